r"""Lines below and above curves, with every rounding error accounted for: the checker's own.

An interval is cut into cells. On a cell with centre ``c`` and half width ``r``, for
``g(v) = f(v) - k v`` and any bound ``B`` of ``|f''|``, Taylor's theorem gives
``|g(v) - g(c)| <= |g'(c)| r + B r^2 / 2``. The least of these lower bounds over the cells is the
shift of a line with slope ``k`` below the curve, the largest upper bound that of one above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CELLS = 128
ROOM = 2.0**-44
"""What the value of a curve, or of a sum of a few terms, may be off by, relative to the magnitudes
that entered it."""


@dataclass(frozen=True)
class SmoothFunction:
    """A function with its derivative, a bound of its second derivative, and its turning point if it
    is not monotone."""

    value: Callable[[Tensor], Tensor]
    steepness: Callable[[Tensor], Tensor]
    bend: float
    least: float  # over all numbers
    most: float
    lowest_at: tuple[float, float] | None = (
        None  # an interval that contains the point of the least value
    )


def _sigmoid(v: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-v))


def _normal(v: Tensor) -> Tensor:
    """The distribution function of a normal variable."""
    return 0.5 * torch.special.erfc(-v / math.sqrt(2))


def _density(v: Tensor) -> Tensor:
    return torch.exp(-v * v / 2) / math.sqrt(2 * math.pi)


CURVES = {
    "sigmoid": SmoothFunction(_sigmoid, lambda v: _sigmoid(v) * _sigmoid(-v), 0.09623, 0.0, 1.0),
    "tanh": SmoothFunction(torch.tanh, lambda v: 1 - torch.tanh(v).square(), 0.76981, -1.0, 1.0),
    "silu": SmoothFunction(
        lambda v: v * _sigmoid(v),
        lambda v: _sigmoid(v) * (1 + v * _sigmoid(-v)),
        0.50001,
        -0.278465,
        math.inf,
        (-1.2785, -1.2784),
    ),
    "gelu": SmoothFunction(
        lambda v: v * _normal(v),
        lambda v: _normal(v) + v * _density(v),
        0.79789,
        -0.169972,
        math.inf,
        (-0.7518, -0.7517),
    ),
}
"""``|f''|`` is at most 1 / (6 sqrt 3) for the sigmoid, at log(2 + sqrt 3), and 4 / (3 sqrt 3) for
tanh. It is largest at 0 for SiLU and GELU."""


@dataclass(frozen=True)
class LinePair:
    """``under v + under_shift <= f(v) <= over v + over_shift``, flat."""

    under: Tensor
    under_shift: Tensor
    over: Tensor
    over_shift: Tensor


def values_between(curve: str, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The least and largest value of a curve on intervals."""
    shape = CURVES[curve]
    room = ROOM * (1 + low.abs() + high.abs())
    first, last = shape.value(low), shape.value(high)
    least, most = torch.minimum(first, last) - room, torch.maximum(first, last) + room
    if shape.lowest_at is not None:
        turns = (low <= shape.lowest_at[1]) & (high >= shape.lowest_at[0])
        least = torch.where(turns, shape.least, least)
    wide = ~(torch.isfinite(low) & torch.isfinite(high))
    least = torch.where(wide, shape.least, least.clamp(min=shape.least))
    return least, torch.where(wide, shape.most, most.clamp(max=shape.most))


def lines(curve: str, low: Tensor, high: Tensor) -> LinePair:
    """Of lines with a few slopes, the highest one below and the lowest one above the curve,
    compared at the middle of each interval."""
    middle, width, shape = (low + high) / 2, (high - low).clamp(min=1e-12), CURVES[curve]
    chord = (shape.value(high) - shape.value(low)) / width
    half = width / CELLS / 2
    centres = torch.stack([low + (2 * k + 1) * half for k in range(CELLS)])
    worth, steep = shape.value(centres), shape.steepness(centres)
    room = ROOM * (1 + low.abs() + high.abs())
    zero, between = torch.zeros_like(middle), values_between(curve, low, high)
    found = LinePair(zero, between[0], zero, between[1])  # what holds anyway
    for slope in (chord, shape.steepness(middle), zero, torch.ones_like(chord)):
        gap = worth - slope * centres
        off = ((steep - slope).abs() + room) * half * (1 + 1e-9)
        off = off + shape.bend * (half * (1 + 1e-9)).square() / 2
        more = room * (1 + slope.abs())
        least, most = (gap - off).amin(0) - more, (gap + off).amax(0) + more
        higher = least + slope * middle > found.under_shift + found.under * middle
        lower = most + slope * middle < found.over_shift + found.over * middle
        found = LinePair(
            torch.where(higher, slope, found.under),
            torch.where(higher, least, found.under_shift),
            torch.where(lower, slope, found.over),
            torch.where(lower, most, found.over_shift),
        )
    return found
