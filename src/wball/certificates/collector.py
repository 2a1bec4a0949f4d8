"""Gathers the upper rows of a layer's units into the layer's anchor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.certificates.anchor import UnitAnchor
from wball.input_sets import TransportSet
from wball.input_sets.charges import Charged
from wball.input_sets.rows import Rows

LIMIT = 2**15
"""Numbers per image and pixel that the gains of one layer may hold on a CPU."""

COPIES = 6
"""Gains are in memory so often while they are computed, padded and read in float64."""


class Collector:
    """The gains of the units of one layer of shape ``shape``, for ``images`` images; at most ``limit`` per pixel."""

    def __init__(
        self, source: TransportSet, images: int, shape: tuple[int, ...], device: torch.device, limit: int
    ) -> None:
        self.source, self.images, self.shape, self.limit = source, images, shape, limit
        self._centre = torch.full((images, math.prod(shape)), math.inf, dtype=torch.float64, device=device)
        self._parts: list[tuple[Tensor, ...]] = []
        self._chosen: Tensor | None = None

    def choose(self, lower: Tensor, upper: Tensor) -> None:
        """If not all unstable units fit, leave some out: they keep the usual lines."""
        self._chosen = chosen(lower, upper, self.source, self.limit)

    def add(self, image: Tensor, unit: Tensor, at_input: Rows, charged: Charged, constant: Tensor) -> None:
        """Rows that bound ``-v`` from below: their values at the image and their gains."""
        if self._chosen is not None:
            keep = self._chosen[image, unit].nonzero()[:, 0]
            if keep.shape[0] == 0:
                return
            image, unit, constant = image[keep], unit[keep], constant[keep]
            at_input, charged = at_input.take(keep), [(anchor, weights.take(keep)) for anchor, weights in charged]
        centre = at_input.read(self.source.x.reshape(-1, *self.source.shape))
        self._centre[image, unit] = -(constant + (at_input.coeff * centre).flatten(1).sum(1))
        gains = self.source.gains(at_input.like(-at_input.coeff), charged)
        self._parts.append((image, unit, *gains))

    def listed(self) -> Tensor:
        """``(images * units,)``: which units have gains by now."""
        return torch.isfinite(self._centre).flatten()

    def anchor(self) -> tuple[UnitAnchor, Tensor] | None:
        """The anchor and the units' values at the images; ``None`` if no unit was added."""
        if not self._parts:
            return None
        image, unit, *gains = (torch.cat(part) for part in zip(*self._parts, strict=True))
        anchor = UnitAnchor(self.shape, image, unit, (gains[0], gains[1], gains[2]), self.images)
        return anchor, self._centre.view(self.images, *self.shape)


def gain_bytes(source: TransportSet) -> int:
    """About how much memory the gains of one unit take."""
    return 4 * COPIES * source.gain_size


def chosen(lower: Tensor, upper: Tensor, source: TransportSet, limit: int) -> Tensor | None:
    """``(images, units)``: each image's most unstable units, as many as there is room for; ``None`` if all fit."""
    low, up = lower.flatten(1), upper.flatten(1)
    most = limit * math.prod(source.shape) // source.gain_size
    if most >= low.shape[1]:
        return None
    depth = torch.minimum(up, -low)
    best = depth.topk(max(1, most), 1)
    return torch.zeros_like(depth, dtype=torch.bool).scatter(1, best.indices, best.values > 0)
