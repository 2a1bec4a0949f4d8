"""Support function: closed forms, scale, and the points of samples."""

from __future__ import annotations

import math

import pytest
import torch

import wball
from references import reference_projection, reference_support


def test_nothing_to_gain() -> None:
    x = torch.rand(2, 1, 4, 4)
    result = wball.WassersteinBall(0.1).support(x, torch.zeros_like(x))
    assert float(result.gap.abs().max()) == pytest.approx(0.0, abs=1e-12)
    alone = wball.WassersteinBall(0.1, wball.GridCost(window=1)).support(x, torch.rand_like(x))
    torch.testing.assert_close(alone.point, x)
    assert wball.WassersteinBall(0.1).support(x[:0], x[:0]).value.shape == (0,)


STENCIL = wball.StencilCost(((math.inf, 0, math.inf), (1, 0, 1), (math.inf, 2, math.inf)))
MATRIX = wball.DenseCost(
    torch.randint(0, 3, (12, 12), generator=torch.Generator().manual_seed(0)).fill_diagonal_(0)
)


@pytest.mark.parametrize("box", [(0.0, 1.0), None], ids=str)
@pytest.mark.parametrize("reg", [math.inf, 100.0])
@pytest.mark.parametrize("cost", [STENCIL, MATRIX], ids=["stencil", "matrix"])
def test_free_moves_need_no_budget(
    cost: wball.StencilCost | wball.DenseCost, reg: float, box: tuple[float, float] | None
) -> None:
    """At radius 0 mass may still go where it costs nothing, and bounds must know it."""
    random = torch.Generator().manual_seed(1)
    x, g = torch.rand(1, 2, 3, 4, generator=random), torch.randn(1, 2, 3, 4, generator=random)
    ball = wball.WassersteinBall(0.0, cost, box=box)
    result, projection = ball.support(x, g, reg), ball.project(x, g, reg)
    best = reference_support(ball, x, g).objective
    assert float(result.value) <= best + 1e-5 <= float(result.upper) + 2e-5
    if math.isinf(reg):  # the status is true: no solver spends what costs nothing yet
        assert bool(result.converged) == (float(result.value) >= best - 1e-5)
    nearest = reference_projection(ball, x, g, reg).objective
    assert float(projection.objective - projection.gap) <= nearest + 1e-5
    assert bool(projection.converged) == (float(projection.objective) <= nearest * (1 + 1e-4))


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
