r"""Entropic dual averaging on the Wasserstein ball: the default attack.

.. math::
    b \leftarrow b + \eta_t\, \nabla \ell(z) / \|\nabla \ell(z)\|_\infty, \qquad
    z \leftarrow \arg\max_{z = P^T 1} \; \langle b, z \rangle + H(P) \quad \text{over plans } P
    \text{ of the ball}

Potentials accumulate gradients, and the next iterate is the entropic plan they propose
(:class:`wball.solvers.oracle.TransportOracle`): mirror ascent in the geometry of plans, or the
paper's conjugate step applied to the sum of all gradients instead of the last. As the potentials
grow, the entropy matters less and the plan concentrates. Each iterate is in the ball, so there is
nothing to project and each may be the answer. With ``memory`` below 1 the sum forgets old
gradients, :math:`b \leftarrow \mu b + \eta_t \nabla \ell / \|\nabla \ell\|_\infty`, and follows
those near the current iterate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.base import AttackBatch, State, SteppedAttack, normal
from wball.ball import Oracle
from wball.inputs import per_image
from wball.plan import FactoredPlan

START_NATS = 20.0
"""Size of the potentials that pull mass towards a given point."""


@dataclass(kw_only=True)
class Potentials(State):
    """Accumulated gradients, and the oracle that maps them to points of the ball."""

    b: Tensor
    oracle: Oracle

    @property
    def reads_host(self) -> bool:
        return self.oracle.reads_host

    def parts(self) -> tuple[object, ...]:
        return self, self.oracle

    def move(self) -> Potentials:
        """Move to the point of the ball that the potentials define."""
        point = self.oracle(self.b)
        self.z, self.proof, self.kernel = point.z, point.proof, point.kernel
        self.distance = point.cost / self.oracle.unit
        return self


@dataclass(frozen=True)
class DualAveraging(SteppedAttack):
    """Entropic dual averaging.

    Attributes:
        steps: gradient steps.
        step_size: ``eta``, in nats per step: the pixel with the largest gradient gains ``e^eta`` in
            weight.
        decay: the step size falls linearly to ``(1 - decay) * step_size`` at the last step.
        memory: ``mu``, the share of the potentials that is kept in each step.
        random_start: standard deviation of the potentials at the start, in nats; 0 starts at the
            clean image.
        sweeps: coordinate steps on the box potentials per step.
    """

    steps: int = 100
    step_size: float = 3.0
    decay: float = 0.0
    memory: float = 1.0
    random_start: float = 0.0
    sweeps: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("sweeps", self.sweeps, 0)
        inputs.check_positive("step_size", self.step_size)
        for name, share in (("decay", self.decay), ("memory", self.memory)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {share}")
        if not 0 <= self.random_start < math.inf:
            raise ValueError(
                f"random_start must be >= 0 and finite, in nats, got {self.random_start}"
            )

    def init(self, batch: AttackBatch, generator: torch.Generator) -> Potentials:
        x = batch.x
        proof = batch.keep_proofs(FactoredPlan) if self.proofs else None
        oracle = batch.ball.oracle(x, sweeps=self.sweeps)
        state = Potentials(
            x,
            batch.ball,
            x,
            torch.zeros_like(oracle.unit),
            proof,
            b=torch.zeros_like(x),
            oracle=oracle,
        )
        if batch.task.start is not None:
            state.b = START_NATS * normalised(batch.task.start - x)
        if self.random_start > 0:
            state.b = state.b + self.random_start * normal(x, generator)
        if batch.task.start is not None or self.random_start > 0:
            state.move()
        return state

    def advance(self, state: Potentials, gradient: Tensor) -> Potentials:
        eta = self.step_size * (1 - self.decay * state.n_steps / max(1, self.steps - 1))
        state.b = self.memory * state.b + eta * normalised(gradient)
        return state.move()


def normalised(gradient: Tensor) -> Tensor:
    """Each image's gradient divided by its largest entry (0 stays 0)."""
    size = inputs.largest(gradient).clamp(min=torch.finfo(gradient.dtype).tiny)
    return gradient / per_image(size, gradient)
