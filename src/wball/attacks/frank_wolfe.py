r"""Frank-Wolfe: walk towards the farthest point of the ball in the direction of the gradient.

.. math::
    s = \arg\max_{s \in B(x, \epsilon)} \langle \nabla \ell(z), s \rangle, \qquad z \leftarrow z +
    \gamma\,(s - z)

The ball is convex, so no projection is needed and every iterate is in it. The state is the image
alone: no plan is kept, unless proofs are asked for, and the distance bound is carried along, ``(1 -
gamma) d(z) + gamma d(s)``.

The method asks for little: a corner ``s`` that is nearly the farthest serves as well, if it is in
the ball. On a Wasserstein ball it comes from the oracle of :class:`~wball.DualAveraging`
(:mod:`wball.solvers.oracle`), at a low temperature and with many sweeps: on the networks that were
tried it gains 98 to 99.7 % of what the farthest point gains. The price and the box potentials of
one step start the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wball.attacks.base import AttackBatch, State, SteppedAttack
from wball.attacks.dual_averaging import normalised
from wball.inputs import per_image
from wball.plan import Plan
from wball.solvers.oracle import ROUNDINGS, TransportOracle

SWEEPS, MOMENTUM, NATS = 30, 0.95, 50.0
"""Of the oracle. A gradient is not like the sum of all before it, which
:class:`~wball.DualAveraging` follows with three plain sweeps: those leave full pixels overfull, and
the repair gives back a fifth of the gain. At ``NATS`` for the way of one pixel the entropy costs
less than 1 % of it, and at twice as many the sweeps no longer suffice."""


@dataclass(kw_only=True)
class _Mixture(State):
    """A convex combination of corners in float64. Without an oracle, the corners are the farthest
    points of the ball."""

    oracle: TransportOracle | None

    def parts(self) -> tuple[object, ...]:
        return (self,) if self.oracle is None else (self, self.oracle)


@dataclass(frozen=True)
class FrankWolfe(SteppedAttack):
    """Frank-Wolfe with steps ``gamma = 2 / (t + 2)``, on any ball.

    Attributes:
        steps: gradient steps.
    """

    def init(self, batch: AttackBatch, generator: torch.Generator) -> _Mixture:
        x, problem = batch.x, batch.ball.problem(batch.x)
        zero = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        # In float64, so that the mixture of many corners is rounded once, for the model.
        state = _Mixture(x, batch.ball, x.double(), zero, oracle=None)
        if problem is not None:
            state.oracle = TransportOracle(
                problem, sweeps=SWEEPS, momentum=MOMENTUM, roundings=ROUNDINGS + 1
            )
            state.proof = batch.keep_proofs(Plan) if self.proofs else None
        return state

    def steady(self) -> bool:
        return self.ball.has_plans and not self.proofs

    def advance(self, state: _Mixture, gradient: Tensor) -> _Mixture:
        direction = normalised(gradient)
        gamma = torch.full_like(state.distance, 2) / (state.n_steps + 2)
        if state.oracle is None:
            found = state.ball.support(state.x, direction)
            corner, state.kernel = found.point, found.kernel
            reach = state.ball.distance(state.x, corner).double()
        else:
            point = state.oracle(state.oracle.along(direction, NATS))
            corner, state.kernel, reach = point.z, point.kernel, point.cost / state.oracle.unit
            if isinstance(state.proof, Plan) and point.proof is not None:
                state.proof = state.proof.mixed(gamma, point.proof.written().cancelled())
        state.z = state.z + per_image(gamma, state.z) * (corner - state.z)
        state.distance = state.distance + gamma * (reach - state.distance)
        return state
