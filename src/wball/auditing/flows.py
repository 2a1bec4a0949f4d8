"""Flows of least cost between two histograms, over the moves that a ground cost allows.

They are found by a network simplex (POT) or a linear program (HiGHS), and believed only as far as they add up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wball.cost import DenseCost, GroundCost

Array = NDArray[np.float64]
Index = NDArray[np.int64]

AGREE = 1e-8  # of the mass, times the dearest move: bounds from both sides must meet this closely


class ListedMoves:
    """Every move ``source -> target`` that a cost allows on a grid, and its price.

    ``straight`` is what a step to the next pixel in a row or column costs, inf if there is none in some direction.
    """

    def __init__(self, cost: GroundCost, height: int, width: int) -> None:
        n = height * width
        here = np.arange(n).reshape(height, width)
        if isinstance(cost, DenseCost):
            if cost.size != n:
                raise ValueError(
                    f"the ball's cost is for {cost.size} pixels, but the images have {n}"
                )
            self.straight = math.inf
            price = cost.matrix.cpu().numpy().T.copy()  # row k: the moves that end in k
            target = np.repeat(np.arange(n)[:, None], n, axis=1)
        else:
            steps = cost.moves(height, width)
            price, target = (
                np.full((len(steps), n), math.inf),
                np.zeros((len(steps), n), dtype=np.int64),
            )
            for k, (down, right, value) in enumerate(steps):
                rows, columns = np.divmod(here.reshape(-1), width)
                rows, columns = rows + down, columns + right
                inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
                price[k, inside] = value
                target[k, inside] = rows[inside] * width + columns[inside]
            self.straight = max(_price(steps, *step) for step in ((0, 1), (0, -1), (1, 0), (-1, 0)))
        self.grid = (height, width)
        self.symmetric = not isinstance(cost, DenseCost)
        step, self.source = np.nonzero(np.isfinite(price))
        self.target, self.price = target[step, self.source], price[step, self.source]
        self.dearest = float(self.price.max())
        self.cheapest = (
            float(self.price[self.price > 0].min()) if bool((self.price > 0).any()) else 0.0
        )


def _price(steps: list[tuple[int, int, float]], down: int, right: int) -> float:
    return next((value for *step, value in steps if step == [down, right]), math.inf)


class Matching(NamedTuple):
    """What it costs to match two histograms, the mass that stayed unmatched, and the flow on some of the moves."""

    cost: float
    missing: float
    arcs: Index
    flow: Array


class Network(NamedTuple):
    """Flows between histograms that both have one more entry, which takes what stays unmatched."""

    tail: Index
    head: Index
    supply: Array
    demand: Array

    def prices(self, price: Array, unmatched: float) -> Array:
        """What each arc costs: the moves, what is not matched, and the way between the two entries more."""
        return np.concatenate(
            [price, np.full(len(self.supply) + len(self.demand) - 2, unmatched), [0.0]]
        )


def network(moves: ListedMoves, a: Array, b: Array) -> tuple[Network, Index]:
    """The network between the entries of ``a`` and ``b`` that are above 0, as fractions of the mass of ``a``; and which
    moves its first arcs are."""
    rows, columns = np.flatnonzero(a > 0), np.flatnonzero(b > 0)
    number = np.zeros((2, len(a)), dtype=np.int64)
    number[0, rows], number[1, columns] = np.arange(len(rows)), np.arange(len(columns))
    arcs = np.flatnonzero((a[moves.source] > 0) & (b[moves.target] > 0))
    n, m, mass = len(rows), len(columns), float(a.sum())
    tail = np.concatenate([number[0, moves.source[arcs]], np.arange(n), np.full(m, n), [n]])
    head = np.concatenate([number[1, moves.target[arcs]], np.full(n, m), np.arange(m), [m]])
    return Network(
        tail, head, np.append(a[rows] / mass, 1.0), np.append(b[columns] / mass, 1.0)
    ), arcs


def match(moves: ListedMoves, a: Array, b: Array) -> Matching:
    """Match ``a`` with ``b``, of the same mass, at the least cost; an infinite one if no solver delivers it.

    As a linear program: ``min <P, C> + M (sum r + sum s)`` with ``P 1 + r = a``, ``P^T 1 + s = b``, all >= 0. Each unit
    that is not matched appears once in ``r`` and once in ``s``; to match it instead costs at most one dearest move per
    pixel on the way, so ``M`` times two exceeds that. As a flow: ``r`` goes to, ``s`` comes from, one more node.
    """
    net, arcs = network(moves, a, b)
    k, mass, most = len(arcs), float(a.sum()), min(len(net.supply), len(net.demand)) - 1
    # A large M costs digits. A smaller one will do whenever all mass is matched at it, as it nearly always is.
    for length in sorted({min(most, 64), most}):
        price = net.prices(moves.price[arcs], 1.0 + moves.dearest * length)
        flow = _optimal_flow(net, price, AGREE * max(moves.dearest, 1.0))
        if flow is not None:
            missing = float(flow[k:-1].sum()) / 2
            if missing <= 1e-12 or length == most:
                return Matching(
                    mass * float(flow[:k] @ price[:k]), mass * missing, arcs, mass * flow[:k]
                )
    return Matching(math.inf, 0.0, arcs[:0], np.zeros(0))


def _optimal_flow(net: Network, price: Array, gap: float) -> Array | None:
    """A flow on the arcs that was checked to be optimal up to ``gap``; ``None`` if no solver delivers one."""
    tail, head, supply, demand = net
    for solve in (by_network_simplex, _by_linear_program):
        answer = solve(net, price)
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


def by_network_simplex(net: Network, price: Array) -> tuple[Array, Array, Array] | None:
    """Flow on each arc and the dual prices, by POT; ``None`` where it is not installed."""
    try:
        import ot  # here and below: slow to import
    except ImportError:
        return None
    from scipy import sparse

    tail, head, supply, demand = net
    shape = (len(supply), len(demand))
    costs = sparse.coo_matrix((price, (tail, head)), shape=shape)
    plan, log = ot.emd(
        supply, demand, costs, numItermax=10**7, log=True, center_dual=False, check_marginals=False
    )
    plan = plan.tocoo()
    key = tail * shape[1] + head
    order = np.argsort(key)
    used = order[
        np.searchsorted(key, plan.row.astype(np.int64) * shape[1] + plan.col, sorter=order)
    ]
    flow = np.zeros(len(price))
    flow[used] = plan.data
    return flow, np.asarray(log["u"]), np.asarray(log["v"])


def _by_linear_program(net: Network, price: Array) -> tuple[Array, Array, Array] | None:
    """The same by HiGHS: slower, and only asked when the first answer did not pass."""
    from scipy import sparse
    from scipy.optimize import linprog

    tail, head, supply, demand = net
    arcs = np.arange(len(price))
    leaves = sparse.csr_matrix((np.ones(len(price)), (tail, arcs)), shape=(len(supply), len(price)))
    arrives = sparse.csr_matrix(
        (np.ones(len(price)), (head, arcs)), shape=(len(demand), len(price))
    )
    # One of the sums follows from the others; with rounding it might contradict them.
    equalities, sums = sparse.vstack([leaves, arrives[:-1]]), np.concatenate([supply, demand[:-1]])
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    answer = linprog(price, A_eq=equalities, b_eq=sums, method="highs", options=tight)
    if answer.x is None:
        return None
    prices = np.append(answer.eqlin.marginals, 0.0)
    return np.asarray(answer.x), prices[: len(supply)], prices[len(supply) :]
