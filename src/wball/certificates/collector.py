"""Gathers the upper rows of a layer's units into the layer's anchor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball.certificates.anchor import UnitAnchor
from wball.input_sets import InputSet
from wball.input_sets.charges import Charges
from wball.input_sets.rows import Rows

LIMIT = 2**15
"""Numbers per image and pixel that the gains of one layer may hold on a CPU."""

COPIES = 6
"""Gains are in memory so often while they are computed, padded and read in float64."""


@dataclass(frozen=True)
class Bound:
    """Lower bounds of rows, and the linear function of the plan behind them."""

    value: Tensor  # (N,), sound
    at_input: Rows
    charges: Charges | None
    constant: Tensor


class Collector:
    """The gains of the units of one layer of shape ``shape``, for ``images`` images; at most
    ``limit`` per pixel."""

    def __init__(
        self,
        source: InputSet,
        images: int,
        shape: tuple[int, ...],
        device: torch.device,
        limit: int,
    ) -> None:
        self.source, self.images, self.shape, self.limit = source, images, shape, limit
        self._centre = torch.full(
            (images, math.prod(shape)), math.inf, dtype=torch.float64, device=device
        )
        self._parts: list[tuple[Tensor, ...]] = []
        self._chosen = torch.ones_like(self._centre, dtype=torch.bool)

    def choose(self, lower: Tensor, upper: Tensor) -> Tensor:
        """``(images, units)``: if not all unstable units fit, some are left out and keep the usual
        lines."""
        found = chosen(lower, upper, self.source, self.limit)
        self._chosen = torch.ones_like(self._centre, dtype=torch.bool) if found is None else found
        return self._chosen

    def add(self, image: Tensor, unit: Tensor, bound: Bound) -> None:
        """Rows that bound ``-v`` from below: their values at the image and their gains, if ``v``
        may be above 0."""
        keep = ((bound.value <= 0) & self._chosen[image, unit]).nonzero()[:, 0]
        if keep.shape[0] == 0:
            return
        at_input, charges, constant = bound.at_input, bound.charges, bound.constant
        if keep.shape[0] < image.shape[0]:
            image, unit, constant, at_input = (
                image[keep],
                unit[keep],
                constant[keep],
                at_input.take(keep),
            )
            charges = None if charges is None else charges.take(keep)
        centre = at_input.read(self.source.x)
        self._centre[image, unit] = -(constant + (at_input.coeff * centre).flatten(1).sum(1))
        gains = self.source.gains(at_input.like(-at_input.coeff), charges)
        self._parts.append((image, unit, gains.moves, gains.out, gains.into))

    def anchor(self) -> tuple[UnitAnchor, Tensor] | None:
        """The anchor and the units' values at the images; ``None`` if no unit was added."""
        if not self._parts:
            return None
        image, unit, *gains = (torch.cat(part) for part in zip(*self._parts, strict=True))
        anchor = UnitAnchor(self.shape, image, unit, Charges(*gains), self.images)
        return anchor, self._centre.view(self.images, *self.shape)


def gain_bytes(source: InputSet) -> int:
    """About how much memory the gains of one unit take."""
    return 4 * COPIES * source.gain_size


def chosen(lower: Tensor, upper: Tensor, source: InputSet, limit: int) -> Tensor | None:
    """``(images, units)``: each image's most unstable units, as many as there is room for; ``None``
    if all fit."""
    low, up = lower.flatten(1), upper.flatten(1)
    most = limit * math.prod(source.shape) // source.gain_size
    if most >= low.shape[1]:
        return None
    depth = torch.minimum(up, -low)
    best = depth.topk(max(1, most), 1)
    return torch.zeros_like(depth, dtype=torch.bool).scatter(1, best.indices, best.values > 0)
