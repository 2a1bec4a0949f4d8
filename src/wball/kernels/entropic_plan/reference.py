"""The entropic plan (:mod:`wball.kernels.entropic_plan`) in plain PyTorch, which the faster kernels
must match."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.cost import PAID
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
    lo, hi = request.box or (0.0, math.inf)
    budget, moves = request.spend, request.moves.like(x)
    plan, unlimited = PlanRows(x, b + q, moves), torch.full_like(psi, math.inf)
    psi = plan.solve_price(budget, psi, request.newton, COST_TOL, unlimited)
    sweeps, before = request.sweeps if request.box is not None else 0, q
    for sweep in range(1, sweeps + 1):
        free = q - plan.columns().clamp_(min=1e-12).log_()
        # An emptied column could ask for an infinite shift.
        least = (free + math.log(lo)).clamp_(0.0, 50.0) if lo > 0 else free.new_zeros(())
        new = torch.minimum(least, free.add_(math.log(hi)))
        q, before = _ahead(q, new, before, request.momentum if sweep < sweeps else 0.0), new
        plan = PlanRows(x, b + q, moves)
        psi = plan.solve_price(budget, psi, request.newton, COST_TOL, unlimited)
    slack = 4 * torch.finfo(dtype).eps * max(1.0, *(request.box or (0.0,)))
    keep, give, sent, received = into_box(plan, lo, hi, slack)
    z = (x - give * sent + keep * received).clamp(lo, hi)  # rounding only
    z, psi, q, kept, given = (t.to(dtype) for t in (z, psi, q, keep, give))
    cost = image_sums(give * plan.exchanged(keep, PAID))
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
