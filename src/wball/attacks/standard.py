"""StandardAttack: a fixed, named, parameter-free ensemble, so that numbers from different papers compare.

Each member attacks only the images that survived those before it. The members differ in what they climb, because that
is what local optima depend on most: an image that survives a hundred steps of the margin often yields at once when
the attack aims at its second or third likeliest class. All points are in the ball by construction.

``"standard"`` (cite as *wball StandardAttack, standard, version 3*)

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
11        cross-entropy                 10 -> 0    60     random start, 3 nats
12        cross-entropy                 6 -> 0     100    random start, 3 nats
13        margin                        6 -> 0     100    random start, 10 nats
14        cross-entropy                 6 -> 0     80     random start, 10 nats
15        margin                        6 -> 0     60     from the best attempt so far
16        margin                        1          100    from the best attempt so far
17        margin                        2          200
18        margin                        6 -> 0     40     smoothed, 0.2
19        cross-entropy                 6 -> 0     60     near only, smoothed, 0.1
20        margin                        6 -> 0     100    near only, random start, 3 nats
21        margin                        0.5        150    near only, from the best attempt so far
22        cross-entropy, runner-up 2, 3  3                score search, 1,000 forward passes
23        none                                            best attempts, rounded to 8 bits
========  ============================  =========  =====  ====================

*Smoothed*: gradients are the mean over noise of that size, in pixel values. Networks that were trained against small
changes of every pixel are flat around an image and hide from gradients what lies a little further.

*Near only*: images whose best attempt is almost an example (:data:`NEAR`), or whose loss was still rising. They are
few, so that many steps cost little.

The first 21 are :class:`~wball.DualAveraging`, the next is :class:`~wball.ScoreSearch` (or
:class:`~wball.DecisionSearch`, for models that only name a class). They look at the model as
:mod:`wball.attacks.views` says: where its own gradients are of no use, members 1 to 21 climb those of smooth stand-ins
or of detours, and the search may ask 5,000 times; models that answer at random are averaged, and the majority of 15
answers decides. After an example by a hair (:data:`CLEARLY`) the next members look for a clearer one; if there is none,
it counts if it is one in batches of other sizes, too.
``result.findings`` lists what all that, and the control experiments after it (:mod:`wball.attacks.control`), tell about
the numbers (:mod:`wball.attacks.findings`).

Version 3 has no runners-up 6 to 9. The last member is for images that are stored with 8 bits: a model may be weak only
there. ``"fast"`` is cross-entropy, margin,
runner-up 2 and runner-up 3 with 30 steps of 6 -> 0 each: for quick looks.

Targeted at a class, the runner-up members make no sense and are left out, as are runners-up that a model with few
classes does not have. On balls without an oracle of their own the gradient members are :class:`~wball.PGD` with the
same objectives and steps, and a random start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from wball.attacks import checks, control, objectives
from wball.attacks.base import Attack, GradientAttack
from wball.attacks.decision_search import DecisionSearch
from wball.attacks.detours import Smoothed
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.findings import Finding, merged
from wball.attacks.levels import on_levels, to_levels
from wball.attacks.pgd import PGD
from wball.attacks.progress import Bar
from wball.attacks.result import AttackResult, AttackStatus, empty, without
from wball.attacks.score_search import ScoreSearch
from wball.attacks.search import Search
from wball.attacks.views import LOOKED_AT, View, best_view
from wball.ball import Ball
from wball.model import Model, as_found, ask, check_classes, full_precision
from wball.result import joined_kernels

Version = Literal["standard", "fast"]

QUERIES, QUERIES_IF_HIDDEN = 1000, 5000
"""Forward passes per image of the score search: where gradients are of use, and where they are not."""
CLEARLY = 1e-3
"""An example whose margin is below this share of the logits may be none in a batch of another size: sums are added up
in another order there, and convolutions round to 10 bits on many GPUs. The next members look for a clearer one."""

NEAR = 0.1
"""An attempt is almost an example if its margin is below this share of the clean image's."""


@dataclass(frozen=True)
class _Member:
    objective: str
    step_size: float = 3.0
    steps: int = 100
    decay: float = 0.0
    random_start: float = 0.0
    from_best: bool = False
    near: bool = False
    smoothed: float = 0.0

    @property
    def steady(self) -> bool:
        """Whether its last steps are as long as its first, and many: then they tell whether more would help."""
        return self.decay == 0 and self.steps >= 100

    @property
    def rank(self) -> int:
        """Which wrong class the member aims at, by its rank on the clean image; 0 if at any."""
        objective = objectives.find(self.objective)
        return objective.rank if isinstance(objective, objectives.RunnerUp) else 0

    def on(self, ball: Ball, proofs: bool = False) -> GradientAttack:
        if ball.has_plans:
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
        return PGD(
            ball, objective=self.objective, steps=self.steps, random_start=True, progress=False
        )


def _falling(
    objective: str,
    step_size: float = 6.0,
    steps: int = 100,
    random_start: float = 0.0,
    from_best: bool = False,
    near: bool = False,
    smoothed: float = 0.0,
) -> _Member:
    return _Member(objective, step_size, steps, 1.0, random_start, from_best, near, smoothed)


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
        _falling("cross-entropy", step_size=10.0, steps=60, random_start=3.0),
        _falling("cross-entropy", random_start=3.0),
        _falling("margin", random_start=10.0),
        _falling("cross-entropy", steps=80, random_start=10.0),
        _falling("margin", steps=60, from_best=True),
        _Member("margin", step_size=1.0, from_best=True),
        _Member("margin", step_size=2.0, steps=200),
        _falling("margin", steps=40, smoothed=0.2),
        _falling("cross-entropy", steps=60, near=True, smoothed=0.1),
        _falling("margin", random_start=3.0, near=True),
        _Member("margin", step_size=0.5, steps=150, from_best=True, near=True),
    ),
    "fast": tuple(
        _falling(name, steps=30)
        for name in ("cross-entropy", "margin", "runner-up-2", "runner-up-3")
    ),
}


@dataclass(frozen=True)
class StandardAttack(Attack):
    """The ensemble of the given version; see the module for its members.

    ``result.member`` says which member (from 0) broke each image, -1 if none did; ``result.loss`` is the cross-entropy
    of the true class (minus that of the target). Images that survived come with the attempt of highest loss.

    Attributes:
        version: ``"standard"`` or ``"fast"``.
        check: warn of signs that a robust accuracy may be an artefact (:mod:`wball.attacks.checks`).
        view: how to look at the model (:meth:`prepared` finds it); ``None`` finds it anew for every batch.
    """

    version: Version = "standard"
    check: bool = True
    view: View | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version not in MEMBERS:
            raise ValueError(f"version must be one of {', '.join(MEMBERS)}, got {self.version!r}")

    def members(
        self,
        *,
        targeted: bool = False,
        classes: int | None = None,
        hidden: bool = False,
        labels_only: bool = False,
    ) -> tuple[GradientAttack, ...]:
        """The attacks that are run, in order.

        Args:
            targeted: leave out those that aim at a class of their own.
            classes: leave out runners-up that do not exist.
            hidden: as for a model that hides its gradients.
            labels_only: as for a model that hides its scores as well.
        """
        members = tuple(
            m.on(self.ball, self.proofs) for m in self._gradient_members(targeted, classes)
        )
        if self.version != "standard":
            return members
        if labels_only:
            return *members, DecisionSearch(self.ball, queries=QUERIES_IF_HIDDEN, progress=False)
        queries = QUERIES_IF_HIDDEN if hidden else QUERIES
        return *members, ScoreSearch(self.ball, queries=queries, progress=False, proofs=self.proofs)

    def _gradient_members(self, targeted: bool, classes: int | None) -> list[_Member]:
        most = 0 if targeted else math.inf if classes is None else classes - 1
        return [member for member in MEMBERS[self.version] if member.rank <= most]

    @property
    def n_gradients(self) -> int:
        return sum(member.n_gradients for member in self.members())

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:
        if self.check:
            checks.check_model(model, x, y)

    def prepared(self, model: Model, x: Tensor, y: Tensor) -> StandardAttack:
        """The attack with its view of the model: several calls on one model, as at several radii, share it."""
        if self.view is not None:
            return self
        with as_found(model, x.device), torch.inference_mode(False):
            return replace(
                self, view=self._view(model, x[:LOOKED_AT].clone(), y[:LOOKED_AT].clone())
            )

    def _view(self, model: Model, x: Tensor, y: Tensor) -> View:
        return best_view(model, x, y, self.ball)

    def attack_batch(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        generator: torch.Generator,
        progress: Bar | None = None,
        start: Tensor | None = None,
    ) -> AttackResult:
        if x.shape[0] == 0:
            return replace(empty(x), member=torch.zeros(0, dtype=torch.long, device=x.device))
        with torch.no_grad():
            outputs = ask(model, x[:1])
        check_classes("y", y, outputs)
        if target is not None:
            check_classes("target", target, outputs)
        view = self.view or self._view(model, x, y)
        hidden, targeted = not (view.is_useful and (view.own or view.clear)), target is not None
        members = self.members(
            targeted=targeted, classes=outputs.shape[1], hidden=hidden, labels_only=view.labels_only
        )
        if self.levels is not None:
            members = tuple(replace(member, until_success=False) for member in members)
        kinds = dict(enumerate(self._gradient_members(targeted, outputs.shape[1])))
        best: AttackResult | None = None
        member_of = torch.full((x.shape[0],), -1, dtype=torch.long, device=x.device)
        rising, unclear = (
            torch.zeros_like(member_of, dtype=torch.bool),
            torch.ones_like(member_of, dtype=torch.bool),
        )
        near, almost = torch.zeros_like(rising), None
        rejected = torch.zeros_like(rising)
        if any(kind.near for kind in kinds.values()):
            with torch.no_grad():
                almost = NEAR * objectives.margin(ask(view.model, x), y, target)
        for number, member in enumerate(members):
            kind = kinds.get(number)
            here = (
                (unclear & (near | rising) if kind is not None and kind.near else unclear)
                .nonzero()
                .squeeze(1)
            )
            if here.numel() == 0:
                continue
            goal = None if target is None else target[here]
            begin = None if start is None else start[here]
            if best is not None and kind is not None and kind.from_best:
                begin = best.images[here]
            asked = view.model
            if kind is not None and kind.smoothed:
                if view.random or isinstance(asked, Smoothed):  # they are averaged already
                    continue
                asked = Smoothed(asked, kind.smoothed, self.ball.box, generator)
            found = member.take(here).attack_batch(
                asked, x[here], y[here], goal, generator, progress, begin
            )
            if kind is not None and kind.steady and found.rising is not None:
                rising[here] = found.rising
            found = self.stored(found, model, x[here], y[here], goal, self.ball.take(here))
            claimed = found.success
            found, margin, clear = _judged(found, view, model, y[here], goal)
            rejected[here] |= claimed & ~found.success
            better = torch.ones_like(clear) if best is None else _is_better(best, here, found)
            best = found if best is None else _merged(best, here, found, better)
            member_of[here[found.success & better]] = number
            if almost is not None:
                near[here] |= margin > almost[here]
            unclear[here] = ~clear
        assert best is not None
        here = (rejected & ~best.success).nonzero().squeeze(1)
        if here.numel() and x.is_cuda and not view.random:
            # TF32 led the members to examples that are none: one attempt without it.
            goal, begin = None if target is None else target[here], best.images[here]
            member = _falling("margin", steps=60).on(self.ball.take(here), self.proofs)
            with full_precision():
                found = member.attack_batch(
                    view.model, x[here], y[here], goal, generator, progress, begin
                )
            found = self.stored(found, model, x[here], y[here], goal, self.ball.take(here))
            found = _judged(found, view, model, y[here], goal)[0]
            better = _is_better(best, here, found)
            best = _merged(best, here, found, better)
            member_of[here[found.success & better]] = 1
        if self.version == "standard" and self.levels is None and on_levels(x, 256):
            best = self._rounded(best, view, model, x, y, target)
            member_of[best.success & (member_of < 0)] = len(members)
        by_a_hair = (best.success & unclear).nonzero().squeeze(1)
        if by_a_hair.numel() and not view.random:
            goal = None if target is None else target[by_a_hair]
            held = _asked_again(view, model, best.images[by_a_hair], y[by_a_hair], goal)
            best = without(best, by_a_hair[~held])
            member_of[by_a_hair[~held]] = -1
        best = replace(best, member=member_of, rising=rising & ~best.success)
        return replace(best, findings=self._findings(view, model, x, y, best, members, targeted))

    def _rounded(
        self,
        best: AttackResult,
        view: View,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
    ) -> AttackResult:
        """The result with examples among the best attempts of surviving images, rounded to 8 bits."""
        left = (~best.success).nonzero().squeeze(1)
        if left.numel() == 0:
            return best

        def judged(index: Tensor, images: Tensor) -> Tensor:
            here = left[index]
            return view.judge(model, images, y[here], None if target is None else target[here])

        attempts = replace(
            best,
            images=best.images[left],
            success=torch.ones_like(left, dtype=torch.bool),
            distance=best.distance[left],
            status=(AttackStatus.FOUND,) * left.numel(),
        )
        found = to_levels(attempts, self.ball.take(left), x[left], 256, judged)
        broken = left[found.success]
        if broken.numel() == 0:
            return best
        images, success, distance = (t.clone() for t in (best.images, best.success, best.distance))
        images[broken], success[broken] = found.images[found.success], True
        distance[broken] = found.distance[found.success]
        status = list(best.status)
        for i in broken.tolist():
            status[i] = AttackStatus.FOUND
        # Rounding has no plan: the audit solves for the distance.
        return replace(
            best,
            images=images,
            success=success,
            distance=distance,
            status=tuple(status),
            proof=None,
        )

    def stored(
        self,
        found: AttackResult,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        ball: Ball,
    ) -> AttackResult:
        """The result on the levels. Members' examples are judged by the view, which knows of random answers."""
        if self.levels is None:
            return found
        return super().stored(found, model, x, y, target, ball)

    def _findings(
        self,
        view: View,
        model: Model,
        x: Tensor,
        y: Tensor,
        best: AttackResult,
        members: tuple[GradientAttack, ...],
        targeted: bool,
    ) -> tuple[Finding, ...]:
        assert best.member is not None and best.rising is not None
        count, survived = best.success.numel(), ~best.success
        alive = int(survived.sum())
        found = [control.not_finite(model, x, best.images)]
        if not view.is_useful and alive:
            found.append(Finding("masked-gradients", alive, count))
        if isinstance(members[-1], Search):
            found.append(
                Finding("black-box-stronger", int((best.member == len(members) - 1).sum()), count)
            )
        if view.random:
            found.append(Finding("random-answers", count, count))
        if any(member.steady for member in MEMBERS[self.version]):
            found.append(Finding("loss-still-rising", int(best.rising.sum()), count))
        if alive and not targeted:
            found.append(control.missed_in_full_ball(members[:2], view, model, x, y, survived))
        if not view.own:
            found.append(Finding("stand-in-gradients", count, count))
        if view.probabilities:
            found.append(Finding("probabilities", count, count))
        return merged(found)


def _judged(
    found: AttackResult, view: View, model: Model, y: Tensor, target: Tensor | None
) -> tuple[AttackResult, Tensor, Tensor]:
    """What a member found, with success judged on the model itself, and its cross-entropy. Also: its margin, and which
    successes are clear, rather than by less than the rounding of a batch of another size."""
    with torch.no_grad():
        logits = ask(view.model, found.images)
    score = objectives.cross_entropy(logits, y, target)
    loss = objectives.report(objectives.cross_entropy, score, targeted=target is not None)
    success = found.success & view.judge(model, found.images, y, target)
    changed = (success != found.success).tolist()
    status = tuple(
        AttackStatus.SURVIVED if c else s for s, c in zip(found.status, changed, strict=True)
    )
    margin = objectives.margin(logits, y, target)
    ahead = margin > CLEARLY * logits.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    return (
        replace(found, loss=loss, success=success, status=status),
        margin,
        success & (ahead | view.random),
    )


def _asked_again(view: View, model: Model, z: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
    """Which examples still are some in batches of other sizes: each alone, and all of them twice."""
    goals = [None] * len(z) if target is None else list(target.split(1))
    alone = torch.cat(
        [view.judge(model, *one) for one in zip(z.split(1), y.split(1), goals, strict=True)]
    )
    twice = None if target is None else target.repeat(2)
    again = view.judge(model, torch.cat([z, z]), y.repeat(2), twice)
    return alone & again[: len(z)] & again[len(z) :]


def _is_better(best: AttackResult, index: Tensor, found: AttackResult) -> Tensor:
    """Where a later member did better: a success, or a higher loss."""
    before = best.success[index]
    return (found.success & ~before) | ((found.success == before) & (found.loss > best.loss[index]))


def _merged(best: AttackResult, index: Tensor, found: AttackResult, better: Tensor) -> AttackResult:
    """``best`` with the images at ``index`` replaced where a later member did ``better``."""
    where = index[better]

    def put(old: Tensor, new: Tensor) -> Tensor:
        out = old.clone()
        out[where] = new[better]
        return out

    steps, queries = best.n_steps.clone(), None
    steps[index] += found.n_steps
    if best.queries is not None and found.queries is not None:
        queries = best.queries.clone()
        queries[index] += found.queries
    proof = None
    if best.proof is not None and found.proof is not None:
        proof = best.proof.put(where, found.proof.take(better))
    status = list(best.status)
    for i, state, success in zip(index.tolist(), found.status, found.success.tolist(), strict=True):
        # One member with a gradient is enough to say that the image survived.
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
        queries=queries,
    )
