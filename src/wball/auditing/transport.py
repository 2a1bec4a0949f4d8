r"""Is this image in that Wasserstein ball? Measured in float64 by code that shares nothing with kernels and solvers.

- *mass*: ``max_c |sum z_c - sum x_c| / m`` over channels ``c``, with ``m`` the mass of ``x``;
- *box*: how far the worst pixel is outside ``[lo, hi]`` (without a box: below 0, because mass is not negative);
- *distance*: the exact optimal transport cost in the unit of ``eps``, or an upper bound that a plan proves
  (:mod:`wball.auditing.proof`).

The moves and what they cost are read off the ground cost, and the transport problem is written down here. Neither is
the linear-programming code trusted: the flow it returns is summed up and priced here (an upper bound of the distance),
its dual prices are checked against every move and summed up (a lower bound), and the two must meet.

Float32 images have equal mass only up to rounding, and so does every island of pixels that the window does not connect
to others. So ``z`` is brought to the mass of ``x`` channel by channel, and mass that no plan could place is left out if
it is at most 1e-5 of ``m``; otherwise the distance is infinite. Half a unit in the last place of ``z``'s dtype, on all
of its mass, moved by the cheapest move, is granted on top of the radius: it only matters for radii near 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball.auditing.proof import proved_distance
from wball.auditing.violations import BOX_TOL, MASS_TOL, Violations, box_violation, half_ulp
from wball.cost import DenseCost, GroundCost
from wball.plan import StoredPlan

Array = NDArray[np.float64]
Index = NDArray[np.int64]

AGREE = 1e-8  # of the mass, times the dearest move: bounds from both sides must meet this closely


def transport_violations(
    cost: GroundCost,
    x: Tensor,
    z: Tensor,
    *,
    relative: bool,
    box: tuple[float, float] | None,
    plan: StoredPlan | Tensor | None = None,
) -> Violations:
    """Mass, box and distance of ``z`` around ``x``, both ``(B, C, H, W)`` or ``(B, n)``.

    Args:
        cost: what moves cost.
        x: centres.
        z: points; their contents may be anything.
        relative: whether distances are fractions of the image's mass.
        box: bounds of pixels.
        plan: plans that claim to turn ``x`` into ``z``. Nothing is solved then: the distance is what the plan proves.
    """
    start, end = _planes(x), _planes(z)
    finite = end.isfinite().flatten(1).all(1)
    end = torch.where(finite.view(-1, 1, 1, 1), end, 0.0)
    mass = start.flatten(1).sum(1)
    off = (end.sum((2, 3)) - start.sum((2, 3))).abs().amax(1)
    moves = _all_moves(cost, int(start.shape[2]), int(start.shape[3]))
    unit = mass if relative else torch.ones_like(mass)
    if plan is None:
        a, b = start.cpu().numpy(), end.cpu().numpy()
        total = torch.tensor([_transport(moves, *pair) for pair in zip(a, b, strict=True)], dtype=torch.float64)
        total = total.reshape(-1).to(x.device)
    else:
        total = proved_distance(cost, start, end, plan)
    return Violations(
        mass_error=torch.where(finite, _over(off, mass), math.inf),
        box_violation=box_violation(z, box if box is not None else (0.0, math.inf)),
        distance=torch.where(finite, _over(total, unit), math.inf),
        rounding=half_ulp(z) * moves.cheapest * torch.where(unit > 0, mass / unit, 1.0),
        exact=torch.ones_like(finite) if plan is None else ~finite,
    )


def cheapest_plan(cost: GroundCost, x: Tensor, z: Tensor) -> tuple[Index, Index, Array]:
    """The moves of a cheapest plan from ``x`` to ``z``, both ``(C, H, W)``: start, end and mass, without what stays.

    Pixels are numbered row by row in each channel. Mass that has no move (rounding) is left out.
    """
    moves = _all_moves(cost, int(x.shape[1]), int(x.shape[2]))
    parts = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))]
    end = z.detach().to("cpu", torch.float64).clamp(min=0).flatten(1).numpy()
    for a, b in zip(x.detach().to("cpu", torch.float64).flatten(1).numpy(), end, strict=True):
        if a.sum() > 0 and b.sum() > 0 and not np.array_equal(a, b):
            _, _, arcs, flow = _channel(moves, a, b * (a.sum() / b.sum()))
            used = (flow > 1e-7 * a.sum()) & (moves.source[arcs] != moves.target[arcs])
            parts.append((moves.source[arcs][used], moves.target[arcs][used], flow[used]))
    source, target, mass = (np.concatenate(part) for part in zip(*parts, strict=True))
    return source, target, mass


def _planes(x: Tensor) -> Tensor:
    image = x.detach().to(torch.float64)
    return image if image.ndim == 4 else image[:, None, None, :]


def _over(total: Tensor, unit: Tensor) -> Tensor:
    """Quotients with 0 / 0 = 0."""
    return torch.where(total == 0, 0.0, torch.where(unit > 0, total / unit, math.inf))


@lru_cache(maxsize=8)
def _all_moves(cost: GroundCost, height: int, width: int) -> _Moves:
    return _Moves(cost, height, width)


class _Moves:
    """Every move ``source -> target`` that a cost allows on a grid, and its price."""

    def __init__(self, cost: GroundCost, height: int, width: int) -> None:
        n = height * width
        here = np.arange(n).reshape(height, width)
        if isinstance(cost, DenseCost):
            if cost.size != n:
                raise ValueError(f"the ball's cost is for {cost.size} pixels, but the images have {n}")
            price = cost.matrix.cpu().numpy().T.copy()  # row k: the moves that end in k
            target = np.repeat(np.arange(n)[:, None], n, axis=1)
        else:
            steps = cost.moves(height, width)
            price, target = np.full((len(steps), n), math.inf), np.zeros((len(steps), n), dtype=np.int64)
            for k, (down, right, value) in enumerate(steps):
                rows, columns = np.divmod(here.reshape(-1), width)
                rows, columns = rows + down, columns + right
                inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
                price[k, inside] = value
                target[k, inside] = rows[inside] * width + columns[inside]
        step, self.source = np.nonzero(np.isfinite(price))
        self.target, self.price = target[step, self.source], price[step, self.source]
        self.dearest = float(self.price.max())
        self.cheapest = float(self.price[self.price > 0].min()) if bool((self.price > 0).any()) else 0.0


def _transport(moves: _Moves, x: Array, z: Array) -> float:
    """The least cost of turning ``x`` into ``z``, both ``(C, H, W)``, in mass units; inf if it cannot be done."""
    if float(z.min()) < -BOX_TOL:
        return math.inf
    mass, spent, missing = float(x.sum()), 0.0, 0.0
    for start, end in zip(x.reshape(len(x), -1), np.maximum(z, 0.0).reshape(len(z), -1), strict=True):
        if np.array_equal(start, end):
            continue  # staying is free
        before, after = float(start.sum()), float(end.sum())
        # Rounding in the sums is forgiven tenfold here so that a distance is reported beside a slightly wrong mass.
        if abs(before - after) > 10 * MASS_TOL * mass or (before == 0) != (after == 0):
            return math.inf
        if before == 0:
            continue
        cost, left, _, _ = _channel(moves, start, end * (before / after))
        spent, missing = spent + cost, missing + left
    return spent if missing <= MASS_TOL * mass else math.inf


def _channel(moves: _Moves, a: Array, b: Array) -> tuple[float, float, Index, Array]:
    """Least cost of matching ``a`` with ``b``, the mass that no plan can match, and the flow on the numbered moves.

    As a linear program: ``min <P, C> + M (sum r + sum s)`` with ``P 1 + r = a``, ``P^T 1 + s = b``, all >= 0. Each unit
    that is not matched appears once in ``r`` and once in ``s``; to match it instead costs at most one dearest move per
    pixel on the way, so ``M`` times two exceeds that. As a flow: ``r`` goes to, ``s`` comes from, one more node.
    """
    rows, columns = np.nonzero(a)[0], np.nonzero(b)[0]
    number = np.zeros((2, len(a)), dtype=np.int64)
    number[0, rows], number[1, columns] = np.arange(len(rows)), np.arange(len(columns))
    usable = np.flatnonzero((a[moves.source] > 0) & (b[moves.target] > 0))
    k = len(usable)
    n, m = len(rows), len(columns)
    tail = np.concatenate([number[0, moves.source[usable]], np.arange(n), np.full(m, n), [n]])
    head = np.concatenate([number[1, moves.target[usable]], np.full(n, m), np.arange(m), [m]])
    mass = float(a.sum())  # the programs below see masses that sum to 1 and as much again in the extra node
    supply, demand = np.append(a[rows] / mass, 1.0), np.append(b[columns] / mass, 1.0)
    # A large M costs digits. A smaller one will do whenever all mass is matched at it, as it nearly always is.
    for length in sorted({min(n, m, 64), min(n, m)}):
        price = np.concatenate([moves.price[usable], np.full(n + m, 1.0 + moves.dearest * length), [0.0]])
        flow = _optimal_flow(tail, head, price, supply, demand, AGREE * max(moves.dearest, 1.0))
        if flow is not None:
            missing = float(flow[k:-1].sum()) / 2
            if missing <= 1e-12 or length == min(n, m):
                return mass * float(flow[:k] @ price[:k]), mass * missing, usable, mass * flow[:k]
    return math.inf, 0.0, usable[:0], np.zeros(0)


def _optimal_flow(tail: Index, head: Index, price: Array, supply: Array, demand: Array, gap: float) -> Array | None:
    """A flow on the arcs that was checked to be optimal up to ``gap``; ``None`` if no solver delivers one."""
    for solve in (_by_network_simplex, _by_linear_program):
        answer = solve(tail, head, price, supply, demand)
        if answer is None:
            continue
        flow, u, v = answer
        flow = np.maximum(flow, 0.0)
        wrong = float(np.abs(np.bincount(tail, flow, len(supply)) - supply).sum())
        wrong += float(np.abs(np.bincount(head, flow, len(demand)) - demand).sum())
        # Shift the row prices until no move is underpriced: then their sum is a lower bound in any case.
        slack = np.full(len(supply), math.inf)
        np.minimum.at(slack, tail, price - u[tail] - v[head])
        lower = float((u + np.minimum(slack, 0.0)) @ supply + v @ demand)
        if wrong <= AGREE and float(flow @ price) - lower <= gap:
            return flow
    return None


def _by_network_simplex(
    tail: Index, head: Index, price: Array, supply: Array, demand: Array
) -> tuple[Array, Array, Array] | None:
    """Flow on each arc and the dual prices, by POT; ``None`` where it is not installed."""
    try:
        import ot  # here and below: slow to import
    except ImportError:
        return None
    from scipy import sparse

    shape = (len(supply), len(demand))
    costs = sparse.coo_matrix((price, (tail, head)), shape=shape)
    plan, log = ot.emd(supply, demand, costs, numItermax=10**7, log=True, center_dual=False, check_marginals=False)
    plan = plan.tocoo()
    key = tail * shape[1] + head
    order = np.argsort(key)
    used = order[np.searchsorted(key, plan.row.astype(np.int64) * shape[1] + plan.col, sorter=order)]
    flow = np.zeros(len(price))
    flow[used] = plan.data
    return flow, np.asarray(log["u"]), np.asarray(log["v"])


def _by_linear_program(
    tail: Index, head: Index, price: Array, supply: Array, demand: Array
) -> tuple[Array, Array, Array] | None:
    """The same by HiGHS: slower, and only asked when the first answer did not pass."""
    from scipy import sparse
    from scipy.optimize import linprog

    arcs = np.arange(len(price))
    leaves = sparse.csr_matrix((np.ones(len(price)), (tail, arcs)), shape=(len(supply), len(price)))
    arrives = sparse.csr_matrix((np.ones(len(price)), (head, arcs)), shape=(len(demand), len(price)))
    # One of the sums follows from the others; with rounding it might contradict them.
    equalities, sums = sparse.vstack([leaves, arrives[:-1]]), np.concatenate([supply, demand[:-1]])
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = linprog(price, A_eq=equalities, b_eq=sums, method="highs", options=tight)
    if answer.x is None:
        return None
    prices = np.append(answer.eqlin.marginals, 0.0)
    return np.asarray(answer.x), prices[: len(supply)], prices[len(supply) :]
