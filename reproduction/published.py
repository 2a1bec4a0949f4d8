"""What the paper reports: Wong, Schmidt, Kolter, "Wasserstein Adversarial Examples via Projected
Sinkhorn Iterations".

Numbers are those printed in its tables, captions and text (its curves were not read off the
figures). Shares, not percentages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper: what it calls it, the name it has here, and its clean accuracy (Table
    1)."""

    label: str
    name: str
    accuracy: float


MNIST = (
    PaperModel("standard", "mnist-standard", 0.9890),
    PaperModel("binarized", "mnist-binarized", 0.9873),
    PaperModel("l-inf robust", "mnist-linf-provable", 0.9820),
    PaperModel("adv. training", "mnist-adversarial-paper", 0.9695),
)
CIFAR10 = (
    PaperModel("standard", "cifar10-standard", 0.9470),
    PaperModel("l-inf robust", "cifar10-linf-provable", 0.6633),
    PaperModel("adv. training", "cifar10-adversarial-paper", 0.8069),
)


@dataclass(frozen=True)
class Claim:
    """A published number: the accuracy of a model under its authors' attack at a radius."""

    text: str
    model: str
    eps: float
    accuracy: float


AUTHORS = (
    Claim("standard", "wong2019-mnist-standard", 1.0, 0.04),
    Claim("binarized", "wong2019-mnist-binarized", 1.0, 0.14),
    Claim("l-inf robust", "wong2019-mnist-linf", 1.0, 0.48),
    Claim("adv. training", "wong2019-mnist-adversarial", 1.0, 0.86),
)
"""What the authors say about the weights that are published with their code."""

WINDOWS = {("standard", 3): (1.83, 0.028), ("l-inf robust", 3): (1.83, 0.41)}
"""Accuracy that is left at a radius with 3 x 3 plans; larger windows reach 0 (appendix, transport
plan sizes)."""

DIGIT_RADII = {
    "mnist-standard": 0.53,
    "mnist-binarized": 0.44,
    "mnist-linf-provable": 0.78,
    "mnist-adversarial-paper": 0.86,
}
"""Radii at which the digit 5 of the four-model comparison is broken."""

GALLERY_SCALE = 0.165
"""Largest total change of a pixel over the three channels in the CIFAR-10 gallery."""

LAMBDAS, POWERS = (1.0, 10.0, 100.0, 500.0, 1000.0), (1.0, 2.0, 3.0, 4.0, 5.0)

SECONDS_PER_ITERATION, ITERATIONS, OPERATIONS = 0.02, (30, 40), 8
"""Projected Sinkhorn: on 100 CIFAR-10 images with 5 x 5 plans on a Titan X; operations of an
iteration."""

CIFAR10_CURVES = {
    "cifar10-standard": {0.01: 0.75, 0.1: 0.03},
    "cifar10-linf-provable": {0.1: 0.61},
    "cifar10-adversarial-paper": {0.1: 0.76},
}
"""Accuracies under the paper's attack that its text names (Figure 5)."""

MNIST_CURVES = {"mnist-standard": {0.5: 0.50, 1.0: 0.06}}
"""The same for Figure 4."""
