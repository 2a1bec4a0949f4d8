"""Bounds, losses, noise, schedules and presets, each against an independent reckoning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reproduction.presets import preset as reproduced
from training.worker import small_config, small_data, small_model
from wball.cli.choices import setting
from wball.training import (
    Loss,
    preset,
    presets,
)
from wball.training.losses import Objective
from wball.training.presets import override
from wball.training.state import Average, pack_optimizer, unpack_optimizer


def test_the_loss_is_its_formula() -> None:
    config, net = small_config(loss=Loss(label_smoothing=0.2)), small_model()
    x, y = small_data(4)
    z = x.flip(2)
    loss, right, _ = Objective(net, config)(x, z, y, 0.0)
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
    last = torch.channels_last
    for entry, expected in zip(second.state.values(), first.state.values(), strict=True):
        kept = {k: v for k, v in entry.items() if isinstance(v, torch.Tensor)}
        assert any(v.ndim != 4 or v.is_contiguous(memory_format=last) for v in kept.values())
        for name, value in kept.items():
            assert torch.equal(value, expected[name])
            assert value.stride() == expected[name].stride()


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
