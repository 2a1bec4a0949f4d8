"""Support function: against an independent convex solver, and value <= optimum <= upper at every stop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

import wball
from problems import Problem, problems, random_problem
from references import reference_projection, reference_support


def bounds_hold(problem: Problem, optimum: float, **options: float) -> None:
    result = problem.ball.support(problem.x, problem.g, **options)  # type: ignore[arg-type]
    slack = 2e-7 * (abs(optimum) + float((problem.g.abs() * problem.x).sum()))
    assert float(result.upper) >= optimum - slack, (
        f"{problem.label} {options}: {result.upper} < {optimum}"
    )
    assert float(result.value) <= optimum + slack, (
        f"{problem.label} {options}: {result.value} > {optimum}"
    )
    assert wball.audit(problem.ball, problem.x, result.point).all_valid, problem.label
    attained = (problem.g * result.point).flatten(1).sum(1)
    torch.testing.assert_close(attained, result.value, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("start", range(0, 204, 12))
def test_value_equals_that_of_a_linear_program(start: int) -> None:
    for seed in range(start, start + 12):
        problem = random_problem(seed, box=None if seed % 4 == 3 else (0.0, 1.0))
        optimum = reference_support(problem.ball, problem.x, problem.g).objective
        result = problem.ball.support(problem.x, problem.g)
        scale = abs(optimum) + 0.1 * float((problem.g.abs() * problem.x).sum())
        assert abs(float(result.value) - optimum) <= 1e-5 * scale, (
            f"{problem.label}: {result.value} {optimum}"
        )
        assert abs(float(result.upper) - optimum) <= 1e-5 * scale, (
            f"{problem.label}: {result.upper} {optimum}"
        )
        if seed % 3 == 0:
            for options in ({"max_iter": 1}, {"reg": 10.0}, {"reg": 1e3, "max_iter": 1}):
                bounds_hold(problem, optimum, **options)


@pytest.mark.parametrize("seed", range(12))
def test_other_costs_and_boxes(seed: int) -> None:
    box = (None, (0.0, 1.0), (0.2, 0.9))[seed % 3]
    problem = random_problem(
        seed, shape=(4, 5), channels=1, kind=("stencil", "dense")[seed % 2], box=box
    )  # type: ignore[arg-type]
    optimum = reference_support(problem.ball, problem.x, problem.g).objective
    result = problem.ball.support(problem.x, problem.g)
    assert float(result.value) == pytest.approx(optimum, rel=1e-5, abs=1e-6)
    assert float(result.upper) == pytest.approx(optimum, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("reg", [10.0, 1e3])
def test_conjugate_sinkhorn_solves_the_entropic_problem(seed: int, reg: float) -> None:
    problem = random_problem(seed, shape=(5, 4), channels=1)
    reference = reference_support(problem.ball, problem.x, problem.g, reg)
    result = problem.ball.support(problem.x, problem.g, reg, tol=1e-8)
    assert bool(result.converged.all())
    torch.testing.assert_close(result.point, reference.point, atol=2e-3, rtol=0)


@given(problems())
@settings(max_examples=10)
def test_gap_closes_and_plan_proves_the_point(problem: Problem) -> None:
    result = problem.ball.support(problem.x, problem.g)
    assert bool((result.gap >= 0).all())
    plan = result.plan
    assert plan is not None
    torch.testing.assert_close(plan.rows(), problem.x, atol=1e-10, rtol=1e-10)
    assert float(plan.cost()) <= float(problem.ball.budget(problem.x)) * (1 + 1e-12)


def test_one_bright_pixel_moves_to_the_best_neighbour() -> None:
    x = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    x[..., 2, 2] = 0.5
    g = torch.zeros_like(x)
    g[..., 2, 3] = 1.0
    for eps, moved in ((0.25, 0.25), (1.0, 1.0), (3.0, 1.0)):
        result = wball.WassersteinBall(eps).support(x, g)
        assert float(result.value) == pytest.approx(0.5 * moved)
        assert float(result.upper) == pytest.approx(0.5 * moved)


def test_zero_direction_and_flat_costs() -> None:
    x = torch.rand(2, 1, 4, 4)
    result = wball.WassersteinBall(0.1).support(x, torch.zeros_like(x))
    assert float(result.gap.abs().max()) == pytest.approx(0.0, abs=1e-12)
    alone = wball.WassersteinBall(0.1, wball.GridCost(window=1)).support(x, torch.rand_like(x))
    torch.testing.assert_close(alone.point, x)


@pytest.mark.parametrize("box", [(0.0, 1.0), None], ids=str)
@pytest.mark.parametrize("reg", [math.inf, 100.0])
@pytest.mark.parametrize("kind", ["stencil", "matrix"])
def test_free_moves_need_no_budget(kind: str, reg: float, box: tuple[float, float] | None) -> None:
    """At radius 0 mass may still go where it costs nothing, and bounds must know it."""
    inf = math.inf
    cost: wball.StencilCost | wball.DenseCost = wball.StencilCost(
        ((inf, 0, inf), (1, 0, 1), (inf, 2, inf))
    )
    if kind == "matrix":
        cost = wball.DenseCost(
            torch.randint(
                0, 3, (12, 12), generator=torch.Generator().manual_seed(0)
            ).fill_diagonal_(0)
        )
    random = torch.Generator().manual_seed(1)
    x, g = torch.rand(2, 2, 3, 4, generator=random), torch.randn(2, 2, 3, 4, generator=random)
    ball = wball.WassersteinBall(0.0, cost, box=box)
    result, projection = ball.support(x, g, reg), ball.project(x, g, reg)
    for k in range(2):
        best = reference_support(ball, x[k : k + 1], g[k : k + 1]).objective
        assert float(result.value[k]) <= best + 1e-5 <= float(result.upper[k]) + 2e-5
        assert float(result.value[k]) >= best - 1e-5 or not bool(result.converged[k]) or reg < inf
        nearest = reference_projection(ball, x[k : k + 1], g[k : k + 1], reg).objective
        assert float(projection.objective[k] - projection.gap[k]) <= nearest + 1e-5
        assert not bool(projection.converged[k]) or float(projection.objective[k]) <= nearest * (
            1 + 1e-4
        )


def test_linf_ball_answers_the_same_questions() -> None:
    x = torch.rand(3, 1, 4, 4)
    g = torch.randn_like(x)
    ball = wball.LinfBall(torch.tensor([0.0, 0.1, 0.5]))
    result = ball.support(x, g)
    assert torch.equal(result.gap, torch.zeros_like(result.gap))
    assert bool(ball.contains(x, result.point).all())
    assert bool((ball.distance(x, result.point) <= torch.tensor([0.0, 0.1, 0.5]) + 1e-6).all())
    projected = ball.project(x, x + g)
    assert bool(ball.contains(x, projected.point).all())
    assert torch.equal(ball.project(x, projected.point).point, projected.point)
    assert bool(ball.contains(x, ball.sample(x)).all())


@pytest.mark.parametrize("eps", [0.0, 0.05, 0.5, 5.0])
def test_samples_are_in_the_ball_and_reproducible(eps: float) -> None:
    x = torch.rand(4, 3, 7, 6)
    x[0] = 0
    x[1] = 1
    ball = wball.WassersteinBall(eps)
    first = ball.sample(x, torch.Generator().manual_seed(5))
    assert wball.audit(ball, x, first).all_valid
    assert torch.equal(first, ball.sample(x, torch.Generator().manual_seed(5)))
    if eps > 0:
        assert float((first[2] - x[2]).abs().max()) > 0


def test_empty_batch() -> None:
    empty = torch.zeros(0, 1, 4, 4)
    assert wball.WassersteinBall(0.1).support(empty, empty).value.shape == (0,)
    assert wball.WassersteinBall(math.pi).sample(empty).shape == empty.shape


@pytest.mark.parametrize("seed", [0, 2, 6])
def test_directions_without_curvature_cost_few_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A box that drained pixels touch leaves pairs that exchange mass with nobody else; the torch version, too."""
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    random = torch.Generator().manual_seed(seed)
    draw = torch.rand((3, 1, 1, 6, 7), generator=random)
    x = torch.where(
        draw[1] < 0.3, torch.zeros(()), torch.where(draw[2] < 0.3, torch.ones(()), draw[0])
    )
    x = 0.1 + 0.8 * x.double()
    g = 0.3 * torch.randn(x.shape, generator=random).double()
    result = wball.WassersteinBall(0.1, wball.GridCost(3), box=(0.1, 0.9)).support(x, g)
    assert bool(result.converged.all()) and int(result.n_iter) <= 60


@pytest.mark.parametrize("size", [1e-38, 1e-15, 1e-12, 1e9, 1e30])
def test_the_maximum_scales_with_the_direction(size: float) -> None:
    """Gradients of confident models are tiny, and nothing about the problem is."""
    torch.manual_seed(0)
    x, g = torch.rand(3, 1, 6, 6), torch.randn(3, 1, 6, 6, dtype=torch.float64)
    x[0] = (x[0] > 0.5).float()  # full pixels: the box matters
    ball = wball.WassersteinBall(0.3)
    plain, scaled = ball.support(x, g), ball.support(x, size * g)
    assert bool(scaled.converged.all())
    torch.testing.assert_close(scaled.value / size, plain.value, atol=0, rtol=1e-5)
    torch.testing.assert_close(scaled.upper / size, plain.upper, atol=0, rtol=1e-5)
