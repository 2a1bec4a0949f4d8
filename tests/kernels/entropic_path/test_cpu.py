"""The compiled path follower against the torch one: same optimum, same guarantees, whatever the batch."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from problems import Problem, random_problem
from wball.ball import WassersteinBall
from wball.result import ProjectionResult, SupportResult

pytest.importorskip("wball.kernels.entropic_plan.cpu")

Box = tuple[float, float] | None
Mass = Literal["relative", "absolute"]
SETTINGS: list[tuple[Box, Mass, float]] = [
    ((0.0, 1.0), "relative", math.inf),
    (None, "absolute", 300.0),
    ((0.2, 0.9), "relative", math.inf),
    ((0.0, 1.0), "absolute", 1e4),
    (None, "relative", math.inf),
    ((0.2, 0.9), "relative", 1e3),
]


def solve(
    monkeypatch: pytest.MonkeyPatch, kernel: str, problem: Problem, reg: float
) -> tuple[ProjectionResult, SupportResult]:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    ball = problem.ball
    return ball.project(problem.x, problem.w, reg), ball.support(problem.x, problem.g, reg)


@pytest.mark.parametrize("seed", range(18))
def test_same_optimum_as_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    box, mass, reg = SETTINGS[seed % len(SETTINGS)]
    kind = "stencil" if seed % 4 == 3 else "grid"
    problem = random_problem(seed, box=box, mass=mass, kind=kind)
    mine, torchs = (solve(monkeypatch, kernel, problem, reg) for kernel in ("cpu", "torch"))
    assert (mine[0].kernel, torchs[0].kernel, torchs[1].kernel) == ("cpu", "torch", "torch")
    # The entropic support function without its box is torch's, and the path goes on where the box is overfilled.
    assert mine[1].kernel in (("cpu",) if reg == math.inf else ("torch", "cpu+torch"))
    scale = float(torchs[0].objective.abs() + 1e-3 * (problem.w - problem.x).square().sum() + 1e-12)
    assert abs(float(mine[0].objective - torchs[0].objective)) <= 2e-5 * scale, problem.label
    # Each bound holds for the other's point.
    assert float(mine[0].objective - mine[0].gap) <= float(torchs[0].objective) + 1e-9 * scale, (
        problem.label
    )
    assert float(torchs[0].objective - torchs[0].gap) <= float(mine[0].objective) + 1e-9 * scale, (
        problem.label
    )
    weight = float((problem.g.abs() * problem.x).sum()) + 1e-12
    assert abs(float(mine[1].value - torchs[1].value)) <= 2e-5 * weight, problem.label
    assert float(torchs[1].value) <= float(mine[1].upper) + 1e-9 * weight, problem.label
    assert float(mine[1].value) <= float(torchs[1].upper) + 1e-9 * weight, problem.label
    for a, b in zip(mine, torchs, strict=True):
        assert a.status == b.status, problem.label
        assert a.plan is not None
        torch.testing.assert_close(a.plan.rows(), problem.x, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(a.plan.columns(), a.point, atol=1e-10, rtol=1e-10)
        assert bool((a.plan.flow >= 0).all())
        assert float(a.plan.cost()) <= float(problem.ball.budget(problem.x)) * (1 + 1e-12)


def test_stopped_early_it_still_returns_points_of_the_ball() -> None:
    x, w = torch.rand(3, 2, 9, 7), torch.rand(3, 2, 9, 7)
    ball = WassersteinBall(0.2)
    for max_iter in (1, 3, 6):
        result = ball.project(x, w, max_iter=max_iter)
        assert bool(ball.contains(x, result.point).all())
        best = ball.project(x, w, tol=1e-7)
        assert bool((result.objective - result.gap <= best.objective + 1e-9).all())


def test_batch_threads_and_warm_start() -> None:
    x = torch.where(torch.rand(6, 1, 12, 10) < 0.4, torch.rand(6, 1, 12, 10), torch.zeros(()))
    x[2] = 0  # no mass
    w = torch.rand_like(x)
    ball, before = (
        WassersteinBall(torch.tensor([0.1, 0.0, 0.3, 0.01, 1.0, 0.1])),
        torch.get_num_threads(),
    )
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(ball.project(x, w))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0].point, results[1].point)
    for i in range(6):
        alone = ball.take(torch.tensor([i])).project(x[i : i + 1], w[i : i + 1])
        assert torch.equal(alone.point, results[0].point[i : i + 1])
    assert torch.equal(results[0].point[1:3], x[1:3])
    assert results[0].duals is not None
    warm = ball.project(x, w, init=results[0].duals)
    assert bool(warm.converged.all())
    assert int(warm.n_iter.sum()) < int(results[0].n_iter.sum())
    torch.testing.assert_close(warm.objective, results[0].objective, rtol=3e-5, atol=1e-9)
