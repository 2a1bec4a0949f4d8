"""The training images: on the device, or read batch by batch where they are many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wball.data import is_map, labels_of, read_items, to_tensors
from wball.data.tensors import Labelled
from wball.model import as_found, ask, check_classes, other_images

IN_MEMORY = 10**9
"""Data sets of more bytes than this are read batch by batch."""


class TrainingImages:
    """Images and labels by their numbers, on a device.

    A map-style data set of more than :data:`IN_MEMORY` bytes is read as batches need it, and so is
    a stream with its labels. Everything else is read once.

    Attributes:
        labels: all of them.
    """

    def __init__(self, data: Any, device: torch.device) -> None:
        self.device, self.dtype = device, torch.float32
        self._read: Callable[[list[int]], Labelled] = partial(read_items, data)
        self._images: Tensor | None = None
        count = len(data) if is_map(data) else 0
        if isinstance(data, tuple) and hasattr(data[0], "survey"):
            self._read, self.labels = data[0].take, data[1].to(device)
        elif count and self._read([0])[0].nbytes * count > IN_MEMORY:
            self.labels = labels_of(data).to(device)
        else:
            self._images, self.labels = to_tensors(data, device=device)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Tensor) -> Labelled:
        """Images and labels of the items ``index``."""
        if self._images is None:
            x = self._read(index.tolist())[0].to(self.device)
        else:
            x = self._images[index]
        return x.to(self.dtype), self.labels[index]

    @property
    def first(self) -> Tensor:
        """Two images."""
        return self.batch(torch.arange(min(2, len(self)), device=self.device))[0]

    def fit(self, name: str, model: nn.Module) -> TrainingImages:
        """Check that the model takes these images, and return them in its precision."""
        if len(self) == 0:
            raise ValueError(f"{name} has no images")
        self.dtype = next(model.parameters()).dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"model has parameters of {self.dtype}: train it with model.float(), and bf16 in its Optimisation"
            )
        if self._images is not None:
            self._images = self._images.to(self.dtype)
        x = self.first
        with as_found(model, self.device), torch.no_grad():
            try:
                logits = ask(model, x)
            except RuntimeError as error:
                raise ValueError(
                    f"the model cannot take images of shape {tuple(x.shape[1:])}, as in "
                    f"{name}{other_images(model, x)}: {error}"
                ) from error
        check_classes(name, self.labels, logits)
        return self

    def whole(self) -> Labelled:
        """All images and labels."""
        return self.batch(torch.arange(len(self), device=self.device))
