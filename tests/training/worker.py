"""A small adversarial run, which the tests also start, kill and restart as a process of its own."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from wball import DualAveraging, WassersteinBall, load_sample
from wball.kernels import dispatch
from wball.training import (
    Adversary,
    Optimisation,
    Smooth,
    TrainConfig,
    Validation,
    train,
)
from wball.training.state import launched

# What torch and the kernels import late, so that forked processes find it done: seconds each.
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
dispatch.why_not("entropic_plan", "cpu")


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(196, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


def small_data(count: int = 96) -> tuple[Tensor, Tensor]:
    """14 x 14 digits."""
    x, y = load_sample("mnist")
    return nn.functional.avg_pool2d(x[:count], 2), y[:count]


def small_config(**changes: object) -> TrainConfig:
    attack = DualAveraging(WassersteinBall(0.3), steps=2, until_success=False, sweeps=1)
    config = TrainConfig(
        "small",
        "mnist",
        "mnist-cnn",
        epochs=3,
        batch_size=16,
        augment=1,
        optimisation=Optimisation(lr=0.05, schedule="one-cycle", ema=0.9),
        adversary=Adversary(attack, radius="per-image", ramp=0.5),
        evaluation=Validation(every=2),
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def run(out: str, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    with launched("cpu"):
        data = small_data()
        train(small_config(), data, data, model=small_model(), out=out, checkpoint_every=1)


class WithIdlePart(nn.Module):
    """Some parameters have no part in the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle = small_model(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        return logits


def kinds() -> dict[str, tuple[TrainConfig, nn.Module]]:
    """One short run of each kind."""
    plain = small_config(epochs=1, adversary=None)
    return {
        "idle": (plain, WithIdlePart()),
        "noise": (dataclasses.replace(plain, noise=0.05), small_model()),
        "smooth": (
            dataclasses.replace(
                plain, epochs=3, noise=0.01, smooth=Smooth(WassersteinBall(0.1), ramp=0.0)
            ),
            small_model(),
        ),
    }


def run_kinds(out: str, environment: dict[str, str]) -> None:
    """Each kind in a folder of its own, measured on a single image: less than one for each
    process."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    with launched("cpu"):
        for kind, (config, model) in kinds().items():
            train(config, small_data(), small_data(1), model=model, out=Path(out, kind))


def run_until_stopped(out: str, environment: dict[str, str]) -> None:
    """A run without end, which leaves a file if it stops in good order."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    with launched("cpu"):
        try:
            train(small_config(epochs=100_000), small_data(), model=small_model(), out=out)
        except KeyboardInterrupt:
            Path(out, f"stopped-{environment['RANK']}").touch()
