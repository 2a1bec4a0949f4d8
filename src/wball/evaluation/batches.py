"""The batches of an evaluation: how one of them is attacked, audited, certified and stored, and how they are joined.

Whatever is random in a batch depends on the seed, the batch and the radius alone, so the result does not depend on who
computes which batch, or on how often the work was interrupted.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wball.attacks import Attack, minimal_radius
from wball.attacks.checks import ModelWarning, check_model
from wball.attacks.findings import Finding, merged
from wball.ball import Ball
from wball.certificates import CertificateStatus, certified_radius, certify
from wball.evaluation.check import audit_in_threads, check_exactly, draw_sample, proved_by_plan
from wball.evaluation.doubts import as_warnings
from wball.evaluation.result import EXACT, PLAN, Evaluation
from wball.evaluation.schema import COLUMNS
from wball.evaluation.stream import Images, View
from wball.evaluation.tally import Tally
from wball.evaluation.trust import EvaluationWarning, as_code
from wball.memory import free_bytes
from wball.model import Model, as_found, ask, full_precision, judge, top_class
from wball.plan import StoredPlan
from wball.progress import Bar, bar
from wball.storage.files import Log, read_tensors, write_tensors
from wball.storage.pixels import as_bytes, as_pixels

CPU_BATCH = 50
CPU_PIXELS, GPU_PIXELS = 1_000_000, 4_000_000
"""Pixels in a batch, so that large images fit by themselves; on a GPU small batches waste most of it."""
GPU_BATCH, GPU_MOST, GPU_SHARE = 256, 40_000_000, 0.4
"""Fewer images than this keep a GPU waiting for its launches, whatever their size, so a batch may have more pixels, as
long as the model takes no more than a share of the memory that is free."""
PROBED = 4
"""Images that tell how much memory a model takes."""
ROUNDING = 1e-4
"""Logits that differ by no more than this part of the largest may change places in a batch of another size."""
KEEP_BYTES, SAMPLE_BYTES = 10**9, 10**8
"""What examples and their originals may take if all of them are stored, and if a sample is."""


class Writer:
    """Stores the state of batches in a thread of its own, while the next one is attacked.

    One file at a time, and all of them before the end: an interruption loses no more than without the thread.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "wball-writer")
        self._last: Future[None] | None = None

    def __call__(self, path: Path, state: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Store it as it is now; an error of the file before is raised."""
        self._wait()
        held, said = {name: values.clone() for name, values in state.items()}, copy.deepcopy(notes)
        self._last = self._thread.submit(self._write, path, held, said)

    @staticmethod
    def _write(path: Path, state: dict[str, Tensor], notes: dict[str, Any]) -> None:
        write_tensors(path, {**state, "adversarial": as_bytes(state["adversarial"])}, notes)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self._wait()


@dataclass(frozen=True)
class _Batch:
    """Images and labels of a batch, what is known about each image, and notes on what was done."""

    x: Tensor
    y: Tensor
    state: dict[str, Tensor]
    notes: dict[str, Any]

    def open(self) -> Tensor:
        """The images without an example."""
        return self.state["distance"].isinf().nonzero().squeeze(1)


@dataclass(frozen=True)
class Batches:
    """The batches of an evaluation, and how one of them is worked off."""

    model: Model
    x: Images
    y: Images
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
        name = str(self.settings["model"]["name"])
        with bar(name, unit="of images x radii", show=progress and rank == 0, parts=True) as shown:
            shown.total(sum(min(size, len(self.x) - b * size) for b in mine) * self.stages)
            tally = Tally(name, shown)
            with Writer() as write:
                for batch in mine:
                    if isinstance(self.x, View):
                        self.x[self._part(batch)]
                        self.x.stream.expect(range(len(self.x))[self._part(batch + world)])
                    self._work_off(batch, tally, write)

    def _part(self, batch: int) -> slice:
        return slice(batch * self.size, (batch + 1) * self.size)

    def _work_off(self, number: int, tally: Tally, write: Writer) -> None:
        batch = self._resume(number, self.x[self._part(number)], self.y[self._part(number)])
        tally.shown.advance(batch.notes["done"] * len(batch.x))
        attack: Attack | None = None
        while batch.notes["done"] < self.stages:
            begun, stage = time.perf_counter(), int(batch.notes["done"])
            tally.begin(self.settings, stage, len(batch.x))
            with self._randomness(number, stage) as generator:
                if self.settings["mode"] == "minimal":
                    self._search(batch, generator)
                else:
                    attack = attack or self._prepared(number, batch.x, batch.y)
                    self._attack(attack.at(float(self.settings["radii"][stage])), batch, generator)
                self._prove(batch, stage)
            batch.notes["done"] = stage + 1
            write(self.path(number), batch.state, batch.notes)
            self.log(
                "batch", batch=number, stage=stage, seconds=round(time.perf_counter() - begun, 3)
            )
            tally.end(stage, batch.state)

    def _resume(self, batch: int, x: Tensor, y: Tensor) -> _Batch:
        if self.path(batch).is_file():
            try:
                return _Batch(x, y, *self._read(batch, len(x)))
            except ValueError as error:
                warnings.warn(f"{error}; the batch is computed again", stacklevel=2)
                self.log("damaged", batch=batch, said=str(error))
        infinite = torch.full((len(x),), math.inf, dtype=torch.float64)
        none = torch.full((len(x),), -1, dtype=torch.long)
        predicted = top_class(answers(self.model, x))
        # A class that holds in float32 alone is a rounding error, for clean images as for examples.
        predicted = torch.where(succeeds(self.model, x, y) | (predicted < 0), predicted, y).cpu()
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
        return _Batch(x, y, state, {"batch": batch, "done": 0, "rejected": [], "findings": []})

    def _read(self, batch: int, images: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        state, notes = read_tensors(self.path(batch))
        state = {name: as_pixels(values) for name, values in state.items()}
        whole = state.keys() == COLUMNS.keys() - {"radius"} | {"adversarial"}
        if (
            not whole
            or any(len(v) != images for v in state.values())
            or not isinstance(notes, dict)
        ):
            raise ValueError(f"{self.path(batch)} is not a batch of this evaluation")
        notes.setdefault("findings", [])  # earlier versions kept none
        if notes.keys() != {"batch", "done", "rejected", "findings"} or notes["done"] not in range(
            self.stages + 1
        ):
            raise ValueError(
                f"{self.path(batch)} is not a batch of this evaluation: its notes are {notes}"
            )
        return state, notes

    def _finished(self, batch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A batch as it was stored; worked off once more if its file was damaged in the meantime."""
        count = min(self.size, len(self.x) - batch * self.size)
        try:
            return self._read(batch, count)
        except ValueError:
            with Writer() as write:
                self._work_off(batch, Tally("", Bar()), write)
            return self._read(batch, count)

    @contextmanager
    def _randomness(self, batch: int, stage: int) -> Iterator[torch.Generator]:
        """A generator, and torch's own random state for models that are random, for this batch and stage alone."""
        entropy = [int(self.settings["seed"]), batch, stage]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
        with torch.random.fork_rng(devices=[self.x.device] if self.x.is_cuda else []):
            torch.manual_seed(seed)
            yield torch.Generator(self.x.device).manual_seed(seed)

    def _prepared(self, batch: int, x: Tensor, y: Tensor) -> Attack:
        """The attack with what it has to find out about the model, the same after a stop at whichever stage."""
        with self._randomness(batch, self.stages):
            return self.attack.at(float(self.settings["radii"][-1])).prepared(self.model, x, y)

    def _attack(self, attack: Attack, batch: _Batch, generator: torch.Generator) -> None:
        left = batch.open()
        if left.numel() == 0:
            return
        here = left.to(batch.x.device)
        attack = replace(attack, proofs=self.settings["exact"] == "sample")
        found = attack(self.model, batch.x[here], batch.y[here], generator=generator)
        batch.state["n_steps"][left] += found.n_steps.cpu()
        batch.notes["findings"] += [
            [finding.code, finding.images, finding.of] for finding in found.findings
        ]
        member = found.member.cpu() if found.member is not None else torch.zeros_like(left)
        radius = torch.full((len(left),), float(attack.ball.eps), dtype=torch.float64)
        self._accept(batch, left, found.success.cpu(), found.images, radius, member, found.proof)

    def _search(self, batch: _Batch, generator: torch.Generator) -> None:
        left = batch.open()
        if left.numel() == 0:
            return
        here, hi = left.to(batch.x.device), float(self.settings["radii"][-1])
        found = minimal_radius(
            self.model, batch.x[here], batch.y[here], self.attack, hi=hi, generator=generator
        )
        batch.state["n_steps"][left] += found.n_attacks.cpu() * self.attack.n_gradients
        self._accept(
            batch,
            left,
            found.success.cpu(),
            found.images,
            found.radius.cpu(),
            torch.zeros_like(left),
        )

    def _accept(
        self,
        batch: _Batch,
        index: Tensor,
        success: Tensor,
        images: Tensor,
        radius: Tensor,
        member: Tensor,
        proof: StoredPlan | None = None,
    ) -> None:
        """Enter claimed examples into the state if the model is really wrong on them and the audit finds no fault.

        An example that the model takes for its own class after all is a false claim, unless rounding alone decides.
        """
        x, y, state, notes = batch.x, batch.y, batch.state, batch.notes
        index, images, radius, member = (
            index[success],
            images[success.to(x.device)],
            radius[success],
            member[success],
        )
        if index.numel() == 0:
            return
        logits = answers(self.model, images)
        read_as = top_class(logits).cpu()
        plan = None if proof is None else proof.take(success.to(x.device))
        begun = time.perf_counter()
        report = audit_in_threads(self.ball.at(radius), x[index.to(x.device)], images, plan)
        seconds, solved = round(time.perf_counter() - begun, 3), int(report.exact.sum())
        self.log("audit", batch=notes["batch"], examples=len(report), exact=solved, seconds=seconds)
        fooled = succeeds(self.model, images, y[index.to(x.device)]).cpu()
        good = fooled & report.valid.cpu()
        start = int(self.settings["batch_size"]) * int(notes["batch"])
        rounding = torch.where(read_as == y.cpu()[index], _tied(logits).cpu(), read_as >= 0)
        tied = (report.valid.cpu() & ~fooled & rounding).nonzero().squeeze(1).tolist()
        notes["findings"].append(
            ["tied-answers", len(tied), len(index)]
        )  # none is one, too: shares are of all claims
        for k in sorted(set((~good).nonzero().squeeze(1).tolist()) - set(tied)):
            said = (
                "has no answer to the stored image (NaN)"
                if read_as[k] < 0
                else "classifies the stored image right"
            )
            reason = report.reasons[k] or f"the model {said}"
            notes["rejected"].append(
                {"index": start + int(index[k]), "eps": float(radius[k]), "reason": reason}
            )
        where = index[good]
        state["read_as"][where] = read_as[good]
        state["distance"][where] = report.distance.cpu()[good]
        state["found_at"][where] = radius[good]
        state["mass_error"][where] = report.mass_error.cpu()[good]
        state["box_violation"][where] = report.box_violation.cpu()[good]
        state["member"][where] = member[good]
        state["proof"][where] = torch.where(report.exact.cpu()[good], EXACT, PLAN)
        state["adversarial"][where] = images[good.to(x.device)].cpu().to(state["adversarial"].dtype)

    def _prove(self, batch: _Batch, stage: int) -> None:
        """Certify at this radius what was certified at the radius before. Broken images are tried, too: proof and
        example check each other. Counterexamples that complete verification finds count as the attack's do."""
        if self.settings["certify"] is None:
            return
        assert isinstance(self.model, nn.Module)
        x, y, state = batch.x, batch.y, batch.state
        method, right = self.settings["certify"]["method"], state["label"] == state["predicted"]
        if self.settings["mode"] == "minimal":
            index = right.nonzero().squeeze(1)
            here, ball = index.to(x.device), self.ball.at(float(self.settings["radii"][-1]))
            if index.numel():
                state["certified"][index] = certified_radius(
                    self.model, x[here], y[here], ball, method
                ).cpu()
            return
        eps = float(self.settings["radii"][stage])
        before = float(self.settings["radii"][stage - 1]) if stage else 0.0
        index = (right & (state["certified"] >= before)).nonzero().squeeze(1)
        if index.numel() == 0:
            return
        here = index.to(x.device)
        proof = certify(self.model, x[here], y[here], self.ball.at(eps), method)
        state["certified"][index[proof.certified.cpu()]] = eps
        if proof.counterexample is not None:
            falsified = torch.tensor(
                [status is CertificateStatus.FALSIFIED for status in proof.status]
            )
            new = falsified & state["distance"][index].isinf()
            radius, nobody = (
                torch.full((len(index),), eps, dtype=torch.float64),
                torch.full_like(index, -1),
            )
            self._accept(batch, index, new, proof.counterexample, radius, nobody)

    def merged(self, origin: dict[str, Any], progress: bool) -> Evaluation:
        """The whole result, once every batch is done."""
        columns: list[dict[str, Tensor]] = []
        rejected: list[dict[str, Any]] = []
        findings: list[Finding] = []
        for batch in range(self.count):
            state, notes = self._finished(batch)
            # Copies: what is read from a file keeps all of it mapped, and the images are most of it.
            columns.append(
                {name: values.clone() for name, values in state.items() if name != "adversarial"}
            )
            rejected += notes["rejected"]
            findings += [Finding(*entry) for entry in notes["findings"]]
        whole = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
        disagreements = self._check_sample(whole, rejected, progress)
        whole["radius"] = _smallest(whole["distance"], whole["found_at"], self.settings)
        index, kept = self._kept((whole["read_as"] >= 0).nonzero().squeeze(1))
        size = self.size  # no more at a time than there was memory for
        doubts, remarks = as_warnings(
            merged(findings), _model_warnings(self.model, self.x[:size], self.y[:size])
        )
        original, adversarial = self.x[:1][:0].cpu(), self.x[:1][:0].cpu()
        if len(index):
            parts = [self.pairs(part) for part in index.split(size)]
            original, adversarial = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return Evaluation(
            {**self.settings, "keep": kept},
            origin,
            {name: whole[name] for name in COLUMNS},
            tuple(rejected),
            doubts,
            {"index": index, "original": original, "adversarial": adversarial},
            disagreements=tuple(disagreements),
            notes=remarks,
        )

    def pairs(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Original and stored images at ascending positions; only the batches that hold them are read."""
        found = []
        for batch in (index // self.size).unique().tolist():
            inside = index[index // self.size == batch] - batch * self.size
            found.append(self._finished(batch)[0]["adversarial"][inside])
        return self.x[index.to(self.x.device)].cpu(), torch.cat(found)

    def _kept(self, found: Tensor) -> tuple[Tensor, str]:
        """Which examples to store, and in a word: all, or a sample where they are too many."""
        keep, image = self.settings.get("keep"), self.x[:1]
        pair = 2 * as_bytes(image.cpu()).nbytes if self.attack.levels == 256 else 2 * image.nbytes
        most, whole = max(1, SAMPLE_BYTES // pair), len(found) * pair <= KEEP_BYTES
        if keep is None and not whole:
            warnings.warn(
                f"the {len(found)} examples take more than a gigabyte: a sample of {most} is stored; say keep='all' to "
                "store all of them",
                stacklevel=2,
            )
        if keep == "all" or (keep is None and whole):
            return found, "all"
        if keep == "none":
            return found[:0], "none"
        random = np.random.default_rng([int(self.settings["seed"]), len(found)])
        return found[torch.from_numpy(np.sort(random.permutation(len(found))[:most]))], "sample"

    def _check_sample(
        self, whole: dict[str, Tensor], rejected: list[dict[str, Any]], progress: bool
    ) -> list[int]:
        """Check plans against exact transport; see :mod:`wball.evaluation.check`. Nothing is stored before its end."""
        disagreements: list[int] = []
        pixels = self.x[:1].numel()
        for chosen in (
            lambda: draw_sample(whole, self.settings, pixels),
            lambda: proved_by_plan(whole),
        ):
            index, begun = chosen(), time.perf_counter()
            with bar(
                "exact check", len(index), "of the examples", show=progress and len(index) > 0
            ) as shown:
                wrong = check_exactly(self.ball, self.pairs, whole, index, rejected, shown.advance)
            self.log(
                "exact check", examples=len(index), seconds=round(time.perf_counter() - begun, 3)
            )
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


@torch.no_grad()
def answers(model: Model, x: Tensor) -> Tensor:
    """The model's logits, without TF32."""
    with as_found(model, x.device), full_precision():
        return torch.cat([ask(model, part) for part in x.split(default_batch_size(x))])


def succeeds(model: Model, z: Tensor, y: Tensor) -> Tensor:
    """Which images the model gets wrong, by :func:`wball.model.judge`."""
    size = default_batch_size(z)
    with as_found(model, z.device):
        parts = zip(z.split(size), y.split(size), strict=True)
        return torch.cat([judge(model, images, labels) for images, labels in parts])


def _tied(logits: Tensor) -> Tensor:
    """Where the two largest logits are equal up to rounding."""
    first, second = logits.topk(2, 1).values.unbind(1)
    return first - second <= ROUNDING * logits.abs().amax(1)


def _model_warnings(model: Model, x: Tensor, y: Tensor) -> list[EvaluationWarning]:
    """What the checks of the model say, harmless notices included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_model(model, x, y)
    return [
        EvaluationWarning(
            as_code(w.category.__name__), str(w.message), str(getattr(w.category, "remedy", ""))
        )
        for w in caught
        if issubclass(w.category, ModelWarning)
    ]


def default_batch_size(x: Tensor) -> int:
    """The batch size for images of this size."""
    pixels = x[:1].numel()
    if x.is_cuda:
        return max(1, GPU_PIXELS // pixels, min(GPU_BATCH, GPU_MOST // pixels))
    return max(1, min(CPU_BATCH, CPU_PIXELS // pixels))


def fitting_batch_size(model: Model, x: Tensor) -> int:
    """The largest batch size, up to the default, at which the model's gradients fit on the device."""
    most = default_batch_size(x)
    if not x.is_cuda:
        return most
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    with torch.enable_grad(), as_found(model, x.device):
        z = x[:1].expand(PROBED, *x.shape[1:]).clone().requires_grad_(True)
        logits = ask(model, z)
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), z, allow_unused=True)
    image = (torch.cuda.max_memory_allocated(x.device) - before) // PROBED
    return max(1, min(most, int(GPU_SHARE * free_bytes(x.device)) // max(1, image)))
