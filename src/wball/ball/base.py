"""What attacks, training and certificates ask of a threat model.

A ball answers questions about itself, and nothing else in the library needs to know which ball it serves: where is its
farthest point in a direction (:meth:`~Ball.support`), its nearest point to an image (:meth:`~Ball.project`), how far is
an image from the centre (:meth:`~Ball.distance`), by how much does it miss the ball (:meth:`~Ball.violations`, the
audit's question), is it inside (:meth:`~Ball.contains`), what ball is this
(:meth:`~Ball.describe`); for certificates, what is the largest value of a linear function over it
(:meth:`~Ball.input_set`, sound in floating point).
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from wball.auditing.violations import DISTANCE_TOL, Violations
from wball.input_sets import InputSet, Plans
from wball.plan import StoredPlan
from wball.result import ProjectionResult, SupportResult

Self = TypeVar("Self", bound="Ball")


class Ball(Protocol):
    """What attacks, training and certificates ask of a threat model."""

    @property
    def eps(self) -> float | Tensor: ...

    @property
    def box(self) -> tuple[float, float] | None: ...

    @property
    def unit(self) -> str: ...

    def at(self: Self, eps: float | Tensor) -> Self: ...

    def take(self: Self, index: Tensor) -> Self: ...

    def support(self, x: Tensor, g: Tensor, reg: float = math.inf) -> SupportResult: ...

    def project(self, x: Tensor, w: Tensor, reg: float = math.inf) -> ProjectionResult: ...

    def distance(self, x: Tensor, z: Tensor) -> Tensor: ...

    def violations(
        self, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
    ) -> Violations: ...

    def contains(self, x: Tensor, z: Tensor, tol: float = DISTANCE_TOL) -> Tensor: ...

    def describe(self) -> dict[str, Any]: ...

    def kernel(self, x: Tensor) -> str: ...

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor: ...

    def input_set(self, x: Tensor, plans: Plans = "full") -> InputSet: ...


def check_tol(tol: float) -> None:
    if isinstance(tol, bool) or not isinstance(tol, (int, float)):
        raise TypeError(f"tol must be a number, got {type(tol).__name__}")
    if not tol >= 0:
        raise ValueError(f"tol must be >= 0, got {tol!r}")


def radii_of(eps: float | Tensor, index: Tensor) -> float | Tensor:
    """The radii of a subset of the images; a single number serves any of them."""
    return eps[index.to(eps.device)] if isinstance(eps, Tensor) else eps
