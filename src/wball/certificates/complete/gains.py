"""Gains of the units of many problems: listed unit by unit, and no more of them at a time than memory has room for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.certificates.anchor import UnitAnchor
from wball.certificates.bounds import Bounds
from wball.certificates.collector import chosen, gain_bytes
from wball.certificates.complete.bound import Problems
from wball.input_sets import InputSet, TransportSet
from wball.input_sets.charges import Anchor, rounded_up
from wball.input_sets.rows import Rows

FIRST_LIMIT = 2**16
"""Numbers per image and pixel that the gains of a first convolution may hold, which has the most units."""


def listed(
    anchor: Anchor, centre: Tensor, bounds: Bounds, position: int, source: InputSet
) -> tuple[UnitAnchor, Tensor]:
    """An anchor as a list of the gains of its unstable units, so that charging many rows is one product.

    With the units' values at the images, as they were given; ``inf`` for units that are not listed, for want of room.
    """
    if isinstance(anchor, UnitAnchor):
        return anchor, centre
    assert isinstance(source, TransportSet)
    unstable = bounds.unstable(position)
    images = unstable.shape[0]
    some = chosen(bounds.lower[position], bounds.upper[position], source, FIRST_LIMIT)
    if some is not None:
        unstable = unstable & some.view_as(unstable)
        centre = torch.where(unstable, centre, math.inf)
    image, unit = unstable.flatten(1).nonzero(as_tuple=True)
    parts = []
    if image.shape[0] == 0:  # one unit that is not listed gives the gains their shape
        image, unit = torch.zeros((2, 1), dtype=torch.long, device=unstable.device)
    count = int(unstable.sum())
    for here in torch.arange(image.shape[0], device=image.device).split(128):
        weights = torch.zeros(
            (here.shape[0], math.prod(anchor.layer)), dtype=torch.float64, device=image.device
        )
        weights.scatter_(1, unit[here][:, None], 1.0)
        nothing = Rows(weights.new_zeros((here.shape[0], *source.x.shape[1:])), image[here])
        charges = anchor.charge(
            Rows(weights.reshape(-1, *anchor.layer), image[here]), nothing, source.active
        )
        parts.append(tuple(rounded_up(part) for part in (charges.moves, charges.out, charges.into)))
    gains = tuple(torch.cat(part)[:count] for part in zip(*parts, strict=True))
    return UnitAnchor(
        anchor.layer, image[:count], unit[:count], (gains[0], gains[1], gains[2]), images
    ), centre


def together(problems: Problems, room: int) -> list[Tensor]:
    """Problems in groups whose gains take about ``room`` bytes: tightening gives every problem gains of its own."""
    every = torch.arange(len(problems), device=problems.y.device)
    if not isinstance(problems.source, TransportSet) or not problems.anchors:
        return [every]
    listed = torch.stack(
        [problems.bounds.unstable(k).flatten(1).sum(1) for k in problems.anchors]
    ).sum(0)
    size = gain_bytes(problems.source) * listed
    _, counts = ((size.cumsum(0) - size) // room).unique_consecutive(return_counts=True)
    return list(every.split(counts.tolist()))
