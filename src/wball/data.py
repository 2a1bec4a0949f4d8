"""Images as whole tensors: MNIST, Fashion-MNIST, CIFAR-10, folders of images, and anything torch can iterate.

Every loader returns ``x``, ``(N, C, H, W)`` in [0, 1], and ``y``, ``(N,)`` class numbers. The sets are small enough to
stand on a GPU as a whole, which is faster than any loader process; augmentation then happens there, too.

No pickle is ever read: CIFAR-10 is used in its binary version.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from wball import inputs

Split = Literal["train", "test"]
PathLike = str | os.PathLike[str]

CIFAR10_RECORDS = 10_000
"""Images in each file of CIFAR-10."""
_CIFAR10_BYTES = 1 + 3 * 32 * 32

# How dictionaries of public data sets call images and labels.
_IMAGE_NAMES = ("image", "images", "img", "pixel_values", "x", "input", "inputs")
_LABEL_NAMES = ("label", "labels", "y", "target", "targets")

_NO_CLASS = ("__MACOSX", "__pycache__")
"""Folders that programs leave beside one's own."""

# The MNIST label files: Fashion-MNIST uses the same file names, and taking one for the other shows nowhere else.
_MNIST_LABELS = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}


@dataclass(frozen=True)
class DatasetInfo:
    """What a named data set looks like and in which folders (below a root) it is usually found."""

    name: str
    title: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    folders: tuple[str, ...]


_DATASETS = {
    d.name: d
    for d in (
        DatasetInfo("mnist", "MNIST", (1, 28, 28), tuple("0123456789"), ("mnist", "MNIST/raw", "MNIST", ".")),
        DatasetInfo(
            "fashion-mnist",
            "Fashion-MNIST",
            (1, 28, 28),
            ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
            ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST", "."),
        ),
        DatasetInfo(
            "cifar10",
            "CIFAR-10",
            (3, 32, 32),
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."),
        ),
    )
}


def datasets() -> dict[str, DatasetInfo]:
    """The data sets :func:`load_dataset` knows, by name.

    >>> list(datasets())
    ['mnist', 'fashion-mnist', 'cifar10']
    """
    return dict(_DATASETS)


def dataset_info(name: str) -> DatasetInfo:
    """The description of a data set; spelling variants such as ``CIFAR-10`` and ``fashion_mnist`` are understood."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "").replace(" ", "")

    for info in _DATASETS.values():
        if isinstance(name, str) and plain(name) == plain(info.name):
            return info
    raise ValueError(f"unknown data set {name!r}; known are {', '.join(_DATASETS)} (or use load_folder, to_tensors)")


def load_dataset(
    name: str,
    root: PathLike,
    split: Split = "test",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """A whole split as ``(x, y)`` on ``device``.

    Args:
        name: ``mnist``, ``fashion-mnist`` (idx files, plain or gzipped) or ``cifar10`` (the binary version).
        root: the folder with the files, or the one above it, in the layouts of the sets' own sites and of torchvision.
        split: ``train`` or ``test``.
        device: where the tensors go; pixels travel as bytes and become floats there.
        dtype: of the pixels.
    """
    info = dataset_info(name)
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", got {split!r}')
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type such as torch.float32, got {dtype}")
    if not Path(root).is_dir():
        raise FileNotFoundError(f"root {os.fspath(root)!r} is not a folder; {_remedy(info, root)}")
    pixels, labels = _load_cifar10(info, root, split) if info.name == "cifar10" else _load_idx(info, root, split)
    top = int(labels.max()) if len(labels) else 0
    if top >= len(info.classes):
        raise ValueError(
            f"{info.title} ({split}) has a label {top}, above {len(info.classes) - 1}: the file is corrupted; "
            "delete it and download it again"
        )
    return _floats(pixels, device, dtype), labels.to(device=device, dtype=torch.long)


def load_sample(name: str = "mnist", *, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The first 1,000 MNIST test images, which come with the package.

    >>> x, y = load_sample("mnist")
    >>> x.shape, y[:5].tolist()
    (torch.Size([1000, 1, 28, 28]), [7, 2, 1, 0, 4])
    """
    if dataset_info(name).name != "mnist":
        raise ValueError(f"there is no bundled sample of {name!r}, only of mnist; use load_dataset({name!r}, root)")
    folder = resources.files("wball.zoo")
    with (
        resources.as_file(folder / "mnist-sample-images-idx3-ubyte.gz") as images,
        resources.as_file(folder / "mnist-sample-labels-idx1-ubyte.gz") as labels,
    ):
        x, y = read_idx(images), read_idx(labels)
    return _floats(x[:, None], device, torch.float32), y.to(device=device, dtype=torch.long)


def load_folder(
    root: PathLike,
    *,
    size: int | tuple[int, int] | None = None,
    grey: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images in one sub-folder per class, as ``(x, y, class names)``. Needs Pillow (``pip install wball[images]``).

    Classes are numbered in alphabetical order. Folder names that are numbers from 0 on are the class numbers
    themselves, so that a missing one moves no other; other numbers are put in their order. A folder that holds images
    directly is one class. Hidden files and folders are left alone.

    Args:
        root: the folder.
        size: resize to this height and width; without it all images must have the same size.
        grey: one channel instead of three.
        device: where the tensors go.
    """
    if size is not None:
        sides = (size, size) if isinstance(size, int) else size
        if not isinstance(sides, (tuple, list)) or len(sides) != 2:
            raise TypeError(f"size must be a number of pixels or (height, width), got {size!r}")
        height, width = (inputs.check_count("size", side) for side in sides)
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("load_folder needs Pillow: pip install wball[images]") from error
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"root {os.fspath(root)!r} is not a folder")
    # What a file is, is told by its content, and Pillow hands EPS over to another program, which executes it.
    endings = Image.registered_extensions()  # loads the formats
    formats = sorted(set(Image.OPEN) - {"EPS"})
    readable = {ending for ending, kind in endings.items() if kind in formats}
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name not in _NO_CLASS and p.name[0] != ".")
    found = {p: _images_in(p, readable) for p in [root, *folders]}
    filled = [p for p in folders if found[p]]
    if found[root]:
        if filled:
            raise ValueError(f"{root} has images beside class folders ({filled[0].name}, ...): move them into a class")
        folders = filled = [root]
    if not filled:
        raise FileNotFoundError(f"no images in {root} or its sub-folders; expected CLASS/IMAGE.png and the like")
    if len(filled) < len(folders):
        without = next(p for p in folders if not found[p])
        raise ValueError(
            f"{without} has no images directly inside it, but class numbers follow the folders: put images there, or "
            "move the folder out if it is not a class"
        )
    names = _class_names([p.name for p in folders])
    numbers = {name: k for k, name in enumerate(names)}
    pixels, labels, first = [], [], None
    for folder in sorted(folders, key=lambda p: numbers[p.name]):
        for path in found[folder]:
            image = _read_image(path, formats, grey)
            if size is not None:
                image = image.resize((width, height), Image.Resampling.BILINEAR)
            first = first or (path, image.size)
            if image.size != first[1]:
                raise ValueError(
                    f"{path} is {image.size[1]} x {image.size[0]}, but {first[0]} is {first[1][1]} x {first[1][0]}; "
                    "pass size=(height, width) (--size) to resize them all"
                )
            pixels.append(_from_array(np.asarray(image)))
            labels.append(numbers[folder.name])
    x = _floats(torch.stack(pixels), device, torch.float32)
    return x, torch.tensor(labels, device=device), names


def to_tensors(
    data: Dataset[Any] | DataLoader[Any] | Iterable[Any] | tuple[Tensor, Tensor],
    *,
    limit: int | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Any source of images and labels as ``(x, y)``.

    Args:
        data: a pair of tensors or arrays ``(N, C, H, W)`` and ``(N,)`` (labels may be a list), a ``Dataset`` of (image,
            label) items or a ``DataLoader`` of such batches (or of dictionaries such as ``{"image": ..., "label":
            ...}``). Single images are tensors, NumPy arrays (``H x W``; ``H x W x C`` if uint8, unless only the first
            axis has 1, 3 or 4 entries) or PIL images; bytes are divided by 255.
        limit: take this many images at most.
        device: where the tensors go (default: where they are).

    >>> from torch.utils.data import TensorDataset
    >>> x, y = to_tensors(TensorDataset(torch.rand(5, 1, 4, 4), torch.arange(5)), limit=3)
    >>> x.shape, y.tolist()
    (torch.Size([3, 1, 4, 4]), [0, 1, 2])
    """
    if limit is not None:
        inputs.check_count("limit", limit)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], (Tensor, np.ndarray)):
        images, labels = [torch.as_tensor(data[0])[:limit].detach()], [_label(data[1])[:limit].detach()]
        labels = [v.squeeze(1) if v.ndim == 2 and v.shape[1] == 1 else v for v in labels]
    else:
        images, labels = _collect(data, limit)
    shapes = {tuple(image.shape[1:]) for image in images}
    if len(shapes) != 1:
        raise ValueError(f"data has images of different shapes, {sorted(shapes)[:3]}; resize them in the data set")
    x, y = torch.cat(images)[:limit], torch.cat(labels)[:limit]
    device = device if device is not None else x.device
    if x.dtype == torch.uint8:
        x = _floats(x, device, torch.float32)
    elif not x.is_floating_point():
        raise TypeError(f"data has images of {x.dtype}; give uint8 (0 to 255) or floating-point pixels in [0, 1]")
    if x.ndim != 4 or len(x) != len(y) or y.ndim != 1:
        hint = "; images without channels need an axis for them: x[:, None]" if x.ndim == 3 and len(x) == len(y) else ""
        hint = "; for one-hot labels give their argmax(1)" if x.ndim == 4 and y.ndim == 2 and len(x) == len(y) else hint
        raise ValueError(
            f"data must give images (C, H, W) with one label each, got images {tuple(x.shape)}, labels {tuple(y.shape)}"
            + hint
        )
    low, high = (float(x.min()), float(x.max())) if x.numel() else (0.0, 0.0)
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        raise ValueError(
            f"data has pixels from {low:g} to {high:g}, outside [0, 1]; divide bytes by 255, drop the normalisation "
            "from the data set and put it inside the model: wball.Normalized(model, mean, std)"
        )
    numbers = y.to(device=device, dtype=torch.long)
    broken = y.is_floating_point() and bool((numbers != y.to(device)).any())
    if y.numel() and (broken or int(numbers.min()) < 0):
        raise ValueError(
            f"data has labels from {y.min().item():g} to {y.max().item():g}; they must be class numbers 0, 1, 2, ..."
        )
    return x.to(device), numbers


@dataclass(frozen=True)
class RandomCropFlip:
    """CIFAR-10's usual augmentation on a whole batch: pad with black, crop at random, mirror half of the images.

    >>> RandomCropFlip()(torch.rand(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment ``x`` (``generator``: on ``x``'s device)."""
        batch, channels, height, width = x.shape

        def draw(high: int) -> Tensor:
            return torch.randint(high, (batch, 1), device=x.device, generator=generator)

        rows = torch.arange(height, device=x.device) + draw(2 * self.padding + 1)
        columns = torch.arange(width, device=x.device).expand(batch, -1)
        if self.flip:
            columns = torch.where(draw(2).bool(), columns.flip(1), columns)
        columns = columns + draw(2 * self.padding + 1)
        padded = F.pad(x, (self.padding,) * 4)
        image = torch.arange(batch, device=x.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
        return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class RandomAffine:
    """Each image turned, scaled and sheared at random about its centre; what comes in from outside is black.

    With ``amount`` 1 angles are up to 10 degrees, scales in [0.9, 1.1] and shears up to 0.1; other amounts multiply
    these ranges. Pixels stay in [0, 1].

    >>> RandomAffine()(torch.rand(8, 1, 28, 28)).shape
    torch.Size([8, 1, 28, 28])
    """

    amount: float = 1.0

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment ``x`` (``generator``: on ``x``'s device)."""
        draws = torch.rand(4, x.shape[0], device=x.device, generator=generator)
        angle, wide, high, shear = (2 * draws - 1) * self.amount
        angle, shear = angle * math.radians(10), 0.1 * shear
        # A rotation times a shear, divided by the scales: where each pixel of the result looks in the image.
        cosine, sine = angle.cos(), angle.sin()
        width, height = 1 + 0.1 * wide, 1 + 0.1 * high
        nothing = torch.zeros_like(angle)
        across = torch.stack([cosine / width, (shear * cosine - sine) / height, nothing], 1)
        down = torch.stack([sine / width, (shear * sine + cosine) / height, nothing], 1)
        grid = F.affine_grid(torch.stack([across, down], 1), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid.to(x.dtype), mode="bilinear", align_corners=False).clamp(0, 1)


@dataclass(frozen=True)
class RandomCutout:
    """Each image with a square of ``size`` pixels blackened, centred anywhere in the image.

    >>> int((RandomCutout(2)(torch.ones(1, 1, 8, 8)) == 0).sum()) in (1, 2, 4)
    True
    """

    size: int

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment ``x`` (``generator``: on ``x``'s device)."""

        def covered(length: int) -> Tensor:
            centre = torch.randint(length, (x.shape[0], 1), device=x.device, generator=generator)
            behind = torch.arange(length, device=x.device) - centre + self.size // 2
            return (behind >= 0) & (behind < self.size)

        square = covered(x.shape[2])[:, None, :, None] & covered(x.shape[3])[:, None, None, :]
        return x.masked_fill(square, 0.0)


def read_idx(path: PathLike) -> Tensor:
    """The bytes in an idx file (plain or gzipped, told by content), in the shape its header gives."""
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
                raise ValueError(f"{path} is truncated: it ends inside its header; delete it and download it again")
            shape = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
            expected = math.prod(shape)
            # Block by block, because a damaged header may promise terabytes; one byte more than promised tells enough.
            content = bytearray()
            while block := file.read(min(1 << 24, expected + 1 - len(content))):
                content += block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or corrupted ({error}); delete it and download it again") from error
    if len(content) != expected:
        got = f"only {len(content)}" if len(content) < expected else "more"
        raise ValueError(
            f"{path} is truncated or corrupted: its header says {' x '.join(map(str, shape))} = {expected} bytes, "
            f"but it has {got}; delete it and download it again"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape))


def read_cifar10(path: PathLike) -> tuple[Tensor, Tensor]:
    """The images (bytes, ``N x 3 x 32 x 32``) and labels in one file of CIFAR-10's binary version."""
    content = np.fromfile(path, np.uint8)
    if len(content) == 0 or len(content) % _CIFAR10_BYTES:
        raise ValueError(
            f"{os.fspath(path)} is truncated or corrupted: {len(content)} bytes are not a multiple of the "
            f"{_CIFAR10_BYTES} bytes of an image; delete it and download it again"
        )
    rows = torch.from_numpy(content).view(-1, _CIFAR10_BYTES)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _load_idx(info: DatasetInfo, root: PathLike, split: Split) -> tuple[Tensor, Tensor]:
    prefix = "train" if split == "train" else "t10k"
    image_path = _find(info, root, _idx_names(f"{prefix}-images", 3))
    label_path = _find(info, root, _idx_names(f"{prefix}-labels", 1))
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or labels.ndim != 1:
        raise ValueError(
            f"{image_path} has {images.ndim} dimensions and {label_path} has {labels.ndim}; expected 3 and 1"
        )
    if len(images) != len(labels):
        raise ValueError(f"{image_path} has {len(images)} images, but {label_path} has {len(labels)} labels")
    if info.name == "fashion-mnist" and hashlib.sha256(labels.numpy().tobytes()).hexdigest() in _MNIST_LABELS:
        raise ValueError(f"{label_path} belongs to MNIST, not to Fashion-MNIST; {_remedy(info, root)}")
    return images[:, None], labels.long()


def _load_cifar10(info: DatasetInfo, root: PathLike, split: Split) -> tuple[Tensor, Tensor]:
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
    return f"get it with `wball data {info.name} --root {os.fspath(root)}` or wball.download({info.name!r}, root)"


def _images_in(folder: Path, endings: set[str]) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix.lower() in endings and p.name[0] != ".")


def _read_image(path: Path, formats: list[str], grey: bool) -> Any:
    from PIL import Image

    try:
        with Image.open(path, formats=formats) as opened:
            known = opened.mode not in ("I", "F")  # Pillow would cut off what is above 255
            wide = opened.mode.startswith("I;16")
            image = Image.fromarray(_bytes(np.asarray(opened))) if wide else opened
            image = image.convert("L" if grey else "RGB")
    except Exception as error:  # damaged bytes make decoders raise anything
        raise ValueError(f"{path} cannot be read as an image ({error}): corrupted, truncated or too large") from error
    if not known:
        raise ValueError(f"{path} has pixels of 32 bits, whose range is unknown: save it with 8 or 16")
    return image


def _class_names(folders: list[str]) -> tuple[str, ...]:
    """The name of each class number, out of the names of its folders in alphabetical order."""
    if not all(name.isdecimal() for name in folders):
        return tuple(folders)
    numbers = {int(name): name for name in folders}
    if len(numbers) < len(folders) or 0 not in numbers or max(numbers) >= 10_000:  # 1 and 01, counted from 1, dates
        return tuple(sorted(folders, key=int))
    return tuple(numbers.get(k, str(k)) for k in range(max(numbers) + 1))


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """16 bits as 8, rounded: 65535 becomes 255."""
    return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _floats(pixels: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    return pixels.to(device).to(dtype).div_(255)


def _from_array(array: np.ndarray[Any, Any]) -> Tensor:
    """``H x W`` or ``H x W x C`` bytes as ``C x H x W``, which they may be already."""
    first = array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4)
    planes = array[None] if array.ndim == 2 else array if first else array.transpose(2, 0, 1)
    return torch.from_numpy(planes.copy())


def _collect(data: Any, limit: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Batches of images and labels out of anything that can be iterated or indexed."""
    data = [data] if isinstance(data, Mapping) else data
    # An IterableDataset may have a length, and inherits a __getitem__ that it does not have.
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        source: Iterable[Any] = (data[i] for i in range(len(data)))  # a map-style Dataset need not stop by IndexError
    else:
        try:
            source = iter(data)
        except TypeError:
            raise TypeError(f"data must be (x, y), a Dataset or a DataLoader, got {type(data).__name__}") from None
    images: list[Tensor] = []
    labels: list[Tensor] = []
    count = 0
    for item in source:
        given = _pair(item)
        label = _label(given[1])
        image = _image(given[0], single=label.numel() == 1)
        if label.ndim == 0 or (image.ndim == 3 and label.numel() == 1):
            image = image[None]
        elif image.ndim == 3 and label.numel() == len(image):
            image = image[:, None]  # a batch of images without channels, like the single ones
        images.append(image.detach())
        labels.append(label.reshape(-1))
        count += len(image)
        if limit is not None and count >= limit:
            break
    if not images:
        raise ValueError("data is empty")
    return images, labels


def _pair(item: Any) -> tuple[Any, Any]:
    """Image and label out of an item or a batch: the first two of several, or by their usual names in a dictionary."""
    if isinstance(item, Mapping):
        images, labels = ([k for k in names if k in item] for names in (_IMAGE_NAMES, _LABEL_NAMES))
        if len(images) != 1 or len(labels) != 1:
            raise TypeError(
                f"data gives dictionaries with {', '.join(map(repr, item))}, and which of them are image and label is "
                "not clear: wrap it to give (image, label) pairs"
            )
        return item[images[0]], item[labels[0]]
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise TypeError(f"data must give (image, label) pairs, got {type(item).__name__}; wrap it to do so")
    return item[0], item[1]


def _label(value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"data has a label {value!r}; they must be class numbers 0, 1, 2, ...") from error


def _image(value: Any, single: bool) -> Tensor:
    """One image or, if not ``single``, a batch, as a tensor."""
    if isinstance(value, Tensor):
        return value if value.ndim > 2 else value[None]
    mode = getattr(value, "mode", None)  # of PIL's images
    if mode in ("1", "P", "PA"):  # bits, and numbers of colours
        value = value.convert("L" if mode == "1" else "RGB")
    array = np.asarray(value)
    if array.dtype == np.uint8 and array.ndim in (2, 3) and (single or array.ndim == 2):
        return _from_array(array)
    if array.dtype.kind not in "uif":
        raise TypeError(f"data has an image of type {type(value).__name__}; give a tensor, an array or a PIL image")
    return torch.from_numpy((array if array.ndim > 2 else array[None]).copy())
