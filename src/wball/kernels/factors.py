r"""A plan in factors in compiled loops: its price, what its pixels exchange, and its repair into
the box.

``P_{i, i+k} = A_i w_k E_{i+k}`` on a flat image (:mod:`wball.kernels.dispatch`), with factors
``give_i`` and ``keep_{i+k}`` on the moves away from a pixel. Loops run over the image between
``pad`` and ``pad + n``; moves are shifts.

The repair is that of :func:`wball.kernels.plan_rows.into_box`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from wball.kernels.compiled import compiled
from wball.kernels.dispatch import GROUP
from wball.kernels.plan_rows import PLAIN_SWEEPS, REPAIR_SWEEPS

TRIAL_SWEEPS, HOPELESS = 12, 0.6
"""If more than this share of the excess is left after this many sweeps, a repair goes straight to
its last sweep."""
SUMS = {"contract", "nsz", "reassoc", "nnan"}
"""Optimisations allowed: reordered sums and maxima, fused multiplications, no NaNs."""
EXACT = {"contract", "nsz"}
TINY = 1e-300


class Flat(NamedTuple):
    """The flat image, and the moves as shifts of it; moves before ``first`` keep mass in place."""

    pad: int
    n: int
    shift: Any
    back: Any
    fee: Any
    first: int


class Factors(NamedTuple):
    """Working memory of a factored plan: one line per quantity, including margins; the last three
    are scratch."""

    x: Any
    a: Any
    e: Any
    keep: Any
    give: Any
    sent: Any
    received: Any
    kept: Any
    had: Any
    tmp: Any


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


class Box(NamedTuple):
    """The box, which columns may violate by ``slack``."""

    lo: float
    hi: float
    slack: float


@compiled(inner=True)
def mass_box(x):  # type: ignore[no-untyped-def]
    """The rows and columns between which an image has mass, over all channels."""
    channels, height, width = x.shape
    top, bottom, left, right = height, 0, width, 0
    for c in range(channels):
        for r in range(height):
            for j in range(width):
                if x[c, r, j] > 0.0:
                    top, bottom = min(top, r), max(bottom, r + 1)
                    left, right = min(left, j), max(right, j + 1)
    return top, bottom, left, right


@compiled(inner=True, fastmath=SUMS)
def correlate(out, values, pad, n, shift, weight, first, last):  # type: ignore[no-untyped-def]
    """``out[i] = sum_k weight[k] values[i + shift[k]]`` over ``first <= k < last``, four at
    once."""
    o = out[pad : pad + n]
    for k in range(first, last, GROUP):
        s0, s1, s2, s3 = pad + shift[k], pad + shift[k + 1], pad + shift[k + 2], pad + shift[k + 3]
        a0, a1, a2, a3 = (
            values[s0 : s0 + n],
            values[s1 : s1 + n],
            values[s2 : s2 + n],
            values[s3 : s3 + n],
        )
        w0, w1, w2, w3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
        if k == first:
            for i in range(n):
                o[i] = w0 * a0[i] + w1 * a1[i] + w2 * a2[i] + w3 * a3[i]
        else:
            for i in range(n):
                o[i] += w0 * a0[i] + w1 * a1[i] + w2 * a2[i] + w3 * a3[i]
    for i in range(n if first >= last else 0):
        o[i] = 0.0


@compiled(inner=True)
def weights(fee, psi, out):  # type: ignore[no-untyped-def]
    """The weights ``w_k``; 0 for the padding moves of a ring."""
    for k in range(fee.size):
        out[k] = math.exp(-psi * fee[k]) if fee[k] < math.inf else 0.0


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
    """The root of ``cost(psi) = budget``. The cost falls about exponentially in the price, so
    Newton's method runs on its logarithm, kept in a bracket: ``low`` costs too much, ``high`` does
    not.

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
        low, high = (low, psi) if cost <= budget else (psi, high)
        step = -1.0
        if cost > 0.0 and slope > 0.0:
            step = max(psi + cost * math.log(cost / (budget * (1 - tolerance / 2))) / slope, 0.0)
        if low < step < min(high, 100 * psi + 100):
            psi = step
        else:
            psi = 2 * psi + 1 if math.isinf(high) else (max(low, 0.0) + high) / 2
    return psi, cost


@compiled(inner=True, fastmath=EXACT)
def receive(f, flat, weight, first):  # type: ignore[no-untyped-def]
    """``received``: inflow of each pixel by the moves from ``first`` on if ``keep`` were 1."""
    pad, n = flat.pad, flat.n
    a, e, give = f.a[pad : pad + n], f.e[pad : pad + n], f.give[pad : pad + n]
    received, scaled = f.received[pad : pad + n], f.tmp[pad : pad + n]
    for i in range(n):
        scaled[i] = a[i] * give[i]
    correlate(f.received, f.tmp, pad, n, flat.back, weight, first, weight.size)
    for i in range(n):
        received[i] *= e[i]


@compiled(inner=True, fastmath=EXACT)
def send(f, flat, weight):  # type: ignore[no-untyped-def]
    """``sent``: outflow of each pixel if ``give`` were 1."""
    pad, n = flat.pad, flat.n
    a, e, keep = f.a[pad : pad + n], f.e[pad : pad + n], f.keep[pad : pad + n]
    sent, scaled = f.sent[pad : pad + n], f.tmp[pad : pad + n]
    for i in range(n):
        scaled[i] = e[i] * keep[i]
    correlate(f.sent, f.tmp, pad, n, flat.shift, weight, flat.first, weight.size)
    for i in range(n):
        sent[i] *= a[i]


@compiled(inner=True, fastmath=SUMS)
def _outside(f, flat, box):  # type: ignore[no-untyped-def]
    """Mass outside the box. Margins, where x and z are 0, do not count as below it."""
    pad, n, outside = flat.pad, flat.n, 0.0
    x, keep, give = f.x[pad : pad + n], f.keep[pad : pad + n], f.give[pad : pad + n]
    sent, received = f.sent[pad : pad + n], f.received[pad : pad + n]
    for i in range(n):
        z = x[i] - give[i] * sent[i] + keep[i] * received[i]
        outside += z - box.hi if z > box.hi + box.slack else 0.0
        outside += box.lo - z if (z < box.lo - box.slack) & (x[i] > 0.0) else 0.0
    return outside


@compiled(inner=True, fastmath=EXACT)
def _tighten(f, flat, box, sweep):  # type: ignore[no-untyped-def]
    """Reduce the factors where the box is violated, or everywhere in the last sweep. The old
    factors are saved in ``kept``."""
    pad, n, lo, hi, last = flat.pad, flat.n, box.lo, box.hi, sweep == REPAIR_SWEEPS
    counted, more = 0.0 if last else 1.0, 0.0 if last or sweep < PLAIN_SWEEPS else 1.0
    x, keep, give = f.x[pad : pad + n], f.keep[pad : pad + n], f.give[pad : pad + n]
    sent, received = f.sent[pad : pad + n], f.received[pad : pad + n]
    kept, had = f.kept[pad : pad + n], f.had[pad : pad + n]
    for i in range(n):
        kept[i] = keep[i]
        had[i] = sent[i]
    for i in range(n):
        z = x[i] - give[i] * sent[i] + kept[i] * received[i]
        room = hi - x[i] + counted * give[i] * sent[i] - more * (z - hi)
        room = max(room / max(received[i], TINY), 0.0)
        keep[i] = min(keep[i], room) if last or z > hi + box.slack else keep[i]
    every = last and lo > 0.0
    for i in range(n):
        z = x[i] - give[i] * sent[i] + kept[i] * received[i]
        spare = x[i] - lo + counted * kept[i] * received[i] - more * (lo - z)
        spare = max(spare / max(sent[i], TINY), 0.0)
        give[i] = min(give[i], spare) if every or z < lo - box.slack else give[i]


@compiled(inner=True, fastmath=EXACT)
def _between(f, flat, box):  # type: ignore[no-untyped-def]
    """The mixture of the last two plans that just satisfies the box. ``received`` does not depend
    on ``keep``."""
    pad, n, way = flat.pad, flat.n, 0.0
    x, keep, give = f.x[pad : pad + n], f.keep[pad : pad + n], f.give[pad : pad + n]
    sent, received = f.sent[pad : pad + n], f.received[pad : pad + n]
    kept, had = f.kept[pad : pad + n], f.had[pad : pad + n]
    for i in range(n):
        excess = x[i] - give[i] * had[i] + kept[i] * received[i] - box.hi
        if excess > box.slack:
            below = max(box.hi - (x[i] - give[i] * sent[i] + keep[i] * received[i]), 0.0)
            way = max(way, excess / (excess + below))
    for i in range(n):
        keep[i] = kept[i] + way * (keep[i] - kept[i])
        sent[i] = had[i] + way * (sent[i] - had[i])


@compiled(inner=True)
def repair(f, flat, weight, box):  # type: ignore[no-untyped-def]
    """``keep`` and ``give`` such that ``x - give sent + keep received`` satisfies the box."""
    keep, give = f.keep[flat.pad : flat.pad + flat.n], f.give[flat.pad : flat.pad + flat.n]
    for i in range(flat.n):
        keep[i] = 1.0
        give[i] = 1.0
    sweep, first = 0, 0.0
    while True:
        send(f, flat, weight)
        receive(f, flat, weight, flat.first)
        if sweep > REPAIR_SWEEPS:
            # With a lower bound both factors differ, and a mixture would not have this form.
            if box.lo <= 0.0:
                _between(f, flat, box)
            return
        outside = _outside(f, flat, box)
        if outside == 0.0:
            return
        first = outside if sweep == 0 else first
        if sweep == TRIAL_SWEEPS and outside > HOPELESS * first:
            sweep = REPAIR_SWEEPS
        _tighten(f, flat, box, sweep)
        sweep += 1
