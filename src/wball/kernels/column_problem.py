r"""A separable function of the columns, minimised over plans: the problem, the best plan and bound
of each image, and when an image is solved.

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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Timer
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball.cost import Moves
from wball.inputs import dot, per_image
from wball.plan import Plan


@dataclass(frozen=True)
class Columns(ABC):
    """``sum_j f_j(z_j)`` over ``lo <= z <= hi``, and its dual function of ``u``.

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


@dataclass(frozen=True)
class QuadraticColumns(Columns):
    """``f(z) = 1/2 (w - z)^2``: ``z(u) = clip(w - u)``."""

    linear = False

    def objective(self, z: Tensor) -> Tensor:
        return 0.5 * (self.target - z).square().flatten(1).sum(1)

    def least(self, u: Tensor) -> Tensor:
        z = (self.target - u).clamp(self.lo, self.hi)
        return (0.5 * (self.target - z).square() + u * z).flatten(1).sum(1)


@dataclass(frozen=True)
class LinearColumns(Columns):
    """``f(z) = -g z``: ``u = g``, but full columns (``z = hi``) have less and drained ones (``z =
    lo``) more."""

    linear = True

    def objective(self, z: Tensor) -> Tensor:
        return -dot(self.target, z)

    def least(self, u: Tensor) -> Tensor:
        over = u - self.target
        return torch.where(over < 0, self.hi * over, self.lo * over).flatten(1).sum(1)


class Deadline:
    """A time limit of ``seconds`` from now; none by default."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.end = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.end

    def put_off(self, seconds: float) -> None:
        """Extend the deadline, to exclude compilation time."""
        self.end += seconds

    @contextmanager
    def flag(self) -> Iterator[NDArray[Any]]:
        """An array with one number, which becomes 1 at the deadline, because compiled loops cannot
        read a clock."""
        stop = np.zeros(1, dtype=np.int64)
        if math.isinf(self.end):
            yield stop
            return
        timer = Timer(self.end - time.monotonic(), stop.fill, (1,))
        timer.daemon = True
        timer.start()
        try:
            yield stop
        finally:
            timer.cancel()


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


class Images(NamedTuple):
    """The arrays of a :class:`Problem` and its starting points."""

    x: Any
    budget: Any
    target: Any
    start: Any
    tau: Any
    offset: Any
    floor: Any


class Best(NamedTuple):
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

    def to(self, device: torch.device) -> Best:
        """The state on the device of a kernel."""
        return Best(*(values.to(device).contiguous() for values in self))

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

    def images(self, start: Tensor) -> Images:
        """What kernels read of each image."""
        target, limits = self.columns.target, self.tolerance
        return Images(self.x, self.budget, target, start, self.tau, limits.offset, limits.floor)

    def take(self, index: Tensor) -> Problem:
        """The problems of a subset of the images."""
        return self._with(lambda values: values[index])

    def to(self, device: torch.device) -> Problem:
        """Move the problem to the device of a kernel. Compiled kernels need only the costs and
        targets of the moves."""
        return self._with(lambda values: values.to(device))

    def _with(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with ``change`` applied to each of its tensors."""
        limits = self.tolerance
        return replace(
            self,
            x=change(self.x),
            budget=change(self.budget),
            tau=change(self.tau),
            columns=replace(self.columns, target=change(self.columns.target)),
            tolerance=replace(limits, offset=change(limits.offset), floor=change(limits.floor)),
        )

    def at_centre(self, primal: Tensor, bound: Tensor | None = None) -> Best:
        """What is known before the first step: the plans that move nothing, and their objective.
        ``bound`` is a lower bound of the optimum, if known."""
        x = self.x
        still = Plan.identity(self.moves, x).flow
        dual = torch.full_like(primal, -math.inf) if bound is None else bound
        zero, free = torch.zeros_like(x), torch.zeros_like(dual)
        return Best(still, x.clone(), primal, dual, dual.clone(), zero, free)

    @cached_property
    def single(self) -> Tensor:
        """Images without mass or budget: the centre is their only point, unless there are free
        moves."""
        return (self.budget <= 0) | (self.x.flatten(1).sum(1) <= 0)

    @property
    def boxed(self) -> bool:
        """Whether there is a pixel range that a plan can leave."""
        return self.columns.hi < math.inf or self.columns.lo > 0

    @property
    def noise(self) -> Tensor:
        """The size of the terms whose sum is the dual, to which its rounding error is
        proportional; 0 where they do not cancel."""
        if self.exact and not self.columns.linear:
            return torch.zeros_like(self.budget)
        return dot(self.columns.target.abs(), self.x)

    def repaired(self, plan: Plan) -> Plan:
        """A feasible plan near a plan of these rows."""
        # Opposite flows waste budget, but the entropy requires them.
        plan = plan.cancelled() if self.exact else plan
        return plan.repair(self.budget, (self.columns.lo, self.columns.hi) if self.boxed else None)

    def entropy(self, flow: Tensor) -> Tensor:
        """``tau sum P log(pi)`` of rows that sum to x, per image."""
        if self.exact:
            return torch.zeros_like(self.tau)
        share = flow / self.x.unsqueeze(2).clamp(min=1e-300)
        return self.tau * (flow * torch.log(share.clamp(min=1e-300))).flatten(1).sum(1)

    def objective(self, plan: Plan) -> Tensor:
        """The objective to minimise, at the plan."""
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
        """:meth:`lower_bounds` of the optimum with all prices 0."""
        if self.exact and not self.columns.linear:
            return self.columns.objective(
                self.columns.target.clamp(self.columns.lo, self.columns.hi)
            )
        return self.lower_bounds(torch.zeros_like(self.x), torch.zeros_like(self.tau))[0]

    def allowed(self, best: Best, index: Tensor | slice = slice(None)) -> Tensor:
        """The gap at which an image counts as solved; ``index`` says where in ``best`` these images
        are."""
        limits, primal = self.tolerance, best.primal[index]
        if self.exact:  # without entropy both sizes are equal
            return torch.add(limits.floor, (primal + limits.offset).abs(), alpha=limits.tol)
        entropy = self.entropy(best.flow[index])
        size = (primal - entropy + limits.offset).abs()
        return (
            limits.tol * torch.maximum(size, limits.parts * (primal - 2 * entropy)) + limits.floor
        )

    def done(self, best: Best, index: Tensor | slice = slice(None)) -> Tensor:
        """Which images are solved."""
        return best.primal[index] - best.dual[index] <= self.allowed(best, index)

    def todo(self, best: Best) -> Tensor:
        """Positions of the unsolved images whose ball has more than one point."""
        return (~self.single & ~self.done(best)).nonzero().squeeze(1)

    def hold_back(self, best: Best, spend: Tensor) -> None:
        """Shrink plans to a cost of at most ``spend``, to leave room for rounding their points."""
        held = spend < self.budget
        if bool(held.any()):
            plan = Plan(self.moves, best.flow)
            over = held & (plan.cost() > spend)
            plan = plan.within(torch.where(over, spend, math.inf))
            best.flow.copy_(plan.flow)
            best.z.copy_(plan.columns())
            best.primal.copy_(torch.where(over, self.objective(plan), best.primal))
