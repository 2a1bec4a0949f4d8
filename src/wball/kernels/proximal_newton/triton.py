r"""Exact plans on a GPU: the proximal Newton method of :mod:`wball.kernels.proximal_newton.cpu`, one program per image.

The whole solver runs inside one launch: proximal steps, Newton steps, conjugate gradients, repair and bounds, in
float64 and without a word to the host. Everything a program needs again lies in a scratch buffer of its own, staged as
in :mod:`wball.kernels.triton_stencil`; vectors of the conjugate gradients stay in registers. Which moves of a row are
in use is one bit each, so that the passes of the conjugate gradients, which are most of the work, load from the two or
three neighbours in use and not from all. Shares are not stored: the shares ``pi^k`` that a step starts from (in
float32: rounded, they are another centre and as good), potentials and the threshold of each row determine them.

The program is one loop around one evaluation of the dual. What an evaluation was for is the *phase*: the search for
the first price, the start of a proximal step, or a trial of the line search. Scalars are chosen by ``tl.where``: what
Triton 3.6 assigns in branches within branches of a loop may be lost (prices were, which doubled the steps).

Linear columns (the support function) sit at their kinks ``u = g`` until they are full; those that are not at their
kinks have no curvature of their own, which makes no difference to conjugate gradients. Their first plan is the best
without a box, as a step of no length around itself: where it overfills no pixel, that is all.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.books import Best, Problem
from wball.kernels.proximal_newton import settings
from wball.kernels.proximal_newton.triton_repair import repair
from wball.kernels.triton_stencil import (
    INTERPRETED,
    is_halo,
    kernel,
    staged_position,
    stencil,
    sum_two,
    too_large,
    warps,
)
from wball.kernels.triton_stencil import why_not as _why_not
from wball.moves import Moves, StencilMoves

MAX_VALUES = 16384
"""Larger images are too much work for one program."""
TILE = 1024
"""Rows or columns that an evaluation sees to at once."""
MAX_MOVES = 63
"""Moves of a row that one number of 64 bits can mark."""

(FIRST, FIRST_LINEAR, WARM, GROWTH, QUICK, SLOW, SHRINK, INNER, SETTLED, SPENT, SPENT_LINEAR, CG_TOL, CG_MAX, DAMPING,
 DAMPING_LINEAR, HALVINGS, LEAST, MOST, PATIENCE, PROMISING) = (tl.constexpr(value) for value in settings.ALL)  # fmt: skip
BUFFERS = tl.constexpr(12)
D, U, TRIAL, TARGET, MASS, GRADIENT, HELD, LEVEL, Q, S, COLUMN, TOLL = (tl.constexpr(i) for i in range(12))
"""Scratch of an image: the direction, the current potentials, those on trial, ``w``, ``x``, the gradient on trial and
that of the current potentials, rows' thresholds; conjugate gradients' direction, rows' means and columns' constants,
which are no longer needed when the repair works there.
What lies before the first pixel of the potentials is the halo behind the buffer before them."""
UNROLLED = tl.constexpr(5)
"""Moves whose loads are under way at once."""
PRICE, BISECT, START, SEARCH, END = (tl.constexpr(i) for i in range(5))
"""Phases."""


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    reason = _why_not(x[:0].float(), moves) or too_large(x, MAX_VALUES)
    if reason is None and len(moves) > MAX_MOVES:
        reason = f"windows of {len(moves)} moves do not fit in a number of 64 bits"
    return reason


def proximal_newton(problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`."""
    x, moves, budget, columns = problem.x, problem.moves, problem.budget, problem.columns
    table, batch, device = stencil(moves, x), x.shape[0], x.device
    n_iter = torch.zeros(batch, dtype=torch.int32, device=device)
    if batch == 0:
        return n_iter.long()
    size = table.guard + batch * BUFFERS.value * table.staged
    scratch = torch.empty(size, dtype=torch.float64, device=device)[table.guard :]
    bits = torch.int32 if len(moves) < 32 else torch.int64
    marks = torch.empty((batch, 2, table.staged + table.guard), dtype=bits, device=device)
    lists = torch.empty((batch, 2, len(moves), table.staged), dtype=torch.int16, device=device)
    centre = torch.empty((batch, len(moves), table.staged), dtype=torch.float32, device=device)
    flow = torch.empty((batch, len(moves), table.staged), dtype=torch.float64, device=device)
    # Columns are never negative anyway, and what a linear one is worth at its bound must be a number.
    box = (max(columns.lo, 0.0) if columns.linear else columns.lo, columns.hi)
    lo, hi = (torch.full_like(budget, bound) for bound in box)
    tolerance = problem.tolerance
    tol = torch.full_like(budget, tolerance.tol)
    terms = torch.stack([budget, lo, hi, tol, tolerance.floor, tolerance.offset]).to(torch.float64)
    channels, height, width = table.shape
    block = table.block
    _solve_kernel[(batch,)](
        x.contiguous(), columns.target.contiguous(), start.contiguous(), terms,
        best.flow, best.u, best.primal, best.dual, best.psi, n_iter,
        scratch, marks, lists, centre, flow, table.offset, *_tables(moves, device), 1, batch, max_iter, int(warm),
        C=channels, H=height, W=width, RR=table.reach[0], RC=table.reach[1], MOVES=len(moves),
        LOWER=columns.lo > 0, LINEAR=columns.linear, BLOCK=block, TILE=min(block, TILE),
        num_warps=warps(block), num_stages=1,
    )  # fmt: skip
    best.hard.copy_(best.dual)
    return n_iter.long()


@lru_cache(maxsize=64)
def _tables(moves: StencilMoves, device: torch.device) -> tuple[Tensor, Tensor]:
    """What each move costs, and the move that goes back (0: none)."""
    back = torch.tensor([k or 0 for k in moves.reverse], dtype=torch.int32)
    return torch.tensor(moves.costs, dtype=torch.float64).to(device), back.to(device)


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _three_sums(a, b, c):
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    else:
        return tl.reduce((a, b, c), 0, _add_three)


@triton.jit
def _range(values, real):
    """How far the values spread, and some positive number where they do not."""
    high = tl.max(tl.where(real, values, float("-inf")), 0)
    low = tl.min(tl.where(real, values, float("inf")), 0)
    span = tl.maximum(high - low, 1e-3 * tl.maximum(tl.abs(low), tl.abs(high)))
    return tl.where(span > 1e-200, span, span * 0.0 + 1.0)


@triton.jit
def _column(w, u, come, lo, hi, LINEAR: tl.constexpr):
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
def _incoming(mark_ptr, place, real, offset_ptr, MOVES: tl.constexpr):
    """Which moves into each pixel are marked at the pixel where they start."""
    bits = tl.load(mark_ptr + place, mask=real, other=0) & 1
    for k in tl.range(1, MOVES):
        there = tl.load(mark_ptr + place - tl.load(offset_ptr + k), mask=real, other=0)
        bit = (bits * 0 + 1) << k
        bits = bits | (there & bit)
    return bits


@triton.jit
def _earned(u_ptr, place, rows, mass, psi, offset_ptr, fee_ptr, MOVES: tl.constexpr):
    """What rows earn without a box by their best moves at the price ``psi``, and what the cheapest of these cost."""
    top, toll = mass * 0.0 + float("-inf"), mass * 0.0
    for k in tl.range(0, MOVES, loop_unroll_factor=UNROLLED):
        fee = tl.load(fee_ptr + k)
        gain = tl.load(u_ptr + place + tl.load(offset_ptr + k), mask=rows, other=0.0) - psi * fee
        toll = tl.where(gain > top, fee, toll)
        top = tl.maximum(top, gain)
    return sum_two(tl.where(rows, mass * top, 0.0), mass * toll)


@triton.jit
def _kink(
    u_ptr, centre_ptr, place, rows, mass, span, budget, max_iter, offset_ptr, fee_ptr,
    STAGED: tl.constexpr, MOVES: tl.constexpr,
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
        tl.store(centre_ptr + k * STAGED + place, share.to(tl.float32), mask=rows)
    tl.debug_barrier()
    return tl.where(value_low <= value_high, low, high)


@triton.jit
def _evaluate(
    s_ptr, mark_ptr, centre_ptr, one, psi, sigma, budget, lo, hi, offset_ptr, fee_ptr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr,
    MOVES: tl.constexpr, LINEAR: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """At the potentials on trial: thresholds, marks of moves in use, gradient; the dual, its derivative in ``psi``,
    how far the plan moved and what that costs, the size of the gradient, and its product with the direction.

    Rows are independent of each other, and so are columns: tiles of them take turns, whose numbers fit in registers.
    """
    N: tl.constexpr = C * H * W
    STAGED: tl.constexpr = C * (H + RR) * (W + RC)
    u_ptr = s_ptr + TRIAL * STAGED
    lanes = tl.arange(0, TILE) * one
    cost, worth = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    moved, pull = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for first in tl.range(0, N, TILE):
        index = first + lanes
        real = index < N
        place = staged_position(tl.where(real, index, 0), H, W, RR, RC)
        m = tl.load(s_ptr + MASS * STAGED + place, mask=real, other=0.0)
        rows = m > 0.0
        t = tl.load(s_ptr + LEVEL * STAGED + place, mask=real, other=0.0)
        # Newton's method for sum max(0, v - t) = 1: from anywhere, its second point is left of the root and it is
        # monotone from there. The marked sets are nested, so that equal counts are equal sets.
        count = t * 0.0 - 1.0
        open_rows = tl.max(rows.to(tl.int32), 0)
        tries = open_rows * 0
        while (open_rows > 0) & (tries < MOVES + 3):
            total, used, top = t * 0.0, t * 0.0, t * 0.0 + float("-inf")
            for k in tl.range(0, MOVES, loop_unroll_factor=UNROLLED):
                end = tl.load(u_ptr + place + tl.load(offset_ptr + k), mask=rows, other=0.0)
                v = tl.load(centre_ptr + k * STAGED + place, mask=rows, other=0.0).to(tl.float64)
                v += sigma * (end - psi * tl.load(fee_ptr + k))
                above = v > t
                total += tl.where(above, v, 0.0)
                used += tl.where(above, 1.0, 0.0)
                top = tl.maximum(top, v)
            settled = (used == count) | (rows == False)  # noqa: E712
            t = tl.where(settled, t, tl.where(used > 0.0, (total - 1.0) / tl.maximum(used, 1.0), top - 1.0))
            count = tl.where(settled, count, used)
            open_rows = tl.max(tl.where(settled, 0, 1), 0)
            tries += 1
        value, away, paid = t * 0.0, t * 0.0, t * 0.0
        marks = tl.load(mark_ptr + place, mask=real, other=0) * 0
        for k in tl.range(0, MOVES, loop_unroll_factor=UNROLLED):
            end = tl.load(u_ptr + place + tl.load(offset_ptr + k), mask=rows, other=0.0)
            at = tl.load(centre_ptr + k * STAGED + place, mask=rows, other=0.0).to(tl.float64)
            fee = tl.load(fee_ptr + k)
            gain = end - psi * fee
            part = at + sigma * gain - t
            taken = rows & (part > 0.0)
            part = tl.where(taken, part, 0.0)
            marks = marks | tl.where(taken, (marks * 0 + 1) << k, marks * 0)
            value += tl.where(taken, gain * part, 0.0)
            paid += fee * part
            away += (part - at) * (part - at)
        tl.store(s_ptr + LEVEL * STAGED + place, t, mask=real)
        tl.store(mark_ptr + place, marks, mask=real)
        cost += m * paid
        worth += m * value
        moved += m * m * away
        pull += m * away
    tl.debug_barrier()
    least, size, along = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for first in tl.range(0, N, TILE):
        index = first + lanes
        real = index < N
        place = staged_position(tl.where(real, index, 0), H, W, RR, RC)
        u = tl.load(u_ptr + place, mask=real, other=0.0)
        come = u * 0.0
        for k in tl.range(0, MOVES, loop_unroll_factor=UNROLLED):
            start = place - tl.load(offset_ptr + k)
            taken = real & (((tl.load(mark_ptr + start, mask=real, other=0) >> k) & 1) != 0)
            part = tl.load(centre_ptr + k * STAGED + start, mask=taken, other=0.0).to(tl.float64)
            part += sigma * (u - psi * tl.load(fee_ptr + k))
            part -= tl.load(s_ptr + LEVEL * STAGED + start, mask=taken, other=0.0)
            come += tl.where(taken, part * tl.load(s_ptr + MASS * STAGED + start, mask=taken, other=0.0), 0.0)
        w = tl.load(s_ptr + TARGET * STAGED + place, mask=real, other=0.0)
        z, _, value = _column(w, u, come, lo, hi, LINEAR)
        gradient = tl.where(real, z - come, 0.0)
        tl.store(s_ptr + GRADIENT * STAGED + place, gradient, mask=real)
        least += tl.where(real, value, 0.0)
        size += gradient * gradient
        along += gradient * tl.load(s_ptr + D * STAGED + place, mask=real, other=0.0)
    spent, worth_rows, length = _three_sums(cost, worth, moved)
    worth_columns, steep, ahead = _three_sums(least, size, along)
    back = tl.sum(pull, 0) / (2.0 * sigma)
    slope = spent - budget
    slope = tl.where((psi <= 0.0) & (slope <= 0.0), 0.0, slope)
    return worth_columns - psi * budget - worth_rows + back, slope, tl.sqrt(length), back, tl.sqrt(steep), ahead


@triton.jit
def _stepped(s_ptr, place, real, length, rise, STAGED: tl.constexpr, LINEAR: tl.constexpr):
    """The potentials a step away, linear ones kept on their side of the kink; and what the columns' slopes promise."""
    u = tl.load(s_ptr + U * STAGED + place, mask=real, other=0.0)
    new = u + length * tl.load(s_ptr + D * STAGED + place, mask=real, other=0.0)
    if LINEAR:
        free = tl.load(s_ptr + TARGET * STAGED + place, mask=real, other=0.0) - u
        held = tl.load(s_ptr + HELD * STAGED + place, mask=real, other=0.0)
        full, drained = (free > 0.0) | ((free == 0.0) & (held < 0.0)), (free < 0.0) | ((free == 0.0) & (held > 0.0))
        kink = u + free
        new = tl.where(full, tl.minimum(new, kink), tl.where(drained, tl.maximum(new, kink), kink))
        return new, tl.sum(held * (new - u), 0)
    else:
        return new, length * rise


@triton.jit
def _direction(
    s_ptr, mark_ptr, list_ptr, place, real, rows, reached, columns, psi, sigma, slope, size, lo, hi,
    offset_ptr, fee_ptr, STAGED: tl.constexpr, MARKED: tl.constexpr, MOVES: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """Newton's step by conjugate gradients, stored; returns that of ``psi`` and how fast the dual should rise."""
    marks = tl.load(mark_ptr + place, mask=real, other=0)
    ways = tl.zeros(place.shape, tl.int32)
    total = tl.zeros(place.shape, tl.float64)
    square = total
    for k in tl.range(0, MOVES):
        fee = tl.load(fee_ptr + k)
        used = ((marks >> k) & 1) != 0
        tl.store(list_ptr + ways * STAGED + place, tl.load(offset_ptr + k), mask=used)
        ways += tl.where(used, 1, 0)
        total += tl.where(used, fee, 0.0)
        square += tl.where(used, fee * fee, 0.0)
    several = rows & (ways > 1)  # rows with one move have no choice
    ways = tl.where(several, ways, 0)
    inverse = 1.0 / tl.maximum(ways, 1).to(tl.float64)
    stiff = tl.where(several, sigma * tl.load(s_ptr + MASS * STAGED + place, mask=real, other=0.0), 0.0)
    tl.store(mark_ptr + MARKED + place, tl.where(several, marks, 0), mask=real)
    tl.store(s_ptr + Q * STAGED + place, stiff, mask=real)
    tl.store(s_ptr + S * STAGED + place, stiff * (1.0 - inverse), mask=real)
    tl.debug_barrier()
    back_ptr = list_ptr + MOVES * STAGED
    senders = ways * 0
    through, toll, diagonal = stiff * 0.0, stiff * 0.0, stiff * 0.0
    for k in tl.range(0, MOVES):
        step = tl.load(offset_ptr + k)
        start = place - step
        there = tl.load(mark_ptr + MARKED + start, mask=real, other=0)
        used = real & (((there >> k) & 1) != 0)
        tl.store(back_ptr + senders * STAGED + place, step, mask=used)
        senders += tl.where(used, 1, 0)
        part = tl.load(s_ptr + Q * STAGED + start, mask=used, other=0.0)
        through += part
        toll += part * tl.load(fee_ptr + k)
        diagonal += tl.load(s_ptr + S * STAGED + start, mask=used, other=0.0)
    most_ways, most_senders = tl.max(ways, 0), tl.max(senders, 0)
    paid_square, paid_mean = sum_two(stiff * square, stiff * total * total * inverse)
    curvature = paid_square - paid_mean
    u = tl.load(s_ptr + U * STAGED + place, mask=real, other=0.0)
    w = tl.load(s_ptr + TARGET * STAGED + place, mask=real, other=0.0)
    gradient = tl.load(s_ptr + GRADIENT * STAGED + place, mask=real, other=0.0)
    _, curved, _ = _column(w, u, u * 0.0, lo, hi, LINEAR)
    moving = (u != w) | (gradient != 0.0)  # of linear columns: the others sit at their kinks
    diagonal += curved
    largest = tl.max(tl.where(real, diagonal, 0.0), 0)
    damping = DAMPING_LINEAR if LINEAR else DAMPING
    ridge = tl.maximum(1e-12 * largest, damping * size / (tl.sqrt(columns) * _range(u, reached)))
    ridge = tl.maximum(ridge, 1e-300)
    own = curved + ridge + through
    # Columns' constants are read again in every step: registers are for what changes.
    tl.store(s_ptr + COLUMN * STAGED + place, own, mask=real)
    tl.store(s_ptr + TOLL * STAGED + place, toll, mask=real)
    diagonal = 1.0 / (diagonal + ridge)
    free = (psi > 0.0) | (slope > 0.0)
    diagonal_psi = tl.where(free & (curvature > 0.0), curvature, 1.0)

    r = gradient
    r_psi = tl.where(free, slope, 0.0)
    q = r * diagonal
    q_psi = r_psi / diagonal_psi
    d = q * 0.0
    d_psi = q_psi * 0.0
    left = tl.sum(r * q, 0) + r_psi * q_psi
    goal = CG_TOL * CG_TOL * left
    steps = most_ways * 0
    going = left > 0.0
    tl.debug_barrier()
    while going & (steps < CG_MAX):
        tl.store(s_ptr + Q * STAGED + place, q, mask=real)
        tl.debug_barrier()
        there = q * 0.0
        for i in tl.range(0, most_ways):
            used = i < ways
            step = tl.load(list_ptr + i * STAGED + place, mask=used, other=0)
            there += tl.load(s_ptr + Q * STAGED + place + step, mask=used, other=0.0)
        mean = (there - q_psi * total) * inverse
        tl.store(s_ptr + S * STAGED + place, stiff * mean, mask=real)
        tl.debug_barrier()
        toll = tl.load(s_ptr + TOLL * STAGED + place, mask=real, other=0.0)
        h = tl.load(s_ptr + COLUMN * STAGED + place, mask=real, other=0.0) * q - q_psi * toll
        for i in tl.range(0, most_senders):
            used = i < senders
            step = tl.load(back_ptr + i * STAGED + place, mask=used, other=0)
            h -= tl.load(s_ptr + S * STAGED + place - step, mask=used, other=0.0)
        if LINEAR:
            h = tl.where(moving, h, 0.0)
        curve, paid = sum_two(q * h, q * toll - stiff * mean * total)
        h_psi = tl.where(free, 1e-12 * diagonal_psi * q_psi - paid + q_psi * paid_square, 0.0)
        curve += q_psi * h_psi
        going = (curve > 0.0) & (left > goal)
        length = tl.where(going, left / tl.where(curve > 0.0, curve, 1.0), 0.0)
        d += length * q
        d_psi += length * q_psi
        r -= length * h
        r_psi -= length * h_psi
        new = tl.sum(r * r * diagonal, 0) + r_psi * r_psi / diagonal_psi
        going = going & (new > goal)
        turn = new / tl.maximum(left, 1e-300)
        q = r * diagonal + turn * q
        q_psi = r_psi / diagonal_psi + turn * q_psi
        left = new
        steps += 1
    tl.store(s_ptr + D * STAGED + place, d, mask=real)
    return d_psi, tl.sum(gradient * d, 0)


@kernel("one", "batch", "max_iter", "warm")
def _solve_kernel(
    x_ptr, target_ptr, start_ptr, terms_ptr,
    best_flow_ptr, best_u_ptr, primal_ptr, dual_ptr, psi_ptr, n_iter_ptr,
    scratch_ptr, marks_ptr, lists_ptr, centre_ptr, flow_ptr, offset_ptr, fee_ptr, reverse_ptr,
    one, batch, max_iter, warm,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr,
    MOVES: tl.constexpr, LOWER: tl.constexpr, LINEAR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = C * H * W
    STAGED: tl.constexpr = C * (H + RR) * (W + RC)
    GUARD: tl.constexpr = RR * (W + RC) + RC
    MARKED: tl.constexpr = STAGED + GUARD
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK) * one  # neighbouring threads hold neighbouring pixels
    real = index < N
    place = staged_position(tl.where(real, index, 0), H, W, RR, RC)
    s_ptr = scratch_ptr + n * (BUFFERS * STAGED)
    mark_ptr = marks_ptr + n * (2 * MARKED) + GUARD
    list_ptr = lists_ptr + n * (2 * MOVES * STAGED)
    centre_ptr += n * (MOVES * STAGED)
    flow_ptr += n * (MOVES * STAGED)
    budget, lo, hi = tl.load(terms_ptr + n), tl.load(terms_ptr + batch + n), tl.load(terms_ptr + 2 * batch + n)
    tol, floor = tl.load(terms_ptr + 3 * batch + n), tl.load(terms_ptr + 4 * batch + n)
    offset = tl.load(terms_ptr + 5 * batch + n)

    # Outside the image nothing arrives and nothing starts.
    for first in tl.range(0, STAGED + GUARD, BLOCK):
        spot = first + index - GUARD
        halo = is_halo(spot, H, W, RR, RC) & (spot < STAGED)
        tl.store(s_ptr + U * STAGED + spot, float("-inf"), mask=halo)
        tl.store(s_ptr + TRIAL * STAGED + spot, float("-inf"), mask=halo)
        tl.store(mark_ptr + spot, 0, mask=halo)
        tl.store(mark_ptr + MARKED + spot, 0, mask=halo)
    x = tl.load(x_ptr + n * N + index, mask=real, other=0.0).to(tl.float64)
    w = tl.load(target_ptr + n * N + index, mask=real, other=0.0).to(tl.float64)
    rows = real & (x > 0.0)
    tl.store(s_ptr + TARGET * STAGED + place, w, mask=real)
    tl.store(s_ptr + MASS * STAGED + place, x, mask=real)
    tl.store(s_ptr + LEVEL * STAGED + place, x * 0.0, mask=real)
    tl.store(s_ptr + D * STAGED + place, x * 0.0, mask=real)
    tl.store(mark_ptr + place, rows.to(tl.int32), mask=real)
    for k in tl.range(0, MOVES):
        tl.store(centre_ptr + k * STAGED + place, tl.where(k == 0, 1.0, 0.0) + tl.zeros([BLOCK], tl.float32), mask=real)
    tl.debug_barrier()
    reached = x > 0.0
    for k in tl.range(1, MOVES):
        there = tl.load(mark_ptr + place - tl.load(offset_ptr + k), mask=real, other=0)
        reached = reached | (there != 0)
    reached = real & reached
    columns = tl.sum(tl.where(reached, x * 0.0 + 1.0, 0.0), 0)
    # Where nothing can arrive, z(u) = 0 at u = w, and nothing ever changes that.
    u = tl.where(reached, tl.load(start_ptr + n * N + index, mask=real, other=0.0).to(tl.float64), w)
    tl.store(s_ptr + U * STAGED + place, u, mask=real)
    tl.store(s_ptr + TRIAL * STAGED + place, u, mask=real)
    tl.debug_barrier()

    span = _range(u, reached)
    zero = budget * 0.0
    none = tl.max(rows.to(tl.int32), 0) * 0
    sigma = (zero + (FIRST_LINEAR if LINEAR else FIRST)) * tl.where(warm != 0, WARM, 1.0) / span
    least = LEAST * sigma
    best_primal, best_dual, best_psi = tl.load(primal_ptr + n), tl.load(dual_ptr + n), tl.load(psi_ptr + n)
    if LINEAR:
        psi = _kink(
            s_ptr + U * STAGED, centre_ptr, place, rows, x, span, budget, max_iter, offset_ptr, fee_ptr, STAGED, MOVES
        )
    else:
        psi = tl.where(warm != 0, best_psi, zero)
    trial_psi, low, dual, slope, moved, size = psi, zero, zero, zero, zero, zero
    d_psi, rise, length, promised, narrow = zero, zero, zero, zero, zero + float("inf")
    # A linear dual is a difference of sums, which round in proportion to their own size.
    noise = tl.sum(x * tl.abs(w), 0) if LINEAR else zero
    steps, taken, halved, idle, tried = none, none, none, none, none
    phase = none + START if LINEAR else tl.where(warm != 0, none + START, none + PRICE)
    while phase != END:
        new_dual, new_slope, new_moved, pull, new_size, along = _evaluate(
            s_ptr, mark_ptr, centre_ptr, one, trial_psi, sigma, budget, lo, hi, offset_ptr, fee_ptr,
            C, H, W, RR, RC, MOVES, LINEAR, TILE,
        )  # fmt: skip
        if phase < START:
            # About the price at which the first step's plan costs the budget, from above.
            dear, pricing = new_slope <= 0.0, phase == PRICE
            climbs = pricing & (dear == False) & (tried < 80)  # noqa: E712
            psi = tl.where((climbs == False) & (pricing | dear), trial_psi, psi)  # noqa: E712
            low = tl.where(climbs | ((pricing | dear) == False), trial_psi, low)  # noqa: E712
            higher = tl.where(tried > 0, 4.0 * trial_psi, 1e-3 * span)
            tried = tl.where(pricing & (climbs == False), 1, tried + 1)  # noqa: E712
            found = (psi - low <= 0.02 * psi) | (tried > 30)
            trial_psi = tl.where(climbs, higher, tl.where(found, psi, 0.5 * (low + psi)))
            phase = tl.where(climbs, none + PRICE, tl.where(found, none + START, none + BISECT))
        else:
            promised += slope * (trial_psi - psi)
            ascends = new_dual >= dual + 1e-4 * promised - 1e-14 * (tl.abs(dual) + noise)
            if (phase == SEARCH) & (ascends == False) & (halved < HALVINGS):  # noqa: E712
                # Where the slope along the direction vanishes, were it linear between here and there.
                bend = along + new_slope * d_psi
                fall = tl.where(bend < 0.0, (promised / length) / (promised / length - bend), 0.5)
                length = length * tl.minimum(tl.maximum(fall, 0.1), 0.5)
                halved += 1
                trial_psi = tl.maximum(psi + length * d_psi, 0.0)
                near, promised = _stepped(s_ptr, place, real, length, rise, STAGED, LINEAR)
                tl.store(s_ptr + TRIAL * STAGED + place, near, mask=real)
            else:
                at = tl.load(s_ptr + TRIAL * STAGED + place, mask=real, other=0.0)
                tl.store(s_ptr + U * STAGED + place, at, mask=real)
                if LINEAR:
                    held = tl.load(s_ptr + GRADIENT * STAGED + place, mask=real, other=0.0)
                    tl.store(s_ptr + HELD * STAGED + place, held, mask=real)
                psi, dual, slope, moved, size = trial_psi, new_dual, new_slope, new_moved, new_size
                stuck = (phase == SEARCH) & (ascends == False)  # noqa: E712
                solved = (size <= SETTLED * moved) & (tl.abs(slope) <= SPENT * budget)
                opens = LINEAR & (tried == 0)  # with the plan that knows no box
                if LINEAR:
                    solved = solved & (tl.abs(slope) <= SPENT_LINEAR * moved + 1e-13 * budget) | opens
                if (solved == False) & (stuck == False) & (taken < INNER) & (steps < max_iter):  # noqa: E712
                    d_psi, rise = _direction(
                        s_ptr, mark_ptr, list_ptr, place, real, rows, reached, columns, psi, sigma, slope, size, lo, hi,
                        offset_ptr, fee_ptr, STAGED, MARKED, MOVES, LINEAR,
                    )  # fmt: skip
                    steps += 1
                    taken += 1
                    # Stop where psi reaches 0: beyond it the direction was computed for other free variables.
                    stops = (d_psi < 0.0) & (psi > 0.0)
                    length = tl.where(stops, tl.minimum(psi / tl.where(stops, -d_psi, 1.0), 1.0), 1.0)
                    halved = none
                    trial_psi = tl.maximum(psi + length * d_psi, 0.0)
                    tl.debug_barrier()
                    near, promised = _stepped(s_ptr, place, real, length, rise, STAGED, LINEAR)
                    tl.store(s_ptr + TRIAL * STAGED + place, near, mask=real)
                    phase = none + SEARCH
                else:
                    level = tl.load(s_ptr + LEVEL * STAGED + place, mask=real, other=0.0)
                    mass = tl.load(s_ptr + MASS * STAGED + place, mask=real, other=0.0)
                    wish = tl.load(s_ptr + TARGET * STAGED + place, mask=real, other=0.0)
                    total, top = mass * 0.0, mass * 0.0 + float("-inf")
                    tl.debug_barrier()
                    for k in tl.range(0, MOVES):
                        end = tl.load(s_ptr + U * STAGED + place + tl.load(offset_ptr + k), mask=rows, other=0.0)
                        gain = end - psi * tl.load(fee_ptr + k)
                        top = tl.maximum(top, gain)
                        part = tl.load(centre_ptr + k * STAGED + place, mask=rows, other=0.0).to(tl.float64)
                        part = tl.where(rows, tl.maximum(part + sigma * gain - level, 0.0), 0.0)
                        total += part
                        tl.store(flow_ptr + k * STAGED + place, part, mask=real)
                    top = tl.where(rows, mass * top, 0.0)
                    if LINEAR:
                        value = (at - wish) * tl.where(at < wish, hi, lo)
                        arriving, hard = sum_two(tl.where(real, value, 0.0), top)
                        priced = arriving - psi * budget
                        # Sums of float64: wider than they can be off.
                        bound = priced - hard - 1e-13 * (tl.sum(tl.abs(top), 0) + tl.abs(priced))
                    else:
                        bounded = tl.minimum(tl.maximum(wish - at, lo), hi)
                        off = 0.5 * (wish - bounded) * (wish - bounded) + at * bounded - top
                        bound = tl.sum(tl.where(real, off, 0.0), 0) - psi * budget
                    if bound > best_dual:
                        tl.store(best_u_ptr + n * N + index, at, mask=real)
                    best_psi = tl.where(bound > best_dual, psi, best_psi)
                    best_dual = tl.maximum(best_dual, bound)
                    # Rows that sum to 1; the next centre.
                    sound = rows & (total > 0.5) & (total < 2.0)
                    whole = tl.where(sound, 1.0 / tl.where(sound, total, 1.0), 0.0)
                    for k in tl.range(0, MOVES):
                        share = whole * tl.load(flow_ptr + k * STAGED + place, mask=real, other=0.0)
                        tl.store(flow_ptr + k * STAGED + place, mass * share, mask=real)
                        if solved:
                            share = tl.where(sound & (opens == False), share, tl.where(k == 0, 1.0, 0.0))  # noqa: E712
                            tl.store(centre_ptr + k * STAGED + place, share.to(tl.float32), mask=rows)
                    quick, slow = tl.minimum(sigma * GROWTH, MOST / _range(at, reached)), sigma / GROWTH
                    next_sigma = tl.where(taken <= QUICK, quick, tl.where(taken > SLOW, slow, sigma))
                    sigma = tl.where(opens, sigma, tl.where(solved, next_sigma, sigma / SHRINK))
                    rest = dual - pull - bound  # the gap of the plan as it is
                    idle = tl.where((rest < 0.999 * narrow) | opens, 0, idle + 1)
                    narrow = tl.where(opens, narrow, tl.minimum(rest, narrow))
                    last = (idle > PATIENCE) | (sigma < least) | (steps >= max_iter)
                    if LINEAR:  # nothing but rounding is left
                        last = last | (solved & (opens == False) & (rest <= 3e-13 * (tl.abs(dual) + noise)))  # noqa: E712
                    if last | opens | (rest <= PROMISING * (tol * tl.abs(best_primal + offset) + floor)):
                        marks = tl.load(mark_ptr + place, mask=real, other=0)
                        incoming = _incoming(mark_ptr, place, real, offset_ptr, MOVES)
                        scale, z = repair(
                            s_ptr + Q * STAGED, flow_ptr, place, real, marks, incoming, mass, budget, lo, hi,
                            offset_ptr, fee_ptr, reverse_ptr, STAGED, MOVES, LOWER,
                        )  # fmt: skip
                        primal = tl.sum(tl.where(real, -wish * z if LINEAR else 0.5 * (wish - z) * (wish - z), 0.0), 0)
                        if primal < best_primal:
                            pixel = index % (H * W)
                            out = best_flow_ptr + n * (N * MOVES) + (index - pixel) * MOVES + pixel
                            stays = mass
                            for k in tl.range(1, MOVES):
                                used = ((marks >> k) & 1) != 0
                                part = scale * tl.load(flow_ptr + k * STAGED + place, mask=used, other=0.0)
                                stays -= part
                                tl.store(out + k * (H * W), part, mask=real)
                            tl.store(out, tl.maximum(stays, 0.0), mask=real)
                        best_primal = tl.minimum(best_primal, primal)
                    taken = none
                    done = last | (best_primal - best_dual <= tol * tl.abs(best_primal + offset) + floor)
                    # The first proximal step: its price is below that of any plan.
                    phase = tl.where(done, none + END, tl.where(opens, none + BISECT, none + START))
                    trial_psi = tl.where(opens, 0.5 * psi, trial_psi)
                    tried = tl.where(opens, 1, tried)
        tl.debug_barrier()
    tl.store(primal_ptr + n, best_primal)
    tl.store(dual_ptr + n, best_dual)
    tl.store(psi_ptr + n, best_psi)
    tl.store(n_iter_ptr + n, steps)
