"""What projections and support functions promise, for every ball, on every kernel, for any input.

The referees share no code with the library: sums over the returned plan and duals in float64
(:mod:`torture.checks`), a convex solver (:mod:`references`), and closed forms. The mistakes they
find: a point outside its ball, a plan that is not the point's, a bound above the optimum, a status
that is not true, an argument that is written to, and an image that depends on its neighbours.
"""

from __future__ import annotations

import math

import cvxpy as cp
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

import wball
from contracts.balls import BALLS, WASSERSTEIN, images
from marks import slow
from problems import Known, Problem, known, random_problem
from references import reference_projection, reference_support
from torture.cases import Case
from torture.operations import run
from wball.result import Status

REGS = (10.0, 1e2, 1e3, 1e4, 1e5, 1e6)
TARGETS = {
    "near": lambda x, noise: x + 0.1 * noise,
    "signs": lambda x, noise: x + 0.1 * noise.sign(),
    "far": lambda x, noise: x + 100 * noise,
    "the image": lambda x, noise: x,
}


def check(name: str, kernel: str, targets: list[str], stops: tuple[int, ...], count: int) -> None:
    ball, regs = WASSERSTEIN[name], (math.inf, 10.0, 1e3, 1e6)
    if name == "a radius for each image":
        ball = ball.take(torch.arange(count))
    for k, target in enumerate(targets):
        dtype = (torch.float32, torch.float64)[k % 2]
        x = images(ball, 1 + k % 2, k).to(dtype)[:count]
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(k), dtype=dtype)
        for operation in ("project", "support"):
            for reg in regs[k % 2 :: 2]:
                for stop in stops:
                    w = TARGETS[target](x, noise)
                    case = Case(k, operation, ball, x, w, noise, reg, 1e-4, stop, kernel, "")
                    assert not run(case), (operation, reg, stop, target)


@pytest.mark.parametrize("name", [name for name in WASSERSTEIN if name != "matrix"])
def test_points_plans_bounds_and_statuses_are_true(name: str) -> None:
    """Wherever the solver is stopped."""
    check(name, "cpu", [*TARGETS], (1, 300), 6)


@pytest.mark.parametrize("name", ["one way", "matrix", "narrow box"])
def test_they_are_true_in_torch(name: str) -> None:
    check(name, "torch", ["near", "far"], (6,), 2)


@pytest.mark.parametrize("name", ["linf", "linf, no box"])
def test_boxes_of_pixels_have_closed_forms(name: str) -> None:
    ball = BALLS[name]
    assert isinstance(ball, wball.LinfBall)
    x = images(ball, 2).clamp(0, 1)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    low, high = x - 0.1, x + 0.1
    if ball.box is not None:
        low, high = low.clamp(0, 1), high.clamp(0, 1)
    found, corner = ball.project(x, x + noise), ball.support(x, noise)
    torch.testing.assert_close(found.point, torch.minimum(torch.maximum(x + noise, low), high))
    torch.testing.assert_close(corner.point, torch.where(noise > 0, high, low))
    expected = 0.5 * (x + noise - found.point).double().square().flatten(1).sum(1)
    torch.testing.assert_close(found.objective.double(), expected)
    expected = (noise * corner.point).double().flatten(1).sum(1)
    torch.testing.assert_close(corner.value.double(), expected)
    for result in (found, corner):
        assert set(result.status) == {Status.EXACT} and bool((result.gap == 0).all())
        assert wball.audit(ball, x, result.point).all_valid


# Against a convex solver
# --------------------------------------------------------------------------------------------------


def projection_is_optimal(problem: Problem, reg: float) -> bool:
    """Whether the reference could solve it; fails where ours is another optimum."""
    try:
        expected = reference_projection(problem.ball, problem.x, problem.w, reg).objective
    except cp.SolverError:  # it gives up on a few ill-conditioned entropic problems
        assert math.isfinite(reg)
        return False
    result = problem.ball.project(problem.x, problem.w, reg)
    start = 0.5 * float((problem.w - problem.x).square().sum())
    error = abs(float(result.objective) - expected)
    about = f"{problem.label} reg={reg:g}: {result.objective} {expected}"
    assert error <= 1e-4 * abs(expected) + 1e-8 * start + 1e-9, about
    bound = float(result.objective - result.gap)
    assert bound <= expected + 1e-6 * abs(expected) + 1e-8 * start, about
    return True


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


@pytest.mark.parametrize("start", [*range(12, 132, 24), *slow(*range(0, 132, 24))])
def test_windows_powers_radii_and_pixels(start: int) -> None:
    """126 seeds have all combinations of these; each part has all windows, powers and pixels."""
    compared = 0
    for seed in range(start, start + 12):
        problem = random_problem(seed)
        projection_is_optimal(problem, math.inf)
        compared += projection_is_optimal(problem, REGS[seed % len(REGS)])
        problem = random_problem(seed, box=None if seed % 4 == 3 else (0.0, 1.0))
        optimum = support_is_optimal(problem)
        if seed % 3 == 0:
            for options in ({"max_iter": 1}, {"reg": 10.0}, {"reg": 1e3, "max_iter": 1}):
                support_is_bounded(problem, optimum, **options)
    assert compared >= 10


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
    assert projection_is_optimal(problem, 300.0)
    support_is_optimal(problem)


@pytest.mark.parametrize("reg", [10.0, 1e3])
def test_the_entropic_support_function(reg: float) -> None:
    for seed in range(8):
        problem = random_problem(seed, shape=(5, 4), channels=1)
        reference = reference_support(problem.ball, problem.x, problem.g, reg)
        result = problem.ball.support(problem.x, problem.g, reg, tol=1e-8)
        assert bool(result.converged.all())
        assert float((result.point - reference.point).abs().max()) <= 2e-3


# Closed forms
# --------------------------------------------------------------------------------------------------


@given(known)
@settings(max_examples=20)
def test_a_point_of_the_ball_is_its_own_projection(case: Known) -> None:
    assume(math.isfinite(case.absolute))
    for factor in (1.0, 2.0):
        point = case.ball(factor).project(case.x, case.z).point
        scale = float((case.z - case.x).abs().max())
        torch.testing.assert_close(point, case.z, atol=1e-4 * scale + 1e-9, rtol=0)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("step", [(0, 1), (2, 1)])
def test_a_share_of_the_radius_moves_that_share_of_the_mass(
    step: tuple[int, int], p: float
) -> None:
    x = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    x[..., 1, 2] = 0.8
    goal = torch.roll(x, step, (2, 3))
    price = math.hypot(*step) ** p
    for share in (0.25, 0.5):
        ball = wball.WassersteinBall(share * price, wball.GridCost(5, p))
        found = ball.support(x, goal).point
        torch.testing.assert_close(found, x + share * (goal - x), atol=1e-6, rtol=1e-5)
        if step == (0, 1):  # longer ways have nearer points between
            found = ball.project(x, x + 1e3 * (goal - x)).point
            torch.testing.assert_close(found, x + share * (goal - x), atol=1e-6, rtol=1e-5)


def test_window_larger_than_the_image_is_a_full_plan() -> None:
    x, w = torch.rand(2, 1, 1, 3, 4, dtype=torch.float64)
    r, c = torch.arange(12) // 4, torch.arange(12) % 4
    matrix = ((r[:, None] - r).square() + (c[:, None] - c).square()).double().sqrt()
    wide = wball.WassersteinBall(0.2, wball.GridCost(21)).project(x, w)
    dense = wball.WassersteinBall(0.2, wball.DenseCost(matrix)).project(x, w)
    torch.testing.assert_close(wide.objective, dense.objective, atol=1e-5, rtol=1e-5)


def test_paper_mode_clamps_and_loses_mass() -> None:
    x = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    x[..., 2:5, 2:5] = 1.0
    ball, w = wball.WassersteinBall(0.3), x.clone()
    w[..., 3, 3] += 2.0
    lost = ball.project(x, w, 1e3, max_iter=500, mode="paper").point
    assert not wball.audit(ball, x, lost).all_valid
    assert wball.audit(ball, x, ball.project(x, w, 1e3).point).all_valid


# Batches, starts and sizes
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reg", [1e3, math.inf])
@pytest.mark.parametrize("operation", ["project", "support"])
def test_an_image_does_not_depend_on_its_batch_or_on_threads(operation: str, reg: float) -> None:
    """Bit for bit: each image is solved by itself."""
    ball = WASSERSTEIN["a radius for each image"]
    x = images(ball, 2).clamp(0, 1)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))

    def solved(threads: int, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch.set_num_threads(threads)
        given = x + 0.4 * noise if operation == "project" else noise
        found = getattr(ball.take(index), operation)(x[index], given[index], reg)
        return found.point, found.n_iter, found.duals.psi

    before = torch.get_num_threads()
    try:
        together, threaded = (solved(count, torch.arange(6)) for count in (1, 3))
        turned = solved(1, torch.arange(6).flip(0))
        alone = [solved(1, index) for index in torch.arange(6).split(1)]
    finally:
        torch.set_num_threads(before)
    for k, value in enumerate(together):
        assert torch.equal(threaded[k], value) and torch.equal(turned[k].flip(0), value)
        assert torch.equal(torch.cat([found[k] for found in alone]), value)


@pytest.mark.parametrize("reg", [1e4, math.inf])
def test_warm_start_takes_fewer_steps(reg: float) -> None:
    torch.manual_seed(3)
    x = torch.rand(5, 2, 6, 5, dtype=torch.float64)
    x[1] = (x[1] * 3).clamp(max=1)
    w, ball = x + 0.4 * torch.randn_like(x), wball.WassersteinBall(0.2)
    first, cold = ball.project(x, w, reg), ball.project(x, w + 1e-4, reg)
    warm = ball.project(x, w + 1e-4, reg, init=first.duals)
    assert int(warm.n_iter.sum()) < int(cold.n_iter.sum())
    assert bool(warm.converged.all())
    torch.testing.assert_close(warm.objective, cold.objective, rtol=2e-4, atol=1e-9)


@pytest.mark.parametrize("reg", [1.0, 3e3, 1e8, math.inf])
def test_points_of_digits_are_valid_at_any_reg(reg: float) -> None:
    """Two steps of a sign-gradient attack: the second starts on the ball's surface."""
    x = wball.load_sample("mnist")[0][:8]
    ball, point = wball.WassersteinBall(torch.linspace(0.005, 0.5, 8)), x
    for size in (0.1, 0.3):
        target = point + size * torch.randn_like(x).sign()
        case = Case(1, "project", ball, x, target, target, reg, 1e-3, 60, "auto", "")
        assert not run(case)
        point = ball.project(x, target, reg, tol=1e-3, max_iter=60).point


@pytest.mark.parametrize("name", [*WASSERSTEIN, "linf"])
def test_odd_inputs(name: str) -> None:
    """No images, half precision, one row, histograms."""
    ball = BALLS[name]
    x = images(ball, 1).clamp(*(ball.box or (0.0, 1.0)))
    if name == "a radius for each image":
        ball = ball.take(torch.arange(6))
    else:
        for found in (ball.project(x[:0], x[:0]), ball.support(x[:0], x[:0])):
            assert found.point.shape == (0, 1, 4, 5) and found.status == ()
    shapes = [(6, 1, 4, 5), (6, 2, 1, 10), (6, 2, 10, 1)]
    if name == "matrix":
        shapes = [(6, 20)]
    for shape in shapes:
        image = x.reshape(shape).half()
        for found in (ball.project(image, image.flip(-1)), ball.support(image, image.flip(-1))):
            assert found.point.dtype == torch.float32 and found.point.shape == shape
            box = ball.box or (0.0, 1.0)
            assert wball.audit(ball, image.float().clamp(*box), found.point).all_valid


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4])
def test_rounding_takes_nothing_from_small_radii(eps: float) -> None:
    """Few pixels of a sparse plan are rounded, and the opposite flows of an entropic one leave more
    than rounding costs. When a share of the budget was held back for all pixels, the gap was the
    price of that share, and images stalled."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand((1, 3, 48, 48), generator=random).mul(1.2).clamp(max=1)
    g = 0.3 * torch.randn(x.shape, generator=random)
    ball = wball.WassersteinBall(eps)
    for found in (ball.project(x, x + g), ball.project(x, x + g, 1000.0), ball.support(x, g)):
        assert bool(found.converged.all())
        report = wball.audit(ball, x, found.point)
        assert report.all_valid and float(report.distance.max()) <= 1.0001 * eps
