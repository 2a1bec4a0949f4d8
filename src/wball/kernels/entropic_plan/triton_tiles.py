"""Entropic plans of large images in Triton: cut into tiles, one program each.

Every step that needs a sum over the image is a launch: the last tile to arrive adds the partial sums in a fixed order
(so that results do not depend on the schedule), and images that are done leave at once. The host never waits for the
device.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.entropic_plan import COST_TOL, REPAIR_COUNTED
from wball.kernels.triton_flows import (
    exchange,
    factored_exchange,
    factored_pair_costs,
    flows,
    is_broken,
    pair_costs,
    tighten,
    way_back,
)
from wball.kernels.triton_launch import kernel
from wball.kernels.triton_stencil import (
    RANGE,
    TILE,
    Stencil,
    is_halo,
    make_rings,
    moments,
    newton_step,
    ring_fees,
    staged_position,
)

Tensors = tuple[Tensor, ...]
Box = tuple[float, float] | None


class Steps(NamedTuple):
    """How far a plan is improved, see :class:`wball.kernels.entropic_plan.PlanRequest`."""

    sweeps: int
    newton: int
    momentum: float


def limits(box: Box) -> tuple[float, float, float]:
    """The box, and what a column may be above it by rounding."""
    lo, hi = box if box is not None else (0.0, float("inf"))
    return lo, hi, 4 * torch.finfo(torch.float32).eps * (max(1.0, hi) if box is not None else 1.0)


def plan_by_tiles(table: Stencil, given: Tensors, out: Tensors, box: Box, steps: Steps) -> None:
    sweeps, newton, momentum = steps
    x, b, budget, psi_in, q_in = given
    z, q, keep, give, psi, cost, net = out
    batch, device = x.shape[0], x.device
    tiles = triton.cdiv(table.values, TILE)
    s, t = table.stage(2, batch, device)
    sent = torch.empty_like(z)
    before = q_in.to(torch.float32, copy=True) if momentum > 0 else q
    bottom, top = torch.aminmax(torch.add(b, q_in, out=sent).view(batch, -1), dim=1)
    wide = (top - bottom > RANGE).to(torch.int32)
    partial = torch.empty((batch, tiles, 2), dtype=torch.float64, device=device)
    bracket = torch.empty((batch, 2), dtype=torch.float32, device=device)
    # Per sweep whether psi is found and whether q moved; per repair whether the box is broken; one arrival counter.
    flags = torch.zeros(
        (2 * (sweeps + 1) + len(REPAIR_COUNTED) + 3, batch), dtype=torch.int32, device=device
    )
    found, moved, broken = (
        flags[: sweeps + 1],
        flags[sweeps + 1 : 2 * sweeps + 2],
        flags[2 * sweeps + 2 : -1],
    )
    arrived, _ = flags[-1], broken[0].fill_(1)  # nobody knows before the first exchange
    moves = (wide, table.offset, table.fee)
    grid, options = (
        (tiles, batch),
        {**table.constants(), "BLOCK": TILE, "num_warps": 8, "maxnreg": 128, "num_stages": 1},
    )
    lo, hi, slack = limits(box)

    _stage_kernel[(triton.cdiv(table.staged + table.guard, TILE), batch)](
        b, q_in, psi_in, q, psi, keep, give, s, t, top, wide, 1, **options
    )
    for sweep in range(sweeps + 1):
        # An image whose potentials stood still in the sweep before has its psi and its rows.
        live = moved[sweep - 1] if sweep else found[0]
        for step in range(newton + 1):
            _newton_kernel[grid](
                x, budget, psi, bracket, s, t, found[sweep], live, partial, arrived, *moves, 1, step, newton,
                **options, FIRST=sweep == 0, TOL=COST_TOL,
            )  # fmt: skip
        if sweep < sweeps:
            last = sweep == sweeps - 1
            _shift_kernel[grid](
                x, q, before, psi, s, t, moved[sweep], live, *moves, 1, lo, hi, 0.0 if last else float(momentum),
                **options, FIRST=sweep == 0, MOMENTUM=momentum > 0,
            )  # fmt: skip
    for repair, counted in enumerate((None, *REPAIR_COUNTED)):
        if counted is not None:
            # Between the last two plans, just far enough: `keep` is then left as it was.
            between = counted == 0.0 and lo <= 0.0
            _tighten_kernel[grid](
                x, sent, z, keep, give, s, t, broken[repair], wide, 1, lo, hi, slack, counted, **options,
                BETWEEN=between,
            )  # fmt: skip
            if between:
                _way_kernel[grid](
                    x,
                    psi,
                    s,
                    t,
                    keep,
                    give,
                    sent,
                    z,
                    broken[repair],
                    partial,
                    *moves,
                    1,
                    hi,
                    slack,
                    **options,
                )
                _blend_kernel[grid](
                    x, b, q, keep, z, s, top, broken[repair], partial, wide, 1, hi, **options
                )
        _exchange_kernel[grid](
            x,
            psi,
            s,
            t,
            keep,
            give,
            sent,
            z,
            broken[repair],
            broken[repair + 1],
            *moves,
            1,
            lo,
            hi,
            slack,
            **options,
        )
    _cost_kernel[grid](
        x, psi, s, t, keep, give, sent, z, cost, net, partial, arrived, wide, table.pair_offset, table.pair_fee,
        1, lo, hi, **options, PAIRS=table.pairs,
    )  # fmt: skip


@triton.jit
def _tile(
    one,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    RR: tl.constexpr,
    RC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of this program: the image, where its values and its staged values start, and its pixels."""
    image = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) * one
    real = index < C * H * W
    place = staged_position(tl.where(real, index, 0), H, W, RR, RC)
    return image, image * (C * H * W), image * (C * (H + RR) * (W + RC)), index, real, place


@triton.jit
def _image_sums(
    first, second, partial_ptr, arrived_ptr, image, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums over the tiles of an image, and whether this program is the last to arrive and so has them all."""
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    spot = partial_ptr + 2 * (image * TILES + tl.program_id(0))
    tl.store(spot, tl.sum(first.to(tl.float64), 0))
    tl.store(spot + 1, tl.sum(second.to(tl.float64), 0))
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + image, 1, sem="acq_rel") == TILES - 1
    total_first = tl.sum(tl.zeros([BLOCK], tl.float64), 0)
    total_second = total_first
    if last:
        tl.store(arrived_ptr + image, 0)
        for start in tl.range(0, TILES, BLOCK):
            each = start + tl.arange(0, BLOCK)
            spots = partial_ptr + 2 * (image * TILES + each)
            # Past the first-level cache, which may hold an older sum.
            total_first += tl.sum(
                tl.load(spots, mask=each < TILES, other=0.0, cache_modifier=".cg"), 0
            )
            total_second += tl.sum(
                tl.load(spots + 1, mask=each < TILES, other=0.0, cache_modifier=".cg"), 0
            )
    return last, total_first, total_second


@kernel("one")
def _stage_kernel(
    b_ptr, q_ptr, psi_ptr, q_out, psi_out, keep_out, give_out, s_ptr, t_ptr, top_ptr, wide_ptr, one,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Halos and starting values."""
    STAGED: tl.constexpr = C * (H + RR) * (W + RC)
    image = tl.program_id(1).to(tl.int64)
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) * one - (RR * (W + RC) + RC)
    halo = is_halo(spot, H, W, RR, RC)
    pixel = (spot < STAGED) & (halo == 0)
    ahead = tl.maximum(spot, 0)
    plane, inside = ahead // ((H + RR) * (W + RC)), ahead % ((H + RR) * (W + RC))
    index = image * (C * H * W) + plane * (H * W) + inside // (W + RC) * W + inside % (W + RC)
    b = tl.load(b_ptr + index, mask=pixel, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + index, mask=pixel, other=0.0).to(tl.float32)
    tl.store(q_out + index, q, mask=pixel)
    tl.store(keep_out + index, 1.0, mask=pixel)
    tl.store(give_out + index, 1.0, mask=pixel)
    linear = tl.load(wide_ptr + image) == 0
    nothing = tl.where(linear, 0.0, float("-inf"))
    s = tl.where(linear, tl.exp(b + q - tl.load(top_ptr + image)), b + q)
    there = image * STAGED + spot
    tl.store(s_ptr + there, tl.where(halo, nothing, s), mask=spot < STAGED)
    tl.store(t_ptr + there, nothing, mask=(spot < STAGED) & halo)
    if tl.program_id(0) == 0:
        tl.store(psi_out + image, tl.load(psi_ptr + image).to(tl.float32))


@kernel("one", "step", "newton")
def _newton_kernel(
    x_ptr, budget_ptr, psi_ptr, bracket_ptr, s_ptr, t_ptr, found_ptr, live_ptr, partial_ptr, arrived_ptr,
    wide_ptr, offset_ptr, fee_ptr, one, step, newton,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, FIRST: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One Newton step on psi, and the row terms at the psi it starts from."""
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    live = tl.load(found_ptr + image) == 0
    if not FIRST:
        live = live & (tl.load(live_ptr + image) != 0)
    if live:
        psi = tl.load(psi_ptr + image)
        x = tl.load(x_ptr + values + index, mask=real, other=0.0).to(tl.float32)
        if tl.load(wide_ptr + image) == 0:
            mean, variance, t = _rows(
                x, psi, s_ptr + staged, place, offset_ptr, fee_ptr, ENDS, OFFSETS, True
            )
        else:
            mean, variance, t = _rows(
                x, psi, s_ptr + staged, place, offset_ptr, fee_ptr, ENDS, (), False
            )
        tl.store(t_ptr + staged + place, t, mask=real)
        if step < newton:
            last, cost, slope = _image_sums(
                x * mean, x * variance, partial_ptr, arrived_ptr, image, C * H * W, BLOCK
            )
            if last:
                low, high = tl.load(bracket_ptr + 2 * image), tl.load(bracket_ptr + 2 * image + 1)
                low, high = tl.where(step == 0, -1.0, low), tl.where(step == 0, float("inf"), high)
                budget = tl.load(budget_ptr + image).to(tl.float32)
                psi, low, high, done = newton_step(
                    psi, low, high, cost.to(tl.float32), slope.to(tl.float32), budget, TOL
                )
                tl.store(psi_ptr + image, psi)
                tl.store(bracket_ptr + 2 * image, low)
                tl.store(bracket_ptr + 2 * image + 1, high)
                tl.store(found_ptr + image, done.to(tl.int32))


@triton.jit
def _rows(
    x,
    psi,
    s_ptr,
    place,
    offset_ptr,
    fee_ptr,
    ENDS: tl.constexpr,
    OFFSETS: tl.constexpr,
    LINEAR: tl.constexpr,
):
    """Mean and variance of the rows' costs, and the row terms."""
    rings = make_rings(s_ptr, place, tl.load(s_ptr + place), offset_ptr, ENDS, OFFSETS, LINEAR)
    fees = ring_fees(fee_ptr, ENDS)
    mean, variance, norm, _ = moments(
        rings, fees, psi, s_ptr, place, offset_ptr, fee_ptr, ENDS, LINEAR
    )
    return mean, variance, x / norm if LINEAR else tl.log(x) - norm


@kernel("one", "momentum")
def _shift_kernel(
    x_ptr, q_ptr, before_ptr, psi_ptr, s_ptr, t_ptr, moved_ptr, live_ptr, wide_ptr, offset_ptr, fee_ptr, one, lo, hi,
    momentum,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, FIRST: tl.constexpr, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A coordinate step on the box potentials. A pixel's own potential is read by nobody else here."""
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    live = True
    if not FIRST:
        live = tl.load(live_ptr + image) != 0
    if live:
        s, stay, received, linear = _columns(
            psi_ptr + image, s_ptr + staged, t_ptr + staged, wide_ptr + image, place, offset_ptr, fee_ptr,
            ENDS, OFFSETS,
        )  # fmt: skip
        q = tl.load(q_ptr + values + index, mask=real, other=0.0)
        z = tl.maximum(stay + received, 1e-12)
        shift = tl.minimum(tl.maximum(q + tl.log(lo / z), 0.0), 50.0)
        shift = tl.where(real, tl.minimum(shift, q + tl.log(hi / z)), q)
        if MOMENTUM:
            before = tl.load(before_ptr + values + index, mask=real, other=0.0)
            tl.store(before_ptr + values + index, shift, mask=real)
            shift = ahead_of(q, shift, before, momentum)
        tl.store(q_ptr + values + index, shift, mask=real)
        tl.store(
            s_ptr + staged + place,
            tl.where(linear, s * tl.exp(shift - q), s + (shift - q)),
            mask=real,
        )
        if tl.max((shift != q).to(tl.int32), 0) > 0:
            tl.store(moved_ptr + image, 1)


@triton.jit
def ahead_of(q, new, before, momentum):
    """Beyond ``new``, in the direction from the step ``before`` it, unless the step from ``q`` turned back."""
    ahead = new + momentum * (new - before)
    ahead = tl.where(new < 0.0, tl.minimum(ahead, 0.0), tl.minimum(tl.maximum(ahead, 0.0), 50.0))
    return tl.where((new != 0.0) & ((new - q) * (new - before) >= 0.0), ahead, new)


@triton.jit
def _columns(
    psi_ptr,
    s_ptr,
    t_ptr,
    wide_ptr,
    place,
    offset_ptr,
    fee_ptr,
    ENDS: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Own column terms, what stays, what arrives, and whether there are no logs."""
    psi = tl.load(psi_ptr)
    s, t = tl.load(s_ptr + place), tl.load(t_ptr + place)
    fees = ring_fees(fee_ptr, ENDS)
    linear = tl.load(wide_ptr) == 0
    if linear:
        stay = t * s
        received = flows(t_ptr, place, s, -1, psi, fees, offset_ptr, fee_ptr, ENDS, OFFSETS, True)
    else:
        stay = tl.exp(t + s)
        received = flows(t_ptr, place, s, -1, psi, fees, offset_ptr, fee_ptr, ENDS, (), False)
    return s, stay, received, linear


@triton.jit
def _without_factors(s, t, keep, give):
    """Undo the staging of factors. Where a factor is 0, what it multiplies no longer matters."""
    return tl.where(keep > 0.0, s / keep, 0.0), tl.where(give > 0.0, t / give, 0.0)


@kernel("one", "counted")
def _tighten_kernel(
    x_ptr, sent_ptr, received_ptr, keep_ptr, give_ptr, s_ptr, t_ptr, broken_ptr, wide_ptr, one, lo, hi, slack, counted,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, BETWEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    if tl.load(broken_ptr + image) != 0:
        x = tl.load(x_ptr + values + index, mask=real, other=0.0).to(tl.float32)
        sent = tl.load(sent_ptr + values + index, mask=real, other=0.0)
        received = tl.load(received_ptr + values + index, mask=real, other=0.0)
        keep = tl.load(keep_ptr + values + index, mask=real, other=1.0)
        give = tl.load(give_ptr + values + index, mask=real, other=1.0)
        linear = tl.load(wide_ptr + image) == 0
        s, t = tl.load(s_ptr + staged + place), tl.load(t_ptr + staged + place)
        s, t = _without_factors(s, t, keep, give)
        over, under = is_broken(x - give * sent + keep * received, x, lo, hi, slack, real)
        keep, give = tighten(x, sent, received, keep, give, over, under, lo, hi, counted, 0.0)
        tl.store(give_ptr + values + index, give, mask=real)
        if linear:
            tl.store(s_ptr + staged + place, s * keep, mask=real)
            tl.store(t_ptr + staged + place, t * give, mask=real)
            if not BETWEEN:
                tl.store(keep_ptr + values + index, keep, mask=real)
        else:
            tl.store(keep_ptr + values + index, keep, mask=real)


@triton.jit
def _tightest(x, received, kept, hi):
    """The column factors of the last sweep."""
    return tl.minimum(kept, tl.maximum((hi - x) / tl.maximum(received, 1.2e-38), 0.0))


@kernel("one")
def _way_kernel(
    x_ptr, psi_ptr, s_ptr, t_ptr, kept_ptr, give_ptr, sent_ptr, received_ptr, broken_ptr, partial_ptr,
    wide_ptr, offset_ptr, fee_ptr, one, hi, slack,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How far this tile must go from the plan before to the plan with the last factors. In logs: all the way."""
    TILES: tl.constexpr = (C * H * W + BLOCK - 1) // BLOCK
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    if (tl.load(broken_ptr + image) != 0) & (tl.load(wide_ptr + image) == 0):
        psi = tl.load(psi_ptr + image)
        x = tl.load(x_ptr + values + index, mask=real, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + values + index, mask=real, other=1.0)
        give = tl.load(give_ptr + values + index, mask=real, other=1.0)
        had_sent = tl.load(sent_ptr + values + index, mask=real, other=0.0)
        received = tl.load(received_ptr + values + index, mask=real, other=0.0)
        keep = _tightest(x, received, kept, hi)
        t = tl.load(t_ptr + staged + place)  # carries `give`
        fees = ring_fees(fee_ptr, ENDS)
        sent = flows(
            s_ptr + staged, place, t, 1, psi, fees, offset_ptr, fee_ptr, ENDS, OFFSETS, True
        )
        way = way_back(
            x - give * had_sent + kept * received, x - sent + keep * received, hi, slack, real
        )
        tl.store(
            partial_ptr + 2 * (image * TILES + tl.program_id(0)), tl.max(way, 0).to(tl.float64)
        )


@kernel("one")
def _blend_kernel(
    x_ptr, b_ptr, q_ptr, keep_ptr, received_ptr, s_ptr, top_ptr, broken_ptr, partial_ptr, wide_ptr, one, hi,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Go as far as the tile that must go furthest."""
    TILES: tl.constexpr = (C * H * W + BLOCK - 1) // BLOCK
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    if (tl.load(broken_ptr + image) != 0) & (tl.load(wide_ptr + image) == 0):
        furthest = tl.max(tl.zeros([BLOCK], tl.float64), 0)
        for start in tl.range(0, TILES, BLOCK):
            each = start + tl.arange(0, BLOCK)
            ways = tl.load(partial_ptr + 2 * (image * TILES + each), mask=each < TILES, other=0.0)
            furthest = tl.maximum(furthest, tl.max(ways, 0))
        x = tl.load(x_ptr + values + index, mask=real, other=0.0).to(tl.float32)
        received = tl.load(received_ptr + values + index, mask=real, other=0.0)
        kept = tl.load(keep_ptr + values + index, mask=real, other=1.0)
        keep = kept + furthest.to(tl.float32) * (_tightest(x, received, kept, hi) - kept)
        tl.store(keep_ptr + values + index, keep, mask=real)
        b = tl.load(b_ptr + values + index, mask=real, other=0.0).to(tl.float32)
        s = b + tl.load(q_ptr + values + index, mask=real, other=0.0)
        tl.store(s_ptr + staged + place, tl.exp(s - tl.load(top_ptr + image)) * keep, mask=real)


@kernel("one")
def _exchange_kernel(
    x_ptr, psi_ptr, s_ptr, t_ptr, keep_ptr, give_ptr, sent_ptr, received_ptr, broken_ptr, still_broken_ptr,
    wide_ptr, offset_ptr, fee_ptr, one, lo, hi, slack,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    if tl.load(broken_ptr + image) != 0:
        psi = tl.load(psi_ptr + image)
        x = tl.load(x_ptr + values + index, mask=real, other=0.0).to(tl.float32)
        keep = tl.load(keep_ptr + values + index, mask=real, other=1.0)
        give = tl.load(give_ptr + values + index, mask=real, other=1.0)
        linear = tl.load(wide_ptr + image) == 0
        s, t = tl.load(s_ptr + staged + place), tl.load(t_ptr + staged + place)
        fees = ring_fees(fee_ptr, ENDS)
        if linear:
            s, t = _without_factors(s, t, keep, give)
            sent, received = exchange(
                s_ptr + staged,
                t_ptr + staged,
                place,
                s,
                t,
                psi,
                fees,
                offset_ptr,
                fee_ptr,
                ENDS,
                OFFSETS,
                True,
            )
        else:
            sent, received = factored_exchange(
                s_ptr + staged, t_ptr + staged, keep_ptr + values, give_ptr + values, place, index, real, s, t, psi,
                offset_ptr, fee_ptr, W, RR, RC, ENDS[len(ENDS) - 1],
            )  # fmt: skip
        tl.store(sent_ptr + values + index, sent, mask=real)
        tl.store(received_ptr + values + index, received, mask=real)
        over, under = is_broken(x - give * sent + keep * received, x, lo, hi, slack, real)
        if tl.max((over | under).to(tl.int32), 0) > 0:
            tl.store(still_broken_ptr + image, 1)


@kernel("one")
def _cost_kernel(
    x_ptr, psi_ptr, s_ptr, t_ptr, keep_ptr, give_ptr, sent_ptr, z_ptr, cost_out, net_out, partial_ptr, arrived_ptr,
    wide_ptr, offset_ptr, fee_ptr, one, lo, hi,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    OFFSETS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The columns, in place of what was received, and the costs."""
    image, values, staged, index, real, place = _tile(one, C, H, W, RR, RC, BLOCK)
    psi = tl.load(psi_ptr + image)
    x = tl.load(x_ptr + values + index, mask=real, other=0.0).to(tl.float32)
    s, t = tl.load(s_ptr + staged + place), tl.load(t_ptr + staged + place)
    keep = tl.load(keep_ptr + values + index, mask=real, other=1.0)
    give = tl.load(give_ptr + values + index, mask=real, other=1.0)
    sent = tl.load(sent_ptr + values + index, mask=real, other=0.0)
    received = tl.load(z_ptr + values + index, mask=real, other=0.0)
    z = x - give * sent + keep * received
    tl.store(z_ptr + values + index, tl.minimum(tl.maximum(z, lo), hi), mask=real)
    if tl.load(wide_ptr + image) == 0:
        cost, net = pair_costs(
            s_ptr + staged, t_ptr + staged, place, s, t, psi, offset_ptr, fee_ptr, PAIRS, True
        )  # fmt: skip
    else:
        cost, net = factored_pair_costs(
            s_ptr + staged, t_ptr + staged, keep_ptr + values, give_ptr + values, place, index, real, s, t, keep, give,
            psi, offset_ptr, fee_ptr, W, RR, RC, PAIRS,
        )  # fmt: skip
    last, cost, net = _image_sums(
        tl.where(real, cost, 0.0),
        tl.where(real, net, 0.0),
        partial_ptr,
        arrived_ptr,
        image,
        C * H * W,
        BLOCK,
    )
    if last:
        tl.store(cost_out + image, cost)
        tl.store(net_out + image, net)
