r"""Score search: dual averaging on gradients estimated from forward passes, for models that hide
theirs.

Only scores are asked for. The model's Jacobian :math:`J` (of its most likely classes) is tracked by
questions around the candidate ``z``, which may leave the ball; the candidate never does:

.. math::
    d_k = f(z + \sigma u_k) - f(z), \qquad J \leftarrow \arg\min \|J' - J\|_F \;\text{ s.t. }\; J'
    \sigma u_k = d_k,

with random directions :math:`u_k` on the pixels that the ball can change. One more equation is
free: what the last step did to the scores. Each step asks about a few directions only and keeps
what it knew about all others, as quasi-Newton methods do: networks are almost linear over the
length of a step, so after a few steps :math:`J` knows every direction, where an average of
:math:`d_k u_k` would still be mostly noise. The objective's gradient is then exact in the scores,
:math:`J^T \nabla \ell(f(z))`, and the step is that of :class:`~wball.DualAveraging`.

Noise must be large enough to cross the steps of a model that rounds, and small enough for a model
to be almost linear.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from wball import inputs
from wball.attacks.base import AttackBatch, GradientAttack, into_box, normal
from wball.attacks.dual_averaging import Potentials, normalised
from wball.ball import Ball
from wball.model import ask
from wball.plan import FactoredPlan

RIDGE = 1e-3
"""Of the equations for the Jacobian, whose rows have length 1."""
MOST_CLASSES = 10
"""Number of Jacobian rows that are kept: the true class and the most likely others."""
AT_ONCE = 8192
"""Images in one forward pass."""


def reachable_pixels(ball: Ball, x: Tensor, generator: Generator) -> Tensor:
    """A mask of the pixels that the ball lets change, found by moving mass along random
    potentials."""
    return (ball.oracle(x)(normal(x, generator)).z != x).to(x)


@dataclass(kw_only=True)
class _Tracked(Potentials):
    """A local model of the scores around the candidate: ``jacobian`` is ``(B, classes,
    pixels)``."""

    classes: Tensor
    jacobian: Tensor
    noise: Tensor
    z_before: Tensor
    logits_before: Tensor


@dataclass(frozen=True)
class QueryAttack(GradientAttack):
    """An attack that estimates gradients from forward passes, which ``result.queries`` counts.

    Attributes:
        queries: forward passes per image, at most.
        directions: noisy copies evaluated at each step.
        step_size: in nats per step, see :class:`~wball.DualAveraging`.
        at_start: forward passes outside the steps: the clean image, the start, the last candidate.
        beside: forward passes of a step beside those of its directions.
    """

    queries: int = 5000
    directions: int = 20
    step_size: float = 3.0
    at_start: ClassVar[int] = 2
    beside: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("directions", self.directions, 2)
        least = self.at_start + self.directions + self.beside
        inputs.check_count("queries", self.queries, least)
        inputs.check_positive("step_size", self.step_size)

    @property
    def n_gradients(self) -> int:
        return (self.queries - self.at_start) // (self.directions + self.beside)


@dataclass(frozen=True)
class ScoreSearch(QueryAttack):
    """Search by scores alone, on any ball.

    Attributes:
        noise: standard deviation of the noise, in widths of the box (pixel values, where there is
            none).
    """

    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_positive("noise", self.noise)

    def init(self, batch: AttackBatch, generator: Generator) -> _Tracked:
        x, oracle = batch.x, batch.ball.oracle(batch.x)
        zero = torch.zeros_like(x)
        others = batch.logits.scatter(1, batch.task.y[:, None], torch.inf)
        classes = others.topk(min(MOST_CLASSES, others.shape[1]), 1).indices
        state = _Tracked(
            x, batch.ball, x, torch.zeros_like(oracle.unit), b=zero, oracle=oracle, classes=classes,
            jacobian=x.new_zeros(len(x), classes.shape[1], x[0:1].numel()),
            noise=zero, z_before=x, logits_before=batch.logits.gather(1, classes),
        )  # fmt: skip
        if self.proofs:
            state.proof = batch.keep_proofs(FactoredPlan)
        low, high = batch.ball.box or (0.0, 1.0)
        state.noise = self.noise * (high - low) * reachable_pixels(batch.ball, x, generator)
        return state

    def gradient(self, batch: AttackBatch, state: _Tracked, generator: Generator) -> Tensor:
        logits = batch.offer(state)
        scores, z = logits.gather(1, state.classes), state.z
        asked = into_box(z + state.noise * normal(z, generator, self.directions), batch.ball.box)
        with torch.no_grad():
            parts = [ask(batch.task.model, part) for part in asked.flatten(0, 1).split(AT_ONCE)]
        answers = torch.cat(parts).view(*asked.shape[:2], -1)
        answers = answers.gather(2, state.classes.expand(len(asked), -1, -1))
        batch.queries += self.directions
        moved = torch.cat([asked - z, (z - state.z_before)[None]]).transpose(0, 1).flatten(2)
        changed = torch.cat([answers - scores, (scores - state.logits_before)[None]]).transpose(
            0, 1
        )
        state.jacobian = _tracked(state.jacobian, moved, changed)
        state.z_before, state.logits_before = z, scores
        with torch.enable_grad():
            logits = logits.detach().requires_grad_(True)
            (pull,) = torch.autograd.grad(batch.loss(logits).sum(), logits)
        pull = pull.gather(1, state.classes).to(state.jacobian)
        return batch.made_step(torch.einsum("bk,bkd->bd", pull, state.jacobian).view_as(z))

    def advance(self, state: _Tracked, gradient: Tensor) -> _Tracked:
        state.b = state.b + self.step_size * normalised(gradient)
        state.move()
        return state


def _tracked(jacobian: Tensor, moved: Tensor, changed: Tensor) -> Tensor:
    """The nearest Jacobian to ``(B, K, D)`` that explains changes ``(B, n, K)`` by moves ``(B, n,
    D)``."""
    length = moved.norm(dim=2, keepdim=True).clamp(min=torch.finfo(moved.dtype).tiny)
    moved, changed = moved / length, (changed / length).nan_to_num(0.0, 0.0, 0.0)
    wrong = changed - torch.einsum("bkd,bnd->bnk", jacobian, moved)
    gram = torch.einsum("bnd,bmd->bnm", moved, moved).double()
    gram = gram + RIDGE * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    # Neither of these synchronises, so that a step can be recorded as a CUDA graph.
    factor, weights = torch.linalg.cholesky_ex(gram).L, wrong.double()
    weights = torch.linalg.solve_triangular(factor, weights, upper=False)
    weights = torch.linalg.solve_triangular(factor.mT, weights, upper=True).to(jacobian)
    return jacobian + torch.einsum("bnk,bnd->bkd", weights, moved)
