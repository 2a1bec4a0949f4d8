"""Conversion of data sets, loaders and arrays to tensors."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from wball import inputs

PathLike = str | os.PathLike[str]
Labelled = tuple[Tensor, Tensor]
"""Images and their labels."""

# Names of images and labels in the dictionaries of public data sets.
_IMAGE_NAMES = ("image", "images", "img", "pixel_values", "x", "input", "inputs")
_LABEL_NAMES = ("label", "labels", "y", "target", "targets")


def to_tensors(
    data: Dataset[Any] | DataLoader[Any] | Iterable[Any] | Labelled,
    *,
    limit: int | None = None,
    device: torch.device | str | None = None,
    items: bool = False,
) -> Labelled:
    """Convert any source of images and labels to ``(x, y)``.

    Args:
        data: a pair of tensors or arrays ``(N, C, H, W)`` and ``(N,)`` (labels may be a list), a
            ``Dataset`` of (image, label) items, or a ``DataLoader`` of such batches (or of
            dictionaries such as ``{"image": ..., "label": ...}``). Single images are tensors, NumPy
            arrays (``H x W``; ``H x W x C`` if uint8, unless only the first axis has 1, 3 or 4
            entries) or PIL images; 8-bit values are divided by 255.
        limit: largest number of images.
        device: device of the result (default: that of the data).
        items: ``data`` yields single images, never batches.

    >>> from torch.utils.data import TensorDataset
    >>> x, y = to_tensors(TensorDataset(torch.rand(5, 1, 4, 4), torch.arange(5)), limit=3)
    >>> x.shape, y.tolist()
    (torch.Size([3, 1, 4, 4]), [0, 1, 2])
    """
    if limit is not None:
        inputs.check_count("limit", limit)
    if (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and isinstance(data[0], (Tensor, np.ndarray))
    ):
        images, labels = ([_tensor(data[0])[:limit].detach()], [_label(data[1])[:limit].detach()])
        labels = [v.squeeze(1) if v.ndim == 2 and v.shape[1] == 1 else v for v in labels]
    else:
        images, labels = _collect(data, limit, items)
    shapes = {tuple(image.shape[1:]) for image in images}
    if len(shapes) != 1:
        raise ValueError(
            f"data has images of different shapes, {sorted(shapes)[:3]}; resize them in the data set"
        )
    x, y = torch.cat(images)[:limit], torch.cat(labels)[:limit]
    device = device if device is not None else x.device
    x = inputs.as_pixels(x.to(device))
    if not x.is_floating_point():
        raise TypeError(
            f"data has images of {x.dtype}; give uint8 (0 to 255) or floating-point pixels in [0, 1]"
        )
    if x.ndim != 4 or len(x) != len(y) or y.ndim != 1:
        hints = {
            (3, 1): "; images without channels need an axis for them: x[:, None]",
            (4, 2): "; for one-hot labels give their argmax(1)",
        }
        hint = hints.get((x.ndim, y.ndim), "") if len(x) == len(y) else ""
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
    return x, numbers


def class_names(data: Any) -> list[str] | None:
    """What a data set calls its classes: ``data.classes``, or the names of a Hugging Face label;
    else ``None``."""
    while isinstance(data, (Subset, DataLoader)):
        data = data.dataset
    features = getattr(data, "features", None)
    labels = (
        [features[name] for name in _LABEL_NAMES if name in features]
        if isinstance(features, Mapping)
        else []
    )
    names = getattr(labels[0], "names", None) if labels else getattr(data, "classes", None)
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else None


def from_array(array: np.ndarray[Any, Any]) -> Tensor:
    """Convert ``H x W`` or ``H x W x C`` bytes to ``C x H x W``; arrays already in that order are
    kept."""
    first = array.ndim == 3 and len(array) in (1, 3, 4) and array.shape[2] not in (1, 3, 4)
    planes = array[None] if array.ndim == 2 else array if first else array.transpose(2, 0, 1)
    return torch.from_numpy(planes.copy())


def _collect(data: Any, limit: int | None, items: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Collect batches of images and labels from anything that can be iterated or indexed."""
    data = [data] if isinstance(data, Mapping) else data
    # An IterableDataset may have a length, and inherits a __getitem__ that it does not have.
    if (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset)
    ):
        source: Iterable[Any] = (
            data[i] for i in range(len(data))
        )  # a map-style Dataset need not stop by IndexError
    else:
        try:
            source = iter(data)
        except TypeError:
            raise TypeError(
                f"data must be (x, y), a Dataset or a DataLoader, got {type(data).__name__}"
            ) from None
    images: list[Tensor] = []
    labels: list[Tensor] = []
    count = 0
    for item in source:
        given = _pair(item)
        label = _label(given[1])
        if items and label.numel() != 1:
            raise ValueError(
                f"data has a label of shape {tuple(label.shape)}; for one-hot labels give their argmax"
            )
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
    """Image and label of an item or a batch: its first two elements, or the entries of a dictionary
    with known names."""
    if isinstance(item, Mapping):
        images, labels = ([k for k in names if k in item] for names in (_IMAGE_NAMES, _LABEL_NAMES))
        if len(images) != 1 or len(labels) != 1:
            raise TypeError(
                f"data gives dictionaries with {', '.join(map(repr, item))}, and which of them are image and label is "
                "not clear: wrap it to give (image, label) pairs"
            )
        return item[images[0]], item[labels[0]]
    if not isinstance(item, (tuple, list)) or len(item) < 2:
        raise TypeError(
            f"data must give (image, label) pairs, got {type(item).__name__}; wrap it to do so"
        )
    return item[0], item[1]


def _tensor(value: Any) -> Tensor:
    """A tensor, array or list as a tensor; flipped arrays have negative strides, which torch
    refuses."""
    flipped = isinstance(value, np.ndarray) and min(value.strides, default=0) < 0
    return torch.as_tensor(value.copy() if flipped else value)


def _label(value: Any) -> Tensor:
    try:
        return _tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"data has a label {value!r}; they must be class numbers 0, 1, 2, ..."
        ) from error


def _image(value: Any, single: bool) -> Tensor:
    """One image or, if not ``single``, a batch, as a tensor."""
    if isinstance(value, Tensor):
        return value if value.ndim > 2 else value[None]
    mode = getattr(value, "mode", None)  # of PIL's images
    if mode in ("1", "P", "PA"):  # bits, and numbers of colours
        value = value.convert("L" if mode == "1" else "RGB")
    array = np.asarray(value)
    if array.dtype == np.uint8 and array.ndim in (2, 3) and (single or array.ndim == 2):
        return from_array(array)
    if array.dtype.kind not in "uif":
        raise TypeError(
            f"data has an image of type {type(value).__name__}; give a tensor, an array or a PIL image"
        )
    return torch.from_numpy((array if array.ndim > 2 else array[None]).copy())
