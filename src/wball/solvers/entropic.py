r"""The entropic projection by fused sweeps: for whoever asks for one, and as a step of an attack.

:func:`swept` is what :func:`wball.solvers.projection.project` does for finite ``reg``: all images at once, one kernel,
one look at the gaps. The plan stays in factors, a few images, until somebody asks for it.

An attack that projects at every step needs neither plan nor gap (:class:`EntropicProjection`). The sweeps of
:mod:`wball.kernels.projected_sinkhorn` are asked for their repaired point alone:

.. math::
    z = x + (1 - \delta)(P^T 1 - x), \qquad cost(P) \le budget, \qquad lo \le P^T 1 \le hi,

where ``delta`` covers what float32 does to the exponents (see :mod:`wball.solvers.oracle`). The duals of one call start
the next: an attack moves its points slowly. Nothing is read back from the device.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wball.cost import DenseCost
from wball.inputs import result_dtype
from wball.kernels import dispatch
from wball.kernels.entropic_plan.pull_back import balanced
from wball.kernels.projected_sinkhorn import (
    COLD_PRICE,
    ProjectedSinkhorn,
    Projection,
    projected_sinkhorn,
)
from wball.moves import Moves
from wball.plan import FactoredPlan
from wball.result import Duals, ProjectionResult, statuses
from wball.solvers.oracle import ROUNDINGS, OraclePoint
from wball.solvers.problem import TransportProblem, as_images


def swept(
    problem: TransportProblem,
    w: Tensor,
    reg: float,
    effort: tuple[float, int],
    init: Duals | None,
) -> ProjectionResult:
    """The entropic projection of ``w`` by projected Sinkhorn, for all images at once."""
    x, budget, spend = problem.x, problem.budget, problem.spendable()
    grid, tau = as_images(x), problem.mass / reg
    moves = problem.moves(grid)
    u, psi = (None, None) if init is None else (as_images(init.beta), init.psi)
    answer = projected_sinkhorn(Projection(
        grid, as_images(w), spend, moves, problem.box, tau,
        u=u, psi=psi, tol=effort[0], max_iter=effort[1], factors=True,
    ))  # fmt: skip
    gap, solved = answer.gap, answer.gap <= answer.allowed
    if spend is not budget:
        gap = gap + answer.psi * (budget - spend).clamp(min=0)
        solved = (gap <= answer.allowed) & ~((spend <= 0) & (budget > 0))
    # Without a budget the kernel treats the ball as one point, but free moves leave it.
    if moves.has_free:
        solved = solved & ~((spend <= 0) & escapes(moves, grid))
    return ProjectionResult(
        point=answer.z.reshape(x.shape).to(grid.dtype),
        objective=answer.objective,
        gap=gap,
        residual=answer.residual,
        status=statuses(solved),
        n_iter=answer.n_iter,
        duals=Duals(answer.u.reshape(x.shape), answer.psi),
        write=partial(_plan, moves, grid, tau, answer),
        kernel=answer.kernel,
    )


def _plan(moves: Moves, grid: Tensor, tau: Tensor, answer: ProjectedSinkhorn) -> FactoredPlan:
    assert answer.keep is not None and answer.give is not None
    return FactoredPlan.tempered(moves, grid, answer.u, answer.psi, tau, answer.keep, answer.give)


def escapes(moves: Moves, x: Tensor) -> Tensor:
    """Whether some of an image's mass can leave its pixel at no cost, per image."""
    return ((moves.free() & ~moves.stay()).any(0) & (x > 0)).flatten(1).any(1)


class EntropicProjection:
    """Points of a ball near given images, with the state that makes the next call fast.

    ``mode="paper"`` solves without the box and clamps ``w - u``, as the original procedure does: such points are in no
    ball, and their ``cost`` is nan.

    Attributes:
        unit: what a cost is divided by to be in the unit of ``eps``: the image's mass, or 1.
    """

    def __init__(
        self,
        problem: TransportProblem,
        reg: float,
        *,
        tol: float = 1e-3,
        max_iter: int = 100,
        mode: Literal["exact", "paper"] = "exact",
    ) -> None:
        x = problem.x.detach()
        self.x, self.mode = x, mode
        self._tol, self._max_iter = tol, max_iter
        self._grid = self.x.float() if x.ndim == 4 else self.x.float()[:, None, None, :]
        self._moves = problem.moves(self._grid)
        mass = self._grid.double().flatten(1).sum(1)
        self.unit = problem.unit
        self._tau = mass / reg
        self._u: Tensor | None = None
        self._psi = torch.full_like(mass, COLD_PRICE)
        self.within(problem)

    @staticmethod
    def serves(problem: TransportProblem, reg: float) -> bool:
        """Whether a fused kernel is there for these images; on a CPU ``project`` is as fast and has plans."""
        x = problem.x
        if (
            isinstance(problem.cost, DenseCost)
            or math.isinf(reg)
            or result_dtype(x) != torch.float32
        ):
            return False
        grid = x.float() if x.ndim == 4 else x.float()[:, None, None, :]
        return dispatch.choose("projected_sinkhorn", grid, problem.moves(grid)) == "triton"

    def within(self, problem: TransportProblem) -> None:
        """Points from now on solve ``problem``, which differs in its budget only."""
        self.problem = problem
        self.budget = problem.budget if self.mode == "paper" else problem.spendable(ROUNDINGS)

    def __call__(self, w: Tensor) -> OraclePoint:
        target = w.detach().float().reshape(self._grid.shape)
        box = None if self.mode == "paper" else self.problem.box
        answer = projected_sinkhorn(Projection(
            self._grid, target, self.budget, self._moves, box, self._tau,
            u=target - self._grid if self._u is None else self._u, psi=self._psi,
            tol=self._tol, max_iter=self._max_iter,
        ))  # fmt: skip
        self._u, self._psi = answer.u, answer.psi.double()
        if self.mode == "paper":
            single = ((self.budget <= 0) | (self._tau <= 0)).view(-1, 1, 1, 1)
            z, scale = (
                torch.where(single, self._grid, target - answer.u),
                torch.ones_like(self.budget),
            )
            cost = torch.full_like(self.budget, math.nan)
        else:
            tau = self._tau.clamp(min=torch.finfo(torch.float64).tiny)
            size = (answer.u.flatten(1).abs().amax(1) + self._psi * self._moves.dearest) / tau
            scale = 1 - (6 * torch.finfo(torch.float32).eps * size).clamp(max=0.5)
            z = self._grid + scale.float().view(-1, 1, 1, 1) * balanced(self._grid, answer.z)
            cost = scale * answer.cost
        if self.problem.box is not None:
            z = z.clamp(*self.problem.box)
        return OraclePoint(z.view(self.x.shape), cost, scale, answer.kernel)

    def take(self, index: Tensor) -> EntropicProjection:
        """The projection of a subset of the images."""
        part = object.__new__(EntropicProjection)
        part.__dict__.update(self.__dict__)
        part.problem = self.problem.take(index)
        for name in ("x", "budget", "unit", "_grid", "_tau", "_psi"):
            setattr(part, name, getattr(self, name)[index])
        part._u = None if self._u is None else self._u[index]
        return part
