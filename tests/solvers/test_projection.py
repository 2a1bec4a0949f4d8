"""Projection: against closed forms and against its own promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import wball
from problems import Known, Problem, known, problems
from wball.result import Status


@given(problems())
@settings(max_examples=15)
def test_point_is_in_the_ball_and_status_is_honest(problem: Problem) -> None:
    for reg, max_iter in ((math.inf, 1), (math.inf, 4), (1e3, 1), (1e6, 500)):
        result = problem.ball.project(problem.x, problem.w, reg, max_iter=max_iter)
        report = wball.audit(problem.ball, problem.x, result.point)
        assert report.all_valid, f"{problem.label} reg={reg} max_iter={max_iter}\n{report}"
        assert result.plan is not None and bool((result.plan.arcs() >= 0).all())
        torch.testing.assert_close(result.plan.rows(), problem.x, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(result.plan.columns(), result.point, atol=1e-10, rtol=1e-10)
        budget = float(problem.ball.budget(problem.x))
        assert float(result.plan.cost()) <= budget * (1 + 1e-12)
        if result.status[0] is Status.CONVERGED:
            better = problem.ball.project(problem.x, problem.w, reg, tol=1e-7)
            lead = float(result.objective - better.objective)
            assert lead <= float(result.gap) + 1e-9 * abs(float(result.objective)) + 1e-12
            assert float(result.residual) <= 3 * math.sqrt(2 * float(result.gap)) + 1e-6


@given(known)
@settings(max_examples=20)
def test_closed_forms(case: Known) -> None:
    """A point inside is its own projection; half the radius brings half of the mass to the next
    pixel."""
    if not math.isfinite(case.absolute):
        return
    for factor in (1.0, 2.0):
        point = case.ball(factor).project(case.x, case.z).point
        scale = float((case.z - case.x).abs().max())
        torch.testing.assert_close(point, case.z, atol=1e-4 * scale + 1e-9, rtol=0)
    if int((case.x > 0).sum()) == 1 and case.absolute == pytest.approx(float(case.x.sum())):
        point = case.ball(0.5).project(case.x, case.x + 1e3 * (case.z - case.x)).point
        torch.testing.assert_close(point, 0.5 * (case.x + case.z), atol=1e-6, rtol=1e-5)


def batch(count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    x = torch.rand(count, 2, 6, 5, dtype=torch.float64)
    x[1] = (x[1] * 3).clamp(max=1)
    return x, x + 0.4 * torch.randn_like(x), torch.linspace(0.0, 0.6, count, dtype=torch.float64)


@pytest.mark.parametrize("reg", [1e3, math.inf])
def test_batch_equals_loop_and_eps_per_image_equals_eps_alone(reg: float) -> None:
    x, w, eps = batch()
    together = wball.WassersteinBall(eps).project(x, w, reg, tol=1e-7)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = wball.WassersteinBall(eps).project(x, w, reg, tol=1e-7)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again.point, together.point)
    for i in range(x.shape[0]):
        alone = wball.WassersteinBall(float(eps[i])).project(
            x[i : i + 1], w[i : i + 1], reg, tol=1e-7
        )
        torch.testing.assert_close(together.point[i], alone.point[0], atol=1e-3, rtol=0)
        torch.testing.assert_close(together.objective[i], alone.objective[0], atol=1e-6, rtol=1e-6)
    assert together.duals is not None
    assert together.duals.beta.shape == x.shape


@pytest.mark.parametrize("reg", [1e4, math.inf])
def test_warm_start_takes_fewer_steps(reg: float) -> None:
    x, w, _ = batch()
    ball = wball.WassersteinBall(0.2)
    first, cold = ball.project(x, w, reg), ball.project(x, w + 1e-4, reg)
    warm = ball.project(x, w + 1e-4, reg, init=first.duals)
    assert int(warm.n_iter.sum()) < int(cold.n_iter.sum())
    assert bool(warm.converged.all())
    torch.testing.assert_close(warm.objective, cold.objective, rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize("reg", [1.0, 100.0, 3e3, 1e5, 1e8, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_valid_at_any_reg(reg: float, dtype: torch.dtype) -> None:
    """Two steps of a sign-gradient attack: the second starts on the ball's surface."""
    x = batch(3)[0]
    for images in (x.to(dtype), wball.load_sample("mnist")[0][:8].to(dtype)):
        ball = wball.WassersteinBall(torch.linspace(0.005, 0.5, len(images)))
        point = images
        for size in (0.1, 0.3):
            target = point + size * torch.randn_like(images).sign()
            result = ball.project(images, target, reg, tol=1e-3, max_iter=60)
            point = result.point
            assert point.dtype == dtype and wball.audit(ball, images, point).all_valid
            start = 0.5 * (target - images).double().square().flatten(1).sum(1)
            allowed = 1e-3 * (result.objective.abs() + start)
            assert bool((result.gap <= allowed)[result.converged].all())


def test_paper_mode_clamps_and_loses_mass() -> None:
    x = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    x[..., 2:5, 2:5] = 1.0
    ball = wball.WassersteinBall(0.3)
    w = x.clone()
    w[..., 3, 3] += 2.0
    lost = ball.project(x, w, 1e3, max_iter=500, mode="paper").point
    assert not wball.audit(ball, x, lost).all_valid
    assert wball.audit(ball, x, ball.project(x, w, 1e3).point).all_valid


def test_odd_inputs() -> None:
    """No radius, no mass, no images, one row, half precision, histograms."""
    x = torch.rand(3, 1, 5, 4)
    x[1] = 0
    result = wball.WassersteinBall(torch.tensor([0.0, 0.3, 0.0])).project(x, torch.rand_like(x))
    assert torch.equal(result.point, x)
    assert bool(result.converged.all()) and bool((result.gap == 0).all())
    ball = wball.WassersteinBall(0.1)
    empty = torch.zeros(0, 1, 4, 4)
    assert ball.project(empty, empty).point.shape == (0, 1, 4, 4)
    for image in (torch.rand(2, 1, 1, 9), torch.rand(2, 1, 6, 6).half()):
        point = ball.project(image, torch.rand_like(image)).point
        assert point.dtype == torch.float32 and wball.audit(ball, image.float(), point).all_valid
    matrix = (torch.arange(6.0)[:, None] - torch.arange(6.0)).abs()
    ball, bins = wball.WassersteinBall(0.2, wball.DenseCost(matrix)), torch.rand(3, 6)
    point = ball.project(bins, torch.rand_like(bins)).point
    assert point.shape == (3, 6) and bool(ball.contains(bins, point).all())


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4])
def test_rounding_takes_nothing_from_small_radii(eps: float) -> None:
    """Few pixels of a sparse plan are rounded, and the opposite flows of an entropic one leave more
    than rounding costs. When a share of the budget was held back for all pixels, the gap was the
    price of that share, and images stalled."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand((1, 3, 64, 64), generator=random).mul(1.2).clamp(max=1)
    g = 0.3 * torch.randn(x.shape, generator=random)
    ball = wball.WassersteinBall(eps)
    for found in (ball.project(x, x + g), ball.project(x, x + g, 1000.0), ball.support(x, g)):
        assert bool(found.converged.all())
        report = wball.audit(ball, x, found.point)
        assert report.all_valid and float(report.distance.max()) <= 1.0001 * eps
