"""The data of an evaluation: tensors, arrays, data sets and files, all read batch by batch.

A :class:`Stream` reads the items it is asked for and keeps none, so memory is bounded by the batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

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
from wball.data import NpzFile, channels_last, read_items, source_name, to_tensors
from wball.data.tensors import Labelled

Box = tuple[float, float] | None
AT_ONCE = 64
"""Number of items read at a time when all items are read."""


class Stream:
    """Images with labels, read on demand. Indexing returns images, :meth:`take` also labels.

    Args:
        count: number of items.
        read: returns images and labels at a list of positions.
        box: the ball's box; images outside of it raise.
        device: device of the returned tensors.
        name: returns the source of an item: its file, or its number in the data.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[list[int]], Labelled],
        box: Box,
        device: torch.device,
        name: Callable[[int], str] = str,
    ) -> None:
        self._count, self._read, self.box, self.device = count, read, box, device
        self.name = name

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice | Tensor | Sequence[int]) -> Tensor:
        return self.take(index)[0]

    def take(self, index: slice | Tensor | Sequence[int]) -> Labelled:
        """Images and labels at the given positions."""
        at = range(self._count)[index] if isinstance(index, slice) else index
        positions = at.tolist() if isinstance(at, Tensor) else list(at)
        x, y = self._read(positions or [0])
        x = inputs.check_images(x, self.box)
        x = x.to(self.device, inputs.result_dtype(x))
        return x[: len(positions)], y[: len(positions)].to(self.device)

    @cached_property
    def first(self) -> Tensor:
        """The first two images."""
        return self[:2]

    def to(self, device: torch.device) -> Stream:
        """The same items on another device."""
        return Stream(self._count, self._read, self.box, device, self.name)

    def only(self, index: Sequence[int]) -> Stream:
        """A stream of a subset of the items."""

        def read(part: list[int]) -> Labelled:
            return self._read([index[k] for k in part])

        return Stream(len(index), read, self.box, self.device, lambda k: self.name(index[k]))

    def survey(self) -> tuple[str, Tensor]:
        """A checksum of all items (equal to that of the same data in tensors), and all labels."""
        digest, labels, shape = hashlib.sha256(), [], tuple(self.first.shape[1:])
        digest.update(f"{(self._count, *shape)} {self.first.dtype};".encode())
        for start in range(0, self._count, AT_ONCE):
            x, y = self.take(slice(start, start + AT_ONCE))
            if tuple(x.shape[1:]) != shape:
                raise ValueError(
                    f"x has images of different shapes: {shape} at first, {tuple(x.shape[1:])} "
                    f"from item {start} on; resize them in the data set"
                )
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            labels.append(y.cpu())
        every = torch.cat(labels)
        digest.update(f"{tuple(every.shape)} {every.dtype};".encode())
        digest.update(every.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest(), every


def open_stream(x: Any, y: Any, model: Any, box: Box) -> Stream:
    """Open a stream of tensors, (memory-mapped) arrays, an ``.npz`` file, a data set or a
    loader."""
    if isinstance(x, Stream):
        return x
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    device = next((p.device for p in parameters), torch.device("cpu"))
    if isinstance(x, (tuple, list)) and len(x) == 2 and y is None:
        x, y = x
    if isinstance(x, (Tensor, np.ndarray)):
        if y is None:
            raise TypeError("y is missing: the labels of the images in x")
        y = np.asarray(y) if isinstance(y, (list, tuple)) else y
        return _of_arrays(x, y, box, x.device if isinstance(x, Tensor) else device)
    if y is not None:
        raise TypeError(
            "y must be left out if the data have labels; name other arguments: ball=..."
        )
    if isinstance(x, (str, os.PathLike)):
        x = NpzFile(x)
    if isinstance(x, DataLoader):
        return _of_loader(x, box, device)
    if isinstance(x, Mapping):
        raise TypeError(
            f"x is a dictionary with {', '.join(map(repr, x)) or 'nothing'}; "
            "give one of its entries (a split), or arrays as x and y"
        )
    if not (hasattr(x, "__getitem__") and hasattr(x, "__len__")):
        raise TypeError(
            "x must be images (B, C, H, W), a data set with a length, a DataLoader of one, or an "
            f".npz file, got {type(x).__name__}; for an iterator give wball.to_tensors(x)"
        )
    return dataset_stream(x, box, device)


def dataset_stream(data: Any, box: Box, device: torch.device) -> Stream:
    """Open a stream of a map-style data set. Errors name the item, or its file."""
    shape: list[tuple[int, ...]] = []

    def read(index: list[int]) -> Labelled:
        x, y = read_items(data, index, shape[0] if shape else None)
        shape[:] = [tuple(x.shape[1:])]  # the first items are read first
        return x, y

    return Stream(len(data), read, box, device, partial(source_name, data))


def _of_arrays(x: Any, y: Any, box: Box, device: torch.device) -> Stream:
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype != torch.uint8:
        images = inputs.check_images(x.detach(), box)
        labels = inputs.check_labels("y", y, x)
        return Stream(len(x), lambda index: (images[index], labels[index]), box, x.device)
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} images and y has {len(y)} labels")
    if isinstance(x, np.ndarray) and x.ndim == 4 and channels_last(x.shape):
        raise ValueError(
            f"x has shape {x.shape}, which looks like channels last: "
            "give x.transpose(0, 3, 1, 2) (or a tensor, if it is not)"
        )

    def read(index: list[int]) -> Labelled:
        images, labels = (
            v[index] if isinstance(v, Tensor) else torch.from_numpy(np.array(v[index]))
            for v in (x, y)
        )
        return to_tensors((images, labels))

    return Stream(len(x), read, box, device)


def _of_loader(loader: DataLoader[Any], box: Box, device: torch.device) -> Stream:
    """All items of the loader's data set, in its order, joined by the loader's ``collate_fn``."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise TypeError(
            "x is a DataLoader of an iterable data set, which cannot be resumed or shared; give a "
            "map-style data set, or wball.to_tensors(x)"
        )
    plain = type(loader.batch_sampler) in (BatchSampler, type(None))
    sampler = loader.sampler if plain else loader.batch_sampler
    if type(sampler) not in (SequentialSampler, RandomSampler, DistributedSampler):
        raise TypeError(
            f"x is a DataLoader with a custom {type(sampler).__name__}, which may leave images "
            "out; give the data set itself, or a part: torch.utils.data.Subset(data, indices)"
        )
    collate = loader.collate_fn
    if collate is default_collate:
        return dataset_stream(data, box, device)
    return Stream(
        len(data),
        lambda index: to_tensors([collate([data[i] for i in index])]),
        box,
        device,
        partial(source_name, data),
    )
