r"""The problem of the exact solvers, the best bounds of each image, and when an image is solved.

Projection and support function minimise a separable convex function of the columns over the plans
of a ball,

.. math::
    \min_{P \ge 0,\ P1 = x,\ lo \le z = P^T 1 \le hi,\ \langle P, C\rangle \le E}
    \sum_j f_j(z_j) \;+\; \tau \sum_i x_i \sum_j \pi_{ij} \log \pi_{ij},
    \qquad P_{ij} = x_i \pi_{ij}.

Any feasible plan is an upper bound of the optimum, and any potential ``u`` of the columns with any
price ``psi >= 0`` of cost is a lower one. Kernels improve both (:class:`Best`) until they meet
(:class:`Tolerance`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from wball.cost import Moves
from wball.inputs import dot, per_image
from wball.kernels.columns import Columns
from wball.kernels.deadline import Deadline
from wball.plan import Plan


@dataclass(frozen=True)
class Tolerance:
    """When an image is done.

    That is, when ``primal - dual <= tol * max(|primal - entropy + offset|, parts * (primal - 2
    entropy)) + floor``.
    """

    tol: float
    parts: float
    offset: Tensor
    floor: Tensor

    def take(self, index: Tensor) -> Tolerance:
        return Tolerance(self.tol, self.parts, self.offset[index], self.floor[index])

    def to(self, device: torch.device) -> Tolerance:
        return Tolerance(self.tol, self.parts, self.offset.to(device), self.floor.to(device))


@dataclass(frozen=True)
class Best:
    """What is known about each image, in float64 and improved in place; a minimum is sought.

    Attributes:
        flow: the best plan, ``(B, C, K, H, W)``.
        z: its columns, ``(B, C, H, W)``.
        primal: its objective.
        dual: the best lower bound of the optimum.
        hard: the best lower bound of the optimum without entropy.
        u: column potentials of that bound, ``(B, C, H, W)``.
        psi: price of that bound.
    """

    flow: Tensor
    z: Tensor
    primal: Tensor
    dual: Tensor
    hard: Tensor
    u: Tensor
    psi: Tensor

    def take(self, index: Tensor, device: torch.device) -> Best:
        """A copy of the state of a subset of the images."""
        return Best(*(getattr(self, f.name)[index].to(device).contiguous() for f in fields(self)))

    def put(self, index: Tensor, part: Best) -> None:
        """Write the state of a subset of the images."""
        for f in fields(self):
            book = getattr(self, f.name)
            book[index] = getattr(part, f.name).to(book.device)

    def keep_plan(self, index: Tensor, plan: Plan, primal: Tensor) -> None:
        """Keep feasible plans where they are the best so far."""
        better = primal < self.primal[index]
        self.primal[index] = torch.where(better, primal, self.primal[index])
        self.flow[index[better]] = plan.flow[better]
        self.z[index[better]] = plan.columns()[better]

    def keep_duals(
        self, index: Tensor, u: Tensor, psi: Tensor, bounds: tuple[Tensor, Tensor]
    ) -> None:
        """Keep lower bounds (of the optimum, and of the one without entropy) where they are the
        best so far."""
        bound, hard = bounds
        better = bound > self.dual[index]
        self.dual[index] = torch.where(better, bound, self.dual[index])
        self.hard[index] = torch.maximum(hard, self.hard[index])
        self.u[index[better]] = u[better]
        self.psi[index] = torch.where(better, psi, self.psi[index])


@dataclass(frozen=True)
class Problem:
    """A batch of problems that share the grid and the moves.

    Attributes:
        x: images with mass, ``(B, C, H, W)``, float64.
        budget: positive, per image.
        moves: the moves of the ground cost.
        columns: what is minimised, and the box.
        tau: the temperature.
        exact: whether there is no entropy: all temperatures are 0.
        tolerance: when an image is done.
        deadline: when to stop in any case.
    """

    x: Tensor
    budget: Tensor
    moves: Moves
    columns: Columns
    tau: Tensor
    exact: bool
    tolerance: Tolerance
    deadline: Deadline = field(default_factory=Deadline)

    def take(self, index: Tensor) -> Problem:
        return Problem(
            self.x[index],
            self.budget[index],
            self.moves,
            self.columns.take(index),
            self.tau[index],
            self.exact,
            self.tolerance.take(index),
            self.deadline,
        )

    def to(self, device: torch.device) -> Problem:
        """The problem where a kernel works; compiled ones need of the moves only what they cost and
        where they end."""
        if device == self.x.device:
            return self
        x, budget, tau = (part.to(device) for part in (self.x, self.budget, self.tau))
        columns, tolerance = self.columns.to(device), self.tolerance.to(device)
        return Problem(x, budget, self.moves, columns, tau, self.exact, tolerance, self.deadline)

    @cached_property
    def single(self) -> Tensor:
        """Images without mass or budget: the centre is their only point, unless there are free
        moves."""
        return (self.budget <= 0) | (self.x.flatten(1).sum(1) <= 0)

    @property
    def boxed(self) -> bool:
        """Whether a plan can break the box."""
        return self.columns.hi < math.inf or self.columns.lo > 0

    def repaired(self, plan: Plan) -> Plan:
        """A feasible plan near a plan of these rows."""
        # Opposite flows are waste, but the entropy asks for them.
        plan = plan.cancelled() if self.exact else plan
        return plan.repair(self.budget, (self.columns.lo, self.columns.hi) if self.boxed else None)

    def entropy(self, flow: Tensor) -> Tensor:
        """``tau sum P log(pi)`` of rows that sum to x, per image."""
        if self.exact:
            return torch.zeros_like(self.tau)
        share = flow / self.x.unsqueeze(2).clamp(min=1e-300)
        return self.tau * (flow * torch.log(share.clamp(min=1e-300))).flatten(1).sum(1)

    def objective(self, plan: Plan) -> Tensor:
        """What is minimised, at the plan."""
        return self.columns.objective(plan.columns()) + self.entropy(plan.flow)

    def lower_bounds(self, u: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bounds of the optimum and of the one without entropy, sound for any ``u`` and ``psi
        >= 0``."""
        score = self.moves.gather(u) - per_image(psi, u.unsqueeze(2)) * self.moves.cost
        score = torch.where(self.moves.allowed, score, -math.inf)
        rows = score.amax(2)
        common = self.columns.least(u) - psi * self.budget
        hard = common - dot(self.x, rows)
        if self.columns.linear:  # float64 sums of n terms: widen by far more than they can be off
            hard = hard - 1e-13 * (dot(rows.abs(), self.x) + common.abs())
        hard = torch.where(hard.isfinite(), hard, -math.inf)
        if self.exact:
            return hard, hard
        soft = per_image(self.tau, u) * torch.logsumexp(score / per_image(self.tau, score), 2)
        bound = common - dot(self.x, soft)
        return torch.where(bound.isfinite(), bound, -math.inf), hard

    def bound_without_prices(self) -> Tensor:
        """:meth:`lower_bounds` of the optimum where neither mass nor cost has a price."""
        if self.exact and not self.columns.linear:
            return self.columns.objective(
                self.columns.target.clamp(self.columns.lo, self.columns.hi)
            )
        return self.lower_bounds(torch.zeros_like(self.x), torch.zeros_like(self.tau))[0]

    def allowed(self, best: Best, index: Tensor | slice = slice(None)) -> Tensor:
        """The gap at which an image counts as solved; ``index`` says where in ``best`` these images
        are."""
        limits, primal = self.tolerance, best.primal[index]
        if self.exact:  # the parts are one then, and no more than the whole
            return torch.add(limits.floor, (primal + limits.offset).abs(), alpha=limits.tol)
        entropy = self.entropy(best.flow[index])
        size = (primal - entropy + limits.offset).abs()
        return (
            limits.tol * torch.maximum(size, limits.parts * (primal - 2 * entropy)) + limits.floor
        )

    def done(self, best: Best, index: Tensor | slice = slice(None)) -> Tensor:
        """Which images are solved."""
        return best.primal[index] - best.dual[index] <= self.allowed(best, index)
