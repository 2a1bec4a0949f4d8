r"""The largest value of many rows over a Wasserstein ball, each over what it can see: all that
certificates ask.

.. math:: \min_{\psi \ge 0} \; \psi E + \sum_i x_i \max_j \big( a_j + M_{ij} - \psi C_{ij} \big)

Rows may live on patches, moves longer than a reach are summed up in tiers of length, and charges
``M`` may be added to what moves earn (:mod:`wball.input_sets.transport`). A scalar convex search
per row: every ``psi >= 0`` gives a sound bound, so it may stop anywhere and run in float32. The
bound that counts is evaluated in the precision of the rows.

Whole images without charges are :mod:`wball.kernels.linear_maximum`.

``row_maximum(problem, rounds)`` of a kernel returns the bound of each row, ``(N,)`` in the rows'
precision, and the ``psi`` behind it, in ``rounds`` of search. Nothing is recorded for gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

NOWHERE = -1e30
"""Value of a move that leaves the image: finite, so that it vanishes when multiplied by no mass."""

DOWN = 0.55
"""Share of ``psi`` that is tried next as long as no smaller one is known to spend the budget."""


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

    def single(self) -> Field:
        """The field in float32, for the search."""
        held = (self.mass, self.stay, self.worth, self.cost, self.far, self.elsewhere, self.away)
        return Field(*(None if part is None else part.float() for part in held))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RowProblem:
    """``N`` rows over images.

    Attributes:
        coeff: the rows ``(N, C, h, w)``, over patches or whole images.
        image: ``(N,)``, the image of each row.
        corner: top and left of each patch; ``None`` if rows are whole images.
        x: the images ``(B, C, H, W)``, float64.
        budget: ``(N,)``, float64.
        moves: row, column and cost of the moves that are listed.
        tiers: least cost and length in pixels of the others, in tiers.
        step: the cheapest move that costs anything.
        elsewhere: mass beyond the patches, as in :class:`Field`.
        field: the rows as a field, with charges and box prices, made when it is asked for.
        plain: whether there are neither charges nor box prices.
    """

    coeff: Tensor
    image: Tensor
    corner: tuple[Tensor, Tensor] | None
    x: Tensor
    budget: Tensor
    moves: Sequence[tuple[int, int, float]]
    tiers: Sequence[tuple[float, int]]
    step: float
    elsewhere: Callable[[], Tensor | None]
    field: Callable[[], Field]
    plain: bool
