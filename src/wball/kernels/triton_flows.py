"""Flows along the moves in Triton kernels: their sums, their repair into the box, their cost.

The factors of a repair are staged with the terms they belong to (``s`` with ``keep``, ``t`` with
``give``), so that two buffers per image suffice.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from wball.kernels.plan_rows import PLAIN_SWEEPS, REPAIR_SWEEPS
from wball.kernels.triton_stencil import ON_CHIP, UNROLL, weight_of

_SWEEPS, _PLAIN = tl.constexpr(REPAIR_SWEEPS), tl.constexpr(PLAIN_SWEEPS)


class FlowBox(NamedTuple):
    """Bounds of the columns, and the mass beyond them that a repair may leave."""

    lo: tl.tensor
    hi: tl.tensor
    slack: tl.tensor


class RowPlan(NamedTuple):
    """The plan ``t_i s_j exp(-psi c_ij)`` with rows ``x``, in which pixels send and receive this
    much."""

    x: tl.tensor
    s: tl.tensor
    t: tl.tensor
    psi: tl.tensor
    sent: tl.tensor
    received: tl.tensor


@triton.jit
def flows(
    ptr, place, own, toward: tl.constexpr, psi, window, LAYOUT: tl.constexpr, PAID: tl.constexpr = False
):  # fmt: skip
    """``sum_k own[i] value[i + toward k] exp(-psi c_k)`` over all moves but the one that stays,
    each times its cost if ``PAID``.

    The row terms of the neighbours and ``toward=-1`` give the inflow; their column terms and
    ``toward=1`` give the outflow.
    """
    total = tl.zeros(own.shape, own.dtype)
    if len(LAYOUT.offsets) > 0:
        for d in tl.static_range(1, len(LAYOUT.ends) - 1):
            ring = tl.zeros(own.shape, own.dtype)
            for k in tl.static_range(
                tl.constexpr(LAYOUT.ends[d]), tl.constexpr(LAYOUT.ends[d + 1])
            ):
                ring += tl.load(ptr + place + toward * LAYOUT.offsets[k])
            ring = ring * weight_of(psi, window.fees[d], LAYOUT.rough)
            total += window.fees[d] * ring if PAID else ring
    else:
        for k in tl.range(
            1, LAYOUT.ends[-1], loop_unroll_factor=UNROLL if LAYOUT.block <= ON_CHIP else 1
        ):
            fee = tl.load(window.fee + k)
            there = ptr + place + toward * tl.load(window.offset + k)
            flow = tl.load(there) * weight_of(psi, fee, LAYOUT.rough)
            total += fee * flow if PAID else flow
    return own * total


@triton.jit
def stage(ptr, place, values, real):
    """Let the neighbours see values."""
    tl.debug_barrier()
    tl.store(ptr + place, values, mask=real)
    tl.debug_barrier()


@triton.jit
def outside(net, x, box, real):
    """The columns above the box, and those below it, where pixels gain ``net``."""
    return ((x - box.hi) + net > box.slack) & real, ((box.lo - x) - net > box.slack) & real


@triton.jit
def tighten(x, flow, factors, outside, box, final, more):
    """Factors ``(keep, give)`` after one repair sweep of a plan without them that sends and
    receives ``flow``. In the final sweep no pixel counts on the mass that it sends or receives, and
    every column is treated, and every row for lo > 0.

    Pixels outside the box are corrected by ``more`` times their excess in addition.
    """
    sent, received = flow
    keep, give = factors
    over, under = outside
    lo, hi = box.lo, box.hi
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
def way_back(before, after, slack, real):
    """The fraction of the way from ``before`` to ``after`` at which a column above its bound
    reaches it. Both are relative to the bound."""
    below = tl.maximum(-after, 0.0)
    return tl.where((before > slack) & real, before / tl.maximum(before + below, 1.2e-38), 0.0)


@triton.jit
def repair(plan, box, ptr, at, window, LAYOUT: tl.constexpr, GIVES: tl.constexpr):
    """The repair of :func:`wball.kernels.plan_rows.into_box`. ``ptr`` is a staged buffer. Without
    ``GIVES`` rows keep what they have.

    Returns ``(keep, give, sent, arrived)``, all factors included.
    """
    x, s, t, psi, raw_sent, raw_received = plan
    real, place = at.real, at.place
    keep = tl.full(x.shape, 1.0, x.dtype)
    give = tl.full(x.shape, 1.0, x.dtype)
    sent = raw_sent
    arrived = raw_received
    net = arrived - sent
    above, below = outside(net, x, box, real)
    broken = tl.max((above | below).to(tl.int32), 0)
    sweep = 0
    while (sweep <= _SWEEPS) & (broken > 0):
        final = sweep == _SWEEPS
        more = tl.where(final | (sweep < _PLAIN), 0.0, 1.0)
        tighter_keep, tighter_give = tighten(
            x, (raw_sent, raw_received), (keep, give), (above, below), box, final, more
        )
        stage(ptr, place, s * tighter_keep, real)
        raw_sent = flows(ptr, place, t, 1, psi, window, LAYOUT)
        if GIVES:
            stage(ptr, place, t * tighter_give, real)
            raw_received = flows(ptr, place, s, -1, psi, window, LAYOUT)
        next_sent = tighter_give * raw_sent
        next_arrived = tighter_keep * raw_received
        mix = tl.max(
            way_back(
                (x - box.hi) + net, (x - box.hi) + (next_arrived - next_sent), box.slack, real
            ),
            0,
        )
        mix = tl.where(final & (box.lo <= 0.0), mix, 1.0)
        sent += mix * (next_sent - sent)
        arrived += mix * (next_arrived - arrived)
        keep += mix * (tighter_keep - keep)
        give += mix * (tighter_give - give)
        net = arrived - sent
        above, below = outside(net, x, box, real)
        broken = tl.max((above | below).to(tl.int32), 0)
        sweep += 1
    return keep, give, sent, arrived


@triton.jit
def pair_costs(s_ptr, t_ptr, place, plan, table, PAIRS: tl.constexpr, ROUGH: tl.constexpr):
    """Cost of the moves between a pixel and its partners, before and after opposite moves cancel.

    ``plan`` is ``s``, ``t`` and ``psi``; terms include their factors, as the staged ones do.
    """
    s, t, psi = plan
    cost = tl.zeros_like(s)
    net = tl.zeros_like(s)
    for k in tl.range(0, PAIRS, loop_unroll_factor=4):
        ahead = place + tl.load(table.pair_offset + k)
        there = tl.load(table.pair_fee + 2 * k).to(s.dtype)
        back = tl.load(table.pair_fee + 2 * k + 1).to(s.dtype)
        one_way = back < 0
        back = tl.maximum(back, 0.0)
        out = t * tl.load(s_ptr + ahead) * weight_of(psi, there, ROUGH)
        into = s * tl.load(t_ptr + ahead) * weight_of(psi, back, ROUGH)
        into = tl.where(one_way, 0.0, into)
        cost += there * out + back * into
        net += there * tl.maximum(out - into, 0.0) + back * tl.maximum(into - out, 0.0)
    return cost, net
