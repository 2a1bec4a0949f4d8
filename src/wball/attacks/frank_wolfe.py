r"""Frank-Wolfe: walk towards the farthest point of the ball in the direction of the gradient.

.. math::
    s = \arg\max_{s \in B(x, \epsilon)} \langle \nabla \ell(z), s \rangle, \qquad z \leftarrow z + \gamma\,(s - z)

The ball is convex, so no projection is needed and every iterate is in it. The state is the image alone: no plan is
kept, unless proofs are asked for, and the distance bound is carried along, ``(1 - gamma) d(z) + gamma d(s)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.base import Climb, GradientAttack, distance_bound, plan_of_nothing, spread
from wball.attacks.dual_averaging import normalised
from wball.ball import WassersteinBall
from wball.plan import Plan

LINE_SEARCH = tuple(0.5**k for k in range(7))
"""Step lengths tried by the line search, all at once."""


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

    def run(self, climb: Climb, generator: torch.Generator) -> None:
        # In float64, so that the mixture of many corners is rounded once, for the model.
        z = climb.x.to(torch.float64)
        distance = torch.zeros(climb.x.shape[0], dtype=torch.float64, device=climb.x.device)
        if self.random_start:
            start = climb.ball.sample(climb.x, generator)
            z, distance = start.to(torch.float64), distance_bound(climb.ball, climb.x, start)
        proof: Plan | None = None
        if self.proofs and isinstance(climb.ball, WassersteinBall) and not self.random_start:
            proof = climb.keep_proofs(partial(plan_of_nothing, Plan, climb.ball))
        for step in range(self.steps):
            gradient = climb.gradient(z.to(climb.x.dtype), distance, proof)
            kept = climb.survivors()
            if kept is not None:
                if climb.empty:
                    return
                z, gradient, distance = z[kept], gradient[kept], distance[kept]
                proof = None if proof is None else proof.take(kept)
            corner, reach, plan = self._farthest(climb, gradient)
            if self.rule == "harmonic":
                gamma = torch.full_like(distance, 2 / (step + 2))
            else:
                gamma = self._line_search(climb, z, corner)
            z = z + spread(gamma, z) * (corner - z)
            distance = distance + gamma * (reach - distance)
            if proof is not None and plan is not None:
                proof = proof.mixed(gamma, plan.cancelled())
        climb.offer(z.to(climb.x.dtype), distance, proof)

    def _farthest(self, climb: Climb, gradient: Tensor) -> tuple[Tensor, Tensor, Plan | None]:
        options: dict[str, Any] = {}
        if isinstance(climb.ball, WassersteinBall):
            options = {"tol": self.tol, "max_iter": self.max_iter}
        result = climb.ball.support(climb.x, normalised(gradient), self.reg, **options)
        climb.kernel = result.kernel
        corner = result.point.to(torch.float64)
        if result.plan is not None:
            corner = result.plan.columns().reshape(climb.x.shape)
            corner = corner if climb.ball.box is None else corner.clamp(*climb.ball.box)
        return corner, distance_bound(climb.ball, climb.x, result.point, result.plan), result.plan

    @staticmethod
    def _line_search(climb: Climb, z: Tensor, corner: Tensor) -> Tensor:
        best = torch.full((z.shape[0],), -torch.inf, dtype=climb.x.dtype, device=z.device)
        gamma = torch.zeros(z.shape[0], dtype=torch.float64, device=z.device)
        for length in LINE_SEARCH:
            value = climb.value((z + length * (corner - z)).to(climb.x.dtype))
            gamma = torch.where(value > best, length, gamma)
            best = torch.maximum(best, value)
        return gamma
