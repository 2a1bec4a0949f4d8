r"""Moves that are not listed, as two that are: what they pay is at most what both of these pay.

The charge of a move is :math:`M_{ij} = \sum_u b_u \max(g^u_{ij}, 0)`, and the gains of a unit add
up along a path: :math:`g_{ij} \le g_{ik} + g_{kj}`. So :math:`M_{ij} \le M_{ik} + M_{kj}`, for any
pixel ``k``, which costs nothing but an addition: no unit needs gains of its own for the move. Here
``k`` is the pixel next to the middle of the way, inside the rectangle that both ends span, so that
it lies in the image if they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.cost import GridCost, moving, rings_of

Offset = tuple[int, int]


@dataclass(frozen=True)
class Detours:
    """The shortest moves beyond the listed ones, each the sum of two listed moves. A length is
    included only if all moves of that length are such sums.

    Attributes:
        offsets: where they lead, sorted by cost.
        first, second: the listed moves they are made of, by number.
        halfway: where the first of them leads.
        rings: places in the list of the moves of each cost.
        limit: all longer moves have at least this length.
    """

    offsets: tuple[Offset, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    halfway: tuple[Offset, ...]
    rings: dict[float, slice]
    limit: float

    def __len__(self) -> int:
        return len(self.offsets)

    def worth(self, charges: Tensor, targets: Tensor, size: Offset, radius: int) -> Tensor:
        """What every source finds at the end of these moves, and pays on the way, ``(N, C, O, S)``.

        ``charges`` (N, C, K, S) are those of the listed moves, which span ``radius`` pixels, on a
        grid of that size; ``targets`` cover it widened by twice the radius.
        """
        grid = F.pad(charges.unflatten(3, size), (radius,) * 4)
        cells = grid.shape[3] * grid.shape[4]
        there = _places(self.halfway, size, radius, charges.device)
        first, second = (
            constant(part, torch.long, charges.device) for part in (self.first, self.second)
        )
        later = (
            grid.flatten(2)
            .index_select(2, (second[:, None] * cells + there).flatten())
            .unflatten(2, there.shape)
        )
        ends = _places(self.offsets, size, 2 * radius, charges.device)
        found = targets.flatten(2).index_select(2, ends.flatten()).unflatten(2, ends.shape)
        return found + later + charges.index_select(2, first)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device once: a copy to a GPU makes the host wait."""
    return torch.tensor(values, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _places(offsets: tuple[Offset, ...], size: Offset, around: int, device: torch.device) -> Tensor:
    """``(O, S)``: where each offset leads from every pixel of a grid, in the grid widened by
    ``around``.
    """
    width = size[1] + 2 * around
    place = torch.arange(size[0] * size[1], device=device)
    centre = (place // size[1] + around) * width + place % size[1] + around
    return centre + torch.tensor([r * width + c for r, c in offsets], device=device)[:, None]


@lru_cache(maxsize=64)
def detours(listed: tuple[Offset, ...], power: float, height: int, width: int) -> Detours | None:
    """The moves next in length after the ``listed`` ones, for images of this size; ``None`` if
    there are none."""
    number = {offset: k for k, offset in enumerate(listed)}
    top = 2 * max((max(abs(r), abs(c)) for r, c in listed), default=0) + 1
    found: dict[Offset, tuple[Offset, float]] = {}
    limit = math.inf
    for r, c, _, cost in moving(GridCost(2 * top + 1, power).moves(height, width)):
        if (r, c) in number:
            continue
        ways = [
            (a, b)
            for a, b in listed
            if (r - a, c - b) in number and _between(a, r) and _between(b, c)
        ]
        if not ways:
            limit = math.hypot(r, c)
            break
        way = min(ways, key=lambda way: (math.hypot(2 * way[0] - r, 2 * way[1] - c), way))
        found[r, c] = way, cost
    kept = [end for end in found if math.hypot(*end) < limit]  # all of a length, or none
    if not kept:
        return None
    halfway = tuple(found[end][0] for end in kept)
    rings = rings_of([found[end][1] for end in kept])
    first = tuple(number[way] for way in halfway)
    second = tuple(number[r - a, c - b] for (r, c), (a, b) in zip(kept, halfway, strict=True))
    return Detours(tuple(kept), first, second, halfway, rings, limit)


def _between(part: int, whole: int) -> bool:
    return min(0, whole) <= part <= max(0, whole)
