r"""The attack step's oracle: from potentials to a point of the ball.

Given potentials ``b`` of the pixels, the oracle returns

.. math::
    z = x + t\,(P^T 1 - x), \qquad t = \min(1,\; (1 - \delta)\, budget / cost(\bar P)),

where ``P`` is the entropic plan of :mod:`wball.kernels` and ``bar P`` the same plan after opposite
flows cancel: it has the same rows and columns and proves that ``W(x, P^T 1) <= cost(bar P)``;
scaling the moved mass by ``t`` scales that bound, and ``delta`` covers what rounding does to the
flows (what it does to ``z`` is held back from the budget: ``TransportProblem.spendable``). The plan
keeps the box and ``x`` is in it, so ``z`` is: every answer is a valid point, whatever ``b`` is.

Cancelling makes the point cheaper than the requested plan, so the next plan is requested
at a raw budget ``kappa * budget``, with ``kappa`` adapted until the *net* cost is what the ball
allows. ``psi``, the box potentials and ``kappa`` are carried from call to call: an attack changes
its potentials slowly.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from wball.inputs import dot, largest, per_image, result_dtype
from wball.kernels import dispatch
from wball.kernels.entropic_plan import PlanRequest, entropic_plan
from wball.kernels.projected_sinkhorn import COLD_PRICE, Projection, projected_sinkhorn
from wball.kernels.row_maximum import linear_maximum
from wball.plan import FactoredPlan, StoredPlan
from wball.solvers.problem import TransportProblem, as_images

ROUNDINGS = 2
"""Roundings of a point: one when columns are summed, one when the plan is scaled to the budget.
Mixtures round once more."""


CLIP = 250.0
"""Largest potential in nats. No move in common windows costs as much, and compiled loops need no
logs below it."""


@dataclass(frozen=True)
class OraclePoint:
    """A point of the ball.

    Attributes:
        z: images like ``x``.
        cost: what the proving plan of ``z`` costs, per image in mass x pixels, float64: an upper
            bound of the distance.
        scale: ``t`` above; below 1, the plan had to be scaled down to fit.
        kernel: which implementation computed it.
        proof: that plan, as a proof of the distance; ``None`` if it is not known.
    """

    z: Tensor
    cost: Tensor
    scale: Tensor
    kernel: str = "torch"
    proof: StoredPlan | None = None


_AnyOracle = TypeVar("_AnyOracle", bound="_Oracle")


class _Oracle:
    """Base class: points of a ball, with state that speeds up the next call. Every tensor has one
    entry per image."""

    def __init__(self, problem: TransportProblem, dtype: torch.dtype) -> None:
        self.problem, self.x = problem, problem.x.detach().to(dtype)
        self._grid = as_images(self.x)
        self._moves = problem.moves(self._grid)

    @property
    def unit(self) -> Tensor:
        """The divisor that converts a cost to the unit of ``eps``: the image's mass, or 1."""
        return self.problem.unit

    def take(self: _AnyOracle, index: Tensor) -> _AnyOracle:
        """The oracle of a subset of the images (``index``: positions or a mask)."""
        part = copy(self)
        part.problem = self.problem.take(index)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(part, name, value[index])
        return part


class TransportOracle(_Oracle):
    """Maps potentials to points of a ball: ``oracle(b)`` returns one for each image."""

    def __init__(
        self,
        problem: TransportProblem,
        *,
        sweeps: int = 3,
        momentum: float = 0.0,
        roundings: int = ROUNDINGS,
    ) -> None:
        super().__init__(problem, result_dtype(problem.x))
        self.sweeps, self.momentum = sweeps, momentum
        self.budget = problem.spendable(roundings)
        self._psi: Tensor | None = None
        self._q: Tensor | None = None
        self._kappa: Tensor | None = None

    @property
    def reads_host(self) -> bool:
        """Whether a kernel serves that reads from the device."""
        kernel = dispatch.choose("entropic_plan", self._grid, self._moves)
        return self.x.is_cuda and kernel != "triton"

    def __call__(self, b: Tensor) -> OraclePoint:
        plan = entropic_plan(PlanRequest(
            self._grid, b.detach().to(self.x.dtype).reshape(self._grid.shape), self.budget, self._moves,
            self.problem.box, psi=self._psi, q=self._q, kappa=self._kappa,
            sweeps=self.sweeps, momentum=self.momentum,
        ))  # fmt: skip
        self._psi, self._q, self._kappa = plan.psi, plan.q, plan.kappa
        proof = FactoredPlan(
            self._moves, self._grid, plan.chosen, plan.psi, plan.keep, plan.give, plan.scale
        )
        cost = plan.scale * plan.net_cost
        return OraclePoint(plan.z.view(self.x.shape), cost, plan.scale, plan.kernel, proof)

    def along(self, g: Tensor, nats: float) -> Tensor:
        """Potentials along ``g``, scaled such that a move by one pixel costs ``nats`` in the plan
        if no column is full.

        The price of the linear maximum sets the scale, because a few pixels may have gradients far
        above all others. Potentials are clipped at :data:`CLIP`.
        """
        grid = g.detach().to(self.x.dtype).reshape(self._grid.shape)
        price = linear_maximum(grid, self._grid, self.budget, self._moves).psi
        tiny = torch.finfo(grid.dtype).tiny
        mass = self._grid.flatten(1).sum(1).clamp(min=tiny)
        mean = dot(grid, self._grid) / mass
        size = nats / torch.maximum(price, 1e-3 * largest(grid)).clamp(min=tiny)
        potentials = per_image(size, grid) * (grid - per_image(mean, grid))
        return potentials.clamp(-CLIP, CLIP).view(self.x.shape)


class EntropicProjection(_Oracle):
    r"""Projects images onto a ball for attacks that need neither plan nor gap.

    The sweeps of :mod:`wball.kernels.projected_sinkhorn` return the columns of a repaired plan, and

    .. math::
        z = x + (1 - \delta)(P^T 1 - x), \qquad cost(P) \le budget, \qquad lo \le P^T 1 \le hi,

    where ``delta`` covers float32 rounding of the exponents. The duals of one call start the next.
    """

    reads_host = False

    def __init__(
        self,
        problem: TransportProblem,
        reg: float,
        *,
        tol: float = 1e-3,
        max_iter: int = 100,
    ) -> None:
        super().__init__(problem, torch.float32)
        self._tol, self._max_iter = tol, max_iter
        mass = self._grid.double().flatten(1).sum(1)
        self._tau = mass / reg
        self._u: Tensor | None = None
        self._psi = torch.full_like(mass, COLD_PRICE)
        self.budget = problem.spendable(ROUNDINGS)

    @staticmethod
    def serves(problem: TransportProblem, reg: float) -> bool:
        """Whether Triton supports these images; on a CPU ``project`` is as fast and returns
        plans."""
        if math.isinf(reg) or result_dtype(problem.x) != torch.float32:
            return False
        grid = as_images(problem.x)
        return dispatch.choose("projected_sinkhorn", grid, problem.moves(grid)) == "triton"

    def within(self, ball: Any) -> None:
        """Continue in a ball of another radius."""
        problem = ball.problem(self.problem.x)
        assert problem is not None
        self.problem, self.budget = problem, problem.spendable(ROUNDINGS)

    def __call__(self, w: Tensor) -> OraclePoint:
        target = w.detach().float().reshape(self._grid.shape)
        answer = projected_sinkhorn(Projection(
            self._grid, target, self.budget, self._moves, self.problem.box, self._tau,
            u=target - self._grid if self._u is None else self._u, psi=self._psi,
            tol=self._tol, max_iter=self._max_iter,
        ))  # fmt: skip
        self._u, self._psi = answer.u, answer.psi.double()
        tau = self._tau.clamp(min=1e-300)
        size = (largest(answer.u) + self._psi * self._moves.dearest) / tau
        scale = 1 - (6 * torch.finfo(torch.float32).eps * size).clamp(max=0.5)
        z = self._grid + per_image(scale.float(), target) * _balanced(self._grid, answer.z)
        if self.problem.box is not None:
            z = z.clamp(*self.problem.box)
        return OraclePoint(z.view(self.x.shape), scale * answer.cost, scale, answer.kernel)


def _balanced(x: Tensor, z: Tensor) -> Tensor:
    """Return ``z - x`` with equal loss and gain in each channel: the larger one is scaled down to
    the other.

    Each pixel ends between its ``x`` and its ``z``, so the box still holds.
    """
    change = z - x
    gained = change.clamp(min=0).sum((-2, -1), keepdim=True, dtype=torch.float64)
    lost = gained - change.sum((-2, -1), keepdim=True, dtype=torch.float64)
    tiny = 1e-300
    up, down = (
        (a / b.clamp(min=tiny)).clamp(0, 1).to(x.dtype) for a, b in ((lost, gained), (gained, lost))
    )
    return change * torch.where(change > 0, up, down)
