"""A journal of a running attack, so that an interruption costs little.

The standard attack is a chain of attacks, each on the images that survived those before it. The
journal keeps the result of each with the random state after it. When the batch is computed again,
the stored results are returned in their order, and the attack goes on after the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
        store: folder of the batches.
        name: start of the names of the files.
        ball: the threat model.
        device: device of the images.
        run: identifies the run, the batch and the radius. Files of another run are not read.
    """

    def __init__(
        self, store: Path, name: str, ball: Ball, device: torch.device, run: dict[str, Any]
    ) -> None:
        self._path = lambda count: store / f"{name}-{count:04d}.safetensors"
        self._store, self._pattern = store, f"{name}-*.safetensors"
        self._ball, self._device, self._run = ball, device, run
        self._known = self._stored()
        self._count, self._new, self._since = 0, list[tuple[dict[str, Tensor], Any]](), time.time()

    def __call__(
        self, task: Task, generator: torch.Generator, attack: Callable[[], AttackResult]
    ) -> AttackResult:
        """The stored result of the attack on ``task``, or that of running it now."""
        asked = {
            "asked": fingerprint(task.x, task.y, *([] if task.start is None else [task.start]))
        }
        number, self._count = self._count, self._count + 1
        if number < len(self._known) and asked.items() <= self._known[number][1].items():
            return self._restored(task, generator, *self._known[number])
        del self._known[number:]  # another split into batches, after memory ran out
        found = attack()
        self._known.append(self._packed(found, generator, asked))
        self._new.append(self._known[-1])
        if time.time() - self._since >= SAVE_EVERY:
            self._save()
        return found

    def clear(self) -> None:
        """Remove the files, when the batch itself is stored."""
        for path in self._store.glob(self._pattern):
            path.unlink()

    def _stored(self) -> list[tuple[dict[str, Tensor], Any]]:
        """The results of all files that are whole and of this run."""
        known = list[tuple[dict[str, Tensor], Any]]()
        while (path := self._path(len(known))).is_file():
            try:
                tensors, notes = read_tensors(path)
            except DamagedFile:
                break
            if notes["run"] != self._run:
                break
            for k, each in enumerate(notes["results"]):
                start = f"{k}."
                part = {n[len(start) :]: t for n, t in tensors.items() if n.startswith(start)}
                known.append((part, each))
        return known

    def _save(self) -> None:
        """Write what is not stored yet."""
        tensors = {
            f"{k}.{name}": value
            for k, (part, _) in enumerate(self._new)
            for name, value in part.items()
        }
        notes = {"run": self._run, "results": [each for _, each in self._new]}
        write_tensors(self._path(len(self._known) - len(self._new)), tensors, notes)
        self._new, self._since = [], time.time()

    def _packed(
        self, found: AttackResult, generator: torch.Generator, asked: dict[str, str]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A result as tensors and plain data, with the random state after it."""
        parts = {name: getattr(found, name) for name in TENSORS}
        tensors = {name: value for name, value in parts.items() if value is not None}
        tensors["status"] = torch.tensor([STATUSES.index(status) for status in found.status])
        tensors["drawn"], tensors["drawn everywhere"] = generator.get_state(), torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["drawn on the device"] = torch.cuda.get_rng_state(self._device)
        if found.proof is not None:
            tensors |= {f"plan {k}": value for k, value in enumerate(found.proof.tensors())}
        form = None if found.proof is None else type(found.proof).__name__
        return tensors, {**asked, "kernel": found.kernel, "plan": form}

    def _restored(
        self, task: Task, generator: torch.Generator, stored: dict[str, Tensor], notes: Any
    ) -> AttackResult:
        """The result that :meth:`_packed` packed. The random state is that after it."""
        generator.set_state(stored["drawn"])
        torch.set_rng_state(stored["drawn everywhere"])
        if "drawn on the device" in stored:
            torch.cuda.set_rng_state(stored["drawn on the device"], self._device)
        status = tuple(STATUSES[k] for k in stored["status"].tolist())
        parts: dict[str, Any] = {n: stored[n].to(task.x.device) for n in TENSORS if n in stored}
        found = AttackResult(**parts, status=status, kernel=notes["kernel"])
        if notes["plan"] is None:
            return found
        count = sum(name.startswith("plan ") for name in stored)
        plan: StoredPlan | None = plan_of_nothing(FORMS[notes["plan"]], self._ball, task.x)
        assert plan is not None, "a plan was stored"
        values = [stored[f"plan {k}"].to(task.x.device) for k in range(count)]
        return replace(found, proof=plan.with_tensors(values))
