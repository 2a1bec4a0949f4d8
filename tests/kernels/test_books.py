"""The problem of the exact solvers: its bounds hold for any duals, and only what is better is kept."""

from __future__ import annotations

import math

import pytest
import torch

from wball.cost import GridCost
from wball.kernels.books import Best, Problem, Tolerance
from wball.kernels.columns import Columns, Linear, Quadratic
from wball.plan import Plan

CPU = torch.device("cpu")


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


def test_only_what_is_better_is_kept() -> None:
    given = problem(0, Quadratic, 0.0)
    still = Plan.identity(given.moves, given.x)
    unknown, nothing = (
        torch.full((3,), -math.inf, dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
    )
    best = Best(
        still.flow,
        given.x.clone(),
        given.objective(still),
        unknown.clone(),
        unknown.clone(),
        torch.zeros_like(given.x),
        nothing,
    )
    plan, everyone = some_plan(given, 0), torch.arange(3)
    better = best.primal - torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    before = best.primal.clone()
    best.keep_plan(everyone, plan, better)
    assert torch.equal(best.primal, torch.minimum(before, better))
    assert torch.equal(best.flow[0], plan.flow[0]) and torch.equal(best.flow[1:], still.flow[1:])
    assert torch.equal(best.z[0], plan.columns()[0]) and torch.equal(best.z[1:], given.x[1:])
    u, psi = torch.ones_like(given.x), torch.ones(3, dtype=torch.float64)
    best.keep_duals(everyone, u, psi, (better, better))
    best.keep_duals(torch.tensor([1]), 2 * u[:1], 2 * psi[:1], (better[1:2] - 9, better[1:2] + 1))
    assert torch.equal(best.dual, better) and torch.equal(best.u, u) and torch.equal(best.psi, psi)
    assert best.hard.tolist() == (better + torch.tensor([0.0, 1.0, 0.0])).tolist()
    part = best.take(torch.tensor([2]), CPU)
    part.primal.fill_(-5.0)
    assert float(best.primal[2]) != -5.0, "a copy"
    best.put(torch.tensor([2]), part)
    assert best.primal.tolist() == [float(before[0] - 1), float(before[1]), -5.0]


def test_an_image_is_done_within_its_tolerance() -> None:
    given = problem(1, Linear, 0.0)
    primal = torch.tensor([2.0, 2.0, -2.0], dtype=torch.float64)
    gap = torch.tensor([1.9e-3, 2.1e-3, 2.0e-3], dtype=torch.float64)
    still = Plan.identity(given.moves, given.x).flow
    best = Best(
        still,
        given.x.clone(),
        primal,
        primal - gap,
        primal - gap,
        torch.zeros_like(given.x),
        torch.zeros_like(primal),
    )
    assert given.done(best)[:2].tolist() == [True, False]
    assert given.take(torch.tensor([1, 0])).done(best, torch.tensor([1, 0])).tolist() == [
        False,
        True,
    ]
