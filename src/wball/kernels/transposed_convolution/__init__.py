r"""Sums of kernels, each placed where a map says and scaled by what stands there: the charges of anchored certificates.

.. math:: out_{n, k, s p + i - t} = \sum_{c, p, i} a_{n, c, p} \, w_{c, k, i}

a transposed convolution with stride ``s``, cut to a window that begins at ``t``. The maps are mostly zeros: a charge
falls on unstable units alone, and only where they help the attacker.
"""

from __future__ import annotations

from torch import Tensor

from wball.kernels import dispatch

OPERATION = "transposed_convolution"
Window = tuple[int, int, int, int]


def transposed_convolution(a: Tensor, weight: Tensor, stride: tuple[int, int], window: Window) -> Tensor:
    """``(N, K, height, width)``: what falls into the ``window`` (top, left, height, width) of the whole result.

    Args:
        a: ``(N, C, h, w)``.
        weight: ``(C, K, i, j)``, of the same precision.
    """
    usable = dispatch.requested() in ("auto", "cpu") and dispatch.why_not(OPERATION, "cpu", a) is None
    kernel = dispatch.load(OPERATION, "cpu" if usable else "torch")  # torch serves gradients whatever was asked for
    found: Tensor = kernel.transposed_convolution(a, weight, stride, window)
    return found
