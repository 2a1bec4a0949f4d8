"""Each sign that a robust accuracy may be an artefact raises its own warning, and a sound model raises none."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wball import StandardAttack, WassersteinBall
from wball.attacks import checks


def test_a_sound_model_raises_nothing(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checks.check_model(net, images, labels) == ()


@pytest.mark.parametrize(
    ("wrap", "category"),
    [
        (lambda net: lambda z: net(z).softmax(1), checks.ProbabilitiesWarning),
        (
            lambda net: lambda z: net(z) + 0.1 * torch.randn(z.shape[0], 1),
            checks.RandomModelWarning,
        ),
        (lambda net: lambda z: net((z > 0.5).float()), checks.ZeroGradientWarning),
        (lambda net: lambda z: net(z.detach()), checks.ZeroGradientWarning),
        (lambda net: lambda z: net(z) / 0.0, checks.NonFiniteWarning),
        (lambda net: lambda z: net(z) + z.flatten(1)[:, :5].sqrt(), checks.NonFiniteWarning),
        (lambda net: net.train(), checks.TrainModeWarning),
    ],
)
def test_each_warning(
    wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    category: type[checks.ModelWarning],
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
) -> None:
    images[0] = 0.0  # sqrt has an infinite slope there
    with pytest.warns(category):
        found = checks.check_model(wrap(net), images, labels)
    assert category in found


def test_standard_attack_checks_unless_told_not_to(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    net.train()
    ball = WassersteinBall(0.05)
    with pytest.warns(checks.TrainModeWarning):
        StandardAttack(ball, version="fast")(net, images[:2], labels[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StandardAttack(ball, version="fast", check=False)(net, images[:2], labels[:2])
