"""Evaluations: what is counted, and what is not."""

from __future__ import annotations

import importlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ot
import pytest
import torch
from torch import Tensor, nn

import wball
from evaluation.linear import BALL, RADII, Claims, attack, measure, problem
from wball.evaluation import evaluate, exit_code, load_evaluation
from wball.evaluation.batches import Batches
from wball.evaluation.stream import open_stream

batches = importlib.import_module("wball.evaluation.batches")


def exact_radius(model: nn.Module, x: Tensor, y: Tensor, hi: float) -> float:
    """The smallest radius that breaks a linear model, by bisection on the support function."""
    weight = (model[1].weight[1 - y] - model[1].weight[y]).detach().reshape(x.shape).double()
    low, high = 0.0, hi
    for _ in range(14):
        middle = (low + high) / 2
        upper = float(wball.WassersteinBall(middle).support(x.double(), weight).upper)
        low, high = (low, middle) if upper > 0 else (middle, high)
    return high


def test_numbers_agree_with_the_exact_radii_of_a_linear_model() -> None:
    model, x, y = problem(8)
    result = measure(model, x, y, name="halves", certify="crown")
    assert result.clean_accuracy == pytest.approx(7 / 8)
    exact = [0.0] + [exact_radius(model, x[i : i + 1], y[i : i + 1], 0.8) for i in range(1, 8)]
    for eps in RADII:
        # no attack beats the exact radius and no certificate exceeds it; on a linear model both are
        # nearly tight
        least = sum(r > eps for r in exact) / 8
        assert result.accuracy_at(eps) >= least - 1e-9
        assert result.accuracy_at(eps) <= sum(r > 0.9 * eps for r in exact) / 8 + 1e-9
        certified = result.certified_at(eps)
        assert certified is not None and certified <= least + 1e-9
        assert certified <= result.accuracy_at(eps)
    assert result.contradictions == []
    assert result.curve()[0].eps == 0 and result.curve()[0].accuracy == result.clean_accuracy
    found = result.images["read_as"] >= 0
    assert found.any()
    report = wball.audit(BALL, result.examples["original"], result.examples["adversarial"])
    assert report.all_valid
    torch.testing.assert_close(report.distance, result.images["distance"][found])
    assert bool(
        (result.images["distance"][found] <= result.images["radius"][found] * (1 + 1e-4)).all()
    )
    index = result.examples["index"]
    assert torch.equal(result.examples["original"], x[index])
    assert torch.equal(
        model(result.examples["adversarial"]).argmax(1), result.images["read_as"][index]
    )


def test_numbers_that_were_not_measured_are_not_shown() -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, [0.1, 0.4], attack())
    found = result.images["found_at"] == 0.4
    assert found.any() and bool((result.images["distance"][found] <= 0.4).all())
    # Exact distances bound the accuracy between two radii.
    assert result.accuracy_at(0.1) >= result.accuracy_bound_at(0.399) >= result.accuracy_at(0.4)
    for eps in (0.2, 0.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"was not evaluated, the radii are 0, 0.1, 0.4"):
            result.accuracy_at(eps)
    assert [p.eps for p in result.curve([0.0, 0.1, 0.2, 0.4, 0.5]) if p.measured] == [0, 0.1, 0.4]
    assert all(p.certified is None and p.certified_interval is None for p in result.curve())
    written = result.to_dict()
    assert written["images"]["certified"] == [None] * len(x)
    assert {point["certified"] for point in written["summary"]["curve"]} == {None}


@pytest.mark.parametrize(
    ("how", "reason"),
    [("copy", "classifies"), ("darken", "mass is off"), ("mirror", "no plan|distance|classifies")],
)
def test_claims_that_do_not_hold_are_not_counted(how: str, reason: str) -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, [0.1, 0.2], Claims(BALL, how=how), batch_size=5)
    assert result.accuracy_at(0.2) == result.clean_accuracy
    assert (
        len(result.rejected) == 2 * 11
    )  # claimed again at each radius, and never for the image that is wrong
    assert {r["index"] for r in result.rejected} == set(range(1, 12))
    for entry in result.rejected:
        assert any(word in entry["reason"] for word in reason.split("|"))
    assert result.audit_summary()["rejected"] == 22 and "22 rejected" in result.verdict()


def test_claims_that_rounding_decides_are_not_counted_and_no_fault_of_the_attack() -> None:
    def tied(x: Tensor) -> Tensor:
        """Nearly the same logits for every image: the first class by less than rounding, the rest
        far below."""
        edge, clear = x.new_tensor([[1.0 + 1e-6, 1.0, -1.0], [1.0, 0.0, -1.0]])
        logits = torch.where(x[:, :1, 0, 0] > 0.5, edge, clear)
        return logits + 0 * x.flatten(1).sum(1, keepdim=True)

    _, x, _ = problem()
    x, y = x.clone(), torch.zeros(len(x), dtype=torch.long)
    x[:, :, 0, 0] = 0.0
    x[0, :, 0, 0] = 1.0
    one = evaluate(tied, x, y, BALL, [0.1], Claims(BALL))
    assert one.accuracy_at(0.1) == 1.0 and {r["index"] for r in one.rejected} == set(
        range(1, len(x))
    )
    assert "tied-answers" in {note.code for note in one.notes}  # one of them is an accident
    x[:, :, 0, 0] = 1.0
    all_of_them = evaluate(tied, x, y, BALL, [0.1], Claims(BALL))
    assert all_of_them.accuracy_at(0.1) == 1.0 and not all_of_them.rejected
    assert "tied-answers" in {w.code for w in all_of_them.warnings} and not all_of_them.reliable


def test_plans_are_proof_and_a_sample_is_checked_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "SAMPLE_LEAST", 2)
    solved = []
    inner = ot.emd
    monkeypatch.setattr(ot, "emd", lambda *a, **k: solved.append(1) or inner(*a, **k))
    model, x, y = problem(40)
    result = measure(model, x, y, out=tmp_path / "a")
    found = result.images["read_as"] >= 0
    at = [int((result.images["found_at"] == eps).sum()) for eps in RADII]
    sampled = sum(min(2, n) for n in at)
    audit = result.audit_summary()
    assert int(found.sum()) > sampled > 0
    assert len(solved) == sampled == audit["both"] == audit["exact_transport"]
    assert audit["proved_by_plan"] == int(found.sum()) - sampled and audit["disagreements"] == []
    assert f"sampled exact check: {sampled}, disagreements: 0" in result.verdict()
    words = json.loads((tmp_path / "a" / "results.json").read_text())["images"]["proof"]
    assert [w is not None for w in words] == found.tolist()
    assert words.count("plan, exact") == sampled and words.count("plan") == audit["proved_by_plan"]

    every = measure(model, x, y, exact="all")
    assert (
        every.audit_summary()["exact_transport"] == int(found.sum())
        and every.audit_summary()["both"] == 0
    )
    assert f"exact transport: {int(found.sum())}" in every.verdict()
    assert torch.equal(every.examples["adversarial"], result.examples["adversarial"])
    assert torch.equal(every.images["found_at"], result.images["found_at"])
    over = result.images["distance"][found] / every.images["distance"][found]
    assert bool((over >= 1 - 1e-6).all()) and bool(
        (over[result.images["proof"][found] == 3] <= 1 + 1e-9).all()
    )
    assert all(r.accuracy <= s.accuracy for r, s in zip(every.curve(), result.curve(), strict=True))


def scale_distances(patch: pytest.MonkeyPatch, of_plans: float, exact: float) -> None:
    """Make plans promise, and exact transport find, multiples of the distances."""

    def scaled(ball: Any, x: Tensor, z: Tensor, plan: Any = None) -> Any:
        found = VIOLATIONS(ball, x, z, plan)
        return replace(found, distance=found.distance * (exact if plan is None else of_plans))

    patch.setattr(wball.WassersteinBall, "violations", scaled)


VIOLATIONS = wball.WassersteinBall.violations


def test_one_wrong_plan_and_none_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the plan check: what it vouches for is twice as far as it says."""
    monkeypatch.setattr(batches, "SAMPLE_LEAST", 1)
    scale_distances(monkeypatch, 0.5, 1.0)
    model, x, y = problem(40)
    result = measure(model, x, y)
    found = (result.images["read_as"] >= 0).nonzero().squeeze(1).tolist()
    assert list(result.disagreements) == found and len(found) > 3
    assert result.audit_summary()["proved_by_plan"] == 0
    assert f"disagreements: {len(found)}" in result.verdict()
    again = wball.audit(BALL, result.examples["original"], result.examples["adversarial"])
    torch.testing.assert_close(result.images["distance"][found], again.distance)

    scale_distances(monkeypatch, 1.0, 100.0)
    result = measure(model, x, y)
    assert {r["index"] for r in result.rejected} == set(result.disagreements) == set(found)
    assert result.accuracy_at(0.4) == result.clean_accuracy and not len(result.examples["index"])


@pytest.mark.parametrize("mass", ["relative", "absolute"])
def test_rounding_is_no_disagreement(mass: Any) -> None:
    """At tiny radii float32 images say less about their distance than a ten-thousandth of it."""
    model, x, y = problem(40)
    ball = wball.WassersteinBall(1e-5 if mass == "relative" else 1e-4, mass=mass)
    found = wball.DualAveraging(ball, steps=6, until_success=False, proofs=True)(model, x, y)
    radius = torch.full((40,), ball.eps).double()
    claims = batches._Claims(torch.arange(40), found.images, radius, radius.long(), found.proof)
    data, settings = open_stream(x, y, model, ball.box), {"batch_size": 40, "seed": 0}
    run = Batches(model, data, ball, attack(), settings, Path(), lambda *_, **__: None)  # type: ignore[arg-type]
    batch = batches._Batch(x, y, {}, {"batch": 0, "disagreements": []})
    _, proof = run._audit(batch, claims)
    assert batch.notes["disagreements"] == [] and int((proof == 3).sum()) >= 20


def test_a_sample_of_the_certificates_is_checked(tmp_path: Path) -> None:
    model, x, y = problem(8)
    result = measure(model, x, y, certify="crown", out=tmp_path)
    counts = {"checked": 4, "confirmed": 4, "unconfirmed": [], "unfollowed": 0, "reason": ""}
    assert load_evaluation(tmp_path).verification == result.verification == counts
    assert "independent checker: 4 of 4" in result.verdict()
    assert measure(model, x, y).verification is None


def test_certificates_that_are_not_confirmed_make_an_evaluation_unreliable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, y = problem(8)
    prove = batches.certify

    def boastful(*args: Any) -> wball.CertificateResult:
        proof = prove(*args)
        return replace(proof, certified=torch.ones_like(proof.certified))

    monkeypatch.setattr(batches, "certify", boastful)
    result = evaluate(model, x, y, BALL, [5.0], attack(), certify="crown")
    assert (
        result.verification is not None
        and result.unconfirmed == result.verification["unconfirmed"] != []
    )
    assert not result.reliable and "unconfirmed-certificate" in {w.code for w in result.warnings}
    assert not result.check("certified:5:0")


def test_minimal_radius() -> None:
    model, x, y = problem(5)
    result = evaluate(model, x, y, BALL, "minimal", attack())
    assert result.images["radius"][0] == 0
    for i in range(1, 5):
        exact = exact_radius(model, x[i : i + 1], y[i : i + 1], 0.8)
        radius = float(result.images["radius"][i])
        assert radius >= exact * (1 - 1e-3)
        assert radius <= 1.2 * exact or (exact > 0.35 and math.isinf(radius))
    assert [p.accuracy for p in result.curve()] == sorted(
        (p.accuracy for p in result.curve()), reverse=True
    )


def test_the_model_is_left_as_found_and_its_oddities_are_reported() -> None:
    model, x, y = problem(4)
    noisy = nn.Sequential(model, nn.Softmax(1), nn.Dropout(0.5))
    noisy.train()
    result = evaluate(noisy, x, y, BALL, 0.1, attack())
    assert all(module.training for module in noisy.modules())
    assert all(p.requires_grad for p in noisy.parameters())
    assert "probabilities" in {w.code for w in result.warnings}
    assert {note.code for note in result.notes} == {"train-mode"}
    assert not result.reliable


def test_what_is_not_a_number_is_not_right() -> None:
    model, x, y = problem(6)
    y = torch.zeros_like(y)  # what argmax makes of NaN
    result = evaluate(lambda z: model(z) * torch.nan, x, y, BALL, RADII, attack())
    assert result.clean_accuracy == 0 and (result.images["predicted"] == -1).all()
    assert [p.accuracy for p in result.curve()] == [0.0] * 4


def test_a_model_that_changes_between_calls_is_found() -> None:
    """Whatever holds the state: the model is asked the same again at the end."""
    (model, x, y), calls = problem(4), itertools.count()
    result = measure(lambda z: model(z) * (1.0 if next(calls) < 30 else 0.5), x, y, batch_size=2)
    assert "changed-answers" in {w.code for w in result.warnings} and not result.reliable
    assert not measure(model, x, y, batch_size=2).warnings


def test_rounding_on_another_device_is_no_change_of_the_model() -> None:
    before = torch.tensor([[3.0, 1.0, -5.0], [1.0, 1.0, -9.0], [math.nan, 0.0, 0.0]])
    noise = torch.tensor([0.02, -0.02, 0.0])
    assert not batches.answers_changed(
        before, before + noise * torch.tensor([[1], [1e-3], [0]])
    ).any()
    flipped = before + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.0]])
    assert batches.answers_changed(before, flipped).tolist() == [False, True, False]
    assert batches.answers_changed(before, before * 0.9).tolist() == [True, True, False]
    assert batches.answers_changed(before, before.nan_to_num()).tolist() == [False, False, True]


def test_clean_accuracy_near_chance_is_a_warning(tmp_path: Path) -> None:
    model, x, y = problem(12)
    result = evaluate(model, x, 1 - y, BALL, 0.1, attack(), out=tmp_path)
    codes = {w.code for w in load_evaluation(tmp_path).warnings}
    assert "clean-accuracy-at-chance" in codes and exit_code([result]) == 6
    assert not evaluate(model, x, y, BALL, 0.1, attack()).warnings
    few = evaluate(model, x[:4], 1 - y[:4], BALL, 0.1, attack())
    assert "clean-accuracy-at-chance" not in {w.code for w in few.warnings}


def test_any_function_is_an_attack_that_need_not_be_trusted() -> None:
    """Its images count at every radius above their distances, unless judge or audit refuse them."""
    model, x, y = problem()
    honest = measure(model, x, y)

    def function(model: Any, x: Tensor, y: Tensor) -> Tensor:
        found = attack()(model, x, y).images
        return torch.where(y[:, None, None, None] == 1, found, 1 - x)

    result = measure(model, x, y, attack=function)
    found = result.images["read_as"] >= 0
    assert result.settings["attack"]["function"].endswith("function")
    assert bool(found.any()) and (y[found] == 1).all()
    assert result.accuracy_at(0.1) >= result.accuracy_at(0.4) >= honest.accuracy_at(0.4)
    assert wball.audit(BALL, result.examples["original"], result.examples["adversarial"]).all_valid
    assert bool((result.images["distance"][found] <= result.images["radius"][found] * 1.0001).all())
    assert result.rejected and {int(y[r["index"]]) for r in result.rejected} == {0}
    assert not measure(model, x, y, attack=lambda model, x, y: x).rejected
    with pytest.raises(ValueError, match=r"attack must return images of shape \(11, 1, 6, 6\)"):
        evaluate(model, x, y, BALL, RADII, lambda model, x, y: x[:2])


def test_the_fast_attack_is_a_quick_look_and_never_reliable(tmp_path: Path) -> None:
    model, x, y = problem(4)
    result = evaluate(model, x, y, BALL, 0.01, "fast", out=tmp_path)
    assert (
        not result.doubts and not result.reliable and result.headline()["reliable"] == "quick look"
    )
    assert "quick look" in result.verdict() and "NOT RELIABLE" not in result.verdict()
    assert not json.loads((tmp_path / "results.json").read_text())["reliable"]
    assert "quick look" in str(result.check("0.01:0")) and exit_code([result]) == 0
    assert exit_code([result], ["0.01:0"]) == 7
    report = wball.write_report(result, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "quick look" in report and ">not reliable<" not in report


def test_a_model_that_works_in_place_leaves_the_images_alone() -> None:
    model, x, y = problem(6)
    before = x.clone()
    result = measure(lambda z: model(z.mul_(3.0)), x, y)
    assert torch.equal(x, before) and result.audit_summary()["rejected"] == 0
    assert result.summary()["curve"] == measure(model, x, y).summary()["curve"]


def test_histograms(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, 5, generator=generator)
    place = torch.arange(5.0)
    ball = wball.WassersteinBall(0.5, wball.DenseCost((place[:, None] - place[None]).abs()))
    model = nn.Linear(5, 2)
    y = model(x).argmax(1)
    result = evaluate(model, x, y, ball, [0.1, 0.5], wball.DualAveraging(ball, steps=5))
    assert result.settings["ball"]["cost"] == "matrix"
    assert wball.write_report(result, tmp_path / "r.html").is_file()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    model, x, y = problem()
    expected = measure(model, x, y)
    found = measure(model.cuda(), x.cuda(), y.cuda(), out=tmp_path, certify="crown")
    assert found.provenance["device"] != "cpu" and not found.rejected
    for one, other in zip(expected.curve(), found.curve(), strict=True):
        assert abs(one.accuracy - other.accuracy) <= 2 / len(x)


def test_bad_arguments_say_what_to_do(tmp_path: Path) -> None:
    model, x, y = problem()
    other = wball.DualAveraging(wball.WassersteinBall(0.1, mass="absolute"))
    (tmp_path / "file").write_text("")
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "2 classes", {"y": y + 1}),
        (ValueError, "does not take images of shape", {"x": x[..., :5]}),
        (ValueError, "empty", {"x": x[:0], "y": y[:0]}),
        (TypeError, "got the class Linear", {"model": nn.Linear}),
        (ValueError, "radii must be finite", {"radii": [0.0, 0.1]}),
        (ValueError, "minimal", {"radii": "smallest"}),
        (ValueError, "standard", {"attack": "pgd"}),
        (TypeError, "a function", {"attack": wball.PGD}),
        (ValueError, "another threat model", {"attack": other}),
        (ValueError, "exact must be", {"exact": "some"}),
        (ValueError, "one of interval", {"certify": "guess"}),
        (TypeError, "Module", {"model": lambda z: model(z), "certify": True}),
        (NotADirectoryError, "is a file", {"out": tmp_path / "file"}),
        (TypeError, "nmae", {"nmae": "mine"}),
        (ValueError, "batch_size", {"batch_size": 0}),
        (ValueError, "seed", {"seed": 2**63}),
    ]
    for error, said, given in cases:
        with pytest.raises(error, match=said):
            evaluate(**{"model": model, "x": x, "y": y, "ball": BALL, **given})
    with pytest.raises(FileNotFoundError, match=r"results\.json"):
        load_evaluation(tmp_path)
    (tmp_path / "results.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match="other"):
        load_evaluation(tmp_path)
