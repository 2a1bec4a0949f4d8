"""The benchmarks, on a few images: what their rows say, that runs resume, and when they fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wball
from benchmarks import (
    architectures,
    calls,
    growth,
    inputs,
    masks,
    photos,
    predecessors,
    proofs,
    public,
    smoothing,
    soundness,
    steps,
    validity,
)
from benchmarks.masked import MASKS
from benchmarks.networks import KINDS, made
from wball.model import ask

CALLS = ["--device", "cpu", "--images", "2", "--digits", "2", "--steps", "2", "--proofs", "1"]
CALLS += ["--seconds", "0.01", "--model", "mnist-certified"]


def measured(run: Callable[[list[str]], None], out: Path, *words: str) -> dict[str, Any]:
    run([*words, "--out", str(out)])
    assert str(out.parent) not in out.read_text()
    content: dict[str, Any] = json.loads(out.read_text())
    assert content["environment"]["commit"] and content["environment"]["seed"] == 0
    return content


def digits(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    x, y = wball.load_sample("mnist")
    return x[:4], y[:4]


def test_calls_report_the_worst_direction_at_two_radii(tmp_path: Path) -> None:
    words = [*CALLS, "--only", "support, exact, mnist"]
    found = measured(calls.main, tmp_path / "calls.json", *words)
    small, large = found["rows"]
    assert small["call"].endswith("eps 0.05") and large["call"].endswith("eps 0.5")
    for row in found["rows"]:
        assert set(row["kinds"]) == set(inputs.DIRECTIONS)
        assert row["seconds"] == max(row["kinds"].values()) == row["kinds"][row["worst"]] > 0
        assert row["converged"] == row["of"] == 2 and row["kernel"]
    resumed = measured(calls.main, tmp_path / "calls.json", *CALLS, "--only", "sample, mnist")
    assert resumed["rows"][:2] == found["rows"] and len(resumed["rows"]) == 4


def test_smoothing_measures_the_best_pairs_of_network_and_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sure(nn.Module):
        """Answers the digit's label where little noise was added."""

        def forward(self, z: Tensor) -> Tensor:
            noisy = (z.clamp(max=0).abs().sum((1, 2, 3)) > 2000).float()
            return nn.functional.one_hot(torch.full((len(z),), 7), 10) * (1 - 2 * noisy[:, None])

    monkeypatch.setattr(wball, "load_model", lambda name, **_: Sure())
    monkeypatch.setattr(wball, "load_dataset", lambda *_: (digits()[0], torch.full((4,), 7)))
    assert set(smoothing.networks()) > {"levine2020-mnist-flow-0.02"}
    words = ["--device", "cpu", "--screen", "40", "2", "--full", "400", "3", "1"]
    path = tmp_path / "s.json"
    rows = measured(smoothing.main, path, *words, "--networks", "any")["rows"]
    screen = {row["noise"]: row["misses"] for row in rows if row["stage"] == "screen"}
    assert set(screen) == set(smoothing.NOISES) and screen[0.2] == [40, 40]
    full = [row for row in rows if row["stage"] == "full"]
    assert full and all(row["images"] == 3 and row["votes"] == 400 for row in full)
    assert all(row["authors"][eps] <= row["tight"][eps] for row in full for eps in row["tight"])
    assert max(row["authors"]["0.01"] for row in full) == 1.0  # noise of 0.01, unanimous
    assert measured(smoothing.main, path, *words, "--networks", "any")["rows"] == rows


def test_steps_are_measured_against_their_passes(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    words = ["--device", "cpu", "--batch", "2", "--gradients", "2", "--rounds", "1"]
    rows = measured(steps.main, tmp_path / "s.json", *words)["rows"]
    shares = {row["call"]: row["share"] for row in rows}
    assert list(shares) == ["clean step", "passes", "DualAveraging", "PGD(reg=1000)", "PGD"]
    assert shares["passes"] == 1.0 > shares["clean step"] and shares["DualAveraging"] > 1.0
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_growth_has_a_row_for_every_size(tmp_path: Path) -> None:
    words = ["--batch", "10", "--side", "32", "--windows", "3", "--seconds", "0.01"]
    rows = measured(growth.main, tmp_path / "g.json", "--device", "cpu", *words)["rows"]
    assert [(r["grows"], r["batch"], r["window"]) for r in rows if r["call"] == "project"] == [
        ("batch", 1, 5), ("batch", 10, 5), ("side", 1, 5), ("window", 8, 3)
    ]  # fmt: skip
    assert all(r["seconds"] > 0 and r["extra_memory_in_batches"] is None for r in rows)
    assert (tmp_path / "g.png").stat().st_size > 1000


def test_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "classifier", lambda: wball.load_model("mnist-standard"))
    np.savez(tmp_path / "crops.npz", crops=(255 * digits()[0]).byte().numpy())
    words = ["--crops", str(tmp_path / "crops.npz"), "--images", "2", "--attacks", "fast"]
    rows = measured(photos.main, tmp_path / "p.json", "--radii", "0.001", "0.5", *words)["rows"]
    assert rows[0]["accuracy"] == {"0.001": 1.0, "0.5": 0.0}
    assert rows[0]["network_images"] > 0 and rows[0]["network_share"] > 0
    assert len(rows[1]["status"]) == 2


def test_masks_leave_the_network_a_network() -> None:
    net = wball.load_model("mnist-standard").eval()
    x, y = (part[:20] for part in wball.load_sample("mnist"))
    for name, mask in MASKS.items():
        with torch.no_grad():
            assert float((mask.wrap(net)(x).argmax(1) == y).float().mean()) >= 0.6, name


def test_a_mask_that_is_neither_opened_nor_seen_has_fooled_the_attack() -> None:
    row = {"mask": "JPEG-like", "robust": 50.0, "reliable": True}
    assert masks.judged(row, 10.0)["fooled"] and masks.judged(row, 45.0)["opened"]
    assert not masks.judged({**row, "reliable": False}, 10.0)["fooled"]
    assert masks.judged({**row, "mask": "rounding to 1/8", "reliable": False}, 10.0)["fooled"]


def test_an_attack_that_distrusts_everything_has_failed_the_masks() -> None:
    bare = {"mask": masks.NONE, "robust": 10.0, "reliable": False}
    assert masks.judged(bare, 10.0)["fooled"]
    assert not masks.judged({**bare, "reliable": True}, 10.0)["fooled"]
    shut = {"mask": "rounding to 1/8", "robust": 90.0, "reliable": False}
    assert masks.judged(shut, 10.0)["unreliable"] and masks.judged(shut, 10.0)["fooled"]


def test_public_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {case.model for case in public.CASES if not case.architecture}
    assert named <= set(wball.public_models())
    loaded = wball.load_model

    def bundled(name: str, *, root: Path | None = None) -> nn.Module:
        assert name in wball.public_models() and root == tmp_path / "weights"
        return loaded("mnist-standard")

    monkeypatch.setattr(wball, "load_model", bundled)
    monkeypatch.setattr(wball, "load_dataset", digits)
    words = ["--images", "3", "--only", "1", "--device", "cpu"]
    words += ["--models", str(tmp_path / "weights"), "--data", str(tmp_path)]
    (row,) = measured(public.main, tmp_path / "p.json", *words)["rows"]
    assert row["eps"] == 0.25 and 0 <= row["robust"] <= 100 and "reliable" in row


@pytest.mark.parametrize("method", predecessors.METHODS)
def test_predecessors_stay_within_the_budget_and_break_digits(method: str) -> None:
    net, (x, y) = wball.load_model("mnist-standard").eval(), digits()
    attack = predecessors.METHODS[method](x, 0.5)
    for number in range(2):
        attack.step(torch.randn_like(x).clamp(-1, 1), number)
    z = attack.images()
    torch.testing.assert_close(z.sum((1, 2, 3)), x.sum((1, 2, 3)))
    wide = wball.WassersteinBall(0.5, box=(0.0, 100.0))
    assert (wide.distance(x, z) <= 0.5001).all()
    found, rejected = predecessors.broken(net, x, y, 0.5, method, steps=20)
    assert found.any() and rejected == 0
    assert predecessors.ours(net, x, y, 0.5, 100).any()


def test_proofs(tmp_path: Path) -> None:
    words = ["--names", "mnist-certified", "--images", "3", "--radii", "0.01", "--device", "cpu"]
    (row,) = measured(proofs.main, tmp_path / "p.json", *words)["rows"]
    statuses = ("certified", "falsified", "misclassified", "unknown")
    assert sum(row[key] for key in statuses) == pytest.approx(1.0)
    x, y = (part[:3] for part in wball.load_sample("mnist"))
    model = wball.load_model("mnist-certified")
    proof = wball.certify(model, x, y, wball.WassersteinBall(0.01))
    assert row["certified"] == pytest.approx(float(proof.certified.double().mean()))


@dataclass(frozen=True)
class Careless(wball.DualAveraging):
    """Returns one image that has lost mass, and claims that it did not move."""

    def attack_batch(self, *args: Any, **kwargs: Any) -> wball.AttackResult:
        found = super().attack_batch(*args, **kwargs)
        images = found.images.clone()
        images[1] *= 0.99
        return replace(found, images=images, distance=torch.zeros_like(found.distance))


@pytest.mark.parametrize("careless", [False, True])
def test_validity(careless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Careless if careless else wball.DualAveraging
    attack = kind(wball.WassersteinBall(0.1), steps=3, until_success=False)
    monkeypatch.setattr(validity, "load_dataset", digits)
    monkeypatch.setattr(validity, "attacks", lambda: [("attack", attack)])
    out = tmp_path / "v.json"
    words = ["--data", str(tmp_path), "--sets", "mnist", "--device", "cpu", "--out", str(out)]
    if careless:
        with pytest.raises(SystemExit, match="4 images are not in their ball"):
            validity.main(words)  # one at each radius
    else:
        validity.main(words)
    rows = json.loads(out.read_text())["rows"]
    assert [row["eps"] for row in rows] == list(validity.RADII)
    for row in rows:
        assert row["images"] == 4 and row["failures"] == int(careless)
        assert (row["claimed_too_little"] > 0) == careless
        assert careless or 0.9 < row["largest_distance_over_eps"] <= 1.0001


def quick(ball: wball.WassersteinBall, **_: Any) -> wball.DualAveraging:
    return wball.DualAveraging(ball, steps=10, objective="margin")


def test_soundness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soundness, "StandardAttack", quick)
    words = ["--images", "0", "--random", "1", "--small", "3", "--device", "cpu"]
    found = measured(soundness.main, tmp_path / "s.json", *words)
    assert [row["method"] for row in found["rows"]] == ["crown", "anchored"]
    for row in found["rows"]:
        assert row["contradictions"] == row["below_the_bound"] == 0 < row["images"]
        assert 0 < row["bound_reached"] <= 1 and row["radius"]["median"] > 0
    before = (tmp_path / "s.json").read_text()
    with pytest.MonkeyPatch.context() as patch:  # killed while it writes
        patch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            soundness.main([*words, "--random", "2", "--out", str(tmp_path / "s.json")])
    assert (tmp_path / "s.json").read_text() == before


ARCHITECTURES = ["LeNet-5", "spectral norm by hooks", "top-1"]


def test_architectures_are_followed_or_refused_in_words(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--seconds", "5", "--only", *ARCHITECTURES]
    rows = measured(architectures.main, tmp_path / "a.json", *words)["rows"]
    found = {row["name"].split(" (")[0]: row for row in rows}
    assert len(rows) == 3
    refused = found.pop("hard mixture of experts")
    assert not refused["followed"] and not refused["raw"] and "argmax" in refused["reason"]
    for row in found.values():
        assert row["followed"] and row["certified"] > 0 and row["radius"] > 1e-4
        assert row["verified"] == "confirmed" and row["below"] == 0


@pytest.mark.slow
def test_architectures_fail_on_a_wrong_bound_and_on_an_error_of_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify = architectures.certify

    def wrong(*a: Any, **k: Any) -> Any:
        return replace(found := certify(*a, **k), margin=found.margin + 1.0)

    words = ["--device", "cpu", "--seconds", "5", "--out", str(tmp_path / "a.json")]
    with monkeypatch.context() as patch:
        patch.setattr(architectures, "certify", wrong)
        with pytest.raises(SystemExit, match=r"wrong bounds: \['LeNet"):
            architectures.main([*words, "--only", ARCHITECTURES[0]])

    def raw(*a: Any, **k: Any) -> None:
        torch.zeros(2) + torch.zeros(3)

    monkeypatch.setattr(architectures, "certify", raw)
    with pytest.raises(SystemExit, match=r"not sentences: \['"):
        architectures.main([*words, "--only", ARCHITECTURES[1]])


def test_every_architecture_answers_and_has_a_name_of_its_own() -> None:
    assert len(KINDS) >= 120 and len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS[::9]:
        x = architectures.images(kind.channels, "cpu")
        logits = ask(made(kind), x)
        assert logits.shape == (2, 10) and torch.equal(logits, ask(made(kind), x)), kind.name


def test_wrong_certificates_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certify = soundness.certify

    def far(model: nn.Module, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((len(x),), 1.0)

    def wrong(*a: Any, **k: Any) -> Any:
        return replace(found := certify(*a, **k), margin=torch.ones_like(found.margin))

    monkeypatch.setattr(soundness, "StandardAttack", quick)
    monkeypatch.setattr(soundness, "certified_radius", far)
    monkeypatch.setattr(soundness, "certify", wrong)
    words = ["--images", "0", "--random", "1", "--small", "3", "--device", "cpu"]
    with pytest.raises(SystemExit, match="a certificate is wrong"):
        soundness.main([*words, "--out", str(tmp_path / "s.json")])
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert sum(row["contradictions"] for row in rows) > 0
    assert sum(row["below_the_bound"] for row in rows) > 0
