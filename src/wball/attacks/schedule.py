"""A radius that grows while an image survives, as in the paper's experiments."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wball import inputs


@dataclass(frozen=True)
class GrowingRadius:
    """``eps * factor^(step // every)``: images that are still right meet a larger ball every few steps.

    The result's ``radius`` says at which one each image was broken, so one run gives the whole curve
    (:meth:`~wball.AttackResult.accuracy_at`).

    >>> GrowingRadius(factor=1.1, every=10).at(0.3, step=20)
    0.363...
    """

    factor: float = 1.1
    every: int = 10

    def __post_init__(self) -> None:
        if not inputs.check_positive("factor", self.factor) >= 1:
            raise ValueError(
                f"factor must be at least 1 so that the radius grows, got {self.factor}"
            )
        inputs.check_count("every", self.every)

    def at(self, eps: float | Tensor, step: int) -> float | Tensor:
        """The radius of step ``step``, which starts at ``eps``."""
        return eps * self.factor ** (step // self.every)
