"""A journal of a running attack, so that an interruption costs little.

The standard attack is a chain of attacks, each on the images that survived those before it. The
journal keeps the result of each with the random state after it. When the batch is computed again,
the stored results are returned in their order, and the attack goes on after the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wball.attacks import AttackResult
from wball.attacks.attack import STATUSES, Task
from wball.attacks.base import plan_of_nothing
from wball.ball import Ball
from wball.plan import FactoredPlan, Plan, StoredPlan
from wball.provenance import fingerprint
from wball.storage.files import DamagedFile, read_tensors, write_tensors

SAVE_EVERY = 10.0
"""Seconds of work that may be lost in addition to the attack that is running."""
FORMS: dict[str, Any] = {form.__name__: form for form in (FactoredPlan, Plan)}
TENSORS = [field.name for field in fields(AttackResult) if "Tensor" in str(field.type)]


class Journal:
    """The results of one batch at one radius.

    Args:
        start: start of the paths of its files.
        ball: the threat model.
        run: identifies the run, the batch and the radius. Files of another run are not read.
    """

    def __init__(self, start: Path, ball: Ball, run: dict[str, Any]) -> None:
        self._start, self._ball, self._run = start, ball, run
        self._count, self._reading, self._saved = 0, True, time.monotonic()
        self._new: list[tuple[Path, dict[str, Tensor], dict[str, Any]]] = []

    def __call__(
        self, task: Task, generator: torch.Generator, attack: Callable[[], AttackResult]
    ) -> AttackResult:
        """The stored result of the attack on ``task``, or that of running it now."""
        path = self._start.with_name(f"{self._start.name}-{self._count:04d}.safetensors")
        given = (task.x, task.y) if task.start is None else (task.x, task.y, task.start)
        run = {**self._run, "asked": fingerprint(*given)}
        self._count += 1
        if self._reading and path.is_file():
            with suppress(DamagedFile):
                stored, notes = read_tensors(path)
                if run.items() <= notes.items():
                    return _restored(task, generator, self._ball, stored, notes)
        self._reading = False  # what follows in the files belongs to another chain
        found = attack()
        self._new.append((path, *_packed(found, generator, run)))
        if time.monotonic() - self._saved >= SAVE_EVERY:
            for one in self._new:
                write_tensors(*one)
            self._new, self._saved = [], time.monotonic()
        return found


def _restored(
    task: Task,
    generator: torch.Generator,
    ball: Ball,
    stored: dict[str, Tensor],
    notes: dict[str, Any],
) -> AttackResult:
    """The result that :func:`_packed` packed. The random state is that after it."""
    generator.set_state(stored["generator"])
    torch.set_rng_state(stored["torch"])
    if "cuda" in stored:
        torch.cuda.set_rng_state(stored["cuda"], task.x.device)
    here = {name: value.to(task.x.device) for name, value in stored.items()}
    parts: dict[str, Any] = {name: here[name] for name in TENSORS if name in here}
    status = tuple(STATUSES[k] for k in stored["status"].tolist())
    found = AttackResult(**parts, status=status, kernel=notes["kernel"])
    if notes["plan"] is None:
        return found
    plan: StoredPlan | None = plan_of_nothing(FORMS[notes["plan"]], ball, task.x)
    assert plan is not None, "a plan was stored"
    tensors = [here[f"plan {k}"] for k in range(len(plan.tensors()))]
    return replace(found, proof=plan.with_tensors(tensors))


def _packed(
    found: AttackResult, generator: torch.Generator, run: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A result as tensors and plain data, with the random state after it."""
    parts = {name: getattr(found, name) for name in TENSORS}
    tensors = {name: value for name, value in parts.items() if value is not None}
    tensors["status"] = torch.tensor([STATUSES.index(status) for status in found.status])
    tensors |= {"generator": generator.get_state(), "torch": torch.get_rng_state()}
    if found.images.is_cuda:
        tensors["cuda"] = torch.cuda.get_rng_state(found.images.device)
    plan = [] if found.proof is None else found.proof.tensors()
    tensors |= {f"plan {k}": value for k, value in enumerate(plan)}
    form = None if found.proof is None else type(found.proof).__name__
    return tensors, {**run, "kernel": found.kernel, "plan": form}
