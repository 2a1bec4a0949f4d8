r"""Frank-Wolfe: walk towards the farthest point of the ball in the direction of the gradient.

.. math::
    s = \arg\max_{s \in B(x, \epsilon)} \langle \nabla \ell(z), s \rangle, \qquad z \leftarrow z + \gamma\,(s - z)

The ball is convex, so no projection is needed and every iterate is in it. The state is the image alone: no plan is
kept, unless proofs are asked for, and the distance bound is carried along, ``(1 - gamma) d(z) + gamma d(s)``.

The method asks for little: a corner ``s`` that is nearly the farthest serves as well, if it is in the ball. On a
Wasserstein ball it comes from the oracle of :class:`~wball.DualAveraging` (:mod:`wball.solvers.oracle`), at a low
temperature and with many sweeps: on the networks that were tried it gains 98 to 99.7 % of what the farthest point
gains. The price and the box potentials of one step start the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.base import (
    GradientAttack,
    distance_bound,
    into_box,
    plan_of_nothing,
    understood,
)
from wball.attacks.batch import AttackBatch, State
from wball.attacks.dual_averaging import normalised
from wball.batch import per_image
from wball.plan import Plan, StoredPlan
from wball.solvers.oracle import ROUNDINGS, TransportOracle

LINE_SEARCH = tuple(0.5**k for k in range(7))
"""Step lengths tried by the line search, all at once."""

SWEEPS, MOMENTUM, NATS = 60, 0.95, 50.0
"""Of the oracle. A gradient is not like the sum of all before it, which :class:`~wball.DualAveraging` follows with
three plain sweeps: those leave full pixels overfull, and the repair gives back a fifth of the gain. At ``NATS`` for the
way of one pixel the entropy costs less than 1 % of it, and at twice as many the sweeps no longer suffice."""


@dataclass
class _Mixture(State):
    """A mixture of corners in float64, where corners come from, and the objective for the line search.

    Without an oracle, corners are the ball's own farthest points.
    """

    value: Callable[[Tensor], Tensor] = field(kw_only=True)
    oracle: TransportOracle | None = field(kw_only=True)


@dataclass(frozen=True)
class FrankWolfe(GradientAttack):
    """Frank-Wolfe on any ball.

    Attributes:
        steps: gradient steps.
        rule: ``"harmonic"`` steps ``2 / (t + 2)``, or ``"line-search"`` the best of seven lengths from 1 down to 1/64
            (seven forward passes a step).
        reg: ``None`` takes nearly the farthest point, at the temperature that suits the gradient; a number, the
            entropic one for the gradient scaled to a largest entry of 1, the paper's conjugate, as far as the oracle's
            sweeps find it; ``inf`` the exact farthest point, which takes many times as long.
        random_start: start at a random point of the ball.
        tol: tolerance of exact corners.
        max_iter: iterations of exact corners.
    """

    steps: int = 40
    rule: Literal["harmonic", "line-search"] = "harmonic"
    reg: float | None = None
    random_start: bool = False
    tol: float = 1e-3
    max_iter: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("steps", self.steps)
        if self.reg is not None:
            inputs.check_positive("reg", self.reg, inf=True)
        inputs.check_positive("tol", self.tol)
        inputs.check_count("max_iter", self.max_iter)
        if self.rule not in ("harmonic", "line-search"):
            raise ValueError(f'rule must be "harmonic" or "line-search", got {self.rule!r}')

    @property
    def n_gradients(self) -> int:
        return self.steps

    def init(self, batch: AttackBatch, generator: torch.Generator) -> _Mixture:
        x, ball = batch.x, batch.ball
        # In float64, so that the mixture of many corners is rounded once, for the model.
        z, distance = (
            x.to(torch.float64),
            torch.zeros(x.shape[0], dtype=torch.float64, device=x.device),
        )
        proof: Plan | None = None
        if self.random_start:
            start = ball.sample(x, generator)
            z, distance = start.to(torch.float64), distance_bound(ball, x, start)
        elif self.proofs and ball.has_plans:
            proof = batch.keep_proofs(partial(plan_of_nothing, Plan, ball))
        problem = ball.problem(x) if self.reg != math.inf else None
        oracle = None
        if problem is not None:
            oracle = TransportOracle(
                problem, sweeps=SWEEPS, momentum=MOMENTUM, roundings=ROUNDINGS + 1
            )
        return _Mixture(x, ball, z, distance, proof, value=batch.value, oracle=oracle)

    def advance(self, state: _Mixture, gradient: Tensor) -> _Mixture:
        corner, reach, plan = self._corner(state, normalised(gradient))
        if self.rule == "harmonic":
            gamma = torch.zeros_like(state.distance) + 2 / (state.n_steps + 2)
        else:
            gamma = _line_search(state.value, state.z, corner, state.x.dtype)
        if isinstance(state.proof, Plan) and plan is not None:
            state.proof = state.proof.mixed(gamma, plan.written().cancelled())
        state.z = state.z + per_image(gamma, state.z) * (corner - state.z)
        state.distance = state.distance + gamma * (reach - state.distance)
        return state

    def _corner(
        self, state: _Mixture, direction: Tensor
    ) -> tuple[Tensor, Tensor, StoredPlan | None]:
        """About the farthest point in float64, how far it is at most, and the plan that proves it, if there is one."""
        if state.oracle is not None:
            along = (
                state.oracle.along(direction, NATS) if self.reg is None else self.reg * direction
            )
            point = state.oracle(along)
            state.kernel = point.kernel
            return point.z.to(torch.float64), point.cost / state.oracle.unit, point.proof
        options = understood(state.ball.support, tol=self.tol, max_iter=self.max_iter)
        result = state.ball.support(state.x, direction, math.inf, **options)
        state.kernel = result.kernel
        corner, plan = result.point.to(torch.float64), result.plan
        if plan is not None:
            corner = into_box(plan.columns().reshape(state.x.shape), state.ball.box)
        return corner, distance_bound(state.ball, state.x, result.point, plan), plan


def _line_search(
    value: Callable[[Tensor], Tensor], z: Tensor, corner: Tensor, dtype: torch.dtype
) -> Tensor:
    """Of the lengths of :data:`LINE_SEARCH`, the one of highest value, per image."""
    best = torch.full((z.shape[0],), -torch.inf, dtype=dtype, device=z.device)
    gamma = torch.zeros(z.shape[0], dtype=torch.float64, device=z.device)
    for length in LINE_SEARCH:
        reached = value((z + length * (corner - z)).to(dtype))
        gamma = torch.where(reached > best, length, gamma)
        best = torch.maximum(best, reached)
    return gamma
