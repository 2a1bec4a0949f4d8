"""The separable term of the columns that exact solvers minimise: quadratic for projections, linear
for supports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from wball.inputs import dot


@dataclass(frozen=True)
class Columns(ABC):
    """``sum_j f_j(z_j)`` over ``lo <= z <= hi``, and how it looks from its dual variable ``u``.

    Attributes:
        target: ``w`` of the quadratic columns, ``g`` of the linear ones, ``(B, C, H, W)``.
        lo: the least value of a column.
        hi: the largest value of a column, possibly infinite.
        linear: whether ``f`` is linear.
    """

    target: Tensor
    lo: float
    hi: float
    linear: ClassVar[bool]

    @abstractmethod
    def objective(self, z: Tensor) -> Tensor:
        """``f(z)``, summed per image."""

    @abstractmethod
    def least(self, u: Tensor) -> Tensor:
        """``min f(z) + u z`` over the box, summed per image."""

    @abstractmethod
    def value(self, u: Tensor) -> Tensor:
        """What ascent sees of :meth:`least`: the same, or less where that has no curvature."""

    @abstractmethod
    def gradient(self, u: Tensor, columns: Tensor) -> Tensor:
        """``z(u) - columns``; where ``z(u)`` is an interval, the part of it that points away from
        ``columns``."""

    @abstractmethod
    def curvature(self, u: Tensor) -> Tensor:
        """``-z'(u)``."""

    @abstractmethod
    def held(self, u: Tensor, columns: Tensor) -> Tensor:
        """The variables that sit at a kink and have no reason to leave it."""

    @abstractmethod
    def retract(self, u: Tensor, columns: Tensor, new: Tensor) -> Tensor:
        """``new``, stopped where it would cross a kink."""

    def take(self, index: Tensor) -> Columns:
        """A subset of the images."""
        return replace(self, target=self.target[index])

    def to(self, device: torch.device) -> Columns:
        return replace(self, target=self.target.to(device))


@dataclass(frozen=True)
class Quadratic(Columns):
    """``f(z) = 1/2 (w - z)^2``: ``z(u) = clip(w - u)``, smooth enough for Newton's method as it
    is."""

    linear = False

    def objective(self, z: Tensor) -> Tensor:
        return 0.5 * (self.target - z).square().flatten(1).sum(1)

    def least(self, u: Tensor) -> Tensor:
        return self._at(u, (self.target - u).clamp(self.lo, self.hi))

    def value(self, u: Tensor) -> Tensor:
        return self._at(u, self._z(u))

    def gradient(self, u: Tensor, columns: Tensor) -> Tensor:
        return self._z(u) - columns

    def curvature(self, u: Tensor) -> Tensor:
        free = self.target - u
        return ((free > self._floor) & (free < self.hi)).to(u.dtype)

    def held(self, u: Tensor, columns: Tensor) -> Tensor:
        return torch.zeros_like(u, dtype=torch.bool)

    def retract(self, u: Tensor, columns: Tensor, new: Tensor) -> Tensor:
        return new

    @property
    def _floor(self) -> float:
        """Columns are never negative anyway; without a clip at 0 the dual stays strongly concave
        there."""
        return self.lo if self.lo > 0 else -torch.inf

    def _z(self, u: Tensor) -> Tensor:
        return (self.target - u).clamp(self._floor, self.hi)

    def _at(self, u: Tensor, z: Tensor) -> Tensor:
        return (0.5 * (self.target - z).square() + u * z).flatten(1).sum(1)


@dataclass(frozen=True)
class Linear(Columns):
    """``f(z) = -g z``: ``u = g``, but full columns (``z = hi``) have less and drained ones (``z =
    lo``) more."""

    linear = True

    def objective(self, z: Tensor) -> Tensor:
        return -dot(self.target, z)

    def least(self, u: Tensor) -> Tensor:
        over = u - self.target
        return torch.where(over < 0, self.hi * over, self.lo * over).flatten(1).sum(1)

    def value(self, u: Tensor) -> Tensor:
        return self.least(u)

    def gradient(self, u: Tensor, columns: Tensor) -> Tensor:
        side = self._side(u, columns)
        ends = torch.where(side < 0, self.hi, self.lo).to(columns.dtype)
        return torch.where(side == 0, torch.zeros_like(columns), ends - columns)

    def curvature(self, u: Tensor) -> Tensor:
        return torch.zeros_like(u)

    def held(self, u: Tensor, columns: Tensor) -> Tensor:
        return self._side(u, columns) == 0

    def retract(self, u: Tensor, columns: Tensor, new: Tensor) -> Tensor:
        side, g = self._side(u, columns), self.target
        return torch.where(
            side < 0, torch.minimum(new, g), torch.where(side > 0, torch.maximum(new, g), g)
        )

    def _side(self, u: Tensor, columns: Tensor) -> Tensor:
        at_kink = (columns < self.lo).to(u.dtype) - (columns > self.hi).to(u.dtype)
        return torch.where(u == self.target, at_kink, torch.sign(u - self.target))
