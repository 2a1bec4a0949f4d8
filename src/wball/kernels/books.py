"""What exact solvers know about a batch of images, whichever kernel improves it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Best:
    """What is known about each image, in float64 and improved in place; a minimum is sought.

    Attributes:
        flow: the best plan, ``(B, C, K, H, W)``.
        primal: its objective.
        dual: the best lower bound of the optimum.
        hard: the best lower bound of the optimum without entropy.
        u: column potentials of that bound, ``(B, C, H, W)``.
        psi: price of that bound.
    """

    flow: Tensor
    primal: Tensor
    dual: Tensor
    hard: Tensor
    u: Tensor
    psi: Tensor


@dataclass(frozen=True)
class Tolerance:
    """When an image is done.

    That is, when ``primal - dual <= tol * max(|primal - entropy + offset|, parts * (primal - 2 entropy)) + floor``.
    """

    tol: float
    parts: float
    offset: Tensor
    floor: Tensor
