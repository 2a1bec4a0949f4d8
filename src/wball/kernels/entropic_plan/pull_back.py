r"""From an entropic plan to a point of the ball.

The columns ``z`` of a plan (:mod:`wball.kernels.entropic_plan`) are moved towards the centre until
they are provably in the ball:

.. math::
    z \leftarrow x + t\,D(z - x), \qquad t = \min(1,\; (1 - \delta)\, budget / cost(\bar P)).

``bar P`` is the plan after opposite flows cancel, ``delta`` bounds the rounding error of the flows,
and ``D`` makes the mass lost equal to the mass gained in each channel. Exponents are sums of
potentials and prices. In float32 a sum of size ``M`` has an error of a few ``M eps``, and each flow
has this relative error: the flows that are priced and the flows that arrive may differ by that
much.

The next plan is requested with the budget ``kappa * budget``. ``kappa`` is adapted until the *net*
cost is the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wball.kernels.entropic_plan import EntropicPlan, PlanRequest

KAPPA = (0.5, 8.0)
"""Range of ``kappa``. Values below 1 occur when the Newton steps end above the requested cost."""

DOUBT = 6
"""Rounding errors of an exponent by which two copies of a flow may differ."""


@dataclass(frozen=True)
class PulledBack:
    """A point of the ball.

    Attributes:
        z: the point, like ``x``.
        cost: cost of the plan that proves it, per image, float64.
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
    """Return the point of the ball that ``plan`` proposes. An image whose plan is not finite stays
    unchanged.

    Args:
        request: the request that the plan answers.
        plan: the plan, with its box potentials.
        budget: the ball's budget per image, float64.
        kappa: the factor on the budget of this plan, per image, float64; ``None`` for 1.
    """
    x, b, box = request.x, request.b, request.box
    chosen = b + plan.q
    size = chosen.flatten(1).abs().amax(1) + plan.psi.to(b) * request.moves.dearest
    doubt = (DOUBT * torch.finfo(b.dtype).eps * size.to(torch.float64)).clamp(max=0.5)
    tiny = torch.finfo(torch.float64).tiny
    slack = (budget * (1 - doubt) / plan.net_cost.clamp(min=tiny)).nan_to_num(nan=0.0)
    paced = slack.clamp(0.5, 2.0) ** 0.7
    kappa = (paced if kappa is None else kappa * paced).clamp(*KAPPA)
    scale = slack.clamp(max=1.0)
    change = plan.z - x if plan.balanced else balanced(x, plan.z)
    z = x + scale.to(x.dtype).view(-1, 1, 1, 1) * change.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if box is not None:
        z = z.clamp(*box)  # rounding only
    return PulledBack(z, (scale * plan.net_cost).nan_to_num(nan=0.0), scale, kappa, chosen)


def balanced(x: Tensor, z: Tensor) -> Tensor:
    """Return ``z - x`` with equal loss and gain in each channel: the larger one is scaled down to
    the other.

    Each pixel ends between its ``x`` and its ``z``, so the box still holds.
    """
    change = z - x
    gained = change.clamp(min=0).sum((-2, -1), keepdim=True, dtype=torch.float64)
    lost = gained - change.sum((-2, -1), keepdim=True, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    up, down = (
        (a / b.clamp(min=tiny)).clamp(0, 1).to(x.dtype) for a, b in ((lost, gained), (gained, lost))
    )
    return change * torch.where(change > 0, up, down)
