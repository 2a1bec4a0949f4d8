"""Training: standard, adversarial with any attack of the library, and provable in the l-inf ball."""

from wball.training.config import Adversary, Evaluation, Loss, Optimisation, Provable, Smooth, TrainConfig, describe
from wball.training.loop import TrainResult, train
from wball.training.measure import accuracy, robust_accuracy, verified_accuracy
from wball.training.presets import preset, presets

__all__ = [
    "Adversary",
    "Evaluation",
    "Loss",
    "Optimisation",
    "Provable",
    "Smooth",
    "TrainConfig",
    "TrainResult",
    "accuracy",
    "describe",
    "preset",
    "presets",
    "robust_accuracy",
    "train",
    "verified_accuracy",
]
