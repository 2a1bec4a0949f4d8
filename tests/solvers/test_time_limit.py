"""Solvers end when their time is up, with a point of the ball, bounds that hold, and a status that says so."""

from __future__ import annotations

import time

import pytest
import torch

import wball
from wball.result import Status


@pytest.fixture(params=["cpu", "torch", "dense"])
def hard(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[wball.WassersteinBall, torch.Tensor]:
    """A ball and images that take a second, by a compiled kernel, in torch, and with a matrix of costs."""
    random = torch.Generator().manual_seed(0)
    if request.param == "dense":
        cost = torch.rand((128, 128), generator=random)
        cost = wball.DenseCost((cost + cost.T).fill_diagonal_(0))
        return wball.WassersteinBall(0.1, cost), torch.rand((2, 128), generator=random)
    pytest.importorskip("numba")
    monkeypatch.setenv("WBALL_KERNEL", request.param)
    side = 32 if request.param == "cpu" else 12
    return wball.WassersteinBall(0.3), torch.rand((2, 1, side, side), generator=random)


@pytest.mark.slow
@pytest.mark.parametrize("reg", [float("inf"), 1e6])
@pytest.mark.parametrize("work", ["support", "project"])
def test_a_time_limit_ends_with_a_point_of_the_ball(
    hard: tuple[wball.WassersteinBall, torch.Tensor], work: str, reg: float
) -> None:
    ball, x = hard
    given = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def solved(**limit: float) -> wball.SupportResult | wball.ProjectionResult:
        if work == "support":
            return ball.support(x, given, reg, **limit)  # type: ignore[arg-type]
        return ball.project(x, x + given, reg, **limit)  # type: ignore[arg-type]

    solved(time_limit=1e-9)  # compiles
    result = solved(time_limit=1e-9)
    assert set(result.status) <= {Status.TIME_LIMIT, Status.CONVERGED}
    assert bool(ball.contains(x, result.point).all())
    if isinstance(result, wball.SupportResult):
        best = ball.support(x, given)
        assert bool((result.upper >= best.value).all()) and bool((result.value <= best.upper).all())
    assert bool((result.gap >= 0).all())


@pytest.mark.parametrize("work", ["support", "project"])
def test_an_image_that_takes_minutes_ends_after_its_time_limit(work: str) -> None:
    """512 x 512 x 3 ``support`` did not end in a minute; a quarter of a side, and a sixteenth of the time, will do."""
    random = torch.Generator().manual_seed(0)
    x, ball = torch.rand((1, 3, 128, 128), generator=random), wball.WassersteinBall(0.1)
    given = torch.randn(x.shape, generator=random)
    begun = time.monotonic()
    result = (
        ball.support(x, given, time_limit=0.5)
        if work == "support"
        else ball.project(x, x + given, time_limit=0.5)
    )
    assert time.monotonic() - begun < 30
    assert result.status == (Status.TIME_LIMIT,) and "time_limit" in str(result.status[0])


def test_a_dense_cost_of_1024_bins_ends_after_its_time_limit() -> None:
    random = torch.Generator().manual_seed(0)
    cost = torch.rand((1024, 1024), generator=random)
    ball = wball.WassersteinBall(0.1, wball.DenseCost((cost + cost.T).fill_diagonal_(0)))
    x, g = torch.rand((2, 1, 1024), generator=random)
    begun = time.monotonic()
    result = ball.support(x, g, time_limit=0.5)
    assert time.monotonic() - begun < 60
    assert result.status == (Status.TIME_LIMIT,) and bool(result.upper >= result.value)


def test_a_time_limit_that_makes_no_sense_is_refused() -> None:
    x = torch.rand(1, 1, 3, 3)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="time_limit must be > 0"):
            wball.WassersteinBall(0.1).support(x, x, time_limit=wrong)
        with pytest.raises(ValueError, match="time_limit must be > 0"):
            wball.WassersteinBall(0.1).project(x, x, time_limit=wrong)
