"""The batches of an evaluation: how one is attacked, audited, certified and stored, and joined.

All randomness in a batch depends only on the seed, the batch and the radius. The result therefore
does not depend on which process computes a batch, or on interruptions.

A plan proves a distance without solving anything, provided the code that sums it up is right. So a
random sample of these examples at each radius is also checked by exact transport. If one plan
understates its distance, every plan of its batch is checked, and the evaluation is not reliable.
"""

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from wball import inputs
from wball.attacks import Attack, AttackResult, AttackStatus, StandardAttack, minimal_radius
from wball.attacks.attack import JOURNAL, Task
from wball.attacks.base import SteppedAttack
from wball.attacks.findings import CODES, Finding
from wball.attacks.views import find_signs
from wball.auditing.audit import AuditReport, audit
from wball.ball import Ball
from wball.certificates import CertificateStatus, certified_radius, certify
from wball.evaluation.doubts import as_warnings, misclassified
from wball.evaluation.journal import SAVE_EVERY, Journal
from wball.evaluation.result import COLUMNS, EXACT, PLAN, Evaluation, EvaluationWarning
from wball.evaluation.stream import Stream
from wball.inputs import positions, zeros
from wball.model import Model, as_found, ask, full_precision, judge, top_class
from wball.plan import StoredPlan
from wball.progress import Bar, bar, duration, notice
from wball.provenance import Plain
from wball.storage.files import Log, Tensors, as_bytes, json_checksum, read_tensors, write_tensors

CPU_BATCH = 50
STEPS_TIMED, SURVIVING = 3, 0.4
"""Steps that are timed for an estimate, and the share of the steps that images make on average
before they are broken."""
CERTIFIED = 8
"""Images that are certified at a time on a CPU, so that an interruption costs little."""
CPU_PIXELS, GPU_PIXELS = 1_000_000, 4_000_000
"""Pixels per batch, so that large images fit into memory."""
CPU_WORK = 4e9
"""Floating-point operations of the model per batch: a hundred steps, each of a forward and a
backward pass, then take less than a minute on one core."""
GPU_BATCH, GPU_MOST = 256, 40_000_000
"""Smaller batches leave a GPU waiting for kernel launches: a batch of this size may have more
pixels. Attacks halve batches that do not fit into memory."""
MEMBERS = "members-{batch:05d}"
"""Start of the names of a batch's journal."""
IMAGES = {"adversarial", "logits"}
"""What a batch stores beside the columns of the result."""
ROUNDING, DRIFT = 1e-4, 1e-2
"""Relative error of logits in a batch of another size, and the share of their spread that
nondeterministic kernels may change."""
KEEP_BYTES, SAMPLE_BYTES = 10**9, 10**8
"""Largest size of all examples with their originals, and of a sample of them."""
SAMPLE_LEAST, SAMPLE_SHARE, SAMPLE_PIXELS = 32, 0.01, 20_000
"""Largest number of examples per radius that are checked by exact transport although a plan proves
them: this number or this share of the images, but no more pixels. A small colour image takes half
a second, so six of them take less time than their attack; one of more pixels takes longer."""


@dataclass(frozen=True)
class _Batch:
    """Images and labels of a batch, the state of each image, and notes about the work."""

    x: Tensor
    y: Tensor
    state: Tensors
    notes: Plain

    def count(self, code: str, images: int) -> None:
        """Record the number of images on which a finding was seen, at the radius where it was seen
        most often."""
        findings = self.notes["findings"]
        findings[code] = max(findings.get(code, 0), images)


@dataclass(frozen=True)
class _Claims:
    """Images claimed to be adversarial: their positions, radius and origin."""

    index: Tensor
    images: Tensor
    radius: Tensor
    member: Tensor
    proof: StoredPlan | None = None


@dataclass(frozen=True)
class Batches:
    """The batches of an evaluation."""

    model: Model
    data: Stream
    ball: Ball
    attack: Attack
    settings: Plain
    store: Path
    log: Log

    @property
    def name(self) -> str:
        return str(self.settings["model"]["name"])

    @property
    def size(self) -> int:
        return int(self.settings["batch_size"])

    @property
    def count(self) -> int:
        return math.ceil(len(self.data) / self.size)

    @property
    def minimal(self) -> bool:
        """Whether each image's smallest radius is searched, instead of given ones."""
        return bool(self.settings["mode"] == "minimal")

    @property
    def radii(self) -> list[float]:
        """The radius of each stage."""
        return [float(r) for r in self.settings["radii"]]

    def path(self, batch: int) -> Path:
        return self.store / f"batch-{batch:05d}.safetensors"

    def run(self, rank: int, world: int, progress: bool | None) -> None:
        """Compute every ``world``-th batch, starting at ``rank``."""
        with bar(self.name, show=progress if rank == 0 else False, parts=True) as shown:
            mine = range(rank, self.count, world)
            images = sum(len(range(len(self.data))[self._part(batch)]) for batch in mine)
            shown.total(images * len(self.radii))
            if shown.shown:
                self._announce(images)
            for batch in mine:
                self._compute(batch, shown)

    def _announce(self, images: int) -> None:
        """Say how long the attack takes at most, by the time of its first steps."""
        attack, first = self.attack.at(self.radii[-1]), self.data.take(self._part(0))
        version = attack.version if isinstance(attack, StandardAttack) else None
        steps = attack.n_gradients
        few = attack.members()[0].on(attack.ball) if isinstance(attack, StandardAttack) else attack
        if not isinstance(few, SteppedAttack) or self.path(0).is_file():
            return
        for count in (1, STEPS_TIMED):  # the first may compile
            begun = time.perf_counter()
            found = replace(few, steps=count, until_success=False, progress=False)(
                self.model, *first
            )
        step = (time.perf_counter() - begun) / STEPS_TIMED / len(first[1])
        right = sum(status is not AttackStatus.ALREADY_WRONG for status in found.status)
        runs = step * images * len(self.radii) * right / len(first[1])
        said = f"about {duration(SURVIVING * runs * steps)} for the attack, at most "
        said += duration(runs * steps)
        if version == "standard":
            fast = StandardAttack(self.ball, version="fast").n_gradients
            said += f" (the fast attack: about {duration(SURVIVING * runs * fast)})"
        notice(f"{self.name}: {said}", always=True)

    def _part(self, batch: int) -> slice:
        return slice(batch * self.size, (batch + 1) * self.size)

    def _compute(self, number: int, shown: Bar) -> None:
        """Attack and certify one batch at all radii that are not stored yet."""
        batch = self._resume(number)
        shown.advance(batch.notes["done"] * len(batch.x))
        attack: Attack | None = None
        for stage in range(batch.notes["done"], len(self.radii)):
            begun, eps = time.perf_counter(), self.radii[stage]
            shown.stage(len(batch.x), f"{self.name}, eps {eps:g}")
            last = stage == len(self.radii) - 1
            once = self.minimal or isinstance(self.attack, FunctionAttack)
            if not batch.notes["attacked"] and (last or not once):
                attack = attack or self._prepared(number, batch)
                with self._randomness(number, stage) as generator:
                    self._attack(attack.at(eps), batch, generator)
                batch.notes["attacked"] = True
                self._save(batch)
            with self._randomness(number, len(self.radii) + 2 + stage):
                self._certify(batch, stage)
            batch.notes.update(done=stage + 1, attacked=False, tried=0)
            self._save(batch)
            seconds = round(time.perf_counter() - begun, 3)
            self.log("batch", batch=number, stage=stage, seconds=seconds)
            shown.advance(len(batch.x))

    def _save(self, batch: _Batch) -> None:
        """Store a batch. The journal of its attack is then not needed any more."""
        stored = {**batch.state, "adversarial": as_bytes(batch.state["adversarial"])}
        write_tensors(self.path(batch.notes["batch"]), stored, batch.notes)
        for path in self.store.glob(f"{MEMBERS.format(**batch.notes)}-*"):
            path.unlink()

    def _resume(self, number: int) -> _Batch:
        """The stored batch, or a new one."""
        x, y = self.data.take(self._part(number))
        if self.path(number).is_file():
            try:
                return _Batch(x, y, *self._read(number))
            except ValueError as error:
                warnings.warn(f"{error}; the batch is computed again", stacklevel=2)
                self.log("damaged", batch=number, said=str(error))
        logits = self._clean_logits(number, x)
        infinite = torch.full((len(x),), math.inf, dtype=torch.float64)
        none = torch.full((len(x),), -1, dtype=torch.long)
        predicted = top_class(logits)
        # A class that holds in float32 alone is a rounding error, for clean images as for examples.
        wrong = misclassified(self.model, x, y, self.size).cpu() | (predicted < 0)
        predicted = torch.where(wrong, predicted, y.cpu())
        state = {
            "label": y.cpu(),
            "predicted": predicted,
            "read_as": none,
            "distance": torch.where(predicted == y.cpu(), infinite, 0.0),
            "found_at": infinite.clone(),
            "mass_error": infinite.clone(),
            "box_violation": infinite.clone(),
            "member": none.clone(),
            "n_steps": torch.zeros_like(none),
            "certified": torch.zeros_like(infinite),
            "proof": torch.zeros_like(none),
            "adversarial": x.cpu().clone(),
            "logits": logits,
        }
        work = {"done": 0, "attacked": False, "tried": 0, "view": None}
        found: Plain = {"rejected": [], "findings": {}, "disagreements": []}
        return _Batch(x, y, state, {**self._identity(number), **work, **found})

    def _identity(self, number: int) -> Plain:
        """What marks the files of this batch of this run."""
        return {"run": json_checksum(self.settings), "batch": number}

    def _read(self, number: int) -> tuple[Tensors, Plain]:
        """Read a stored batch. Raises ``ValueError`` if the file is not this batch of this run."""
        state, notes = read_tensors(self.path(number))
        same = isinstance(notes, dict) and self._identity(number).items() <= notes.items()
        if not same or state.keys() != COLUMNS.keys() - {"radius"} | IMAGES:
            raise ValueError(f"{self.path(number)} is not a batch of this evaluation")
        return {name: inputs.as_pixels(values) for name, values in state.items()}, notes

    @contextmanager
    def _randomness(self, batch: int, stage: int) -> Iterator[Generator]:
        """A generator seeded for this batch and stage; seeds PyTorch's global random state as
        well."""
        entropy = [int(self.settings["seed"]), batch, stage]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
        device = self.data.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield Generator(device).manual_seed(seed)

    def _clean_logits(self, number: int, x: Tensor) -> Tensor:
        with self._randomness(number, len(self.radii) + 1):
            return answers(self.model, x, self.size).cpu()

    def _prepared(self, number: int, batch: _Batch) -> Attack:
        """The attack after it has inspected the model, which does not depend on the first stage."""
        attack, known = self.attack.at(self.radii[-1]), batch.notes["view"]
        with self._randomness(number, len(self.radii)):
            attack = attack.prepared(self.model, batch.x, batch.y, known)
        if known is None and isinstance(attack, StandardAttack) and attack.view is not None:
            batch.notes["view"] = attack.view.known()
            self._save(batch)
        return attack

    def _attack(self, attack: Attack, batch: _Batch, generator: Generator) -> None:
        """Attack the unbroken images of a batch, and record the valid examples."""
        left = positions(batch.state["distance"].isinf())  # without an example
        if left.numel() == 0:
            return
        here = left.to(batch.x.device)
        attack = replace(attack, proofs=self.settings["exact"] == "sample")
        if self.minimal and not isinstance(attack, FunctionAttack):
            attack = FunctionAttack(attack.ball, partial(smallest, attack))
        run = {**self._identity(batch.notes["batch"]), "stage": batch.notes["done"]}
        kept = JOURNAL.set(Journal(self.store / MEMBERS.format(**batch.notes), self.ball, run))
        try:
            found = attack(self.model, batch.x[here], batch.y[here], generator=generator)
        finally:
            JOURNAL.reset(kept)
        batch.state["n_steps"][left] += found.n_steps.cpu()
        for finding in found.findings:
            batch.count(finding.code, finding.images)
        claimed, success = found.success.cpu(), found.success
        member = torch.zeros_like(left) if found.member is None else found.member.cpu()
        radius = torch.full((int(claimed.sum()),), float(attack.ball.eps), dtype=torch.float64)
        proof = None if found.proof is None else found.proof.take(success)
        claims = _Claims(left[claimed], found.images[success], radius, member[claimed], proof)
        self._accept(batch, claims)

    def _accept(self, batch: _Batch, claims: _Claims) -> None:
        """Record claimed examples that the model misclassifies and that pass the audit.

        An example that the model classifies correctly is a false claim, unless the two largest
        logits are equal up to rounding.
        """
        index, state, notes = claims.index, batch.state, batch.notes
        if index.numel() == 0:
            return
        logits = answers(self.model, claims.images, self.size)
        read_as, label = top_class(logits).cpu(), batch.y.cpu()[index]
        report, proof = self._audit(batch, claims)
        valid = report.valid.cpu()
        labels = label.to(batch.x.device)
        fooled = misclassified(self.model, claims.images, labels, self.size).cpu()
        good = valid & fooled
        first, second = logits.topk(2, 1).values.unbind(1)
        close = (first - second <= rounding(logits)).cpu()
        tied = valid & ~fooled & torch.where(read_as == label, close, read_as >= 0)
        batch.count("tied-answers", int(tied.sum()))
        for k in positions(~good & ~tied).tolist():
            said = "has NaN logits for" if read_as[k] < 0 else "classifies correctly"
            notes["rejected"].append(
                {
                    "index": self.size * int(notes["batch"]) + int(index[k]),
                    "eps": float(claims.radius[k]),
                    "reason": report.reasons[k] or f"the model {said} the stored image",
                }
            )
        found = {
            "read_as": read_as,
            "distance": report.distance.cpu(),
            "found_at": claims.radius,
            "mass_error": report.mass_error.cpu(),
            "box_violation": report.box_violation.cpu(),
            "member": claims.member,
            "proof": proof,
            "adversarial": claims.images.cpu().to(state["adversarial"].dtype),
        }
        for name, values in found.items():
            state[name][index[good]] = values[good]

    def _audit(self, batch: _Batch, claims: _Claims) -> tuple[AuditReport, Tensor]:
        """Audit claims, and solve a sample of those with plans; all of them if a plan is wrong.

        Returns the report, and how each distance is proved.
        """
        begun, number = time.perf_counter(), int(batch.notes["batch"])
        ball, images, workers = self.ball.at(claims.radius), claims.images, os.cpu_count() or 1
        centres = batch.x[claims.index.to(batch.x.device)]
        report = audit(
            ball,
            centres,
            images,
            plan=claims.proof,
            exact="sample",
            sample=self._sampled(number),
            generator=Generator().manual_seed(int(self.settings["seed"])),
            workers=workers,
        )
        planned = torch.zeros_like(report.valid)
        if claims.proof is not None:
            promised = ball.violations(centres, images, claims.proof)
            planned, allowed = promised.within(ball.eps), promised.allowed(promised.distance)
            if (planned & report.exact & ~(report.distance <= allowed)).any():
                report = audit(ball, centres, images, workers=workers)
                wrong = (planned & ~(report.distance <= allowed)).cpu()
                batch.notes["disagreements"] += (self.size * number + claims.index[wrong]).tolist()
        proof = PLAN * planned.long() + EXACT * report.exact.long()
        self.log(
            "audit",
            batch=number,
            examples=len(report),
            exact=int(report.exact.sum()),
            seconds=round(time.perf_counter() - begun, 3),
        )
        return report, proof.cpu()

    def _sampled(self, number: int) -> int:
        """Number of plans of a batch to check exactly at each radius."""
        total = max(SAMPLE_LEAST, math.ceil(SAMPLE_SHARE * len(self.data)))
        total = min(total, SAMPLE_PIXELS // self.data.first[0].numel())
        return (number + 1) * total // self.count - number * total // self.count

    def _certify(self, batch: _Batch, stage: int) -> None:
        """Certify what was certified at the radius before.

        Broken images are tried, too: certificate and example check each other. Counterexamples of
        complete verification count as those of the attack do.
        """
        if self.settings["certify"] is None:
            return
        assert isinstance(self.model, nn.Module)
        x, y, state, eps = batch.x, batch.y, batch.state, self.radii[stage]
        method, right = self.settings["certify"]["method"], state["label"] == state["predicted"]
        before = self.radii[stage - 1] if stage else 0.0
        index = positions(right & (state["certified"] >= before))
        if index.numel() == 0:
            return
        if self.minimal:
            here = index.to(x.device)
            radius = certified_radius(self.model, x[here], y[here], self.ball.at(eps), method)
            state["certified"][index] = radius.cpu()
            return
        saved = time.perf_counter()
        for part in index[batch.notes["tried"] :].split(len(index) if x.is_cuda else CERTIFIED):
            self._certify_part(batch, part, eps)
            batch.notes["tried"] += len(part)
            if time.perf_counter() - saved > SAVE_EVERY:
                self._save(batch)
                saved = time.perf_counter()

    def _certify_part(self, batch: _Batch, index: Tensor, eps: float) -> None:
        """Certify some images of a batch at one radius."""
        assert isinstance(self.model, nn.Module)
        x, y, state, ball = batch.x, batch.y, batch.state, self.ball.at(eps)
        here = index.to(x.device)
        proof = certify(self.model, x[here], y[here], ball, self.settings["certify"]["method"])
        state["certified"][index[proof.certified.cpu()]] = eps
        if proof.counterexample is not None:
            falsified = [status is CertificateStatus.FALSIFIED for status in proof.status]
            new = torch.tensor(falsified) & state["distance"][index].isinf()
            index, images = index[new], proof.counterexample[new.to(x.device)]
            radius = torch.full((len(index),), eps, dtype=torch.float64)
            self._accept(batch, _Claims(index, images, radius, torch.full_like(index, -1)))

    def joined(self, begun: Mapping[str, Any]) -> Evaluation:
        """Join all batches into the whole evaluation, after every batch is done."""
        columns, rejected = list[Tensors](), list[Plain]()
        seen, disagreements = Counter[str](), set[int]()
        for batch in range(self.count):
            state, notes = self._read(batch)
            # Copies: a tensor that was read from a file keeps the whole file mapped.
            small = state.keys() - IMAGES
            columns.append({name: state[name].clone() for name in small})
            rejected += notes["rejected"]
            seen.update(notes["findings"])
            disagreements.update(notes["disagreements"])
        whole = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
        whole["radius"] = self._smallest_radius(whole)
        x, y = self.data.take(slice(0, self.size))
        findings = [Finding(code, seen[code], len(self.data)) for code in CODES if seen[code]]
        signs = [EvaluationWarning(*sign) for sign in find_signs(self.model, x, y).items()]
        doubts, remarks = as_warnings(findings, signs)
        index = self._kept(positions(whole["read_as"] >= 0))
        pairs = [self.pairs(part) for part in index.split(self.size)]
        original, adversarial = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        return Evaluation(
            self.settings,
            begun["provenance"],
            {name: whole[name] for name in COLUMNS},
            tuple(rejected),
            doubts,
            {"index": index, "original": original, "adversarial": adversarial},
            disagreements=tuple(sorted(disagreements)),
            notes=remarks,
            names=tuple(begun["names"]),
        )

    def ask_again(self) -> list[EvaluationWarning]:
        """Run the model on the clean images again, in the same batches. Different outputs mean that
        the model has hidden state that calls change."""
        changed = 0
        for batch in range(self.count):
            before = self._read(batch)[0]["logits"]
            after = self._clean_logits(batch, self.data[self._part(batch)])
            changed += int(answers_changed(before, after).sum())
        warning = EvaluationWarning(
            "changed-answers",
            f"the logits of {changed} of {len(self.data)} clean images are not those of the first call",
            "the model keeps a state between calls: make its output depend on the image alone",
        )
        return [warning] if changed else []

    def pairs(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The original and adversarial images at ascending positions."""
        original = self.data[index].cpu()
        found = [original[:0]]
        for batch in (index // self.size).unique().tolist():
            inside = index[index // self.size == batch] - batch * self.size
            found.append(self._read(batch)[0]["adversarial"][inside])
        return original, torch.cat(found)

    def _kept(self, found: Tensor) -> Tensor:
        """The examples to store: all, or a sample if they take more than a gigabyte."""
        image = self.data.first[:1]
        pair = 2 * image.nbytes
        if len(found) * pair <= KEEP_BYTES:
            return found
        most = max(1, SAMPLE_BYTES // pair)
        warnings.warn(
            f"the {len(found)} examples take more than a gigabyte: a sample of {most} is stored",
            stacklevel=2,
        )
        random = np.random.default_rng([int(self.settings["seed"]), len(found)])
        return found[torch.from_numpy(np.sort(random.permutation(len(found))[:most]))]

    def _smallest_radius(self, whole: Tensors) -> Tensor:
        """The smallest evaluated radius of each example, by its distance."""
        distance = whole["distance"]
        radius = torch.where(distance == 0, distance, whole["found_at"])
        if self.minimal:
            return torch.minimum(radius, distance)
        for eps in sorted(self.radii, reverse=True):
            radius = torch.where((distance <= eps) & (eps < radius), eps, radius)
        return radius


@dataclass(frozen=True)
class FunctionAttack(Attack):
    """An attack by a function ``function(model, x, y) -> images``.

    Every image that the model misclassifies is a claim, which the audit checks. The function does
    not know the radius: it is called once, and its examples count at all radii above their
    distances. A search for the smallest radius is such a function.
    """

    function: Callable[[Model, Tensor, Tensor], Tensor]

    @property
    def n_gradients(self) -> int:
        return 0

    def describe(self) -> Plain:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return {**super().describe(), "function": name}

    def attack_batch(self, task: Task, *rest: Any) -> AttackResult:
        x = task.x
        images = self.function(task.model, x.clone(), task.y.clone())
        if not isinstance(images, Tensor) or images.shape != x.shape:
            seen = getattr(images, "shape", type(images).__name__)
            raise ValueError(f"attack must return images of shape {tuple(x.shape)}, got {seen}")
        zero = zeros(x)
        images = images.detach().to(x)
        success = judge(task.model, images, task.y)
        kinds = (AttackStatus.SURVIVED, AttackStatus.FOUND)
        status = tuple(kinds[found] for found in success.tolist())
        return AttackResult(images, success, zero, zero, zero.long(), status, zero)


def smallest(attack: Attack, model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Examples at the smallest radii that an attack finds."""
    seed = int(torch.randint(2**62, ()))  # each batch has its own random state
    generator = Generator(x.device).manual_seed(seed)
    hi = float(attack.ball.eps)
    return minimal_radius(model, x, y, attack, hi=hi, generator=generator).images


@torch.no_grad()
def answers(model: Model, x: Tensor, size: int) -> Tensor:
    """The model's logits, without TF32, for ``size`` images at a time."""
    with as_found(model, x.device), full_precision():
        return torch.cat([ask(model, part) for part in x.split(size)])


def rounding(logits: Tensor) -> Tensor:
    """The difference between logits that rounding can explain, per image."""
    return ROUNDING * logits.abs().amax(1)


def answers_changed(before: Tensor, after: Tensor) -> Tensor:
    """Images whose logits changed by more than nondeterministic kernels explain, or whose class
    changed by more than rounding explains."""
    same = (before == after) | (before.isnan() & after.isnan())
    drift = (before - after).abs().masked_fill(same, 0.0).amax(1)
    slack = rounding(after)
    flipped = (top_class(before) != top_class(after)) & ~(drift <= slack)
    stable = drift <= slack + DRIFT * (after.amax(1) - after.amin(1))
    return ~same.all(1) & (flipped | ~stable)


def default_batch_size(x: Tensor, model: Model) -> int:
    """The batch size for a model of images of this size."""
    pixels = x[:1].numel()
    if x.is_cuda:
        return max(1, GPU_PIXELS // pixels, min(GPU_BATCH, GPU_MOST // pixels))
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, where it is installed

    with FlopCounterMode(display=False) as counter, torch.no_grad(), as_found(model, x.device):
        ask(model, x[:1])
    work = max(1, counter.get_total_flops())
    return max(1, min(CPU_BATCH, CPU_PIXELS // pixels, int(CPU_WORK / work)))
