r"""The attack step's oracle: from potentials to a point of the ball.

Given potentials ``b`` (what the attacker has learnt so far about where mass should arrive), the oracle returns

.. math::
    z = x + t\,(P^T 1 - x), \qquad t = \min(1,\; (1 - \delta)\, budget / cost(\bar P)),

where ``P`` is the entropic plan of :mod:`wball.kernels` and ``bar P`` the same plan after opposite flows cancel: it has
the same rows and columns and proves that ``W(x, P^T 1) <= cost(bar P)``; scaling the moved mass by ``t`` scales that
bound, and ``delta`` covers what rounding does to the flows (what it does to ``z`` is held back from the budget:
``TransportProblem.spendable``). The plan keeps the box and ``x`` is in it, so ``z`` is: every answer is a valid point,
whatever ``b`` is.

Cancelling makes the point cheaper than the plan that was asked for, so the next plan is asked for at a raw budget
``kappa * budget``, with ``kappa`` adapted until the *net* cost is what the ball allows. ``psi``, the box potentials and
``kappa`` are carried from call to call: an attack changes its potentials slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wball.batch import largest, per_image
from wball.inputs import result_dtype
from wball.kernels.entropic_plan import PlanRequest, entropic_plan
from wball.kernels.entropic_plan.pull_back import pull_back
from wball.kernels.linear_maximum import linear_maximum
from wball.plan import FactoredPlan
from wball.solvers.problem import TransportProblem

ROUNDINGS = 2
"""Of a point: when the plan's columns are summed up, and when it is pulled back to the budget. Mixtures of points round
once more."""


CLIP = 250.0
"""Nats from the mean beyond which a potential is as good as any: no way in common windows costs as much, and compiled
loops need no logarithms below."""


@dataclass(frozen=True)
class OraclePoint:
    """A point of the ball.

    Attributes:
        z: images like ``x``.
        cost: what the proving plan of ``z`` costs, per image in mass x pixels, float64: an upper bound of the distance.
        scale: ``t`` above; below 1, the plan had to be scaled down to fit.
        kernel: which implementation computed it.
        proof: that plan, for whoever wants to check; ``None`` where it is not known.
    """

    z: Tensor
    cost: Tensor
    scale: Tensor
    kernel: str = "torch"
    proof: FactoredPlan | None = None


class TransportOracle:
    """Points of a ball from potentials, with the state that makes the next call fast.

    ``oracle(b)`` answers for all images, ``oracle.take(index)`` is the oracle of some of them. ``oracle.unit`` is
    what a cost is divided by to be in the unit of ``eps``.
    """

    def __init__(
        self,
        problem: TransportProblem,
        *,
        sweeps: int = 3,
        newton: int = 12,
        momentum: float = 0.0,
        roundings: int = ROUNDINGS,
    ) -> None:
        self.problem, self.sweeps, self.newton, self.momentum = problem, sweeps, newton, momentum
        x = problem.x
        self.x = x.detach().to(result_dtype(x))
        self._grid = self.x if x.ndim == 4 else self.x[:, None, None, :]
        self.budget = problem.spendable(roundings)
        self._moves = problem.moves(self._grid)
        self._psi: Tensor | None = None
        self._q: Tensor | None = None
        self._kappa: Tensor | None = None

    @property
    def unit(self) -> Tensor:
        return self.problem.unit

    def __call__(self, b: Tensor) -> OraclePoint:
        potentials = b.detach().to(self.x.dtype).reshape(self._grid.shape)
        raw = self.budget if self._kappa is None else self.budget * self._kappa
        request = PlanRequest(
            self._grid, potentials, raw, self._moves, self.problem.box,
            psi=self._psi, q=self._q, sweeps=self.sweeps, newton=self.newton, momentum=self.momentum,
        )  # fmt: skip
        plan = entropic_plan(request)
        self._psi, self._q = plan.psi, plan.q
        point = pull_back(request, plan, self.budget, self._kappa)
        self._kappa = point.kappa
        proof = FactoredPlan(
            self._moves, self._grid, point.chosen, plan.psi, plan.keep, plan.give, point.scale
        )
        return OraclePoint(point.z.view(self.x.shape), point.cost, point.scale, plan.kernel, proof)

    def along(self, g: Tensor, nats: float) -> Tensor:
        """Potentials in a direction, so large that the plan pays ``nats`` for the way of a pixel if no column is full.

        Few pixels may have gradients far above all others, which say nothing about what moves are worth: scaled by
        their largest entry, most of an image would have no potential. Potentials end at :data:`CLIP`.
        """
        grid = g.detach().to(self.x.dtype).reshape(self._grid.shape)
        price = linear_maximum(grid, self._grid, self.budget, self._moves).psi
        most, mass = (
            largest(grid),
            self._grid.flatten(1).sum(1).clamp(min=torch.finfo(grid.dtype).tiny),
        )
        mean = (grid * self._grid).flatten(1).sum(1) / mass
        size = nats / torch.maximum(price, 1e-3 * most).clamp(min=torch.finfo(grid.dtype).tiny)
        return (
            (per_image(size, grid) * (grid - per_image(mean, grid)))
            .clamp(-CLIP, CLIP)
            .view(self.x.shape)
        )

    def take(self, index: Tensor) -> TransportOracle:
        """The oracle of a subset of the images (``index``: positions or a mask)."""
        part = object.__new__(TransportOracle)
        part.__dict__.update(self.__dict__)
        part.problem = self.problem.take(index)
        for name in ("x", "_grid", "budget", "_psi", "_q", "_kappa"):
            value = getattr(self, name)
            setattr(part, name, None if value is None else value[index])
        return part
