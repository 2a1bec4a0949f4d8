r"""A transposed convolution of many maps at once, at the cells that matter: rows of a bound behind inactive units.

.. math:: out_{c, s p + d i - t, n} = \sum_{k, p, i} value_{k, p, n} \, w_{k, c, i}

The maps stand side by side, so that all of them are served by one reading of the weights; half of the cells of a
network's layers are known to be 0 for all of them, and half of the results are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wball.kernels import dispatch


@dataclass(frozen=True)
class Geometry:
    """Of a convolution from maps of shape ``before`` (C, H, W) to maps of shape ``after``."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def sparse_transpose(
    value: Tensor, cell: Tensor, weight: Tensor, wanted: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """The maps before the convolution where they are wanted and may differ from 0: ``(L', N)``, and those cells.

    Args:
        value: ``(L, N)``, float64: the maps at the cells listed, 0 elsewhere.
        cell: ``(L,)``, positions in a map of shape ``after``, in order.
        weight: of the convolution, of the same precision.
        wanted: bool, for every cell of a map of shape ``before``.
    """
    kernel = dispatch.load("sparse_transpose", dispatch.choose("sparse_transpose", value))
    found: tuple[Tensor, Tensor] = kernel.sparse_transpose(value, cell, weight, wanted, geometry)
    return found
