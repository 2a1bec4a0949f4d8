r"""One image in the compiled exact solvers: rows with mass, columns within their reach, and plans.

A column beyond reach stays at ``z = 0``, and its dual variable has a closed form (``u = w``, or
``u = g``). All problems are minimisations: the support function is the minimum of ``-<g, z>``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wball.kernels.compiled import compiled


class Window(NamedTuple):
    """The moves as arrays; the first keeps mass in place."""

    down: NDArray[np.int64]
    across: NDArray[np.int64]
    over: NDArray[np.int64]  # channels
    fee: NDArray[np.float64]
    reverse: NDArray[np.int64]  # the move that goes back, or -1


class Goal(NamedTuple):
    """The box and kind of the columns (``-<g, z>`` if linear), the tolerances, and the limits."""

    lo: float
    hi: float
    linear: bool
    tol: float
    parts: float
    max_iter: int
    repair_sweeps: int
    stop: Any  # (1,): 1 when time is up


class ImageProblem(NamedTuple):
    """One image: rows with mass, columns within reach."""

    mass: Any  # (R,)
    home: Any  # (R,): the row's own column
    row: Any  # (J,): the column's own row, or -1
    end: Any  # (R, K): column where the move ends, or -1
    fee: Any  # (K,)
    reverse: Any  # (K,)
    target: Any  # (J,)
    lo: float
    hi: float
    budget: float
    tau: float
    linear: bool
    noise: float  # size of the terms of a dual whose sums cancel
    beyond: float  # value of the columns out of reach
    offset: float  # of the objective, and the gap that always counts as solved
    floor: float
    stop: Any  # (1,): 1 when time is up


# Loops instead of array expressions: numba takes seconds to compile each of those.


@compiled(inner=True)
def fill(values, number):  # type: ignore[no-untyped-def]
    flat = values.reshape(-1)
    for i in range(flat.size):
        flat[i] = number


@compiled(inner=True)
def copy(source, into):  # type: ignore[no-untyped-def]
    a, b = source.reshape(-1), into.reshape(-1)
    for i in range(a.size):
        b[i] = a[i]


@compiled(inner=True)
def columns_of(p, flow, z):  # type: ignore[no-untyped-def]
    fill(z, 0.0)
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            if flow[a, k] > 0.0:
                z[p.end[a, k]] += flow[a, k]


@compiled(inner=True)
def cancel(p, flow):  # type: ignore[no-untyped-def]
    """Cancel opposite flows: only their difference remains."""
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            if flow[a, k] > 0.0 and p.reverse[k] >= 0:
                b = p.row[p.end[a, k]]
                if b > a:
                    common = min(flow[a, k], flow[b, p.reverse[k]])
                    flow[a, k] -= common
                    flow[b, p.reverse[k]] -= common
                    flow[a, 0] += common
                    flow[b, 0] += common


@compiled(inner=True)
def shrink(flow, scale):  # type: ignore[no-untyped-def]
    """Scale the flow of all moves except staying."""
    for a in range(flow.shape[0]):
        for k in range(1, flow.shape[1]):
            flow[a, 0] += (1 - scale) * flow[a, k]
            flow[a, k] *= scale


@compiled(inner=True)
def into_box(p, flow, sweeps, z):  # type: ignore[no-untyped-def]
    """Return excess along the moves it came by, and recall mass of drained pixels:
    ``Plan.repair``."""
    n_rows, n_moves = flow.shape
    # If every pixel is full, an excess of the size of rounding errors cannot be removed.
    rounding = 1e-13 * max(1.0, p.hi)
    n, tiny = z.size, 2.2250738585072014e-308
    easy, rate, rest, near, full = np.ones((5, n))
    for sweep in range(sweeps + 1):
        columns_of(p, flow, z)
        over, under = 0, 0
        for j in range(n):
            over += int(z[j] > p.hi + rounding)
            under += int(z[j] < p.lo - rounding)
        if over + under == 0:
            return
        if sweep == sweeps:
            break
        # The last sweeps return more and more, so that no mass circulates among full pixels.
        more = 2.0 ** max(0, sweep - sweeps + 40)
        # Excess that its neighbours have no room for goes toward pixels that have, along large
        # flows.
        for j in range(n):
            near[j] = 1.0 if z[j] < p.hi else full[j]
            easy[j], full[j] = tiny, 1e-30
        for a in range(n_rows):
            room = max(p.hi - z[p.home[a]], 0.0)
            for k in range(1, n_moves):
                if flow[a, k] > 0.0:
                    easy[p.end[a, k]] += min(flow[a, k], room)
                    full[p.end[a, k]] += flow[a, k] * near[p.home[a]]
        for j in range(n):
            excess = more * (z[j] - p.hi) if z[j] > p.hi + rounding else 0.0
            enough = easy[j] >= excess
            rate[j] = excess / easy[j] if enough else 0.0
            rest[j] = 0.0 if enough else excess / full[j]
        for a in range(n_rows):
            room, own = max(p.hi - z[p.home[a]], 0.0), z[p.home[a]]
            recall, recall_rest = 0.0, 0.0
            if own < p.lo - rounding:
                lack, plenty, sent = more * (p.lo - own), tiny, tiny
                for k in range(1, n_moves):
                    if flow[a, k] > 0.0:
                        plenty += min(flow[a, k], max(z[p.end[a, k]] - p.lo, 0.0))
                        sent += flow[a, k]
                if plenty >= lack:
                    recall = lack / plenty
                else:
                    recall_rest = lack / sent
            for k in range(1, n_moves):
                if flow[a, k] > 0.0:
                    j, f = p.end[a, k], flow[a, k]
                    back = min(f, room) * rate[j] + f * near[p.home[a]] * rest[j]
                    called = min(f, max(z[j] - p.lo, 0.0)) * recall + f * recall_rest
                    returned = min(max(back, called), f)
                    flow[a, k] -= returned
                    flow[a, 0] += returned
    shrink(flow, 0.0)


@compiled(inner=True)
def repaired(p, sweeps, flow, z):  # type: ignore[no-untyped-def]
    """Make the plan ``flow`` feasible. Returns its objective and its entropy term."""
    if p.tau == 0.0:  # opposite flows waste budget, but the entropy requires them
        cancel(p, flow)
    if p.hi < math.inf or p.lo > 0.0:
        into_box(p, flow, sweeps, z)
    cost = 0.0
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            cost += flow[a, k] * p.fee[k]
    if cost > p.budget:
        shrink(flow, p.budget / cost)
    columns_of(p, flow, z)
    value = p.beyond
    for j in range(z.size):
        value += -p.target[j] * z[j] if p.linear else 0.5 * (p.target[j] - z[j]) ** 2
    entropy = 0.0
    if p.tau > 0.0:
        for a in range(flow.shape[0]):
            for k in range(flow.shape[1]):
                if flow[a, k] > 0.0:
                    entropy += p.tau * flow[a, k] * math.log(flow[a, k] / p.mass[a])
    return value + entropy, entropy


@compiled(inner=True)
def lower_bounds(p, u, psi):  # type: ignore[no-untyped-def]
    """Lower bounds of the optimum with and without entropy, for any ``u`` and ``psi >= 0``."""
    hard, soft, size = 0.0, 0.0, 0.0
    for a in range(p.end.shape[0]):
        top = -math.inf
        for k in range(p.end.shape[1]):
            if p.end[a, k] >= 0:
                top = max(top, u[p.end[a, k]] - psi * p.fee[k])
        hard += p.mass[a] * top
        size += p.mass[a] * abs(top)
        if p.tau > 0.0:
            total = 0.0
            for k in range(p.end.shape[1]):
                if p.end[a, k] >= 0:
                    total += math.exp((u[p.end[a, k]] - psi * p.fee[k] - top) / p.tau)
            soft += p.mass[a] * (top + p.tau * math.log(total))
    value = p.beyond - psi * p.budget
    for j in range(u.size):
        if p.linear:
            excess = p.target[j] - u[j]
            value -= (p.hi if excess > 0.0 else p.lo) * excess
        else:
            z = min(max(p.target[j] - u[j], p.lo), p.hi)
            value += 0.5 * (p.target[j] - z) ** 2 + u[j] * z
    # float64 sums of n terms: widen by far more than they can be off.
    rounding = 1e-13 * (size + abs(value)) if p.linear else 0.0
    plain = value - hard - rounding
    entropic = value - soft if p.tau > 0.0 else plain
    # NaN compares as false with every bound so far
    return entropic, plain if math.isfinite(plain) else -math.inf


@compiled(inner=True)
def allowed(p, goal, primal, entropy):  # type: ignore[no-untyped-def]
    """The gap at which an image counts as solved:
    :class:`wball.kernels.column_problem.Tolerance`."""
    size = max(abs(primal - entropy + p.offset), goal.parts * (primal - 2.0 * entropy))
    return goal.tol * size + p.floor


@compiled(inner=True)
def _ends(i, k, moves, shape):  # type: ignore[no-untyped-def]
    """Where a move from pixel ``i`` ends; -1 outside the image."""
    _, channels, height, width = shape
    row, column = i // width % height + moves.down[k], i % width + moves.across[k]
    channel = i // (height * width) + moves.over[k]
    if 0 <= row < height and 0 <= column < width and 0 <= channel < channels:
        return (channel * height + row) * width + column
    return -1


@compiled(inner=True)
def lay_out(images, m, moves, goal, cell):  # type: ignore[no-untyped-def]
    """Rows, columns and moves of image ``m``; fills ``cell`` with the pixel of each column."""
    x, target = images.x[m].reshape(-1), images.target[m].reshape(-1)
    fee, shape = moves.fee, images.x.shape
    number = np.empty(x.size, np.int64)
    fill(number, -1)
    n_rows = 0
    for i in range(x.size):
        if x[i] > 0.0:
            n_rows += 1
            for k in range(fee.size):
                j = _ends(i, k, moves, shape)
                if j >= 0:
                    number[j] = 0
    n_columns, beyond = 0, 0.0
    for i in range(x.size):
        if number[i] == 0:
            number[i] = n_columns
            cell[n_columns] = i
            n_columns += 1
        elif not goal.linear:
            beyond += 0.5 * target[i] * target[i]
    mass, home, row = (
        np.empty(n_rows),
        np.empty(n_rows, np.int64),
        np.empty(n_columns, np.int64),
    )
    end, wanted = np.empty((n_rows, fee.size), np.int64), np.empty(n_columns)
    fill(row, -1)
    fill(end, -1)
    a = 0
    for i in range(x.size):
        if number[i] >= 0:
            wanted[number[i]] = target[i]
        if x[i] > 0.0:
            mass[a], home[a], row[number[i]] = x[i], number[i], a
            for k in range(fee.size):
                j = _ends(i, k, moves, shape)
                if j >= 0:
                    end[a, k] = number[j]
            a += 1
    noise = 0.0
    if goal.linear or images.tau[m] > 0.0:
        for a in range(n_rows):
            noise += mass[a] * abs(wanted[home[a]])
    return ImageProblem(
        mass, home, row, end, fee, moves.reverse, wanted, goal.lo, goal.hi,
        images.budget[m], images.tau[m], goal.linear, noise, beyond, images.offset[m],
        images.floor[m], goal.stop,
    )  # fmt: skip


@compiled(inner=True)
def opened(images, moves, goal, known, m, cell):  # type: ignore[no-untyped-def]
    """Set up image ``m``: its problem, first potentials, memory for the best plan and potentials,
    and the best primal, dual and hard bound so far with their price."""
    p = lay_out(images, m, moves, goal, cell)
    u, found, start = np.empty(p.target.size), np.empty(4), images.start[m].reshape(-1)
    for t in range(u.size):
        u[t] = start[cell[t]]
    found[0], found[1] = known.primal[m], known.dual[m]
    found[2], found[3] = known.hard[m], known.psi[m]
    return p, u, np.zeros(p.end.shape), np.empty(u.size), found


@compiled(inner=True)
def store(known, m, p, cell, target, best_flow, best_u, found):  # type: ignore[no-untyped-def]
    """Write the results of image ``m`` that improved; ``found`` as in :func:`opened`."""
    flow, z, u = known.flow[m], known.z[m].reshape(-1), known.u[m].reshape(-1)
    area = z.size // flow.shape[0]
    flow = flow.reshape((flow.shape[0], flow.shape[1], area))
    if found[0] < known.primal[m]:
        fill(flow, 0.0)
        fill(z, 0.0)
        for a in range(p.mass.size):
            i = cell[p.home[a]]
            for k in range(p.fee.size):
                flow[i // area, k, i % area] = best_flow[a, k]
                if best_flow[a, k] > 0.0:
                    z[cell[p.end[a, k]]] += best_flow[a, k]
    if found[1] > known.dual[m]:
        # Out of reach nothing arrives: u = w makes z(u) = 0, and u = g costs nothing.
        copy(target, u)
        for t in range(best_u.size):
            u[cell[t]] = best_u[t]
    known.primal[m], known.dual[m] = found[0], found[1]
    known.hard[m], known.psi[m] = found[2], found[3]
