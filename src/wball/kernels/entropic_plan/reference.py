"""The entropic plan (:mod:`wball.kernels.entropic_plan`) in plain PyTorch, which the faster kernels
must match."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.kernels.entropic_plan import (
    COST_TOL,
    EntropicPlan,
    PlanRequest,
    narrowed,
    pulled_back,
)
from wball.kernels.plan_rows import PlanRows, image_sums, into_box


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`. Computes in float64 for any input."""
    dtype = request.x.dtype
    x, b, psi, q = (t.detach().double() for t in (request.x, narrowed(request.b), *request.start()))
    lo, hi = request.box if request.box is not None else (0.0, math.inf)
    budget, moves = request.spend, request.moves.like(x)
    plan = PlanRows(x, b + q, moves)
    psi = plan.solve_price(budget, psi, request.newton, lambda psi: COST_TOL)
    sweeps, before = request.sweeps if request.box is not None else 0, q
    for sweep in range(1, sweeps + 1):
        z = plan.columns().clamp(min=1e-12)
        # The upper bound on the shift only matters for lo > 0, where an emptied column could ask
        # for infinity.
        new = torch.minimum((q + torch.log(lo / z)).clamp(0.0, 50.0), q + torch.log(hi / z))
        q, before = _ahead(q, new, before, request.momentum if sweep < sweeps else 0.0), new
        plan = PlanRows(x, b + q, moves)
        psi = plan.solve_price(budget, psi, request.newton, lambda psi: COST_TOL)
    slack = 4 * torch.finfo(dtype).eps * max(1.0, hi if math.isfinite(hi) else 1.0)
    keep, give, sent, received = into_box(plan, lo, hi, slack)
    z = (x - give * sent + keep * received).clamp(lo, hi)  # rounding only
    z, psi, q, kept, given = (t.to(dtype) for t in (z, psi, q, keep, give))
    cost = image_sums(give * plan.spent(keep))
    net = moves.net_cost(plan.row * give, plan.column * keep, plan.price)
    return pulled_back(request, z, (cost, net), psi, q, (kept, given))


def _ahead(q: Tensor, new: Tensor, before: Tensor, momentum: float) -> Tensor:
    """Extrapolate beyond ``new`` along the last two steps, unless the step from ``q`` reversed its
    direction."""
    if momentum == 0.0:
        return new
    ahead = new + momentum * (new - before)
    ahead = torch.where(new < 0, ahead.clamp(max=0.0), ahead.clamp(0.0, 50.0))
    return torch.where((new != 0) & ((new - q) * (new - before) >= 0), ahead, new)
