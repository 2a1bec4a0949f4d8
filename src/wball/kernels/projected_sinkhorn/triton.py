r"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn.reference`) in Triton: every sweep inside one launch.

One program per image: both blocks of the ascent, momentum, the stopping test, repair and the gap. Images leave one by
one. Arithmetic is float32; the gap is a sum of small terms, added in float64. Images whose potentials grow too wide to
do without logs (large ``lambda``) are noted by a first launch, wherever they get to, and continued by a second.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.projected_sinkhorn import ProjectedSinkhorn, reference
from wball.kernels.triton_flows import (
    exchange,
    flows,
    pair_costs,
    stage_factors,
    tighten,
    way_back,
    with_factors,
)
from wball.kernels.triton_stencil import (
    RANGE,
    extent,
    kernel,
    pixels,
    ring_prices,
    solve_price,
    stage_halos,
    stencil,
    sum_six,
    too_large,
    warps,
)
from wball.kernels.triton_stencil import why_not as _why_not
from wball.moves import Moves, StencilMoves

MAX_VALUES = 16384
"""Larger images do not fit in one program."""

_FIRST, _LEAST = tl.constexpr(reference.FIRST), tl.constexpr(reference.LEAST)
_ROUNDS, _REPAIRS = tl.constexpr(reference.ROUNDS), tl.constexpr(reference.REPAIR_SWEEPS)
_MOMENTUM, _PSI_TOL = tl.constexpr(reference.MOMENTUM), tl.constexpr(reference.PSI_TOL)
_PARTS = tl.constexpr(reference.PARTS)
_RESOLUTION = tl.constexpr(reference.RESOLUTION * 2.0**-23)


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x, moves) or too_large(x, MAX_VALUES)


def projected_sinkhorn(
    x: Tensor,
    w: Tensor,
    budget: Tensor,
    moves: StencilMoves,
    box: tuple[float, float] | None,
    tau: Tensor,
    *,
    u: Tensor,
    psi: Tensor,
    tol: float = 1e-4,
    max_iter: int = 500,
) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    table = stencil(moves, x)
    batch, device = x.shape[0], x.device
    z, u_out = torch.empty((2, *x.shape), dtype=torch.float32, device=device)
    # objective, gap, allowed gap, cost
    numbers = torch.empty((4, batch), dtype=torch.float64, device=device)
    psi_out, residual = torch.empty((2, batch), dtype=torch.float32, device=device)
    n_iter = torch.empty(batch, dtype=torch.int32, device=device)
    staged = table.stage(2, batch, device)
    lo, hi = (max(box[0], 0.0), box[1]) if box is not None else (0.0, float("inf"))
    wide = torch.empty(batch, dtype=torch.int32, device=device)
    x, w, budget = x.contiguous(), w.contiguous(), budget.to(torch.float64)
    for linear in (True, False) if batch else ():
        start = (u.contiguous(), psi) if linear else (u_out, psi_out)
        _projection_kernel[(batch,)](
            x, w, budget, tau, *start, z, u_out, psi_out, numbers, residual, n_iter, *staged, wide,
            table.offset, table.price, table.pair_offset, table.pair_price,
            1, lo, hi, reference.SLACK * (max(1.0, hi) if box is not None else 1.0),
            tol, max_iter, batch,
            # In logs the moves are looped over: that kernel is rarely needed, and long to compile.
            **table.constants(offsets=linear), PAIRS=table.pairs,
            BOX=box is not None, LINEAR=linear, WIDEST=RANGE, BLOCK=table.block, num_warps=warps(table.block),
            num_stages=1,
        )  # fmt: skip
    objective, gap, allowed, cost = numbers
    return ProjectedSinkhorn(z, cost, u_out, psi_out, objective, gap, allowed, residual, n_iter.long())


@triton.jit
def _total(values, real):
    return tl.sum(tl.where(real, values, 0.0).to(tl.float64), 0)


@triton.jit
def _x_log_y(x, y):
    return tl.where(x > 0.0, x * tl.log(tl.maximum(y, 1.2e-38)), 0.0)


@triton.jit
def wright_omega(y):
    """The solution ``o`` of ``o + log(o) = y``, by Newton steps on ``log(o)``."""
    y = tl.maximum(y, -80.0)  # where o = e^y and vanishes in float32 next to anything
    v = tl.where(y < 1.0, y - tl.minimum(tl.exp(tl.minimum(y, 1.0)), 0.5), tl.log(tl.maximum(y, 1.0)))
    for _ in tl.static_range(4):
        o = tl.exp(v)
        v = v - (o + v - y) / (1.0 + o)
    return tl.exp(v)


@triton.jit
def _clip(values, lo, hi):
    return tl.minimum(tl.maximum(values, lo), hi)


@triton.jit
def _misfit(w, u, z, lo, hi):
    """The first term of the gap, per pixel."""
    v = w - u
    c = _clip(v, lo, hi)
    return 0.5 * (z - c) * (z - c) - (z - c) * (v - c)


@kernel("one", "max_iter", "batch", "tol")
def _projection_kernel(
    x_ptr, w_ptr, budget_ptr, tau_ptr, u_ptr, psi_ptr,
    z_out, u_out, psi_out, numbers_out, residual_out, n_iter_out,
    s_ptr, t_ptr, wide_ptr,
    offset_ptr, price_ptr, pair_offset_ptr, pair_price_ptr,
    one, lo, hi, slack, tol, max_iter, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, PAIRS: tl.constexpr, BOX: tl.constexpr, LINEAR: tl.constexpr, WIDEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = C * H * W
    STAGED: tl.constexpr = C * (H + RR) * (W + RC)
    image = tl.program_id(0).to(tl.int64)
    if not LINEAR:  # noqa: SIM102, decided when compiling
        if tl.load(wide_ptr + image) == 0:
            return
    index, real, place = pixels(one, C, H, W, RR, RC, BLOCK)
    here = image * N + index
    s_ptr += image * STAGED
    t_ptr += image * STAGED
    stage_halos(s_ptr, t_ptr, index, C, H, W, RR, RC, LINEAR, BLOCK)
    x = tl.load(x_ptr + here, mask=real, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + here, mask=real, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + here, mask=real, other=0.0).to(tl.float32)
    budget_exact = tl.load(budget_ptr + image)
    budget = budget_exact.to(tl.float32)
    psi = tl.load(psi_ptr + image).to(tl.float32)
    single = (budget <= 0.0) | (tl.sum(x, 0) <= 0.0)
    tau = tl.where(single, 1.0, tl.load(tau_ptr + image).to(tl.float32))
    at_centre = _total(0.5 * (w - x) * (w - x), real)
    prices = ring_prices(price_ptr, ENDS)
    log_tau = tl.log(tau)

    beta = u / tau
    last = beta
    price = psi / tau
    streak = 0.0
    n_iter = 0
    offers = 0
    target = tol * _FIRST
    scale = at_centre.to(tl.float32)
    done = single
    wide = False
    while (n_iter < max_iter) & (done == False):  # noqa: E712
        # Rows and price.
        s = beta
        top = 0.0
        if LINEAR:
            top, bottom = extent(beta, real)
            wide = top - bottom > WIDEST
            s = tl.where(real, tl.exp(beta - top), 1.0)
        tl.debug_barrier()
        tl.store(s_ptr + place, s, mask=real)
        tl.debug_barrier()
        worth = tl.maximum(tau * price * budget, 1.2e-38)
        miss = tl.minimum(tl.maximum(_PSI_TOL * target * scale / worth, _RESOLUTION), _PSI_TOL)
        price, mean, norm, moved = solve_price(
            x, s, price, budget, miss, tl.where(n_iter == 0, 12, 3), wide,
            s_ptr, place, prices, offset_ptr, price_ptr, ENDS, OFFSETS, LINEAR,
        )  # fmt: skip
        if LINEAR:
            t = x / norm
            log_sum = tl.log(norm) + top
        else:
            t = tl.log(x) - norm  # -inf where the row is empty
            log_sum = norm
        tl.store(t_ptr + place, t, mask=real)
        tl.debug_barrier()
        received = flows(t_ptr, place, s, -1, price, prices, offset_ptr, price_ptr, ENDS, OFFSETS, LINEAR)

        # Columns.
        columns = received + x * (1.0 - moved)
        log_s = tl.log(columns) - beta
        omega = wright_omega(w / tau + log_s - log_tau)
        new = w / tau - omega
        new = tl.where(omega * tau > hi, tl.log(hi) - log_s, new)
        new = tl.where(omega * tau < lo, tl.log(lo) - log_s, new)
        new = tl.where(real, new, 0.0)
        n_iter += 1

        # About the gap after a repair: columns above hi will send mass back, unspent.
        kept = _clip(columns, lo, hi)
        misfit, outside, entropy, distance, cost, turn = sum_six(
            tl.where(real, _misfit(w, tau * beta, kept, lo, hi), 0.0),
            tl.where(real, tl.abs(columns - kept), 0.0),
            tl.where(real, beta * columns - x * log_sum, 0.0),
            tl.where(real, 0.5 * (w - columns) * (w - columns), 0.0),
            x * mean,
            (new - beta) * (new - last),
        )
        scale = tl.maximum(distance, _PARTS * (distance - tau * (entropy - price * cost)))
        scale += tol * at_centre.to(tl.float32)
        unspent = tl.maximum(tl.abs(budget - cost) - _RESOLUTION * budget, 0.0)
        estimate = misfit + tau * price * (unspent + 1.5 * outside)
        if wide:
            done = True
        elif (estimate <= target * scale) | (n_iter == max_iter):
            # Into the box.
            keep = tl.full([BLOCK], 1.0, tl.float32)
            give = tl.full([BLOCK], 1.0, tl.float32)
            stage_factors(s_ptr, t_ptr, place, s, t, keep, give, real, LINEAR)
            stayed = x * (1.0 - moved)
            raw_sent = x * moved
            raw_received = received
            sent = raw_sent
            arrived = raw_received
            z = x - sent + arrived
            if BOX:
                over = (z > hi + slack) & real
                under = (z < lo - slack) & real
                broken = tl.max((over | under).to(tl.int32), 0)
                repair = 0
                while (repair <= _REPAIRS) & (broken > 0):
                    final = repair == _REPAIRS
                    tighter_keep, tighter_give = tighten(
                        x, raw_sent, raw_received, keep, give, over, under, lo, hi, tl.where(final, 0.0, 1.0)
                    )
                    stage_factors(s_ptr, t_ptr, place, s, t, tighter_keep, tighter_give, real, LINEAR)
                    raw_sent, raw_received = exchange(
                        s_ptr, t_ptr, place, s, t, price, prices, offset_ptr, price_ptr, ENDS, OFFSETS, LINEAR
                    )
                    next_sent = tighter_give * raw_sent
                    next_arrived = tighter_keep * raw_received
                    mix = tl.max(way_back(z, x - next_sent + next_arrived, hi, slack, real), 0)
                    mix = tl.where(final & (lo == 0.0), mix, 1.0)
                    sent += mix * (next_sent - sent)
                    arrived += mix * (next_arrived - arrived)
                    keep += mix * (tighter_keep - keep)
                    give += mix * (tighter_give - give)
                    z = x - sent + arrived
                    over = (z > hi + slack) & real
                    under = (z < lo - slack) & real
                    broken = tl.max((over | under).to(tl.int32), 0)
                    repair += 1
            stage_factors(s_ptr, t_ptr, place, s, t, keep, give, real, LINEAR)
            s_kept, t_given = with_factors(s, t, keep, give, LINEAR)
            paid, _ = pair_costs(
                s_ptr, t_ptr, place, s_kept, t_given, price, pair_offset_ptr, pair_price_ptr, PAIRS, LINEAR
            )  # fmt: skip
            # Within the budget.
            spent = _total(paid, real)
            share = tl.minimum(budget_exact / tl.maximum(spent, 1e-300), 1.0)
            spent *= share
            sent *= share.to(tl.float32)
            arrived *= share.to(tl.float32)
            z = _clip(x - sent + arrived, lo, hi)
            # The gap of this plan.
            stay = tl.maximum(x - sent, 0.0)
            divergence = _total(
                _x_log_y(arrived, keep)
                + _x_log_y(sent, give)
                + _x_log_y(stay, stay / tl.maximum(stayed, 1.2e-38))
                + sent * tl.log(share.to(tl.float32)),
                real,
            )
            heat = tau.to(tl.float64)
            value = price.to(tl.float64)
            gap = _total(_misfit(w, tau * beta, z, lo, hi), real)
            gap += heat * (value * (budget_exact - spent) + divergence)
            entropy_exact = heat * (divergence - value * spent + _total(beta * z - x * log_sum, real))
            distance_exact = _total(0.5 * (w - z) * (w - z), real)
            allowed = tol * tl.maximum(distance_exact, _PARTS * (distance_exact - entropy_exact))
            allowed += tol * tol * at_centre
            residual = tl.max(tl.where(real, tl.abs(z - _clip(w - tau * beta, lo, hi)), 0.0), 0)
            tl.store(z_out + here, z, mask=real)
            tl.store(u_out + here, tau * beta, mask=real)
            tl.store(psi_out + image, tau * price)
            tl.store(numbers_out + image, distance_exact + entropy_exact)
            tl.store(numbers_out + batch + image, gap)
            tl.store(numbers_out + 2 * batch + image, allowed)
            tl.store(numbers_out + 3 * batch + image, spent)
            tl.store(residual_out + image, residual)
            offers += 1
            done = (gap <= allowed) | (offers == _ROUNDS)
            target = tl.maximum(0.5 * target, tol * _LEAST)
        # Momentum, restarted when a sweep turns back.
        streak = tl.where((turn < 0.0) | (n_iter <= 1), 0.0, streak + 1.0)
        weight = tl.minimum(streak / (streak + 3.0), _MOMENTUM)
        beta = tl.where(wide, beta, new + weight * (new - last))
        last = new
    if LINEAR:
        tl.store(wide_ptr + image, wide.to(tl.int32))
        if wide:  # where the second launch takes over
            tl.store(u_out + here, tau * beta, mask=real)
            tl.store(psi_out + image, tau * price)
    tl.store(n_iter_out + image, n_iter)
    if single:  # a ball of one point
        tl.store(z_out + here, x, mask=real)
        tl.store(u_out + here, u, mask=real)
        tl.store(psi_out + image, psi)
        tl.store(numbers_out + image, at_centre)
        tl.store(numbers_out + batch + image, 0.0)
        tl.store(numbers_out + 2 * batch + image, tol * at_centre)
        tl.store(numbers_out + 3 * batch + image, 0.0)
        tl.store(residual_out + image, 0.0)
