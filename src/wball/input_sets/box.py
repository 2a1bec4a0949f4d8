"""Sets given by one interval per pixel, and sets given by their support function."""

from __future__ import annotations

import math
import time
from typing import Any

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


class SupportSet(IntervalSet):
    """A ``ball`` around images ``x`` by its own support function, inside of ``low <= z <= high``.

    ``ball.support(x, g)`` returns a point and, in ``upper``, a bound of the maximum that holds in
    exact arithmetic; ``ball.take(index)`` is the ball of a subset of the images.
    """

    def __init__(self, ball: Any, x: Tensor, low: Tensor, high: Tensor) -> None:
        super().__init__(low, high)
        self.ball, self.centre = ball, x.double()

    def maximum(
        self,
        rows: Rows,
        charges: Charges | None = None,
        box: Tensor | None = None,
        rounds: int = ROUNDS,
    ) -> Tensor:
        whole = rows.dense(self.shape)
        g = whole.coeff.detach().double().reshape(-1, *self.shape)
        found = self.ball.take(whole.image).support(self.centre[whole.image], g)
        point = found.point.double().reshape(whole.coeff.shape)
        attained = dot(whole.coeff.double(), point)
        return (attained + (found.upper - attained).detach()).to(rows.coeff)

    def take(self, index: Tensor) -> SupportSet:
        return SupportSet(
            self.ball.take(index), self.centre[index], self.low[index], self.high[index]
        )


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
