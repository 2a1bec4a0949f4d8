"""What every solver does around its mathematics: layout, precision and memory.

Solvers work on ``(B, C, H, W)`` in float64 and in chunks of images; callers get their own shape and dtype back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_ARC_ENTRIES = 12_000_000
"""Moves held at once by the reference solvers (about 100 MB per arc tensor in float64)."""


def as_grid(values: Tensor) -> Tensor:
    """Histograms ``(B, n)`` become ``(B, 1, 1, n)``; images pass through. Always float64."""
    grid = values if values.ndim == 4 else values[:, None, None, :]
    return grid.to(torch.float64)


def result_dtype(x: Tensor) -> torch.dtype:
    """The images' dtype, but at least float32: a half-precision point cannot keep its mass to 1e-5."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def as_given(point: Tensor, x: Tensor, box: tuple[float, float] | None) -> Tensor:
    """A float64 grid in the shape and dtype of ``x``, with rounding kept inside the box."""
    out = point.reshape(x.shape)
    if box is not None:
        out = out.clamp(*box)
    return out.to(result_dtype(x))


def chunks(batch: int, entries_per_image: int) -> Iterator[slice]:
    """Slices of the batch whose arc tensors fit in memory."""
    size = max(1, MAX_ARC_ENTRIES // max(1, entries_per_image))
    for start in range(0, batch, size):
        yield slice(start, min(batch, start + size))
