"""Evaluations with complete certificates: counterexamples count, and an interruption changes nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wball
from evaluation.linear import problem

batches = importlib.import_module("wball.evaluation.batches")


class Interrupted(Exception):
    pass


@pytest.mark.slow  # test_resuming.py does the same without certificates
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_interrupted_evaluation_with_complete_certificates_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.rand(6, 1, 3, 3)
    y, ball = model(x).argmax(1), wball.WassersteinBall(0.1)
    proved: list[int] = []
    prove = batches.certify

    def certify(model: nn.Module, images: torch.Tensor, *rest: Any) -> wball.CertificateResult:
        if len(proved) == 2:
            proved.append(0)  # once
            raise Interrupted
        proved.append(len(images))
        found: wball.CertificateResult = prove(model, images, *rest)
        return found

    monkeypatch.setattr(batches, "certify", certify)

    def run(folder: Path) -> wball.Evaluation:
        attack = wball.DualAveraging(ball, steps=5)
        settings: dict[str, Any] = {
            "batch_size": 2,
            "name": "m",
            "command": "c",
            "certify": "complete",
        }
        return wball.evaluate(model, x, y, ball, [0.05, 0.1], attack, out=folder, **settings)

    with pytest.raises(Interrupted):
        run(tmp_path / "a")
    before = len(proved)
    resumed = run(tmp_path / "a")
    assert len(proved) - before < 6  # the batch that was finished is not proved again
    whole = run(tmp_path / "b")
    assert resumed.images["certified"].tolist() == whole.images["certified"].tolist()
    assert (tmp_path / "a" / "results.json").read_bytes() == (
        tmp_path / "b" / "results.json"
    ).read_bytes()
    assert float(whole.images["certified"].max()) == 0.1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_counterexamples_count_as_broken() -> None:
    (model, x, _), ball = problem(4), wball.WassersteinBall(1.0)
    y = model(x).argmax(1)
    timid = wball.DualAveraging(ball, steps=1, step_size=1e-12)  # breaks nothing
    result = wball.evaluate(model, x, y, ball, [1.0], timid, certify="complete")
    broken = result.images["read_as"] >= 0
    assert broken.any()
    assert (broken | (result.images["certified"] == 1.0)).all()  # every image is decided
    assert (result.images["member"][broken] == -1).all()
    assert not result.rejected
    assert wball.audit(
        ball, result.examples["original"], result.examples["adversarial"]
    ).valid.all()
    assert (model(result.examples["adversarial"]).argmax(1) != y[broken]).all()
