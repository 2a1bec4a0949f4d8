"""The benchmarks of exact solvers and of certificates, on a few images."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import exact, proving
from wball import WassersteinBall, certify, load_model, load_sample


def test_both_kernels_solve_the_same_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", "auto")
    digits = exact.mnist(None, torch.device("cpu"))
    small = replace(digits, x=digits.x[:1, :, 11:17, 11:17])  # whole images take torch seconds
    monkeypatch.setattr(exact, "BATCH", {"mnist": 1})
    for name in ("mnist", "cifar10"):
        monkeypatch.setattr(exact, name, lambda *_: small)
    out = tmp_path / "exact.json"
    exact.main(["--seconds", "0.01", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    works = {row["work"] for row in rows}
    assert {(row["work"], row["kernel"]) for row in rows} == {
        (w, k) for w in works for k in ("torch", "cpu")
    }
    assert len(works) == 3 and all(
        row["converged"] and row["processor_ms_per_image"] > 0 for row in rows
    )
    assert os.environ["WBALL_KERNEL"] == "auto", "what the user asked for is asked for again"


def test_shares_are_those_of_certify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving, "DIGITS", (0.01, 0.1))
    monkeypatch.setattr(proving, "COLOUR", (1e-3,))
    every = proving.cases
    monkeypatch.setattr(
        proving, "cases", lambda count: [case for case in every(count) if "plain" in case[0]]
    )
    out = tmp_path / "proving.json"
    proving.main(["--images", "4", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    x, y = (part[:4] for part in load_sample("mnist"))
    for row in rows[:2]:
        found = certify(
            load_model("mnist-certified"), x, y, WassersteinBall(row["eps"]), method="crown"
        )
        assert row["certified"] == pytest.approx(float(found.certified.double().mean()))
    assert len(rows) == 3 and rows[0]["certified"] > rows[1]["certified"], (
        "plain CROWN fails at 0.1"
    )
    assert all(row["seconds_per_image"] > 0 for row in rows)
