"""The adversary at work: the attack on the network as it is now."""

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
    """Makes training images, each in a ball of the given radius."""

    def __init__(
        self, settings: Adversary, options: Optimisation, model: nn.Module, seed: int
    ) -> None:
        self.seed = seed
        # Checks of the model and bars are for one call, not for thousands.
        self.attack: Attack = replace(settings.attack, progress=False)
        if isinstance(self.attack, StandardAttack):
            self.attack = replace(self.attack, check=False)
        self.victim = AsTrained(model, options)
        self._record = options.cuda_graph
        self._replay: Replay | None = None

    def __call__(
        self, x: Tensor, y: Tensor, eps: float | Tensor, step: int, world: World
    ) -> tuple[Tensor, Tensor]:
        """What the attack makes of this process's shard ``x, y`` of the batch, and which of it is broken."""
        return self._attack(x, y, eps, generator(self.seed, f"attack-{world.rank}", step, x.device))

    def _attack(
        self, x: Tensor, y: Tensor, eps: float | Tensor, draws: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Images that the attack makes at radius ``eps``, and which of them succeed."""
        if self._record:
            self._record, self._replay = False, recorded(self.attack, self.victim, x, y)
        if self._replay is not None:
            return self._replay(x, y, eps, draws.initial_seed())
        result = self.attack.at(eps)(self.victim, x, y, generator=draws)
        return result.images, result.success
