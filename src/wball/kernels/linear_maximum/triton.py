r"""Linear functions over the ball (:mod:`wball.kernels.linear_maximum`) in Triton: one program per
row.

Ring maxima are computed once and stay in registers. Each evaluation of ``h`` is then a few
comparisons per pixel and two sums in float64. The maximiser mixes the plans at both ends of the
last bracket; torch makes these.
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
from wball.kernels.linear_maximum import FLAT, LinearMaximum
from wball.kernels.linear_maximum.reference import best_plan, mixed_plan
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import MAX_VALUES, read, ring_fees, stencil, sum_two, too_large
from wball.kernels.triton_stencil import why_not as _why_not

_FLAT = tl.constexpr(FLAT[torch.float32])
CLOSE = 2.0**-20
"""Eight roundings of a float32 price."""


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x, moves) or too_large(x, MAX_VALUES)


def linear_maximum(
    a: Tensor,
    x: Tensor,
    budget: Tensor,
    moves: StencilMoves,
    *,
    point: bool = False,
    max_iter: int = 60,
) -> LinearMaximum:
    """See :func:`wball.kernels.linear_maximum.linear_maximum`."""
    table = stencil(moves, a)
    layout, rows, device = table.layout, a.shape[0], a.device
    found = SupportFound(
        torch.empty((3, rows), dtype=torch.float32, device=device),
        torch.empty((2, rows), dtype=torch.float64, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )
    if rows:
        given = SupportGiven(*map(aligned, (a, x, budget.double())))
        _support_kernel[(rows,)](
            given, found, (table.tables[0].fee, _steps(moves, device)), 1, max_iter, LAYOUT=layout,
            num_warps=min(32, max(4, layout.block // 128)), num_stages=1,
        )  # fmt: skip
    (psi, low, high), (upper, cost) = found.prices.unbind(), found.sums.unbind()
    z = None
    if point:
        # torch rounds scores differently: ends this far apart lie on both sides of the kink for it,
        # too
        low, high = low * (1 - CLOSE), high * (1 + CLOSE)
        dear, cheap = (best_plan(a.float(), x.float(), moves.like(psi), end) for end in (low, high))
        z = mixed_plan(dear, cheap, budget.double().clamp(min=0.0)).columns()
    return LinearMaximum(psi, upper, cost, z, found.n_iter.long())


@lru_cache(maxsize=64)
def _steps(moves: StencilMoves, device: torch.device) -> Tensor:
    """Row and column offset of every move."""
    return torch.tensor(moves.offsets, dtype=torch.int32).flatten().to(device)


@triton.jit
def _at(rings, fees, x, psi, budget):
    """The function at ``psi`` and what the cheapest best moves cost."""
    best = rings[0]
    toll = tl.zeros_like(best)
    for d in tl.static_range(1, len(rings)):
        score = rings[d] - psi * fees[d]
        toll = tl.where(score > best, fees[d], toll)
        best = tl.maximum(best, score)
    worth, spent = x.to(tl.float64) * best.to(tl.float64), (x * toll).to(tl.float64)
    value, cost = sum_two(worth, spent)
    return value + psi.to(tl.float64) * budget, cost


class SupportGiven(NamedTuple):
    """Functions, images and budgets."""

    a: Tensor
    x: Tensor
    budget: Tensor


class SupportFound(NamedTuple):
    """Per row: the best price and both ends of its bracket, maximum and cost, evaluations."""

    prices: Tensor
    sums: Tensor
    n_iter: Tensor


@kernel
def _support_kernel(given, out, table, one, max_iter, LAYOUT: tl.constexpr):
    H: tl.constexpr = LAYOUT.height
    W: tl.constexpr = LAYOUT.width
    N: tl.constexpr = LAYOUT.numel
    fee_ptr, step_ptr = table
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, LAYOUT.block) * one  # one pixel a thread: see triton_stencil.pixels
    real = index < N
    row, column = index % (H * W) // W, index % W
    a_ptr = given.a + n * N
    a = read(a_ptr + index, real).to(tl.float32)
    x = read(given.x + n * N + index, real).to(tl.float32)
    budget = tl.maximum(tl.load(given.budget + n), 0.0)

    fees = ring_fees(fee_ptr, LAYOUT)
    rings = (a,)
    for d in tl.static_range(1, len(LAYOUT.ends) - 1):
        best = tl.full(a.shape, float("-inf"), tl.float32)
        for k in tl.range(LAYOUT.ends[d], LAYOUT.ends[d + 1]):
            r, c = row + tl.load(step_ptr + 2 * k), column + tl.load(step_ptr + 2 * k + 1)
            inside = real & (r >= 0) & (r < H) & (c >= 0) & (c < W)
            shift = tl.load(step_ptr + 2 * k) * W + tl.load(step_ptr + 2 * k + 1)
            best = tl.maximum(
                best,
                tl.load(a_ptr + index + shift, mask=inside, other=float("-inf")).to(tl.float32),
            )
        rings = rings + (best,)

    # Above the steepest gain per unit of cost, all mass stays.
    steepest = tl.zeros_like(a)
    for d in tl.static_range(1, len(rings)):
        gain = tl.where(x > 0.0, (rings[d] - a) / tl.where(fees[d] > 0.0, fees[d], 1.0), 0.0)
        gain = tl.where(fees[d] > 0.0, gain, 0.0)
        steepest = tl.maximum(steepest, gain)
    low_psi = 0.0 * tl.max(steepest, 0)
    low_value, low_cost = _at(rings, fees, x, low_psi, budget)
    free = low_cost <= budget
    high_psi = tl.where(free, 0.0, tl.max(steepest, 0) * (1 + 1e-6) + 1e-30)
    high_value, high_cost = _at(rings, fees, x, high_psi, budget)
    steps = 2
    settled = free
    while (steps < max_iter) & (settled == False):
        left, right = budget - low_cost, budget - high_cost
        span = high_psi.to(tl.float64) - low_psi.to(tl.float64)
        reach = (low_value - high_value + right * span) / tl.maximum(right - left, 1e-300)
        middle = 0.5 * (low_psi + high_psi)
        tangent_step = (steps - 2) % 3 < 2
        trial = tl.where(tangent_step, (low_psi.to(tl.float64) + reach).to(tl.float32), middle)
        trial = tl.where((trial > low_psi) & (trial < high_psi), trial, middle)
        value, cost = _at(rings, fees, x, trial, budget)
        below = tl.maximum(
            low_value + left * (trial - low_psi).to(tl.float64),
            high_value - right * (high_psi - trial).to(tl.float64),
        )
        flat = value - below <= (tl.abs(value) + tl.abs(low_value)) * _FLAT
        goes_high = cost <= budget
        high_psi = tl.where(goes_high, trial, high_psi)
        high_value = tl.where(goes_high, value, high_value)
        high_cost = tl.where(goes_high, cost, high_cost)
        low_psi = tl.where(goes_high, low_psi, trial)
        low_value = tl.where(goes_high, low_value, value)
        low_cost = tl.where(goes_high, low_cost, cost)
        settled = tl.where(tangent_step, flat, False) | (high_psi - low_psi <= 4.8e-7 * high_psi)
        steps += 1
    at_low = low_value <= high_value
    count = tl.num_programs(0)
    tl.store(out.prices + n, tl.where(at_low, low_psi, high_psi))
    tl.store(out.prices + count + n, low_psi)
    tl.store(out.prices + 2 * count + n, high_psi)
    tl.store(out.sums + n, tl.where(at_low, low_value, high_value))
    tl.store(out.sums + count + n, tl.where(at_low, low_cost, high_cost))
    tl.store(out.n_iter + n, steps)
