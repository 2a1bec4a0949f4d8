"""Data: readers against hand-made files, downloads against a server on this machine, damaged files of every kind."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import struct
import tarfile
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import wball
from server import Server
from wball import data, fetch
from wball.data import (
    RandomAffine,
    RandomCropFlip,
    RandomCutout,
    load_dataset,
    load_folder,
    load_sample,
    named,
    read_idx,
    to_tensors,
)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def digits(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n, np.uint8)


def write_mnist(
    folder: Path, prefix: str, n: int = 7, ending: str = "", dot: str = "-"
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits(n)
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if ending else bytes
    (folder / f"{prefix}-images{dot}idx3-ubyte{ending}").write_bytes(pack(idx(images)))
    (folder / f"{prefix}-labels{dot}idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    return images, labels


# --- reading -----------------------------------------------------------------------------------------------------


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


def test_pixels_are_exact_fractions_of_255(tmp_path: Path) -> None:
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(1)))
    x, _ = load_dataset("mnist", tmp_path)
    assert torch.equal(x.flatten(), torch.arange(256) / 255)


def write_cifar10(folder: Path, n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        pixels, labels = rng.integers(0, 256, (n, 3, 32, 32), np.uint8), rng.integers(0, 10, n, np.uint8)
        (folder / name).write_bytes(np.concatenate([labels[:, None], pixels.reshape(n, -1)], 1).tobytes())
        out[name] = pixels, labels
    return out


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "CIFAR10_RECORDS", 4)
    parts = write_cifar10(tmp_path / folder, 4)
    x, y = load_dataset("CIFAR-10", tmp_path, "train")
    assert x.shape == (20, 3, 32, 32)
    np.testing.assert_array_equal((x[4:8] * 255).round().numpy(), parts["data_batch_2.bin"][0])
    np.testing.assert_array_equal(y[4:8].numpy(), parts["data_batch_2.bin"][1])
    assert torch.equal(load_dataset("cifar10", tmp_path)[1], torch.from_numpy(parts["test_batch.bin"][1]).long())


def test_sample_is_the_start_of_the_test_set() -> None:
    x, y = load_sample("mnist")
    assert x.shape == (1000, 1, 28, 28) and y.shape == (1000,)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    # Known facts about MNIST's test set.
    assert y[:20].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5, 9, 7, 3, 4]
    assert y.bincount().tolist() == [85, 126, 116, 107, 110, 87, 87, 99, 89, 94]


def test_zoo_models_classify_the_sample() -> None:
    samples = {name: load_sample(name) for name in ("mnist", "cifar10")}
    for name in wball.list_models():
        card, model = wball.model_card(name), wball.load_model(name)
        assert card["name"] == name and not model.training
        x, y = samples[card["dataset"]]
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).double().mean())
        # Some of the 10,000 images the card is about: four standard deviations of their sampling.
        share = card["clean_accuracy"]
        assert abs(accuracy - share) < 4 * (share * max(0.05, 1 - share) / len(x)) ** 0.5 + 0.005
    assert wball.model_card("cifar10-small")["clean_accuracy"] > 0.69
    assert wball.model_card("mnist-standard")["clean_accuracy"] >= 0.989
    with pytest.raises(ValueError, match="mnist-standard"):
        wball.load_model("mnist-standart")


# --- damaged files -----------------------------------------------------------------------------------------------


def test_missing_files_say_where_and_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="wball data mnist --root"):
        load_dataset("mnist", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"t10k-images-idx3-ubyte of MNIST.*MNIST/raw.*wball data mnist"):
        load_dataset("mnist", tmp_path)
    write_mnist(tmp_path, "t10k")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        load_dataset("mnist", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin of CIFAR-10"):
        load_dataset("cifar10", tmp_path, "train")
    with pytest.raises(ValueError, match="fashion-mnist"):
        load_dataset("mnits", tmp_path)
    with pytest.raises(ValueError, match="split"):
        load_dataset("mnist", tmp_path, "validation")  # type: ignore[arg-type]


@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_idx(tmp_path: Path, zipped: bool) -> None:
    good = idx(digits(5)[0])
    path = tmp_path / "file"
    cases = [
        (good[:-1], "truncated or corrupted: its header says 5 x 28 x 28 = 3920 bytes, but it has only 3919"),
        (good + b"\0", "but it has more"),
        (good[:10], "inside its header"),
        (b"", "starts with nothing"),
        (b"<html>not found</html>", "not an idx file.*error page"),
        (b"\0\0\x0d\x01" + good[4:], "not an idx file of bytes"),  # floats
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "truncated or corrupted"),
    ]
    for content, message in cases[: -1 if zipped else None]:
        path.write_bytes(gzip.compress(content) if zipped else content)
        with pytest.raises(ValueError, match=message):
            read_idx(path)
    if zipped:
        whole = gzip.compress(good)
        for content in (whole[: len(whole) // 2], whole[:3], whole[:40] + b"\xff" * 40 + whole[80:]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="truncated or corrupted"):
                read_idx(path)


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write_mnist(tmp_path, "t10k")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(6)))
    with pytest.raises(ValueError, match=r"7 images, but .* 6 labels"):
        load_dataset("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(7, 11)))
    with pytest.raises(ValueError, match="label 11"):
        load_dataset("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros((7, 1))))
    with pytest.raises(ValueError, match="expected 3 and 1"):
        load_dataset("mnist", tmp_path)


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, labels = write_mnist(tmp_path, "t10k")
    monkeypatch.setattr(named, "_MNIST_LABELS", {hashlib.sha256(labels.tobytes()).hexdigest()})
    with pytest.raises(ValueError, match="belongs to MNIST"):
        load_dataset("fashion-mnist", tmp_path)


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


# --- folders, data sets, loaders ---------------------------------------------------------------------------------


def save_image(path: Path, array: np.ndarray) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(array).save(path)


def test_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"{c}/{i}.png": rng.integers(0, 256, (6, 5, 3), np.uint8) for c in ("cat", "dog") for i in range(2)}
    for name, array in arrays.items():
        save_image(tmp_path / name, array)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    x, y, classes = load_folder(tmp_path)
    assert classes == ("cat", "dog") and y.tolist() == [0, 0, 1, 1] and x.shape == (4, 3, 6, 5)
    np.testing.assert_array_equal((x[3] * 255).round().numpy().transpose(1, 2, 0), arrays["dog/1.png"])
    assert load_folder(tmp_path, size=(8, 9), grey=True)[0].shape == (4, 1, 8, 9)
    save_image(tmp_path / "dog" / "9.png", arrays["dog/1.png"][:3])
    with pytest.raises(ValueError, match=r"3 x 5.*6 x 5.*size="):
        load_folder(tmp_path)
    (tmp_path / "dog" / "9.png").write_bytes((tmp_path / "dog" / "1.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"9\.png cannot be read"):
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
    for size, message in (("8", "size must be a number"), ((1, 2, 3), "size must be a number"), (2.0, "size must be")):
        with pytest.raises(TypeError, match=message):
            load_folder(tmp_path / "sixteen", size=size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        load_folder(tmp_path / "sixteen", size=0)


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


def save(path: Path, size: tuple[int, int], value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("PIL.Image").fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def test_bad_files_are_named_or_skipped_with_a_count(tmp_path: Path) -> None:
    """Truncated, another format under a wrong name, no image at all, another size: nothing else is lost."""
    for k in range(4):
        save(tmp_path / "n01" / f"{k}.png", (8, 8), 10 * k)
        save(tmp_path / "n02" / f"{k}.jpg", (8, 8), 10 * k)
    whole = (tmp_path / "n01" / "3.png").read_bytes()
    bad = {
        "truncated.png": whole[: len(whole) // 2],
        "mislabelled.png": b"%PDF-1.7 not an image",
        "empty.jpg": b"",
    }
    for name, content in bad.items():
        path = tmp_path / "n01" / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read as an image")):
            load_folder(tmp_path)
        path.unlink()
    save(tmp_path / "n02" / "odd.png", (9, 8))
    with pytest.raises(ValueError, match=r"odd.png is 9 x 8, but .*0.png is 8 x 8; pass size"):
        load_folder(tmp_path)
    for name, content in bad.items():
        (tmp_path / "n01" / name).write_bytes(content)
    (tmp_path / "n02" / "notes.txt").write_text("not an image")
    (tmp_path / "n02" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.warns(UserWarning, match="left out") as caught:
        x, y, classes = load_folder(tmp_path, skip_bad=True)
    said = " ".join(str(w.message) for w in caught)
    assert "left out 5 of 13 items" in said and "empty.jpg" in said and "notes.txt" in said
    assert x.shape == (8, 3, 8, 8) and y.tolist() == [0] * 4 + [1] * 4 and classes == ("n01", "n02")
    torch.testing.assert_close(x[:4, 0, 0, 0], torch.tensor([0.0, 10, 20, 30]) / 255)


def test_resize_and_crop_keep_proportions(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    ramp = np.tile(np.arange(0, 240, 4, dtype=np.uint8)[None, :, None], (30, 1, 3))  # 30 x 60, darker on the left
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
    assert load_folder(tmp_path, resize=20, crop=(10, 12))[0].shape == (2, 3, 10, 12)
    with pytest.raises(ValueError, match=r"high.png is 60 x 30, smaller than the crop of 32 x 32"):
        load_folder(tmp_path, crop=32)
    with pytest.raises(ValueError, match="size excludes resize and crop"):
        load_folder(tmp_path, size=8, crop=8)


def test_folder_with_what_programs_leave_behind(tmp_path: Path) -> None:
    for c in ("a", "b"):
        save_image(tmp_path / c / "1.png", np.full((2, 2), 9, np.uint8))
    (tmp_path / "a" / "._1.png").write_bytes(b"resource fork")
    (tmp_path / "a" / "manual.pdf").write_bytes(b"%PDF-1.4")  # Pillow writes such files and cannot read them
    save_image(tmp_path / ".ipynb_checkpoints" / "1.png", np.zeros((2, 2), np.uint8))
    (tmp_path / "__MACOSX" / "a").mkdir(parents=True)
    x, y, classes = load_folder(tmp_path)
    assert classes == ("a", "b") and y.tolist() == [0, 1] and len(x) == 2


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
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    # PostScript is a program: no interpreter may be started for it, whatever its name says.
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n%%EndComments\nshowpage\n"
    (tmp_path / "a").mkdir()
    for content, reason in ((bomb, "decompression bomb"), (program, "cannot identify")):
        (tmp_path / "a" / "1.png").write_bytes(content)
        with pytest.raises(ValueError, match=rf"1\.png cannot be read as an image.*{reason}"):
            load_folder(tmp_path)


class Arrays(Dataset):
    """A map-style data set that never raises IndexError."""

    def __init__(self, x: torch.Tensor, kind: str) -> None:
        self.x, self.kind = x, kind

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[object, int]:
        array = (self.x[i] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        if self.kind == "pil":
            return pytest.importorskip("PIL.Image").fromarray(array), i
        return array, i


class Stream(IterableDataset):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((image, i) for i, image in enumerate(self.x))


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(self.x)


class Endless(Dataset):
    """A map-style data set without a length, as the sequence protocol allows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], i  # a tensor raises IndexError at its end


def test_any_source_becomes_tensors() -> None:
    x, y = torch.randint(0, 256, (7, 3, 4, 5)) / 255, torch.arange(7)
    tensors = TensorDataset(x, y)
    sources = [(x, y), tensors, DataLoader(tensors, batch_size=3), Arrays(x, "array"), Arrays(x, "pil"), Stream(x)]
    sources += [[(image, int(label)) for image, label in tensors], DataLoader(Stream(x), batch_size=2)]
    sources += [CountedStream(x), DataLoader(CountedStream(x), batch_size=2), Endless(x)]
    sources += [(x.numpy(), y.numpy().astype(kind)) for kind in ("uint8", "uint16", "int32", "float64")]
    sources += [(x.clone().requires_grad_(), y), [(image, np.array([label])) for image, label in tensors]]
    named = [{"image": image, "label": int(label), "id": "a"} for image, label in tensors]
    sources += [named, DataLoader(named, batch_size=3), {"x": x, "y": y}]  # type: ignore[list-item, arg-type]
    for source in sources:
        got_x, got_y = to_tensors(source)
        torch.testing.assert_close(got_x, x, rtol=0, atol=1e-7)
        assert torch.equal(got_y, y) and got_y.dtype == torch.long and not got_x.requires_grad
        assert [len(v) for v in to_tensors(source, limit=5)] == [5, 5]
    assert to_tensors([(x[0], 1), (x[1], 2)])[1].tolist() == [1, 2]
    bytes_ = (x * 255).round().to(torch.uint8).numpy()
    for source in ((x, y.tolist()), (x, y[:, None]), [(image, i) for i, image in enumerate(bytes_)]):
        assert torch.equal(to_tensors(source)[0], x) and torch.equal(to_tensors(source)[1], y)
    square = bytes_[:5, 0]  # as many images as columns: each axis could be the batch
    assert torch.equal(to_tensors([(square, y[:5].numpy())])[0], x[:5, :1])
    flat = TensorDataset(x[:, 0], y)
    for source in (flat, *(DataLoader(flat, batch_size=size) for size in (1, 3, 7))):  # 3: the last batch is one image
        assert torch.equal(to_tensors(source)[0], x[:, :1])


def test_pil_images_of_few_colours() -> None:
    image = pytest.importorskip("PIL.Image")
    colours = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    palette = image.fromarray(colours).quantize(20)
    x, _ = to_tensors([(palette, 1)])
    np.testing.assert_array_equal((x[0] * 255).round().numpy(), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))
    bits = image.fromarray(colours[..., 0]).convert("1")
    x, _ = to_tensors([(bits, 1)])
    np.testing.assert_array_equal(x[0, 0].numpy(), np.asarray(bits).astype(np.float32))


def test_to_tensors_refuses_with_a_reason() -> None:
    x, y = torch.rand(4, 1, 5, 5), torch.arange(4)
    for bad, kind, message in [
        ((x * 3 - 1, y), ValueError, "wball.Normalized"),
        ((x[:, 0], y), ValueError, r"images \(4, 5, 5\).*x\[:, None\]"),
        ((x * 255, y), ValueError, "divide bytes by 255"),
        ((x, y + 0.5), ValueError, "labels from 0.5 to 3.5"),
        ((x, y - 1), ValueError, "labels from -1 to 2"),
        ([(x[0], "cat")], TypeError, "label 'cat'"),
        ([(x[0], None)], TypeError, "label None"),
        ((x, y[:3]), ValueError, r"labels \(3,\)"),
        ((x.long(), y), TypeError, "int64"),
        ((x, torch.eye(4)), ValueError, r"one-hot labels give their argmax\(1\)"),
        ([], ValueError, "empty"),
        ([x[0], x[1], x[2]], TypeError, "pairs"),
        ([(x[0], 0), (x[0, :, 1:], 1)], ValueError, "different shapes"),
        ([("a.png", 1)], TypeError, "str"),
        ([{"image": x[0], "x": x[0], "label": 1}], TypeError, "'image', 'x', 'label'.*not clear"),
        ([{"picture": x[0], "label": 1}], TypeError, "'picture', 'label'.*not clear"),
        (3, TypeError, "got int"),
    ]:
        with pytest.raises(kind, match=message):
            to_tensors(bad)
    for limit, kind in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(kind, match="limit"):
            to_tensors((x, y), limit=limit)  # type: ignore[arg-type]


def test_augmentation_is_a_crop_of_the_padded_image() -> None:
    x = torch.rand(40, 2, 6, 7)
    out = RandomCropFlip(padding=2)(x)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for image, source in zip(out, padded, strict=True):
        options = {
            (r, c, flip): source[:, r : r + 6, c : c + 7].flip(2) if flip else source[:, r : r + 6, c : c + 7]
            for r in range(5)
            for c in range(5)
            for flip in (False, True)
        }
        found = [key for key, crop in options.items() if torch.equal(crop, image)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 15 and {flip for *_, flip in seen} == {False, True}
    assert torch.equal(RandomCropFlip(padding=0, flip=False)(x), x)
    same = [RandomCropFlip()(x, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*same)


# --- download ----------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.http.shutdown()
    running.http.server_close()


def mnist_source(server: Server, *mirrors: str) -> fetch.Source:
    images, labels = digits(50)
    for prefix in ("train", "t10k"):
        server.files[f"{prefix}-images-idx3-ubyte.gz"] = gzip.compress(idx(images), mtime=0)
        server.files[f"{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels), mtime=0)
    sums = {name: hashlib.md5(content).hexdigest() for name, content in server.files.items()}
    return fetch.Source(mirrors or (server.url,), sums, "mnist")


def test_download_then_load_then_nothing_to_do(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server)
    heard: list[tuple[str, int, int | None]] = []
    folder = wball.download("mnist", tmp_path / "new", source=source, progress=lambda *a: heard.append(a))
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == sorted(source.files)
    assert load_dataset("mnist", tmp_path / "new", "train")[0].shape == (50, 1, 28, 28)
    size = len(server.files["train-images-idx3-ubyte.gz"])
    assert ("train-images-idx3-ubyte.gz", size, size) in heard
    count = len(server.requests)
    wball.download("mnist", tmp_path / "new", source=source)
    assert len(server.requests) == count


def test_unzipped_files_need_no_download_if_they_are_whole(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server)
    for name, content in server.files.items():
        (tmp_path / "mnist").mkdir(exist_ok=True)
        (tmp_path / "mnist" / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
    assert wball.download("mnist", tmp_path, source=source) == tmp_path / "mnist"
    assert not server.requests
    broken = tmp_path / "mnist" / "train-labels-idx1-ubyte"
    broken.write_bytes(broken.read_bytes()[:-1])
    wball.download("mnist", tmp_path, source=source)
    assert len(server.requests) == 1 and broken.with_suffix(".gz").is_file()
    with pytest.raises(ValueError, match="delete it and download it again"):
        load_dataset("mnist", tmp_path, "train")
    broken.unlink()
    assert len(load_dataset("mnist", tmp_path, "train")[1]) == 50


def test_two_processes_fetch_a_set_once(tmp_path: Path, server: Server) -> None:
    source, held = mnist_source(server), threading.Event()
    answer = server.answer

    def slowly(request: BaseHTTPRequestHandler) -> None:
        held.wait(0.1)  # long enough for the others to come in between
        answer(request)

    server.answer = slowly  # type: ignore[method-assign]
    heard: list[Path] = []

    def one() -> None:
        heard.append(wball.download("mnist", tmp_path, source=source))

    threads = [threading.Thread(target=one) for _ in range(4)]  # each opens the lock for itself, like a process
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [tmp_path / "mnist"] * 4 and len(server.requests) == len(source.files)
    assert load_dataset("mnist", tmp_path, "train")[0].shape == (50, 1, 28, 28)


def test_what_is_there_needs_no_disk_that_can_be_written_to(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mnist_source(server)
    wball.download("mnist", tmp_path, source=source)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(fetch, "locked", read_only)
    assert wball.download("mnist", tmp_path, source=source) == tmp_path / "mnist"


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_transfer_is_resumed(tmp_path: Path, server: Server, ranges: bool) -> None:
    source = mnist_source(server)
    name = "train-images-idx3-ubyte.gz"
    server.break_after, server.ranges = 1000, ranges
    with pytest.raises(fetch.DownloadError, match=r"broke after 1000 of \d+ bytes.*resumed"):
        wball.download("mnist", tmp_path, source=source)
    folder = tmp_path / "mnist"
    assert [p.name for p in folder.glob("*.*") if p.name != ".lock"] == [f"{name}.part"]
    server.break_after = None
    wball.download("mnist", tmp_path, source=source)
    assert (name, "bytes=1000-") in server.requests
    assert (folder / name).read_bytes() == server.files[name]
    assert not list(folder.glob("*.part"))


def test_complete_part_needs_no_bytes(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server)
    name = "train-images-idx3-ubyte.gz"
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{name}.part").write_bytes(server.files[name])
    wball.download("mnist", tmp_path, source=source)
    assert (tmp_path / "mnist" / name).read_bytes() == server.files[name]


@pytest.mark.parametrize("length", [100, 10**6])
def test_a_part_of_something_else_is_no_obstacle(tmp_path: Path, server: Server, length: int) -> None:
    """A single mirror, and a part that it did not send: shorter than the file, or longer."""
    source = mnist_source(server)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz.part").write_bytes(bytes(length))
    wball.download("mnist", tmp_path, source=source)
    assert len(load_dataset("mnist", tmp_path, "train")[1]) == 50


def test_a_full_disk_is_not_taken_for_a_dead_line(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = mnist_source(server, server.url, server.url)

    usual = Path.open

    def full(path: Path, *args: object) -> object:
        if path.suffix == ".part":
            raise OSError(28, "No space left on device")
        return usual(path, *args)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        wball.download("mnist", tmp_path, source=source)
    assert error.value.errno == 28 and len(server.requests) == 1


def test_wrong_checksum_is_thrown_away_and_the_next_mirror_tried(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server, server.url + "bad/", server.url + "none/", server.url)
    for name in source.files:
        server.files[f"bad/{name}"] = b"<html>moved</html>"
    folder = wball.download("mnist", tmp_path, source=source)
    assert load_dataset("mnist", tmp_path)[0].shape[0] == 50
    for name in source.files:
        (folder / name).write_bytes(b"damaged on disk")
        del server.files[name]
    with pytest.raises(fetch.DownloadError, match=r"bad/: wrong checksum.*none/: HTTP 404"):
        wball.download("mnist", tmp_path, source=source)
    assert not list(folder.glob("*.part"))


def test_offline_is_one_clear_message(tmp_path: Path, server: Server) -> None:
    source = mnist_source(server)
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(
        fetch.DownloadError, match=r"could not download .* of MNIST\. Are you offline\?.*by hand"
    ) as error:
        wball.download("mnist", tmp_path, source=source, timeout=2)
    assert "\n" not in str(error.value)


def tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return buffer.getvalue()


def cifar10_source(server: Server, archive: bytes) -> fetch.Source:
    server.files["cifar-10-binary.tar.gz"] = archive
    sums = {"cifar-10-binary.tar.gz": hashlib.md5(archive).hexdigest()}
    return fetch.Source((server.url,), sums, "cifar-10-batches-bin")


@pytest.fixture
def small_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    monkeypatch.setattr(named, "CIFAR10_RECORDS", 4)
    monkeypatch.setattr(fetch, "_CIFAR10_BATCH_BYTES", 4 * 3073)
    write_cifar10(tmp_path / "original", 4)
    return {f"cifar-10-batches-bin/{p.name}": p.read_bytes() for p in sorted((tmp_path / "original").iterdir())}


def test_cifar10_archive_cannot_write_elsewhere(
    tmp_path: Path, server: Server, small_cifar10: dict[str, bytes]
) -> None:
    evil = {"../escaped.bin": b"x", "/tmp/wball-escaped.bin": b"x", "cifar-10-batches-bin/../../up.bin": b"x"}
    source = cifar10_source(server, tar(evil | small_cifar10))
    root = tmp_path / "deep" / "root"
    folder = wball.download("cifar10", root, source=source)
    files = sorted(p.name for p in folder.iterdir())
    assert files == [".lock", *(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    assert [p.name for p in root.iterdir()] == ["cifar-10-batches-bin"]
    assert not (tmp_path / "deep" / "escaped.bin").exists() and not Path("/tmp/wball-escaped.bin").exists()
    assert load_dataset("cifar10", root, "train")[0].shape == (20, 3, 32, 32)
    count = len(server.requests)
    wball.download("cifar10", root, source=source)
    assert len(server.requests) == count


def test_bad_cifar10_archives(tmp_path: Path, server: Server, small_cifar10: dict[str, bytes]) -> None:
    first = next(iter(small_cifar10))
    rest = {k: v for k, v in small_cifar10.items() if k != first}
    cases = [
        (tar(rest), f"{first} not in it"),
        (tar(rest | {first: b"short"}), "is not a file of"),
        (tar(rest, links={first: "/etc/hostname"}), "is not a file of"),
        (tar(small_cifar10)[:2000], "truncated or corrupted"),
    ]
    for archive, message in cases:
        with pytest.raises(ValueError, match=message):
            wball.download("cifar10", tmp_path / "root", source=cifar10_source(server, archive))


def test_known_sources_are_complete() -> None:
    assert set(fetch.SOURCES) == set(data.datasets())
    for source in fetch.SOURCES.values():
        assert all(re.fullmatch(r"[0-9a-f]{32}", md5) for md5 in source.files.values())
        assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in source.mirrors)


def test_affine_turns_about_the_centre_and_keeps_pixels_in_range() -> None:
    x = torch.rand(64, 3, 32, 32)
    draws = torch.Generator().manual_seed(0)
    out = RandomAffine()(x, draws)
    assert out.shape == x.shape and float(out.min()) >= 0 and float(out.max()) <= 1
    assert torch.equal(out, RandomAffine()(x, torch.Generator().manual_seed(0)))
    assert torch.allclose(RandomAffine(0.0)(x), x, atol=1e-5)
    # A dot at the centre stays there; dots 10 pixels away move by at most 10 * (angle + scale + shear).
    dots = torch.zeros(64, 1, 33, 33)
    dots[:, :, 16, 16] = 1
    dots[:, :, 15:18, 25:28] = 1
    moved = RandomAffine()(dots, draws)
    assert (moved[:, 0, 16, 16] > 0.5).all()
    columns = torch.arange(33.0)
    far = moved.clone()
    far[..., :20] = 0
    right = (far.sum((1, 2)) * columns).sum(1) / far.sum((1, 2, 3))
    height = (far.sum((1, 3)) * columns).sum(1) / far.sum((1, 2, 3))
    assert 1.0 < (right.max() - right.min()) < 3.0 and ((right - 26).abs() < 2).all()
    assert 2.0 < (height.max() - height.min()) < 6.5 and ((height - 16).abs() < 3.2).all()
    # Turned one way and the other, and each image in its own way.
    assert height.min() < 15 and height.max() > 17 and len(height.unique()) > 60


def test_cutout_blackens_one_square() -> None:
    out = RandomCutout(4)(torch.ones(500, 2, 12, 10), torch.Generator().manual_seed(1))
    assert torch.equal(out[:, 0], out[:, 1])
    black = out[:, 0] == 0
    rows, columns = black.any(2).sum(1), black.any(1).sum(1)
    assert torch.equal(black.sum((1, 2)), rows * columns)
    assert rows.max() == columns.max() == 4 and rows.min() == columns.min() == 2
    # Every pixel is covered now and then.
    assert black.any(0).all()


def test_colour_sample_is_balanced_and_made_of_bytes() -> None:
    x, y = load_sample("CIFAR-10")
    assert x.shape == (200, 3, 32, 32) and y.bincount().tolist() == [20] * 10
    assert torch.equal((x * 255).round() / 255, x)
    content = (x * 255).round().to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest().startswith("d9b4e5c7ec7a3a2b")
    with pytest.raises(ValueError, match="only of mnist and cifar10"):
        load_sample("fashion-mnist")
