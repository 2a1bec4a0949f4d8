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
        moves: row, column and cost of the moves that are listed one by one.
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
    moves: list[tuple[int, int, float]]
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
        """The most that moved mass gains in each row per unit of its cost, ``(N,)``; ``None`` if
        that is not known."""
        return None

    def patched(self, rows: Rows, allowed: bool = True) -> Rows:
        """The rows as :meth:`maximum` reads them; dense unless patches pay and are ``allowed``."""
        return rows

    @abstractmethod
    def ranges(self) -> tuple[Tensor, Tensor]:
        """Least and largest value of every pixel that is known without searching, ``(B,
        *shape)`` each.
        """

    def box_prices(self, rows: Rows) -> Tensor | None:
        """Box prices of 0 for these rows, to be optimised; ``None`` if the set has no use for
        them.
        """
        return None

    @abstractmethod
    def floats(self, rows: Rows, charged: bool = False) -> int:
        """About how many numbers :meth:`maximum` keeps per row, to choose chunks that fit."""

    @abstractmethod
    def take(self, index: Tensor) -> InputSet:
        """The set of some of the images, or several times the same."""

    def finer(self, reach: float) -> InputSet:
        """The same set with tighter maxima: moves shorter than ``reach`` pixels are listed
        one by one.
        """
        return self

    def gains(self, rows: Rows, charges: Charges | None) -> Charges:
        """What moving mass gains in each row, as charges; for sets that have plans."""
        raise NotImplementedError(f"{type(self).__name__} has no plans")

    @property
    def gain_size(self) -> int:
        """How many numbers :meth:`gains` returns per row."""
        raise NotImplementedError(f"{type(self).__name__} has no plans")
