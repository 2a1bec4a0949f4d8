"""The repair of a plan that is written out (:meth:`wball.plan.Plan.repair`) inside a Triton
program, one image each."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from wball.kernels.proximal_newton.triton_dual import DIAGONAL, OWN, TOLL, Q, S, Spots, in_use, put
from wball.kernels.triton_stencil import read
from wball.plan import REPAIR_SWEEPS

SWEEPS = tl.constexpr(REPAIR_SWEEPS)
ROOM, PLENTY, RATE, REST, NEAR = Q, S, OWN, TOLL, DIAGONAL
"""Buffers of the repair."""


class WrittenPlan(NamedTuple):
    """A plan in memory. It is not staged: moves are an image's plane apart, and ``spot`` is where
    those of a pixel begin.

    ``marks`` and ``incoming`` have a bit for each move in use.
    """

    spots: Spots
    flow: tl.tensor
    spot: tl.tensor
    marks: tl.tensor
    incoming: tl.tensor


@triton.jit
def _exchange(plan, table, CASE: tl.constexpr):
    """What each pixel sends away and receives."""
    PLANE: tl.constexpr = CASE.layout.height * CASE.layout.width
    _, flow_ptr, spot, marks, incoming = plan
    sent, come = tl.zeros(spot.shape, tl.float64), tl.zeros(spot.shape, tl.float64)
    for k in tl.range(1, CASE.moves):
        step = tl.load(table.flat + k)
        sent += read(flow_ptr + k * PLANE + spot, in_use(marks, k))
        used = in_use(incoming, k)
        come += read(flow_ptr + k * PLANE + spot - step, used)
    return sent, come


@triton.jit
def _send_back(plan, z, near, more, limits, rounding, table, CASE: tl.constexpr):
    """One sweep of :meth:`wball.plan.Plan.repair`: overfull pixels send back, drained ones
    recall. ``near``: how much came from pixels with room, at any distance; returns that of the
    next sweep."""
    STAGED: tl.constexpr = CASE.layout.staged
    PLANE: tl.constexpr = CASE.layout.height * CASE.layout.width
    spots, flow_ptr, spot, marks, incoming = plan
    s_ptr, place, _ = spots
    lo, hi = limits.lo, limits.hi
    room = tl.maximum(hi - z, 0.0)
    near = tl.where(z < hi, 1.0, near)
    put(spots, ROOM, room, CASE)
    put(spots, NEAR, near, CASE)
    if CASE.lower:
        put(spots, PLENTY, tl.maximum(z - lo, 0.0), CASE)
    tl.debug_barrier()
    easy, come = z * 0.0 + 1e-300, z * 0.0 + 1e-30
    for k in tl.range(1, CASE.moves):
        start = place - tl.load(table.offset + k)
        used = in_use(incoming, k)
        part = read(flow_ptr + k * PLANE + spot - tl.load(table.flat + k), used)
        come += part * read(s_ptr + NEAR * STAGED + start, used)
        easy += tl.minimum(part, read(s_ptr + ROOM * STAGED + start, used))
    excess = tl.where(z > hi + rounding, more * (z - hi), 0.0)
    enough = easy >= excess
    put(spots, RATE, tl.where(enough, excess / easy, 0.0), CASE)
    put(spots, REST, tl.where(enough, 0.0, excess / come), CASE)
    recall, recall_rest = z * 0.0, z * 0.0
    if CASE.lower:
        easy, full = z * 0.0 + 1e-300, z * 0.0 + 1e-300
        for k in tl.range(1, CASE.moves):
            used = in_use(marks, k)
            part = read(flow_ptr + k * PLANE + spot, used)
            there = place + tl.load(table.offset + k)
            full += part
            easy += tl.minimum(part, read(s_ptr + PLENTY * STAGED + there, used))
        lack = tl.where(z < lo - rounding, more * (lo - z), 0.0)
        recall = tl.where(easy >= lack, lack / easy, 0.0)
        recall_rest = tl.where(easy >= lack, 0.0, lack / full)
    tl.debug_barrier()
    for k in tl.range(1, CASE.moves):
        used = in_use(marks, k)
        part = read(flow_ptr + k * PLANE + spot, used)
        there = place + tl.load(table.offset + k)
        back = tl.minimum(part, room) * read(s_ptr + RATE * STAGED + there, used)
        back += part * near * read(s_ptr + REST * STAGED + there, used)
        if CASE.lower:
            plenty = read(s_ptr + PLENTY * STAGED + there, used)
            back = tl.maximum(back, tl.minimum(part, plenty) * recall + part * recall_rest)
        tl.store(flow_ptr + k * PLANE + spot, part - tl.minimum(back, part), mask=used)
    tl.debug_barrier()
    return come


@triton.jit
def repair(plan, x, limits, table, CASE: tl.constexpr):
    """:meth:`wball.plan.Plan.cancelled` and :meth:`wball.plan.Plan.repair` of a plan with rows
    ``x``, in place.

    Returns a factor that is left to apply to everything that moves, and the columns with it.
    """
    PLANE: tl.constexpr = CASE.layout.height * CASE.layout.width
    spots, flow_ptr, spot, marks, _ = plan
    real = spots.real
    budget, lo, hi = limits
    tl.debug_barrier()
    if CASE.exact:  # opposite flows waste budget, but the entropy requires them
        for k in tl.range(1, CASE.moves):
            back = tl.load(table.reverse + k)
            if back > k:  # one end of each pair of opposite moves treats both
                there = spot + tl.load(table.flat + k)
                used = in_use(marks, k)
                ahead = read(flow_ptr + k * PLANE + spot, used)
                behind = read(flow_ptr + back * PLANE + there, used)
                common = tl.minimum(ahead, behind)
                tl.store(flow_ptr + k * PLANE + spot, ahead - common, mask=used)
                tl.store(flow_ptr + back * PLANE + there, behind - common, mask=used)
    tl.debug_barrier()
    sent, come = _exchange(plan, table, CASE)
    # Where every pixel is full, nothing but rounding is ever left over and no sweep can remove it.
    rounding = 1e-13 * tl.maximum(hi, 1.0)
    z = x + (come - sent)
    wrong = tl.max(tl.where(real & ((z > hi + rounding) | (z < lo - rounding)), 1, 0), 0)
    sweep = wrong * 0
    near, more = z * 0.0 + 1.0, budget * 0.0 + 1.0
    while (wrong > 0) & (sweep < SWEEPS):
        # The last sweeps return ever more than the excess, so that what circulates among full
        # pixels dies out.
        more = tl.where(sweep > SWEEPS - 40, 2.0 * more, more)
        near = _send_back(plan, z, near, more, limits, rounding, table, CASE)
        sent, come = _exchange(plan, table, CASE)
        z = x + (come - sent)
        wrong = tl.max(tl.where(real & ((z > hi + rounding) | (z < lo - rounding)), 1, 0), 0)
        sweep += 1
    cost = x * 0.0
    for k in tl.range(1, CASE.moves):
        part = read(flow_ptr + k * PLANE + spot, in_use(marks, k))
        cost += part * tl.load(table.fee + k)
    spent = tl.sum(cost, 0)
    scale = tl.where(
        wrong > 0, 0.0, tl.where(spent > budget, budget / tl.maximum(spent, 1e-300), 1.0)
    )
    return scale, x + scale * (come - sent)
