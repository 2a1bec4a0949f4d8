"""Accuracy on a test set, counted by all processes together: clean, under attack, and proved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wball import inputs
from wball.attacks import Attack
from wball.attacks.base import check_attack
from wball.model import Model, as_found, ask, full_precision, top_class
from wball.training.bounds import verified
from wball.training.config import TrainConfig
from wball.training.distributed import World, current

CHUNK = 1000


def accuracy(model: Model, x: Tensor, y: Tensor, *, world: World | None = None) -> float:
    """The share of images that the model (in evaluation mode) gets right."""
    return _counted(lambda a, b: _right(model, a, b), model, x, y, world or current())


def robust_accuracy(
    model: Model, x: Tensor, y: Tensor, attack: Attack, *, world: World | None = None
) -> float:
    """The share of images that the model gets right and ``attack`` finds no adversarial example for."""
    check_attack(attack)
    return _counted(
        lambda a, b: ~attack(model, a, b).success & _right(model, a, b),
        model,
        x,
        y,
        world or current(),
    )


def verified_accuracy(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, *, world: World | None = None
) -> float:
    """The share of images proved right over the l-inf ball of radius ``eps`` (:mod:`wball.training.bounds`)."""
    inputs.check_eps(eps)
    return _counted(
        lambda a, b: verified(model, a, b, eps), model, x, y, world or current(), chunk=200
    )


@torch.no_grad()
def _right(model: Model, x: Tensor, y: Tensor) -> Tensor:
    with full_precision():
        return top_class(ask(model, x)) == y


def _counted(
    right: Callable[[Tensor, Tensor], Tensor],
    model: Model,
    x: Tensor,
    y: Tensor,
    world: World,
    chunk: int = CHUNK,
) -> float:
    inputs.check_layout("x", x)
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"x has {len(x)} images and y has {len(y)} labels; give one label per image, and some images"
        )
    mine, labels = world.strided(x), world.strided(y)
    count = torch.zeros(2, dtype=torch.float64, device=x.device)
    with as_found(model, x.device):
        for a, b in zip(mine.split(chunk), labels.split(chunk), strict=True):
            count += torch.stack([right(a, b).sum().double(), count.new_tensor(len(b))])
    count = world.sum(count)
    return float(count[0] / count[1].clamp(min=1))


def measure(
    config: TrainConfig, model: nn.Module, x: Tensor, y: Tensor, world: World
) -> dict[str, float]:
    """What :class:`~wball.training.Validation` asks for."""
    out = {"clean_accuracy": accuracy(model, x, y, world=world)}
    settings = config.evaluation
    if settings.attack is not None:
        some, labels = x[: settings.images], y[: settings.images]
        for eps in settings.eps or (float(settings.attack.ball.eps),):
            out[f"robust_accuracy_{eps:g}"] = robust_accuracy(
                model, some, labels, settings.attack.at(eps), world=world
            )
    if config.provable is not None:
        out["verified_accuracy"] = verified_accuracy(model, x, y, config.provable.eps, world=world)
    return out
