r"""Linear functions over the ball without its box: ring maxima and the kink of a scalar function.

.. math::
    \max_{z \in B} \langle a, z \rangle = \min_{\psi \ge 0} h(\psi), \qquad
    h(\psi) = \psi E + \sum_i x_i \max_d \big( M_d(i) - \psi d \big),

with ``M_d(i)`` the largest ``a`` over the moves of cost ``d`` out of pixel ``i``. Every ``psi >=
0`` is a sound upper bound, so the search may stop anywhere. ``h`` is convex and piecewise linear
with slope ``E - cost(psi)``: where the tangents at both ends of a bracket meet is the minimum or a
new end, and every third step halves, against creeping brackets. The maximiser sends mass by the
best moves at both ends of the last bracket, mixed so that it costs ``E``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wball.cost import Moves
from wball.kernels import dispatch

FLAT = {torch.float32: 1e-7, torch.float64: 1e-15}
"""Tangents have met when the function is this close to them, relative to its size."""


@dataclass(frozen=True)
class LinearMaximum:
    """The maximum of each row.

    Attributes:
        psi: the minimising price, ``(B,)``, in the rows' dtype.
        upper: ``h(psi)``, float64: the maximum, up to the search and rounding.
        cost: what the cheapest best moves at ``psi`` cost, float64.
        z: the maximiser, like the rows; ``None`` if not asked for.
        n_iter: evaluations per row.
        kernel: which implementation computed it.
    """

    psi: Tensor
    upper: Tensor
    cost: Tensor
    z: Tensor | None
    n_iter: Tensor
    kernel: str = ""


def linear_maximum(
    a: Tensor, x: Tensor, budget: Tensor, moves: Moves, *, point: bool = False, max_iter: int = 60
) -> LinearMaximum:
    """``max <a, z>`` over the points that mass from ``x`` can reach at a cost of ``budget``.

    Args:
        a: rows, ``(B, C, H, W)``, float32 or float64.
        x: images, like the rows.
        budget: cost that may be spent per image, ``(B,)``.
        moves: the moves of the ground cost on these images.
        point: whether to return the maximiser.
        max_iter: largest number of evaluations per row.
    """
    name = dispatch.choose("linear_maximum", x, moves)
    solve = dispatch.load("linear_maximum", name).linear_maximum
    found: LinearMaximum = solve(a, x, budget, moves, point=point, max_iter=max_iter)
    return replace(found, kernel=name)
