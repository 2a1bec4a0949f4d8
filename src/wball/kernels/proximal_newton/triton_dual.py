r"""The dual of a proximal step inside a Triton program: the plan and the residual at given
potentials.

Rows with mass and columns within their reach are listed: of a digit's pixels, one in six has mass.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wball.kernels import proximal_newton as settings
from wball.kernels.triton_stencil import INTERPRETED, Layout, read

BUFFERS = tl.constexpr(17)
D, U, TRIAL, TARGET, MASS, GRADIENT, HELD, LEVEL, Q, S, OWN, TOLL, DIAGONAL, SHARE, FEES, R, H = (
    tl.constexpr(i) for i in range(17)
)
"""Scratch of an image: the direction, the current potentials, those on trial, ``w``, ``x``, the
gradient on trial and that of the current potentials, rows' thresholds; and what conjugate gradients
need, packed: directions, rows' means, constants of columns and rows, residuals and products. The
repair works there as well. What lies before the first pixel of the potentials is the halo behind
the buffer before them."""
SPARSE = tl.constexpr(settings.SPARSE)
GROUP = tl.constexpr(5)
"""Moves whose loads are under way at once. The assembler puts each load right before the arithmetic
that needs it: a pass over the moves then takes the latency of all its loads one after the other,
which is nearly all of its time. :func:`missing` makes the arithmetic of a group need all of its
loads."""


class SolveCase(NamedTuple):
    """What the program is compiled for: images, the number of moves, whether there is a lower bound
    above 0, whether columns are linear, whether there is no entropy, how many rows or columns are
    taken at once, and the settings."""

    layout: Layout
    moves: int
    lower: bool
    linear: bool
    exact: bool
    tile: int
    method: settings.Method


class SolveTable(NamedTuple):
    """Moves in the memory of the device: staged offset, cost, the move that goes back (0: none),
    and offset in an image."""

    offset: Tensor
    fee: Tensor
    reverse: Tensor
    flat: Tensor


class SolveLimits(NamedTuple):
    """Budget and box of an image."""

    budget: tl.tensor
    lo: tl.tensor
    hi: tl.tensor


class Work(NamedTuple):
    """Scratch of an image: staged buffers, marks of the moves in use, where these lead, and the
    shares that a step starts from (with entropy, those of the moves in use); places of rows with
    mass and of columns within their reach (with room for two lists more), how many there are, and
    the value of the other columns."""

    s: tl.tensor
    marks: tl.tensor
    lists: tl.tensor
    centre: tl.tensor
    rows: tl.tensor
    columns: tl.tensor
    n_rows: tl.tensor
    n_columns: tl.tensor
    beyond: tl.tensor


class Spots(NamedTuple):
    """Places in the buffers, and which of them exist."""

    s: tl.tensor
    place: tl.tensor
    real: tl.tensor


@triton.jit
def in_use(marks, move):
    """Where a move is marked."""
    return ((marks >> move) & 1) != 0


@triton.jit
def get(spots, buffer: tl.constexpr, CASE: tl.constexpr):
    """What a buffer holds in some places."""
    return read(spots.s + buffer * CASE.layout.staged + spots.place, spots.real)


@triton.jit
def put(spots, buffer: tl.constexpr, values, CASE: tl.constexpr):
    """Store values in some places of a buffer."""
    tl.store(spots.s + buffer * CASE.layout.staged + spots.place, values, mask=spots.real)


@triton.jit
def listed_spots(work, list_ptr, index, count):
    """The places with these numbers in a list."""
    real = index < count
    return Spots(work.s, read(list_ptr + index, real).to(tl.int64), real)


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def three_sums(a, b, c):
    """Three sums for the price of one wait."""
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)
    else:
        return tl.reduce((a, b, c), 0, _add_three)


@triton.jit
def share(score, level, EXACT: tl.constexpr):
    """The shares of moves by their scores and their rows' thresholds: with entropy, the logarithms
    of sums."""
    if EXACT:
        return tl.maximum(score - level, 0.0)
    else:
        return tl.where(score > level - SPARSE, tl.exp(score - level), 0.0)


@triton.jit
def column(w, u, come, limits, LINEAR: tl.constexpr):
    """The column at potential ``u`` where the plan puts ``come``, its curvature, and the least of
    its objective.

    Without a clip at 0 the dual of a projection stays strongly concave there. A linear column sits
    at its kink ``u = g`` while it is neither full nor drained, and takes what the plan gives it.
    """
    lo, hi, free = limits.lo, limits.hi, w - u
    if LINEAR:
        full, drained = (
            (free > 0.0) | ((free == 0.0) & (come > hi)),
            (free < 0.0) | ((free == 0.0) & (come < lo)),
        )
        z = tl.where(full, hi, tl.where(drained, lo, come))
        return z, free * 0.0, -free * tl.where(free > 0.0, hi, lo)
    else:
        least = tl.where(lo > 0.0, lo, float("-inf"))
        curved = tl.where((free < hi) & (free > least), free * 0.0 + 1.0, free * 0.0)
        z = tl.maximum(tl.minimum(free, hi), least)
        return z, curved, 0.5 * (w - z) * (w - z) + u * z


@triton.jit
def tables(table, first, MOVES: tl.constexpr):
    """Offsets and fees of a group of moves that begins with ``first``; 0 beyond the last."""
    steps, fees = (), ()
    for i in tl.static_range(GROUP):
        exists = first + i < MOVES
        steps = steps + (read(table.offset + first + i, exists),)
        fees = fees + (read(table.fee + first + i, exists),)
    tl.debug_barrier()
    return steps, fees


@triton.jit
def missing(values):
    """Nowhere (where all of these are not numbers), but that is known only when all of them are
    there."""
    bits = values[0].to(tl.int32 if values[0].dtype == tl.float32 else tl.int64, bitcast=True)
    for i in tl.static_range(1, len(values)):
        bits = bits & values[i].to(bits.dtype, bitcast=True)
    return bits == -1


@triton.jit
def _scores(work, place, rows, first, psi, sigma, table, CASE: tl.constexpr):
    """Of a group of moves: scores (``-inf`` beyond the last move), and the shares that the step
    starts from."""
    STAGED: tl.constexpr = CASE.layout.staged
    steps, fees = tables(table, first, CASE.moves)
    ends, held = (), ()
    for i in tl.static_range(GROUP):
        real = rows & (first + i < CASE.moves)
        end_ptr = work.s + TRIAL * STAGED + place + steps[i]
        ends = ends + (tl.load(end_ptr, mask=real, other=float("-inf")),)
        held = held + (read(work.centre + (first + i) * STAGED + place, real & CASE.exact),)
    gone = missing(ends) | missing(held)
    price = tl.where(gone, 0.0, psi)
    scores = ()
    for i in tl.static_range(GROUP):
        start = tl.where(gone, 0.0, held[i]).to(tl.float64)
        scores = scores + (start + sigma * (ends[i] - price * fees[i]),)
    return scores, held


@triton.jit(noinline=True)
def evaluate(work, psi, sigma, limits, table, one, CASE: tl.constexpr):
    """At the potentials on trial: thresholds, marks of moves in use, gradient; the dual, its
    derivative in ``psi``, how far the plan moved and what that costs, the size of the gradient, and
    its product with the direction.

    Rows are independent of each other, and so are columns: tiles of them take turns, whose numbers
    fit in registers.
    """
    STAGED: tl.constexpr = CASE.layout.staged
    MOVES: tl.constexpr = CASE.moves
    TILE: tl.constexpr = CASE.tile
    s_ptr, mark_ptr, centre_ptr = work.s, work.marks, work.centre
    lanes = tl.arange(0, TILE) * one
    cost, worth = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    moved, pull = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for first in tl.range(0, work.n_rows, TILE):
        spots = listed_spots(work, work.rows, first + lanes, work.n_rows)
        place, rows = spots.place, spots.real
        m, t = get(spots, MASS, CASE), get(spots, LEVEL, CASE)
        listed, starts = (), ()
        for k in tl.static_range(0, MOVES, GROUP):
            scores, held = _scores(work, place, rows, k, psi, sigma, table, CASE)
            listed, starts = listed + scores, starts + held
        if CASE.exact:
            # Newton's method for sum max(0, v - t) = 1: from anywhere, its second point is left of
            # the root and it is monotone from there. The marked sets are nested, so that equal
            # counts are equal sets.
            count = t * 0.0 - 1.0
            open_rows = tl.max(rows.to(tl.int32), 0)
            tries = open_rows * 0
            while (open_rows > 0) & (tries < MOVES + 3):
                total, used, top = t * 0.0, t * 0.0, t * 0.0 + float("-inf")
                for i in tl.static_range(len(listed)):
                    above = listed[i] > t
                    total += tl.where(above, listed[i], 0.0)
                    used += tl.where(above, 1.0, 0.0)
                    top = tl.maximum(top, listed[i])
                settled = (used == count) | (rows == False)
                t = tl.where(
                    settled,
                    t,
                    tl.where(used > 0.0, (total - 1.0) / tl.maximum(used, 1.0), top - 1.0),
                )
                count = tl.where(settled, count, used)
                open_rows = tl.max(tl.where(settled, 0, 1), 0)
                tries += 1
        else:
            top, total = t * 0.0 + float("-inf"), t * 0.0
            for i in tl.static_range(len(listed)):
                top = tl.maximum(top, listed[i])
            for i in tl.static_range(len(listed)):
                total += tl.exp(listed[i] - top)
            t = tl.where(rows, top + tl.log(total), 0.0)
        value, away, paid = t * 0.0, t * 0.0, t * 0.0
        marks = read(mark_ptr + place, rows) * 0
        for i in tl.static_range(len(listed)):
            part = tl.where(rows, share(listed[i], t, CASE.exact), 0.0)
            start, taken = starts[i].to(tl.float64), part > 0.0
            marks = marks | tl.where(taken, (marks * 0 + 1) << i, marks * 0)
            value += tl.where(taken, (listed[i] - start) * part, 0.0)
            paid += read(table.fee + i, i < MOVES) * part
            away += (part - start) * (part - start)
        if CASE.exact == False:
            value, away = t, t * 0.0
        put(spots, LEVEL, t, CASE)
        tl.store(mark_ptr + place, marks, mask=rows)
        cost += m * paid
        worth += m * value / sigma
        moved += m * m * away
        pull += m * away
    tl.debug_barrier()
    least, size, along = (
        tl.zeros([TILE], tl.float64),
        tl.zeros([TILE], tl.float64),
        tl.zeros([TILE], tl.float64),
    )
    for first in tl.range(0, work.n_columns, TILE):
        spots = listed_spots(work, work.columns, first + lanes, work.n_columns)
        place, real = spots.place, spots.real
        u = get(spots, TRIAL, CASE)
        come = u * 0.0
        for k in tl.range(0, MOVES, GROUP):
            steps, fees = tables(table, k, MOVES)
            there, taken = (), ()
            for i in tl.static_range(GROUP):
                there = there + (read(mark_ptr + place - steps[i], real),)
            tl.debug_barrier()
            held, levels, masses = (), (), ()
            for i in tl.static_range(GROUP):
                taken = taken + (real & in_use(there[i], k + i),)
            for i in tl.static_range(GROUP):
                start = place - steps[i]
                held = held + (read(centre_ptr + (k + i) * STAGED + start, taken[i] & CASE.exact),)
                levels = levels + (read(s_ptr + LEVEL * STAGED + start, taken[i]),)
                masses = masses + (read(s_ptr + MASS * STAGED + start, taken[i]),)
            gone = missing(levels) | missing(masses) | missing(held)
            price = tl.where(gone, 0.0, psi)
            for i in tl.static_range(GROUP):
                score = tl.where(gone, 0.0, held[i]).to(tl.float64) + sigma * (u - price * fees[i])
                come += tl.where(taken[i], share(score, levels[i], CASE.exact) * masses[i], 0.0)
        if CASE.exact == False:
            moved += come * come
        z, _, value = column(get(spots, TARGET, CASE), u, come, limits, CASE.linear)
        gradient = tl.where(real, z - come, 0.0)
        put(spots, GRADIENT, gradient, CASE)
        least += tl.where(real, value, 0.0)
        size += gradient * gradient
        along += gradient * get(spots, D, CASE)
    spent, worth_rows, length = three_sums(cost, worth, moved)
    worth_columns, steep, ahead = three_sums(least, size, along)
    back = tl.sum(pull, 0) / (2.0 * sigma)
    slope = spent - limits.budget
    slope = tl.where((psi <= 0.0) & (slope <= 0.0), 0.0, slope)
    dual = work.beyond + worth_columns - psi * limits.budget - worth_rows + back
    return dual, slope, tl.sqrt(length), back, tl.sqrt(steep), ahead
