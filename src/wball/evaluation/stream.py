"""Data sets that are read batch by batch: memory is bounded by the batch in work, never by the data set.

A :class:`Stream` looks like the pair of tensors that it stands for: ``stream.images[index]`` reads those items and no
others, and so does ``stream.labels[index]``. The last reads are remembered, because images and labels come together,
and the batch that comes next is read in a thread of its own while the one before is attacked.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from wball import inputs
from wball.data import read_items, to_tensors
from wball.inputs import result_dtype

Layout = Literal["NCHW", "NHWC"]
Reader = Callable[[list[int]], tuple[Tensor, Tensor]]
AT_ONCE = 64
"""Items read at a time while all of them are looked at."""
REMEMBERED = 2
CHANNELS = (1, 3, 4)
"""Of images, as nearly everybody's have."""


class Stream:
    """Images and labels that are read when they are asked for.

    Args:
        count: how many items there are.
        read: the items at a list of positions, as checked tensors.
        box: the ball's box, which the pixels must keep.
        device: where images and labels go.
    """

    def __init__(
        self, count: int, read: Reader, box: tuple[float, float] | None, device: torch.device
    ) -> None:
        self._count, self.read, self.box, self.device = count, read, box, device
        self._recent: OrderedDict[tuple[int, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._next: tuple[tuple[int, ...], Future[tuple[Tensor, Tensor]]] | None = None
        self._reader, self._one = ThreadPoolExecutor(1, "wball-reader"), Lock()
        self.images, self.labels = View(self, 0), View(self, 1)

    def __len__(self) -> int:
        return self._count

    def take(self, index: list[int]) -> tuple[Tensor, Tensor]:
        key = tuple(index)
        if key not in self._recent:
            ready = self._next if self._next is not None and self._next[0] == key else None
            x, y = ready[1].result() if ready is not None else self._checked(index)
            self._next = None if ready is not None else self._next
            self._recent[key] = x.to(self.device, non_blocking=True), y.to(self.device)
            while len(self._recent) > REMEMBERED:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return self._recent[key]

    def expect(self, index: range) -> None:
        """Begin to read items that will be asked for next."""
        key = tuple(index)
        if key and key not in self._recent and (self._next is None or self._next[0] != key):
            self._next = key, self._reader.submit(self._checked, list(key))

    def _checked(self, index: list[int]) -> tuple[Tensor, Tensor]:
        """Items on the CPU; for a GPU in memory that it can copy from by itself."""
        with self._one:  # data sets need not be ready for two threads
            x, y = self.read(index)
        x = inputs.check_images("x", x, self.box)
        x = x.to(result_dtype(x))
        return (x.pin_memory() if self.device.type == "cuda" else x), y

    def survey(self) -> tuple[str, int, int]:
        """The fingerprint of all data (that of the same data in tensors), and the least and largest label."""
        digest, labels, shape = hashlib.sha256(), [], None
        for start in range(0, self._count, AT_ONCE):
            x, y = self.take(list(range(start, min(start + AT_ONCE, self._count))))
            self.expect(range(start + AT_ONCE, min(start + 2 * AT_ONCE, self._count)))
            if shape is None:
                shape = tuple(x.shape[1:])
                digest.update(f"{(self._count, *shape)} {x.dtype};".encode())
            elif tuple(x.shape[1:]) != shape:
                raise ValueError(
                    f"x has images of different shapes: {shape} at first, {tuple(x.shape[1:])} from item {start} on; "
                    "resize them in the data set"
                )
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            labels.append(y.cpu())
        every = torch.cat(labels)
        digest.update(f"{tuple(every.shape)} {every.dtype};".encode())
        digest.update(every.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest(), int(every.min()), int(every.max())


class View:
    """The images, or the labels, of a stream: indexed like a tensor, read on demand."""

    def __init__(self, stream: Stream, which: Literal[0, 1]) -> None:
        self._stream, self._which = stream, which

    @property
    def stream(self) -> Stream:
        return self._stream

    @property
    def device(self) -> torch.device:
        return self._stream.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def to(self, device: torch.device) -> View:
        """The view itself: its images go to the device of the stream."""
        assert torch.device(device) == self.device
        return self

    def only(self, index: list[int]) -> View:
        """A view of some of the items."""
        part = Stream(
            len(index),
            lambda k: self._stream.read([index[i] for i in k]),
            self._stream.box,
            self.device,
        )
        return View(part, self._which)

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        at = range(len(self))[index] if isinstance(index, slice) else index.tolist()
        if len(at) == 0:
            return self._stream.take([0])[self._which][:0]
        return self._stream.take(list(at))[self._which]


Images = Tensor | View


def unpacked(x: Any, y: Any) -> tuple[Any, Any]:
    """Images and labels, where they come as a pair, a dictionary of arrays or a file of them; labels are no lists."""
    if isinstance(x, (str, os.PathLike)):
        _no_labels_beside(y)
        return read_npz(Path(x))
    if isinstance(x, Mapping):
        _no_labels_beside(y)
        return _of_names(x)
    if (
        isinstance(x, (tuple, list))
        and len(x) == 2
        and y is None
        and isinstance(x[0], (Tensor, np.ndarray))
    ):
        x, y = x
    return x, np.asarray(y) if isinstance(y, (list, tuple)) else y


def find_stream(
    x: Any, y: Any, model: Any, box: tuple[float, float] | None, layout: Layout = "NCHW"
) -> Stream | None:
    """A stream for anything but tensors: arrays (also memory-mapped), ``.npz`` files, data sets, loaders."""
    if layout not in ("NCHW", "NHWC"):
        raise ValueError(f'layout must be "NCHW" or "NHWC", got {layout!r}')
    device = (
        next((p.device for p in model.parameters()), torch.device("cpu"))
        if isinstance(model, nn.Module)
        else None
    )
    device = device or torch.device("cpu")
    if isinstance(x, View):
        return x.stream
    if isinstance(x, Tensor) and (isinstance(y, Tensor) or y is None) and layout == "NCHW":
        return None
    if isinstance(x, (Tensor, np.ndarray)):
        return _of_arrays(x, y, box, device, layout)
    if isinstance(x, DataLoader):
        return _of_loader(x, y, box, device)
    if not (hasattr(x, "__getitem__") and hasattr(x, "__len__")):
        raise TypeError(
            f"x must be images (B, C, H, W), a data set with a length, a DataLoader of one, or an .npz file, "
            f"got {type(x).__name__}; for an iterator give wball.to_tensors(x)"
        )
    _no_labels_beside(y)
    return dataset_stream(x, box, device)


def dataset_stream(data: Any, box: tuple[float, float] | None, device: torch.device) -> Stream:
    """A stream of a map-style data set; the first item whose shape is not that of item 0 is named."""
    shape: list[tuple[int, ...]] = []

    def read(index: list[int]) -> tuple[Tensor, Tensor]:
        x, y = read_items(data, index, shape[0] if shape else None)
        shape[:] = [tuple(x.shape[1:])]  # the first items are read first
        return x, y

    return Stream(len(data), read, box, device)


NAMES = (("x", "y"), ("images", "labels"), ("x_test", "y_test"), ("test_images", "test_labels"))
"""What arrays of images and labels are called in files. Two arrays with other names are told apart by their shapes."""


def read_npz(path: Path) -> tuple[Any, Any]:
    """The arrays of images and labels in a file."""
    if path.suffix != ".npz":
        raise ValueError(
            f"{path}: expected an .npz file with images and labels; open .npy files with numpy.load"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except Exception as error:  # zip, numpy and pickle each have their own
        raise ValueError(f"{path} is not a complete .npz file of arrays ({error})") from error
    try:
        return _of_names(found)
    except TypeError:
        said = f"{path} must hold arrays x and y (or images and labels), it has {', '.join(found) or 'none'}"
        raise ValueError(said) from None


def _of_names(found: Mapping[str, Any]) -> tuple[Any, Any]:
    """Arrays of images and labels out of a dictionary of them."""
    for images, labels in NAMES:
        if images in found and labels in found:
            return found[images], found[labels]
    arrays = sorted(found.values(), key=lambda value: getattr(value, "ndim", 0), reverse=True)
    if [getattr(value, "ndim", 0) for value in arrays] == [4, 1]:
        return arrays[0], arrays[1]
    raise TypeError(
        f"x is a dictionary with {', '.join(map(repr, found)) or 'nothing'}; give one of its entries (a split), or "
        "arrays as x and y"
    )


def _no_labels_beside(y: Any) -> None:
    if y is not None:
        raise TypeError(
            "y must be left out where the data bring their own labels; name other arguments: ball=..."
        )


def _of_arrays(
    x: Any, y: Any, box: tuple[float, float] | None, device: torch.device, layout: Layout
) -> Stream:
    if y is None:
        raise TypeError("y is missing: the labels of the images in x")
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} images and y has {len(y)} labels")
    if layout == "NCHW" and isinstance(x, np.ndarray) and x.ndim == 4 and channels_last(x.shape):
        raise ValueError(
            f"x has shape {x.shape}, which looks like channels last: say layout='NHWC' (or give a tensor)"
        )

    def read(index: list[int]) -> tuple[Tensor, Tensor]:
        # A run of neighbours is a slice, which memory-mapped files read at once.
        run = (
            slice(index[0], index[-1] + 1)
            if index == list(range(index[0], index[-1] + 1))
            else index
        )
        images, labels = (
            v if isinstance(v, Tensor) else torch.from_numpy(np.array(v)) for v in (x[run], y[run])
        )
        return to_tensors((images.movedim(-1, 1) if layout == "NHWC" else images, labels))

    return Stream(len(x), read, box, device)


def channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images of such a shape can only have their channels last."""
    return shape[3] in CHANNELS and shape[1] not in CHANNELS


def _of_loader(
    loader: DataLoader[Any], y: Any, box: tuple[float, float] | None, device: torch.device
) -> Stream:
    """The data set behind a loader, all of it and in its own order, joined by the loader's ``collate_fn``."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise TypeError(
            "x is a DataLoader of an iterable data set, which cannot be resumed or shared; give a map-style data set, "
            "or wball.to_tensors(x)"
        )
    _no_labels_beside(y)
    chosen = (
        loader.sampler
        if type(loader.batch_sampler) in (BatchSampler, type(None))
        else loader.batch_sampler
    )
    if type(chosen) not in (SequentialSampler, RandomSampler, DistributedSampler):
        raise TypeError(
            f"x is a DataLoader with a {type(chosen).__name__} of its own, which may leave images out; give the data "
            "set itself, or a part: torch.utils.data.Subset(data, indices)"
        )
    collate = loader.collate_fn
    if collate is default_collate:
        return dataset_stream(data, box, device)
    return Stream(
        len(data), lambda index: to_tensors([collate([data[i] for i in index])]), box, device
    )
