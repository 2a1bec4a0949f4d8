r"""Is this image in that Wasserstein ball? Computed in float64, without solvers or kernels.

- *mass*: ``max_c |sum z_c - sum x_c| / m`` over channels ``c``, with ``m`` the mass of ``x``;
- *box*: how far the worst pixel is outside ``[lo, hi]`` (without a box: below 0);
- *distance*: the exact optimal transport cost in the unit of ``eps``, or an upper bound that a plan
  proves (:mod:`wball.auditing.proof`).

The linear-programming code is not trusted either: the cost of its flow is an upper bound of the
distance, its dual prices give a lower bound, and the two must meet (:mod:`wball.auditing.flows`).

Float32 images have equal mass only up to rounding, and so does every set of pixels that the window
connects. So ``z`` is scaled to the mass of ``x`` in each channel, and mass that no plan could place
is ignored if it is at most 1e-5 of ``m``; otherwise the distance is infinite. Half a unit in the
last place of ``z``'s dtype, on all of its mass, moved by the cheapest move, is granted on top of
the radius. It only matters for radii near 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from wball.auditing.flows import Array, Index, ListedMoves, Matching, list_moves, match
from wball.auditing.proof import proved_distance
from wball.auditing.violations import BOX_TOL, MASS_TOL, Violations, box_violation, half_ulp
from wball.cost import GroundCost
from wball.plan import StoredPlan

LARGE = 2048
"""Pixels per channel above which channels are matched in parallel."""


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
        plan: plans that claim to turn ``x`` into ``z``. The distance is then the bound that they
            prove, and nothing is solved.
    """
    start, end = to_planes(x), to_planes(z)
    finite = end.isfinite().flatten(1).all(1)
    end = torch.where(finite.view(-1, 1, 1, 1), end, 0.0)
    mass = start.flatten(1).sum(1)
    off = (end.sum((2, 3)) - start.sum((2, 3))).abs().amax(1)
    moves = all_moves(cost, int(start.shape[2]), int(start.shape[3]))
    unit = mass if relative else torch.ones_like(mass)
    if plan is None:
        pairs = zip(start.cpu().numpy(), end.cpu().numpy(), strict=True)
        costs = [transport_cost(partial(_match_channel, moves), *pair) for pair in pairs]
        total = torch.tensor(costs, dtype=torch.float64, device=x.device)
    else:
        total = proved_distance(cost, start, end, plan)
    return Violations(
        mass_error=torch.where(finite, over(off, mass), math.inf),
        box_violation=box_violation(z, box if box is not None else (0.0, math.inf)),
        distance=torch.where(finite, over(total, unit), math.inf),
        rounding=half_ulp(z) * moves.cheapest * torch.where(unit > 0, mass / unit, 1.0),
        exact=torch.ones_like(finite) if plan is None else ~finite,
    )


def cheapest_plan(cost: GroundCost, x: Tensor, z: Tensor) -> tuple[Index, Index, Array]:
    """The moves of an optimal plan from ``x`` to ``z``, both ``(C, H, W)``: start, end and mass.

    Pixels are numbered row by row in each channel. Mass that stays, or has no move, is left out.
    """
    moves = all_moves(cost, int(x.shape[1]), int(x.shape[2]))
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    end = z.detach().to("cpu", torch.float64).clamp(min=0).flatten(1).numpy()
    for a, b in zip(x.detach().to("cpu", torch.float64).flatten(1).numpy(), end, strict=True):
        if a.sum() > 0 and b.sum() > 0 and not np.array_equal(a, b):
            found = _match_channel(moves, a, b)
            source, target = moves.source[found.arcs], moves.target[found.arcs]
            used = (found.flow > 1e-7 * a.sum()) & (source != target)
            parts.append((source[used], target[used], found.flow[used]))
    source, target, mass = (np.concatenate(part) for part in zip(*parts, strict=True))
    return source, target, mass


def to_planes(x: Tensor) -> Tensor:
    """Images in float64, ``(B, C, H, W)``; a histogram is an image of one row."""
    image = x.detach().to(torch.float64)
    return image if image.ndim == 4 else image[:, None, None, :]


def over(total: Tensor, unit: Tensor) -> Tensor:
    """Quotients with 0 / 0 = 0 and 1 / 0 = inf."""
    return torch.where(total == 0, 0.0, total / unit)


@lru_cache(maxsize=8)
def all_moves(cost: GroundCost, height: int, width: int) -> ListedMoves:
    """:func:`list_moves`, remembered for a few sizes."""
    return list_moves(cost, height, width)


def transport_cost(matched: Callable[[Array, Array], Matching], x: Array, z: Array) -> float:
    """Least cost of turning ``x`` into ``z``, both ``(C, H, W)``, in mass units.

    It is infinite if this is impossible. ``matched`` solves the transport problem of a channel.
    """
    if float(z.min()) < -BOX_TOL:
        return math.inf
    mass, missing, pairs = float(x.sum()), 0.0, []
    ends = np.maximum(z, 0.0).reshape(len(z), -1)
    for start, end in zip(x.reshape(len(x), -1), ends, strict=True):
        if np.array_equal(start, end):
            continue  # staying is free
        before, after = float(start.sum()), float(end.sum())
        # Ten times the tolerance, so that a distance is reported beside a slightly wrong mass.
        if abs(before - after) > 10 * MASS_TOL * mass:
            return math.inf
        if before > 0 and after > 0:
            pairs.append((start, end))
        else:
            missing += before + after
    if len(pairs) > 1 and pairs[0][0].size > LARGE:
        with ThreadPoolExecutor(min(len(pairs), os.cpu_count() or 1)) as pool:
            found = list(pool.map(lambda pair: matched(*pair), pairs))
    else:
        found = [matched(*pair) for pair in pairs]
    missing += sum(one.missing for one in found)
    return sum(one.cost for one in found) if missing <= MASS_TOL * mass else math.inf


def _match_channel(moves: ListedMoves, a: Array, b: Array) -> Matching:
    """``a`` and ``b`` matched at the least cost, after ``b`` is scaled to the mass of ``a``."""
    return match(moves, a, b * (a.sum() / b.sum()))
