"""Evaluations in files: what is written is read back, and what does not belong together is
refused."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import wball
from evaluation.linear import BALL, RADII, attack, measure, problem
from wball.evaluation import Evaluation, OtherSettings, Storage, evaluate, load_evaluation
from wball.report.figures import examples_figure, save_figures
from wball.storage.files import Log


def test_saved_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    result = measure(
        model, x, y, out=tmp_path / "a", name=wball.Names(data="spots", command="made by a test")
    )
    again = load_evaluation(tmp_path / "a")
    written = json.loads((tmp_path / "a" / "results.json").read_text())
    del written["sha256"], written["files"]
    assert again.to_dict() == result.to_dict() == written
    assert again.provenance["command"] == "made by a test"
    assert again.provenance["versions"]["wball"] == wball.__version__
    assert again.settings["data"]["name"] == "spots"
    for name in ("radius", "distance", "read_as"):
        assert torch.equal(again.images[name], result.images[name])
    assert not (tmp_path / "a" / "batches").exists()
    before = (tmp_path / "a" / "results.json").stat().st_mtime_ns
    measure(model, x, y, out=tmp_path / "a", name=wball.Names(data="spots"))
    assert (tmp_path / "a" / "results.json").stat().st_mtime_ns == before
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert again.to_pandas()["label"] == y.tolist()
    with pytest.raises(OtherSettings, match="a different seed"):
        measure(model, x, y, out=tmp_path / "a", name=wball.Names(data="spots"), seed=1)
    with pytest.raises(OtherSettings, match="sha256"):
        measure(model, x * 0.5, y, out=tmp_path / "a", name=wball.Names(data="spots"))
    other = measure(model, x, y, out=wball.Storage(tmp_path / "a", overwrite=True), seed=1)
    assert other.settings["seed"] == 1


@pytest.mark.parametrize("checksum", ["kept", "removed", "not a number"])
def test_edited_results_are_refused(tmp_path: Path, checksum: str) -> None:
    model, x, y = problem(4)
    measure(model, x, y, out=tmp_path)
    file = tmp_path / "results.json"
    content = json.loads(file.read_text())
    for name in content.keys() - {"format", "sha256", "verification"}:
        edited = {**content, name: None}
        if checksum == "removed":
            del edited["sha256"]
        elif checksum != "kept":
            edited["sha256"] = [checksum]
        file.write_text(json.dumps(edited))
        with pytest.raises(ValueError, match=r"results\.json is not what was written"):
            load_evaluation(tmp_path)


def test_images_of_another_run_are_refused(tmp_path: Path) -> None:
    """Also if they are as many, at the same positions."""
    model, x, y = problem(6)
    measure(model, x, y, out=tmp_path / "0")
    measure(model, 0.99 * x, y, out=tmp_path / "1")
    for name in ("examples.safetensors", "exhibit.safetensors"):
        shutil.copytree(tmp_path / "0", tmp_path / name)
        shutil.copy(tmp_path / "1" / name, tmp_path / name / name)
        with pytest.raises(ValueError, match=f"{name} belongs to another run"):
            load_evaluation(tmp_path / name)


def test_the_log_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "log.jsonl").symlink_to(victim)
    evaluate(*problem(2), BALL, 0.1, attack(), out=tmp_path / "out")
    assert victim.read_text() == "mine" and (tmp_path / "out" / "log.jsonl").read_text()
    log = Log(tmp_path / "log.jsonl", 0)
    (tmp_path / "log.jsonl").symlink_to(victim)  # while it is in use
    with pytest.raises(OSError, match="symbolic"):
        log("event")
    assert victim.read_text() == "mine"


def test_explorer_shows_every_radius_and_belongs_to_its_results(tmp_path: Path) -> None:
    model, x, y = problem()
    result = measure(model, x, y, out=tmp_path)
    assert not result.explorer  # it is made for a report
    assert torch.equal(result.exhibit["original"], x[result.exhibit["index"]])
    explored = wball.explore(result, model, x, y, ball=BALL)
    shown = explored.explorer
    assert shown["radii"].tolist() == RADII
    assert 0 not in shown["index"].tolist()  # wrong as it is: nothing to explore
    explored.save_explorer(tmp_path)
    assert torch.equal(load_evaluation(tmp_path).explorer["images"], shown["images"])
    measure(model, x, y, seed=1, out=Storage(tmp_path / "other")).save(tmp_path)
    assert not load_evaluation(tmp_path).explorer
    assert result.baseline is not None  # random points are no stronger than an exact attack
    for k, eps in enumerate(RADII):
        assert result.baseline["random"][eps] >= result.accuracy_at(eps)
        report = wball.audit(BALL.at(eps), x[shown["index"]], shown["images"][:, k])
        assert report.all_valid


def test_a_figure_of_examples_has_examples() -> None:
    pytest.importorskip("matplotlib")
    model, x, y = problem(4)
    none = evaluate(model, x, y, BALL, 1e-6, attack())
    assert len(none.examples["index"]) == 0
    with pytest.raises(ValueError, match="no examples that are images"):
        examples_figure(none)


def test_figures_show_names_as_they_are_and_do_not_replace_each_other(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = evaluate(
        *problem(4), BALL, RADII, attack(), name=wball.Names(classes=["$x_$"])
    )  # the other has none

    def called(name: str) -> Evaluation:
        return replace(result, settings={**result.settings, "model": {"name": name}})

    names = ("_a$b$", "_a$b$", "a-2", "a", "a")
    paths = save_figures([called(name) for name in names], tmp_path, "svg")
    assert paths[0].name == "accuracy.svg"
    examples = ["_a-b", "_a-b-2", "a-2", "a", "a-3"]
    assert [p.stem for p in paths[1:]] == [f"examples-{name}" for name in examples]
    assert paths[0].read_text().count("_a$b$") >= 2  # a legend of two lines
    shown = paths[1].read_text()
    assert "→ $x_$" in shown or "→ 1" in shown
