"""Folders of images, one per class."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from wball.data import (
    load_folder,
)


def save_image(path: Path, array: np.ndarray) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(array).save(path)


def test_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{c}/{i}.png": rng.integers(0, 256, (6, 5, 3), np.uint8)
        for c in ("cat", "dog")
        for i in range(2)
    }
    for name, array in arrays.items():
        save_image(tmp_path / name, array)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    x, y, classes = load_folder(tmp_path)
    assert classes == ("cat", "dog") and y.tolist() == [0, 0, 1, 1] and x.shape == (4, 3, 6, 5)
    np.testing.assert_array_equal(
        (x[3] * 255).round().numpy().transpose(1, 2, 0), arrays["dog/1.png"]
    )
    save_image(tmp_path / "dog" / "9.png", arrays["dog/1.png"][:3])
    with pytest.raises(ValueError, match=r"3 x 5.*6 x 5.*pass resize and crop"):
        load_folder(tmp_path)


def test_folder_of_images_with_more_than_eight_bits(tmp_path: Path) -> None:
    exact = np.arange(16, dtype=np.uint8).reshape(4, 4) * 17
    save_image(tmp_path / "sixteen" / "a" / "0.png", exact.astype(np.uint16) * 257)
    for grey in (True, False):
        x = load_folder(tmp_path / "sixteen", grey=grey)[0]
        np.testing.assert_array_equal((x[0, 0] * 255).round().numpy(), exact)
    save_image(tmp_path / "float" / "a" / "0.tiff", exact.astype(np.float32) / 255)
    with pytest.raises(ValueError, match=r"0\.tiff has pixels of 32 bits"):
        load_folder(tmp_path / "float")
    for crop, kind, message in (
        ("8", TypeError, "crop must be an int"),
        (0, ValueError, "crop must be at least 1, got 0"),
    ):
        with pytest.raises(kind, match=message):
            load_folder(tmp_path / "sixteen", crop=crop)  # type: ignore[arg-type]


def test_folder_order_and_flat_folder(tmp_path: Path) -> None:
    for c in ("10", "9", "2"):
        save_image(tmp_path / "numbered" / c / "a.png", np.full((2, 2), int(c), np.uint8))
    x, y, classes = load_folder(tmp_path / "numbered", grey=True)
    assert classes == ("2", "9", "10") and y.tolist() == [0, 1, 2]
    assert (x[:, 0, 0, 0] * 255).round().tolist() == [2, 9, 10]
    assert load_folder(tmp_path / "numbered" / "2")[2] == ("2",)
    save_image(tmp_path / "numbered" / "stray.png", np.zeros((2, 2), np.uint8))
    with pytest.raises(ValueError, match="beside class folders"):
        load_folder(tmp_path / "numbered")
    (tmp_path / "void").mkdir()
    with pytest.raises(FileNotFoundError, match="no images"):
        load_folder(tmp_path / "void")


def test_bad_files_are_named(tmp_path: Path) -> None:
    """Truncated, another format under a wrong name, empty, a dangling link, another size."""
    colour = np.zeros((8, 8, 3), np.uint8)
    save_image(tmp_path / "n01" / "0.png", colour)
    whole = (tmp_path / "n01" / "0.png").read_bytes()
    bad = {
        "truncated.png": whole[: len(whole) // 2],
        "mislabelled.png": b"%PDF-1.7 not an image",
        "empty.jpg": b"",
        "gone.png": None,
    }
    for name, content in bad.items():
        path = tmp_path / "n01" / name
        if content is None:
            path.symlink_to(tmp_path / "nowhere.png")
        else:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read as an image")):
            load_folder(tmp_path)
        path.unlink()
    (tmp_path / "n01" / "notes.txt").write_text("not an image")
    with pytest.warns(UserWarning, match=r"ignored files that are not images: .*notes\.txt"):
        load_folder(tmp_path)


def test_resize_and_crop_keep_proportions(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    ramp = np.tile(
        np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (30, 1, 3)
    )  # 30 x 60, darker on the left
    (tmp_path / "a").mkdir()
    image.fromarray(ramp).save(tmp_path / "a" / "wide.png")
    image.fromarray(ramp.transpose(1, 0, 2)).save(tmp_path / "a" / "high.png")
    x, _, _ = load_folder(tmp_path, resize=15, crop=14)
    assert x.shape == (2, 3, 14, 14)
    high, wide = x
    torch.testing.assert_close(high, wide.transpose(1, 2), atol=0.02, rtol=0)
    columns = wide[0].mean(0)
    assert float(columns.diff().min()) > 0  # the middle of the ramp, as it was
    assert abs(float(columns.mean()) * 255 - 118) < 4
    with pytest.raises(ValueError, match=r"high.png is 60 x 30, smaller than the crop of 32 x 32"):
        load_folder(tmp_path, crop=32)


def test_folder_never_moves_a_class_number_in_silence(tmp_path: Path) -> None:
    for c in ("0", "2"):
        save_image(tmp_path / "digits" / c / "1.png", np.full((2, 2), 9, np.uint8))
    _, y, classes = load_folder(tmp_path / "digits")
    assert classes == ("0", "1", "2") and y.tolist() == [0, 2]
    (tmp_path / "digits" / "1").mkdir()
    for inside in (None, "deeper"):  # nothing, and images one level too deep
        if inside is not None:
            save_image(tmp_path / "digits" / "1" / inside / "1.png", np.zeros((2, 2), np.uint8))
        with pytest.raises(ValueError, match=r"digits/1 has no images directly inside"):
            load_folder(tmp_path / "digits")
    for folder in ("²", "1"):  # a digit that is no number
        save_image(tmp_path / "odd" / folder / "1.png", np.zeros((2, 2), np.uint8))
    assert load_folder(tmp_path / "odd")[2] == ("1", "²")


def test_hostile_images_are_refused_by_name(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )
    # PostScript is a program: no interpreter may be started for it, whatever its name says.
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n%%EndComments\nshowpage\n"
    (tmp_path / "a").mkdir()
    for content, reason in ((bomb, "decompression bomb"), (program, "cannot identify")):
        (tmp_path / "a" / "1.png").write_bytes(content)
        with pytest.raises(ValueError, match=rf"1\.png cannot be read as an image.*{reason}"):
            load_folder(tmp_path)


def test_folder_with_what_programs_leave_behind(tmp_path: Path) -> None:
    for c in ("a", "b"):
        save_image(tmp_path / c / "1.png", np.full((2, 2), 9, np.uint8))
    (tmp_path / "a" / "._1.png").write_bytes(b"resource fork")
    (tmp_path / "a" / "manual.pdf").write_bytes(
        b"%PDF-1.4"
    )  # Pillow writes such files and cannot read them
    save_image(tmp_path / ".ipynb_checkpoints" / "1.png", np.zeros((2, 2), np.uint8))
    (tmp_path / "__MACOSX" / "a").mkdir(parents=True)
    x, y, classes = load_folder(tmp_path)
    assert classes == ("a", "b") and y.tolist() == [0, 1] and len(x) == 2
