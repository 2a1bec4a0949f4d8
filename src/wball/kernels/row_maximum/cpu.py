"""Row maxima (:mod:`wball.kernels.row_maximum`) on a CPU: one row at a time, compiled by numba.

Nothing larger than one row's options exists at a time, so that they stay in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled
from wball.kernels.dispatch import split
from wball.kernels.linear_maximum.cpu import BLOCK, FAST, Aim, Beyond, Options, search
from wball.kernels.row_maximum import NOWHERE, Field, RowProblem

_TOL = 1e-6  # of what moving gains: the search may stop


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
    """The smallest cost of a move, which sets the scale of the first price, and the steps of the
    search."""

    step: float
    rounds: int


def row_maximum(problem: RowProblem, rounds: int) -> tuple[Tensor, Tensor]:
    """See :mod:`wball.kernels.row_maximum`."""
    value, psi = (
        _patches(problem, 2 * rounds)
        if problem.plain
        else _field(problem, problem.field(), 2 * rounds)
    )
    return value.to(problem.coeff.dtype), psi.to(problem.coeff.dtype)


def _patches(problem: RowProblem, rounds: int) -> tuple[Tensor, Tensor]:
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
    ways, effort = (
        _Ways(shifts, ring, len(costs), fees, wide, beyond, reach),
        _Effort(float(problem.step), rounds),
    )
    out, psi = np.empty((2, count))

    def work(start: int, stop: int) -> None:
        _rows(given, ways, effort, start, stop, out, psi)

    height, width = coeff.shape[2] + 2 * reach, coeff.shape[3] + 2 * reach
    split(count, work, channels * height * width * (len(away) + 2 * len(fees)))
    return torch.from_numpy(out), torch.from_numpy(psi)


def _field(problem: RowProblem, field: Field, rounds: int) -> tuple[Tensor, Tensor]:
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
    effort = _Effort(float(problem.step), rounds)
    out, psi = np.empty((2, count))

    def work(start: int, stop: int) -> None:
        _fields(given, cost, (far, elsewhere), (budget, effort), start, stop, out, psi)

    split(count, work, 2 * channels * options * field.mass.shape[2])
    return torch.from_numpy(out), torch.from_numpy(psi)


@compiled(fastmath=FAST)
def _fields(given, fee, outside, limits, start, stop, out, psi):  # type: ignore[no-untyped-def]
    """Search the maxima of rows ``start`` to ``stop`` with listed options."""
    (worth, stay, mass), (far, elsewhere), (budget, effort) = given, outside, limits
    channels, options, sources = worth.shape[1:]
    most = channels * sources
    options_held, stay_held, mass_held = np.empty((options, most)), np.empty(most), np.empty(most)
    held = Options(options_held, stay_held, mass_held, fee, np.empty(BLOCK), np.empty(BLOCK))
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
        beyond = Beyond(far[n], elsewhere[n])
        found = search(held, count, beyond, Aim(budget[n], effort.step, effort.rounds, _TOL))
        out[n], psi[n] = (
            found.value if whole else np.nan,
            found.psi,
        )  # NaN is not a bound


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
def _rows(given, ways, effort, start, stop, out, psi):  # type: ignore[no-untyped-def]
    """List the options of rows ``start`` to ``stop``, and search their maxima."""
    coeff, image, corner, patched, x, budget = given
    shifts, ring, rings, fee, wide, elsewhere, reach = ways
    step, rounds = effort
    channels, height, width = coeff.shape[1:]
    full_height, full_width = x.shape[2:]
    around = reach if patched else 0
    rows, columns = height + 2 * around, width + 2 * around  # where sources are looked for
    wide_rows, wide_columns = rows + 2 * reach, columns + 2 * reach  # where they can go
    target = np.empty(wide_rows * wide_columns)
    ends, spare = np.empty(rows * columns), np.empty(rows * columns)
    most = channels * rows * columns
    worth, stay, mass = np.empty((fee.shape[0], most)), np.empty(most), np.empty(most)
    options = Options(worth, stay, mass, fee, np.empty(BLOCK), np.empty(BLOCK))
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
        beyond = Beyond(far, elsewhere[n])
        found = search(options, count, beyond, Aim(budget[n], step, rounds, _TOL))
        out[n], psi[n] = found.value, found.psi
