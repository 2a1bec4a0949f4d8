"""Evaluations that are interrupted, shared or damaged: nothing is lost, and nothing is counted
twice."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evaluation.linear import BALL, RADII, attack, measure, problem
from wball import (
    PGD,
    CertificateResult,
    DecisionSearch,
    DualAveraging,
    Evaluation,
    FrankWolfe,
    ScoreSearch,
    WassersteinBall,
    audit,
)
from wball.attacks import Attack, GrowingRadius
from wball.attacks.standard import MEMBERS, Member
from wball.evaluation import FolderInUse, Names, OtherSettings, Storage, evaluate
from wball.storage.files import locked, read_tensors, write_tensors, write_whole

batches = importlib.import_module("wball.evaluation.batches")
journal = importlib.import_module("wball.evaluation.journal")
FILES = ("results.json", "examples.safetensors", "exhibit.safetensors")


class Dies(Exception):
    pass


class Fragile(nn.Module):
    """A model that dies after a number of calls."""

    def __init__(self, model: nn.Module, calls: int) -> None:
        super().__init__()
        self.model, self.calls = model, [calls]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] -= 1
        if self.calls[0] < 0:
            raise Dies
        return self.model(x)


def test_folders_in_the_place_of_files(tmp_path: Path) -> None:
    """One among the batches is removed, as a damaged batch is; one where the result is written is
    refused before the work, not after it."""
    model, x, y = problem()
    out = tmp_path / "a"
    with contextlib.suppress(Dies):
        evaluate(Fragile(model, 60), x, y, BALL, RADII, attack(), out=out, batch_size=3)
    assert not (out / "results.json").exists() and len(list(out.glob("batches/batch-*"))) > 1
    first = out / "batches" / "batch-00000.safetensors"
    first.unlink()
    (first / "inside").mkdir(parents=True)
    with pytest.warns(UserWarning, match="batch-00000.safetensors is a folder"):
        result = evaluate(Fragile(model, 10**9), x, y, BALL, RADII, attack(), out=out, batch_size=3)
    expected = evaluate(model, x, y, BALL, RADII, attack(), batch_size=3)
    assert torch.equal(result.images["distance"], expected.images["distance"])
    for name in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(IsADirectoryError, match=f"{name} is a folder, where a file is written"):
            evaluate(Fragile(model, 10), x, y, BALL, RADII, attack(), out=tmp_path / name)


def test_interrupted_anywhere_ends_with_the_same_bytes(tmp_path: Path) -> None:
    model, x, y = problem()
    start = attack(random_start=2.0)
    settings: dict[str, Any] = {"batch_size": 3, "seed": 5, "name": Names("m", command="c")}
    reference = tmp_path / "reference"
    evaluate(Fragile(model, 10**9), x, y, BALL, RADII, start, out=reference, **settings)
    done = 0
    for calls in range(3, 400, 23):
        fragile = Fragile(model, calls)
        try:
            evaluate(fragile, x, y, BALL, RADII, start, out=tmp_path / "b", **settings)
        except Dies:
            done += 1
            assert not (tmp_path / "b" / "results.json").exists()
        else:
            break
    assert done >= 2
    for name in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (reference / name).read_bytes()


def test_one_process_per_folder(tmp_path: Path) -> None:
    model, x, y = problem()
    with locked(tmp_path), pytest.raises(FolderInUse, match="in use"):
        measure(model, x, y, out=tmp_path)
    measure(model, x, y, out=tmp_path)


def test_a_file_system_without_locks_is_not_a_folder_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    for wait in (False, True):  # the call must not wait for a lock
        with pytest.raises(OSError, match="cannot lock files"), locked(tmp_path, wait=wait):
            pass


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]


def test_damaged_files_say_how_to_go_on(tmp_path: Path) -> None:
    model, x, y = problem(4)
    ready = measure(model, x, y, out=tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    parts = {
        "results.json": ("{", "{}", json.dumps({**content, "images": {}})),
        "examples.safetensors": ("",),
        "exhibit.safetensors": ("half",),
    }
    for name, texts in parts.items():
        whole = (tmp_path / name).read_bytes()
        for text in texts:
            (tmp_path / name).write_text(text)
            with pytest.raises(ValueError, match=f"{name} is not? .*overwrite"):
                measure(model, x, y, out=tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "results.json").write_text("{}")
    again = measure(model, x, y, out=Storage(tmp_path, overwrite=True))
    assert again.summary() == ready.summary()


@pytest.mark.parametrize("damage", ["run", "batch", "columns", "notes"])
def test_batches_of_another_run_are_named_and_computed_again(tmp_path: Path, damage: str) -> None:
    model, x, y = problem(4)
    settings: dict[str, Any] = {"name": "m", "batch_size": 2}
    whole = measure(model, x, y, **settings)
    with pytest.raises(Dies):
        measure(Fragile(model, 40), x, y, out=tmp_path, **settings)
    path = tmp_path / "batches" / "batch-00000.safetensors"
    state, notes = read_tensors(path)
    if damage == "columns":
        del state["certified"]
    write_tensors(
        path,
        state,
        {**notes, damage: "another"} if damage in notes else notes if damage == "columns" else [],
    )
    with pytest.warns(
        UserWarning, match=r"batch-00000.*not a batch of this evaluation.*computed again"
    ):
        again = measure(Fragile(model, 10**9), x, y, out=tmp_path, **settings)
    assert again.summary() == whole.summary()


def test_another_model_with_the_same_weights_is_another_model(tmp_path: Path) -> None:
    model, x, y = problem(4)
    before = measure(model, x, y, out=tmp_path / "net", name="m")
    assert measure(model, x, y, out=tmp_path / "net", name="m").summary() == before.summary()
    with pytest.raises(OtherSettings, match="logits for the first"):
        measure(nn.Sequential(*model, nn.Tanh()), x, y, out=tmp_path / "net", name="m")
    measure(lambda z: model(z), x, y, out=tmp_path / "function")
    with pytest.raises(OtherSettings, match="logits for the first"):
        measure(lambda z: model(z).flip(1), x, y, out=tmp_path / "function")

    def dice(z: Tensor) -> Tensor:
        """Random beyond torch's seeds: such a model is known by its weights alone."""
        return model(z) + float(np.random.default_rng().random())

    for _ in range(2):
        measure(dice, x, y, out=tmp_path / "dice")


@pytest.mark.slow
def test_an_interruption_among_certificates_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[int] = []
    prove = batches.certify

    def certify(model: nn.Module, images: Tensor, *rest: Any) -> CertificateResult:
        proved.append(len(images))
        if len(proved) == 3:
            raise Dies
        found: CertificateResult = prove(model, images, *rest)
        return found

    def run(folder: Path) -> Evaluation:
        settings: dict[str, Any] = {"batch_size": 2, "name": Names("m", command="c")}
        return measure(*problem(6), out=folder, certify="complete", **settings)

    monkeypatch.setattr(batches, "certify", certify)
    with pytest.raises(Dies):
        run(tmp_path / "a")
    resumed, calls = run(tmp_path / "a"), len(proved)
    whole = run(tmp_path / "b")
    assert calls - 3 < len(proved) - calls  # the batch that was finished is not proved again
    assert torch.equal(resumed.images["certified"], whole.images["certified"])
    assert float(whole.images["certified"].max()) > 0
    first, second = (tmp_path / name / "results.json" for name in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_counterexamples_of_complete_certificates_count_as_broken() -> None:
    (model, x, _), ball = problem(4), WassersteinBall(1.0)
    y = model(x).argmax(1)
    timid = DualAveraging(ball, steps=1, step_size=1e-12)  # breaks nothing
    result = evaluate(model, x, y, ball, [1.0], timid, certify="complete")
    broken = result.images["read_as"] >= 0
    assert broken.any()
    assert (broken | (result.images["certified"] == 1.0)).all()  # every image is decided
    assert (result.images["member"][broken] == -1).all()
    assert not result.rejected
    assert audit(ball, result.examples["original"], result.examples["adversarial"]).valid.all()
    assert (model(result.examples["adversarial"]).argmax(1) != y[broken]).all()


class Slow(Fragile):
    """A model that takes its time, on a clock of its own, and dies when that has run out."""

    EACH = 0.012
    """Seconds for an image; three times as much where a gradient is taken."""

    def __init__(self, model: nn.Module, seconds: float = math.inf) -> None:
        super().__init__(model, 10**9)
        self.seconds, self.clock = seconds, 0.0

    def monotonic(self) -> float:
        return self.clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock += self.EACH * len(x) * (3 if torch.is_grad_enabled() else 1)
        if self.clock > self.seconds:
            raise Dies
        return super().forward(x)


def test_an_interruption_costs_at_most_thirty_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is killed, a run of a slow model whose members take 43 seconds does not ask it
    again for more than thirty, and ends with the same bytes."""
    members = tuple(Member(name, steps=100) for name in ("cross-entropy", "margin"))
    monkeypatch.setitem(MEMBERS, "fast", members)

    def run(out: Path, seconds: float = math.inf) -> float:
        model, x, y = problem()
        slow = Slow(model, seconds)
        monkeypatch.setattr(journal, "time", slow)
        settings: dict[str, Any] = {"attack": "fast", "batch_size": len(x), "radii": [0.002]}
        with contextlib.suppress(Dies):
            measure(slow, x, y, out=out, name=Names("m", command="c"), **settings)
        return slow.clock

    whole, lost = run(tmp_path / "whole"), list[float]()
    assert whole > 90
    for seconds in (8, 40, 60, 90):
        out = tmp_path / f"after {seconds}"
        lost.append(run(out, seconds) + run(out) - whole)
        for name in FILES:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert max(lost) <= 30, lost


RESUMED: dict[str, Attack] = {
    "noise and plans": attack(random_start=2.0, noise=0.2, memory=0.9),
    "images that drop out": DualAveraging(BALL, steps=30, step_size=0.3),
    "frank-wolfe": FrankWolfe(BALL, steps=10),
    "exact projections": PGD(BALL, steps=12),
    "growing radius": PGD(BALL, steps=12, growth=GrowingRadius(1.05, 3), step_size=0.02),
    "scores": ScoreSearch(BALL, queries=200),
    "labels": DecisionSearch(BALL, queries=400),
}


@pytest.mark.parametrize("name", RESUMED)
def test_an_attack_goes_on_after_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also inside of the search for the smallest radius, which runs it several times."""
    monkeypatch.setattr(journal, "SAVE_EVERY", 0.0)
    model, x, y = problem(6)
    radii = "minimal" if name == "images that drop out" else [0.01]
    settings: dict[str, Any] = {"radii": radii, "attack": RESUMED[name].at(0.01)}
    settings["name"] = Names("m", command="c")
    counted, resumed = Fragile(model, 10**9), list[int]()
    ball = WassersteinBall(0.01)
    evaluate(counted, x, y, ball, out=tmp_path / "whole", **settings)
    whole, resume = 10**9 - counted.calls[0], journal.Journal.resume

    def seen(*args: Any) -> int:
        resumed.append(resume(*args))
        return resumed[-1]

    monkeypatch.setattr(journal.Journal, "resume", seen)
    for calls in (whole // 2, whole // 3, whole // 2, 10**9):
        with contextlib.suppress(Dies):
            evaluate(Fragile(model, calls), x, y, ball, out=tmp_path / "parts", **settings)
    assert max(resumed) > 0
    for file in FILES:
        whole_file, parts = ((tmp_path / run / file).read_bytes() for run in ("whole", "parts"))
        assert whole_file == parts


def test_an_interrupted_standard_attack_goes_on_after_its_last_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members that ran before an interruption are not run again, and nothing changes by it."""
    monkeypatch.setattr("wball.evaluation.journal.SAVE_EVERY", 0.0)
    model, x, y = problem(6)
    settings: dict[str, Any] = {
        "attack": "fast",
        "batch_size": 6,
        "name": Names("m", command="c"),
    }
    settings["radii"] = [0.02, 0.05]
    counted = Fragile(model, 10**9)
    measure(counted, x, y, out=tmp_path / "whole", **settings)
    once, calls, each = 10**9 - counted.calls[0], 0, 160
    for _ in range(50):  # each attempt has time for one member and what stands around it
        fragile = Fragile(model, each)
        with contextlib.suppress(Dies):
            measure(fragile, x, y, out=tmp_path / "parts", **settings)
        calls += each - max(0, fragile.calls[0])
        if (tmp_path / "parts" / "results.json").exists():
            break
        assert not (tmp_path / "parts" / "results.json").exists()
    for name in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        whole, parts = ((tmp_path / run / name).read_bytes() for run in ("whole", "parts"))
        assert whole == parts
    assert each < once < calls < 3 * once
    assert not (tmp_path / "parts" / "batches").exists()
