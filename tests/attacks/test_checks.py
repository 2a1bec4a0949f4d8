"""Each sign that a robust accuracy may be an artefact is reported by its code, and a sound model has none."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wball import StandardAttack, WassersteinBall
from wball.attacks import checks


@pytest.mark.parametrize(
    ("wrap", "code"),
    [
        (lambda net: net, None),
        (lambda net: lambda z: net(z).softmax(1), "probabilities"),
        (lambda net: lambda z: net(z) + 0.1 * torch.randn(z.shape[0], 1), "random-model"),
        (lambda net: lambda z: net((z > 0.5).float()), "zero-gradient"),
        (lambda net: lambda z: net(z.detach()), "zero-gradient"),
        (lambda net: lambda z: net(z) / 0.0, "non-finite"),
        (lambda net: lambda z: net(z) + z.flatten(1)[:, :5].sqrt(), "non-finite"),
        (lambda net: net.train(), "train-mode"),
    ],
)
def test_each_sign(
    wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]],
    code: str | None,
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
) -> None:
    images[0] = 0.0  # sqrt has an infinite slope there
    found = checks.find_signs(wrap(net), images, labels)
    assert code in found if code else found == {}


def test_standard_attack_checks_unless_told_not_to(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    net.train()
    ball = WassersteinBall(0.05)
    with pytest.warns(checks.ModelWarning, match="training mode"):
        StandardAttack(ball, version="fast")(net, images[:2], labels[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StandardAttack(ball, version="fast", check=False)(net, images[:2], labels[:2])
