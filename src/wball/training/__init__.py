"""Training: standard, adversarial with any attack of the library, certified, or with a loss of your
own."""

from wball.training.config import Adversary, Loss, Optimisation, Smooth, TrainConfig, Validation
from wball.training.loop import TrainResult, train
from wball.training.losses import accuracy, robust_accuracy
from wball.training.presets import preset, presets

__all__ = [
    "Adversary",
    "Validation",
    "Loss",
    "Optimisation",
    "Smooth",
    "TrainConfig",
    "TrainResult",
    "accuracy",
    "preset",
    "presets",
    "robust_accuracy",
    "train",
]
