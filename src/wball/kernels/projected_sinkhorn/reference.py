"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`) in plain PyTorch: whole batches, in
float64.

The other kernels are tested against it. It serves GPU images that are too large for one Triton
program. An image sweeps until an estimate of its gap is small enough, offers its repaired plan, and
leaves the batch when it is done.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from wball.cost import PAID, Moves
from wball.inputs import largest, per_image
from wball.kernels import projected_sinkhorn as settings
from wball.kernels.entropic_plan import narrowed
from wball.kernels.plan_rows import PlanRows, image_sums, into_box
from wball.kernels.projected_sinkhorn import (
    EXACT_SLACK,
    MEMORY,
    SLACK,
    ProjectedSinkhorn,
    Projection,
    entropy_at_rest,
)

TINY = 1e-300


class Unfinished(SimpleNamespace):
    """The unfinished images; the first dimension of each tensor is the image.

    ``beta`` and ``price`` are in units of ``tau``. Gaps are relative to ``size``, and an image
    offers its plan at a gap of ``target``. ``changes`` and ``steps`` are the memory of the sweeps,
    ``(B, MEMORY, n)``.
    """

    def take(self, index: Tensor) -> Unfinished:
        return Unfinished(**{name: values[index] for name, values in vars(self).items()})


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    (s, answer), step = _start(problem), 0
    moves = problem.moves.like(s.x)
    while len(s.place):
        step += 1
        wide, s.beta = s.beta, narrowed(s.beta)  # potentials too far apart end the sweeps
        s.done = (wide < s.beta).flatten(1).any(1) | (step >= problem.max_iter)
        rows, miss = PlanRows(s.x, s.beta, moves), settings.PSI_TOL * s.target * s.size / s.tau
        s.price = rows.solve_price(
            s.budget, s.price, 12 if step == 1 else 3, settings.PSI_TOL, miss
        )
        columns, cost = rows.columns(), image_sums(rows.exchanged(1.0, PAID))
        change, scale, resists, relief = _columns(problem, s, rows, columns)
        # The expected gap after a repair, which returns mass outside the box at no cost.
        kept = columns.clamp(*problem.ends)
        outside = settings.EXCESS * image_sums((columns - kept).abs())
        about = _misfit(problem, s, kept) - relief
        about += s.tau * s.price * ((s.budget - cost).abs() + outside)
        _, s.size = _value(problem, s, rows, columns, cost, 0.0)
        ready = ((about <= s.target * s.size) | s.done).nonzero()[:, 0]
        if len(ready):
            _offer(problem, s, ready, moves, answer, step)
        misled = about > settings.DOUBT * torch.maximum(s.lowest, s.target * s.size)
        s.lowest = torch.where(misled, about, torch.minimum(s.lowest, about))
        s.bold = torch.where(misled, settings.LESS * s.bold, s.bold)
        reach = change.abs().clamp(min=settings.FAR)
        longer = (per_image(s.bold, s.x) * scale).clamp(min=1.0)
        _follow(
            s, (change * longer).clamp(-reach, reach), resists, misled | (step == 1), step % MEMORY
        )
        s = s.take((~s.done).nonzero()[:, 0]) if len(ready) else s
    return answer


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
        lowest=torch.full_like(centre, math.inf), bold=torch.ones_like(centre),
        last=beta, change=beta, metric=beta,
        changes=past, steps=past,
    )  # fmt: skip
    return s.take((~single).nonzero()[:, 0]), answer


def _columns(
    problem: Projection, s: Unfinished, rows: PlanRows, columns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve the columns: the change of ``beta`` that they ask for, what it is scaled by, how much
    they resist it, and how much the margin of full columns lowers the gap."""
    (lo, hi), tau, n = problem.ends, per_image(s.tau, s.x), s.x[0].numel()
    # Full columns aim below hi, by a margin in which the gap has the derivative `pressed`.
    pressed = image_sums((s.w - tau * s.beta - hi).clamp(min=0.0))
    worth = settings.MARGIN * problem.tol * s.size
    margin = torch.minimum(worth / pressed.clamp(min=TINY), (2 * worth / n).sqrt())
    margin = torch.minimum(margin, settings.MARGIN * s.budget / n)
    margin = margin.clamp(max=settings.WIDEST_MARGIN * (hi - lo) if hi < math.inf else 0.0)
    log_s = torch.log(columns.clamp(min=TINY)) - s.beta
    level = log_omega(s.w / tau + log_s - torch.log(tau)) + torch.log(tau)
    bound = level.clamp(min=math.log(lo) if lo > 0 else -math.inf)
    bound = bound.minimum(per_image(torch.log(hi - margin), s.x))
    whole = columns + torch.where(bound == level, tau, 0.0)
    resists = whole - rows.stays.square() / s.x.clamp(min=TINY)
    resists = torch.maximum(resists, 1e-9 * whole).clamp(min=TINY)
    return bound - log_s - s.beta, whole / resists, resists, margin * pressed


def log_omega(y: Tensor) -> Tensor:
    """The logarithm of Wright's omega, the solution ``v`` of ``exp(v) + v = y``, by Newton's
    method.

    >>> float(log_omega(torch.tensor(1.0)))
    0.0
    """
    y = y.clamp(min=torch.finfo(y.dtype).min)  # a column that nothing reaches has y = -inf
    v = torch.where(y < 1, y, torch.log(y.clamp(min=1)))  # above the solution, or at it
    for _ in range(6):
        below = v - 1
        v = torch.addcmul(below, y - below, torch.sigmoid(-v))
    return v


def _follow(s: Unfinished, change: Tensor, resists: Tensor, begins: Tensor, slot: int) -> None:
    """The next ``beta``: a conjugate step from the scaled change of this sweep and of earlier ones,
    which are dropped for images that begin anew."""
    new, fresh = s.beta + change, per_image(begins, change)
    s.metric = torch.where(fresh, resists, s.metric)
    s.changes[:, slot], s.steps[:, slot] = (change - s.change).flatten(1), (new - s.last).flatten(1)
    s.changes = torch.where(per_image(begins, s.changes), 0.0, s.changes)
    s.change, s.last = change, new
    weighted = s.metric.flatten(1)[:, None] * s.changes
    square = weighted @ s.changes.mT
    # Sweeps may depend on each other, and rows without a change are 0.
    square.diagonal(dim1=1, dim2=2).mul_(1 + settings.DEPENDENT).add_(TINY)
    share = torch.linalg.solve(square, weighted @ change.flatten(1)[..., None])
    s.beta = new - (share.mT @ s.steps).view_as(new)


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
    problem: Projection,
    everyone: Unfinished,
    index: Tensor,
    moves: Moves,
    answer: ProjectedSinkhorn,
    step: int,
) -> None:
    """Repair and evaluate the plans of some images, and store those of images that are done."""
    (lo, hi), s = problem.ends, everyone.take(index)
    rows, exact = PlanRows(s.x, s.beta, moves), answer.z.dtype == torch.float64
    rows.at(s.price)
    slack = problem.unit * (EXACT_SLACK if exact else SLACK)
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
    everyone.target[index] = (0.5 * s.target).clamp(min=settings.LEAST * problem.tol)
