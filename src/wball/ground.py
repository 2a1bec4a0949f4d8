"""Ground costs: what it costs to move one unit of mass from pixel ``i`` to pixel ``j``.

A *stencil* cost depends on the offset ``j - i`` alone and is infinite outside a small window; a *dense* cost is any
``n x n`` matrix. Staying is free in both, so the centre of a ball always lies in it.

Solvers see a cost as :class:`Arcs`: the list of moves ``i -> j`` it allows on a given grid, laid out as one tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


class Arcs(ABC):
    """The moves a cost allows on an ``H x W`` grid.

    An *arc tensor* has shape ``(B, C, K, H, W)``: entry ``[..., k, r, c]`` belongs to the ``k``-th move out of pixel
    ``(r, c)``. ``cost`` broadcasts against it. Moves that would leave the image exist in the layout but carry no mass.
    """

    cost: Tensor  # (K, 1, 1) for stencils, (K, H, W) for matrices
    allowed: Tensor  # (K, H, W), bool: the move ends inside the image and has finite cost

    @abstractmethod
    def gather(self, values: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, C, K, H, W)``: the value at the pixel where each move ends (0 outside the image)."""

    @abstractmethod
    def scatter(self, arcs: Tensor) -> Tensor:
        """``(B, C, K, H, W) -> (B, C, H, W)``: sum of what arrives at each pixel, the adjoint of :meth:`gather`."""

    @abstractmethod
    def scatter_max(self, arcs: Tensor) -> Tensor:
        """``(B, C, K, H, W) -> (B, C, H, W)``: the largest of what arrives at each pixel by allowed moves."""

    @abstractmethod
    def opposite(self, arcs: Tensor) -> Tensor:
        """The arc tensor whose entry at ``i -> j`` is the given entry at ``j -> i`` (0 where no such move exists)."""

    @abstractmethod
    def stay(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that go nowhere."""

    def free(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that cost nothing. Most costs have none but those that stay."""
        return self.allowed & (self.cost == 0)


class StencilArcs(Arcs):
    """The moves of a stencil cost: the same list of offsets at every pixel."""

    def __init__(self, moves: Sequence[tuple[int, int, float]], shape: tuple[int, int], like: Tensor) -> None:
        self.offsets, self.shape = [(r, c) for r, c, _ in moves], shape
        self.radius = (max(abs(r) for r, _ in self.offsets), max(abs(c) for _, c in self.offsets))
        self.cost = torch.tensor([cost for *_, cost in moves], dtype=like.dtype, device=like.device).view(-1, 1, 1)
        ones = torch.ones((1, 1, *shape), dtype=torch.float32, device=like.device)
        self.allowed = self.gather(ones)[0, 0] > 0
        index = {offset: k for k, offset in enumerate(self.offsets)}
        self._reverse = [index.get((-r, -c)) for r, c in self.offsets]

    def _slice(self, padded: Tensor, offset: tuple[int, int]) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        return padded[..., rr + offset[0] : rr + offset[0] + height, rc + offset[1] : rc + offset[1] + width]

    def gather(self, values: Tensor) -> Tensor:
        padded = F.pad(values, (self.radius[1],) * 2 + (self.radius[0],) * 2)
        return torch.stack([self._slice(padded, offset) for offset in self.offsets], dim=2)

    def scatter(self, arcs: Tensor) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        total = arcs.new_zeros((*arcs.shape[:2], height + 2 * rr, width + 2 * rc))
        for k, offset in enumerate(self.offsets):
            self._slice(total, offset).add_(arcs[:, :, k])
        return total[..., rr : rr + height, rc : rc + width]

    def scatter_max(self, arcs: Tensor) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        top = arcs.new_full((*arcs.shape[:2], height + 2 * rr, width + 2 * rc), -math.inf)
        for k, offset in enumerate(self.offsets):
            part = self._slice(top, offset)
            torch.maximum(part, arcs[:, :, k], out=part)
        return top[..., rr : rr + height, rc : rc + width]

    def opposite(self, arcs: Tensor) -> Tensor:
        out = torch.zeros_like(arcs)
        for k, (offset, reverse) in enumerate(zip(self.offsets, self._reverse, strict=True)):
            if reverse is not None:
                padded = F.pad(arcs[:, :, reverse], (self.radius[1],) * 2 + (self.radius[0],) * 2)
                out[:, :, k] = self._slice(padded, offset)
        return out

    def stay(self) -> Tensor:
        centre = torch.zeros_like(self.allowed)
        centre[self.offsets.index((0, 0))] = True
        return centre


class DenseArcs(Arcs):
    """The moves of a matrix cost: from every pixel to every pixel. ``K = H * W`` counts the targets."""

    def __init__(self, matrix: Tensor, shape: tuple[int, int], like: Tensor) -> None:
        self.shape = shape
        matrix = matrix.to(device=like.device)
        finite = torch.isfinite(matrix)
        by_target = torch.where(finite, matrix, torch.zeros_like(matrix)).T.reshape(-1, *shape)
        self.cost = by_target.to(like.dtype)
        self.allowed = finite.T.reshape(-1, *shape)

    def gather(self, values: Tensor) -> Tensor:
        ends = values.flatten(2)[..., None, None].expand(-1, -1, -1, *self.shape)
        return torch.where(self.allowed, ends, torch.zeros_like(ends))

    def scatter(self, arcs: Tensor) -> Tensor:
        kept = torch.where(self.allowed, arcs, torch.zeros_like(arcs))
        return kept.sum((-2, -1)).reshape(*arcs.shape[:2], *self.shape)

    def scatter_max(self, arcs: Tensor) -> Tensor:
        kept = torch.where(self.allowed, arcs, torch.full_like(arcs, -math.inf))
        return kept.amax((-2, -1)).reshape(*arcs.shape[:2], *self.shape)

    def opposite(self, arcs: Tensor) -> Tensor:
        square = arcs.flatten(3)
        return torch.where(self.allowed, square.transpose(2, 3).reshape(arcs.shape), torch.zeros_like(arcs))

    def stay(self) -> Tensor:
        n = self.allowed.shape[0]
        return torch.eye(n, dtype=torch.bool, device=self.allowed.device).reshape(n, *self.shape)


@dataclass(frozen=True)
class StencilCost:
    """A cost that depends on the offset alone, given as an odd x odd table; ``inf`` forbids a move.

    ``table[r][c]`` is the cost of moving by ``(r - rows // 2, c - columns // 2)``. The centre must be 0.

    >>> plus = StencilCost(((math.inf, 1, math.inf), (1, 0, 1), (math.inf, 1, math.inf)))
    >>> len(plus.moves(28, 28))
    5
    """

    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        try:
            rows = tuple(tuple(float(v) for v in row) for row in self.table)
        except TypeError as error:
            raise TypeError(f"table must be a 2-D table of numbers, got {type(self.table).__name__}") from error
        object.__setattr__(self, "table", rows)
        widths = {len(row) for row in rows}
        if len(widths) != 1 or len(rows) % 2 == 0 or widths.pop() % 2 == 0:
            raise ValueError(
                f"table must be rectangular with odd sides, got rows of {[len(r) for r in rows]}; "
                "pad it with inf so that the centre is the move that stays"
            )
        if any(not v >= 0 for row in rows for v in row):
            raise ValueError("table has a negative or NaN cost; costs are >= 0, and inf forbids a move")
        if rows[len(rows) // 2][len(rows[0]) // 2] != 0:
            raise ValueError("the centre of table must be 0: staying is free")

    def moves(self, height: int, width: int) -> list[tuple[int, int, float]]:
        """The moves ``(dr, dc, cost)`` that fit a ``height x width`` image, staying first, then the cheapest first."""
        rr, rc = len(self.table) // 2, len(self.table[0]) // 2
        found = [
            (r - rr, c - rc, value)
            for r, row in enumerate(self.table)
            for c, value in enumerate(row)
            if math.isfinite(value) and abs(r - rr) < height and abs(c - rc) < width
        ]
        return sorted(found, key=lambda move: (move[2], move[:2] != (0, 0), move[:2]))

    def arcs(self, height: int, width: int, like: Tensor) -> StencilArcs:
        """The moves on a grid, in ``like``'s dtype and on its device."""
        return StencilArcs(self.moves(height, width), (height, width), like)

    def full(self, height: int, width: int) -> StencilCost:
        """The cost without its window. A table says nothing about moves outside it, so it is its own full cost."""
        return self


@dataclass(frozen=True)
class GridCost:
    """``(dr^2 + dc^2)^(p/2)`` inside an odd ``window x window`` neighbourhood, infinite outside.

    ``p = 1`` is the Euclidean distance of the paper's experiments. A window that covers the image allows full plans.

    >>> GridCost(window=5).moves(28, 28)[:2]
    [(0, 0, 0.0), (-1, 0, 1.0)]
    """

    window: int = 5
    p: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise TypeError(f"window must be an int, got {self.window!r}")
        if self.window < 1 or self.window % 2 == 0:
            raise ValueError(f"window must be odd and at least 1 so that it has a centre, got {self.window}")
        if not (isinstance(self.p, (int, float)) and 0 < self.p < math.inf):
            raise ValueError(f"p must be a finite number > 0, got {self.p!r}; 1 is the Euclidean distance")

    @property
    def radius(self) -> int:
        return self.window // 2

    def covers(self, height: int, width: int) -> bool:
        """Whether the window reaches from any pixel of such an image to any other: plans are then full."""
        return self.radius >= max(height, width) - 1

    def moves(self, height: int, width: int) -> list[tuple[int, int, float]]:
        """The moves ``(dr, dc, cost)`` that can stay inside a ``height x width`` image, cheapest first."""
        rr, rc = min(self.radius, height - 1), min(self.radius, width - 1)
        found = [(r, c, float(r * r + c * c) ** (self.p / 2)) for r in range(-rr, rr + 1) for c in range(-rc, rc + 1)]
        return sorted(found, key=lambda move: (move[2], move[0], move[1]))

    def arcs(self, height: int, width: int, like: Tensor) -> StencilArcs:
        """The moves on a grid, in ``like``'s dtype and on its device."""
        return StencilArcs(self.moves(height, width), (height, width), like)

    def full(self, height: int, width: int) -> GridCost:
        """The same cost with a window that covers such an image."""
        return GridCost(2 * max(height, width) - 1, self.p)


class DenseCost:
    """An arbitrary ``n x n`` cost: histograms that are no images, or full plans on small images (``n = H * W``).

    ``matrix[i, j]`` is the cost of moving from ``i`` to ``j``; ``inf`` forbids a move, the diagonal is 0.

    >>> line = DenseCost(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> line.size
    2
    """

    def __init__(self, matrix: Tensor) -> None:
        matrix = torch.as_tensor(matrix).detach().to(torch.float64)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix must be square (n x n), got shape {tuple(matrix.shape)}")
        if not bool((matrix >= 0).all()):
            raise ValueError("matrix has a negative or NaN cost; costs are >= 0, and inf forbids a move")
        if bool((matrix.diagonal() != 0).any()):
            raise ValueError("matrix must have a zero diagonal: staying is free")
        self.matrix = matrix

    def __repr__(self) -> str:
        return f"DenseCost({self.size} x {self.size})"

    @cached_property
    def size(self) -> int:
        return int(self.matrix.shape[0])

    def arcs(self, height: int, width: int, like: Tensor) -> DenseArcs:
        """The moves on a grid of ``height * width = n`` pixels, in ``like``'s dtype and on its device."""
        self.check_size(height, width)
        return DenseArcs(self.matrix, (height, width), like)

    def check_size(self, height: int, width: int) -> None:
        """Raise unless the matrix is for images of this size."""
        if height * width != self.size:
            raise ValueError(
                f"the cost matrix is for {self.size} pixels, but the images have {height} x {width} = {height * width}"
            )

    def full(self, height: int, width: int) -> DenseCost:
        """A matrix cost already knows every pair."""
        return self


GroundCost = GridCost | StencilCost | DenseCost
