"""Gradients through projections, support functions and distances, against finite differences."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wball

SHAPE = (2, 2, 3, 3)
STEP = 1e-4
"""Answers are exact to about 1e-7, so differences of this step are exact to 1e-3."""
Function = Callable[..., Tensor]


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 0.05 + 0.9 * torch.rand(SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def differences(
    function: Function, given: tuple[Tensor, Tensor], which: int, length: float = STEP
) -> Tensor:
    """The Jacobian of each image by central differences, one image of one batch for each step."""
    count, size = len(given[0]), given[0][0].numel()
    many = [part.repeat_interleave(2 * size, 0) for part in given]
    step = torch.cat([torch.eye(size), -torch.eye(size)]).to(many[0]) * length
    many[which] = many[which] + step.repeat(count, 1).view_as(many[which])
    ahead, behind = function(*many).view(count, 2, size, -1).unbind(1)
    return (ahead - behind) / (2 * length)


def derivatives(function: Function, given: tuple[Tensor, Tensor], which: int) -> Tensor:
    """The same by autograd. What an image takes from another shows, too: it is added up."""
    at = tuple(part.clone().requires_grad_(k == which) for k, part in enumerate(given))
    values = function(*at).view(len(at[0]), -1).sum(0)
    rows = [torch.autograd.grad(value, at[which], retain_graph=True)[0] for value in values]
    return torch.stack([row.flatten(1) for row in rows], 2)


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("reg", [math.inf, 50.0, 1000.0])
@pytest.mark.parametrize(("window", "eps"), [(3, 0.2), (5, 0.05)])
def test_the_projection_is_differentiable_in_the_point_and_the_centre(
    box: tuple[float, float] | None, reg: float, window: int, eps: float
) -> None:
    ball = wball.WassersteinBall(eps, cost=wball.GridCost(window), box=box)
    x, noise = images(9)
    tol = 1e-10 if math.isinf(reg) else 1e-15

    def point(x: Tensor, w: Tensor) -> Tensor:
        return ball.project(x, w, reg, tol=tol, max_iter=3000).point

    given = x, x + 0.5 * noise
    for which in (0, 1):
        found, expected = (by(point, given, which) for by in (derivatives, differences))
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=5e-3)
        assert float((expected.abs() > 0.01).double().mean()) > 0.05, "something is compared"


@pytest.mark.parametrize("box", [None, (0.0, 1.0)])
@pytest.mark.parametrize("reg", [math.inf, 50.0])
def test_the_support_function_is_differentiable(
    box: tuple[float, float] | None, reg: float
) -> None:
    ball = wball.WassersteinBall(0.1, cost=wball.GridCost(3), box=box)

    def value(x: Tensor, g: Tensor) -> Tensor:
        return ball.support(x, g, reg, tol=1e-13, max_iter=3000).value

    for which in (0, 1):
        found, expected = (by(value, images(3), which) for by in (derivatives, differences))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


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

    def distance(x: Tensor, z: Tensor) -> Tensor:
        return ball.distance(x, z, plans=plans)

    for which in (0, 1):
        # Where mass is lost the distance is another: hence a step within rounding.
        found, expected = (
            derivatives(distance, (x, z), which),
            differences(distance, (x, z), which, 1e-7),
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_potentials_of_full_plans_at_p_1_are_one_lipschitz() -> None:
    ball = wball.WassersteinBall(1.0, cost=wball.GridCost(9), mass="absolute")
    x, _ = images(6)
    z = ball.sample(x, torch.Generator().manual_seed(1))
    _, prices = ball.distance(x, z, plans="full", potentials=True)
    torch.testing.assert_close(prices.rows, -prices.columns)
    place = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).double()
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
