"""The soundness benchmark: it counts contradictions, and fails when a certificate is wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wball

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import soundness

QUICK = ["--images", "0", "--random", "1", "--small", "3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def attack(ball: wball.WassersteinBall, **_: Any) -> wball.DualAveraging:
        return wball.DualAveraging(ball, steps=10, objective="margin")

    monkeypatch.setattr(soundness, "StandardAttack", attack)


def test_command_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.json"
    soundness.main([*QUICK, "--seconds", "0", "--out", str(out)])
    assert not out.exists()
    soundness.main([*QUICK, "--out", str(out)])
    written = json.loads(out.read_text())
    assert [row["method"] for row in written["rows"]] == ["crown", "anchored"]
    assert written["summary"] == {
        "models": 1,
        "images": 6,
        "contradictions": 0,
        "below_the_bound": 0,
    }
    assert all(
        0 < row["bound_reached"] <= 1 and row["radius"]["median"] > 0 for row in written["rows"]
    )
    before = out.read_text()
    with pytest.MonkeyPatch.context() as patch:  # killed while it writes
        patch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            soundness.main([*QUICK, "--random", "2", "--out", str(out)])
    assert out.read_text() == before
    soundness.main([*QUICK, "--out", str(out)])
    assert out.read_text() == before


def test_wrong_certificates_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        soundness, "certified_radius", lambda model, x, *_, **__: torch.full((len(x),), 1.0)
    )
    certify = soundness.certify
    monkeypatch.setattr(
        soundness,
        "certify",
        lambda *a, **k: replace(r := certify(*a, **k), margin=torch.ones_like(r.margin)),
    )
    with pytest.raises(SystemExit, match="a certificate is wrong"):
        soundness.main([*QUICK, "--out", str(tmp_path / "s.json")])
    found = json.loads((tmp_path / "s.json").read_text())["summary"]
    assert found["contradictions"] > 0 and found["below_the_bound"] > 0


def test_every_kind_of_network_is_supported() -> None:
    x = torch.rand(1, 1, 14, 14)
    for seed in range(soundness.KINDS):
        net = soundness.random_network(seed)
        assert torch.isfinite(
            wball.certify(net, x, soundness.said(net, x), wball.WassersteinBall(0.001)).margin
        ).all()
