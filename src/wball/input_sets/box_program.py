r"""Exact prices of the box, by linear programming, for the few rows that decide a certificate.

The maximum of a row over ball and box is the linear program over plans

.. math::
    \max_{P \ge 0} \sum_{ij} P_{ij} (a_j + M_{ij}) \quad \text{s.t.} \quad P 1 = x,\; \langle P, C \rangle \le E,\;
    lo \le P^T 1 \le hi

Its multipliers of the last constraint are the prices ``r`` of :mod:`wball.input_sets.transport`. They are used as
prices and nothing else: the bound is evaluated from them there, so a solver that stops early costs tightness, never
soundness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class BoxProgram:
    """The constraints of one image: sources, their moves, the budget and the box.

    Args:
        mass: ``(S,)``, mass of each source.
        target: ``(S, K)``, the pixel where each listed move of a source ends, -1 if it may not be made. The first
            one stays.
        cost: ``(S, K)``, what the moves cost.
        pixels: number of pixels (of all channels).
        channel: ``(S,)``, each source's channel; far moves stay inside it.
        far: cost of a move that is not listed (``None``: there are none).
        budget: the most a plan may cost.
        box: range of a pixel.
    """

    def __init__(
        self,
        mass: Array,
        target: NDArray[np.int64],
        cost: Array,
        pixels: int,
        channel: NDArray[np.int64],
        channels: int,
        far: float | None,
        budget: float,
        box: tuple[float, float],
    ) -> None:
        from scipy.sparse import coo_array  # here and below: slow to import, and rarely needed

        self.pixels, self.box, self.mass = pixels, box, mass
        source, move = np.nonzero(target >= 0)
        self.listed = (source, move)
        count, sources = source.shape[0], mass.shape[0]
        ends = target[source, move]
        self.ends = ends
        arcs = np.arange(count)
        rows, columns, values = [source], [arcs], [np.ones(count)]
        arrive = [(ends, arcs)]
        spend = [(arcs, cost[source, move])]
        total = count
        self.far = far is not None
        if far is not None:
            leave, land = total + np.arange(sources), total + sources + np.arange(pixels)
            total += sources + pixels
            rows += [
                np.arange(sources),
                sources + channel,
                sources + np.arange(pixels) * channels // pixels,
            ]
            columns += [leave, leave, land]
            values += [np.ones(sources), np.ones(sources), -np.ones(pixels)]
            arrive.append((np.arange(pixels), land))
            spend.append((leave, np.full(sources, far)))
        equal = sources + (channels if self.far else 0)
        where = (np.concatenate(rows), np.concatenate(columns))
        self.equal = coo_array((np.concatenate(values), where), shape=(equal, total)).tocsr()
        self.equal_to = np.concatenate([mass, np.zeros(equal - sources)])
        into = (np.concatenate([r for r, _ in arrive]), np.concatenate([c for _, c in arrive]))
        sides = [(1.0, 0)] if box[0] <= 0 else [(1.0, 0), (-1.0, pixels)]
        parts_r = [into[0] + shift for _, shift in sides]
        parts_c = [into[1] for _ in sides]
        parts_v = [np.full(into[0].shape[0], sign) for sign, _ in sides]
        last = pixels * len(sides)
        paid = np.concatenate([c for c, _ in spend])
        parts_r.append(np.full(paid.shape[0], last))
        parts_c.append(paid)
        parts_v.append(np.concatenate([v for _, v in spend]))
        where = (np.concatenate(parts_r), np.concatenate(parts_c))
        self.below = coo_array((np.concatenate(parts_v), where), shape=(last + 1, total)).tocsr()
        ends_box = [np.full(pixels, box[1])] + (
            [np.full(pixels, -box[0])] if len(sides) == 2 else []
        )
        self.below_to = np.concatenate([*ends_box, [budget]])

    def prices(self, worth: Array, out: Array, into: Array) -> Array | None:
        """Prices ``(pixels,)`` for one row; ``None`` if the solver failed.

        ``worth`` (S, K) is what each listed move earns, ``out`` (S,) and ``into`` (pixels,) what a far move earns.
        """
        from scipy.optimize import linprog

        gain = np.concatenate([worth[self.listed]] + ([out, into] if self.far else []))
        if not np.isfinite(gain).all():
            return None  # of a network that overflows: nothing is certified there
        result = linprog(
            -gain,
            A_ub=self.below,
            b_ub=self.below_to,
            A_eq=self.equal,
            b_eq=self.equal_to,
            bounds=(0, None),
            method="highs",
        )
        if result.status != 0:
            return None
        duals = -np.asarray(result.ineqlin.marginals)
        prices: Array = duals[: self.pixels].copy()
        if self.box[0] > 0:
            prices -= duals[self.pixels : 2 * self.pixels]
        return prices
