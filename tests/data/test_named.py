"""Data sets by name: readers against hand-made files, damaged files of every kind, the bundled
samples."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from image_files import digits, idx, write_cifar10, write_mnist
from wball.data import (
    load_dataset,
    load_sample,
    named,
    read_idx,
)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "."),
        ("MNIST", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion_mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_sets(tmp_path: Path, name: str, folder: str, ending: str) -> None:
    images, labels = write_mnist(tmp_path / folder, "t10k", ending=ending)
    train, _ = write_mnist(tmp_path / folder, "train", n=9, ending=ending, dot=".")
    x, y = load_dataset(name, tmp_path, "test")
    assert x.dtype == torch.float32 and y.dtype == torch.long
    np.testing.assert_array_equal((x[:, 0] * 255).round().numpy(), images)
    np.testing.assert_array_equal(y.numpy(), labels)
    assert load_dataset(name, str(tmp_path), "train")[0].shape == (len(train), 1, 28, 28)
    assert load_dataset(name, tmp_path, dtype=torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "CIFAR10_RECORDS", 4)
    parts = write_cifar10(tmp_path / folder, 4)
    x, y = load_dataset("CIFAR-10", tmp_path, "train")
    assert x.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal((x[4:8] * 255).round().numpy(), parts["data_batch_2.bin"][0])
    np.testing.assert_array_equal(y[4:8].numpy(), parts["data_batch_2.bin"][1])
    assert torch.equal(
        load_dataset("cifar10", tmp_path)[1], torch.from_numpy(parts["test_batch.bin"][1]).long()
    )


def test_sample_is_the_start_of_the_test_set() -> None:
    x, y = load_sample("mnist")
    assert x.shape == (1000, 1, 28, 28) and y.shape == (1000,)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    # Known facts about MNIST's test set.
    assert y[:20].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5, 9, 7, 3, 4]
    assert y.bincount().tolist() == [85, 126, 116, 107, 110, 87, 87, 99, 89, 94]


def test_missing_files_say_where_and_how_to_get_them(tmp_path: Path) -> None:
    write_mnist(tmp_path / "half", "t10k")
    (tmp_path / "half" / "t10k-labels-idx1-ubyte").unlink()
    for name, folder, split, message in (
        ("mnist", "nowhere", "test", "wball data mnist --data-dir"),
        ("mnist", ".", "test", r"t10k-images-idx3-ubyte of MNIST.*MNIST/raw.*wball data mnist"),
        ("mnist", "half", "test", "t10k-labels-idx1-ubyte"),
        ("cifar10", ".", "train", r"data_batch_1\.bin of CIFAR-10"),
        ("mnits", ".", "test", "fashion-mnist"),
        ("mnist", ".", "validation", "split"),
    ):
        kind = FileNotFoundError if split != "validation" and name != "mnits" else ValueError
        with pytest.raises(kind, match=message):
            load_dataset(name, tmp_path / folder, split)  # type: ignore[arg-type]


@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_idx(tmp_path: Path, zipped: bool) -> None:
    good = idx(digits(5)[0])
    path = tmp_path / "file"
    cases = [
        (
            good[:-1],
            "truncated or corrupted: its header says 5 x 28 x 28 = 3920 bytes, but it has only 3919",
        ),
        (good + b"\0", "but it has more"),
        (good[:10], "inside its header"),
        (b"", "starts with nothing"),
        (b"<html>not found</html>", "not an idx file.*error page"),
        (b"\0\0\x0d\x01" + good[4:], "not an idx file of bytes"),  # floats
        (
            struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1),
            "truncated or corrupted",
        ),
    ]
    for content, message in cases[: -1 if zipped else None]:
        path.write_bytes(gzip.compress(content) if zipped else content)
        with pytest.raises(ValueError, match=message):
            read_idx(path)
    if zipped:
        whole = gzip.compress(good)
        for content in (
            whole[: len(whole) // 2],
            whole[:3],
            whole[:40] + b"\xff" * 40 + whole[80:],
        ):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="truncated or corrupted"):
                read_idx(path)


def test_damaged_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "CIFAR10_RECORDS", 4)
    write_cifar10(tmp_path, 4)
    path = tmp_path / "test_batch.bin"
    good = path.read_bytes()
    for content, message in [
        (good[:-1], "12291 bytes are not a multiple"),
        (good[: 2 * 3073], "2 images instead of 4"),
        (b"", "0 bytes"),
        (b"\xff" + good[1:], "label 255"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_dataset("cifar10", tmp_path)


def test_colour_sample_is_balanced_and_made_of_bytes() -> None:
    x, y = load_sample("CIFAR-10")
    assert x.shape == (200, 3, 32, 32) and y.bincount().tolist() == [20] * 10
    assert torch.equal((x * 255).round() / 255, x)
    content = (x * 255).round().to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest().startswith("d9b4e5c7ec7a3a2b")
    with pytest.raises(ValueError, match="only of mnist and cifar10"):
        load_sample("fashion-mnist")


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write_mnist(tmp_path, "t10k")
    for labels, message in (
        (np.zeros(6), r"7 images, but .* 6 labels"),
        (np.full(7, 11), "label 11"),
        (np.zeros((7, 1)), "expected 3 and 1"),
    ):
        (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
        with pytest.raises(ValueError, match=message):
            load_dataset("mnist", tmp_path)
