r"""What the Triton kernels share: images staged with a halo, tables of moves, and passes over a
stencil.

Triton cannot gather from registers, so what neighbours must see (potentials, row terms, factors) is
*staged* in a small global buffer per image that stays in the first-level cache. Rows are ``W + rc``
apart and planes ``H + rr`` rows apart, where ``(rr, rc)`` is the reach of the stencil: the halo to
the right of a row is also the halo to the left of the next, and the halo below a plane is also the
halo above the next. A move is then one number added to an address, no bounds are checked, and a
buffer is little larger than the images. Where moves change the channel, empty channels follow an
image, which also precede the next. Halos hold no mass.

Potentials are exponentiated once a pixel, relative to their maximum. The mass on a move is then a
product ``A_i B_j exp(-psi c)``, and a pass over the moves loads and adds. In float32 this serves
potentials whose range over an image is at most :data:`RANGE` nats: what underflows would be less
than 1e-11 of a row. Programs note the images with wider potentials, and a second launch solves
those in float64, up to :data:`EXACT_RANGE`.

Moves are ordered by ring, the centre alone in ring 0. Windows of up to :data:`MAX_RINGS` rings keep
them in registers from one Newton step to the next, with the offsets of the moves in the code,
because a pass over an image that is on chip waits for loads more than it computes. The rings of
larger windows would not fit the registers of a multiprocessor (15 rings of a CIFAR-10 image are all
of them): there each Newton step is a pass over a table of moves. So it is in float64, and where a
program holds more than :data:`MAX_ON_CHIP` values: its registers are full, and code for that number
of values a thread takes minutes to compile.
"""

# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: RUF005  (Triton has no starred tuples)
from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves, StencilMoves
from wball.plan import SPREAD

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
MAX_ON_CHIP = 4096
"""Programs of up to this many values keep rings in registers and offsets of moves in the code."""
MAX_VALUES = 16384
"""Larger images do not fit in one program, and torch serves."""
RANGE, EXACT_RANGE = 60.0, SPREAD
"""Largest range of the potentials of an image, in nats, in float32 and in float64."""
MAX_RINGS = 10
"""Windows with up to this many rings (7 x 7) keep them in registers."""
UNROLL, ON_CHIP = tl.constexpr(8), tl.constexpr(MAX_ON_CHIP)
LINE = 32
"""Threads of a warp, and values of four bytes in a line of the cache."""
_LINE = tl.constexpr(LINE)


class Layout(NamedTuple):
    """What kernels are compiled for: images of one shape, how they are staged, and their moves.

    Attributes:
        channels, height, width: of an image.
        numel: their product.
        pitch: staged values from a row to the next, with the halo.
        plane: staged values from a channel to the next.
        staged: staged values per image.
        halo: staged values before the first pixel that moves can reach.
        block: values of a program that holds a whole image.
        ends: ``ends[d]:ends[d + 1]`` are the moves of ring ``d``.
        offsets: address offset of each move, for the code; empty where programs loop over the
            table.
        rough: whether float64 programs need the weights of moves to the precision of float32 only.
    """

    channels: int
    height: int
    width: int
    numel: int
    pitch: int
    plane: int
    staged: int
    halo: int
    block: int
    ends: tuple[int, ...]
    offsets: tuple[int, ...]
    rough: bool = False


class Table(NamedTuple):
    """Moves in the memory of the device.

    Attributes:
        offset: address offset of each move, int32.
        fee: cost of each move, in the precision of the program.
        pair_offset: offsets of pairs of opposite moves, each pair once.
        pair_fee: cost there and cost back (negative: no such move), float64, ``(2 * pairs,)``.
    """

    offset: Tensor
    fee: Tensor
    pair_offset: Tensor
    pair_fee: Tensor


class StagedWindow(NamedTuple):
    """Moves inside a program: tables of their offsets and costs, and the cost of each ring in
    registers."""

    offset: tl.tensor
    fee: tl.tensor
    fees: tl.tuple


class Pixels(NamedTuple):
    """Pixels of a program: their numbers, which of them exist, and their staged addresses."""

    index: tl.tensor
    real: tl.tensor
    place: tl.tensor


@dataclass(frozen=True)
class Stencil:
    """Moves on images of one shape, as the kernels read them.

    Attributes:
        layout: what kernels are compiled for.
        guard: staged values before the first pixel. Rows of :data:`LINE` values with their halos
            are then cache lines.
        pairs: number of pairs of opposite moves.
        tables: the moves in float32 and in float64.
        in_code: offsets for the code of programs that hold a part of an image.
    """

    layout: Layout
    guard: int
    pairs: int
    tables: tuple[Table, Table]
    in_code: tuple[int, ...]

    def stage(
        self, count: int, batch: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, ...]:
        """``count`` buffers for a batch, each starting at its first pixel."""
        size = -(-(self.guard + batch * self.layout.staged) // LINE) * LINE
        buffers = torch.empty((count, size), dtype=dtype, device=device)
        return buffers[:, self.guard :].unbind()


OLDEST = (3, 3)
"""Tuples of tensors, which hold the rings, came with this version of Triton."""

_TOO_OLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST


def why_not(x: Tensor, moves: Moves | None) -> str | None:
    """Why Triton kernels in float32 must refuse such images, or ``None``."""
    if x.dtype == torch.float64:
        return "the Triton kernels compute in float32, the images are float64"
    return why_not_here(x, moves)


def why_not_here(x: Tensor, moves: Moves | None) -> str | None:
    """Why Triton kernels in any precision must refuse such images, or ``None``."""
    if _TOO_OLD:
        return f"Triton {triton.__version__} is too old, these kernels need {'.'.join(map(str, OLDEST))}"
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a CUDA device, the images are on {x.device} (TRITON_INTERPRET=1 interprets it on the CPU)"
    if not isinstance(moves, StencilMoves | None):
        return "the Triton kernels serve stencil costs, not matrices"
    return None


def too_large(x: Tensor, most: int) -> str | None:
    """Why one program cannot hold such an image, or ``None``."""
    values = math.prod(x.shape[1:])
    return (
        f"images of {values} values do not fit in one program (at most {most})"
        if values > most
        else None
    )


def block_of(values: int) -> int:
    """The size of a program that holds ``values`` values. Triton's own helpers take microseconds
    each time."""
    return max(128, 1 << (values - 1).bit_length())


def warps(block: int, values: int = 64) -> int:
    """For programs that hold ``block`` values, ``values`` a warp: threads wait less, but have fewer
    registers.

    One program has a multiprocessor for itself in common batches. With more than 16 warps, what an
    image of CIFAR-10 needs no longer fits in their registers; what larger ones need does not fit in
    any case.
    """
    return 32 if block > MAX_ON_CHIP else min(16, max(4, block // values))


def stencil(moves: Moves, x: Tensor) -> Stencil:
    """The tables for images like ``x`` (built once per shape and device)."""
    assert isinstance(moves, StencilMoves)
    channels, height, width = x.shape[1:]
    return _stencil(moves, (channels, height, width), x.device)


@lru_cache(maxsize=64)
def _stencil(moves: StencilMoves, shape: tuple[int, int, int], device: torch.device) -> Stencil:
    channels, height, width = shape
    (rows, columns), over = _reach(shape, moves.radius), moves.radius[2]
    values, pitch = math.prod(shape), width + columns
    plane, block = (height + rows) * pitch, block_of(values)
    halo = over * plane + rows * pitch + columns
    ends = (0, *(ring[-1] + 1 for ring in moves.rings_apart))
    offsets = tuple(s * plane + r * pitch + c for r, c, s in moves.offsets)
    in_code = offsets if len(ends) - 1 <= MAX_RINGS else ()
    layout = Layout(
        channels, height, width, values, pitch, plane, (channels + over) * plane, halo, block,
        ends, in_code if block <= MAX_ON_CHIP else (),
    )  # fmt: skip
    pairs = []
    for k, back in enumerate(moves.reverse):
        if back is None:
            pairs.append((offsets[k], moves.costs[k], -1.0))
        elif moves.offsets[k] > moves.offsets[back]:
            pairs.append((offsets[k], moves.costs[k], moves.costs[back]))

    def table(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    offset, pair_offset = (
        table(listed, torch.int32) for listed in (offsets, [p[0] for p in pairs] or [0])
    )
    pair_fee = table([v for p in pairs for v in p[1:]] or [0.0], torch.float64)
    single, double = (
        Table(offset, table(moves.costs, dtype), pair_offset, pair_fee)
        for dtype in (torch.float32, torch.float64)
    )
    guard = halo + (columns // 2 - halo) % LINE
    return Stencil(layout, guard, len(pairs) if len(ends) > 2 else 0, (single, double), in_code)


def _reach(shape: tuple[int, int, int], radius: tuple[int, int, int]) -> tuple[int, int]:
    """How far apart planes and rows are staged.

    If a row with its halo fits in a cache line and no more threads are needed, each row is aligned
    to a line and served by one warp. For any move, a warp then loads one line instead of parts of
    two.
    """
    channels, height, width = shape
    threads = triton.next_power_of_2(channels * height * width)
    if width + radius[1] <= LINE and channels * height * LINE <= threads:
        return radius[0], LINE - width
    return radius[:2]


@triton.jit
def read(ptr, mask):
    """Values in memory where ``mask`` holds, 0 elsewhere."""
    return tl.load(ptr, mask=mask, other=0)


@triton.jit
def staged_position(index, LAYOUT: tl.constexpr):
    """Address of pixel ``index`` (counted without halos) in an image's staged buffer.

    64 bits wide, so that the compiler may add a move's offset inside the load instruction instead
    of keeping one address per move.
    """
    inside = index % (LAYOUT.height * LAYOUT.width)
    place = index // (LAYOUT.height * LAYOUT.width) * LAYOUT.plane
    place = place + inside // LAYOUT.width * LAYOUT.pitch + inside % LAYOUT.width
    return place.to(tl.int64)


@triton.jit
def is_halo(place, LAYOUT: tl.constexpr):
    """Whether a staged address (from ``-guard`` on) is no pixel."""
    ahead = tl.maximum(place, 0)
    outside = (place < 0) | (ahead >= LAYOUT.channels * LAYOUT.plane)
    outside |= ahead % LAYOUT.plane // LAYOUT.pitch >= LAYOUT.height
    return outside | (ahead % LAYOUT.pitch >= LAYOUT.width)


@triton.jit
def pixels(one, LAYOUT: tl.constexpr):
    """The :class:`Pixels` of a program that holds a whole image.

    ``one`` is a one the compiler cannot see: shifted loads are never aligned, so neighbouring
    threads should hold neighbouring pixels instead of four each.
    """
    index = tl.arange(0, LAYOUT.block) * one
    real = index < LAYOUT.numel
    rows: tl.constexpr = LAYOUT.channels * LAYOUT.height
    if LAYOUT.pitch == _LINE and rows * _LINE <= LAYOUT.block:  # a row to each warp
        row, column = index // _LINE, index % _LINE
        real = (column < LAYOUT.width) & (row < rows)
        index = row * LAYOUT.width + column
    return Pixels(index, real, staged_position(tl.where(real, index, 0), LAYOUT))


@triton.jit
def stage_halos(ptr, one, LAYOUT: tl.constexpr):
    """Everything around an image that its stencil may touch: no mass there."""
    lanes = tl.arange(0, LAYOUT.block) * one
    for first in tl.range(0, LAYOUT.staged + LAYOUT.halo, LAYOUT.block):
        spot = first + lanes - LAYOUT.halo
        halo = is_halo(spot, LAYOUT) & (spot < LAYOUT.staged)
        tl.store(ptr + spot, 0.0, mask=halo)


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
def ring_fees(fee_ptr, LAYOUT: tl.constexpr):
    """The cost of each ring, as a tuple of scalars."""
    fees = (0.0,)
    for d in tl.static_range(1, len(LAYOUT.ends) - 1):
        fees = fees + (tl.load(fee_ptr + LAYOUT.ends[d]),)
    return fees


@triton.jit
def ring_sums(ptr, place, own, LAYOUT: tl.constexpr):
    """For each ring, the sum of the staged values at its ends; ``own`` is the value at the
    centre."""
    rings = (own,)
    for d in tl.static_range(1, len(LAYOUT.ends) - 1):
        total = tl.zeros_like(own)
        for k in tl.static_range(tl.constexpr(LAYOUT.ends[d]), tl.constexpr(LAYOUT.ends[d + 1])):
            total += tl.load(ptr + place + LAYOUT.offsets[k])
        rings = rings + (total,)
    return rings


@triton.jit
def weight_of(psi, fee, ROUGH: tl.constexpr):
    """``exp(-psi fee)``. If ``ROUGH``, in the range of float64 to the precision of float32: every
    thread computes it, and in float64 it is most of the work of a Newton step."""
    if ROUGH:
        power = -1.4426950408889634 * psi * fee
        whole = tl.floor(power)
        bits = (tl.maximum(whole, -1023.0).to(tl.int64) + 1023) << 52
        part = tl.exp2((power - whole).to(tl.float32))
        return part.to(tl.float64) * bits.to(tl.float64, bitcast=True)
    else:
        return tl.exp(-psi * fee)


@triton.jit
def ring_moments(rings, fees, psi, ROUGH: tl.constexpr):
    """Mean and variance of the cost of a row, its normaliser, and the share of it that moves."""
    best = rings[0]
    pivot = tl.zeros_like(best)  # the likeliest cost: moments around it do not cancel
    moving = tl.zeros_like(best)
    for d in tl.static_range(1, len(rings)):
        weight = rings[d] * weight_of(psi, fees[d], ROUGH)
        pivot = tl.where(weight > best, fees[d], pivot)
        best = tl.maximum(best, weight)
        moving += weight
    first = -pivot * rings[0]
    second = pivot * pivot * rings[0]
    for d in tl.static_range(1, len(rings)):
        weight = rings[d] * weight_of(psi, fees[d], ROUGH)
        apart = fees[d] - pivot
        first += apart * weight
        second += apart * apart * weight
    total = rings[0] + moving
    share = 1.0 / total
    shift = first * share
    return pivot + shift, tl.maximum(second * share - shift * shift, 0.0), total, moving * share


@triton.jit
def table_moments(s_ptr, place, own, psi, window, LAYOUT: tl.constexpr):
    """:func:`ring_moments` in one pass over the table of moves."""
    moving = tl.zeros_like(own)
    first = tl.zeros_like(own)
    second = tl.zeros_like(own)
    for k in tl.range(
        1, LAYOUT.ends[-1], loop_unroll_factor=UNROLL if LAYOUT.block <= ON_CHIP else 1
    ):
        fee = tl.load(window.fee + k)
        weight = tl.load(s_ptr + place + tl.load(window.offset + k))
        weight *= weight_of(psi, fee, LAYOUT.rough)
        moving += weight
        first += fee * weight
        second += fee * fee * weight
    total = own + moving
    # Nothing cancels in the mean. In the variance it may: that only makes a Newton step a poorer
    # guess.
    share = 1.0 / total
    mean = first * share
    return mean, tl.maximum(second * share - mean * mean, 0.0), total, moving * share


class PriceSearch(NamedTuple):
    """What a price is searched for: rows spend ``budget``, up to the relative ``tolerance``, after
    at most ``steps`` Newton steps; nothing is computed if ``given_up``."""

    budget: tl.tensor
    tolerance: tl.tensor
    steps: tl.tensor
    given_up: tl.tensor


@triton.jit
def solve_price(x, own, psi, search, s_ptr, place, window, LAYOUT: tl.constexpr):
    """The price at which rows ``x`` spend the budget of a :class:`PriceSearch`, and the rows'
    moments there.

    Returns ``(psi, mean, norm, moved)``.
    """
    steps = search.steps
    rings = ring_sums(s_ptr, place, own, LAYOUT) if len(LAYOUT.offsets) > 0 else (own,)
    low = 0.0 * psi - 1.0  # in the precision of psi, which the loop keeps
    high = 0.0 * psi + float("inf")
    mean = tl.zeros_like(own)
    moved = tl.zeros_like(own)
    norm = tl.full(own.shape, 1.0, own.dtype)
    # One counter, which jumps when the price is found: Triton's layout pass stumbles over a flag
    # that only ends a loop.
    step = tl.where(search.given_up, steps + 1, 0)
    while step <= steps:
        if len(LAYOUT.offsets) > 0:
            mean, variance, norm, moved = ring_moments(rings, window.fees, psi, LAYOUT.rough)
        else:
            mean, variance, norm, moved = table_moments(s_ptr, place, own, psi, window, LAYOUT)
        if step < steps:
            cost, slope = sum_two(x * mean, x * variance)
            psi, low, high, done = newton_step(
                psi, low, high, cost, slope, search.budget, search.tolerance
            )
            step = tl.where(done, steps, step)
        step += 1
    return psi, mean, norm, moved


@triton.jit
def newton_step(psi, low, high, cost, slope, budget, tolerance):
    """One bracketed Newton step on ``log(cost)``; returns ``(psi, low, high, done)`` with psi kept
    where done."""
    inside = cost <= budget
    done = inside & ((cost >= budget * (1 - tolerance)) | (psi == 0.0))
    low = tl.where(inside, low, psi)
    high = tl.where(inside, psi, high)
    step = psi + cost * tl.log(cost / (budget * (1 - tolerance / 2))) / slope
    step = tl.where(step < 0.0, 0.0, step)  # not a number where nothing moves
    middle = tl.where(high == float("inf"), 2 * psi + 1, 0.5 * (tl.maximum(low, 0.0) + high))
    # Cap the step: a slope lost to underflow would make it huge.
    step = tl.where((step > low) & (step < high) & (step < 100 * psi + 100), step, middle)
    return tl.where(done, psi, step), low, high, done


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def sum_two(a, b):
    """Two sums over a block for the price of one wait (the interpreter adds pairs one by one, so
    not there)."""
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
