"""The layout of images and moves in compiled loops: cropped, flat, ring after ring.

An image is cropped to the box around its mass, widened by the reach of the moves, and stored flat
with contiguous channels. The margins are wide enough that a move is a constant shift of the whole
flat image, so that every inner loop runs over contiguous numbers and vectorises. The black frame of
a digit costs nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wball.kernels.compiled import compiled
from wball.moves import StencilMoves

PART = 32
"""Images per piece of work: their float64 copies are all the memory that grows with the images'
size."""

GROUP = 4
"""Moves a pass, and moves a ring is filled up to with moves of weight 0."""


class MoveTables(NamedTuple):
    """The moves for compiled loops, ring after ring."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    fee: NDArray[np.float64]  # what each move costs; inf for moves that only fill up a ring
    fee_back: NDArray[np.float64]  # of the reverse move, inf if there is none
    ring_cost: NDArray[np.float64]
    ring: NDArray[np.int64]  # where each ring begins, and where the last ends


class FlatMoves:
    """The moves as arrays, ring after ring, each ring filled up with moves that carry nothing."""

    def __init__(self, moves: StencilMoves) -> None:
        rings = moves.rings_apart
        rows: list[tuple[int, int, float, float]] = []
        edges, places = [0], []
        for ring in rings:
            for k in ring:
                reverse = moves.reverse[k]
                rows.append((*moves[k], math.inf if reverse is None else moves.costs[reverse]))
            places += ring + [-1] * (-len(ring) % GROUP)
            rows += [(0, 0, math.inf, math.inf)] * (len(places) - len(rows))
            edges.append(len(rows))
        down, across, fee, back = zip(*rows, strict=True)
        self.radius = (max(map(abs, down)), max(map(abs, across)))
        self.rings = len(rings)
        self.places = np.asarray(places)  # in the moves as given; -1 for those that fill up
        self.arrays = MoveTables(
            np.asarray(down),
            np.asarray(across),
            np.asarray(fee, dtype=np.float64),
            np.asarray(back, dtype=np.float64),
            np.asarray([moves.costs[ring[0]] for ring in rings], dtype=np.float64),
            np.asarray(edges),
        )

    def length(self, shape: tuple[int, ...]) -> int:
        """The largest length of a flat image with its margins, for any crop."""
        _, channels, height, width = shape
        stride = width + 2 * self.radius[1]
        return channels * (height + 2 * self.radius[0]) * stride + 2 * (
            self.radius[0] * stride + self.radius[1]
        )


@lru_cache(maxsize=64)
def stencil_of(moves: StencilMoves) -> FlatMoves:
    """The moves as arrays, made once."""
    return FlatMoves(moves)


@compiled(inner=True)
def mass_box(x):  # type: ignore[no-untyped-def]
    """The rows and columns between which an image has mass, over all channels."""
    channels, height, width = x.shape
    top, bottom, left, right = height, 0, width, 0
    for c in range(channels):
        for r in range(height):
            for j in range(width):
                if x[c, r, j] > 0.0:
                    top, bottom, left, right = (
                        min(top, r),
                        max(bottom, r + 1),
                        min(left, j),
                        max(right, j + 1),
                    )
    return top, bottom, left, right
