"""StandardAttack: a fixed ensemble without parameters, so that numbers from different papers
compare.

Each member attacks only the images that survived those before it. The members differ in objective,
noise and start, because local optima depend on these most: an image that survives a hundred steps
of the margin is often broken at once by an attack on its second or third likeliest class.

``"standard"`` (cite as *wball StandardAttack, standard, version 7*)

=======  =============  =========  =====  ====================================================
member   objective      step size  steps  remarks
=======  =============  =========  =====  ====================================================
1        cross-entropy  20 -> 0    100    memory 0.95, noise 0.3
2        runner-up-2    6 -> 0     100
3        margin         10         100    memory 0.9, random start of 3 nats
4        cross-entropy  20         100    memory 0.9
5        runner-up-3    6 -> 0     100
6        margin         1          100    from the best attempt
7        runner-up-2    20 -> 0    100    memory 0.95, noise 0.3
8        runner-up-4    20 -> 0    100    memory 0.95, noise 0.3, random start of 10 nats
9        dlr            10 -> 0    100
10       runner-up-4    5          100    memory 0.95
11       runner-up-2    20 -> 0    100    memory 0.95, noise 0.3, from the best attempt
12       margin         10         200    memory 0.9, from the best attempt
=======  =============  =========  =====  ====================================================

- *Noise*: gradients are taken at noisy copies of the images, less noisy in every step
  (:class:`~wball.attacks.base.SteppedAttack`). Networks trained against small changes of every
  pixel are flat around an image, and others bend within the ball.
- *Memory*: the share of the accumulated gradients that is kept in each step. A decay of 1 lets the
  step size fall linearly to 0.
- *Best attempt*: the member begins there, and its runner-up is that of the attempt.
- The members are :class:`~wball.DualAveraging`. They were chosen on training images
  (``python -m benchmarks ablation``).
- ``extra`` members of your own run after them, and are named in the results.
- :class:`~wball.ScoreSearch` then looks at the first :data:`SEARCHED` survivors with 1,000 forward
  passes, without gradients. If it breaks one of them, it goes on with all others.
- Targeted attacks leave out the runner-up members, as do models with too few classes for them.

All members attack the view of the model that :mod:`wball.attacks.views` selects. If no gradients
predict it clearly, the search has 5,000 forward passes for every survivor. Random models are
averaged, and the majority of 15 answers decides. A member goes on until the margin of an example is
clear (:data:`CLEARLY`), and the next members search for a clearer one; otherwise an example counts
if it is also one in a batch of its own. ``result.findings`` lists what the views and the control
experiments (:mod:`wball.attacks.control`) say about the numbers.

``"fast"`` is a quick look: cross-entropy, margin, runner-up-2 and runner-up-3 with 30 steps each,
without random numbers, so that no image's result depends on the other images.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from wball import inputs
from wball.attacks import control
from wball.attacks.attack import (
    Attack,
    AttackResult,
    StepCount,
    Task,
    check_attack,
    empty,
    updated,
    without,
)
from wball.attacks.base import GradientAttack, cross_entropy, find_objective, margin, reported_loss
from wball.attacks.dual_averaging import DualAveraging
from wball.attacks.findings import Finding, ModelWarning, merged
from wball.attacks.score_search import ScoreSearch
from wball.attacks.views import LOOKED_AT, View, best_view, find_signs, view_again
from wball.ball import Ball
from wball.inputs import positions
from wball.model import Model, as_found, ask, full_precision
from wball.provenance import Plain

Version = Literal["standard", "fast"]

VERSION = 7
"""Number of the member list; results name it."""
QUERIES, QUERIES_IF_HIDDEN = 1000, 5000
"""Forward passes per image of the search: with useful gradients, and without."""
SEARCHED = 64
"""Survivors that the search looks at first, where gradients are useful."""
CLEARLY = 1e-2
"""Margin of a clear example, relative to the largest logit: five times what the ten bits of TF32
lose in a network of a few layers. Sums in another order lose less."""


@dataclass(frozen=True)
class Member:
    """Settings of one gradient attack of the ensemble."""

    objective: str
    step_size: float = 20.0
    steps: int = 100
    decay: float = 1.0
    memory: float = 0.95
    noise: float = 0.0
    random_start: float = 0.0
    from_best: bool = False

    @property
    def rank(self) -> int:
        """Rank of the wrong class that the member aims at; 0 for any class."""
        return getattr(find_objective(self.objective), "rank", 0)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value)

    def on(self, ball: Ball, proofs: bool = False) -> GradientAttack:
        settings = asdict(self)
        del settings["from_best"]
        return DualAveraging(ball, clearly=CLEARLY, progress=False, proofs=proofs, **settings)


MEMBERS: dict[str, tuple[Member, ...]] = {
    "standard": (
        Member("cross-entropy", noise=0.3),
        Member("runner-up-2", 6.0, memory=1.0),
        Member("margin", 10.0, decay=0.0, memory=0.9, random_start=3.0),
        Member("cross-entropy", decay=0.0, memory=0.9),
        Member("runner-up-3", 6.0, memory=1.0),
        Member("margin", 1.0, decay=0.0, memory=1.0, from_best=True),
        Member("runner-up-2", noise=0.3),
        Member("runner-up-4", noise=0.3, random_start=10.0),
        Member("dlr", 10.0, memory=1.0),
        Member("runner-up-4", 5.0, decay=0.0),
        Member("runner-up-2", noise=0.3, from_best=True),
        Member("margin", 10.0, steps=200, decay=0.0, memory=0.9, from_best=True),
    ),
    "fast": tuple(
        Member(name, steps=30) for name in ("cross-entropy", "margin", "runner-up-2", "runner-up-3")
    ),
}


@dataclass(frozen=True)
class StandardAttack(Attack):
    """The ensemble of the given version; see the module for its members.

    ``result.member`` is the member (from 0) that broke each image, -1 if none did;
    ``attack.describe()["members"]`` names them. ``result.loss`` is the cross-entropy of the true
    class (minus that of the target). Images that survived come with the attempt of highest loss.

    Attributes:
        version: ``"standard"`` or ``"fast"``.
        extra: attacks of your own, which run on the survivors of the gradient members; the ball is
            that of the ensemble.
        check: warn of signs that a robust accuracy may be an artefact
            (:class:`wball.attacks.findings.ModelWarning`).
        view: the view of the model (from :meth:`prepared`); ``None`` selects one for every batch.
    """

    version: Version = "standard"
    extra: Sequence[Attack] = ()
    check: bool = True
    view: View | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_choice("version", self.version, MEMBERS)
        for attack in self.extra:
            check_attack(attack)
        object.__setattr__(self, "extra", tuple(self.extra))

    def describe(self) -> Plain:
        """The settings as plain data, with the number of the version and the list of members."""
        members = [str(member) for member in MEMBERS[self.version]]
        for attack in self.extra:
            settings = {key: value for key, value in attack.describe().items() if value}
            members.append(", ".join(f"{key} {value}" for key, value in settings.items()))
        if self.version == "standard":
            members.append(f"search without gradients, {QUERIES} forward passes")
        return {**super().describe(), "version_number": VERSION, "members": members}

    def members(self, *, targeted: bool = False, classes: int | None = None) -> tuple[Member, ...]:
        """The gradient members, in order: without runner-ups if ``targeted``, or if the model has
        too few ``classes``."""
        most = 0 if targeted else math.inf if classes is None else classes - 1
        return tuple(member for member in MEMBERS[self.version] if member.rank <= most)

    @property
    def n_gradients(self) -> int:
        own = sum(member.steps for member in self.members())
        return own + sum(attack.n_gradients for attack in self.extra)

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:
        for message in find_signs(model, x, y).values() if self.check else ():
            warnings.warn(message, ModelWarning, stacklevel=3)

    def prepared(
        self, model: Model, x: Tensor, y: Tensor, known: Plain | None = None
    ) -> StandardAttack:
        """The attack with a fixed view of the model, for several calls on one model, such as at
        several radii."""
        if self.view is not None:
            return self
        first, labels = x[:LOOKED_AT].clone(), y[:LOOKED_AT].clone()
        with as_found(model, x.device), torch.inference_mode(False):
            if known is not None:
                return replace(self, view=view_again(model, first, known))
            return replace(self, view=best_view(model, first, labels, self.ball))

    def attack_batch(
        self, task: Task, generator: Generator, progress: StepCount | None = None
    ) -> AttackResult:
        x = task.x
        if len(task) == 0:
            return replace(empty(x), member=torch.zeros(0, dtype=torch.long, device=x.device))
        with torch.no_grad():
            classes = ask(task.model, x[:1]).shape[1]
        view = self.view or best_view(task.model, x, task.y, self.ball)
        members = self.members(targeted=task.target is not None, classes=classes)
        chain = _Chain(self, view, task, generator, progress)
        for number, member in enumerate(members):
            start = chain.best.images if member.from_best and chain.best is not None else None
            chain.run(number, chain.unclear(), member.on(self.ball, self.proofs), start)
        for number, attack in enumerate(self.extra, len(members)):
            chain.run(number, chain.unclear(), replace(attack, ball=self.ball, progress=False))
        last = len(members) + len(self.extra)
        if self.version == "standard":
            chain.search(last)
        best = chain.finish()
        first = tuple(member.on(self.ball) for member in members[:4])
        return replace(best, findings=self._findings(view, task, best, first, last))

    def stored(self, found: AttackResult, task: Task) -> AttackResult:
        """The result on the levels. The view judges the members' examples."""
        return found if self.levels is None else super().stored(found, task)

    def _findings(
        self,
        view: View,
        task: Task,
        best: AttackResult,
        members: tuple[GradientAttack, ...],
        searched: int,
    ) -> tuple[Finding, ...]:
        """What casts doubt on the result. ``searched`` is the number of the search."""
        assert best.member is not None
        count, survived = best.success.numel(), ~best.success
        found = [
            control.not_finite(task.model, task.x, best.images),
            Finding("masked-gradients", 0 if view.is_useful else int(survived.sum()), count),
            Finding("black-box-stronger", int((best.member == searched).sum()), count),
            Finding("random-answers", count if view.random else 0, count),
            Finding("stand-in-gradients", 0 if view.own else count, count),
            Finding("probabilities", count if view.probabilities else 0, count),
        ]
        if not view.random:
            found.append(control.precision_dependent(task, best))
        if task.target is None:
            found.append(control.missed_in_full_ball(members, view, task, survived))
        return merged(found)


class _Chain:
    """The best attempts of the members so far, on one batch.

    Attributes:
        best: the merged result; ``None`` before the first member.
        member: the member that broke each image, -1 for none.
    """

    def __init__(
        self,
        attack: StandardAttack,
        view: View,
        task: Task,
        generator: Generator,
        progress: StepCount | None,
    ) -> None:
        self._attack, self._view, self._task = attack, view, task
        self._generator, self._progress, self._steps = generator, progress, 0
        self.best: AttackResult | None = None
        self.member = torch.full_like(task.y, -1)
        self._clear = torch.zeros_like(self.member, dtype=torch.bool)

    def unclear(self) -> Tensor:
        """The images without a clear example."""
        return positions(~self._clear)

    def run(self, number: int, here: Tensor, attack: Attack, start: Tensor | None = None) -> None:
        """Attack some images, from points ``start`` if they are given, and merge what is found."""
        if self._progress is not None:
            self._progress.reach(self._steps, here.numel())
        self._steps += attack.n_gradients
        if here.numel() == 0:
            return
        task = self._task.take(here)
        part = replace(task, model=self._view.model, start=None if start is None else start[here])
        with full_precision():  # examples that exist in TF32 only would end the search
            found = attack.take(here).attempt(part, self._generator, self._progress)
        found, self._clear[here] = _judged(found, self._view, task)
        if self.best is None:
            self.best, better = found, torch.ones_like(found.success)
        else:
            before, loss = self.best.success[here], self.best.loss[here]
            better = (found.success & ~before) | (found.success == before) & (found.loss > loss)
            self.best = updated(self.best, here, found, better)
        self.member[here[found.success & better]] = number

    def search(self, number: int) -> None:
        """Look for examples without gradients: of the first survivors, and of all others if there
        are any."""
        hidden = not (self._view.is_useful and self._view.clear)
        queries = QUERIES_IF_HIDDEN if hidden else QUERIES
        attack = self._attack
        search = ScoreSearch(attack.ball, queries=queries, progress=False, proofs=attack.proofs)
        here = self.unclear()
        first = here if hidden else here[:SEARCHED]
        self.run(number, first, search)
        if (self.member[first] == number).any():
            self.run(number, here[len(first) :], search)

    def finish(self) -> AttackResult:
        """The final result, without examples that do not hold in a batch of their own."""
        assert self.best is not None
        unclear = positions(self.best.success & ~self._clear)
        if unclear.numel() and not self._view.random:
            judge, task, images = self._view.judge, self._task, self.best.images
            alone = [judge(task.take(one), images[one]) for one in unclear.split(1)]
            lost = unclear[~torch.cat(alone)]
            self.best = without(self.best, lost)
            self.member[lost] = -1
        return replace(self.best, member=self.member)


def _judged(found: AttackResult, view: View, task: Task) -> tuple[AttackResult, Tensor]:
    """A member's result, judged on the model itself, and which successes are clear."""
    with torch.no_grad(), full_precision():
        logits = ask(view.model, found.images)
    score = cross_entropy(logits, task.y, task.target)
    loss = reported_loss(cross_entropy, score, targeted=task.target is not None)
    lost = found.success & ~view.judge(task, found.images)
    found = without(replace(found, loss=loss), positions(lost))
    ahead = margin(logits, task.y, task.target)
    clear = ahead > CLEARLY * logits.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    return found, found.success & (clear | view.random)
