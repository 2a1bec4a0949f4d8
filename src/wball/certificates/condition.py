r"""Bounds over what is left for an attacker: only images with a margin ``m <= 0`` matter.

There ``v <= v - gamma m`` for every function ``v`` of the image and every ``gamma >= 0``. With a
row that bounds ``m`` from below over the whole set, the right-hand side is a row again, so any
bound can be taken over those images alone: an attacker who drives a unit up must bring the margin
down with the same budget. Tighter bounds of the units improve the row of ``m``, and so on; should
the bound of ``m`` rise above 0, or the bounds of a unit cross, there is no such image. (In the
limit this is the dual of the program that minimises a unit subject to ``m <= 0``.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball.input_sets import InputSet
from wball.input_sets.base import ROUNDS
from wball.input_sets.rows import Charges, Rows
from wball.inputs import dot, per_image

TIMES = (0.5, 1.5, 4.0)
"""Multipliers ``gamma`` that are tried, relative to how far the unit can rise for what the
margin can fall."""

TRIAL_ROUNDS = 4
"""Rounds of the search for ``psi`` while multipliers are compared; any of both is sound."""


@dataclass(frozen=True)
class Condition:
    """``m >= constant + <rows, z> - charges`` for every image of the set, problem by problem; it
    matters where m <= 0.

    Attributes:
        rows: dense rows over the images, one per problem.
        charges: what moved mass pays, one per problem; ``None`` if nothing is charged.
        constant: ``(P,)``, float64, rounded down.
        centre: the images themselves, float64.
        fall: ``(P,)``, how far the row can fall below its value at the image.
    """

    rows: Rows
    charges: Charges | None
    constant: Tensor
    centre: Tensor
    fall: Tensor

    @torch.no_grad()
    def maximum(
        self,
        source: InputSet,
        rows: Rows,
        charges: Charges | None,
        known: Tensor,
        rounds: int = ROUNDS,
    ) -> tuple[Tensor, Tensor]:
        """A sound upper bound of ``max <rows, z>`` plus charges where ``m <= 0``; and the
        magnitudes it adds.

        Rows are dense. ``known``, the maximum over all images, gives multipliers their scale.
        """
        single = rows.like(rows.coeff.float())
        lighter = (
            None
            if charges is None
            else Charges(charges.moves.float(), charges.out.float(), charges.into.float())
        )
        rise = known - dot(rows.coeff, self.centre[rows.image])
        unit = (rise.clamp(min=0) / self.fall[rows.image]).nan_to_num(0.0, 0.0, 0.0)
        gamma, best = torch.zeros_like(unit), torch.full_like(unit, math.inf)
        for times in TIMES:
            trial = times * unit
            value = self._at(trial, source, single, lighter, TRIAL_ROUNDS)
            gamma, best = torch.where(value < best, trial, gamma), torch.minimum(value, best)
        size = self.constant.abs() + self.rows.coeff.abs().flatten(1).sum(1)
        return self._at(gamma, source, rows, charges, rounds), gamma * size[rows.image]

    def _at(
        self, gamma: Tensor, source: InputSet, rows: Rows, charges: Charges | None, rounds: int
    ) -> Tensor:
        dtype = rows.coeff.dtype
        weight = per_image(gamma.to(dtype), rows.coeff)
        together = rows.like(rows.coeff - weight * self.rows.coeff.to(dtype)[rows.image])
        if self.charges is not None:
            mine = self.charges.times(gamma.to(dtype), rows.image)
            charges = mine if charges is None else charges.plus(mine)
        value = source.maximum(together, charges, rounds=rounds).double()
        return value - gamma * self.constant[rows.image]


def condition(
    rows: Rows, charges: Charges | None, largest: Tensor, constant: Tensor, centre: Tensor
) -> Condition:
    """The condition ``m <= 0`` from a lower bound of ``m``, one row per problem in their order.

    ``largest`` is the largest value of minus the rows plus charges.
    """
    at_image = dot(rows.coeff, centre)
    fall = (largest + at_image).clamp(min=math.ulp(1.0) * at_image.abs().clamp(min=1e-30))
    return Condition(rows, charges, constant, centre, fall)
