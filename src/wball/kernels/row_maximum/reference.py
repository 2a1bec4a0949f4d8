r"""Row maxima (:mod:`wball.kernels.row_maximum`) in plain PyTorch, which the others must match; and
the plans that attain them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.cost import Moves
from wball.inputs import largest, per_image
from wball.kernels.row_maximum import DOWN, FLAT, Field, RowMaximum, whole_rows
from wball.plan import Plan


@torch.no_grad()
def row_maximum(
    field: Field, budget: Tensor, step: float, rounds: int, exact: bool = False
) -> RowMaximum:
    """See :mod:`wball.kernels.row_maximum`."""
    precision, dtype, limit = torch.float64 if exact else torch.float32, field.stay.dtype, budget
    seen, budget = field.to(precision), budget.to(precision)
    low, high = torch.zeros_like(budget), _steepest(seen, step)
    (value_low, cost_low), (value_high, cost_high) = _at(seen, low), _at(seen, high)
    value_high = value_high + budget * high
    psi = torch.where(value_high < value_low, high, low)
    best, k = torch.minimum(value_low, value_high), 0
    for k in range(rounds):
        # The tangents at both ends meet below the minimum, and soon at it.
        slope_low, slope_high = budget - cost_low, budget - cost_high
        drop = slope_high - slope_low
        meet = value_low - value_high + slope_high * high - slope_low * low
        meet = torch.where(drop > 0, meet / drop.clamp(min=1e-30), high).clamp(low, high)
        below = value_low + slope_low * (meet - low)
        flat = (best - below <= FLAT * (best.abs() + value_low.abs())) | (slope_low >= 0)
        if exact and bool(flat.all()):
            break
        trial = 0.5 * (low + high) if k % 3 == 2 else meet
        # The budget is small against the mass: the best psi is near the top, and 0 a bad end.
        trial = torch.where(low > 0, trial, DOWN * high)
        worth, cost = _at(seen, trial)
        value, over = worth + budget * trial, cost > budget
        psi, best = torch.where(value < best, trial, psi), torch.minimum(value, best)
        keep = over, flat & exact
        low, value_low, cost_low = _moved(keep, (low, value_low, cost_low), (trial, value, cost))
        keep = ~over, keep[1]
        high, value_high, cost_high = _moved(
            keep, (high, value_high, cost_high), (trial, value, cost)
        )
    psi, low, high = psi.to(dtype), low.to(dtype), high.to(dtype)
    value = worth_of(field, psi) + psi * limit.to(dtype)
    return RowMaximum(value, psi, low, high, torch.full_like(limit, k, dtype=torch.long))


def _moved(
    where: tuple[Tensor, Tensor], end: tuple[Tensor, ...], trial: tuple[Tensor, ...]
) -> list[Tensor]:
    """The end of a bracket, at the trial in rows that move it and are not done."""
    moves, done = where
    return [torch.where(moves & ~done, new, old) for old, new in zip(end, trial, strict=True)]


def _steepest(field: Field, step: float) -> Tensor:
    """Just above the steepest gain per unit of cost: there no mass moves."""
    gain = (field.worth - field.stay[:, :, None]) / torch.where(field.cost > 0, field.cost, step)
    best = (gain.amax(2) * (field.mass > 0)).amax((1, 2)).clamp(min=0)
    if field.far is not None:
        best = torch.maximum(best, field.far.amax(1) / step)
    return best * (1 + 1e-6)


def _elsewhere(field: Field, psi: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """Value and cost of the mass beyond the patch."""
    if field.elsewhere is None or field.far is None or field.away is None:
        return 0.0, 0.0
    gain = field.far[..., None] - psi.view(-1, 1, 1) * field.away
    paid = torch.where(gain > 0, field.away, 0.0)
    return (gain.clamp(min=0) * field.elsewhere).sum((1, 2)), (paid * field.elsewhere).sum((1, 2))


def worth_of(field: Field, psi: Tensor) -> Tensor:
    """``sum_i x_i max_j (a_j - psi C_ij)``, ``(N,)``."""
    best = torch.maximum(field.stay, (field.worth - psi.view(-1, 1, 1, 1) * field.cost).amax(2))
    return (best * field.mass).sum((1, 2)) + _elsewhere(field, psi)[0]


def _at(field: Field, psi: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and what the cheapest of the best moves cost."""
    score = field.worth - psi.view(-1, 1, 1, 1) * field.cost
    best = score.amax(2)
    toll = torch.where(score >= best[:, :, None], field.cost, math.inf).amin(2)
    cost = (torch.where(best > field.stay, toll, 0.0) * field.mass).sum((1, 2))
    worth = (torch.maximum(best, field.stay) * field.mass).sum((1, 2))
    value, paid = _elsewhere(field, psi)
    return worth + value, cost + paid


def _either_side(a: Tensor, moves: Moves, found: RowMaximum) -> tuple[Tensor, Tensor]:
    """Prices on both sides of the kink: kernels round scores differently, and at the kink itself
    the best moves would be a matter of rounding."""
    gain = largest(a) / torch.where(moves.cost > 0, moves.cost, math.inf).amin()
    apart = 8 * torch.finfo(a.dtype).eps * torch.maximum(gain, found.high)
    return (found.low - apart).clamp(min=0.0), found.high + apart


def _share(budget: Tensor, most: Tensor, least: Tensor) -> Tensor:
    """The share of the dearer of two plans in a mixture that costs the budget."""
    return ((budget - least) / (most - least).double().clamp(min=1e-300)).clamp(0, 1)


def maximiser(a: Tensor, x: Tensor, budget: Tensor, moves: Moves, found: RowMaximum) -> Tensor:
    """The point at which a linear maximum is attained: the derivative of the maximum."""
    moves = moves.like(a)
    with torch.enable_grad():
        rows = torch.cat((a, a)).detach().requires_grad_(True)
        psi = torch.cat(_either_side(a, moves, found)).detach().requires_grad_(True)
        worth = worth_of(whole_rows(rows, torch.cat((x, x)), moves), psi).sum()
        z, earned = torch.autograd.grad(worth, (rows, psi))
    (dear, cheap), (most, least) = z.chunk(2), (-earned).chunk(2)
    return torch.lerp(cheap, dear, per_image(_share(budget, most, least).to(a), a))


def maximising_plan(a: Tensor, x: Tensor, budget: Tensor, moves: Moves, found: RowMaximum) -> Plan:
    """The plan that attains it."""
    moves = moves.like(a)
    dear, cheap = (_best_plan(a, x, moves, psi) for psi in _either_side(a, moves, found))
    share = per_image(_share(budget, dear.cost(), cheap.cost()).to(a), dear.flow)
    return Plan(moves, torch.lerp(cheap.flow, dear.flow, share))


def _best_plan(a: Tensor, x: Tensor, moves: Moves, psi: Tensor) -> Plan:
    """The plan that moves all mass by the cheapest of the best moves at price ``psi``."""
    gained = torch.where(moves.allowed, moves.gather(a), -math.inf)
    score = gained - per_image(psi, gained) * moves.cost
    fees = torch.where(score >= score.amax(2, keepdim=True), moves.cost, math.inf)
    sent = torch.zeros_like(gained).scatter_(2, fees.argmin(2, keepdim=True), x.unsqueeze(2))
    return Plan(moves, sent)
