"""Bounds of what the relaxed operations of a network read, their start by intervals, and the lines that
bound an activation between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wball.certificates.graph import Activation, Affine, Curved, Graph, Input, Interval
from wball.input_sets import InputSet
from wball.input_sets.rows import Rows

ROUNDING = 1e-12
"""Allowance for float64 rounding, relative to the magnitudes summed: a few thousand times the
unit round-off."""

NEGLIGIBLE = 1e-7
"""Share of its range by which a unit may cross 0 without being bounded again."""


@dataclass
class Bounds:
    """What each relaxed operation reads lies in ``[lower, upper]``, ``(B, *shape)``, in float64."""

    lower: dict[int, Tensor] = field(default_factory=dict)
    upper: dict[int, Tensor] = field(default_factory=dict)

    def take(self, index: Tensor) -> Bounds:
        """The bounds of a subset of the images."""
        return Bounds(
            {k: v[index] for k, v in self.lower.items()},
            {k: v[index] for k, v in self.upper.items()},
        )

    @staticmethod
    def join(parts: list[Bounds]) -> Bounds:
        """The bounds of several groups of images, one after the other."""
        lower, upper = (
            {k: torch.cat([side[k] for side in sides]) for k in sides[0]}
            for sides in ([part.lower for part in parts], [part.upper for part in parts])
        )
        return Bounds(lower, upper)

    def set(self, position: int, lower: Tensor, upper: Tensor) -> None:
        """Store bounds, in the order of their units whatever the memory format of the network
        that computed them.
        """
        self.lower[position] = lower.nan_to_num(
            -math.inf, math.inf, -math.inf
        ).contiguous()  # NaN is no bound
        self.upper[position] = upper.nan_to_num(math.inf, math.inf, -math.inf).contiguous()

    def put(self, index: Tensor, other: Bounds) -> None:
        """Write back the bounds of a subset."""
        for position in other.lower:
            self.lower[position][index] = other.lower[position]
            self.upper[position][index] = other.upper[position]

    def unstable(self, position: int) -> Tensor:
        return (self.lower[position] < 0) & (self.upper[position] > 0)

    def worth_a_row(self, position: int) -> Tensor:
        """Units whose activation bends where it matters: one that crosses 0 by rounding needs
        no better bound.
        """
        low, up = self.lower[position], self.upper[position]
        small = (torch.minimum(-low, up) <= NEGLIGIBLE * (up - low)) & torch.isfinite(up - low)
        return (low < 0) & (up > 0) & ~small


class Intervals:
    """What the values of a graph can be over an input set, coordinate by coordinate, as far
    as bounds are known.
    """

    def __init__(self, graph: Graph, source: InputSet) -> None:
        self.graph, self.source = graph, source
        self._found: dict[int, Interval | None] = {}

    def start(self, position: int, bounds: Bounds) -> None:
        """Bounds by one step of intervals from the bounds of earlier layers: cheap, and
        enough for many units.
        """
        source = self.graph.ops[position].inputs[0]
        for place in range(source + 1):
            if place in self._found:
                continue
            op, found = self.graph.ops[place], None
            if isinstance(op, Input):
                low, up = self.source.ranges()
                found = (low + up) / 2, (up - low) / 2
            elif isinstance(op, Affine):
                parts = [self._found[k] for k in op.inputs]
                known = [part for part in parts if part is not None]
                found = _widened(op, known) if len(known) == len(parts) else None
            elif place in bounds.lower:
                assert isinstance(op, (Activation, Curved))
                found = op.interval(bounds.lower[place], bounds.upper[place])
                # Half a bound is enough for a stable unit, but infinite intervals would cancel to
                # NaN further on.
                found = found if bool(torch.isfinite(found[1]).all()) else None
            self._found[place] = found
        interval = self._found[source]
        if interval is None:
            like = self.source.ranges()[0]
            empty = like.new_full((like.shape[0], *self.graph.ops[source].shape), math.inf)
            bounds.set(position, -empty, empty)
            return
        centre, radius = interval
        bounds.set(position, centre - radius, centre + radius)


def _widened(op: Affine, parts: list[Interval]) -> Interval | None:
    """The interval after an operation, with room for the rounding of every sum in it."""
    found = op.interval(*parts)
    summed = op.interval(*((torch.zeros_like(c), c.abs() + r) for c, r in parts))
    if found is None or summed is None:
        return None
    assert not bool((found[1] < 0).any()) and not bool((summed[1] < 0).any()), (
        f"{op.name}: negative radius"
    )
    return found[0], found[1] + ROUNDING * (summed[1] + found[0].abs())


def anchored_line(
    low: Tensor, up: Tensor, centre: Tensor, leak: float, slope: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bend, slope and shift of the interpolation at ``low``, ``centre`` and ``up``, and where
    there is one.

    Where the unit is stable or its centre is not strictly inside, the given line stays, without a
    bend.
    """
    inside = (low < 0) & (up > 0) & (low < centre) & (centre < up)
    at = torch.where(inside, centre, 0.5 * (low + up))
    value = torch.where(at > 0, at, leak * at)
    left = (value - leak * low) / (at - low)
    right = (up - value) / (up - at)
    bend = torch.where(inside, right - left, torch.zeros_like(slope))
    return (
        bend.clamp(min=0),
        torch.where(inside, left, slope),
        torch.where(inside, value - left * at, shift),
        inside,
    )


def either(steep: Tensor, leak: float, like: Tensor) -> Tensor:
    """1 or the leak, in the precision of ``like``: ``torch.where`` of two plain numbers rounds them
    to float32."""
    return torch.where(steep, torch.ones_like(like), leak)


def upper_line(low: Tensor, up: Tensor, leak: float) -> tuple[Tensor, Tensor]:
    """Slope and shift of the upper line, exact where the unit is stable."""
    crossing = (low < 0) & (up > 0)
    width = torch.where(crossing, up - low, torch.ones_like(up))
    slope = torch.where(crossing, (up - leak * low) / width, either(up > 0, leak, up))
    shift = torch.where(crossing, (leak - slope) * low, torch.zeros_like(slope))
    return slope, shift


def relax_curve(
    op: Curved, rows: Rows, lower: Tensor, upper: Tensor
) -> tuple[Tensor, Rows, Tensor]:
    """The line below a curve where a row's coefficient is positive, the one above where it is
    negative.

    The last one is the sum of the magnitudes that entered the constant.
    """
    dtype, lines = rows.coeff.dtype, op.lines(lower.double(), upper.double())
    positive, negative = rows.coeff.clamp(min=0), rows.coeff.clamp(max=0)

    def read(part: Tensor) -> Tensor:
        return rows.read(part.to(dtype))

    below, above = positive * read(lines.low_shift), negative * read(lines.up_shift)
    size = (below.detach().abs() + above.detach().abs()).flatten(1).sum(1)
    out = rows.like(positive * read(lines.low_slope) + negative * read(lines.up_slope))
    return (below + above).flatten(1).sum(1), out, size
