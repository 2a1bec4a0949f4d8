"""Row maxima (:mod:`wball.kernels.row_maximum`) on a CPU: one row at a time, compiled by numba.

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

from wball.kernels.compiled import compiled
from wball.kernels.dispatch import split
from wball.kernels.row_maximum import DOWN, Field, RowMaximum

FAST = {"contract", "nsz", "reassoc"}
BLOCK = 512
"""Sources whose best option is held at once."""


class _Options(NamedTuple):
    """The options of the sources of a row, and memory for a block of them."""

    worth: Any  # (K, S)
    stay: Any  # (S,): what staying is worth
    mass: Any  # (S,)
    fee: Any  # (K,): what each option costs
    best: Any  # (BLOCK,)
    paid: Any  # (BLOCK,)


class _Beyond(NamedTuple):
    """Mass outside the patch of a row, which can arrive by the last options only."""

    far: Any  # (C,): the most that it can be worth
    mass: Any  # (C, T)


class _Aim(NamedTuple):
    """The budget, the smallest cost of a move, and the stopping criterion of the search."""

    budget: float
    step: float
    rounds: int
    tol: float


class _Found(NamedTuple):
    """The smallest bound found, its price, the bracket of the price, and the number of steps."""

    value: float
    psi: float
    low: float
    high: float
    steps: int


def row_maximum(
    field: Field, budget: Tensor, step: float, rounds: int, exact: bool = False
) -> RowMaximum:
    """See :mod:`wball.kernels.row_maximum`."""
    (count, channels, options), dtype = field.worth.shape[:3], field.stay.dtype
    far, elsewhere = np.zeros((count, channels)), np.zeros((count, channels, 0))
    if field.far is not None and field.elsewhere is not None:
        far, elsewhere = _array(field.far), _array(field.elsewhere)
    given = _array(field.worth), _array(field.stay), _array(field.mass)
    fee, limit = _array(field.cost[:, 0]), _array(budget)
    most, tol = (rounds, 1e-12) if exact else (2 * rounds, 1e-6)
    out = np.empty((count, 5))

    def work(start: int, stop: int) -> None:
        _rows(given, fee, (far, elsewhere), (limit, float(step), most, tol), (start, stop), out)

    split(count, work, 2 * channels * options * field.mass.shape[2])
    value, psi, low, high, steps = torch.from_numpy(out).unbind(1)
    return RowMaximum(value.to(dtype), psi.to(dtype), low.to(dtype), high.to(dtype), steps.long())


def _array(values: Tensor) -> Any:
    return values.detach().double().contiguous().numpy()


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
def _search(options, count, beyond, aim):  # type: ignore[no-untyped-def]
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
        return _Found(still, 0.0, 0.0, 0.0, 0)
    high *= 1.0 + 1e-6
    best, value_high, cost_high = still + budget * high, still + budget * high, 0.0
    psi_best, steps, base = high, 0, 0.0
    low, value_low, cost_low, bracketed = 0.0, 0.0, 0.0, False
    for k in range(aim.rounds):
        if bracketed:
            slope_low, slope_high = budget - cost_low, budget - cost_high
            meet = _crossing(low, value_low, slope_low, high, value_high, slope_high)
            if best - (value_low + slope_low * (meet - low)) <= aim.tol * (best - still):
                break
            psi = 0.5 * (low + high) if k % 3 == 2 else meet
        else:
            psi = 0.0 if k == aim.rounds - 1 else DOWN * high
        value, cost = _evaluate(options, count, psi)
        if beyond.mass.shape[1]:
            more, spent = _from_beyond(beyond, fee, psi)
            value, cost = value + more, cost + spent
        value += base + budget * psi
        steps += 1
        if value < best:
            best, psi_best = value, psi
        if cost > budget:
            low, value_low, cost_low, bracketed = psi, value, cost, True
            count, rest = _leave(options, count, psi)
            base += rest
        else:
            high, value_high, cost_high = psi, value, cost
            if psi == 0.0:
                break
    return _Found(best, psi_best, low if bracketed else high, high, steps)


@compiled(fastmath=FAST)
def _rows(given, fee, outside, limits, part, out):  # type: ignore[no-untyped-def]
    """Search the maxima of a part of the rows."""
    (worth, stay, mass), (far, elsewhere), (budget, step, rounds, tol) = given, outside, limits
    channels, options, sources = worth.shape[1:]
    most = channels * sources
    options_held, stay_held, mass_held = np.empty((options, most)), np.empty(most), np.empty(most)
    held = _Options(options_held, stay_held, mass_held, fee, np.empty(BLOCK), np.empty(BLOCK))
    for n in range(part[0], part[1]):
        count, whole = np.int64(0), True  # a literal would trigger another compilation
        for c in range(channels):
            for s in range(sources):
                if mass[n, c, s] > 0.0:
                    stay_held[count], mass_held[count] = stay[n, c, s], mass[n, c, s]
                    for k in range(options):
                        options_held[k, count] = worth[n, c, k, s]
                        whole = whole and not np.isnan(worth[n, c, k, s])
                    count += 1
        beyond = _Beyond(far[n], elsewhere[n])
        found = _search(held, count, beyond, _Aim(budget[n], step, rounds, tol))
        out[n, 0] = found.value if whole else np.nan  # not a bound
        out[n, 1], out[n, 2], out[n, 3], out[n, 4] = found.psi, found.low, found.high, found.steps
