"""Gains of the units of many problems: listed unit by unit, in groups that fit into memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.certificates.anchor import Anchor, ConvAnchor, UnitAnchor, chosen, gain_bytes
from wball.certificates.bounds import Bounds
from wball.certificates.complete.bound import Problems
from wball.certificates.relaxation import Relaxation
from wball.input_sets import InputSet
from wball.input_sets.rows import Charges, rounded_up

FIRST_LIMIT = 2**16
"""Numbers per image and pixel that the gains of a first convolution may hold, which has the
most units."""


def listed(
    anchor: Anchor, centre: Tensor, bounds: Bounds, position: int, source: InputSet
) -> tuple[UnitAnchor, Tensor]:
    """An anchor as a list of the gains of its unstable units: one product charges many rows.

    With the units' values at the images; ``inf`` for units that are left out for lack of memory.
    """
    if isinstance(anchor, UnitAnchor):
        return anchor, centre
    assert isinstance(anchor, ConvAnchor)
    unstable = bounds.unstable(position)
    images = unstable.shape[0]
    some = chosen(bounds.lower[position], bounds.upper[position], source, FIRST_LIMIT)
    if some is not None:
        unstable = unstable & some.view_as(unstable)
        centre = torch.where(unstable, centre, math.inf)
    image, unit = unstable.flatten(1).nonzero(as_tuple=True)
    parts = []
    for here in torch.arange(image.shape[0], device=image.device).split(128):
        found = anchor.gains(image[here], unit[here], source.active)
        parts.append(tuple(rounded_up(part) for part in (found.moves, found.out, found.into)))
    gains = Charges(*(torch.cat(part) for part in zip(*parts, strict=True)))
    return UnitAnchor(anchor.layer, image, unit, gains, images), centre


def open_problems(
    relaxation: Relaxation, x: Tensor, y: Tensor, bounds: Bounds, image: Tensor, other: Tensor
) -> Problems:
    """The problem of each pair of an image and a class ``other`` that may beat its label."""
    graph, source = relaxation.graph, relaxation.source
    anchors = {k: listed(*found, bounds, k, source) for k, found in relaxation.anchors.items()}
    every = torch.arange(y.shape[0], device=y.device)
    problems = Problems(graph, x, y, y, source, bounds, anchors, every).take(image)
    problems.other, problems.index = other, torch.arange(image.shape[0], device=y.device)
    return problems


def grouped(size: Tensor, room: float) -> list[Tensor]:
    """Indices of consecutive items whose sizes sum up to about ``room``."""
    _, counts = ((size.cumsum(0) - size) // room).unique_consecutive(return_counts=True)
    return list(torch.arange(size.shape[0], device=size.device).split(counts.tolist()))


def together(problems: Problems, room: int) -> list[Tensor]:
    """Problems in groups whose gains take about ``room`` bytes: tightening gives every
    problem gains of its own.
    """
    if not problems.anchors:
        return [torch.arange(len(problems), device=problems.y.device)]
    units = [problems.bounds.unstable(k).flatten(1).sum(1) for k in problems.anchors]
    return grouped(gain_bytes(problems.source) * torch.stack(units).sum(0), room)
