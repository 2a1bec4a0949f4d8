r"""Where the mass went: the moves of a cheapest transport plan between two images, for drawing.

.. math:: \min_P \langle P, C \rangle, \qquad P 1 = x,\; P^T 1 = z

over plans that use only the moves of the ball, by the audit's solver
(:mod:`wball.auditing.violations`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from wball.auditing.violations import cheapest_plan
from wball.cost import read_cost

SHOWN = 60
"""Arrows drawn at most, those that move the most."""

LARGE = 20_000
"""Values per image above which a plan takes too long for a picture."""


@dataclass(frozen=True)
class ShownMoves:
    """The moves of a plan that the explorer shows.

    Attributes:
        arrows: ``(row, column, row, column, mass)`` of the largest moves, as lists.
        moved: fraction of the image's mass that moves.
        farthest: the longest move that carries a thousandth of what moves, in pixels.
    """

    arrows: list[list[float]]
    moved: float
    farthest: float


def plan_moves(ball: Mapping[str, Any], x: Tensor, z: Tensor) -> ShownMoves | None:
    """The moves of an optimal plan from ``x`` to ``z``, both ``(C, H, W)``; ``None`` for large
    images and balls without plans."""
    if x.numel() > LARGE:
        return None
    cost = read_cost(ball)
    if cost is None:
        return None
    width = int(x.shape[-1])
    i, j, mass = cheapest_plan(cost, x, z)
    i, j = (place % (width * int(x.shape[-2])) for place in (i, j))  # whatever the channel
    whole = float(x.double().sum())
    if len(mass) == 0 or whole == 0:
        return ShownMoves([], 0.0, 0.0)
    moves = np.stack([i // width, i % width, j // width, j % width, mass], 1).astype(np.float64)
    length = np.hypot(moves[:, 2] - moves[:, 0], moves[:, 3] - moves[:, 1])
    heavy = mass >= 1e-3 * mass.sum()
    order = np.argsort(-mass * length, kind="stable")[:SHOWN]
    arrows = [[*(int(v) for v in row[:4]), float(f"{row[4]:.3g}")] for row in moves[order]]
    return ShownMoves(arrows, float(mass.sum()) / whole, float(length[heavy].max(initial=0.0)))
