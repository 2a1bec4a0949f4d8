"""Ground costs: what it costs to move one unit of mass from pixel ``i`` to pixel ``j``.

A *stencil* cost depends on the offset ``j - i`` alone and is infinite outside a small window; a *dense* cost is any
``n x n`` matrix. Staying is free in both, so the centre of a ball always lies in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from wball.moves import DenseMoves, StencilMoves


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

    def arcs(self, height: int, width: int, like: Tensor) -> StencilMoves:
        """The moves on a grid, in ``like``'s dtype and on its device."""
        return _stencil_moves(self, height, width, like.dtype, like.device)

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
            raise ValueError(
                f"window must be odd and at least 1 so that it has a centre, got {self.window}"
            )
        if not (isinstance(self.p, (int, float)) and 0 < self.p < math.inf):
            raise ValueError(
                f"p must be a finite number > 0, got {self.p!r}; 1 is the Euclidean distance"
            )

    @property
    def radius(self) -> int:
        return self.window // 2

    def covers(self, height: int, width: int) -> bool:
        """Whether the window reaches from any pixel of such an image to any other: plans are then full."""
        return self.radius >= max(height, width) - 1

    def moves(self, height: int, width: int) -> list[tuple[int, int, float]]:
        """The moves ``(dr, dc, cost)`` that can stay inside a ``height x width`` image, cheapest first."""
        rr, rc = min(self.radius, height - 1), min(self.radius, width - 1)
        found = [
            (r, c, float(r * r + c * c) ** (self.p / 2))
            for r in range(-rr, rr + 1)
            for c in range(-rc, rc + 1)
        ]
        return sorted(found, key=lambda move: (move[2], move[0], move[1]))

    def arcs(self, height: int, width: int, like: Tensor) -> StencilMoves:
        """The moves on a grid, in ``like``'s dtype and on its device."""
        return _stencil_moves(self, height, width, like.dtype, like.device)

    def full(self, height: int, width: int) -> GridCost:
        """The same cost with a window that covers such an image."""
        return GridCost(2 * max(height, width) - 1, self.p)


@lru_cache(maxsize=64)
def _stencil_moves(
    cost: GridCost | StencilCost, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> StencilMoves:
    """Listed once per grid, dtype and device: an attack asks at every step."""
    like = torch.empty(0, dtype=dtype, device=device)
    return StencilMoves(cost.moves(height, width), (height, width), like)


class DenseCost:
    """An arbitrary ``n x n`` cost: histograms that are not images, or full plans on small images (``n = H * W``).

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
            raise ValueError(
                "matrix has a negative or NaN cost; costs are >= 0, and inf forbids a move"
            )
        if bool((matrix.diagonal() != 0).any()):
            raise ValueError("matrix must have a zero diagonal: staying is free")
        self.matrix = matrix

    def __repr__(self) -> str:
        return f"DenseCost({self.size} x {self.size})"

    @cached_property
    def size(self) -> int:
        return int(self.matrix.shape[0])

    def arcs(self, height: int, width: int, like: Tensor) -> DenseMoves:
        """The moves on a grid of ``height * width = n`` pixels, in ``like``'s dtype and on its device."""
        self.check_size(height, width)
        return DenseMoves(self.matrix, (height, width), like)

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
