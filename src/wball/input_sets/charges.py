"""What moved mass pays: the charges that an anchored relaxation adds to the moves of a plan.

How they come about is told in :mod:`wball.certificates.anchor`; an input set only adds them to what
its moves earn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Charges:
    """What moved mass pays, per row: ``moves`` (N, C, K, S) for each listed move out of each
    source.

    A move that is not listed pays at most ``out`` (N, C, S) for its source plus ``into`` (N, C, h,
    w) for its target.
    """

    moves: Tensor
    out: Tensor
    into: Tensor

    def plus(self, other: Charges) -> Charges:
        return Charges(self.moves + other.moves, self.out + other.out, self.into + other.into)

    def take(self, index: Tensor) -> Charges:
        """The charges of some of the rows."""
        return Charges(self.moves[index], self.out[index], self.into[index])

    def times(self, weight: Tensor, index: Tensor) -> Charges:
        """The charges of rows ``index``, each times its ``weight``, in the weights' precision."""

        def scaled(part: Tensor) -> Tensor:
            return weight.view(-1, *[1] * (part.ndim - 1)) * part[index].to(weight.dtype)

        return Charges(scaled(self.moves), scaled(self.out), scaled(self.into))


def rounded_up(gains: Tensor) -> Tensor:
    """The same in float32, no number smaller than it was: larger gains only loosen a bound."""
    single = gains.float()
    return torch.where(single < gains, torch.nextafter(single, single.new_tensor(math.inf)), single)


def spread(
    patches: Tensor,
    corner: tuple[Tensor, Tensor],
    image: Tensor,
    active: Tensor | None,
    shape: tuple[int, ...],
) -> Tensor:
    """Patch maps ``(N, C, K, h, w)`` read at the sources of dense rows, ``(N, C, K, S)``; 0
    outside the patches.
    """
    size = (patches.shape[-2], patches.shape[-1])
    if active is None:
        place = torch.arange(shape[1] * shape[2], device=image.device).expand(
            image.shape[0], patches.shape[1], -1
        )
    else:
        place = active[image]
    row = place // shape[2] - corner[0].view(-1, 1, 1)
    column = place % shape[2] - corner[1].view(-1, 1, 1)
    keep = (row >= 0) & (row < size[0]) & (column >= 0) & (column < size[1])
    index = torch.where(keep, row * size[1] + column, 0)
    found = patches.flatten(3).gather(3, index[:, :, None].expand(-1, -1, patches.shape[2], -1))
    return found * keep[:, :, None]
