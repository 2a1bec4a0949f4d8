"""Radii of training images at work: one for all, drawn per step, or one per image that follows how the image fares."""

from __future__ import annotations

import torch
from torch import Tensor

from wball.training.config import Adversary, Smooth
from wball.training.distributed import World
from wball.training.state import generator


class Radii:
    """Gives the radii of a batch, and takes note of who survived.

    Attributes:
        values: float64, one per training image (empty unless the rule is ``"per-image"``).
    """

    def __init__(
        self, settings: Adversary | Smooth, count: int, seed: int, device: torch.device
    ) -> None:
        self.settings, self.seed = settings, seed
        first = min(max(settings.low, settings.start), settings.eps)
        shape = (count if settings.radius == "per-image" else 0,)
        self.values = torch.full(shape, first, dtype=torch.float64, device=device)

    def batch(self, index: Tensor, step: int, progress: float, world: World) -> float | Tensor:
        """The radii of this process's shard of the training images ``index``."""
        settings, scale = self.settings, self.settings.scale(progress)
        if settings.radius == "fixed":
            return scale * settings.eps
        if settings.radius == "uniform":
            for_all = generator(self.seed, "radius", step, index.device)
            u = torch.rand(
                index.shape[0], dtype=torch.float64, device=index.device, generator=for_all
            )
            return scale * world.shard(settings.low + u * (settings.eps - settings.low))
        return scale * world.shard(self.values[index])

    def follow(self, index: Tensor, broken: Tensor, world: World) -> None:
        """Let the radii of the training images ``index`` grow or shrink, given who of this shard was broken."""
        if self.settings.radius != "per-image":
            return
        fell = world.gather(broken.to(self.values.dtype))
        eps = self.values[index] + self.settings.grow * (1 - fell) - self.settings.shrink * fell
        self.values[index] = eps.clamp(self.settings.low, self.settings.eps)
