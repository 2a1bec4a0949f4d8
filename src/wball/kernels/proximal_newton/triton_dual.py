r"""The dual of a proximal step inside a Triton program: at given potentials, who sends what, and the end of a step.

Rows and columns that take part are listed, because of a digit's pixels few have mass, and come in tiles of rows by
moves: what the moves of a row are worth is loaded once and stays in registers while its threshold is sought.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from wball.kernels.triton_stencil import INTERPRETED, sum_two

BUFFERS = tl.constexpr(12)
D, U, TRIAL, TARGET, MASS, GRADIENT, HELD, LEVEL, Q, S, COLUMN, TOLL = (tl.constexpr(i) for i in range(12))
"""Scratch of an image: the direction, the current potentials, those on trial, ``w``, ``x``, the gradient on trial and
that of the current potentials, rows' thresholds; conjugate gradients' direction, rows' means and columns' constants,
which are no longer needed when the repair works there.
What lies before the first pixel of the potentials is the halo behind the buffer before them."""
ROUNDS = tl.constexpr(3)
"""Newton steps on the rows' thresholds between two looks at whether all are found."""


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def three_sums(a, b, c):
    """Sums over a tile for the price of one wait."""
    if INTERPRETED:
        return tl.sum(a), tl.sum(b), tl.sum(c)
    else:
        return tl.reduce((a, b, c), None, _add_three)


@triton.jit
def column(w, u, come, lo, hi, LINEAR: tl.constexpr):
    """The column at potential ``u`` where the plan puts ``come``, its curvature, and the least of its objective.

    Without a clip at 0 the dual of a projection stays strongly concave there. A linear column sits at its kink
    ``u = g`` while it is neither full nor drained, and takes what the plan gives it.
    """
    free = w - u
    if LINEAR:
        full, drained = (free > 0.0) | ((free == 0.0) & (come > hi)), (free < 0.0) | ((free == 0.0) & (come < lo))
        z = tl.where(full, hi, tl.where(drained, lo, come))
        return z, free * 0.0, -free * tl.where(free > 0.0, hi, lo)
    else:
        least = tl.where(lo > 0.0, lo, float("-inf"))
        curved = tl.where((free < hi) & (free > least), free * 0.0 + 1.0, free * 0.0)
        z = tl.maximum(tl.minimum(free, hi), least)
        return z, curved, 0.5 * (w - z) * (w - z) + u * z


@triton.jit
def _earned(u_ptr, place, rows, mass, psi, offset_ptr, fee_ptr, MOVES: tl.constexpr):
    """What rows earn without a box by their best moves at the price ``psi``, and what the cheapest of these cost."""
    top, toll = mass * 0.0 + float("-inf"), mass * 0.0
    for k in tl.range(0, MOVES, loop_unroll_factor=5):
        fee = tl.load(fee_ptr + k)
        gain = tl.load(u_ptr + place + tl.load(offset_ptr + k), mask=rows, other=0.0) - psi * fee
        toll = tl.where(gain > top, fee, toll)
        top = tl.maximum(top, gain)
    return sum_two(tl.where(rows, mass * top, 0.0), mass * toll)


@triton.jit
def kink(
    u_ptr, centre_ptr, place, rows, mass, span, budget, max_iter, offset_ptr, fee_ptr,
    MOVES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The price at which the best plan without a box costs the budget; stores the shares of that plan.

    See :func:`wball.kernels.image_rows.kink`: two lines bracket the kink and are intersected until they meet there.
    """
    cheapest = span * 0.0 + float("inf")
    for k in tl.range(0, MOVES):
        fee = tl.load(fee_ptr + k)
        cheapest = tl.where(fee > 0.0, tl.minimum(cheapest, fee), cheapest)
    low, high = span * 0.0, 2.0 * span / tl.where(cheapest < float("inf"), cheapest, 1.0) + 1e-30
    value_low, cost_low = _earned(u_ptr, place, rows, mass, low, offset_ptr, fee_ptr, MOVES)
    high = tl.where(cost_low <= budget, low, high)
    value_high, cost_high = _earned(u_ptr, place, rows, mass, high, offset_ptr, fee_ptr, MOVES)
    value_high += high * budget
    step = max_iter * 0
    going = cost_low > budget
    while going & (step < max_iter):
        # Slopes budget - cost: negative on the left, not negative on the right.
        left, right = budget - cost_low, budget - cost_high
        meet = (value_low - value_high + right * high - left * low) / tl.maximum(right - left, 1e-300)
        crosses = (step % 3 < 2) & (meet > low) & (meet < high)  # every third step halves, against creeping brackets
        psi = tl.where(crosses, meet, 0.5 * (low + high))
        value, cost = _earned(u_ptr, place, rows, mass, psi, offset_ptr, fee_ptr, MOVES)
        value += psi * budget
        line = tl.maximum(value_low + left * (psi - low), value_high - right * (high - psi))
        flat = (step % 3 < 2) & (value - line <= 1e-15 * (tl.abs(value) + tl.abs(value_low)))
        dear = cost <= budget
        high, cost_high, value_high = (
            tl.where(dear, psi, high), tl.where(dear, cost, cost_high), tl.where(dear, value, value_high)
        )  # fmt: skip
        low, cost_low, value_low = (
            tl.where(dear, low, psi), tl.where(dear, cost_low, cost), tl.where(dear, value_low, value)
        )  # fmt: skip
        going = (flat | (high - low <= 4e-16 * high)) == False  # noqa: E712
        step += 1
    spread = cost_low - cost_high
    blend = tl.where(spread > 0.0, (budget - cost_high) / tl.maximum(spread, 1e-300), 0.0)
    blend = tl.minimum(tl.maximum(blend, 0.0), 1.0)
    top_low, top_high = mass * 0.0 + float("-inf"), mass * 0.0 + float("-inf")
    at_low, at_high = tl.zeros(place.shape, tl.int32), tl.zeros(place.shape, tl.int32)
    for k in tl.range(0, MOVES):
        end, fee = tl.load(u_ptr + place + tl.load(offset_ptr + k), mask=rows, other=0.0), tl.load(fee_ptr + k)
        at_low = tl.where(end - low * fee > top_low, k, at_low)
        top_low = tl.maximum(top_low, end - low * fee)
        at_high = tl.where(end - high * fee > top_high, k, at_high)
        top_high = tl.maximum(top_high, end - high * fee)
    for k in tl.range(0, MOVES):
        share = tl.where(at_high == k, 1.0 - blend, 0.0) + tl.where(at_low == k, blend, 0.0)
        tl.store(centre_ptr + place * SLOTS + k, share.to(tl.float32), mask=rows)
    tl.debug_barrier()
    return tl.where(value_low <= value_high, low, high)


@triton.jit
def _tile(
    list_ptr, first, count, one, offset_ptr, fee_ptr, MOVES: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr
):
    """A tile of a list: positions, which of them and of their moves are real, the moves' numbers, offsets and fees."""
    lanes = first + tl.arange(0, TILE // SLOTS)[:, None] * one
    k = tl.arange(0, SLOTS)[None, :]
    real = lanes < count
    place = tl.load(list_ptr + lanes, mask=real, other=0).to(tl.int64)
    step = tl.load(offset_ptr + k, mask=k < MOVES, other=0)
    fee = tl.load(fee_ptr + k, mask=k < MOVES, other=0.0)
    return place, real, real & (k < MOVES), k, step, fee


@triton.jit
def evaluate(
    s_ptr, mark_ptr, centre_ptr, row_ptr, column_ptr, n_rows, n_columns, one, psi, sigma, budget, lo, hi, beyond,
    offset_ptr, fee_ptr,
    STAGED: tl.constexpr, MOVES: tl.constexpr, SLOTS: tl.constexpr, LINEAR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """At the potentials on trial: thresholds, marks of moves in use, gradient; the dual, its derivative in ``psi``,
    how far the plan moved and what that costs, the size of the gradient, and its product with the direction.

    ``beyond`` is the value of the columns out of reach.
    """
    ROWS: tl.constexpr = TILE // SLOTS
    u_ptr = s_ptr + TRIAL * STAGED
    cost, worth = tl.zeros([ROWS, 1], tl.float64), tl.zeros([ROWS, 1], tl.float64)
    moved, pull = tl.zeros([ROWS, 1], tl.float64), tl.zeros([ROWS, 1], tl.float64)
    for first in tl.range(0, n_rows, ROWS):
        place, real, valid, k, step, fee = _tile(row_ptr, first, n_rows, one, offset_ptr, fee_ptr, MOVES, SLOTS, TILE)
        m = tl.load(s_ptr + MASS * STAGED + place, mask=real, other=0.0)
        t = tl.load(s_ptr + LEVEL * STAGED + place, mask=real, other=0.0)
        end = tl.load(u_ptr + place + step, mask=valid, other=float("-inf"))
        at = tl.load(centre_ptr + place * SLOTS + k, mask=valid, other=0.0).to(tl.float64)
        gain = end - psi * fee
        v = at + sigma * gain
        # Newton's method for sum max(0, v - t) = 1: from anywhere, its second point is left of the root and it is
        # monotone from there. The sets in use are nested, so that equal counts are equal sets.
        top = tl.max(v, 1)[:, None]
        count = tl.sum(valid.to(tl.int32), 1)[:, None] * 0 - 1
        open_rows = tl.max(real.to(tl.int32)) * 0 + 1
        tries = open_rows * 0
        while (open_rows > 0) & (tries < MOVES + 3):
            for _ in tl.static_range(ROUNDS):
                above = v > t
                used = tl.sum(above.to(tl.int32), 1)[:, None]
                total = tl.sum(tl.where(above, v, 0.0), 1)[:, None]
                settled = (used == count) | (real == False)  # noqa: E712
                inner = (total - 1.0) / tl.maximum(used, 1).to(tl.float64)
                t = tl.where(settled, t, tl.where(used > 0, inner, top - 1.0))
                count = tl.where(settled, count, used)
            open_rows = tl.max(tl.where(settled, 0, 1))
            tries += ROUNDS
        taken = valid & (v > t)
        part = tl.where(taken, v - t, 0.0)
        marked = tl.where(taken, tl.full([1, SLOTS], 1, mark_ptr.dtype.element_ty) << k, 0)
        tl.store(s_ptr + LEVEL * STAGED + place, t, mask=real)
        tl.store(mark_ptr + place, tl.sum(marked, 1)[:, None], mask=real)
        away = tl.sum((part - at) * (part - at), 1)[:, None]
        cost += m * tl.sum(fee * part, 1)[:, None]
        worth += m * tl.sum(tl.where(taken, gain * part, 0.0), 1)[:, None]
        moved += m * m * away
        pull += m * away
    tl.debug_barrier()
    least, size, along = (
        tl.zeros([ROWS, 1], tl.float64),
        tl.zeros([ROWS, 1], tl.float64),
        tl.zeros([ROWS, 1], tl.float64),
    )
    for first in tl.range(0, n_columns, ROWS):
        place, real, valid, k, step, fee = _tile(
            column_ptr, first, n_columns, one, offset_ptr, fee_ptr, MOVES, SLOTS, TILE
        )
        u = tl.load(u_ptr + place, mask=real, other=0.0)
        start = place - step
        taken = valid & (((tl.load(mark_ptr + start, mask=valid, other=0) >> k) & 1) != 0)
        part = tl.load(centre_ptr + start * SLOTS + k, mask=taken, other=0.0).to(tl.float64)
        part += sigma * (u - psi * fee)
        part -= tl.load(s_ptr + LEVEL * STAGED + start, mask=taken, other=0.0)
        part *= tl.load(s_ptr + MASS * STAGED + start, mask=taken, other=0.0)
        come = tl.sum(tl.where(taken, part, 0.0), 1)[:, None]
        w = tl.load(s_ptr + TARGET * STAGED + place, mask=real, other=0.0)
        z, _, value = column(w, u, come, lo, hi, LINEAR)
        gradient = tl.where(real, z - come, 0.0)
        tl.store(s_ptr + GRADIENT * STAGED + place, gradient, mask=real)
        least += tl.where(real, value, 0.0)
        size += gradient * gradient
        along += gradient * tl.load(s_ptr + D * STAGED + place, mask=real, other=0.0)
    spent, worth_rows, length = three_sums(cost, worth, moved)
    worth_columns, steep, ahead = three_sums(least, size, along)
    back = tl.sum(pull) / (2.0 * sigma)
    slope = spent - budget
    slope = tl.where((psi <= 0.0) & (slope <= 0.0), 0.0, slope)
    dual = beyond + worth_columns - psi * budget - worth_rows + back
    return dual, slope, tl.sqrt(length), back, tl.sqrt(steep), ahead


@triton.jit
def settle(
    s_ptr, centre_ptr, flow_ptr, row_ptr, n_rows, one, psi, sigma, renew, stay, offset_ptr, fee_ptr,
    H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr,
    STAGED: tl.constexpr, MOVES: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The plan of the current potentials, its rows summing to 1, in ``flow``; and where asked for it is the next centre
    (``renew``), or the plan that moves nothing is (``stay``). Returns what rows earn at most, and that without signs.
    """
    ROWS: tl.constexpr = TILE // SLOTS
    hard, size = tl.zeros([ROWS, 1], tl.float64), tl.zeros([ROWS, 1], tl.float64)
    for first in tl.range(0, n_rows, ROWS):
        place, real, valid, k, step, fee = _tile(row_ptr, first, n_rows, one, offset_ptr, fee_ptr, MOVES, SLOTS, TILE)
        m = tl.load(s_ptr + MASS * STAGED + place, mask=real, other=0.0)
        t = tl.load(s_ptr + LEVEL * STAGED + place, mask=real, other=0.0)
        end = tl.load(s_ptr + U * STAGED + place + step, mask=valid, other=float("-inf"))
        at = tl.load(centre_ptr + place * SLOTS + k, mask=valid, other=0.0).to(tl.float64)
        gain = end - psi * fee
        part = tl.where(valid, tl.maximum(at + sigma * gain - t, 0.0), 0.0)
        total = tl.sum(part, 1)[:, None]
        top = m * tl.max(gain, 1)[:, None]
        hard += tl.where(real, top, 0.0)
        size += tl.where(real, tl.abs(top), 0.0)
        sound = real & (total > 0.5) & (total < 2.0)
        share = part * tl.where(sound, 1.0 / tl.where(sound, total, 1.0), 0.0)
        inside = place % ((H + RR) * (W + RC))
        spot = place // ((H + RR) * (W + RC)) * (MOVES * H * W) + inside // (W + RC) * W + inside % (W + RC)
        tl.store(flow_ptr + spot + k * (H * W), m * share, mask=valid)
        if renew != 0:
            share = tl.where(sound & (stay == 0), share, tl.where(k == 0, 1.0, 0.0))
            tl.store(centre_ptr + place * SLOTS + k, share.to(tl.float32), mask=valid)
    earned, absolute, _ = three_sums(hard, size, size)
    return earned, absolute
