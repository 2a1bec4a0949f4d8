"""What solvers return: a point, bounds that say how good it is, and the plan that proves where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wball.plan import Plan


class Status(Enum):
    """How a solver ended, per image. The value is the explanation, with the remedy where there is one."""

    CONVERGED = "the duality gap and the residual are within the tolerance"
    MAX_ITER = "stopped at max_iter above the tolerance: the point is in the ball, but raise max_iter or loosen tol"
    EXACT = "closed form: nothing was iterated"

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


def statuses(converged: Tensor) -> tuple[Status, ...]:
    """One status per image from a mask of those that met the tolerance."""
    return tuple(Status.CONVERGED if c else Status.MAX_ITER for c in converged.tolist())


@dataclass(frozen=True)
class SupportResult:
    """``max <g, z>`` over a ball. ``value <= optimum <= upper`` holds whether or not the solver converged.

    Attributes:
        point: images in the ball, ``(B, C, H, W)``.
        value: ``<g, point>``, per image.
        upper: a sound upper bound of the maximum, per image.
        status: how the solver ended, per image.
        n_iter: iterations used, per image.
        plan: the transport plan that proves the point's membership (``None`` for balls that need no plan).
        kernel: which implementation computed it.
    """

    point: Tensor
    value: Tensor
    upper: Tensor
    status: tuple[Status, ...]
    n_iter: Tensor
    plan: Plan | None = None
    kernel: str = "torch"

    @property
    def gap(self) -> Tensor:
        """``upper - value``, per image: at most this much was left on the table."""
        return self.upper - self.value

    @property
    def converged(self) -> Tensor:
        return converged(self.status)


AnyProof = TypeVar("AnyProof", bound="Proof")


class Proof:
    """A plan that proves where points lie: tensors with one entry per image, to be kept and checked later.

    It proves nothing by itself. ``wball.audit(ball, x, z, plan=proof)`` works the plan out in float64 and decides.
    """

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]

    def take(self: AnyProof, index: Tensor) -> AnyProof:
        """The proof of a subset of the images (``index``: positions or a mask)."""
        return type(self)(*(tensor[index] for tensor in self._tensors()))

    def put(self: AnyProof, index: Tensor, part: AnyProof) -> AnyProof:
        """This proof with the images at ``index`` replaced."""
        pairs = zip(self._tensors(), part._tensors(), strict=True)
        return type(self)(*(mine.index_copy(0, index, theirs.to(mine)) for mine, theirs in pairs))

    def where(self: AnyProof, mask: Tensor, other: AnyProof) -> AnyProof:
        """This proof for the images of the mask, ``other`` for the rest."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return type(self)(
            *(torch.where(mask.view(-1, *[1] * (mine.ndim - 1)), mine, theirs.to(mine)) for mine, theirs in pairs)
        )

    @staticmethod
    def joined(parts: Sequence[AnyProof]) -> AnyProof:
        """The proofs of several batches as one."""
        return type(parts[0])(*(torch.cat(pieces) for pieces in zip(*(p._tensors() for p in parts), strict=True)))


@dataclass(frozen=True)
class EntropicProof(Proof):
    r"""A plan written in a few images instead of one number per move.

    .. math::
        P_{ij} = share \; x_i\, \mathrm{softmax}_j(s_j - \psi C_{ij}) \, give_i\, keep_j \quad (i \ne j), \qquad
        P_{ii} = x_i - \sum_{j \ne i} P_{ij}

    Attributes:
        potentials: ``s``, images like ``x``.
        price: ``psi``, per image.
        keep: column factors, images like ``x``.
        give: row factors, images like ``x``.
        share: factor on everything that moves, per image.
    """

    potentials: Tensor
    price: Tensor
    keep: Tensor
    give: Tensor
    share: Tensor

    @classmethod
    def of_nothing(cls, x: Tensor) -> EntropicProof:
        """The plan of images that stay as they are."""
        zero, one = torch.zeros_like(x), torch.ones_like(x)
        none = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        return cls(zero, none.to(x.dtype), one, one, none)


@dataclass(frozen=True)
class ListedProof(Proof):
    """A plan as it is: the mass on each move, ``(B, C, K, H, W)``, laid out as in :class:`wball.moves.Moves`."""

    flow: Tensor

    def arcs(self) -> Tensor:
        return self.flow

    def mixed(self, gamma: Tensor, other: ListedProof) -> ListedProof:
        """``(1 - gamma)`` of this plan and ``gamma`` of the other, per image: plans of the mixed points."""
        share = gamma.to(self.flow.dtype).view(-1, 1, 1, 1, 1)
        return ListedProof(self.flow + share * (other.flow.to(self.flow.dtype) - self.flow))


@dataclass(frozen=True)
class Duals:
    """Dual variables of a projection, for a warm start: ``init=result.duals``.

    ``beta`` is the column potential in image units (``z = clip(w - beta)``), ``psi`` the price of cost.
    """

    beta: Tensor
    psi: Tensor


@dataclass(frozen=True)
class ProjectionResult:
    """The point of a ball nearest to ``w``. The point is in the ball whether or not the solver converged.

    Attributes:
        point: images in the ball, ``(B, C, H, W)``.
        objective: what was minimised, at the point: ``1/2 |w - z|^2``, plus the entropy term for finite ``reg``.
        gap: objective minus a lower bound of the optimum, per image (weak duality: sound at any iteration).
        residual: largest violation of the optimality conditions, in pixel units, per image.
        status: how the solver ended, per image.
        n_iter: iterations used, per image.
        duals: dual variables for a warm start.
        plan: the transport plan that proves the point's membership (``None`` for balls that need no plan).
        kernel: which implementation computed it.
    """

    point: Tensor
    objective: Tensor
    gap: Tensor
    residual: Tensor
    status: tuple[Status, ...]
    n_iter: Tensor
    duals: Duals | None = None
    plan: Plan | None = None
    kernel: str = "torch"

    @property
    def converged(self) -> Tensor:
        return converged(self.status)


def converged(status: tuple[Status, ...]) -> Tensor:
    """Which images a solver vouches for, as a mask."""
    return torch.tensor([s in (Status.CONVERGED, Status.EXACT) for s in status], dtype=torch.bool)
