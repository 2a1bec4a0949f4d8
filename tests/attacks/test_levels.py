"""Examples on 8-bit levels are valid after being stored and read back, with exactly the same
mass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from problems import Case
from wball import PGD, DualAveraging, LinfBall, StandardAttack, WassersteinBall, audit, evaluate
from wball.attacks import Attack
from wball.attacks.levels import rounded


def stored(images: Tensor) -> Tensor:
    """What a file of bytes gives back."""
    return (images * 255).round().to(torch.uint8).float() / 255


@pytest.mark.parametrize(
    "attack",
    [
        DualAveraging(WassersteinBall(0.3), steps=20, levels=256),
        StandardAttack(WassersteinBall(0.3), version="fast", check=False, levels=256),
        PGD(LinfBall(0.1), steps=8, levels=256),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_examples_survive_storage(
    attack: Attack, net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    images = stored(images)
    result = attack(net, images, labels)
    again = stored(result.images)
    assert torch.equal(again, result.images)
    assert audit(attack.ball, images, again).all_valid
    assert torch.equal(net(again).argmax(1) != labels, result.success)
    assert (
        int(result.success.sum())
        >= int(replace(attack, levels=None)(net, images, labels).success.sum()) - 1
    )
    if isinstance(attack.ball, WassersteinBall):
        whole = (result.images * 255).round().flatten(1).sum(1)
        assert torch.equal(whole, (images * 255).round().flatten(1).sum(1))
    assert torch.equal(result.images[~result.success], images[~result.success])


def test_rounding_moves_less_than_a_level_and_keeps_every_channel() -> None:
    torch.manual_seed(0)
    x = stored(torch.rand(3, 2, 7, 9))
    z = torch.rand(3, 2, 7, 9)
    z = (z * (x.flatten(2).sum(2) / z.flatten(2).sum(2))[..., None, None]).clamp(0, 1)
    z = z * (x.flatten(2).sum(2) / z.flatten(2).sum(2))[..., None, None]
    q = rounded(z, x, 256)
    assert float((q - z).abs().max()) < 1.001 / 255
    assert torch.equal((q * 255).round().flatten(2).sum(2), (x * 255).round().flatten(2).sum(2))


def test_images_must_be_on_the_levels(case: Case) -> None:
    with pytest.raises(ValueError, match="multiples of 1/255"):
        DualAveraging(WassersteinBall(0.1), levels=256)(*case)
    with pytest.raises(ValueError, match="levels"):
        DualAveraging(WassersteinBall(0.1), levels=1)


def test_an_evaluation_of_stored_images(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    images, ball = stored(images), WassersteinBall(0.3)
    attack = DualAveraging(ball, steps=20)
    result = evaluate(net, images, labels, ball, attack=replace(attack, levels=256))
    assert not result.rejected and result.accuracy_at(0.3) < 0.5
