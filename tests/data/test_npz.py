"""Images in ``.npz`` files: read item by item."""

from __future__ import annotations

import resource
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from wball.data import NpzFile, read_items


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_items_are_those_of_the_arrays(tmp_path: Path, save: object) -> None:
    x = np.random.default_rng(0).integers(0, 256, (9, 5, 6, 3), dtype=np.uint8)
    y = np.arange(9, dtype=">i2")
    save(tmp_path / "a.npz", target=y, data=x)  # type: ignore[operator]
    data = NpzFile(tmp_path / "a.npz")
    images, labels = read_items(data, [8, 0, 3])  # channels first
    assert torch.equal(images, torch.from_numpy(x[[8, 0, 3]]).movedim(-1, 1) / 255)
    assert len(data) == 9 and labels.tolist() == [8, 0, 3]


@pytest.mark.parametrize("shape", [(-1, 4, 4, 1), (3, -4, 4, 1)])
def test_a_negative_size_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Such a header is damaged; a negative number of bytes to read would read them all."""
    np.savez(tmp_path / "a.npz", y=np.arange(3))
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "a") as archive,
        archive.open("x.npy", "w") as file,
    ):
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(48))
    with pytest.raises(ValueError, match=r"a.npz is not a complete .npz file.*shape \("):
        NpzFile(tmp_path / "a.npz")


def test_a_file_that_unpacks_to_gigabytes_is_read_in_little_memory(tmp_path: Path) -> None:
    """1 MB of compressed zeros: 3 GB in memory."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, shape, size in (("x", (10**6, 3, 32, 32), 1), ("y", (10**6,), 8)):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                kind = "|u1" if size == 1 else "<i8"
                header = {"descr": kind, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for _ in range(64 if size == 1 else 8):  # the rest is missing
                    file.write(bytes(10**6))
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = NpzFile(tmp_path / "a.npz")
    x, y = read_items(data, range(100))
    assert x.shape == (100, 3, 32, 32) and len(data) == 10**6 and int(y.sum()) == 0
    assert tracemalloc.get_traced_memory()[1] < 20e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    tracemalloc.stop()
    with pytest.raises(ValueError, match="item 999999 of the data cannot be read"):
        read_items(data, [999_999])


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "half.npz").write_bytes(b"PK")
    np.savez(tmp_path / "object.npz", x=np.array([{}]), y=np.zeros(1))
    np.savez(tmp_path / "lengths.npz", x=np.zeros((3, 1, 2, 2)), y=np.zeros(2))
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    for name, message in (
        ("half.npz", "is not a complete .npz file"),
        ("object.npz", "arrays of numbers"),
        ("lengths.npz", "labels of shape"),
        ("other.npz", "must hold arrays x and y"),
        ("a.npy", "expected an .npz file"),
    ):
        with pytest.raises(ValueError, match=message):
            NpzFile(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no file"):
        NpzFile(tmp_path / "none.npz")
