r"""Sums of kernels, each placed where a map says and scaled by what stands there: the charges of anchored certificates.

.. math:: out_{n, k, s p + i - t} = \sum_{c, p, i} a_{n, c, p} \, w_{c, k, i}

a transposed convolution with stride ``s``, cut to a window that begins at ``t``. The maps are mostly zeros: a charge
falls on unstable units alone, and only where they help the attacker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wball.kernels import dispatch

Window = tuple[int, int, int, int]


def transposed_convolution(
    a: Tensor, weight: Tensor, stride: tuple[int, int], window: Window
) -> Tensor:
    """``(N, K, height, width)``: what falls into the ``window`` (top, left, height, width) of the whole result.

    Args:
        a: ``(N, C, h, w)``.
        weight: ``(C, K, i, j)``, of the same precision.

    Gradients pass through torch whatever kernel is asked for: the others record nothing.
    """
    recorded = torch.is_grad_enabled() and (a.requires_grad or weight.requires_grad)
    name = "torch" if recorded else dispatch.choose("transposed_convolution", a)
    found: Tensor = dispatch.load("transposed_convolution", name).transposed_convolution(
        a, weight, stride, window
    )
    return found
