"""The benchmark of public networks, on one of the zoo in their place and a few digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor, nn

import wball
from benchmarks import public


def test_rows_say_what_each_version_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, sample = wball.load_model, wball.load_sample("mnist")

    def stands_in(name: str, *, root: Path | None = None) -> nn.Module:
        assert name in wball.public_models() and root == tmp_path / "weights"
        return loaded("mnist-standard")

    def digits(name: str, root: Path) -> tuple[Tensor, Tensor]:
        return sample

    monkeypatch.setattr(wball, "load_model", stands_in)
    monkeypatch.setattr(wball, "load_dataset", digits)
    out = tmp_path / "public.json"
    few = [
        "--images",
        "3",
        "--only",
        "1",
        "--device",
        "cpu",
        "--data",
        str(tmp_path),
        "--out",
        str(out),
    ]
    public.main([*few, "--zoo", "0", "--models", str(tmp_path / "weights")])
    found = json.loads(out.read_text())
    assert [row["version"] for row in found["rows"]] == ["standard-1", "standard"]
    assert all(row["reliable"] and 0 <= row["robust"] <= 100 for row in found["rows"])
    assert {row["eps"] for row in found["rows"]} == {0.25} and str(tmp_path) not in out.read_text()


def test_every_check_names_a_public_network() -> None:
    assert {name for name, *_ in public.CHECKS} <= set(wball.public_models())
    assert all(goal <= stated for _, _, stated, goal in public.CHECKS)
