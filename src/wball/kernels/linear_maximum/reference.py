"""Linear maxima over the ball (:mod:`wball.kernels.linear_maximum`) in plain PyTorch, which the
others must match."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from wball.cost import Moves
from wball.inputs import dot, per_image
from wball.kernels.linear_maximum import FLAT, LinearMaximum
from wball.plan import Plan


def linear_maximum(
    a: Tensor, x: Tensor, budget: Tensor, moves: Moves, *, point: bool = False, max_iter: int = 60
) -> LinearMaximum:
    """See :func:`wball.kernels.linear_maximum.linear_maximum`."""
    if not point:
        return _PriceSearch(a, x, budget, moves).run(max_iter)[0]
    plan, found = maximising_plan(a, x, budget, moves, max_iter=max_iter)
    return replace(found, z=plan.columns())


def maximising_plan(
    a: Tensor, x: Tensor, budget: Tensor, moves: Moves, *, max_iter: int = 60
) -> tuple[Plan, LinearMaximum]:
    """The maximum, and a plan that attains it."""
    search = _PriceSearch(a, x, budget, moves)
    found, low, high = search.run(max_iter)
    dear, cheap = (best_plan(a, x, search.moves, end.psi) for end in (low, high))
    return mixed_plan(dear, cheap, search.budget), found


def best_plan(a: Tensor, x: Tensor, moves: Moves, psi: Tensor) -> Plan:
    """The plan that moves all mass by the cheapest of the best moves at price ``psi``."""
    gained = torch.where(moves.allowed, moves.gather(a), -math.inf)
    score = gained - per_image(psi, gained) * moves.cost
    fees = torch.where(score >= score.amax(2, keepdim=True), moves.cost, math.inf)
    sent = torch.zeros_like(gained).scatter_(2, fees.argmin(2, keepdim=True), x.unsqueeze(2))
    return Plan(moves, sent)


def mixed_plan(dear: Plan, cheap: Plan, budget: Tensor) -> Plan:
    """The mixture of two plans whose cost is the budget, or as close to it as possible."""
    cost = cheap.cost()
    spread = dear.cost() - cost
    part = torch.where(spread > 0, (budget - cost) / spread.clamp(min=1e-300), 0.0).clamp(0, 1)
    part = per_image(part.to(dear.flow.dtype), dear.flow)
    return Plan(dear.moves, (1 - part) * cheap.flow + part * dear.flow)


@dataclass(frozen=True)
class _End:
    """A price, the value of the function there, and the cost of the cheapest best moves."""

    psi: Tensor
    value: Tensor
    cost: Tensor

    def where(self, mask: Tensor, other: _End) -> _End:
        return _End(
            torch.where(mask, self.psi, other.psi),
            torch.where(mask, self.value, other.value),
            torch.where(mask, self.cost, other.cost),
        )


class _PriceSearch:
    """Searches the price of the budget that minimises the dual function of each row."""

    def __init__(self, a: Tensor, x: Tensor, budget: Tensor, moves: Moves) -> None:
        self.a, self.x, self.moves = a, x, moves.like(a)
        self.budget = budget.double().clamp(min=0.0)
        ends = self.moves.ends(a, -math.inf)
        self.rings = torch.stack(
            [reduce(torch.maximum, map(ends, ring)) for ring in self.moves.rings]
        )
        self.ring_cost = self.moves.ring_cost  # a number each, or one per pixel

    def at(self, psi: Tensor) -> _End:
        score = self.rings - per_image(psi, self.a) * self.ring_cost
        best = score.amax(0)
        # Among equal moves the cheapest: the side of a kink on which the plan costs less.
        toll = torch.where(score >= best, self.ring_cost, math.inf).amin(0)
        value = dot(self.x.double(), best.double()) + psi.double() * self.budget
        return _End(psi, value, dot(self.x.double(), toll.double()))

    def run(self, max_iter: int) -> tuple[LinearMaximum, _End, _End]:
        """The maximum, and the ends of the last bracket of its price."""
        low = self.at(torch.zeros_like(self.a[:, 0, 0, 0]))
        free = low.cost <= self.budget
        # Above the steepest gain per unit of cost, all mass stays.
        gain = torch.where(
            (self.x > 0) & (self.ring_cost > 0),
            (self.rings - self.a) / self.ring_cost.clamp(min=1e-30),
            0.0,
        )
        steepest = gain.amax(0).flatten(1).amax(1).clamp(min=0)
        high = low.where(free, self.at(steepest * (1 + 1e-6) + 1e-30))
        settled, n_iter = free, torch.full_like(low.psi, 2, dtype=torch.long)
        for step in range(max_iter - 2):
            if bool(settled.all()):
                break
            left, right = self.budget - low.cost, self.budget - high.cost
            reach = (low.value - high.value + right * (high.psi.double() - low.psi.double())) / (
                right - left
            ).clamp(min=1e-300)
            meet = (low.psi.double() + reach).to(low.psi.dtype)
            middle = 0.5 * (low.psi + high.psi)
            trial = meet if step % 3 < 2 else middle
            trial = torch.where((trial > low.psi) & (trial < high.psi), trial, middle)
            new = self.at(trial)
            tangent = torch.maximum(
                low.value + left * (trial - low.psi).double(),
                high.value - right * (high.psi - trial).double(),
            )
            flat = (
                new.value - tangent <= FLAT[trial.dtype] * (new.value.abs() + low.value.abs())
            ) & (step % 3 < 2)
            goes_high = new.cost <= self.budget
            high = new.where(goes_high & ~settled, high)
            low = new.where(~goes_high & ~settled, low)
            n_iter += ~settled
            settled = (
                settled | flat | (high.psi - low.psi <= 4 * torch.finfo(trial.dtype).eps * high.psi)
            )
        best = low.where(low.value <= high.value, high)
        return LinearMaximum(best.psi, best.value, best.cost, None, n_iter), low, high
