"""StandardAttack: a fixed, named, parameter-free ensemble, so that numbers from different papers compare.

Each member attacks only the images that withstood those before it. The members differ in what they climb, because that
is what local optima depend on most: an image that withstands a hundred steps of the margin often yields at once when
the attack aims at its second or third likeliest class. All are :class:`~wball.DualAveraging`, so all points are in the
ball by construction.

``"standard"`` (cite as *wball StandardAttack, standard, version 1*)

======  =====================  =========  =====  ======================
member  objective              step size  steps  remarks
======  =====================  =========  =====  ======================
1       margin                 3          100
2 - 6   runner-up 2, 3, 4, 1,  3          100    in this order
        5
7       cross-entropy          10 -> 0    100    linear decay
8       margin                 1          200
9       runner-up 2            10 -> 0    100    linear decay
10      margin                 3          100    random start, 10 nats
======  =====================  =========  =====  ======================

``"fast"`` is member 1 with 30 steps and members 2 and 3 with 20 steps each: for quick looks.

Targeted at a class, the runner-up members make no sense and are left out. On other balls the members are
:class:`~wball.PGD` with the same objectives and steps, and a random start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wball.attacks import checks, objectives
from wball.attacks.base import Attack, AttackResult, AttackStatus, GradientAttack, Tick
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.model import Model
from wball.attacks.pgd import PGD
from wball.ball import Ball, WassersteinBall

Version = Literal["standard", "fast"]


@dataclass(frozen=True)
class _Member:
    objective: str
    step_size: float = 3.0
    steps: int = 100
    decay: float = 0.0
    random_start: float = 0.0

    def on(self, ball: Ball) -> GradientAttack:
        if isinstance(ball, WassersteinBall):
            return DualAveraging(
                ball,
                objective=self.objective,
                steps=self.steps,
                step_size=self.step_size,
                decay=self.decay,
                random_start=self.random_start,
                progress=False,
            )
        return PGD(ball, objective=self.objective, steps=self.steps, random_start=True, progress=False)


MEMBERS: dict[str, tuple[_Member, ...]] = {
    "standard": (
        _Member("margin"),
        _Member("runner-up-2"),
        _Member("runner-up-3"),
        _Member("runner-up-4"),
        _Member("runner-up-1"),
        _Member("runner-up-5"),
        _Member("cross-entropy", step_size=10.0, decay=1.0),
        _Member("margin", step_size=1.0, steps=200),
        _Member("runner-up-2", step_size=10.0, decay=1.0),
        _Member("margin", random_start=10.0),
    ),
    "fast": (
        _Member("margin", steps=30),
        _Member("runner-up-2", steps=20),
        _Member("runner-up-3", steps=20),
    ),
}


@dataclass(frozen=True)
class StandardAttack(Attack):
    """The ensemble of the given version; see the module for its members.

    ``result.member`` says which member (from 0) broke each image, -1 if none did; ``result.loss`` is the cross-entropy
    of the true class (minus that of the target). Images that withstood come with the attempt of highest loss.

    Attributes:
        version: ``"standard"`` or ``"fast"``.
        check: warn of signs that a robust accuracy may be an artefact (:mod:`wball.attacks.checks`).
    """

    version: Version = "standard"
    check: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version not in MEMBERS:
            raise ValueError(f"version must be one of {', '.join(MEMBERS)}, got {self.version!r}")

    def members(self, *, targeted: bool = False) -> tuple[GradientAttack, ...]:
        """The attacks that are run, in order."""
        chosen = MEMBERS[self.version]
        return tuple(m.on(self.ball) for m in chosen if not (targeted and m.objective.startswith("runner-up")))

    @property
    def n_gradients(self) -> int:
        return sum(member.n_gradients for member in self.members())

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:
        if self.check:
            checks.check_model(model, x, y)

    def attack_batch(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        generator: torch.Generator,
        tick: Tick | None = None,
    ) -> AttackResult:
        best: AttackResult | None = None
        member_of = torch.full((x.shape[0],), -1, dtype=torch.long, device=x.device)
        left = torch.arange(x.shape[0], device=x.device)
        for number, member in enumerate(self.members(targeted=target is not None)):
            if best is not None and left.numel() == 0:
                break
            goal = None if target is None else target[left]
            found = member.take(left).attack_batch(model, x[left], y[left], goal, generator, tick)
            found = replace(found, loss=_cross_entropy(model, found.images, y[left], goal))
            member_of[left[found.success]] = number
            best = found if best is None else _merged(best, left, found)
            left = (~best.success).nonzero().squeeze(1)
        assert best is not None
        return replace(best, member=member_of)


def _cross_entropy(model: Model, z: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
    if z.shape[0] == 0:
        return z.new_zeros(0)
    with torch.no_grad():
        score = objectives.cross_entropy(model(z), y, target)
    return objectives.report(objectives.cross_entropy, score, targeted=target is not None)


def _merged(best: AttackResult, index: Tensor, found: AttackResult) -> AttackResult:
    """``best`` with the images at ``index`` replaced where a later member did better."""
    better = found.success | (found.loss > best.loss[index])
    where = index[better]

    def put(old: Tensor, new: Tensor) -> Tensor:
        out = old.clone()
        out[where] = new[better]
        return out

    steps = best.n_steps.clone()
    steps[index] += found.n_steps
    status = list(best.status)
    for i, state, success in zip(index.tolist(), found.status, found.success.tolist(), strict=True):
        # One member with a gradient is enough to say that the image withstood.
        if success or status[i] is AttackStatus.NO_GRADIENT:
            status[i] = state
    return AttackResult(
        put(best.images, found.images),
        put(best.success, found.success),
        put(best.distance, found.distance),
        put(best.loss, found.loss),
        steps,
        tuple(status),
        put(best.radius, found.radius),
    )
