"""StandardAttack: a fixed ensemble without parameters, so that numbers from different papers
compare.

Each member attacks only the images that survived those before it. The members differ mainly in
their objective, because local optima depend on it most: an image that survives a hundred steps of
the margin is often broken at once by an attack on its second or third likeliest class.

``"standard"`` (cite as *wball StandardAttack, standard, version 6*)

=======  =============  =========  =====  ======================================================
member   objective      step size  steps  remarks
=======  =============  =========  =====  ======================================================
1        cross-entropy  6 -> 0     100    linear decay
2        margin         6 -> 0     100
3        runner-up-2    6 -> 0     100
4        runner-up-3    6 -> 0     100
5        runner-up-4    3          60     constant step size
6        runner-up-5    6 -> 0     60
7        margin         3          150    constant step size
8, 9     runner-up-2/3  10         80     constant step size, memory 0.9
10       dlr            10 -> 0    60
11       cross-entropy  10 -> 0    60     random start, 3 nats
12       cross-entropy  6 -> 0     100    random start, 3 nats
13       margin         10         200    constant step size, memory 0.9
14       cross-entropy  10         100    constant step size, memory 0.9
15       margin         6 -> 0     60     from the best attempt
16       margin         5          150    constant step size, memory 0.95, from the best attempt
17       margin         10         150    constant step size, memory 0.9, from the best attempt
18       margin         6 -> 0     40     smoothed, 0.2
19       cross-entropy  6 -> 0     60     near only, smoothed, 0.1
20       margin         3          200    memory 0.97, near only, from the best attempt
21       margin         0.5        150    constant step size, from the best attempt
22       margin         6 -> 0     40     on the model behind rounding to 8 bits
23       scores                           search without gradients, 1,000 forward passes
24       several        6 -> 0     30     on students, which learn the model's labels
25       none                             attempts of members 22 and 24, rounded to 8 bits
=======  =============  =========  =====  ======================================================

- *Smoothed*: the gradient is the mean over noise of that size, in pixel values. Networks trained
  against small changes of every pixel are flat around an image.
- *Memory*: the share of the accumulated gradients that is kept in each step. Networks without
  adversarial training bend within the ball, and gradients at the clean image mislead.
- *Near only*: images whose best attempt is almost an example (:data:`NEAR`), or whose loss was
  still rising.
- Members 1 to 22 are :class:`~wball.DualAveraging`, or :class:`~wball.PGD` with a random start on
  balls without plans. Member 23 is :class:`~wball.ScoreSearch`.
- Member 24 (:class:`wball.attacks.control.Student`) uses nothing of the model but its labels, so
  that no mask matters to it. It runs if more images survive than one in fifty, on the bundled
  network whose examples fool the model most often, or on a small one with random weights. Rounds of
  learning and attacking follow each other until nothing new is broken.
- Members 22 and 25 run if the images are 8-bit images: a model may be weak only there.
- Targeted attacks leave out the runner-up members, as do models with too few classes for them.

All members attack the view of the model that :mod:`wball.attacks.views` selects. If no gradients
predict it clearly, the search has 5,000 forward passes. Random models are averaged, and the
majority of 15 answers decides. If an example has a tiny margin (:data:`CLEARLY`), the next members
search for a clearer one; otherwise it counts if it is also an example in a batch of its own.
``result.findings`` lists what the views and the control experiments (:mod:`wball.attacks.control`)
say about the numbers.

``"fast"`` is a quick look: cross-entropy, margin, runner-up-2 and runner-up-3 with 30 steps of 6 ->
0 each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from wball import inputs
from wball.attacks import control
from wball.attacks.attack import (
    Attack,
    AttackResult,
    AttackStatus,
    StepCount,
    Task,
    empty,
    to_levels,
    updated,
    without,
)
from wball.attacks.base import (
    GradientAttack,
    cross_entropy,
    find_objective,
    margin,
    reported_loss,
)
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.findings import FEW_SURVIVORS, Finding, ModelWarning, merged
from wball.attacks.levels import on_levels
from wball.attacks.score_search import ScoreSearch
from wball.attacks.stand_ins import Smoothed
from wball.attacks.views import LOOKED_AT, View, best_view, find_signs
from wball.ball import Ball
from wball.model import Model, as_found, ask, check_classes, full_precision

Version = Literal["standard", "fast"]
Journal = Callable[[Task, torch.Generator, Callable[[], AttackResult]], AttackResult]
"""Runs the attack of a member on a task, or returns its stored result if it ran before an
interruption (:mod:`wball.evaluation.journal`)."""

VERSION = 6
"""Number of the member list; results name it."""
QUERIES, QUERIES_IF_HIDDEN = 1000, 5000
"""Forward passes per image of the search: with useful gradients, and without."""
CLEARLY = 1e-3
"""Margin of a clear example, relative to the logits. In a batch of another size sums are added in
another order, so that an example with a smaller margin may be none there."""
NEAR = 0.1
"""An attempt is almost an example if its margin is below this share of the clean image's."""
STUDENT_ROUNDS, SAMPLES = 8, 4
"""Attacks on a student at most, and random points per image whose labels it learns."""
AUDITION = 16
"""Images that networks for a student to start from are compared on."""


@dataclass(frozen=True)
class _Member:
    """Settings of one gradient attack of the ensemble."""

    objective: str
    step_size: float = 6.0
    steps: int = 100
    decay: float = 1.0
    memory: float = 1.0
    random_start: float = 0.0
    from_best: bool = False
    near: bool = False
    smoothed: float = 0.0
    on_bytes: bool = False

    @property
    def steady(self) -> bool:
        """Whether the last steps are as long as the first, so that they show whether more steps
        would help."""
        return self.decay == 0 and self.memory == 1 and self.steps >= 100

    @property
    def rank(self) -> int:
        """Rank of the wrong class that the member aims at; 0 for any class."""
        rank: int = getattr(find_objective(self.objective), "rank", 0)
        return rank

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value)

    def on(self, ball: Ball, proofs: bool = False) -> GradientAttack:
        return DualAveraging(
            ball,
            objective=self.objective,
            steps=self.steps,
            step_size=self.step_size,
            decay=self.decay,
            memory=self.memory,
            random_start=self.random_start,
            progress=False,
            proofs=proofs,
        )


SEARCH = _Member("scores")
"""The search without gradients, which has no other settings."""

MEMBERS: dict[str, tuple[_Member, ...]] = {
    "standard": (
        _Member("cross-entropy"),
        _Member("margin"),
        _Member("runner-up-2"),
        _Member("runner-up-3"),
        _Member("runner-up-4", step_size=3.0, decay=0.0, steps=60),
        _Member("runner-up-5", steps=60),
        _Member("margin", step_size=3.0, decay=0.0, steps=150),
        _Member("runner-up-2", step_size=10.0, decay=0.0, steps=80, memory=0.9),
        _Member("runner-up-3", step_size=10.0, decay=0.0, steps=80, memory=0.9),
        _Member("dlr", step_size=10.0, steps=60),
        _Member("cross-entropy", step_size=10.0, steps=60, random_start=3.0),
        _Member("cross-entropy", random_start=3.0),
        _Member("margin", step_size=10.0, decay=0.0, steps=200, memory=0.9),
        _Member("cross-entropy", step_size=10.0, decay=0.0, memory=0.9),
        _Member("margin", steps=60, from_best=True),
        _Member("margin", step_size=5.0, decay=0.0, steps=150, memory=0.95, from_best=True),
        _Member("margin", step_size=10.0, decay=0.0, steps=150, memory=0.9, from_best=True),
        _Member("margin", steps=40, smoothed=0.2),
        _Member("cross-entropy", steps=60, near=True, smoothed=0.1),
        _Member(
            "margin", step_size=3.0, decay=0.0, steps=200, memory=0.97, near=True, from_best=True
        ),
        _Member("margin", step_size=0.5, decay=0.0, steps=150, from_best=True),
        _Member("margin", steps=40, on_bytes=True),
    ),
    "fast": tuple(
        _Member(name, steps=30)
        for name in ("cross-entropy", "margin", "runner-up-2", "runner-up-3")
    ),
}

TRANSFERRED = tuple(_Member(name, steps=30) for name in ("margin", "cross-entropy", "runner-up-2"))
"""Attacks on a student, by turns."""


@dataclass(frozen=True)
class StandardAttack(Attack):
    """The ensemble of the given version; see the module for its members.

    ``result.member`` is the member (from 0) that broke each image, -1 if none did. ``result.loss``
    is the cross-entropy of the true class (minus that of the target). Images that survived come
    with the attempt of highest loss.

    Attributes:
        version: ``"standard"`` or ``"fast"``.
        check: warn of signs that a robust accuracy may be an artefact
            (:class:`wball.attacks.findings.ModelWarning`).
        view: the view of the model (from :meth:`prepared`); ``None`` selects one for every batch.
        journal: keeps the result of each member, so that an interrupted attack can be resumed.
    """

    version: Version = "standard"
    check: bool = True
    view: View | None = field(default=None, repr=False, compare=False)
    journal: Journal | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_choice("version", self.version, MEMBERS)

    def describe(self) -> dict[str, Any]:
        """The settings as plain data, with the number of the version and the list of members."""
        members = [str(member) for member in MEMBERS[self.version]]
        if self.version == "standard":
            search = f"search without gradients, {QUERIES} forward passes"
            members += [search, "students", "8-bit rounding"]
        return {**super().describe(), "version_number": VERSION, "members": members}

    def members(
        self,
        *,
        targeted: bool = False,
        classes: int | None = None,
        hidden: bool = False,
    ) -> tuple[GradientAttack, ...]:
        """The attacks of the ensemble, in order.

        Args:
            targeted: leave out runner-up members.
            classes: leave out runner-up members for classes that do not exist.
            hidden: as for a model without useful gradients.
        """
        kinds = self._gradient_members(targeted, classes)
        members = tuple(kind.on(self.ball, self.proofs) for kind in kinds)
        if self.version != "standard":
            return members
        queries = QUERIES_IF_HIDDEN if hidden else QUERIES
        return *members, ScoreSearch(self.ball, queries=queries, progress=False, proofs=self.proofs)

    def _gradient_members(self, targeted: bool, classes: int | None) -> list[_Member]:
        most = 0 if targeted else math.inf if classes is None else classes - 1
        return [member for member in MEMBERS[self.version] if member.rank <= most]

    @property
    def n_gradients(self) -> int:
        return sum(member.n_gradients for member in self.members())

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:
        for message in find_signs(model, x, y).values() if self.check else ():
            warnings.warn(message, ModelWarning, stacklevel=3)

    def prepared(self, model: Model, x: Tensor, y: Tensor) -> StandardAttack:
        """The attack with a fixed view of the model, for several calls on one model, such as at
        several radii."""
        if self.view is not None:
            return self
        first, labels = x[:LOOKED_AT].clone(), y[:LOOKED_AT].clone()
        with as_found(model, x.device), torch.inference_mode(False):
            return replace(self, view=best_view(model, first, labels, self.ball))

    def attack_batch(
        self, task: Task, generator: torch.Generator, progress: StepCount | None = None
    ) -> AttackResult:
        x = task.x
        if len(task) == 0:
            return replace(empty(x), member=torch.zeros(0, dtype=torch.long, device=x.device))
        with torch.no_grad():
            outputs = ask(task.model, x[:1])
        check_classes("y", task.y, outputs)
        if task.target is not None:
            check_classes("target", task.target, outputs)
        view = self.view or best_view(task.model, x, task.y, self.ball)
        hidden, classes = not (view.is_useful and view.clear), outputs.shape[1]
        targeted = task.target is not None
        members = self.members(targeted=targeted, classes=classes, hidden=hidden)
        if self.levels is not None:
            members = tuple(replace(member, until_success=False) for member in members)
        kinds = [*self._gradient_members(targeted, classes), SEARCH]
        ensemble = _Ensemble(self, view, task)
        steps = 0
        for number, (kind, member) in enumerate(zip(kinds, members, strict=False)):
            here = ensemble.attacked_by(kind)
            if progress is not None:
                progress.reach(steps, here.numel())
            steps += member.n_gradients
            if here.numel() == 0:
                continue
            part = replace(task.take(here), model=view.model)
            if kind.from_best and ensemble.best is not None:
                part = replace(part, start=ensemble.best.images[here])
            if kind.smoothed:
                if view.random:  # averaged already
                    continue
                smoothed = Smoothed(view.model, kind.smoothed, self.ball.box, generator)
                part = replace(part, model=smoothed)
            if kind.on_bytes:
                part = replace(part, model=partial(_on_bytes, view.model))
                member = replace(member, until_success=False)
            run = partial(member.take(here).attack_batch, part, generator, progress)
            with full_precision():  # examples that exist in TF32 only would end the search
                found = run() if self.journal is None else self.journal(part, generator, run)
            if kind.steady and found.rising is not None:
                ensemble.rising[here] = found.rising
            ensemble.add(number, here, found)
            if kind.on_bytes:
                ensemble.round_attempts(len(members) + 1, here, found)
        if self.version == "standard":
            ensemble.attack_students(len(members), classes, generator)
        best = ensemble.finish()
        return replace(best, findings=self._findings(view, task, best, members[: len(kinds) - 1]))

    def stored(self, found: AttackResult, task: Task) -> AttackResult:
        """The result on the levels. The view judges the members' examples."""
        return found if self.levels is None else super().stored(found, task)

    def _findings(
        self, view: View, task: Task, best: AttackResult, members: tuple[GradientAttack, ...]
    ) -> tuple[Finding, ...]:
        assert best.member is not None and best.rising is not None
        count, survived = best.success.numel(), ~best.success
        alive = int(survived.sum())
        blind = int((best.member >= len(members)).sum())  # the search, students and rounding
        found = [
            control.not_finite(task.model, task.x, best.images),
            Finding("masked-gradients", 0 if view.is_useful else alive, count),
            Finding("black-box-stronger", blind, count),
            Finding("random-answers", count if view.random else 0, count),
            Finding("loss-still-rising", int(best.rising.sum()), count),
            Finding("stand-in-gradients", 0 if view.own else count, count),
            Finding("probabilities", count if view.probabilities else 0, count),
        ]
        if task.target is None:
            found.append(control.missed_in_full_ball(members[:4], view, task, survived))
        return merged(found)


class _Ensemble:
    """The best attempts of the members so far, on one batch.

    Attributes:
        best: the merged result; ``None`` before the first member.
        member: the member that broke each image, -1 for none.
        rising: images whose loss was still rising.
        near: images whose best attempt is almost an example.
    """

    def __init__(self, attack: StandardAttack, view: View, task: Task) -> None:
        self._attack, self._view, self._task = attack, view, task
        self.best: AttackResult | None = None
        self._on_bytes = attack.levels is None and on_levels(task.x, 256)
        self.member = torch.full_like(task.y, -1)
        self.rising, self.near, self._clear = (
            torch.zeros_like(self.member, dtype=torch.bool) for _ in range(3)
        )
        with torch.no_grad():
            self._almost = NEAR * margin(ask(view.model, task.x), task.y, task.target)

    def attacked_by(self, kind: _Member) -> Tensor:
        """The images that a member should attack."""
        left = ~self._clear
        if kind.near:
            left &= self.near | self.rising
        if kind.on_bytes:
            left &= self._on_bytes
        return left.nonzero().squeeze(1)

    def add(self, number: int, here: Tensor, found: AttackResult) -> AttackResult:
        """Merge the result of a member, with success judged on the model itself, and return it."""
        part = self._task.take(here)
        found = self._attack.take(here).stored(found, part)
        found, ahead, clear = _judged(found, self._view, part)
        self.near[here] |= ahead > self._almost[here]
        self._clear[here] = clear
        self._merge(number, here, found)
        return found

    def _merge(self, number: int, here: Tensor, found: AttackResult) -> None:
        if self.best is None:
            self.best, better = found, torch.ones_like(found.success)
        else:
            better = _is_better(self.best, here, found)
            self.best = updated(self.best, here, found, better)
        self.member[here[found.success & better]] = number

    def survivors(self) -> Tensor:
        assert self.best is not None
        return (~self.best.success).nonzero().squeeze(1)

    def attack_students(self, number: int, classes: int, generator: torch.Generator) -> None:
        """Attack networks that imitate the model's labels, until no further image is broken."""
        x, left, draws = self._task.x, self.survivors(), generator
        if left.numel() <= FEW_SURVIVORS * len(x):
            return
        networks = control.untaught(x, classes, draws)
        first = left[:AUDITION]
        broken = [int(self._transfer(number, first, n, draws)[1].sum()) for n in networks]
        network = networks[broken.index(max(broken))]
        student = control.Student(network, self._task.model, draws)
        points = [x, *(self._attack.ball.sample(x, draws) for _ in range(SAMPLES))]
        for turn in range(1, STUDENT_ROUNDS + 1):
            left = self.survivors()
            if left.numel() == 0:
                return
            images, success = self._transfer(number, left, network, draws, turn)
            if turn > 2 and not bool(success.any()):
                return
            student.learn(torch.cat([*points, images]))
            points = []

    def _transfer(
        self, number: int, here: Tensor, network: Model, generator: torch.Generator, turn: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Attack a network in place of the model. Returns the images, and which of them are
        adversarial for the model, unchanged or rounded to 8 bits."""
        attack, kind = self._attack.take(here), TRANSFERRED[turn % len(TRANSFERRED)]
        member = replace(kind.on(attack.ball, attack.proofs), until_success=False)
        part = replace(self._task.take(here), model=network)
        found = self.add(number, here, _claimed(member.attack_batch(part, generator)))
        return found.images, found.success | self.round_attempts(number + 1, here, found)

    def round_attempts(self, number: int, here: Tensor, attempts: AttackResult) -> Tensor:
        """Round attempts on 8-bit images to 8 bits. Returns which of the rounded images are
        examples."""
        if here.numel() == 0 or not self._on_bytes:
            return torch.zeros_like(attempts.success)
        ball, part = self._attack.ball.take(here), self._task.take(here)
        attempts = replace(attempts, n_steps=torch.zeros_like(here), queries=None)
        found = to_levels(_claimed(attempts), ball, part, 256, self._view.judge)
        broken = found.success.nonzero().squeeze(1)
        if broken.numel():
            self._merge(number, here[broken], found.take(broken))
        return found.success

    def finish(self) -> AttackResult:
        """The final result, without examples that do not hold in a batch of their own."""
        assert self.best is not None
        unclear = (self.best.success & ~self._clear).nonzero().squeeze(1)
        if unclear.numel() and not self._view.random:
            judge, task, images = self._view.judge, self._task, self.best.images
            alone = [judge(task.take(one), images[one]) for one in unclear.split(1)]
            lost = unclear[~torch.cat(alone)]
            self.best = without(self.best, lost)
            self.member[lost] = -1
        return replace(self.best, member=self.member, rising=self.rising & ~self.best.success)


def _on_bytes(model: Model, x: Tensor) -> Tensor:
    """The model's output at the nearest 8-bit images, with the gradient there."""
    return ask(model, (255 * x).round().detach() / 255 + (x - x.detach()))


def _claimed(attempts: AttackResult) -> AttackResult:
    """The result with every attempt claimed as an example, to be judged later."""
    success = torch.ones_like(attempts.success)
    return replace(attempts, success=success, status=(AttackStatus.FOUND,) * success.numel())


def _judged(found: AttackResult, view: View, task: Task) -> tuple[AttackResult, Tensor, Tensor]:
    """A member's result, judged on the model itself, with its margin and which successes are
    clear."""
    with torch.no_grad():
        logits = ask(view.model, found.images)
    score = cross_entropy(logits, task.y, task.target)
    loss = reported_loss(cross_entropy, score, targeted=task.target is not None)
    lost = found.success & ~view.judge(task, found.images)
    found = without(replace(found, loss=loss), lost.nonzero().squeeze(1))
    ahead = margin(logits, task.y, task.target)
    clear = ahead > CLEARLY * logits.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    return found, ahead, found.success & (clear | view.random)


def _is_better(best: AttackResult, index: Tensor, found: AttackResult) -> Tensor:
    """Where a later member did better: a success, or a higher loss."""
    before = best.success[index]
    return (found.success & ~before) | ((found.success == before) & (found.loss > best.loss[index]))
