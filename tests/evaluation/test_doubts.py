"""What an evaluation says for and against its own numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn

import wball
from evaluation.linear import BALL, Claims, measure, problem
from wball.attacks.findings import Finding
from wball.evaluation import (
    Comparison,
    Evaluation,
    EvaluationWarning,
    Requirement,
    confidence_interval,
    exit_code,
    load_evaluation,
)
from wball.evaluation import evaluate as run
from wball.evaluation.doubts import as_warnings


class FourClasses(nn.Module):
    """The brightest quarter of an image; no notice about few classes."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1) * 20


def images(count: int = 20) -> tuple[Tensor, Tensor]:
    """One bright quarter each, clear enough to survive small moves."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(count, 1, 6, 6, generator=generator) * 0.2, torch.arange(count) % 4
    for k, c in enumerate(y.tolist()):
        x[k, :, 3 * (c // 2) : 3 * (c // 2) + 3, 3 * (c % 2) : 3 * (c % 2) + 3] += 0.4
    return x, y


@pytest.fixture(scope="module")
def sound() -> Evaluation:
    return run(
        FourClasses(),
        *images(),
        BALL,
        [0.01, 0.02],
        wball.DualAveraging(BALL, steps=5),
        certify=False,
    )


def test_intervals_are_clopper_and_pearsons() -> None:
    for count, total in ((0, 1), (1, 1), (0, 40), (7, 40), (40, 40), (316, 1000)):
        want = binomtest(count, total).proportion_ci(0.95, method="exact")
        assert confidence_interval(count, total) == pytest.approx((want.low, want.high), abs=1e-9)
    with pytest.raises(ValueError, match="got 3 of 2"):
        confidence_interval(3, 2)


def test_models_are_compared_by_a_paired_test(sound: Evaluation) -> None:
    for alone, said in (((9, 1), "a is more robust than b"), ((1, 3), "b is not distinguishable")):
        found = Comparison(0.1, ("a", "b"), alone)
        assert found.p_value == pytest.approx(binomtest(alone[0], sum(alone)).pvalue)
        assert str(found).startswith(said)
    assert sound.compare(sound, 0.01).alone == (0, 0)
    assert (
        sound.compare(sound, 0.01).p_value == 1 and not sound.compare(sound, 0.01).distinguishable
    )
    with pytest.raises(ValueError, match="different images"):
        sound.compare(measure(*problem()), 0.01)


def test_a_sound_evaluation_is_reliable(sound: Evaluation, tmp_path: Path) -> None:
    assert sound.reliable and sound.warnings == () and exit_code([sound]) == 0
    assert "NOT RELIABLE" not in sound.verdict()
    sound.save(tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert (
        written["reliable"] is True
        and written["warnings"] == []
        and written["summary"]["reliable"] is True
    )
    for point in sound.curve():
        assert point.interval[0] <= point.accuracy <= point.interval[1]


def test_requirements(sound: Evaluation) -> None:
    assert sound.accuracy_at(0.02) == 1.0  # 20 of 20: the interval starts at 0.83
    met = sound.check(["0.02:0.8", Requirement(0.01, 0.5)])
    assert met and met.met and str(met).count("met:") == 2
    missed = sound.check("0.02:0.9")
    assert not missed and "evaluate more images" in missed.checks[0].reason
    assert exit_code([sound], ["0.02:0.8"]) == 0 and exit_code([sound], ["0.02:0.9"]) == 7
    uncertified = sound.check("certified:0.01:0.1")
    assert not uncertified and uncertified.checks[0].measured is None
    doubtful = replace(sound, warnings=(EvaluationWarning("zero-gradient", "seen", "look"),))
    decision = doubtful.check("0.02:0.1")
    assert not decision and "not reliable: zero-gradient" in str(decision)
    assert exit_code([sound, doubtful], ["0.02:0.1"]) == 6
    claims = replace(sound, rejected=({"index": 0, "eps": 0.1, "reason": "far"},))
    assert not claims.reliable and exit_code([claims, doubtful]) == 3
    with pytest.raises(ValueError, match="was not evaluated"):
        sound.check("0.015:0.5")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.1",
        "0.1:80",
        "a:b",
        "0.1:0.5:2",
        "-1:0.5",
        "proved:0.1:0.5",
        "xcertified:1:1",
        "nan:0.5",
    ],
)
def test_requirements_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be RADIUS:SHARE or certified:RADIUS:SHARE"):
        Requirement.parse(text)


def test_certified_requirements() -> None:
    result = measure(*problem(20), radii=[0.01], certify=True)
    assert result.check("certified:0.01:0.7").met and result.check("certified:0.005:0.7").met
    assert not result.check("certified:0.01:0.99").met


def test_what_an_attack_missed_makes_an_evaluation_unreliable(tmp_path: Path) -> None:
    """At a radius where other images are in reach, an attack that finds nothing is caught without
    gradients."""
    x, y = images()
    ball = wball.WassersteinBall(20.0, cost=wball.GridCost(11))
    result = run(FourClasses(), x, y, ball, 20.0, Claims(ball, how="nothing"), out=tmp_path)
    assert result.accuracy_at(20.0) == 1.0
    assert {w.code for w in result.warnings} == {"missed-example"} and not result.reliable
    assert "NOT RELIABLE: missed-example" in result.verdict()
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["reliable"] is False
    assert (
        written["warnings"][0].keys() == {"code", "message", "remedy"}
        and written["warnings"][0]["remedy"]
    )
    assert load_evaluation(tmp_path).warnings == result.warnings


def test_what_the_attack_dealt_with_is_no_reason_to_doubt() -> None:
    zero, mode = EvaluationWarning("zero-gradient", "seen"), EvaluationWarning("train-mode", "seen")
    doubts, notes = as_warnings([], [zero, mode])
    assert doubts == (zero,) and notes == (mode,)
    doubts, notes = as_warnings([Finding("stand-in-gradients", 9, 9)], [zero, mode])
    assert doubts == () and [n.code for n in notes] == ["stand-in-gradients", "train-mode"]
    doubts, _ = as_warnings([Finding("masked-gradients", 9, 9)], [zero])
    assert [d.code for d in doubts] == ["masked-gradients"] and doubts[0].remedy


def test_findings_of_the_attack_add_up_over_batches_and_survive_storage(tmp_path: Path) -> None:
    x, y = images()
    result = run(
        FourClasses(),
        x,
        y,
        BALL,
        [0.01, 0.02],
        Claims(BALL, how="nothing", codes=("black-box-stronger",)),
        batch_size=6,
        out=tmp_path,
    )
    (warning,) = result.warnings
    assert warning.code == "black-box-stronger" and warning.message.startswith(
        "a search without gradients broke 20 of 20 images"
    )
    assert load_evaluation(tmp_path).warnings == (warning,) and exit_code([result]) == 6
