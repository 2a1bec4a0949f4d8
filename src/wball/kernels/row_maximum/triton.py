"""Row maxima (:mod:`wball.kernels.row_maximum`) in Triton: the whole search of a row is one
program.

The choices of a row are read again for every price; they stay in the cache of a multiprocessor.
Prices are compared in float32, sums are taken in float64, and the bound at the best price is
evaluated in the precision of the field.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves
from wball.kernels.row_maximum import DOWN, RowProblem
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import read
from wball.kernels.triton_stencil import why_not as _why_not

BLOCK = 512
"""Sources looked at together."""
_DOWN = tl.constexpr(DOWN)


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x[:0].float(), moves)


@torch.no_grad()
def row_maximum(problem: RowProblem, rounds: int) -> tuple[Tensor, Tensor]:
    """See :mod:`wball.kernels.row_maximum`."""
    field = problem.field()
    rows, channels, choices, sources = field.worth.shape
    dtype, device = problem.coeff.dtype, field.worth.device
    value = torch.empty(rows, dtype=torch.float64, device=device)
    psi = torch.empty(rows, dtype=torch.float32, device=device)
    beyond = field.elsewhere is not None
    far = (
        (field.far, field.elsewhere, field.away) if beyond else (field.mass, field.mass, field.cost)
    )
    if rows:
        block = min(BLOCK, max(32, triton.next_power_of_2(channels * sources)))
        given = (field.worth, field.stay, field.mass, field.cost, *far, problem.budget.double())
        _row_kernel[(rows,)](
            RowGiven(*map(aligned, given)), (value, psi), channels, choices, sources, float(problem.step), rounds,
            CASE=RowCase(field.away.shape[0] if beyond else 0, block), num_warps=max(1, block // 128),
        )  # fmt: skip
    return value.to(dtype), psi.to(dtype)


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
    """What the program is compiled for: tiers of mass beyond the patch, and sources looked at
    together."""

    tiers: int
    block: int


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
    steepest = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, channels * sources, BLOCK):
        place = first + lane
        real = place < channels * sources
        real = real & (read(row.mass + place, real) > 0.0)
        stay = read(row.stay + place, real).to(tl.float32)
        option_ptr = row.worth + place // sources * (choices * sources) + place % sources
        for k in tl.range(0, choices):
            cost = tl.load(row.cost + k).to(tl.float32)
            apart = tl.where(cost > 0.0, cost, step)
            gain = (read(option_ptr + k * sources, real).to(tl.float32) - stay) / apart
            steepest = tl.where(real, tl.maximum(steepest, gain), steepest)
    high = tl.max(steepest, 0)
    if CASE.tiers > 0:
        for c in tl.range(0, channels):
            high = tl.maximum(high, tl.load(row.far + c).to(tl.float32) / step)
    high = high * (1.0 + 1e-6)
    low = high * 0.0
    value_low, cost_low = _evaluate(row, low, size, CASE, False)
    value_high, cost_high = _evaluate(row, high, size, CASE, False)
    value_high += budget * high
    best = tl.minimum(value_low, value_high)
    psi = tl.where(value_high < value_low, high, low)
    # No mass gains by moving, or all may move: then an end is the best price.
    steps = tl.where((high > 0.0) & (cost_low > budget), 0, rounds)
    while steps < rounds:
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
        meet = (meet / tl.maximum(drop, 1e-300)).to(tl.float32)
        trial = tl.where(steps % 3 == 2, 0.5 * (low + high), tl.where(drop > 0.0, meet, high))
        # The budget is small against the mass: the best price is near the top, and 0 a bad end of
        # the bracket.
        trial = tl.where(low > 0.0, trial, _DOWN * high)
        trial = tl.maximum(tl.minimum(trial, high), low)
        value, cost = _evaluate(row, trial, size, CASE, False)
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
    tl.store(out[0] + n, value + budget * psi.to(tl.float64))
    tl.store(out[1] + n, psi)
