r"""Transport between large images: only where they differ, with bounds from both sides.

Mass that two images share can nearly always stay. So the sources are the pixels that lose mass and
the sinks those that gain some. The problem between them has a quarter of the moves if every pixel
changes, and few if few do. Its answer is not the whole problem's in every case: a window forbids
moves that a chain of two replaces, and float32 images have islands of change that do not balance by
themselves. So the answer is

- an *upper bound*: the matching of sources with sinks, and leftovers (rounding) carried from pixel
  to pixel, none of which sends more than it has. Together they are a plan;
- a *lower bound*: :math:`\\sum_i f_i (x_i - z_i)` for prices with :math:`f_i - f_j \\le C_{ij}` on
  every move, namely the dual prices of the matching, lowered until they satisfy these.

If the two do not meet, ``None`` is returned, and the whole problem must be solved.
"""

from __future__ import annotations

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
    match_at,
    no_flow,
)
from wball.auditing.violations import DISTANCE_TOL

ROUNDING = 1e-6
"""Largest relative difference in mass between the changed pixels of the two images."""
UNMATCHED = 4.0
"""Price of unmatched mass, in multiples of the largest cost: more than an optimal plan pays."""
LEFT_OUT = 1e-12
"""Fraction of the mass that need not be placed although a plan could."""
BARELY, LEAST = 1e-3, 1e-7
"""A flow below a fraction of the mean flow, or of the largest pixel, may be rounding, and does not
tie the prices of its two ends."""
PASSES, STILL = 100, 1e-9
"""Largest number of passes over the prices of islands, and the tolerance at which they end."""
MEET = 0.9 * DISTANCE_TOL
"""The bounds must meet within ``MEET`` of the distance. The upper bound is reported, so no point
outside the ball is accepted."""


def match_differences(moves: ListedMoves, a: Array, b: Array) -> Matching | None:
    """Match ``a`` with ``b`` at a cost that is proved to be the least; ``None`` without a proof."""
    if not moves.symmetric:
        return None
    changed = a != b
    before, after = float(a[changed].sum()), float(b[changed].sum())
    if before == 0 or not abs(before - after) <= ROUNDING * before:
        return None
    lost = np.where(changed, a - b * (before / after), 0.0)
    if not lost.any():  # a single pixel was rounded
        return no_flow(0.0)
    price = UNMATCHED * moves.dearest
    found = match_at(
        moves, np.maximum(lost, 0.0), np.maximum(-lost, 0.0), price, [by_network_simplex]
    )
    if found is None:
        return None
    source, target = moves.source[found.arcs], moves.target[found.arcs]
    sent: Array = np.bincount(source, found.flow, len(a)).astype(np.float64)
    left: Array = lost - sent + np.bincount(target, found.flow, len(a))
    carried, handed_on, missing = _carry_leftovers(moves, np.minimum(a, b), left)
    overdrawn = float(np.maximum(sent + handed_on - a, 0.0).sum())
    usable = (a[moves.source] > 0) & (b[moves.target] > 0)
    between = ListedMoves(moves.source[usable], moves.target[usable], moves.price[usable])
    parts = _islands(len(a), between.source, between.target)
    unplaceable = float(np.abs(np.bincount(parts, lost)).sum()) / 2
    if overdrawn + missing - unplaceable > LEFT_OUT * before:
        return None
    upper = found.cost + carried
    near = max(AGREE * float(a.sum()) * moves.dearest, MEET * upper)
    prices = np.zeros(len(a))
    prices[lost > 0], prices[lost < 0] = found.row_prices, -found.column_prices
    limit = max(BARELY * float(found.flow.sum()) / max(1, len(found.flow)), LEAST * float(a.max()))
    firm = found.flow > limit
    island = _islands(len(a), source[firm], target[firm])
    gap = upper - _lower_bound(between, lost, prices, island, missing)
    return found._replace(cost=upper, missing=missing) if gap <= near else None


def _carry_leftovers(moves: ListedMoves, spare: Array, left: Array) -> tuple[float, Array, float]:
    """Balance ``left`` along a tree of cheap moves between pixels with mass to spare.

    A pixel without any is a leaf, by its cheapest move, and hands on nothing. Returns the cost, the
    mass that each pixel sends, and half of the mass that the tree does not reach.
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
    # One extra node joins the trees of all parts, at a pixel that is not a leaf if there is one.
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


def _islands(n: int, source: Index, target: Index) -> Index:
    """Component of each pixel in the graph of the moves."""
    graph = sparse.csr_matrix((np.ones(len(source)), (source, target)), shape=(n, n))
    label: Index = csgraph.connected_components(graph, directed=False)[1]
    return label


def _lower_bound(
    moves: ListedMoves, lost: Array, prices: Array, island: Index, missing: float
) -> float:
    """A lower bound on the cost of every plan, by prices of the pixels that changed.

    Within an island prices are known up to a constant. Islands are first lowered as wholes until
    they satisfy the moves between them, then pixel by pixel until every move is satisfied.
    """
    known, source, target, price = (
        np.flatnonzero(lost != 0),
        moves.source,
        moves.target,
        moves.price,
    )
    low, high = np.full(len(lost), np.inf), np.full(len(lost), -np.inf)
    np.minimum.at(low, island[known], prices[known])
    np.maximum.at(high, island[known], prices[known])
    prices = prices.copy()
    prices[known] -= (low[island[known]] + high[island[known]]) / 2
    prices[lost == 0] = prices[known].max()
    between = island[source] != island[target]
    start, end, cost = source[between], target[between], price[between]
    for _ in range(PASSES):
        excess = np.zeros(len(lost))
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
