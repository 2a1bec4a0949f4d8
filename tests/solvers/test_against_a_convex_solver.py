"""Projection and support function against an independent convex solver, whatever the cost, the box
and the kernel."""

from __future__ import annotations

import math

import cvxpy as cp
import pytest

import wball
from marks import slow
from problems import Problem, random_problem
from references import reference_projection, reference_support

REGS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)


def projection_is_optimal(problem: Problem, reg: float) -> None:
    try:
        expected = reference_projection(problem.ball, problem.x, problem.w, reg).objective
    except cp.SolverError:  # it gives up on a few ill-conditioned entropic problems
        if math.isinf(reg):
            raise
        return
    result = problem.ball.project(problem.x, problem.w, reg)
    start = 0.5 * float((problem.w - problem.x).square().sum())
    error = abs(float(result.objective) - expected)
    about = f"{problem.label} reg={reg:g}: {result.objective} {expected}"
    assert error <= 1e-4 * abs(expected) + 1e-8 * start + 1e-9, about
    bound = float(result.objective - result.gap)
    assert bound <= expected + 1e-6 * abs(expected) + 1e-8 * start, about


def support_is_optimal(problem: Problem) -> float:
    optimum = reference_support(problem.ball, problem.x, problem.g).objective
    result = problem.ball.support(problem.x, problem.g)
    scale = abs(optimum) + 0.1 * float((problem.g.abs() * problem.x).sum())
    for found in (result.value, result.upper):
        assert abs(float(found) - optimum) <= 1e-5 * scale, f"{problem.label}: {found} {optimum}"
    return optimum


def support_is_bounded(problem: Problem, optimum: float, **options: float) -> None:
    result = problem.ball.support(problem.x, problem.g, **options)  # type: ignore[arg-type]
    slack = 2e-7 * (abs(optimum) + float((problem.g.abs() * problem.x).sum()))
    bounds, about = (float(result.value), float(result.upper)), f"{problem.label} {options}"
    assert bounds[0] - slack <= optimum <= bounds[1] + slack, f"{about}: {bounds} {optimum}"
    assert wball.audit(problem.ball, problem.x, result.point).all_valid, about
    attained = float((problem.g * result.point).sum())
    assert attained == pytest.approx(bounds[0], abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("start", [*range(12, 132, 24), *slow(*range(0, 132, 24))])
def test_windows_powers_radii_and_pixels(start: int) -> None:
    """126 seeds have all combinations of these; each part has all windows, powers and pixels."""
    for seed in range(start, start + 12):
        problem = random_problem(seed)
        projection_is_optimal(problem, math.inf)
        projection_is_optimal(problem, REGS[seed % len(REGS)])
        problem = random_problem(seed, box=None if seed % 4 == 3 else (0.0, 1.0))
        optimum = support_is_optimal(problem)
        if seed % 3 == 0:
            for options in ({"max_iter": 1}, {"reg": 10.0}, {"reg": 1e3, "max_iter": 1}):
                support_is_bounded(problem, optimum, **options)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("seed", [*range(6), *slow(6), *range(7, 18)])
def test_costs_boxes_units_and_kernels(
    seed: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    kind = ("grid", "stencil", "dense")[seed % 3]
    box = (None, (0.0, 1.0), (0.2, 0.9))[seed // 3 % 3]
    mass = ("relative", "absolute")[seed % 2]
    problem = random_problem(
        seed, shape=(4, 5), channels=1, kind=kind, box=box, mass=mass, radius="loose"
    )  # type: ignore[arg-type]
    projection_is_optimal(problem, math.inf)
    projection_is_optimal(problem, 300.0)
    support_is_optimal(problem)


@pytest.mark.parametrize("reg", [10.0, 1e3])
def test_the_entropic_support_function(reg: float) -> None:
    for seed in range(8):
        problem = random_problem(seed, shape=(5, 4), channels=1)
        reference = reference_support(problem.ball, problem.x, problem.g, reg)
        result = problem.ball.support(problem.x, problem.g, reg, tol=1e-8)
        assert bool(result.converged.all())
        assert float((result.point - reference.point).abs().max()) <= 2e-3
