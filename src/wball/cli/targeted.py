"""The attack of ``wball evaluate --target``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wball.attacks import Attack, AttackResult
from wball.model import Model


@dataclass(frozen=True)
class Targeted(Attack):
    """Another attack, which succeeds only if the model predicts the class ``target``."""

    _: KW_ONLY
    attack: Attack
    target: int

    def attack_batch(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        generator: torch.Generator,
        progress: Any = None,
        start: Tensor | None = None,
    ) -> AttackResult:
        """Attack the images at this attack's radius."""
        inner, goal = replace(self.attack, ball=self.ball), torch.full_like(y, self.target)
        return inner.attack_batch(model, x, y, goal, generator, progress, start)

    @property
    def n_gradients(self) -> int:
        return self.attack.n_gradients
