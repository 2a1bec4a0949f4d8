"""An attack: what it is asked for, its call, and what it returns.

An attack holds settings only. The model comes at the call::

    result = attack(model, x, y)                       # untargeted: success is argmax != y
    result = attack(model, x, y, target=t)             # targeted:   success is argmax == t

:meth:`Attack.__call__` is final: it checks the inputs, splits them into batches that fit in memory,
puts the model in evaluation mode with frozen parameters, and restores the mode of every module, the
parameters' flags and the random state afterwards, also after an error. Subclasses write
:meth:`Attack.attack_batch`; :mod:`wball.attacks.base` does for gradient attacks.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import torch
from torch import Generator, Tensor

from wball import inputs, progress
from wball.attacks.findings import Finding, merged, reliable
from wball.attacks.levels import check_on_levels, rounded
from wball.ball import Ball, check_ball
from wball.display import Explained, Summarised, percent
from wball.inputs import positions, result_dtype
from wball.model import Model, as_found, ask, judge, reached
from wball.plan import StoredPlan
from wball.progress import Bar
from wball.provenance import Plain, describe_settings
from wball.result import joined_kernels

PROGRESS_AFTER = 2_000_000
"""Image-steps above which a progress bar appears by itself (about half a minute on a small CPU)."""

JOURNAL: ContextVar[Any] = ContextVar("wball_journal", default=None)
"""Keeps what attacks found and where they are, so that an interrupted evaluation can be resumed
(:class:`wball.evaluation.journal.Journal`)."""

PULLED_BACK = (1.0, 0.99, 0.98, 0.96, 0.93, 0.9, 0.85)
"""Shares of the way from the image to the example that :func:`to_levels` tries."""


@dataclass(frozen=True)
class Task:
    """The arguments of an attack: model, images, labels and goal.

    Attributes:
        model: images to logits.
        x: the images.
        y: their labels.
        target: classes to reach, or ``None`` for any wrong class.
        start: points of the ball to begin at, such as the attempts of another attack, or ``None``.
        index: positions of the images in the call.
        confirm: whether successes are judged again, see :meth:`judge`.
    """

    model: Model
    x: Tensor
    y: Tensor
    target: Tensor | None = None
    start: Tensor | None = None
    index: Tensor | None = None
    confirm: bool = True

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Tensor) -> Task:
        """The task for a subset of the images."""
        others = (self.target, self.start, self.index)
        target, start, place = (v if v is None else v[index] for v in others)
        return Task(self.model, self.x[index], self.y[index], target, start, place, self.confirm)

    def judge(self, z: Tensor) -> Tensor:
        """Which images meet the goal at ``z``, see :func:`wball.model.judge`; by one forward pass
        without ``confirm``."""
        if not self.confirm:
            with torch.no_grad():
                return reached(ask(self.model, z), self.y, self.target)
        return judge(self.model, z, self.y, self.target)


class StepCount:
    """Progress of an attack on a bar: images of finished batches, and the steps of the current
    one."""

    def __init__(self, bar: Bar, images: int, steps: int) -> None:
        self._bar, self._images, self._steps = bar, max(1, images), max(1, steps)
        self._start, self._size, self._step = 0, 0, 0

    def batch(self, start: int, size: int) -> None:
        """Start a batch of ``size`` images after ``start`` finished ones."""
        self._start, self._size, self._step = start, size, 0

    def step(self, left: int) -> None:
        """Count one gradient step of the ``left`` images of the batch that are still attacked."""
        self.reach(self._step + 1, left)

    def reach(self, step: int, left: int) -> None:
        """Move to a step. Nothing remains to be done on the images that are not ``left``."""
        self._step = step
        remaining = min(left, self._size) * max(0.0, 1 - step / self._steps)
        self._bar.within((self._start + self._size - remaining) / self._images)


class AttackStatus(Explained):
    """How an attack ended for an image. The value is the explanation, with a remedy if there is
    one."""

    FOUND = "an adversarial example was found"
    ALREADY_WRONG = "the clean image already meets the goal: distance 0"
    SURVIVED = (
        "no adversarial example was found: more steps, restarts or StandardAttack may find one"
    )
    NO_GRADIENT = (
        "the gradient was zero or not finite: the model may mask it; try another objective"
    )


STATUSES = tuple(AttackStatus)


@dataclass(frozen=True, repr=False)
class AttackResult(Summarised):
    """What an attack found, one entry per image.

    Attributes:
        images: per image the adversarial example, or the best attempt; always in the ball.
        success: whether ``images`` meets the goal (``argmax != y``, or ``argmax == target``).
        distance: upper bound of the distance from ``x`` that the attack's plan proves, in the unit
            of ``eps``, float64.
        loss: value of the objective at ``images`` (the cross-entropy, for that objective).
        n_steps: steps used, per image.
        status: how it ended, per image.
        radius: radius of the ball each image was found in (or the last one tried), float64.
        member: for ensembles, which attack found it (-1: none).
        kernel: the implementation used by the ball; several are joined by ``+``, and it is
            ``"none"`` where no step was made.
        proof: the plans behind ``distance``, where the attack was asked for them (``proofs=True``)
            and knows them: ``wball.audit(ball, x, result.images, plan=result.proof,
            exact="needed")`` then has nothing to solve.
        queries: forward passes used, per image, by attacks that count them.
        findings: reasons to doubt the robust accuracy, from attacks that look for them.
    """

    images: Tensor
    success: Tensor
    distance: Tensor
    loss: Tensor
    n_steps: Tensor
    status: tuple[AttackStatus, ...]
    radius: Tensor
    member: Tensor | None = None
    kernel: str = "none"
    proof: StoredPlan | None = None
    queries: Tensor | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def reliable(self) -> bool:
        """Whether no finding suggests that the robust accuracy is too high."""
        return reliable(self.findings)

    def headline(self) -> dict[str, str]:
        broken = self.distance[self.success]
        shown = {"images": str(len(self.success)), "robust accuracy": percent(self.robust_accuracy)}
        if len(broken):
            shown["median distance"] = f"{float(broken.median()):.4g}"
        return {**shown, "steps": str(int(self.n_steps.sum())), "kernel": self.kernel}

    @property
    def robust_accuracy(self) -> float:
        """Share of the images without an adversarial example."""
        return self.accuracy_at(math.inf)

    def accuracy_at(self, eps: float) -> float:
        """The share of images that no adversarial example was found for at a radius up to
        ``eps``."""
        if self.success.numel() == 0:
            return 1.0
        wrong = torch.tensor(
            [s is AttackStatus.ALREADY_WRONG for s in self.status], device=self.success.device
        )
        return 1.0 - float((self.success & (wrong | (self.radius <= eps))).double().mean())


@dataclass(frozen=True)
class Attack(ABC):
    """Settings of an attack, and its call.

    Attributes:
        ball: the threat model.
        batch_size: images at a time; ``None`` takes all, and halves the batch whenever memory runs
            out.
        progress: show a bar on stderr; ``None`` shows it on long runs.
        proofs: return the plans that prove the distances, if the attack has them
            (``result.proof``).
        levels: return examples whose pixels are multiples of ``1 / (levels - 1)``, so that they
            survive being stored (256: as 8-bit images); the images must be on the levels, too
            (:mod:`wball.attacks.levels`).
        target: class that every image shall be predicted as; ``None`` for any wrong class. A call
            with ``target`` sets one class per image instead.
    """

    ball: Ball
    _: KW_ONLY
    batch_size: int | None = None
    progress: bool | None = None
    proofs: bool = False
    levels: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None:
            inputs.check_count("levels", self.levels, 2)
        check_ball(self.ball)
        if self.batch_size is not None:
            inputs.check_count("batch_size", self.batch_size)

    @abstractmethod
    def attack_batch(
        self, task: Task, generator: Generator, progress: StepCount | None = None
    ) -> AttackResult:
        """Attack a batch of validated images that fits in memory, on a prepared model."""

    def attempt(
        self, task: Task, generator: Generator, progress: StepCount | None = None
    ) -> AttackResult:
        """:meth:`attack_batch`, or what it returned before an interruption."""
        if (journal := JOURNAL.get()) is None:
            return self.attack_batch(task, generator, progress)
        return journal(self, task, generator, progress)

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:  # noqa: B027 - a hook, empty on purpose
        """Hook: called once with the unchanged model before the attack."""

    def prepared(self, model: Model, x: Tensor, y: Tensor, known: Plain | None = None) -> Attack:
        """The attack after it has inspected the model, for repeated calls on such images;
        ``known`` is what an earlier inspection found."""
        return self

    @property
    @abstractmethod
    def n_gradients(self) -> int:
        """Number of gradient steps for an image that is never broken."""

    def at(self, eps: float | Tensor) -> Attack:
        """The same attack at another radius."""
        return replace(self, ball=self.ball.at(eps))

    def take(self, index: Tensor) -> Attack:
        """The attack on a subset of the images (a ball can have one radius per image)."""
        return replace(self, ball=self.ball.take(index))

    def describe(self) -> Plain:
        """The settings as plain data, to be stored with an evaluation."""
        hidden = {"ball", "progress", "check", "proofs", "view", "extra"}
        if self.target is None:
            hidden.add("target")
        shown = [item.name for item in fields(self) if item.name not in hidden]
        plain = {name: describe_settings(getattr(self, name)) for name in shown}
        return {"name": type(self).__name__, **plain}

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        target: Tensor | None = None,
        generator: Generator | None = None,
        confirm: bool = True,
    ) -> AttackResult:
        """Attack ``model`` on images ``x`` with true labels ``y``; see :class:`AttackResult`.

        ``generator`` is the source of randomness; without it a fixed seed is used. The global
        random state is not changed. Successes are confirmed in float64 and without TF32; training
        needs the images only, and saves time with ``confirm=False``.
        """
        if not callable(model):
            raise TypeError(f"model must be callable, images to logits, got {type(model).__name__}")
        inputs.check_generator(generator)
        x = inputs.check_images(x.detach() if isinstance(x, Tensor) else x, self.ball.box)
        y = inputs.check_labels("y", y, x)
        if target is None and self.target is not None:
            target = torch.full_like(y, self.target)
        target = None if target is None else inputs.check_labels("target", target, x)
        inputs.check_eps_count(self.ball.eps, len(x))
        x = x.to(result_dtype(x))
        if self.levels is not None:
            check_on_levels(x, self.levels)
        if generator is None:
            generator = Generator(x.device).manual_seed(0)
        with torch.inference_mode(False):
            # An inference tensor cannot carry gradients.
            place = torch.arange(len(x)).to(y)
            task = Task(model, x.clone(), y.clone(), target, index=place, confirm=confirm)
            self.before(model, task.x, task.y)
            with as_found(model, x.device), self._steps(len(task)) as steps:
                return self._in_batches(task, generator, steps)

    def _in_batches(
        self, task: Task, generator: Generator, progress: StepCount | None
    ) -> AttackResult:
        parts: list[AttackResult] = []
        start, size = 0, self.batch_size or max(1, len(task))
        while start < len(task) or not parts:
            index = torch.arange(start, min(start + size, len(task)), device=task.x.device)
            seeds = generator.get_state()
            if progress is not None:
                progress.batch(start, index.numel())
            try:
                part, attack = task.take(index), self.take(index)
                parts.append(attack.stored(attack.attempt(part, generator, progress), part))
            except RuntimeError as error:
                if not out_of_memory(error) or size == 1:
                    raise
            else:
                start += size
                continue
            # Outside the handler, so that the failed batch's tensors are released with the
            # exception.
            generator.set_state(seeds)
            size = max(1, min(size, index.numel()) // 2)
            warnings.warn(
                f"out of memory: continuing with batches of {size} images",
                RuntimeWarning,
                stacklevel=4,
            )
            if task.x.is_cuda:
                torch.cuda.empty_cache()
        return joined(parts)

    def stored(self, found: AttackResult, task: Task) -> AttackResult:
        """The result with only the examples that :func:`wball.model.judge` confirms, rounded to
        pixel levels if there are any."""
        if self.levels is not None:
            return to_levels(found, self.ball, task, self.levels)
        claimed = positions(found.success)
        if claimed.numel() == 0 or not task.confirm:
            return found
        return without(found, claimed[~task.take(claimed).judge(found.images[claimed])])

    @contextmanager
    def _steps(self, images: int) -> Iterator[StepCount | None]:
        """Open a progress counter, on its own bar or on that of the surrounding evaluation;
        ``None`` if no bar is shown."""
        name, steps = type(self).__name__, self.n_gradients
        show = images * steps > PROGRESS_AFTER if self.progress is None else self.progress
        if show:
            with progress.bar(name, images) as shown:
                shown.stage(images, name)
                yield StepCount(shown, images, steps)
        else:
            outer = progress.AROUND.get()
            yield None if outer is None else StepCount(outer, images, steps)


def empty(x: Tensor) -> AttackResult:
    """The result of an attack on no images."""
    none = torch.zeros(0, device=x.device)
    return AttackResult(x.clone(), none.bool(), none.double(), none, none.long(), (), none.double())


def without(found: AttackResult, index: Tensor) -> AttackResult:
    """Remove the claimed examples at ``index`` from a result."""
    if index.numel() == 0:
        return found
    success, status = found.success.clone(), list(found.status)
    success[index] = False
    for i in index.tolist():
        status[i] = AttackStatus.SURVIVED
    return replace(found, success=success, status=tuple(status))


def updated(best: AttackResult, index: Tensor, found: AttackResult, better: Tensor) -> AttackResult:
    """Replace the images of ``best`` at ``index`` where the later attack did ``better``."""
    where = index[better]
    steps, queries = best.n_steps.index_add(0, index, found.n_steps), best.queries
    if queries is not None and found.queries is not None:
        queries = queries.index_add(0, index, found.queries)
    proof = None
    if best.proof is not None and found.proof is not None:
        proof = best.proof.put(where, found.proof.take(better))
    status = list(best.status)
    for i, state, success in zip(index.tolist(), found.status, found.success.tolist(), strict=True):
        # One attack with a gradient suffices to call the image a survivor.
        if success or status[i] is AttackStatus.NO_GRADIENT:
            status[i] = state
    names = ("images", "success", "distance", "loss", "radius")
    pairs = {name: (getattr(best, name), getattr(found, name)) for name in names}
    parts: Plain = {
        name: old.index_put((where,), new[better].to(old)) for name, (old, new) in pairs.items()
    }
    return replace(
        best,
        **parts,
        n_steps=steps,
        status=tuple(status),
        kernel=joined_kernels((best.kernel, found.kernel)),
        proof=proof,
        queries=queries,
    )


def joined(parts: list[AttackResult]) -> AttackResult:
    """Concatenate the results of several batches."""
    if len(parts) == 1:
        return parts[0]
    tensors: Plain = {
        item.name: torch.cat([getattr(part, item.name) for part in parts])
        for item in fields(AttackResult)
        if isinstance(getattr(parts[0], item.name), Tensor)
    }
    proofs = [part.proof for part in parts if part.proof is not None]
    return AttackResult(
        **tensors,
        status=sum((part.status for part in parts), ()),
        kernel=joined_kernels(part.kernel for part in parts),
        proof=StoredPlan.joined(proofs) if len(proofs) == len(parts) else None,
        findings=merged(finding for part in parts for finding in part.findings),
    )


def to_levels(result: AttackResult, ball: Ball, task: Task, levels: int) -> AttackResult:
    """Round the examples of a result to pixel levels. An image whose example cannot be kept becomes
    the clean image without success."""
    x, already = task.x, task.judge(task.x)
    images, success = x.clone(), already.clone()
    distance = torch.zeros_like(result.distance)
    for share in PULLED_BACK:
        left = positions(result.success & ~success)
        if left.numel() == 0:
            break
        start = x[left]
        points = rounded(start + share * (result.images[left] - start), start, levels)
        wrong = task.take(left).judge(points)
        left, points = left[wrong], points[wrong]
        if left.numel() == 0:
            continue
        inside = ball.take(left)
        far = inside.violations(x[left], points)
        kept = far.within(inside.eps)
        where = left[kept]
        images[where], success[where] = points[kept], True
        distance[where] = far.distance[kept].to(distance)
    status = list(result.status)
    for i in positions(already).tolist():
        status[i] = AttackStatus.ALREADY_WRONG
    for i in positions(result.success & ~success).tolist():
        status[i] = AttackStatus.SURVIVED
    return replace(
        result, images=images, success=success, distance=distance, status=tuple(status), proof=None
    )


def check_attack(attack: object) -> None:
    """Raise unless the argument is an attack."""
    if not isinstance(attack, Attack):
        raise TypeError(f"attack must be an attack such as DualAveraging(ball), got {attack!r}")


def attack_labels(
    attack: Attack, model: Model, x: Tensor, labels: Tensor, targeted: bool, seed: int
) -> AttackResult:
    """Attack as adapters do: ``labels`` are the true classes or, if ``targeted``, the target
    classes. A targeted attack uses the model's predictions as true classes, which matter only to
    objectives that compare the two."""
    generator = Generator(x.device).manual_seed(seed)
    if not targeted:
        return attack(model, x, labels, generator=generator)
    with torch.no_grad(), as_found(model, x.device):
        own = ask(model, x).argmax(1)
    return attack(model, x, own, target=labels, generator=generator)


def out_of_memory(error: Exception) -> bool:
    """Whether an error reports that memory ran out, on a GPU or on the host, by the messages of
    PyTorch's allocators."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return any(
        words in str(error)
        for words in ("t allocate memory", "DefaultCPUAllocator: not enough memory")
    )
