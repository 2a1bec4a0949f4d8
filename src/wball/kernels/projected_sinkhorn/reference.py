"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`) in plain PyTorch: the yardstick of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wball.batch import per_image
from wball.kernels.plan_rows import PlanRows, Repair, image_sums, into_box, ring_sums, solve_price
from wball.kernels.projected_sinkhorn import ProjectedSinkhorn, Projection, entropy_at_rest
from wball.moves import Moves

MOMENTUM = 0.95
"""Largest weight of the extrapolation."""
ROUNDS = 8
"""How often an image may offer a plan, because the repaired one is not always as good as estimated."""
FIRST, LEAST = 0.7, 0.02
"""An image offers its plan when the estimate falls below this share of the tolerance, halved from offer to offer."""
REPAIR_SWEEPS = 40
OVERSHOOT, FROM_SWEEP = 1.0, 2
"""From this repair sweep on, pixels above ``hi`` give back their excess and as much again. Mass that circulates among
full pixels would else take forever to die out; if they gave back more, their neighbours would have more to give back
than they had."""
SCHEDULE = (
    tuple(float(sweep < REPAIR_SWEEPS) for sweep in range(REPAIR_SWEEPS + 1)),
    tuple(OVERSHOOT * (FROM_SWEEP <= sweep < REPAIR_SWEEPS) for sweep in range(REPAIR_SWEEPS + 1)),
)
"""Of each sweep: what part of what a pixel sends it counts on, and how much further than the box asks for it goes."""
SLACK, EXACT_SLACK = 5e-7, 1e-12
"""What float32 and float64 may leave above ``hi``: it is cut off, far less mass than the images are given in."""
EXCESS = 1.5
"""What mass above the box will cost, in units of its price: it is sent back unspent, and takes others with it."""
PARTS = 0.03
"""Share of the objective's parts that counts where ``1/2 |w - z|^2`` is small next to the entropy."""
PSI_TOL = 0.2
"""The price is exact enough when what it leaves of the budget costs this share of what an offer may miss."""
RESOLUTION = 16
"""Roundings by which the cost may miss the budget at any price."""


def wright_omega(y: Tensor) -> Tensor:
    """The real solution ``o`` of ``o + log(o) = y``, by Newton's method on ``log(o)`` from either asymptote.

    >>> float(wright_omega(torch.tensor(1.0)))
    1.0
    """
    # For y below -1, o = e^y nearly; above, o = y - log(y) nearly. Newton in v = log(o) is globally convergent.
    y = y.clamp(min=torch.finfo(y.dtype).min)  # a column that nothing reaches has y = -inf
    v = torch.where(y < 1, y.clamp(max=1) - torch.exp(y.clamp(max=1)).clamp(max=0.5), torch.log(y.clamp(min=1)))
    for _ in range(6):
        o = torch.exp(v)
        v = v - (o + v - y) / (1 + o)
    return torch.exp(v)


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    answer = _Search(problem).run(problem.max_iter)
    return answer if problem.factors else replace(answer, keep=None, give=None)


class _Priced(PlanRows):
    """Rows with what the dual needs of them: the log of their normaliser, and their cost per image."""

    def __init__(self, x: Tensor, beta: Tensor, price: Tensor, moves: Moves) -> None:
        rings = ring_sums(beta, moves)
        super().__init__(x, beta, price, rings, moves)
        score = rings - per_image(price, self.x) * moves.ring_cost
        self.log_sum = torch.logsumexp(score, 0)
        self.cost = image_sums(x * (torch.softmax(score, 0) * moves.ring_cost).sum(0))


class _Search:
    def __init__(self, problem: Projection) -> None:
        dtype = torch.float64 if problem.factors else problem.x.dtype
        self.x, self.w, self.u, self.psi = (t.to(dtype) for t in (problem.x, problem.w, *problem.start()))
        self.budget, self.moves, self.tol = problem.budget.to(torch.float64), problem.moves.like(self.x), problem.tol
        self.boxed = problem.box is not None
        self.lo, self.hi = problem.ends
        self.slack = problem.unit * (SLACK if dtype == torch.float32 else EXACT_SLACK)
        self.single = (self.budget <= 0) | (image_sums(self.x) <= 0)
        self.at_rest = entropy_at_rest(problem.x, problem.tau)
        tau = problem.tau.to(dtype)
        self.tau = torch.where(self.single, torch.ones_like(tau), tau)
        self.resolution = RESOLUTION * torch.finfo(dtype).eps

    def run(self, max_iter: int) -> ProjectedSinkhorn:
        x, u, psi, scale = self.x, self.u, self.psi, per_image(self.tau, self.x)
        beta, price = u / scale, psi / self.tau
        last, streak = beta, torch.zeros_like(price)
        done = self.single.clone()
        target = torch.full_like(self.budget, FIRST * self.tol)
        size = 0.5 * image_sums((self.w - x).square())
        offers = torch.zeros_like(done, dtype=torch.long)
        n_iter = torch.zeros_like(done, dtype=torch.long)
        answer = self._finish(beta, price, self._rows(beta, price))
        for step in range(max_iter):
            if bool(done.all()):
                break
            price = torch.where(done, price, self._price(beta, price, target * size, 12 if step == 0 else 3))
            rows = self._rows(beta, price)
            columns = rows.columns()
            new = self._columns(beta, columns)
            n_iter += ~done
            about, size = self._estimate(beta, price, rows, columns)
            ready = ~done & ((about <= target * size) | (n_iter >= max_iter))
            if bool(ready.any()):
                offered = self._finish(beta, price, rows)
                answer = _choose(ready, offered, answer)
                offers += ready
                done = done | ready & ((offered.gap <= offered.allowed) | (offers == ROUNDS))
                target = torch.where(ready, (0.5 * target).clamp(min=LEAST * self.tol), target)
            turned = image_sums((new - beta) * (new - last)) < 0
            streak = torch.where(turned | (n_iter <= 1), torch.zeros_like(streak), streak + 1)
            weight = (streak / (streak + 3)).clamp(max=MOMENTUM)
            keep = per_image(done, self.x)
            beta, last = (
                torch.where(keep, beta, new + per_image(weight, self.x) * (new - last)),
                torch.where(keep, last, new),
            )
        still = per_image(self.single, self.x)
        assert answer.give is not None
        nothing = torch.zeros_like(answer.gap)
        at_centre = 0.5 * image_sums((self.w - x).square())
        return ProjectedSinkhorn(
            z=torch.where(still, x, answer.z),
            cost=torch.where(self.single, nothing, answer.cost),
            u=torch.where(still, u, answer.u),
            psi=torch.where(self.single, psi, answer.psi),
            objective=torch.where(self.single, at_centre, answer.objective) + self.at_rest,
            gap=torch.where(self.single, nothing, answer.gap.clamp(min=0)),
            allowed=torch.where(self.single, self.tol * at_centre, answer.allowed),
            residual=torch.where(self.single, torch.zeros_like(answer.residual), answer.residual),
            n_iter=n_iter,
            keep=answer.keep,
            give=torch.where(still, torch.zeros_like(x), answer.give),
        )

    def _price(self, beta: Tensor, price: Tensor, offer: Tensor, newton: int) -> Tensor:
        """The rows' block: bracketed Newton steps on the price, in units of ``tau``, for a gap of about ``offer``."""
        rings, cost_of = ring_sums(beta, self.moves), self.moves.ring_cost

        def tolerance(price: Tensor) -> Tensor:
            worth = (self.tau * price * self.budget).clamp(min=1e-300)
            return (PSI_TOL * offer / worth).clamp(self.resolution, PSI_TOL)

        return solve_price(self.x, rings, cost_of, self.budget, price, newton, tolerance, self.single)

    def _rows(self, beta: Tensor, price: Tensor) -> _Priced:
        return _Priced(self.x, beta, price, self.moves)

    def _columns(self, beta: Tensor, columns: Tensor) -> Tensor:
        """The columns' block."""
        scale = per_image(self.tau, self.x)
        log_s = torch.log(columns) - beta
        omega = wright_omega(self.w / scale + log_s - torch.log(scale))
        free = self.w / scale - omega
        bound = (omega * scale).clamp(self.lo, self.hi)
        return torch.where(omega * scale == bound, free, torch.log(bound) - log_s)

    def _misfit(self, beta: Tensor, z: Tensor) -> Tensor:
        """The first term of the gap, per pixel."""
        v = self.w - per_image(self.tau, self.x) * beta
        c = v.clamp(self.lo, self.hi)
        return 0.5 * (z - c).square() - (z - c) * (v - c)

    def _estimate(self, beta: Tensor, price: Tensor, rows: _Priced, columns: Tensor) -> tuple[Tensor, Tensor]:
        """About the gap after a repair, and its scale. Columns above ``hi`` will send mass back, unspent."""
        cost, psi = rows.cost, (self.tau * price).to(torch.float64)
        kept = columns.clamp(self.lo, self.hi)
        gap = image_sums(self._misfit(beta, kept))
        unspent = ((self.budget - cost).abs() - self.resolution * self.budget).clamp(min=0.0)
        gap = gap + psi * (unspent + EXCESS * image_sums((columns - kept).abs()))
        entropy = self.tau * (image_sums(beta * columns) - price * cost - image_sums(self.x * rows.log_sum))
        distance = 0.5 * image_sums((self.w - columns).square())
        return gap, self._scale(distance, entropy)

    def _scale(self, distance: Tensor, entropy: Tensor) -> Tensor:
        """What a gap is measured against. The point is off by at most the root of twice the gap: not by the entropy."""
        size = torch.maximum(distance, PARTS * (distance - entropy))
        return size + self.tol * 0.5 * image_sums((self.w - self.x).square())

    def _finish(self, beta: Tensor, price: Tensor, rows: _Priced) -> ProjectedSinkhorn:
        """The repaired plan of these duals, and its gap."""
        x, w, psi = self.x, self.w, (self.tau * price).to(torch.float64)
        keep, give, sent, received = self._into_box(rows)
        cost = _moved_cost(rows, keep, give)
        scale = (self.budget / cost.clamp(min=1e-300)).clamp(max=1.0)
        sent, received = (per_image(scale.to(x.dtype), x) * part for part in (sent, received))
        z = x - sent + received
        if self.boxed:
            z = z.clamp(self.lo, self.hi)
        cost = scale * cost
        stay, stayed = (x - sent).clamp(min=0.0), rows.flow(0)
        divergence = torch.log(scale) * image_sums(sent)
        divergence = divergence + image_sums(torch.special.xlogy(received, keep))
        divergence = divergence + image_sums(torch.special.xlogy(sent, give))
        tiny = torch.finfo(x.dtype).tiny
        divergence = divergence + image_sums(torch.special.xlogy(stay, stay / stayed.clamp(min=tiny)))
        gap = image_sums(self._misfit(beta, z)) + psi * (self.budget - cost) + self.tau * divergence
        entropy = self.tau * (divergence + image_sums(beta * z) - price * cost - image_sums(x * rows.log_sum))
        distance = 0.5 * image_sums((w - z).square())
        u = per_image(self.tau, self.x) * beta
        return ProjectedSinkhorn(
            z=z,
            cost=cost,
            u=u,
            psi=self.tau * price,
            objective=distance + entropy,
            gap=gap,
            allowed=self.tol * self._scale(distance, entropy),
            residual=(z - (w - u).clamp(self.lo, self.hi)).flatten(1).abs().amax(1),
            n_iter=torch.zeros_like(psi, dtype=torch.long),
            keep=keep,
            give=give * per_image(scale.to(x.dtype), x),
        )

    def _into_box(self, rows: _Priced) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Factors that keep the box, and what each pixel then sends and receives."""
        how = Repair(*SCHEDULE, self.slack, 0.0, self.slack)
        keep, give, sent, received = into_box(rows, self.lo, self.hi, how)
        return keep, give, give * sent, keep * received


def _moved_cost(rows: _Priced, keep: Tensor, give: Tensor) -> Tensor:
    """``<P, C>`` per image."""
    kept = rows.moves.ends(keep, 0.0)
    total = torch.zeros(rows.x.shape[0], dtype=torch.float64, device=rows.x.device)
    for k, flow in rows.flows():
        total += image_sums(flow * give * kept(k) * rows.moves.costs[k])
    return total


def _choose(mask: Tensor, yes: ProjectedSinkhorn, no: ProjectedSinkhorn) -> ProjectedSinkhorn:
    def pick(name: str) -> Tensor:
        a, b = getattr(yes, name), getattr(no, name)
        return torch.where(per_image(mask, a) if a.ndim == 4 else mask, a, b)

    names = ("z", "cost", "u", "psi", "objective", "gap", "allowed", "residual", "n_iter", "keep", "give")
    chosen: dict[str, Any] = {name: pick(name) for name in names}
    return replace(no, **chosen)
