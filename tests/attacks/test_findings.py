"""Findings add up by code, the serious ones make a result unreliable, and a sound model has no
signs."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wball import StandardAttack, WassersteinBall
from wball.attacks.findings import CODES, Finding, ModelWarning, merged, reliable
from wball.attacks.views import find_signs


@pytest.mark.parametrize("code", CODES)
def test_every_code_says_what_was_seen_and_what_to_do(code: str) -> None:
    finding = Finding(code, 3, 7)
    assert "{" not in finding.message and finding.remedy
    assert finding.serious == (CODES[code].tolerated is not None and CODES[code].tolerated < 3 / 7)


def test_findings_of_batches_add_up() -> None:
    parts = [
        Finding("probabilities", 1, 1),
        Finding("black-box-stronger", 1, 64),
        Finding("black-box-stronger", 9, 64),
    ]
    assert merged(parts) == (Finding("black-box-stronger", 10, 128), Finding("probabilities", 1, 1))
    assert not reliable(merged(parts))


@pytest.mark.parametrize(
    ("code", "images", "of", "serious"),
    [
        ("full-ball-survivors", 1, 16, True),
        ("masked-gradients", 1, 1000, True),
        ("black-box-stronger", 2, 100, False),
        ("black-box-stronger", 3, 100, True),
        ("probabilities", 1, 1, False),
    ],
)
def test_single_images_and_notes_do_not_make_a_result_unreliable(
    code: str, images: int, of: int, serious: bool
) -> None:
    finding = Finding(code, images, of)
    assert finding.serious == serious and reliable([finding]) != serious


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
    found = find_signs(wrap(net), images, labels)
    assert code in found if code else found == {}


def test_standard_attack_checks_unless_told_not_to(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    net.train()
    ball = WassersteinBall(0.05)
    with pytest.warns(ModelWarning, match="training mode"):
        StandardAttack(ball, version="fast")(net, images[:2], labels[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StandardAttack(ball, version="fast", check=False)(net, images[:2], labels[:2])
