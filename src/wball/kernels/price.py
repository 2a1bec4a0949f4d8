r"""The price ``psi`` at which a plan costs its budget, for compiled loops.

The cost of the best plan falls with its price. With entropy it is smooth, and its logarithm is
nearly a line in ``psi``; without, the plan jumps, and the price sought is the kink of a convex
function that is a line on either side.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from wball.kernels.compiled import compiled
from wball.kernels.factors import SUMS, TINY


class PlanLines(NamedTuple):
    """Rows of a plan: their mass, the normalisers of the last price, and scratch. For each distinct
    cost, the sum of ``E`` over its moves is a row of ``work`` from ``ring`` on, from ``start``
    on."""

    x: Any
    work: Any
    ring: int
    start: int
    norm: Any
    first: Any
    second: Any


@compiled(inner=True)
def narrowed(psi, cost, budget, low, high):  # type: ignore[no-untyped-def]
    """The bracket after a trial: ``low`` costs too much, ``high`` does not."""
    return (low, psi) if cost <= budget else (psi, high)


@compiled(inner=True)
def smooth_step(psi, cost, slope, target, low, high):  # type: ignore[no-untyped-def]
    """Newton's step on the logarithm of the cost towards ``target``, kept inside the bracket;
    ``slope`` is minus the derivative of the cost."""
    step = (
        max(psi + cost * math.log(cost / target) / slope, 0.0)
        if cost > 0.0 and slope > 0.0
        else -1.0
    )
    if low < step < min(high, 100 * psi + 100):
        return step
    return 2 * psi + 1 if math.isinf(high) else (max(low, 0.0) + high) / 2


@compiled(inner=True, fastmath=SUMS)
def _moments(lines, psi, ring_cost):  # type: ignore[no-untyped-def]
    """Cost of the plan at ``psi`` and minus its derivative; sets ``norm``."""
    x, norm, first, second = lines.x, lines.norm, lines.first, lines.second
    for i in range(x.size):
        norm[i] = first[i] = second[i] = 0.0
    for d in range(ring_cost.size):
        ring, c = lines.work[lines.ring + d, lines.start : lines.start + x.size], ring_cost[d]
        w = math.exp(-psi * c)
        for i in range(x.size):
            t = w * ring[i]
            norm[i] += t
            first[i] += c * t
            second[i] += c * c * t
    cost, slope = 0.0, 0.0
    for i in range(x.size):
        scale = 1.0 / max(norm[i], TINY)
        mean = first[i] * scale
        cost += x[i] * mean
        slope += x[i] * max(second[i] * scale - mean * mean, 0.0)
    return cost, slope


@compiled(inner=True)
def solve_price(lines, psi, budget, ring_cost, newton, tol, miss):  # type: ignore[no-untyped-def]
    """The root of ``cost(psi) = budget``: Newton on the logarithm of the cost, kept in a bracket.

    The budget left may be a share ``tol`` of the budget, and may be worth ``miss``. Returns the
    price and the cost.
    """
    low, high = -1.0, math.inf
    for attempt in range(newton + 1):
        cost, slope = _moments(lines, psi, ring_cost)
        tolerance = min(max(miss / max(psi * budget, TINY), 4e-15), tol)
        found = cost <= budget and (cost >= budget * (1 - tolerance) or psi == 0.0)
        if found or attempt == newton:
            break
        low, high = narrowed(psi, cost, budget, low, high)
        psi = smooth_step(psi, cost, slope, budget * (1 - tolerance / 2), low, high)
    return psi, cost


@compiled(inner=True)
def crossing(low, value_low, slope_low, high, value_high, slope_high):  # type: ignore[no-untyped-def]
    """Where the two lines meet that bound a convex function from below at the ends of the
    bracket."""
    drop = slope_high - slope_low
    meet = (
        (value_low - value_high + slope_high * high - slope_low * low) / drop
        if drop > 0.0
        else high
    )
    return min(max(meet, low), high)
