"""The sparse transposed convolution (:mod:`wball.kernels.sparse_transpose`) in plain PyTorch, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.kernels.sparse_transpose import Geometry


def sparse_transpose(
    value: Tensor, cell: Tensor, weight: Tensor, wanted: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """See :func:`wball.kernels.sparse_transpose.sparse_transpose`."""
    after = geometry.after

    def transposed(listed: Tensor, kernel: Tensor) -> Tensor:
        maps = value.new_zeros((listed.shape[1], math.prod(after)))
        maps[:, cell] = listed.T
        spans = [geometry.dilation[k] * (kernel.shape[2 + k] - 1) + 1 for k in (0, 1)]
        least = [
            (after[1 + k] - 1) * geometry.stride[k] - 2 * geometry.padding[k] + spans[k]
            for k in (0, 1)
        ]
        beyond = [geometry.before[1 + k] - least[k] for k in (0, 1)]
        settings = (
            None,
            geometry.stride,
            geometry.padding,
            beyond,
            geometry.groups,
            geometry.dilation,
        )
        return F.conv_transpose2d(maps.reshape(-1, *after), kernel, *settings).flatten(1).T

    seen = transposed(value.new_ones((cell.shape[0], 1)), torch.ones_like(weight))[:, 0] > 0
    reached = (wanted & seen).nonzero()[:, 0]
    return transposed(value, weight)[reached], reached
