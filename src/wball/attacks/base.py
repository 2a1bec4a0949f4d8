"""What every attack shares: the call, the bookkeeping per image, and leaving the model as it was found.

An attack holds settings only. The model comes at the call::

    result = attack(model, x, y)                       # untargeted: success is argmax != y
    result = attack(model, x, y, target=t)             # targeted:   success is argmax == t

:meth:`Attack.__call__` is final: it checks the inputs, splits them into batches that fit in memory, puts the model in
evaluation mode with frozen parameters, and restores the mode of every module, the parameters' flags and the random
state afterwards, whatever happens. Gradient attacks write :meth:`GradientAttack.run`, which sees one batch as a
:class:`Climb` and tells it each candidate; the climb keeps the best **per image** and drops images that are done.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from wball import inputs
from wball.attacks import objectives
from wball.attacks.findings import Finding, merged, reliable
from wball.attacks.progress import Bar, bar
from wball.ball import Ball, WassersteinBall
from wball.inputs import result_dtype
from wball.model import Model, as_found, ask, check_classes, reached
from wball.plan import AnyPlan, FactoredPlan, Plan, StoredPlan
from wball.solvers.problem import unit_of

DROP_EVERY = {"cpu": 1, "cuda": 10}
"""After how many steps finished images are dropped. Looking costs a GPU its pipeline, and a CPU nothing."""

PROGRESS_AFTER = 2_000_000
"""Image-steps above which a progress bar appears by itself (about half a minute on a small CPU)."""


class AttackStatus(Enum):
    """How an attack ended for an image. The value is the explanation, with the remedy where there is one."""

    FOUND = "an adversarial example was found"
    ALREADY_WRONG = "the clean image already meets the goal: distance 0"
    SURVIVED = "no adversarial example was found: more steps, restarts or StandardAttack may find one"
    NO_GRADIENT = "the gradient was zero or not finite: the model may mask it; try another objective"

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


STATUSES = tuple(AttackStatus)


@dataclass(frozen=True)
class AttackResult:
    """What an attack found, in the order of the images.

    Attributes:
        images: per image the adversarial example, or the best attempt; always in the ball.
        success: whether ``images`` meets the goal (``argmax != y``, or ``argmax == target``).
        distance: upper bound of the distance from ``x`` that the attack's plan proves, in the unit of ``eps``, float64.
        loss: value of the objective at ``images`` (the cross-entropy, for that objective).
        n_steps: steps used, per image.
        status: how it ended, per image.
        radius: radius of the ball each image was found in (or the last one tried), float64.
        member: for ensembles, which attack found it (-1: none).
        kernel: which implementation served the ball; several are joined by ``+``, and it is ``"none"`` where no step
            was made.
        proof: the plans behind ``distance``, where the attack was asked for them (``proofs=True``) and knows them:
            ``wball.audit(ball, x, result.images, plan=result.proof, exact="needed")`` then has nothing to solve.
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
        """Whether no finding says that the robust accuracy may be too high."""
        return reliable(self.findings)

    @property
    def robust_accuracy(self) -> float:
        """The share of images that no adversarial example was found for."""
        return self.accuracy_at(math.inf)

    def accuracy_at(self, eps: float) -> float:
        """The share of images that no adversarial example was found for at a radius up to ``eps``."""
        if self.success.numel() == 0:
            return 1.0
        wrong = torch.tensor([s is AttackStatus.ALREADY_WRONG for s in self.status], device=self.success.device)
        return 1.0 - float((self.success & (wrong | (self.radius <= eps))).double().mean())


class _Best(NamedTuple):
    """The best candidate so far for each image of a batch."""

    z: Tensor
    success: Tensor
    distance: Tensor
    loss: Tensor
    n_steps: Tensor
    status: Tensor
    radius: Tensor

    def at(self, index: Tensor) -> _Best:
        return _Best(*(field[index] for field in self))

    def put(self, index: Tensor, part: _Best) -> None:
        for field, value in zip(self, part, strict=True):
            field[index] = value


class Climb:
    """One batch under attack: the goal, the gradient, and the best candidate per image.

    Attributes:
        ball: threat model of the images that are still in.
        x, y, target: those images, their labels, and the target classes or ``None``.
        steps_done: gradient evaluations so far.
        kernel: which implementation served the ball so far; attacks report it.

    With ``whole`` images that are done stay in, and keep what was found: a recording knows one batch.
    """

    def __init__(
        self,
        model: Model,
        ball: Ball,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        objective: objectives.Objective,
        until_success: bool,
        progress: Bar | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self.model, self.x, self.y, self.target = model, x, y, target
        self.within(ball)
        self.objective, self.until_success, self._whole = objective, until_success, whole
        self.steps_done, self.kernel = 0, "none"
        self._proof: StoredPlan | None = None
        self._all_proof: StoredPlan | None = None
        self._progress = progress
        self._every = DROP_EVERY.get(x.device.type, 10)
        with torch.no_grad():
            logits = ask(model, x)
            check_classes("y", y, logits)
            if target is not None:
                check_classes("target", target, logits)
            self._aim = objective.rival(logits, y) if isinstance(objective, objectives.RunnerUp) else None
            success, loss = self.reached(logits), self._loss(logits)
        zero = torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
        survived, wrong = STATUSES.index(AttackStatus.SURVIVED), STATUSES.index(AttackStatus.ALREADY_WRONG)
        status = torch.where(success, wrong, survived)
        steps = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        self._all = _Best(x.clone(), success, zero, loss, steps, status, self._radius.clone())
        self._best = self._all.at(torch.arange(x.shape[0], device=x.device))
        self._active = torch.arange(x.shape[0], device=x.device)

    def within(self, ball: Ball) -> None:
        """Candidates from now on are from ``ball``."""
        self.ball = ball
        eps = torch.as_tensor(ball.eps, dtype=torch.float64).to(self.x.device)
        self._radius = eps.expand(self.x.shape[0]).contiguous()

    def reached(self, logits: Tensor) -> Tensor:
        """Which images' logits meet the goal."""
        return reached(logits, self.y, self.target)

    def _loss(self, logits: Tensor) -> Tensor:
        target = self.target if self.target is not None else self._aim
        loss = self.objective(logits, self.y, target)
        if not isinstance(loss, Tensor) or loss.shape != self.y.shape:
            seen = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"objective must return one value per image, shape ({len(self.y)},), got {seen}")
        return loss

    def start(self) -> Tensor | None:
        """Leave out what is done before the first step. The positions kept, or ``None`` if all are."""
        return self._drop()

    def keep_proofs(self, of_nothing: Callable[[Tensor], AnyPlan]) -> AnyPlan:
        """From now on every candidate comes with its proof. Returns that of the images as they are."""
        whole = of_nothing(self._all.z)
        part = whole.take(self._active)
        self._all_proof, self._proof = whole, part
        return part

    def gradient(self, z: Tensor, distance: Tensor, proof: StoredPlan | None = None) -> Tensor:
        """The objective's gradient at ``z``, which is also offered as a candidate (``distance``: see the result)."""
        z = z.detach().requires_grad_(True)
        with torch.enable_grad():
            logits = ask(self.model, z)
            loss = self._loss(logits)
            gradient = None  # where the model cuts the graph
            if loss.requires_grad:
                (gradient,) = torch.autograd.grad(loss.sum(), z, allow_unused=True)
        gradient = torch.zeros_like(z) if gradient is None else gradient
        finite = gradient.isfinite()
        gradient = torch.where(finite, gradient, torch.zeros_like(gradient))
        self._consider(z.detach(), logits.detach(), loss.detach(), distance, proof)
        dead = ~(finite & (gradient != 0)).flatten(1).any(1) & ~self._best.success
        status = torch.where(dead, STATUSES.index(AttackStatus.NO_GRADIENT), self._best.status)
        self._best = self._best._replace(status=status, n_steps=self._best.n_steps + (~self._best.success))
        self.steps_done += 1
        if self._progress is not None:
            self._progress.step(z.shape[0])
        return gradient

    def value(self, z: Tensor) -> Tensor:
        """The objective at ``z``, which is not offered as a candidate."""
        with torch.no_grad():
            return self._loss(ask(self.model, z))

    def offer(self, z: Tensor, distance: Tensor, proof: StoredPlan | None = None) -> Tensor:
        """A candidate without its gradient. Returns which images it succeeds on."""
        with torch.no_grad():
            logits = ask(self.model, z)
            self._consider(z, logits, self._loss(logits), distance, proof)
            return self.reached(logits)

    def _consider(self, z: Tensor, logits: Tensor, loss: Tensor, distance: Tensor, proof: StoredPlan | None) -> None:
        best, success = self._best, self.reached(logits)
        better = (success & ~best.success) | ((success == best.success) & (loss > best.loss))
        if self.until_success:
            better = better & ~best.success
        status = torch.where(success, STATUSES.index(AttackStatus.FOUND), best.status)
        self._best = best._replace(
            z=torch.where(better.view(-1, *[1] * (z.ndim - 1)), z, best.z),
            success=best.success | (better & success),
            distance=torch.where(better, distance.to(best.distance), best.distance),
            loss=torch.where(better, loss, best.loss),
            status=torch.where(better, status, best.status),
            radius=torch.where(best.success & ~better, best.radius, self._radius),
        )
        if self._proof is not None:
            assert proof is not None
            self._proof = proof.where(better, self._proof)

    def survivors(self) -> Tensor | None:
        """Every few steps, drop the images that are done. The positions kept, or ``None`` if nothing changed."""
        return self._drop() if self.steps_done % self._every == 0 else None

    def _drop(self) -> Tensor | None:
        if self._whole or not self.until_success:
            return None
        kept = (~self._best.success).nonzero().squeeze(1)
        if kept.numel() == self._active.numel():
            return None
        self._put()
        self._active, self._best = self._active[kept], self._best.at(kept)
        self._proof = None if self._proof is None else self._proof.take(kept)
        self.x, self.y = self.x[kept], self.y[kept]
        self.within(self.ball.take(kept))
        self.target = None if self.target is None else self.target[kept]
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


@dataclass(frozen=True)
class Attack(ABC):
    """Settings of an attack, and its call.

    Attributes:
        ball: the threat model.
        batch_size: images at a time; ``None`` takes all, and halves the batch whenever memory runs out.
        progress: show a bar on stderr; ``None`` shows it on long runs.
        proofs: return the plans that prove the distances, if the attack has them (``result.proof``).
    """

    ball: Ball
    _: KW_ONLY
    batch_size: int | None = None
    progress: bool | None = None
    proofs: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self.ball, "project"):
            raise TypeError(f"ball must be a threat model such as WassersteinBall(0.1), got {self.ball!r}")
        if self.batch_size is not None:
            inputs.check_count("batch_size", self.batch_size)

    @abstractmethod
    def attack_batch(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        generator: torch.Generator,
        progress: Bar | None = None,
    ) -> AttackResult:
        """Attack checked images that fit in memory, on a model that is ready for it."""

    def before(self, model: Model, x: Tensor, y: Tensor) -> None:  # noqa: B027 - a hook, empty on purpose
        """Called once with the model as found."""

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

        ``generator`` seeds whatever is random; without it the same fixed seed is used each time. The global random
        state is left as found.
        """
        if not callable(model):
            raise TypeError(f"model must be callable, images to logits, got {type(model).__name__}")
        inputs.check_generator(generator)
        x = inputs.check_images("x", x.detach() if isinstance(x, Tensor) else x, self.ball.box)
        y = check_labels("y", y, x)
        target = None if target is None else check_labels("target", target, x)
        inputs.check_eps_count(self.ball.eps, x.shape[0])
        x = x.to(result_dtype(x))
        self.before(model, x, y)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(0)
        with as_found(model, x.device), torch.inference_mode(False):
            x, y = x.clone(), y.clone()  # an inference tensor cannot carry gradients
            with self._bar(x.shape[0]) as progress:
                return self._in_batches(model, x, y, target, generator, progress)

    def _in_batches(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        generator: torch.Generator,
        progress: Bar | None,
    ) -> AttackResult:
        parts: list[AttackResult] = []
        start, size = 0, self.batch_size or max(1, x.shape[0])
        while start < x.shape[0] or not parts:
            index = torch.arange(start, min(start + size, x.shape[0]), device=x.device)
            seeds = generator.get_state()
            if progress is not None:
                progress.batch(start, index.numel())
            try:
                part = None if target is None else target[index]
                parts.append(self.take(index).attack_batch(model, x[index], y[index], part, generator, progress))
            except RuntimeError as error:
                if not out_of_memory(error) or size == 1:
                    raise
            else:
                start += size
                continue
            # Outside the handler, so that the failed batch's tensors are released with the exception.
            generator.set_state(seeds)
            size = max(1, min(size, index.numel()) // 2)
            warnings.warn(f"out of memory: going on with batches of {size} images", RuntimeWarning, stacklevel=4)
            if x.is_cuda:
                torch.cuda.empty_cache()
        return _joined(parts)

    def _bar(self, images: int) -> AbstractContextManager[Bar | None]:
        long = images * self.n_gradients > PROGRESS_AFTER
        show = long if self.progress is None else self.progress
        return bar(type(self).__name__, images, self.n_gradients) if show else nullcontext()


@dataclass(frozen=True)
class GradientAttack(Attack):
    """An attack that climbs one objective by its gradient. Subclasses write :meth:`run`.

    Attributes:
        objective: what to climb, by name or a callable (:mod:`wball.attacks.objectives`).
        until_success: stop at an image's first success. Otherwise go on to the end and return the success of highest
            loss, which is what training wants.
    """

    _: KW_ONLY
    objective: str | objectives.Objective = "cross-entropy"
    until_success: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        objectives.find(self.objective)

    @abstractmethod
    def run(self, climb: Climb, generator: torch.Generator) -> None:
        """Attack one batch: ask ``climb`` for gradients, tell it candidates that lie in its ball."""

    def attack_batch(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        target: Tensor | None,
        generator: torch.Generator,
        progress: Bar | None = None,
    ) -> AttackResult:
        objective = objectives.find(self.objective)
        if x.shape[0] == 0:
            return _empty(x)
        climb = Climb(model, self.ball, x, y, target, objective, self.until_success, progress)
        climb.start()
        if not climb.empty:
            self.run(climb, generator)
        best = climb.finish()
        loss = objectives.report(objective, best.loss, targeted=target is not None)
        status = tuple(STATUSES[i] for i in best.status.tolist())
        return AttackResult(
            best.z, best.success, best.distance, loss, best.n_steps, status, best.radius,
            kernel=climb.kernel, proof=climb.proof,
        )  # fmt: skip


def spread(per_image: Tensor, like: Tensor) -> Tensor:
    """One value per image (or one for all), shaped to multiply ``like``."""
    return per_image.view(-1, *[1] * (like.ndim - 1))


def distance_bound(ball: Ball, x: Tensor, z: Tensor, plan: Plan | None = None) -> Tensor:
    """How far ``z`` is from ``x`` at most, in the unit of ``eps``: by the plan that proves it, or else exactly."""
    if plan is None or not isinstance(ball, WassersteinBall):
        return ball.distance(x, z).to(torch.float64)
    return plan.cancelled().cost().to(torch.float64) / unit_of(ball, x)


Kind = TypeVar("Kind", Plan, FactoredPlan)


def plan_of_nothing(kind: type[Kind], ball: WassersteinBall, x: Tensor) -> Kind:
    """The plan of images that stay as they are."""
    grid = x if x.ndim == 4 else x[:, None, None, :]
    return kind.identity(ball.cost.arcs(int(grid.shape[2]), int(grid.shape[3]), grid), grid)


def check_labels(name: str, labels: Tensor, x: Tensor) -> Tensor:
    """Integer classes, one per image, on the images' device."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of class indices, got {type(labels).__name__}")
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"{name} must hold integer class indices, got {labels.dtype}; for one-hot rows use argmax(1)")
    if labels.shape != x.shape[:1]:
        raise ValueError(f"{name} must have one class per image, shape ({x.shape[0]},), got {tuple(labels.shape)}")
    return labels.detach().to(device=x.device, dtype=torch.long)


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the host (in the words of torch's two allocators)."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("t allocate memory", "DefaultCPUAllocator: not enough memory"))


def _empty(x: Tensor) -> AttackResult:
    none = torch.zeros(0, device=x.device)
    counts = none.long()
    return AttackResult(x.clone(), none.bool(), none.double(), none, counts, (), none.double())


def _joined(parts: list[AttackResult]) -> AttackResult:
    if len(parts) == 1:
        return parts[0]
    fields: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("images", "success", "distance", "loss", "n_steps", "radius", "member", "queries")
        if getattr(parts[0], name) is not None
    }
    kernel = joined_kernels(part.kernel for part in parts)
    proofs = [part.proof for part in parts if part.proof is not None]
    proof = StoredPlan.joined(proofs) if len(proofs) == len(parts) else None
    findings = merged(finding for part in parts for finding in part.findings)
    status = sum((part.status for part in parts), ())
    return AttackResult(status=status, kernel=kernel, proof=proof, findings=findings, **fields)


def joined_kernels(names: Iterable[str]) -> str:
    """The kernels that served, each once.

    >>> joined_kernels(["triton", "none", "triton", "torch"])
    'torch+triton'
    """
    served = {name for joined in names for name in joined.split("+")} - {"none"}
    return "+".join(sorted(served)) or "none"
