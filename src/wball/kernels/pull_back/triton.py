"""Pulling back (:mod:`wball.kernels.pull_back`) in Triton: one launch, one program an image."""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.entropic_plan import EntropicPlan, PlanRequest
from wball.kernels.pull_back import DOUBT, KAPPA, PulledBack
from wball.kernels.triton_launch import kernel
from wball.kernels.triton_stencil import MAX_ON_CHIP, block_of, too_large
from wball.kernels.triton_stencil import why_not as _why_not
from wball.moves import Moves

MAX_CHANNELS = 16
"""Each channel takes a pass over the image."""

_DOUBT = tl.constexpr(DOUBT * 2.0**-23)
_LEAST, _MOST = tl.constexpr(KAPPA[0]), tl.constexpr(KAPPA[1])


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    many = (
        f"images of {x.shape[1]} channels (at most {MAX_CHANNELS})"
        if x.shape[1] > MAX_CHANNELS
        else None
    )
    return _why_not(x, moves) or too_large(x, MAX_ON_CHIP) or many


def pull_back(
    request: PlanRequest, plan: EntropicPlan, budget: Tensor, kappa: Tensor | None
) -> PulledBack:
    """See :func:`wball.kernels.pull_back.pull_back`."""
    x, b, box = request.x, request.b, request.box
    batch, channels, height, width = x.shape
    z, chosen = torch.empty((2, *x.shape), dtype=torch.float32, device=x.device).unbind()
    cost, scale, kappa_out = torch.empty((3, batch), dtype=torch.float64, device=x.device).unbind()
    block = block_of(channels * height * width)
    if batch:
        _pull_kernel[(batch,)](
            x.contiguous(), b.contiguous(), plan.z.contiguous(), plan.q.contiguous(), plan.psi, plan.net_cost,
            budget.to(torch.float64), cost if kappa is None else kappa, z, chosen, cost, scale, kappa_out,
            int(kappa is not None), float(request.moves.dearest), *(box or (float("-inf"), float("inf"))),
            C=channels, SIZE=height * width, BLOCK=block, num_warps=min(16, max(4, block // 256)),
        )  # fmt: skip
    return PulledBack(z, cost, scale, kappa_out, chosen)


@triton.jit
def _number(values):
    """0 where it is none."""
    return tl.where(tl.abs(values) < 1e30, values, 0.0)


@kernel("warm", "dearest", "lo", "hi")
def _pull_kernel(
    x_ptr, b_ptr, plan_ptr, q_ptr, psi_ptr, net_ptr, budget_ptr, kappa_ptr,
    z_out, chosen_out, cost_out, scale_out, kappa_out,
    warm, dearest, lo, hi, C: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    real = index < C * SIZE
    here = image * (C * SIZE) + index
    x = tl.load(x_ptr + here, mask=real, other=0.0).to(tl.float32)
    change = tl.load(plan_ptr + here, mask=real, other=0.0).to(tl.float32) - x
    chosen = tl.load(b_ptr + here, mask=real, other=0.0).to(tl.float32) + tl.load(
        q_ptr + here, mask=real, other=0.0
    )
    tl.store(chosen_out + here, chosen, mask=real)
    net = tl.load(net_ptr + image)
    size = tl.max(tl.abs(chosen), 0) + tl.load(psi_ptr + image).to(tl.float32) * dearest
    doubt = tl.minimum(_DOUBT * size.to(tl.float64), 0.5)
    slack = tl.load(budget_ptr + image) * (1.0 - doubt) / tl.maximum(net, 2.3e-308)
    slack = tl.where(tl.abs(net) < 1e30, slack, 0.0)
    paced = tl.minimum(tl.maximum(slack, 0.5), 2.0)
    kappa = tl.where(warm > 0, tl.load(kappa_ptr + image), 1.0)
    kappa *= tl.exp2(0.7 * tl.log2(paced.to(tl.float32))).to(tl.float64)
    scale = tl.minimum(slack, 1.0)
    tl.store(kappa_out + image, tl.minimum(tl.maximum(kappa, _LEAST), _MOST))
    tl.store(scale_out + image, scale)
    tl.store(cost_out + image, _number(scale * net))
    factor = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(C):
        part = tl.where((index // SIZE == c) & real, change, 0.0).to(tl.float64)
        gained, total = tl.sum(tl.maximum(part, 0.0), 0), tl.sum(part, 0)
        lost = gained - total
        up = tl.minimum(tl.maximum(lost / tl.maximum(gained, 2.3e-308), 0.0), 1.0).to(tl.float32)
        down = tl.minimum(tl.maximum(gained / tl.maximum(lost, 2.3e-308), 0.0), 1.0).to(tl.float32)
        sound = tl.where(tl.abs(total) < 1e30, 1.0, 0.0)  # a kernel that failed moves nothing
        factor = tl.where(index // SIZE == c, sound * tl.where(change > 0.0, up, down), factor)
    z = x + scale.to(tl.float32) * _number(change * factor)
    tl.store(z_out + here, tl.minimum(tl.maximum(z, lo), hi), mask=real)
