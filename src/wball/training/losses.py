"""What a training step minimises (the network in the precision of its training, its adversary, the
labels of a teacher, and the loss as one module, so that data parallelism wraps it), and what is
measured: accuracy on a test set, counted by all processes together."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball import inputs
from wball.attacks import Attack, StandardAttack
from wball.attacks.attack import check_attack
from wball.model import Model, as_found, ask, check_classes, full_precision, top_class
from wball.training.bounds import linear_gain
from wball.training.config import Adversary, Optimisation, RadiusSchedule, Smooth, TrainConfig
from wball.training.state import World, current, generator

Loss = Callable[[nn.Module, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""A loss of one's own: network, clean images, training images, labels and the completed share of
the run to the mean loss and the logits by which accuracy is counted."""

CHUNK = 1000


class AsTrained(nn.Module):
    """``model`` in the precision and memory layout of training, with logits in at least float32."""

    def __init__(self, model: nn.Module, options: Optimisation) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, x: Tensor) -> Tensor:
        if self.options.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.options.bf16):
            logits = self.model(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Opponent:
    """Generates adversarial training images, each in a ball of the given radius."""

    def __init__(
        self, settings: Adversary, options: Optimisation, model: nn.Module, seed: int
    ) -> None:
        self.seed = seed
        # Checks of the model and progress bars would repeat at every step.
        self.attack = replace(settings.attack, progress=False)
        if isinstance(self.attack, StandardAttack):
            self.attack = replace(self.attack, check=False)
        self.victim = AsTrained(model, options)

    def __call__(
        self, x: Tensor, y: Tensor, eps: float | Tensor, step: int, world: World
    ) -> tuple[Tensor, Tensor]:
        """Adversarial images of this process's shard ``x, y``, and which of them succeed."""
        draws = generator(self.seed, f"attack-{world.rank}", step, x.device)
        result = self.attack.at(eps)(self.victim, x, y, generator=draws, confirm=False)
        return result.images, result.success


class Radii:
    """The radii of training images: one for all, or one per image that adapts to its robustness.

    Attributes:
        values: float64, one per training image; empty unless the rule is ``"per-image"``.
    """

    def __init__(self, settings: Adversary | Smooth, count: int, device: torch.device) -> None:
        self.settings: RadiusSchedule = settings
        self.largest = settings.eps
        first = min(max(settings.low, settings.start), settings.eps)
        shape = (count if settings.radius == "per-image" else 0,)
        self.values = torch.full(shape, first, dtype=torch.float64, device=device)

    def batch(self, index: Tensor, progress: float, world: World) -> float | Tensor:
        """The radii of this process's shard of the training images ``index``."""
        scale = self.settings.scale(progress)
        if self.settings.radius == "fixed":
            return scale * self.largest
        return scale * world.shard(self.values[index])

    def follow(self, index: Tensor, broken: Tensor, world: World) -> None:
        """Increase the radii of the training images ``index``, or decrease those of broken ones."""
        if self.settings.radius == "fixed":
            return
        shrinks = world.gather(broken.to(self.values.dtype))
        step = self.settings.grow * (1 - shrinks) - self.settings.shrink * shrinks
        self.values[index] = (self.values[index] + step).clamp(self.settings.low, self.largest)


class Teacher:
    r"""Soft labels from a teacher model (distillation).

    Hard labels make a small network overconfident and a large one memorise ambiguous images. With a
    teacher ``T`` and its share ``s`` the loss compares logits with

    .. math:: (1 - s)\, 1_y + s\, \mathrm{softmax}(T(x)),

    where ``x`` is the augmented, clean image.
    It is not a module, so that its weights are not trained or averaged.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, x: Tensor, y: Tensor) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"teacher must be a torch.nn.Module, got {model!r}")
        options = config.optimisation
        layout = torch.channels_last if options.channels_last else torch.preserve_format
        own = copy.deepcopy(model).to(x.device, memory_format=layout)  # type: ignore[call-overload]
        self.share = config.loss.teacher
        self.model = AsTrained(own, options).eval().requires_grad_(False)
        try:
            check_classes("data", y, ask(self.model, x[:2]))
        except RuntimeError as error:
            raise ValueError(
                f"the teacher cannot take images of shape {tuple(x.shape[1:])}: {error}"
            ) from error

    @torch.no_grad()
    def targets(self, x: Tensor, y: Tensor) -> Tensor:
        """Labels mixed with the teacher's probabilities, ``(B, classes)``."""
        soft = self.model(x).softmax(1)
        return torch.lerp(F.one_hot(y, soft.shape[1]).to(soft.dtype), soft, self.share)


class Objective(nn.Module):
    """``(clean images, training images, labels, progress, radii, targets)`` to a loss.

    The training images are adversarial, noisy, or the clean ones again. Targets are probabilities
    if a teacher has a share in them (:class:`Teacher`), else the labels. Returns the
    mean loss, the number of images predicted as their label, and which images survived: those that
    are robust to first order at their radius for :class:`~wball.training.Smooth`, else those that
    are predicted as their label. ``own`` replaces the cross-entropy.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, own: Loss | None = None) -> None:
        super().__init__()
        if own is not None and (config.smooth or config.loss.teacher):
            raise ValueError("loss replaces the losses of smooth and of a teacher: drop them")
        self.config, self._logits, self._own = config, AsTrained(model, config.optimisation), own

    def forward(
        self,
        x: Tensor,
        z: Tensor,
        y: Tensor,
        progress: float,
        eps: float | Tensor = 0.0,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        targets = y if targets is None else targets
        if self._own is not None:
            loss, logits = self._own(self._logits, x, z, y, progress)
            right = logits.argmax(1) == y
        elif self.config.smooth is not None and (isinstance(eps, Tensor) or eps > 0):
            return self._smooth(x, z, y, targets, eps)
        else:
            logits = self._logits(z)
            loss, right = self._cross_entropy(logits, targets), logits.argmax(1) == y
        return loss, right.sum(), right

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=self.config.loss.label_smoothing)

    def _smooth(
        self, x: Tensor, z: Tensor, y: Tensor, targets: Tensor, eps: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = z.detach().requires_grad_(True)
        logits = self._logits(z)
        (gradient,) = torch.autograd.grad(_excess(logits, y).sum(), z, create_graph=True)
        assert self.config.smooth is not None
        ball = self.config.smooth.ball.at(eps)
        own = F.one_hot(y, logits.shape[1]).to(logits.dtype)
        raised = logits + linear_gain(gradient, x, ball)[:, None] * (1 - own)
        loss = self._cross_entropy(raised, targets)
        return loss, (logits.argmax(1) == y).sum(), _excess(raised, y).detach() < 0


def _excess(logits: Tensor, y: Tensor) -> Tensor:
    """``f_r - f_y`` for the most likely wrong class ``r``."""
    rival = logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1)
    return (logits.gather(1, rival[:, None]) - logits.gather(1, y[:, None])).squeeze(1)


def accuracy(model: Model, x: Tensor, y: Tensor) -> float:
    """Share of the images that the model (in evaluation mode) classifies correctly."""
    return _counted(lambda a, b: _right(model, a, b), model, x, y)


def robust_accuracy(model: Model, x: Tensor, y: Tensor, attack: Attack) -> float:
    """Share of the images that the model classifies correctly and ``attack`` does not break."""
    check_attack(attack)
    return _counted(lambda a, b: ~attack(model, a, b).success & _right(model, a, b), model, x, y)


@torch.no_grad()
def _right(model: Model, x: Tensor, y: Tensor) -> Tensor:
    with full_precision():
        return top_class(ask(model, x)) == y


def _counted(
    right: Callable[[Tensor, Tensor], Tensor],
    model: Model,
    x: Tensor,
    y: Tensor,
) -> float:
    """Share of the images that are ``right``, over all processes."""
    world = current()
    x = inputs.as_pixels(x)
    inputs.check_layout("x", x)
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"x has {len(x)} images and y has {len(y)} labels; give one label per image, and some images"
        )
    mine, labels = world.strided(x), world.strided(y)
    count = torch.zeros(2, dtype=torch.float64, device=x.device)
    with as_found(model, x.device):
        for a, b in zip(mine.split(CHUNK), labels.split(CHUNK), strict=True):
            count += torch.stack([right(a, b).sum().double(), count.new_tensor(len(b))])
    count = world.sum(count)
    return float(count[0] / count[1].clamp(min=1))


def measure(config: TrainConfig, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """The metrics that :class:`~wball.training.Validation` requests."""
    out = {"clean_accuracy": accuracy(model, x, y)}
    settings = config.evaluation
    if settings.attack is not None:
        some, labels = x[: settings.images], y[: settings.images]
        for eps in settings.eps or (float(settings.attack.ball.eps),):
            out[f"robust_accuracy_{eps:g}"] = robust_accuracy(
                model, some, labels, settings.attack.at(eps)
            )
    return out
