r"""Is this image in that Wasserstein ball? Measured in float64 by code that shares nothing with kernels and solvers.

- *mass*: ``max_c |sum z_c - sum x_c| / m`` over channels ``c``, with ``m`` the mass of ``x``;
- *box*: how far the worst pixel is outside ``[lo, hi]`` (without a box: below 0, because mass is not negative);
- *distance*: the exact optimal transport cost in the unit of ``eps``, or an upper bound that a plan proves
  (:mod:`wball.auditing.proof`).

The moves and what they cost are read off the ground cost, and the transport problem is written down here. Neither is
the linear-programming code trusted: the flow it returns is summed up and priced here (an upper bound of the distance),
its dual prices are checked against every move and summed up (a lower bound), and the two must meet. Images of more than
:data:`LARGE` pixels a channel are matched where they differ first (:mod:`wball.auditing.differences`), which takes a
tenth of the time and is enough for nearly all.

Float32 images have equal mass only up to rounding, and so does every island of pixels that the window does not connect
to others. So ``z`` is brought to the mass of ``x`` channel by channel, and mass that no plan could place is left out if
it is at most 1e-5 of ``m``; otherwise the distance is infinite. Half a unit in the last place of ``z``'s dtype, on all
of its mass, moved by the cheapest move, is granted on top of the radius: it only matters for radii near 0.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from wball.auditing.differences import match_differences
from wball.auditing.flows import Array, Index, ListedMoves, Matching, match
from wball.auditing.proof import proved_distance
from wball.auditing.violations import BOX_TOL, MASS_TOL, Violations, box_violation, half_ulp
from wball.cost import GroundCost
from wball.plan import StoredPlan

LARGE = 2048
"""Pixels of a channel from which on it pays to leave out of the problem what two images share."""


def transport_violations(
    cost: GroundCost,
    x: Tensor,
    z: Tensor,
    *,
    relative: bool,
    box: tuple[float, float] | None,
    plan: StoredPlan | Tensor | None = None,
) -> Violations:
    """Mass, box and distance of ``z`` around ``x``, both ``(B, C, H, W)`` or ``(B, n)``.

    Args:
        cost: what moves cost.
        x: centres.
        z: points; their contents may be anything.
        relative: whether distances are fractions of the image's mass.
        box: bounds of pixels.
        plan: plans that claim to turn ``x`` into ``z``. Nothing is solved then: the distance is what the plan proves.
    """
    start, end = _planes(x), _planes(z)
    finite = end.isfinite().flatten(1).all(1)
    end = torch.where(finite.view(-1, 1, 1, 1), end, 0.0)
    mass = start.flatten(1).sum(1)
    off = (end.sum((2, 3)) - start.sum((2, 3))).abs().amax(1)
    moves = _all_moves(cost, int(start.shape[2]), int(start.shape[3]))
    unit = mass if relative else torch.ones_like(mass)
    if plan is None:
        a, b = start.cpu().numpy(), end.cpu().numpy()
        total = torch.tensor(
            [_transport(moves, *pair) for pair in zip(a, b, strict=True)], dtype=torch.float64
        )
        total = total.reshape(-1).to(x.device)
    else:
        total = proved_distance(cost, start, end, plan)
    return Violations(
        mass_error=torch.where(finite, _over(off, mass), math.inf),
        box_violation=box_violation(z, box if box is not None else (0.0, math.inf)),
        distance=torch.where(finite, _over(total, unit), math.inf),
        rounding=half_ulp(z) * moves.cheapest * torch.where(unit > 0, mass / unit, 1.0),
        exact=torch.ones_like(finite) if plan is None else ~finite,
    )


def cheapest_plan(cost: GroundCost, x: Tensor, z: Tensor) -> tuple[Index, Index, Array]:
    """The moves of a cheapest plan from ``x`` to ``z``, both ``(C, H, W)``: start, end and mass, without what stays.

    Pixels are numbered row by row in each channel. Mass that has no move (rounding) is left out.
    """
    moves = _all_moves(cost, int(x.shape[1]), int(x.shape[2]))
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    end = z.detach().to("cpu", torch.float64).clamp(min=0).flatten(1).numpy()
    for a, b in zip(x.detach().to("cpu", torch.float64).flatten(1).numpy(), end, strict=True):
        if a.sum() > 0 and b.sum() > 0 and not np.array_equal(a, b):
            _, _, arcs, flow = _channel(moves, a, b)
            used = (flow > 1e-7 * a.sum()) & (moves.source[arcs] != moves.target[arcs])
            parts.append((moves.source[arcs][used], moves.target[arcs][used], flow[used]))
    source, target, mass = (np.concatenate(part) for part in zip(*parts, strict=True))
    return source, target, mass


def _planes(x: Tensor) -> Tensor:
    image = x.detach().to(torch.float64)
    return image if image.ndim == 4 else image[:, None, None, :]


def _over(total: Tensor, unit: Tensor) -> Tensor:
    """Quotients with 0 / 0 = 0."""
    return torch.where(total == 0, 0.0, torch.where(unit > 0, total / unit, math.inf))


@lru_cache(maxsize=8)
def _all_moves(cost: GroundCost, height: int, width: int) -> ListedMoves:
    return ListedMoves(cost, height, width)


def _transport(moves: ListedMoves, x: Array, z: Array) -> float:
    """The least cost of turning ``x`` into ``z``, both ``(C, H, W)``, in mass units; inf if it cannot be done."""
    if float(z.min()) < -BOX_TOL:
        return math.inf
    mass, pairs = float(x.sum()), []
    for start, end in zip(
        x.reshape(len(x), -1), np.maximum(z, 0.0).reshape(len(z), -1), strict=True
    ):
        if np.array_equal(start, end):
            continue  # staying is free
        before, after = float(start.sum()), float(end.sum())
        # Rounding in the sums is forgiven tenfold here so that a distance is reported beside a slightly wrong mass.
        if abs(before - after) > 10 * MASS_TOL * mass or (before == 0) != (after == 0):
            return math.inf
        if before > 0:
            pairs.append((start, end))
    if len(pairs) > 1 and pairs[0][0].size > LARGE:
        with ThreadPoolExecutor(min(len(pairs), os.cpu_count() or 1)) as pool:
            found = list(pool.map(lambda pair: _channel(moves, *pair), pairs))
    else:
        found = [_channel(moves, *pair) for pair in pairs]
    return (
        sum(one.cost for one in found)
        if sum(one.missing for one in found) <= MASS_TOL * mass
        else math.inf
    )


def _channel(moves: ListedMoves, a: Array, b: Array) -> Matching:
    """``a`` and ``b`` matched at the least cost, after ``b`` was brought to the mass of ``a``."""
    found = match_differences(moves, a, b) if a.size > LARGE else None
    return match(moves, a, b * (a.sum() / b.sum())) if found is None else found
