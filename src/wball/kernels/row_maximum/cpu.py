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

from wball.kernels.compiled import compiled
from wball.kernels.dispatch import split
from wball.kernels.row_maximum import DOWN, NOWHERE, Field, RowMaximum, RowProblem

FAST = {"contract", "nsz", "reassoc"}
BLOCK = 512
"""Sources whose best option is held at once."""


class _Rows(NamedTuple):
    """Rows over images, as in :class:`wball.kernels.row_maximum.RowProblem`."""

    coeff: Any
    image: Any
    corner: Any
    patched: bool
    x: Any
    budget: Any


class _Ways(NamedTuple):
    """Where mass can go: the listed moves with their rings, the costs of rings and tiers, the
    widths of the tiers, and the mass beyond the patches."""

    shifts: Any
    ring: Any
    rings: int
    fee: Any
    wide: Any
    elsewhere: Any
    reach: int


class _Effort(NamedTuple):
    """The smallest cost of a move, which sets the scale of the first price, the steps of the
    search, and the share of what moving gains at which it may stop."""

    step: float
    rounds: int
    tol: float


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
    """The smallest bound found, its price, the bracket of the price, the share of the plan at its
    low end in the maximum, and the number of steps."""

    value: float
    psi: float
    low: float
    high: float
    share: float
    steps: int


def row_maximum(problem: RowProblem, rounds: int) -> RowMaximum:
    """See :mod:`wball.kernels.row_maximum`."""
    exact = problem.exact
    effort = _Effort(float(problem.step), rounds if exact else 2 * rounds, 1e-12 if exact else 1e-6)
    count, z = len(problem.coeff), None
    out, maximiser = np.empty((5, count)), np.zeros((count, 0, 0, 0))
    if problem.point:
        maximiser = np.zeros(problem.coeff.shape)
        z = torch.from_numpy(maximiser)
    if problem.plain:
        _patches(problem, effort, out, maximiser)
    else:
        _field(problem, problem.field(), effort, out)
    *found, steps = torch.from_numpy(out).unbind()
    value, psi, low, high = (part.to(problem.coeff.dtype) for part in found)
    return RowMaximum(value, psi, low, high, steps.long(), z)


def _patches(problem: RowProblem, effort: _Effort, out: Any, z: Any) -> None:
    """Maxima of rows without charges, whose options are listed here, row by row."""
    away = [m for m in problem.moves if m[:2] != (0, 0)]
    costs = sorted({d for *_, d in away})
    shifts = np.array([m[:2] for m in away], dtype=np.int64).reshape(-1, 2)
    ring = np.array([costs.index(d) for *_, d in away], dtype=np.int64)
    fees = np.array([*costs, *(least for least, _ in problem.tiers)], dtype=np.float64)
    wide = np.array([w for _, w in problem.tiers], dtype=np.int64)
    coeff, patched, elsewhere = problem.coeff, problem.corner is not None, problem.elsewhere()
    count, channels = coeff.shape[:2]
    corner = (
        torch.zeros((2, count), dtype=torch.long)
        if problem.corner is None
        else torch.stack(problem.corner)
    )
    beyond = np.zeros((count, channels, 0)) if elsewhere is None else elsewhere.double().numpy()
    given = _Rows(
        coeff.detach().double().contiguous().numpy(),
        problem.image.contiguous().numpy(),
        corner.contiguous().numpy(),
        patched,
        problem.x.detach().double().contiguous().numpy(),
        problem.budget.double().contiguous().numpy(),
    )
    reach = int(np.abs(shifts).max()) if len(away) else 0
    ways = _Ways(shifts, ring, len(costs), fees, wide, beyond, reach)

    def work(start: int, stop: int) -> None:
        _rows(given, ways, effort, start, stop, out, z)

    height, width = coeff.shape[2] + 2 * reach, coeff.shape[3] + 2 * reach
    split(count, work, channels * height * width * (len(away) + 2 * len(fees)))


def _field(problem: RowProblem, field: Field, effort: _Effort, out: Any) -> None:
    """Maxima of rows with charges or box prices, whose options are already listed."""
    count, channels, options = field.worth.shape[:3]
    given = tuple(
        t.detach().double().contiguous().numpy() for t in (field.worth, field.stay, field.mass)
    )
    cost, budget = (t.double().contiguous().numpy() for t in (field.cost[:, 0], problem.budget))
    far, elsewhere = np.zeros((count, channels)), np.zeros((count, channels, 0))
    if field.far is not None and field.elsewhere is not None:
        far, elsewhere = (
            t.detach().double().contiguous().numpy() for t in (field.far, field.elsewhere)
        )

    def work(start: int, stop: int) -> None:
        _fields(given, cost, (far, elsewhere), (budget, effort), start, stop, out)

    split(count, work, 2 * channels * options * field.mass.shape[2])


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
        return _Found(still, 0.0, 0.0, 0.0, 0.0, 0)
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
    apart = cost_low - cost_high
    share = (budget - cost_high) / apart if bracketed and apart > 0.0 else 0.0
    low = low if bracketed else high
    return _Found(best, psi_best, low, high, min(max(share, 0.0), 1.0), steps)


@compiled(inner=True)
def _store(out, n, found):  # type: ignore[no-untyped-def]
    out[0, n], out[1, n] = found.value, found.psi
    out[2, n], out[3, n], out[4, n] = found.low, found.high, found.steps


@compiled(inner=True)
def _add_best_moves(a, x, ways, psi, share, z):  # type: ignore[no-untyped-def]
    """Add a share of an image's mass where the cheapest of its best moves at ``psi`` end."""
    for c in range(a.shape[0]):
        for r in range(a.shape[1]):
            for k in range(a.shape[2]):
                best, row, column = a[c, r, k], r, k
                for m in range(ways.ring.size if x[c, r, k] > 0.0 else 0):
                    down, across = r + ways.shifts[m, 0], k + ways.shifts[m, 1]
                    if 0 <= down < a.shape[1] and 0 <= across < a.shape[2]:
                        score = a[c, down, across] - psi * ways.fee[ways.ring[m]]
                        if score > best:
                            best, row, column = score, down, across
                z[c, row, column] += share * x[c, r, k]


@compiled(fastmath=FAST)
def _fields(given, fee, outside, limits, start, stop, out):  # type: ignore[no-untyped-def]
    """Search the maxima of rows ``start`` to ``stop`` with listed options."""
    (worth, stay, mass), (far, elsewhere), (budget, effort) = given, outside, limits
    channels, options, sources = worth.shape[1:]
    most = channels * sources
    options_held, stay_held, mass_held = np.empty((options, most)), np.empty(most), np.empty(most)
    held = _Options(options_held, stay_held, mass_held, fee, np.empty(BLOCK), np.empty(BLOCK))
    for n in range(start, stop):
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
        aim = _Aim(budget[n], effort.step, effort.rounds, effort.tol)
        _store(out, n, _search(held, count, beyond, aim))
        if not whole:
            out[0, n] = np.nan  # not a bound


@compiled(inner=True, fastmath=FAST)
def _widened(maps, spare, height, width, reach):  # type: ignore[no-untyped-def]
    """Replace each value by the largest one within ``reach`` rows and columns, in place."""
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


@compiled(fastmath=FAST)
def _rows(given, ways, effort, start, stop, out, z):  # type: ignore[no-untyped-def]
    """List the options of rows ``start`` to ``stop``, and search their maxima."""
    coeff, image, corner, patched, x, budget = given
    shifts, ring, rings, fee, wide, elsewhere, reach = ways
    channels, height, width = coeff.shape[1:]
    full_height, full_width = x.shape[2:]
    around = reach if patched else 0
    rows, columns = height + 2 * around, width + 2 * around  # where sources are looked for
    wide_rows, wide_columns = rows + 2 * reach, columns + 2 * reach  # where they can go
    target = np.empty(wide_rows * wide_columns)
    ends, spare = np.empty(rows * columns), np.empty(rows * columns)
    most = channels * rows * columns
    worth, stay, mass = np.empty((fee.shape[0], most)), np.empty(most), np.empty(most)
    options = _Options(worth, stay, mass, fee, np.empty(BLOCK), np.empty(BLOCK))
    place, far = np.empty(rows * columns, np.int64), np.empty(channels)
    for n in range(start, stop):
        picture = x[image[n]]
        top, left = corner[0, n] - around, corner[1, n] - around
        count = np.int64(0)  # a literal would trigger another compilation
        for c in range(channels):
            for r in range(wide_rows):
                there = top - reach + r
                for k in range(wide_columns):
                    column = left - reach + k
                    inside = 0 <= there < full_height and 0 <= column < full_width
                    target[r * wide_columns + k] = 0.0 if inside else NOWHERE
            for r in range(height):
                there = corner[0, n] + r
                if 0 <= there < full_height:
                    begin = (around + reach + r) * wide_columns + around + reach
                    for k in range(max(0, -corner[1, n]), min(width, full_width - corner[1, n])):
                        target[begin + k] = coeff[n, c, r, k]
            first = count
            for r in range(rows):
                there = top + r
                if not 0 <= there < full_height:
                    continue
                for k in range(max(0, -left), min(columns, full_width - left)):
                    if picture[c, there, left + k] > 0.0:
                        mass[count] = picture[c, there, left + k]
                        place[count - first] = r * columns + k
                        stay[count] = target[(r + reach) * wide_columns + k + reach]
                        count += 1
            for d in range(rings):
                for s in range(first, count):
                    worth[d, s] = NOWHERE
            # Runs of neighbouring sources: the inner loop is over contiguous numbers.
            s = first
            while s < count:
                end = s + 1
                at = place[s - first]
                while (
                    end < count
                    and place[end - first] == at + end - s
                    and place[end - first] % columns
                ):
                    end += 1
                centre = (at // columns + reach) * wide_columns + at % columns + reach
                for m in range(ring.shape[0]):
                    d, goes = ring[m], centre + shifts[m, 0] * wide_columns + shifts[m, 1]
                    for k in range(end - s):
                        worth[d, s + k] = max(worth[d, s + k], target[goes + k])
                s = end
            if wide.shape[0]:
                top_value = NOWHERE
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
        beyond = _Beyond(far, elsewhere[n])
        aim = _Aim(budget[n], effort.step, effort.rounds, effort.tol)
        found = _search(options, count, beyond, aim)
        _store(out, n, found)
        if z.shape[1] > 0:
            _add_best_moves(coeff[n], picture, ways, found.high, 1.0 - found.share, z[n])
            _add_best_moves(coeff[n], picture, ways, found.low, found.share, z[n])
