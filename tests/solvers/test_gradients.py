"""Gradients through projections, support functions and distances, against finite differences."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import wball

SHAPE = (2, 2, 4, 3)
STEP = 1e-4
"""Answers are exact to about 1e-7, so differences of this step are exact to 1e-3."""


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 0.05 + 0.9 * torch.rand(SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def differences(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The Jacobian by central differences."""
    columns = []
    for k in range(at.numel()):
        step = torch.zeros(at.numel(), dtype=at.dtype)
        step[k] = STEP
        ahead, behind = (function(at + s * step.view_as(at)) for s in (1, -1))
        columns.append(((ahead - behind) / (2 * STEP)).flatten())
    return torch.stack(columns, 1)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("reg", [math.inf, 50.0, 1000.0])
@pytest.mark.parametrize(("window", "eps"), [(3, 0.2), (5, 0.05)])
def test_the_projection_is_differentiable_in_the_point_and_the_centre(
    box: tuple[float, float] | None, reg: float, window: int, eps: float
) -> None:
    ball = wball.WassersteinBall(eps, cost=wball.GridCost(window), box=box)
    x, noise = images(7)
    w, tol = x + 0.5 * noise, 1e-10 if math.isinf(reg) else 1e-15

    def of_point(w: Tensor) -> Tensor:
        return ball.project(x, w, reg, tol=tol, max_iter=3000).point

    def of_centre(x: Tensor) -> Tensor:
        return ball.project(x, w, reg, tol=tol, max_iter=3000).point

    for function, at in ((of_point, w), (of_centre, x)):
        found = torch.autograd.functional.jacobian(function, at).reshape(at.numel(), -1)
        torch.testing.assert_close(found, differences(function, at), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("reg", [math.inf, 50.0])
def test_the_support_function_is_differentiable(
    box: tuple[float, float] | None, reg: float
) -> None:
    ball = wball.WassersteinBall(0.1, cost=wball.GridCost(3), box=box)
    x, g = images(3)

    def value(x: Tensor, g: Tensor) -> Tensor:
        return ball.support(x, g, reg, tol=1e-13, max_iter=3000).value

    assert gradcheck(value, (x.requires_grad_(), g.requires_grad_()), eps=1e-4, atol=1e-3)


def test_the_gradient_of_an_exact_support_function_is_its_maximiser() -> None:
    ball = wball.WassersteinBall(0.1)
    x, g = images(4)
    result = ball.support(x, g.requires_grad_())
    (found,) = torch.autograd.grad(result.value.sum(), g)
    torch.testing.assert_close(found, result.point)


@pytest.mark.parametrize("plans", ["window", "full"])
@pytest.mark.parametrize("window", [3, 9])
@pytest.mark.parametrize("mass", ["relative", "absolute"])
def test_the_distance_has_its_potentials_as_gradients(plans: str, window: int, mass: str) -> None:
    ball = wball.WassersteinBall(0.3, cost=wball.GridCost(window), box=None, mass=mass)
    x, _ = images(5)
    z = ball.sample(x, torch.Generator().manual_seed(0))
    value, prices = ball.distance(x, z, plans=plans, potentials=True)
    total = (prices.rows * x + prices.columns * z).flatten(1).sum(1)
    torch.testing.assert_close(total, value)
    assert bool((value > 0.01).all())
    inputs = x.requires_grad_(), z.requires_grad_()
    assert gradcheck(lambda x, z: ball.distance(x, z, plans=plans), inputs, eps=1e-7, atol=1e-4)


def test_potentials_of_full_plans_at_p_1_are_one_lipschitz() -> None:
    ball = wball.WassersteinBall(1.0, cost=wball.GridCost(9), mass="absolute")
    x, _ = images(6)
    z = ball.sample(x, torch.Generator().manual_seed(1))
    _, prices = ball.distance(x, z, plans="full", potentials=True)
    torch.testing.assert_close(prices.rows, -prices.columns)
    place = torch.cartesian_prod(torch.arange(4.0), torch.arange(3.0)).double()
    gaps = (prices.rows.flatten(2)[..., None] - prices.rows.flatten(2)[:, :, None]).abs()
    assert bool((gaps <= torch.cdist(place, place) + 1e-9).all())


def test_balls_of_one_point_and_histograms_have_gradients() -> None:
    x, w = images(8)
    x = x.requires_grad_()
    point = wball.WassersteinBall(0.0).project(x, w).point
    (found,) = torch.autograd.grad(point.sum(), x)
    assert bool((found == 1).all())
    ball = wball.WassersteinBall(0.2, cost=wball.GridCost(3), box=None)
    flat, target = x.detach().flatten(1), w.flatten(1).requires_grad_()
    (found,) = torch.autograd.grad(ball.project(flat, target).point.square().sum(), target)
    assert found.shape == target.shape
    assert bool((found != 0).any())


@pytest.mark.parametrize("ball", [wball.LinfBall(0.1), wball.WassersteinBall(0.1)])
def test_nothing_is_detached_silently(ball: wball.ball.Ball) -> None:
    x, w = images(9)
    w = (x + 0.1 * w).requires_grad_()
    answers = ball.project(x, w).point, ball.support(x, w).value, ball.distance(x, w.clamp(0, 1))
    assert all(answer.requires_grad for answer in answers)
    with torch.no_grad():
        assert not ball.project(x, w).point.requires_grad
