"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`) in plain PyTorch: whole batches, in
logs, in float64.

The other kernels are tested against it. It serves GPU images that are too large for one Triton
program. An image leaves the batch when it is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wball.batch import largest, per_image
from wball.kernels.plan_rows import PlanRows, image_sums, into_box, ring_sums, solve_price
from wball.kernels.projected_sinkhorn import (
    DOUBT,
    EXACT_SLACK,
    EXCESS,
    FAR,
    FIRST,
    LEAST,
    LESS,
    LONGEST,
    MARGIN,
    MEMORY,
    PARTS,
    PSI_TOL,
    ROUNDS,
    SLACK,
    WIDEST_MARGIN,
    ProjectedSinkhorn,
    Projection,
    entropy_at_rest,
)

TINY = 1e-300


def log_omega(y: Tensor) -> Tensor:
    """The logarithm of Wright's omega, the solution ``v`` of ``exp(v) + v = y``, by Newton's
    method.

    >>> float(log_omega(torch.tensor(1.0)))
    0.0
    """
    y = y.clamp(min=torch.finfo(y.dtype).min)  # a column that nothing reaches has y = -inf
    low = y.clamp(max=1)
    v = torch.where(y < 1, low - torch.exp(low).clamp(max=0.5), torch.log(y.clamp(min=1)))
    for _ in range(6):
        o = torch.exp(v)
        v = v - (o + v - y) / (1 + o)
    return v


@dataclass
class _Images:
    """The images that are not done; the first dimension of each tensor is the image.

    Attributes:
        place: index of the image in the problem.
        centre: ``1/2 |w - x|^2``.
        beta, price: potentials and price, in units of ``tau``.
        size: the value that gaps are relative to.
        target: the relative gap at which an image offers its plan.
        lowest: the lowest estimate since the memory began.
        bold: the scale of the steps, at most 1.
        offers: number of plans offered.
        last, change: the potentials after the last sweep, and their change in that sweep.
        steps, changes: differences of ``last`` and ``change`` between sweeps, ``(B, MEMORY, n)``.
    """

    place: Tensor
    x: Tensor
    w: Tensor
    budget: Tensor
    tau: Tensor
    centre: Tensor
    beta: Tensor
    price: Tensor
    size: Tensor
    target: Tensor
    lowest: Tensor
    bold: Tensor
    offers: Tensor
    last: Tensor
    change: Tensor
    steps: Tensor
    changes: Tensor

    def take(self, index: Tensor) -> _Images:
        return _Images(*(getattr(self, field.name)[index] for field in fields(self)))


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    search = _Search(problem)
    step = 0
    while len(search.images.place):
        step += 1
        search.sweep(step)
    return search.answer


class _Search:
    def __init__(self, problem: Projection) -> None:
        self.tol, self.max_iter = problem.tol, max(problem.max_iter, 1)
        self.lo, self.hi = problem.ends
        self.least = math.log(self.lo) if self.lo > 0 else -math.inf
        exact = problem.factors or problem.x.dtype == torch.float64
        self.slack = problem.unit * (EXACT_SLACK if exact else SLACK)
        x, w, u, psi = (
            t.detach().to(torch.float64) for t in (problem.x, problem.w, *problem.start())
        )
        self.moves = problem.moves.like(x)
        budget, centre = problem.budget.to(torch.float64), 0.5 * image_sums((w - x).square())
        single = (budget <= 0) | (image_sums(x) <= 0)
        tau = torch.where(single, 1.0, problem.tau.to(torch.float64))
        out = torch.float64 if exact else problem.x.dtype
        self.at_rest = entropy_at_rest(x, problem.tau)
        # The answer for balls of one point; the others are overwritten.
        self.answer = ProjectedSinkhorn(
            z=x.to(out, copy=True),
            cost=torch.zeros_like(centre),
            u=u.to(out, copy=True),
            psi=psi.to(out, copy=True),
            objective=centre + self.at_rest,
            gap=torch.zeros_like(centre),
            allowed=self.tol * centre,
            residual=torch.zeros_like(centre, dtype=out),
            n_iter=torch.zeros_like(centre, dtype=torch.long),
            keep=torch.ones_like(x) if problem.factors else None,
            give=torch.zeros_like(x) if problem.factors else None,
        )
        beta = u / per_image(tau, x)
        past = x.new_zeros((len(x), MEMORY, x[0:1].numel()))
        self.images = _Images(
            place=torch.arange(len(x), device=x.device), x=x, w=w, budget=budget, tau=tau,
            centre=centre, beta=beta, price=psi / tau, size=centre,
            target=torch.full_like(centre, (FIRST - MARGIN) * self.tol),
            lowest=torch.full_like(centre, math.inf),
            bold=torch.ones_like(centre), offers=torch.zeros_like(centre),
            last=beta, change=torch.zeros_like(x), steps=past, changes=past.clone(),
        ).take((~single).nonzero()[:, 0])  # fmt: skip

    def sweep(self, step: int) -> None:
        """One sweep of all images, and the potentials that the next starts from. Images that are
        done leave."""
        s = self.images
        rings = ring_sums(s.beta, self.moves)
        s.price = self._price(s, rings, 12 if step == 1 else 3)
        rows = PlanRows(s.x, s.beta, s.price, rings, self.moves)
        stays = rows.flow(0)
        columns = stays + rows.received()
        margin, pressed = self._margin(s)
        new, free = self._columns(s, columns, margin)

        about = self._estimate(s, rows, columns) - margin * pressed
        ready = about <= s.target * s.size
        misled = about > DOUBT * torch.maximum(s.lowest, s.target * s.size)
        s.lowest = torch.where(misled, about, torch.minimum(s.lowest, about))
        s.bold = torch.where(misled, LESS * s.bold, s.bold)
        left = None
        if step >= self.max_iter or bool(ready.any()):
            left = self._offer((ready | (step >= self.max_iter)).nonzero()[:, 0], step)

        whole = columns + torch.where(free, per_image(s.tau, s.x), 0.0)
        moves_away = stays.square() / s.x.clamp(min=TINY)
        resists = torch.maximum(whole - moves_away, 1e-9 * whole).clamp(min=TINY)
        scaled = _scaled(s.beta, new, per_image(s.bold, s.x) * whole / resists)
        _remember(s, scaled, resists, misled | (step == 1), step % MEMORY)
        if left is not None and len(left) < len(s.place):
            self.images = s.take(left)

    def _price(self, s: _Images, rings: Tensor, newton: int) -> Tensor:
        """The block of the rows: bracketed Newton steps on the price, in units of ``tau``."""

        def tolerance(price: Tensor) -> Tensor:
            worth = (s.tau * price * s.budget).clamp(min=TINY)
            return (PSI_TOL * s.target * s.size / worth).clamp(4e-15, PSI_TOL)

        return solve_price(s.x, rings, self.moves.ring_cost, s.budget, s.price, newton, tolerance)

    def _margin(self, s: _Images) -> tuple[Tensor, Tensor]:
        """The distance from ``hi`` that full columns aim at, and the derivative of the gap in
        it."""
        pressed = image_sums((s.w - per_image(s.tau, s.x) * s.beta - self.hi).clamp(min=0.0))
        cost = MARGIN * self.tol * s.size
        margin = torch.minimum(cost / pressed.clamp(min=TINY), (2 * cost / s.x[0].numel()).sqrt())
        widest = WIDEST_MARGIN * (self.hi - self.lo) if self.hi < math.inf else 0.0
        return margin.clamp(max=widest), pressed

    def _columns(self, s: _Images, columns: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
        """The block of the columns: their new potentials, and where the box does not bind."""
        scale = per_image(s.tau, s.x)
        log_s, log_tau = torch.log(columns.clamp(min=TINY)) - s.beta, torch.log(scale)
        level = log_omega(s.w / scale + log_s - log_tau) + log_tau
        bound = level.clamp(min=self.least).minimum(per_image(torch.log(self.hi - margin), s.x))
        return bound - log_s, bound == level

    def _misfit(self, s: _Images, z: Tensor) -> Tensor:
        """The first term of the gap."""
        v = s.w - per_image(s.tau, s.x) * s.beta
        c = v.clamp(self.lo, self.hi)
        away = z - c
        return image_sums(away * (0.5 * away - (v - c)))

    def _estimate(self, s: _Images, rows: PlanRows, columns: Tensor) -> Tensor:
        """The gap to expect after a repair, which sends mass outside the box back, unspent."""
        kept = columns.clamp(self.lo, self.hi)
        psi, outside = s.tau * s.price, image_sums((columns - kept).abs())
        cost = image_sums(rows.spent(torch.ones_like(columns))[1])
        gap = self._misfit(s, kept) + psi * ((s.budget - cost).abs() + EXCESS * outside)
        logs = image_sums(s.beta * columns) - image_sums(s.x * rows.log_sum)
        distance = 0.5 * image_sums((s.w - columns).square())
        s.size = self._size(s, distance, s.tau * (logs - s.price * cost))
        return gap

    def _size(self, s: _Images, distance: Tensor, entropy: Tensor) -> Tensor:
        """The value that gaps are relative to."""
        return torch.maximum(distance, PARTS * (distance - entropy)) + self.tol * s.centre

    def _offer(self, index: Tensor, step: int) -> Tensor:
        """Repair and judge the plans of some images; returns the positions of all that are not
        done."""
        everyone, s = self.images, self.images.take(index)
        rows = PlanRows(s.x, s.beta, s.price, ring_sums(s.beta, self.moves), self.moves)
        keep, give, _, received = into_box(rows, self.lo, self.hi, self.slack)
        sent, paid = rows.spent(keep)
        cost = image_sums(give * paid)
        scale = (s.budget / cost.clamp(min=TINY)).clamp(max=1.0)
        share = per_image(scale, s.x)
        sent, received, cost = share * give * sent, share * keep * received, scale * cost
        z = (s.x - sent + received).clamp(self.lo, self.hi)
        stay, xlogy = (s.x - sent).clamp(min=0.0), torch.special.xlogy
        changed = xlogy(received, keep) + xlogy(sent, give)
        remained = xlogy(stay, stay / rows.flow(0).clamp(min=TINY))
        divergence = (
            torch.log(scale) * image_sums(sent) + image_sums(changed) + image_sums(remained)
        )
        gap = self._misfit(s, z) + s.tau * (s.price * (s.budget - cost) + divergence)
        logs = image_sums(s.beta * z) - image_sums(s.x * rows.log_sum)
        entropy = s.tau * (divergence + logs - s.price * cost)
        distance = 0.5 * image_sums((s.w - z).square())
        allowed = self.tol * self._size(s, distance, entropy)
        final = (s.offers + 1 >= ROUNDS) | (step >= self.max_iter)
        done = (gap <= allowed) | final

        u = per_image(s.tau, s.x) * s.beta
        found = {
            "z": z, "cost": cost, "u": u, "psi": s.tau * s.price,
            "objective": distance + entropy + self.at_rest[s.place], "gap": gap.clamp(min=0.0),
            "allowed": allowed, "residual": largest(z - (s.w - u).clamp(self.lo, self.hi)),
            "n_iter": torch.full_like(s.place, step), "keep": keep, "give": give * share,
        }  # fmt: skip
        for name, value in found.items():
            place = getattr(self.answer, name)
            if place is not None:
                place[s.place[done]] = value[done].to(place.dtype)
        everyone.offers[index] += 1
        everyone.target[index] = (0.5 * s.target).clamp(min=LEAST * self.tol)
        unfinished = torch.ones_like(everyone.place, dtype=torch.bool)
        unfinished[index] = ~done
        return unfinished.nonzero()[:, 0]


def _scaled(beta: Tensor, new: Tensor, scale: Tensor) -> Tensor:
    """Scaled steps (:mod:`wball.kernels.projected_sinkhorn`)."""
    step = new - beta
    reach = step.abs().clamp(min=FAR)
    return beta + torch.maximum(torch.minimum(step * scale.clamp(min=1.0), reach), -reach)


def _remember(s: _Images, new: Tensor, resists: Tensor, begins: Tensor, slot: int) -> None:
    """Anderson's method: the next ``beta`` from ``new`` and the sweeps before it; some images
    forget those."""
    change = new - s.beta
    s.steps[:, slot], s.changes[:, slot] = (new - s.last).flatten(1), (change - s.change).flatten(1)
    for past in (s.steps, s.changes):
        past.masked_fill_(begins[:, None, None], 0.0)
    weighted = s.changes * resists.flatten(1)[:, None]
    gram = weighted @ s.changes.mT
    ridge = 1e-10 * gram.diagonal(dim1=1, dim2=2).sum(1)[:, None].expand(-1, MEMORY) + TINY
    share, _ = torch.linalg.solve_ex(
        gram + torch.diag_embed(ridge), weighted @ change.flatten(1)[..., None]
    )
    s.change, s.last = change, new
    back = (share.mT @ s.steps).view_as(new)
    short = largest(back) <= LONGEST * largest(change).clamp(min=FAR)
    s.beta = torch.where(per_image(short, new), new - back, new)
