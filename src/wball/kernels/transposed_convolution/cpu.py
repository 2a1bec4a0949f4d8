"""Transposed convolutions (:mod:`wball.kernels.transposed_convolution`) on a CPU: zeros of the maps cost nothing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, split
from wball.kernels.transposed_convolution import Window
from wball.moves import Moves

_SHARE = 16  # a map has so many cells for each that is not 0, about


def why_not(x: Tensor, moves: Moves | None) -> str | None:
    """Why maps like ``x`` must be refused, or ``None``."""
    return (
        None
        if x.device.type == "cpu"
        else f"the maps are on {x.device}, this kernel runs on the CPU"
    )


def transposed_convolution(
    a: Tensor, weight: Tensor, stride: tuple[int, int], window: Window
) -> Tensor:
    """See :func:`wball.kernels.transposed_convolution.transposed_convolution`."""
    top, left, height, width = window
    given = (
        a.detach().contiguous().numpy(),
        weight.detach().permute(0, 2, 3, 1).contiguous().numpy(),
    )
    shape = (
        a.shape[0],
        height,
        width,
        weight.shape[1],
    )  # kinds last, so that the inner loop is a long one
    out = np.zeros(shape, dtype=given[0].dtype)

    def work(start: int, stop: int) -> None:
        _place(*given, stride[0], stride[1], top, left, start, stop, out)

    split(a.shape[0], work, a[0].numel() * weight[0].numel() // _SHARE if a.shape[0] else 0)
    return torch.from_numpy(out).permute(0, 3, 1, 2)


@compiled(fastmath={"contract"})
def _place(a, weight, down, across, top, left, start, stop, out):  # type: ignore[no-untyped-def]
    channels, rows, columns = a.shape[1:]
    tall, wide, kinds = weight.shape[1:]
    height, width = out.shape[1:3]
    for n in range(start, stop):
        for c in range(channels):
            for p in range(rows):
                first = p * down - top
                for q in range(columns):
                    value = a[n, c, p, q]
                    if value == 0.0:
                        continue
                    begin = q * across - left
                    for i in range(max(0, -first), min(tall, height - first)):
                        for j in range(max(0, -begin), min(wide, width - begin)):
                            for k in range(kinds):
                                out[n, first + i, begin + j, k] += value * weight[c, i, j, k]
