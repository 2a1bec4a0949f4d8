"""The entropic plan (:mod:`wball.kernels.entropic_plan`) in plain PyTorch: the yardstick of the faster kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wball.batch import per_image
from wball.kernels.entropic_plan import COST_TOL, REPAIR_COUNTED, EntropicPlan
from wball.moves import Moves


def entropic_plan(
    x: Tensor,
    b: Tensor,
    budget: Tensor,
    moves: Moves,
    box: tuple[float, float] | None,
    *,
    psi: Tensor,
    q: Tensor,
    sweeps: int = 3,
    newton: int = 12,
) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`."""
    lo, hi = box if box is not None else (0.0, math.inf)
    budget, moves = budget.to(torch.float64), moves.like(x)
    rings = ring_sums(b + q, moves)
    psi = _solve_psi(x, rings, moves.ring_cost, budget, psi.to(x.dtype), newton)
    for _ in range(sweeps if box is not None else 0):
        plan = PlanRows(x, b + q, psi, rings, moves)
        z = plan.columns().clamp(min=1e-12)
        # The upper bound on the shift only matters for lo > 0, where an emptied column could ask for infinity.
        q = torch.minimum((q + torch.log(lo / z)).clamp(0.0, 50.0), q + torch.log(hi / z))
        rings = ring_sums(b + q, moves)
        psi = _solve_psi(x, rings, moves.ring_cost, budget, psi, newton)
    return _keep_box(PlanRows(x, b + q, psi, rings, moves), lo, hi, psi, q)


def image_sums(values: Tensor) -> Tensor:
    return values.sum((-3, -2, -1), dtype=torch.float64)


def ring_sums(s: Tensor, moves: Moves) -> Tensor:
    """``(D, B, C, H, W)``: for each distinct cost, the logsumexp of ``s`` over the moves of that cost."""
    ends = moves.ends(s, -math.inf)
    out = []
    for ring in moves.rings:
        top = ends(ring[0])
        for k in ring[1:]:
            top = torch.maximum(top, ends(k))
        if len(ring) == 1:
            out.append(top)
            continue
        base = top.clamp(min=torch.finfo(s.dtype).min)  # a ring that lies outside the image has no top to subtract
        total = sum((ends(k) - base).exp() for k in ring)
        out.append(base + torch.as_tensor(total).log())
    return torch.stack(out)


def _solve_psi(x: Tensor, rings: Tensor, ring_cost: Tensor, budget: Tensor, psi: Tensor, newton: int) -> Tensor:
    """The ``psi >= 0`` at which ``sum_i x_i E_i[cost]`` meets the budget, from the side below it."""
    low, high = torch.full_like(psi, -1.0), torch.full_like(psi, math.inf)
    done = torch.zeros_like(psi, dtype=torch.bool)
    target = budget * (1 - COST_TOL / 2)
    for _ in range(newton):
        share = torch.softmax(rings - per_image(psi, x) * ring_cost, 0)
        mean = (share * ring_cost).sum(0)
        variance = (share * (ring_cost - mean).square()).sum(0)
        cost, slope = image_sums(x * mean), image_sums(x * variance)
        inside = cost <= budget
        done = done | (inside & ((cost >= budget * (1 - COST_TOL)) | (psi == 0)))
        low, high = torch.where(inside, low, psi), torch.where(inside, psi, high)
        # cost falls about exponentially in psi, so Newton's method runs on its logarithm
        step = psi + (cost * torch.log(cost / target) / slope).to(psi.dtype)
        step = step.clamp(min=0.0)
        middle = torch.where(high.isinf(), 2 * psi + 1, (low.clamp(min=0.0) + high) / 2)
        # A slope lost to underflow sends the step to the moon: not beyond a hundred times where we are.
        step = torch.where((step > low) & (step < high) & (step < 100 * psi + 100), step, middle)
        psi = torch.where(done, psi, step)
        if bool(done.all()):
            break
    return psi


class PlanRows:
    """The plan before the box is enforced: mass along one move at a time."""

    def __init__(self, x: Tensor, s: Tensor, psi: Tensor, rings: Tensor, moves: Moves) -> None:
        self.x, self.moves, self._price = x, moves, per_image(psi, x)
        normaliser = torch.logsumexp(rings - self._price * moves.ring_cost, 0)
        self._start = torch.log(x) - normaliser  # -inf where the row is empty
        self._ends = moves.ends(s, -math.inf)

    def flow(self, k: int) -> Tensor:
        """Mass that leaves each pixel by move ``k``."""
        return (self._start + self._ends(k) - self._price * self.moves.costs[k]).exp()

    def flows(self) -> Iterator[tuple[int, Tensor]]:
        """All moves but the one that stays."""
        for k in range(1, len(self.moves)):
            yield k, self.flow(k)

    def columns(self) -> Tensor:
        total = self.moves.arrivals(self.x)
        total.add(0, self.flow(0))
        for k, flow in self.flows():
            total.add(k, flow)
        return total.total()

    def exchange(self, keep: Tensor, give: Tensor) -> tuple[Tensor, Tensor]:
        """What each pixel would send if ``give`` were 1, and receive if ``keep`` were 1."""
        kept, received, sent = self.moves.ends(keep, 0.0), self.moves.arrivals(self.x), torch.zeros_like(self.x)
        for k, flow in self.flows():
            sent += flow * kept(k)
            received.add(k, flow * give)
        return sent, received.total()


def _keep_box(plan: PlanRows, lo: float, hi: float, psi: Tensor, q: Tensor) -> EntropicPlan:
    x = plan.x
    keep, give = torch.ones_like(x), torch.ones_like(x)
    sent, received = plan.exchange(keep, give)
    rounding, tiny = 4 * torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
    slack = rounding * max(1.0, hi if math.isfinite(hi) else 1.0)
    # Potentials of size M leave the flows of a row off by a few M * eps of it, so that an emptied row may send more
    # than it has, which may be far below hi.
    least = lo - rounding * x - tiny
    for counted in REPAIR_COUNTED:
        z = x - give * sent + keep * received
        over, under = z > hi + slack, z < least
        broken = (over | under).flatten(1).any(1)
        if not bool(broken.any()):
            break
        if counted == 0.0:  # every column of a broken image, because these moves push others over
            over = per_image(broken, x).expand_as(x)
            under = over if lo > 0 else under
        room = ((hi - x + counted * give * sent) / received.clamp(min=tiny)).clamp(min=0.0)
        spare = ((x - lo + counted * keep * received) / sent.clamp(min=tiny)).clamp(min=0.0)
        kept, had_sent = keep, sent
        keep = torch.where(over, torch.minimum(keep, room), keep)
        give = torch.where(under, torch.minimum(give, spare), give)
        sent, received = plan.exchange(keep, give)
        if counted == 0.0 and lo <= 0.0:
            excess, below = z - hi, (hi - (x - give * sent + keep * received)).clamp(min=0.0)
            part = torch.where(excess > slack, excess / (excess + below).clamp(min=tiny), torch.zeros_like(z))
            way = per_image(part.flatten(1).amax(1), part)
            keep, sent = kept + way * (keep - kept), had_sent + way * (sent - had_sent)
    z = (x - give * sent + keep * received).clamp(lo, hi)  # rounding only
    cost, net_cost = _costs(plan, keep, give)
    return EntropicPlan(z, cost, net_cost, psi, q, keep, give)


def _costs(plan: PlanRows, keep: Tensor, give: Tensor) -> tuple[Tensor, Tensor]:
    moves, kept = plan.moves, plan.moves.ends(keep, 0.0)
    cost = torch.zeros(plan.x.shape[0], dtype=torch.float64, device=plan.x.device)
    net = cost.clone()
    for k, flow in plan.flows():
        flow = flow * give * kept(k)
        cost += image_sums(flow * moves.costs[k])
        reverse = moves.reverse[k]
        if reverse is not None:
            back = plan.flow(reverse) * give * kept(reverse)
            flow = (flow - moves.ends(back, 0.0)(k)).clamp(min=0.0)
        net += image_sums(flow * moves.costs[k])
    return cost, net
