"""The same seed gives the same numbers on a CPU, whatever the batch, the order of the images and
the threads.

``docs/evaluation.md`` says what holds and why. Runs that are killed and started again are in
``faults`` and ``training/test_restart.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wball

BALL = wball.WassersteinBall(0.2)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return nn.functional.avg_pool2d(wball.load_sample("mnist")[0][:7], 2)


class Net(nn.Module):
    """Sums in float64, so that a batch of another size does not round the logits differently."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Parameter(torch.randn(196, 16, generator=generator) / 6)
        self.second = nn.Parameter(torch.randn(16, 10, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x.flatten(1).double() @ self.first.double())
        return (hidden @ self.second.double()).to(x.dtype)


ATTACKS: dict[str, wball.Attack] = {
    "dual averaging": wball.DualAveraging(BALL, steps=8, until_success=False),
    "pgd": wball.PGD(BALL, steps=2, reg=1000.0, until_success=False),
    "exact pgd": wball.PGD(BALL, steps=2, until_success=False),
    "conjugate pgd": wball.PGD(BALL, steps=2, step="wasserstein", step_size=0.1),
    "frank-wolfe": wball.FrankWolfe(BALL, steps=3, until_success=False),
    "linf pgd": wball.PGD(wball.LinfBall(0.1), steps=5, until_success=False),
    "linf frank-wolfe": wball.FrankWolfe(wball.LinfBall(0.1), steps=5, until_success=False),
    "fast": wball.StandardAttack(BALL, version="fast"),
}


@pytest.fixture
def labels(digits: Tensor) -> Tensor:
    return Net()(digits).argmax(1)


@pytest.mark.parametrize("name", ["dual averaging", "pgd"])
def test_same_seed_same_bits(digits: Tensor, labels: Tensor, name: str) -> None:
    attack = replace(ATTACKS[name], random_start=1.0 if name == "dual averaging" else True)

    def attacked(seed: int | None) -> Tensor:
        torch.rand(3)  # the global state plays no role
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return attack(Net(), digits, labels, generator=generator).images

    assert torch.equal(attacked(1), attacked(1)) and torch.equal(attacked(None), attacked(None))
    assert not torch.equal(attacked(1), attacked(2))


@pytest.mark.parametrize("name", ATTACKS)
def test_batch_size_and_order_do_not_matter(digits: Tensor, labels: Tensor, name: str) -> None:
    x, attack = digits, ATTACKS[name]
    whole = attack(Net(), x, labels)
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    turned = attack(Net(), x[order], labels[order])
    torch.testing.assert_close(turned.images, whole.images[order], rtol=0, atol=1e-6)
    parts = [attack(Net(), x[k : k + 1], labels[k : k + 1]) for k in range(len(x))]
    torch.testing.assert_close(
        torch.cat([p.images for p in parts]), whole.images, rtol=0, atol=1e-6
    )
    assert torch.equal(torch.cat([p.success for p in parts]), whole.success)
    assert torch.equal(turned.success, whole.success[order])


def test_evaluations_repeat_to_the_byte(digits: Tensor, labels: Tensor, tmp_path: Path) -> None:
    for name in ("one", "two"):
        wball.evaluate(
            Net(), digits, labels, BALL, [0.05, 0.2], ATTACKS["dual averaging"], out=tmp_path / name, seed=4,
            batch_size=3, name=wball.Names(command="c"),
        )  # fmt: skip
    for file in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_certificates_repeat_and_do_not_depend_on_the_batch(digits: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(196, 12), nn.ReLU(), nn.Linear(12, 10)).double()
    x = digits.double()
    y = net(x).argmax(1)
    whole, again, *alone = (
        wball.certify(net, x[part], y[part], BALL.at(0.02)).margin
        for part in (slice(None), slice(None), slice(0, 1), slice(3, 4))
    )
    assert torch.equal(whole, again)
    torch.testing.assert_close(torch.cat(alone), whole[[0, 3]], rtol=1e-5, atol=1e-6)
