"""Linear maxima over the ball (:mod:`wball.kernels.linear_maximum`) in plain PyTorch: the yardstick of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball.kernels.entropic_plan.reference import per_image
from wball.kernels.linear_maximum import FLAT, LinearMaximum
from wball.moves import Moves


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Serves any images and stencil costs."""
    return None


def linear_maximum(
    a: Tensor, x: Tensor, budget: Tensor, moves: Moves, *, point: bool = False, max_iter: int = 60
) -> LinearMaximum:
    """See :func:`wball.kernels.linear_maximum.linear_maximum`."""
    limit = budget.to(torch.float64).clamp(min=0.0)
    search = _Search(a, x, limit, moves.like(a))
    low, high, n_iter = search.run(max_iter)
    best = low.where(low.value <= high.value, high)
    z = None
    if point:
        spread = low.cost - high.cost
        blend = torch.where(spread > 0, (limit - high.cost) / spread.clamp(min=1e-300), torch.zeros_like(spread))
        blend = blend.clamp(0, 1)
        z = search.columns(high.psi, 1 - blend) + search.columns(low.psi, blend)
    return LinearMaximum(best.psi, best.value, best.cost, z, n_iter)


@dataclass(frozen=True)
class _End:
    """A price, the function there, and what the cheapest best moves cost."""

    psi: Tensor
    value: Tensor
    cost: Tensor

    def where(self, mask: Tensor, other: _End) -> _End:
        return _End(
            torch.where(mask, self.psi, other.psi),
            torch.where(mask, self.value, other.value),
            torch.where(mask, self.cost, other.cost),
        )


class _Search:
    def __init__(self, a: Tensor, x: Tensor, budget: Tensor, moves: Moves) -> None:
        self.a, self.x, self.budget, self.moves = a, x, budget, moves
        ends = moves.ends(a, -math.inf)
        self.rings = []
        for ring in moves.rings:
            best = ends(ring[0])
            for k in ring[1:]:
                best = torch.maximum(best, ends(k))
            self.rings.append(best)
        self.prices = list(moves.ring_cost)  # a number each, or one per pixel

    def at(self, psi: Tensor) -> _End:
        best, toll = self.rings[0], torch.zeros_like(self.a)
        for ring, price in zip(self.rings[1:], self.prices[1:], strict=True):
            score = ring - per_image(psi) * price
            toll = torch.where(score > best, price.expand_as(toll), toll)
            best = torch.maximum(best, score)
        value = (self.x.double() * best).sum((1, 2, 3)) + psi.double() * self.budget
        return _End(psi, value, (self.x.double() * toll).sum((1, 2, 3)))

    def run(self, max_iter: int) -> tuple[_End, _End, Tensor]:
        low = self.at(torch.zeros_like(self.a[:, 0, 0, 0]))
        free = low.cost <= self.budget
        # Above the steepest gain per unit of cost nobody moves.
        steepest = torch.zeros_like(low.psi)
        for ring, price in zip(self.rings, self.prices, strict=True):
            gain = torch.where((self.x > 0) & (price > 0), (ring - self.a) / price.clamp(min=1e-30), 0.0)
            steepest = torch.maximum(steepest, gain.flatten(1).amax(1))
        high = low.where(free, self.at(steepest * (1 + 1e-6) + 1e-30))
        settled, n_iter = free, torch.full_like(low.psi, 2, dtype=torch.long)
        for step in range(max_iter - 2):
            if bool(settled.all()):
                break
            left, right = self.budget - low.cost, self.budget - high.cost
            reach = (low.value - high.value + right * (high.psi.double() - low.psi.double())) / (right - left).clamp(
                min=1e-300
            )
            meet = (low.psi.double() + reach).to(low.psi.dtype)
            middle = 0.5 * (low.psi + high.psi)
            trial = meet if step % 3 < 2 else middle
            trial = torch.where((trial > low.psi) & (trial < high.psi), trial, middle)
            new = self.at(trial)
            tangent = torch.maximum(
                low.value + left * (trial - low.psi).double(), high.value - right * (high.psi - trial).double()
            )
            flat = (new.value - tangent <= FLAT * (new.value.abs() + low.value.abs())) & (step % 3 < 2)
            goes_high = new.cost <= self.budget
            high = new.where(goes_high & ~settled, high)
            low = new.where(~goes_high & ~settled, low)
            n_iter += ~settled
            settled = settled | flat | (high.psi - low.psi <= 4 * torch.finfo(trial.dtype).eps * high.psi)
        return low, high, n_iter

    def columns(self, psi: Tensor, weight: Tensor) -> Tensor:
        """Where the cheapest best moves at ``psi`` take the mass, times ``weight``."""
        ends = self.moves.ends(self.a, -math.inf)
        best, choice = self.a, torch.zeros_like(self.a, dtype=torch.long)
        for k, cost in enumerate(self.moves.costs):
            score = ends(k) - per_image(psi) * cost
            choice = torch.where(score > best, torch.full_like(choice, k), choice)
            best = torch.maximum(best, score)
        total = self.moves.arrivals(self.a)
        sending = self.x * per_image(weight.to(self.x.dtype))
        for k in range(len(self.moves)):
            total.add(k, torch.where(choice == k, sending, torch.zeros_like(sending)))
        return total.total()
