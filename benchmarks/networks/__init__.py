"""Ordinary image classifiers in small form, as people write them: what certificates are tried on.

Each is made with random weights for images of ``channels`` x 8 x 8 and ten classes (:func:`made`).
They were not chosen by what certificates follow: kinds that are refused stay in the list.
"""

from __future__ import annotations

from benchmarks.networks import (
    assorted,
    attention,
    convolutional,
    normalised,
    perceptrons,
    pools,
    programs,
    recurrent,
    residual,
)
from benchmarks.networks.kinds import KINDS, Architecture, made

__all__ = [
    "KINDS",
    "Architecture",
    "assorted",
    "attention",
    "convolutional",
    "made",
    "normalised",
    "perceptrons",
    "pools",
    "programs",
    "recurrent",
    "residual",
]
