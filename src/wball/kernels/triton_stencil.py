r"""What the Triton kernels share: images staged with a halo, tables of moves, and passes over a stencil.

Triton cannot gather from registers, so what neighbours must see (potentials, row terms, factors) is *staged* in a
small global buffer per image that stays in the first-level cache. Rows are ``W + rc`` apart and planes ``H + rr`` rows
apart, where ``(rr, rc)`` is the reach of the stencil: the halo to the right of a row is also the halo to the left of
the next, and the halo below a plane is also the halo above the next. A move is then one number added to an address,
no bounds are checked, and a buffer is little larger than the images. Halos hold no mass: ``-inf`` in logs, 0 otherwise.

Every pass exists twice. Potentials whose range over an image is at most :data:`RANGE` nats are exponentiated once a
pixel, relative to their maximum: the mass on a move is then a product ``A_i B_j exp(-psi c)``, a pass over the moves
loads and adds, and what underflows would be less than 1e-11 of a row. Wider potentials (late in an attack) take the
passes in logs, at one exponential a move. Programs of the first kind note the images they must leave to the second.

Moves are ordered by ring, the centre alone in ring 0. Rings are unrolled (each is a tensor in registers). So are the
moves inside a ring of small windows, with their offsets in the code, because a pass over an image that is on chip waits
for loads more than it computes; large windows loop over a table, or they would compile for minutes.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005  (Triton has no starred tuples)
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

Move = tuple[int, int, float]

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
MAX_ON_CHIP = 4096
"""Images up to this many values are solved by one program that keeps them in registers."""
TILE = 1024
"""Values per program of a larger image."""
RANGE = 60.0
"""Potentials that differ by no more than this over an image need no logs."""
MAX_UNROLLED = 49
"""Windows with up to this many moves have their offsets in the code."""


@dataclass(frozen=True)
class Stencil:
    """Moves on images of one shape, as the kernels read them.

    Attributes:
        shape: ``(C, H, W)``.
        reach: largest row and column offset ``(rr, rc)``.
        ends: ``ends[d]:ends[d + 1]`` are the moves of ring ``d``.
        offsets: address offset of each move, for the code; empty for large windows.
        offset: the same as a table, int32.
        price: cost of each move, float32.
        pair_offset: offsets of pairs of opposite moves, each pair once.
        pair_price: cost there and cost back (negative: no such move), float32, ``(2 * pairs,)``.
    """

    shape: tuple[int, int, int]
    reach: tuple[int, int]
    ends: tuple[int, ...]
    offsets: tuple[int, ...]
    offset: Tensor
    price: Tensor
    pair_offset: Tensor
    pair_price: Tensor

    @property
    def values(self) -> int:
        channels, height, width = self.shape
        return channels * height * width

    @property
    def guard(self) -> int:
        """Staged values before the first pixel."""
        return self.reach[0] * (self.shape[2] + self.reach[1]) + self.reach[1]

    @property
    def staged(self) -> int:
        """Staged values per image."""
        channels, height, width = self.shape
        return channels * (height + self.reach[0]) * (width + self.reach[1])

    def stage(self, count: int, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        """``count`` buffers for a batch, each starting at its first pixel."""
        buffers = torch.empty((count, self.guard + batch * self.staged), dtype=torch.float32, device=device)
        return tuple(buffers[k, self.guard :] for k in range(count))

    def unstage(self, buffer: Tensor, batch: int) -> Tensor:
        """The pixels of a staged buffer, as a view ``(B, C, H, W)``."""
        channels, height, width = self.shape
        row = width + self.reach[1]
        plane = (height + self.reach[0]) * row
        return buffer.as_strided(
            (batch, channels, height, width), (channels * plane, plane, row, 1), buffer.storage_offset()
        )


def stencil(moves: Sequence[Move], x: Tensor) -> Stencil:
    """The tables for images like ``x`` (built once per shape and device)."""
    return _stencil(tuple(moves), tuple(int(n) for n in x.shape[1:]), x.device)


@lru_cache(maxsize=64)
def _stencil(moves: tuple[Move, ...], shape: tuple[int, int, int], device: torch.device) -> Stencil:
    stay = (0, 0, 0.0)
    if stay not in moves:
        raise ValueError(f"moves must hold {stay}, the move that stays, got {moves}")
    rr, rc = max(abs(r) for r, _, _ in moves), max(abs(c) for _, c, _ in moves)
    row = shape[2] + rc
    ends, rest = [0, 1], sorted((move for move in moves if move != stay), key=lambda move: move[2])
    for k, move in enumerate(rest):
        if k + 1 == len(rest) or rest[k + 1][2] != move[2]:
            ends.append(k + 2)
    ordered = [stay, *rest]
    cost = {(r, c): price for r, c, price in rest}
    pairs = []
    for r, c, price in rest:
        back = cost.get((-r, -c))
        if back is None:
            pairs.append((r * row + c, price, -1.0))
        elif (r, c) > (-r, -c):
            pairs.append((r * row + c, price, back))

    def table(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    offsets = [r * row + c for r, c, _ in ordered]
    return Stencil(
        shape,
        (rr, rc),
        tuple(ends),
        tuple(offsets) if len(offsets) <= MAX_UNROLLED else (),
        table(offsets, torch.int32),
        table([price for *_, price in ordered], torch.float32),
        table([p[0] for p in pairs] or [0], torch.int32),
        table([v for p in pairs for v in p[1:]] or [0.0], torch.float32),
    )


@triton.jit
def staged_position(index, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr):
    """Address of pixel ``index`` (counted without halos) in an image's staged buffer.

    64 bits wide, so that the compiler may add a move's offset inside the load instruction instead of keeping one
    address per move.
    """
    inside = index % (H * W)
    place = index // (H * W) * ((H + RR) * (W + RC)) + inside // W * (W + RC) + inside % W
    return place.to(tl.int64)


@triton.jit
def is_halo(place, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr):
    """Whether a staged address (from ``-guard`` on) is no pixel."""
    ahead = tl.maximum(place, 0)
    return (place < 0) | (ahead % ((H + RR) * (W + RC)) // (W + RC) >= H) | (ahead % (W + RC) >= W)


@triton.jit
def stage_halos(
    s_ptr, t_ptr, keep_ptr, give_ptr, index,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr,
    LINEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything around an image that its stencil may touch: no mass there."""
    STAGED: tl.constexpr = C * (H + RR) * (W + RC)
    GUARD: tl.constexpr = RR * (W + RC) + RC
    nothing = 0.0 if LINEAR else float("-inf")
    for first in tl.range(0, STAGED + GUARD, BLOCK):
        spot = first + index - GUARD
        halo = is_halo(spot, H, W, RR, RC) & (spot < STAGED)
        tl.store(s_ptr + spot, nothing, mask=halo)
        tl.store(t_ptr + spot, nothing, mask=halo)
        tl.store(keep_ptr + spot, 0.0, mask=halo)
        tl.store(give_ptr + spot, 0.0, mask=halo)


@triton.jit
def _widest(a0, a1, b0, b1):
    return tl.maximum(a0, b0), tl.minimum(a1, b1)


@triton.jit
def extent(values, real):
    """Largest and smallest value of an image."""
    above, below = tl.where(real, values, float("-inf")), tl.where(real, values, float("inf"))
    if INTERPRETED:
        return tl.max(above, 0), tl.min(below, 0)
    else:
        return tl.reduce((above, below), 0, _widest)


@triton.jit
def ring_prices(price_ptr, ENDS: tl.constexpr):
    """The cost of each ring, as a tuple of scalars."""
    prices = (0.0,)
    for d in tl.static_range(1, len(ENDS) - 1):
        prices = prices + (tl.load(price_ptr + ENDS[d]),)
    return prices


@triton.jit
def log_rings(s_ptr, place, own, offset_ptr, ENDS: tl.constexpr, OFFSETS: tl.constexpr):
    """For each ring, the logsumexp of the staged values at its ends; ``own`` is the value at the centre."""
    rings = (own,)
    for d in tl.static_range(1, len(ENDS) - 1):
        top = tl.full(own.shape, -3.0e38, tl.float32)  # finite: a ring may lie outside the image
        total = tl.zeros_like(own)
        if len(OFFSETS) > 0:
            for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                top = tl.maximum(top, tl.load(s_ptr + place + OFFSETS[k]))
            for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                total += tl.exp(tl.load(s_ptr + place + OFFSETS[k]) - top)
        else:
            for k in tl.range(ENDS[d], ENDS[d + 1]):
                top = tl.maximum(top, tl.load(s_ptr + place + tl.load(offset_ptr + k)))
            for k in tl.range(ENDS[d], ENDS[d + 1]):
                total += tl.exp(tl.load(s_ptr + place + tl.load(offset_ptr + k)) - top)
        rings = rings + (top + tl.log(total),)
    return rings


@triton.jit
def log_moments(rings, prices, psi):
    """Mean and variance of the cost of a row, the log of its normaliser, and the share of it that moves."""
    top = rings[0]
    pivot = tl.zeros_like(top)  # the likeliest cost: moments around it do not cancel
    for d in tl.static_range(1, len(rings)):
        score = rings[d] - psi * prices[d]
        pivot = tl.where(score > top, prices[d], pivot)
        top = tl.maximum(top, score)
    stay = tl.exp(rings[0] - top)
    moving = tl.zeros_like(top)
    first = -pivot * stay
    second = pivot * pivot * stay
    for d in tl.static_range(1, len(rings)):
        weight = tl.exp(rings[d] - psi * prices[d] - top)
        apart = prices[d] - pivot
        moving += weight
        first += apart * weight
        second += apart * apart * weight
    total = stay + moving
    shift = first / total
    return pivot + shift, tl.maximum(second / total - shift * shift, 0.0), top + tl.log(total), moving / total


@triton.jit
def ring_sums(b_ptr, place, own, offset_ptr, ENDS: tl.constexpr, OFFSETS: tl.constexpr):
    """For each ring, the sum of the staged values at its ends."""
    rings = (own,)
    for d in tl.static_range(1, len(ENDS) - 1):
        total = tl.zeros_like(own)
        if len(OFFSETS) > 0:
            for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                total += tl.load(b_ptr + place + OFFSETS[k])
        else:
            for k in tl.range(ENDS[d], ENDS[d + 1]):
                total += tl.load(b_ptr + place + tl.load(offset_ptr + k))
        rings = rings + (total,)
    return rings


@triton.jit
def sum_moments(rings, prices, psi):
    """:func:`log_moments` for sums; the normaliser itself instead of its log."""
    best = rings[0]
    pivot = tl.zeros_like(best)
    moving = tl.zeros_like(best)
    for d in tl.static_range(1, len(rings)):
        weight = rings[d] * tl.exp(-psi * prices[d])
        pivot = tl.where(weight > best, prices[d], pivot)
        best = tl.maximum(best, weight)
        moving += weight
    first = -pivot * rings[0]
    second = pivot * pivot * rings[0]
    for d in tl.static_range(1, len(rings)):
        weight = rings[d] * tl.exp(-psi * prices[d])
        apart = prices[d] - pivot
        first += apart * weight
        second += apart * apart * weight
    total = rings[0] + moving
    shift = first / total
    return pivot + shift, tl.maximum(second / total - shift * shift, 0.0), total, moving / total


@triton.jit
def moments(rings, prices, psi, LINEAR: tl.constexpr):
    if LINEAR:
        return sum_moments(rings, prices, psi)
    else:
        return log_moments(rings, prices, psi)


@triton.jit
def make_rings(ptr, place, own, offset_ptr, ENDS: tl.constexpr, OFFSETS: tl.constexpr, LINEAR: tl.constexpr):
    if LINEAR:
        return ring_sums(ptr, place, own, offset_ptr, ENDS, OFFSETS)
    else:
        return log_rings(ptr, place, own, offset_ptr, ENDS, OFFSETS)


@triton.jit
def newton_step(psi, low, high, cost, slope, budget, tolerance):
    """One bracketed Newton step on ``log(cost)``; returns ``(psi, low, high, done)`` with psi kept where done."""
    inside = cost <= budget
    done = inside & ((cost >= budget * (1 - tolerance)) | (psi == 0.0))
    low = tl.where(inside, low, psi)
    high = tl.where(inside, psi, high)
    step = psi + cost * tl.log(cost / (budget * (1 - tolerance / 2))) / slope
    step = tl.where(step < 0.0, 0.0, step)  # not a number where nothing moves
    middle = tl.where(high == float("inf"), 2 * psi + 1, 0.5 * (tl.maximum(low, 0.0) + high))
    # A slope lost to underflow sends the step to the moon: not beyond a hundred times where we are.
    step = tl.where((step > low) & (step < high) & (step < 100 * psi + 100), step, middle)
    return tl.where(done, psi, step), low, high, done


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def sum_two(a, b):
    """Two sums over a block for the price of one wait (the interpreter adds pairs one by one, so not there)."""
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0)
    else:
        return tl.reduce((a, b), 0, _add_two)


@triton.jit
def _add_six(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def sum_six(a, b, c, d, e, f):
    if INTERPRETED:
        return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0), tl.sum(d, 0), tl.sum(e, 0), tl.sum(f, 0)
    else:
        return tl.reduce((a, b, c, d, e, f), 0, _add_six)


@triton.jit
def neighbours(ptr, place, toward: tl.constexpr, psi, prices, offset_ptr, ENDS: tl.constexpr, OFFSETS: tl.constexpr):
    """``sum_k value[i + toward k] exp(-psi c_k)`` over all moves but the one that stays."""
    total = tl.zeros(place.shape, tl.float32)
    for d in tl.static_range(1, len(ENDS) - 1):
        ring = tl.zeros(place.shape, tl.float32)
        if len(OFFSETS) > 0:
            for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                ring += tl.load(ptr + place + toward * OFFSETS[k])
        else:
            for k in tl.range(ENDS[d], ENDS[d + 1]):
                ring += tl.load(ptr + place + toward * tl.load(offset_ptr + k))
        total += ring * tl.exp(-psi * prices[d])
    return total


@triton.jit
def arriving(
    t_ptr, place, own, psi, prices, offset_ptr, ENDS: tl.constexpr, OFFSETS: tl.constexpr, LINEAR: tl.constexpr
):
    """What arrives at each pixel from others: ``sum_k A[i - k] B[i] exp(-psi c_k)``."""
    if LINEAR:
        total = own * neighbours(t_ptr, place, -1, psi, prices, offset_ptr, ENDS, OFFSETS)
    else:
        total = tl.zeros_like(own)
        for d in tl.static_range(1, len(ENDS) - 1):
            toll = psi * prices[d]
            if len(OFFSETS) > 0:
                for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                    total += tl.exp(tl.load(t_ptr + place - OFFSETS[k]) + own - toll)
            else:
                for k in tl.range(ENDS[d], ENDS[d + 1]):
                    total += tl.exp(tl.load(t_ptr + place - tl.load(offset_ptr + k)) + own - toll)
    return total


@triton.jit
def _exchange_one(s_ptr, t_ptr, keep_ptr, give_ptr, ahead, behind, s, t, toll):
    out = tl.exp(t + tl.load(s_ptr + ahead) - toll) * tl.load(keep_ptr + ahead)
    into = tl.exp(tl.load(t_ptr + behind) + s - toll) * tl.load(give_ptr + behind)
    return out, into


@triton.jit
def stage_factors(s_ptr, t_ptr, keep_ptr, give_ptr, place, s, t, keep, give, real, LINEAR: tl.constexpr):
    """Let the neighbours see the factors: on their own, or (without logs) multiplied into what they belong to."""
    tl.debug_barrier()
    if LINEAR:
        tl.store(s_ptr + place, s * keep, mask=real)
        tl.store(t_ptr + place, t * give, mask=real)
    else:
        tl.store(keep_ptr + place, keep, mask=real)
        tl.store(give_ptr + place, give, mask=real)
    tl.debug_barrier()


@triton.jit
def exchange(
    s_ptr, t_ptr, keep_ptr, give_ptr, place, s, t, psi, prices, offset_ptr,
    ENDS: tl.constexpr, OFFSETS: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """What each pixel would send if its own ``give`` were 1, and receive if its own ``keep`` were 1."""
    if LINEAR:
        sent = t * neighbours(s_ptr, place, 1, psi, prices, offset_ptr, ENDS, OFFSETS)
        received = s * neighbours(t_ptr, place, -1, psi, prices, offset_ptr, ENDS, OFFSETS)
    else:
        sent = tl.zeros_like(s)
        received = tl.zeros_like(s)
        for d in tl.static_range(1, len(ENDS) - 1):
            toll = psi * prices[d]
            if len(OFFSETS) > 0:
                for k in tl.static_range(tl.constexpr(ENDS[d]), tl.constexpr(ENDS[d + 1])):
                    out, into = _exchange_one(
                        s_ptr, t_ptr, keep_ptr, give_ptr, place + OFFSETS[k], place - OFFSETS[k], s, t, toll
                    )
                    sent += out
                    received += into
            else:
                for k in tl.range(ENDS[d], ENDS[d + 1]):
                    offset = tl.load(offset_ptr + k)
                    out, into = _exchange_one(
                        s_ptr, t_ptr, keep_ptr, give_ptr, place + offset, place - offset, s, t, toll
                    )
                    sent += out
                    received += into
    return sent, received


@triton.jit
def tighten(x, sent, received, keep, give, over, under, lo, hi, share):
    """Factors after one repair sweep; with share 0 every column and row of the image is treated."""
    room = tl.maximum((hi - x + share * give * sent) / tl.maximum(received, 1.2e-38), 0.0)
    spare = tl.maximum((x - lo + share * keep * received) / tl.maximum(sent, 1.2e-38), 0.0)
    kept, given = tl.minimum(keep, room), tl.minimum(give, spare)
    everywhere = share == 0.0
    return (
        tl.where(everywhere, kept, tl.where(over, kept, keep)),
        tl.where(everywhere, given, tl.where(under, given, give)),
    )


@triton.jit
def pair_costs(
    s_ptr, t_ptr, keep_ptr, give_ptr, place, s, t, keep, give, psi, offset_ptr, price_ptr,
    PAIRS: tl.constexpr, UNROLL: tl.constexpr, LINEAR: tl.constexpr,
):  # fmt: skip
    """Cost of the moves between a pixel and its partners, and of what is left after opposite moves cancel."""
    cost = tl.zeros_like(s)
    net = tl.zeros_like(s)
    for k in tl.range(0, PAIRS, loop_unroll_factor=UNROLL):
        ahead = place + tl.load(offset_ptr + k)
        there, back = tl.load(price_ptr + 2 * k), tl.load(price_ptr + 2 * k + 1)
        if LINEAR:
            out = t * give * tl.load(s_ptr + ahead) * tl.exp(-psi * there)
            into = s * keep * tl.load(t_ptr + ahead) * tl.exp(-psi * tl.maximum(back, 0.0))
        else:
            out = tl.exp(t + tl.load(s_ptr + ahead) - psi * there) * (give * tl.load(keep_ptr + ahead))
            into = tl.exp(tl.load(t_ptr + ahead) + s - psi * back) * (keep * tl.load(give_ptr + ahead))
        into = tl.where(back >= 0, into, 0.0)
        back = tl.maximum(back, 0.0)
        cost += there * out + back * into
        net += there * tl.maximum(out - into, 0.0) + back * tl.maximum(into - out, 0.0)
    return cost, net
