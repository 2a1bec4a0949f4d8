r"""The largest value of rows over a Wasserstein ball, on a CPU: one row at a time, compiled by numba.

.. math:: \min_{\psi \ge 0} \; \psi E + \sum_i x_i \max_j \big( a_j - \psi C_{ij} \big)

Nothing larger than one row's options exists at a time, so that they stay in the cache. The search begins where nothing
moves and goes down: the budget is small against the mass, so the best ``psi`` lies near the top, and a source that
stays at some ``psi`` stays at every larger one and is not looked at again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, split
from wball.kernels.compiled import why_not as why_not
from wball.kernels.linear_maximum import LinearMaximum
from wball.kernels.price import crossing
from wball.moves import StencilMoves

NOWHERE = -1e30
FAST = {"contract", "nsz", "reassoc"}
BLOCK = 512  # sources whose best option is held at once
_DOWN = 0.55  # of the price, as long as the plan stays within the budget


def linear_maximum(
    a: Tensor,
    x: Tensor,
    budget: Tensor,
    moves: StencilMoves,
    *,
    point: bool = False,
    max_iter: int = 60,
) -> LinearMaximum:
    """See :func:`wball.kernels.linear_maximum.linear_maximum`."""
    rows, image, limit = (
        t.detach().to(torch.float64).contiguous().numpy()
        for t in (a, x, budget.clamp(min=0.0).to(torch.float64))
    )
    shifts = np.array(moves.offsets, dtype=np.int64)
    ring = np.array([moves.distinct.index(cost) for cost in moves.costs], dtype=np.int64)
    fee = np.array(moves.distinct)
    numbers, steps = np.empty((len(rows), 3)), np.empty(len(rows), dtype=np.int64)
    z = np.zeros(rows.shape if point else (len(rows), 0, 0, 0))

    def work(start: int, stop: int) -> None:
        _maxima(rows, image, limit, shifts, ring, fee, max_iter, start, stop, numbers, steps, z)

    split(len(rows), work, x[:1].numel() * (len(moves) + 4 * len(fee)))
    upper, psi, cost = torch.from_numpy(numbers).unbind(1)
    maximiser = torch.from_numpy(z).to(a.dtype) if point else None
    return LinearMaximum(psi.to(a.dtype), upper, cost, maximiser, torch.from_numpy(steps))


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


@compiled(inner=True, fastmath=FAST)
def _evaluate(worth, stay, mass, count, fee, psi, best, paid):  # type: ignore[no-untyped-def]
    """``sum_i x_i max_j (a_j - psi C_ij)`` over the sources left, and what the plan costs."""
    value, cost = 0.0, 0.0
    for start in range(0, count, BLOCK):
        n = min(BLOCK, count - start)
        for s in range(n):
            best[s] = stay[start + s]
            paid[s] = 0.0
        for k in range(fee.shape[0]):
            drop, own = psi * fee[k], fee[k]
            for s in range(n):
                gain = worth[k, start + s] - drop
                better = gain > best[s]
                best[s] = gain if better else best[s]
                paid[s] = own if better else paid[s]
        for s in range(n):
            value += best[s] * mass[start + s]
            cost += paid[s] * mass[start + s]
    return value, cost


@compiled(inner=True, fastmath=FAST)
def _leave(worth, stay, mass, count, fee, psi):  # type: ignore[no-untyped-def]
    """Drop the sources that stay at ``psi``; how many are left, and what the others are worth."""
    kept, rest = 0, 0.0
    for s in range(count):
        moves = False
        for k in range(fee.shape[0]):
            moves = moves or worth[k, s] - psi * fee[k] > stay[s]
        if moves:
            stay[kept], mass[kept] = stay[s], mass[s]
            for k in range(fee.shape[0]):
                worth[k, kept] = worth[k, s]
            kept += 1
        else:
            rest += stay[s] * mass[s]
    return kept, rest


@compiled(inner=True, fastmath=FAST)
def _beyond(far, elsewhere, fee, psi):  # type: ignore[no-untyped-def]
    """What mass outside the patch is worth and pays."""
    value, cost = 0.0, 0.0
    first = fee.shape[0] - elsewhere.shape[1]
    for c in range(elsewhere.shape[0]):
        for t in range(elsewhere.shape[1]):
            gain = far[c] - psi * fee[first + t]
            if gain > 0.0:
                value += gain * elsewhere[c, t]
                cost += fee[first + t] * elsewhere[c, t]
    return value, cost


@compiled(inner=True, fastmath=FAST)
def search(worth, stay, mass, count, fee, far, elsewhere, budget, step, rounds, tol, best_of, paid):  # type: ignore[no-untyped-def]
    """The smallest ``psi E + sum_i x_i max_j (a_j - psi C_ij)`` that is found, and the bracket it is in."""
    high, base = 0.0, 0.0
    for k in range(fee.shape[0]):  # a free move is as good as staying, at any price
        if fee[k] == 0.0:
            for s in range(count):
                stay[s] = max(stay[s], worth[k, s])
    for k in range(fee.shape[0]):
        if fee[k] > 0.0:
            for s in range(count):
                high = max(high, (worth[k, s] - stay[s]) / fee[k])
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
            meet = crossing(low, value_low, slope_low, high, value_high, slope_high)
            if best - (value_low + slope_low * (meet - low)) <= tol * (best - still):
                break
            psi = 0.5 * (low + high) if k % 3 == 2 else meet
        else:
            psi = 0.0 if k == rounds - 1 else _DOWN * high
        value, cost = _evaluate(worth, stay, mass, count, fee, psi, best_of, paid)
        if elsewhere.shape[1]:
            more, spent = _beyond(far, elsewhere, fee, psi)
            value, cost = value + more, cost + spent
        value += base + budget * psi
        steps += 1
        if value < best:
            best, psi_best, cost_best = value, psi, cost
        if cost > budget:
            low, value_low, cost_low, bracketed = psi, value, cost, True
            count, rest = _leave(worth, stay, mass, count, fee, psi)
            base += rest
        else:
            high, value_high, cost_high = psi, value, cost
            if psi == 0.0:
                break
    if not bracketed:
        low, cost_low = high, cost_high
    return _Found(best, psi_best, cost_best, low, cost_low, high, cost_high, steps)


@compiled(inner=True)
def _best_move(a, c, r, k, shifts, ring, fee, psi):  # type: ignore[no-untyped-def]
    """The cheapest of the best moves out of a pixel."""
    best, choice = a[c, r, k], 0
    for m in range(1, shifts.shape[0]):
        down, across = r + shifts[m, 0], k + shifts[m, 1]
        if 0 <= down < a.shape[1] and 0 <= across < a.shape[2]:
            score = a[c, down, across] - psi * fee[ring[m]]
            if score > best:
                best, choice = score, m
    return choice


@compiled()
def _maxima(a, x, budget, shifts, ring, fee, rounds, start, stop, numbers, steps, z):  # type: ignore[no-untyped-def]
    """Whole images: bounds, and where asked for the points that reach them."""
    channels, height, width = a.shape[1:]
    most = channels * height * width
    worth, stay, mass = np.empty((fee.shape[0], most)), np.empty(most), np.empty(most)
    best, paid = np.empty(BLOCK), np.empty(BLOCK)
    far, elsewhere = np.empty(channels), np.empty((channels, 0))
    for n in range(start, stop):
        count = 0
        for c in range(channels):
            for r in range(height):
                for k in range(width):
                    if x[n, c, r, k] <= 0.0:
                        continue
                    mass[count], stay[count] = x[n, c, r, k], a[n, c, r, k]
                    for d in range(fee.shape[0]):
                        worth[d, count] = NOWHERE
                    for m in range(shifts.shape[0]):
                        down, across = r + shifts[m, 0], k + shifts[m, 1]
                        if 0 <= down < height and 0 <= across < width:
                            worth[ring[m], count] = max(
                                worth[ring[m], count], a[n, c, down, across]
                            )
                    count += 1
        found = search(
            worth, stay, mass, count, fee, far, elsewhere, budget[n], 1.0, rounds, 1e-12, best, paid
        )
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
                        m = _best_move(a[n], c, r, k, shifts, ring, fee, found.high)
                        z[n, c, r + shifts[m, 0], k + shifts[m, 1]] += (1.0 - blend) * x[n, c, r, k]
                        m = _best_move(a[n], c, r, k, shifts, ring, fee, found.low)
                        z[n, c, r + shifts[m, 0], k + shifts[m, 1]] += blend * x[n, c, r, k]
