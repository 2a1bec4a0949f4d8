"""Settings of a training run. All are frozen."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from wball.attacks import Attack
from wball.attacks.attack import check_attack
from wball.ball import Ball, WassersteinBall
from wball.cost import DenseCost
from wball.data import dataset_info
from wball.inputs import check_choice, check_count, check_eps, check_positive, check_seed
from wball.zoo.architectures import architectures


def _check_share(settings: Any, *names: str) -> None:
    """Raise unless these settings are in [0, 1]."""
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {getattr(settings, name)}")


@dataclass(frozen=True)
class Optimisation:
    """Optimizer, learning rate and precision.

    Attributes:
        method: ``"sgd"`` (momentum 0.9) or ``"adamw"``.
        lr: learning rate; the peak for ``"one-cycle"``.
        nesterov: Nesterov momentum, for SGD.
        weight_decay: on all parameters.
        schedule: ``"step"`` divides the rate by 10 after ``drop_epochs``; ``"one-cycle"`` rises
            linearly over the first ``warmup`` share of the run and falls linearly to 0.
        clip: largest gradient norm, or ``None``.
        ema: decay per step of the averaged weights that are evaluated and saved; 0 keeps the last
            weights.
        bf16: run the network in bfloat16 where autocast allows it.
        channels_last: memory layout of images and kernels.
    """

    method: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: Literal["constant", "step", "one-cycle"] = "step"
    drop_epochs: int = 10
    warmup: float = 0.2
    clip: float | None = None
    ema: float = 0.0
    bf16: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_choice("method", self.method, ("sgd", "adamw"))
        check_choice("schedule", self.schedule, ("constant", "step", "one-cycle"))
        if not 0 <= self.ema < 1:
            raise ValueError(
                f"ema must be in [0, 1), got {self.ema}; 0.999 averages about the last 1,000 steps"
            )
        if not 0 < self.warmup < 1:
            raise ValueError(f"warmup must be a share of the run in (0, 1), got {self.warmup}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be >= 0 and finite, got {self.weight_decay}")
        check_count("drop_epochs", self.drop_epochs, least=0)
        if self.clip is not None:
            check_positive("clip", self.clip)

    def lr_at(self, progress: float, epochs: int) -> float:
        """The learning rate at a share ``progress`` of the run.

        >>> Optimisation().lr_at(0.5, epochs=15), Optimisation().lr_at(0.7, epochs=15)
        (0.1, 0.01)
        """
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "step":
            return self.lr if progress * epochs < self.drop_epochs else self.lr / 10
        rise = min(1.0, progress / self.warmup)
        fall = min(1.0, (1 - progress) / (1 - self.warmup))
        return self.lr * max(min(rise, fall), 1e-4)


@dataclass(frozen=True)
class Loss:
    """Labels of the cross-entropy on adversarial images, or on clean images without an adversary.

    Attributes:
        label_smoothing: share of the uniform distribution in the labels.
        teacher: share of a teacher's probabilities in the labels
            (:class:`~wball.training.losses.Teacher`); the teacher is passed to
            :func:`~wball.training.train`.
    """

    label_smoothing: float = 0.0
    teacher: float = 0.0

    def __post_init__(self) -> None:
        _check_share(self, "label_smoothing", "teacher")


@dataclass(frozen=True, kw_only=True)
class RadiusSchedule:
    """The radius of each training image's ball, up to the ball's own ``eps``.

    Attributes:
        radius: ``"fixed"``, or ``"per-image"``: each training image has a radius of its own, which
            starts at ``start``, grows by ``grow`` when the image survives and shrinks by ``shrink``
            when it is broken, within ``[low, eps]``. It settles where the image is broken with
            probability ``grow / (grow + shrink)``.
        low: smallest radius.
        start, grow, shrink: see ``radius``.
        ramp: share of the run over which all radii grow from 0 to their value.
    """

    radius: Literal["fixed", "per-image"] = "fixed"
    low: float = 0.0
    start: float = 0.0
    grow: float = 0.02
    shrink: float = 0.02
    ramp: float = 0.0

    def check_radii(self, eps: float) -> None:
        """Raise unless these settings fit a ball of radius ``eps``."""
        check_choice("radius", self.radius, ("fixed", "per-image"))
        if not 0 <= self.low <= eps:
            raise ValueError(f"low must be in [0, eps] = [0, {eps:g}], got {self.low}")
        check_positive("grow", self.grow)
        check_positive("shrink", self.shrink)
        _check_share(self, "ramp")

    def scale(self, progress: float) -> float:
        """The factor of all radii at a share ``progress`` of the run.

        >>> Smooth(WassersteinBall(0.1), ramp=0.5).scale(0.25)
        0.5
        """
        return min(1.0, progress / self.ramp) if self.ramp > 0 else 1.0


@dataclass(frozen=True)
class Smooth(RadiusSchedule):
    r"""First-order robustness: moving mass along the gradient of the margin must not help the
    attacker.

    .. math::
        CE\big(f(z) + S\, 1_{k \ne y},\; y\big), \qquad
        S = \max_{w \in B(x, eps)} \langle \nabla_z (f_r - f_y)(z),\, w - x \rangle

    with ``r`` the most likely wrong class. For ``p = 1`` this penalises the gradient's differences
    between neighbouring pixels, the ball's dual norm. With noise (:attr:`TrainConfig.noise`) it
    makes networks that can be certified. With a radius per image (see :class:`RadiusSchedule`; an
    image survives if ``f_r + S < f_y``) images that are hard to protect do not cost the others
    their clean accuracy.

    Attributes:
        ball: the threat model; its ``eps`` is the (largest) radius.
    """

    ball: WassersteinBall
    ramp: float = field(default=0.3, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.ball, WassersteinBall) or isinstance(self.ball.cost, DenseCost):
            raise TypeError(
                f"ball must be a WassersteinBall with a cost by moves, got {self.ball!r}"
            )
        check_positive("the ball's eps", self.eps)
        self.check_radii(self.eps)

    @property
    def eps(self) -> float:
        return _single(self.ball)


@dataclass(frozen=True)
class Adversary(RadiusSchedule):
    """The attack that makes the training images, and the radii of their balls.

    Attributes:
        attack: any attack of the library. Its ball's ``eps`` is the (largest) radius.
            ``until_success=True`` stops at an image's first success, as in the paper; ``False``
            continues to the highest loss.
    """

    attack: Attack

    def __post_init__(self) -> None:
        check_attack(self.attack)
        self.check_radii(self.eps)

    @property
    def eps(self) -> float:
        return _single(self.attack.ball)


def _single(ball: Ball) -> float:
    """The radius of a ball that has one for all images."""
    if isinstance(ball.eps, Tensor):
        raise ValueError("the ball has one eps per image; training needs a single number")
    return ball.eps


@dataclass(frozen=True)
class Validation:
    """Measurements during training, on the test images and the weights that would be saved.

    Attributes:
        every: epochs between evaluations; the last epoch always has one.
        attack: an attack to measure robust accuracy with, or ``None``.
        eps: its radii; without them, that of its ball.
        images: number of test images to attack.
    """

    every: int = 1
    attack: Attack | None = None
    eps: tuple[float, ...] = ()
    images: int = 1000

    def __post_init__(self) -> None:
        check_count("every", self.every)
        check_count("images", self.images)
        if self.attack is not None:
            check_attack(self.attack)
        if not isinstance(self.eps, tuple):
            raise TypeError(f"eps must be a tuple of radii such as (0.1, 0.3), got {self.eps!r}")
        if self.eps and self.attack is None:
            raise ValueError(f"eps {self.eps} needs an attack, but attack is None")
        for eps in self.eps:
            check_eps(eps)


OWN = "own"
"""In place of the name of a data set or an architecture: the caller passes data, or a model."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
        name: name of the run and of the model's files.
        dataset: the data set that the command line loads; :func:`~wball.training.train` takes
            tensors. ``"own"`` for the caller's data.
        architecture: a name of :func:`wball.build_model`, or ``"own"`` for a model that is passed
            to :func:`~wball.training.train`.
        epochs: passes over the training images.
        batch_size: images per step, over all processes. An incomplete last batch is dropped.
        seed: random seed.
        augment: largest shift in pixels, 0 for none.
        flip: mirror half of the images.
        affine: amount of random rotation, scaling and shear (:class:`wball.data.RandomAffine`), 0
            for none.
        cutout: side of a random square that is set to 0; 0 for none.
        noise: scale of Laplace noise in the flow domain (:mod:`wball.certificates.smoothing`), 0
            for none. Not with an adversary.
        optimisation, loss, adversary, smooth, evaluation: see there.
        summary: a sentence for the card.
    """

    name: str
    dataset: str
    architecture: str
    epochs: int = 15
    batch_size: int = 128
    seed: int = 0
    augment: int = 0
    flip: bool = False
    affine: float = 0.0
    cutout: int = 0
    noise: float = 0.0
    optimisation: Optimisation = field(default_factory=Optimisation)
    loss: Loss = field(default_factory=Loss)
    adversary: Adversary | None = None
    smooth: Smooth | None = None
    evaluation: Validation = field(default_factory=Validation)
    summary: str = ""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and self.name not in ("", ".", "..", "checkpoint")
        if not named or any(c in self.name for c in "/\\\0"):
            raise ValueError(
                f'name must be a file name without folders, other than "checkpoint", got {self.name!r}'
            )
        for part, kind in _PARTS.items():
            value = getattr(self, part)
            optional = part in ("adversary", "smooth")
            if not isinstance(value, kind) and not (optional and value is None):
                raise TypeError(f"{part} must be a wball.training.{kind.__name__}, got {value!r}")
        if self.dataset != OWN:
            dataset_info(self.dataset)
        if self.architecture not in (OWN, *architectures()):
            raise ValueError(
                f"unknown architecture {self.architecture!r}; choose from "
                f'{", ".join(architectures())}, and "{OWN}" for a model that is passed to train'
            )
        check_count("epochs", self.epochs)
        check_count("batch_size", self.batch_size)
        check_seed(self.seed)
        check_count("augment", self.augment, least=0)
        check_count("cutout", self.cutout, least=0)
        for name in ("noise", "affine"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if self.adversary is not None and self.smooth is not None:
            raise ValueError("adversary and smooth exclude each other: give one of them")
        if self.noise > 0 and self.adversary is not None:
            raise ValueError(f"noise {self.noise} is not used with adversary: set it to 0")


_PARTS: dict[str, type] = {
    "optimisation": Optimisation,
    "loss": Loss,
    "adversary": Adversary,
    "smooth": Smooth,
    "evaluation": Validation,
}
