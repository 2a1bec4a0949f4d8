r"""The largest value of linear functions (*rows*) over a Wasserstein ball: what certificates, the
support function without a box and some attacks ask.

.. math:: \min_{\psi \ge 0} h(\psi), \qquad
    h(\psi) = \psi E + \sum_i x_i \max_j \big( a_j + M_{ij} - \psi C_{ij} \big)

Rows of certificates may live on patches, moves longer than a reach are summed up in tiers of
length, and charges ``M`` may be added to what moves earn (:mod:`wball.input_sets.transport`);
:func:`linear_maximum` has rows over whole images.

``h`` is convex and piecewise linear with slope ``E - cost(psi)``. Where the tangents at both ends
of a bracket meet is the minimum or a new end; every third step halves the bracket, against creeping
ends. Every ``psi >= 0`` gives a sound bound, so the search may stop anywhere and run in float32;
the bound that counts is evaluated in the precision of the rows. The plans that send mass by the
best moves at both ends of the last bracket, mixed such that they cost ``E``, attain the maximum.

``row_maximum(field, budget, step, rounds, exact)`` of a kernel returns a :class:`RowMaximum`. The
budgets are ``(N,)`` in float64, ``step`` is the cheapest move that costs anything; there are at
most so many rounds of search, in float64 and until the kink of ``h`` is found if ``exact``. Nothing
is recorded for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from wball.cost import Moves
from wball.kernels import dispatch

NOWHERE = -1e30
"""Value of a move that leaves the image: finite, so that it vanishes when multiplied by no mass."""

DOWN = 0.55
"""Share of ``psi`` that is tried next as long as no smaller one is known to spend the budget."""

FLAT, FLAT_SINGLE = 1e-15, 1e-7
"""A search in float64 or float32 ends where the tangents meet this close to ``h``, relative to its
size."""


@dataclass(frozen=True)
class Field:
    """Rows seen from the pixels with mass: the value of staying, and every other option with its
    cost.

    ``mass`` and ``stay`` cover the sources, ``(N, C, S)``; ``worth`` the options, ``(N, C, L, S)``,
    with their cost ``(L, 1)`` or ``(L, S)``. Rows on patches cannot see all pixels: ``elsewhere``
    (N, C, T) is the mass at several distances from the patch, ``away`` (T,) what it costs to come
    from there, ``far`` (N, C) what that is worth.
    """

    mass: Tensor
    stay: Tensor
    worth: Tensor
    cost: Tensor
    far: Tensor | None = None
    elsewhere: Tensor | None = None
    away: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Field:
        """The field in the precision of a search."""
        parts = {name: value.to(dtype) for name, value in vars(self).items() if value is not None}
        return replace(self, **parts)


@dataclass(frozen=True)
class RowMaximum:
    """The maximum of each row, ``(N,)``.

    Attributes:
        value: ``h(psi)``, in the precision of the rows.
        psi: the best price found.
        low, high: the last bracket of the price.
        n_iter: rounds of search.
    """

    value: Tensor
    psi: Tensor
    low: Tensor
    high: Tensor
    n_iter: Tensor


def linear_maximum(
    a: Tensor, x: Tensor, budget: Tensor, moves: Moves, *, rounds: int = 60, exact: bool = False
) -> RowMaximum:
    """``max <a, z>`` over the points that mass from ``x`` can reach at a cost of ``budget``.

    Args:
        a: rows, ``(B, C, H, W)``, float32 or float64.
        x: images, like the rows.
        budget: cost that may be spent per image, ``(B,)``.
        moves: the moves of the ground cost on these images.
        rounds: largest number of rounds of search.
        exact: whether to search for the kink, in float64.
    """
    kernel = dispatch.load("row_maximum", dispatch.choose("row_maximum", x, moves))
    moves, limit = moves.like(a), budget.double().clamp(min=0.0)
    rows = whole_rows(a, x, moves)
    found: RowMaximum = kernel.row_maximum(rows, limit, moves.cheapest, rounds, exact)
    return found


def whole_rows(a: Tensor, x: Tensor, moves: Moves) -> Field:
    """Rows over whole images: for each distinct cost, the largest value that moves of this cost
    reach."""
    ends = moves.ends(a, NOWHERE)
    worth = torch.stack([reduce(torch.maximum, map(ends, ring)) for ring in moves.rings], 2)
    return Field(x.to(a).flatten(2), a.flatten(2), worth.flatten(3), moves.ring_cost.flatten(1))
