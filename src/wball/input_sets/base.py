r"""The largest value of linear functions over a set of images: all that a linear relaxation asks of a threat model.

A ball answers with an :class:`InputSet` (``ball.input_set(x, plans)``); nothing else about it enters a certificate.
Sets whose images are made by transport plans also say what a relaxation may charge to moved mass
(:mod:`wball.input_sets.charges`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from wball.input_sets.charges import Charged
from wball.input_sets.rows import Rows

if TYPE_CHECKING:
    from wball.input_sets.transport import TransportSet

Array = NDArray[np.float64]
Plans = Literal["window", "full"]
"""The transport plans a proof holds for: those of the ball's window, or all."""

ROUNDS = 10
"""Steps of the search for ``psi``."""


@dataclass(frozen=True)
class Constraints:
    """``z = to_image t`` with ``low <= t <= high``, ``equal t = equal_to`` and ``below t <= below_to``."""

    to_image: Array
    low: Array
    high: Array
    equal: Array
    equal_to: Array
    below: Array
    below_to: Array


class InputSet(ABC):
    """A set of images around each of ``B`` centres."""

    shape: tuple[int, ...]  # of one image
    compiled = False  # whether a full search costs hardly more than a short one
    small: bool = False  # whether a linear program over the whole set is a matter of milliseconds
    kernel = "torch"  # behind :meth:`maximum`

    @property
    def transport(self) -> TransportSet | None:
        """This set, if its images come from transport plans: then relaxations may charge moved mass."""
        return None

    @abstractmethod
    def maximum(
        self,
        rows: Rows,
        charged: Charged = (),
        box: Tensor | None = None,
        reg: float = math.inf,
        rounds: int = ROUNDS,
    ) -> Tensor:
        """A sound upper bound of ``max <rows, z>`` plus charges, ``(N,)``, in the rows' precision.

        ``box`` holds prices of the box; a finite ``reg`` takes ``psi`` from the entropic plan instead of the best,
        which is searched for in ``rounds``.
        Differentiable in coefficients, weights and prices: at the best ``psi`` its own slope is 0 (envelope theorem).
        """

    def rough(self, rows: Rows) -> Tensor | None:
        """A sound upper bound of ``max <rows, z>`` that costs next to nothing, ``(N,)``; ``None`` if there is none."""
        return None

    @abstractmethod
    def ranges(self) -> tuple[Tensor, Tensor]:
        """Least and largest value of every pixel that is known without searching, ``(B, *shape)`` each."""

    @abstractmethod
    def box_prices(self, rows: Rows) -> Tensor | None:
        """Box prices of 0 for these rows, to be optimised; ``None`` if the set has no use for them."""

    @abstractmethod
    def floats(self, rows: Rows, charged: bool = False) -> int:
        """About how many numbers :meth:`maximum` keeps per row, to choose chunks that fit."""

    @abstractmethod
    def take(self, index: Tensor) -> InputSet:
        """The set of some of the images, or several times the same."""

    def finer(self, reach: float) -> InputSet:
        """The same set, its maxima tighter and dearer: moves shorter than ``reach`` pixels are told apart."""
        return self

    def exact_box_prices(self, rows: Rows, charged: Charged = ()) -> Tensor | None:
        """The best box prices of each row, by one linear program a row; ``None`` if the set has no use for them."""
        return None

    def constraints(self, image: int) -> Constraints:
        """The set around one image, for linear programs; only ``small`` sets need to know."""
        raise NotImplementedError
