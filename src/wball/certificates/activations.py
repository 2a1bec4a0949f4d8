r"""Lines that bound an activation from below and above, given bounds of what it reads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.certificates.graph import Curved, MaxPool
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


def relax_max_pool(op: MaxPool, rows: Rows, lower: Tensor, upper: Tensor) -> tuple[Tensor, Rows]:
    """``max >= the entry with the largest lower bound``; ``max <= largest upper bound``, or that
    entry if it wins."""
    whole = rows.dense(op.shape)
    dtype, image = whole.coeff.dtype, whole.image
    low, up = op.windows(lower), op.windows(upper)
    floor, pick = low.max(-1)
    places = op.places(lower.device).expand(*low.shape)
    source = places.gather(-1, pick[..., None])[..., 0].flatten(2)
    others = up.scatter(-1, pick[..., None], -math.inf)
    sure = (floor >= others.amax(-1)).flatten(2)[image]
    ceiling = up.amax(-1).to(dtype).flatten(2)[image]
    flat = whole.coeff.flatten(2)
    kept = torch.where((flat > 0) | sure, flat, torch.zeros_like(flat))
    out = flat.new_zeros((flat.shape[0], flat.shape[1], op.before[1] * op.before[2]))
    out = out.scatter_add(2, source[image], kept)
    constant = ((flat - kept) * ceiling).flatten(1).sum(1)
    return constant, Rows(out.reshape(-1, *op.before), image)


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
