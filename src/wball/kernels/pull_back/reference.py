"""Pulling back (:mod:`wball.kernels.pull_back`) in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wball.kernels.entropic_plan import EntropicPlan, PlanRequest
from wball.kernels.pull_back import DOUBT, KAPPA, PulledBack


def pull_back(
    request: PlanRequest, plan: EntropicPlan, budget: Tensor, kappa: Tensor | None
) -> PulledBack:
    """See :func:`wball.kernels.pull_back.pull_back`."""
    x, b, box = request.x, request.b, request.box
    chosen = b + plan.q
    size = chosen.flatten(1).abs().amax(1) + plan.psi.to(b) * request.moves.dearest
    doubt = (DOUBT * torch.finfo(b.dtype).eps * size.to(torch.float64)).clamp(max=0.5)
    slack = (
        budget * (1 - doubt) / plan.net_cost.clamp(min=torch.finfo(torch.float64).tiny)
    ).nan_to_num(nan=0.0)
    paced = slack.clamp(0.5, 2.0) ** 0.7
    kappa = (paced if kappa is None else kappa * paced).clamp(*KAPPA)
    scale = slack.clamp(max=1.0)
    change = plan.z - x if plan.balanced else balanced(x, plan.z)
    z = x + scale.to(x.dtype).view(-1, 1, 1, 1) * change.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    if box is not None:
        z = z.clamp(*box)  # rounding only
    return PulledBack(z, (scale * plan.net_cost).nan_to_num(nan=0.0), scale, kappa, chosen)


def balanced(x: Tensor, z: Tensor) -> Tensor:
    """``z - x`` with as much lost as gained in each channel: the larger of the two is scaled down to the other.

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
