"""Flows along the moves in Triton kernels: their sums, their repair into the box, their cost.

The factors of a repair are staged with the terms they belong to (``s`` with ``keep``, ``t`` with
``give``), so that two buffers per image suffice. In logs this would round outflow and inflow
differently, by the size of the potentials. There, factors are read from plain images
(:func:`factored_flows`).
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from wball.kernels.triton_stencil import LOG_RINGS_KEPT, ON_CHIP, RINGS_KEPT, UNROLL

_ROUNDING = tl.constexpr(4 * 2.0**-23)


@triton.jit
def flows(
    ptr, place, own, toward: tl.constexpr, psi, fees, offset_ptr, fee_ptr,
    ENDS: tl.constexpr, OFFSETS: tl.constexpr, LINEAR: tl.constexpr, PAID: tl.constexpr = False,
):  # fmt: skip
    """``sum_k own[i] value[i + toward k] exp(-psi c_k)`` over all moves but the one that stays,
    each times its cost if ``PAID``.

    The row terms of the neighbours and ``toward=-1`` give the inflow; their column terms and
    ``toward=1`` give the outflow.
    """
    total = tl.zeros(place.shape, own.dtype)
    if len(ENDS) - 1 > (RINGS_KEPT if LINEAR else LOG_RINGS_KEPT) or place.shape[0] > ON_CHIP:
        for k in tl.range(
            1, ENDS[len(ENDS) - 1], loop_unroll_factor=UNROLL if place.shape[0] <= ON_CHIP else 1
        ):
            fee = tl.load(fee_ptr + k)
            value = tl.load(ptr + place + toward * tl.load(offset_ptr + k))
            flow = value * tl.exp(-psi * fee) if LINEAR else tl.exp(value + own - psi * fee)
            total += fee * flow if PAID else flow
    else:
        for d in tl.static_range(1, len(ENDS) - 1):
            toll = psi * fees[d]
            ring = tl.zeros(place.shape, own.dtype)
            if len(OFFSETS) > 0:
                for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                    value = tl.load(ptr + place + toward * OFFSETS[k])
                    ring += value if LINEAR else tl.exp(value + own - toll)
            else:
                for k in tl.range(ENDS[d], ENDS[d + 1]):
                    value = tl.load(ptr + place + toward * tl.load(offset_ptr + k))
                    ring += value if LINEAR else tl.exp(value + own - toll)
            ring = ring * tl.exp(-toll) if LINEAR else ring
            total += fees[d] * ring if PAID else ring
    return own * total if LINEAR else total


@triton.jit
def stage_factors(s_ptr, t_ptr, place, s, t, keep, give, real):
    """Let the neighbours see column and row terms times the factors of a repair."""
    tl.debug_barrier()
    tl.store(s_ptr + place, s * keep, mask=real)
    tl.store(t_ptr + place, t * give, mask=real)
    tl.debug_barrier()


@triton.jit
def exchange(
    s_ptr, t_ptr, place, s, t, psi, fees, offset_ptr, fee_ptr,
    ENDS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Outflow of each pixel if its own ``give`` were 1, and inflow if its own ``keep`` were 1."""
    sent = flows(s_ptr, place, t, 1, psi, fees, offset_ptr, fee_ptr, ENDS, OFFSETS, True)
    received = flows(t_ptr, place, s, -1, psi, fees, offset_ptr, fee_ptr, ENDS, OFFSETS, True)
    return sent, received


@triton.jit
def is_broken(z, x, lo, hi, slack, real):
    """The columns above the box, and those below it.

    Potentials of size M cause a relative error of a few M * eps in the flows of a row: an emptied
    row may send more than it has, by far less than ``slack``.
    """
    return (z > hi + slack) & real, (z < lo - _ROUNDING * x - 1.2e-38) & real


@triton.jit
def tighten(x, sent, received, keep, give, over, under, lo, hi, counted, more):
    """Factors after one repair sweep. If ``counted`` is 0, every column is treated, and every row
    for lo > 0.

    Pixels outside the box are corrected by ``more`` times their excess in addition.
    """
    net = keep * received - give * sent
    above, below = (
        tl.where(over, more * ((x - hi) + net), 0.0),
        tl.where(under, more * ((lo - x) - net), 0.0),
    )
    room = tl.maximum((hi - x + counted * give * sent - above) / tl.maximum(received, 1.2e-38), 0.0)
    spare = tl.maximum(
        (x - lo + counted * keep * received - below) / tl.maximum(sent, 1.2e-38), 0.0
    )
    last = counted == 0.0
    kept, given = tl.minimum(keep, room), tl.minimum(give, spare)
    return (
        tl.where(last, kept, tl.where(over, kept, keep)),
        tl.where(
            last,
            tl.where(lo > 0.0, given, tl.where(under, given, give)),
            tl.where(under, given, give),
        ),
    )


@triton.jit
def way_back(before, after, hi, slack, real):
    """The fraction of the way from ``before``, above ``hi``, to ``after``, at which a column is
    ``hi``."""
    excess, below = before - hi, tl.maximum(hi - after, 0.0)
    return tl.where((excess > slack) & real, excess / tl.maximum(excess + below, 1.2e-38), 0.0)


@triton.jit
def pair_costs(s_ptr, t_ptr, place, s, t, psi, offset_ptr, fee_ptr, PAIRS: tl.constexpr):
    """Cost of the moves between a pixel and its partners, before and after opposite moves cancel.

    ``s`` and ``t`` include their factors, as the staged terms do.
    """
    cost = tl.zeros_like(s)
    net = tl.zeros_like(s)
    for k in tl.range(0, PAIRS, loop_unroll_factor=4):
        ahead = place + tl.load(offset_ptr + k)
        there, back = tl.load(fee_ptr + 2 * k), tl.load(fee_ptr + 2 * k + 1)
        one_way = back < 0
        back = tl.maximum(back, 0.0)
        out = t * tl.load(s_ptr + ahead) * tl.exp(-psi * there)
        into = s * tl.load(t_ptr + ahead) * tl.exp(-psi * back)
        into = tl.where(one_way, 0.0, into)
        cost += there * out + back * into
        net += there * tl.maximum(out - into, 0.0) + back * tl.maximum(into - out, 0.0)
    return cost, net


@triton.jit
def _unstaged(step, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr):
    """The step between the same two pixels in an image without halos."""
    return step - RC * ((step + RC + RR * (W + RC)) // (W + RC) - RR)


@triton.jit
def factored_flows(
    ptr, factor_ptr, place, index, real, own, toward: tl.constexpr, psi, offset_ptr, fee_ptr,
    W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, MOVES: tl.constexpr, PAID: tl.constexpr = False,
):  # fmt: skip
    """:func:`flows` in logs, each times the factor of the pixel at its other end."""
    total = tl.zeros(place.shape, own.dtype)
    for k in tl.range(1, MOVES, loop_unroll_factor=UNROLL if place.shape[0] <= ON_CHIP else 1):
        step = toward * tl.load(offset_ptr + k)
        value = tl.load(ptr + place + step)
        there = real & (value > float("-inf"))  # halos and empty rows have nothing
        factor = tl.load(factor_ptr + index + _unstaged(step, W, RR, RC), mask=there, other=0.0)
        fee = tl.load(fee_ptr + k)
        flow = tl.exp(value + own - psi * fee) * factor
        total += fee * flow if PAID else flow
    return total


@triton.jit
def factored_exchange(
    s_ptr, t_ptr, keep_ptr, give_ptr, place, index, real, s, t, psi, offset_ptr, fee_ptr,
    W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """:func:`exchange` in logs: outflow and inflow are sums of the same numbers."""
    sent = factored_flows(
        s_ptr, keep_ptr, place, index, real, t, 1, psi, offset_ptr, fee_ptr, W, RR, RC, MOVES
    )
    received = factored_flows(
        t_ptr, give_ptr, place, index, real, s, -1, psi, offset_ptr, fee_ptr, W, RR, RC, MOVES
    )
    return sent, received


@triton.jit
def factored_pair_costs(
    s_ptr, t_ptr, keep_ptr, give_ptr, place, index, real, s, t, keep, give, psi, offset_ptr, fee_ptr,
    W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """:func:`pair_costs` in logs."""
    cost = tl.zeros_like(s)
    net = tl.zeros_like(s)
    for k in tl.range(0, PAIRS, loop_unroll_factor=4):
        step = tl.load(offset_ptr + k)
        there, back = tl.load(fee_ptr + 2 * k), tl.load(fee_ptr + 2 * k + 1)
        one_way = back < 0
        back = tl.maximum(back, 0.0)
        end = tl.load(s_ptr + place + step)
        inside = real & (end > float("-inf"))
        spot = index + _unstaged(step, W, RR, RC)
        out = (
            tl.exp(t + end - psi * there) * give * tl.load(keep_ptr + spot, mask=inside, other=0.0)
        )
        into = tl.exp(tl.load(t_ptr + place + step) + s - psi * back) * keep
        into = tl.where(one_way, 0.0, into * tl.load(give_ptr + spot, mask=inside, other=0.0))
        cost += there * out + back * into
        net += there * tl.maximum(out - into, 0.0) + back * tl.maximum(into - out, 0.0)
    return cost, net
