"""What black-box searches share: a budget of questions, and how it is spent on steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from wball import inputs
from wball.attacks.base import GradientAttack


@dataclass(frozen=True)
class Search(GradientAttack):
    """A search by forward passes alone, on any ball. ``result.queries`` says how many questions each image cost.

    Attributes:
        queries: forward passes per image, at most.
        directions: of them, how many noisy copies are asked about at each step.
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
        """Questions besides those of the steps: the clean image, the first looks, the last candidate."""

    @property
    @abstractmethod
    def per_step(self) -> int:
        """Questions of each step."""

    @property
    def n_gradients(self) -> int:
        return (self.queries - self.at_start) // self.per_step
