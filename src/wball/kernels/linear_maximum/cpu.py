r"""The largest value of rows over a Wasserstein ball, on a CPU: one row at a time, compiled by numba.

The bound of :mod:`wball.input_sets.transport` without charges and box prices,

.. math:: \min_{\psi \ge 0} \; \psi E + \sum_i x_i \max_j \big( a_j - \psi C_{ij} \big)

Nothing larger than one row's options exists at a time, so that they stay in the cache. The search begins where nothing
moves and goes down: the budget is small against the mass, so the best ``psi`` lies near the top, and a source that
stays at some ``psi`` stays at every larger one and is not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, split
from wball.kernels.compiled import why_not as why_not
from wball.kernels.linear_maximum import LinearMaximum
from wball.moves import StencilMoves

if TYPE_CHECKING:
    from wball.input_sets.rows import Rows

_NOWHERE = -1e30
_FAST = {"contract", "nsz", "reassoc"}
_BLOCK = 512  # sources whose best option is held at once
_TOL = 1e-6  # of what moving gains: the search may stop
_DOWN = 0.55  # of the price, as long as the plan stays within the budget


def linear_maximum(
    a: Tensor, x: Tensor, budget: Tensor, moves: StencilMoves, *, point: bool = False, max_iter: int = 60
) -> LinearMaximum:
    """See :func:`wball.kernels.linear_maximum.linear_maximum`."""
    rows, image, limit = (
        t.detach().to(torch.float64).contiguous().numpy() for t in (a, x, budget.clamp(min=0.0).to(torch.float64))
    )
    shifts = np.array(moves.offsets, dtype=np.int64)
    ring = np.array([moves.distinct.index(cost) for cost in moves.costs], dtype=np.int64)
    price = np.array(moves.distinct)
    numbers, steps = np.empty((len(rows), 3)), np.empty(len(rows), dtype=np.int64)
    z = np.zeros(rows.shape if point else (len(rows), 0, 0, 0))

    def work(start: int, stop: int) -> None:
        _maxima(rows, image, limit, shifts, ring, price, max_iter, start, stop, numbers, steps, z)

    split(len(rows), work, x[:1].numel() * (len(moves) + 4 * len(price)))
    upper, psi, cost = torch.from_numpy(numbers).unbind(1)
    maximiser = torch.from_numpy(z).to(a.dtype) if point else None
    return LinearMaximum(psi.to(a.dtype), upper, cost, maximiser, torch.from_numpy(steps))


def largest(
    rows: Rows,
    x: Tensor,
    budget: Tensor,
    moves: Sequence[tuple[int, int, float]],
    tiers: Sequence[tuple[float, int]],
    elsewhere: Tensor | None,
    step: float,
    rounds: int,
) -> Tensor:
    """Upper bounds ``(N,)`` in float64 for rows over images ``x`` (B, C, H, W); all arguments are on a CPU.

    ``tiers`` and ``elsewhere`` (N, C, tiers) are those of :class:`~wball.input_sets.transport.TransportSet`,
    ``step`` its cheapest move that costs anything, ``budget`` (N,) each row's.
    """
    away = [m for m in moves if m[:2] != (0, 0)]
    costs = sorted({d for *_, d in away})
    shifts = np.array([m[:2] for m in away], dtype=np.int64).reshape(-1, 2)
    ring = np.array([costs.index(d) for *_, d in away], dtype=np.int64)
    prices = np.array([*costs, *(least for least, _ in tiers)], dtype=np.float64)
    wide = np.array([w for _, w in tiers], dtype=np.int64)
    count, channels = rows.coeff.shape[:2]
    if rows.corner is None:
        corner = torch.zeros((2, count), dtype=torch.long)
    else:
        corner = torch.stack(rows.corner)
    beyond = np.zeros((count, channels, 0)) if elsewhere is None else elsewhere.to(torch.float64).numpy()
    given = (
        rows.coeff.detach().to(torch.float64).contiguous().numpy(),
        rows.image.contiguous().numpy(),
        corner.contiguous().numpy(),
        rows.corner is not None,
        x.detach().to(torch.float64).contiguous().numpy(),
        budget.to(torch.float64).contiguous().numpy(),
    )
    out = np.empty(count)
    reach = int(np.abs(shifts).max()) if len(away) else 0

    def work(start: int, stop: int) -> None:
        _rows(*given, shifts, ring, len(costs), prices, wide, beyond, reach, float(step), rounds, start, stop, out)

    height, width = rows.coeff.shape[2] + 2 * reach, rows.coeff.shape[3] + 2 * reach
    split(count, work, channels * height * width * (len(away) + 2 * len(prices)))
    return torch.from_numpy(out)


class _Found(NamedTuple):
    """The least bound that was found, at which price, and the prices on both sides with what their moves cost."""

    value: float
    psi: float
    cost: float
    low: float
    cost_low: float
    high: float
    cost_high: float
    steps: int


@compiled(inner=True, fastmath=_FAST)
def _widened(maps, spare, height, width, reach):  # type: ignore[no-untyped-def]
    """The largest value within ``reach`` rows and columns, in place."""
    for r in range(height):
        for c in range(width):
            spare[r * width + c] = maps[r * width + c]
        for k in range(1, min(reach, width - 1) + 1):
            for c in range(width - k):
                spare[r * width + c] = max(spare[r * width + c], maps[r * width + c + k])
            for c in range(width - k):
                spare[r * width + c + k] = max(spare[r * width + c + k], maps[r * width + c])
    for r in range(height):
        for c in range(width):
            maps[r * width + c] = spare[r * width + c]
        for k in range(max(0, r - reach), min(height, r + reach + 1)):
            for c in range(width):
                maps[r * width + c] = max(maps[r * width + c], spare[k * width + c])


@compiled(inner=True, fastmath=_FAST)
def _evaluate(worth, stay, mass, count, price, psi, best, paid):  # type: ignore[no-untyped-def]
    """``sum_i x_i max_j (a_j - psi C_ij)`` over the sources left, and what the plan costs."""
    value, cost = 0.0, 0.0
    for start in range(0, count, _BLOCK):
        n = min(_BLOCK, count - start)
        for s in range(n):
            best[s] = stay[start + s]
            paid[s] = 0.0
        for k in range(price.shape[0]):
            drop, fee = psi * price[k], price[k]
            for s in range(n):
                gain = worth[k, start + s] - drop
                better = gain > best[s]
                best[s] = gain if better else best[s]
                paid[s] = fee if better else paid[s]
        for s in range(n):
            value += best[s] * mass[start + s]
            cost += paid[s] * mass[start + s]
    return value, cost


@compiled(inner=True, fastmath=_FAST)
def _leave(worth, stay, mass, count, price, psi):  # type: ignore[no-untyped-def]
    """Drop the sources that stay at ``psi``; how many are left, and what the others are worth."""
    kept, rest = 0, 0.0
    for s in range(count):
        moves = False
        for k in range(price.shape[0]):
            moves = moves or worth[k, s] - psi * price[k] > stay[s]
        if moves:
            stay[kept], mass[kept] = stay[s], mass[s]
            for k in range(price.shape[0]):
                worth[k, kept] = worth[k, s]
            kept += 1
        else:
            rest += stay[s] * mass[s]
    return kept, rest


@compiled(inner=True, fastmath=_FAST)
def _beyond(far, elsewhere, price, psi):  # type: ignore[no-untyped-def]
    """What mass outside the patch is worth and pays."""
    value, cost = 0.0, 0.0
    first = price.shape[0] - elsewhere.shape[1]
    for c in range(elsewhere.shape[0]):
        for t in range(elsewhere.shape[1]):
            gain = far[c] - psi * price[first + t]
            if gain > 0.0:
                value += gain * elsewhere[c, t]
                cost += price[first + t] * elsewhere[c, t]
    return value, cost


@compiled(inner=True, fastmath=_FAST)
def _search(worth, stay, mass, count, price, far, elsewhere, budget, step, rounds, tol, best_of, paid):  # type: ignore[no-untyped-def]
    """The smallest ``psi E + sum_i x_i max_j (a_j - psi C_ij)`` that is found, and the bracket it is in."""
    high, base = 0.0, 0.0
    for k in range(price.shape[0]):  # a free move is as good as staying, at any price
        if price[k] == 0.0:
            for s in range(count):
                stay[s] = max(stay[s], worth[k, s])
    for k in range(price.shape[0]):
        if price[k] > 0.0:
            for s in range(count):
                high = max(high, (worth[k, s] - stay[s]) / price[k])
    if elsewhere.shape[1]:
        for c in range(far.shape[0]):
            high = max(high, far[c] / step)
    for s in range(count):
        base += stay[s] * mass[s]
    if high <= 0.0:
        return _Found(base, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    still = base  # what staying is worth
    high *= 1.0 + 1e-6
    best, value_high, cost_high = base + budget * high, base + budget * high, 0.0
    psi_best, cost_best, steps = high, 0.0, 0
    base = 0.0
    low, value_low, cost_low, bracketed = 0.0, 0.0, 0.0, False
    for k in range(rounds):
        if bracketed:
            slope_low, slope_high = budget - cost_low, budget - cost_high
            drop = slope_high - slope_low
            meet = (value_low - value_high + slope_high * high - slope_low * low) / drop if drop > 0.0 else high
            meet = min(max(meet, low), high)
            if best - (value_low + slope_low * (meet - low)) <= tol * (best - still):
                break
            psi = 0.5 * (low + high) if k % 3 == 2 else meet
        else:
            psi = 0.0 if k == rounds - 1 else _DOWN * high
        value, cost = _evaluate(worth, stay, mass, count, price, psi, best_of, paid)
        if elsewhere.shape[1]:
            more, fees = _beyond(far, elsewhere, price, psi)
            value, cost = value + more, cost + fees
        value += base + budget * psi
        steps += 1
        if value < best:
            best, psi_best, cost_best = value, psi, cost
        if cost > budget:
            low, value_low, cost_low, bracketed = psi, value, cost, True
            count, rest = _leave(worth, stay, mass, count, price, psi)
            base += rest
        else:
            high, value_high, cost_high = psi, value, cost
            if psi == 0.0:
                break
    if not bracketed:
        low, cost_low = high, cost_high
    return _Found(best, psi_best, cost_best, low, cost_low, high, cost_high, steps)


@compiled(fastmath=_FAST)
def _rows(  # type: ignore[no-untyped-def]
    coeff, image, corner, patched, x, budget, shifts, ring, rings, price, wide, elsewhere, reach, step, rounds, start,
    stop, out,
):  # fmt: skip
    channels, height, width = coeff.shape[1:]
    full_height, full_width = x.shape[2:]
    around = reach if patched else 0
    rows, columns = height + 2 * around, width + 2 * around  # where sources are looked for
    wide_rows, wide_columns = rows + 2 * reach, columns + 2 * reach  # where they can go
    target = np.empty(wide_rows * wide_columns)
    ends, spare = np.empty(rows * columns), np.empty(rows * columns)
    most = channels * rows * columns
    worth, stay, mass = np.empty((price.shape[0], most)), np.empty(most), np.empty(most)
    best, paid = np.empty(_BLOCK), np.empty(_BLOCK)
    place, far = np.empty(rows * columns, np.int64), np.empty(channels)
    for n in range(start, stop):
        picture = x[image[n]]
        top, left = corner[0, n] - around, corner[1, n] - around
        count = 0
        for c in range(channels):
            for r in range(wide_rows):
                there = top - reach + r
                for k in range(wide_columns):
                    column = left - reach + k
                    inside = there >= 0 and there < full_height and column >= 0 and column < full_width
                    target[r * wide_columns + k] = 0.0 if inside else _NOWHERE
            for r in range(height):
                there = corner[0, n] + r
                if there >= 0 and there < full_height:
                    begin = (around + reach + r) * wide_columns + around + reach
                    for k in range(max(0, -corner[1, n]), min(width, full_width - corner[1, n])):
                        target[begin + k] = coeff[n, c, r, k]
            first = count
            for r in range(rows):
                there = top + r
                if there < 0 or there >= full_height:
                    continue
                for k in range(max(0, -left), min(columns, full_width - left)):
                    if picture[c, there, left + k] > 0.0:
                        mass[count] = picture[c, there, left + k]
                        place[count - first] = r * columns + k
                        stay[count] = target[(r + reach) * wide_columns + k + reach]
                        count += 1
            for d in range(rings):
                for s in range(first, count):
                    worth[d, s] = _NOWHERE
            # Runs of neighbouring sources: the inner loop is over contiguous numbers.
            s = first
            while s < count:
                end = s + 1
                at = place[s - first]
                while end < count and place[end - first] == at + end - s and place[end - first] % columns:
                    end += 1
                centre = (at // columns + reach) * wide_columns + at % columns + reach
                for m in range(ring.shape[0]):
                    d, goes = ring[m], centre + shifts[m, 0] * wide_columns + shifts[m, 1]
                    for k in range(end - s):
                        worth[d, s + k] = max(worth[d, s + k], target[goes + k])
                s = end
            if wide.shape[0]:
                top_value = _NOWHERE
                for r in range(rows):
                    for k in range(columns):
                        ends[r * columns + k] = target[(r + reach) * wide_columns + k + reach]
                        top_value = max(top_value, ends[r * columns + k])
                far[c] = max(0.0, top_value)
                within = 0
                for t in range(wide.shape[0]):
                    if wide[t] < max(rows, columns) - 1:
                        _widened(ends, spare, rows, columns, wide[t] - within)
                        within = wide[t]
                        for s in range(first, count):
                            worth[rings + t, s] = ends[place[s - first]]
                    else:
                        for s in range(first, count):
                            worth[rings + t, s] = top_value
                    if patched:
                        for s in range(first, count):
                            worth[rings + t, s] = max(0.0, worth[rings + t, s])
        found = _search(worth, stay, mass, count, price, far, elsewhere[n], budget[n], step, rounds, _TOL, best, paid)
        out[n] = found.value


@compiled(inner=True)
def _best_move(a, c, r, k, shifts, ring, price, psi):  # type: ignore[no-untyped-def]
    """The cheapest of the best moves out of a pixel."""
    best, choice = a[c, r, k], 0
    for m in range(1, shifts.shape[0]):
        down, across = r + shifts[m, 0], k + shifts[m, 1]
        if 0 <= down < a.shape[1] and 0 <= across < a.shape[2]:
            score = a[c, down, across] - psi * price[ring[m]]
            if score > best:
                best, choice = score, m
    return choice


@compiled()
def _maxima(a, x, budget, shifts, ring, price, rounds, start, stop, numbers, steps, z):  # type: ignore[no-untyped-def]
    """Whole images: bounds, and where asked for the points that reach them."""
    channels, height, width = a.shape[1:]
    most = channels * height * width
    worth, stay, mass = np.empty((price.shape[0], most)), np.empty(most), np.empty(most)
    best, paid = np.empty(_BLOCK), np.empty(_BLOCK)
    far, elsewhere = np.empty(channels), np.empty((channels, 0))
    for n in range(start, stop):
        count = 0
        for c in range(channels):
            for r in range(height):
                for k in range(width):
                    if x[n, c, r, k] <= 0.0:
                        continue
                    mass[count], stay[count] = x[n, c, r, k], a[n, c, r, k]
                    for d in range(price.shape[0]):
                        worth[d, count] = _NOWHERE
                    for m in range(shifts.shape[0]):
                        down, across = r + shifts[m, 0], k + shifts[m, 1]
                        if 0 <= down < height and 0 <= across < width:
                            worth[ring[m], count] = max(worth[ring[m], count], a[n, c, down, across])
                    count += 1
        found = _search(worth, stay, mass, count, price, far, elsewhere, budget[n], 1.0, rounds, 1e-12, best, paid)
        numbers[n, 0], numbers[n, 1], numbers[n, 2] = found.value, found.psi, found.cost
        steps[n] = found.steps
        if z.shape[1] == 0:
            continue
        apart = found.cost_low - found.cost_high
        blend = min(max((budget[n] - found.cost_high) / apart, 0.0), 1.0) if apart > 0.0 else 0.0
        for c in range(channels):
            for r in range(height):
                for k in range(width):
                    if x[n, c, r, k] > 0.0:
                        m = _best_move(a[n], c, r, k, shifts, ring, price, found.high)
                        z[n, c, r + shifts[m, 0], k + shifts[m, 1]] += (1.0 - blend) * x[n, c, r, k]
                        m = _best_move(a[n], c, r, k, shifts, ring, price, found.low)
                        z[n, c, r + shifts[m, 0], k + shifts[m, 1]] += blend * x[n, c, r, k]
