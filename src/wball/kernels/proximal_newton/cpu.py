"""Exact plans (:mod:`wball.kernels.proximal_newton`) on a CPU: one image at a time, compiled by numba.

Only rows with mass and columns within their reach exist (:mod:`wball.kernels.image_rows`), an image takes as many steps
as *it* needs, and conjugate gradients walk over lists of the moves in use.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from wball.kernels.books import Best, Problem
from wball.kernels.compiled import compiled
from wball.kernels.image_rows import (
    copy,
    fill,
    improve,
    lower_bounds,
    opened,
    repaired,
    store,
)
from wball.kernels.proximal_newton import settings
from wball.moves import Moves, StencilMoves


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``. Images of a GPU are solved on the host."""
    return None if isinstance(moves, StencilMoves) else "matrix costs are served by the torch kernel only"


class _Settings(NamedTuple):
    """:data:`wball.kernels.proximal_newton.settings.ALL`, and whether the start is warm."""

    first: float
    warmer: float
    growth: float
    quick: int
    slow: int
    shrink: float
    inner: int
    settled: float
    spent: float
    cg_tol: float
    cg_max: int
    damping: float
    halvings: int
    least: float
    most: float
    patience: int
    promising: float
    warm: bool


class _Step(NamedTuple):
    """The proximal step of one image: its length, and the shares it starts from."""

    sigma: float
    centre: Any  # (R, K)


def proximal_newton(problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`."""
    method = _Settings(*settings.ALL, warm)._replace(first=settings.FIRST * (settings.WARM if warm else 1.0))
    return improve(_solve_images, method, problem, start, problem.tau, max_iter, best)  # there are no temperatures


@compiled(inner=True)
def _project_row(row):  # type: ignore[no-untyped-def]
    """The threshold ``t`` with ``sum max(0, row - t) = 1``: Newton's method from the left, where it is monotone."""
    top = -math.inf
    for k in range(row.size):
        top = max(top, row[k])
    t, used = top - 1.0, 0
    while True:
        total, count = 0.0, 0
        for k in range(row.size):
            if row[k] > t:
                total += row[k]
                count += 1
        if count == used or count == 0:
            return t
        used = count
        t = max(t, (total - 1.0) / count)


@compiled(inner=True)
def _column(p, j, u):  # type: ignore[no-untyped-def]
    """The column at potential ``u``, its curvature, and ``min 1/2 (w - z)^2 + u z``."""
    free = p.target[j] - u
    # Columns are never negative anyway; without a clip at 0 the dual stays strongly concave there.
    z = max(min(free, p.hi), p.lo) if p.lo > 0.0 else min(free, p.hi)
    return z, 1.0 if free < p.hi and (free > p.lo or p.lo <= 0.0) else 0.0, 0.5 * (p.target[j] - z) ** 2 + u * z


@compiled(inner=True, fastmath={"contract", "nsz"})
def _evaluate(p, step, u, psi, share, columns, gradient):  # type: ignore[no-untyped-def]
    """Fill shares, columns and gradient; returns the dual, its derivative in ``psi``, how far the plan moved, and what
    that costs."""
    n_rows, n_moves = p.end.shape
    fill(columns, 0.0)
    cost, rows, moved, pull, sigma = 0.0, 0.0, 0.0, 0.0, step.sigma
    for a in range(n_rows):
        row, centre, end = share[a], step.centre[a], p.end[a]
        for k in range(n_moves):
            row[k] = centre[k] + sigma * (u[end[k]] - psi * p.price[k]) if end[k] >= 0 else -math.inf
        t = _project_row(row)
        value, away, paid, m = 0.0, 0.0, 0.0, p.mass[a]
        for k in range(n_moves):
            part = row[k] - t
            if part > 0.0:
                j = end[k]
                row[k] = part
                value += (u[j] - psi * p.price[k]) * part
                paid += p.price[k] * part
                columns[j] += m * part
                part -= centre[k]
            else:
                row[k] = 0.0
                part = centre[k]
            away += part * part
        cost += m * paid
        rows += m * (value - away / (2.0 * sigma))
        pull += m * away / (2.0 * sigma)
        moved += m * m * away
    dual = p.beyond - psi * p.budget - rows
    for j in range(u.size):
        z, _, value = _column(p, j, u[j])
        dual += value
        gradient[j] = z - columns[j]
    slope = cost - p.budget
    if psi <= 0.0 and slope <= 0.0:
        slope = 0.0
    return dual, slope, math.sqrt(moved), pull


@compiled(inner=True)
def _normalise(p, share):  # type: ignore[no-untyped-def]
    """Rows that sum to 1 up to rounding, wherever their thresholds were rounded to."""
    for a in range(share.shape[0]):
        total = 0.0
        for k in range(share.shape[1]):
            total += share[a, k]
        sound = 0.5 < total < 2.0
        for k in range(share.shape[1]):
            share[a, k] = share[a, k] / total if sound else 1.0 if k == p.stay else 0.0


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
    # Where all are equal (an image of one pixel) any positive number will do.
    span = max(high - low, 1e-3 * max(abs(low), abs(high)))
    return span if span > 1e-200 else 1.0


@compiled(inner=True, fastmath={"contract", "nsz"})
def _direction(p, step, settings, u, psi, share, gradient, slope, d):  # type: ignore[no-untyped-def]
    """Newton's step ``d`` by conjugate gradients with a diagonal preconditioner; returns that of ``psi``."""
    n_rows, n_moves = p.end.shape
    n = u.size
    first, end = np.empty(n_rows + 1, np.int64), np.empty(n_rows * n_moves, np.int64)
    price, weight, inverse = np.empty(n_rows * n_moves), np.empty(n_rows), np.empty(n_rows)
    diagonal, column = np.zeros(n), np.empty(n)
    used, count, curvature = 0, 0, 0.0
    first[0] = 0
    for a in range(n_rows):
        ways, total, square = 0, 0.0, 0.0
        for k in range(n_moves):
            if share[a, k] > 0.0:
                end[count + ways], price[count + ways] = p.end[a, k], p.price[k]
                total += p.price[k]
                square += p.price[k] * p.price[k]
                ways += 1
        if ways > 1:  # rows with one move have no choice
            stiff = step.sigma * p.mass[a]
            for e in range(count, count + ways):
                diagonal[end[e]] += stiff * (1.0 - 1.0 / ways)
            curvature += stiff * (square - total * total / ways)
            weight[used], inverse[used] = stiff, 1.0 / ways
            count += ways
            used += 1
            first[used] = count
    largest = 1e-300
    for j in range(n):
        column[j] = _column(p, j, u[j])[1]
        diagonal[j] += column[j]
        largest = max(largest, diagonal[j])
    ridge = max(1e-12 * largest, settings.damping * _norm(gradient) / (math.sqrt(n) * _range(u)))
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
    goal = settings.cg_tol * settings.cg_tol * size
    for _ in range(settings.cg_max):
        if p.stop[0] != 0:
            break
        for j in range(n):
            h[j] = column[j] * q[j]
        h_psi = 1e-12 * diagonal_psi * q_psi
        for a in range(used):
            mean = 0.0
            for e in range(first[a], first[a + 1]):
                mean += q[end[e]] - q_psi * price[e]
            mean *= inverse[a]
            for e in range(first[a], first[a + 1]):
                change = weight[a] * (q[end[e]] - q_psi * price[e] - mean)
                h[end[e]] += change
                h_psi -= change * price[e]
        if not free:
            h_psi = 0.0
        curve = q_psi * h_psi
        for j in range(n):
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
def _first_price(p, step, u, share, columns, gradient):  # type: ignore[no-untyped-def]
    """About the price at which the first step's plan costs the budget, from above."""
    low, high = 0.0, 0.0
    for attempt in range(80):
        if _evaluate(p, step, u, high, share, columns, gradient)[1] <= 0.0:
            break
        low, high = high, 4.0 * high if attempt > 0 else 1e-3 * _range(u)
    for _ in range(30):
        if high - low <= 0.02 * high or p.stop[0] != 0:
            break
        middle = 0.5 * (low + high)
        if _evaluate(p, step, u, middle, share, columns, gradient)[1] > 0.0:
            low = middle
        else:
            high = middle
    return high


@compiled(inner=True)
def _solve(p, goal, settings, u, psi, floor, best_flow, best_u, found):  # type: ignore[no-untyped-def]
    """One image from ``u`` and ``psi`` (negative if unknown). ``found``: primal, dual, hard bound, and its price."""
    n, shape = u.size, p.end.shape
    columns, gradient, share = np.empty(n), np.empty(n), np.empty(shape)
    new_u, new_columns, new_gradient, new_share = np.empty(n), np.empty(n), np.empty(n), np.empty(shape)
    d, z, flow, centre, steps = np.empty(n), np.empty(n), np.empty(shape), np.zeros(shape), 0
    for a in range(p.mass.size):
        centre[a, p.stay] = 1.0
    sigma = settings.first / _range(u)
    least, step, idle, narrow = settings.least * sigma, _Step(sigma, centre), 0, math.inf
    if psi < 0.0:
        psi = _first_price(p, step, u, share, columns, gradient)
    while steps < goal.max_iter:
        dual, slope, moved, pull = _evaluate(p, step, u, psi, share, columns, gradient)
        solved, taken, ascends = False, 0, True
        while taken < settings.inner and steps < goal.max_iter and ascends and p.stop[0] == 0:
            solved = _norm(gradient) <= settings.settled * moved and abs(slope) <= settings.spent * p.budget
            if solved:
                break
            d_psi = _direction(p, step, settings, u, psi, share, gradient, slope, d)
            steps += 1
            taken += 1
            # Stop where psi reaches 0: beyond it the direction was computed for another set of free variables.
            length = min(psi / -d_psi, 1.0) if d_psi < 0.0 and psi > 0.0 else 1.0
            ascends = False
            for _ in range(settings.halvings):
                new_psi = max(psi + length * d_psi, 0.0)
                promised = slope * (new_psi - psi)
                for j in range(n):
                    new_u[j] = u[j] + length * d[j]
                    promised += gradient[j] * (new_u[j] - u[j])
                new_dual, new_slope, new_moved, new_pull = _evaluate(
                    p, step, new_u, new_psi, new_share, new_columns, new_gradient
                )
                if new_dual >= dual + 1e-4 * promised - 1e-14 * abs(dual):
                    ascends = True
                    break
                # Where the slope along the direction vanishes, were it linear between here and there.
                rise, bend = promised / length, new_slope * d_psi
                for j in range(n):
                    bend += new_gradient[j] * d[j]
                length *= min(max(rise / (rise - bend), 0.1), 0.5) if bend < 0.0 else 0.5
            if ascends:
                u, new_u = new_u, u
                columns, new_columns = new_columns, columns
                gradient, new_gradient = new_gradient, gradient
                share, new_share = new_share, share
                psi, dual, slope, moved, pull = new_psi, new_dual, new_slope, new_moved, new_pull

        _normalise(p, share)
        bound, _ = lower_bounds(p, u, psi, 0.0)
        if bound > found[1]:
            found[1], found[3] = bound, psi
            copy(u, best_u)
        found[2] = max(found[2], bound)
        if solved:
            copy(share, centre)
            if taken <= settings.quick:
                sigma = min(sigma * settings.growth, settings.most / _range(u))
            elif taken > settings.slow:
                sigma /= settings.growth
        else:
            sigma /= settings.shrink
        rest = dual - pull - bound  # the gap of the plan as it is
        idle = 0 if rest < 0.999 * narrow else idle + 1
        narrow = min(rest, narrow)
        last = idle > settings.patience or sigma < least or steps >= goal.max_iter or p.stop[0] != 0
        if last or rest <= settings.promising * (goal.tol * found[0] + floor):
            primal, _ = repaired(p, share, 0.0, goal.repair_sweeps, flow, z)
            if primal < found[0]:
                found[0] = primal
                copy(flow, best_flow)
        if last or found[0] - found[1] <= goal.tol * found[0] + floor:
            break
        step = _Step(sigma, centre)
    return steps


@compiled()
def _solve_images(images, moves, goal, settings, known):  # type: ignore[no-untyped-def]
    cell = np.empty(images.x[0].size, dtype=np.int64)
    for m in range(images.x.shape[0]):
        p, u, best_flow, best_u, found = opened(images, moves, goal, known, m, cell)
        psi = found[3] if settings.warm else -1.0
        known.n_iter[m] = _solve(p, goal, settings, u, psi, images.floor[m], best_flow, best_u, found)
        store(known, m, p, cell, images.target[m], best_flow, best_u, found)
