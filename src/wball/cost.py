"""Ground costs: the cost of moving one unit of mass from pixel ``i`` to pixel ``j``.

A *stencil* cost depends only on the offset ``j - i`` and is infinite outside a small window. A *dense*
cost is any ``n x n`` matrix. In both, staying costs nothing, so the centre of a ball is in the ball.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wball.moves import DenseMoves, StencilMoves
from wball.provenance import fingerprint


@dataclass(frozen=True)
class StencilCost:
    """A cost that depends only on the offset, as a table with odd sides. ``inf`` forbids a move.

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
        """The moves ``(dr, dc, cost)`` that fit a ``height x width`` image, staying first, then by cost."""
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
        """The cost for full plans: the same, because the table has no costs of longer moves."""
        return self

    def describe(self) -> dict[str, Any]:
        """The cost as plain data; :func:`read_cost` reads it."""
        table = [[None if v == math.inf else v for v in row] for row in self.table]
        return {"cost": "table", "table": table}


@dataclass(frozen=True)
class GridCost:
    """``(dr^2 + dc^2)^(p/2)`` inside an odd ``window x window`` neighbourhood, infinite outside.

    ``p = 1`` is the Euclidean distance, as in the paper. A window that covers the image allows every
    transport plan.

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
        """Whether the window reaches from any pixel of such an image to any other."""
        return self.radius >= max(height, width) - 1

    def moves(self, height: int, width: int) -> list[tuple[int, int, float]]:
        """The moves ``(dr, dc, cost)`` that fit a ``height x width`` image, cheapest first."""
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

    def describe(self) -> dict[str, Any]:
        """The cost as plain data; :func:`read_cost` reads it."""
        return {"cost": "grid", "window": self.window, "p": float(self.p)}


@lru_cache(maxsize=64)
def _stencil_moves(
    cost: GridCost | StencilCost, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> StencilMoves:
    """Cached per grid, dtype and device, because an attack asks at every step."""
    like = torch.empty(0, dtype=dtype, device=device)
    return StencilMoves(cost.moves(height, width), (height, width), like)


class DenseCost:
    """An arbitrary ``n x n`` cost, for histograms that are not images or for small images (``n = H * W``).

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
        self.matrix, self.size = matrix, matrix.shape[0]

    def __repr__(self) -> str:
        return f"DenseCost({self.size} x {self.size})"

    def arcs(self, height: int, width: int, like: Tensor) -> DenseMoves:
        """The moves on a grid of ``height * width = n`` pixels, in ``like``'s dtype and on its device."""
        self.check_size(height, width)
        return DenseMoves(self.matrix, (height, width), like)

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
    """The cost that ``describe`` wrote; ``None`` for a matrix, and for balls without a cost."""
    if description.get("cost") == "grid":
        return GridCost(description["window"], description["p"])
    if description.get("cost") == "table":
        rows = description["table"]
        return StencilCost(tuple(tuple(math.inf if v is None else v for v in row) for row in rows))
    return None
