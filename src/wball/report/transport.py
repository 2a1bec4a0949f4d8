r"""Where the mass went: the moves of a cheapest transport plan between two images, for drawing.

.. math:: \min_P \langle P, C \rangle, \qquad P 1 = x,\; P^T 1 = z

over all plans. Where the cost is a metric (p <= 1), mass that both images share can stay, and only the rest is matched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ot
from numpy.typing import NDArray
from torch import Tensor

SHOWN = 90
"""Arrows drawn at most, those that move the most."""


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
    """The moves from ``x`` to ``z``, both ``(C, H, W)``; ``None`` if the ball has no distances between pixels."""
    if ball.get("cost") not in ("grid", "table"):
        return None
    p = float(ball.get("p", 1.0))
    width = x.shape[-1]
    found: list[NDArray[np.float64]] = []
    for a, b in zip(x.double().flatten(1).numpy(), z.double().flatten(1).numpy(), strict=True):
        found.append(_channel(a, np.clip(b, 0, None), width, p))
    moves = np.concatenate(found) if found else np.zeros((0, 5))
    mass = float(x.double().sum())
    if len(moves) == 0 or mass == 0:
        return Moves([], 0.0, 0.0)
    total = float(moves[:, 4].sum())
    length = np.hypot(moves[:, 2] - moves[:, 0], moves[:, 3] - moves[:, 1])
    heavy = moves[:, 4] >= 1e-3 * total
    order = np.argsort(-moves[:, 4] * length, kind="stable")[:SHOWN]
    arrows = [[*(float(v) for v in row[:4]), round(float(row[4]), 4)] for row in moves[order]]
    return Moves(arrows, total / mass, float(length[heavy].max(initial=0.0)))


def _channel(a: NDArray[np.float64], b: NDArray[np.float64], width: int, p: float) -> NDArray[np.float64]:
    """Rows ``(row, column, row, column, mass)`` of a cheapest plan from ``a`` to ``b``, without what stays."""
    if a.sum() == 0 or b.sum() == 0:
        return np.zeros((0, 5))
    b = b * (a.sum() / b.sum())
    if p <= 1:
        common = np.minimum(a, b)
        a, b = a - common, b - common
    rows, columns = np.flatnonzero(a > 1e-7), np.flatnonzero(b > 1e-7)
    if len(rows) == 0 or len(columns) == 0:
        return np.zeros((0, 5))
    start, end = a[rows], b[columns]
    mass = start.sum()
    squared = (
        np.subtract.outer(rows // width, columns // width) ** 2 + np.subtract.outer(rows % width, columns % width) ** 2
    ).astype(np.float64)
    plan = mass * ot.emd(start / mass, end / end.sum(), squared ** (p / 2), numItermax=10**6, check_marginals=False)
    i, j = np.nonzero(plan > 1e-6)
    i, j = i[rows[i] != columns[j]], j[rows[i] != columns[j]]
    r, c = rows[i], columns[j]
    return np.stack([r // width, r % width, c // width, c % width, plan[i, j]], 1).astype(np.float64)
