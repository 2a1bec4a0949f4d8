"""The benchmark of training's adversaries, on a few digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import strength
from wball import load_model, load_sample
from wball.attacks import Attack
from wball.training.presets import preset


def test_the_adversary_of_training_is_among_them() -> None:
    adversary = preset("mnist-adversarial").adversary
    assert adversary is not None
    eps = adversary.attack.ball.eps
    assert adversary.attack in strength.adversaries(eps).values()


def test_shares_are_those_of_the_attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def two(eps: float) -> dict[str, Attack]:
        every = {
            name: attack
            for name, attack in adversaries(eps).items()
            if name in ("12 steps of 5 nats", few)
        }
        assert len(every) == 2
        return every

    adversaries, few, out = strength.adversaries, "8 steps of 20 nats", tmp_path / "strength.json"
    monkeypatch.setattr(strength, "adversaries", two)
    small = ["--model", "mnist-standard", "--eps", "0.1", "--images", "24", "--device", "cpu"]
    strength.main([*small, "--out", str(out)])
    found = json.loads(out.read_text())
    x, y = (part[:24] for part in load_sample("mnist"))
    images = adversaries(0.1)[few](load_model("mnist-standard"), x, y).images
    left = (load_model("mnist-standard")(images).argmax(1) == y).float().mean()
    assert found["images"] == 24 and 0 < float(left) < 1
    assert {row["adversary"]: row["withstand"] for row in found["rows"]}[few] == pytest.approx(
        float(left)
    )
    assert str(tmp_path) not in out.read_text() and found["environment"]["commit"]
