"""Training settings that only the reproduction uses, beside the presets of
:mod:`wball.training`."""

from __future__ import annotations

import dataclasses
from typing import Any

from reproduction.provable import Provable
from wball.attacks import PGD, DualAveraging, FrankWolfe, GrowingRadius
from wball.ball import WassersteinBall
from wball.training import (
    Adversary,
    Loss,
    Optimisation,
    TrainConfig,
    Validation,
)
from wball.training import presets as packaged_presets
from wball.training.presets import preset as packaged_preset

MNIST_LINF_PROVABLE = TrainConfig(
    "mnist-linf-provable",
    "mnist",
    "mnist-cnn",
    epochs=40,
    optimisation=Optimisation("adamw", lr=2e-3, weight_decay=0.0, schedule="one-cycle", clip=1.0),
    evaluation=Validation(every=5),
    summary="The paper's MNIST network, provably robust to l-inf perturbations of 0.1 (CROWN-IBP).",
)

CIFAR10_LINF_PROVABLE = TrainConfig(
    "cifar10-linf-provable",
    "cifar10",
    "cifar10-resnet-small",
    epochs=60,
    batch_size=256,
    augment=4,
    flip=True,
    optimisation=Optimisation(
        "adamw", lr=1e-3, weight_decay=1e-4, schedule="one-cycle", clip=8.0, ema=0.998
    ),
    evaluation=Validation(every=10),
    summary="A small residual network, provably robust to l-inf perturbations of 2/255 (CROWN-IBP).",
)

CIFAR10_ADVERSARIAL_PAPER = TrainConfig(
    "cifar10-adversarial-paper",
    "cifar10",
    "cifar10-resnet18",
    epochs=15,
    augment=4,
    flip=True,
    optimisation=Optimisation(bf16=True, channels_last=True),
    adversary=Adversary(
        PGD.paper("cifar10", steps=50, growth=GrowingRadius(1.5, 5), max_iter=50).at(0.01)
    ),
    evaluation=Validation(
        every=5,
        attack=DualAveraging(WassersteinBall(0.005), steps=30, objective="margin"),
        eps=(0.005, 0.01, 0.05, 0.1),
        images=500,
    ),
    summary="ResNet-18 and the paper's adversarial training: projected Sinkhorn PGD, radius from 0.01 up to 0.38.",
)

CIFAR10_STANDARD_PLAIN = dataclasses.replace(
    packaged_preset("cifar10-standard"),
    name="cifar10-standard-plain",
    cutout=0,
    loss=Loss(),
    optimisation=dataclasses.replace(packaged_preset("cifar10-standard").optimisation, ema=0.0),
    summary="ResNet-18 with standard training, without label smoothing, cutout and averaged weights.",
)

# As in the scripts of the two papers, but every adversarial image is in the ball, box included.
CIFAR10_ADVERSARIAL_WU = TrainConfig(
    "cifar10-adversarial-wu",
    "cifar10",
    "cifar10-resnet18",
    epochs=50,
    optimisation=Optimisation(lr=0.01, nesterov=True, schedule="constant", channels_last=True),
    adversary=Adversary(FrankWolfe(WassersteinBall(0.005), steps=30, until_success=False)),
    evaluation=CIFAR10_ADVERSARIAL_PAPER.evaluation,
    summary="ResNet-18 and the adversarial training of Wu, Wang and Yu 2020: Frank-Wolfe at eps 0.005.",
)

CIFAR10_ADVERSARIAL_HU = TrainConfig(
    "cifar10-adversarial-hu",
    "cifar10",
    "cifar10-resnet18",
    epochs=200,
    batch_size=512,
    augment=4,
    flip=True,
    optimisation=Optimisation(schedule="constant", channels_last=True),
    adversary=Adversary(
        PGD(
            WassersteinBall(0.1),
            steps=10,
            step_size=0.1,
            reg=3000.0,
            growth=GrowingRadius(1.5, 1),
            max_iter=10,
        )
    ),
    evaluation=CIFAR10_ADVERSARIAL_PAPER.evaluation,
    summary="ResNet-18 and the adversarial training of Hu et al. 2020: projected Sinkhorn with the box.",
)

_PRESETS = {
    config.name: config
    for config in (
        MNIST_LINF_PROVABLE,
        CIFAR10_LINF_PROVABLE,
        CIFAR10_ADVERSARIAL_PAPER,
        CIFAR10_STANDARD_PLAIN,
        CIFAR10_ADVERSARIAL_WU,
        CIFAR10_ADVERSARIAL_HU,
    )
}


LOSSES = {
    "mnist-linf-provable": Provable(0.1, kappa=0.5, ramp=(0.05, 0.6)),
    "cifar10-linf-provable": Provable(
        2 / 255, kappa=0.7, ramp=(0.1, 0.6), crown=1.0, crown_end=1.0
    ),
}
"""The losses of presets that have one of their own."""


def presets() -> list[str]:
    """The names of all presets, the package's and these."""
    return [*packaged_presets(), *_PRESETS]


def preset(name: str, **changes: Any) -> TrainConfig:
    """The preset of that name; ``changes`` replace its top-level settings."""
    if name in _PRESETS:
        return dataclasses.replace(_PRESETS[name], **changes)
    return packaged_preset(name, **changes)
