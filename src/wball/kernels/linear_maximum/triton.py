r"""Linear functions over the ball (:mod:`wball.kernels.linear_maximum`) in Triton: one program per row.

Ring maxima are taken once and stay in registers; each evaluation of ``h`` is then a few comparisons a pixel and two
sums, in float64. Rows are read in place, nothing is staged unless the maximiser is asked for.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.linear_maximum import FLAT, LinearMaximum
from wball.kernels.triton_launch import kernel
from wball.kernels.triton_stencil import (
    MAX_VALUES,
    is_halo,
    ring_fees,
    staged_position,
    stencil,
    sum_two,
    too_large,
)
from wball.kernels.triton_stencil import why_not as _why_not
from wball.moves import Moves, StencilMoves

_FLAT = tl.constexpr(FLAT[torch.float32])


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
    rows, device = a.shape[0], a.device
    psi = torch.empty(rows, dtype=torch.float32, device=device)
    upper, cost = torch.empty((2, rows), dtype=torch.float64, device=device).unbind()
    n_iter = torch.empty(rows, dtype=torch.int32, device=device)
    z = torch.empty(a.shape if point else (1,), dtype=torch.float32, device=device)
    choice, mass = table.stage(2, rows, device) if point else (z, z)
    channels, height, width = table.shape
    if rows:
        _support_kernel[(rows,)](
            a.contiguous(), x.contiguous(), budget.to(torch.float64), psi, upper, cost, n_iter, z, choice, mass,
            table.offset, table.fee, _steps(moves, device), 1, max_iter,
            C=channels, H=height, W=width, RR=table.reach[0], RC=table.reach[1], ENDS=table.ends,
            POINT=point, BLOCK=table.block, num_warps=min(32, max(4, table.block // 128)), num_stages=1,
        )  # fmt: skip
    return LinearMaximum(psi, upper, cost, z if point else None, n_iter.long())


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


@kernel("one", "max_iter")
def _support_kernel(
    a_ptr, x_ptr, budget_ptr, psi_out, upper_out, cost_out, n_iter_out, z_out, choice_ptr, mass_ptr,
    offset_ptr, fee_ptr, step_ptr, one, max_iter,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    POINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = C * H * W
    MOVES: tl.constexpr = ENDS[len(ENDS) - 1]
    n = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK) * one  # see triton_plan: one pixel a thread, not four
    real = index < N
    row, column = index % (H * W) // W, index % W
    a_ptr += n * N
    a = tl.load(a_ptr + index, mask=real, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + n * N + index, mask=real, other=0.0).to(tl.float32)
    budget = tl.maximum(tl.load(budget_ptr + n), 0.0)

    fees = ring_fees(fee_ptr, ENDS)
    rings = (a,)
    for d in tl.static_range(1, len(ENDS) - 1):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for k in tl.range(ENDS[d], ENDS[d + 1]):
            r, c = row + tl.load(step_ptr + 2 * k), column + tl.load(step_ptr + 2 * k + 1)
            inside = real & (r >= 0) & (r < H) & (c >= 0) & (c < W)
            shift = tl.load(step_ptr + 2 * k) * W + tl.load(step_ptr + 2 * k + 1)
            best = tl.maximum(
                best,
                tl.load(a_ptr + index + shift, mask=inside, other=float("-inf")).to(tl.float32),
            )
        rings = rings + (best,)

    # Above the steepest gain per unit of cost nobody moves.
    steepest = tl.zeros([BLOCK], tl.float32)
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
    tl.store(psi_out + n, tl.where(at_low, low_psi, high_psi))
    tl.store(upper_out + n, tl.where(at_low, low_value, high_value))
    tl.store(cost_out + n, tl.where(at_low, low_cost, high_cost))
    tl.store(n_iter_out + n, steps)

    if POINT:
        STAGED: tl.constexpr = C * (H + RR) * (W + RC)
        GUARD: tl.constexpr = RR * (W + RC) + RC
        place = staged_position(tl.where(real, index, 0), H, W, RR, RC)
        choice_ptr += n * STAGED
        mass_ptr += n * STAGED
        for first in tl.range(0, STAGED + GUARD, BLOCK):
            spot = first + index - GUARD
            halo = is_halo(spot, H, W, RR, RC) & (spot < STAGED)
            tl.store(choice_ptr + spot, -1.0, mask=halo)
            tl.store(mass_ptr + spot, 0.0, mask=halo)
        best_low, best_high = a, a
        move_low, move_high = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for k in tl.range(1, MOVES):
            r, c = row + tl.load(step_ptr + 2 * k), column + tl.load(step_ptr + 2 * k + 1)
            inside = real & (r >= 0) & (r < H) & (c >= 0) & (c < W)
            shift = tl.load(step_ptr + 2 * k) * W + tl.load(step_ptr + 2 * k + 1)
            end = tl.load(a_ptr + index + shift, mask=inside, other=float("-inf")).to(tl.float32)
            fee = tl.load(fee_ptr + k)
            number = k * 1.0
            move_low = tl.where(end - low_psi * fee > best_low, number, move_low)
            best_low = tl.maximum(best_low, end - low_psi * fee)
            move_high = tl.where(end - high_psi * fee > best_high, number, move_high)
            best_high = tl.maximum(best_high, end - high_psi * fee)
        spread = low_cost - high_cost
        blend = tl.where(spread > 0.0, (budget - high_cost) / tl.maximum(spread, 1e-300), 0.0)
        blend = tl.minimum(tl.maximum(blend, 0.0), 1.0).to(tl.float32)
        # Two choices in one number: move numbers are far below 4096.
        code = move_high * 4096.0 + move_low
        tl.store(choice_ptr + place, code, mask=real)
        tl.store(mass_ptr + place, x, mask=real)
        tl.debug_barrier()
        z = x * (
            tl.where(move_high == 0.0, 1.0 - blend, 0.0) + tl.where(move_low == 0.0, blend, 0.0)
        )
        for k in tl.range(1, MOVES):
            behind = place - tl.load(offset_ptr + k)
            code = tl.load(choice_ptr + behind)
            high_number = tl.floor(code / 4096.0)
            low_number = code - high_number * 4096.0
            number = k * 1.0
            share = tl.where(high_number == number, 1.0 - blend, 0.0) + tl.where(
                low_number == number, blend, 0.0
            )
            z += tl.load(mass_ptr + behind) * share
        tl.store(z_out + n * N + index, z, mask=real)
