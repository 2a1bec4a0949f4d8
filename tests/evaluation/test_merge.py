"""Parts that were evaluated apart are joined into what one evaluation says, or refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wball
from evaluation.linear import BALL, bytes_in_classes
from wball.cli import main
from wball.evaluation import Evaluation, OtherSettings, load_evaluation, merge_evaluations

BATCH = 4


def run(part: slice, out: Path | None = None, **more: Any) -> Evaluation:
    model, x, y = bytes_in_classes(16)
    settings: dict[str, Any] = {
        "radii": [0.1, 0.4],
        "attack": wball.PGD(BALL, steps=4),
        "batch_size": BATCH,
        "name": wball.Names("m", command="c"),
    }
    return wball.evaluate(
        model, x[part], y[part], BALL, **{**settings, **more}, out=out, exact="all"
    )


def test_parts_say_what_the_whole_says(tmp_path: Path) -> None:
    whole = run(slice(None))
    parts = [run(slice(0, 8), tmp_path / "a"), run(slice(8, 16), tmp_path / "b")]
    for merged in (merge_evaluations(parts), merge_evaluations([tmp_path / "a", tmp_path / "b"])):
        for name, values in whole.images.items():
            torch.testing.assert_close(merged.images[name], values, atol=1e-9, rtol=1e-9, msg=name)
        assert merged.summary()["curve"] == whole.summary()["curve"]
        for name in ("index", "original", "adversarial"):
            assert torch.equal(merged.examples[name], whole.examples[name])
        assert merged.settings["data"]["images"] == 16 and merged.warnings == whole.warnings
        merged.save(tmp_path / "all")
        again = load_evaluation(tmp_path / "all")
        assert again.to_dict() == merged.to_dict()
        assert wball.write_report(again, tmp_path / "r.html").stat().st_size > 0


def test_marks_of_single_images_are_counted_through() -> None:
    parts = [run(slice(0, 8)), run(slice(8, 16))]
    entry = {"index": 3, "eps": 0.1, "reason": "r"}
    parts = [replace(part, rejected=(entry,), disagreements=(2,)) for part in parts]
    merged = merge_evaluations(parts)
    assert [r["index"] for r in merged.rejected] == [3, 11] and merged.disagreements == (2, 10)
    assert not merged.reliable


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"radii": [0.1]}, "radii"),
        ({"seed": 1}, "seed"),
        ({"attack": wball.PGD(BALL, steps=5)}, "attack"),
        ({"batch_size": 8}, "batch_size"),
        ({"name": "other"}, "model"),
    ],
)
def test_parts_with_other_settings_are_refused(more: dict[str, Any], key: str) -> None:
    with pytest.raises(
        OtherSettings, match=f"part 1 was evaluated with a different {key} than part 0"
    ):
        merge_evaluations([run(slice(0, 8)), run(slice(8, 16), **more)])


def test_images_that_would_count_twice_are_refused() -> None:
    one, two = run(slice(0, 8)), run(slice(8, 16))
    with pytest.raises(ValueError, match="part 1 and part 0 evaluate the same images"):
        merge_evaluations([one, one])
    with pytest.raises(ValueError, match="part 1 and part 0 evaluate the same images"):
        merge_evaluations([merge_evaluations([one, two]), two])
    with pytest.raises(ValueError, match="parts is empty"):
        merge_evaluations([])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(slice(0, 8), tmp_path / "a")
    run(slice(8, 16), tmp_path / "b")
    run(slice(8, 16), tmp_path / "c", seed=1)
    parts, out = [str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "all")
    assert main(["report", "--merge", *parts, "--out", out]) in (0, 6)
    assert "16 images" in capsys.readouterr().out and (tmp_path / "all" / "report.html").is_file()
    assert main(["report", "--merge", *parts, "--out", out]) == 2
    assert "contains results" in capsys.readouterr().err
    other = ["--out", str(tmp_path / "other")]
    assert main(["report", "--merge", parts[0], str(tmp_path / "c"), *other]) == 2
    assert "different seed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_of_a_pool(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """``examples/pool.py`` on a Dask cluster of two processes says what one evaluation says."""
    pytest.importorskip("distributed")
    example = pytestconfig.rootpath / "examples" / "pool.py"
    options = ("--local", "2", "--images", "12", "--parts", "3", "--out", str(tmp_path))
    words = [sys.executable, str(example), *options]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    merged = load_evaluation(tmp_path / "all")
    x, y = wball.load_sample("mnist")
    order = torch.cat([torch.arange(k, 12, 3) for k in range(3)])
    ball = wball.WassersteinBall(0.1)
    attack = wball.DualAveraging(ball, steps=20)
    whole = wball.evaluate(
        wball.load_model("mnist-standard"), x[order], y[order], ball, [0.05, 0.1], attack
    )
    assert torch.equal(merged.images["label"], y[order]) and torch.equal(
        merged.images["read_as"] >= 0, whole.images["read_as"] >= 0
    )
    assert len(list(tmp_path.glob("part-*/results.json"))) == 3
