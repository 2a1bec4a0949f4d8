r"""Projected Sinkhorn, in plain PyTorch: the paper's entropic projection with the box inside, and O(n) state.

.. math::
    \min_{P \ge 0,\ P1 = x,\ \langle P, C\rangle \le E,\ lo \le z \le hi}
    \tfrac12 \|w - z\|^2 + \tau \sum_{ij} P_{ij} \log (P_{ij} / x_i), \qquad z = P^T 1

has the dual ``D(u, psi) = sum_j phi_j(u_j) - psi E - tau sum_i x_i lse_j((u_j - psi C_ij) / tau)`` with
``phi_j(u) = min over the box of 1/2 (w_j - z)^2 + u z``. It is climbed in two blocks, in logs (``beta = u / tau``):

* rows and price together: the rows in closed form, ``psi`` a scalar root over rings (as in the entropic plan);
* columns: with ``s_j`` the arriving mass per unit of ``e^beta_j``, ``clip(w_j - tau beta_j) = e^beta_j s_j`` has the
  solution ``beta = w / tau - omega(w / tau + log(s / tau))`` (Wright omega) where the box does not bind, and
  ``log(bound / s)`` where it does.

Plain block ascent crawls when ``tau`` is small or many pixels are full. Each sweep therefore starts from a point
extrapolated along the last move, with weights ``k / (k + 3)``, and ``k`` starts again at 0 when the sweep turns back
(Nesterov's momentum with adaptive restart): a quarter of the sweeps at the paper's ``lambda``, and far less beyond it.

**Stopping.** For a plan ``Q`` with rows ``x`` and the plan ``P`` of ``(u, psi)``, with ``v = w - u``, ``c = clip(v)``,

.. math::
    primal(Q) - D(u, \psi) = \sum_j \big( \tfrac12 (z_j - c_j)^2 - (z_j - c_j)(v_j - c_j) \big)
    + \psi (E - \langle Q, C \rangle) + \tau\, KL(Q \,|\, P),

a sum of small terms that nothing cancels in, so float32 resolves gaps far below its rounding of the objective.
An image leaves when a cheap estimate of this is within the tolerance; then its plan is repaired (box, then budget),
the gap is evaluated for the repaired plan, and the image goes back if that was not enough.

**Repair.** Full columns send their excess back, which may overfill those who sent it; what a few sweeps leave is tiny.
It is removed by mixing in a plan ``Q`` in which no column counts on what it sends away: ``Q`` is below ``hi`` by that
amount, so a small share of it is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wball.kernels.entropic_plan.reference import Move, _per_image, _rings, _Rows, _StencilMoves, _total

MOMENTUM = 0.95
"""Largest weight of the extrapolation."""
ROUNDS = 8
"""How often an image may offer a plan, because the repaired one is not always as good as estimated."""
FIRST, LEAST = 0.7, 0.02
"""An image offers its plan when the estimate falls below this share of the tolerance, halved from offer to offer."""
REPAIR_SWEEPS = 40
SLACK = 5e-7
"""What may be left above ``hi`` (and is cut off: far less mass than float32 images are given in)."""
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


@dataclass(frozen=True)
class ProjectedSinkhorn:
    """A feasible point near the entropic projection, and how near.

    Attributes:
        z: columns of a plan that keeps box and budget, ``(B, C, H, W)``.
        cost: what that plan costs, per image, float64.
        u: potential of the columns, to warm-start the next call.
        psi: price of cost per image, to warm-start the next call.
        objective: ``1/2 |w - z|^2 + tau sum P log(P / x)`` of that plan, float64.
        gap: proven distance of ``objective`` from the optimum, float64.
        allowed: the gap at which an image counts as solved, float64.
        residual: largest difference between ``z`` and ``clip(w - u)``.
        n_iter: sweeps per image.
    """

    z: Tensor
    cost: Tensor
    u: Tensor
    psi: Tensor
    objective: Tensor
    gap: Tensor
    allowed: Tensor
    residual: Tensor
    n_iter: Tensor
    kernel: str = "torch"


def projected_sinkhorn(
    x: Tensor,
    w: Tensor,
    budget: Tensor,
    moves: Sequence[Move],
    box: tuple[float, float] | None,
    tau: Tensor,
    *,
    u: Tensor,
    psi: Tensor,
    tol: float = 1e-4,
    max_iter: int = 500,
) -> ProjectedSinkhorn:
    """The entropic projection of ``w`` at temperature ``tau`` (``m / lambda`` in image units).

    Args:
        x: images in the box, float32 or float64, ``(B, C, H, W)``.
        w: points to project, like ``x``.
        budget: cost that may be spent per image, ``(B,)``. Not positive: the point is ``x``.
        moves: ``(dr, dc, cost)``, cheapest first, the first being ``(0, 0, 0)``.
        box: ``(lo, hi)`` or ``None``.
        tau: temperature per image, ``(B,)``, positive where the image has mass.
        u: starting potential, like ``x``; ``w - x`` is a good one.
        psi: starting price, ``(B,)``.
        tol: an image is done when ``gap <= tol * max(d, PARTS * (d + tau |entropy|)) + tol^2 * 1/2 |w - x|^2`` with
            ``d = 1/2 |w - z|^2``.
        max_iter: at most so many sweeps per image.
    """
    search = _Search(x, w, budget.to(torch.float64), _StencilMoves(moves, x), box, tau.to(x.dtype), tol)
    return search.run(u.to(x.dtype), psi.to(x.dtype), max_iter)


class _Priced(_Rows):
    """Rows with what the dual needs of them: the log of their normaliser, and their cost per image."""

    def __init__(self, x: Tensor, beta: Tensor, price: Tensor, moves: _StencilMoves) -> None:
        rings = _rings(beta, moves)
        super().__init__(x, beta, price, rings, moves)
        score = rings - _per_image(price) * moves.ring_cost
        self.log_sum = torch.logsumexp(score, 0)
        self.cost = _total(x * (torch.softmax(score, 0) * moves.ring_cost).sum(0))


class _Search:
    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        budget: Tensor,
        moves: _StencilMoves,
        box: tuple[float, float] | None,
        tau: Tensor,
        tol: float,
    ) -> None:
        self.x, self.w, self.budget, self.moves, self.tol = x, w, budget, moves, tol
        self.boxed = box is not None
        self.lo, self.hi = (max(box[0], 0.0), box[1]) if box is not None else (0.0, math.inf)
        self.single = (budget <= 0) | (_total(x) <= 0)
        self.tau = torch.where(self.single, torch.ones_like(tau), tau)
        self.resolution = RESOLUTION * torch.finfo(x.dtype).eps

    def run(self, u: Tensor, psi: Tensor, max_iter: int) -> ProjectedSinkhorn:
        x, scale = self.x, _per_image(self.tau)
        beta, price = u / scale, psi / self.tau
        last, streak = beta, torch.zeros_like(price)
        done = self.single.clone()
        target = torch.full_like(self.budget, FIRST * self.tol)
        size = 0.5 * _total((self.w - x).square())
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
            turned = _total((new - beta) * (new - last)) < 0
            streak = torch.where(turned | (n_iter <= 1), torch.zeros_like(streak), streak + 1)
            weight = (streak / (streak + 3)).clamp(max=MOMENTUM)
            keep = _per_image(done)
            beta, last = torch.where(keep, beta, new + _per_image(weight) * (new - last)), torch.where(keep, last, new)
        still = _per_image(self.single)
        nothing = torch.zeros_like(answer.gap)
        at_centre = 0.5 * _total((self.w - x).square())
        return ProjectedSinkhorn(
            z=torch.where(still, x, answer.z),
            cost=torch.where(self.single, nothing, answer.cost),
            u=torch.where(still, u, answer.u),
            psi=torch.where(self.single, psi, answer.psi),
            objective=torch.where(self.single, at_centre, answer.objective),
            gap=torch.where(self.single, nothing, answer.gap),
            allowed=torch.where(self.single, self.tol * at_centre, answer.allowed),
            residual=torch.where(self.single, torch.zeros_like(answer.residual), answer.residual),
            n_iter=n_iter,
        )

    def _price(self, beta: Tensor, price: Tensor, offer: Tensor, newton: int) -> Tensor:
        """The rows' block: bracketed Newton steps on the price, in units of ``tau``, for a gap of about ``offer``."""
        rings, cost_of = _rings(beta, self.moves), self.moves.ring_cost
        low, high = torch.full_like(price, -1.0), torch.full_like(price, math.inf)
        for _ in range(newton):
            worth = (self.tau * price * self.budget).clamp(min=1e-300)
            tolerance = (PSI_TOL * offer / worth).clamp(self.resolution, PSI_TOL)
            share = torch.softmax(rings - _per_image(price) * cost_of, 0)
            mean = (share * cost_of).sum(0)
            cost, slope = _total(self.x * mean), _total(self.x * (share * (cost_of - mean).square()).sum(0))
            inside = cost <= self.budget
            found = inside & ((cost >= self.budget * (1 - tolerance)) | (price == 0))
            low, high = torch.where(inside, low, price), torch.where(inside, price, high)
            step = price + (cost * torch.log(cost / (self.budget * (1 - tolerance / 2))) / slope).to(price.dtype)
            step = torch.where(step < 0, torch.zeros_like(step), step)
            middle = torch.where(high.isinf(), 2 * price + 1, (low.clamp(min=0.0) + high) / 2)
            step = torch.where((step > low) & (step < high) & (step < 100 * price + 100), step, middle)
            price = torch.where(found, price, step)
            if bool((found | self.single).all()):
                break
        return price

    def _rows(self, beta: Tensor, price: Tensor) -> _Priced:
        return _Priced(self.x, beta, price, self.moves)

    def _columns(self, beta: Tensor, columns: Tensor) -> Tensor:
        """The columns' block."""
        scale = _per_image(self.tau)
        log_s = torch.log(columns) - beta
        omega = wright_omega(self.w / scale + log_s - torch.log(scale))
        free = self.w / scale - omega
        bound = (omega * scale).clamp(self.lo, self.hi)
        return torch.where(omega * scale == bound, free, torch.log(bound) - log_s)

    def _misfit(self, beta: Tensor, z: Tensor) -> Tensor:
        """The first term of the gap, per pixel."""
        v = self.w - _per_image(self.tau) * beta
        c = v.clamp(self.lo, self.hi)
        return 0.5 * (z - c).square() - (z - c) * (v - c)

    def _estimate(self, beta: Tensor, price: Tensor, rows: _Priced, columns: Tensor) -> tuple[Tensor, Tensor]:
        """About the gap after a repair, and its scale. Columns above ``hi`` will send mass back, unspent."""
        cost, psi = rows.cost, (self.tau * price).to(torch.float64)
        kept = columns.clamp(self.lo, self.hi)
        gap = _total(self._misfit(beta, kept))
        unspent = ((self.budget - cost).abs() - self.resolution * self.budget).clamp(min=0.0)
        gap = gap + psi * (unspent + 1.5 * _total((columns - kept).abs()))
        entropy = self.tau * (_total(beta * columns) - price * cost - _total(self.x * rows.log_sum))
        distance = 0.5 * _total((self.w - columns).square())
        return gap, self._scale(distance, entropy)

    def _scale(self, distance: Tensor, entropy: Tensor) -> Tensor:
        """What a gap is measured against. The point is off by at most the root of twice the gap: not by the entropy."""
        size = torch.maximum(distance, PARTS * (distance - entropy))
        return size + self.tol * 0.5 * _total((self.w - self.x).square())

    def _finish(self, beta: Tensor, price: Tensor, rows: _Priced) -> ProjectedSinkhorn:
        """The repaired plan of these duals, and its gap."""
        x, w, psi = self.x, self.w, (self.tau * price).to(torch.float64)
        keep, give, sent, received = self._into_box(rows)
        cost = _moved_cost(rows, keep, give)
        share = (self.budget / cost.clamp(min=1e-300)).clamp(max=1.0)
        sent, received = (_per_image(share.to(x.dtype)) * part for part in (sent, received))
        z = x - sent + received
        if self.boxed:
            z = z.clamp(self.lo, self.hi)
        cost = share * cost
        stay, stayed = (x - sent).clamp(min=0.0), rows.flow(0)
        divergence = torch.log(share) * _total(sent)
        divergence = divergence + _total(torch.special.xlogy(received, keep))
        divergence = divergence + _total(torch.special.xlogy(sent, give))
        tiny = torch.finfo(x.dtype).tiny
        divergence = divergence + _total(torch.special.xlogy(stay, stay / stayed.clamp(min=tiny)))
        gap = _total(self._misfit(beta, z)) + psi * (self.budget - cost) + self.tau * divergence
        entropy = self.tau * (divergence + _total(beta * z) - price * cost - _total(x * rows.log_sum))
        distance = 0.5 * _total((w - z).square())
        u = _per_image(self.tau) * beta
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
        )

    def _into_box(self, rows: _Priced) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Factors that keep the box, and what each pixel then sends and receives."""
        x, lo, hi = self.x, self.lo, self.hi
        keep, give = torch.ones_like(x), torch.ones_like(x)
        sent, received = rows.exchange(keep, give)
        slack = SLACK * max(1.0, hi if math.isfinite(hi) else 1.0)
        tiny = torch.finfo(x.dtype).tiny

        def tightened(share: float) -> tuple[Tensor, Tensor]:
            room = ((hi - x + share * give * sent) / received.clamp(min=tiny)).clamp(min=0.0)
            spare = ((x - lo + share * keep * received) / sent.clamp(min=tiny)).clamp(min=0.0)
            return torch.minimum(keep, room), torch.minimum(give, spare)

        for sweep in range(REPAIR_SWEEPS + 1):
            z = x - give * sent + keep * received
            over, under = z > hi + slack, z < lo - slack
            broken = (over | under).flatten(1).any(1)
            if not bool(broken.any()):
                break
            if sweep < REPAIR_SWEEPS:
                kept, given = tightened(1.0)
                keep, give = torch.where(over, kept, keep), torch.where(under, given, give)
                sent, received = rows.exchange(keep, give)
                continue
            kept, given = tightened(0.0)
            out, into = rows.exchange(kept, given)
            excess = (z - hi).clamp(min=0.0)
            below = (hi - (x - given * out + kept * into)).clamp(min=0.0)
            mix = torch.where(over, excess / (excess + below).clamp(min=tiny), torch.zeros_like(x)).flatten(1).amax(1)
            # With a lower bound both factors may differ, and a mixture would not have this form.
            mix = torch.where(broken, mix if lo == 0.0 else torch.ones_like(mix), torch.zeros_like(mix))
            mix = _per_image(mix)
            sent, received = (
                (1 - mix) * a + mix * b for a, b in ((give * sent, given * out), (keep * received, kept * into))
            )
            return (1 - mix) * keep + mix * kept, (1 - mix) * give + mix * given, sent, received
        return keep, give, give * sent, keep * received


def _moved_cost(rows: _Priced, keep: Tensor, give: Tensor) -> Tensor:
    """``<P, C>`` per image."""
    kept = rows.moves.prepare(keep, 0.0)
    total = torch.zeros(rows.x.shape[0], dtype=torch.float64, device=rows.x.device)
    for k, flow in rows.flows():
        total += _total(flow * give * rows.moves.at_end(kept, k) * rows.moves.costs[k])
    return total


def _choose(mask: Tensor, yes: ProjectedSinkhorn, no: ProjectedSinkhorn) -> ProjectedSinkhorn:
    def pick(name: str) -> Tensor:
        a, b = getattr(yes, name), getattr(no, name)
        return torch.where(_per_image(mask) if a.ndim == 4 else mask, a, b)

    names = ("z", "cost", "u", "psi", "objective", "gap", "allowed", "residual", "n_iter")
    chosen: dict[str, Any] = {name: pick(name) for name in names}
    return replace(no, **chosen)
