"""Images in one folder per class, as in ImageNet: read on demand, resized and cropped."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from wball import inputs
from wball.data.tensors import Labelled, PathLike, from_array, to_tensors

_NO_CLASS = ("__MACOSX", "__pycache__")
"""Folders that other programs create."""
NAMED = 3
"""Largest number of files that a message names."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in one sub-folder per class, as items ``(bytes (C, H, W), class number)``. Needs
    Pillow.

    Classes are numbered in alphabetical order. If folder names are numbers from 0 on, they are the
    class numbers, so that a missing class does not change the others. Other numbers are sorted by
    value. A folder with images and no sub-folders is one class. Hidden files and folders are
    ignored; a warning names other files that are not images.

    Args:
        root: the folder.
        resize: resize the shorter side to this many pixels, keeping proportions.
        crop: then take the central square of this many pixels.
        grey: convert to one channel.

    Attributes:
        classes: the name of each class number.
        labels: the class number of each image.
        paths: the file of each image.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        resize: int | None = None,
        crop: int | None = None,
        grey: bool = False,
    ) -> None:
        self._grey = grey
        self._resize = None if resize is None else inputs.check_count("resize", resize)
        self._crop = None if crop is None else inputs.check_count("crop", crop)
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError("folders of images need Pillow: pip install wball[images]") from error
        root = Path(root)
        if not root.is_dir():
            raise FileNotFoundError(f"root {os.fspath(root)!r} is not a folder")
        # Pillow detects formats by content, and passes EPS to another program, which executes it.
        endings = Image.registered_extensions()  # loads the formats
        self._formats = sorted(set(Image.OPEN) - {"EPS"})
        readable = {ending for ending, kind in endings.items() if kind in self._formats}
        folders = sorted(
            p for p in root.iterdir() if p.is_dir() and p.name not in _NO_CLASS and p.name[0] != "."
        )
        found = {p: _images_in(p, readable) for p in [root, *folders]}
        filled = [p for p in folders if found[p]]
        if found[root]:
            if filled:
                raise ValueError(
                    f"{root} has images beside class folders ({filled[0].name}, ...): move them into a class"
                )
            folders = filled = [root]
        if not filled:
            raise FileNotFoundError(
                f"no images in {root} or its sub-folders; expected CLASS/IMAGE.png and the like"
            )
        if len(filled) < len(folders):
            without = next(p for p in folders if not found[p])
            raise ValueError(
                f"{without} has no images directly inside it, but class numbers follow the folders: put images there, "
                "or move the folder out if it is not a class"
            )
        self.classes = _class_names([p.name for p in folders])
        numbers = {name: k for k, name in enumerate(self.classes)}
        listed = [(path, numbers[folder.name]) for folder in folders for path in found[folder]]
        listed.sort(key=lambda pair: pair[1])  # files stay in their order
        self.paths, self.labels = [path for path, _ in listed], [label for _, label in listed]
        _name_others(folders, readable)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        from PIL import Image

        path = self.paths[k]
        image = _read_image(path, self._formats, self._grey)
        wide, high = image.size
        if self._resize is not None:
            short, longer = self._resize, int(self._resize * max(wide, high) / min(wide, high))
            image = image.resize(
                (short, longer) if wide <= high else (longer, short), Image.Resampling.BILINEAR
            )
        if (side := self._crop) is not None:
            width, height = image.size
            if side > min(width, height):
                raise ValueError(
                    f"{path} is {height} x {width}, smaller than the crop of {side} x {side}: "
                    "resize it first (--resize)"
                )
            top, left = round((height - side) / 2), round((width - side) / 2)
            image = image.crop((left, top, left + side, top + side))
        return from_array(np.asarray(image)), self.labels[k]


def load_folder(
    root: PathLike,
    *,
    resize: int | None = None,
    crop: int | None = None,
    grey: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images in one sub-folder per class as ``(x, y, class names)``; see :class:`ImageFolder`.

    Without ``resize`` and ``crop`` all images must have the same size. The first file that cannot
    be read, or has a different size, raises an error that names it.
    """
    folder = ImageFolder(root, resize=resize, crop=crop, grey=grey)
    x, y = read_items(folder, range(len(folder)))
    return x.to(device), y.to(device), folder.classes


def read_items(data: Any, index: Sequence[int], shape: tuple[int, ...] | None = None) -> Labelled:
    """Read items of a data set as ``(x, y)``.

    The error names the first item that cannot be read or does not have the ``shape`` of item 0.
    """
    images, labels = [], []
    for k in index:
        x, y = read_item(data, k)
        shape = shape or tuple(x.shape[1:])
        if tuple(x.shape[1:]) != shape:
            raise ValueError(
                f"{item_name(data, k)} {_other_shape(tuple(x.shape[1:]), shape, item_name(data, 0))}"
            )
        images.append(x)
        labels.append(y)
    return torch.cat(images), torch.cat(labels)


def read_item(data: Any, k: int) -> Labelled:
    """Item ``k`` of a data set as a batch of one; errors name the item."""
    name = item_name(data, k)
    try:
        item = data[k]
    except Exception as error:  # a data set may raise anything
        said = (str(error).strip().splitlines() or [""])[0]
        if name in said or (
            isinstance(error, (ValueError, OSError))
            and isinstance(_behind(data, k)[0], ImageFolder)
        ):
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{name} of the data cannot be read: {type(error).__name__}: {said}") from error
    try:
        return to_tensors([item], items=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def _other_shape(here: tuple[int, ...], there: tuple[int, ...], first: str) -> str:
    """The message about an item whose shape differs from the first one's."""
    if here[0] != there[0]:
        return (
            f"has {here[0]} channel{'s'[: here[0] != 1]}, but {first} has {there[0]}; "
            'convert them in the data set, such as image.convert("RGB")'
        )
    size, other = (" x ".join(map(str, shape[1:])) for shape in (here, there))
    remedy = "pass resize and crop (--resize, --crop) to make them equal"
    return f"is {size}, but {first} is {other}; {remedy}"


def source_name(data: Any, k: int) -> str:
    """The file of item ``k`` of a data set, or its number in the whole set."""
    data, k = _behind(data, k)
    return os.fspath(data.paths[k]) if isinstance(data, ImageFolder) else str(k)


def item_name(data: Any, k: int) -> str:
    """The name of item ``k`` of a data set in messages."""
    name = source_name(data, k)
    return f"item {name}" if name.isdigit() else name


def _behind(data: Any, k: int) -> tuple[Any, int]:
    """The data set that a ``Subset`` wraps, and the position of item ``k`` in it."""
    while isinstance(data, Subset):
        data, k = data.dataset, data.indices[k]
    return data, k


def is_map(data: Any) -> bool:
    """Whether items can be read one by one, by their numbers."""
    sized = isinstance(data, Dataset) and hasattr(data, "__len__")
    return sized and not isinstance(data, IterableDataset)


def labels_of(data: Any) -> Tensor:
    """The labels of all items; those of folders, and of parts of them, without reading images."""
    places = [_behind(data, k) for k in range(len(data))]
    if all(isinstance(inner, ImageFolder) for inner, _ in places):
        return torch.tensor([inner.labels[k] for inner, k in places])
    return torch.cat([read_item(data, k)[1] for k in range(len(data))])


def _images_in(folder: Path, endings: set[str]) -> list[Path]:
    """The images in a folder. Dangling links are included, so that reading them raises."""
    found = (p for p in folder.iterdir() if p.suffix.lower() in endings and p.name[0] != ".")
    return sorted(p for p in found if p.is_file() or p.is_symlink() and not p.exists())


def _name_others(folders: Sequence[Path], endings: set[str]) -> None:
    """Warn about files in class folders that are not images."""
    others = [
        p
        for folder in folders
        for p in sorted(folder.iterdir())
        if p.is_file()
        and p.suffix.lower() not in endings
        and p.name[0] != "."
        and p.name != "Thumbs.db"
    ]
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        named = ", ".join(os.fspath(p) for p in others[:NAMED])
        warnings.warn(f"ignored files that are not images: {named}{more}", stacklevel=4)


def _read_image(path: Path, formats: list[str], grey: bool) -> Any:
    """Decode an image as 8-bit RGB or grey; errors name the file."""
    from PIL import Image

    try:
        with Image.open(path, formats=formats) as opened:
            known = opened.mode not in ("I", "F")  # Pillow would clip values above 255
            wide = opened.mode.startswith("I;16")
            if wide:  # 16-bit values as 8 bits, rounded: 65535 becomes 255
                values = (np.asarray(opened).astype(np.uint32) + 128) // 257
            image = Image.fromarray(values.astype(np.uint8)) if wide else opened
            image = image.convert("L" if grey else "RGB")
    except Exception as error:  # damaged bytes make decoders raise anything
        raise ValueError(
            f"{path} cannot be read as an image ({error}): corrupted, truncated or too large"
        ) from error
    if not known:
        raise ValueError(
            f"{path} has pixels of 32 bits, whose range is unknown: save it with 8 or 16"
        )
    return image


def _class_names(folders: list[str]) -> tuple[str, ...]:
    """The name of each class number, from folder names in alphabetical order."""
    if not all(name.isdecimal() for name in folders):
        return tuple(folders)
    numbers = {int(name): name for name in folders}
    if (
        len(numbers) < len(folders) or 0 not in numbers or max(numbers) >= 10_000
    ):  # 1 and 01, counted from 1, dates
        return tuple(sorted(folders, key=int))
    return tuple(numbers.get(k, str(k)) for k in range(max(numbers) + 1))
