"""Minimum-cost flows between two histograms over the moves that a ground cost allows.

They are computed by a network simplex (POT), whose answers are checked here. The audit and
:mod:`wball.solvers.distance` both use this solver.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wball.cost import DenseCost, GroundCost

Array = NDArray[np.float64]
Index = NDArray[np.int64]

AGREE = 1e-8
"""Largest gap between upper and lower bound, as a fraction of mass x largest cost."""

LOST = 1e-12
"""Mass that may stay unmatched although another flow would match it, as a fraction of the mass."""


class ListedMoves(NamedTuple):
    """Moves ``source -> target`` between pixels, with the cost of each."""

    source: Index
    target: Index
    price: Array

    @property
    def dearest(self) -> float:
        return float(self.price.max())

    @property
    def cheapest(self) -> float:
        """The smallest cost above 0; 0 if all moves are free."""
        paid = self.price[self.price > 0]
        return float(paid.min()) if len(paid) else 0.0


def list_moves(cost: GroundCost, channels: int, height: int, width: int) -> ListedMoves:
    """Every move that a cost allows on a grid: of a channel, or of the whole image if moves change
    the channel."""
    if isinstance(cost, DenseCost):
        cost.check_size(height, width)
        matrix = cost.matrix.cpu().numpy()
        source, target = np.nonzero(np.isfinite(matrix))
        return ListedMoves(source, target, matrix[source, target])
    steps = cost.moves(height, width, channels)
    sides = (1 if cost.channel_cost is None else channels, height, width)
    places = np.indices(sides).reshape(3, -1)
    sources, targets = [], []
    for down, right, over, _ in steps:
        ends = zip(places, (over, down, right), sides, strict=True)
        inside = np.all([(at + by >= 0) & (at + by < side) for at, by, side in ends], axis=0)
        sources.append(np.flatnonzero(inside))
        targets.append(sources[-1] + (over * height + down) * width + right)
    price = np.repeat([value for *_, value in steps], [len(part) for part in sources])
    return ListedMoves(np.concatenate(sources), np.concatenate(targets), price)


class Matching(NamedTuple):
    """A flow that turns one histogram into another.

    Attributes:
        cost: of the whole flow.
        missing: mass that is not matched.
        more: upper bound of how much of that another flow could match.
        arcs: the moves between entries with mass, as positions in the list of moves.
        flow: mass on each of these arcs.
        rows: the entries of the first histogram with mass.
        row_prices: their dual prices.
        column_prices: those of the second. ``row + column <= cost`` on every arc, up to rounding.
    """

    cost: float
    missing: float
    more: float
    arcs: Index
    flow: Array
    rows: Index
    row_prices: Array
    column_prices: Array


class _Network(NamedTuple):
    """Arcs with their prices, and the mass that leaves and enters each node.

    The last node on either side takes mass that is not matched.
    """

    tail: Index
    head: Index
    price: Array
    supply: Array
    demand: Array


def match(moves: ListedMoves, a: Array, b: Array) -> Matching:
    """Match ``a`` with ``b``, of equal mass, at the least cost; inf if the solver fails.

    As a linear program: ``min <P, C> + M (sum r + sum s)`` with ``P 1 + r = a``, ``P^T 1 + s = b``,
    all >= 0. Each unit of unmatched mass appears once in ``r`` and once in ``s``. To match it costs
    at most the largest cost per pixel on the way, so ``M = 1 + pixels * largest cost`` matches as
    much mass as the moves permit. As a flow, ``r`` goes to an extra node and ``s`` comes from one.
    """
    most, found = min(int((a > 0).sum()), int((b > 0).sum())), no_flow(math.inf)
    # A large M costs digits. A smaller M gives the same answer if no other flow matches more.
    for length in sorted({min(most, 64), most}):
        better = match_at(moves, a, b, 1.0 + moves.dearest * length)
        if better is None:
            return found._replace(cost=found.cost + found.more * moves.dearest * most)
        found = better
        if found.more <= LOST * a.sum():
            break
    return found


def no_flow(cost: float) -> Matching:
    """A matching without moves and with the given cost: 0, or inf if the solver fails."""
    empty = np.zeros(0)
    none = np.zeros(0, np.int64)
    return Matching(cost, 0.0, 0.0, none, empty, none, empty, empty)


def match_at(moves: ListedMoves, a: Array, b: Array, unmatched: float) -> Matching | None:
    """Match ``a`` with ``b`` at price ``unmatched`` for unmatched mass.

    An answer is accepted if it adds up and a lower bound from its dual prices meets its cost.
    Returns ``None`` if the solver fails.
    """
    rows, columns, mass = np.flatnonzero(a), np.flatnonzero(b), float(a.sum())
    n, m = len(rows), len(columns)
    arcs = np.flatnonzero((a[moves.source] > 0) & (b[moves.target] > 0))
    tail = np.searchsorted(rows, moves.source[arcs])
    head = np.searchsorted(columns, moves.target[arcs])
    net = _Network(
        np.concatenate([tail, np.arange(n), np.full(m + 1, n)]),
        np.concatenate([head, np.full(n, m), np.arange(m + 1)]),
        np.concatenate([moves.price[arcs], np.full(n + m, unmatched), [0.0]]),
        np.append(a[rows] / mass, 1.0),
        np.append(b[columns] / mass, 1.0),
    )
    flow, u, v = _by_network_simplex(net)
    if not _optimal(net, flow, u, v, AGREE * max(moves.dearest, 1.0)):
        return None
    flow *= mass
    matched, missing = flow[: len(arcs)], float(flow[len(arcs) : -1].sum()) / 2
    more = 0.0 if missing <= LOST * mass else _cut(net, flow, len(arcs), LOST * mass / len(flow))
    cost = float(matched @ moves.price[arcs])
    return Matching(cost, missing, more, arcs, matched, rows, u[:-1], v[:-1])


def _cut(net: _Network, flow: Array, count: int, negligible: float) -> float:
    """How much more mass the first ``count`` arcs could match: at most the capacity of a cut.

    The cut separates what unmatched mass of the first histogram reaches: forward by these arcs, and
    backward against flow that is not negligible.
    """
    from scipy import sparse
    from scipy.sparse import csgraph

    extra, head = len(net.supply) - 1, net.head + len(net.supply)
    back = (flow > negligible) & (net.tail < extra)
    start = np.append(net.tail[:count], head[back])
    end = np.append(head[:count], net.tail[back])
    nodes = np.arange(head[-1] + 1)
    graph = sparse.csr_matrix((np.ones(len(start)), (start, end)), shape=(len(nodes),) * 2)
    reached = np.isin(nodes, csgraph.breadth_first_order(graph, head[-1])[0])
    return float(flow[:-1][(~reached[net.tail] & reached[head])[:-1]].sum())


def _optimal(net: _Network, flow: Array, u: Array, v: Array, gap: float) -> bool:
    """Whether a flow adds up and its cost is within ``gap`` of a lower bound."""
    wrong = float(np.abs(np.bincount(net.tail, flow, len(u)) - net.supply).sum())
    wrong += float(np.abs(np.bincount(net.head, flow, len(v)) - net.demand).sum())
    # Lower the row prices until they satisfy every arc: then they give a lower bound in any case.
    slack = np.full(len(u), math.inf)
    np.minimum.at(slack, net.tail, net.price - u[net.tail] - v[net.head])
    lower = float((u + np.minimum(slack, 0.0)) @ net.supply + v @ net.demand)
    return wrong <= AGREE and float(flow @ net.price) - lower <= gap


def _by_network_simplex(net: _Network) -> tuple[Array, Array, Array]:
    """Flow on each arc and the dual prices, by POT."""
    import ot  # here and above: slow to import
    from scipy import sparse

    shape = (len(net.supply), len(net.demand))
    plan, log = ot.emd(
        net.supply,
        net.demand,
        sparse.coo_matrix((net.price, (net.tail, net.head)), shape=shape),
        numItermax=10**7,
        log=True,
        center_dual=False,
        check_marginals=False,
    )
    plan = plan.tocoo()
    key = net.tail * shape[1] + net.head
    order = np.argsort(key)
    used = np.searchsorted(key, plan.row.astype(np.int64) * shape[1] + plan.col, sorter=order)
    flow = np.zeros(len(net.price))
    flow[order[used]] = np.maximum(plan.data, 0.0)
    return flow, np.asarray(log["u"]), np.asarray(log["v"])
