r"""The entropic projection as a step of an attack: the point and what it costs, and no plan.

:func:`wball.solvers.projection.project` returns a plan, which is ``k^2`` times the size of the images, and looks at
each gap to decide what to do next. An attack that projects at every step needs neither. Here the fused sweeps of
:mod:`wball.kernels.projected_sinkhorn.reference` are asked for their repaired point alone:

.. math::
    z = x + (1 - \delta)(P^T 1 - x), \qquad cost(P) \le budget, \qquad lo \le P^T 1 \le hi,

where ``delta`` covers what float32 does to the exponents (see :mod:`wball.solvers.oracle`). The duals of one call start
the next: an attack moves its points slowly. Nothing is read back from the device.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from wball.cost import DenseCost
from wball.inputs import result_dtype
from wball.kernels import dispatch
from wball.kernels.projected_sinkhorn import projected_sinkhorn
from wball.solvers.oracle import ROUNDINGS, OraclePoint, balanced
from wball.solvers.problem import TransportProblem
from wball.solvers.projection import SWEEP_TOL


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
        self._tol, self._max_iter = max(tol, SWEEP_TOL), max_iter
        self._grid = self.x.float() if x.ndim == 4 else self.x.float()[:, None, None, :]
        self._moves = problem.moves(self._grid)
        mass = self._grid.double().flatten(1).sum(1)
        self.unit = problem.unit
        self._tau = mass / reg
        self._u: Tensor | None = None
        self._psi = torch.full_like(mass, 0.1)
        self.within(problem)

    @staticmethod
    def serves(problem: TransportProblem, reg: float) -> bool:
        """Whether a fused kernel is there for these images; on a CPU ``project`` is as fast and has plans."""
        x = problem.x
        if isinstance(problem.cost, DenseCost) or math.isinf(reg) or result_dtype(x) != torch.float32:
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
        answer = projected_sinkhorn(
            self._grid, target, self.budget, self._moves, box, self._tau,
            u=target - self._grid if self._u is None else self._u, psi=self._psi,
            tol=self._tol, max_iter=self._max_iter,
        )  # fmt: skip
        self._u, self._psi = answer.u, answer.psi.double()
        if self.mode == "paper":
            single = ((self.budget <= 0) | (self._tau <= 0)).view(-1, 1, 1, 1)
            z, share = torch.where(single, self._grid, target - answer.u), torch.ones_like(self.budget)
            cost = torch.full_like(self.budget, math.nan)
        else:
            tau = self._tau.clamp(min=torch.finfo(torch.float64).tiny)
            size = (answer.u.flatten(1).abs().amax(1) + self._psi * self._moves.dearest) / tau
            share = 1 - (6 * torch.finfo(torch.float32).eps * size).clamp(max=0.5)
            z = self._grid + share.float().view(-1, 1, 1, 1) * balanced(self._grid, answer.z, answer.kernel)
            cost = share * answer.cost
        if self.problem.box is not None:
            z = z.clamp(*self.problem.box)
        return OraclePoint(z.view(self.x.shape), cost, share, answer.kernel)

    def take(self, index: Tensor) -> EntropicProjection:
        """The projection of a subset of the images."""
        part = object.__new__(EntropicProjection)
        part.__dict__.update(self.__dict__)
        part.problem = self.problem.take(index)
        for name in ("x", "budget", "unit", "_grid", "_tau", "_psi"):
            setattr(part, name, getattr(self, name)[index])
        part._u = None if self._u is None else self._u[index]
        return part
