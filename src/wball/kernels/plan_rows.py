"""A plan in factors in plain torch, for the references: its rows, the price it is made at, its
repair into the box.

For whole batches and any moves; compiled loops have :mod:`wball.kernels.price` and
:mod:`wball.kernels.factors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wball.batch import per_image
from wball.moves import Moves

REPAIR_SWEEPS, PLAIN_SWEEPS = 40, 2
"""Sweeps of a repair. After ``PLAIN_SWEEPS`` of them, pixels above the box send back twice their
excess: mass that circulates among full pixels would take long to vanish otherwise."""

NARROW = {torch.float64: 600.0}
"""Nats between the potentials of an image up to which its plan is a product of factors, by
precision: the others have logs only."""


def image_sums(values: Tensor) -> Tensor:
    return values.sum((-3, -2, -1), dtype=torch.float64)


def ring_sums(s: Tensor, moves: Moves) -> Tensor:
    """``(D, B, C, H, W)``: for each distinct cost, the logsumexp of ``s`` over the moves of that
    cost."""
    ends = moves.ends(s, -math.inf)
    rings = [
        torch.stack([ends(k) for k in ring]) if len(ring) > 1 else ends(ring[0])[None]
        for ring in moves.rings
    ]
    return torch.stack([torch.logsumexp(ring, 0) if len(ring) > 1 else ring[0] for ring in rings])


def newton_step(
    psi: Tensor,
    low: Tensor,
    high: Tensor,
    cost: Tensor,
    slope: Tensor,
    budget: Tensor,
    tolerance: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One bracketed step towards the price at which ``cost`` is just below ``budget``.

    The cost falls about exponentially in the price, so Newton's method runs on its logarithm;
    ``slope`` is minus the derivative of the cost. Returns the price, kept where it is found, the
    bracket, and where it is found.
    """
    inside = cost <= budget
    found = inside & ((cost >= budget * (1 - tolerance)) | (psi == 0))
    low, high = torch.where(inside, low, psi), torch.where(inside, psi, high)
    step = psi + (cost * torch.log(cost / (budget * (1 - tolerance / 2))) / slope).to(psi.dtype)
    step = step.clamp(min=0.0)  # not a number where nothing moves
    middle = torch.where(high.isinf(), 2 * psi + 1, (low.clamp(min=0.0) + high) / 2)
    # Cap the step: a slope lost to underflow would make it huge.
    step = torch.where((step > low) & (step < high) & (step < 100 * psi + 100), step, middle)
    return torch.where(found, psi, step), low, high, found


def solve_price(
    x: Tensor,
    rings: Tensor,
    ring_cost: Tensor,
    budget: Tensor,
    psi: Tensor,
    steps: int,
    tolerance: Callable[[Tensor], float | Tensor],
) -> Tensor:
    """The ``psi >= 0`` at which ``sum_i x_i E_i[cost]`` meets the budget, from the side below it.

    ``tolerance``, relative to the budget, may depend on the price.
    """
    low, high = torch.full_like(psi, -1.0), torch.full_like(psi, math.inf)
    for _ in range(steps):
        share = torch.softmax(rings - per_image(psi, x) * ring_cost, 0)
        mean = (share * ring_cost).sum(0)
        variance = (share * (ring_cost - mean).square()).sum(0)
        cost, slope = image_sums(x * mean), image_sums(x * variance)
        psi, low, high, found = newton_step(psi, low, high, cost, slope, budget, tolerance(psi))
        if bool(found.all()):
            break
    return psi


@dataclass(frozen=True)
class PlanFactors:
    """A plan ``row_i weight(c) column_j`` along moves of cost ``c``, without logs.

    Attributes:
        fit: the images whose potentials are narrow enough for it.
        row, column: like the images.
        weights: of each ring, as :meth:`wball.moves.Moves.sums` takes them.
    """

    fit: Tensor
    row: Tensor
    column: Tensor
    weights: Tensor


class PlanRows:
    """The plan before the box is enforced. Sums over its moves take factors where all images of the
    batch have them."""

    def __init__(self, x: Tensor, s: Tensor, psi: Tensor, rings: Tensor, moves: Moves) -> None:
        self.x, self.s, self.moves, self.price = x, s, moves, per_image(psi, x)
        self.log_sum = torch.logsumexp(rings - self.price * moves.ring_cost, 0)
        self.start = torch.log(x) - self.log_sum  # -inf where the row is empty
        self._ends = moves.ends(s, -math.inf)

    @cached_property
    def factors(self) -> PlanFactors:
        low, high = (extreme(self.s.flatten(1), 1) for extreme in (torch.amin, torch.amax))
        middle = per_image(0.5 * (low + high), self.s)
        row, column = torch.exp(self.start + middle), torch.exp(self.s - middle)
        weights = torch.exp(-self.price * self.moves.ring_cost)
        return PlanFactors(high - low <= NARROW.get(self.x.dtype, -1.0), row, column, weights)

    @cached_property
    def _factored(self) -> bool:
        return self.x.dtype in NARROW and bool(self.factors.fit.all())

    def flow(self, k: int) -> Tensor:
        """Mass that leaves each pixel by move ``k``."""
        return (self.start + self._ends(k) - self.price * self.moves.costs[k]).exp()

    def flows(self) -> Iterator[tuple[int, Tensor]]:
        """All moves but the one that stays."""
        for ring in self.moves.rings:
            start = self.start - self.price * self.moves.costs[ring[0]]
            for k in ring:
                if k > 0:
                    yield k, (start + self._ends(k)).exp_()

    def columns(self) -> Tensor:
        return self.flow(0) + self.received()

    def received(self) -> Tensor:
        """What arrives at each pixel from others."""
        if self._factored:
            f = self.factors
            return f.column * self.moves.sums(f.weights, back=True)(f.row)
        received = self.moves.arrivals(self.x)
        for k, flow in self.flows():
            received.add(k, flow)
        return received.total()

    def exchange(self, keep: Tensor, give: Tensor) -> tuple[Tensor, Tensor]:
        """What each pixel would send if ``give`` were 1, and receive if ``keep`` were 1."""
        if self._factored:
            f, sums = self.factors, self.moves.sums
            sent = f.row * sums(f.weights)(f.column * keep)
            return sent, f.column * sums(f.weights, back=True)(f.row * give)
        kept, received, sent = (
            self.moves.ends(keep, 0.0),
            self.moves.arrivals(self.x),
            torch.zeros_like(self.x),
        )
        for k, flow in self.flows():
            sent += flow * kept(k)
            received.add(k, flow * give)
        return sent, received.total()

    def spent(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        """What each pixel would send if ``give`` were 1, and what that would cost."""
        if self._factored:
            f, sums, ends = self.factors, self.moves.sums, self.factors.column * keep
            return f.row * sums(f.weights)(ends), f.row * sums(f.weights * self.moves.ring_cost)(
                ends
            )
        kept, sent, paid = (
            self.moves.ends(keep, 0.0),
            torch.zeros_like(keep),
            torch.zeros_like(keep),
        )
        for k, flow in self.flows():
            part = flow.mul_(kept(k))
            sent += part
            paid += part * self.moves.costs[k]
        return sent, paid


def into_box(
    rows: PlanRows, lo: float, hi: float, slack: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors ``keep`` and ``give`` such that ``x - give sent + keep received`` keeps the box up to
    ``slack``; returns all four.

    A column above ``hi`` sends its excess back along the arcs it came by, which may overfill the
    pixels it came from, and so on. In the last sweep no column counts on the mass that it sends
    away, which always succeeds and takes away far too much. Plans are linear in ``keep``, so where
    rows need no repair (``lo <= 0``) the answer is the mixture of the last two that just keeps the
    box.
    """
    x, tiny = rows.x, torch.finfo(rows.x.dtype).tiny
    keep, give = torch.ones_like(x), torch.ones_like(x)
    sent, received = rows.exchange(keep, give)
    for sweep in range(REPAIR_SWEEPS + 1):
        z = x - give * sent + keep * received
        over, under = z > hi + slack, z < lo - slack
        broken = (over | under).flatten(1).any(1)
        if not bool(broken.any()):
            break
        counted, more = 1.0, float(sweep >= PLAIN_SWEEPS)
        if sweep == REPAIR_SWEEPS:
            counted, more = 0.0, 0.0
            over = per_image(broken, x).expand_as(x)
            under = over if lo > 0 else under
        above, below = more * (z - hi).clamp(min=0.0), more * (lo - z).clamp(min=0.0)
        room = ((hi - x + counted * give * sent - above) / received.clamp(min=tiny)).clamp(min=0.0)
        spare = ((x - lo + counted * keep * received - below) / sent.clamp(min=tiny)).clamp(min=0.0)
        kept, had_sent = keep, sent
        keep = torch.where(over, torch.minimum(keep, room), keep)
        give = torch.where(under, torch.minimum(give, spare), give)
        sent, received = rows.exchange(keep, give)
        if sweep == REPAIR_SWEEPS and lo <= 0.0:
            excess, below = z - hi, (hi - (x - give * sent + keep * received)).clamp(min=0.0)
            part = torch.where(
                excess > slack, excess / (excess + below).clamp(min=tiny), torch.zeros_like(z)
            )
            way = per_image(part.flatten(1).amax(1), part)
            keep, sent = kept + way * (keep - kept), had_sent + way * (sent - had_sent)
    return keep, give, sent, received
