"""Evaluations: what is counted, what is not, and that nothing is lost when the process dies."""

from __future__ import annotations

import errno
import importlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor, nn

import wball
from wball.attacks import Attack, AttackResult, AttackStatus
from wball.evaluation import FolderInUse, OtherSettings, evaluate, load_evaluation
from wball.evaluation.check import audit_in_threads
from wball.report.content import make_content
from wball.report.figures import save_figures
from wball.storage.atomic import locked, write_whole
from wball.storage.files import read_json, read_tensors, write_tensors

checking = importlib.import_module("wball.evaluation.check")
batches = importlib.import_module("wball.evaluation.batches")
SOURCES = Path(__file__).parents[2] / "src"
BALL = wball.WassersteinBall(0.4)
RADII = [0.1, 0.2, 0.4]


def problem(count: int = 12, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Blurry two-spot images, and a linear model that weighs the left half against the right one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 6, 6, generator=generator).square() * 0.8
    weight = torch.linspace(-1, 1, 6).repeat(6)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-weight, weight]))
        model[1].bias.zero_()
    y = model(x).argmax(1)
    y[0] = 1 - y[0]  # one image that is wrong as it is
    return model.eval(), x, y


def attack(**changes: Any) -> wball.DualAveraging:
    return wball.DualAveraging(BALL, steps=8, **changes)


def exact_radius(model: nn.Module, x: Tensor, y: Tensor, hi: float) -> float:
    """The smallest radius that breaks a linear model, by bisection on the support function."""
    weight = (model[1].weight[1 - y] - model[1].weight[y]).detach().reshape(x.shape).double()
    low, high = 0.0, hi
    for _ in range(14):
        middle = (low + high) / 2
        upper = float(wball.WassersteinBall(middle).support(x.double(), weight).upper)
        low, high = (low, middle) if upper > 0 else (middle, high)
    return high


@dataclass(frozen=True)
class Claims(Attack):
    """Claims success on every image with whatever ``make`` returns."""

    how: str = "copy"

    @property
    def n_gradients(self) -> int:
        return 1

    def attack_batch(self, model: Any, x: Tensor, y: Tensor, *rest: Any, **more: Any) -> AttackResult:
        if self.how == "copy":
            z = x.clone()
        elif self.how == "darken":
            z = x * 0.5
        else:
            z = x.flip(3)  # far outside the ball
        ones = torch.ones(len(x), dtype=torch.float64)
        return AttackResult(z, ones > 0, 0 * ones, ones, ones.long(), (AttackStatus.FOUND,) * len(x), ones)


def test_numbers_agree_with_the_exact_radii_of_a_linear_model() -> None:
    model, x, y = problem(8)
    result = evaluate(model, x, y, BALL, RADII, attack(), name="halves", certify="crown")
    assert result.clean_accuracy == pytest.approx(7 / 8)
    exact = [0.0] + [exact_radius(model, x[i : i + 1], y[i : i + 1], 0.8) for i in range(1, 8)]
    for eps in RADII:
        # no attack beats the exact radius and no certificate exceeds it; on a linear model both are nearly tight
        least = sum(r > eps for r in exact) / 8
        assert result.accuracy_at(eps) >= least - 1e-9
        assert result.accuracy_at(eps) <= sum(r > 0.9 * eps for r in exact) / 8 + 1e-9
        certified = result.certified_at(eps)
        assert certified is not None and certified <= least + 1e-9
        assert certified <= result.accuracy_at(eps)
    assert result.contradictions == []
    assert result.curve()[0].eps == 0 and result.curve()[0].accuracy == result.clean_accuracy
    found = result.images["read_as"] >= 0
    assert found.any()
    report = wball.audit(BALL, result.examples["original"], result.examples["adversarial"])
    assert report.all_valid
    torch.testing.assert_close(report.distance, result.images["distance"][found])
    assert bool((result.images["distance"][found] <= result.images["radius"][found] * (1 + 1e-4)).all())
    index = result.examples["index"]
    assert torch.equal(result.examples["original"], x[index])
    assert torch.equal(model(result.examples["adversarial"]).argmax(1), result.images["read_as"][index])


def test_an_example_counts_at_every_radius_above_its_distance() -> None:
    model, x, y = problem()
    coarse = evaluate(model, x, y, BALL, [0.01, 0.4], attack())
    found = coarse.images["found_at"] == 0.4
    assert found.any()
    assert bool((coarse.images["distance"][found] <= 0.4).all())
    # between two radii the exact distances still say something, and never more than at the next radius
    assert coarse.accuracy_at(0.01) >= coarse.accuracy_bound_at(0.399) >= coarse.accuracy_at(0.4)


def test_numbers_nobody_measured_are_not_shown() -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, [0.1, 0.4], attack())
    for eps in (0.2, 0.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"was not evaluated, the radii are 0, 0.1, 0.4"):
            result.accuracy_at(eps)
    assert [p.measured for p in result.curve([0.0, 0.1, 0.2, 0.4, 0.5])] == [True, True, False, True, False]
    assert all(p.certified is None and p.certified_interval is None for p in result.curve())
    written = result.to_dict()
    assert written["images"]["certified"] == [None] * len(x)
    assert {point["certified"] for point in written["summary"]["curve"]} == {None}


@pytest.mark.parametrize(
    ("how", "reason"), [("copy", "classifies"), ("darken", "mass is off"), ("mirror", "no plan|distance|classifies")]
)
def test_claims_that_do_not_hold_are_not_counted(how: str, reason: str) -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, [0.1, 0.2], Claims(BALL, how=how), batch_size=5)
    assert result.accuracy_at(0.2) == result.clean_accuracy
    assert len(result.rejected) == 2 * 11  # claimed again at each radius, and never for the image that is wrong
    assert {r["index"] for r in result.rejected} == set(range(1, 12))
    for entry in result.rejected:
        assert any(word in entry["reason"] for word in reason.split("|"))
    assert result.audit_summary()["rejected"] == 22 and "22 rejected" in result.verdict()


def test_plans_are_proof_and_a_sample_is_checked_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SAMPLE_LEAST", 2)
    solved = []
    inner = ot.emd
    monkeypatch.setattr(ot, "emd", lambda *a, **k: solved.append(1) or inner(*a, **k))
    model, x, y = problem(40)
    result = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", batch_size=16)
    found = result.images["read_as"] >= 0
    at = [int((result.images["found_at"] == eps).sum()) for eps in RADII]
    sampled = sum(min(2, n) for n in at)
    audit = result.audit_summary()
    assert int(found.sum()) > sampled > 0
    assert len(solved) == sampled == audit["both"] == audit["exact_transport"]
    assert audit["proved_by_plan"] == int(found.sum()) - sampled and audit["disagreements"] == []
    assert f"sampled exact check: {sampled}, disagreements: 0" in result.verdict()
    words = json.loads((tmp_path / "a" / "results.json").read_text())["images"]["proof"]
    assert [w is not None for w in words] == found.tolist()
    assert words.count("plan, exact") == sampled and words.count("plan") == audit["proved_by_plan"]

    every = evaluate(model, x, y, BALL, RADII, attack(), exact="all", batch_size=16)
    assert every.audit_summary()["exact_transport"] == int(found.sum()) and every.audit_summary()["both"] == 0
    assert f"exact transport: {int(found.sum())}" in every.verdict()
    assert torch.equal(every.examples["adversarial"], result.examples["adversarial"])
    assert torch.equal(every.images["found_at"], result.images["found_at"])
    over = result.images["distance"][found] / every.images["distance"][found]
    assert bool((over >= 1 - 1e-6).all()) and bool((over[result.images["proof"][found] == 3] <= 1 + 1e-9).all())
    assert all(r.accuracy <= s.accuracy for r, s in zip(every.curve(), result.curve(), strict=True))


@pytest.mark.parametrize(("side", "count"), [(28, 50), (64, 32), (224, 2), (1024, 1)])
def test_the_exact_check_of_large_images_is_bounded(side: int, count: int) -> None:
    """32 or 1 % of them, but no more pixels than 32 images of 64 x 64 x 3, and one image at least."""
    found = 5000
    images = {
        "label": torch.zeros(found),
        "proof": torch.full((found,), checking.PLAN),
        "found_at": torch.full((found,), 0.1, dtype=torch.float64),
    }
    drawn = checking.draw_sample(images, {"radii": [0.1], "seed": 0}, 3 * side * side)
    assert len(drawn) == len(set(drawn.tolist())) == count


def test_one_wrong_plan_and_none_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the plan check: what it vouches for is twice as far as it says."""
    monkeypatch.setattr(checking, "SAMPLE_LEAST", 1)
    inner = checking.audit

    def careless(ball: Any, x: Tensor, z: Tensor, plan: Any = None, **rest: Any) -> Any:
        report = inner(ball, x, z, plan=plan, **rest)
        return report if plan is None else replace(report, distance=report.distance / 2)

    monkeypatch.setattr(checking, "audit", careless)
    model, x, y = problem(40)
    result = evaluate(model, x, y, BALL, RADII, attack())
    found = (result.images["read_as"] >= 0).nonzero().squeeze(1).tolist()
    assert list(result.disagreements) == found and len(found) > 3
    assert result.audit_summary()["proved_by_plan"] == 0
    assert f"disagreements: {len(found)}" in result.verdict()
    again = wball.audit(BALL, result.examples["original"], result.examples["adversarial"])
    torch.testing.assert_close(result.images["distance"][found], again.distance)

    def blind(ball: Any, x: Tensor, z: Tensor, plan: Any = None, **rest: Any) -> Any:
        return inner(ball.at(10.0) if plan is not None else ball.at(torch.as_tensor(ball.eps) / 10), x, z, **rest)

    def approves(*args: Any, plan: Any = None, **rest: Any) -> Any:
        report = blind(*args, plan=plan, **rest)
        return report if plan is None else replace(report, exact=torch.zeros_like(report.exact))

    monkeypatch.setattr(checking, "audit", approves)
    result = evaluate(model, x, y, BALL, RADII, attack())
    assert len(result.rejected) == len(result.disagreements) == len(found)
    assert result.accuracy_at(0.4) == result.clean_accuracy and not len(result.examples["index"])


@pytest.mark.parametrize("mass", ["relative", "absolute"])
def test_rounding_is_no_disagreement(mass: Any) -> None:
    """At tiny radii float32 images say less about their distance than a ten-thousandth of it."""
    model, x, y = problem(40)
    ball = wball.WassersteinBall(1e-5 if mass == "relative" else 1e-4, mass=mass)
    found = wball.DualAveraging(ball, steps=6, until_success=False, proofs=True)(model, x, y)
    promised = wball.audit(ball, x, found.images, plan=found.proof, exact="needed")
    assert promised.all_valid and int(promised.exact.sum()) < 20
    everything = np.arange(40)
    for share, wrong in ((1.0, []), (0.5, everything.tolist())):
        images = {
            "found_at": torch.full((40,), float(ball.eps), dtype=torch.float64),
            "distance": share * promised.distance,
            "proof": torch.ones(40).long(),
        }
        found_wrong = checking.check_exactly(
            ball, lambda index: (x[index], found.images[index]), images, everything, [], lambda _: None
        )
        assert found_wrong == wrong
        assert images["proof"].tolist() == [3] * 40


@pytest.mark.filterwarnings("ignore:files of an earlier version")
def test_results_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path, exact="all")
    content = json.loads((tmp_path / "results.json").read_text())
    del content["images"]["proof"], content["disagreements"], content["sha256"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    again = load_evaluation(tmp_path)
    assert torch.equal(again.images["proof"], result.images["proof"])
    assert again.verdict() == result.verdict()


def test_a_sample_of_the_certificates_is_checked(tmp_path: Path) -> None:
    model, x, y = problem(8)
    result = evaluate(model, x, y, BALL, RADII, attack(), certify="crown", out=tmp_path)
    assert result.verification == {"checked": 4, "confirmed": 4, "unconfirmed": [], "unfollowed": 0, "reason": ""}
    assert "independent checker: 4 of 4" in result.verdict()
    assert json.loads((tmp_path / "results.json").read_text())["verification"]["confirmed"] == 4
    assert load_evaluation(tmp_path).verification == result.verification
    assert evaluate(model, x, y, BALL, RADII, attack()).verification is None


def test_certificates_that_are_not_confirmed_make_an_evaluation_unreliable(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem(8)
    prove = batches.certify

    def boastful(*args: Any) -> wball.CertificateResult:
        proof = prove(*args)
        return replace(proof, certified=torch.ones_like(proof.certified))

    monkeypatch.setattr(batches, "certify", boastful)
    result = evaluate(model, x, y, BALL, [5.0], attack(), certify="crown")
    assert result.verification is not None and result.unconfirmed == result.verification["unconfirmed"] != []
    assert not result.reliable and "unconfirmed-certificate" in {w.code for w in result.warnings}
    assert not result.check("certified:5:0")


def test_minimal_radius() -> None:
    model, x, y = problem(5)
    result = evaluate(model, x, y, BALL, "minimal", attack())
    assert result.images["radius"][0] == 0
    for i in range(1, 5):
        exact = exact_radius(model, x[i : i + 1], y[i : i + 1], 0.8)
        radius = float(result.images["radius"][i])
        assert radius >= exact * (1 - 1e-3)
        assert radius <= 1.2 * exact or (exact > 0.35 and math.isinf(radius))
    assert [p.accuracy for p in result.curve()] == sorted((p.accuracy for p in result.curve()), reverse=True)


def test_saved_and_read_back(tmp_path: Path) -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", command="made by a test", data="spots")
    again = load_evaluation(tmp_path / "a")
    written = json.loads((tmp_path / "a" / "results.json").read_text())
    del written["sha256"]
    assert again.to_dict() == result.to_dict() == written
    assert again.provenance["command"] == "made by a test"
    assert again.provenance["versions"]["wball"] == wball.__version__
    assert again.settings["data"]["name"] == "spots"
    for name in ("radius", "distance", "read_as"):
        assert torch.equal(again.images[name], result.images[name])
    assert not (tmp_path / "a" / "batches").exists()
    before = (tmp_path / "a" / "results.json").stat().st_mtime_ns
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", data="spots")
    assert (tmp_path / "a" / "results.json").stat().st_mtime_ns == before
    with pytest.raises(OtherSettings, match="a different seed"):
        evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", data="spots", seed=1)
    with pytest.raises(OtherSettings, match="sha256"):
        evaluate(model, x * 0.5, y, BALL, RADII, attack(), out=tmp_path / "a", data="spots")
    other = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", seed=1, overwrite=True)
    assert other.settings["seed"] == 1


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


def test_interrupted_anywhere_ends_with_the_same_bytes(tmp_path: Path) -> None:
    model, x, y = problem()
    start = attack(random_start=2.0)
    settings: dict[str, Any] = {"batch_size": 3, "seed": 5, "name": "m", "command": "c"}
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


RUN = """
import os, sys
sys.path.insert(0, {here!r})
import torch
from test_evaluate import BALL, RADII, attack, problem
from wball.evaluation import evaluate

def run(folder):
    torch.set_num_threads(1)
    model, x, y = problem(48)
    start = attack(random_start=2.0)
    evaluate(model, x, y, BALL, RADII, start, out=folder, batch_size=4, seed=3, name="m", command="c")
"""

ALONE = RUN + "run(sys.argv[1])"

# Children are forked before torch has done anything, so that only the first one pays for the imports.
KILLED = (
    RUN
    + """
import signal, time

def child(folder):
    pid = os.fork()
    if pid == 0:
        run(folder)
        os._exit(0)
    return pid

assert os.waitpid(child(sys.argv[1]), 0)[1] == 0
begin = time.perf_counter()
assert os.waitpid(child(sys.argv[1] + "-again"), 0)[1] == 0
whole = time.perf_counter() - begin
kills, share = 0, 0.37
for _ in range(10):
    pid = child(sys.argv[2])
    share = (share + 0.618) % 1
    time.sleep(share * whole / 2)
    os.kill(pid, signal.SIGKILL)
    kills += os.waitpid(pid, 0)[1] == signal.SIGKILL
assert os.waitpid(child(sys.argv[2]), 0)[1] == 0
print(kills)
"""
)


def started(script: str, *arguments: str | Path, launcher: tuple[str, ...] = ()) -> str:
    line = [sys.executable, *launcher, *(() if launcher else ("-c", script)), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path) -> None:
    script = KILLED.format(here=str(Path(__file__).parent))
    assert int(started(script, tmp_path / "reference", tmp_path / "killed")) >= 3
    for name in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "reference" / name).read_bytes()
    leftovers = [p.name for p in (tmp_path / "killed").iterdir() if p.name == "batches"]
    assert leftovers == []


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(ALONE.format(here=str(Path(__file__).parent)))
    started(script.read_text(), tmp_path / "one")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    started("", tmp_path / "two", launcher=launcher)
    assert (tmp_path / "one" / "results.json").read_bytes() == (tmp_path / "two" / "results.json").read_bytes()
    ranks = [json.loads(row) for row in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    worked = {(row["rank"], row["batch"]) for row in ranks if row["event"] == "batch"}
    assert worked == {(b % 2, b) for b in range(12)}


def test_one_process_per_folder(tmp_path: Path) -> None:
    model, x, y = problem()
    with locked(tmp_path), pytest.raises(FolderInUse, match="in use"):
        evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path)
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path)


def test_a_file_system_without_locks_is_not_a_folder_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    for wait in (False, True):  # nobody waits for locks that never come
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
    (tmp_path / "b.json").write_text('{"a": ')
    with pytest.raises(ValueError, match="not a complete JSON"):
        read_json(tmp_path / "b.json")
    (tmp_path / "c.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="not a complete safetensors"):
        read_tensors(tmp_path / "c.safetensors")


def test_audit_in_threads_is_the_audit() -> None:
    _, x, _ = problem(40)
    ball = BALL.at(torch.linspace(0.01, 0.4, 40))
    z = BALL.at(0.2).sample(x, torch.Generator().manual_seed(0))
    z[3] *= 0.9
    one, many = wball.audit(ball, x, z), audit_in_threads(ball, x, z)
    assert 0 < one.n_valid < 40
    assert one.to_dict() == many.to_dict()


def test_the_model_is_left_as_found_and_its_oddities_are_reported() -> None:
    model, x, y = problem(4)
    noisy = nn.Sequential(model, nn.Softmax(1), nn.Dropout(0.5))
    noisy.train()
    result = evaluate(noisy, x, y, BALL, 0.1, attack())
    assert all(module.training for module in noisy.modules())
    assert all(p.requires_grad for p in noisy.parameters())
    assert "probabilities" in {w.code for w in result.warnings}
    assert {note.code for note in result.notes} == {"train-mode", "few-classes"}
    assert not result.reliable


def test_what_is_not_a_number_is_not_right() -> None:
    model, x, y = problem(6)
    y = torch.zeros_like(y)  # what argmax makes of NaN
    result = evaluate(lambda z: model(z) * torch.nan, x, y, BALL, RADII, attack())
    assert result.clean_accuracy == 0 and (result.images["predicted"] == -1).all()
    assert [p.accuracy for p in result.curve()] == [0.0] * 4


def test_classes_without_a_name_are_shown_by_number(tmp_path: Path) -> None:
    model, x, y = problem(4)
    result = evaluate(model, x, y, BALL, RADII, attack(), classes=["left"])
    assert len(save_figures([result], tmp_path, "png")) == 3


def test_radii_as_arrays() -> None:
    model, x, y = problem(2)
    for radii in (np.array(RADII), torch.tensor(RADII, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)):
        assert evaluate(model, x, y, BALL, radii, attack()).radii in (RADII, [0.1])  # type: ignore[arg-type]


def test_damaged_files_say_how_to_go_on(tmp_path: Path) -> None:
    model, x, y = problem(4)
    ready = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    parts = {"results.json": ("{", "{}", json.dumps({**content, "images": {}})), "examples.safetensors": ("",)}
    for name, texts in parts.items():
        whole = (tmp_path / name).read_bytes()
        for text in texts:
            (tmp_path / name).write_text(text)
            with pytest.raises(ValueError, match=f"{name} is not? .*overwrite"):
                evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "results.json").write_text("{}")
    again = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path, overwrite=True)
    assert again.summary() == ready.summary()


@pytest.mark.filterwarnings("ignore:files of an earlier version")
def test_files_edited_by_hand_are_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    """Whatever is removed from a file, or replaced by something of another kind: a ValueError, or a result."""
    model, x, y = problem(4)
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "results.json").read_text())
    del content["sha256"]  # as one does who edits
    shutil.copytree(tmp_path / "whole", tmp_path / "edited", ignore=shutil.ignore_patterns("*.safetensors"))

    def places(inside: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for key in inside if isinstance(inside, dict) else range(min(1, len(inside))):
            yield (*path, key)
            if isinstance(inside[key], (dict, list)):
                yield from places(inside[key], (*path, key))

    strange = (..., None, "x", -5, [], {}, 1e400, 10**400)
    refused = allowed = cases = 0
    for path, value in itertools.product(list(places(content, ())), strange):
        cases += 1
        edited = json.loads(json.dumps(content))
        inside = edited
        for key in path[:-1]:
            inside = inside[key]
        if value is ...:
            del inside[path[-1]]
        else:
            inside[path[-1]] = value
        (tmp_path / "edited" / "results.json").write_text(json.dumps(edited))
        try:
            result = load_evaluation(tmp_path / "edited")
        except ValueError as error:
            refused += "results.json is n" in str(error) and "\n" not in str(error)
            continue
        assert result.verdict() and result.summary()
        if path[0] == "settings":
            assert make_content([result], None, 1)
        allowed += 1
    assert refused + allowed == cases and refused > 300
    for name, field in (("settings", "radii"), ("images", "distance")):
        edited = json.loads(json.dumps(content))
        edited[name][field] = "a"
        (tmp_path / "edited" / "results.json").write_text(json.dumps(edited))
        with pytest.raises(ValueError, match=rf"{name}\.{field} is 'a', expected a list"):
            load_evaluation(tmp_path / "edited")


def test_names_of_any_kind_are_stored_as_text(tmp_path: Path) -> None:
    model, x, y = problem(2)
    result = evaluate(model, x, y, BALL, RADII, attack(), name=5, data=Path("a"), command=Path("b"), out=tmp_path)  # type: ignore[arg-type]
    assert (result.name, result.settings["data"]["name"], result.provenance["command"]) == ("5", "a", "b")
    with pytest.raises(ValueError, match="seed"):
        evaluate(model, x, y, BALL, RADII, attack(), seed=2**63)


def test_pictures_of_another_evaluation_are_not_shown(tmp_path: Path) -> None:
    model, x, y = problem(6)
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a")
    evaluate(model, x[:3], y[:3], BALL, [1e-6], attack(), out=tmp_path / "b")
    for name in ("examples.safetensors", "exhibit.safetensors"):
        shutil.copytree(tmp_path / "b", tmp_path / name)
        shutil.copy(tmp_path / "a" / name, tmp_path / name / name)
        with pytest.raises(ValueError, match=r"belong to another results\.json"):
            load_evaluation(tmp_path / name)


@pytest.mark.parametrize("damage", ["notes", "rows", "columns", "done"])
def test_batches_edited_by_hand_are_named_and_computed_again(tmp_path: Path, damage: str) -> None:
    model, x, y = problem(4)
    whole = evaluate(model, x, y, BALL, RADII, attack(), name="m", batch_size=2)
    with pytest.raises(Dies):
        evaluate(Fragile(model, 40), x, y, BALL, RADII, attack(), out=tmp_path, name="m", batch_size=2)
    path = tmp_path / "batches" / "batch-00000.safetensors"
    state, notes = read_tensors(path)
    if damage == "rows":
        state["label"] = state["label"][:1]
    elif damage == "columns":
        del state["certified"]
    write_tensors(path, state, {"notes": [], "done": {**notes, "done": 99}}.get(damage, notes))
    with pytest.warns(UserWarning, match=r"batch-00000.*not a batch of this evaluation.*computed again"):
        again = evaluate(Fragile(model, 10**9), x, y, BALL, RADII, attack(), out=tmp_path, name="m", batch_size=2)
    assert again.summary() == whole.summary()


def test_another_model_with_the_same_weights_is_another_model(tmp_path: Path) -> None:
    model, x, y = problem(4)
    before = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "net", name="m")
    assert evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "net", name="m").summary() == before.summary()
    with pytest.raises(OtherSettings, match="logits for the first"):
        evaluate(nn.Sequential(*model, nn.Tanh()), x, y, BALL, RADII, attack(), out=tmp_path / "net", name="m")
    evaluate(lambda z: model(z), x, y, BALL, RADII, attack(), out=tmp_path / "function")
    with pytest.raises(OtherSettings, match="logits for the first"):
        evaluate(lambda z: model(z).flip(1), x, y, BALL, RADII, attack(), out=tmp_path / "function")

    class Dice(nn.Module):  # random beyond torch's seeds: such a model is known by its weights alone
        def forward(self, z: Tensor) -> Tensor:
            return model(z) + float(np.random.default_rng().random())

    for _ in range(2):
        evaluate(Dice(), x, y, BALL, RADII, attack(), out=tmp_path / "dice")


def test_a_model_that_works_in_place_leaves_the_images_alone() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, z: Tensor) -> Tensor:
            return self.net(z.mul_(3.0))

    model, x, y = problem(6)
    before = x.clone()
    result = evaluate(InPlace(), x, y, BALL, RADII, attack())
    assert torch.equal(x, before) and result.audit_summary()["rejected"] == 0
    assert result.summary()["curve"] == evaluate(model, x, y, BALL, RADII, attack()).summary()["curve"]


def test_exhibit_shows_every_radius() -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, RADII, attack())
    shown = result.exhibit
    assert shown["explorer_radii"].tolist() == RADII
    assert torch.equal(shown["original"], x[shown["index"]])
    assert 0 not in shown["explorer_index"].tolist()  # wrong as it is: nothing to explore
    for k, eps in enumerate(RADII):
        report = wball.audit(BALL.at(eps), x[shown["explorer_index"]], shown["explorer"][:, k])
        assert report.all_valid


def test_other_threat_models() -> None:
    model, x, y = problem()
    ball = wball.LinfBall(0.1)
    result = evaluate(model, x, y, ball, [0.02, 0.1], wball.PGD(ball, steps=5))
    assert result.unit == "pixel value" and result.accuracy_at(0.1) <= result.accuracy_at(0.02)
    stencil = wball.WassersteinBall(
        0.2, cost=wball.StencilCost(((math.inf, 1, math.inf), (1, 0, 1), (math.inf, 1, math.inf)))
    )
    result = evaluate(model, x, y, stencil, attack=wball.DualAveraging(stencil, steps=4))
    json.dumps(result.to_dict(), allow_nan=False)


def test_histograms(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, 5, generator=generator)
    place = torch.arange(5.0)
    ball = wball.WassersteinBall(0.5, wball.DenseCost((place[:, None] - place[None]).abs()))
    model = nn.Linear(5, 2)
    y = model(x).argmax(1)
    result = evaluate(model, x, y, ball, [0.1, 0.5], wball.DualAveraging(ball, steps=5))
    assert result.settings["ball"]["cost"] == "matrix"
    assert result.report(tmp_path / "r.html").is_file()


def test_figures_show_names_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, x, y = problem(4)
    names = ["$x_$", "$5"]
    result = evaluate(model, x, y, BALL, RADII, attack(), name="_a$b$", classes=names)
    paths = save_figures([result, result], tmp_path, "svg")
    assert [p.name for p in paths] == ["accuracy.svg", "radii.svg", "examples-_a-b.svg", "examples-_a-b-2.svg"]
    assert (tmp_path / "accuracy.svg").read_text().count("_a$b$") >= 2  # a legend of two lines
    read_as = names[int(result.images["read_as"].max())]
    assert f"→ {read_as}" in (tmp_path / "examples-_a-b.svg").read_text()


def test_no_figure_takes_the_place_of_another(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, x, y = problem(4)
    second, first = (evaluate(model, x, y, BALL, RADII, attack(), name=name) for name in ("a-2", "a"))
    paths = save_figures([second, first, first], tmp_path, "svg")
    assert [p.stem for p in paths[2:]] == ["examples-a-2", "examples-a", "examples-a-3"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    model, x, y = problem()
    expected = evaluate(model, x, y, BALL, RADII, attack())
    found = evaluate(model.cuda(), x.cuda(), y.cuda(), BALL, RADII, attack(), out=tmp_path, certify="crown")
    assert found.provenance["device"] != "cpu" and not found.rejected
    for one, other in zip(expected.curve(), found.curve(), strict=True):
        assert abs(one.accuracy - other.accuracy) <= 2 / len(x)


def test_bad_arguments_say_what_to_do(tmp_path: Path) -> None:
    model, x, y = problem()
    with pytest.raises(ValueError, match="2 classes"):
        evaluate(model, x, y + 1, BALL)
    with pytest.raises(ValueError, match="does not take images of shape"):
        evaluate(model, x[..., :5], y, BALL)
    with pytest.raises(ValueError, match="radii must be finite"):
        evaluate(model, x, y, BALL, [0.0, 0.1])
    with pytest.raises(ValueError, match="minimal"):
        evaluate(model, x, y, BALL, "smallest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="standard"):
        evaluate(model, x, y, BALL, attack="pgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another threat model"):
        evaluate(model, x, y, BALL, attack=wball.DualAveraging(wball.WassersteinBall(0.1, mass="absolute")))
    with pytest.raises(ValueError, match="exact must be"):
        evaluate(model, x, y, BALL, exact="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of interval"):
        evaluate(model, x, y, BALL, certify="guess")
    with pytest.raises(TypeError, match="Module"):
        evaluate(lambda z: model(z), x, y, BALL, certify=True)
    with pytest.raises(ValueError, match="empty"):
        evaluate(model, x[:0], y[:0], BALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        evaluate(model, x, y, BALL, out=tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"results\.json"):
        load_evaluation(tmp_path)
    (tmp_path / "results.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="other"):
        load_evaluation(tmp_path)
