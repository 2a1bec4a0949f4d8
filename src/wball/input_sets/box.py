"""Sets given by one interval per pixel: l-infinity balls, and the box around any other set."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from wball.input_sets.base import ROUNDS, InputSet
from wball.input_sets.rows import Charges, Rows, units
from wball.inputs import dot


class IntervalSet(InputSet):
    """``low <= z <= high`` in every pixel. The maximum has a closed form, so nothing is
    searched."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low.double(), high.double()
        self.shape = tuple(low.shape[1:])

    def maximum(
        self,
        rows: Rows,
        charges: Charges | None = None,
        box: Tensor | None = None,
        rounds: int = ROUNDS,
    ) -> Tensor:
        if charges is not None:
            raise ValueError("an interval set has no plans to charge")
        dtype = rows.coeff.dtype
        high, low = rows.read(self.high.to(dtype)), rows.read(self.low.to(dtype))
        return dot(rows.coeff, torch.where(rows.coeff > 0, high, low))

    def ranges(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def take(self, index: Tensor) -> IntervalSet:
        return IntervalSet(self.low[index], self.high[index])

    def floats(self, rows: Rows, charged: bool = False) -> int:
        return 3 * rows.coeff[0].numel()


@torch.no_grad()
def intervals(source: InputSet, deadline: float = math.inf) -> IntervalSet:
    """The smallest box of per-pixel intervals around each ball: the relaxation that the paper found
    too loose. Pixels keep their whole range after the deadline."""
    size, ends = math.prod(source.shape), [end.clone().contiguous() for end in source.ranges()]
    for sign, end in zip((-1.0, 1.0), ends, strict=True):
        flat = end.view(-1)
        for part in torch.arange(flat.shape[0], device=flat.device).split(4096):
            if time.monotonic() > deadline:
                break
            signs = flat.new_full(part.shape, sign)
            rows = units(source.shape, part // size, part % size, signs, flat)
            flat[part] = sign * source.maximum(rows)
    return IntervalSet(ends[0], ends[1])
