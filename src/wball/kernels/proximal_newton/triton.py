r"""Exact and entropic plans on a GPU: the Newton method of
:mod:`wball.kernels.proximal_newton.cpu`, one program per image.

The whole solver runs inside one launch: proximal steps, Newton steps, conjugate gradients, repair
and bounds, in float64 and without synchronising with the host. Everything a program needs again
lies in a scratch buffer of its own, staged as in :mod:`wball.kernels.triton_stencil`; vectors of
the conjugate gradients stay in registers. Which moves of a row are in use is one bit each, so that
the passes of the conjugate gradients, which are most of the work, load from the two or three
neighbours in use and not from all. Shares are not stored: the shares ``pi^k`` that a step starts
from (in float32: rounded, they are another centre and as good), potentials and the threshold of
each row determine them. With entropy there is no centre, and the shares of the moves in use, which
conjugate gradients need, are stored in its place.

The program is one loop around one evaluation of the dual. What an evaluation was for is the
*phase*: the search for the first price, the start of a proximal step, or a trial of the line
search. Scalars are chosen by ``tl.where``: what Triton 3.6 assigns in branches within branches of a
loop may be lost (prices were, which doubled the steps).

Linear columns (the support function) sit at their kinks ``u = g`` until they are full; those that
are not at their kinks have no curvature of their own, which makes no difference to conjugate
gradients.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves, StencilMoves
from wball.kernels import proximal_newton as settings
from wball.kernels.column_problem import Best, Problem
from wball.kernels.proximal_newton.triton_dual import (
    BUFFERS,
    COLUMN,
    GRADIENT,
    GROUP,
    HELD,
    LEVEL,
    MASS,
    TARGET,
    TOLL,
    TRIAL,
    D,
    Listed,
    Q,
    S,
    SolveCase,
    SolveLimits,
    SolveTable,
    U,
    Work,
    column,
    evaluate,
    owned,
    share,
    tables,
)  # fmt: skip
from wball.kernels.proximal_newton.triton_repair import WrittenPlan, repair
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import (
    MAX_VALUES,
    is_halo,
    read,
    staged_position,
    stencil,
    sum_two,
    too_large,
    warps,
)
from wball.kernels.triton_stencil import why_not as _why_not

TILE = 1024
"""Rows or columns of a tile of an evaluation; small images, whose rows are listed, have half."""
MAX_LISTED = 1024
"""Rows and columns are listed for images of at most this many values: larger ones are
photographs."""
MAX_MOVES = 63
"""Moves of a row that one number of 64 bits can mark."""

(
    SPENT, SPENT_LINEAR, ROUNDING, GROWTH, SHRINK, RELAX, SLIDE, QUICK, SLOW, INNER, CG_MAX,
    HALVINGS, WARM, MOST, COOLING, SHARPER, SHARPEST, PATIENCE, PROMISING,
) = map(tl.constexpr, (
    settings.SPENT, settings.SPENT_LINEAR, settings.ROUNDING, settings.GROWTH, settings.SHRINK,
    settings.RELAX, settings.SLIDE, settings.QUICK, settings.SLOW, settings.INNER,
    settings.CG_MAX, settings.HALVINGS, settings.WARM, settings.MOST, settings.COOLING,
    settings.SHARPER, settings.SHARPEST, settings.PATIENCE, settings.PROMISING,
))  # fmt: skip
PRICE, BISECT, START, SEARCH, END = (tl.constexpr(i) for i in range(5))
"""Phases."""


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    reason = _why_not(x[:0].float(), moves) or too_large(x, MAX_VALUES)
    if reason is None and len(moves) > MAX_MOVES:
        reason = f"windows of {len(moves)} moves do not fit in a number of 64 bits"
    return reason


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`. ``best`` holds the plans that move
    nothing."""
    x, moves, budget, columns = problem.x, problem.moves, problem.budget, problem.columns
    table, batch, device = stencil(moves, x), x.shape[0], x.device
    layout, count = table.layout, len(moves)
    shares = count if problem.exact else 2 * count
    n_iter = torch.empty(batch, dtype=torch.int64, device=device)
    if batch == 0:
        return n_iter
    listed = layout.block <= MAX_LISTED
    size = table.guard + batch * BUFFERS.value * layout.staged
    bits = torch.int32 if count < 32 else torch.int64
    scratch = SolveScratch(
        torch.empty(size, dtype=torch.float64, device=device)[table.guard :],
        torch.empty((batch, 2, layout.staged + table.guard), dtype=bits, device=device),
        torch.empty((batch, 2 * count * layout.staged), dtype=torch.int16, device=device),
        torch.empty((batch, 2, layout.numel) if listed else 1, dtype=torch.int32, device=device),
        torch.empty((batch, shares, layout.staged), dtype=torch.float32, device=device),
    )
    # Columns are never negative anyway, and what a linear one is worth at its bound must be a
    # number.
    lo, tolerance = max(columns.lo, 0.0) if columns.linear else columns.lo, problem.tolerance
    common = _numbers(lo, columns.hi, tolerance.tol, tolerance.parts, device)
    given = (
        x,
        columns.target,
        start,
        common,
        budget,
        tolerance.floor,
        tolerance.offset,
        problem.tau,
    )
    _solve_kernel[(batch,)](
        SolveGiven(*map(aligned, given)),
        SolveFound(best.flow, best.z, best.u, best.primal, best.dual, best.hard, best.psi, n_iter),
        scratch, SolveTable(*table.tables[1][:2], *_tables(moves, device)), 1, max_iter, int(warm),
        CASE=SolveCase(
            layout._replace(offsets=()), count, columns.lo > 0, columns.linear, problem.exact, listed,
            layout.block // 2 if listed else TILE, settings.method(problem),
        ),
        num_warps=warps(layout.block), num_stages=1,
    )  # fmt: skip
    return n_iter


@lru_cache(maxsize=64)
def _numbers(lo: float, hi: float, tol: float, parts: float, device: torch.device) -> Tensor:
    """What all images have in common, as float64, which arguments of kernels cannot be."""
    return torch.tensor([lo, hi, tol, parts], dtype=torch.float64).to(device)


@lru_cache(maxsize=64)
def _tables(moves: StencilMoves, device: torch.device) -> tuple[Tensor, Tensor]:
    """The move that goes back (0: none), and how far apart the ends of a move are in an image."""
    back = torch.tensor([k or 0 for k in moves.reverse], dtype=torch.int32)
    flat = torch.tensor([r * moves.shape[1] + c for r, c in moves.offsets], dtype=torch.int32)
    return back.to(device), flat.to(device)


@triton.jit
def _range(values, real):
    """How far the values spread, and some positive number where they do not."""
    high = tl.max(tl.where(real, values, float("-inf")), 0)
    low = tl.min(tl.where(real, values, float("inf")), 0)
    span = tl.maximum(high - low, 1e-3 * tl.maximum(tl.abs(low), tl.abs(high)))
    return tl.where(span > 1e-200, span, span * 0.0 + 1.0)


@triton.jit
def _priced(psi, step):
    """The price a step away: at 0, and not next to it."""
    return tl.where(psi + step > 1e-14 * psi, psi + step, 0.0)


@triton.jit
def _incoming(mark_ptr, place, real, offset_ptr, MOVES: tl.constexpr):
    """Which moves into each pixel are marked at the pixel where they start."""
    bits = read(mark_ptr + place, real) & 1
    for k in tl.range(1, MOVES):
        there = read(mark_ptr + place - tl.load(offset_ptr + k), real)
        bit = (bits * 0 + 1) << k
        bits = bits | (there & bit)
    return bits


@triton.jit
def _stepped(s_ptr, place, real, length, rise, STAGED: tl.constexpr, LINEAR: tl.constexpr):
    """The potentials a step away, linear ones kept on their side of the kink; and what the columns'
    slopes promise."""
    u = read(s_ptr + U * STAGED + place, real)
    new = u + length * read(s_ptr + D * STAGED + place, real)
    if LINEAR:
        free = read(s_ptr + TARGET * STAGED + place, real) - u
        held = read(s_ptr + HELD * STAGED + place, real)
        full, drained = (
            (free > 0.0) | ((free == 0.0) & (held < 0.0)),
            (free < 0.0) | ((free == 0.0) & (held > 0.0)),
        )
        kink = u + free
        new = tl.where(full, tl.minimum(new, kink), tl.where(drained, tl.maximum(new, kink), kink))
        return new, tl.sum(held * (new - u), 0)
    else:
        return new, length * rise


class Spots(NamedTuple):
    """Pixels of a program: staged addresses, which exist, and which are rows with mass."""

    place: tl.tensor
    real: tl.tensor
    rows: tl.tensor


class SolveState(NamedTuple):
    """Price, ``sigma`` and stiffness, and the dual's derivative in the price."""

    psi: tl.tensor
    sigma: tl.tensor
    stiffness: tl.tensor
    slope: tl.tensor


@triton.jit
def _mixed(part, mass):
    """``P log(pi)`` of moves of rows with this mass."""
    return part * tl.log(tl.maximum(part / tl.maximum(mass, 1e-300), 1e-300))


@triton.jit
def _weight(score, level, used):
    """Shares in the precision in which they are stored: rows and columns must have the same."""
    return tl.where(used, share(score, level, False), 0.0).to(tl.float32).to(tl.float64)


@triton.jit
def _direction(work, spots, state, limits, table, CASE: tl.constexpr, GROUP: tl.constexpr):
    """Newton's step by conjugate gradients, stored; returns that of ``psi`` and how fast the dual
    should rise."""
    STAGED: tl.constexpr = CASE.layout.staged
    MARKED: tl.constexpr = STAGED + CASE.layout.halo
    MOVES: tl.constexpr = CASE.moves
    LINEAR: tl.constexpr = CASE.linear
    EXACT: tl.constexpr = CASE.exact
    METHOD: tl.constexpr = CASE.method
    s_ptr, mark_ptr, list_ptr, weight_ptr = work
    place, real, rows = spots
    psi, sigma, stiffness, slope = state
    marks = read(mark_ptr + place, real)
    level = read(s_ptr + LEVEL * STAGED + place, real)
    ways = tl.zeros(place.shape, tl.int32)
    weigh = tl.zeros(place.shape, tl.float64)
    total, square = weigh, weigh
    for first in tl.range(0, MOVES, GROUP):
        shifts, fees = tables(table, first, MOVES, GROUP)
        for i in tl.static_range(GROUP):
            used = owned(((marks >> (first + i)) & 1) != 0, first + i, MOVES, GROUP)
            tl.store(list_ptr + ways * STAGED + place, shifts[i], mask=used)
            weight = 1.0
            if EXACT == False:  # shares of a row change by the shares times scores, less their mean
                end = read(s_ptr + U * STAGED + place + shifts[i], used)
                weight = _weight(sigma * (end - psi * fees[i]), level, used)
                tl.store(weight_ptr + ways * STAGED + place, weight, mask=used)
                weigh += weight
            ways += tl.where(used, 1, 0)
            total += tl.where(used, weight * fees[i], 0.0)
            square += tl.where(used, weight * fees[i] * fees[i], 0.0)
    several = rows & (ways > 1)  # rows with one move have no choice
    ways = tl.where(several, ways, 0)
    inverse = 1.0 / (tl.maximum(ways, 1).to(tl.float64) if EXACT else tl.maximum(weigh, 0.5))
    stiff = tl.where(several, sigma * read(s_ptr + MASS * STAGED + place, real), 0.0)
    tl.store(mark_ptr + MARKED + place, tl.where(several, marks, 0), mask=real)
    tl.store(s_ptr + Q * STAGED + place, stiff, mask=real)
    tl.store(s_ptr + S * STAGED + place, inverse, mask=real)
    tl.debug_barrier()
    back_ptr, back_weight_ptr = list_ptr + MOVES * STAGED, weight_ptr + MOVES * STAGED
    u = read(s_ptr + U * STAGED + place, real)
    senders = ways * 0
    through, toll, diagonal = stiff * 0.0, stiff * 0.0, stiff * 0.0
    for first in tl.range(0, MOVES, GROUP):
        shifts, fees = tables(table, first, MOVES, GROUP)
        there, parts, inverses, weights = (), (), (), ()
        for i in tl.static_range(GROUP):
            there = there + (read(mark_ptr + MARKED + place - shifts[i], real),)
        if GROUP > 1:
            tl.debug_barrier()
        for i in tl.static_range(GROUP):
            start = place - shifts[i]
            used = owned(real & (((there[i] >> (first + i)) & 1) != 0), first + i, MOVES, GROUP)
            parts = parts + (read(s_ptr + Q * STAGED + start, used),)
            inverses = inverses + (read(s_ptr + S * STAGED + start, used),)
            tl.store(back_ptr + senders * STAGED + place, shifts[i], mask=used)
            weight = 1.0
            if EXACT == False:
                start_level = read(s_ptr + LEVEL * STAGED + start, used)
                weight = _weight(sigma * (u - psi * fees[i]), start_level, used)
                tl.store(back_weight_ptr + senders * STAGED + place, weight, mask=used)
            weights = weights + (weight,)
            senders += tl.where(used, 1, 0)
        for i in tl.static_range(GROUP):
            part = parts[i] * weights[i]
            through += part
            toll += part * fees[i]
            diagonal += part * (1.0 - weights[i] * inverses[i])
    most_ways, most_senders = tl.max(ways, 0), tl.max(senders, 0)
    paid_square, paid_mean = sum_two(stiff * square, stiff * total * total * inverse)
    curvature = paid_square - paid_mean
    w = read(s_ptr + TARGET * STAGED + place, real)
    gradient = read(s_ptr + GRADIENT * STAGED + place, real)
    _, curved, _ = column(w, u, u * 0.0, limits, LINEAR)
    moving = (u != w) | (gradient != 0.0)  # of linear columns: the others sit at their kinks
    diagonal += curved
    largest = tl.max(tl.where(real, diagonal, 0.0), 0)
    ridge = tl.maximum(stiffness * sigma * tl.abs(gradient), 1e-12 * largest + 1e-300)
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
    goal = METHOD.cg_tol * METHOD.cg_tol * left
    steps = most_ways * 0
    going = left > 0.0
    tl.debug_barrier()
    while going & (steps < CG_MAX):
        tl.store(s_ptr + Q * STAGED + place, q, mask=real)
        tl.debug_barrier()
        there = q * 0.0
        for i in tl.range(0, most_ways):
            used = i < ways
            step = read(list_ptr + i * STAGED + place, used)
            far = read(s_ptr + Q * STAGED + place + step, used)
            there += far if EXACT else far * read(weight_ptr + i * STAGED + place, used)
        mean = (there - q_psi * total) * inverse
        tl.store(s_ptr + S * STAGED + place, stiff * mean, mask=real)
        tl.debug_barrier()
        toll = read(s_ptr + TOLL * STAGED + place, real)
        h = read(s_ptr + COLUMN * STAGED + place, real) * q - q_psi * toll
        for i in tl.range(0, most_senders):
            used = i < senders
            step = read(back_ptr + i * STAGED + place, used)
            mean_there = read(s_ptr + S * STAGED + place - step, used)
            h -= (
                mean_there
                if EXACT
                else mean_there * read(back_weight_ptr + i * STAGED + place, used)
            )
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


class SolveGiven(NamedTuple):
    """A problem: images, what all of them have in common (``lo``, ``hi``, ``tol``, ``parts``), and
    numbers per image."""

    x: Tensor
    target: Tensor
    start: Tensor
    common: Tensor
    budget: Tensor
    floor: Tensor
    offset: Tensor
    tau: Tensor


class SolveFound(NamedTuple):
    """The fields of :class:`~wball.kernels.column_problem.Best` that are improved, and the Newton
    steps."""

    flow: Tensor
    z: Tensor
    u: Tensor
    primal: Tensor
    dual: Tensor
    hard: Tensor
    psi: Tensor
    n_iter: Tensor


class SolveScratch(NamedTuple):
    """Memory of all programs: staged buffers, marks and lists of moves in use, lists of rows and
    columns, and the shares that a step starts from."""

    buffers: Tensor
    marks: Tensor
    lists: Tensor
    listed: Tensor
    centre: Tensor


@kernel
def _solve_kernel(given, best, scratch, table, one, max_iter, warm, CASE: tl.constexpr):
    LAYOUT: tl.constexpr = CASE.layout
    N: tl.constexpr = LAYOUT.numel
    PLANE: tl.constexpr = LAYOUT.height * LAYOUT.width
    STAGED: tl.constexpr = LAYOUT.staged
    GUARD: tl.constexpr = LAYOUT.halo
    MARKED: tl.constexpr = STAGED + GUARD
    BLOCK: tl.constexpr = LAYOUT.block
    MOVES: tl.constexpr = CASE.moves
    LINEAR: tl.constexpr = CASE.linear
    EXACT: tl.constexpr = CASE.exact
    METHOD: tl.constexpr = CASE.method
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK) * one  # neighbouring threads hold neighbouring pixels
    real = index < N
    place = staged_position(tl.where(real, index, 0), LAYOUT)
    s_ptr = scratch.buffers + n * (BUFFERS * STAGED)
    mark_ptr = scratch.marks + n * (2 * MARKED) + GUARD
    list_ptr = scratch.lists + n * (2 * MOVES * STAGED)
    row_ptr = scratch.listed + n * (2 * N)
    column_ptr = row_ptr + N
    centre_ptr = scratch.centre + n * ((MOVES if EXACT else 2 * MOVES) * STAGED)
    flow_ptr = best.flow + n * (MOVES * N)
    work = Work(s_ptr, mark_ptr, list_ptr, centre_ptr)
    lo, hi, tol = tl.load(given.common), tl.load(given.common + 1), tl.load(given.common + 2)
    coldest = float("inf") if EXACT else 1.0 / tl.load(given.tau + n)
    budget, floor, offset = (
        tl.load(given.budget + n),
        tl.load(given.floor + n),
        tl.load(given.offset + n),
    )
    limits = SolveLimits(budget, lo, hi)

    # Outside the image nothing arrives and nothing starts.
    for first in tl.range(0, STAGED + GUARD, BLOCK):
        spot = first + index - GUARD
        halo = is_halo(spot, LAYOUT) & (spot < STAGED)
        tl.store(s_ptr + U * STAGED + spot, float("-inf"), mask=halo)
        tl.store(s_ptr + TRIAL * STAGED + spot, float("-inf"), mask=halo)
        tl.store(mark_ptr + spot, 0, mask=halo)
        tl.store(mark_ptr + MARKED + spot, 0, mask=halo)
    x = read(given.x + n * N + index, real).to(tl.float64)
    w = read(given.target + n * N + index, real).to(tl.float64)
    rows = real & (x > 0.0)
    tl.store(s_ptr + TARGET * STAGED + place, w, mask=real)
    tl.store(s_ptr + MASS * STAGED + place, x, mask=real)
    tl.store(s_ptr + LEVEL * STAGED + place, x * 0.0, mask=real)
    tl.store(s_ptr + D * STAGED + place, x * 0.0, mask=real)
    tl.store(s_ptr + GRADIENT * STAGED + place, x * 0.0, mask=real)
    tl.store(mark_ptr + place, rows.to(tl.int32), mask=real)
    for k in tl.range(0, MOVES if EXACT else 0):
        tl.store(
            centre_ptr + k * STAGED + place,
            tl.where(k == 0, 1.0, 0.0) + tl.zeros([BLOCK], tl.float32),
            mask=real,
        )
    tl.debug_barrier()
    reached = x > 0.0
    for k in tl.range(1, MOVES):
        there = read(mark_ptr + place - tl.load(table.offset + k), real)
        reached = reached | (there != 0)
    reached = real & reached
    if CASE.listed:
        before_row, before_column = (
            tl.cumsum(rows.to(tl.int32), 0) - 1,
            tl.cumsum(reached.to(tl.int32), 0) - 1,
        )
        tl.store(row_ptr + before_row, place.to(tl.int32), mask=rows)
        tl.store(column_ptr + before_column, place.to(tl.int32), mask=reached)
        n_rows, n_columns = tl.max(before_row, 0) + 1, tl.max(before_column, 0) + 1
        beyond = tl.sum(tl.where(real & (reached == False), 0.0 if LINEAR else 0.5 * w * w, 0.0), 0)
    else:
        n_rows, n_columns, beyond = N, N, budget * 0.0
    listed = Listed(row_ptr, column_ptr, n_rows, n_columns, beyond)
    spots = Spots(place, real, rows)
    # Where nothing can arrive, z(u) = 0 at u = w, and nothing ever changes that.
    u = tl.where(reached, read(given.start + n * N + index, real).to(tl.float64), w)
    tl.store(s_ptr + U * STAGED + place, u, mask=real)
    tl.store(s_ptr + TRIAL * STAGED + place, u, mask=real)
    tl.debug_barrier()

    span = _range(u, reached)
    zero = budget * 0.0
    none = tl.max(rows.to(tl.int32), 0) * 0
    sigma = tl.minimum(METHOD.first * tl.where(warm != 0, WARM, zero + 1.0) / span, coldest)
    precision, stiffness = zero + 1.0, zero
    centre_primal, best_dual, best_hard, best_psi = (
        tl.load(best.primal + n),
        tl.load(best.dual + n),
        tl.load(best.hard + n),
        tl.load(best.psi + n),
    )
    best_primal, entropy = centre_primal, zero
    psi = tl.where(warm != 0, best_psi, zero)
    trial_psi, low, dual, slope, moved, size = psi, zero, zero, zero, zero, zero
    d_psi, rise, length, promised, narrow = zero, zero, zero, zero, zero + float("inf")
    # A linear dual is a difference of sums, which round in proportion to their own size.
    total_mass = tl.sum(x, 0)
    noise = zero if EXACT and LINEAR == False else tl.sum(x * tl.abs(w), 0)
    steps, taken, halved, idle, tried = none, none, none, none, none
    phase = tl.where(warm != 0, none + START, none + PRICE)
    while phase != END:
        new_dual, new_slope, new_moved, pull, new_size, along = evaluate(
            work, listed, trial_psi, sigma, limits, table, one, CASE
        )
        if phase < START:
            # About the price at which the first step's plan costs the budget, from above.
            dear, pricing = new_slope <= 0.0, phase == PRICE
            climbs = pricing & (dear == False) & (tried < 80)
            psi = tl.where((climbs == False) & (pricing | dear), trial_psi, psi)
            low = tl.where(climbs | ((pricing | dear) == False), trial_psi, low)
            higher = tl.where(tried > 0, 4.0 * trial_psi, 1e-3 * span)
            tried = tl.where(pricing & (climbs == False), 1, tried + 1)
            found = (psi - low <= 0.02 * psi) | (tried > 30)
            trial_psi = tl.where(climbs, higher, tl.where(found, psi, 0.5 * (low + psi)))
            phase = tl.where(climbs, none + PRICE, tl.where(found, none + START, none + BISECT))
        else:
            at_once = (phase == SEARCH) & (halved == 0)
            stiffness = tl.where(at_once, RELAX * stiffness, METHOD.stiffness)
            promised += slope * (trial_psi - psi)
            ascends = new_dual >= dual + 1e-4 * promised - 1e-14 * (tl.abs(dual) + noise)
            if (phase == SEARCH) & (ascends == False) & (halved < HALVINGS):
                # Where the slope along the direction vanishes, were it linear between here and
                # there.
                bend = along + new_slope * d_psi
                fall = tl.where(bend < 0.0, (promised / length) / (promised / length - bend), 0.5)
                length = length * tl.minimum(tl.maximum(fall, 0.1), 0.5)
                halved += 1
                trial_psi = _priced(psi, length * d_psi)
                near, promised = _stepped(s_ptr, place, real, length, rise, STAGED, LINEAR)
                tl.store(s_ptr + TRIAL * STAGED + place, near, mask=real)
            else:
                at = read(s_ptr + TRIAL * STAGED + place, real)
                tl.store(s_ptr + U * STAGED + place, at, mask=real)
                if LINEAR:
                    held = read(s_ptr + GRADIENT * STAGED + place, real)
                    tl.store(s_ptr + HELD * STAGED + place, held, mask=real)
                psi, dual, slope, moved, size = trial_psi, new_dual, new_slope, new_moved, new_size
                stuck = (phase == SEARCH) & (ascends == False)
                rounded = ROUNDING * sigma * span * total_mass
                solved = (size <= METHOD.settled * precision * moved + rounded) & (
                    tl.abs(slope) <= SPENT * precision * budget
                )
                if LINEAR and EXACT:
                    solved = solved & (tl.abs(slope) <= SPENT_LINEAR * moved + rounded)
                    solved = solved & (taken > 0)  # or plans drift along uncorrected prices
                if (solved == False) & (stuck == False) & (taken < INNER) & (steps < max_iter):
                    d_psi, rise = _direction(
                        work, spots, SolveState(psi, sigma, stiffness, slope), limits, table, CASE,
                        GROUP if CASE.listed else 1,
                    )  # fmt: skip
                    steps += 1
                    taken += 1
                    # Stop where psi reaches 0: beyond it the direction was computed for other free
                    # variables.
                    stops = (d_psi < 0.0) & (psi > 0.0)
                    length = tl.where(
                        stops, tl.minimum(psi / tl.where(stops, -d_psi, 1.0), 1.0), 1.0
                    )
                    halved = none
                    trial_psi = _priced(psi, length * d_psi)
                    tl.debug_barrier()
                    near, promised = _stepped(s_ptr, place, real, length, rise, STAGED, LINEAR)
                    tl.store(s_ptr + TRIAL * STAGED + place, near, mask=real)
                    phase = none + SEARCH
                else:
                    pixel = index % PLANE
                    home = (index - pixel).to(tl.int64) * MOVES + pixel
                    level = read(s_ptr + LEVEL * STAGED + place, real)
                    mass = read(s_ptr + MASS * STAGED + place, real)
                    wish = read(s_ptr + TARGET * STAGED + place, real)
                    total, top = mass * 0.0, mass * 0.0 + float("-inf")
                    tl.debug_barrier()
                    for k in tl.range(0, MOVES):
                        end = read(s_ptr + U * STAGED + place + tl.load(table.offset + k), rows)
                        gain = end - psi * tl.load(table.fee + k)
                        top = tl.maximum(top, gain)
                        part = read(centre_ptr + k * STAGED + place, rows & EXACT).to(tl.float64)
                        part = tl.where(rows, share(part + sigma * gain, level, EXACT), 0.0)
                        total += part
                        tl.store(flow_ptr + k * PLANE + home, part, mask=real)
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
                    final = sigma >= coldest
                    if EXACT == False:  # the sums of the rows are those of the last temperature
                        best_hard = tl.maximum(best_hard, bound)
                        softer = tl.where(rows, top - mass * level / sigma, 0.0)
                        bound = tl.where(final, bound + tl.sum(softer, 0), float("-inf"))
                    if bound > best_dual:
                        tl.store(best.u + n * N + index, at, mask=real)
                    best_psi = tl.where(bound > best_dual, psi, best_psi)
                    best_dual = tl.maximum(best_dual, bound)
                    # Rows that sum to 1; the next centre.
                    sound = rows & (total > 0.5) & (total < 2.0)
                    whole = tl.where(sound, 1.0 / tl.where(sound, total, 1.0), 0.0)
                    for k in tl.range(0, MOVES):
                        part = whole * read(flow_ptr + k * PLANE + home, real)
                        tl.store(flow_ptr + k * PLANE + home, mass * part, mask=real)
                        if solved & EXACT:
                            centre = tl.where(sound, part, tl.where(k == 0, 1.0, 0.0))
                            tl.store(
                                centre_ptr + k * STAGED + place, centre.to(tl.float32), mask=rows
                            )
                    last = steps >= max_iter
                    if EXACT:
                        # The gap of the plan before its repair.
                        rest = dual - pull + psi * tl.abs(slope) - bound
                        idle = tl.where(rest < 0.999 * narrow, 0, idle + 1)
                        narrow = tl.minimum(rest, narrow)
                        growth = tl.where((idle > 0) & (taken <= 1), SLIDE + 0.0 * sigma, GROWTH)
                        quick, slow = (
                            tl.minimum(sigma * growth, MOST / _range(at, reached)),
                            sigma / GROWTH,
                        )
                        next_sigma = tl.where(
                            taken <= QUICK, quick, tl.where(taken > SLOW, slow, sigma)
                        )
                        sigma = tl.where(solved, next_sigma, sigma / SHRINK)
                        last = last | (idle > PATIENCE)
                        if LINEAR:  # nothing but rounding is left
                            off = size * _range(at, reached)
                            last = last | (solved & (rest + off <= 3e-13 * (tl.abs(dual) + noise)))
                        shown = last | (
                            rest <= PROMISING * (tol * tl.abs(bound + rest + offset) + floor)
                        )
                    else:
                        ends = solved | (taken < INNER)
                        last = last | (final & ends & (precision <= SHARPEST))
                        shown = last | final
                        precision = tl.where(final & ends, SHARPER, 1.0) * precision
                        sigma = tl.minimum(tl.where(ends, COOLING, 1.0) * sigma, coldest)
                    if shown:
                        marks = read(mark_ptr + place, real)
                        incoming = _incoming(mark_ptr, place, real, table.offset, MOVES)
                        plan = WrittenPlan(
                            s_ptr + Q * STAGED, flow_ptr, place, home, real, marks, incoming
                        )
                        scale, z = repair(plan, mass, limits, table, CASE)
                        primal = tl.sum(
                            tl.where(
                                real, -wish * z if LINEAR else 0.5 * (wish - z) * (wish - z), 0.0
                            ),
                            0,
                        )
                        # There is room for one plan: the last, or that of the centre where it is
                        # better.
                        helps = (primal < centre_primal) | (EXACT == False)
                        scale, best_primal = (
                            tl.where(helps, scale, 0.0),
                            tl.where(helps, primal, centre_primal),
                        )
                        stays, mixed = mass, mass * 0.0
                        for k in tl.range(1, MOVES):
                            used = ((marks >> k) & 1) != 0
                            part = scale * read(flow_ptr + k * PLANE + home, used)
                            stays -= part
                            tl.store(flow_ptr + k * PLANE + home, part, mask=used)
                            if EXACT == False:
                                mixed += _mixed(part, mass)
                        stays = tl.maximum(stays, 0.0)
                        tl.store(flow_ptr + home, stays, mask=real)
                        if EXACT == False:
                            entropy = tl.sum(mixed + _mixed(stays, mass), 0) / coldest
                            best_primal += entropy
                        tl.store(
                            best.z + n * N + index,
                            tl.where(helps, tl.maximum(z, 0.0), mass),
                            mask=real,
                        )
                    taken = none
                    aim = best_primal - entropy  # what is minimised beside the entropy
                    gauge = tl.abs(aim + offset)
                    if EXACT == False:
                        gauge = tl.maximum(gauge, tl.load(given.common + 3) * (aim - entropy))
                    done = last | (shown & (best_primal - best_dual <= tol * gauge + floor))
                    phase = tl.where(done, none + END, none + START)
        tl.debug_barrier()
    tl.store(best.primal + n, best_primal)
    tl.store(best.dual + n, best_dual)
    tl.store(best.hard + n, best_dual if EXACT else best_hard)
    tl.store(best.psi + n, best_psi)
    tl.store(best.n_iter + n, steps)
