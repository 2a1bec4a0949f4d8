"""Evaluations in files: what is written is read back, and what does not belong together is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wball
from evaluation.linear import BALL, RADII, attack, problem
from wball.evaluation import OtherSettings, evaluate, load_evaluation
from wball.report.content import make_content
from wball.report.figures import save_figures


@pytest.mark.filterwarnings("ignore:files of an earlier version")
def test_results_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path, exact="all")
    content = json.loads((tmp_path / "results.json").read_text())
    del content["images"]["proof"], content["disagreements"], content["sha256"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    again = load_evaluation(tmp_path)
    assert torch.equal(again.images["proof"], result.images["proof"])
    assert again.verdict() == result.verdict()


def test_saved_and_read_back(tmp_path: Path) -> None:
    model, x, y = problem()
    result = evaluate(
        model,
        x,
        y,
        BALL,
        RADII,
        attack(),
        out=tmp_path / "a",
        command="made by a test",
        data="spots",
    )
    again = load_evaluation(tmp_path / "a")
    written = json.loads((tmp_path / "a" / "results.json").read_text())
    del written["sha256"]
    assert again.to_dict() == result.to_dict() == written
    assert again.provenance["command"] == "made by a test"
    assert again.provenance["versions"]["wball"] == wball.__version__
    assert again.settings["data"]["name"] == "spots"
    for name in ("radius", "distance", "read_as"):
        assert torch.equal(again.images[name], result.images[name])
    assert not (tmp_path / "a" / "batches").exists()
    before = (tmp_path / "a" / "results.json").stat().st_mtime_ns
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", data="spots")
    assert (tmp_path / "a" / "results.json").stat().st_mtime_ns == before
    with pytest.raises(OtherSettings, match="a different seed"):
        evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", data="spots", seed=1)
    with pytest.raises(OtherSettings, match="sha256"):
        evaluate(model, x * 0.5, y, BALL, RADII, attack(), out=tmp_path / "a", data="spots")
    other = evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a", seed=1, overwrite=True)
    assert other.settings["seed"] == 1


def test_classes_without_a_name_are_shown_by_number(tmp_path: Path) -> None:
    model, x, y = problem(4)
    result = evaluate(model, x, y, BALL, RADII, attack(), classes=["left"])
    assert len(save_figures([result], tmp_path, "png")) == 3


@pytest.mark.filterwarnings("ignore:files of an earlier version")
def test_files_edited_by_hand_are_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    """Whatever is removed from a file, or replaced by something of another kind: a ValueError, or a result."""
    model, x, y = problem(4)
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "results.json").read_text())
    del content["sha256"]  # as one does who edits
    shutil.copytree(
        tmp_path / "whole", tmp_path / "edited", ignore=shutil.ignore_patterns("*.safetensors")
    )

    def places(inside: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        for key in inside if isinstance(inside, dict) else range(min(1, len(inside))):
            yield (*path, key)
            if isinstance(inside[key], (dict, list)):
                yield from places(inside[key], (*path, key))

    strange = (..., None, "x", -5, [], {}, 1e400, 10**400)
    refused = allowed = cases = 0
    for path, value in itertools.product(list(places(content, ())), strange):
        cases += 1
        edited = json.loads(json.dumps(content))
        inside = edited
        for key in path[:-1]:
            inside = inside[key]
        if value is ...:
            del inside[path[-1]]
        else:
            inside[path[-1]] = value
        (tmp_path / "edited" / "results.json").write_text(json.dumps(edited))
        try:
            result = load_evaluation(tmp_path / "edited")
        except ValueError as error:
            refused += "results.json is n" in str(error) and "\n" not in str(error)
            continue
        assert result.verdict() and result.summary()
        if path[0] == "settings":
            assert make_content([result], None, 1)
        allowed += 1
    assert refused + allowed == cases and refused > 300
    for name, field in (("settings", "radii"), ("images", "distance")):
        edited = json.loads(json.dumps(content))
        edited[name][field] = "a"
        (tmp_path / "edited" / "results.json").write_text(json.dumps(edited))
        with pytest.raises(ValueError, match=rf"{name}\.{field} is 'a', expected a list"):
            load_evaluation(tmp_path / "edited")


def test_names_of_any_kind_are_stored_as_text(tmp_path: Path) -> None:
    model, x, y = problem(2)
    result = evaluate(
        model, x, y, BALL, RADII, attack(), name=5, data=Path("a"), command=Path("b"), out=tmp_path
    )  # type: ignore[arg-type]
    assert (result.name, result.settings["data"]["name"], result.provenance["command"]) == (
        "5",
        "a",
        "b",
    )
    with pytest.raises(ValueError, match="seed"):
        evaluate(model, x, y, BALL, RADII, attack(), seed=2**63)


def test_pictures_of_another_evaluation_are_not_shown(tmp_path: Path) -> None:
    model, x, y = problem(6)
    evaluate(model, x, y, BALL, RADII, attack(), out=tmp_path / "a")
    evaluate(model, x[:3], y[:3], BALL, [1e-6], attack(), out=tmp_path / "b")
    for name in ("examples.safetensors", "exhibit.safetensors"):
        shutil.copytree(tmp_path / "b", tmp_path / name)
        shutil.copy(tmp_path / "a" / name, tmp_path / name / name)
        with pytest.raises(ValueError, match=r"belong to another results\.json"):
            load_evaluation(tmp_path / name)


def test_exhibit_shows_every_radius() -> None:
    model, x, y = problem()
    result = evaluate(model, x, y, BALL, RADII, attack())
    shown = result.exhibit
    assert shown["explorer_radii"].tolist() == RADII
    assert torch.equal(shown["original"], x[shown["index"]])
    assert 0 not in shown["explorer_index"].tolist()  # wrong as it is: nothing to explore
    for k, eps in enumerate(RADII):
        report = wball.audit(BALL.at(eps), x[shown["explorer_index"]], shown["explorer"][:, k])
        assert report.all_valid


def test_figures_show_names_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, x, y = problem(4)
    names = ["$x_$", "$5"]
    result = evaluate(model, x, y, BALL, RADII, attack(), name="_a$b$", classes=names)
    paths = save_figures([result, result], tmp_path, "svg")
    assert [p.name for p in paths] == [
        "accuracy.svg",
        "radii.svg",
        "examples-_a-b.svg",
        "examples-_a-b-2.svg",
    ]
    assert (tmp_path / "accuracy.svg").read_text().count("_a$b$") >= 2  # a legend of two lines
    read_as = names[int(result.images["read_as"].max())]
    assert f"→ {read_as}" in (tmp_path / "examples-_a-b.svg").read_text()


def test_no_figure_takes_the_place_of_another(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, x, y = problem(4)
    second, first = (
        evaluate(model, x, y, BALL, RADII, attack(), name=name) for name in ("a-2", "a")
    )
    paths = save_figures([second, first, first], tmp_path, "svg")
    assert [p.stem for p in paths[2:]] == ["examples-a-2", "examples-a", "examples-a-3"]
