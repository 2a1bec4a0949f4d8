r"""Transport between large images: only where they differ, with bounds from both sides.

Mass that two images share can nearly always stay. So the sources are the pixels that lose mass, the sinks those that
gain some, and the problem between them is a quarter of the whole one where every pixel changes, and next to nothing
where few do. Neither must be taken for granted: a window forbids moves that a chain of two replaces, and float32 images
have islands of change that do not balance by themselves. So the answer is

- an *upper bound*: the matching of sources with sinks, and what is left over (rounding) carried from pixel to pixel,
  each of which hands on no more than it has. Together they are a plan, move by move;
- a *lower bound*: :math:`\\sum_i f_i (x_i - z_i)` for prices with :math:`f_i - f_j \\le C_{ij}` on every move that
  exists, namely the dual prices of the matching, lowered until they obey.

Where the two do not meet, nothing is returned, and the whole problem must be solved. Like
:mod:`wball.auditing.transport`, which uses it, this file shares no code with the solvers or their kernels.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from wball.auditing.flows import (
    AGREE,
    Array,
    Index,
    ListedMoves,
    Matching,
    by_network_simplex,
    network,
)
from wball.auditing.violations import DISTANCE_TOL

ROUNDING = 1e-6
"""By how much, as a fraction of their mass, the pixels that changed may be scaled to have the mass they had."""
UNMATCHED = 4.0
"""Price of mass that is not matched, in dearest moves: more than what an optimal plan pays for any."""
LEFT_OUT = 1e-12
"""Of the mass: what the tree need not reach, although a plan could."""
BARELY, LEAST, TRIED = 1e-3, 1e-7, (1.0, 5.0, 25.0)
"""A flow below a fraction of the mean one, or of the largest pixel, may be rounding, and does not say how the prices of
its two ends compare. Multiples of that limit are tried in turn."""
LEFTOVERS, LEFTOVER = 2000, 1e-6
"""Pixels with mass left over that are matched with each other at the least cost: no more than these, the largest, and
none with less than this share of the whole."""
PASSES, STILL = 100, 1e-9
"""How often the prices of islands are compared at most, and by how much they may be off (in moves) in the end."""
MEET, FAR = 0.9 * DISTANCE_TOL, 0.1
"""Of the distance: bounds must meet so closely, and this far apart they never do: chains of moves matter then. What is
reported is the upper one. So no point of the ball is rejected, and no other is accepted that would not be anyway."""


def match_differences(moves: ListedMoves, a: Array, b: Array) -> Matching | None:
    """Match ``a`` with ``b`` at a cost that was checked to be the least; ``None`` if it was not."""
    if not moves.symmetric:
        return None
    changed = a != b
    before, after = float(a[changed].sum()), float(b[changed].sum())
    if before == 0 or not abs(before - after) <= ROUNDING * before:
        return None
    lost = np.where(changed, a - b * (before / after), 0.0)
    if not lost.any():  # a pixel that was rounded, and no other
        return Matching(0.0, 0.0, np.zeros(0, np.int64), np.zeros(0))
    source_mass, sink_mass = np.maximum(lost, 0.0), np.maximum(-lost, 0.0)
    net, arcs = network(moves, source_mass, sink_mass)
    answer = by_network_simplex(net, net.prices(moves.price[arcs], UNMATCHED * moves.dearest))
    if answer is None:
        return None
    flow, u, v = answer
    flow = float(source_mass.sum()) * np.maximum(flow[: len(arcs)], 0.0)
    source, target = moves.source[arcs], moves.target[arcs]
    sent: Array = np.bincount(source, flow, len(a)).astype(np.float64)
    left: Array = lost - sent + np.bincount(target, flow, len(a))
    matched = float(flow @ moves.price[arcs])
    carried, handed_on, missing = _carry(moves, np.minimum(a, b), left, MEET * matched / 10)
    overdrawn = float(np.maximum(sent + handed_on - a, 0.0).sum())
    if overdrawn + missing - _unplaceable(moves, a, b, lost) > LEFT_OUT * before:
        return None
    upper = matched + carried
    near = max(AGREE * float(a.sum()) * moves.dearest, MEET * upper)
    prices = np.zeros(len(a))
    prices[lost > 0], prices[lost < 0] = u[:-1], -v[:-1]
    limit = max(BARELY * float(flow.sum()) / max(1, len(flow)), LEAST * float(a.max()))
    for share in TRIED:
        firm = flow > share * limit
        island = _islands(len(a), source[firm], target[firm])
        gap = upper - _lower_bound(moves, a, b, lost, prices, island, missing)
        if gap <= near:
            return Matching(upper, missing, arcs, flow)
        if gap > FAR * upper:
            break
    return None


def _carry(
    moves: ListedMoves, spare: Array, left: Array, enough: float
) -> tuple[float, Array, float]:
    """Balance ``left`` (above 0: too much) by moves between pixels that have mass to spare; it may cost ``enough``.

    Returns what all that costs, what each pixel sends for it, and half of what is not balanced.
    """
    winding, sent, missing = _carry_along_a_tree(moves, spare, left)
    if winding <= enough:
        return winding, sent, missing
    straight, sent, left = _carry_straight(moves, spare, left)
    winding, sent_too, missing = _carry_along_a_tree(moves, np.maximum(spare - sent, 0.0), left)
    return straight + winding, sent + sent_too, missing


def _carry_straight(moves: ListedMoves, spare: Array, left: Array) -> tuple[float, Array, Array]:
    """Leftovers matched with each other at the least cost, and carried along a row and a column.

    Where a pixel on both of the two ways has next to nothing, they stay. Returns what the others cost, what each pixel
    sends for them, and what stays.
    """
    import ot  # slow to import; the caller has used it

    used = np.argsort(-np.abs(left))[:LEFTOVERS]
    used = used[np.abs(left[used]) > LEFTOVER * float(np.abs(left).sum())]
    more, less = used[left[used] > 0], used[left[used] < 0]
    if not math.isfinite(moves.straight) or min(len(more), len(less)) == 0:
        return 0.0, np.zeros_like(left), left
    (height, width), supply, demand = moves.grid, left[more], -left[less]
    total = min(float(supply.sum()), float(demand.sum()))
    (top, begin), (bottom, end) = np.divmod(more, width), np.divmod(less, width)
    steps = np.abs(top[:, None] - bottom) + np.abs(begin[:, None] - end).astype(np.float64)
    plan, _ = ot.emd(
        supply / supply.sum(), demand / demand.sum(), steps, 10**7, log=True, check_marginals=False
    )
    i, j = np.nonzero(plan > 0)
    mass, sent = total * plan[i, j], np.zeros((height, width))
    poor, go = (spare < 2 * total).reshape(height, width), np.ones(len(i), dtype=bool)
    for turn in (1, 0):  # at the corner (top, end), or (bottom, begin)
        row, column = (top[i], end[j]) if turn else (bottom[j], begin[i])
        ways = ((1, row, begin[i], end[j]), (0, column, top[i], bottom[j]))
        free = go & ~np.logical_or(
            *(_on_the_way(np.cumsum(poor, axis), axis, *way) > 0 for axis, *way in ways)
        )
        for axis, line, one, other in ways:
            _send(sent, axis, line[free], one[free], other[free], mass[free])
        go &= ~free
    mass = np.where(go, 0.0, mass)
    left = left - np.bincount(more[i], mass, len(left)) + np.bincount(less[j], mass, len(left))
    return moves.straight * float(mass @ steps[i, j]), sent.ravel(), left


def _on_the_way(sums: Array, axis: int, line: Index, one: Index, other: Index) -> Array:
    """What lies on a row or column from one pixel to another, both included, by sums along it."""
    sums = np.pad(sums if axis else sums.T, ((0, 0), (1, 0)))
    found: Array = sums[line, np.maximum(one, other) + 1] - sums[line, np.minimum(one, other)]
    return found


def _send(sent: Array, axis: int, line: Index, one: Index, other: Index, mass: Array) -> None:
    """Add what pixels of a row or column send on the way from one to another, which itself sends nothing."""
    grid = sent if axis else sent.T
    change = np.zeros((grid.shape[0], grid.shape[1] + 1))
    np.add.at(change, (line, np.where(one <= other, one, other + 1)), mass)
    np.add.at(change, (line, np.where(one <= other, other, one + 1)), -mass)
    grid += np.maximum(change.cumsum(1)[:, :-1], 0.0)


def _carry_along_a_tree(
    moves: ListedMoves, spare: Array, left: Array
) -> tuple[float, Array, float]:
    """Balance ``left`` along a tree of cheap moves between pixels that have mass to spare.

    A pixel that has none is a leaf, by its cheapest move: it hands on nothing. Returns what all that costs, what each
    pixel sends for it, and half of what the tree does not reach.
    """
    n, rich = len(spare), spare > 0
    inner = rich[moves.source] & rich[moves.target] & (moves.source != moves.target)
    near = inner & (moves.price == moves.cheapest)
    if len(np.unique(_islands(n, moves.source[near], moves.target[near])[rich])) == 1:
        inner = near  # otherwise some are reached by longer moves alone
    outer = np.flatnonzero(rich[moves.source] & ~rich[moves.target])
    outer = outer[np.argsort(moves.price[outer], kind="stable")]
    outer = outer[np.unique(moves.target[outer], return_index=True)[1]]
    used = np.concatenate([np.flatnonzero(inner), outer])
    graph = sparse.csr_matrix(
        (moves.price[used], (moves.source[used], moves.target[used])), shape=(n, n)
    )
    graph = graph.maximum(graph.T)
    # One more node joins the trees of all parts, at a pixel that is no leaf where there is one, so that they are one.
    parts, label = csgraph.connected_components(graph, directed=False)
    root = np.full(parts, 2 * n)
    np.minimum.at(root, label, np.where(rich, np.arange(n), n + np.arange(n)))
    ends = sparse.csr_matrix(
        (np.ones(parts), (np.zeros(parts, dtype=np.int64), root % n)), shape=(1, n)
    )
    whole = sparse.bmat([[graph, None], [ends, sparse.csr_matrix((1, 1))]], format="csr")
    order, parent = csgraph.breadth_first_order(whole, n, directed=False)
    total, above = [*left.tolist(), 0.0], parent.tolist()
    for pixel in reversed(order[1:].tolist()):
        total[above[pixel]] += total[pixel]
    sums, joined = np.asarray(total[:-1]), np.flatnonzero(parent[:n] < n)
    price = np.asarray(graph[joined, parent[joined]]).ravel()
    up, down = np.maximum(sums[joined], 0.0), np.maximum(-sums[joined], 0.0)
    handed_on = np.zeros(n)
    handed_on[joined] += up
    np.add.at(handed_on, parent[joined], down)
    return float((up + down) @ price), handed_on, float(np.abs(sums[root % n]).sum()) / 2


def _unplaceable(moves: ListedMoves, a: Array, b: Array, lost: Array) -> float:
    """Half of what does not balance among pixels that moves join: no plan places it."""
    usable = (a[moves.source] > 0) & (b[moves.target] > 0)
    label = _islands(len(a), moves.source[usable], moves.target[usable])
    return float(np.abs(np.bincount(label, lost)).sum()) / 2


def _islands(n: int, source: Index, target: Index) -> Index:
    """A number for each pixel: those that moves join have the same."""
    graph = sparse.csr_matrix((np.ones(len(source)), (source, target)), shape=(n, n))
    label: Index = csgraph.connected_components(graph, directed=False)[1]
    return label


def _lower_bound(
    moves: ListedMoves,
    a: Array,
    b: Array,
    lost: Array,
    prices: Array,
    island: Index,
    missing: float,
) -> float:
    """What no plan is cheaper than, by prices of the pixels that changed.

    Within an island prices are known up to a constant. The islands are first lowered as wholes until they obey the
    moves between them, and then, pixel by pixel, until all moves are obeyed.
    """
    known = np.flatnonzero(lost != 0)
    usable = (a[moves.source] > 0) & (b[moves.target] > 0)
    source, target, price = moves.source[usable], moves.target[usable], moves.price[usable]
    low, high = np.full(len(a), np.inf), np.full(len(a), -np.inf)
    np.minimum.at(low, island[known], prices[known])
    np.maximum.at(high, island[known], prices[known])
    prices = prices.copy()
    prices[known] -= (low[island[known]] + high[island[known]]) / 2
    prices[lost == 0] = prices[known].max()
    between = island[source] != island[target]
    start, end, cost = source[between], target[between], price[between]
    for _ in range(PASSES):
        excess = np.zeros(len(a))
        np.maximum.at(excess, island[start], prices[start] - cost - prices[end])
        if float(excess.max()) <= STILL:
            break
        prices -= excess[island]
    while True:
        lowered = prices.copy()
        np.minimum.at(lowered, source, price + prices[target])
        if np.array_equal(lowered, prices):
            break
        prices = lowered
    spread = float(prices[known].max() - prices[known].min())
    return float(prices[known] @ lost[known]) - missing * spread
