r"""Lines below and above curved activations: sigmoid, tanh, GELU, SiLU and clamps.

For a curve ``f`` on ``[l, u]`` and *any* slope ``k`` the line ``k v + min (f(v) - k v)`` lies below
it, and with the maximum above it. On a grid of step ``h`` the extremes are known up to ``max |f''|
h^2 / 8``, which is allowed for. Of a few slopes the one whose line is best in the middle of the
interval is taken. Where the interval is too wide for a grid, sigmoid and tanh have their range, and
GELU and SiLU lie between ``max(v, 0)`` less their depth and ``max(v, 0)``. A clamp has its extremes
at the ends and kinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

POINTS, WIDEST = 48, 64.0
"""Cells of the grid, and the widest interval it serves."""

ROOM = 1e-12
"""Allowance for the rounding of a curve's values, relative to the magnitudes."""

HUGE = 1e30
"""Stands for a bound that is not known: finite, so that it vanishes when multiplied by 0."""


@dataclass(frozen=True)
class Curve:
    """A scalar function; ``bend`` bounds ``|f''|``.

    ``ends`` is its range; without one it lies between ``max(v, 0) - depth`` and ``max(v, 0)``.
    A function with ``kinks`` is linear between them.
    """

    function: Callable[[Tensor], Tensor]
    bend: float
    ends: tuple[float, float] | None
    depth: float = 0.0
    kinks: tuple[float, ...] = ()


CURVES = {
    "sigmoid": Curve(torch.sigmoid, 0.0963, (0.0, 1.0)),
    "tanh": Curve(torch.tanh, 0.77, (-1.0, 1.0)),
    "gelu": Curve(F.gelu, 0.7979, None, 0.17),
    "silu": Curve(F.silu, 0.5, None, 0.2785),
}
"""By name. |f''| is largest for the sigmoid at 1 / (6 sqrt 3), for tanh at 4 / (3 sqrt 3),
for GELU and SiLU at 0."""


@dataclass(frozen=True)
class Lines:
    """``slope v + shift`` below and above the curve, float64, in the shape of the bounds."""

    low_slope: Tensor
    low_shift: Tensor
    up_slope: Tensor
    up_shift: Tensor


def _best(
    slopes: list[Tensor], extremes: Callable[[Tensor], tuple[Tensor, Tensor]], middle: Tensor
) -> Lines:
    """Of the lines with these slopes the highest one below and the lowest one above, at
    ``middle``.
    """
    low = up = torch.zeros_like(middle)
    best_low, best_up = torch.full_like(middle, -math.inf), torch.full_like(middle, math.inf)
    low_shift, up_shift = best_low, best_up
    for slope in slopes:
        least, most = extremes(slope)
        below, above = least + slope * middle, most + slope * middle
        better = below > best_low
        best_low, low, low_shift = (
            torch.where(better, a, b)
            for a, b in ((below, best_low), (slope, low), (least, low_shift))
        )
        better = above < best_up
        best_up, up, up_shift = (
            torch.where(better, a, b) for a, b in ((above, best_up), (slope, up), (most, up_shift))
        )
    return Lines(low, low_shift, up, up_shift)


def clamp(ends: tuple[float, float]) -> Curve:
    """The curve ``min(max(v, ends[0]), ends[1])``."""
    finite = max(ends[0], -HUGE), min(ends[1], HUGE)
    return Curve(lambda v: v.clamp(*ends), 0.0, finite, kinks=ends)


def curve_lines(curve: Curve, low: Tensor, up: Tensor) -> Lines:
    """Lines of a curve on ``[low, up]``, float64."""
    served = torch.isfinite(low) & torch.isfinite(up) & (up >= low)
    if not curve.kinks:
        served &= up - low <= WIDEST
    start, end = torch.where(served, low, 0.0), torch.where(served, up, 0.0)
    middle, step = (start + end) / 2, (end - start) / POINTS
    width = torch.where(end > start, end - start, 1.0)
    chord = (curve.function(end) - curve.function(start)) / width
    tangent = (curve.function(middle + 1e-4) - curve.function(middle - 1e-4)) / 2e-4

    def points() -> Iterator[Tensor]:
        if not curve.kinks:
            yield from (start + step * k for k in range(POINTS + 1))
            return
        yield from (start, end)
        for kink in curve.kinks:
            yield torch.minimum(torch.maximum(torch.full_like(start, kink), start), end)

    def extremes(slope: Tensor) -> tuple[Tensor, Tensor]:
        """The least and largest ``f(v) - slope v`` on the intervals."""
        least, most = torch.full_like(low, math.inf), torch.full_like(low, -math.inf)
        size = torch.zeros_like(low)
        for v in points():
            value = curve.function(v) - slope * v
            least, most = torch.minimum(least, value), torch.maximum(most, value)
            size = torch.maximum(size, value.abs() + (slope * v).abs())
        room = curve.bend * (step * (1 + ROOM)).square() / 8 + ROOM * (size + 1e-3)
        return least - room, most + room

    slopes = [chord, tangent, torch.zeros_like(chord), torch.ones_like(chord)]
    found, rough = _best(slopes, extremes, middle), _rough(curve, low, up)
    return Lines(
        torch.where(served, found.low_slope, rough.low_slope),
        torch.where(served, found.low_shift, rough.low_shift),
        torch.where(served, found.up_slope, rough.up_slope),
        torch.where(served, found.up_shift, rough.up_shift),
    )


def _rough(curve: Curve, low: Tensor, up: Tensor) -> Lines:
    """Lines of an interval of any width."""
    zero = torch.zeros_like(low)
    if curve.ends is not None:
        return Lines(zero, zero + curve.ends[0], zero, zero + curve.ends[1])
    known = torch.isfinite(low) & torch.isfinite(up)
    crossing = known & (low < 0) & (up > 0)
    steep = torch.where(
        crossing,
        up / torch.where(crossing, up - low, 1.0),
        torch.where(known & (low >= 0), 1.0, 0.0),
    )
    height = torch.where(crossing, -steep * low * (1 + ROOM), torch.where(known, 0.0, HUGE))
    under = torch.where(known & (up > -low), 1.0, 0.0).to(low.dtype)
    return Lines(under, zero - curve.depth, steep.to(low.dtype), height.to(low.dtype))
