"""The model under attack is left as it was found, also by several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

import wball
from marks import slow
from wball import DualAveraging, WassersteinBall
from wball.attacks.views import find_signs
from wball.model import evaluating, full_precision, in_training


def network(seed: int = 0) -> nn.Sequential:
    """Batch norm and dropout whose modes matter, in training mode, with one parameter frozen by its
    owner."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(144, 5),
    )
    net[1].running_mean.uniform_(-1, 1)
    net[0].bias.requires_grad_(False)
    return net.train()


def test_threads_attack_one_model_and_leave_it_as_it_was() -> None:
    net, ball = network(), WassersteinBall(0.2)
    x = torch.rand(4, 6, 1, 8, 8)
    with evaluating(net), torch.no_grad():
        y = net(x.flatten(0, 1)).argmax(1).view(4, 6)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    start, random = Barrier(4), torch.get_rng_state()

    def attack(worker: int) -> list[Tensor]:
        start.wait()
        found = (DualAveraging(ball, steps=2 + k % 3)(net, x[worker], y[worker]) for k in range(12))
        return [torch.cat([r.images.flatten(1), r.success[:, None]], 1) for r in found]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(attack, range(4)))
    assert all(module.training for module in net.modules())
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True, True, True]
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    with evaluating(net), torch.no_grad():
        for worker, found in enumerate(results):
            for result in found:
                predicted = net(result[:, :-1].reshape(-1, 1, 8, 8)).argmax(1)
                assert torch.equal(predicted != y[worker], result[:, -1].bool())


def test_models_that_share_a_module_are_independent_otherwise() -> None:
    net = network()
    wrapped = nn.Sequential(nn.Identity(), net).eval()
    net.train()
    with evaluating(wrapped):
        with evaluating(net):
            assert not net.training
        assert not net.training, "the outer call is still running"
    assert net.training and not wrapped.training


def test_the_training_mode_is_seen_while_another_call_evaluates_the_model() -> None:
    net = network()
    with evaluating(net):
        assert "train-mode" in find_signs(net, torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))


def test_a_module_that_refuses_its_mode_leaves_the_others_alone() -> None:
    class Stubborn(nn.Module):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "training" and value is False:
                raise RuntimeError("no")
            super().__setattr__(name, value)

    net = nn.Sequential(network(), Stubborn())
    with pytest.raises(RuntimeError, match="no"), evaluating(net):
        pass
    assert net.training and net[0].training and in_training(net)


class Tf32(nn.Linear):
    """A linear layer as a GPU computes it: to 10 bits, unless TF32 is off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.flatten(1)
        if torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32:
            z = z + ((z * 1024).ceil() / 1024 - z).detach()
        return super().forward(z)


def threshold(layer: nn.Linear, at: float) -> nn.Linear:
    """Class 1 where the mass of the first of four pixels is above ``at``."""
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 0, 0, 0], [1.0, 0, 0, 0]]))
        layer.bias.copy_(torch.tensor([0.0, -at]))
    return layer


class AddsOne(nn.Module):
    """Class 1 where float32 loses what is below half a unit in the last place of 1, which float64
    keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lost = (self.one + 1e-9) - self.one
        first = x.flatten(1)[:, :1]
        return torch.cat([lost + 0 * first, 1e-12 * first], 1)


@pytest.mark.parametrize("name", ["DualAveraging", "ScoreSearch", *slow("StandardAttack")])
def test_examples_in_tf32_or_in_float32_alone_do_not_count(name: str) -> None:
    attack = getattr(wball, name)(WassersteinBall(0.05))
    x, y = torch.full((2, 1, 2, 2), 0.5), torch.zeros(2, dtype=torch.long)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    reachable, beyond = threshold(Tf32(4, 2), 0.55), threshold(Tf32(4, 2), 0.6003)
    assert attack(reachable, x, y).success.all()
    assert not attack(
        beyond, x, y
    ).success.any()  # the ball ends at 0.6, which TF32 rounds to 0.6006
    assert not attack(AddsOne(), x, y).success.any()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_minimal_radii_hold_in_float64() -> None:
    x, y = torch.full((1, 1, 2, 2), 0.5), torch.zeros(1, dtype=torch.long)
    net = threshold(Tf32(4, 2), 0.6003)
    found = wball.minimal_radius(net, x, y, DualAveraging(WassersteinBall(0.1)), hi=0.1)
    assert bool(found.success) and float(found.images.flatten()[0]) > 0.6003


def test_the_newer_settings_of_tf32_are_restored() -> None:
    conv = getattr(torch.backends.cudnn, "conv", None)
    if not hasattr(conv, "fp32_precision"):
        pytest.skip("this torch has one setting")
    before = conv.fp32_precision
    try:
        conv.fp32_precision = "ieee"
        with full_precision():
            assert conv.fp32_precision == "ieee"
        assert conv.fp32_precision == "ieee"
    finally:
        conv.fp32_precision = before
