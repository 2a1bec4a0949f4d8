"""Row maxima (:mod:`wball.kernels.row_maximum`) in Triton: the whole search of a row is one
program.

The options of a row are read again for every price; they stay in the cache of a multiprocessor.
Rows over whole images with mass everywhere have one option for each distinct cost, the largest
value that moves of this cost reach: the program lists these itself. Unless the problem is exact,
prices are compared in float32. Sums are taken in float64, and the bound at the best price is
evaluated in the precision of the rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Move, Moves
from wball.kernels.row_maximum import DOWN, FLAT, FLAT_SINGLE, NOWHERE, RowMaximum, RowProblem
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import block_of, read
from wball.kernels.triton_stencil import why_not_here as _why_not

BLOCK, WHOLE = 512, 4096
"""Sources looked at together, and of whole images."""
_DOWN, _FLAT, _SINGLE, _NOWHERE = map(tl.constexpr, (DOWN, FLAT, FLAT_SINGLE, NOWHERE))


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x, moves)


@torch.no_grad()
def row_maximum(problem: RowProblem, rounds: int) -> RowMaximum:
    """See :mod:`wball.kernels.row_maximum`."""
    coeff, whole, count = problem.coeff, problem.dense, len(problem.coeff)
    device = coeff.device
    value = torch.empty(count, dtype=torch.float64, device=device)
    prices = torch.empty((3, count), dtype=torch.float64, device=device)
    n_iter = torch.empty(count, dtype=torch.int64, device=device)
    if whole:
        channels, height, width = coeff.shape[1:]
        table, sources, tiers = _table(tuple(problem.moves), device), height * width, 0
        choices = len(table.cost)
        # Programs of exact problems, too, read float32 if the rows have no more.
        options = torch.empty((count, channels, choices, sources), dtype=coeff.dtype, device=device)
        given = RowGiven(
            options, aligned(coeff), aligned(problem.x), table.cost, value, value, value, problem.budget,
            aligned(problem.image), table.step, table.end,
        )  # fmt: skip
    else:
        field = problem.field()
        channels, choices, sources = field.worth.shape[1:]
        height = width = 0
        nothing = problem.image
        far, elsewhere, away = (
            nothing if part is None else aligned(part)
            for part in (field.far, field.elsewhere, field.away)
        )
        given = RowGiven(
            aligned(field.worth), aligned(field.stay), aligned(field.mass), aligned(field.cost),
            far, elsewhere, away, problem.budget, nothing, nothing, nothing,
        )  # fmt: skip
        tiers = 0 if field.away is None else len(field.away)
    if count:
        block = min(WHOLE if whole else BLOCK, max(32, block_of(channels * sources)))
        _row_kernel[(count,)](
            given, (value, prices, n_iter), channels, choices, sources, height, width, float(problem.step),
            rounds, CASE=RowCase(tiers, block, whole, problem.exact),
            num_warps=max(1, block // 128),
        )  # fmt: skip
    psi, low, high = prices.to(coeff.dtype).unbind()
    return RowMaximum(value.to(coeff.dtype), psi, low, high, n_iter)


class _Rings(NamedTuple):
    """Row and column offset of moves, sorted by cost; the distinct costs, and where the moves of
    each end."""

    step: Tensor
    cost: Tensor
    end: Tensor


@lru_cache(maxsize=64)
def _table(moves: tuple[Move, ...], device: torch.device) -> _Rings:
    listed = sorted((fee, row, column) for row, column, fee in moves)
    costs = sorted({fee for fee, *_ in listed})
    ends = [sum(fee <= cost for fee, *_ in listed) for cost in costs]
    steps = torch.tensor([move[1:] for move in listed], dtype=torch.int32)
    return _Rings(
        steps.flatten().to(device), torch.tensor(costs, dtype=torch.float64).to(device),
        torch.tensor(ends, dtype=torch.int32).to(device),
    )  # fmt: skip


class RowGiven(NamedTuple):
    """The fields of :class:`~wball.kernels.row_maximum.Field`, and the budgets. Of rows over whole
    images: memory for their options, the image of each row, and the moves as in
    :class:`_Rings`."""

    worth: Tensor
    stay: Tensor
    mass: Tensor
    cost: Tensor
    far: Tensor
    elsewhere: Tensor
    away: Tensor
    budget: Tensor
    image: Tensor
    step: Tensor
    end: Tensor


class Size(NamedTuple):
    """The shape of a row's field."""

    channels: tl.tensor
    choices: tl.tensor
    sources: tl.tensor


class RowCase(NamedTuple):
    """What the program is compiled for: tiers of mass beyond the patch, sources looked at
    together, whether rows are over whole images, and exact."""

    tiers: int
    block: int
    whole: bool
    exact: bool


@triton.jit
def _list_options(row, size, height, width, CASE: tl.constexpr):
    """For each distinct cost, the largest value where a move of this cost ends."""
    channels, choices, sources = size
    for first in tl.range(0, channels * sources, CASE.block):
        place = first + tl.arange(0, CASE.block)
        real = place < channels * sources
        down, across = place % sources // width, place % width
        option_ptr = row.worth + place // sources * (choices * sources) + place % sources
        move = 0
        for k in tl.range(0, choices):
            best = tl.full([CASE.block], _NOWHERE, row.stay.dtype.element_ty)
            last = tl.load(row.end + k)
            while move < last:
                r, c = tl.load(row.step + 2 * move), tl.load(row.step + 2 * move + 1)
                inside = real & (down + r >= 0) & (down + r < height)
                inside = inside & (across + c >= 0) & (across + c < width)
                there = row.stay + place + r * width + c
                best = tl.maximum(best, tl.load(there, mask=inside, other=_NOWHERE))
                move += 1
            tl.store(option_ptr + k * sources, best, mask=real)
    tl.debug_barrier()


@triton.jit
def _evaluate(row, psi, size, CASE: tl.constexpr, EXACT: tl.constexpr):
    """What the best choices at ``psi`` are worth, and what they cost."""
    channels, choices, sources = size
    BLOCK: tl.constexpr = CASE.block
    kind: tl.constexpr = tl.float64 if EXACT else tl.float32
    lane = tl.arange(0, BLOCK)
    worth = tl.zeros([BLOCK], tl.float64)
    spent = tl.zeros([BLOCK], tl.float64)
    price = psi.to(kind)
    for first in tl.range(0, channels * sources, BLOCK):
        place = first + lane
        real = place < channels * sources
        best = read(row.stay + place, real).to(kind)
        mass = read(row.mass + place, real).to(kind)
        toll = tl.zeros([BLOCK], kind)
        option_ptr = row.worth + place // sources * (choices * sources) + place % sources
        for k in tl.range(0, choices):
            cost = tl.load(row.cost + k).to(kind)
            score = read(option_ptr + k * sources, real).to(kind) - price * cost
            better = (score > best) | (score != score)  # what is not a number is no bound
            toll = tl.where(better, cost, toll)
            best = tl.where(better, score, best)
        worth += (best * mass).to(tl.float64)
        spent += (toll * mass).to(tl.float64)
    value, paid = tl.sum(worth, 0), tl.sum(spent, 0)
    if CASE.tiers > 0:
        for c in tl.range(0, channels):
            far = tl.load(row.far + c).to(tl.float64)
            for t in tl.static_range(tl.constexpr(CASE.tiers)):
                away = tl.load(row.away + t).to(tl.float64)
                held = tl.load(row.elsewhere + c * CASE.tiers + t).to(tl.float64)
                gain = far - psi.to(tl.float64) * away
                value += tl.maximum(gain, 0.0) * held
                paid += tl.where(gain > 0.0, away, 0.0) * held
    return value, paid


@kernel
def _row_kernel(
    given, out, channels, choices, sources, height, width, step, rounds, CASE: tl.constexpr
):
    BLOCK: tl.constexpr = CASE.block
    EXACT: tl.constexpr = CASE.exact
    kind: tl.constexpr = tl.float64 if EXACT else tl.float32
    n = tl.program_id(0).to(tl.int64)
    worth_ptr = given.worth + n * channels * choices * sources
    stay_ptr = given.stay + n * channels * sources
    image = tl.load(given.image + n) if CASE.whole else n
    mass_ptr = given.mass + image * channels * sources
    far_ptr, elsewhere_ptr = given.far, given.elsewhere
    if CASE.tiers > 0:
        far_ptr += n * channels
        elsewhere_ptr += n * channels * CASE.tiers
    budget = tl.load(given.budget + n)
    row = RowGiven(
        worth_ptr, stay_ptr, mass_ptr, given.cost, far_ptr, elsewhere_ptr, given.away, given.budget,
        given.image, given.step, given.end,
    )  # fmt: skip
    size = Size(channels, choices, sources)
    if CASE.whole:
        _list_options(row, size, height, width, CASE)

    # Above the steepest gain per unit of cost no mass moves.
    lane = tl.arange(0, BLOCK)
    steepest = tl.zeros([BLOCK], kind)
    for first in tl.range(0, channels * sources, BLOCK):
        place = first + lane
        real = place < channels * sources
        real = real & (read(row.mass + place, real) > 0.0)
        stay = read(row.stay + place, real).to(kind)
        option_ptr = row.worth + place // sources * (choices * sources) + place % sources
        for k in tl.range(0, choices):
            cost = tl.load(row.cost + k).to(kind)
            apart = tl.where(cost > 0.0, cost, step)
            gain = (read(option_ptr + k * sources, real).to(kind) - stay) / apart
            steepest = tl.where(real, tl.maximum(steepest, gain), steepest)
    high = tl.max(steepest, 0)
    if CASE.tiers > 0:
        for c in tl.range(0, channels):
            high = tl.maximum(high, tl.load(row.far + c).to(kind) / step)
    high = high * (1.0 + 1e-6)
    low = high * 0.0
    value_low, cost_low = _evaluate(row, low, size, CASE, EXACT)
    value_high, cost_high = _evaluate(row, high, size, CASE, EXACT)
    value_high += budget * high
    best = tl.minimum(value_low, value_high)
    psi = tl.where(value_high < value_low, high, low)
    steps = 0
    # Where no mass gains by moving, or all may move, an end is the best price.
    done = (high <= 0.0) | (cost_low <= budget)
    while (steps < rounds) & (done == False):
        # Convex and piecewise linear: the tangents at both ends meet below the minimum, and soon at
        # it.
        slope_low, slope_high = budget - cost_low, budget - cost_high
        drop = slope_high - slope_low
        meet = (
            value_low
            - value_high
            + slope_high * high.to(tl.float64)
            - slope_low * low.to(tl.float64)
        )
        meet = tl.where(drop > 0.0, (meet / tl.maximum(drop, 1e-300)).to(kind), high)
        meet = tl.maximum(tl.minimum(meet, high), low)
        below = value_low + slope_low * (meet - low).to(tl.float64)
        done = best - below <= (_FLAT if EXACT else _SINGLE) * (tl.abs(best) + tl.abs(value_low))
        trial = tl.where(steps % 3 == 2, 0.5 * (low + high), meet)
        # The budget is small against the mass: the best price is near the top, and 0 a bad end of
        # the bracket.
        trial = tl.where(low > 0.0, trial, _DOWN * high)
        value, cost = _evaluate(row, trial, size, CASE, EXACT)
        value += budget * trial
        psi = tl.where(value < best, trial, psi)
        best = tl.minimum(best, value)
        over = cost > budget
        low, value_low, cost_low = (
            tl.where(over, trial, low), tl.where(over, value, value_low), tl.where(over, cost, cost_low),
        )  # fmt: skip
        high, value_high, cost_high = (
            tl.where(over, high, trial), tl.where(over, value_high, value), tl.where(over, cost_high, cost),
        )  # fmt: skip
        steps += 1
    value, cost = _evaluate(row, psi, size, CASE, True)
    count = tl.num_programs(0)
    tl.store(out[0] + n, value + budget * psi.to(tl.float64))
    tl.store(out[1] + n, psi.to(tl.float64))
    tl.store(out[1] + count + n, low.to(tl.float64))
    tl.store(out[1] + 2 * count + n, high.to(tl.float64))
    tl.store(out[2] + n, steps)
