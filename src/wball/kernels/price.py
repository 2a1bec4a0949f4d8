r"""The price ``psi`` at which a plan costs its budget: one step of the search, for compiled loops.

The cost of the best plan falls with its price. With entropy it is smooth, and its logarithm is
nearly a line in ``psi``; without, the plan jumps, and the price sought is the kink of a convex
function that is a line on either side.
"""

from __future__ import annotations

import math

from wball.kernels.compiled import compiled


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
