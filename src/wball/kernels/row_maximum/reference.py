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
    top = _steepest(seen, step)
    low, high = _at(seen, 0 * top, budget), _at(seen, top, budget)
    (psi, best, _), k = torch.where(high[1] < low[1], high, low), 0
    for k in range(rounds):
        # The tangents at both ends meet below the minimum, and soon at it.
        slope_low, slope_high = budget - low[2], budget - high[2]
        drop = slope_high - slope_low
        meet = low[1] - high[1] + slope_high * high[0] - slope_low * low[0]
        meet = torch.where(drop > 0, meet / drop.clamp(min=1e-30), high[0]).clamp(low[0], high[0])
        below = low[1] + slope_low * (meet - low[0])
        flat = (best - below <= FLAT * (best.abs() + low[1].abs())) | (slope_low >= 0)
        if exact and bool(flat.all()):
            break
        trial = 0.5 * (low[0] + high[0]) if k % 3 == 2 else meet
        # The budget is small against the mass: the best psi is near the top, and 0 a bad end.
        new = _at(seen, torch.where(low[0] > 0, trial, DOWN * high[0]), budget)
        (psi, best), over = (
            torch.where(new[1] < best, new[:2], torch.stack((psi, best))),
            new[2] > budget,
        )
        low = torch.where(over & ~(flat & exact), new, low)
        high = torch.where(over | (flat & exact), high, new)
    psi, low, high = psi.to(dtype), low[0].to(dtype), high[0].to(dtype)
    value = worth_of(field, psi) + psi * limit.to(dtype)
    return RowMaximum(value, psi, low, high, torch.full_like(limit, k, dtype=torch.long))


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


def _at(field: Field, psi: Tensor, budget: Tensor) -> Tensor:
    """A price, the bound there, and what the cheapest of the best moves cost, ``(3, N)``."""
    score = field.worth - psi.view(-1, 1, 1, 1) * field.cost
    best = score.amax(2)
    toll = torch.where(score >= best[:, :, None], field.cost, math.inf).amin(2)
    cost = (torch.where(best > field.stay, toll, 0.0) * field.mass).sum((1, 2))
    worth = (torch.maximum(best, field.stay) * field.mass).sum((1, 2))
    value, paid = _elsewhere(field, psi)
    return torch.stack((psi, worth + value + budget * psi, cost + paid))


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
