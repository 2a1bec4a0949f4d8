r"""Transport between large images: only where they differ, with bounds from both sides.

Mass that two images share can nearly always stay. So the sources are the pixels that lose mass, the sinks those that
gain some, and the problem between them is a quarter of the whole one where every pixel changes, and next to nothing
where few do. Neither must be taken for granted: a window forbids moves that a chain of two replaces, and float32 images
have islands of change that do not balance by themselves. So the answer is

- an *upper bound*: the matching of sources with sinks, and what is left over (rounding) carried along a tree of
  neighbouring pixels, each of which hands on no more than it has. Together they are a plan, move by move;
- a *lower bound*: :math:`\\sum_i f_i (x_i - z_i)` for prices with :math:`f_i - f_j \\le C_{ij}` on every move that
  exists, namely the dual prices of the matching, lowered until they obey.

Where the two do not meet, nothing is returned, and the whole problem must be solved. Like
:mod:`wball.auditing.transport`, which uses it, this file shares no code with the solvers or their kernels.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from wball.auditing.flows import AGREE, Array, Index, ListedMoves, Matching, by_network_simplex, network
from wball.auditing.violations import DISTANCE_TOL

ROUNDING = 1e-6
"""By how much, as a fraction of their mass, the pixels that changed may be scaled to have the mass they had."""
UNMATCHED = 4.0
"""Price of mass that is not matched, in dearest moves: more than what an optimal plan pays for any."""
LEFT_OUT = 1e-12
"""Of the mass: what the tree need not reach, although a plan could."""
BARELY = (1e-6, 1e-5, 1e-7)
"""Of the largest pixel: a flow below may be rounding, and does not say how the prices of its two ends compare. Tried in
this order."""
PASSES, STILL = 100, 1e-9
"""How often the prices of islands are compared at most, and by how much they may be off (in moves) in the end."""
MEET, FAR = 0.9 * DISTANCE_TOL, 1e-2
"""Of the distance: bounds must meet so closely, and this far apart they never do: chains of moves matter then. What is
reported is the upper one. So no point of the ball is rejected, and no other is accepted that would not be anyway."""


def match_differences(moves: ListedMoves, a: Array, b: Array) -> Matching | None:
    """Match ``a`` with ``b`` at a cost that was checked to be the least; ``None`` if it was not."""
    if not moves.symmetric:
        return None
    changed = a != b
    before, after = float(a[changed].sum()), float(b[changed].sum())
    if not abs(before - after) <= ROUNDING * before:
        return None
    lost = np.where(changed, a - b * (before / after), 0.0)
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
    carried, handed_on, missing = _carry(moves, np.minimum(a, b), left)
    overdrawn = float(np.maximum(sent + handed_on - a, 0.0).sum())
    if overdrawn + missing - _unplaceable(moves, a, b, lost) > LEFT_OUT * before:
        return None
    upper = float(flow @ moves.price[arcs]) + carried
    near = max(AGREE * float(a.sum()) * moves.dearest, MEET * upper)
    prices = np.zeros(len(a))
    prices[lost > 0], prices[lost < 0] = u[:-1], -v[:-1]
    for share in BARELY:
        firm = flow > share * float(a.max())
        island = _islands(len(a), source[firm], target[firm])
        gap = upper - _lower_bound(moves, a, b, lost, prices, island, missing)
        if gap <= near:
            return Matching(upper, missing, arcs, flow)
        if gap > FAR * upper:
            break
    return None


def _carry(moves: ListedMoves, spare: Array, left: Array) -> tuple[float, Array, float]:
    """Balance ``left`` (above 0: too much) along a tree of cheap moves between pixels that have mass to spare.

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
    graph = sparse.csr_matrix((moves.price[used], (moves.source[used], moves.target[used])), shape=(n, n))
    graph = graph.maximum(graph.T)
    # One more node joins the trees of all parts, at a pixel that is no leaf where there is one, so that they are one.
    parts, label = csgraph.connected_components(graph, directed=False)
    root = np.full(parts, 2 * n)
    np.minimum.at(root, label, np.where(rich, np.arange(n), n + np.arange(n)))
    ends = sparse.csr_matrix((np.ones(parts), (np.zeros(parts, dtype=np.int64), root % n)), shape=(1, n))
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
    moves: ListedMoves, a: Array, b: Array, lost: Array, prices: Array, island: Index, missing: float
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
