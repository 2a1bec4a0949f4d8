r"""Frank-Wolfe: walk towards the farthest point of the ball in the direction of the gradient.

.. math::
    s = \arg\max_{s \in B(x, \epsilon)} \langle \nabla \ell(z), s \rangle, \qquad z \leftarrow z +
    \gamma\,(s - z)

The ball is convex, so no projection is needed and every iterate is in it. The state is the image
alone: no plan is kept, unless proofs are asked for, and the distance bound is carried along, ``(1 -
gamma) d(z) + gamma d(s)``.

The method asks for little: a corner ``s`` that is nearly the farthest serves as well, if it is in
the ball. It comes from the oracle of :class:`~wball.DualAveraging`; that of a Wasserstein ball
(:mod:`wball.solvers.oracle`) works at a low temperature and with many sweeps: on the networks that
were tried it gains 98 to 99.7 % of what the farthest point gains. The price and the box potentials
of one step start the next.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from wball.attacks.base import AttackBatch, State, SteppedAttack
from wball.attacks.dual_averaging import normalised
from wball.ball import Oracle
from wball.inputs import per_image, zeros
from wball.plan import Plan
from wball.solvers.oracle import ROUNDINGS

SWEEPS, MOMENTUM, NATS = 30, 0.95, 50.0
"""Of the oracle. A gradient is not like the sum of all before it, which
:class:`~wball.DualAveraging` follows with three plain sweeps: those leave full pixels overfull, and
the repair gives back a fifth of the gain. At ``NATS`` for the way of one pixel the entropy costs
less than 1 % of it, and at twice as many the sweeps no longer suffice."""


@dataclass(kw_only=True)
class _Mixture(State):
    """A convex combination of corners in float64."""

    oracle: Oracle

    @property
    def reads_host(self) -> bool:
        return self.oracle.reads_host or self.proof is not None

    def parts(self) -> tuple[object, ...]:
        return self, self.oracle


@dataclass(frozen=True)
class FrankWolfe(SteppedAttack):
    """Frank-Wolfe with steps ``gamma = 2 / (t + 2)``, on any ball with an oracle.

    Attributes:
        steps: gradient steps.
    """

    def init(self, batch: AttackBatch, generator: torch.Generator) -> _Mixture:
        x = batch.x
        options = {"sweeps": SWEEPS, "momentum": MOMENTUM, "roundings": ROUNDINGS + 1}
        proof = batch.keep_proofs(Plan) if self.proofs else None
        zero = zeros(x)
        # In float64, so that the mixture of many corners is rounded once, for the model.
        z, oracle = x.double(), batch.ball.oracle(x, **options)
        return _Mixture(x, batch.ball, z, zero, proof, oracle=oracle)

    def advance(self, state: _Mixture, gradient: Tensor) -> _Mixture:
        gamma = torch.full_like(state.distance, 2) / (state.n_steps + 2)
        point = state.oracle(state.oracle.along(normalised(gradient), NATS))
        if isinstance(state.proof, Plan) and point.proof is not None:
            state.proof = state.proof.mixed(gamma, point.proof.written().cancelled())
        state.z = state.z + per_image(gamma, state.z) * (point.z - state.z)
        reach = point.cost / state.oracle.unit
        state.distance, state.kernel = (
            state.distance + gamma * (reach - state.distance),
            point.kernel,
        )
        return state
