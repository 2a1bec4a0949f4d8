"""Transposed convolutions as matrix products.

Libraries run float64 convolutions slowly, and those of many small maps one by one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

FOLDED = 2**27
"""Numbers that a folded convolution may hold at a time."""


def transposed(
    a: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The transposed convolution of ``a`` (N, C, h, w) without padding.

    Many small maps are multiplied by one matrix. In float64, windows of others are: on a GPU, and
    on a CPU if there are more channels after it than before (otherwise copying them takes longer).
    """
    count, *patch = a.shape
    cells = math.prod(patch)
    sides = [
        (patch[1 + k] - 1) * stride[k] + dilation[k] * (weight.shape[2 + k] - 1) + 1 for k in (0, 1)
    ]
    out = (weight.shape[1] * groups, *sides)
    if count <= 2 * cells or cells * math.prod(out) > 2**22:
        pays = a.is_cuda or weight.shape[1] > weight.shape[0]
        if pays and a.dtype == torch.float64 and dilation == (1, 1) and groups == 1:
            return folded(a, weight, stride)
        return F.conv_transpose2d(a, weight, stride=stride, dilation=dilation, groups=groups)
    # Float64 keeps the weights as they are: GPUs may round the input of float32 convolutions.
    every = torch.eye(cells, dtype=torch.float64, device=a.device).reshape(cells, *patch)
    matrix = F.conv_transpose2d(
        every, weight.double(), stride=stride, dilation=dilation, groups=groups
    )
    return (a.flatten(1) @ matrix.to(a.dtype).flatten(1)).reshape(count, *out)


def folded(a: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
    """The same, as one product of the windows of ``a`` for all remainders by the stride.

    Outputs with the same remainder are an ordinary convolution of ``a`` with a part of the kernel.
    """
    channels, height, width = a.shape[1:]
    down, across = stride
    tall, broad = -(-weight.shape[2] // down), -(-weight.shape[3] // across)  # windows of ``a``
    full = F.pad(weight, (0, broad * across - weight.shape[3], 0, tall * down - weight.shape[2]))
    parts = full.reshape(channels, -1, tall, down, broad, across).flip(2, 4)
    matrix = parts.permute(0, 2, 4, 1, 3, 5).reshape(channels * tall * broad, -1)
    rows, columns = height + tall - 1, width + broad - 1
    step = max(1, FOLDED // (rows * columns * (matrix.shape[0] + 2 * matrix.shape[1])))
    found = []
    for some in a.split(step):
        padded = F.pad(some, (broad - 1, broad - 1, tall - 1, tall - 1))
        windows = padded.unfold(2, tall, 1).unfold(3, broad, 1).permute(0, 2, 3, 1, 4, 5)
        out = windows.reshape(-1, matrix.shape[0]) @ matrix
        out = out.reshape(some.shape[0], rows, columns, weight.shape[1], down, across).permute(
            0, 3, 1, 4, 2, 5
        )
        found.append(out.flatten(4).flatten(2, 3))
    bottom, right = (height - 1) * down + weight.shape[2], (width - 1) * across + weight.shape[3]
    whole = found[0] if len(found) == 1 else torch.cat(found)  # a copy would take as long again
    return whole[..., :bottom, :right]
