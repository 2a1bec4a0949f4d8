"""Flows along the moves in Triton kernels: their sums, their repair into the box, their cost.

The factors of a repair are staged with the terms they belong to (``s`` with ``keep``, ``t`` with
``give``), so that two buffers per image suffice.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from wball.kernels.plan_rows import PLAIN_SWEEPS, REPAIR_SWEEPS
from wball.kernels.triton_stencil import ON_CHIP, UNROLL

_SWEEPS, _PLAIN = tl.constexpr(REPAIR_SWEEPS), tl.constexpr(PLAIN_SWEEPS)


@triton.jit
def flows(
    ptr, place, own, toward: tl.constexpr, psi, fees, offset_ptr, fee_ptr,
    ENDS: tl.constexpr, OFFSETS: tl.constexpr, PAID: tl.constexpr = False,
):  # fmt: skip
    """``sum_k own[i] value[i + toward k] exp(-psi c_k)`` over all moves but the one that stays,
    each times its cost if ``PAID``.

    The row terms of the neighbours and ``toward=-1`` give the inflow; their column terms and
    ``toward=1`` give the outflow.
    """
    total = tl.zeros(place.shape, own.dtype)
    if len(OFFSETS) > 0:
        for d in tl.static_range(1, len(ENDS) - 1):
            ring = tl.zeros(place.shape, own.dtype)
            for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                ring += tl.load(ptr + place + toward * OFFSETS[k])
            ring = ring * tl.exp(-psi * fees[d])
            total += fees[d] * ring if PAID else ring
    else:
        for k in tl.range(
            1, ENDS[len(ENDS) - 1], loop_unroll_factor=UNROLL if place.shape[0] <= ON_CHIP else 1
        ):
            fee = tl.load(fee_ptr + k)
            flow = tl.load(ptr + place + toward * tl.load(offset_ptr + k)) * tl.exp(-psi * fee)
            total += fee * flow if PAID else flow
    return own * total


@triton.jit
def stage(ptr, place, values, real):
    """Let the neighbours see values."""
    tl.debug_barrier()
    tl.store(ptr + place, values, mask=real)
    tl.debug_barrier()


@triton.jit
def _outside(net, x, lo, hi, slack, real):
    """The columns above the box, and those below it, where pixels gain ``net``."""
    return ((x - hi) + net > slack) & real, ((lo - x) - net > slack) & real


@triton.jit
def _tighten(x, sent, received, keep, give, over, under, lo, hi, final, more):
    """Factors after one repair sweep. In the final one, no pixel counts on the mass that it sends
    or receives, and every column is treated, and every row for lo > 0.

    Pixels outside the box are corrected by ``more`` times their excess in addition.
    """
    net = keep * received - give * sent
    above, below = (
        tl.where(over, more * ((x - hi) + net), 0.0),
        tl.where(under, more * ((lo - x) - net), 0.0),
    )
    counted = tl.where(final, 0.0, 1.0)
    room = tl.maximum((hi - x + counted * give * sent - above) / tl.maximum(received, 1.2e-38), 0.0)
    spare = tl.maximum(
        (x - lo + counted * keep * received - below) / tl.maximum(sent, 1.2e-38), 0.0
    )
    return (
        tl.where(over | final, tl.minimum(keep, room), keep),
        tl.where(under | (final & (lo > 0.0)), tl.minimum(give, spare), give),
    )


@triton.jit
def _way_back(before, after, slack, real):
    """The fraction of the way from ``before`` to ``after`` at which a column above its bound
    reaches it. Both are relative to the bound."""
    below = tl.maximum(-after, 0.0)
    return tl.where((before > slack) & real, before / tl.maximum(before + below, 1.2e-38), 0.0)


@triton.jit
def repair(
    x, s, t, raw_sent, raw_received, ptr, place, real, psi, fees, offset_ptr, fee_ptr,
    lo, hi, slack, ENDS: tl.constexpr, OFFSETS: tl.constexpr, GIVES: tl.constexpr,
):  # fmt: skip
    """The repair of :func:`wball.kernels.plan_rows.into_box` of a plan in which pixels send
    ``raw_sent`` and receive ``raw_received``. ``ptr`` is a staged buffer. Without ``GIVES`` rows
    keep what they have.

    Returns ``(keep, give, sent, arrived)``, all factors included.
    """
    keep = tl.full(x.shape, 1.0, x.dtype)
    give = tl.full(x.shape, 1.0, x.dtype)
    sent = raw_sent
    arrived = raw_received
    net = arrived - sent
    above, below = _outside(net, x, lo, hi, slack, real)
    broken = tl.max((above | below).to(tl.int32), 0)
    sweep = 0
    while (sweep <= _SWEEPS) & (broken > 0):
        final = sweep == _SWEEPS
        more = tl.where(final | (sweep < _PLAIN), 0.0, 1.0)
        tighter_keep, tighter_give = _tighten(
            x, raw_sent, raw_received, keep, give, above, below, lo, hi, final, more
        )
        stage(ptr, place, s * tighter_keep, real)
        raw_sent = flows(ptr, place, t, 1, psi, fees, offset_ptr, fee_ptr, ENDS, OFFSETS)
        if GIVES:
            stage(ptr, place, t * tighter_give, real)
            raw_received = flows(ptr, place, s, -1, psi, fees, offset_ptr, fee_ptr, ENDS, OFFSETS)
        next_sent = tighter_give * raw_sent
        next_arrived = tighter_keep * raw_received
        mix = tl.max(
            _way_back((x - hi) + net, (x - hi) + (next_arrived - next_sent), slack, real), 0
        )
        mix = tl.where(final & (lo <= 0.0), mix, 1.0)
        sent += mix * (next_sent - sent)
        arrived += mix * (next_arrived - arrived)
        keep += mix * (tighter_keep - keep)
        give += mix * (tighter_give - give)
        net = arrived - sent
        above, below = _outside(net, x, lo, hi, slack, real)
        broken = tl.max((above | below).to(tl.int32), 0)
        sweep += 1
    return keep, give, sent, arrived


@triton.jit
def pair_costs(s_ptr, t_ptr, place, s, t, psi, offset_ptr, fee_ptr, PAIRS: tl.constexpr):
    """Cost of the moves between a pixel and its partners, before and after opposite moves cancel.

    ``s`` and ``t`` include their factors, as the staged terms do.
    """
    cost = tl.zeros_like(s)
    net = tl.zeros_like(s)
    for k in tl.range(0, PAIRS, loop_unroll_factor=4):
        ahead = place + tl.load(offset_ptr + k)
        there = tl.load(fee_ptr + 2 * k).to(s.dtype)
        back = tl.load(fee_ptr + 2 * k + 1).to(s.dtype)
        one_way = back < 0
        back = tl.maximum(back, 0.0)
        out = t * tl.load(s_ptr + ahead) * tl.exp(-psi * there)
        into = s * tl.load(t_ptr + ahead) * tl.exp(-psi * back)
        into = tl.where(one_way, 0.0, into)
        cost += there * out + back * into
        net += there * tl.maximum(out - into, 0.0) + back * tl.maximum(into - out, 0.0)
    return cost, net
