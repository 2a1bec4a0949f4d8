"""A plan in factors in plain torch, for the references: its rows, the price it is made at, its
repair into the box.

For whole batches and any moves; compiled loops have :mod:`wball.kernels.factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from wball.cost import Moves
from wball.inputs import per_image

REPAIR_SWEEPS, PLAIN_SWEEPS = 64, 6
"""Sweeps of a repair at most; with 16, one pixel of a photograph was left above the box now and
then, and its image unsolved. After ``PLAIN_SWEEPS`` of them, pixels above the box send back twice
their excess: mass that circulates among full pixels would take long to vanish otherwise."""


def image_sums(values: Tensor) -> Tensor:
    return values.sum((-3, -2, -1), dtype=torch.float64)


class PlanRows:
    """The plan ``row_i weight(c) column_j`` of potentials ``s``, before the box is enforced.

    Attributes:
        column: ``exp(s)``, scaled for each image.
        price, weights, norm, row: set by :meth:`at`.
    """

    def __init__(self, x: Tensor, s: Tensor, moves: Moves) -> None:
        self.x, self.moves = x, moves
        flat = s.flatten(1)
        self.middle = per_image(0.5 * (flat.amin(1) + flat.amax(1)), s)
        self.column = torch.exp(s - self.middle)

    def at(self, psi: Tensor) -> PlanRows:
        """The plan at a price per image."""
        self.price = per_image(psi, self.x)
        self.weights = torch.exp(-self.price * self.moves.ring_cost)
        self.norm = self.column + self.moves.sums(self.column, self.weights)
        self.row = self.x / self.norm
        return self

    def solve_price(
        self,
        budget: Tensor,
        psi: Tensor,
        steps: int,
        tolerance: Callable[[Tensor], float | Tensor],
    ) -> Tensor:
        """The price ``psi >= 0`` at which the cost of the plan is at most the budget, and close to
        it.

        The cost falls about exponentially in the price, so Newton's method runs on its logarithm,
        kept in a bracket. ``tolerance``, relative to the budget, may depend on the price.
        """
        low, high = torch.full_like(psi, -1.0), torch.full_like(psi, math.inf)
        ring_cost = self.moves.ring_cost
        for _ in range(steps):
            self.at(psi)
            paid = self.weights * ring_cost
            mean = self.moves.sums(self.column, paid) / self.norm
            square = self.moves.sums(self.column, paid * ring_cost) / self.norm
            variance = square - mean.square()
            cost, slope = image_sums(self.x * mean), image_sums(self.x * variance.clamp(min=0.0))
            precise = tolerance(psi)
            inside = cost <= budget
            found = inside & ((cost >= budget * (1 - precise)) | (psi == 0))
            low, high = torch.where(inside, low, psi), torch.where(inside, psi, high)
            logarithm = torch.log(cost / (budget * (1 - precise / 2)))
            step = psi + (cost * logarithm / slope).to(psi.dtype)
            step = step.clamp(min=0.0)  # NaN where nothing moves
            middle = torch.where(high.isinf(), 2 * psi + 1, (low.clamp(min=0.0) + high) / 2)
            # Cap the step: a slope lost to underflow would make it huge.
            usable = (step > low) & (step < high) & (step < 100 * psi + 100)
            psi = torch.where(found, psi, torch.where(usable, step, middle))
            if bool(found.all()):
                return psi
        self.at(psi)
        return psi

    @property
    def log_sum(self) -> Tensor:
        """The logarithm of the rows' normalisers."""
        return torch.log(self.norm) + self.middle

    @property
    def stays(self) -> Tensor:
        """Mass that stays where it is."""
        return self.row * self.column

    def columns(self) -> Tensor:
        return self.stays + self.column * self.moves.sums(self.row, self.weights, back=True)

    def exchange(
        self, keep: Tensor, give: Tensor, which: Tensor | slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """What each pixel of some images would send if ``give`` were 1, and receive if ``keep``
        were 1."""
        row, column, weights = self.row[which], self.column[which], self.weights[:, which]
        received = self.moves.sums(row * give, weights, back=True)
        return row * self.moves.sums(column * keep, weights), column * received

    def spent(self, keep: Tensor) -> Tensor:
        """Cost of the mass that each pixel would send if ``give`` were 1."""
        weights = self.weights * self.moves.ring_cost
        return self.row * self.moves.sums(self.column * keep, weights)


def into_box(rows: PlanRows, lo: float, hi: float, slack: float) -> Tensor:
    """Factors ``keep`` and ``give`` such that ``x - give sent + keep received`` keeps the box up to
    ``slack``; all four in one tensor.

    A column above ``hi`` sends its excess back along the arcs it came by, which may overfill the
    pixels it came from, and so on. In the last sweep no column counts on the mass that it sends
    away, which always succeeds and takes away far too much. Plans are linear in ``keep``, so where
    rows need no repair (``lo <= 0``) the answer is the mixture of the last two that just keeps the
    box.
    """
    tiny, ones = torch.finfo(rows.x.dtype).tiny, torch.ones_like(rows.x)
    found = torch.stack((ones, ones, *rows.exchange(ones, ones)))
    for sweep in range(REPAIR_SWEEPS + 1):
        x, (keep, give, sent, received) = rows.x, found
        z = x - give * sent + keep * received
        broken = ((z > hi + slack) | (z < lo - slack)).flatten(1).any(1).nonzero()[:, 0]
        if not len(broken):
            break
        x, z, (keep, give, sent, received) = x[broken], z[broken], found[:, broken]
        last = sweep == REPAIR_SWEEPS
        counted, more = float(not last), float(PLAIN_SWEEPS <= sweep < REPAIR_SWEEPS)
        above, below = more * (z - hi).clamp(min=0.0), more * (lo - z).clamp(min=0.0)
        room = ((hi - x + counted * give * sent - above) / received.clamp(min=tiny)).clamp(min=0.0)
        spare = ((x - lo + counted * keep * received - below) / sent.clamp(min=tiny)).clamp(min=0.0)
        kept, had_sent = keep, sent
        keep = torch.where((z > hi + slack) | last, torch.minimum(keep, room), keep)
        give = torch.where((z < lo - slack) | (last and lo > 0), torch.minimum(give, spare), give)
        sent, received = rows.exchange(keep, give, broken)
        if last and lo <= 0.0:
            excess, below = z - hi, (hi - (x - give * sent + keep * received)).clamp(min=0.0)
            part = torch.where(
                excess > slack, excess / (excess + below).clamp(min=tiny), torch.zeros_like(z)
            )
            way = per_image(part.flatten(1).amax(1), part)
            keep, sent = kept + way * (keep - kept), had_sent + way * (sent - had_sent)
        found[:, broken] = torch.stack((keep, give, sent, received))
    return found
