"""Storage of images as bytes, if that is exact."""

from __future__ import annotations

import torch
from torch import Tensor

GLANCE = 4096
"""Pixels that are tested first, so that most other images are recognised at once."""


def as_bytes(images: Tensor) -> Tensor:
    """Images as uint8, if every pixel is a multiple of 1/255 to the last bit; the same tensor otherwise.

    >>> as_bytes(torch.tensor([0.0, 51 / 255, 1.0]))
    tensor([  0,  51, 255], dtype=torch.uint8)
    >>> as_bytes(torch.tensor([0.3]))
    tensor([0.3000])
    """
    if images.dtype != torch.float32:
        return images
    first = images.reshape(-1)[:GLANCE]
    if first.numel() < images.numel() and as_bytes(first).dtype != torch.uint8:
        return images
    packed = (images * 255).round().nan_to_num(0).clamp(0, 255).to(torch.uint8)
    return packed if torch.equal(as_pixels(packed), images) else images


def as_pixels(stored: Tensor) -> Tensor:
    """The images that :func:`as_bytes` stored."""
    return stored.to(torch.float32).div_(255) if stored.dtype == torch.uint8 else stored
