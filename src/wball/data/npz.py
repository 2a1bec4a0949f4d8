"""Images and labels in an ``.npz`` file, read item by item: the arrays are never in memory."""

import os
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from wball.data.tensors import Labelled, PathLike

NAMES = (("x", "y"), ("images", "labels"), ("x_test", "y_test"), ("test_images", "test_labels"))
"""Names of the arrays. Two arrays with other names are told apart by their dimensions."""
CHANNELS = (1, 3, 4)


class _Array(NamedTuple):
    """An array in the archive: its open stream, where the values start, shape and type."""

    stream: Any
    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def row(self, k: int) -> Tensor:
        count = int(np.prod(self.shape[1:]))
        # Seeking forward decompresses what is skipped; seeking back starts at the beginning.
        self.stream.seek(self.start + k * count * self.dtype.itemsize)
        values = self.stream.read(count * self.dtype.itemsize)
        row = np.frombuffer(values, self.dtype, count).reshape(self.shape[1:])
        return torch.from_numpy(row.astype(self.dtype.newbyteorder("=")))


class NpzFile(Dataset[Labelled]):
    """An ``.npz`` file of images and labels as a data set of ``(image, label)``.

    Images whose channels can only be last, ``(N, H, W, C)``, are returned with channels first.
    Items in ascending order are read in one pass over the file.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        if self.path.suffix != ".npz":
            raise ValueError(
                f"{path}: expected an .npz file with images and labels; "
                "open .npy files with numpy.load"
            )
        if not self.path.is_file():
            raise FileNotFoundError(f"no file {os.fspath(path)}")
        try:
            archive = zipfile.ZipFile(self.path)
            found = {n.removesuffix(".npy"): _open(archive.open(n)) for n in archive.namelist()}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is not a complete .npz file of arrays ({error})") from error
        pairs = [(found[x], found[y]) for x, y in NAMES if x in found and y in found]
        by_shape = sorted(found.values(), key=lambda array: -len(array.shape))
        if not pairs and [len(array.shape) for array in by_shape] == [4, 1]:
            pairs = [(by_shape[0], by_shape[1])]
        if not pairs:
            raise ValueError(
                f"{path} must hold arrays x and y (or images and labels), "
                f"it has {', '.join(found) or 'none'}"
            )
        self._images, self._labels = pairs[0]
        if self._images.shape[:1] != self._labels.shape[:1]:
            raise ValueError(
                f"{path} has images of shape {self._images.shape} "
                f"and labels of shape {self._labels.shape}"
            )
        self._last = len(self._images.shape) == 4 and channels_last(self._images.shape)

    def __len__(self) -> int:
        return self._images.shape[0]

    def __getitem__(self, k: int) -> Labelled:
        image = self._images.row(k)
        return (image.movedim(-1, 0) if self._last else image), self._labels.row(k)


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images ``(N, ., ., .)`` of this shape can only have their channels last."""
    return shape[3] in CHANNELS and shape[1] not in CHANNELS


def _open(stream: Any) -> _Array:
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0
    if version != (1, 0):
        header = np.lib.format.read_array_header_2_0
    shape, fortran, dtype = header(stream)
    if any(size < 0 for size in shape):
        raise ValueError(f"an array has the shape {shape}")
    if fortran or dtype.hasobject:
        raise ValueError("save arrays of numbers in C order: numpy.ascontiguousarray")
    return _Array(stream, stream.tell(), shape, dtype)
