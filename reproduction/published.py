"""What the paper reports: Wong, Schmidt, Kolter, "Wasserstein Adversarial Examples via Projected Sinkhorn Iterations".

Numbers are those printed in its tables, captions and text (its curves were not read off the figures). Shares, not
percentages.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper: what it calls it, the name it has here, and its clean accuracy (Table 1)."""

    label: str
    name: str
    accuracy: float | None


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
OURS = {
    "mnist": PaperModel("adv. training, ours", "mnist-adversarial", None),
    "cifar10": PaperModel("adv. training, ours", "cifar10-adversarial", None),
}


@dataclass(frozen=True)
class Claim:
    """A published number: the accuracy of a model under its authors' attack at a radius, and where it is printed."""

    text: str
    dataset: str
    model: str
    eps: float
    accuracy: float
    place: str = "text of the paper"


_README = "[README of the code](https://github.com/locuslab/projected_sinkhorn), the paper's attack"
AUTHORS = (
    Claim("standard", "mnist", "wong2019-mnist-standard", 1.0, 0.04, _README),
    Claim("binarized", "mnist", "wong2019-mnist-binarized", 1.0, 0.14, _README),
    Claim("l-inf robust", "mnist", "wong2019-mnist-linf", 1.0, 0.48, _README),
    Claim("adv. training", "mnist", "wong2019-mnist-adversarial", 1.0, 0.86, _README),
)
"""What the authors say about the weights that are published with their code."""
_RADII = "[radii published by Hu et al. 2020](https://github.com/edwardjhu/improved_wasserstein/tree/master/epsilons)"
OTHERS = tuple(
    Claim("adv. training", "mnist", "wong2019-mnist-adversarial", eps, accuracy, _RADII)
    for eps, accuracy in ((0.1, 0.497), (0.25, 0.085), (0.5, 0.021))
)
"""What others' attacks leave of public weights: the file has the radius of each of the 10,000 test digits."""

WINDOWS = {("standard", 3): (1.83, 0.028), ("l-inf robust", 3): (1.83, 0.41)}
"""Accuracy that is left at a radius with 3 x 3 plans; larger windows reach 0 (appendix, transport plan sizes)."""

DIGIT_RADII = {
    "mnist-standard": 0.53,
    "mnist-binarized": 0.44,
    "mnist-linf-provable": 0.78,
    "mnist-adversarial-paper": 0.86,
}
"""Radii at which the digit 5 of the four-model comparison fell."""

GALLERY_SCALE = 0.165
"""Largest total change of a pixel over the three channels in the CIFAR-10 gallery."""

LAMBDAS, POWERS = (1.0, 10.0, 100.0, 500.0, 1000.0), (1.0, 2.0, 3.0, 4.0, 5.0)
