r"""Where the mass went: the moves of a cheapest transport plan between two images, for drawing.

.. math:: \min_P \langle P, C \rangle, \qquad P 1 = x,\; P^T 1 = z

over plans that use only the moves of the ball. Mass that has no such move (rounding) is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import ot
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from wball.cost import GridCost, StencilCost
from wball.evaluation.schema import stored_cost

Array = NDArray[np.float64]
Index = NDArray[np.int64]

SHOWN = 90
"""Arrows drawn at most, those that move the most."""

LARGE = 20_000
"""Values per image above which a plan takes too long for a picture."""


@dataclass(frozen=True)
class Moves:
    """The moves of a plan.

    Attributes:
        arrows: ``(row, column, row, column, mass)`` of the largest moves, as lists.
        moved: share of the image's mass that moves at all.
        farthest: the longest move that carries a thousandth of what moves, in pixels.
    """

    arrows: list[list[float]]
    moved: float
    farthest: float


def plan_moves(ball: Mapping[str, Any], x: Tensor, z: Tensor) -> Moves | None:
    """The moves from ``x`` to ``z``, both ``(C, H, W)``; ``None`` for large images and balls without such moves."""
    if x.numel() > LARGE:
        return None
    cost = stored_cost(ball)
    if cost is None:
        return None
    height, width = (int(s) for s in x.shape[-2:])
    start, end, price = _arcs(cost, height, width)
    found = [
        _channel(start, end, price, a, np.clip(b, 0, None))
        for a, b in zip(x.double().flatten(1).numpy(), z.double().flatten(1).numpy(), strict=True)
    ]
    i, j, mass = (np.concatenate(part) for part in zip(*found, strict=True))
    whole = float(x.double().sum())
    if len(mass) == 0 or whole == 0:
        return Moves([], 0.0, 0.0)
    moves = np.stack([i // width, i % width, j // width, j % width, mass], 1).astype(np.float64)
    length = np.hypot(moves[:, 2] - moves[:, 0], moves[:, 3] - moves[:, 1])
    heavy = mass >= 1e-3 * mass.sum()
    order = np.argsort(-mass * length, kind="stable")[:SHOWN]
    arrows = [[*(float(v) for v in row[:4]), round(float(row[4]), 4)] for row in moves[order]]
    return Moves(arrows, float(mass.sum()) / whole, float(length[heavy].max(initial=0.0)))


@lru_cache(maxsize=4)
def _arcs(cost: GridCost | StencilCost, height: int, width: int) -> tuple[Index, Index, Array]:
    """Every move on a grid: where it starts, where it ends, what it costs."""
    row, column = np.divmod(np.arange(height * width), width)
    parts = []
    for down, right, value in cost.moves(height, width):
        inside = (row + down >= 0) & (row + down < height) & (column + right >= 0) & (column + right < width)
        here = np.flatnonzero(inside)
        parts.append((here, here + down * width + right, np.full(len(here), value)))
    start, end, price = (np.concatenate(part) for part in zip(*parts, strict=True))
    return start, end, price


def _channel(start: Index, end: Index, price: Array, a: Array, b: Array) -> tuple[Index, Index, Array]:
    """Start, end and mass of the moves of a cheapest plan from ``a`` to ``b``, without what stays."""
    nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)
    total = float(a.sum())
    if total == 0 or b.sum() == 0:
        return nothing
    a, b = a / total, b / b.sum()
    rows, columns = np.flatnonzero(a), np.flatnonzero(b)
    n, m = len(rows), len(columns)
    kept = (a[start] > 0) & (b[end] > 0)
    # One more row and column take what has no move, at a price above that of any detour.
    dear = float(price.max()) * min(n, m) + 1.0
    i = np.concatenate([np.searchsorted(rows, start[kept]), np.arange(n), np.full(m, n), [n]])
    j = np.concatenate([np.searchsorted(columns, end[kept]), np.full(n, m), np.arange(m), [m]])
    costs = sparse.coo_matrix(
        (np.concatenate([price[kept], np.full(n + m, dear), [0.0]]), (i, j)), shape=(n + 1, m + 1)
    )
    supply, demand = np.append(a[rows], 1.0) / 2, np.append(b[columns], 1.0) / 2
    plan = ot.emd(supply, demand, costs, numItermax=10**6, check_marginals=False).tocoo()
    real = (plan.row < n) & (plan.col < m)
    i, j, mass = rows[plan.row[real]], columns[plan.col[real]], 2 * total * plan.data[real]
    moves = (i != j) & (mass > 1e-7 * total)
    return i[moves], j[moves], mass[moves]
