"""One batch under attack: the goal, the gradient, and the best candidate per image."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from wball.attacks import objectives
from wball.attacks.result import STATUSES, AttackStatus
from wball.ball import Ball
from wball.model import Model, ask, check_classes, full_precision, judge, reached
from wball.plan import FactoredPlan, Plan, StoredPlan
from wball.progress import Bar

DROP_EVERY = {"cpu": 1, "cuda": 10}
"""After how many steps finished images are dropped. Looking costs a GPU its pipeline, and a CPU
nothing."""

DROP_FROM = {"cpu": 0.0, "cuda": 0.5}
"""Share of the images that must be finished for that. A step on a smaller batch is recorded anew on
a GPU."""

AnyState = TypeVar("AnyState", bound="State")
Kind = TypeVar("Kind", Plan, FactoredPlan)


def plan_of_nothing(kind: type[Kind], ball: Ball, x: Tensor) -> Kind:
    """The plan of images that stay as they are."""
    grid = x if x.ndim == 4 else x[:, None, None, :]
    problem = ball.problem(x)
    assert problem is not None, "only balls with plans are asked for one"
    return kind.identity(problem.moves(grid), grid)


@dataclass(frozen=True)
class Task:
    """What an attack is asked for.

    Attributes:
        model: images to logits.
        x: the images.
        y: their labels.
        target: classes to reach, or ``None`` for any wrong class.
        start: points of the ball to begin at, such as the attempts of another attack, or ``None``.
    """

    model: Model
    x: Tensor
    y: Tensor
    target: Tensor | None = None
    start: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    def take(self, index: Tensor) -> Task:
        """The task for a subset of the images."""
        target, start = (v if v is None else v[index] for v in (self.target, self.start))
        return Task(self.model, self.x[index], self.y[index], target, start)

    def judge(self, z: Tensor) -> Tensor:
        """Which images meet the goal at ``z``, see :func:`wball.model.judge`."""
        return judge(self.model, z, self.y, self.target)


class StepCount:
    """Progress of an attack on a bar: images of finished batches, and the steps of the current
    one."""

    def __init__(self, bar: Bar, images: int, steps: int) -> None:
        self._bar, self._images, self._steps = bar, max(1, images), max(1, steps)
        self._start, self._size, self._step = 0, 0, 0

    def batch(self, start: int, size: int) -> None:
        """A batch of ``size`` images begins after ``start`` finished ones."""
        self._start, self._size, self._step = start, size, 0

    def step(self) -> None:
        """One gradient step of the batch is done."""
        self._step += 1
        share = self._size * min(1.0, self._step / self._steps)
        self._bar.within((self._start + share) / self._images)


@dataclass
class State:
    """The current candidate, and in subclasses what the next step needs.

    Attributes:
        x: the images that are still in.
        ball: their threat model.
        z: the candidates, in the ball.
        distance: upper bound of their distance from ``x``, in the unit of ``eps``, float64.
        proof: the plans behind it, if they are kept.
        kernel: which implementation served the ball.
        n_steps: steps made so far; a tensor where a step is replayed for many.
    """

    x: Tensor
    ball: Ball
    z: Tensor
    distance: Tensor
    proof: StoredPlan | None = None
    kernel: str = "none"
    n_steps: int | Tensor = 0

    def parts(self) -> tuple[object, ...]:
        """The objects that a step changes."""
        return (self,)

    def take(self: AnyState, index: Tensor) -> AnyState:
        """The state of a subset of the images: of whatever has an entry per image."""

        def part(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value if value.ndim == 0 else value[index.to(value.device)]
            return value.take(index) if hasattr(value, "take") else value

        return replace(
            self, **{field.name: part(getattr(self, field.name)) for field in fields(self)}
        )


class _Best(NamedTuple):
    """The best candidate so far for each image of a batch."""

    z: Tensor
    success: Tensor
    distance: Tensor
    loss: Tensor
    n_steps: Tensor
    status: Tensor
    radius: Tensor
    queries: Tensor
    late: Tensor  # loss before the last steps

    def at(self, index: Tensor) -> _Best:
        return _Best(*(field[index] for field in self))

    def put(self, index: Tensor, part: _Best) -> None:
        for field, value in zip(self, part, strict=True):
            field[index] = value


class AttackBatch:
    """One batch under attack.

    Attributes:
        task: what is asked for the images that are still in.
        ball: their threat model.
        steps_done: steps so far.
        queries: forward passes so far, of each image that is still in.
        kernel: which implementation served the ball so far.
    """

    def __init__(
        self,
        task: Task,
        ball: Ball,
        objective: objectives.Objective,
        until_success: bool,
        progress: StepCount | None = None,
    ) -> None:
        self.task, self.ball, self.objective = task, ball, objective
        self.until_success = until_success
        self.steps_done, self.queries, self.kernel = 0, 1, "none"
        self._counted = self.queries
        self._proof: StoredPlan | None = None
        self._all_proof: StoredPlan | None = None
        self._progress = progress
        x = task.x
        with torch.no_grad():
            with full_precision():
                logits = ask(task.model, x)
            check_classes("y", task.y, logits)
            self._aim = task.target
            if task.target is not None:
                check_classes("target", task.target, logits)
            elif isinstance(objective, objectives.RunnerUp):
                self._aim = objective.rival(logits, task.y)
            success, loss = self.reached(logits), self.loss(logits)
            wrong = success.nonzero().squeeze(1)
            if wrong.numel():  # an image that is wrong by rounding alone is attacked
                success[wrong] = task.take(wrong).judge(x[wrong])
        self.logits = logits
        zero = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        survived, already_wrong = (
            STATUSES.index(AttackStatus.SURVIVED),
            STATUSES.index(AttackStatus.ALREADY_WRONG),
        )
        status = torch.where(success, already_wrong, survived)
        steps = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        queries = steps + self.queries
        late = loss.clone()
        self._all = _Best(
            x.clone(), success, zero, loss, steps, status, self._radius(self.ball), queries, late
        )
        self._best = self._all.at(torch.arange(x.shape[0], device=x.device))
        self._active = torch.arange(x.shape[0], device=x.device)

    @property
    def x(self) -> Tensor:
        """The images that are still in."""
        return self.task.x

    def _radius(self, ball: Ball) -> Tensor:
        if isinstance(ball.eps, Tensor):
            return ball.eps.to(self.x.device, torch.float64).expand(self.x.shape[0]).contiguous()
        return torch.full((self.x.shape[0],), ball.eps, dtype=torch.float64, device=self.x.device)

    def reached(self, logits: Tensor) -> Tensor:
        """Which images' logits meet the goal."""
        return reached(logits, self.task.y, self.task.target)

    def loss(self, logits: Tensor) -> Tensor:
        """The objective of logits of the images that are still in."""
        loss = self.objective(logits, self.task.y, self._aim)
        if not isinstance(loss, Tensor) or loss.shape != self.task.y.shape:
            seen = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"objective must return one value per image, shape ({len(self.task)},), got {seen}"
            )
        return loss

    def keep_proofs(self, kind: type[Kind]) -> Kind:
        """From now on every candidate comes with its proof. Returns that of the images as they
        are."""
        whole = plan_of_nothing(kind, self.ball, self._all.z)
        part = whole.take(self._active)
        self._all_proof, self._proof = whole, part
        return part

    def gradient(self, state: State) -> Tensor:
        """The objective's gradient at the candidate, which is offered on the way."""
        z = state.z.detach().to(self.x.dtype).requires_grad_(True)
        with torch.enable_grad():
            logits = ask(self.task.model, z)
            loss = self.loss(logits)
            gradient = objectives.slope(loss, z)
        self.queries += 1
        self._consider(state, logits.detach(), loss.detach())
        return self.made_step(gradient)

    def made_step(self, gradient: Tensor) -> Tensor:
        """Note a step along ``gradient``, which is returned with 0 where it is not finite."""
        finite = gradient.isfinite()
        gradient = torch.where(finite, gradient, torch.zeros_like(gradient))
        dead = ~(finite & (gradient != 0)).flatten(1).any(1) & ~self._best.success
        status = torch.where(dead, STATUSES.index(AttackStatus.NO_GRADIENT), self._best.status)
        self._best = self._best._replace(
            status=status, n_steps=self._best.n_steps + (~self._best.success)
        )
        return gradient

    def count_step(self) -> None:
        """One step more, for progress and for :meth:`survivors`."""
        self.steps_done += 1
        if self._progress is not None:
            self._progress.step()

    def begin_last_steps(self) -> None:
        """Remember how far the loss has come."""
        self._best = self._best._replace(late=self._best.loss.clone())

    def succeeds(self, z: Tensor) -> Tensor:
        """Which images meet the goal at ``z``, which is not offered as a candidate."""
        with torch.no_grad():
            self.queries += 1
            return self.reached(ask(self.task.model, z))

    def offer(self, state: State) -> Tensor:
        """The candidate without its gradient. Returns its logits."""
        with torch.no_grad():
            logits = ask(self.task.model, state.z.to(self.x.dtype))
            self.queries += 1
            self._consider(state, logits, self.loss(logits))
            return logits

    def _consider(self, state: State, logits: Tensor, loss: Tensor) -> None:
        best, success, z = self._best, self.reached(logits), state.z.to(self.x.dtype)
        better = (success & ~best.success) | ((success == best.success) & (loss > best.loss))
        if self.until_success:
            better = better & ~best.success
        status = torch.where(success, STATUSES.index(AttackStatus.FOUND), best.status)
        # By how many rather than how many: the same number at every step can be recorded.
        queries, self._counted = best.queries + (self.queries - self._counted), self.queries
        self._best = best._replace(
            z=torch.where(better.view(-1, *[1] * (z.ndim - 1)), z, best.z),
            success=best.success | (better & success),
            distance=torch.where(better, state.distance.to(best.distance), best.distance),
            loss=torch.where(better, loss, best.loss),
            status=torch.where(better, status, best.status),
            radius=torch.where(best.success & ~better, best.radius, self._radius(state.ball)),
            queries=torch.where(best.success, best.queries, queries)
            if self.until_success
            else queries,
        )
        if state.kernel != "none":
            self.kernel = state.kernel
        if self._proof is not None:
            assert state.proof is not None
            self._proof = state.proof.where(better, self._proof)

    def survivors(self) -> Tensor | None:
        """Every few steps, drop the images that are done. The positions kept, or ``None`` if
        nothing changed."""
        device = self.x.device.type
        return (
            self.drop(DROP_FROM.get(device, 0.5))
            if self.steps_done % DROP_EVERY.get(device, 10) == 0
            else None
        )

    def drop(self, least: float = 0.0) -> Tensor | None:
        """Leave out what is done, if it is a share of at least ``least``. The positions kept, or
        ``None`` if all."""
        if not self.until_success:
            return None
        kept = (~self._best.success).nonzero().squeeze(1)
        count = self._active.numel()
        if kept.numel() == count or count - kept.numel() < least * count:
            return None
        self._put()
        self._active, self._best = self._active[kept], self._best.at(kept)
        self._proof = None if self._proof is None else self._proof.take(kept)
        self.task, self.ball, self.logits = (
            self.task.take(kept),
            self.ball.take(kept),
            self.logits[kept],
        )
        self._aim = None if self._aim is None else self._aim[kept]
        return kept

    @property
    def empty(self) -> bool:
        return self._active.numel() == 0

    def finish(self) -> _Best:
        self._put()
        return self._all

    @property
    def proof(self) -> StoredPlan | None:
        """The plans of all images' best candidates, after the end."""
        return self._all_proof

    def _put(self) -> None:
        self._all.put(self._active, self._best)
        if self._proof is not None and self._all_proof is not None:
            self._all_proof = self._all_proof.put(self._active, self._proof)
