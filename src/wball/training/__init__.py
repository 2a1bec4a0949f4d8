"""Training: standard, adversarial with any attack of the library, and provable in the l-inf
ball."""

from wball.training.config import (
    Adversary,
    Loss,
    Optimisation,
    Provable,
    Smooth,
    TrainConfig,
    Validation,
)
from wball.training.loop import TrainResult, train
from wball.training.losses import accuracy, robust_accuracy, verified_accuracy
from wball.training.presets import preset, presets

__all__ = [
    "Adversary",
    "Validation",
    "Loss",
    "Optimisation",
    "Provable",
    "Smooth",
    "TrainConfig",
    "TrainResult",
    "accuracy",
    "preset",
    "presets",
    "robust_accuracy",
    "train",
    "verified_accuracy",
]
