"""Complete verification takes every layer of the table: proofs at small radii, counterexamples at
large ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from certificates.exact import gap
from marks import slow
from wball.attacks.adapters import onnx
from wball.certificates import CertificateStatus, certified_radius, certify
from wball.certificates.complete import Search
from wball.certificates.operators import read_graph
from wball.zoo.architectures import ResNet18

LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.max_pool2d": lambda h: torch.max_pool2d(h.relu(), 2),
    "F.max_pool2d": lambda h: F.max_pool2d(h, 2),
    "leaky_relu": lambda h: F.leaky_relu(h, 0.1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "clamp": lambda h: h.clamp(-0.2, 0.3),
    "relu6": lambda h: F.relu6(10 * h) / 10,
}


FAST = ("F.max_pool2d", "gelu")
"""One layer that is rewritten, and one curve; make test-all tries the others."""


class Small(nn.Module):
    """A convolution, the layer, and a linear layer with biases that make every class possible."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.first = LAYERS[layer], nn.Conv2d(1, 4, 3, padding=1)
        with torch.no_grad():
            self.first.weight.mul_(3.0)
        self.last = nn.Linear(self.layer(self.first(torch.zeros(1, 1, 6, 6))).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layer(self.first(x)).flatten(1))
        return out


@pytest.mark.parametrize(
    "layer",
    [
        lambda h: F.max_pool2d(h, 2),
        lambda h: F.max_pool2d(h, (3, 2), stride=1, dilation=(1, 2)),
        lambda h: F.max_pool2d(h.relu(), 3, 2, padding=1),
        lambda h: F.max_pool2d(h.relu(), 4, 3, padding=2, ceil_mode=True),
        lambda h: F.max_pool2d(h - 5.0, 3, 2, padding=1),  # zeros would win
        lambda h: F.max_pool2d(h.relu(), 2, 2, ceil_mode=True),
        lambda h: h.clamp(-0.2, 0.3),
        lambda h: h.clamp(min=0.1),
        lambda h: h.clamp(max=0.1),
        lambda h: h.clamp(None, math.inf),
        F.relu6,
    ],
)
def test_pooling_and_clamps_written_with_relus_are_the_same_function(
    layer: Callable[[Tensor], Tensor],
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return layer(4 * self.first(x)).flatten(1)

    net, x = Net().double().eval(), torch.rand(5, 2, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(read_graph(net, x).logits(x), net(x), rtol=0, atol=1e-12)


def digits() -> Tensor:
    return (
        torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        .mul(1.6)
        .sub(0.6)
        .clamp(min=0)
    )


def proved_and_falsified(net: nn.Module, x: Tensor) -> None:
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.02)
    radius = certified_radius(net, x, y, ball, "crown", rounds=6)
    assert bool((radius > 0).all())
    # Beyond what linear bounds prove, still out of an attacker's reach.
    decided(net, x, y, ball.at(1.15 * radius), ball.at(4.0))


def decided(net: nn.Module, x: Tensor, y: Tensor, further: wball.Ball, wide: wball.Ball) -> None:
    proof = certify(net, x, y, further, "complete")
    assert all(status is CertificateStatus.CERTIFIED for status in proof.status), proof.status
    for seed in range(3):
        z = further.sample(x, generator=torch.Generator().manual_seed(seed))
        assert bool((gap(net(z), y) > 0).all())
    broken = certify(net, x, y, wide, "complete")
    assert broken.counterexample is not None
    found = [k for k, status in enumerate(broken.status) if status is CertificateStatus.FALSIFIED]
    assert found, broken.status
    assert wball.audit(
        wide.take(torch.tensor(found)), x[found], broken.counterexample[found]
    ).all_valid
    assert not bool((net(broken.counterexample[found]).argmax(1) == y[found]).any())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layer", [*FAST, *slow(*(layer for layer in LAYERS if layer not in FAST))])
def test_every_layer_is_proved_and_falsified(layer: str) -> None:
    proved_and_falsified(Small(layer).eval(), digits())


def resnet18() -> nn.Module:
    """Every block of the zoo's network, two filters wide, with running statistics that matter."""
    net = ResNet18(classes=3, width=2, channels=1)
    with torch.no_grad():
        for _ in range(30):
            net(torch.rand(64, 1, 6, 6))
    return net


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_residual_network_is_proved_and_falsified() -> None:
    torch.manual_seed(1)
    net, x = resnet18().eval(), digits()
    bias = list(net.parameters())[-1]
    with torch.no_grad():  # every class is near
        bias -= net(x)[0] - torch.tensor([0.05, 0.0, 0.0])
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.0028)
    assert not bool(certify(net, x, y, ball, "crown").certified)
    decided(net, x, y, ball, ball.at(4.0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_the_ordinary_bound_proves_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet has too many units for a tree: where plain bounds are enough, they are all that is
    computed."""

    def never(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(Search, "decide", never)
    torch.manual_seed(1)
    net, x = resnet18().eval(), digits()
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-4)
    found = certify(net, x, y, ball, "complete")
    assert found.status == (CertificateStatus.CERTIFIED,) * len(x)
    assert bool((found.margin >= certify(net, x, y, ball, "crown").margin).all())
    with pytest.raises(AssertionError, match="searched"):
        certify(net, x, y, ball.at(1.0), "complete")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_onnx_file_is_decided_like_the_network_it_was_made_from(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    net, x = Small("torch.max_pool2d").eval(), digits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": ["x"], "output_names": ["y"], "opset_version": 17}
        torch.onnx.export(net, (x,), str(tmp_path / "net.onnx"), dynamo=False, **names)
    proved_and_falsified(onnx.load(tmp_path / "net.onnx"), x)
