r"""Lines that bound an activation from below and above, given bounds of what it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from wball.certificates.graph import Curved
from wball.input_sets.rows import Rows


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
