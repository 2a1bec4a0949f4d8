r"""The largest value of linear functions over a set of images: all that a linear relaxation asks of
a threat model.

A ball answers with an :class:`InputSet` (``ball.input_set(x, plans)``); nothing else about it
enters a certificate. Sets whose images are made by transport plans can also add charges on moved
mass (:mod:`wball.input_sets.rows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from wball.cost import Move
from wball.input_sets.rows import Charges, Rows

Plans = Literal["window", "full"]
"""The transport plans a proof holds for: those of the ball's window, or all."""

ROUNDS = 10
"""Steps of the search for ``psi``."""


class InputSet(ABC):
    """A set of images around each of ``B`` centres.

    Attributes:
        shape: the shape of one image.
        kernel: the kernel behind :meth:`maximum`.
        has_plans: whether images are made by transport plans. The other attributes are for such
            sets.
        x: the images on a grid, ``(B, C, H, W)``, float64.
        budget: what a plan may cost, ``(B,)``, float64.
        box: the range of a pixel.
        power: moves cost their length to this power and all are allowed; ``None`` otherwise.
        moves: the moves that are listed one by one: rows, columns, 1 if they lead to the best of
            all channels (0: their own), and what they cost.
        shares_moves: whether every pixel has the same listed moves.
        far: the cheapest move that is not listed; ``None`` if all are listed.
        follows_far: whether charges of moves that are not listed are bounded by those of two listed
            ones.
        active: pixels that can be sources of mass, ``(B, C, S)``; ``None``: every pixel.
    """

    shape: tuple[int, ...]
    kernel = "torch"
    has_plans = False
    x: Tensor
    budget: Tensor
    box: tuple[float, float] | None
    power: float | None = None
    moves: list[Move]
    shares_moves = False
    far: float | None = None
    follows_far: bool = False
    active: Tensor | None = None

    @abstractmethod
    def maximum(
        self,
        rows: Rows,
        charges: Charges | None = None,
        box: Tensor | None = None,
        rounds: int = ROUNDS,
    ) -> Tensor:
        """A sound upper bound of ``max <rows, z>`` plus charges, ``(N,)``, in the rows' precision.

        Rows with ``charges`` must have been :meth:`patched`. ``box`` holds prices of the box; the
        best ``psi`` is searched for in ``rounds``. Differentiable in coefficients, charges and
        prices: at the best ``psi`` its own slope is 0 (envelope theorem).
        """

    def steepest(self, rows: Rows) -> Tensor | None:
        """The largest gain per unit of cost that moved mass can have in each row, ``(N,)``;
        ``None`` if unknown."""
        return None

    def patched(self, rows: Rows, allowed: bool = True) -> Rows:
        """The rows in the form that :meth:`maximum` expects: dense, unless patches are ``allowed``
        and smaller."""
        return rows

    @abstractmethod
    def ranges(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of every pixel, as far as known without a search, ``(B,
        *shape)`` each."""

    def box_prices(self, rows: Rows) -> Tensor | None:
        """Box prices of 0 for these rows, to be optimised; ``None`` if the set does not use
        them."""
        return None

    @abstractmethod
    def floats(self, rows: Rows, charged: bool = False) -> int:
        """Approximate number of values that :meth:`maximum` stores per row, for choosing a chunk
        size."""

    @abstractmethod
    def take(self, index: Tensor) -> InputSet:
        """The set for the images at ``index``, which may repeat."""

    def finer(self, reach: float) -> InputSet:
        """The same set with tighter maxima: moves shorter than ``reach`` pixels are listed
        one by one.
        """
        return self

    def gains(self, rows: Rows, charges: Charges | None) -> Charges:
        """The gain of moving mass in each row, as charges; only for sets with plans."""
        raise NotImplementedError(f"{type(self).__name__} has no plans")

    @property
    def gain_size(self) -> int:
        """Number of values that :meth:`gains` returns per row."""
        raise NotImplementedError(f"{type(self).__name__} has no plans")
