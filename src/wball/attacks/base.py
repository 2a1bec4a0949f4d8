"""What every attack shares: the call, the bookkeeping per image, and leaving the model as it was
found.

An attack holds settings only. The model comes at the call::

    result = attack(model, x, y)                       # untargeted: success is argmax != y
    result = attack(model, x, y, target=t)             # targeted:   success is argmax == t

:meth:`Attack.__call__` is final: it checks the inputs, splits them into batches that fit in memory,
puts the model in evaluation mode with frozen parameters, and restores the mode of every module, the
parameters' flags and the random state afterwards, also after an error. Gradient attacks write
:meth:`GradientAttack.init`, the first candidates of a batch, and :meth:`GradientAttack.advance`,
the next ones from a gradient. The base loops, keeps the best **per image** and drops images that
are done.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, fields, is_dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from wball import inputs, progress
from wball.attacks import objectives
from wball.attacks.batch import AttackBatch, State, StepCount, Task
from wball.attacks.levels import check_on_levels, to_levels
from wball.attacks.recording import RECORDERS, WORTH, recorded
from wball.attacks.result import STATUSES, AttackResult, empty, joined, without
from wball.ball import Ball, check_ball
from wball.inputs import result_dtype
from wball.kernels import dispatch
from wball.model import Model, as_found
from wball.plan import StoredPlan

PROGRESS_AFTER = 2_000_000
"""Image-steps above which a progress bar appears by itself (about half a minute on a small CPU)."""


LATE = 0.75
"""The steps after this share of them tell whether the loss is still rising: whether as many steps
again, at their pace, would bring the objective above 0, where it succeeds."""


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
    """

    ball: Ball
    _: KW_ONLY
    batch_size: int | None = None
    progress: bool | None = None
    proofs: bool = False
    levels: int | None = None

    def __post_init__(self) -> None:
        if self.levels is not None:
            inputs.check_count("levels", self.levels, 2)
        check_ball(self.ball)
        if self.batch_size is not None:
            inputs.check_count("batch_size", self.batch_size)

    @abstractmethod
    def attack_batch(
        self, task: Task, generator: torch.Generator, progress: StepCount | None = None
    ) -> AttackResult:
        """Attack checked images that fit in memory, on a model that is ready for it."""

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:  # noqa: B027 - a hook, empty on purpose
        """Called once with the model as found."""

    def prepared(self, model: Model, x: Tensor, y: Tensor) -> Attack:
        """The attack with what it has to find out about the model, for several calls on images like
        these."""
        return self

    @property
    @abstractmethod
    def n_gradients(self) -> int:
        """Gradient steps an image costs if it is never broken."""

    def at(self, eps: float | Tensor) -> Attack:
        """The same attack at another radius."""
        return replace(self, ball=self.ball.at(eps))

    def take(self, index: Tensor) -> Attack:
        """The attack on a subset of the images (a ball can have one radius per image)."""
        return replace(self, ball=self.ball.take(index))

    def describe(self) -> dict[str, Any]:
        """The settings as plain data, for the files of an evaluation."""
        plain: dict[str, Any] = {"name": type(self).__name__}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("ball", "progress", "check", "proofs", "view"):
                continue
            if is_dataclass(value) and not isinstance(value, type):
                value = {"name": type(value).__name__, **asdict(value)}
            elif not isinstance(value, (str, int, float, bool, type(None))):
                value = getattr(value, "__qualname__", repr(value))
            elif isinstance(value, float) and not math.isfinite(value):
                value = str(value)
            plain[item.name] = value
        return plain

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        target: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> AttackResult:
        """Attack ``model`` on images ``x`` with true labels ``y``; see :class:`AttackResult`.

        ``generator`` is the source of randomness; without it a fixed seed is used. The global
        random state is not changed.
        """
        if not callable(model):
            raise TypeError(f"model must be callable, images to logits, got {type(model).__name__}")
        inputs.check_generator(generator)
        x = inputs.check_images("x", x.detach() if isinstance(x, Tensor) else x, self.ball.box)
        y = check_labels("y", y, x)
        target = None if target is None else check_labels("target", target, x)
        inputs.check_eps_count(self.ball.eps, x.shape[0])
        x = x.to(result_dtype(x))
        if self.levels is not None:
            check_on_levels(x, self.levels)
        self.before(model, x, y)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(0)
        with as_found(model, x.device), torch.inference_mode(False):
            # An inference tensor cannot carry gradients.
            task = Task(model, x.clone(), y.clone(), target)
            with self._steps(len(task)) as steps:
                return self._in_batches(task, generator, steps)

    def _in_batches(
        self, task: Task, generator: torch.Generator, progress: StepCount | None
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
                parts.append(attack.stored(attack.attack_batch(part, generator, progress), part))
            except RuntimeError as error:
                if not out_of_memory(error) or size == 1:
                    raise
            else:
                start += size
                continue
            # Outside the handler, so that the failed batch's tensors are released with the exception.
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
        """The result with only the examples that :func:`wball.model.judge` confirms, on the levels
        if there are some."""
        if self.levels is not None:
            return to_levels(found, self.ball, task, self.levels, Task.judge)
        claimed = found.success.nonzero().squeeze(1)
        if claimed.numel() == 0:
            return found
        return without(found, claimed[~task.take(claimed).judge(found.images[claimed])])

    @contextmanager
    def _steps(self, images: int) -> Iterator[StepCount | None]:
        """Progress on a bar of its own or on that of an evaluation; ``None`` if there is none."""
        name, steps = type(self).__name__, self.n_gradients
        show = images * steps > PROGRESS_AFTER if self.progress is None else self.progress
        if show:
            with progress.bar(name, images, "of the images") as shown:
                shown.stage(images, name)
                yield StepCount(shown, images, steps)
        else:
            outer = progress.AROUND.get()
            yield None if outer is None else StepCount(outer, images, steps)


@dataclass(frozen=True)
class GradientAttack(Attack):
    """An attack that climbs one objective by its gradient. Subclasses write :meth:`init` and
    :meth:`advance`.

    Attributes:
        objective: what to climb, by name or a callable (:mod:`wball.attacks.objectives`).
        until_success: stop at an image's first success. Otherwise go on to the end and return the
            success of highest loss, which is what training wants.
    """

    _: KW_ONLY
    objective: str | objectives.Objective = "cross-entropy"
    until_success: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        objectives.find(self.objective)

    @abstractmethod
    def init(self, batch: AttackBatch, generator: torch.Generator) -> State:
        """The first candidates, and what the steps need."""

    @abstractmethod
    def advance(self, state: Any, gradient: Tensor) -> State:
        """The next candidates, from the gradient at those of ``state`` (which may be
        overwritten)."""

    def gradient(self, batch: AttackBatch, state: Any, generator: torch.Generator) -> Tensor:
        """The gradient at the candidates, which are offered on the way."""
        return batch.gradient(state)

    def steady(self) -> bool:
        """Whether steps decide nothing by numbers that they read from the device: one of them can
        be recorded, and replayed for all."""
        return False

    def run(self, batch: AttackBatch, generator: torch.Generator) -> None:
        """Make all steps, dropping images that are done."""
        loop, replay, device = _Loop(self, batch, generator), None, batch.x.device
        wanted = self.steady() and device.type in RECORDERS
        for step in range(self.n_gradients):
            if step == int(LATE * self.n_gradients):
                batch.begin_last_steps()
            batch.count_step()
            kept, left = batch.survivors(), self.n_gradients - 1 - step
            if kept is not None:
                if batch.empty:
                    return
                loop.state, loop.gradient = loop.state.take(kept), loop.gradient[kept]
                replay = None
            state = loop.state
            if replay is not None and left:
                torch.as_tensor(state.n_steps).fill_(step)
                replay()
                continue
            state.n_steps = step
            if left == 0:
                batch.offer(self.advance(state, loop.gradient))
            elif wanted and left >= WORTH and step > 0:
                state.n_steps = torch.full((), step, dtype=torch.float64, device=device)
                replay = recorded(loop.step, (loop, batch, *state.parts()), device, generator)
                wanted = replay is not None
            else:
                loop.step()
                # A kernel that reads from the GPU cannot be recorded.
                wanted &= not batch.x.is_cuda or state.kernel in dispatch.NEVER_READS

    def attack_batch(
        self, task: Task, generator: torch.Generator, progress: StepCount | None = None
    ) -> AttackResult:
        if len(task) == 0:
            return empty(task.x)
        # Examples that will be rounded are improved to the end: at the boundary rounding undoes them.
        until_success = self.until_success and self.levels is None
        objective = objectives.find(self.objective)
        batch = AttackBatch(task, self.ball, objective, until_success, progress)
        batch.drop()
        if not batch.empty:
            self.run(batch, generator)
        best = batch.finish()
        loss = objectives.report(objective, best.loss, targeted=task.target is not None)
        status = tuple(STATUSES[i] for i in best.status.tolist())
        return AttackResult(
            best.z, best.success, best.distance, loss, best.n_steps, status, best.radius,
            kernel=batch.kernel, proof=batch.proof, queries=best.queries,
            rising=~best.success & (best.loss - best.late > -(1 - LATE) * best.loss),
        )  # fmt: skip


class _Loop:
    """What one step of an attack reads and changes."""

    def __init__(
        self, attack: GradientAttack, batch: AttackBatch, generator: torch.Generator
    ) -> None:
        self.attack, self.batch, self.generator = attack, batch, generator
        self.state = attack.init(batch, generator)
        self.gradient = attack.gradient(batch, self.state, generator)

    def step(self) -> None:
        """To the next candidates and their gradient."""
        self.state = self.attack.advance(self.state, self.gradient)
        self.gradient = self.attack.gradient(self.batch, self.state, self.generator)


def normal(like: Tensor, generator: torch.Generator, count: int | None = None) -> Tensor:
    """Standard normal noise like images, or ``count`` times that. The same on every device of the
    generator."""
    shape = like.shape if count is None else (count, *like.shape)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(
        like
    )


def into_box(images: Tensor, box: tuple[float, float] | None) -> Tensor:
    """Images clipped to the box, if there is one."""
    return images if box is None else images.clamp(*box)


def distance_bound(ball: Ball, x: Tensor, z: Tensor, plan: StoredPlan | None = None) -> Tensor:
    """How far ``z`` is from ``x`` at most, in the unit of ``eps``: by the plan that proves it, or
    else exactly."""
    problem = None if plan is None else ball.problem(x)
    if plan is None or problem is None:
        return ball.distance(x, z).to(torch.float64)
    return plan.net_cost().to(torch.float64) / problem.unit


def understood(method: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of the options that a ball's method takes: not every ball has something to iterate."""
    return {name: value for name, value in options.items() if name in signature(method).parameters}


def check_attack(attack: object) -> None:
    """Raise unless this is an attack."""
    if not isinstance(attack, Attack):
        raise TypeError(f"attack must be an attack such as DualAveraging(ball), got {attack!r}")


def check_labels(name: str, labels: Tensor, x: Tensor) -> Tensor:
    """Integer classes, one per image, on the images' device."""
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor of class indices, got {type(labels).__name__}"
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(
            f"{name} must hold integer class indices, got {labels.dtype}; for one-hot rows use argmax(1)"
        )
    if labels.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must have one class per image, shape ({x.shape[0]},), got {tuple(labels.shape)}; for one-hot "
            "rows use argmax(1), for a column of classes flatten()"
        )
    return labels.detach().to(device=x.device, dtype=torch.long)


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host (in the words of torch's
    two allocators)."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return any(
        words in str(error)
        for words in ("t allocate memory", "DefaultCPUAllocator: not enough memory")
    )
