"""The adversary at work: radii for a batch, and the attack on the network as it is now."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from wball.attacks import Attack, StandardAttack
from wball.training.config import Adversary, Optimisation
from wball.training.distributed import World
from wball.training.network import AsTrained
from wball.training.replay import Replay, recorded
from wball.training.state import generator


class Opponent:
    """Makes training images. Holds one radius per training image where the rule asks for it.

    Attributes:
        radii: float64, one per training image (empty unless the rule is ``"per-image"``).
    """

    def __init__(self, settings: Adversary, options: Optimisation, model: nn.Module, count: int, seed: int) -> None:
        device = next(model.parameters()).device
        self.settings, self.seed = settings, seed
        # Checks of the model and bars are for one call, not for thousands.
        self.attack: Attack = replace(settings.attack, progress=False)
        if isinstance(self.attack, StandardAttack):
            self.attack = replace(self.attack, check=False)
        self.victim = AsTrained(model, options)
        first = min(max(settings.low, settings.start), settings.eps)
        shape = (count if settings.radius == "per-image" else 0,)
        self.radii = torch.full(shape, first, dtype=torch.float64, device=device)
        self._record = options.cuda_graph
        self._replay: Replay | None = None

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, step: int, progress: float, world: World) -> Tensor:
        """What the attack makes of this process's shard ``x, y`` of the batch of training images ``index``."""
        settings = self.settings
        scale = min(1.0, progress / settings.ramp) if settings.ramp > 0 else 1.0
        draws = generator(self.seed, f"attack-{world.rank}", step, x.device)
        if settings.radius == "fixed":
            return self._attack(x, y, scale * settings.eps, draws)[0]
        if settings.radius == "uniform":
            for_all = generator(self.seed, "radius", step, x.device)
            u = torch.rand(index.shape[0], dtype=torch.float64, device=x.device, generator=for_all)
            eps = settings.low + u * (settings.eps - settings.low)
            return self._attack(x, y, scale * world.shard(eps), draws)[0]
        eps = self.radii[index]
        images, success = self._attack(x, y, scale * world.shard(eps), draws)
        fell = world.gather(success.to(eps.dtype))
        eps = eps + settings.grow * (1 - fell) - settings.shrink * fell
        self.radii[index] = eps.clamp(settings.low, settings.eps)
        return images

    def _attack(self, x: Tensor, y: Tensor, eps: float | Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images that the attack makes at radius ``eps``, and which of them succeed."""
        if self._record:
            self._record, self._replay = False, recorded(self.attack, self.victim, x, y)
        if self._replay is not None:
            return self._replay(x, y, eps, draws.initial_seed())
        result = self.attack.at(eps)(self.victim, x, y, generator=draws)
        return result.images, result.success
