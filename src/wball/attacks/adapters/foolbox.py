"""foolbox: any attack of this library for foolbox models and criteria.

    from wball.attacks.adapters.foolbox import FoolboxAttack
    attack = FoolboxAttack(wball.DualAveraging(wball.WassersteinBall(0.1)))
    raw, clipped, success = attack(fmodel, images, labels, epsilons=[0.05, 0.1, 0.2])

``epsilons`` are radii of the attack's ball, in its unit; ``None`` keeps the ball's own. foolbox
clips to an l-p norm what its attacks return; here nothing needs clipping, so ``clipped`` is
``raw``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import eagerpy as ep
import torch
from foolbox.attacks.base import Attack as FoolboxBase
from foolbox.attacks.base import get_criterion
from foolbox.criteria import Misclassification, TargetedMisclassification
from foolbox.models import Model
from torch import Tensor

from wball.attacks.attack import Attack, AttackResult, attack_labels, check_attack, updated
from wball.inputs import check_count


class FoolboxAttack(FoolboxBase):
    """An attack of this library with foolbox's call.

    Attributes:
        results: what the last call found, one result per radius.
    """

    def __init__(self, attack: Attack, seed: int = 0, times: int = 1) -> None:
        check_attack(attack)
        self.attack, self.seed, self.times = attack, seed, check_count("times", times)
        self.results: list[AttackResult] = []

    def repeat(self, times: int) -> FoolboxAttack:
        """The attack run ``times`` times with different seeds: the first success of each image."""
        return FoolboxAttack(self.attack, self.seed, self.times * check_count("times", times))

    def __call__(
        self,
        model: Model,
        inputs: Any,
        criterion: Any,
        *,
        epsilons: Iterable[float | None] | float | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        images, restore = ep.astensor_(inputs)
        if not isinstance(images.raw, Tensor):
            raise TypeError(f"inputs must be PyTorch tensors, got {type(images.raw).__name__}")
        bounds = tuple(model.bounds)
        if self.attack.ball.box is not None and bounds != self.attack.ball.box:
            raise ValueError(
                f"the model's bounds are {bounds} and the ball's box is {self.attack.ball.box}; make them equal"
            )
        goal = get_criterion(criterion)
        if not isinstance(goal, (Misclassification, TargetedMisclassification)):
            raise ValueError(
                "criterion must be Misclassification or TargetedMisclassification, got "
                f"{type(goal).__name__}"
            )
        targeted = isinstance(goal, TargetedMisclassification)
        labels = (goal.target_classes if targeted else goal.labels).raw.long()
        radii = list(epsilons) if isinstance(epsilons, Iterable) else [epsilons]
        attacks = [self.attack if eps is None else self.attack.at(float(eps)) for eps in radii]
        every = torch.arange(len(labels), device=labels.device)
        self.results = []
        for attack in attacks:
            seeds = range(self.seed, self.seed + self.times)
            found, *others = (
                attack_labels(attack, model, images.raw, labels, targeted, seed) for seed in seeds
            )
            for other in others:
                found = updated(found, every, other, other.success & ~found.success)
            self.results.append(found)
        raw = [restore(ep.astensor(result.images)) for result in self.results]
        success = restore(ep.astensor(torch.stack([result.success for result in self.results])))
        if isinstance(epsilons, Iterable):
            return raw, list(raw), success
        return raw[0], raw[0], success[0]
