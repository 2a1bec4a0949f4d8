"""What attacks leave of trained networks, measured in chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import wball
from benchmarks import defended
from wball.training import accuracy, robust_accuracy


def test_shares_are_those_of_the_attack_and_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (part[20:44] for part in wball.load_sample("mnist"))
    monkeypatch.setattr(wball, "load_dataset", lambda *_: wball.load_sample("mnist"))
    model, file, out = (
        wball.load_model("mnist-standard"),
        tmp_path / "mine.safetensors",
        tmp_path / "defended.json",
    )
    wball.save_weights(model, file)
    words = [
        f"mine=mnist-cnn:{file}",
        "--data",
        str(tmp_path),
        "--eps",
        "0.1",
        "0.05",
        "--attack",
        "dual",
    ]
    words += [
        "--first",
        "20",
        "--images",
        "24",
        "--chunk",
        "16",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    defended.main([*words, "--time-limit", "1e-9"])
    assert not out.exists()
    defended.main(words)
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert (
        row["attacked"] == 24
        and found["eps"] == [0.05, 0.1]
        and str(tmp_path) not in out.read_text()
    )
    assert row["clean"] == pytest.approx(accuracy(model, x, y))
    for eps in found["eps"]:
        left = robust_accuracy(model, x, y, defended.attack("dual", eps))
        assert row["robust"][f"{eps:g}"] == pytest.approx(left) and 0 < left < 1
    defended.main(words)
    assert json.loads(out.read_text())["rows"] == found["rows"]  # nothing is attacked twice
    with pytest.raises(SystemExit, match="another --out"):
        defended.main([*words, "--images", "12"])


def test_a_network_is_a_name_an_architecture_and_a_file() -> None:
    with pytest.raises(SystemExit, match="NAME=ARCHITECTURE:FILE"):
        defended.Network.of("mnist-standard")
