"""What black-box searches share: a budget of forward passes, and how the steps use it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.base import GradientAttack, normal
from wball.ball import Ball


@dataclass(frozen=True)
class BlackBoxSearch(GradientAttack):
    """A search by forward passes alone, on any ball. ``result.queries`` counts them per image.

    Attributes:
        queries: forward passes per image, at most.
        directions: noisy copies evaluated at each step.
        step_size: in nats per step, see :class:`~wball.DualAveraging`.
    """

    queries: int = 5000
    directions: int = 20
    step_size: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("directions", self.directions, self.least_directions)
        inputs.check_count("queries", self.queries, self.at_start + self.per_step)
        inputs.check_positive("step_size", self.step_size)

    @property
    def least_directions(self) -> int:
        return 1

    @property
    @abstractmethod
    def at_start(self) -> int:
        """Forward passes outside of the steps: the clean image, the start, the last candidate."""

    @property
    @abstractmethod
    def per_step(self) -> int:
        """Forward passes of each step."""

    @property
    def n_gradients(self) -> int:
        return (self.queries - self.at_start) // self.per_step


def reachable_pixels(ball: Ball, x: Tensor, generator: torch.Generator) -> Tensor:
    """1 where the ball lets a pixel change: random potentials move mass wherever it can go."""
    return (ball.oracle(x)(normal(x, generator)).z != x).to(x)
