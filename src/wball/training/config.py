"""Settings of a training run. All are frozen, and :func:`describe` turns them into JSON for the model card."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from wball import inputs
from wball.attacks import Attack
from wball.data import dataset_info
from wball.models import architectures

Schedule = Literal["constant", "step", "one-cycle"]
LossKind = Literal["cross-entropy", "trades", "mart"]
RadiusRule = Literal["fixed", "uniform", "per-image"]


@dataclass(frozen=True)
class Optimisation:
    """How weights move.

    Attributes:
        method: ``"sgd"`` (momentum) or ``"adamw"``.
        lr: learning rate; the peak for ``"one-cycle"``.
        momentum, nesterov: of SGD.
        weight_decay: on all parameters.
        schedule: ``"step"`` divides the rate by 10 after ``drop_epochs``; ``"one-cycle"`` rises linearly over the
            first ``warmup`` share of the run and falls linearly to 0.
        clip: largest gradient norm, or ``None``.
        perturbation: relative size of adversarial weight perturbations (:mod:`wball.training.perturbation`), against
            robust overfitting; 0 for none. A step then takes two passes.
        ema: decay per step of the averaged weights that are evaluated and saved; 0 keeps the last weights.
        bf16: run the network in bfloat16 where autocast allows it.
        channels_last: memory layout of images and kernels.
        cuda_graph: replay the whole attack as one CUDA graph where that is possible (:mod:`wball.training.replay`).
        compile: run the network through ``torch.compile``. It takes about a minute to begin with.
    """

    method: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    schedule: Schedule = "step"
    drop_epochs: int = 10
    warmup: float = 0.2
    clip: float | None = None
    perturbation: float = 0.0
    ema: float = 0.0
    bf16: bool = False
    channels_last: bool = False
    cuda_graph: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        inputs.check_positive("lr", self.lr)
        if self.method not in ("sgd", "adamw"):
            raise ValueError(f'method must be "sgd" or "adamw", got {self.method!r}')
        if self.schedule not in ("constant", "step", "one-cycle"):
            raise ValueError(
                f'schedule must be "constant", "step" or "one-cycle", got {self.schedule!r}'
            )
        if not 0 <= self.ema < 1:
            raise ValueError(
                f"ema must be in [0, 1), got {self.ema}; 0.999 averages about the last 1,000 steps"
            )
        if not 0 <= self.perturbation < 1:
            raise ValueError(
                f"perturbation must be a share of the weights' norm in [0, 1), got {self.perturbation}"
            )
        if not 0 < self.warmup < 1:
            raise ValueError(f"warmup must be a share of the run in (0, 1), got {self.warmup}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be >= 0 and finite, got {self.weight_decay}")
        inputs.check_count("drop_epochs", self.drop_epochs, least=0)
        if self.clip is not None:
            inputs.check_positive("clip", self.clip)

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
    r"""What is minimised, given clean images ``x`` and what the adversary made of them, ``z``.

    ======================  =========================================================================
    ``"cross-entropy"``     :math:`(1 - c)\, CE(f(z), y) + c\, CE(f(x), y)`
    ``"trades"``            :math:`CE(f(x), y) + \beta\, KL(p(x) \| p(z))`
    ``"mart"``              :math:`BCE(p(z), y) + \beta\, KL(p(x) \| p(z))\, (1 - p_y(x))`
    ======================  =========================================================================

    with ``c = clean``. Without an adversary the first is the usual cross-entropy of ``x``; with :class:`Smooth` the
    raised logits stand for ``f(z)``, and the others for ``f(x)``.

    Attributes:
        kind, clean, beta: see above.
        label_smoothing: share of all classes alike in the labels.
        teacher: share of a teacher's probabilities in the labels (:mod:`wball.training.teacher`), not for
            ``"mart"``; the network itself, or several, is passed to :func:`~wball.training.train`.
    """

    kind: LossKind = "cross-entropy"
    clean: float = 0.0
    beta: float = 5.0
    label_smoothing: float = 0.0
    teacher: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("cross-entropy", "trades", "mart"):
            raise ValueError(f'kind must be "cross-entropy", "trades" or "mart", got {self.kind!r}')
        if not 0 <= self.clean <= 1:
            raise ValueError(f"clean must be a share in [0, 1], got {self.clean}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0 <= self.teacher <= 1:
            raise ValueError(f"teacher must be a share in [0, 1], got {self.teacher}")
        if self.teacher > 0 and self.kind == "mart":
            raise ValueError('the loss "mart" has hard labels: it goes without a teacher')
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta must be >= 0 and finite, got {self.beta}")


@dataclass(frozen=True, kw_only=True)
class Radii:
    """The radius of each training image's ball, up to the ball's own ``eps``.

    Attributes:
        radius: ``"fixed"``; ``"uniform"``, drawn per image and step from ``[low, eps]``; or ``"per-image"``: each
            training image has a radius of its own, which starts at ``start``, grows by ``grow`` each time the image
            survives and shrinks by ``shrink`` each time it is broken, within ``[low, eps]``. It settles where the image
            falls with probability ``grow / (grow + shrink)``.
        low: smallest radius.
        start, grow, shrink: see ``radius``.
        ramp: share of the run over which all radii grow from 0 to their value.
    """

    radius: RadiusRule = "fixed"
    low: float = 0.0
    start: float = 0.0
    grow: float = 0.02
    shrink: float = 0.02
    ramp: float = 0.0

    def check_radii(self, eps: float) -> None:
        """Raise unless these settings fit a ball of radius ``eps``."""
        if self.radius not in ("fixed", "uniform", "per-image"):
            raise ValueError(
                f'radius must be "fixed", "uniform" or "per-image", got {self.radius!r}'
            )
        if not 0 <= self.low <= eps:
            raise ValueError(f"low must be in [0, eps] = [0, {eps:g}], got {self.low}")
        inputs.check_positive("grow", self.grow)
        inputs.check_positive("shrink", self.shrink)
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp must be a share of the run in [0, 1], got {self.ramp}")

    def scale(self, progress: float) -> float:
        """What radii are multiplied with at a share ``progress`` of the run.

        >>> Smooth(0.1, ramp=0.5).scale(0.25)
        0.5
        """
        return min(1.0, progress / self.ramp) if self.ramp > 0 else 1.0


@dataclass(frozen=True)
class Smooth(Radii):
    r"""Robustness to first order: moving mass must not pay along the gradient of the margin.

    .. math::
        CE\big(f(z) + S\, 1_{k \ne y},\; y\big), \qquad
        S = \max_{w \in B(x, eps)} \langle \nabla_z (f_r - f_y)(z),\, w - x \rangle

    with ``r`` the most likely wrong class. For ``p = 1`` this penalises the gradient's differences between neighbouring
    pixels, the ball's dual norm; with noise (:attr:`TrainConfig.noise`) it makes networks that can be certified. With a
    radius per image (see :class:`Radii`; an image survives if ``f_r + S < f_y``) images that are hard to protect do not
    cost the others their clean accuracy.

    Attributes:
        eps: (largest) radius of the ball, in (fraction of mass) x (pixels).
        anchored: ``S`` also counts what units that may switch can add: an anchored bound
            (:mod:`wball.training.anchored`), for networks of one convolution and one hidden layer.
    """

    eps: float
    anchored: bool = field(default=False, kw_only=True)
    ramp: float = field(default=0.3, kw_only=True)

    def __post_init__(self) -> None:
        inputs.check_positive("eps", self.eps)
        self.check_radii(self.eps)


@dataclass(frozen=True)
class Adversary(Radii):
    """Who makes the training images, and in which ball (see :class:`Radii`).

    Attributes:
        attack: any attack of the library. Its ball's ``eps`` is the (largest) radius. ``until_success=True`` stops at
            an image's first success, as in the paper; ``False`` goes on to the highest loss.
    """

    attack: Attack

    def __post_init__(self) -> None:
        if not isinstance(self.attack, Attack):
            raise TypeError(
                f"attack must be an attack such as wball.DualAveraging(ball), got {self.attack!r}"
            )
        if isinstance(self.attack.ball.eps, Tensor):
            raise ValueError(
                "the attack's ball has one eps per image; training needs a single number"
            )
        self.check_radii(self.eps)

    @property
    def eps(self) -> float:
        return float(self.attack.ball.eps)


@dataclass(frozen=True)
class Provable:
    """Provable robustness in the l-inf ball: interval bounds mixed with CROWN (:mod:`wball.training.bounds`).

    The loss is ``kappa CE(f(x)) + (1 - kappa) CE(worst logits)``. During the ramp the radius grows from 0 to ``eps``,
    ``kappa`` falls from 1 to its value, and the bounds pass from CROWN to pure intervals.

    Attributes:
        eps: radius in pixel values.
        kappa: weight of the clean loss at the end.
        ramp: the shares of the run at which the ramp begins and ends.
        crown: share of CROWN in the bounds when the ramp begins (0: intervals only), and
        crown_end: when it ends.
    """

    eps: float
    kappa: float = 0.5
    ramp: tuple[float, float] = (0.05, 0.5)
    crown: float = 1.0
    crown_end: float = 0.0

    def __post_init__(self) -> None:
        inputs.check_positive("eps", self.eps)
        if (
            not isinstance(self.ramp, tuple)
            or len(self.ramp) != 2
            or not 0 <= self.ramp[0] < self.ramp[1] <= 1
        ):
            raise ValueError(
                f"ramp must be two rising shares of the run in [0, 1], got {self.ramp}"
            )
        for name in ("kappa", "crown", "crown_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def ramped(self, progress: float) -> float:
        """How far the ramp is, in [0, 1]."""
        begin, end = self.ramp
        return min(1.0, max(0.0, (progress - begin) / (end - begin)))


@dataclass(frozen=True)
class Validation:
    """What is measured while training, on the test images and the weights that would be saved.

    Attributes:
        every: epochs between evaluations; the last epoch always has one.
        attack: an attack to measure robust accuracy with, or ``None``.
        eps: its radii; without them, that of its ball.
        images: how many test images are attacked.
    """

    every: int = 1
    attack: Attack | None = None
    eps: tuple[float, ...] = ()
    images: int = 1000

    def __post_init__(self) -> None:
        inputs.check_count("every", self.every)
        inputs.check_count("images", self.images)
        if self.attack is not None and not isinstance(self.attack, Attack):
            raise TypeError(
                f"attack must be an attack such as wball.DualAveraging(ball) or None, got {self.attack!r}"
            )
        if not isinstance(self.eps, tuple):
            raise TypeError(f"eps must be a tuple of radii such as (0.1, 0.3), got {self.eps!r}")
        if self.eps and self.attack is None:
            raise ValueError(f"eps {self.eps} are the radii of an attack: give one, or no radii")
        for eps in self.eps:
            inputs.check_eps(eps)


OWN = "own"
"""In place of a data set's or an architecture's name: the caller passes data, or a model."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
        name: of the run and of the model it makes; files are called so.
        dataset: the data set that the command line and the ``reproduction`` package load; :func:`~wball.training.train`
            takes tensors. ``"own"`` for data that only the caller has.
        architecture: a name of :func:`wball.build_model`, or ``"own"`` for a model that is passed to
            :func:`~wball.training.train`.
        epochs: passes over the training images.
        batch_size: images per step, all processes together. What is left at the end of an epoch is dropped.
        seed: random seed.
        augment: largest shift in pixels, 0 for none.
        flip: mirror half of the images.
        affine: amount of random rotation, scaling and shear (:class:`wball.data.RandomAffine`), 0 for none.
        cutout: side of a random square that is blackened, 0 for none.
        noise: scale of Laplace noise in the flow domain (:mod:`wball.certificates.smoothing`), 0 for none. Not with an
            adversary or a provable loss.
        optimisation, loss, adversary, provable, smooth, evaluation: see there.
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
    provable: Provable | None = None
    smooth: Smooth | None = None
    evaluation: Validation = field(default_factory=Validation)
    summary: str = ""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and self.name not in ("", ".", "..", "checkpoint")
        if not named or any(c in self.name for c in "/\\\0"):
            raise ValueError(
                f'name must be a file name without folders, other than "checkpoint" (which is taken), got {self.name!r}'
            )
        for part, kind in _PARTS.items():
            value = getattr(self, part)
            if not isinstance(value, kind) and (
                value is not None or part in ("optimisation", "loss", "evaluation")
            ):
                raise TypeError(f"{part} must be a wball.training.{kind.__name__}, got {value!r}")
        if self.dataset != OWN:
            dataset_info(self.dataset)
        if self.architecture not in (OWN, *architectures()):
            raise ValueError(
                f"unknown architecture {self.architecture!r}; known are {', '.join(architectures())}, "
                f'and "{OWN}" for a model that is passed to train'
            )
        inputs.check_count("epochs", self.epochs)
        inputs.check_count("batch_size", self.batch_size)
        inputs.check_seed(self.seed)
        inputs.check_count("augment", self.augment, least=0)
        inputs.check_count("cutout", self.cutout, least=0)
        for name in ("noise", "affine"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        if self.adversary is not None and self.provable is not None:
            raise ValueError("give an adversary or a provable loss, not both")
        if self.noise > 0 and (self.adversary is not None or self.provable is not None):
            raise ValueError(
                f"noise {self.noise} goes without an adversary or a provable loss, which do not use it"
            )
        alone = (
            self.provable is None and self.adversary is None and self.loss.kind == "cross-entropy"
        )
        if self.smooth is not None and not alone:
            raise ValueError(
                'smooth goes with the loss "cross-entropy", without an adversary and a provable loss'
            )
        if self.loss.teacher > 0 and self.provable is not None:
            raise ValueError("the provable loss has hard labels: it goes without a teacher")
        if self.loss.kind != "cross-entropy" and self.adversary is None:
            raise ValueError(
                f'loss "{self.loss.kind}" compares clean and adversarial images: give an adversary'
            )


_PARTS: dict[str, type] = {
    "optimisation": Optimisation,
    "loss": Loss,
    "adversary": Adversary,
    "provable": Provable,
    "smooth": Smooth,
    "evaluation": Validation,
}


def describe(settings: Any) -> Any:
    """Settings as JSON values: dataclasses become dictionaries with their type's name."""
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        fields = {f.name: describe(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
        return {"type": type(settings).__name__, **fields}
    if isinstance(settings, (tuple, list)):
        return [describe(v) for v in settings]
    if isinstance(settings, float) and not math.isfinite(settings):
        return str(settings)
    if settings is None or isinstance(settings, (bool, int, float, str)):
        return settings
    # Without addresses, which change from run to run and say nothing.
    return getattr(settings, "__name__", None) or re.sub(r" at 0x[0-9a-fA-F]+", "", repr(settings))
