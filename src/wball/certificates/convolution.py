"""Transposed convolutions as matrix products.

Libraries run float64 convolutions slowly, and transposed ones of many small maps one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def windowed(
    a: Tensor, weight: Tensor, stride: tuple[int, int], window: tuple[int, int, int, int]
) -> Tensor:
    """The transposed convolution of ``a`` (N, C, h, w), cut to a ``window`` (top, left,
    height, width).
    """
    raw = _product(a, weight, stride, (1, 1), 1)
    if raw is None:
        raw = folded(a, weight, stride)
    top, left, height, width = window
    return F.pad(raw, (-left, left + width - raw.shape[3], -top, top + height - raw.shape[2]))


def transposed(
    a: Tensor, weight: Tensor, stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor:
    """The transposed convolution of many small patches, without padding."""
    product = _product(a, weight, stride, dilation, groups)
    if product is not None:
        return product
    return F.conv_transpose2d(a, weight, stride=stride, dilation=dilation, groups=groups)


def _product(
    a: Tensor, weight: Tensor, stride: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Tensor | None:
    """As one matrix product where the patches are small and many; libraries run such
    convolutions patch by patch.
    """
    count, *patch = a.shape
    cells = math.prod(patch)
    sides = [
        (patch[1 + k] - 1) * stride[k] + dilation[k] * (weight.shape[2 + k] - 1) + 1 for k in (0, 1)
    ]
    out = (weight.shape[1] * groups, *sides)
    if count <= 2 * cells or cells * math.prod(out) > 2**22:
        return None
    # In float64, which writes the weights down as they are: GPUs may round what float32
    # convolutions read.
    every = torch.eye(cells, dtype=torch.float64, device=a.device).reshape(cells, *patch)
    matrix = F.conv_transpose2d(
        every, weight.double(), stride=stride, dilation=dilation, groups=groups
    ).to(a.dtype)
    return (a.flatten(1) @ matrix.flatten(1)).reshape(count, *out)


FOLDED = 2**27
"""Numbers that a transposed convolution by products may hold at a time."""


def folded(a: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """The transposed convolution without padding as one product.

    Outputs whose position leaves the same remainder by the stride see the same part of the kernel:
    they are an ordinary
    convolution of ``a`` with it, and all remainders together one product of its windows.
    """
    channels, height, width = a.shape[1:]
    down, across = stride
    spans = [
        -(-weight.shape[2] // down),
        -(-weight.shape[3] // across),
    ]  # windows of ``a`` that an output sees
    full = F.pad(
        weight, (0, spans[1] * across - weight.shape[3], 0, spans[0] * down - weight.shape[2])
    )
    parts = full.reshape(channels, -1, spans[0], down, spans[1], across).flip(2, 4)
    matrix = parts.permute(0, 2, 4, 1, 3, 5).reshape(
        channels * spans[0] * spans[1], -1
    )  # (in, i, j), (out, r, c)
    rows, columns = height + spans[0] - 1, width + spans[1] - 1
    sides = ((height - 1) * down + weight.shape[2], (width - 1) * across + weight.shape[3])
    step = max(1, FOLDED // (rows * columns * (matrix.shape[0] + 2 * matrix.shape[1])))

    def product(some: Tensor) -> Tensor:
        padded = F.pad(some, (spans[1] - 1, spans[1] - 1, spans[0] - 1, spans[0] - 1))
        windows = padded.unfold(2, spans[0], 1).unfold(3, spans[1], 1).permute(0, 2, 3, 1, 4, 5)
        out = windows.reshape(-1, matrix.shape[0]) @ matrix
        return out.reshape(some.shape[0], rows, columns, -1, down, across).permute(0, 3, 1, 4, 2, 5)

    if a.requires_grad:  # a recording cannot write into parts of a tensor
        found = torch.cat([product(some) for some in a.split(step)])
    else:
        found = a.new_empty(
            (a.shape[0], matrix.shape[1] // (down * across), rows, down, columns, across)
        )
        for some, goal in zip(a.split(step), found.split(step), strict=True):
            goal.copy_(product(some))
    return found.reshape(a.shape[0], -1, rows * down, columns * across)[..., : sides[0], : sides[1]]
