"""What solvers return: a point, bounds that say how good it is, and the plan that proves where it
lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from wball.display import Explained, Summarised
from wball.plan import Plan, StoredPlan


class Status(Explained):
    """How a solver ended, per image. The value is the explanation, with a remedy if there is
    one."""

    CONVERGED = "the duality gap and the residual are within the tolerance"
    MAX_ITER = (
        "stopped at max_iter above the tolerance: the point is in the ball, but "
        "raise max_iter or loosen tol"
    )
    STALLED = (
        "no further progress above the tolerance: the point is in the ball, but "
        "max_iter does not help; loosen tol"
    )
    TIME_LIMIT = (
        "stopped at time_limit above the tolerance: the point is in the ball, but "
        "raise time_limit or loosen tol"
    )
    EXACT = "closed form: nothing was iterated"


class _Solved(Summarised):
    """Base class of the results of all solvers."""

    status: tuple[Status, ...]
    write: Callable[[], StoredPlan] | None
    kernel: str

    def headline(self) -> dict[str, str]:
        images, solved = str(len(self.status)), str(int(self.converged.sum()))
        return {"images": images, "converged": solved, "kernel": self.kernel}

    @cached_property
    def stored(self) -> StoredPlan | None:
        """The transport plan that proves that the point is in the ball, as the solver stores it."""
        return None if self.write is None else self.write()

    @cached_property
    def plan(self) -> Plan | None:
        """The same plan with one number per move, computed on first use."""
        return None if self.stored is None else self.stored.written()

    @property
    def converged(self) -> Tensor:
        """Which images the solver solved to the requested tolerance."""
        good = (Status.CONVERGED, Status.EXACT)
        return torch.tensor([status in good for status in self.status], dtype=torch.bool)


class Duals(NamedTuple):
    """Dual variables. Those of a projection start another one warm: ``init=result.duals``.

    ``beta`` is the column potential (of a projection in image units, ``z = clip(w - beta)``),
    ``psi`` the price of cost.
    """

    beta: Tensor
    psi: Tensor

    def take(self, index: Tensor | slice) -> Duals:
        """The duals of a subset of the images."""
        return Duals(self.beta[index], self.psi[index])


@dataclass(frozen=True, repr=False)
class SupportResult(_Solved):
    """``max <g, z>`` over a ball. ``value <= optimum <= upper`` holds whether or not the solver
    converged.

    Attributes:
        point: images in the ball, ``(B, C, H, W)``.
        value: ``<g, point>``, per image.
        upper: a sound upper bound of the maximum, per image.
        status: how the solver ended, per image.
        n_iter: iterations used, per image.
        duals: column potential and price of cost.
        write: makes the plan (``None`` without one), which written out has the window's size times
            that of the images.
        kernel: which implementations computed it, joined by ``+``.
    """

    point: Tensor
    value: Tensor
    upper: Tensor
    status: tuple[Status, ...]
    n_iter: Tensor
    duals: Duals | None = None
    write: Callable[[], StoredPlan] | None = field(default=None, repr=False, compare=False)
    kernel: str = "torch"

    @property
    def gap(self) -> Tensor:
        """``upper - value``, per image: the largest possible distance from the optimum."""
        return self.upper - self.value


@dataclass(frozen=True, repr=False)
class ProjectionResult(_Solved):
    """The point of a ball nearest to ``w``. The point is in the ball whether or not the solver
    converged.

    Attributes:
        point: images in the ball, ``(B, C, H, W)``.
        objective: what was minimised, at the point: ``1/2 |w - z|^2``, plus the entropy term for
            finite ``reg``.
        gap: objective minus a lower bound of the optimum, per image (weak duality: sound at any
            iteration).
        residual: largest violation of the optimality conditions, in pixel units, per image.
        status: how the solver ended, per image.
        n_iter: iterations used, per image.
        duals: dual variables for a warm start.
        write: makes the plan (``None`` without one), which written out has the window's size times
            that of the images.
        kernel: which implementations computed it, joined by ``+``.
    """

    point: Tensor
    objective: Tensor
    gap: Tensor
    residual: Tensor
    status: tuple[Status, ...]
    n_iter: Tensor
    duals: Duals | None = None
    write: Callable[[], StoredPlan] | None = field(default=None, repr=False, compare=False)
    kernel: str = "torch"


@dataclass(frozen=True, repr=False)
class SinkhornResult(Summarised):
    """Where the iterations of :mod:`wball.paper` ended. Dual variables are the paper's, for images
    of mass 1.

    Attributes:
        point: images like ``x``.
        alpha: dual variables of the rows; ``-inf`` where ``x`` is 0.
        beta: dual variables of the columns.
        psi: price of the budget, per image.
        value: the dual objective before the last step of ``psi``, per image.
        n_iter: iterations done, per image.
        converged: whether the last change of ``value`` was below ``tol * (1 + |value|)``.
    """

    point: Tensor
    alpha: Tensor
    beta: Tensor
    psi: Tensor
    value: Tensor
    n_iter: Tensor
    converged: Tensor

    def headline(self) -> dict[str, str]:
        images, solved = str(len(self.psi)), str(int(self.converged.sum()))
        return {"images": images, "converged": solved}

    def where(self, these: Tensor, others: SinkhornResult) -> SinkhornResult:
        """This result for some images (a mask), ``others`` for the rest."""
        pairs = zip(vars(self).values(), vars(others).values(), strict=True)
        return SinkhornResult(
            *(torch.where(these.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in pairs)
        )


def joined_kernels(names: Iterable[str]) -> str:
    """The names of the kernels used, each once.

    >>> joined_kernels(["triton", "none", "triton", "torch"])
    'torch+triton'
    """
    served = {name for joined in names for name in joined.split("+")} - {"none"}
    return "+".join(sorted(served)) or "none"
