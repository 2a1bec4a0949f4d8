"""Evaluate a model: attack every image at every radius, audit each example, prove what can be proved, keep it all.

Radii are tried from small to large, and an image that falls at one of them is not attacked again: its example lies in
every larger ball, too. What an attack claims is not believed: the model is asked again about the very image that is
stored, and :func:`wball.audit` measures its mass and its box, and proves its distance: by the plan that the attack
hands over, or by exact transport where there is none. Of the examples at each radius that a plan proves, a sample is
checked by exact transport all the same.

The images are cut into batches. Whatever is random in a batch depends on the seed, the batch and the radius alone, so
the result does not depend on who computes which batch, or on how often the work was interrupted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from wball import inputs, provenance
from wball.attacks import Attack, StandardAttack, minimal_radius
from wball.attacks.base import check_labels, out_of_memory
from wball.attacks.checks import ModelWarning, check_model
from wball.attacks.findings import Finding, merged
from wball.ball import Ball
from wball.certificates import certified_radius, certify
from wball.certificates.certificate import METHODS
from wball.certificates.tracing import trace
from wball.evaluation.check import audit_in_threads, check_exactly, draw_sample, proved_by_plan
from wball.evaluation.doubts import as_warnings, look_for_missed, weaker_at_larger
from wball.evaluation.exhibit import make_exhibit
from wball.evaluation.result import (
    COLUMNS,
    EXACT,
    EXAMPLES,
    EXHIBIT,
    PLAN,
    RESULTS,
    Evaluation,
    load_evaluation,
    same_json,
)
from wball.evaluation.trust import EvaluationWarning, as_code, claim_warnings
from wball.inputs import result_dtype
from wball.model import Model, as_found, ask, top_class
from wball.plan import StoredPlan
from wball.processes import grouped, rank_and_size
from wball.storage.atomic import clear_parts, locked
from wball.storage.files import Log, read_json, read_tensors, sealed, unsealed, write_json, write_tensors

BATCHES = "batches"
CPU_BATCH = 50
GPU_PIXELS = 4_000_000
"""Pixels in a batch on a GPU, where small batches waste most of it."""


class OtherSettings(ValueError):
    """The folder holds an evaluation with other settings."""


def evaluate(
    model: Model,
    x: Tensor,
    y: Tensor,
    ball: Ball,
    radii: Sequence[float] | float | Literal["minimal"] | None = None,
    attack: Attack | Literal["standard", "fast"] = "standard",
    *,
    certify: bool | str = False,
    exact: Literal["sample", "all"] = "sample",
    out: str | os.PathLike[str] | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    name: str | None = None,
    data: str = "data",
    classes: Sequence[str] | None = None,
    command: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Evaluation:
    """How robust is ``model`` on images ``x`` with labels ``y``?

    Args:
        model: images to logits; evaluated in evaluation mode and left as it was.
        x: images ``(B, C, H, W)`` in the ball's box.
        y: class numbers ``(B,)``.
        ball: the threat model.
        radii: radii to evaluate (default: the ball's), or ``"minimal"`` to search each image's smallest one up to the
            ball's.
        attack: ``"standard"`` (:class:`wball.StandardAttack`), its ``"fast"`` version, or any attack.
        certify: also prove what can be proved; ``True`` or the name of a method of :func:`wball.certify`. It then needs
            a model that is a feed-forward network of supported modules.
        exact: which examples to solve the exact transport problem of. ``"sample"``: those without a plan that proves
            their distance, and of the others 1 %, or 32 if that is more, at each radius. ``"all"``: all of them.
            Distances are then exact, and the audit may take longer than the attack. A search for the smallest radius
            solves all of them, because the distance is its result.
        out: a folder for results, examples and the report's images. An evaluation that was interrupted goes on where
            it was; a finished one is read back.
        seed: of everything random.
        batch_size: images per batch (default: chosen for the device).
        name: what to call the model.
        data: what to call the data.
        classes: names of the classes, for the report.
        command: command line to record (default: that of this process).
        overwrite: start afresh even if ``out`` holds something.
        progress: show a bar with the time left.

    Under ``torchrun``, or in a process group of your own, each process takes its share of the batches (``out`` is then
    a folder all of them see), and all return the whole result.

    >>> import wball
    >>> x, y = wball.load_sample()
    >>> result = evaluate(wball.load_model("mnist-standard"), x[:2], y[:2], wball.WassersteinBall(0.01), attack="fast")
    >>> result.clean_accuracy
    1.0
    """
    inputs.check_ball(ball)
    x = inputs.check_images("x", x.detach() if isinstance(x, Tensor) else x, ball.box)
    x, y = x.to(result_dtype(x)), check_labels("y", y, x)
    if x.shape[0] == 0:
        raise ValueError("x is empty: there is nothing to evaluate")
    mode, points = _radii(radii, ball)
    chosen = _attack(attack, ball.at(points[-1]))
    method = None if certify is False else "anchored" if certify is True else certify
    if exact not in ("sample", "all"):
        raise ValueError(f'exact must be "sample" or "all", got {exact!r}')
    inputs.check_seed(seed)
    name, command = (None if text is None else str(text) for text in (name, command))
    if batch_size is not None:
        inputs.check_count("batch_size", batch_size)
    logits = probe(model, x, y)
    if method is not None:
        _check_provable(model, x, method)
    said: dict[str, Any] = {
        "model": provenance.describe_model(model, name),
        "answers": _answers(model, x),
        "data": {
            "name": str(data),
            "images": x.shape[0],
            "shape": list(x.shape[1:]),
            "sha256": provenance.fingerprint(x, y),
            "classes": [str(c) for c in classes] if classes is not None else [str(k) for k in range(logits.shape[1])],
        },
        "ball": ball.describe(),
        "mode": mode,
        "radii": points,
        "attack": _describe(chosen),
        "certify": None if method is None else {"method": method, "plans": "full"},
        "exact": "all" if mode == "minimal" else exact,
        "batch_size": batch_size or _batch_size(x),
        "seed": seed,
    }
    origin = provenance.collect(ball, x, command)
    with _folder(out) as folder, _team() as (rank, world, meet), locked(folder, rank):
        if rank == 0:
            if overwrite:
                _clear(folder)
            clear_parts(folder)
            _begin(folder, {"settings": said, "provenance": origin}, batch_size is None)
        meet()
        if not (folder / RESULTS).is_file():
            begun = read_json(folder / BATCHES / "settings.json")  # checked by the first process
            log = Log(folder / "log.jsonl", rank)
            log("start", world=world, command=begun["provenance"]["command"])
            shard = _Shard(model, x, y, ball, chosen, begun["settings"], folder / BATCHES, log)
            shard.run(rank, world, progress)
            meet()
            if rank == 0:
                result = shard.merged(begun["provenance"], progress)
                result = replace(result, exhibit=make_exhibit(result, model, x, y, ball))
                doubts = claim_warnings(len(result.rejected), len(result.contradictions), len(result.disagreements))
                doubts += look_for_missed(result, model, x, y, ball) + weaker_at_larger(result)
                replace(result, warnings=result.warnings + doubts).save(folder)
                log("finish")
        if rank == 0:
            _clear(folder, results=False)
        meet()
        with _or_overwrite():
            return load_evaluation(folder)


@dataclass(frozen=True)
class _Shard:
    """The batches of an evaluation, and how one of them is worked off."""

    model: Model
    x: Tensor
    y: Tensor
    ball: Ball
    attack: Attack
    settings: dict[str, Any]
    store: Path
    log: Log

    @property
    def size(self) -> int:
        return int(self.settings["batch_size"])

    @property
    def count(self) -> int:
        return math.ceil(len(self.x) / self.size)

    @property
    def stages(self) -> int:
        return 1 if self.settings["mode"] == "minimal" else len(self.settings["radii"])

    def path(self, batch: int) -> Path:
        return self.store / f"batch-{batch:05d}.safetensors"

    def run(self, rank: int, world: int, progress: bool) -> None:
        """Work off every ``world``-th batch, from ``rank`` on."""
        mine = range(rank, self.count, world)
        size = int(self.settings["batch_size"])
        with _bar(progress and rank == 0, self.settings["model"]["name"]) as (total, advance):
            total(sum(min(size, len(self.x) - b * size) for b in mine) * self.stages)
            for batch in mine:
                self._work_off(batch, advance)

    def _work_off(self, batch: int, advance: Callable[[int], None]) -> None:
        size = int(self.settings["batch_size"])
        part = slice(batch * size, (batch + 1) * size)
        x, y = self.x[part], self.y[part]
        state, notes = self._resume(batch, x, y)
        advance(notes["done"] * len(x))
        while notes["done"] < self.stages:
            begun, stage = time.perf_counter(), int(notes["done"])
            with self._randomness(batch, stage) as generator:
                if self.settings["mode"] == "minimal":
                    self._search(state, notes, x, y, generator)
                else:
                    self._attack(state, notes, x, y, float(self.settings["radii"][stage]), generator)
                self._prove(state, x, y, stage)
            notes["done"] = stage + 1
            write_tensors(self.path(batch), state, notes)
            self.log("batch", batch=batch, stage=stage, seconds=round(time.perf_counter() - begun, 3))
            advance(len(x))

    def _resume(self, batch: int, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.path(batch).is_file():
            try:
                return self._read(batch, len(x))
            except ValueError as error:
                warnings.warn(f"{error}; the batch is computed again", stacklevel=2)
                self.log("damaged", batch=batch, said=str(error))
        infinite = torch.full((len(x),), math.inf, dtype=torch.float64)
        none = torch.full((len(x),), -1, dtype=torch.long)
        predicted = _predict(self.model, x).cpu()
        state = {
            "label": y.cpu(),
            "predicted": predicted,
            "read_as": none,
            "distance": torch.where(predicted == y.cpu(), infinite, torch.zeros_like(infinite)),
            "found_at": infinite.clone(),
            "mass_error": infinite.clone(),
            "box_violation": infinite.clone(),
            "member": none.clone(),
            "n_steps": torch.zeros_like(none),
            "certified": torch.zeros_like(infinite),
            "proof": torch.zeros_like(none),
            "adversarial": x.cpu().clone(),
        }
        return state, {"batch": batch, "done": 0, "rejected": [], "findings": []}

    def _read(self, batch: int, images: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state, notes = read_tensors(self.path(batch))
        whole = state.keys() == COLUMNS.keys() - {"radius"} | {"adversarial"}
        if not whole or any(len(v) != images for v in state.values()) or not isinstance(notes, dict):
            raise ValueError(f"{self.path(batch)} is no batch of this evaluation")
        notes.setdefault("findings", [])  # earlier versions kept none
        if notes.keys() != {"batch", "done", "rejected", "findings"} or notes["done"] not in range(self.stages + 1):
            raise ValueError(f"{self.path(batch)} is no batch of this evaluation: its notes are {notes}")
        return state, notes

    def _finished(self, batch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A batch as it was stored; worked off once more if its file was damaged in the meantime."""
        count = min(self.size, len(self.x) - batch * self.size)
        try:
            return self._read(batch, count)
        except ValueError:
            self._work_off(batch, lambda _: None)
            return self._read(batch, count)

    @contextmanager
    def _randomness(self, batch: int, stage: int) -> Iterator[torch.Generator]:
        """A generator, and torch's own random state for models that are random, for this batch and stage alone."""
        entropy = [int(self.settings["seed"]), batch, stage]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
        with torch.random.fork_rng(devices=[self.x.device] if self.x.is_cuda else []):
            torch.manual_seed(seed)
            yield torch.Generator(self.x.device).manual_seed(seed)

    def _attack(
        self,
        state: dict[str, Tensor],
        notes: dict[str, Any],
        x: Tensor,
        y: Tensor,
        eps: float,
        generator: torch.Generator,
    ) -> None:
        left = state["distance"].isinf().nonzero().squeeze(1)
        if left.numel() == 0:
            return
        here = left.to(x.device)
        attack = replace(self.attack.at(eps), proofs=self.settings["exact"] == "sample")
        found = attack(self.model, x[here], y[here], generator=generator)
        state["n_steps"][left] += found.n_steps.cpu()
        notes["findings"] += [[finding.code, finding.images, finding.of] for finding in found.findings]
        member = found.member.cpu() if found.member is not None else torch.zeros_like(left)
        radius = torch.full((len(left),), eps, dtype=torch.float64)
        self._accept(state, notes, left, x, y, found.success.cpu(), found.images, radius, member, found.proof)

    def _search(
        self, state: dict[str, Tensor], notes: dict[str, Any], x: Tensor, y: Tensor, generator: torch.Generator
    ) -> None:
        left = state["distance"].isinf().nonzero().squeeze(1)
        if left.numel() == 0:
            return
        here = left.to(x.device)
        hi = float(self.settings["radii"][-1])
        found = minimal_radius(self.model, x[here], y[here], self.attack, hi=hi, generator=generator)
        state["n_steps"][left] += found.n_attacks.cpu() * self.attack.n_gradients
        self._accept(
            state, notes, left, x, y, found.success.cpu(), found.images, found.radius.cpu(), torch.zeros_like(left)
        )

    def _accept(
        self,
        state: dict[str, Tensor],
        notes: dict[str, Any],
        index: Tensor,
        x: Tensor,
        y: Tensor,
        success: Tensor,
        images: Tensor,
        radius: Tensor,
        member: Tensor,
        proof: StoredPlan | None = None,
    ) -> None:
        """Enter claimed examples into the state if the model is really wrong on them and the audit finds no fault."""
        index, images, radius, member = index[success], images[success.to(x.device)], radius[success], member[success]
        if index.numel() == 0:
            return
        read_as = _predict(self.model, images).cpu()
        plan = None if proof is None else proof.take(success.to(x.device))
        begun = time.perf_counter()
        report = audit_in_threads(self.ball.at(radius), x[index.to(x.device)], images, plan)
        seconds, solved = round(time.perf_counter() - begun, 3), int(report.exact.sum())
        self.log("audit", batch=notes["batch"], examples=len(report), exact=solved, seconds=seconds)
        fooled = (read_as >= 0) & (read_as != y.cpu()[index])
        good = fooled & report.valid.cpu()
        start = int(self.settings["batch_size"]) * int(notes["batch"])
        for k in (~good).nonzero().squeeze(1).tolist():
            said = "has no answer to the stored image (NaN)" if read_as[k] < 0 else "classifies the stored image right"
            reason = report.reasons[k] or f"the model {said}"
            notes["rejected"].append({"index": start + int(index[k]), "eps": float(radius[k]), "reason": reason})
        where = index[good]
        state["read_as"][where] = read_as[good]
        state["distance"][where] = report.distance.cpu()[good]
        state["found_at"][where] = radius[good]
        state["mass_error"][where] = report.mass_error.cpu()[good]
        state["box_violation"][where] = report.box_violation.cpu()[good]
        state["member"][where] = member[good]
        state["proof"][where] = torch.where(report.exact.cpu()[good], EXACT, PLAN)
        state["adversarial"][where] = images[good.to(x.device)].cpu().to(state["adversarial"].dtype)

    def _prove(self, state: dict[str, Tensor], x: Tensor, y: Tensor, stage: int) -> None:
        """Certify at this radius what was certified at the radius before. Broken images are tried, too: proof and
        example check each other."""
        if self.settings["certify"] is None:
            return
        assert isinstance(self.model, nn.Module)
        method, right = self.settings["certify"]["method"], state["label"] == state["predicted"]
        if self.settings["mode"] == "minimal":
            index = right.nonzero().squeeze(1)
            here, ball = index.to(x.device), self.ball.at(float(self.settings["radii"][-1]))
            if index.numel():
                state["certified"][index] = certified_radius(self.model, x[here], y[here], ball, method).cpu()
            return
        eps = float(self.settings["radii"][stage])
        before = float(self.settings["radii"][stage - 1]) if stage else 0.0
        index = (right & (state["certified"] >= before)).nonzero().squeeze(1)
        if index.numel() == 0:
            return
        here = index.to(x.device)
        proof = certify(self.model, x[here], y[here], self.ball.at(eps), method)
        state["certified"][index[proof.certified.cpu()]] = eps

    def merged(self, origin: dict[str, Any], progress: bool) -> Evaluation:
        """The whole result, once every batch is done."""
        parts = [self._finished(batch) for batch in range(self.count)]
        size = int(self.settings["batch_size"])  # no more at a time than there was memory for
        whole = {name: torch.cat([state[name] for state, _ in parts]) for name in parts[0][0]}
        adversarial = whole.pop("adversarial")
        rejected = [entry for _, notes in parts for entry in notes["rejected"]]
        disagreements = self._check_sample(whole, adversarial, rejected, progress)
        whole["radius"] = _smallest(whole["distance"], whole["found_at"], self.settings)
        index = (whole["read_as"] >= 0).nonzero().squeeze(1)
        original = self.x[index.to(self.x.device)].cpu()
        found = merged(Finding(*entry) for _, notes in parts for entry in notes["findings"])
        doubts, remarks = as_warnings(found, _model_warnings(self.model, self.x[:size], self.y[:size]))
        return Evaluation(
            self.settings,
            origin,
            {name: whole[name] for name in COLUMNS},
            tuple(rejected),
            doubts,
            {"index": index, "original": original, "adversarial": adversarial[index]},
            disagreements=tuple(disagreements),
            notes=remarks,
        )

    def _check_sample(
        self, whole: dict[str, Tensor], adversarial: Tensor, rejected: list[dict[str, Any]], progress: bool
    ) -> list[int]:
        """Check plans against exact transport; see :mod:`wball.evaluation.check`. Nothing is stored before its end."""
        disagreements: list[int] = []
        for chosen in (lambda: draw_sample(whole, self.settings), lambda: proved_by_plan(whole)):
            index, begun = chosen(), time.perf_counter()
            with _bar(progress and len(index) > 0, "exact check", "examples") as (total, advance):
                total(len(index))
                wrong = check_exactly(self.ball, self.x, adversarial, whole, index, rejected, advance)
            self.log("exact check", examples=len(index), seconds=round(time.perf_counter() - begun, 3))
            disagreements += wrong
            if not wrong:
                break
        return sorted(disagreements)


def _smallest(distance: Tensor, found_at: Tensor, settings: dict[str, Any]) -> Tensor:
    """The smallest radius that each example counts at: an exact distance below a smaller radius counts there, too."""
    radius = torch.where(distance == 0, distance, found_at)
    if settings["mode"] == "minimal":
        return torch.minimum(radius, distance)
    for eps in sorted(settings["radii"], reverse=True):
        radius = torch.where((distance <= eps) & (eps < radius), eps, radius)
    return radius


def _radii(radii: Sequence[float] | float | str | None, ball: Ball) -> tuple[Literal["radii", "minimal"], list[float]]:
    mode: Literal["radii", "minimal"] = "minimal" if isinstance(radii, str) and radii == "minimal" else "radii"
    if radii is None or mode == "minimal":
        if isinstance(ball.eps, Tensor):
            raise ValueError("ball has one radius per image; give a single one, or the list of radii to evaluate")
        radii = ball.eps
    try:
        given = radii.flatten().tolist() if isinstance(radii, (Tensor, np.ndarray)) else radii
        values = [float(r) for r in given] if isinstance(given, Sequence) else [float(given)]
    except (TypeError, ValueError):
        raise ValueError(f'radii must be numbers or "minimal", got {radii!r}') from None
    if not values or any(not 0 < r < math.inf for r in values):
        raise ValueError(f"radii must be finite and > 0, got {values}")
    return mode, sorted(set(values))


def _attack(attack: Attack | str, ball: Ball) -> Attack:
    if isinstance(attack, str):
        if attack not in ("standard", "fast"):
            raise ValueError(f'attack must be "standard", "fast" or an attack such as PGD(ball), got {attack!r}')
        return StandardAttack(ball, version="fast" if attack == "fast" else "standard", check=False, progress=False)
    if not isinstance(attack, Attack):
        raise TypeError(f'attack must be "standard", "fast" or an attack, got {type(attack).__name__}')
    theirs, ours = attack.ball.describe(), ball.describe()
    if theirs != ours:
        raise ValueError(f"attack is for another threat model than ball: {theirs} and {ours}")
    if isinstance(attack, StandardAttack):
        attack = replace(attack, check=False)  # done once, and not in each batch
    return replace(attack, progress=False)


def _describe(attack: Attack) -> dict[str, Any]:
    """An attack's settings as plain data."""
    plain: dict[str, Any] = {"name": type(attack).__name__}
    for item in dataclasses.fields(attack):
        value = getattr(attack, item.name)
        if item.name in ("ball", "progress", "check", "proofs"):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {"name": type(value).__name__, **dataclasses.asdict(value)}
        elif not isinstance(value, (str, int, float, bool, type(None))):
            value = getattr(value, "__qualname__", repr(value))
        elif isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        plain[item.name] = value
    return plain


def _batch_size(x: Tensor) -> int:
    return max(1, GPU_PIXELS // x[0].numel()) if x.is_cuda else CPU_BATCH


@torch.no_grad()
def _predict(model: Model, x: Tensor) -> Tensor:
    with as_found(model, x.device):
        return torch.cat([top_class(ask(model, part)) for part in x.split(_batch_size(x))])


def probe(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The logits of one image: the model takes such images, and it has the labels' classes."""
    if not callable(model):
        raise TypeError(f"model must be callable, images to logits, got {type(model).__name__}")
    with torch.no_grad(), as_found(model, x.device):
        try:
            logits = ask(model, x[:2])
        except (ValueError, TypeError, MemoryError):
            raise
        except Exception as error:  # RuntimeError is torch's word for wrong shapes, others are the model's own
            if out_of_memory(error):
                raise
            first = (str(error).strip().splitlines() or [""])[0]
            kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            raise ValueError(f"the model does not take images of shape {tuple(x.shape[1:])}: {kind}{first}") from error
    low, high, classes = int(y.min()), int(y.max()), logits.shape[1]
    if low < 0 or high >= classes:
        raise ValueError(
            f"y has labels from {low} to {high}, but the model has {classes} classes (0 to {classes - 1}): "
            "the data belong to another model, or the labels need renumbering"
        )
    return logits


def _answers(model: Model, x: Tensor) -> list[list[float | None]] | None:
    """The logits of the first two images, to four digits: they tell models apart whose code differs, not their weights.

    ``None`` if two calls disagree.
    """
    asked = []
    with torch.no_grad(), as_found(model, x.device):
        for _ in range(2):
            torch.manual_seed(0)  # as_found brings the generators back
            asked.append(ask(model, x[:2]))
    if not torch.equal(*(v.nan_to_num() for v in asked)):
        return None
    return [[float(f"{v:.4g}") if math.isfinite(v) else None for v in row] for row in asked[0].tolist()]


def _alike(old: Any, new: Any) -> bool:
    """Whether one model can have given both answers: they are equal up to what hardware and threads change."""
    if not (isinstance(old, list) and isinstance(new, list)) or old == new:
        return True  # a random model, or a run of an earlier version, gave none
    try:
        one, other = (torch.tensor([[math.nan if v is None else v for v in row] for row in a]) for a in (old, new))
    except (TypeError, ValueError):  # edited by hand
        return False
    slack = 0.01 * float(one.nan_to_num().abs().max())
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=0.0, atol=slack, equal_nan=True))


def _check_provable(model: Model, x: Tensor, method: str) -> None:
    """Raise now what the certificate would raise after the first attack."""
    if method not in METHODS:
        raise ValueError(f"certify must be a method, one of {', '.join(METHODS)}, got {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"certify needs a model that is a torch.nn.Module, got {type(model).__name__}")
    trace(model, x[:1])


def _model_warnings(model: Model, x: Tensor, y: Tensor) -> list[EvaluationWarning]:
    """What the checks of the model say, harmless notices included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_model(model, x, y)
    return [
        EvaluationWarning(as_code(w.category.__name__), str(w.message), str(getattr(w.category, "remedy", "")))
        for w in caught
        if issubclass(w.category, ModelWarning)
    ]


@contextmanager
def _team() -> Iterator[tuple[int, int, Callable[[], None]]]:
    """Which process of how many this is, and how to wait for the others."""
    rank, world = rank_and_size()
    if world == 1:
        yield 0, 1, lambda: None
        return
    patience = timedelta(days=30)  # the slowest decides
    joined = grouped()
    if not joined:
        torch.distributed.init_process_group("gloo", timeout=patience)
    group: Any = torch.distributed.new_group(backend="gloo", timeout=patience) if joined else None
    try:
        yield rank, world, lambda: torch.distributed.barrier(group)
    finally:
        torch.distributed.destroy_process_group(group)


@contextmanager
def _folder(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    if out is not None:
        path = Path(out)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"out must be a folder, but {path} is a file")
        yield path
        return
    if rank_and_size()[1] > 1:
        raise ValueError("out must be given where several processes share the work: they meet in that folder")
    with tempfile.TemporaryDirectory(prefix="wball-") as folder:
        yield Path(folder)


def _begin(folder: Path, run: dict[str, Any], any_batch_size: bool) -> None:
    """Enter the run into the folder, unless it is there already: finished or begun."""
    for path in (folder / RESULTS, folder / BATCHES / "settings.json"):
        if path.is_file():
            with _or_overwrite():
                found = read_json(path)
                parts = [found.get(name) for name in ("settings", "provenance")] if isinstance(found, dict) else [None]
                if not all(isinstance(part, dict) for part in parts):
                    raise ValueError(f"{path} is no evaluation")
                unsealed(path, found)
            return _same_run(found, run, folder, any_batch_size)
    write_json(folder / BATCHES / "settings.json", sealed(run))


@contextmanager
def _or_overwrite() -> Iterator[None]:
    """Files that cannot be read get the way out into their message."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; say --overwrite (overwrite=True) to start afresh") from error


def _same_run(theirs: dict[str, Any], ours: dict[str, Any], folder: Path, any_batch_size: bool) -> None:
    """Raise unless the folder's evaluation is the one asked for. The command may be written differently."""
    old, new = ({**run["settings"], **run["provenance"], "command": None} for run in (theirs, ours))
    if any_batch_size and isinstance(old.get("batch_size"), int) and old["batch_size"] > 0:
        new["batch_size"] = old["batch_size"]
    answers = old.pop("answers", None), new.pop("answers")
    for key, value in new.items():
        if not same_json(old.get(key), value):
            raise OtherSettings(
                f"{folder} holds an evaluation with another {key} ({_short(old.get(key), value)}); "
                "choose another folder, or say --overwrite (overwrite=True) to start afresh"
            )
    if not _alike(*answers):
        raise OtherSettings(
            f"{folder} holds an evaluation of another model: with the same weights it answers differently to the first "
            "images; choose another folder, or say --overwrite (overwrite=True) to start afresh"
        )


def _short(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        key = next((k for k in new if old.get(k) != new[k]), None)
        return f"{key}: {old.get(key)!r} there, {new.get(key)!r} here" if key is not None else "fields differ"
    return f"{old!r} there, {new!r} here"


def _clear(folder: Path, results: bool = True) -> None:
    """Remove the batches; with ``results``, everything an evaluation wrote."""
    batches = folder / BATCHES
    if batches.is_symlink():  # rmtree refuses it, and what is behind it is not ours
        batches.unlink()
    elif batches.exists():
        shutil.rmtree(batches)
    if results:
        for name in (RESULTS, EXAMPLES, EXHIBIT, "report.html", "log.jsonl"):
            (folder / name).unlink(missing_ok=True)


@contextmanager
def _bar(
    show: bool, title: str, unit: str = "images x radii"
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar on stderr with the time left."""
    if not show:
        yield lambda _: None, lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(escape(title), total=None)
        yield lambda n: bar.update(task, total=n), lambda n: bar.advance(task, n)
