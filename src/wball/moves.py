"""Moves: the pairs of pixels between which mass may move on a grid, and their costs.

Solvers and kernels use a ground cost (:mod:`wball.cost`) as :class:`Moves`: the list of moves
``i -> j`` that it allows on a given grid, with offsets, costs, rings of equal cost and reverses, and
operations that gather and scatter values along them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

Move = tuple[int, int, float]
"""``(dr, dc, cost)``: a step by rows and columns, and its cost per unit of mass."""


class Moves(ABC):
    """The moves that a cost allows on an ``H x W`` grid.

    An *arc tensor* has shape ``(B, C, K, H, W)``: entry ``[..., k, r, c]`` belongs to the ``k``-th
    move out of pixel ``(r, c)``. ``cost`` broadcasts against it. Moves that would leave the image
    have entries, but carry no mass.

    Passes that cannot hold an arc tensor visit the moves one at a time (:meth:`ends`,
    :meth:`arrivals`). There, move 0 stays, and moves of the same number end in different pixels.
    """

    shape: tuple[int, int]
    cost: Tensor  # (K, 1, 1) for stencils, (K, H, W) for matrices
    allowed: Tensor  # (K, H, W), bool: the move ends inside the image and has finite cost

    # One move at a time:
    costs: Sequence[float | Tensor]  # the cost of the k-th move, for all pixels or per pixel
    reverse: Sequence[int | None]  # the reverse of the k-th move, if there is one
    rings: Sequence[Sequence[int]]  # the moves of each distinct cost, the cheapest first
    ring_cost: Tensor  # (D, 1, 1, 1, 1) or (D, 1, 1, H, W): the cost of each ring

    def __len__(self) -> int:
        return int(self.allowed.shape[0])

    @property
    def dearest(self) -> float:
        """The largest cost of a move."""
        return float(self.cost.max())

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
        """The arc tensor with the entry of ``j -> i`` at ``i -> j`` (0 if there is no such move)."""

    @abstractmethod
    def stay(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that stay at their pixel."""

    @abstractmethod
    def ends(self, values: Tensor, outside: float) -> Callable[[int], Tensor]:
        """A function from the number of a move to the values where it ends."""

    @abstractmethod
    def arrivals(self, like: Tensor) -> Arrivals:
        """An empty sum of the mass that arrives at each pixel."""

    def sums(self, weights: Tensor, back: bool = False) -> Callable[[Tensor], Tensor]:
        """A function from values to weighted sums over the moves of each pixel, except staying.

        Values are read where a move ends, or with ``back`` where the moves that end here start. Each
        is multiplied by the ``weights`` of its ring, ``(D, B, 1, 1, 1)`` or per pixel of the start.
        """

        def arriving(values: Tensor) -> Tensor:
            arrivals = self.arrivals(values)
            for ring, weight in zip(self.rings, weights, strict=True):
                part = values * weight
                for k in ring:
                    if k > 0:
                        arrivals.add(k, part)
            return arrivals.total()

        def leaving(values: Tensor) -> Tensor:
            ends, total = self.ends(values, 0.0), torch.zeros_like(values)
            for ring, weight in zip(self.rings, weights, strict=True):
                for k in ring:
                    if k > 0:
                        total.addcmul_(ends(k), weight)
            return total

        return arriving if back else leaving

    @property
    def has_free(self) -> bool:
        """Whether some moves other than staying cost nothing."""
        return bool((self.free() & ~self.stay()).any())

    def free(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that cost nothing."""
        return self.allowed & (self.cost == 0)


class Arrivals(ABC):
    """The mass that arrives at each pixel, summed one move at a time."""

    @abstractmethod
    def add(self, move: int, amount: Tensor) -> None:
        """Add ``amount``, given at the pixel where the move starts, to the pixel where it ends."""

    @abstractmethod
    def total(self) -> Tensor:
        """The sum so far, ``(B, C, H, W)``."""


class StencilMoves(Moves):
    """The moves of a stencil cost: the same offsets at every pixel. Iterates over ``(dr, dc, cost)``.

    Tensors are created on first use: compiled kernels do not need them.
    """

    costs: Sequence[float]

    def __init__(self, moves: Sequence[Move], shape: tuple[int, int], like: Tensor) -> None:
        self._moves, self.shape, self._like = tuple(moves), shape, like.new_empty(0)
        self.offsets = [(r, c) for r, c, _ in moves]
        self.costs = [cost for *_, cost in moves]
        self.radius = (max(abs(r) for r, _ in self.offsets), max(abs(c) for _, c in self.offsets))
        if self._moves[:1] != ((0, 0, 0.0),) or self.costs != sorted(self.costs):
            raise ValueError(
                f"moves must begin with (0, 0, 0.0), the move that stays, and go on by cost, got {moves}"
            )
        index = {offset: k for k, offset in enumerate(self.offsets)}
        self.reverse = [index.get((-r, -c)) for r, c in self.offsets]
        self.distinct = sorted(set(self.costs))
        self.rings = [[k for k, cost in enumerate(self.costs) if cost == d] for d in self.distinct]

    @property
    def rings_apart(self) -> list[list[int]]:
        """The rings with the move that stays in one of its own, even if others are free as well."""
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
        return any(cost == 0 for cost in self.costs[1:])

    @property
    def dearest(self) -> float:
        return self.distinct[-1]

    @cached_property
    def cost(self) -> Tensor:  # type: ignore[override]
        return self._table(self.costs).view(-1, 1, 1)

    @cached_property
    def ring_cost(self) -> Tensor:  # type: ignore[override]
        return self._table(self.distinct).view(-1, 1, 1, 1, 1)

    @cached_property
    def allowed(self) -> Tensor:  # type: ignore[override]
        with torch.inference_mode(False):
            return self.gather(torch.ones((1, 1, *self.shape), device=self._like.device))[0, 0] > 0

    def like(self, values: Tensor) -> StencilMoves:
        if values.dtype == self._like.dtype and values.device == self._like.device:
            return self
        return StencilMoves(self._moves, self.shape, values)

    def _table(self, values: Sequence[float]) -> Tensor:
        with torch.inference_mode(False):  # kept for later calls, which may want gradients
            return torch.tensor(values, dtype=self._like.dtype).to(self._like.device)

    def _slice(self, padded: Tensor, k: int) -> Tensor:
        (rr, rc), (height, width), (dr, dc) = self.radius, self.shape, self.offsets[k]
        return padded[..., rr + dr : rr + dr + height, rc + dc : rc + dc + width]

    def _padded(self, values: Tensor, outside: float = 0.0) -> Tensor:
        return F.pad(values, (self.radius[1],) * 2 + (self.radius[0],) * 2, value=outside)

    def gather(self, values: Tensor) -> Tensor:
        ends = self.ends(values, 0.0)
        return torch.stack([ends(k) for k in range(len(self))], dim=2)

    def scatter(self, arcs: Tensor) -> Tensor:
        arrivals = self.arrivals(arcs[:, :, 0])
        for k in range(len(self)):
            arrivals.add(k, arcs[:, :, k])
        return arrivals.total()

    def opposite(self, arcs: Tensor) -> Tensor:
        out = torch.zeros_like(arcs)
        for k, reverse in enumerate(self.reverse):
            if reverse is not None:
                (row, up), (column, left) = map(_overlap, self.shape, self.offsets[k])
                out[:, :, k, row, column] = arcs[:, :, reverse, up, left]
        return out

    def stay(self) -> Tensor:
        return self._stay

    @cached_property
    def _stay(self) -> Tensor:
        with torch.inference_mode(False):
            centre = torch.zeros_like(self.allowed)
            centre[0] = True
        return centre

    def ends(self, values: Tensor, outside: float) -> Callable[[int], Tensor]:
        padded = self._padded(values, outside)
        return lambda k: self._slice(padded, k)

    def arrivals(self, like: Tensor) -> Arrivals:
        return _StencilArrivals(self, like)


def _overlap(size: int, step: int) -> tuple[slice, slice]:
    """The start positions of a step that stays inside a row of this size, and its end positions."""
    return slice(max(0, -step), max(0, size - max(0, step))), slice(
        max(0, step), max(0, size + min(0, step))
    )


class _StencilArrivals(Arrivals):
    def __init__(self, moves: StencilMoves, like: Tensor) -> None:
        self._moves, self._sum = moves, moves._padded(torch.zeros_like(like))

    def add(self, move: int, amount: Tensor) -> None:
        self._moves._slice(self._sum, move).add_(amount)

    def total(self) -> Tensor:
        return self._moves._slice(self._sum, 0)


class DenseMoves(Moves):
    """The moves of a matrix cost: from every pixel to every pixel.

    Arc tensors list them by target: ``K = H * W``. One at a time, the ``k``-th goes from ``i`` to
    ``i + k`` modulo ``n``, so that each is its own ring.
    """

    def __init__(self, matrix: Tensor, shape: tuple[int, int], like: Tensor) -> None:
        self.shape = shape
        self._matrix = matrix.to(device=like.device)
        finite = torch.isfinite(self._matrix)
        by_target = torch.where(finite, self._matrix, torch.zeros_like(self._matrix)).T.reshape(
            -1, *shape
        )
        self.cost = by_target.to(like.dtype)
        self.allowed = finite.T.reshape(-1, *shape)

    @cached_property
    def _by_shift(self) -> tuple[Tensor, Tensor]:
        """Cost and permission of the moves one at a time, ``(n, H, W)``."""
        n = len(self)
        start = torch.arange(n, device=self._matrix.device)
        cost = self._matrix[start, (start + start[:, None]) % n].view(n, *self.shape)
        return cost.nan_to_num(posinf=0.0).to(self.cost.dtype), torch.isfinite(cost)

    @property
    def costs(self) -> Sequence[float | Tensor]:  # type: ignore[override]
        return self._by_shift[0].unbind()

    @property
    def reverse(self) -> Sequence[int | None]:  # type: ignore[override]
        return [-k % len(self) for k in range(len(self))]

    @property
    def rings(self) -> Sequence[Sequence[int]]:  # type: ignore[override]
        return [[k] for k in range(len(self))]

    @property
    def ring_cost(self) -> Tensor:  # type: ignore[override]
        return self._by_shift[0].view(-1, 1, 1, *self.shape)

    def like(self, values: Tensor) -> DenseMoves:
        if values.dtype == self.cost.dtype and values.device == self.cost.device:
            return self
        return DenseMoves(self._matrix, self.shape, values)

    def gather(self, values: Tensor) -> Tensor:
        ends = values.flatten(2)[..., None, None].expand(-1, -1, -1, *self.shape)
        return torch.where(self.allowed, ends, torch.zeros_like(ends))

    def scatter(self, arcs: Tensor) -> Tensor:
        kept = torch.where(self.allowed, arcs, torch.zeros_like(arcs))
        return kept.sum((-2, -1)).reshape(*arcs.shape[:2], *self.shape)

    def opposite(self, arcs: Tensor) -> Tensor:
        square = arcs.flatten(3)
        return torch.where(
            self.allowed, square.transpose(2, 3).reshape(arcs.shape), torch.zeros_like(arcs)
        )

    def stay(self) -> Tensor:
        n = len(self)
        return torch.eye(n, dtype=torch.bool, device=self.allowed.device).reshape(n, *self.shape)

    def ends(self, values: Tensor, outside: float) -> Callable[[int], Tensor]:
        allowed, nothing = self._by_shift[1], torch.full_like(values, outside)
        return lambda k: torch.where(
            allowed[k], values.flatten(-2).roll(-k, -1).view(values.shape), nothing
        )

    def arrivals(self, like: Tensor) -> Arrivals:
        return _DenseArrivals(self._by_shift[1], like)


class _DenseArrivals(Arrivals):
    def __init__(self, allowed: Tensor, like: Tensor) -> None:
        self._allowed, self._sum = allowed, torch.zeros_like(like)

    def add(self, move: int, amount: Tensor) -> None:
        kept = torch.where(self._allowed[move], amount, 0)
        self._sum.add_(kept.flatten(-2).roll(move, -1).view(kept.shape))

    def total(self) -> Tensor:
        return self._sum
