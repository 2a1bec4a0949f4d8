"""A few hundred cases of the long run, and what the long run found once, by name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import wball
from torture.cases import OPERATIONS
from torture.checks import Findings
from torture.networks import certify_and_attack
from torture.operations import findings

CASES, PARTS = range(1410, 1570), 4
"""The first is a projection whose plan lost digits in factors."""


@pytest.mark.parametrize("part", range(PARTS))
def test_cases(part: int) -> None:
    for index in CASES[part::PARTS]:
        assert not findings(77, list(OPERATIONS), index)


@pytest.mark.parametrize(
    ("seeds", "least"), [(range(2), 1), pytest.param(range(2, 20), 50, marks=pytest.mark.slow)]
)
def test_certificates_of_random_networks_hold_and_are_proved_again(
    seeds: range, least: int
) -> None:
    found = Findings()
    assert sum(certify_and_attack(seed, found) for seed in seeds) >= least
    assert not found


class Spots(nn.Module):
    """Class 1 if there is more mass on the right."""

    def forward(self, x: Tensor) -> Tensor:
        right = (x * torch.linspace(-1, 1, x.shape[3], dtype=x.dtype)).flatten(1).sum(1)
        return torch.stack([-right, right], 1)


def points(ball: wball.WassersteinBall, x: Tensor) -> list[Tensor]:
    """A point of the ball from each public operation."""
    y = torch.zeros(len(x), dtype=torch.long)
    return [
        ball.project(x, torch.rand_like(x)).point,
        ball.project(x, torch.rand_like(x), 100.0).point,
        ball.support(x, torch.randn_like(x)).point,
        ball.sample(x),
        wball.DualAveraging(ball, steps=2)(Spots(), x, y).images,
    ]


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 2.0**-149), (torch.float64, 5e-324)])
def test_the_smallest_numbers_cannot_be_split_and_stay(dtype: torch.dtype, least: float) -> None:
    x = torch.full((1, 1, 4, 4), least, dtype=dtype)
    assert all(torch.equal(z, x) for z in points(wball.WassersteinBall(0.5), x))


def test_a_radius_below_rounding_leaves_the_image() -> None:
    x, ball = torch.rand(2, 1, 5, 5), wball.WassersteinBall(1e-9)
    assert all(torch.equal(z, x) for z in points(ball, x))
    assert not torch.equal(ball.support(x.double(), torch.randn_like(x).double()).point, x.double())


def test_tensors_that_carry_gradients_are_taken_as_they_are() -> None:
    x, ball = torch.rand(1, 1, 4, 4, requires_grad=True), wball.WassersteinBall(0.2)
    for z in points(ball, x):
        assert wball.audit(ball, x, z).all_valid
    assert bool(ball.contains(x, x)) and ball.distance(x, x).requires_grad


def test_a_matrix_of_costs_for_another_size() -> None:
    ball = wball.WassersteinBall(0.2, wball.DenseCost(torch.ones(4, 4) - torch.eye(4)))
    x = torch.rand(1, 1, 2, 3)
    for call in (
        lambda: ball.project(x, x),
        lambda: ball.support(x, x),
        lambda: ball.distance(x, x),
        lambda: wball.DualAveraging(ball, steps=1)(Spots(), x, Spots()(x).argmax(1)),
    ):
        with pytest.raises(ValueError, match="for 4 pixels, but the images have 2 x 3 = 6"):
            call()


def test_a_window_of_one_pixel_is_certified() -> None:
    """Within it nothing moves, and one channel of one pixel has nowhere to go to even with full
    plans."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    x, ball = torch.rand(1, 3, 1, 1), wball.WassersteinBall(0.5, wball.GridCost(1))
    for plans in ("window", "full"):
        assert bool(wball.certify(model, x, model(x).argmax(1), ball, plans=plans).certified.all())


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(18147, id="pgd under a matrix of costs"),
        pytest.param(33407, id="mixtures of corners in bfloat16"),
        pytest.param(39545, id="entropic projection in float16"),
        pytest.param(25346, id="potentials of 1e4 on an image of mass 1e-6"),
        pytest.param(12049, id="directions of 1e30 on an image of 1e-311"),
        pytest.param(11339, id="an image of two of the smallest numbers"),
        pytest.param(46838, id="projection in float64 at a radius of 1e-12"),
        pytest.param(726, id="a search in float64 at a radius of 1e-12 with free moves"),
        pytest.param(77488, marks=pytest.mark.slow, id="certificate with moves that cost nothing"),
    ],
)
def test_cases_that_failed_once(index: int) -> None:
    """Radii of 1e-6 and rounding of 12 % on top; rows that sent more than they had; bounds without
    free moves."""
    assert not findings(0, list(OPERATIONS), index)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("shape", [(1, 40), (9, 9)])
def test_rounding_is_paid_from_the_budget(eps: float, shape: tuple[int, int]) -> None:
    """The exact distance itself, nothing forgiven. In a strip errors add up over many moves of a
    narrow window."""
    torch.manual_seed(5)
    x, g = torch.rand(2, 1, *shape), torch.linspace(-1, 1, shape[1]).expand(2, 1, *shape)
    model, y = Spots(), torch.zeros(2, dtype=torch.long)
    for cost in (wball.GridCost(3), wball.GridCost(5, 2.0), wball.GridCost(11, 2.0)):
        ball = wball.WassersteinBall(eps, cost)
        for z in (
            ball.support(x, g + 0.1 * torch.randn_like(x)).point,
            ball.project(x, x + 0.1 * torch.randn_like(x), tol=1e-3).point,
            wball.DualAveraging(ball, steps=3, until_success=False)(model, x, y).images,
            wball.FrankWolfe(ball, steps=4, until_success=False)(model, x, y).images,
        ):
            assert float((wball.audit(ball, x, z).distance / eps).max()) <= 1.0001


@pytest.mark.parametrize("reg", [1.0, 1e4, math.inf])
def test_what_is_held_back_shows_in_the_gap(reg: float) -> None:
    """float64 holds nothing back at this radius, and what it finds to be better is within the gap
    stated in float32."""
    torch.manual_seed(6)
    x = torch.rand(2, 1, 5, 5)
    w = 30 * torch.randn_like(x)
    ball = wball.WassersteinBall(1e-9)
    coarse = ball.project(x, w, reg)
    fine = ball.project(x.double(), w.double(), reg, tol=1e-10)
    better = coarse.objective - fine.objective
    assert bool((better > 0).all() and (coarse.gap >= better * (1 - 1e-3)).all())
