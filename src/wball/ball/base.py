"""What attacks, training and certificates ask of a threat model.

A ball answers four questions about itself, and nothing else in the library needs to know which ball it serves:
where is its farthest point in a direction (:meth:`~Ball.support`), its nearest point to an image
(:meth:`~Ball.project`), how far is an image from the centre (:meth:`~Ball.distance`), and is it inside
(:meth:`~Ball.contains`).
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from wball.result import ProjectionResult, SupportResult

Self = TypeVar("Self", bound="Ball")
Plans = Literal["window", "full"]


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

    def contains(self, x: Tensor, z: Tensor, tol: float = 1e-4) -> Tensor: ...

    def sample(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor: ...


def radii_of(eps: float | Tensor, index: Tensor) -> float | Tensor:
    """The radii of a subset of the images; a single number serves any of them."""
    return eps[index.to(eps.device)] if isinstance(eps, Tensor) else eps
