"""Bounds, losses, noise, schedules and presets, each against an independent reckoning."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reproduction.presets import preset as reproduced
from training.worker import small_config, small_data, small_model
from wball import LinfBall, Normalized, certify
from wball.certificates.trust import UnsupportedModule
from wball.cli.choices import setting
from wball.training import (
    Loss,
    Optimisation,
    Provable,
    preset,
    presets,
    train,
    verified_accuracy,
)
from wball.training.bounds import LinfBounds, verified
from wball.training.losses import Objective
from wball.training.presets import override
from wball.training.state import Average, pack_optimizer, unpack_optimizer
from wball.zoo.architectures import SmallResNet


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
        train(small_config(adversary=None, provable=Provable(0.1)), small_data(32), model=net)


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
    robust = train(small_config(**settings, provable=provable), data, data, model=small_model())
    before = verified_accuracy(plain, *data, 0.1)
    assert robust.history[-1]["verified_accuracy"] > before + 0.2
    assert robust.history[-1]["verified_accuracy"] <= robust.history[-1]["clean_accuracy"]


def test_the_loss_is_its_formula() -> None:
    config, net = small_config(loss=Loss(label_smoothing=0.2)), small_model()
    x, y = small_data(4)
    z = x.flip(2)
    loss, right, _ = Objective(net, config, x)(x, z, y, 0.0)
    q, rows = net(z).softmax(1), torch.arange(4)
    expected = -0.8 * q[rows, y].log().mean() - 0.2 * q.log().mean()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert int(right) == int((q.argmax(1) == y).sum())


def test_papers_presets_are_the_papers() -> None:
    mnist, cifar = preset("mnist-adversarial-paper"), reproduced("cifar10-adversarial-paper")
    for config, eps, factor in ((mnist, 0.1, 1.4), (cifar, 0.01, 1.5)):
        attack, options = config.adversary.attack, config.optimisation  # type: ignore[union-attr]
        assert (attack.ball.eps, attack.steps, attack.growth.factor, attack.growth.every) == (
            eps,
            50,
            factor,
            5,
        )
        assert attack.until_success and attack.mode == "paper"
        assert (options.method, options.weight_decay, config.batch_size) == ("sgd", 5e-4, 128)
        assert options.lr_at(9.9 / config.epochs, config.epochs) == 0.1
        assert options.lr_at(10 / config.epochs, config.epochs) == pytest.approx(0.01)


@pytest.mark.parametrize("name", presets())
def test_presets_have_their_names(name: str) -> None:
    assert preset(name).name == name and preset(name).summary


def test_override_reaches_any_depth_and_names_what_it_cannot_find() -> None:
    config = preset("mnist-adversarial")
    changed = override(config, "adversary.attack.ball.cost.window", 7)
    assert changed.adversary.attack.ball.cost.window == 7  # type: ignore[union-attr]
    assert override(config, "optimisation.clip", None).optimisation.clip is None
    for path, value, message in (
        ("adversary.attack.stepps", 7, "no setting 'stepps' in DualAveraging"),
        ("adversary.attack.until_success", "no", "until_success must be true or false, got 'no'"),
        ("optimisation.lr", "fast", "lr must be a number, got 'fast'"),
        ("optimisation.ema", None, "ema must be a number, got None"),
        ("adversary.low", None, "low must be a number, got None"),
        ("optimisation.lr", True, "lr must be a number, got True"),
    ):
        with pytest.raises(ValueError, match=message):
            override(config, path, value)
    with pytest.raises(ValueError, match="have no adversary"):
        override(preset("mnist-standard"), "adversary.attack.steps", 7)
    with pytest.raises(ValueError, match="unknown preset"):
        preset("mnist")


def test_settings_of_the_command_line_may_be_spelled_as_in_python() -> None:
    read = [
        setting(text)
        for text in ("flip=False", "flip=true", "clip=None", "name=a", "eps=[0.1]", "lr=1e-3")
    ]
    assert read == [
        ("flip", False),
        ("flip", True),
        ("clip", None),
        ("name", "a"),
        ("eps", [0.1]),
        ("lr", 1e-3),
    ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_come_back_in_the_layout_of_their_parameters(kind) -> None:  # type: ignore[no-untyped-def]
    def one_step(net: nn.Module) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(net.parameters(), lr=0.1, **options)
        net(torch.ones(2, 3, 8, 8)).sum().backward()
        optimizer.step()
        return optimizer  # type: ignore[no-any-return]

    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    first, second = one_step(net), one_step(net)
    saved = {k: v.contiguous() for k, v in pack_optimizer(first).items()}
    unpack_optimizer(second, saved)
    for entry, expected in zip(second.state.values(), first.state.values(), strict=True):
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert (
                    torch.equal(value, expected[name]) and value.stride() == expected[name].stride()
                )


def test_averages_are_exponential_and_forget_the_start() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = Average(net, 0.9)
    expected = net[0].weight.detach().clone()
    for step in range(30):
        with torch.no_grad():
            net[0].weight.fill_(float(step))
            net[1].num_batches_tracked.fill_(step)
        average.update()
        keep = min(0.9, (step + 1) / (step + 11))
        expected = keep * expected + (1 - keep) * step
        assert torch.allclose(average.model[0].weight, expected)  # type: ignore[index]
        assert int(average.model[1].num_batches_tracked) == step  # type: ignore[index]
