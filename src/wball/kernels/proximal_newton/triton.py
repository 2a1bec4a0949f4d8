r"""Exact and entropic plans on a GPU: the Newton method of
:mod:`wball.kernels.proximal_newton.cpu`, one program per image.

The whole solver runs inside one launch: proximal steps, Newton steps, conjugate gradients, repair
and bounds, in float64 and without synchronising with the host. Everything a program needs again
lies in a scratch buffer of its own, staged as in :mod:`wball.kernels.triton_stencil`; tiles of rows
and columns take turns. Which moves of a row are in use is one bit each. Conjugate gradients are
most of the work: they run over the rows that have a choice and the columns that these reach, one
after the other in memory, with lists of where the two or three moves in use lead. Shares are not
stored: the shares ``pi^k`` that a step starts from (in float32: rounded, they are another centre
and as good), potentials and the threshold of each row determine them. With entropy there is no
centre, and the shares of the moves in use, which conjugate gradients need, are stored in its place.

The program is one loop around one evaluation of the dual, for the start of a proximal step or for a
trial of the line search: its *phase*. Triton carries through a loop what one pass over its body
changes: variables that are assigned to each other must start from different values, or the
assignment is lost (prices were: they start from two loads of the same number). Its time to compile
a function grows with the cube of the length: the two long ones are not inlined.

Linear columns (the support function) sit at their kinks ``u = g`` until they are full; those that
are not at their kinks have no curvature of their own, which makes no difference to conjugate
gradients.
"""

# ruff: noqa: RUF005  (Triton has no starred tuples)
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves, StencilMoves
from wball.kernels import proximal_newton as settings
from wball.kernels.column_problem import Best, Images, Problem
from wball.kernels.proximal_newton.triton_dual import (
    BUFFERS,
    DIAGONAL,
    FEES,
    GRADIENT,
    GROUP,
    HELD,
    LEVEL,
    MASS,
    OWN,
    SHARE,
    TARGET,
    TOLL,
    TRIAL,
    D,
    H,
    Q,
    R,
    S,
    SolveCase,
    SolveLimits,
    SolveTable,
    Spots,
    U,
    Work,
    column,
    evaluate,
    get,
    in_use,
    listed_spots,
    missing,
    put,
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

LOADS = tl.constexpr(4)
"""Listed moves whose loads are under way at once. Few rows and columns have more: those come first,
so that others need not wait for moves that they do not have."""
MAX_MOVES = 59
"""Moves of a row that one number of 64 bits can mark, with room for the rest of a group."""

_SETTINGS = (
    "SPENT SPENT_LINEAR ROUNDING GROWTH SHRINK RELAX SLIDE QUICK INNER CG_MAX HALVINGS WARM MOST "
    "COOLING SHARP SHARPER SHARPEST PATIENCE PROMISING"
)
(
    SPENT, SPENT_LINEAR, ROUNDING, GROWTH, SHRINK, RELAX, SLIDE, QUICK, INNER, CG_MAX, HALVINGS,
    WARM, MOST, COOLING, SHARP, SHARPER, SHARPEST, PATIENCE, PROMISING,
) = (tl.constexpr(getattr(settings, name)) for name in _SETTINGS.split())  # fmt: skip
START, SEARCH, END = (tl.constexpr(i) for i in range(3))
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
    x, moves, columns = problem.x, problem.moves, problem.columns
    assert isinstance(moves, StencilMoves)
    table, batch, device = stencil(moves, x), x.shape[0], x.device
    layout, count = table.layout, len(moves)
    shares = count if problem.exact else 2 * count
    n_iter = torch.empty(batch, dtype=torch.int64, device=device)
    if batch == 0:
        return n_iter
    size = table.guard + batch * BUFFERS.value * layout.staged
    bits = torch.int32 if count < 28 else torch.int64
    scratch = (  # buffers, marks of the moves in use, lists of rows and columns, and shares
        torch.empty(size, dtype=torch.float64, device=device)[table.guard :],
        torch.empty((batch, layout.staged + table.guard), dtype=bits, device=device),
        torch.empty((batch, 4, layout.numel), dtype=torch.int32, device=device),
        torch.empty((batch, shares, layout.staged), dtype=torch.float32, device=device),
    )
    # Columns are never negative anyway, and what a linear one is worth at its bound must be a
    # number.
    lo, tolerance = max(columns.lo, 0.0) if columns.linear else columns.lo, problem.tolerance
    n_warps = warps(layout.block, 128)
    common = _numbers(lo, columns.hi, tolerance.tol, tolerance.parts, device)
    _solve_kernel[(batch,)](
        Images(*map(aligned, problem.images(start))), common, best, n_iter,
        scratch, SolveTable(*table.tables[1][:2], *_tables(moves, device)), 1, max_iter, int(warm),
        CASE=SolveCase(
            layout._replace(offsets=()), count, columns.lo > 0, columns.linear, problem.exact,
            32 * n_warps, settings.method(problem),
        ),
        num_warps=n_warps, num_stages=1,
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
    _, height, width = moves.shape
    steps = [(s * len(moves) * height + r) * width + c for r, c, s in moves.offsets]
    flat = torch.tensor(steps, dtype=torch.int32)
    return back.to(device), flat.to(device)


@triton.jit
def _pixels(s_ptr, one, CASE: tl.constexpr):
    """The pixels, neighbouring ones in neighbouring threads."""
    LAYOUT: tl.constexpr = CASE.layout
    index = tl.arange(0, LAYOUT.block) * one
    real = index < LAYOUT.numel
    return index, Spots(s_ptr, staged_position(tl.where(real, index, 0), LAYOUT), real)


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
def _stepped(spots, length, rise, CASE: tl.constexpr):
    """The potentials a step away, linear ones kept on their side of the kink, are put on trial;
    returns what the columns' slopes promise."""
    u = get(spots, U, CASE)
    new = u + length * get(spots, D, CASE)
    promised = length * rise
    if CASE.linear:
        free = get(spots, TARGET, CASE) - u
        held = get(spots, HELD, CASE)
        full, drained = (
            (free > 0.0) | ((free == 0.0) & (held < 0.0)),
            (free < 0.0) | ((free == 0.0) & (held > 0.0)),
        )
        kink = u + free
        new = tl.where(full, tl.minimum(new, kink), tl.where(drained, tl.maximum(new, kink), kink))
        promised = tl.sum(held * (new - u), 0)
    put(spots, TRIAL, new, CASE)
    return promised


@triton.jit
def _mixed(part, mass):
    """``P log(pi)`` of moves of rows with this mass."""
    return part * tl.log(tl.maximum(part / tl.maximum(mass, 1e-300), 1e-300))


@triton.jit
def _weight(score, level, used):
    """Shares in the precision in which they are stored: rows and columns must have the same."""
    return tl.where(used, share(score, level, False), 0.0).to(tl.float32).to(tl.float64)


@triton.jit
def _numbered(chosen, wide, place, list_ptr):
    """Number the chosen pixels, wide ones first, and list their places; returns the numbers, how
    many there are, and how many are wide."""
    counted = tl.cumsum(chosen.to(tl.int32) + (wide.to(tl.int32) << 16), 0)  # both at once
    before, last = counted >> 16, tl.max(counted, 0)
    narrow = (last >> 16) + (counted & 0xFFFF) - before
    number = tl.where(wide, before, narrow) - 1
    tl.store(list_ptr + number, place.to(tl.int32), mask=chosen)
    return number, last & 0xFFFF, last >> 16


@triton.jit
def _summed(from_ptr, list_ptr, weight_ptr, index, count, most, CASE: tl.constexpr):
    """The values that the first ``count`` listed moves lead to, added up."""
    total = tl.zeros(index.shape, tl.float64)
    for first in tl.range(0, most, LOADS):
        ends, weights, values = (), (), ()
        for i in tl.static_range(LOADS):
            spot, used = (first + i) * CASE.layout.numel + index, first + i < count
            ends = ends + (read(list_ptr + spot, used),)
            weights = weights + (1.0 if CASE.exact else read(weight_ptr + spot, used),)
        tl.debug_barrier()
        for i in tl.static_range(LOADS):
            values = values + (read(from_ptr + ends[i], first + i < count),)
        gone = missing(values)
        for i in tl.static_range(LOADS):
            total += tl.where(gone, 0.0, values[i]) * weights[i]
    return total


@triton.jit
def _curved(columns, through, stiffness, limits, CASE: tl.constexpr):
    """The gradient of columns, and their own curvature with its ridge."""
    gradient, u = get(columns, GRADIENT, CASE), get(columns, U, CASE)
    _, curved, _ = column(get(columns, TARGET, CASE), u, u, limits, CASE.linear)
    least = 1e-12 * (curved + through) + 1e-300
    return gradient, curved + tl.maximum(stiffness * tl.abs(gradient), least)


@triton.jit(noinline=True)
def _equations(work, psi, sigma, stiffness, slope, limits, table, one, CASE: tl.constexpr):
    """What conjugate gradients need for Newton's step, stored. Returns how many rows there are, how
    many of these have many moves, and how many moves one has at most; the same of columns; of the
    price, the diagonal entry with and without what the rows' means take off; the size of the
    residual, in these columns and in the others.

    Rows with one move have no choice, and columns that only such rows reach have a step of their
    own. The others are packed: they have numbers, and what belongs to them lies at these numbers.
    """
    N: tl.constexpr = CASE.layout.numel
    STAGED: tl.constexpr = CASE.layout.staged
    MOVES: tl.constexpr = CASE.moves
    EXACT: tl.constexpr = CASE.exact
    TILE: tl.constexpr = CASE.layout.block // 4
    s_ptr, mark_ptr, list_ptr, weight_ptr = work.s, work.marks, work.lists, work.centre
    _, spots = _pixels(s_ptr, one, CASE)
    choice_ptr, coupled_ptr = work.columns + N, work.columns + 2 * N
    back_ptr, back_weight_ptr = list_ptr + MOVES * N, weight_ptr + MOVES * N
    marked = read(mark_ptr + spots.place, spots.real)
    several = (marked & (marked - 1)) != 0
    for _ in tl.static_range(LOADS):  # drop one mark
        marked = marked & (marked - 1)
    number, n_rows, n_wide = _numbered(several, marked != 0, spots.place, choice_ptr)
    put(spots, H, tl.where(several, number, -1), CASE)
    put(spots, S, 0.0, CASE)
    tl.debug_barrier()
    lanes = tl.arange(0, TILE) * one
    zeros = tl.zeros([TILE], tl.float64)
    paid_square, paid_mean, most_ways = zeros, zeros, lanes * 0
    for begin in tl.range(0, n_rows, TILE):
        index = begin + lanes
        rows = listed_spots(work, choice_ptr, index, n_rows)
        marks, level = read(mark_ptr + rows.place, rows.real), get(rows, LEVEL, CASE)
        ways = lanes * 0
        weigh, total, square = zeros, zeros, zeros
        for first in tl.range(0, MOVES, GROUP):
            shifts, fees = tables(table, first, MOVES)
            for i in tl.static_range(GROUP):
                used = in_use(marks, first + i)
                end = rows.place + shifts[i]
                tl.store(list_ptr + ways * N + index, end, mask=used)
                tl.atomic_add(s_ptr + S * STAGED + end, 1.0, used, sem="relaxed", scope="cta")
                weight = 1.0
                if EXACT == False:  # shares change by the shares times scores, less their mean
                    far = read(s_ptr + U * STAGED + end, used)
                    weight = _weight(sigma * (far - psi * fees[i]), level, used)
                    tl.store(weight_ptr + ways * N + index, weight, mask=used)
                    weigh += weight
                ways += tl.where(used, 1, 0)
                total += tl.where(used, weight * fees[i], 0.0)
                square += tl.where(used, weight * fees[i] * fees[i], 0.0)
        tl.store(choice_ptr + index, ways, mask=rows.real)
        stiff = sigma * get(rows, MASS, CASE)
        part = stiff / (tl.maximum(ways, 1).to(tl.float64) if EXACT else tl.maximum(weigh, 0.5))
        packed = Spots(s_ptr, index, rows.real)
        put(packed, SHARE, part, CASE)
        put(packed, FEES, total, CASE)
        paid_square += stiff * square
        paid_mean += part * total * total
        most_ways = tl.maximum(most_ways, ways)
    tl.debug_barrier()
    widest = tl.max(most_ways, 0)
    square, less = sum_two(paid_square, paid_mean)
    free = (psi > 0.0) | (slope > 0.0)
    diagonal_psi = tl.where(free & (square > less), square - less, 1.0)

    gradient, curved = _curved(spots, 0.0, stiffness, limits, CASE)
    arriving = get(spots, S, CASE)
    coupled = arriving > 0.0
    if CASE.linear:  # columns at their kinks do not move
        coupled = coupled & ((get(spots, U, CASE) != get(spots, TARGET, CASE)) | (gradient != 0.0))
    wide = coupled & (arriving > LOADS)
    _, n_columns, n_crowded = _numbered(coupled, wide, spots.place, coupled_ptr)
    step = tl.where(coupled, 0.0, gradient / curved)
    put(spots, D, step, CASE)
    put(spots, Q, 0.0, CASE)
    alone = tl.sum(gradient * step, 0)
    tl.debug_barrier()
    sizes, most_senders = zeros, lanes * 0
    for begin in tl.range(0, n_columns, TILE):
        index = begin + lanes
        columns = listed_spots(work, coupled_ptr, index, n_columns)
        u, senders = get(columns, U, CASE), lanes * 0
        through, toll, diagonal = zeros, zeros, zeros
        for first in tl.range(0, MOVES, GROUP):
            shifts, fees = tables(table, first, MOVES)
            numbers, masses, there = (), (), ()
            for i in tl.static_range(GROUP):
                there = there + (read(mark_ptr + columns.place - shifts[i], columns.real),)
            tl.debug_barrier()
            for i in tl.static_range(GROUP):
                start = Spots(s_ptr, columns.place - shifts[i], in_use(there[i], first + i))
                numbers = numbers + (get(start, H, CASE).to(tl.int32),)
                masses = masses + (get(start, MASS, CASE),)
            tl.debug_barrier()
            for i in tl.static_range(GROUP):
                used = in_use(there[i], first + i) & (numbers[i] >= 0)
                tl.store(back_ptr + senders * N + index, numbers[i], mask=used)
                weight = 1.0
                if EXACT == False:
                    level = read(s_ptr + LEVEL * STAGED + columns.place - shifts[i], used)
                    weight = _weight(sigma * (u - psi * fees[i]), level, used)
                    tl.store(back_weight_ptr + senders * N + index, weight, mask=used)
                part = tl.where(used, sigma * masses[i] * weight, 0.0)
                through += part
                toll += part * fees[i]
                diagonal += part
                diagonal -= weight * weight * get(Spots(s_ptr, numbers[i], used), SHARE, CASE)
                senders += tl.where(used, 1, 0)
        tl.store(
            coupled_ptr + index, (columns.place * 64 + senders).to(tl.int32), mask=columns.real
        )
        r, own = _curved(columns, through, stiffness, limits, CASE)
        inverse = 1.0 / (diagonal + own)
        put(columns, Q, r * inverse, CASE)
        packed = Spots(s_ptr, index, columns.real)
        put(packed, OWN, own + through, CASE)
        put(packed, TOLL, toll, CASE)
        put(packed, DIAGONAL, inverse, CASE)
        put(packed, R, r, CASE)
        sizes += r * r * inverse
        most_senders = tl.maximum(most_senders, senders)
    crowd, size = tl.max(most_senders, 0), tl.sum(sizes, 0)
    return (
        n_rows, n_wide, widest, n_columns, n_crowded, crowd, diagonal_psi, square, size, alone
    )  # fmt: skip


@triton.jit
def _direction(work, system, psi, slope, one, CASE: tl.constexpr):
    """Newton's step by conjugate gradients, stored; returns that of ``psi``."""
    N: tl.constexpr = CASE.layout.numel
    STAGED: tl.constexpr = CASE.layout.staged
    METHOD: tl.constexpr = CASE.method
    TILE: tl.constexpr = CASE.layout.block // 4
    s_ptr, list_ptr, weight_ptr = work.s, work.lists, work.centre
    choice_ptr, coupled_ptr = work.columns + N, work.columns + 2 * N
    back_ptr, back_weight_ptr = list_ptr + CASE.moves * N, weight_ptr + CASE.moves * N
    lanes, zeros = tl.arange(0, TILE) * one, tl.zeros([TILE], tl.float64)
    n_rows, n_wide, widest, n_columns, n_crowded, crowd, diagonal_psi, square, size, alone = system
    free = (psi > 0.0) | (slope > 0.0)
    r_psi = tl.where(free, slope, 0.0)
    q_psi, d_psi = r_psi / diagonal_psi, r_psi * 0.0
    left = size + r_psi * q_psi
    goal = METHOD.cg_tol * METHOD.cg_tol * (left + alone)
    steps = one * 0
    going = left > goal
    while going & (steps < CG_MAX):
        curves, paid, across, along = zeros, zeros, zeros, zeros
        for begin in tl.range(0, n_rows, TILE):
            index = begin + lanes
            there = index < n_rows
            rows = Spots(s_ptr, index, there)
            ways = read(choice_ptr + index, there)
            most = tl.where(begin < n_wide, widest, LOADS)
            ends = _summed(s_ptr + Q * STAGED, list_ptr, weight_ptr, index, ways, most, CASE)
            fees = get(rows, FEES, CASE)
            mean = (ends - q_psi * fees) * get(rows, SHARE, CASE)
            put(rows, S, mean, CASE)
            paid -= mean * fees
        tl.debug_barrier()
        for begin in tl.range(0, n_columns, TILE):
            index = begin + lanes
            there = index < n_columns
            columns = Spots(s_ptr, index, there)
            entry = read(coupled_ptr + index, there)
            most, count = tl.where(begin < n_crowded, crowd, LOADS), entry % 64
            starts = _summed(
                s_ptr + S * STAGED, back_ptr, back_weight_ptr, index, count, most, CASE
            )
            q = get(Spots(s_ptr, entry // 64, there), Q, CASE)
            toll = get(columns, TOLL, CASE)
            h = get(columns, OWN, CASE) * q - q_psi * toll - starts
            put(columns, H, h, CASE)
            curves += q * h
            paid += q * toll
            scaled = h * get(columns, DIAGONAL, CASE)
            across += get(columns, R, CASE) * scaled
            along += h * scaled
        curve, received = sum_two(curves, paid)
        h_psi = 1e-12 * diagonal_psi * q_psi - received + q_psi * square
        h_psi = tl.where(free, h_psi, 0.0)
        curve += q_psi * h_psi
        going = curve > 0.0
        length = tl.where(going, left / tl.where(going, curve, 1.0), 0.0)
        # The next residual's size, before it is computed: so one pass is enough.
        across, along = sum_two(across, along)
        across += r_psi * h_psi / diagonal_psi
        along += h_psi * h_psi / diagonal_psi
        new = tl.maximum(left + length * (length * along - 2.0 * across), 0.0)
        turn = new / tl.maximum(left, 1e-300)
        d_psi += length * q_psi
        r_psi -= length * h_psi
        for begin in tl.range(0, n_columns, TILE):
            index = begin + lanes
            there = index < n_columns
            columns = Spots(s_ptr, index, there)
            staged = Spots(s_ptr, read(coupled_ptr + index, there) // 64, there)
            q = get(staged, Q, CASE)
            put(staged, D, get(staged, D, CASE) + length * q, CASE)
            r = get(columns, R, CASE) - length * get(columns, H, CASE)
            put(columns, R, r, CASE)
            put(staged, Q, r * get(columns, DIAGONAL, CASE) + turn * q, CASE)
        tl.debug_barrier()
        going = going & (new > goal)
        q_psi = r_psi / diagonal_psi + turn * q_psi
        left = new
        steps += 1
    tl.debug_barrier()
    return d_psi


@kernel
def _solve_kernel(
    given, common, best, n_iter, scratch, table, one, max_iter, warm, CASE: tl.constexpr
):
    LAYOUT: tl.constexpr = CASE.layout
    N: tl.constexpr = LAYOUT.numel
    PLANE: tl.constexpr = LAYOUT.height * LAYOUT.width
    STAGED: tl.constexpr = LAYOUT.staged
    GUARD: tl.constexpr = LAYOUT.halo
    BLOCK: tl.constexpr = LAYOUT.block
    MOVES: tl.constexpr = CASE.moves
    LINEAR: tl.constexpr = CASE.linear
    EXACT: tl.constexpr = CASE.exact
    METHOD: tl.constexpr = CASE.method
    n = tl.program_id(0).to(tl.int64)
    s_ptr, mark_ptr, row_ptr, centre_ptr = scratch
    s_ptr += n * (BUFFERS * STAGED)
    mark_ptr += n * (STAGED + GUARD) + GUARD
    row_ptr += n * (4 * N)
    column_ptr = row_ptr + N
    centre_ptr += n * ((MOVES if EXACT else 2 * MOVES) * STAGED)
    flow_ptr = best.flow + n * (MOVES * N)
    # Where moves in use lead is listed where the plan will be written.
    list_ptr = flow_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    index, spots = _pixels(s_ptr, one, CASE)
    place, real = spots.place, spots.real
    lo, hi, tol = tl.load(common), tl.load(common + 1), tl.load(common + 2)
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
    x = read(given.x + n * N + index, real).to(tl.float64)
    w = read(given.target + n * N + index, real).to(tl.float64)
    rows = real & (x > 0.0)
    put(spots, TARGET, w, CASE)
    put(spots, MASS, x, CASE)
    put(spots, LEVEL, x * 0.0, CASE)
    put(spots, D, x * 0.0, CASE)
    put(spots, GRADIENT, x * 0.0, CASE)
    tl.store(mark_ptr + place, tl.where(rows, -1, 0), mask=real)
    for k in tl.range(0, MOVES if EXACT else 0):
        tl.store(
            centre_ptr + k * STAGED + place,
            tl.where(k == 0, 1.0, 0.0) + tl.zeros([BLOCK], tl.float32),
            mask=real,
        )
    tl.debug_barrier()
    reached = _incoming(mark_ptr, place, real, table.offset, MOVES) != 0
    _, n_rows, _ = _numbered(rows, rows, place, row_ptr)
    _, n_columns, _ = _numbered(reached, reached, place, column_ptr)
    beyond = tl.sum(tl.where(real & (reached == False), 0.0 if LINEAR else 0.5 * w * w, 0.0), 0)
    work = Work(
        s_ptr, mark_ptr, list_ptr, centre_ptr, row_ptr, column_ptr, n_rows, n_columns, beyond
    )
    # Where nothing can arrive, z(u) = 0 at u = w, and nothing ever changes that.
    u = tl.where(reached, read(given.start + n * N + index, real).to(tl.float64), w)
    put(spots, U, u, CASE)
    put(spots, TRIAL, u, CASE)
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
    psi, trial_psi = best_psi, tl.load(best.psi + n)
    dual, slope, moved, size = zero, zero, zero, zero
    d_psi, rise, length, promised, narrow = zero, zero, zero, zero, zero + float("inf")
    # A linear dual is a difference of sums, which round in proportion to their own size.
    total_mass = tl.sum(x, 0)
    noise = zero if EXACT and LINEAR == False else tl.sum(x * tl.abs(w), 0)
    steps, taken, halved, idle, phase = none, none, none, none, none + START
    while phase != END:
        new_dual, new_slope, new_moved, pull, new_size, along = evaluate(
            work, trial_psi, sigma, limits, table, one, CASE
        )
        promised += slope * (trial_psi - psi)
        ascends = new_dual >= dual + 1e-4 * promised - 1e-14 * (tl.abs(dual) + noise)
        searches = phase == SEARCH
        tighter = tl.maximum(stiffness / RELAX, METHOD.stiffness)
        eased = tl.where(halved == 0, RELAX * stiffness, tighter)
        eased = tl.where(ascends, eased, stiffness)
        stiffness = tl.where(searches, eased, METHOD.stiffness)
        if searches & (ascends == False) & (halved < HALVINGS):
            # Where the slope along the direction vanishes, were it linear between here and
            # there.
            bend = along + new_slope * d_psi
            fall = tl.where(bend < 0.0, (promised / length) / (promised / length - bend), 0.5)
            length = length * tl.minimum(tl.maximum(fall, 0.1), 0.5)
            halved += 1
            trial_psi = _priced(psi, length * d_psi)
            promised = _stepped(spots, length, rise, CASE)
        else:
            at = get(spots, TRIAL, CASE)
            put(spots, U, at, CASE)
            if LINEAR:
                held = get(spots, GRADIENT, CASE)
                put(spots, HELD, held, CASE)
            psi, dual, slope, moved, size = trial_psi, new_dual, new_slope, new_moved, new_size
            stuck = searches & (ascends == False)
            rounded = ROUNDING * sigma * span * total_mass
            solved = (size <= METHOD.settled * precision * moved + rounded) & (
                tl.abs(slope) <= SPENT * precision * budget
            )
            if LINEAR and EXACT:
                solved = solved & (tl.abs(slope) <= SPENT_LINEAR * moved + rounded)
                solved = solved & (taken > 0)  # or plans drift along uncorrected prices
            if (solved == False) & (stuck == False) & (taken < INNER) & (steps < max_iter):
                system = _equations(
                    work, psi, sigma, stiffness * sigma, slope, limits, table, one, CASE
                )
                tl.debug_barrier()
                d_psi = _direction(work, system, psi, slope, one, CASE)
                rise = tl.sum(get(spots, GRADIENT, CASE) * get(spots, D, CASE), 0)
                steps += 1
                taken += 1
                # Stop where psi reaches 0: beyond it the direction was computed for other free
                # variables.
                stops = (d_psi < 0.0) & (psi > 0.0)
                length = tl.where(stops, tl.minimum(psi / tl.where(stops, -d_psi, 1.0), 1.0), 1.0)
                halved = none
                trial_psi = _priced(psi, length * d_psi)
                tl.debug_barrier()
                promised = _stepped(spots, length, rise, CASE)
                phase = none + SEARCH
            else:
                pixel = index % PLANE
                home = (index - pixel).to(tl.int64) * MOVES + pixel
                level = get(spots, LEVEL, CASE)
                mass = get(spots, MASS, CASE)
                wish = get(spots, TARGET, CASE)
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
                        tl.store(centre_ptr + k * STAGED + place, centre.to(tl.float32), mask=rows)
                last = steps >= max_iter
                if EXACT:
                    # The gap of the plan before its repair.
                    rest = dual - pull + psi * tl.abs(slope) - bound
                    idle = tl.where(rest < 0.999 * narrow, 0, idle + 1)
                    narrow = tl.minimum(rest, narrow)
                    growth = tl.where((idle > 0) & (taken <= 1), SLIDE + 0.0 * sigma, GROWTH)
                    grown = tl.minimum(sigma * growth, MOST / _range(at, reached))
                    grown = tl.where(taken <= QUICK, grown, sigma)
                    sigma = tl.where(solved, grown, sigma / SHRINK)
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
                    plan = WrittenPlan(spots, flow_ptr, home, marks, incoming)
                    scale, z = repair(plan, mass, limits, table, CASE)
                    primal = tl.sum(
                        tl.where(real, -wish * z if LINEAR else 0.5 * (wish - z) * (wish - z), 0.0),
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
                        used = in_use(marks, k)
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
                    gauge = tl.maximum(gauge, tl.load(common + 3) * (aim - entropy))
                enough = tol * gauge + floor
                if EXACT:
                    precision = tl.where(shown & (rest <= enough), SHARP * precision, 1.0)
                done = last | (shown & (best_primal - best_dual <= enough))
                phase = tl.where(done, none + END, none + START)
        tl.debug_barrier()
    tl.store(best.primal + n, best_primal)
    tl.store(best.dual + n, best_dual)
    tl.store(best.hard + n, best_dual if EXACT else best_hard)
    tl.store(best.psi + n, best_psi)
    tl.store(n_iter + n, steps)
