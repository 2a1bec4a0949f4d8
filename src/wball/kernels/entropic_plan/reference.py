r"""The entropic plan, in plain PyTorch: the attack step's oracle, and the yardstick of the faster kernels.

For an image ``x`` (rows), potentials ``b`` and ``q`` (columns), a price ``psi`` per image and factors ``keep`` and
``give`` in [0, 1], the plan is

.. math::
    P_{ij} = x_i\, \mathrm{softmax}_j(b_j + q_j - \psi C_{ij}) \, give_i\, keep_j \quad (i \ne j), \qquad
    P_{ii} = x_i - \sum_{j \ne i} P_{ij},

so its rows sum to ``x`` whatever the other quantities are, and five images describe it. :func:`entropic_plan` chooses

* ``psi >= 0`` so that the cost meets the budget: the root of a decreasing function per image, found by bracketed Newton
  steps on its logarithm. Moves of equal cost form a *ring*; once their logsumexp is known, a step costs one term a
  ring instead of one a move;
* ``q`` by coordinate steps ``q_j <- clip(0, q_j + log(lo / z_j), q_j + log(hi / z_j))``: the multipliers of the box;
* ``keep`` and ``give`` so that the box holds exactly: a column above ``hi`` sends its excess back along the arcs it
  came by, a row that would leave less than ``lo`` sends less.

No tensor with one entry per arc exists: every pass loops over the moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Move = tuple[int, int, float]

COST_TOL = 1e-3
"""``psi`` is good enough when the cost lies within this relative distance below the budget."""

REPAIR_SHARES = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.99, 0.9, 0.5, 0.0)
"""Per repair sweep, the share of a column's outflow it may count on while later sweeps can still shrink that outflow.

With share 0 the bound ``x_j + inflow_j <= hi`` holds whatever the other columns do, so the last sweep always succeeds.
It also takes away far more than the little that is then left over. Plans are linear in ``keep``, so where rows need no
repair (``lo <= 0``) the answer lies between the last two: just far enough on the way to hold the box.
"""


@dataclass(frozen=True)
class EntropicPlan:
    """A plan of the family above that keeps the box, as column sums and the images that describe it.

    Attributes:
        z: column sums, inside the box, ``(B, C, H, W)``.
        cost: ``<P, C>`` per image, float64. At most ``budget`` where the Newton steps sufficed; the caller scales.
        net_cost: cost after opposite flows ``i -> j`` and ``j -> i`` cancel (rows and columns stay), float64.
        psi: price of cost per image, to warm-start the next call.
        q: box potentials, to warm-start the next call.
        keep: column factors on the moving mass.
        give: row factors on the moving mass.
        kernel: which implementation computed it.
    """

    z: Tensor
    cost: Tensor
    net_cost: Tensor
    psi: Tensor
    q: Tensor
    keep: Tensor
    give: Tensor
    kernel: str = "torch"


def entropic_plan(
    x: Tensor,
    b: Tensor,
    budget: Tensor,
    moves: Sequence[Move],
    box: tuple[float, float] | None,
    *,
    psi: Tensor,
    q: Tensor,
    sweeps: int = 3,
    newton: int = 12,
) -> EntropicPlan:
    """The feasible plan that ``b`` proposes at a cost of about ``budget``.

    Args:
        x: images in the box, float32 or float64, ``(B, C, H, W)``.
        b: potentials, like ``x``. Only differences inside a channel's window matter.
        budget: cost to spend per image, ``(B,)``. Not positive: the plan is not used, any psi will do.
        moves: ``(dr, dc, cost)``, cheapest first, the first being ``(0, 0, 0)``.
        box: ``(lo, hi)`` or ``None``.
        psi: starting price per image, ``(B,)``.
        q: starting box potentials, like ``x`` (zeros without a box).
        sweeps: coordinate steps on the box potentials.
        newton: at most so many Newton steps after each of them.
    """
    return _entropic_plan(x, b, budget, _StencilMoves(moves, x), box, psi, q, sweeps, newton)


def entropic_plan_dense(
    x: Tensor,
    b: Tensor,
    budget: Tensor,
    matrix: Tensor,
    box: tuple[float, float] | None,
    *,
    psi: Tensor,
    q: Tensor,
    sweeps: int = 3,
    newton: int = 12,
) -> EntropicPlan:
    """The same for a matrix of costs ``(n, n)`` with ``n = H * W``, ``inf`` where a move is forbidden."""
    return _entropic_plan(x, b, budget, _MatrixMoves(matrix, x), box, psi, q, sweeps, newton)


class _StencilMoves:
    """Moves by an offset: the same cost at every pixel."""

    def __init__(self, moves: Sequence[Move], x: Tensor) -> None:
        self.moves = list(moves)
        self.shape = (int(x.shape[-2]), int(x.shape[-1]))
        self.radius = (max(abs(r) for r, _, _ in moves), max(abs(c) for _, c, _ in moves))
        index = {(r, c): k for k, (r, c, _) in enumerate(self.moves)}
        self.reverse = [index.get((-r, -c)) for r, c, _ in self.moves]
        self.costs: list[float | Tensor] = [cost for *_, cost in self.moves]
        distinct = sorted({cost for *_, cost in self.moves})
        self.rings = [[k for k, (*_, cost) in enumerate(self.moves) if cost == d] for d in distinct]
        self.ring_cost = torch.tensor(distinct, dtype=x.dtype, device=x.device).view(-1, 1, 1, 1, 1)

    def _window(self, padded: Tensor, k: int) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        dr, dc, _ = self.moves[k]
        return padded[..., rr + dr : rr + dr + height, rc + dc : rc + dc + width]

    def prepare(self, values: Tensor, fill: float) -> Tensor:
        rr, rc = self.radius
        return F.pad(values, (rc, rc, rr, rr), value=fill)

    def at_end(self, prepared: Tensor, k: int) -> Tensor:
        """The value at the pixel where move ``k`` ends."""
        return self._window(prepared, k)

    def zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(self.prepare(like, 0.0))

    def arrive(self, total: Tensor, k: int, amount: Tensor) -> None:
        """Add ``amount``, given at the pixel where move ``k`` starts, to where it ends."""
        self._window(total, k).add_(amount)

    def finish(self, total: Tensor) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        return total[..., rr : rr + height, rc : rc + width]


class _MatrixMoves:
    """Moves of a matrix cost: the ``k``-th goes from ``i`` to ``i + k`` modulo ``n``. Each is its own ring."""

    def __init__(self, matrix: Tensor, x: Tensor) -> None:
        size, self.shape = matrix.shape[0], (int(x.shape[-2]), int(x.shape[-1]))
        start = torch.arange(size, device=matrix.device)
        by_move = torch.stack([matrix[start, (start + k) % size] for k in range(size)]).to(x.device)
        self.allowed = torch.isfinite(by_move).view(size, *self.shape)
        by_move = by_move.nan_to_num(posinf=0.0).to(x.dtype).view(size, *self.shape)
        self.costs: list[float | Tensor] = list(by_move)
        self.reverse: list[int | None] = [(size - k) % size for k in range(size)]
        self.rings = [[k] for k in range(size)]
        self.ring_cost = by_move.view(size, 1, 1, *self.shape)

    def prepare(self, values: Tensor, fill: float) -> Tensor:
        self._fill = fill
        return values

    def at_end(self, prepared: Tensor, k: int) -> Tensor:
        rolled = prepared.flatten(-2).roll(-k, -1).view(prepared.shape)
        return torch.where(self.allowed[k], rolled, torch.full_like(rolled, self._fill))

    def zeros(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def arrive(self, total: Tensor, k: int, amount: Tensor) -> None:
        total.add_(torch.where(self.allowed[k], amount, 0).flatten(-2).roll(k, -1).view(total.shape))

    def finish(self, total: Tensor) -> Tensor:
        return total


_Moves = _StencilMoves | _MatrixMoves


def _per_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


def _total(values: Tensor) -> Tensor:
    return values.sum((-3, -2, -1), dtype=torch.float64)


def _entropic_plan(
    x: Tensor,
    b: Tensor,
    budget: Tensor,
    moves: _Moves,
    box: tuple[float, float] | None,
    psi: Tensor,
    q: Tensor,
    sweeps: int,
    newton: int,
) -> EntropicPlan:
    lo, hi = box if box is not None else (0.0, math.inf)
    budget = budget.to(torch.float64)
    rings = _rings(b + q, moves)
    psi = _solve_psi(x, rings, moves.ring_cost, budget, psi.to(x.dtype), newton)
    for _ in range(sweeps if box is not None else 0):
        plan = _Rows(x, b + q, psi, rings, moves)
        z = plan.columns().clamp(min=1e-12)
        # The upper bound on the shift only matters for lo > 0, where an emptied column could ask for infinity.
        q = torch.minimum((q + torch.log(lo / z)).clamp(0.0, 50.0), q + torch.log(hi / z))
        rings = _rings(b + q, moves)
        psi = _solve_psi(x, rings, moves.ring_cost, budget, psi, newton)
    return _keep_box(_Rows(x, b + q, psi, rings, moves), lo, hi, psi, q)


def _rings(s: Tensor, moves: _Moves) -> Tensor:
    """``(D, B, C, H, W)``: for each distinct cost, the logsumexp of ``s`` over the moves of that cost."""
    ends = moves.prepare(s, -math.inf)
    out = []
    for ring in moves.rings:
        top = moves.at_end(ends, ring[0])
        for k in ring[1:]:
            top = torch.maximum(top, moves.at_end(ends, k))
        if len(ring) == 1:
            out.append(top)
            continue
        base = top.clamp(min=torch.finfo(s.dtype).min)  # a ring that lies outside the image has no top to subtract
        total = sum((moves.at_end(ends, k) - base).exp() for k in ring)
        out.append(base + torch.as_tensor(total).log())
    return torch.stack(out)


def _solve_psi(x: Tensor, rings: Tensor, ring_cost: Tensor, budget: Tensor, psi: Tensor, newton: int) -> Tensor:
    """The ``psi >= 0`` at which ``sum_i x_i E_i[cost]`` meets the budget, from the side below it."""
    low, high = torch.full_like(psi, -1.0), torch.full_like(psi, math.inf)
    done = torch.zeros_like(psi, dtype=torch.bool)
    target = budget * (1 - COST_TOL / 2)
    for _ in range(newton):
        share = torch.softmax(rings - _per_image(psi) * ring_cost, 0)
        mean = (share * ring_cost).sum(0)
        variance = (share * (ring_cost - mean).square()).sum(0)
        cost, slope = _total(x * mean), _total(x * variance)
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


class _Rows:
    """The plan before the box is enforced: mass along one move at a time."""

    def __init__(self, x: Tensor, s: Tensor, psi: Tensor, rings: Tensor, moves: _Moves) -> None:
        self.x, self.moves, self._price = x, moves, _per_image(psi)
        normaliser = torch.logsumexp(rings - self._price * moves.ring_cost, 0)
        self._start = torch.log(x) - normaliser  # -inf where the row is empty
        self._end = moves.prepare(s, -math.inf)

    def flow(self, k: int) -> Tensor:
        """Mass that leaves each pixel by move ``k``."""
        return (self._start + self.moves.at_end(self._end, k) - self._price * self.moves.costs[k]).exp()

    def flows(self) -> Iterator[tuple[int, Tensor]]:
        """All moves but the one that stays."""
        for k in range(1, len(self.moves.costs)):
            yield k, self.flow(k)

    def columns(self) -> Tensor:
        total = self.moves.zeros(self.x)
        self.moves.arrive(total, 0, self.flow(0))
        for k, flow in self.flows():
            self.moves.arrive(total, k, flow)
        return self.moves.finish(total)

    def exchange(self, keep: Tensor, give: Tensor) -> tuple[Tensor, Tensor]:
        """What each pixel would send if ``give`` were 1, and receive if ``keep`` were 1."""
        kept, received, sent = self.moves.prepare(keep, 0.0), self.moves.zeros(self.x), torch.zeros_like(self.x)
        for k, flow in self.flows():
            sent += flow * self.moves.at_end(kept, k)
            self.moves.arrive(received, k, flow * give)
        return sent, self.moves.finish(received)


def _keep_box(plan: _Rows, lo: float, hi: float, psi: Tensor, q: Tensor) -> EntropicPlan:
    x = plan.x
    keep, give = torch.ones_like(x), torch.ones_like(x)
    sent, received = plan.exchange(keep, give)
    rounding, tiny = 4 * torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
    slack = rounding * max(1.0, hi if math.isfinite(hi) else 1.0)
    # Potentials of size M leave the flows of a row off by a few M * eps of it, so that an emptied row may send more
    # than it has, which may be far below hi.
    least = lo - rounding * x - tiny
    for share in REPAIR_SHARES:
        z = x - give * sent + keep * received
        over, under = z > hi + slack, z < least
        broken = (over | under).flatten(1).any(1)
        if not bool(broken.any()):
            break
        if share == 0.0:  # every column of a broken image, because these moves push others over
            over = _per_image(broken).expand_as(x)
            under = over if lo > 0 else under
        room = ((hi - x + share * give * sent) / received.clamp(min=tiny)).clamp(min=0.0)
        spare = ((x - lo + share * keep * received) / sent.clamp(min=tiny)).clamp(min=0.0)
        kept, had_sent = keep, sent
        keep = torch.where(over, torch.minimum(keep, room), keep)
        give = torch.where(under, torch.minimum(give, spare), give)
        sent, received = plan.exchange(keep, give)
        if share == 0.0 and lo <= 0.0:
            excess, below = z - hi, (hi - (x - give * sent + keep * received)).clamp(min=0.0)
            part = torch.where(excess > slack, excess / (excess + below).clamp(min=tiny), torch.zeros_like(z))
            way = _per_image(part.flatten(1).amax(1))
            keep, sent = kept + way * (keep - kept), had_sent + way * (sent - had_sent)
    z = (x - give * sent + keep * received).clamp(lo, hi)  # rounding only
    cost, net_cost = _costs(plan, keep, give)
    return EntropicPlan(z, cost, net_cost, psi, q, keep, give)


def _costs(plan: _Rows, keep: Tensor, give: Tensor) -> tuple[Tensor, Tensor]:
    moves, kept = plan.moves, plan.moves.prepare(keep, 0.0)
    cost = torch.zeros(plan.x.shape[0], dtype=torch.float64, device=plan.x.device)
    net = cost.clone()
    for k, flow in plan.flows():
        flow = flow * give * moves.at_end(kept, k)
        cost += _total(flow * moves.costs[k])
        reverse = moves.reverse[k]
        if reverse is not None:
            back = plan.flow(reverse) * give * moves.at_end(kept, reverse)
            flow = (flow - moves.at_end(moves.prepare(back, 0.0), k)).clamp(min=0.0)
        net += _total(flow * moves.costs[k])
    return cost, net
