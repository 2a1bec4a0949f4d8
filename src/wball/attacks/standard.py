"""StandardAttack: a fixed, named, parameter-free ensemble, so that numbers from different papers compare.

Each member attacks only the images that withstood those before it. The members differ in what they climb, because that
is what local optima depend on most: an image that withstands a hundred steps of the margin often yields at once when
the attack aims at its second or third likeliest class. All are :class:`~wball.DualAveraging`, so all points are in the
ball by construction.

``"standard"`` (cite as *wball StandardAttack, standard, version 1*)

========  ============================  =========  =====  ====================
members   objective                     step size  steps  remarks
========  ============================  =========  =====  ====================
1, 2      cross-entropy, margin         6 -> 0     100    linear decay
3, 4      runner-up 2, 3                6 -> 0     100    linear decay
5         runner-up 4                   3          60
6         runner-up 5                   6 -> 0     60     linear decay
7         margin                        3          150
8, 9      runner-up 2, 3                3          80
10        DLR                           10 -> 0    60     linear decay
11 - 14   runner-up 6, 7, 8, 9          3          20
15        cross-entropy                 10 -> 0    60     random start, 3 nats
16        cross-entropy                 6 -> 0     100    random start, 3 nats
17        margin                        6 -> 0     100    random start, 10 nats
18        cross-entropy                 6 -> 0     80     random start, 10 nats
========  ============================  =========  =====  ====================

An image that withstands all costs about thirteen times what one run of 100 steps does.

``"fast"`` is cross-entropy, margin, runner-up 2 and runner-up 3 with 30 steps of 6 -> 0 each: for quick looks.

Targeted at a class, the runner-up members make no sense and are left out, as are runners-up that a model with few
classes does not have. On other balls the members are :class:`~wball.PGD` with the same objectives and steps, and a
random start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from wball.attacks import checks, objectives
from wball.attacks.base import Attack, GradientAttack
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.pgd import PGD
from wball.attacks.progress import Bar
from wball.attacks.result import AttackResult, AttackStatus, joined_kernels
from wball.ball import Ball
from wball.model import Model, ask

Version = Literal["standard", "fast"]


@dataclass(frozen=True)
class _Member:
    objective: str
    step_size: float = 3.0
    steps: int = 100
    decay: float = 0.0
    random_start: float = 0.0

    @property
    def rank(self) -> int:
        """Which wrong class the member aims at, by its rank on the clean image; 0 if at any."""
        objective = objectives.find(self.objective)
        return objective.rank if isinstance(objective, objectives.RunnerUp) else 0

    def on(self, ball: Ball, proofs: bool = False) -> GradientAttack:
        if hasattr(ball, "oracle"):
            return DualAveraging(
                ball,
                objective=self.objective,
                steps=self.steps,
                step_size=self.step_size,
                decay=self.decay,
                random_start=self.random_start,
                progress=False,
                proofs=proofs,
            )
        return PGD(ball, objective=self.objective, steps=self.steps, random_start=True, progress=False)


def _falling(objective: str, step_size: float = 6.0, steps: int = 100, random_start: float = 0.0) -> _Member:
    return _Member(objective, step_size, steps, decay=1.0, random_start=random_start)


MEMBERS: dict[str, tuple[_Member, ...]] = {
    "standard": (
        _falling("cross-entropy"),
        _falling("margin"),
        _falling("runner-up-2"),
        _falling("runner-up-3"),
        _Member("runner-up-4", steps=60),
        _falling("runner-up-5", steps=60),
        _Member("margin", steps=150),
        _Member("runner-up-2", steps=80),
        _Member("runner-up-3", steps=80),
        _falling("dlr", step_size=10.0, steps=60),
        *(_Member(f"runner-up-{rank}", steps=20) for rank in (6, 7, 8, 9)),
        _falling("cross-entropy", step_size=10.0, steps=60, random_start=3.0),
        _falling("cross-entropy", random_start=3.0),
        _falling("margin", random_start=10.0),
        _falling("cross-entropy", steps=80, random_start=10.0),
    ),
    "fast": tuple(_falling(name, steps=30) for name in ("cross-entropy", "margin", "runner-up-2", "runner-up-3")),
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

    def members(self, *, targeted: bool = False, classes: int | None = None) -> tuple[GradientAttack, ...]:
        """The attacks that are run, in order (``classes``: leave out runners-up that do not exist)."""
        most = 0 if targeted else math.inf if classes is None else classes - 1
        return tuple(m.on(self.ball, self.proofs) for m in MEMBERS[self.version] if m.rank <= most)

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
        progress: Bar | None = None,
    ) -> AttackResult:
        best: AttackResult | None = None
        member_of = torch.full((x.shape[0],), -1, dtype=torch.long, device=x.device)
        left = torch.arange(x.shape[0], device=x.device)
        classes = None
        if x.shape[0] > 0:
            with torch.no_grad():
                classes = ask(model, x[:1]).shape[1]
        for number, member in enumerate(self.members(targeted=target is not None, classes=classes)):
            if best is not None and left.numel() == 0:
                break
            goal = None if target is None else target[left]
            found = member.take(left).attack_batch(model, x[left], y[left], goal, generator, progress)
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
        score = objectives.cross_entropy(ask(model, z), y, target)
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
    proof = None
    if best.proof is not None and found.proof is not None:
        proof = best.proof.put(where, found.proof.take(better))
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
        kernel=joined_kernels((best.kernel, found.kernel)),
        proof=proof,
    )
