"""MNIST, Fashion-MNIST and CIFAR-10, read from the files that their authors publish.

No pickle is read: CIFAR-10 is used in its binary version.
"""

import gzip
import json
import lzma
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wball import inputs
from wball.data.tensors import Labelled, PathLike

Split = Literal["train", "test"]

CIFAR10_RECORDS = 10_000
"""Images in each file of CIFAR-10."""
_CIFAR10_BYTES = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class DatasetInfo:
    """A known data set (``datasets.json``).

    Attributes:
        name: name for :func:`load_dataset`.
        title: name in texts.
        shape: shape of an image.
        classes: names of the classes.
        folders: folders (below a root) to look in; it is downloaded to the first.
        mirrors: where it is downloaded from, in order of preference.
        files: the files there, with their MD5.
    """

    name: str
    title: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    folders: tuple[str, ...]
    mirrors: tuple[str, ...]
    files: dict[str, str]


def _read() -> dict[str, DatasetInfo]:
    text = (resources.files(__package__) / "datasets.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        for row in json.loads(text)
    ]
    return {row["name"]: DatasetInfo(**row) for row in rows}


_DATASETS = _read()


def datasets() -> dict[str, DatasetInfo]:
    """The data sets that :func:`load_dataset` reads, by name.

    >>> list(datasets())
    ['mnist', 'fashion-mnist', 'cifar10']
    """
    return dict(_DATASETS)


def dataset_info(name: str) -> DatasetInfo:
    """The description of a data set. Case, hyphens and underscores in the name are ignored."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "").replace(" ", "")

    for info in _DATASETS.values():
        if isinstance(name, str) and plain(name) == plain(info.name):
            return info
    raise ValueError(
        f"unknown data set {name!r}; choose from {', '.join(_DATASETS)} (or use load_folder, to_tensors)"
    )


def load_dataset(
    name: str,
    root: PathLike,
    split: Split = "test",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Labelled:
    """Load a split as ``(x, y)`` on ``device``.

    Args:
        name: ``mnist``, ``fashion-mnist`` (idx files, plain or gzipped) or ``cifar10`` (the binary
            version).
        root: the folder with the files or its parent. The layout of torchvision is known, too.
        split: ``train`` or ``test``.
        device: device of the tensors. Pixels are copied as bytes and converted there.
        dtype: dtype of the images.
    """
    info = dataset_info(name)
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", got {split!r}')
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type such as torch.float32, got {dtype}")
    if not Path(root).is_dir():
        raise FileNotFoundError(f"root {os.fspath(root)!r} is not a folder; {_remedy(info, root)}")
    pixels, labels = (
        _load_cifar10(info, root, split) if info.name == "cifar10" else _load_idx(info, root, split)
    )
    top = int(labels.max()) if len(labels) else 0
    if top >= len(info.classes):
        raise ValueError(
            f"{info.title} ({split}) has a label {top}, above {len(info.classes) - 1}: the file is corrupted; "
            "delete it and download it again"
        )
    return pixels.to(device).to(dtype).div_(255), labels.to(device=device, dtype=torch.long)


def load_sample(name: str = "mnist", *, device: torch.device | str = "cpu") -> Labelled:
    """Load the bundled images: 1,000 of MNIST's test set, or 20 per class of CIFAR-10's.

    >>> x, y = load_sample("mnist")
    >>> x.shape, y[:5].tolist()
    (torch.Size([1000, 1, 28, 28]), [7, 2, 1, 0, 4])
    >>> x, y = load_sample("cifar10")
    >>> x.shape, y.bincount().tolist()
    (torch.Size([200, 3, 32, 32]), [20, 20, 20, 20, 20, 20, 20, 20, 20, 20])
    """
    known, folder = dataset_info(name).name, resources.files("wball.zoo")
    if known == "cifar10":
        x, y = _unpacked((folder / "cifar10-sample.xz").read_bytes())
    elif known == "mnist":
        with (
            resources.as_file(folder / "mnist-sample-images-idx3-ubyte.gz") as images,
            resources.as_file(folder / "mnist-sample-labels-idx1-ubyte.gz") as labels,
        ):
            x, y = read_idx(images)[:, None], read_idx(labels)
    else:
        raise ValueError(
            f"there is no bundled sample of {name!r}, only of mnist and cifar10; use load_dataset({name!r}, root)"
        )
    return inputs.as_pixels(x.to(device)), y.to(device=device, dtype=torch.long)


def _unpacked(content: bytes) -> Labelled:
    """Decode the sample: labels, then differences of neighbours, red and blue relative to green."""
    stored = np.frombuffer(lzma.decompress(content), np.uint8)
    count = len(stored) // _CIFAR10_BYTES
    planes = (
        stored[count:].reshape(count, 3, 32, 32).cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    )
    planes[:, [0, 2]] += planes[:, [1]]
    return torch.from_numpy(planes), torch.from_numpy(stored[:count].copy())


def read_idx(path: PathLike) -> Tensor:
    """Read an idx file of bytes, plain or gzipped, in the shape of its header."""
    path = Path(path)
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            magic = file.read(4)
            if len(magic) < 4 or magic[:3] != b"\x00\x00\x08" or not 1 <= magic[3] <= 4:
                raise ValueError(
                    f"{path} is not an idx file of bytes: it starts with {magic.hex() or 'nothing'}, not 000008; "
                    "it may be an error page saved under that name: delete it and download it again"
                )
            header = file.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise ValueError(
                    f"{path} is truncated: it ends inside its header; delete it and download it again"
                )
            shape = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
            expected = math.prod(shape)
            # Read in blocks, because a damaged header may announce terabytes.
            content = bytearray()
            while block := file.read(min(1 << 24, expected + 1 - len(content))):
                content += block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is truncated or corrupted ({error}); delete it and download it again"
        ) from error
    if len(content) != expected:
        got = f"only {len(content)}" if len(content) < expected else "more"
        raise ValueError(
            f"{path} is truncated or corrupted: its header says {' x '.join(map(str, shape))} = {expected} bytes, "
            f"but it has {got}; delete it and download it again"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape))


def read_cifar10(path: PathLike) -> Labelled:
    """Read the images (bytes, ``N x 3 x 32 x 32``) and labels of one file of CIFAR-10's binary
    version."""
    content = np.fromfile(path, np.uint8)
    if len(content) == 0 or len(content) % _CIFAR10_BYTES:
        raise ValueError(
            f"{os.fspath(path)} is truncated or corrupted: {len(content)} bytes are not a multiple of the "
            f"{_CIFAR10_BYTES} bytes of an image; delete it and download it again"
        )
    rows = torch.from_numpy(content).view(-1, _CIFAR10_BYTES)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _load_idx(info: DatasetInfo, root: PathLike, split: Split) -> Labelled:
    prefix = "train" if split == "train" else "t10k"
    image_path = _find(info, root, _idx_names(f"{prefix}-images", 3))
    label_path = _find(info, root, _idx_names(f"{prefix}-labels", 1))
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or labels.ndim != 1:
        raise ValueError(
            f"{image_path} has {images.ndim} dimensions and {label_path} has {labels.ndim}; expected 3 and 1"
        )
    if len(images) != len(labels):
        raise ValueError(
            f"{image_path} has {len(images)} images, but {label_path} has {len(labels)} labels"
        )
    return images[:, None], labels.long()


def _load_cifar10(info: DatasetInfo, root: PathLike, split: Split) -> Labelled:
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    parts = []
    for name in names:
        path = _find(info, root, [name])
        images, labels = read_cifar10(path)
        if len(images) != CIFAR10_RECORDS:
            raise ValueError(
                f"{path} is truncated or corrupted: it has {len(images)} images instead of {CIFAR10_RECORDS}; "
                "delete it and download it again, or use read_cifar10 to read a part on purpose"
            )
        parts.append((images, labels))
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _idx_names(stem: str, ndim: int) -> list[str]:
    return [f"{stem}{dot}idx{ndim}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]


def _find(info: DatasetInfo, root: PathLike, names: Sequence[str]) -> Path:
    """The first existing file of these names in the folders of a data set."""
    for folder in info.folders:
        for name in names:
            path = Path(root) / folder / name
            if path.is_file():
                return path
    below = ", ".join(f for f in info.folders if f != ".")
    raise FileNotFoundError(
        f"{names[0]} of {info.title} is not in {os.fspath(root)!r} or its folders {below}; {_remedy(info, root)}"
    )


def _remedy(info: DatasetInfo, root: PathLike) -> str:
    return f"get it with `wball data {info.name} --data-dir {os.fspath(root)}` or wball.download({info.name!r}, root)"
