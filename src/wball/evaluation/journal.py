"""A journal of a running attack, so that an interruption costs little.

The standard attack is a chain of attacks, each on the images that survived those before it. The
journal keeps the result of each, and the state of the one that is running. When the batch is
computed again, results are returned in their order, and the running attack goes on after the last
step that was kept. Random states are kept as well, so nothing changes by an interruption.
"""

import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Generator

from wball.attacks import Attack, AttackResult
from wball.attacks.attack import STATUSES, StepCount, Task
from wball.attacks.base import Loop, plan_of_nothing
from wball.attacks.findings import Finding
from wball.ball import Ball
from wball.plan import FactoredPlan, Plan, StoredPlan
from wball.provenance import Plain, fingerprint
from wball.storage.files import DamagedFile, Tensors, json_checksum, read_tensors, write_tensors

SAVE_EVERY = 10.0
"""Seconds of work that may be lost."""
FORMS: Plain = {form.__name__: form for form in (FactoredPlan, Plan)}
TENSORS = [field.name for field in fields(AttackResult) if "Tensor" in str(field.type)]


class Journal:
    """The results of one batch at one radius.

    Args:
        start: start of the paths of its files.
        ball: the threat model.
        run: identifies the run, the batch and the radius. Files of another run are not read.
    """

    def __init__(self, start: Path, ball: Ball, run: Plain) -> None:
        self._start, self._ball, self._run = start, ball, run
        self._count, self._saved, self._asked = 0, time.monotonic(), run
        self._new: list[tuple[Path, Tensors, Plain]] = []

    def _path(self, name: str) -> Path:
        return self._start.with_name(f"{self._start.name}-{name}.safetensors")

    def _read(self, path: Path, run: Plain) -> tuple[Tensors, Plain] | None:
        """A file of this run, if there is one."""
        with suppress(DamagedFile, FileNotFoundError):
            stored, notes = read_tensors(path)
            if run.items() <= notes.items():
                return stored, notes
        return None

    def __call__(
        self, attack: Attack, task: Task, generator: Generator, progress: StepCount | None
    ) -> AttackResult:
        """The stored result of the attack on ``task``, or that of running it now."""
        path = self._path(f"{self._count:04d}")
        given = [task.x, task.y, *_randomness(generator, task.x.device).values()]
        given += [] if task.start is None else [task.start]
        asked = [fingerprint(*given), json_checksum(attack.describe())]
        run = self._asked = {**self._run, "number": self._count, "asked": asked}
        self._count += 1
        if (found := self._read(path, run)) is not None:
            return _restored(task, generator, self._ball, *found)
        result = attack.attack_batch(task, generator, progress)
        self._new.append((path, *_packed(result, generator, run)))
        self._save()
        return result

    def resume(self, loop: Loop) -> int:
        """Return an attack to the last step that was kept, and say how many it has made."""
        found = self._read(self._path("steps"), self._asked)
        if found is None:
            return 0
        loop.restore(found[0], found[1]["plain"])
        _set_randomness(found[0], loop.generator, loop.batch.x.device)
        return int(found[1]["step"])

    def keep(self, loop: Loop, step: int) -> None:
        """Keep where an attack is, from time to time."""
        if self._save():
            tensors, plain = loop.packed()
            tensors |= _randomness(loop.generator, loop.batch.x.device)
            write_tensors(
                self._path("steps"), tensors, {**self._asked, "step": step, "plain": plain}
            )
            self._saved = time.monotonic()

    def _save(self) -> bool:
        """Write the new results if it is time to; returns whether it was."""
        due = time.monotonic() - self._saved >= SAVE_EVERY
        if due:
            for one in self._new:
                write_tensors(*one)
            self._new, self._saved = [], time.monotonic()
        return due


def _randomness(generator: Generator, device: torch.device) -> Tensors:
    """The states of the generators that an attack and a model draw from."""
    states = {"generator": generator.get_state(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_randomness(states: Tensors, generator: Generator, device: torch.device) -> None:
    generator.set_state(states["generator"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _restored(
    task: Task,
    generator: Generator,
    ball: Ball,
    stored: Tensors,
    notes: Plain,
) -> AttackResult:
    """The result that :func:`_packed` packed. The random state is that after it."""
    _set_randomness(stored, generator, task.x.device)
    here = {name: value.to(task.x.device) for name, value in stored.items()}
    parts: Plain = {name: here[name] for name in TENSORS if name in here}
    status = tuple(STATUSES[k] for k in stored["status"].tolist())
    findings = tuple(Finding(*finding) for finding in notes["findings"])
    found = AttackResult(**parts, status=status, kernel=notes["kernel"], findings=findings)
    if notes["plan"] is None:
        return found
    plan: StoredPlan | None = plan_of_nothing(FORMS[notes["plan"]], ball, task.x)
    assert plan is not None, "a plan was stored"
    tensors = [here[f"plan {k}"] for k in range(len(plan.tensors()))]
    return replace(found, proof=plan.with_tensors(tensors))


def _packed(found: AttackResult, generator: Generator, run: Plain) -> tuple[Tensors, Plain]:
    """A result as tensors and plain data, with the random state after it."""
    parts = {name: getattr(found, name) for name in TENSORS}
    tensors = {name: value for name, value in parts.items() if value is not None}
    tensors["status"] = torch.tensor([STATUSES.index(status) for status in found.status])
    tensors |= _randomness(generator, found.images.device)
    plan = [] if found.proof is None else found.proof.tensors()
    tensors |= {f"plan {k}": value for k, value in enumerate(plan)}
    form = None if found.proof is None else type(found.proof).__name__
    findings = [[finding.code, finding.images, finding.of] for finding in found.findings]
    return tensors, {**run, "kernel": found.kernel, "plan": form, "findings": findings}
