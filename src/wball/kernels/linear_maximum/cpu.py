r"""The largest value of rows over a Wasserstein ball, on a CPU: one row at a time, compiled by
numba.

.. math:: \min_{\psi \ge 0} \; \psi E + \sum_i x_i \max_j \big( a_j - \psi C_{ij} \big)

Nothing larger than one row's options exists at a time, so that they stay in the cache. The search
begins where nothing moves and goes down: the budget is small against the mass, so the best ``psi``
lies near the top, and a source that stays at some ``psi`` stays at every larger one and is not
looked at again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball.cost import StencilMoves
from wball.kernels.compiled import compiled
from wball.kernels.dispatch import split
from wball.kernels.linear_maximum import LinearMaximum

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
    given = _Given(
        *(t.detach().double().contiguous().numpy() for t in (a, x, budget.clamp(min=0.0)))
    )
    tables = _Moves(
        np.array(moves.offsets, dtype=np.int64),
        np.array([moves.distinct.index(cost) for cost in moves.costs], dtype=np.int64),
        np.array(moves.distinct),
    )
    rows = len(a)
    answer = _Answer(
        np.empty((rows, 3)),
        np.empty(rows, dtype=np.int64),
        np.zeros(a.shape if point else (rows, 0, 0, 0)),
    )

    def work(start: int, stop: int) -> None:
        _maxima(given, tables, max_iter, start, stop, answer)

    split(rows, work, x[:1].numel() * (len(moves) + 4 * len(tables.fee)))
    upper, psi, cost = torch.from_numpy(answer.numbers).unbind(1)
    z = torch.from_numpy(answer.z).to(a.dtype) if point else None
    return LinearMaximum(psi.to(a.dtype), upper, cost, z, torch.from_numpy(answer.steps))


class _Given(NamedTuple):
    """The rows, images and budgets."""

    a: Any
    x: Any
    budget: Any


class _Moves(NamedTuple):
    """The moves, the ring of each, and the cost of each ring."""

    shifts: Any
    ring: Any
    fee: Any


class _Answer(NamedTuple):
    """Bound, price and cost of each row, evaluations, and the maximisers."""

    numbers: Any
    steps: Any
    z: Any


class Options(NamedTuple):
    """The options of the sources of a row, and memory for a block of them."""

    worth: Any  # (K, S)
    stay: Any  # (S,): what staying is worth
    mass: Any  # (S,)
    fee: Any  # (K,): what each option costs
    best: Any  # (BLOCK,)
    paid: Any  # (BLOCK,)


class Beyond(NamedTuple):
    """Mass outside the patch of a row, which can arrive by the last options only."""

    far: Any  # (C,): the most that it can be worth
    mass: Any  # (C, T)


class Aim(NamedTuple):
    """The budget, the smallest cost of a move, and the stopping criterion of the search."""

    budget: float
    step: float
    rounds: int
    tol: float


class _Found(NamedTuple):
    """The smallest bound found, its price and cost, and the bracket of the price with the cost at
    both ends."""

    value: float
    psi: float
    cost: float
    low: float
    cost_low: float
    high: float
    cost_high: float
    steps: int


@compiled(inner=True, fastmath=FAST)
def _evaluate(options, count, psi):  # type: ignore[no-untyped-def]
    """``sum_i x_i max_j (a_j - psi C_ij)`` over the remaining sources, and the cost of the plan."""
    worth, stay, mass, fee, best, paid = options
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
def _leave(options, count, psi):  # type: ignore[no-untyped-def]
    """Drop the sources whose mass stays at price ``psi``. Returns the number left, and the value of
    the dropped ones."""
    worth, stay, mass, fee, _, _ = options
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
def _from_beyond(beyond, fee, psi):  # type: ignore[no-untyped-def]
    """Value and cost of the mass outside the patch."""
    value, cost = 0.0, 0.0
    first = fee.shape[0] - beyond.mass.shape[1]
    for c in range(beyond.mass.shape[0]):
        for t in range(beyond.mass.shape[1]):
            gain = beyond.far[c] - psi * fee[first + t]
            if gain > 0.0:
                value += gain * beyond.mass[c, t]
                cost += fee[first + t] * beyond.mass[c, t]
    return value, cost


@compiled(inner=True)
def _crossing(low, value_low, slope_low, high, value_high, slope_high):  # type: ignore[no-untyped-def]
    """The point where two lines cross that bound a convex function from below at the ends of the
    bracket."""
    drop = slope_high - slope_low
    meet = (
        (value_low - value_high + slope_high * high - slope_low * low) / drop
        if drop > 0.0
        else high
    )
    return min(max(meet, low), high)


@compiled(inner=True, fastmath=FAST)
def search(options, count, beyond, aim):  # type: ignore[no-untyped-def]
    """Minimise ``psi E + sum_i x_i max_j (a_j - psi C_ij)`` over the price. Returns the smallest
    value found and its bracket."""
    worth, stay, mass, fee, _, _ = options
    budget, high, still = aim.budget, 0.0, 0.0
    for k in range(fee.shape[0]):  # a free move equals staying at any price
        if fee[k] == 0.0:
            for s in range(count):
                stay[s] = max(stay[s], worth[k, s])
    for k in range(fee.shape[0]):
        if fee[k] > 0.0:
            for s in range(count):
                high = max(high, (worth[k, s] - stay[s]) / fee[k])
    if beyond.mass.shape[1]:
        for c in range(beyond.far.shape[0]):
            high = max(high, beyond.far[c] / aim.step)
    for s in range(count):
        still += stay[s] * mass[s]
    if high <= 0.0:
        return _Found(still, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    high *= 1.0 + 1e-6
    best, value_high, cost_high = still + budget * high, still + budget * high, 0.0
    psi_best, cost_best, steps, base = high, 0.0, 0, 0.0
    low, value_low, cost_low, bracketed = 0.0, 0.0, 0.0, False
    for k in range(aim.rounds):
        if bracketed:
            slope_low, slope_high = budget - cost_low, budget - cost_high
            meet = _crossing(low, value_low, slope_low, high, value_high, slope_high)
            if best - (value_low + slope_low * (meet - low)) <= aim.tol * (best - still):
                break
            psi = 0.5 * (low + high) if k % 3 == 2 else meet
        else:
            psi = 0.0 if k == aim.rounds - 1 else _DOWN * high
        value, cost = _evaluate(options, count, psi)
        if beyond.mass.shape[1]:
            more, spent = _from_beyond(beyond, fee, psi)
            value, cost = value + more, cost + spent
        value += base + budget * psi
        steps += 1
        if value < best:
            best, psi_best, cost_best = value, psi, cost
        if cost > budget:
            low, value_low, cost_low, bracketed = psi, value, cost, True
            count, rest = _leave(options, count, psi)
            base += rest
        else:
            high, value_high, cost_high = psi, value, cost
            if psi == 0.0:
                break
    if not bracketed:
        low, cost_low = high, cost_high
    return _Found(best, psi_best, cost_best, low, cost_low, high, cost_high, steps)


@compiled(inner=True)
def _add_best_moves(given, n, moves, psi, part, z):  # type: ignore[no-untyped-def]
    """Add ``part`` of the mass of image ``n`` where the cheapest of its best moves at ``psi``
    end."""
    a, x = given.a[n], given.x[n]
    shifts, ring, fee = moves
    for c in range(a.shape[0]):
        for r in range(a.shape[1]):
            for k in range(a.shape[2]):
                best, row, column = a[c, r, k], r, k
                for m in range(1, shifts.shape[0] if x[c, r, k] > 0.0 else 1):
                    down, across = r + shifts[m, 0], k + shifts[m, 1]
                    if 0 <= down < a.shape[1] and 0 <= across < a.shape[2]:
                        score = a[c, down, across] - psi * fee[ring[m]]
                        if score > best:
                            best, row, column = score, down, across
                z[c, row, column] += part * x[c, r, k]


@compiled()
def _maxima(given, moves, rounds, start, stop, answer):  # type: ignore[no-untyped-def]
    """Bounds for whole images, and the points that attain them if memory for them is given."""
    shifts, ring, fee = moves
    channels, height, width = given.a.shape[1:]
    most = channels * height * width
    worth, stay, mass = np.empty((fee.shape[0], most)), np.empty(most), np.empty(most)
    options = Options(worth, stay, mass, fee, np.empty(BLOCK), np.empty(BLOCK))
    beyond = Beyond(np.empty(channels), np.empty((channels, 0)))
    for n in range(start, stop):
        a, x, budget = given.a[n], given.x[n], given.budget[n]
        count = np.int64(0)  # a literal would trigger another compilation
        for c in range(channels):
            for r in range(height):
                for k in range(width):
                    if x[c, r, k] <= 0.0:
                        continue
                    mass[count], stay[count] = x[c, r, k], a[c, r, k]
                    for d in range(fee.shape[0]):
                        worth[d, count] = NOWHERE
                    for m in range(shifts.shape[0]):
                        down, across = r + shifts[m, 0], k + shifts[m, 1]
                        if 0 <= down < height and 0 <= across < width:
                            worth[ring[m], count] = max(worth[ring[m], count], a[c, down, across])
                    count += 1
        found = search(options, count, beyond, Aim(budget, 1.0, rounds, 1e-12))
        numbers = answer.numbers[n]
        numbers[0], numbers[1], numbers[2] = found.value, found.psi, found.cost
        answer.steps[n] = found.steps
        if answer.z.shape[1] > 0:
            apart = found.cost_low - found.cost_high
            blend = (budget - found.cost_high) / apart if apart > 0.0 else 0.0
            blend = min(max(blend, 0.0), 1.0)
            _add_best_moves(given, n, moves, found.high, 1.0 - blend, answer.z[n])
            _add_best_moves(given, n, moves, found.low, blend, answer.z[n])
