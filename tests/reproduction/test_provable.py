"""Provable training of the paper's defences: bounds against points, certificates and formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reproduction.networks import SmallResNet
from reproduction.presets import LOSSES, preset
from reproduction.provable import LinfBounds, Provable, verified, verified_accuracy
from training.worker import small_config, small_data, small_model
from wball import LinfBall, Normalized, certify
from wball.certificates.program import UnsupportedModule
from wball.training import Optimisation, train


def small_resnet() -> nn.Module:
    torch.manual_seed(1)
    net = SmallResNet()
    for block in net.blocks:  # fresh blocks are their shortcuts: not all there is to bound
        block.conv2.reset_parameters()  # type: ignore[operator, union-attr]
        block.shortcut.reset_parameters()  # type: ignore[operator, union-attr]
    return Normalized(net, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))


@pytest.mark.parametrize("crown", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("model", "shape"), [(small_model, (1, 14, 14)), (small_resnet, (3, 32, 32))]
)
def test_bounds_hold_at_every_point_of_the_ball(model, shape, crown) -> None:  # type: ignore[no-untyped-def]
    net, eps = model().double(), 0.05
    x, y = torch.rand((2, *shape), dtype=torch.float64), torch.tensor([3, 7])
    margins = LinfBounds(net, x).margins(x, y, eps, crown)
    assert margins.gather(1, y[:, None]).abs().max() < 1e-9
    ball = LinfBall(eps)
    for _ in range(20):
        z = ball.project(x, x + eps * torch.randn_like(x).sign()).point
        logits = net(z)
        assert (logits.gather(1, y[:, None]) - logits >= margins - 1e-9).all()


def test_bounds_of_a_linear_model_are_exact() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    x, y, eps = torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64), torch.tensor([1]), 0.1
    rows = net[1].weight[1] - net[1].weight
    exact = (net(x)[:, 1:2] - net(x)) - eps * rows.abs().sum(1)
    for crown in (0.0, 1.0):
        assert torch.allclose(LinfBounds(net, x).margins(x, y, eps, crown), exact)


def test_verified_images_are_those_of_the_certificate() -> None:
    x, y = small_data(24)
    net = small_model()
    for _ in range(60):  # enough to be right on most of them
        loss = F.cross_entropy(net(x), y)
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.3 * p.grad  # type: ignore[operator]
    ours = verified(net, x, y, 0.01)
    # the certificate bounds inner layers by CROWN, too, so it can only prove more
    theirs = certify(net, x, y, LinfBall(0.01), method="crown").certified
    assert ours.any() and not (ours & ~theirs).any()


def test_bounds_refuse_what_they_cannot_bound() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.Sigmoid())
    with pytest.raises(UnsupportedModule, match="Curved"):
        LinfBounds(net, torch.zeros(1, 1, 4, 4))


def test_provable_training_refuses_statistics_that_change() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )
    with pytest.raises(
        UnsupportedModule, match=r"'1' \(BatchNorm2d\).*without batch normalisation"
    ):
        train(
            small_config(adversary=None),
            small_data(32),
            model=net,
            loss=Provable(0.1, ramp=(0.0, 0.1)),
        )


@pytest.mark.slow
def test_provable_training_raises_verified_accuracy() -> None:
    data = small_data(256)
    options = Optimisation("adamw", lr=1e-2, weight_decay=0.0, schedule="one-cycle")
    settings = {
        "epochs": 20,
        "adversary": None,
        "augment": 0,
        "batch_size": 32,
        "optimisation": options,
    }
    plain = train(small_config(**settings), data, model=small_model()).model
    provable = Provable(0.1, kappa=0.3, ramp=(0.05, 0.5))
    robust = train(small_config(**settings), data, data, model=small_model(), loss=provable)
    before, after = (verified_accuracy(model, *data, 0.1) for model in (plain, robust.model))
    assert before + 0.2 < after <= robust.history[-1]["clean_accuracy"]


def test_the_loss_ramps_from_clean_to_worst_case() -> None:
    x, y = small_data(16)
    loss = Provable(0.1, kappa=0.25, ramp=(0.2, 0.6), crown=1.0, crown_end=0.5)
    model = small_model()
    clean = F.cross_entropy(model(x), y)
    for progress, share in ((0.0, 0.0), (0.2, 0.0), (0.4, 0.5), (0.6, 1.0), (1.0, 1.0)):
        found, logits = loss(model, x, x, y, progress)
        margins = LinfBounds(model, x).margins(x, y, share * 0.1, 1 - 0.5 * share)
        kappa = 1 - 0.75 * share
        torch.testing.assert_close(logits, model(x))
        torch.testing.assert_close(
            found, kappa * clean + (1 - kappa) * F.cross_entropy(-margins, y)
        )


def test_settings() -> None:
    assert all(preset(name).adversary is None for name in LOSSES)
    with pytest.raises(ValueError, match="ramp must be"):
        Provable(0.1, ramp=(0.5, 0.2))
    with pytest.raises(ValueError, match="kappa must be"):
        Provable(0.1, kappa=1.5)
