"""Ground costs, and the moves between pixels that they allow.

A *ground cost* says what it costs to move one unit of mass from pixel ``i`` to pixel ``j``. A
*stencil* cost depends only on the offset ``j - i`` and is infinite outside a small window. A
*dense* cost is any ``n x n`` matrix. In both, staying costs nothing, so the centre of a ball is in
the ball.

Solvers and kernels use a cost as :class:`Moves`: the list of moves ``i -> j`` that it allows on a
given grid, with offsets, costs, rings of equal cost and reverses, and operations that gather and
scatter values along them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wball import inputs
from wball.provenance import fingerprint

Move = tuple[int, int, int, float]
"""``(dr, dc, ds, cost)``: a step by rows, columns and channels, and its cost per unit of mass."""

AWAY, ALL, PAID, MOMENTS = slice(1), slice(1, 2), slice(2, 3), slice(1, 4)
"""The weights of the moves away from a pixel, of all moves, of what they cost, and what the
distribution of a row's cost takes."""


class Moves(ABC):
    """The moves that a cost allows on a grid.

    An *arc tensor* has shape ``(B, C, K, H, W)``: entry ``[..., k, r, c]`` belongs to the ``k``-th
    move out of pixel ``(r, c)``. ``cost`` broadcasts against it. Moves that would leave the image
    have entries, but carry no mass.

    Passes that cannot hold an arc tensor visit the moves one at a time (:meth:`ends`).
    """

    shape: tuple[int, int, int]  # (C, H, W); C = 1 if no move changes the channel
    cost: Tensor  # (K, 1, 1) for stencils, (K, H, W) for matrices
    # Whether the move ends inside the image and has finite cost, bool: (K, H, W), or (C, K, H, W)
    # if moves change the channel.
    allowed: Tensor

    factors: Tensor  # (4, 1, ...): of the weights

    # One move at a time:
    rings: Sequence[Sequence[int]]  # the moves of each distinct cost, the cheapest first
    ring_cost: Tensor  # (D, 1, 1, 1, 1) or (D, 1, 1, H, W): the cost of each ring

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def together(self) -> tuple[int, ...]:
        """The dimensions of images that moves connect."""
        return (2, 3) if self.shape[0] == 1 else (1, 2, 3)

    @property
    def dearest(self) -> float:
        """The largest cost of a move."""
        return float(self.cost.max())

    @property
    def cheapest(self) -> float:
        """The smallest cost above 0; any number (1) if there is none."""
        paid = self.cost[self.cost > 0]
        return float(paid.min()) if paid.numel() else 1.0

    @abstractmethod
    def like(self, values: Tensor) -> Moves:
        """The same moves in the dtype and on the device of ``values``."""

    @abstractmethod
    def gather(self, values: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, C, K, H, W)``: the value where each move ends (0 outside)."""

    @abstractmethod
    def scatter(self, arcs: Tensor) -> Tensor:
        """``(B, C, K, H, W) -> (B, C, H, W)``: the sum that arrives at each pixel.

        The adjoint of :meth:`gather`.
        """

    @abstractmethod
    def opposite(self, arcs: Tensor) -> Tensor:
        """The arc tensor with the entry of ``j -> i`` at ``i -> j`` (0 if there is no such
        move)."""

    @abstractmethod
    def stay(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that stay at their pixel."""

    @abstractmethod
    def ends(self, values: Tensor, outside: float) -> Callable[[int], Tensor]:
        """A function from the number of a move to the values where it ends."""

    def weights(self, price: Tensor) -> Tensor:
        """``exp(-price C)`` of the moves except staying, that of all moves, that times ``C``, and
        that times ``C^2``, for a price per image ``(B, 1, 1, 1)``.

        :data:`AWAY`, :data:`ALL`, :data:`PAID` and :data:`MOMENTS` are parts of it.
        """
        return torch.exp(-price * self.factors[2]) * self.factors

    @abstractmethod
    def sums(self, values: Tensor, weights: Tensor, back: bool = False) -> Tensor:
        """Weighted sums over the moves of each pixel of the values where they end, or with ``back``
        where the moves that end here start: ``(B, C, M, H, W)`` for ``M`` of the
        :meth:`weights`."""

    def net_cost(self, row: Tensor, column: Tensor, price: Tensor) -> Tensor:
        """Cost of the plan ``row_i exp(-price C_ij) column_j`` per image, after opposite flows
        cancel."""
        flow = row[:, :, None] * torch.exp(-price[..., None] * self.cost) * self.gather(column)
        net = (flow - self.opposite(flow)).clamp(min=0.0)
        return inputs.dot(net, self.cost)

    @property
    def has_free(self) -> bool:
        """Whether some moves other than staying cost nothing."""
        return bool((self.free() & ~self.stay()).any())

    def free(self) -> Tensor:
        """Like ``allowed``: the moves that cost nothing."""
        return self.allowed & (self.cost == 0)


class StencilMoves(Moves):
    """The moves of a stencil cost: the same offsets at every pixel.

    Iterates over ``(dr, dc, ds, cost)``.

    Tensors are created on first use: compiled kernels do not need them.
    """

    costs: Sequence[float]

    def __init__(self, moves: Iterable[Move], shape: tuple[int, int, int], like: Tensor) -> None:
        self._moves, self.shape, self._like = tuple(moves), shape, like.new_empty(0)
        self.offsets = [(r, c, s) for r, c, s, _ in self]
        self.costs = [cost for *_, cost in self]
        rows, columns, channels = (
            max(map(abs, steps)) for steps in zip(*self.offsets, strict=True)
        )
        self.radius = rows, columns, channels
        if self._moves[:1] != ((0, 0, 0, 0.0),) or self.costs != sorted(self.costs):
            raise ValueError(
                f"moves must begin with (0, 0, 0, 0.0), the move that stays, and be sorted by cost, got {moves}"
            )
        if channels and self.shape[0] == 1:
            raise ValueError("moves that change the channel need images of several channels")
        index = {offset: k for k, offset in enumerate(self.offsets)}
        self.reverse = [index.get((-r, -c, -s)) for r, c, s in self.offsets]
        self.distinct = sorted(set(self.costs))
        self.rings = [[k for k, cost in enumerate(self.costs) if cost == d] for d in self.distinct]

    @property
    def rings_apart(self) -> list[list[int]]:
        """The rings, with staying in a ring of its own even if other moves are free as well."""
        moving = ([k for k in ring if k > 0] for ring in self.rings)
        return [[0], *(ring for ring in moving if ring)]

    def __len__(self) -> int:
        return len(self._moves)

    def __hash__(self) -> int:
        return hash((self._moves, self.shape))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StencilMoves) and (self._moves, self.shape) == (
            other._moves,
            other.shape,
        )

    def __iter__(self) -> Iterator[Move]:
        return iter(self._moves)

    def __getitem__(self, k: int) -> Move:
        return self._moves[k]

    @property
    def has_free(self) -> bool:
        return self.costs[1:2] == [0.0]

    @property
    def dearest(self) -> float:
        return self.distinct[-1]

    @property
    def cheapest(self) -> float:
        return next((cost for cost in self.distinct if cost > 0), 1.0)

    @cached_property
    def cost(self) -> Tensor:  # type: ignore[override]
        return self._table(self.costs).view(-1, 1, 1)

    @cached_property
    def ring_cost(self) -> Tensor:  # type: ignore[override]
        return self._table(self.distinct).view(-1, 1, 1, 1, 1)

    @cached_property
    def allowed(self) -> Tensor:  # type: ignore[override]
        with torch.inference_mode(False):
            inside = self.gather(torch.ones((1, *self.shape), device=self._like.device))[0] > 0
        return inside if self.shape[0] > 1 else inside[0]

    def like(self, values: Tensor) -> StencilMoves:
        return _alike(self, values.dtype, values.device)

    def _table(self, values: Sequence[float]) -> Tensor:
        with torch.inference_mode(False):  # kept for later calls, which may want gradients
            return torch.tensor(values, dtype=self._like.dtype).to(self._like.device)

    def _slice(self, padded: Tensor, k: int) -> Tensor:
        (rr, rc, rs), (_, height, width), (dr, dc, ds) = self.radius, self.shape, self.offsets[k]
        there = padded[..., rr + dr : rr + dr + height, rc + dc : rc + dc + width]
        return there[:, rs + ds : rs + ds + self.shape[0]] if rs else there

    def _padded(self, values: Tensor, outside: float = 0.0) -> Tensor:
        rows, columns, channels = (2 * (side,) for side in self.radius)
        return F.pad(values, columns + rows + channels, value=outside)

    def gather(self, values: Tensor) -> Tensor:
        ends = self.ends(values, 0.0)
        return torch.stack([ends(k) for k in range(len(self))], dim=2)

    def scatter(self, arcs: Tensor) -> Tensor:
        total = self._padded(torch.zeros_like(arcs[:, :, 0]))
        for k, mass in enumerate(arcs.unbind(2)):
            self._slice(total, k).add_(mass)
        return self._slice(total, 0)

    def opposite(self, arcs: Tensor) -> Tensor:
        out = torch.zeros_like(arcs)
        for k, reverse in enumerate(self.reverse):
            if reverse is not None:
                out[:, :, k] = self._slice(self._padded(arcs[:, :, reverse]), k)
        return out

    def stay(self) -> Tensor:
        return self._stay

    @cached_property
    def _stay(self) -> Tensor:
        with torch.inference_mode(False):
            every = torch.arange(len(self), device=self._like.device)
            return (every == 0)[:, None, None].expand(-1, *self.shape[1:])

    def ends(self, values: Tensor, outside: float) -> Callable[[int], Tensor]:
        padded = self._padded(values, outside)
        return lambda k: self._slice(padded, k)

    def sums(self, values: Tensor, weights: Tensor, back: bool = False) -> Tensor:
        # A convolution of each plane, or of each image: one pass instead of one a move.
        shape, weights = values.shape, weights.flip(2, 3, 4) if back else weights
        if not values.numel():
            return values.new_empty((*shape[:2], len(weights), *shape[2:]))
        rows, columns, channels = self.radius
        if channels:
            window = weights.movedim(0, 1).flatten(0, 1)[:, None]
            found = F.conv3d(
                values[None], window, padding=(channels, rows, columns), groups=len(values)
            )
            return found.view(shape[0], -1, *shape[1:]).transpose(1, 2)
        planes = values.flatten(0, 1)[None]
        window = weights.expand(-1, -1, shape[1], -1, -1).movedim(0, 2).flatten(0, 2)[:, None]
        found = F.conv2d(planes, window, padding=(rows, columns), groups=planes.shape[1])
        return found.view(*shape[:2], -1, *shape[2:])

    @cached_property
    def factors(self) -> Tensor:  # type: ignore[override]
        rows, columns, channels = self.radius
        with torch.inference_mode(False):
            window = (2 * side + 1 for side in (channels, rows, columns))
            table = torch.zeros(4, 1, *window, dtype=self._like.dtype)
            for k, (r, c, s, d) in enumerate(self):
                here = (slice(None), 0, channels + s, rows + r, columns + c)
                table[here] = table.new_tensor((k > 0, 1, d, d * d))
            return table.to(self._like.device)

    def net_cost(self, row: Tensor, column: Tensor, price: Tensor) -> Tensor:
        to, back, total = self.ends(column, 0.0), self.ends(row, 0.0), row.new_zeros(len(row))
        weights = torch.exp(-price.flatten(1) * self.cost.flatten())
        for k, reverse in enumerate(self.reverse):
            if reverse is None or reverse > k:  # each pair once, from its cheaper move
                net, cost = row * to(k), self.costs[k]
                if reverse is not None:
                    more = self.costs[reverse] - cost
                    returning = column * torch.exp(-more * price) if more else column
                    net.addcmul_(returning, back(k), value=-1)
                    if more:
                        total.addcmul_(
                            weights[:, k], net.clamp(max=0.0).sum((1, 2, 3)), value=-more
                        )
                moved = torch.linalg.vector_norm(net, 1, (1, 2, 3))
                total.addcmul_(weights[:, k], moved, value=cost)
        return total


@lru_cache(maxsize=64)
def _alike(moves: StencilMoves, dtype: torch.dtype, device: torch.device) -> StencilMoves:
    return StencilMoves(moves, moves.shape, torch.empty(0, dtype=dtype, device=device))


class DenseMoves(Moves):
    """The moves of a matrix cost: from every pixel to every pixel.

    The ``k``-th move ends at pixel ``k``, and is its own ring.
    """

    def __init__(self, matrix: Tensor, shape: tuple[int, int, int], like: Tensor) -> None:
        self.shape = shape
        self._matrix = matrix.to(device=like.device)
        finite = torch.isfinite(self._matrix)
        by_target = self._matrix.nan_to_num(posinf=0.0).T.reshape(-1, *shape[1:])
        self.cost = by_target.to(like.dtype)
        self.allowed = finite.T.reshape(-1, *shape[1:])
        self.ring_cost = self.cost[:, None, None]
        every = self.allowed.to(self.cost)
        table = torch.stack((every * ~self.stay(), every, self.cost, self.cost.square()))
        self.factors = table.flatten(2)[:, None, None]
        self.rings = [[k] for k in range(len(self))]

    def __len__(self) -> int:
        return len(self._matrix)

    def like(self, values: Tensor) -> DenseMoves:
        if values.dtype == self.cost.dtype and values.device == self.cost.device:
            return self
        return DenseMoves(self._matrix, self.shape, values)

    def gather(self, values: Tensor) -> Tensor:
        ends = values.flatten(2)[..., None, None].expand(-1, -1, -1, *self.shape[1:])
        return torch.where(self.allowed, ends, 0.0)

    def scatter(self, arcs: Tensor) -> Tensor:
        kept = torch.where(self.allowed, arcs, 0.0)
        return kept.sum((-2, -1)).reshape(*arcs.shape[:2], *self.shape[1:])

    def opposite(self, arcs: Tensor) -> Tensor:
        square = arcs.flatten(3)
        return torch.where(self.allowed, square.mT.reshape(arcs.shape), 0.0)

    def stay(self) -> Tensor:
        n = len(self)
        every = torch.eye(n, dtype=torch.bool, device=self.allowed.device)
        return every.reshape(n, *self.shape[1:])

    def ends(self, values: Tensor, outside: float) -> Callable[[int], Tensor]:
        at = values.flatten(2)[..., None, None]
        return lambda k: torch.where(self.allowed[k], at[:, :, k], outside)

    def sums(self, values: Tensor, weights: Tensor, back: bool = False) -> Tensor:
        plan, rows = weights.mT if back else weights, values.flatten(2)[:, :, None]
        return (rows @ plan).movedim(0, 2).flatten(3).unflatten(3, self.shape[1:])


class _ByOffset(ABC):
    """A cost that depends only on the offset.

    Attributes:
        channel_cost: the price of changing the channel; ``None`` forbids it.
    """

    channel_cost: float | None = None

    @abstractmethod
    def moves(self, height: int, width: int, channels: int = 1) -> list[Move]:
        """The moves ``(dr, dc, ds, cost)`` that fit such an image, staying first, then by cost."""

    def arcs(self, like: Tensor) -> StencilMoves:
        """The moves on images ``(B, C, H, W)``, in their dtype and on their device."""
        channels, height, width = (int(side) for side in like.shape[-3:])
        if self.channel_cost is None:
            channels = 1
        return _stencil_moves(self, (channels, height, width), like.dtype, like.device)


def moving(moves: Iterable[Move]) -> list[Move]:
    """The moves except the one that stays."""
    return [move for move in moves if move[:3] != (0, 0, 0)]


def rings_of(costs: Sequence[float]) -> dict[float, slice]:
    """Where the moves of each cost are in a list that is sorted by cost."""
    first = {cost: costs.index(cost) for cost in costs}
    return {cost: slice(start, start + costs.count(cost)) for cost, start in first.items()}


def _cheapest_first(moves: Iterable[Move]) -> list[Move]:
    return sorted(moves, key=lambda move: (move[3], move[:3] != (0, 0, 0), move[:3]))


@dataclass(frozen=True)
class StencilCost(_ByOffset):
    """A cost that depends only on the offset, as a table with odd sides. ``inf`` forbids a move.

    ``table[r][c]`` is the cost of moving by ``(r - rows // 2, c - columns // 2)``. The centre must
    be 0.

    >>> plus = StencilCost(((math.inf, 1, math.inf), (1, 0, 1), (math.inf, 1, math.inf)))
    >>> len(plus.moves(28, 28))
    5
    """

    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        try:
            rows = tuple(tuple(float(v) for v in row) for row in self.table)
        except TypeError as error:
            raise TypeError(
                f"table must be a 2-D table of numbers, got {type(self.table).__name__}"
            ) from error
        object.__setattr__(self, "table", rows)
        widths = {len(row) for row in rows}
        if len(widths) != 1 or len(rows) % 2 == 0 or widths.pop() % 2 == 0:
            raise ValueError(
                f"table must be rectangular with odd sides, got rows of {[len(r) for r in rows]}; "
                "pad it with inf so that the centre is the move that stays"
            )
        if any(not v >= 0 for row in rows for v in row):
            raise ValueError(
                "table has a negative or NaN cost; costs are >= 0, and inf forbids a move"
            )
        if rows[len(rows) // 2][len(rows[0]) // 2] != 0:
            raise ValueError("the centre of table must be 0: staying is free")

    def moves(self, height: int, width: int, channels: int = 1) -> list[Move]:
        rr, rc = len(self.table) // 2, len(self.table[0]) // 2
        return _cheapest_first(
            (r - rr, c - rc, 0, value)
            for r, row in enumerate(self.table)
            for c, value in enumerate(row)
            if math.isfinite(value) and abs(r - rr) < height and abs(c - rc) < width
        )

    def full(self, height: int, width: int) -> StencilCost:
        """The cost for full plans: the same, because the table has no costs of longer moves."""
        return self

    def describe(self) -> dict[str, Any]:
        """The cost as plain data; :func:`read_cost` reads it."""
        table = [[None if v == math.inf else v for v in row] for row in self.table]
        return {"cost": "table", "table": table}


@dataclass(frozen=True)
class GridCost(_ByOffset):
    """``(dr^2 + dc^2)^(p/2)`` inside an odd ``window x window`` neighbourhood, infinite outside.

    ``p = 1`` is the Euclidean distance, as in the paper. A window that covers the image allows
    every transport plan.

    With a ``channel_cost``, mass may also change its channel, into any other, on the way: it is as
    far away as the distance in the plane plus ``channel_cost``, and the move costs the ``p``-th
    power of that. Without one (the default) mass stays in its channel.

    >>> GridCost(window=5).moves(28, 28)[:2]
    [(0, 0, 0, 0.0), (-1, 0, 0, 1.0)]
    >>> GridCost(window=1, channel_cost=2.0).moves(32, 32, channels=3)[:3]
    [(0, 0, 0, 0.0), (0, 0, -2, 2.0), (0, 0, -1, 2.0)]
    """

    window: int = 5
    p: float = 1.0
    channel_cost: float | None = None

    def __post_init__(self) -> None:
        if inputs.check_count("window", self.window) % 2 == 0:
            raise ValueError(f"window must be odd so that it has a centre, got {self.window}")
        if not (isinstance(self.p, (int, float)) and 0 < self.p < math.inf):
            raise ValueError(
                f"p must be a finite number > 0, got {self.p!r}; 1 is the Euclidean distance"
            )
        if self.channel_cost is not None:
            price = inputs.check_positive("channel_cost", self.channel_cost)
            object.__setattr__(self, "channel_cost", price)

    @property
    def radius(self) -> int:
        return self.window // 2

    def covers(self, height: int, width: int) -> bool:
        """Whether the window reaches from any pixel of such an image to any other."""
        return self.radius >= max(height, width) - 1

    def price(self, squared: float, changes: bool = False) -> float:
        """The cost of a move from the square of its length, and whether it changes the channel."""
        if not changes:
            return float(squared) ** (self.p / 2)
        assert self.channel_cost is not None
        return (math.sqrt(squared) + self.channel_cost) ** self.p

    def moves(self, height: int, width: int, channels: int = 1) -> list[Move]:
        rr, rc = min(self.radius, height - 1), min(self.radius, width - 1)
        rs = 0 if self.channel_cost is None else channels - 1
        return _cheapest_first(
            (r, c, s, self.price(r * r + c * c, s != 0))
            for r in range(-rr, rr + 1)
            for c in range(-rc, rc + 1)
            for s in range(-rs, rs + 1)
        )

    def full(self, height: int, width: int) -> GridCost:
        """The same cost with a window that covers such an image."""
        return GridCost(2 * max(height, width) - 1, self.p, self.channel_cost)

    def describe(self) -> dict[str, Any]:
        """The cost as plain data; :func:`read_cost` reads it."""
        about = {"cost": "grid", "window": self.window, "p": float(self.p)}
        return about if self.channel_cost is None else {**about, "channel_cost": self.channel_cost}


@lru_cache(maxsize=64)
def _stencil_moves(
    cost: _ByOffset, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> StencilMoves:
    """The moves of a stencil cost. Cached per grid, dtype and device, because an attack asks at
    every step."""
    channels, height, width = shape
    like = torch.empty(0, dtype=dtype, device=device)
    return StencilMoves(cost.moves(height, width, channels), shape, like)


class DenseCost:
    """An arbitrary ``n x n`` cost, for histograms that are not images or for small images.

    ``matrix[i, j]`` is the cost of moving from ``i`` to ``j``; ``inf`` forbids a move, the diagonal
    is 0.

    >>> line = DenseCost(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> line.size
    2
    """

    def __init__(self, matrix: Tensor) -> None:
        matrix = torch.as_tensor(matrix).detach().double()
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix must be square (n x n), got shape {tuple(matrix.shape)}")
        if not bool((matrix >= 0).all()):
            raise ValueError(
                "matrix has a negative or NaN cost; costs are >= 0, and inf forbids a move"
            )
        if bool((matrix.diagonal() != 0).any()):
            raise ValueError("matrix must have a zero diagonal: staying is free")
        self.matrix, self.size = matrix, matrix.shape[0]

    def __repr__(self) -> str:
        return f"DenseCost({self.size} x {self.size})"

    channel_cost: float | None = None

    def arcs(self, like: Tensor) -> DenseMoves:
        """The moves on images ``(B, C, H, W)`` of ``H * W = n`` pixels, in their dtype and on their
        device."""
        height, width = (int(side) for side in like.shape[-2:])
        self.check_size(height, width)
        return DenseMoves(self.matrix, (1, height, width), like)

    def check_size(self, height: int, width: int) -> None:
        """Raise an error unless the matrix is for images of this size."""
        if height * width != self.size:
            raise ValueError(
                f"the cost matrix is for {self.size} pixels, but the images have "
                f"{height} x {width} = {height * width}"
            )

    def full(self, height: int, width: int) -> DenseCost:
        """The cost for full plans: the same, because a matrix has the cost of every pair."""
        return self

    def describe(self) -> dict[str, Any]:
        """Size and checksum of the matrix, which is too large for plain data."""
        return {"cost": "matrix", "size": self.size, "sha256": fingerprint(self.matrix)}


GroundCost = GridCost | StencilCost | DenseCost


def read_cost(description: Mapping[str, Any]) -> GridCost | StencilCost | None:
    """The cost described by ``describe``; ``None`` for a matrix, and for balls without a cost."""
    if description.get("cost") == "grid":
        return GridCost(description["window"], description["p"], description.get("channel_cost"))
    if description.get("cost") == "table":
        rows = description["table"]
        return StencilCost(tuple(tuple(math.inf if v is None else v for v in row) for row in rows))
    return None
