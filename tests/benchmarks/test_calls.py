"""``python -m benchmarks calls``: every public call that the documentation speaks of is timed and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.calls import main
from benchmarks.origin import environment


def test_commands_name_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images, weights = tmp_path / "images", tmp_path / "weights"
    monkeypatch.setattr("sys.argv", ["bench", "--models", str(weights), "--data", str(images)])
    command = environment("cpu", images)["command"]
    assert command.endswith("--models weights --data DATA") and str(tmp_path) not in command


def test_calls_are_timed_and_judged(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    few = [
        "--device",
        "cpu",
        "--images",
        "2",
        "--digits",
        "2",
        "--steps",
        "2",
        "--proofs",
        "1",
        "--seconds",
        "0.01",
    ]
    main([*few, "--model", "mnist-certified", "--only", "mnist x 2", "--out", str(out)])
    found = json.loads(out.read_text())
    rows = {row["call"].partition(",")[0]: row for row in found["rows"]}
    assert {"project", "support", "sample"} <= rows.keys() and found["environment"]["commit"]
    for row in found["rows"]:
        assert row["seconds"] > 0 and row["target_seconds"] is None
        if "project," in row["call"] or "support" in row["call"]:
            assert row["converged"] == row["of"] == 2 and row["kernel"]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    few = [
        "--device",
        "cpu",
        "--images",
        "2",
        "--digits",
        "2",
        "--proofs",
        "1",
        "--seconds",
        "0.01",
        "--out",
        str(out),
    ]
    few += ["--model", "mnist-certified", "--resume", "--only"]
    main([*few, "sample, mnist"])
    (before,) = json.loads(out.read_text())["rows"]
    main([*few, "sample"])
    kept, more = json.loads(out.read_text())["rows"]
    assert kept == before and more["call"].startswith("sample, cifar10")


@pytest.mark.slow
def test_attacks_and_certificates_are_among_them(tmp_path: Path) -> None:
    out = tmp_path / "calls.json"
    few = [
        "--device",
        "cpu",
        "--images",
        "1",
        "--digits",
        "2",
        "--steps",
        "2",
        "--proofs",
        "1",
        "--seconds",
        "0.01",
    ]
    for only in ("DualAveraging", "certify"):
        main([*few, "--model", "mnist-certified", "--only", only, "--out", str(out)])
        (row,) = json.loads(out.read_text())["rows"]
        assert row["call"].startswith(only) and ("robust_accuracy" in row or "certified" in row)
