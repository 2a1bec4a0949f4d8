"""Projection: against an independent convex solver, against closed forms, and against its own promises."""

from __future__ import annotations

import math

import cvxpy as cp
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import wball
from problems import Known, Problem, known, problems, random_problem
from references import reference_projection
from wball.kernels.projected_sinkhorn.reference import wright_omega
from wball.result import Status

REGS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)


def same_objective(problem: Problem, reg: float) -> None:
    try:
        expected = reference_projection(problem.ball, problem.x, problem.w, reg).objective
    except (
        cp.SolverError
    ):  # the reference itself gives up on a few ill-conditioned entropic problems
        if math.isinf(reg):
            raise
        return
    result = problem.ball.project(problem.x, problem.w, reg)
    start = 0.5 * float((problem.w - problem.x).square().sum())
    error = abs(float(result.objective) - expected)
    assert error <= 1e-4 * abs(expected) + 1e-8 * start + 1e-9, (
        f"{problem.label} reg={reg:g}: {result.objective} {expected}"
    )
    assert float(result.objective - result.gap) <= expected + 1e-6 * abs(expected) + 1e-8 * start, (
        problem.label
    )


@pytest.mark.parametrize("start", range(0, 204, 12))
def test_objective_equals_that_of_a_convex_solver(start: int) -> None:
    for seed in range(start, start + 12):
        problem = random_problem(seed)
        same_objective(problem, math.inf)
        same_objective(problem, REGS[seed % len(REGS)])


@pytest.mark.parametrize("seed", range(12))
def test_other_costs_boxes_and_units(seed: int) -> None:
    kind = ("stencil", "dense")[seed % 2]
    box = (None, (0.0, 1.0), (0.2, 0.9))[seed % 3]
    mass = ("relative", "absolute")[seed % 2]
    problem = random_problem(
        seed, shape=(4, 5), channels=1, kind=kind, box=box, mass=mass, radius="loose"
    )  # type: ignore[arg-type]
    same_objective(problem, math.inf)
    same_objective(problem, 300.0)


@given(problems())
@settings(max_examples=15)
def test_point_is_in_the_ball_and_status_is_honest(problem: Problem) -> None:
    for reg, max_iter in ((math.inf, 1), (math.inf, 4), (1e3, 1), (1e6, 500)):
        result = problem.ball.project(problem.x, problem.w, reg, max_iter=max_iter)
        report = wball.audit(problem.ball, problem.x, result.point)
        assert report.all_valid, f"{problem.label} reg={reg} max_iter={max_iter}\n{report}"
        if result.status[0] is Status.CONVERGED:
            better = problem.ball.project(problem.x, problem.w, reg, tol=1e-7)
            lead = float(result.objective - better.objective)
            assert lead <= float(result.gap) + 1e-9 * abs(float(result.objective)) + 1e-12
            assert float(result.residual) <= 3 * math.sqrt(2 * float(result.gap)) + 1e-6


@given(problems())
@settings(max_examples=10)
def test_plan_proves_membership(problem: Problem) -> None:
    result = problem.ball.project(problem.x, problem.w)
    plan = result.plan
    assert plan is not None
    assert bool((plan.arcs() >= 0).all())
    torch.testing.assert_close(plan.rows(), problem.x, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(plan.columns(), result.point, atol=1e-10, rtol=1e-10)
    assert float(plan.cost()) <= float(problem.ball.budget(problem.x)) * (1 + 1e-12)


@given(known)
@settings(max_examples=15)
def test_a_point_inside_is_its_own_projection(case: Known) -> None:
    if not math.isfinite(case.absolute):
        return
    for factor in (1.0, 2.0):
        ball = case.ball(factor)
        point = ball.project(case.x, case.z).point
        scale = float((case.z - case.x).abs().max())
        torch.testing.assert_close(point, case.z, atol=1e-4 * scale + 1e-9, rtol=0)


@given(known)
@settings(max_examples=10)
def test_mass_moved_half_way(case: Known) -> None:
    """For a single arc in use the ball is a segment there: half the radius brings half of the mass over."""
    if not math.isfinite(case.absolute) or case.absolute == 0 or int((case.x > 0).sum()) != 1:
        return
    point = case.ball(0.5).project(case.x, case.x + 1e3 * (case.z - case.x)).point
    torch.testing.assert_close(point, 0.5 * (case.x + case.z), atol=1e-6, rtol=1e-5)


def test_no_radius_no_mass() -> None:
    x = torch.rand(3, 1, 5, 4)
    x[1] = 0
    result = wball.WassersteinBall(torch.tensor([0.0, 0.3, 0.0])).project(x, torch.rand_like(x))
    assert torch.equal(result.point, x)
    assert bool(result.converged.all())
    assert bool((result.gap == 0).all())


def test_idempotent() -> None:
    for seed in range(6):
        problem = random_problem(seed, shape=(6, 6), radius="tight")
        once = problem.ball.project(problem.x, problem.w, tol=1e-7).point
        twice = problem.ball.project(problem.x, once, tol=1e-7).point
        torch.testing.assert_close(once, twice, atol=2e-4, rtol=0)


def batch(count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.rand(count, 2, 6, 5, dtype=torch.float64)
    x[1] = (x[1] * 3).clamp(max=1)
    return x, x + 0.4 * torch.randn_like(x), torch.linspace(0.0, 0.6, count, dtype=torch.float64)


@pytest.mark.parametrize("reg", [1e3, math.inf])
def test_batch_equals_loop_and_eps_per_image_equals_eps_alone(reg: float) -> None:
    x, w, eps = batch()
    together = wball.WassersteinBall(eps).project(x, w, reg, tol=1e-7)
    for i in range(x.shape[0]):
        alone = wball.WassersteinBall(float(eps[i])).project(
            x[i : i + 1], w[i : i + 1], reg, tol=1e-7
        )
        torch.testing.assert_close(together.point[i], alone.point[0], atol=1e-3, rtol=0)
        torch.testing.assert_close(together.objective[i], alone.objective[0], atol=1e-6, rtol=1e-6)
    assert together.duals is not None
    assert together.duals.beta.shape == x.shape


def test_warm_start_takes_fewer_steps() -> None:
    x, w, _ = batch()
    ball = wball.WassersteinBall(0.2)
    cold = ball.project(x, w, 1e4)
    warm = ball.project(x, w + 1e-4, 1e4, init=cold.duals)
    assert int(warm.n_iter.sum()) < int(ball.project(x, w + 1e-4, 1e4).n_iter.sum())
    assert bool(warm.converged.all())


@pytest.mark.parametrize("reg", [1.0, 10.0, 100.0, 1e3, 3e3, 1e5, 1e7, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_overflow_at_any_reg(reg: float, dtype: torch.dtype) -> None:
    x, w, _ = batch(3)
    ball = wball.WassersteinBall(0.1)
    result = ball.project(x.to(dtype), w.to(dtype), reg, max_iter=60)
    assert result.point.dtype == dtype
    assert bool(result.point.isfinite().all())
    assert wball.audit(ball, x.to(dtype), result.point).all_valid
    paper = ball.project(x.to(dtype), w.to(dtype), reg, max_iter=50, mode="paper")
    assert bool(paper.point.isfinite().all())


def test_half_precision_is_answered_in_float32() -> None:
    x = torch.rand(2, 1, 6, 6).half()
    ball = wball.WassersteinBall(0.1)
    point = ball.project(x, torch.rand_like(x)).point
    assert point.dtype == torch.float32
    assert wball.audit(ball, x.float(), point).all_valid


def test_paper_mode_is_the_same_problem_without_box() -> None:
    """Before its clamp, the paper's point is the entropic projection onto the ball without a box."""
    x, w, _ = batch()
    open_ball = wball.WassersteinBall(0.2, box=None)
    ours = open_ball.project(x, w, 50.0, tol=1e-9)
    theirs = open_ball.project(x, w, 50.0, tol=1e-7, mode="paper")
    torch.testing.assert_close(theirs.point, ours.point, atol=1e-4, rtol=0)
    torch.testing.assert_close(theirs.objective, ours.objective, atol=1e-6, rtol=1e-6)
    assert bool((theirs.gap <= 1e-7).all()) and theirs.plan is None


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
def test_paper_mode_by_every_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast ways end where the paper's own iteration does, clamp included."""
    if kernel == "triton":
        pytest.importorskip("triton")
    x = torch.rand(3, 1, 6, 6).square()
    x[2] = 0.0
    x[1, 0, 2:5, 2:5] = 1.0
    w = x + 0.3 * torch.rand_like(x)
    w[1, 0, 3, 3] = 2.5
    ball = wball.WassersteinBall(0.2)
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    slow = ball.project(x, w, 50.0, tol=1e-8, max_iter=5000, mode="paper")
    assert float(slow.point.max()) == 1.0  # the clamp is at work
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    fast = ball.project(x, w, 50.0, tol=1e-4, mode="paper")
    assert fast.kernel == kernel and fast.plan is None
    torch.testing.assert_close(fast.point, slow.point, atol=5e-3, rtol=0)  # the root of the gap
    torch.testing.assert_close(
        fast.objective, slow.objective, atol=1e-4, rtol=1e-4, check_dtype=False
    )
    assert torch.equal(fast.point[2], x[2])


@pytest.mark.parametrize("reg", [1.0, 1e3, 1e5, 1e8])
def test_paper_mode_does_not_overflow(reg: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from every bright pixel, what arrives is smaller than the image's largest by more than exp can say."""
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = x + torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    place = torch.arange(16)
    matrix = (
        ((place[:, None] // 4 - place // 4) ** 2 + (place[:, None] % 4 - place % 4) ** 2)
        .double()
        .sqrt()
    )
    for cost in (wball.GridCost(7), wball.DenseCost(matrix)):
        for eps in (1e-3, 0.3):
            result = wball.WassersteinBall(eps, cost).project(x, w, reg, max_iter=100, mode="paper")
            for values in (result.point, result.objective, result.gap, result.residual):
                assert bool(values.isfinite().all())


def test_paper_mode_clamps_and_loses_mass() -> None:
    x = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    x[..., 2:5, 2:5] = 1.0
    ball = wball.WassersteinBall(0.3)
    w = x.clone()
    w[..., 3, 3] += 2.0
    lost = ball.project(x, w, 1e3, max_iter=500, mode="paper").point
    assert not wball.audit(ball, x, lost).all_valid
    assert wball.audit(ball, x, ball.project(x, w, 1e3).point).all_valid


def test_wright_omega() -> None:
    y = torch.cat(
        [
            torch.linspace(-700, 700, 4001, dtype=torch.float64),
            torch.tensor([1e6, 1e12], dtype=torch.float64),
        ]
    )
    o = wright_omega(y)
    torch.testing.assert_close(o + torch.log(o), y, atol=1e-10, rtol=1e-12)


def test_empty_batch_and_single_row() -> None:
    ball = wball.WassersteinBall(0.1)
    empty = torch.zeros(0, 1, 4, 4)
    assert ball.project(empty, empty).point.shape == (0, 1, 4, 4)
    line = torch.rand(2, 1, 1, 9)
    assert wball.audit(ball, line, ball.project(line, torch.rand_like(line)).point).all_valid


def test_histograms() -> None:
    matrix = (torch.arange(6.0)[:, None] - torch.arange(6.0)).abs()
    ball = wball.WassersteinBall(0.2, wball.DenseCost(matrix))
    x = torch.rand(3, 6, dtype=torch.float64)
    result = ball.project(x, torch.rand_like(x))
    assert result.point.shape == (3, 6)
    assert bool(ball.contains(x, result.point).all())
