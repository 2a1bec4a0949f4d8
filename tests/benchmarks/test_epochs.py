"""The benchmark of training times, on a few images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks import epochs
from wball import load_sample
from wball.training.presets import override, preset


def test_times_the_second_epoch_and_records_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return load_sample("mnist")

    small = {"architecture": "mnist-cnn", "batch_size": 16, "adversary.attack.steps": 1}
    monkeypatch.setattr(epochs, "load_dataset", sample)
    monkeypatch.setattr(
        epochs, "CASES", {"small": ("mnist-adversarial", small, 10.0), "other": ("none", {}, None)}
    )
    out = tmp_path / "epochs.json"
    epochs.main(
        [
            "--data",
            str(tmp_path),
            "--device",
            "cpu",
            "--images",
            "32",
            "--only",
            "small",
            "--out",
            str(out),
        ]
    )
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert (
        row["images"] == 32
        and row["seconds"] >= 0
        and row["target_seconds"] == 10.0
        and row["changes"] == small
    )
    assert str(tmp_path) not in out.read_text() and written["environment"]["commit"]


def test_every_case_is_a_preset_with_settings_it_has() -> None:
    for title, (name, changes, _) in epochs.CASES.items():
        config = preset(name)
        for path, value in changes.items():
            config = override(config, path, value)
        said = re.search(r"(\d+) steps", title)
        assert (
            said is None
            or config.adversary is not None
            and config.adversary.attack.steps == int(said[1])
        )


def test_a_case_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        epochs.main(["--data", str(tmp_path), "--only", "nothing"])
    assert "CIFAR-10, ResNet-18, standard" in capsys.readouterr().err
