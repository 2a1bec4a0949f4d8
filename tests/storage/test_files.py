"""Files that are damaged are named, and never read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import wball
from torture.damage import flip_bits, make_files
from wball.evaluation import evaluate
from wball.storage.files import (
    DamagedFile,
    read_json,
    read_sealed,
    read_tensors,
    write_sealed,
    write_tensors,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, object]]:
    return dict(make_files(tmp_path_factory.mktemp("files")))


@pytest.mark.parametrize(
    "kind", ["batch", "results", "examples", "exhibit", "checkpoint", "weights"]
)
def test_flipped_bits_are_noticed_or_change_nothing(
    made: dict[str, tuple[Path, object]], kind: str
) -> None:
    counts = flip_bits(*made[kind], count=25, seed=1)  # type: ignore[arg-type]
    assert counts["silent"] == 0 and counts["noticed"] > 0


def test_files_without_a_checksum_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors", {"notes": '{"done": 1}'})
    with pytest.raises(DamagedFile, match="no checksum"):
        read_tensors(tmp_path / "a.safetensors")
    (tmp_path / "a.json").write_text('{"a": 1}')
    with pytest.raises(DamagedFile, match="checksum is missing or wrong"):
        read_sealed(tmp_path / "a.json")


def test_sealed_content_is_what_it_was(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, None, 1e-300], "b": {"c": "ä"}, "d": (1, 2)}
    write_sealed(tmp_path / "a.json", content)
    assert read_sealed(tmp_path / "a.json") == {**content, "d": [1, 2]}


def test_json_nested_too_deeply_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(
        DamagedFile, match=r"a.json is not a complete JSON file \(it is nested too deeply\)"
    ):
        read_json(tmp_path / "a.json")


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tensors(
            tmp_path / name, {"x": torch.arange(5), "y": torch.zeros(0, 2)}, {"n": 1, "m": [1.5]}
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_overwrite_does_not_reuse_batches_behind_a_symbolic_link(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)).eval()
    ball = wball.WassersteinBall(0.1)
    x = torch.rand(4, 1, 4, 4)
    y = model(x).argmax(1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "batch-00000.safetensors").write_bytes(b"old work")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "batches").symlink_to(elsewhere, target_is_directory=True)
    result = evaluate(
        model,
        x,
        y,
        ball,
        attack=wball.DualAveraging(ball, steps=2),
        out=wball.Storage(tmp_path / "o", overwrite=True),
    )
    assert result.clean_accuracy == 1.0
    assert (elsewhere / "batch-00000.safetensors").read_bytes() == b"old work"
    assert not (tmp_path / "o" / "batches").exists()
