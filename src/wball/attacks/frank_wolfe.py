r"""Frank-Wolfe: walk towards the farthest point of the ball in the direction of the gradient.

.. math::
    s = \arg\max_{s \in B(x, \epsilon)} \langle \nabla \ell(z), s \rangle, \qquad z \leftarrow z + \gamma\,(s - z)

The ball is convex, so no projection is needed and every iterate is in it. The state is the image alone: no plan is
kept, unless proofs are asked for, and the distance bound is carried along, ``(1 - gamma) d(z) + gamma d(s)``.
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
from wball.attacks.base import GradientAttack, distance_bound, lists_plans, plan_of_nothing, understood
from wball.attacks.batch import AttackBatch, State
from wball.attacks.dual_averaging import normalised
from wball.batch import per_image
from wball.plan import Plan

LINE_SEARCH = tuple(0.5**k for k in range(7))
"""Step lengths tried by the line search, all at once."""


@dataclass
class _Mixture(State):
    """A mixture of corners in float64, and the objective for the line search."""

    value: Callable[[Tensor], Tensor] = field(kw_only=True)


@dataclass(frozen=True)
class FrankWolfe(GradientAttack):
    """Frank-Wolfe on any ball.

    Attributes:
        steps: gradient steps.
        rule: ``"harmonic"`` steps ``2 / (t + 2)``, or ``"line-search"`` the best of seven lengths from 1 down to 1/64
            (seven forward passes a step).
        reg: ``inf`` takes the exact farthest point; finite, the entropic one for the gradient scaled to a largest
            entry of 1, the paper's conjugate.
        random_start: start at a random point of the ball.
        tol: tolerance of the oracle.
        max_iter: iterations of the oracle.
    """

    steps: int = 40
    rule: Literal["harmonic", "line-search"] = "harmonic"
    reg: float = math.inf
    random_start: bool = False
    tol: float = 1e-3
    max_iter: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("steps", self.steps)
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
        z, distance = x.to(torch.float64), torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        proof: Plan | None = None
        if self.random_start:
            start = ball.sample(x, generator)
            z, distance = start.to(torch.float64), distance_bound(ball, x, start)
        elif self.proofs and lists_plans(ball):
            proof = batch.keep_proofs(partial(plan_of_nothing, Plan, ball))
        return _Mixture(x, ball, z, distance, proof, value=batch.value)

    def advance(self, state: _Mixture, gradient: Tensor) -> _Mixture:
        options = understood(state.ball.support, tol=self.tol, max_iter=self.max_iter)
        result = state.ball.support(state.x, normalised(gradient), self.reg, **options)
        corner = result.point.to(torch.float64)
        if result.plan is not None:
            corner = result.plan.columns().reshape(state.x.shape)
            corner = corner if state.ball.box is None else corner.clamp(*state.ball.box)
        reach = distance_bound(state.ball, state.x, result.point, result.plan)
        if self.rule == "harmonic":
            gamma = torch.zeros_like(state.distance) + 2 / (state.n_steps + 2)
        else:
            gamma = _line_search(state.value, state.z, corner, state.x.dtype)
        if isinstance(state.proof, Plan) and result.plan is not None:
            state.proof = state.proof.mixed(gamma, result.plan.cancelled())
        state.z = state.z + per_image(gamma, state.z) * (corner - state.z)
        state.distance = state.distance + gamma * (reach - state.distance)
        state.kernel = result.kernel
        return state


def _line_search(value: Callable[[Tensor], Tensor], z: Tensor, corner: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the lengths of :data:`LINE_SEARCH`, the one of highest value, per image."""
    best = torch.full((z.shape[0],), -torch.inf, dtype=dtype, device=z.device)
    gamma = torch.zeros(z.shape[0], dtype=torch.float64, device=z.device)
    for length in LINE_SEARCH:
        reached = value((z + length * (corner - z)).to(dtype))
        gamma = torch.where(reached > best, length, gamma)
        best = torch.maximum(best, reached)
    return gamma
