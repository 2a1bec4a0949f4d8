r"""What gradient attacks share: the objective, the loop, and the bookkeeping per image.

Gradient attacks write :meth:`GradientAttack.init`, the first candidates of a batch, and
:meth:`GradientAttack.advance`, the next ones from a gradient. The base loops, keeps the best **per
image** and drops images that are done.

An objective is a function of the logits, larger meaning closer to success:

===================  ========================================  =====================================
name                 untargeted (true class y)                 targeted (class t)
===================  ========================================  =====================================
``"cross-entropy"``  :math:`\log\sum_{k \ne y} e^{o_k} - o_y`  :math:`o_t - \log\sum_{k \ne t}
                                                               e^{o_k}`
``"margin"``         :math:`\max_{k \ne y} o_k - o_y`          :math:`o_t - \max_{k \ne t} o_k`
``"dlr"``            margin / :math:`(o_{(1)} - o_{(3)})`      :math:`o_t - o_y` / :math:`(o_{(1)} -
                                                               (o_{(3)} + o_{(4)})/2)`
``"runner-up-k"``    :math:`o_r - o_y`, r = k-th best          as ``"margin"``
                     wrong class of the clean image
===================  ========================================  =====================================

The cross-entropy is ``softplus`` of the first, with the same gradient up to a factor ``1 - p_y``
per image. For a confident model that factor is 0 in float32, and the gradient with it. Attacks
normalise the gradient anyway, so they climb the form without the factor, and report the
cross-entropy.

A user's own objective is any callable ``(logits, y, target) -> (B,)`` with ``target`` ``None`` in
untargeted attacks. If it has a parameter ``index``, it gets the positions of its images in the
call, to look up what belongs to them: soft labels, or the clean images' logits (TRADES).
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields, replace
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from wball import inputs
from wball.attacks.attack import (
    JOURNAL,
    STATUSES,
    Attack,
    AttackResult,
    StepCount,
    Task,
    empty,
)
from wball.attacks.recording import RECORDERS, WORTH, put, recorded, tensors_in
from wball.ball import Ball
from wball.inputs import per_image, positions, zeros
from wball.model import ask, check_classes, full_precision, reached
from wball.plan import FactoredPlan, Plan, StoredPlan

DROP_EVERY = {"cpu": 1, "cuda": 10}
"""After how many steps finished images are dropped. Looking costs a GPU its pipeline, and a CPU
nothing."""

DROP_FROM = {"cpu": 0.0, "cuda": 0.5}
"""Share of the images that must be finished for that. A step on a smaller batch is recorded anew on
a GPU."""

FOUND, ALREADY_WRONG, SURVIVED, NO_GRADIENT = range(len(STATUSES))
"""Positions in :data:`STATUSES`."""

Objective = Callable[..., Tensor]
AnyState = TypeVar("AnyState", bound="State")
Kind = TypeVar("Kind", Plan, FactoredPlan)


def plan_of_nothing(kind: type[Kind], ball: Ball, x: Tensor) -> Kind | None:
    """A plan that moves nothing, for images that stay unchanged; ``None`` if the ball has no
    plans."""
    grid = x if x.ndim == 4 else x[:, None, None, :]
    problem = ball.problem(x)
    return None if problem is None else kind.identity(problem.moves(grid), grid)


def _at(logits: Tensor, label: Tensor) -> Tensor:
    return logits.gather(1, label[:, None]).squeeze(1)


def _others(logits: Tensor, label: Tensor) -> Tensor:
    return logits.scatter(1, label[:, None], -torch.inf)


def cross_entropy(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """Log-odds of all wrong classes against ``y``; targeted: of ``target`` against all others.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.])
    """
    if target is not None:
        return _at(logits, target) - torch.logsumexp(_others(logits, target), 1)
    return torch.logsumexp(_others(logits, y), 1) - _at(logits, y)


def margin(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """How far the best wrong class is above ``y``; targeted: ``target`` above the best other
    one."""
    if target is not None:
        return _at(logits, target) - _others(logits, target).amax(1)
    return _others(logits, y).amax(1) - _at(logits, y)


def dlr(logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """Difference of logits ratio: the margin in units of the spread of the largest logits, so
    invariant to their scale.

    The formula needs three classes, four if targeted; with fewer this is the margin.
    """
    if logits.shape[1] < (3 if target is None else 4):
        return margin(logits, y, target)
    top = logits.topk(4 if target is not None else 3, 1).values
    tiny = torch.finfo(logits.dtype).eps
    if target is not None:
        return (_at(logits, target) - _at(logits, y)) / (
            top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + tiny
        )
    return margin(logits, y) / (top[:, 0] - top[:, 2] + tiny)


@dataclass(frozen=True)
class RunnerUp:
    """The margin of one fixed wrong class over ``y``: the ``rank``-th most likely one on the clean
    image."""

    rank: int = 1

    def rival(self, clean_logits: Tensor, y: Tensor) -> Tensor:
        """The class to aim at, per image: the ``rank``-th most likely wrong one, or the least
        likely if there are fewer."""
        wrong = max(1, min(self.rank, clean_logits.shape[1] - 1))
        return _others(clean_logits, y).topk(wrong, 1).indices[:, -1]

    def __call__(self, logits: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
        """``target`` is the rival here; success does not require it to win."""
        if target is None:
            return margin(logits, y)
        return _at(logits, target) - _at(logits, y)


_NAMED: dict[str, Objective] = {"cross-entropy": cross_entropy, "margin": margin, "dlr": dlr}


def find_objective(objective: str | Objective) -> Objective:
    """Look up an objective by its name; a callable is returned unchanged."""
    if callable(objective):
        return objective
    if isinstance(objective, str):
        runner_up = re.fullmatch(r"runner-up-([1-9]\d*)", objective)
        if runner_up:
            return RunnerUp(int(runner_up.group(1)))
        if objective in _NAMED:
            return _NAMED[objective]
    raise ValueError(
        f'objective must be one of {", ".join(_NAMED)}, "runner-up-<k>", or a callable, got {objective!r}'
    )


def _takes_index(objective: Objective) -> bool:
    """Whether an objective asks for the positions of its images in the call."""
    try:
        return "index" in signature(objective).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


def input_gradient(value: Tensor, z: Tensor) -> Tensor:
    """The gradient of an objective at ``z``; 0 where the model cuts the graph, or torch has no
    derivative."""
    gradient = None
    if value.requires_grad:
        with suppress(NotImplementedError):
            (gradient,) = torch.autograd.grad(value.sum(), z, allow_unused=True)
    return torch.zeros_like(z) if gradient is None else inputs.row_major(gradient)


def reported_loss(objective: Objective, value: Tensor, *, targeted: bool) -> Tensor:
    """The loss to report for a value of the objective: the cross-entropy of ``y`` (minus that of
    the target) instead of its log-odds."""
    if objective is not cross_entropy:
        return value
    return -F.softplus(-value) if targeted else F.softplus(value)


@dataclass
class State:
    """The current candidates. Subclasses add what the next step needs.

    Attributes:
        x: the images that are still attacked.
        ball: their threat model.
        z: the candidates, in the ball.
        distance: upper bound of their distance from ``x``, in the unit of ``eps``, float64.
        proof: the plans behind it, if they are kept.
        kernel: the implementation that computed the points.
        n_steps: steps made so far; a tensor where a step is replayed for many.
        loss: the objective at the candidates, as far as it was asked for.
    """

    x: Tensor
    ball: Ball
    z: Tensor
    distance: Tensor
    proof: StoredPlan | None = None
    kernel: str = "none"
    n_steps: int | Tensor = 0
    loss: Tensor | None = None

    @property
    def reads_host(self) -> bool:
        """Whether a step depends on values read from the device; otherwise it can be recorded as a
        CUDA graph and replayed."""
        return True

    def parts(self) -> tuple[object, ...]:
        """The objects whose attributes a step changes, if they are known: then an interrupted
        attack can go on after its last step."""
        return ()

    def take(self: AnyState, index: Tensor) -> AnyState:
        """The state of a subset of the images: attributes with one entry per image are indexed."""

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
    clear: Tensor  # an example with the margin that is asked for

    def at(self, index: Tensor) -> _Best:
        return _Best(*(field[index] for field in self))

    def put(self, index: Tensor, part: _Best) -> None:
        for field, value in zip(self, part, strict=True):
            field[index] = value


class AttackBatch:
    """One batch under attack.

    Attributes:
        task: the task of the images that are still attacked.
        ball: their threat model.
        steps_done: steps so far.
        queries: forward passes so far, of each image that is still attacked.
        kernel: the implementations used by the ball so far.
        active: positions of the images that are still attacked.
    """

    def __init__(
        self,
        task: Task,
        ball: Ball,
        objective: Objective,
        until_success: bool,
        progress: StepCount | None = None,
        clearly: float = 0.0,
    ) -> None:
        self.task, self.ball, self.objective = task, ball, objective
        self.until_success, self._clearly = until_success, clearly
        self._by_index = _takes_index(objective)
        if self._by_index and task.index is None:
            self.task = replace(task, index=torch.arange(len(task), device=task.x.device))
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
            elif isinstance(objective, RunnerUp):
                first = logits if task.start is None else ask(task.model, task.start)
                self._aim = objective.rival(first, task.y)
            success, loss = self.reached(logits), self.loss(logits)
            wrong = positions(success)
            if (
                wrong.numel() and task.confirm
            ):  # an image that is wrong by rounding alone is attacked
                success[wrong] = task.take(wrong).judge(x[wrong])
        self.logits = logits
        zero = zeros(x)
        status = torch.where(success, ALREADY_WRONG, SURVIVED)
        steps = torch.zeros(len(x), dtype=torch.long, device=x.device)
        queries = steps + self.queries
        self._all = _Best(
            x.clone(), success, zero, loss, steps, status, spread_eps(ball, zero).clone(), queries,
            success.clone(),
        )  # fmt: skip
        self._best = self._all.at(torch.arange(len(x), device=x.device))
        self.active = torch.arange(len(x), device=x.device)

    @property
    def x(self) -> Tensor:
        """The images that are still attacked."""
        return self.task.x

    def reached(self, logits: Tensor) -> Tensor:
        """Which images' logits meet the goal of the attack."""
        return reached(logits, self.task.y, self.task.target)

    def loss(self, logits: Tensor) -> Tensor:
        """The objective at the logits of the images that are still attacked."""
        where = {"index": self.task.index} if self._by_index else {}
        loss = self.objective(logits, self.task.y, self._aim, **where)
        if not isinstance(loss, Tensor) or loss.shape != self.task.y.shape:
            seen = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"objective must return one value per image, shape ({len(self.task)},), got {seen}"
            )
        return loss

    def keep_proofs(self, kind: type[Kind]) -> Kind | None:
        """Require a proof with every candidate from now on. Returns the proof of the unchanged
        images; ``None`` if the ball has no plans."""
        whole = plan_of_nothing(kind, self.ball, self._all.z)
        part = None if whole is None else whole.take(self.active)
        self._all_proof, self._proof = whole, part
        return part

    def gradient(self, state: State, noise: Tensor | None = None) -> Tensor:
        """The gradient of the objective at the candidate, which is also offered. With ``noise``,
        the model is differentiated at the candidate plus noise, inside the box."""
        z = state.z.detach().to(self.x.dtype)
        if noise is None:
            with torch.enable_grad():
                logits = ask(self.task.model, z.requires_grad_(True))
                loss = self.loss(logits)
                gradient = input_gradient(loss, z)
            self.queries += 1
            self._consider(state, logits.detach(), loss.detach())
            return self.made_step(gradient)
        scores = self.offer(state).detach().requires_grad_(True)
        z = into_box(z + noise, self.ball.box).requires_grad_(True)
        with torch.enable_grad():
            pull = input_gradient(self.loss(scores), scores)
            gradient = input_gradient((pull * ask(self.task.model, z)).sum(1), z)
        self.queries += 1
        return self.made_step(gradient)

    def made_step(self, gradient: Tensor) -> Tensor:
        """Record a step along ``gradient``, and return the gradient with 0 where it is not
        finite."""
        gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
        dead = (inputs.largest(gradient) == 0) & ~self._best.success
        status = torch.where(dead, NO_GRADIENT, self._best.status)
        self._best = self._best._replace(
            status=status, n_steps=self._best.n_steps + (~self._best.clear)
        )
        return gradient

    def count_step(self) -> None:
        """Count a step, for progress and for :meth:`survivors`."""
        self.steps_done += 1
        if self._progress is not None:
            self._progress.step(self.active.numel())

    def succeeds(self, z: Tensor) -> Tensor:
        """Which images meet the goal at ``z``, without offering ``z`` as a candidate."""
        with torch.no_grad():
            self.queries += 1
            return self.reached(ask(self.task.model, z))

    def offer(self, state: State) -> Tensor:
        """Offer a candidate without computing its gradient. Returns its logits."""
        with torch.no_grad():
            logits = ask(self.task.model, state.z.to(self.x.dtype))
            self.queries += 1
            self._consider(state, logits, self.loss(logits))
            return logits

    def _consider(self, state: State, logits: Tensor, loss: Tensor) -> None:
        """Update the best candidates where this one is better."""
        best, success, z = self._best, self.reached(logits), state.z.to(self.x.dtype)
        clear = success
        if self._clearly:
            ahead = margin(logits, self.task.y, self.task.target)
            clear = success & (ahead > self._clearly * logits.abs().amax(1))
        state.loss = loss
        better = (success == best.success) & (loss > best.loss)
        better |= (success & ~best.success) | (clear & ~best.clear)
        if self.until_success:
            better = better & ~best.clear
        status = torch.where(success, FOUND, best.status)
        # Add the increment, which is the same at every step, so that the step can be recorded.
        queries, self._counted = best.queries + (self.queries - self._counted), self.queries
        self._best = best._replace(
            z=torch.where(per_image(better, z), z, best.z),
            success=best.success | (better & success),
            distance=torch.where(better, state.distance.to(best.distance), best.distance),
            loss=torch.where(better, loss, best.loss),
            status=torch.where(better, status, best.status),
            radius=torch.where(
                best.success & ~better, best.radius, spread_eps(state.ball, best.radius)
            ),
            queries=torch.where(best.clear, best.queries, queries)
            if self.until_success
            else queries,
            clear=best.clear | (better & clear),
        )
        if state.kernel != "none":
            self.kernel = state.kernel
        if self._proof is not None:
            assert state.proof is not None
            self._proof = state.proof.where(better, self._proof)

    def survivors(self) -> Tensor | None:
        """Drop broken images every few steps. Returns the positions that are kept, or ``None`` if
        nothing changed."""
        device = self.x.device.type
        return (
            self.drop(DROP_FROM.get(device, 0.5))
            if self.steps_done % DROP_EVERY.get(device, 10) == 0
            else None
        )

    def drop(self, least: float = 0.0) -> Tensor | None:
        """Drop the broken images if they are at least a share ``least`` of the batch. Returns the
        positions that are kept, or ``None`` if all are."""
        if not self.until_success:
            return None
        kept = positions(~self._best.clear)
        count = self.active.numel()
        if kept.numel() == count or count - kept.numel() < least * count:
            return None
        self.keep(kept)
        return kept

    def keep(self, kept: Tensor) -> None:
        """Go on with the images at these positions."""
        self._put()
        self.active, self._best = self.active[kept], self._best.at(kept)
        self._proof = None if self._proof is None else self._proof.take(kept)
        self.task, self.ball, self.logits = (
            self.task.take(kept),
            self.ball.take(kept),
            self.logits[kept],
        )
        self._aim = None if self._aim is None else self._aim[kept]

    @property
    def empty(self) -> bool:
        return self.active.numel() == 0

    def finish(self) -> _Best:
        self._put()
        return self._all

    @property
    def proof(self) -> StoredPlan | None:
        """The plans of all images' best candidates, after the attack has finished."""
        return self._all_proof

    def _put(self) -> None:
        self._all.put(self.active, self._best)
        if self._proof is not None and self._all_proof is not None:
            self._all_proof = self._all_proof.put(self.active, self._proof)


@dataclass(frozen=True)
class GradientAttack(Attack):
    """An attack that climbs one objective by its gradient. Subclasses write :meth:`init` and
    :meth:`advance`.

    Attributes:
        objective: what to climb, by name or a callable.
        until_success: stop at an image's first success. Otherwise go on to the end and return the
            success of highest loss, which is what training wants.
        clearly: the first success that counts for this has a margin above this share of the largest
            logit. A smaller margin may be lost in another precision.
    """

    _: KW_ONLY
    objective: str | Objective = "cross-entropy"
    until_success: bool = True
    clearly: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        find_objective(self.objective)
        if not 0 <= self.clearly < 1:
            raise ValueError(f"clearly must be in [0, 1), got {self.clearly}")

    @abstractmethod
    def init(self, batch: AttackBatch, generator: Generator) -> State:
        """The first candidates, and what the steps need."""

    @abstractmethod
    def advance(self, state: Any, gradient: Tensor) -> State:
        """The next candidates, from the gradient at those of ``state`` (which may be
        overwritten)."""

    def gradient(self, batch: AttackBatch, state: Any, generator: Generator) -> Tensor:
        """The gradient at the candidates, which are also offered."""
        return batch.gradient(state)

    def run(self, batch: AttackBatch, generator: Generator) -> None:
        """Run all steps, dropping images that are broken."""
        loop, replay, device = Loop(self, batch, generator), None, batch.x.device
        wanted = device.type in RECORDERS and not loop.state.reads_host
        journal = JOURNAL.get() if loop.state.parts() else None
        begun = 0 if journal is None else journal.resume(loop)
        for step in range(begun, self.n_gradients):
            if journal is not None and step:  # after one step every attribute has its form
                journal.keep(loop, step)
            batch.count_step()
            kept, left = batch.survivors(), self.n_gradients - 1 - step
            if kept is not None:
                if batch.empty:
                    return
                loop.take(kept)
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
                replay = recorded(loop.step, loop.owners(), device, generator)
                wanted = replay is not None
            else:
                loop.step()

    def attack_batch(
        self, task: Task, generator: Generator, progress: StepCount | None = None
    ) -> AttackResult:
        if len(task) == 0:
            return empty(task.x)
        # Examples that will be rounded are improved to the end: at the boundary rounding undoes
        # them.
        until_success = self.until_success and self.levels is None
        objective = find_objective(self.objective)
        batch = AttackBatch(task, self.ball, objective, until_success, progress, self.clearly)
        batch.drop()
        if not batch.empty:
            self.run(batch, generator)
        best = batch.finish()
        loss = reported_loss(objective, best.loss, targeted=task.target is not None)
        status = tuple(STATUSES[i] for i in best.status.tolist())
        return AttackResult(
            best.z, best.success, best.distance, loss, best.n_steps, status, best.radius,
            kernel=batch.kernel, proof=batch.proof, queries=best.queries,
        )  # fmt: skip


@dataclass(frozen=True)
class SteppedAttack(GradientAttack):
    """A gradient attack whose first setting is the number of its steps.

    Attributes:
        steps: gradient steps.
        noise: standard deviation, in pixel values, of fresh noise on the images that gradients are
            taken at. It fades to 0 over the steps: the first ones climb a smoothed model.
    """

    steps: int = 40
    _: KW_ONLY
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs.check_count("steps", self.steps)
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be >= 0 and finite, in pixel values, got {self.noise}")

    def gradient(self, batch: AttackBatch, state: Any, generator: Generator) -> Tensor:
        if self.noise == 0:
            return batch.gradient(state)
        fading = 1 - state.n_steps / max(1, self.steps - 1)
        return batch.gradient(state, self.noise * fading * normal(batch.x, generator))

    @property
    def n_gradients(self) -> int:
        return self.steps


class Loop:
    """The state that one step of an attack reads and changes."""

    def __init__(self, attack: GradientAttack, batch: AttackBatch, generator: Generator) -> None:
        self.attack, self.batch, self.generator = attack, batch, generator
        self.state = self._checked(attack.init(batch, generator))
        self.gradient = attack.gradient(batch, self.state, generator)

    def _checked(self, state: State) -> State:
        """Raise unless a subclass returned a state with one entry per image."""
        seen = getattr(getattr(state, "z", None), "shape", type(state).__name__)
        if seen != self.batch.x.shape:
            raise TypeError(
                f"init and advance of {type(self.attack).__name__} must return a State with images "
                f"z of shape {tuple(self.batch.x.shape)}, got {seen}"
            )
        return state

    def owners(self) -> tuple[object, ...]:
        """The objects whose attributes a step changes."""
        return (self, self.batch, *self.state.parts())

    def take(self, kept: Tensor) -> None:
        """Go on with a subset of the images."""
        self.state, self.gradient = self.state.take(kept), self.gradient[kept]

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state as tensors, and as plain data."""
        tensors, plain = {"active": self.batch.active}, {}
        for place, owner, name in self._slots():
            value = getattr(owner, name)
            if isinstance(value, (int, float, str)):
                plain[place] = value
            tensors |= {f"{place} {k}": part for k, part in enumerate(tensors_in(value))}
        return tensors, plain

    def restore(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Return to the state that was :meth:`packed`, from the start of the same attack."""
        kept = positions(torch.isin(self.batch.active.cpu(), tensors["active"]))
        kept = kept.to(self.batch.x.device)
        self.batch.keep(kept)
        self.take(kept)
        self.step()  # gives every attribute its form; the content is replaced
        for place, owner, name in self._slots():
            parts = tensors_in(getattr(owner, name))
            if place in plain:
                setattr(owner, name, plain[place])
            elif parts:
                stored = [tensors[f"{place} {k}"].to(part.device) for k, part in enumerate(parts)]
                put(owner, name, stored)

    def _slots(self) -> list[tuple[str, object, str]]:
        owners = enumerate(self.owners())
        return [(f"{k} {name}", owner, name) for k, owner in owners for name in vars(owner)]

    def step(self) -> None:
        """Advance to the next candidates and compute their gradient."""
        self.state = self._checked(self.attack.advance(self.state, self.gradient))
        self.gradient = self.attack.gradient(self.batch, self.state, self.generator)


def normal(like: Tensor, generator: Generator, count: int | None = None) -> Tensor:
    """Standard normal noise shaped like the images, or ``count`` such tensors. The noise depends
    only on the generator, not on the device."""
    shape = like.shape if count is None else (count, *like.shape)
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(
        like
    )


def spread_eps(ball: Ball, like: Tensor) -> Tensor:
    """The ball's radius, one per image."""
    return torch.as_tensor(ball.eps, dtype=like.dtype, device=like.device).expand_as(like)


def into_box(images: Tensor, box: tuple[float, float] | None) -> Tensor:
    """Clip images to the box, if there is one."""
    return images if box is None else images.clamp(*box)
