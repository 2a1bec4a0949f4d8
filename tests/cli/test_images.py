"""Images on the command line: class folders, arrays, bad files, and more than memory holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from wball.cli import main
from wball.evaluation import load_evaluation

MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
"""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten photographs of two classes, wider than high."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name in ("n01", "n02"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(5):
            pixels = random.integers(0, 256, (12, 18, 3), np.uint8)
            image.fromarray(pixels).save(tmp_path / "photos" / name / f"{k}.png")
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path / "photos"


def evaluate(photos: Path, out: str, *words: str) -> int:
    line = ["evaluate", f"{photos.parent / 'mine.py'}:net", "--data", str(photos), "--eps", "0.05"]
    line += ["--attack", "pgd", "--out", str(photos.parent / out)]
    return main([*line, *words])


def test_folders_are_resized_cropped_and_streamed(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = ("--resize", "9", "--crop", "8")
    assert evaluate(photos, "memory", *cut) in (0, 6)
    monkeypatch.setattr("wball.cli.choices.IN_MEMORY", 0)
    assert evaluate(photos, "stream", *cut) in (0, 6)
    memory, stream = (load_evaluation(photos.parent / name) for name in ("memory", "stream"))
    one, other = (e.to_dict() | {"provenance": None} for e in (memory, stream))
    assert one == other  # but for the command
    assert torch.equal(memory.examples["adversarial"], stream.examples["adversarial"])
    assert memory.settings["data"]["classes"] == ["n01", "n02"] and memory.settings["data"][
        "shape"
    ] == [3, 8, 8]
    assert evaluate(photos, "some", *cut, "--limit", "4") in (0, 6)
    some = load_evaluation(photos.parent / "some")
    assert len(some.names) == 4 and all(Path(name).is_file() for name in some.names)
    for file in ("images.csv", "report.html"):
        assert some.names[0] in (photos.parent / "some" / file).read_text()


def test_bad_files_end_the_command(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = photos / "n02" / "broken.png"
    bad.write_bytes((photos / "n02" / "0.png").read_bytes()[:200])
    cut = ("--resize", "9", "--crop", "8")
    assert evaluate(photos, "out", *cut) == 2
    said = capsys.readouterr().err.strip()
    assert str(bad) in said and len(said.splitlines()) == 1
    assert not (photos.parent / "out").exists()
    bad.unlink()
    assert evaluate(photos, "other") == 2  # without a crop the images do not fit the model
    assert "(3, 12, 18)" in capsys.readouterr().err


def test_arrays_in_a_file(photos: Path) -> None:
    """As Keras stores them, channels last."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)
    path = photos.parent / "arrays.npz"
    np.savez(path, x_test=pixels, y_test=np.arange(6) % 2)
    assert evaluate(path, "arrays") in (0, 6)
    assert load_evaluation(photos.parent / "arrays").settings["data"]["shape"] == [3, 8, 8]
