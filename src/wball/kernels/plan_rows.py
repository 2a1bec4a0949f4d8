"""A plan in factors in plain torch, for the references: its rows, the price it is made at, its
repair into the box.

For whole batches and any moves; compiled loops have :mod:`wball.kernels.factors`.
"""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from wball.cost import ALL, AWAY, MOMENTS, Moves
from wball.inputs import per_image

REPAIR_SWEEPS, PLAIN_SWEEPS = 64, 6
"""Sweeps of a repair at most; with 16, one pixel of a photograph was left above the box now and
then, and its image unsolved. After ``PLAIN_SWEEPS`` of them, pixels above the box send back twice
their excess: mass that circulates among full pixels would take long to vanish otherwise."""


def image_sums(values: Tensor) -> Tensor:
    return values.sum((-3, -2, -1))


class PlanRows:
    """The plan ``row_i weight(c) column_j`` of potentials ``s``, before the box is enforced.

    Attributes:
        column: ``exp(s)``, scaled for each image.
        price, weights, norm, row: set by :meth:`at` and :meth:`solve_price`.
    """

    def __init__(self, x: Tensor, s: Tensor, moves: Moves) -> None:
        self.x, self.moves = x, moves
        low, high = torch.aminmax(s.flatten(1), dim=1)
        self.middle = per_image(0.5 * (low + high), s)
        self.column = (s - self.middle).exp_()

    def at(self, psi: Tensor, part: slice = ALL) -> Tensor:
        """Set the price per image. Returns weighted sums over the moves of each pixel, the
        normalisers first."""
        self.price = per_image(psi.to(self.x), self.x)
        self.weights = self.moves.weights(self.price)
        sums = self.moves.sums(self.column, self.weights[part])
        self.norm = sums[:, :, 0]
        self.row = self.x / self.norm
        return sums

    def take(self, index: Tensor) -> PlanRows:
        """The plans of a subset of the images, to repair them."""
        part = copy(self)
        part.x, part.row, part.column = self.x[index], self.row[index], self.column[index]
        part.weights = self.weights[:, index]
        return part

    def solve_price(
        self, budget: Tensor, psi: Tensor, steps: int, tol: float, miss: Tensor
    ) -> Tensor:
        """The price ``psi >= 0`` at which the cost of the plan is at most the budget, and close to
        it.

        The cost falls about exponentially in the price, so Newton's method runs on its logarithm,
        kept in a bracket. The budget left may be a share ``tol`` of the budget, and may be worth
        ``miss``. Numbers per image are on the host, which has to know when all prices are found.
        """
        budget, psi, miss = torch.stack((budget, psi, miss)).cpu()
        low, high = torch.full_like(psi, -1.0), psi + math.inf
        for _ in range(steps):
            paid = self.at(psi, MOMENTS)[:, :, 1:]
            mean = paid[:, :, 0] / self.norm
            paid *= self.row[:, :, None]
            paid[:, :, 1].addcmul_(paid[:, :, 0], mean, value=-1)  # x times the variance
            cost, slope = image_sums(paid.movedim(2, 0)).cpu()
            precise = (miss / (psi * budget).clamp(min=1e-300)).clamp(4e-15, tol)
            inside = cost <= budget
            found = inside & ((cost >= budget * (1 - precise)) | (psi == 0))
            low, high = torch.where(inside, low, psi), torch.where(inside, psi, high)
            gain = cost * torch.log(cost / (budget * (1 - precise / 2)))
            step = (psi + gain / slope.clamp(min=0.0)).clamp(min=0.0)  # NaN where nothing moves
            middle = torch.where(high.isinf(), 2 * psi + 1, (low.clamp(min=0.0) + high) / 2)
            # Cap the step: a slope lost to underflow would make it huge.
            usable = (step > low) & (step < high) & (step < 100 * psi + 100)
            psi = torch.where(found, psi, torch.where(usable, step, middle))
            if bool(found.all()):
                break
        else:
            self.at(psi)
        return self.price.flatten()

    @property
    def log_sum(self) -> Tensor:
        """The logarithm of the rows' normalisers."""
        return torch.log(self.norm) + self.middle

    @property
    def stays(self) -> Tensor:
        """Mass that stays where it is."""
        return self.row * self.column

    def columns(self) -> Tensor:
        return self.exchanged(1.0, ALL, back=True)

    def exchanged(self, factor: Tensor | float, part: slice = AWAY, back: bool = False) -> Tensor:
        """What each pixel would send if ``give`` were 1, or with ``PAID`` its cost, for a factor
        ``keep``; with ``back``, what it would receive if ``keep`` were 1, for a factor ``give``."""
        near, far = (self.column, self.row) if back else (self.row, self.column)
        return near * self.moves.sums(far * factor, self.weights[part], back)[:, :, 0]


def into_box(rows: PlanRows, lo: float, hi: float, slack: float) -> Tensor:
    """Factors ``keep`` and ``give`` such that ``x - give sent + keep received`` keeps the box up to
    ``slack``; all four in one tensor.

    A column above ``hi`` sends its excess back along the arcs it came by, which may overfill the
    pixels it came from, and so on. In the last sweep no column counts on the mass that it sends
    away, which always succeeds and takes away far too much. Plans are linear in ``keep``, so where
    rows need no repair (``lo <= 0``) the answer is the mixture of the last two that just keeps the
    box.
    """
    ones = torch.ones_like(rows.x)
    found = torch.stack((ones, ones, rows.exchanged(ones), rows.exchanged(ones, back=True)))
    state, place = found.unbind(), torch.arange(len(ones), device=ones.device)
    for sweep in range(REPAIR_SWEEPS + 1):
        keep, give, sent, received = state
        more = sweep >= PLAIN_SWEEPS
        room = torch.addcmul(hi - rows.x, give, sent)
        less, broken = _cut(keep, received, room, slack, more)
        smaller = give
        if lo > 0.0:
            spare = torch.addcmul(rows.x - lo, keep, received)
            smaller, drained = _cut(give, sent, spare, slack, more)
            broken |= drained
        left = broken.flatten(1).any(1).nonzero()[:, 0]
        if len(left) < len(place):
            if sweep:
                found[:, place] = torch.stack(state)
            if not len(left):
                return found
            rows, place = rows.take(left), place[left]
            keep, give, sent, received, less, smaller = (t[left] for t in (*state, less, smaller))
        if sweep < REPAIR_SWEEPS:
            received = rows.exchanged(smaller, back=True) if lo > 0.0 else received
            state = less, smaller, rows.exchanged(less), received
    less = _cut(keep, received, hi - rows.x, 0.0, False)[0]
    sends, way = rows.exchanged(less), ones[:1]
    if lo > 0.0:
        give = _cut(give, sent, rows.x - lo, 0.0, False)[0]
        received = rows.exchanged(give, back=True)
    else:
        over, under = (rows.x - s + k * received - hi for k, s in ((keep, sent), (less, sends)))
        part = torch.where(over > slack, over / (over - under.clamp(max=0.0)), 0.0)
        way = per_image(part.flatten(1).amax(1), part)
    keep, sent = torch.lerp(keep, less, way), torch.lerp(sent, sends, way)
    found[:, place] = torch.stack((keep, give, sent, received))
    return found


def _cut(
    factor: Tensor, flow: Tensor, room: Tensor, slack: float, more: bool
) -> tuple[Tensor, Tensor]:
    """Cuts the factors whose flows exceed their room by more than ``slack`` to it, with ``more`` by
    twice the excess. Returns the factors, and which are cut."""
    excess = (factor * flow).sub_(room)
    over = excess > slack
    if more:
        room = room - excess
    cut = (room / flow.clamp(min=1e-300)).clamp_(min=0.0)
    return torch.where(over, cut, factor), over
