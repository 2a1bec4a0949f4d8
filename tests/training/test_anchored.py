"""Anchored bounds in the loss: against certificates, attacks, the first-order gain, and their effect on training."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.worker import small_config, small_data, small_model
from wball import DualAveraging, GridCost, WassersteinBall, certify
from wball.certificates.trust import UnsupportedModule
from wball.models import CIFAR10_MEAN, CIFAR10_STD, Normalized, shallow
from wball.training import Smooth, train
from wball.training.anchored import AnchoredBounds, record
from wball.training.bounds import linear_gain


def trained(steps: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    model, (x, y) = small_model(), small_data(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), x, y


def margins(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    with torch.no_grad():
        logits, gains = AnchoredBounds(model, x[:1])(x, y, WassersteinBall(eps).budget(x))
        raised = logits + gains
        return raised.gather(1, y[:, None])[:, 0] - raised.scatter(1, y[:, None], -torch.inf).amax(
            1
        )


@pytest.mark.slow
def test_margins_are_close_to_those_of_anchored_certificates() -> None:
    """A certificate stops at the first method that proves an image: those whose margin is below 0 had all of them."""
    model, x, y = trained()
    x, y, eps = x[:16], y[:16], 0.2
    proof = certify(model, x, y, WassersteinBall(eps)).margin.float()
    clean, ours = margins(model, x, y, 0.0), margins(model, x, y, eps)
    tried = proof < 0
    assert int(tried.sum()) > 4
    taken = (clean - ours)[tried] / (clean - proof)[tried]
    assert 0.8 < float(taken.median()) < 1.25, taken


def test_no_attack_inside_the_neighbours_goes_below_the_margin() -> None:
    model, x, y = trained()
    eps = 0.15
    bound = margins(model, x, y, eps)
    attack = DualAveraging(
        WassersteinBall(eps, GridCost(3)), steps=20, objective="margin", until_success=False
    )
    with torch.no_grad():
        logits = model(attack(model, x, y).images)
    found = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).amax(1)
    clean = margins(model, x, y, 0.0)
    assert bool((found < clean - 0.05).any()) and bool((found >= bound - 1e-4).all())


def test_units_that_cannot_switch_charge_nothing() -> None:
    """A network that is linear around the images: what is left is the gain along the gradient."""
    model, (x, y) = small_model(), small_data(6)
    with torch.no_grad():
        model[0].bias.fill_(50.0)
        model[3].bias.add_(500.0)
    z = x.clone().requires_grad_(True)
    logits = model(z)
    ball = WassersteinBall(0.001, GridCost(3))  # so small that no pixel runs out of mass
    found, gains = AnchoredBounds(model, x[:1])(x, y, ball.budget(x))
    torch.testing.assert_close(found, logits)
    for k in range(10):
        rise = logits[:, k] - logits.gather(1, y[:, None])[:, 0]
        (gradient,) = torch.autograd.grad(rise.sum(), z, retain_graph=True)
        torch.testing.assert_close(
            gains[:, k], linear_gain(gradient, x, ball), atol=1e-5, rtol=2e-2
        )


def test_a_ball_of_radius_0_gains_nothing_and_has_a_gradient() -> None:
    model, (x, y) = small_model(), small_data(6)
    logits, gains = AnchoredBounds(model, x[:1])(x, y, torch.zeros(6, dtype=torch.float64))
    assert not bool(gains.detach().any())
    F.cross_entropy(logits + gains, y).backward()
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters()
    )


def test_colour_images_and_normalisation_inside_the_network() -> None:
    torch.manual_seed(0)
    model = Normalized(shallow(3, 8, filters=4, hidden=6, kernel=6), CIFAR10_MEAN, CIFAR10_STD)
    x, y = torch.rand(3, 3, 8, 8), torch.tensor([1, 2, 3])
    logits, gains = AnchoredBounds(model, x[:1])(x, y, WassersteinBall(0.01).budget(x))
    torch.testing.assert_close(logits, model(x))
    assert bool((gains.gather(1, y[:, None]) == 0).all()) and int((gains > 0).sum()) == 27


def test_other_networks_are_refused() -> None:
    with pytest.raises(UnsupportedModule, match="mnist-shallow"):
        AnchoredBounds(nn.Sequential(nn.Flatten(), nn.Linear(196, 10)), torch.zeros(1, 1, 14, 14))
    grouped = nn.Sequential(
        nn.Conv2d(2, 2, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4), nn.ReLU()
    )
    grouped.append(nn.Linear(4, 3))
    with pytest.raises(UnsupportedModule, match="groups"):
        AnchoredBounds(grouped, torch.zeros(1, 2, 8, 8))


@pytest.mark.slow
def test_training_makes_the_bounds_tighter_than_robustness_to_first_order() -> None:
    x, y = small_data(64)

    def taken(smooth: Smooth) -> float:
        config = small_config(adversary=None, epochs=5, smooth=smooth, augment=0)
        model = train(config, (x, y), model=small_model()).model
        with torch.no_grad():
            spread = float(model(x).std())
        return float((margins(model, x, y, 0.0) - margins(model, x, y, 0.2)).mean()) / spread

    first_order = Smooth(0.3, ramp=0.0)
    assert taken(dataclasses.replace(first_order, anchored=True)) < 0.95 * taken(first_order)


@pytest.mark.gpu
def test_a_recording_on_a_gpu_gives_the_same_gains_and_gradients() -> None:
    torch.manual_seed(0)
    model = shallow(1, 28, filters=4, hidden=8, kernel=10).cuda()
    x, y = torch.rand(6, 1, 28, 28, device="cuda"), torch.arange(6, device="cuda")
    budget = WassersteinBall(0.1).budget(x)

    def step(bounds: nn.Module) -> list[Tensor]:
        model.zero_grad()
        logits, gains = bounds(x, y, budget)
        F.cross_entropy(logits + gains, y).backward()
        return [
            logits.detach().clone(),
            gains.detach().clone(),
            *(p.grad.clone() for p in model.parameters()),
        ]

    plain = step(AnchoredBounds(model, x[:1]))
    bounds = AnchoredBounds(model, x[:1])
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", RuntimeWarning
        )  # that it was not recorded; torch has warnings of its own
        record(bounds, x, y, budget)
    for _ in range(2):
        for ours, theirs in zip(step(bounds), plain, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    with torch.no_grad():  # weights are read where they lie
        model[5].weight.mul_(2.0)
    torch.testing.assert_close(step(bounds)[1], 2 * plain[1], atol=1e-4, rtol=1e-3)
