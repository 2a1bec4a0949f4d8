"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`) in plain PyTorch: whole batches, in
float64.

The other kernels are tested against it. It serves GPU images that are too large for one Triton
program. An image sweeps (:mod:`wball.kernels.projected_sinkhorn.reference_sweeps`) until an
estimate of its gap is small enough, offers its repaired plan, and leaves the batch when it is done.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wball.cost import PAID
from wball.inputs import largest, per_image
from wball.kernels import projected_sinkhorn as settings
from wball.kernels.plan_rows import PlanRows, image_sums, into_box
from wball.kernels.projected_sinkhorn import MEMORY, ProjectedSinkhorn, Projection, entropy_at_rest
from wball.kernels.projected_sinkhorn.reference_sweeps import TINY, Unfinished, follow, sweep


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    (s, answer), step = _start(problem), 0
    problem = replace(problem, moves=problem.moves.like(s.x))
    while len(s.place):
        step += 1
        s = _sweep_and_offer(problem, s, answer, step)
    return answer


def _sweep_and_offer(
    problem: Projection, s: Unfinished, answer: ProjectedSinkhorn, step: int
) -> Unfinished:
    """Sweep once, and offer the plans that seem good enough. Returns the images that are left."""
    swept = sweep(problem, s, step)
    # The expected gap after a repair, which returns mass outside the box at no cost.
    columns, cost = swept.columns, image_sums(swept.rows.exchanged(1.0, PAID))
    kept = columns.clamp(*problem.ends)
    outside = settings.EXCESS * image_sums((columns - kept).abs())
    about = _misfit(problem, s, kept) - swept.relief
    about += s.tau * s.price * ((s.budget - cost).abs() + outside)
    _, s.size = _value(problem, s, swept.rows, columns, cost, 0.0)
    ready = (((about <= s.target * s.size) & (step >= s.wait)) | s.done).nonzero()[:, 0]
    if len(ready):
        _offer(problem, s, ready, answer, step)
    misled = about > settings.DOUBT * torch.maximum(s.lowest, s.target * s.size)
    s.lowest = torch.where(misled, about, torch.minimum(s.lowest, about))
    s.bold = torch.where(misled, settings.LESS * s.bold, s.bold)
    follow(s, swept, misled | (step == 1), step % MEMORY)
    return s.take((~s.done).nonzero()[:, 0]) if len(ready) else s


def _start(problem: Projection) -> tuple[Unfinished, ProjectedSinkhorn]:
    """The images to sweep, and the result of those whose ball contains only the centre; others
    overwrite it."""
    given = (problem.x, problem.w, *problem.start(), problem.budget)
    x, w, u, psi, budget = (t.detach().double() for t in given)
    centre, rest = 0.5 * image_sums((w - x).square()), entropy_at_rest(x, problem.tau)
    dtype = torch.float64 if problem.factors else problem.x.dtype
    z, potential, price = (part.to(dtype, copy=True) for part in (x, u, psi))
    cost, gap, residual, n_iter = centre.new_zeros((4, len(x)))
    answer = ProjectedSinkhorn(
        z, cost, potential, price, centre + rest, gap, problem.tol * centre,
        residual.to(dtype), n_iter.long(),
        *(torch.ones_like(x), torch.zeros_like(x)) if problem.factors else (None, None),
    )  # fmt: skip
    single = (budget <= 0) | (image_sums(x) <= 0)
    tau = torch.where(single, 1.0, problem.tau.double())
    beta, past = u / per_image(tau, x), x.new_zeros((len(x), MEMORY, x[:1].numel()))
    s = Unfinished(
        place=torch.arange(len(x), device=x.device), x=x, w=w, budget=budget, tau=tau,
        centre=centre, rest=rest, beta=beta, price=psi / tau, size=centre,
        target=torch.full_like(centre, (settings.FIRST - settings.MARGIN) * problem.tol),
        offers=torch.zeros_like(centre), wait=torch.zeros_like(centre),
        lowest=torch.full_like(centre, math.inf), bold=torch.ones_like(centre),
        last=beta, change=beta, metric=beta,
        changes=past, steps=past, inverse=x.new_zeros((len(x), MEMORY)),
    )  # fmt: skip
    return s.take((~single).nonzero()[:, 0]), answer


def _misfit(problem: Projection, s: Unfinished, z: Tensor) -> Tensor:
    """The first term of the gap."""
    v = s.w - per_image(s.tau, s.x) * s.beta
    c = v.clamp(*problem.ends)
    return image_sums((z - c) * (0.5 * (z - c) - (v - c)))


def _value(
    problem: Projection,
    s: Unfinished,
    rows: PlanRows,
    z: Tensor,
    cost: Tensor,
    divergence: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """The objective with entropy relative to ``x``, and the size that gaps are relative to."""
    logs = image_sums(s.beta * z) - image_sums(s.x * rows.log_sum)
    entropy = s.tau * (divergence + logs - s.price * cost)
    distance = 0.5 * image_sums((s.w - z).square())
    size = torch.maximum(distance, settings.PARTS * (distance - entropy))
    return distance + entropy, size + problem.tol * s.centre


def _offer(
    problem: Projection, everyone: Unfinished, index: Tensor, answer: ProjectedSinkhorn, step: int
) -> None:
    """Repair and evaluate the plans of some images, and store those of images that are done."""
    (lo, hi), s = problem.ends, everyone.take(index)
    rows, exact = PlanRows(s.x, s.beta, problem.moves), answer.z.dtype == torch.float64
    rows.at(s.price)
    slack = problem.unit * (settings.EXACT_SLACK if exact else settings.SLACK)
    keep, give, sent, received = into_box(rows, lo, hi, slack)
    cost = image_sums(give * rows.exchanged(keep, PAID))
    scale = (s.budget / cost.clamp(min=TINY)).clamp(max=1.0)
    share = per_image(scale, s.x)
    sent, received, cost = share * give * sent, share * keep * received, scale * cost
    z = (s.x - sent + received).clamp(lo, hi)
    stay, xlogy = (s.x - sent).clamp(min=0.0), torch.special.xlogy
    changed = xlogy(received, keep) + xlogy(sent, give * share)
    divergence = image_sums(changed + xlogy(stay, stay / rows.stays.clamp(min=TINY)))
    gap = _misfit(problem, s, z) + s.tau * (s.price * (s.budget - cost) + divergence)
    objective, size = _value(problem, s, rows, z, cost, divergence)
    u, allowed = per_image(s.tau, s.x) * s.beta, problem.tol * size
    done = s.done | (gap <= allowed)
    found = {
        "z": z, "cost": cost, "u": u, "psi": s.tau * s.price, "objective": objective + s.rest,
        "gap": gap.clamp(min=0.0), "allowed": allowed, "keep": keep, "give": give * share,
        "residual": largest(z - (s.w - u).clamp(lo, hi)), "n_iter": torch.full_like(s.place, step),
    }  # fmt: skip
    kept = done.nonzero()[:, 0]
    for name, value in found.items():
        place = getattr(answer, name)
        if place is not None:
            place[s.place[kept]] = value[kept].to(place.dtype)
    everyone.done[index] = done
    everyone.offers[index] += 1
    everyone.wait[index] = step + settings.PAUSE * everyone.offers[index]
    everyone.target[index] = (0.5 * s.target).clamp(min=settings.LEAST * problem.tol)
