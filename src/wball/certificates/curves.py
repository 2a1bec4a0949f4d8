r"""Lines below and above curved activations: sigmoid, tanh, GELU and SiLU.

For a curve ``f`` on ``[l, u]`` and *any* slope ``k`` the line ``k v + min (f(v) - k v)`` lies below
it, and with the maximum above it. On a grid of step ``h`` the extremes are known up to ``max |f''|
h^2 / 8``, which is allowed for. Of a few slopes the one whose line is best in the middle of the
interval is taken; the range of the curve on the interval is a line, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

POINTS = 48
"""Cells of the grid."""

ROOM = 1e-12
"""Allowance for the rounding of a curve's values, relative to the magnitudes."""

HUGE = 1e30
"""Stands for a bound that is not known: finite, so that it vanishes when multiplied by 0."""


@dataclass(frozen=True)
class Curve:
    """A scalar function with values in ``[least, most]``; ``bend`` bounds ``|f''|``.

    It is monotone, except around ``turn``, an interval that contains its only minimum.
    """

    function: Callable[[Tensor], Tensor]
    bend: float
    least: float
    most: float = math.inf
    turn: tuple[float, float] = (math.inf, -math.inf)

    def between(self, low: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest value on intervals, widened for rounding."""
        known = torch.isfinite(low) & torch.isfinite(up)
        start, end = torch.where(known, low, 0.0), torch.where(known, up, 0.0)
        first, last = self.function(start), self.function(end)
        room = ROOM * (1 + start.abs() + end.abs())
        known_below = known & ((low > self.turn[1]) | (up < self.turn[0]))
        least = torch.where(known_below, torch.minimum(first, last) - room, self.least)
        most = torch.where(known, torch.maximum(first, last) + room, self.most)
        return least.clamp(min=self.least), most.clamp(max=self.most)


CURVES = {
    "sigmoid": Curve(torch.sigmoid, 0.0963, 0.0, 1.0),
    "tanh": Curve(torch.tanh, 0.77, -1.0, 1.0),
    "gelu": Curve(F.gelu, 0.7979, -0.17, turn=(-0.76, -0.74)),
    "silu": Curve(F.silu, 0.5, -0.2785, turn=(-1.29, -1.27)),
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


def curve_lines(curve: Curve, low: Tensor, up: Tensor) -> Lines:
    """Lines of a curve on ``[low, up]``, float64."""
    known = torch.isfinite(low) & torch.isfinite(up)
    start, end = torch.where(known, low, 0.0), torch.where(known, up, 0.0)
    middle, step = (start + end) / 2, (end - start) / POINTS
    width = torch.where(end > start, end - start, 1.0)
    chord = (curve.function(end) - curve.function(start)) / width
    tangent = (curve.function(middle + 1e-4) - curve.function(middle - 1e-4)) / 2e-4

    slopes = torch.stack([torch.zeros_like(low), chord, tangent, torch.ones_like(low)])
    size = torch.zeros_like(slopes)
    least, most = size + math.inf, size - math.inf
    for k in range(POINTS + 1):
        v = start + step * k
        line = slopes * v
        value = curve.function(v) - line
        least, most = torch.minimum(least, value), torch.maximum(most, value)
        size = torch.maximum(size, value.abs() + line.abs())
    room = curve.bend * (step * (1 + ROOM)).square() / 8 + ROOM * (size + 1e-3)
    least, most = (
        torch.where(known, least - room, -math.inf),
        torch.where(known, most + room, math.inf),
    )
    bottom, top = curve.between(low, up)
    least[0], most[0] = least[0].maximum(bottom), most[0].minimum(top.clamp(max=HUGE))
    below = (least + slopes * middle).argmax(0, keepdim=True)
    above = (most + slopes * middle).argmin(0, keepdim=True)
    return Lines(
        *(part.gather(0, below)[0] for part in (slopes, least)),
        *(part.gather(0, above)[0] for part in (slopes, most)),
    )
