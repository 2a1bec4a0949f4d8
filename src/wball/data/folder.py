"""Images in one folder per class, as ImageNet has them: read when they are asked for, resized and cropped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from wball import inputs
from wball.data.tensors import PathLike, from_array, to_tensors

_NO_CLASS = ("__MACOSX", "__pycache__")
"""Folders that programs leave beside one's own."""
NAMED = 3
"""How many of several files a message names."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in one sub-folder per class, as a data set of ``(bytes (C, H, W), class number)``. Needs Pillow.

    Classes are numbered in alphabetical order. Folder names that are numbers from 0 on are the class numbers
    themselves, so that a missing one moves no other; other numbers are put in their order. A folder that holds images
    directly is one class. Hidden files and folders are left alone; other files that are not images are named in a
    warning.

    Args:
        root: the folder.
        size: resize to this height and width, whatever the proportions.
        resize: resize the shorter side to this many pixels, keeping proportions.
        crop: then cut this many pixels (a square, or height and width) out of the middle.
        grey: one channel instead of three.

    Attributes:
        classes: the name of each class number.
        labels: the class number of each image.
        paths: the file of each image.
    """

    def __init__(
        self,
        root: PathLike,
        *,
        size: int | tuple[int, int] | None = None,
        resize: int | None = None,
        crop: int | tuple[int, int] | None = None,
        grey: bool = False,
    ) -> None:
        self._size, self._crop, self._grey = _sides("size", size), _sides("crop", crop), grey
        self._resize = None if resize is None else inputs.check_count("resize", resize)
        if self._size is not None and (resize is not None or crop is not None):
            raise ValueError(
                "size excludes resize and crop: it sets both sides whatever the proportions"
            )
        try:
            from PIL import Image
        except ImportError as error:
            raise ImportError("folders of images need Pillow: pip install wball[images]") from error
        root = Path(root)
        if not root.is_dir():
            raise FileNotFoundError(f"root {os.fspath(root)!r} is not a folder")
        # What a file is, is told by its content, and Pillow hands EPS over to another program, which executes it.
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
        if self._size is not None:
            image = image.resize(self._size[::-1], Image.Resampling.BILINEAR)
        if self._resize is not None:
            short, longer = self._resize, int(self._resize * max(wide, high) / min(wide, high))
            image = image.resize(
                (short, longer) if wide <= high else (longer, short), Image.Resampling.BILINEAR
            )
        if self._crop is not None:
            image = _cropped(path, image, self._crop)
        return from_array(np.asarray(image)), self.labels[k]

    def describe(self, k: int) -> str:
        """What to call an item in a message."""
        return os.fspath(self.paths[k])


def _sides(name: str, value: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Height and width."""
    if value is None:
        return None
    sides = (value, value) if isinstance(value, int) else value
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"{name} must be a number of pixels or (height, width), got {value!r}")
    return inputs.check_count(name, sides[0]), inputs.check_count(name, sides[1])


def _cropped(path: Path, image: Any, crop: tuple[int, int]) -> Any:
    (high, wide), (width, height) = crop, image.size
    if high > height or wide > width:
        raise ValueError(
            f"{path} is {height} x {width}, smaller than the crop of {high} x {wide}: resize it first (--resize)"
        )
    top, left = round((height - high) / 2), round((width - wide) / 2)
    return image.crop((left, top, left + wide, top + high))


def load_folder(
    root: PathLike,
    *,
    size: int | tuple[int, int] | None = None,
    resize: int | None = None,
    crop: int | tuple[int, int] | None = None,
    grey: bool = False,
    skip_bad: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images in one sub-folder per class, all of them, as ``(x, y, class names)``; see :class:`ImageFolder`.

    Without ``size``, or ``resize`` and ``crop``, all images must have the same size. ``skip_bad``: leave out files that
    cannot be read or have another size, with a warning that counts and names them; without it the first one raises.
    """
    folder = ImageFolder(root, size=size, resize=resize, crop=crop, grey=grey)
    data: Dataset[Any] = without_bad(folder) if skip_bad else folder
    x, y = read_items(data, range(len(data)))  # type: ignore[arg-type]
    return x.to(device), y.to(device), folder.classes


def read_items(
    data: Any, index: Sequence[int], shape: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Items of a data set as ``(x, y)``; the first that cannot be read, or has not the ``shape`` of item 0, is
    named."""
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


def read_item(data: Any, k: int) -> tuple[Tensor, Tensor]:
    """Item ``k`` of a data set as a batch of one; whatever is wrong with it, the error names it."""
    name = item_name(data, k)
    try:
        item = data[k]
    except Exception as error:  # whatever somebody's data set raises
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
    """What to say about an item whose shape is not that of the first."""
    if here[0] != there[0]:
        return (
            f"has {here[0]} channel{'s'[: here[0] != 1]}, but {first} has {there[0]}; convert them in the data set, "
            'such as image.convert("RGB")'
        )
    size, other = (" x ".join(map(str, shape[1:])) for shape in (here, there))
    remedy = "pass size=(height, width), or resize and crop (--resize, --crop), to make them equal"
    return f"is {size}, but {first} is {other}; {remedy}"


def without_bad(data: Any) -> Subset[Any]:
    """The items of a data set that can be read and have the shape of the first of these; a warning counts the others.

    Every item is read once.
    """
    good, bad, shape = [], [], None
    for k in range(len(data)):
        try:
            x, _ = read_item(data, k)
        except (ValueError, TypeError, OSError) as error:
            bad.append(str(error).strip().splitlines()[0])
            continue
        shape = shape or tuple(x.shape[1:])
        if tuple(x.shape[1:]) != shape:
            bad.append(f"{item_name(data, k)} has shape {tuple(x.shape[1:])}, not {shape}")
            continue
        good.append(k)
    if not good:
        raise ValueError(
            f"no item of the data can be read; the first: {bad[0]}" if bad else "data is empty"
        )
    if bad:
        more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        warnings.warn(
            f"left out {len(bad)} of {len(data)} items: {'; '.join(bad[:NAMED])}{more}",
            stacklevel=2,
        )
    return Subset(data, good)


def item_name(data: Any, k: int) -> str:
    """What to call item ``k`` of a data set: its file, or its number."""
    data, k = _behind(data, k)
    return data.describe(k) if isinstance(data, ImageFolder) else f"item {k}"


def _behind(data: Any, k: int) -> tuple[Any, int]:
    """The data set that a part was taken of, and where the part's item ``k`` stands in it."""
    while isinstance(data, Subset):
        data, k = data.dataset, data.indices[k]
    return data, k


def labels_of(data: Any) -> Tensor | None:
    """The class numbers of a folder's images, or of some of them, without reading the images; ``None`` if unknown."""
    if isinstance(data, Subset):
        known = labels_of(data.dataset)
        return None if known is None else known[list(data.indices)]
    return torch.tensor(data.labels) if isinstance(data, ImageFolder) else None


def _images_in(folder: Path, endings: set[str]) -> list[Path]:
    """The images in a folder, links to nothing included: reading them says so."""
    found = (p for p in folder.iterdir() if p.suffix.lower() in endings and p.name[0] != ".")
    return sorted(p for p in found if p.is_file() or p.is_symlink() and not p.exists())


def _name_others(folders: Sequence[Path], endings: set[str]) -> None:
    """Say which files in class folders are not taken for images."""
    others = [
        p
        for folder in folders
        for p in sorted(folder.iterdir())
        if p.is_file()
        and p.suffix.lower() not in endings
        and p.name[0] != "."
        and p.name not in ("Thumbs.db",)
    ]
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        named = ", ".join(os.fspath(p) for p in others[:NAMED])
        warnings.warn(f"left out files that are not images: {named}{more}", stacklevel=4)


def _read_image(path: Path, formats: list[str], grey: bool) -> Any:
    from PIL import Image

    try:
        with Image.open(path, formats=formats) as opened:
            known = opened.mode not in ("I", "F")  # Pillow would cut off what is above 255
            wide = opened.mode.startswith("I;16")
            image = Image.fromarray(_bytes(np.asarray(opened))) if wide else opened
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
    """The name of each class number, out of the names of its folders in alphabetical order."""
    if not all(name.isdecimal() for name in folders):
        return tuple(folders)
    numbers = {int(name): name for name in folders}
    if (
        len(numbers) < len(folders) or 0 not in numbers or max(numbers) >= 10_000
    ):  # 1 and 01, counted from 1, dates
        return tuple(sorted(folders, key=int))
    return tuple(numbers.get(k, str(k)) for k in range(max(numbers) + 1))


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """16 bits as 8, rounded: 65535 becomes 255."""
    return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
