"""The validity benchmark: it counts what the audit finds, and fails when there is something to find."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wball
from wball import AttackResult, DualAveraging, WassersteinBall

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import validity


@dataclass(frozen=True)
class Careless(DualAveraging):
    """Returns one image that has lost mass, and claims that it did not move."""

    def attack_batch(self, *args: Any, **kwargs: Any) -> AttackResult:
        found = super().attack_batch(*args, **kwargs)
        images = found.images.clone()
        images[1] *= 0.99
        return replace(found, images=images, distance=torch.zeros_like(found.distance))


def sample(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    x, y = wball.load_sample("mnist")
    return x[:4], y[:4]


@pytest.mark.parametrize("careless", [False, True])
def test_command(careless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Careless if careless else DualAveraging
    attack = kind(WassersteinBall(0.1), steps=3, until_success=False)
    monkeypatch.setattr(validity, "load_dataset", sample)
    monkeypatch.setattr(validity, "KINDS", (kind.__name__,))
    monkeypatch.setattr(validity, "attacks", lambda data, count: [("attack", attack, count)])
    arguments = [
        "--data",
        str(tmp_path),
        "--sets",
        "mnist",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "out" / "v"),
    ]
    if careless:
        with pytest.raises(
            SystemExit, match="4 images are not in their ball"
        ):  # one at each radius
            validity.main([*arguments, "--device", "cpu"])
    else:
        validity.main([*arguments, "--device", "cpu"])
    written = json.loads((tmp_path / "out" / "v.json").read_text())
    assert [row["eps"] for row in written["rows"]] == list(validity.RADII)
    for row in written["rows"]:
        assert row["images"] == 4 and row["failures"] == int(careless)
        assert (row["claimed_too_little"] > 0) == careless
        assert careless or 0.9 < row["largest_distance_over_eps"] <= 1.0001
    text = (tmp_path / "out" / "v.md").read_text()
    assert (
        f"16 images audited, {4 * careless} failures" in text
        and ("mass is off" in text) == careless
    )
    assert str(tmp_path) not in json.dumps(written["environment"])


def test_every_attack_is_sized_for_its_set() -> None:
    for data, count in validity.IMAGES.items():
        named = list(validity.attacks(data, count))
        assert [images for _, _, images in named[:2]] == [count, count]
        assert [type(attack).__name__ for _, attack, _ in named] == list(validity.KINDS)
        assert all(images <= 7 for _, _, images in validity.attacks(data, 7)) and len(named) == 4
