"""A step of training: what the network sees, and how its weights move."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.worker import small_config, small_data, small_model
from wball import DualAveraging, WassersteinBall
from wball.training import Adversary, Loss, Optimisation, Smooth, Validation, train
from wball.training.losses import Objective, Radii
from wball.training.state import World

STILL = Optimisation(lr=1e-30, weight_decay=0.0, schedule="constant")
"""Weights stay where they are."""


class Watched(nn.Module):
    """Keeps what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and next(self.parameters()).requires_grad:
            assert self.training
            self.seen.append(x.detach().clone())
        logits: Tensor = self.inner(x)
        return logits


def seen(**settings: Any) -> list[Tensor]:
    """The batches of three epochs, measured after each."""
    data, model = settings.pop("data", small_data(24)), Watched()
    settings = {"adversary": None, "augment": 0, "batch_size": 8, "optimisation": STILL, **settings}
    train(small_config(epochs=3, evaluation=Validation(), **settings), data, data, model=model)
    return model.seen


def test_each_epoch_has_every_image_in_an_order_of_its_own() -> None:
    x, _ = small_data(24)
    batches = seen()
    assert len(batches) == 9
    orders = []
    for epoch in range(3):
        images = torch.cat(batches[3 * epoch : 3 * epoch + 3]).flatten(1)
        orders.append(torch.cdist(images, x.flatten(1)).argmin(1).tolist())
        assert torch.equal(images, x.flatten(1)[orders[-1]]) and sorted(orders[-1]) == list(
            range(24)
        )
    assert len({tuple(order) for order in orders}) == 3


RANDOM: dict[str, dict[str, Any]] = {
    "shifts": {"augment": 2},
    "mirrors": {"flip": True},
    "rotations": {"affine": 1.0},
    "squares": {"cutout": 4},
    "noise": {"noise": 0.05},
    "starts": {
        "adversary": Adversary(
            DualAveraging(WassersteinBall(0.3), steps=1, until_success=False, random_start=5.0)
        )
    },
}


@pytest.mark.parametrize("kind", RANDOM)
def test_what_is_random_is_drawn_anew_at_each_step(kind: str) -> None:
    x, y = small_data(1)
    settings = {"data": (x.repeat(8, 1, 1, 1), y.repeat(8)), **RANDOM[kind]}
    first, second, third = seen(**settings)
    assert (
        not torch.equal(first, second)
        and not torch.equal(second, third)
        and not torch.equal(first, third)
    )
    assert torch.equal(
        torch.stack([first, second, third]), torch.stack(seen(**settings))
    )  # but not anew in another run
    assert (
        len({tuple(image.flatten().tolist()) for image in first}) > 1
    )  # nor once for the whole batch


@pytest.mark.parametrize(
    "options",
    [
        Optimisation(lr=0.05, weight_decay=0.01, schedule="constant"),
        Optimisation(lr=0.05, nesterov=True, weight_decay=0.01, schedule="constant", clip=0.1),
        Optimisation("adamw", lr=0.01, weight_decay=0.1, schedule="constant"),
        Optimisation(lr=0.05, schedule="step", drop_epochs=2),
        Optimisation(lr=0.05, schedule="one-cycle", warmup=0.5),
    ],
    ids=["sgd", "nesterov", "adamw", "step", "one-cycle"],
)
def test_weights_move_as_the_optimiser_of_torch_moves_them(options: Optimisation) -> None:
    x, y = small_data(32)
    config = small_config(
        epochs=4,
        batch_size=32,
        adversary=None,
        augment=0,
        optimisation=options,
        loss=Loss(label_smoothing=0.2),
    )
    found = train(config, (x, y), model=small_model()).model
    model, shared = small_model(), {"weight_decay": options.weight_decay}
    optimiser: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **shared)
    if options.method == "sgd":
        optimiser = torch.optim.SGD(
            model.parameters(), momentum=0.9, nesterov=options.nesterov, **shared
        )
    rates = {"constant": [1, 1, 1, 1], "step": [1, 1, 0.1, 0.1], "one-cycle": [1e-4, 0.5, 1, 0.5]}[
        options.schedule
    ]
    for rate in rates:
        optimiser.param_groups[0]["lr"] = rate * options.lr
        optimiser.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)
        assert options.clip is None or norm > options.clip  # or nothing would be tried
        optimiser.step()
    for mine, theirs in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_for_the_network_alone() -> None:
    x, y = small_data(16)
    config = small_config(adversary=None, optimisation=Optimisation(bf16=True, channels_last=True))
    loss, *_ = Objective(small_model(), config)(x, x, y, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        logits = small_model()(x)
    assert loss.dtype == torch.float32 and logits.dtype == torch.bfloat16
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), y))
    assert not torch.equal(loss, F.cross_entropy(small_model()(x), y))


def test_smooth_at_a_radius_per_image_protects_what_it_can() -> None:
    x, y = small_data(32)
    settings = Smooth(
        WassersteinBall(0.4),
        ramp=0.0,
        radius="per-image",
        low=0.01,
        start=0.05,
        grow=0.05,
        shrink=0.04,
    )
    config = small_config(adversary=None, epochs=4, smooth=settings)
    objective = Objective(small_model(), config)
    eps = torch.linspace(0.0, 0.4, 32, dtype=torch.float64)
    each = [
        objective(x[i : i + 1], x[i : i + 1], y[i : i + 1], 0.5, float(eps[i])) for i in range(32)
    ]
    loss, _, survived = objective(x, x, y, 0.5, eps)
    torch.testing.assert_close(loss, torch.stack([v[0] for v in each]).mean())
    assert torch.equal(survived, torch.cat([v[2] for v in each]))
    result = train(config, (x, y), model=small_model())
    radii = [r["mean_radius"] for r in result.history]
    assert len(set(radii)) > 1 and all(0.01 <= r <= 0.4 for r in radii)


def test_radii_follow_their_rule() -> None:
    attack = DualAveraging(WassersteinBall(0.4), steps=1)
    rule = Adversary(
        attack, radius="per-image", low=0.1, start=0.2, grow=0.15, shrink=0.08, ramp=0.5
    )

    def radii(settings: Adversary, count: int = 6) -> Radii:
        return Radii(settings, count, torch.device("cpu"))

    index, broken, own = (
        torch.tensor([5, 0, 2, 3]),
        torch.tensor([True, False, True, False]),
        radii(rule),
    )
    # The first and third shrink to low, the others grow to eps; the ramp scales what is asked, not
    # what is kept.
    expected = {0.25: [0.1] * 4, 0.5: [0.12, 0.35, 0.12, 0.35], 1.0: [0.1, 0.4, 0.1, 0.4]}
    for progress, asked in expected.items():
        torch.testing.assert_close(
            own.batch(index, progress, World()), torch.tensor(asked, dtype=torch.float64)
        )
        own.follow(index, broken, World())
    torch.testing.assert_close(
        own.values, torch.tensor([0.4, 0.2, 0.1, 0.4, 0.2, 0.1], dtype=torch.float64)
    )
    fixed = radii(dataclasses.replace(rule, radius="fixed"))
    fixed.follow(index, broken, World())
    assert fixed.batch(index, 0.1, World()) == pytest.approx(0.08) and fixed.values.numel() == 0
    for start, first in ((9.0, 0.4), (0.0, 0.1)):
        assert radii(dataclasses.replace(rule, start=start), 1).values.tolist() == [first]


def test_only_so_many_test_images_are_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "wball.training.losses.robust_accuracy", lambda _, x, y, attack: len(x) + len(y)
    )
    attack = DualAveraging(WassersteinBall(0.3))
    for radii, names in (((0.1, 0.2), ("0.1", "0.2")), ((), ("0.3",))):  # its own without any
        measured = Validation(attack=attack, eps=radii, images=5)
        config = small_config(epochs=1, adversary=None, evaluation=measured)
        record = train(config, small_data(16), small_data(20), model=small_model()).history[-1]
        assert all(record[f"robust_accuracy_{name}"] == 10 for name in names)


class Clock:
    """A clock that moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(
            "wball.training.loop.time", SimpleNamespace(perf_counter=lambda: self.now)
        )

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class Slow(nn.Module):
    """A second for each step, a minute for the first."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.inner, self.clock, self.steps = (
            nn.Sequential(nn.Flatten(), nn.Linear(196, 10)),
            clock,
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.clock.pass_by(1.0 if self.steps else 60.0)
            self.steps += 1
        logits: Tensor = self.inner(x)
        return logits


def test_neither_the_first_step_nor_measuring_is_on_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("wball.training.loop.measure", lambda *_: clock.pass_by(500.0) or {})  # type: ignore[func-returns-value]
    config = small_config(epochs=3, adversary=None, evaluation=Validation())
    history = train(config, small_data(64), small_data(4), model=Slow(clock)).history
    assert [record["seconds"] for record in history] == [3.0, 7.0, 11.0]
    data = small_data(64), small_data(4)
    with pytest.warns(UserWarning, match="time_limit ended training at step 8 of 12"):
        history = train(config, *data, model=Slow(clock), time_limit=6.0).history
    # six seconds after the first step, and one more at the end of the schedule
    assert [record["step"] for record in history] == [4, 8]


@pytest.mark.parametrize(
    ("every", "expected"), [(None, [1, 101, 201, 240]), (100, [100, 200, 240])]
)
def test_checkpoints_take_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None, expected: list[int]
) -> None:
    clock, saved = Clock(monkeypatch), []

    def save(path: Path, tensors: object, header: dict[str, Any]) -> None:
        clock.pass_by(2.0)  # so the next one is due in 100 seconds
        saved.append(header["step"])

    monkeypatch.setattr("wball.training.loop.write_tensors", save)
    config = small_config(epochs=1, batch_size=1, adversary=None, augment=0)
    train(config, small_data(240), model=Slow(clock), out=tmp_path, checkpoint_every=every)
    assert saved == expected
