r"""Row maxima (:mod:`wball.kernels.row_maximum`) in plain PyTorch: the yardstick of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from wball.kernels.row_maximum import DOWN, Field, RowProblem


@torch.no_grad()
def row_maximum(problem: RowProblem, rounds: int) -> tuple[Tensor, Tensor]:
    """See :mod:`wball.kernels.row_maximum`."""
    field, dtype = problem.field(), problem.coeff.dtype
    psi = _search(field.single(), problem.budget.float(), problem.step, rounds).to(dtype)
    return worth_of(field, psi) + psi * problem.budget.to(dtype), psi


def _choose(
    where: Tensor, first: tuple[Tensor, ...], second: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return tuple(torch.where(where, a, b) for a, b in zip(first, second, strict=True))


def _elsewhere(field: Field, psi: Tensor) -> tuple[Tensor, Tensor] | None:
    """Value and cost of the mass beyond the patch, ``(N,)`` each."""
    if field.elsewhere is None or field.far is None or field.away is None:
        return None
    gain = field.far[..., None] - psi.view(-1, 1, 1) * field.away
    paid = torch.where(gain > 0, field.away, 0.0)
    return (gain.clamp(min=0) * field.elsewhere).sum((1, 2)), (paid * field.elsewhere).sum((1, 2))


def worth_of(field: Field, psi: Tensor) -> Tensor:
    """``sum_i x_i max_j (a_j - psi C_ij)``, ``(N,)``."""
    best = torch.maximum(field.stay, (field.worth - psi.view(-1, 1, 1, 1) * field.cost).amax(2))
    total = (best * field.mass).sum((1, 2))
    rest = _elsewhere(field, psi)
    return total if rest is None else total + rest[0]


def _evaluate(field: Field, psi: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the cost of the maximising plan, ``(N,)`` each."""
    best, choice = (field.worth - psi.view(-1, 1, 1, 1) * field.cost).max(2)
    moves = best > field.stay
    if field.cost.shape[1] == 1:
        cost = field.cost[:, 0][choice]
    else:
        cost = field.cost.expand(field.worth.shape).gather(2, choice[:, :, None])[:, :, 0]
    worth = (torch.where(moves, best, field.stay) * field.mass).sum((1, 2))
    total = (torch.where(moves, cost, 0.0) * field.mass).sum((1, 2))
    rest = _elsewhere(field, psi)
    return (worth, total) if rest is None else (worth + rest[0], total + rest[1])


def _search(field: Field, budget: Tensor, step: float, rounds: int) -> Tensor:
    """The ``psi`` that minimises ``psi E + sum_i x_i max_j (a_j - psi C_ij)``, in a few rounds."""
    low = torch.zeros_like(budget)
    value_low, cost_low = _evaluate(field, low)
    # Above the steepest gain per unit of cost no mass moves.
    holds = (field.mass > 0).to(field.stay.dtype)
    apart = torch.where(field.cost > 0, field.cost, step)
    gain = (((field.worth - field.stay[:, :, None]) / apart).amax(2) * holds).amax((1, 2))
    steepest = gain.clamp(min=0)
    if field.far is not None and field.elsewhere is not None:
        steepest = torch.maximum(steepest, field.far.amax(1) / step)
    high = steepest * (1 + 1e-6)
    value_high, cost_high = _evaluate(field, high)
    value_high = value_high + budget * high
    best, psi = value_low, low
    better = value_high < best
    best, psi = torch.where(better, value_high, best), torch.where(better, high, psi)
    for k in range(rounds):
        # Convex and piecewise linear: the tangents at both ends meet below the minimum, and soon at
        # it.
        slope_low, slope_high = budget - cost_low, budget - cost_high
        drop = slope_high - slope_low
        meet = (value_low - value_high + slope_high * high - slope_low * low) / drop.clamp(
            min=1e-30
        )
        trial = 0.5 * (low + high) if k % 3 == 2 else torch.where(drop > 0, meet, high)
        # The budget is small against the mass: the best psi is near the top, and 0 a bad end of the
        # bracket.
        trial = torch.where(low > 0, trial, DOWN * high)
        trial = torch.maximum(torch.minimum(trial, high), low)
        worth, cost = _evaluate(field, trial)
        value = worth + budget * trial
        better = value < best
        best, psi = torch.where(better, value, best), torch.where(better, trial, psi)
        over = cost > budget
        low, value_low, cost_low = _choose(over, (trial, value, cost), (low, value_low, cost_low))
        high, value_high, cost_high = _choose(
            over, (high, value_high, cost_high), (trial, value, cost)
        )
    return psi
