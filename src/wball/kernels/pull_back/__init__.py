r"""From an entropic plan to a point of the ball.

The columns ``z`` of a plan (:mod:`wball.kernels.entropic_plan`) are moved towards the centre until they are in the
ball for certain:

.. math::
    z \leftarrow x + t\,D(z - x), \qquad t = \min(1,\; (1 - \delta)\, budget / cost(\bar P)),

where ``bar P`` is the plan after opposite flows cancel, ``delta`` covers what rounding does to the flows, and ``D``
makes as much lost as gained in each channel. Exponents are sums of potentials and prices: in float32 a sum of size
``M`` is off by a few ``M eps``, and so is each flow. Those that were priced and those that arrived may differ by that
share, and so may what pixels send and what they receive.

The raw budget of the next plan is ``kappa`` times that of the ball, with ``kappa`` adapted until the *net* cost is what
the ball allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wball.kernels import dispatch
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest

KAPPA = (0.5, 8.0)
"""How far the raw budget may leave the ball's: below 1 where the Newton steps end above what was asked for."""

DOUBT = 6
"""Roundings of an exponent by which flows may differ."""


@dataclass(frozen=True)
class PulledBack:
    """A point of the ball.

    Attributes:
        z: the point, like ``x``.
        cost: what the plan that proves it costs, per image, float64.
        scale: ``t``, per image, float64.
        kappa: for the next plan, per image, float64.
        chosen: the potentials of the plan, ``b + q``, like ``x``.
    """

    z: Tensor
    cost: Tensor
    scale: Tensor
    kappa: Tensor
    chosen: Tensor


def pull_back(
    request: PlanRequest, plan: EntropicPlan, budget: Tensor, kappa: Tensor | None
) -> PulledBack:
    """The point of the ball that ``plan`` proposes. An image on which a kernel failed stays where it is.

    Args:
        request: what the plan was asked for with.
        plan: the plan, with its box potentials.
        budget: what may be spent, per image, float64.
        kappa: what the raw budget was multiplied with, per image, float64; ``None`` for 1.
    """
    name = dispatch.choose("pull_back", request.x, request.moves)
    point: PulledBack = dispatch.load("pull_back", name).pull_back(request, plan, budget, kappa)
    return point
