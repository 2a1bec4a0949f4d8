"""Exact plans (:mod:`wball.kernels.proximal_newton`) on a CPU: one image at a time, compiled by
numba.

Only rows with mass and columns within their reach exist (:mod:`wball.kernels.image_rows`), an image
takes as many steps as *it* needs, and conjugate gradients walk over lists of the moves in use.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from wball.kernels.books import Best, Problem
from wball.kernels.compiled import compiled
from wball.kernels.image_rows import (
    allowed,
    copy,
    fill,
    improve,
    lower_bounds,
    opened,
    repaired,
    store,
    without_box,
)
from wball.kernels.proximal_newton import settings
from wball.moves import Moves, StencilMoves


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``. Images of a GPU are solved on the
    host."""
    return (
        None
        if isinstance(moves, StencilMoves)
        else "matrix costs are served by the torch kernel only"
    )


class _Settings(NamedTuple):
    """The settings that depend on the columns, and whether the start is warm."""

    method: settings.Method
    warm: bool


class _Shares(NamedTuple):
    """The moves in use, row after row: how many, which, and the share of each."""

    count: Any  # (R,)
    move: Any  # (R, K)
    part: Any  # (R, K)


class _Step(NamedTuple):
    """The proximal step of one image."""

    sigma: float  # its length
    centre: _Shares  # the shares it starts from
    end: Any  # (R, K): where moves end; the number of columns if outside the image
    method: settings.Method


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`."""
    method = _Settings(settings.LINEAR if problem.columns.linear else settings.QUADRATIC, warm)
    return improve(_solve_images, method, problem, start, problem.tau, max_iter, best)


@compiled(inner=True)
def _threshold(values, count, top):  # type: ignore[no-untyped-def]
    """The ``t`` with ``sum max(0, values - t) = 1``: Newton's method from the left, where it is
    monotone."""
    t, used = top - 1.0, 0
    while True:
        total, above = 0.0, 0
        for i in range(count):
            if values[i] > t:
                total += values[i]
                above += 1
        if above == used or above == 0:
            return t
        used = above
        t = max(t, (total - 1.0) / above)


@compiled(inner=True)
def _column(w, u, lo, hi):  # type: ignore[no-untyped-def]
    """The column at potential ``u``, its curvature, and ``min 1/2 (w - z)^2 + u z``."""
    free = w - u
    # Columns are never negative anyway; without a clip at 0 the dual stays strongly concave there.
    z = max(min(free, hi), lo) if lo > 0.0 else min(free, hi)
    return z, 1.0 if free < hi and (free > lo or lo <= 0.0) else 0.0, 0.5 * (w - z) ** 2 + u * z


@compiled(inner=True)
def _linear_column(g, u, come, lo, hi):  # type: ignore[no-untyped-def]
    """Likewise for ``min (u - g) z`` where the plan puts ``come``.

    It sits at its kink ``u = g`` while it is neither full nor drained, and takes what the plan
    gives it.
    """
    free = g - u
    if free > 0.0 or free == 0.0 and come > hi:
        return hi, -free * hi
    if free < 0.0 or come < lo:
        return lo, -free * lo
    return come, 0.0


@compiled(inner=True, fastmath={"contract", "nsz", "nnan", "reassoc"})
def _scores(gain, ends, a, toll, row):  # type: ignore[no-untyped-def]
    """What each move of row ``a`` gains, and the largest of these numbers."""
    top = -math.inf
    for k in range(toll.size):
        row[k] = gain[ends[a, k]] - toll[k]
        top = max(top, row[k])
    return top


@compiled(inner=True, fastmath={"contract", "nsz"})
def _evaluate(p, step, u, psi, shares, gradient):  # type: ignore[no-untyped-def]
    """Fill shares and gradient. Returns the dual, its derivative in ``psi``, the distance of the
    plan from the centre, and the proximal term.

    A row looks at all of its moves once: moves in use are within 1 of the best, and they are few.
    """
    n_rows, n_moves = p.end.shape
    n, sigma, ends = u.size, step.sigma, step.end
    held_count, held_move, held_part = step.centre.count, step.centre.move, step.centre.part
    counts, move, parts = shares.count, shares.move, shares.part
    mass, fee, target, lo, hi, linear = p.mass, p.fee, p.target, p.lo, p.hi, p.linear
    gain, toll, row = np.empty(n + 1), np.empty(n_moves), np.empty(n_moves)
    near, values, held = np.empty(n_moves, np.int64), np.empty(n_moves), np.zeros(n_moves)
    for j in range(n):
        gain[j] = sigma * u[j]
        gradient[j] = 0.0
    gain[n] = -math.inf
    for k in range(n_moves):
        toll[k] = sigma * (psi * fee[k])
    cost, rows, moved, pull = 0.0, 0.0, 0.0, 0.0
    for a in range(n_rows):
        top = _scores(gain, ends, a, toll, row)
        for i in range(held_count[a]):
            k = held_move[a, i]
            held[k] = held_part[a, i]
            row[k] += held[k]
            top = max(top, row[k])
        count = 0
        for k in range(n_moves):  # without branches
            near[count], values[count] = k, row[k]
            count += int(row[k] > top - 1.0)
        t = _threshold(values, count, top)
        value, away, paid, m, used = 0.0, 0.0, 0.0, mass[a], 0
        for i in range(count):
            part = values[i] - t
            if part > 0.0:
                k = near[i]
                move[a, used], parts[a, used] = k, part
                used += 1
                value += (u[ends[a, k]] - psi * fee[k]) * part
                paid += fee[k] * part
                gradient[ends[a, k]] -= m * part
                away += (part - held[k]) ** 2
        counts[a] = used
        for i in range(held_count[a]):
            k = held_move[a, i]
            away += held[k] ** 2 if row[k] <= t else 0.0
            held[k] = 0.0
        cost += m * paid
        rows += m * (value - away / (2.0 * sigma))
        pull += m * away / (2.0 * sigma)
        moved += m * m * away
    dual = p.beyond - psi * p.budget - rows
    for j in range(n):
        if linear:
            z, value = _linear_column(target[j], u[j], -gradient[j], lo, hi)
        else:
            z, _, value = _column(target[j], u[j], lo, hi)
        dual += value
        gradient[j] += z
    slope = cost - p.budget
    if psi <= 0.0 and slope <= 0.0:
        slope = 0.0
    return dual, slope, math.sqrt(moved), pull


@compiled(inner=True)
def _normalise(p, shares):  # type: ignore[no-untyped-def]
    """Rescale rows so that they sum to 1 up to rounding."""
    count, move, part = shares.count, shares.move, shares.part
    for a in range(count.size):
        total = 0.0
        for i in range(count[a]):
            total += part[a, i]
        if 0.5 < total < 2.0:
            for i in range(count[a]):
                part[a, i] /= total
        else:
            count[a], move[a, 0], part[a, 0] = 1, p.stay, 1.0


@compiled(inner=True)
def _write(shares, out):  # type: ignore[no-untyped-def]
    """The shares of all moves."""
    count, move, part = shares.count, shares.move, shares.part
    fill(out, 0.0)
    for a in range(count.size):
        for i in range(count[a]):
            out[a, move[a, i]] = part[a, i]


@compiled(inner=True)
def _shares(shape):  # type: ignore[no-untyped-def]
    return _Shares(np.zeros(shape[0], np.int64), np.empty(shape, np.int64), np.empty(shape))


@compiled(inner=True)
def _norm(values):  # type: ignore[no-untyped-def]
    total = 0.0
    for j in range(values.size):
        total += values[j] * values[j]
    return math.sqrt(total)


@compiled(inner=True)
def _range(values):  # type: ignore[no-untyped-def]
    low, high = math.inf, -math.inf
    for j in range(values.size):
        low, high = min(low, values[j]), max(high, values[j])
    # Where all values are equal (an image of one pixel), return any positive number.
    span = max(high - low, 1e-3 * max(abs(low), abs(high)))
    return span if span > 1e-200 else 1.0


@compiled(inner=True, fastmath={"contract", "nsz"})
def _direction(p, step, u, psi, shares, gradient, slope, d):  # type: ignore[no-untyped-def]
    """Newton's step ``d`` by conjugate gradients with a diagonal preconditioner. Returns the step
    of ``psi``."""
    n_rows, n_moves = p.end.shape
    n, method = u.size, step.method
    ends, fees, mass, target, lo, hi, sigma = p.end, p.fee, p.mass, p.target, p.lo, p.hi, step.sigma
    counts, move, stop = shares.count, shares.move, p.stop
    first, end = np.empty(n_rows + 1, np.int64), np.empty(n_rows * n_moves, np.int64)
    fee, weight, inverse = np.empty(n_rows * n_moves), np.empty(n_rows), np.empty(n_rows)
    diagonal, column, moving, linear = np.zeros(n), np.empty(n), np.empty(n), p.linear
    used, count, curvature = 0, 0, 0.0
    first[0] = 0
    for a in range(n_rows):
        ways, total, square = counts[a], 0.0, 0.0
        if ways > 1:  # rows with one move have no choice
            for i in range(ways):
                k = move[a, i]
                end[count + i], fee[count + i] = ends[a, k], fees[k]
                total += fees[k]
                square += fees[k] * fees[k]
            stiff = sigma * mass[a]
            for e in range(count, count + ways):
                diagonal[end[e]] += stiff * (1.0 - 1.0 / ways)
            curvature += stiff * (square - total * total / ways)
            weight[used], inverse[used] = stiff, 1.0 / ways
            count += ways
            used += 1
            first[used] = count
    largest = 1e-300
    for j in range(n):
        # Linear columns have no curvature, and those at their kinks do not move.
        column[j] = 0.0 if linear else _column(target[j], u[j], lo, hi)[1]
        moving[j] = 1.0 if not linear or u[j] != target[j] or gradient[j] != 0.0 else 0.0
        diagonal[j] += column[j]
        largest = max(largest, diagonal[j])
    ridge = max(1e-12 * largest, method.damping * _norm(gradient) / (math.sqrt(n) * _range(u)))
    free = psi > 0.0 or slope > 0.0
    diagonal_psi = curvature if free and curvature > 0.0 else 1.0

    r, q, h = np.empty(n), np.empty(n), np.empty(n)
    r_psi = slope if free else 0.0
    q_psi = r_psi / diagonal_psi
    size, d_psi = r_psi * q_psi, 0.0
    for j in range(n):
        column[j] += ridge
        diagonal[j] = 1.0 / (diagonal[j] + ridge)
        d[j] = 0.0
        r[j] = gradient[j]
        q[j] = r[j] * diagonal[j]
        size += r[j] * q[j]
    goal = method.cg_tol * method.cg_tol * size
    for _ in range(settings.CG_MAX):
        if stop[0] != 0:
            break
        for j in range(n):
            h[j] = column[j] * q[j]
        h_psi = 1e-12 * diagonal_psi * q_psi
        for a in range(used):
            mean = 0.0
            for e in range(first[a], first[a + 1]):
                mean += q[end[e]] - q_psi * fee[e]
            mean *= inverse[a]
            for e in range(first[a], first[a + 1]):
                change = weight[a] * (q[end[e]] - q_psi * fee[e] - mean)
                h[end[e]] += change
                h_psi -= change * fee[e]
        if not free:
            h_psi = 0.0
        curve = q_psi * h_psi
        for j in range(n):
            h[j] *= moving[j]
            curve += q[j] * h[j]
        if not (curve > 0.0 and size > goal):
            break
        length = size / curve
        d_psi += length * q_psi
        r_psi -= length * h_psi
        new = r_psi * r_psi / diagonal_psi
        for j in range(n):
            d[j] += length * q[j]
            r[j] -= length * h[j]
            new += r[j] * r[j] * diagonal[j]
        if new <= goal:
            break
        turn = new / size
        for j in range(n):
            q[j] = r[j] * diagonal[j] + turn * q[j]
        q_psi = r_psi / diagonal_psi + turn * q_psi
        size = new
    return d_psi


@compiled(inner=True)
def _first_price(p, step, u, kink, shares, gradient):  # type: ignore[no-untyped-def]
    """A price slightly above the one at which the first step's plan costs the budget.

    ``kink`` is the price without a box, which is an upper bound; 0 for quadratic columns.
    """
    low, high = 0.0, kink
    for attempt in range(0 if p.linear else 80):
        if _evaluate(p, step, u, high, shares, gradient)[1] <= 0.0:
            break
        low, high = high, 4.0 * high if attempt > 0 else 1e-3 * _range(u)
    for _ in range(30):
        if high - low <= 0.02 * high or p.stop[0] != 0:
            break
        middle = 0.5 * (low + high)
        if _evaluate(p, step, u, middle, shares, gradient)[1] > 0.0:
            low = middle
        else:
            high = middle
    return high


@compiled(inner=True)
def _solve(p, goal, chosen, u, psi, best_flow, best_u, found):  # type: ignore[no-untyped-def]
    """Solve one image from ``u`` and ``psi`` (negative if unknown). Returns the steps used.

    ``found`` as in :func:`wball.kernels.image_rows.opened`.
    """
    n, shape, steps = u.size, p.end.shape, 0
    new_u, gradient, new_gradient = np.empty(n), np.empty(n), np.empty(n)
    d, z, flow, share = np.empty(n), np.empty(n), np.empty(shape), np.empty(shape)
    shares, new_shares, centre = _shares(shape), _shares(shape), _shares(shape)
    _normalise(p, centre)  # all mass stays
    end = np.empty(shape, np.uint32)
    ends, target, linear, noise = p.end, p.target, p.linear, 0.0
    if linear:  # this dual is a difference of sums, which round in proportion to their own size
        for a in range(p.mass.size):
            noise += p.mass[a] * abs(target[p.home[a]])
    for a in range(shape[0]):
        for k in range(shape[1]):
            end[a, k] = ends[a, k] if ends[a, k] >= 0 else n
    method, sigma = chosen.method, chosen.method.first / _range(u)
    if chosen.warm:
        sigma *= settings.WARM
    step = _Step(sigma, centre, end, method)
    idle, narrow = 0, math.inf
    if psi < 0.0:
        psi = _first_price(p, step, u, found[3] if linear else 0.0, shares, gradient)
    while steps < goal.max_iter:
        dual, slope, moved, pull = _evaluate(p, step, u, psi, shares, gradient)
        solved, taken, ascends = False, 0, True
        while taken < settings.INNER and steps < goal.max_iter and ascends and p.stop[0] == 0:
            solved = _norm(gradient) <= method.settled * moved
            solved = solved and abs(slope) <= settings.SPENT * p.budget
            solved = solved and (
                not linear or abs(slope) <= settings.SPENT_LINEAR * moved + 1e-13 * p.budget
            )
            if solved:
                break
            d_psi = _direction(p, step, u, psi, shares, gradient, slope, d)
            steps += 1
            taken += 1
            # Stop where psi reaches 0: beyond it the direction was computed for another set of free
            # variables.
            length = min(psi / -d_psi, 1.0) if d_psi < 0.0 and psi > 0.0 else 1.0
            ascends = False
            for _ in range(settings.HALVINGS):
                new_psi = max(psi + length * d_psi, 0.0)
                promised = slope * (new_psi - psi)
                for j in range(n):
                    new_u[j] = u[j] + length * d[j]
                    if linear:  # on its side of the kink
                        drained = u[j] > target[j] or u[j] == target[j] and gradient[j] > 0.0
                        new_u[j] = max(new_u[j], target[j]) if drained else min(new_u[j], target[j])
                    promised += gradient[j] * (new_u[j] - u[j])
                new_dual, new_slope, new_moved, new_pull = _evaluate(
                    p, step, new_u, new_psi, new_shares, new_gradient
                )
                if new_dual >= dual + 1e-4 * promised - 1e-14 * (abs(dual) + noise):
                    ascends = True
                    break
                # Where the slope along the direction vanishes, were it linear between here and
                # there.
                rise, bend = promised / length, new_slope * d_psi
                for j in range(n):
                    bend += new_gradient[j] * d[j]
                length *= min(max(rise / (rise - bend), 0.1), 0.5) if bend < 0.0 else 0.5
            if ascends:
                u, new_u = new_u, u
                gradient, new_gradient = new_gradient, gradient
                shares, new_shares = new_shares, shares
                psi, dual, slope, moved, pull = new_psi, new_dual, new_slope, new_moved, new_pull

        _normalise(p, shares)
        bound, _ = lower_bounds(p, u, psi, 0.0)
        if bound > found[1]:
            found[1], found[3] = bound, psi
            copy(u, best_u)
        found[2] = max(found[2], bound)
        if solved:
            copy(shares.count, centre.count)
            copy(shares.move, centre.move)
            copy(shares.part, centre.part)
            if taken <= settings.QUICK:
                sigma = min(sigma * settings.GROWTH, settings.MOST / _range(u))
            elif taken > settings.SLOW:
                sigma /= settings.GROWTH
        else:
            sigma /= settings.SHRINK
        rest = dual - pull - bound  # the gap of the plan as it is
        idle = 0 if rest < 0.999 * narrow else idle + 1
        narrow = min(rest, narrow)
        last = idle > settings.PATIENCE or steps >= goal.max_iter or p.stop[0] != 0
        # Where only rounding errors are left:
        last = last or linear and solved and rest <= 3e-13 * (abs(dual) + noise)
        if last or rest <= settings.PROMISING * allowed(p, goal, found[0]):
            _write(shares, share)
            primal, _ = repaired(p, share, 0.0, goal.repair_sweeps, flow, z)
            if primal < found[0]:
                found[0] = primal
                copy(flow, best_flow)
        if last or found[0] - found[1] <= allowed(p, goal, found[0]):
            break
        step = _Step(sigma, centre, end, method)
    return steps


@compiled()
def _solve_images(images, moves, goal, chosen, known):  # type: ignore[no-untyped-def]
    cell = np.empty(images.x[0].size, dtype=np.int64)
    for m in range(images.x.shape[0]):
        p, u, best_flow, best_u, found = opened(images, moves, goal, known, m, cell)
        psi, steps, done = found[3] if chosen.warm else -1.0, 0, False
        if p.linear:
            steps, done = without_box(p, goal, u, best_flow, best_u, found)
        if not done:
            steps += _solve(p, goal, chosen, u, psi, best_flow, best_u, found)
        known.n_iter[m] = steps
        store(known, m, p, cell, images.target[m], best_flow, best_u, found)
