"""The adversary of a training run: the attack on the current network, and the radii of its balls."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from wball.attacks import StandardAttack
from wball.training.config import Adversary, Optimisation, RadiusSchedule, Smooth
from wball.training.distributed import World
from wball.training.network import AsTrained
from wball.training.state import generator


class Opponent:
    """Makes adversarial training images, each in a ball of the given radius."""

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
        result = self.attack.at(eps)(self.victim, x, y, generator=draws)
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
        """Let the radii of the training images ``index`` grow, or shrink where an image is broken."""
        if self.settings.radius == "fixed":
            return
        shrinks = world.gather(broken.to(self.values.dtype))
        step = self.settings.grow * (1 - shrinks) - self.settings.shrink * shrinks
        self.values[index] = (self.values[index] + step).clamp(self.settings.low, self.largest)
