"""The problem of the exact solvers: its bounds hold for any duals."""

from __future__ import annotations

import math

import pytest
import torch

from wball.cost import GridCost
from wball.kernels.books import Problem, Tolerance
from wball.kernels.columns import Columns, Linear, Quadratic
from wball.plan import Plan


def problem(seed: int, kind: type[Columns], tau: float, hi: float = 1.0) -> Problem:
    random = torch.Generator().manual_seed(seed)
    x = torch.rand((3, 1, 4, 4), generator=random, dtype=torch.float64)
    mass, nothing = x.sum((1, 2, 3)), torch.zeros(3, dtype=torch.float64)
    target = torch.randn(x.shape, generator=random, dtype=torch.float64)
    tolerance = Tolerance(1e-3, 0.0, nothing, nothing)
    return Problem(
        x,
        0.2 * mass,
        GridCost(3).arcs(4, 4, x),
        kind(target, 0.0, hi),
        nothing + tau,
        tau == 0,
        tolerance,
    )


def some_plan(given: Problem, seed: int) -> Plan:
    """A feasible plan."""
    random = torch.Generator().manual_seed(100 + seed)
    score = 3 * torch.randn(
        (*given.x.shape[:2], len(given.moves), 4, 4), generator=random, dtype=torch.float64
    )
    share = torch.softmax(torch.where(given.moves.allowed, score, -math.inf), 2)
    return given.repaired(Plan(given.moves, given.x.unsqueeze(2) * share))


@pytest.mark.parametrize("kind", [Linear, Quadratic])
@pytest.mark.parametrize("tau", [0.0, 0.05])
@pytest.mark.parametrize("hi", [1.0, math.inf])
def test_any_duals_bound_every_plan_from_below(kind: type[Columns], tau: float, hi: float) -> None:
    for seed in range(5):
        given = problem(seed, kind, tau, hi)
        value = given.objective(some_plan(given, seed))
        random = torch.Generator().manual_seed(200 + seed)
        for size in (0.0, 0.1, 3.0):
            u = size * torch.randn(given.x.shape, generator=random, dtype=torch.float64)
            psi = size * torch.rand(3, generator=random, dtype=torch.float64)
            bound, hard = given.lower_bounds(u, psi)
            assert bool((bound <= value + 1e-12).all())
            assert bool(
                (hard <= given.columns.objective(some_plan(given, seed).columns()) + 1e-12).all()
            )
            assert bool((bound <= hard + 1e-12).all()), "entropy only lowers the optimum"
