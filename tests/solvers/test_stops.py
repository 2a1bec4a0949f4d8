"""Where solvers stop: at their time limit, at the rounding of their numbers, and never for lack of
curvature."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

import wball
from wball.result import ProjectionResult, Status, SupportResult


def draws(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=random), torch.randn(shape, generator=random)


def dense(bins: int) -> wball.WassersteinBall:
    cost = draws(bins, bins)[0]
    return wball.WassersteinBall(0.1, wball.DenseCost((cost + cost.T).fill_diagonal_(0)))


def solved(
    work: str, ball: wball.WassersteinBall, x: Tensor, g: Tensor, reg: float, limit: float
) -> SupportResult | ProjectionResult:
    if work == "support":
        return ball.support(x, g, reg, time_limit=limit)
    return ball.project(x, x + g, reg, time_limit=limit)


@pytest.mark.parametrize("kernel", ["cpu", "torch", "dense"])
@pytest.mark.parametrize("reg", [math.inf, 1e6])
@pytest.mark.parametrize("work", ["support", "project"])
@pytest.mark.slow
def test_a_time_limit_ends_with_a_point_of_the_ball(
    kernel: str, work: str, reg: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ball, (x, g) = dense(128), draws(2, 128)
    if kernel != "dense":
        monkeypatch.setenv("WBALL_KERNEL", kernel)
        side = 32 if kernel == "cpu" else 12
        ball, (x, g) = wball.WassersteinBall(0.3), draws(2, 1, side, side)
    solved(work, ball, x, g, reg, 1e-9)  # compiles
    result = solved(work, ball, x, g, reg, 1e-9)
    assert set(result.status) <= {Status.TIME_LIMIT, Status.CONVERGED}
    assert bool(ball.contains(x, result.point).all()) and bool((result.gap >= 0).all())
    if isinstance(result, SupportResult):
        best = ball.support(x, g)
        assert bool((result.upper >= best.value).all()) and bool((result.value <= best.upper).all())


@pytest.mark.parametrize("work", ["support", "project", "support of 512 bins"])
def test_what_takes_minutes_ends_after_its_time_limit(work: str) -> None:
    """512 x 512 x 3 ``support`` did not end in a minute; a sixteenth of the pixels will do."""
    ball, (x, g) = wball.WassersteinBall(0.1), draws(1, 3, 128, 128)
    if "bins" in work:
        ball, (x, g) = dense(512), draws(1, 512)
    begun = time.monotonic()
    result = solved(work.split()[0], ball, x, g, math.inf, 0.5)
    assert time.monotonic() - begun < 30
    assert result.status == (Status.TIME_LIMIT,) and "time_limit" in str(result.status[0])
    assert not isinstance(result, SupportResult) or bool(result.upper >= result.value)


def test_a_time_limit_that_makes_no_sense_is_refused() -> None:
    x = torch.rand(1, 1, 3, 3)
    for wrong in (0.0, -1.0, float("nan")):
        for work in ("support", "project"):
            with pytest.raises(ValueError, match="time_limit must be > 0"):
                solved(work, wball.WassersteinBall(0.1), x, x, math.inf, wrong)


@pytest.mark.parametrize("reg", [1e5, math.inf])
@pytest.mark.parametrize(
    ("kernel", "shape"), [("cpu", (1, 2)), ("cpu", (1, 3)), ("torch", (1, 2))], ids=str
)
def test_pixels_that_exchange_mass_only_with_each_other(
    shape: tuple[int, int], reg: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny images, mostly full, and points near and far: directions without curvature stall no
    solver."""
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    count, random = 60 if kernel == "cpu" else 8, torch.Generator().manual_seed(1)
    x = torch.rand((count, 1, *shape), generator=random, dtype=torch.float64)
    x = torch.where(torch.rand(x.shape, generator=random) < 0.6, 1.0, x).clamp(min=0.2)
    size = 10 ** (3 * torch.rand((count, 1, 1, 1), generator=random, dtype=torch.float64) - 1.5)
    w, g = (torch.randn(x.shape, generator=random, dtype=torch.float64) for _ in range(2))
    for box in ((0.0, 1.0), (0.2, 1.0)):
        ball = wball.WassersteinBall(0.3, wball.GridCost(3), box=box)
        for result in (ball.project(x, x + size * w, reg), ball.support(x, g, reg)):
            assert set(result.status) == {Status.CONVERGED}
            assert reg < math.inf or int(result.n_iter.max()) <= 60


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_a_tolerance_below_rounding_is_a_stall_and_not_a_matter_of_max_iter(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    ball, (x, g) = wball.WassersteinBall(0.3), (part.double() for part in draws(1, 1, 4, 4))
    result = ball.support(x, g, tol=1e-30, max_iter=500)
    assert result.status == (Status.STALLED,)
    assert int(result.n_iter) < 500 and bool(ball.contains(x, result.point).all())
    assert "max_iter" in str(Status.STALLED) and "tol" in str(Status.STALLED)
    assert ball.project(x, g, max_iter=2).status == (Status.MAX_ITER,)
