"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`) in plain PyTorch: whole batches, in
float64.

The other kernels are tested against it. It serves GPU images that are too large for one Triton
program. An image leaves the batch when it is done.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from wball.inputs import largest, per_image
from wball.kernels import projected_sinkhorn as settings
from wball.kernels.plan_rows import SPREAD, PlanRows, image_sums, into_box
from wball.kernels.projected_sinkhorn import MEMORY, ProjectedSinkhorn, Projection, entropy_at_rest

TINY = 1e-300


def log_omega(y: Tensor) -> Tensor:
    """The logarithm of Wright's omega, the solution ``v`` of ``exp(v) + v = y``, by Newton's
    method.

    >>> float(log_omega(torch.tensor(1.0)))
    0.0
    """
    y = y.clamp(min=torch.finfo(y.dtype).min)  # a column that nothing reaches has y = -inf
    v = torch.where(y < 1, y, torch.log(y.clamp(min=1)))  # above the solution, or at it
    for _ in range(6):
        o = torch.exp(v)
        v = v - (o + v - y) / (1 + o)
    return v


class _Images(SimpleNamespace):
    """The unfinished images; the first dimension of each tensor is the image.

    ``beta`` and ``price`` are in units of ``tau``. Gaps are relative to ``size``, and an image
    offers its plan at a gap of ``target``. ``changes`` and ``steps`` are the memory of the sweeps,
    ``(B, MEMORY, n)``, and ``sizes`` the squares of ``changes``.
    """

    def take(self, index: Tensor) -> _Images:
        return _Images(**{name: values[index] for name, values in vars(self).items()})


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    search, step = _Sweeps(problem), 0
    while len(search.images.place):
        step += 1
        search.sweep(step)
    return search.answer


class _Sweeps:
    """Runs the sweeps of a batch and collects the results."""

    def __init__(self, problem: Projection) -> None:
        self.tol, self.max_iter = problem.tol, max(problem.max_iter, 1)
        self.lo, self.hi = problem.ends
        exact = problem.factors or problem.x.dtype == torch.float64
        self.slack = problem.unit * (settings.EXACT_SLACK if exact else settings.SLACK)
        given = (problem.x, problem.w, *problem.start(), problem.budget)
        x, w, u, psi, budget = (t.detach().to(torch.float64) for t in given)
        self.moves, centre = problem.moves.like(x), 0.5 * image_sums((w - x).square())
        single = (budget <= 0) | (image_sums(x) <= 0)
        tau = torch.where(single, 1.0, problem.tau.to(torch.float64))
        self.at_rest = entropy_at_rest(x, problem.tau)
        out = torch.float64 if exact else problem.x.dtype
        z, potential, price = (part.to(out, copy=True) for part in (x, u, psi))
        cost, gap, residual, n_iter = centre.new_zeros((4, len(x)))
        # The result for balls that contain only their centre; other images overwrite it.
        self.answer = ProjectedSinkhorn(
            z, cost, potential, price, centre + self.at_rest, gap, self.tol * centre,
            residual.to(out), n_iter.long(),
            *(torch.ones_like(x), torch.zeros_like(x)) if problem.factors else (None, None),
        )  # fmt: skip
        beta, past = u / per_image(tau, x), x.new_zeros((len(x), MEMORY, x[:1].numel()))
        self.images = _Images(
            place=torch.arange(len(x), device=x.device), x=x, w=w, budget=budget, tau=tau,
            centre=centre, beta=beta, price=psi / tau, size=centre,
            target=torch.full_like(centre, (settings.FIRST - settings.MARGIN) * self.tol),
            offers=torch.zeros_like(centre), lowest=torch.full_like(centre, math.inf),
            bold=torch.ones_like(centre), last=beta, change=beta, metric=beta,
            changes=past, steps=past, sizes=x.new_zeros((len(x), MEMORY)),
        ).take((~single).nonzero()[:, 0])  # fmt: skip

    def sweep(self, step: int) -> None:
        """Run one sweep of all images and compute the potentials that the next one starts from.
        Finished images are removed."""
        s, tau = self.images, per_image(self.images.tau, self.images.x)
        # Rows and price.
        least = per_image(s.beta.flatten(1).amax(1) - SPREAD, s.x)
        last = (s.beta < least).flatten(1).any(1) | (step >= self.max_iter)
        s.beta = torch.maximum(s.beta, least)
        rows, worth = PlanRows(s.x, s.beta, self.moves), settings.PSI_TOL * s.target * s.size
        s.price = rows.solve_price(
            s.budget, s.price, 12 if step == 1 else 3,
            lambda price: (worth / (s.tau * price * s.budget).clamp(min=TINY)).clamp(4e-15, settings.PSI_TOL),
        )  # fmt: skip
        stays, columns = rows.flow(0), rows.columns()
        # Columns. Full ones aim below hi, by a margin in which the gap has the derivative
        # `pressed`.
        pressed = image_sums((s.w - tau * s.beta - self.hi).clamp(min=0.0))
        worth = settings.MARGIN * self.tol * s.size
        widest = settings.WIDEST_MARGIN * (self.hi - self.lo) if self.hi < math.inf else 0.0
        margin = torch.minimum(worth / pressed.clamp(min=TINY), (2 * worth / s.x[0].numel()).sqrt())
        margin = margin.clamp(max=widest)
        log_s = torch.log(columns.clamp(min=TINY)) - s.beta
        level = log_omega(s.w / tau + log_s - torch.log(tau)) + torch.log(tau)
        bound = level.clamp(min=math.log(self.lo) if self.lo > 0 else -math.inf)
        bound = bound.minimum(per_image(torch.log(self.hi - margin), s.x))
        # The expected gap after a repair, which returns mass outside the box at no cost.
        kept, cost = columns.clamp(self.lo, self.hi), image_sums(rows.spent(torch.ones_like(s.x)))
        outside = settings.EXCESS * image_sums((columns - kept).abs())
        about = self._misfit(s, kept) - margin * pressed
        about += s.tau * s.price * ((s.budget - cost).abs() + outside)
        logs = image_sums(s.beta * columns) - image_sums(s.x * rows.log_sum)
        s.size = self._size(s, columns, s.tau * (logs - s.price * cost))
        ready = (about <= s.target * s.size) | last
        left = self._offer(ready.nonzero()[:, 0], last, step) if bool(ready.any()) else None
        # Starting point of the next sweep: a scaled step, then a conjugate one.
        misled = about > settings.DOUBT * torch.maximum(s.lowest, s.target * s.size)
        s.lowest = torch.where(misled, about, torch.minimum(s.lowest, about))
        s.bold = torch.where(misled, settings.LESS * s.bold, s.bold)
        whole = columns + torch.where(bound == level, tau, 0.0)
        resists = whole - stays.square() / s.x.clamp(min=TINY)
        resists = torch.maximum(resists, 1e-9 * whole).clamp(min=TINY)
        change = bound - log_s - s.beta
        reach = change.abs().clamp(min=settings.FAR)
        scaled = change * (per_image(s.bold, s.x) * whole / resists).clamp(min=1.0)
        change = torch.maximum(torch.minimum(scaled, reach), -reach)
        _conjugate(s, change, resists, misled | (step == 1), step % MEMORY)
        if left is not None:
            self.images = s.take(left)

    def _misfit(self, s: _Images, z: Tensor) -> Tensor:
        """The first term of the gap."""
        v = s.w - per_image(s.tau, s.x) * s.beta
        c = v.clamp(self.lo, self.hi)
        return image_sums((z - c) * (0.5 * (z - c) - (v - c)))

    def _size(self, s: _Images, z: Tensor, entropy: Tensor) -> Tensor:
        """The value that gaps are relative to."""
        distance = 0.5 * image_sums((s.w - z).square())
        share = settings.PARTS * (distance - entropy)
        return torch.maximum(distance, share) + self.tol * s.centre

    def _offer(self, index: Tensor, last: Tensor, step: int) -> Tensor:
        """Repair and evaluate the plans of some images. Returns the positions of all unfinished
        images."""
        everyone, s = self.images, self.images.take(index)
        rows = PlanRows(s.x, s.beta, self.moves).at(s.price)
        keep, give, sent, received = into_box(rows, self.lo, self.hi, self.slack)
        cost = image_sums(give * rows.spent(keep))
        scale = (s.budget / cost.clamp(min=TINY)).clamp(max=1.0)
        share = per_image(scale, s.x)
        sent, received, cost = share * give * sent, share * keep * received, scale * cost
        z = (s.x - sent + received).clamp(self.lo, self.hi)
        stay, xlogy = (s.x - sent).clamp(min=0.0), torch.special.xlogy
        changed = xlogy(received, keep) + xlogy(sent, give * share)
        divergence = image_sums(changed + xlogy(stay, stay / rows.flow(0).clamp(min=TINY)))
        gap = self._misfit(s, z) + s.tau * (s.price * (s.budget - cost) + divergence)
        logs = image_sums(s.beta * z) - image_sums(s.x * rows.log_sum)
        entropy = s.tau * (divergence + logs - s.price * cost)
        allowed = self.tol * self._size(s, z, entropy)
        done = (gap <= allowed) | (s.offers + 1 >= settings.ROUNDS) | last[index]

        u, distance = per_image(s.tau, s.x) * s.beta, 0.5 * image_sums((s.w - z).square())
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
        everyone.target[index] = (0.5 * s.target).clamp(min=settings.LEAST * self.tol)
        unfinished = torch.ones_like(everyone.place, dtype=torch.bool)
        unfinished[index] = ~done
        return unfinished.nonzero()[:, 0]


def _conjugate(s: _Images, change: Tensor, resists: Tensor, begins: Tensor, slot: int) -> None:
    """A conjugate step (:mod:`wball.kernels.projected_sinkhorn`): the next ``beta`` from the change
    of this sweep and of earlier ones, which are dropped for images that begin anew."""
    new = s.beta + change
    latest, step = (change - s.change).flatten(1), (new - s.last).flatten(1)
    s.change, s.last = change, new
    s.metric = torch.where(per_image(begins, new), resists, s.metric)
    metric = s.metric.flatten(1)[:, None]
    s.sizes[:, slot] = 0.0

    def shares(values: Tensor) -> Tensor:
        along = (metric * s.changes * values[:, None]).sum(2)
        return torch.where(s.sizes > 0, along / s.sizes.clamp(min=TINY), 0.0)[:, None]

    whole, share = (metric[:, 0] * latest.square()).sum(1), shares(latest)
    s.changes[:, slot] = latest - (share @ s.changes)[:, 0]
    s.steps[:, slot] = step - (share @ s.steps)[:, 0]
    s.sizes[:, slot] = (metric[:, 0] * s.changes[:, slot].square()).sum(1)
    dependent = begins | (s.sizes[:, slot] <= settings.DEPENDENT * whole)
    s.sizes = torch.where(dependent[:, None], 0.0, s.sizes)
    s.beta = new - (shares(change.flatten(1)) @ s.steps).view_as(new)
