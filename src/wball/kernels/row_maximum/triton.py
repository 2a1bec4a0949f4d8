"""Row maxima (:mod:`wball.kernels.row_maximum`) in Triton: the whole search of a row is one
program.

The options of a row are read again for every price; they stay in the cache of a multiprocessor.
Prices are compared in float32 unless the search is exact. Sums are taken in float64, and the bound
at the best price is evaluated in the precision of the rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves
from wball.kernels.row_maximum import DOWN, FLAT, FLAT_SINGLE, Field, RowMaximum
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import block_of, read
from wball.kernels.triton_stencil import why_not_here as _why_not

BLOCK, MOST = 512, 4096
"""Sources looked at together, and of rows that have more than that."""
_DOWN, _FLAT, _SINGLE = map(tl.constexpr, (DOWN, FLAT, FLAT_SINGLE))


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x, moves)


@torch.no_grad()
def row_maximum(
    field: Field, budget: Tensor, step: float, rounds: int, exact: bool = False
) -> RowMaximum:
    """See :mod:`wball.kernels.row_maximum`."""
    (count, channels, choices, sources), dtype = field.worth.shape, field.stay.dtype
    value = torch.empty(count, dtype=torch.float64, device=budget.device)
    prices = torch.empty((4, count), dtype=torch.float64, device=budget.device)
    far, elsewhere, away = (
        budget if part is None else aligned(part)
        for part in (field.far, field.elsewhere, field.away)
    )
    given = RowGiven(
        aligned(field.worth), aligned(field.stay), aligned(field.mass), aligned(field.cost),
        far, elsewhere, away, aligned(budget),
    )  # fmt: skip
    if count:
        block = min(MOST if sources > MOST else BLOCK, max(32, block_of(channels * sources)))
        _row_kernel[(count,)](
            given, (value, prices), channels, choices, sources, float(step), rounds,
            CASE=RowCase(0 if field.away is None else len(away), block, exact),
            num_warps=max(1, block // 128),
        )  # fmt: skip
    psi, low, high, steps = prices.unbind()
    return RowMaximum(value.to(dtype), psi.to(dtype), low.to(dtype), high.to(dtype), steps.long())


class RowGiven(NamedTuple):
    """The fields of :class:`~wball.kernels.row_maximum.Field`, and the budgets."""

    worth: Tensor
    stay: Tensor
    mass: Tensor
    cost: Tensor
    far: Tensor
    elsewhere: Tensor
    away: Tensor
    budget: Tensor


class Size(NamedTuple):
    """The shape of a row's field."""

    channels: tl.tensor
    choices: tl.tensor
    sources: tl.tensor


class RowCase(NamedTuple):
    """What the program is compiled for: tiers of mass beyond the patch, sources looked at
    together, and whether prices are float64."""

    tiers: int
    block: int
    exact: bool


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
def _row_kernel(given, out, channels, choices, sources, step, rounds, CASE: tl.constexpr):
    BLOCK: tl.constexpr = CASE.block
    EXACT: tl.constexpr = CASE.exact
    kind: tl.constexpr = tl.float64 if EXACT else tl.float32
    n = tl.program_id(0).to(tl.int64)
    worth_ptr = given.worth + n * channels * choices * sources
    stay_ptr = given.stay + n * channels * sources
    mass_ptr = given.mass + n * channels * sources
    far_ptr, elsewhere_ptr = given.far, given.elsewhere
    if CASE.tiers > 0:
        far_ptr += n * channels
        elsewhere_ptr += n * channels * CASE.tiers
    budget = tl.load(given.budget + n)
    row = RowGiven(
        worth_ptr, stay_ptr, mass_ptr, given.cost, far_ptr, elsewhere_ptr, given.away, given.budget
    )
    size = Size(channels, choices, sources)

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
    tl.store(out[1] + 3 * count + n, steps)
