r"""Entropic dual averaging on the Wasserstein ball: the default attack.

.. math::
    b \leftarrow b + \eta_t\, \nabla \ell(z) / \|\nabla \ell(z)\|_\infty, \qquad
    z \leftarrow \arg\max_{z = P^T 1} \; \langle b, z \rangle + H(P) \quad \text{over plans } P \text{ of the ball}

Potentials accumulate gradients, and the next iterate is the entropic plan they propose
(:class:`wball.solvers.oracle.TransportOracle`): mirror ascent in the geometry of plans, or the paper's conjugate step
applied to the sum of all gradients instead of the last. As the potentials grow, the entropy matters less and the plan
concentrates. Each iterate is in the ball, so there is nothing to project and each may be the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wball import inputs
from wball.attacks.base import Climb, GradientAttack, plan_of_nothing, spread
from wball.ball import WassersteinBall
from wball.plan import FactoredPlan
from wball.solvers.oracle import TransportOracle
from wball.solvers.problem import unit_of


@dataclass(frozen=True)
class DualAveraging(GradientAttack):
    """Entropic dual averaging.

    Attributes:
        steps: gradient steps.
        step_size: ``eta``, in nats per step: the pixel with the largest gradient gains ``e^eta`` in weight.
        decay: the step size falls linearly to ``(1 - decay) * step_size`` at the last step.
        random_start: standard deviation of the potentials at the start, in nats; 0 starts at the clean image.
        sweeps: coordinate steps on the box potentials per step.
        newton: at most so many Newton steps on the price after each of them.
    """

    steps: int = 100
    step_size: float = 3.0
    decay: float = 0.0
    random_start: float = 0.0
    sweeps: int = 3
    newton: int = 12

    def __post_init__(self) -> None:
        if not isinstance(self.ball, WassersteinBall):
            raise TypeError(f"ball must be a WassersteinBall, got {type(self.ball).__name__}; PGD serves other balls")
        super().__post_init__()
        inputs.check_count("steps", self.steps)
        inputs.check_count("sweeps", self.sweeps, 0)
        inputs.check_count("newton", self.newton, 0)
        inputs.check_positive("step_size", self.step_size)
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        if not 0 <= self.random_start < math.inf:
            raise ValueError(f"random_start must be >= 0 and finite, in nats, got {self.random_start}")

    @property
    def n_gradients(self) -> int:
        return self.steps

    def run(self, climb: Climb, generator: torch.Generator) -> None:
        ball = climb.ball
        assert isinstance(ball, WassersteinBall)
        oracle = TransportOracle(ball, climb.x, sweeps=self.sweeps, newton=self.newton)
        unit = unit_of(ball, climb.x)
        b, z = torch.zeros_like(climb.x), climb.x
        distance = torch.zeros_like(unit)
        proof: FactoredPlan | None = None
        if self.proofs:
            proof = climb.keep_proofs(partial(plan_of_nothing, FactoredPlan, ball))
        if self.random_start > 0:
            noise = torch.randn(b.shape, generator=generator, device=generator.device, dtype=torch.float32)
            b = self.random_start * noise.to(b)
            point = oracle(b)
            z, distance, proof, climb.kernel = point.z, point.cost / unit, point.proof, point.kernel
        for step in range(self.steps):
            gradient = climb.gradient(z, distance, proof)
            eta = self.step_size * (1 - self.decay * step / max(1, self.steps - 1))
            b = b + eta * normalised(gradient)
            kept = climb.survivors()
            if kept is not None:
                if climb.empty:
                    return
                b, oracle, unit = b[kept], oracle.take(kept), unit[kept]
            point = oracle(b)
            z, distance, proof, climb.kernel = point.z, point.cost / unit, point.proof, point.kernel
        climb.offer(z, distance, proof)


def normalised(gradient: Tensor) -> Tensor:
    """Each image's gradient divided by its largest entry (0 stays 0)."""
    largest = spread(gradient.flatten(1).abs().amax(1), gradient)
    return gradient / largest.clamp(min=torch.finfo(gradient.dtype).tiny)
