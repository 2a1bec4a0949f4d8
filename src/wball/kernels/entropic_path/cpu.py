r"""The entropic path (:mod:`wball.kernels.entropic_path.reference`) on a CPU, compiled by numba.

The mathematics is that of the torch version. The differences are in the work:

* images are solved one at a time, each with its own number of steps;
* the support function without box, a convex function of the price alone, is solved first;
* only rows with mass and columns within their reach are stored (:mod:`wball.kernels.image_rows`);
* shares below ``e^-SPARSE`` of the largest in their row count as 0, so that a step of conjugate
  gradients at a low temperature visits one or two moves per row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from wball.kernels.books import Best, Problem
from wball.kernels.compiled import compiled, exp
from wball.kernels.entropic_path.reference import (
    CG_MAX,
    CG_TOL,
    LEVEL_TOL,
    LINGER,
    MAX_HALVINGS,
    RATIO,
)
from wball.kernels.image_rows import (
    copy,
    fill,
    improve,
    lower_bounds,
    opened,
    repaired,
    store,
    without_box,
)
from wball.kernels.price import narrowed, smooth_step
from wball.moves import Moves, StencilMoves

SPARSE = 32.0
"""Nats below the largest share of a row at which a share counts as 0: e^-32 is a hundredth of
float64's rounding."""


class _Damping(NamedTuple):
    """Regularisation of Newton's equation, relative to the residual."""

    damping: float


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``.

    Images of a GPU are solved on the host: steps in float64 that differ from image to image are
    hundreds of small launches and read-backs in torch, and a few milliseconds of one core.
    """
    return (
        None
        if isinstance(moves, StencilMoves)
        else "matrix costs are served by the torch kernel only"
    )


def entropic_path(
    problem: Problem, start: Tensor, tau_start: Tensor, max_iter: int, best: Best
) -> Tensor:
    """See :func:`wball.kernels.entropic_path.reference.entropic_path`."""
    damping = _Damping(problem.columns.damping)
    return improve(_follow_images, damping, problem, start, tau_start, max_iter, best)


class _Sparse(NamedTuple):
    """The moves that matter, row after row."""

    first: Any  # (R + 1,)
    end: Any
    fee: Any
    share: Any


@compiled(inner=True, fastmath={"contract", "nsz", "reassoc"})
def _exp_row(row, top, scale):  # type: ignore[no-untyped-def]
    """``exp((row - top) * scale)`` in place, 0 where that is below ``e^-SPARSE``; returns the
    sum."""
    total = 0.0
    for k in range(row.size):
        t = (row[k] - top) * scale
        row[k] = exp(t) if t > -SPARSE else 0.0
        total += row[k]
    return total


@compiled(inner=True)
def _side(p, j, u, column):  # type: ignore[no-untyped-def]
    """Of a linear column: -1 if it is full, 1 if it is drained, 0 if it sits at its kink."""
    if u < p.target[j]:
        return -1
    if u > p.target[j]:
        return 1
    return -1 if column > p.hi else 1 if column < p.lo else 0


@compiled(inner=True)
def _evaluate(p, u, psi, tau, share, columns, gradient):  # type: ignore[no-untyped-def]
    """Fill shares, columns and gradient; returns the dual, its derivative in ``psi``, and the
    residual."""
    n_rows, n_moves = p.end.shape
    fill(columns, 0.0)
    cost, rows = 0.0, 0.0
    for a in range(n_rows):
        row, top = share[a], -math.inf
        for k in range(n_moves):
            j = p.end[a, k]
            row[k] = u[j] - psi * p.fee[k] if j >= 0 else -math.inf
            top = max(top, row[k])
        total = _exp_row(row, top, 1.0 / tau)
        mean, m = 0.0, p.mass[a]
        for k in range(n_moves):
            if row[k] > 0.0:
                row[k] /= total
                columns[p.end[a, k]] += m * row[k]
                mean += row[k] * p.fee[k]
        cost += m * mean
        rows += m * (top + tau * math.log(total))
    dual = p.beyond - psi * p.budget - rows
    residual = 0.0
    for j in range(u.size):
        if p.linear:
            side = _side(p, j, u[j], columns[j])
            over = u[j] - p.target[j]
            dual += (p.hi if over < 0.0 else p.lo) * over
            gradient[j] = 0.0 if side == 0 else (p.hi if side < 0 else p.lo) - columns[j]
        else:
            # Columns are never negative anyway; without a clip at 0 the dual stays strongly concave
            # there.
            z = min(p.target[j] - u[j], p.hi)
            z = max(z, p.lo) if p.lo > 0.0 else z
            dual += 0.5 * (p.target[j] - z) ** 2 + u[j] * z
            gradient[j] = z - columns[j]
        residual = max(residual, abs(gradient[j]))
    slope = cost - p.budget
    if psi <= 0.0 and slope <= 0.0:
        slope = 0.0
    return dual, slope, max(residual, abs(slope) / max(p.budget, 1e-300))


@compiled(inner=True)
def _apply(s, weight, d, d_psi, out):  # type: ignore[no-untyped-def]
    """The plan's part of the Hessian times ``(d, d_psi)``; returns the part that belongs to
    ``psi``."""
    fill(out, 0.0)
    out_psi = 0.0
    for a in range(weight.size):
        mean = 0.0
        for e in range(s.first[a], s.first[a + 1]):
            mean += s.share[e] * (d[s.end[e]] - d_psi * s.fee[e])
        for e in range(s.first[a], s.first[a + 1]):
            change = weight[a] * s.share[e] * (d[s.end[e]] - d_psi * s.fee[e] - mean)
            out[s.end[e]] += change
            out_psi -= change * s.fee[e]
    return out_psi


@compiled(inner=True)
def _solve_newton(p, damping, u, psi, tau, share, columns, slope, residual, rhs, rhs_psi, d):  # type: ignore[no-untyped-def]
    """``-D''(u, psi) d = rhs`` by conjugate gradients with a diagonal preconditioner; returns
    ``d_psi``."""
    n_rows, n_moves = p.end.shape
    n = u.size
    weight = np.empty(n_rows)
    s = _Sparse(
        np.zeros(n_rows + 1, dtype=np.int64),
        np.empty(n_rows * n_moves, dtype=np.int64),
        np.empty(n_rows * n_moves),
        np.empty(n_rows * n_moves),
    )
    diagonal, column = np.zeros(n), np.zeros(n)
    curvature, count = 0.0, 0
    for a in range(n_rows):
        weight[a] = p.mass[a] / tau
        mean, square = 0.0, 0.0
        for k in range(n_moves):
            if share[a, k] > 0.0:
                j, part = p.end[a, k], share[a, k]
                s.end[count], s.fee[count], s.share[count] = j, p.fee[k], part
                count += 1
                diagonal[j] += weight[a] * part * (1 - part)
                mean += part * p.fee[k]
                square += part * p.fee[k] ** 2
        curvature += weight[a] * max(square - mean * mean, 0.0)
        s.first[a + 1] = count
    moving = np.ones(n)
    largest, low, high = 1e-12, math.inf, -math.inf
    for j in range(n):
        low, high = min(low, u[j]), max(high, u[j])
        if p.linear:
            moving[j] = 0.0 if _side(p, j, u[j], columns[j]) == 0 else 1.0
        else:
            free = p.target[j] - u[j]
            column[j] = 1.0 if free < p.hi and (free > p.lo or p.lo <= 0.0) else 0.0
        diagonal[j] += column[j]
        largest = max(largest, diagonal[j])
    # A pixel that no mass can reach or leave has no curvature at all: any positive number will do
    # there.
    ridge = max(1e-12 * largest, damping * residual / max(high - low, 1e-300))
    price_free = psi > 0.0 or slope > 0.0
    diagonal_psi = curvature if price_free and curvature > 0.0 else 1.0

    r, y, q, h = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    size = 0.0
    for j in range(n):
        diagonal[j] += ridge
        d[j] = 0.0
        r[j] = rhs[j] * moving[j]
        q[j] = r[j] / diagonal[j]
        size += r[j] * q[j]
    r_psi = rhs_psi if price_free else 0.0
    q_psi = r_psi / diagonal_psi
    size += r_psi * q_psi
    d_psi = 0.0
    goal = CG_TOL**2 * size
    for _ in range(CG_MAX):
        if p.stop[0] != 0:
            break
        h_psi = _apply(s, weight, q, q_psi, h)
        h_psi = h_psi + 1e-12 * diagonal_psi * q_psi if price_free else 0.0
        curve = q_psi * h_psi
        for j in range(n):
            h[j] = moving[j] * (h[j] + (column[j] + ridge) * q[j])
            curve += q[j] * h[j]
        if not (curve > 0.0 and size > goal):
            break
        step = size / curve
        new = 0.0
        for j in range(n):
            d[j] += step * q[j]
            r[j] -= step * h[j]
            y[j] = r[j] / diagonal[j]
            new += r[j] * y[j]
        d_psi += step * q_psi
        r_psi -= step * h_psi
        new += r_psi * r_psi / diagonal_psi
        if new <= goal:
            break
        turn = new / size
        for j in range(n):
            q[j] = y[j] + turn * q[j]
        q_psi = r_psi / diagonal_psi + turn * q_psi
        size = new
    return d_psi


@compiled(inner=True)
def _add_tangent(p, u, psi, tau, share, distance, rhs):  # type: ignore[no-untyped-def]
    """Add ``distance`` times the gradient's derivative in ``tau`` to ``rhs``; returns what ``psi``
    gets of it."""
    out = 0.0
    for a in range(p.end.shape[0]):
        mean = 0.0
        for k in range(p.end.shape[1]):
            if share[a, k] > 0.0:
                mean += share[a, k] * (u[p.end[a, k]] - psi * p.fee[k])
        for k in range(p.end.shape[1]):
            if share[a, k] > 0.0:
                change = (
                    p.mass[a] * share[a, k] * (u[p.end[a, k]] - psi * p.fee[k] - mean) / (tau * tau)
                )
                rhs[p.end[a, k]] += distance * change
                out -= distance * change * p.fee[k]
    return out


@compiled(inner=True)
def _stepped(p, u, columns, psi, d, d_psi, step, out):  # type: ignore[no-untyped-def]
    """The dual point a step away, kept on its side of every kink; returns its price."""
    for j in range(u.size):
        out[j] = u[j] + step * d[j]
        if p.linear:
            side = _side(p, j, u[j], columns[j])
            g = p.target[j]
            out[j] = g if side == 0 else min(out[j], g) if side < 0 else max(out[j], g)
    return max(psi + step * d_psi, 0.0)


@compiled(inner=True)
def _price_root(p, u, tau, share, columns, gradient):  # type: ignore[no-untyped-def]
    """The price at which the rows' cost meets the budget: bracketed Newton, feasible side."""
    least, total = math.inf, 0.0
    for k in range(p.fee.size):
        if p.fee[k] > 0.0:
            least, total = min(least, p.fee[k]), total + p.fee[k]
    if total == 0.0:
        return 0.0
    mass, smallest, largest = 0.0, math.inf, -math.inf
    for a in range(p.mass.size):
        mass += p.mass[a]
    for j in range(u.size):
        smallest, largest = min(smallest, u[j]), max(largest, u[j])
    # Above this price all but a fraction budget / (mass * dearest move) of every row stays.
    dearest = (largest - smallest + tau * math.log(max(mass * total / p.budget, 1.0))) / least
    low, high, psi = -1.0, dearest, 0.0
    for _ in range(60):
        _evaluate(p, u, psi, tau, share, columns, gradient)
        cost, variance = 0.0, 0.0
        for a in range(p.end.shape[0]):
            mean, square = 0.0, 0.0
            for k in range(p.fee.size):
                mean += share[a, k] * p.fee[k]
                square += share[a, k] * p.fee[k] ** 2
            cost += p.mass[a] * mean
            variance += p.mass[a] * max(square - mean * mean, 0.0)
        low, high = narrowed(psi, cost, p.budget, low, high)
        if (
            cost <= p.budget
            and (cost > (1 - 1e-3) * p.budget or psi == 0.0)
            or high - low <= 1e-15 * high
        ):
            break
        if p.stop[0] != 0:
            break
        psi = smooth_step(psi, cost, variance / tau, (1 - 5e-4) * p.budget, low, high)
    return high


@compiled(inner=True)
def _follow(p, goal, damping, start, tau_start, tau_end, offset, floor, best_flow, best_u, known):  # type: ignore[no-untyped-def]
    """Follow one image's path. ``known``: primal, dual, bound without entropy, price of the dual.
    Returns the steps."""
    n, shape = start.size, p.end.shape
    exact = tau_end == 0.0
    u, columns, gradient, share = start, np.empty(n), np.empty(n), np.zeros(shape)
    new_u, new_columns, new_gradient, new_share = (
        np.empty(n),
        np.empty(n),
        np.empty(n),
        np.zeros(shape),
    )
    rhs, d, z, flow = np.empty(n), np.empty(n), np.empty(n), np.empty(shape)
    tau = tau_start
    psi = _price_root(p, u, tau, share, columns, gradient)
    dual, slope, residual = _evaluate(p, u, psi, tau, share, columns, gradient)
    stuck, lingered, steps, best_entropy, total, largest = 0, 0, 0, 0.0, 0.0, 0.0
    for a in range(p.mass.size):
        total += p.mass[a]
    for j in range(n):
        largest = max(largest, abs(u[j]))
    for _ in range(goal.max_iter):
        final = tau <= tau_end * (1 + 1e-9)
        settled = residual <= min(max(tau, 1e-9), LEVEL_TOL) and not final or stuck >= 3
        settled = settled or lingered >= LINGER and not final
        lingered = 0 if settled else lingered + 1
        copy(gradient, rhs)
        rhs_psi = slope
        if settled:
            rhs_psi += _add_tangent(p, u, psi, tau, share, tau_end - tau, rhs)
        d_psi = _solve_newton(
            p, damping, u, psi, tau, share, columns, slope, residual, rhs, rhs_psi, d
        )
        steps += 1

        late = p.stop[0] != 0
        if (settled if exact else final) or late:
            primal, entropy = repaired(p, share, tau_end, goal.repair_sweeps, flow, z)
            if primal < known[0]:
                known[0], best_entropy = primal, entropy
                copy(flow, best_flow)
            for trial in range(2 if exact else 1):
                ahead = exact and trial == 0
                if ahead:
                    price = _stepped(p, u, columns, psi, d, d_psi, 1.0, new_u)
                else:
                    price = psi
                    copy(u, new_u)
                bound, plain = lower_bounds(p, new_u, price, tau_end)
                known[2] = max(known[2], plain)
                if bound > known[1]:
                    known[1], known[3] = bound, price
                    copy(new_u, best_u)
            scale = max(
                abs(known[0] - best_entropy + offset), goal.parts * (known[0] - 2 * best_entropy)
            )
            if late or known[0] - known[1] <= goal.tol * scale + floor:
                break

        moved = True
        if settled and not final:
            # Down one level along the tangent, or from where we are if that is better.
            lower = max(tau / RATIO, tau_end)
            travelled = (tau - lower) / max(tau - tau_end, 1e-300)
            new_psi = _stepped(p, u, columns, psi, d, d_psi, travelled, new_u)
            new_dual, new_slope, new_residual = _evaluate(
                p, new_u, new_psi, lower, new_share, new_columns, new_gradient
            )
            plain_dual, plain_slope, plain_residual = _evaluate(
                p, u, psi, lower, share, columns, gradient
            )
            if not (math.isfinite(new_dual) and new_dual >= plain_dual):
                new_psi, new_dual, new_slope, new_residual = (
                    psi,
                    plain_dual,
                    plain_slope,
                    plain_residual,
                )
                copy(u, new_u)
                copy(columns, new_columns)
                copy(gradient, new_gradient)
                copy(share, new_share)
            tau = lower
        else:
            # Stop where psi reaches 0: beyond it the direction was computed for another set of free
            # variables.
            step = min(psi / -d_psi, 1.0) if d_psi < 0.0 and psi > 0.0 else 1.0
            # The dual is a difference of sums, which round in proportion to their own size.
            noise, moved = 1e-14 * (abs(dual) + total * largest), False
            new_psi, new_dual, new_slope, new_residual = psi, dual, slope, residual
            for _ in range(MAX_HALVINGS):
                new_psi = _stepped(p, u, columns, psi, d, d_psi, step, new_u)
                new_dual, new_slope, new_residual = _evaluate(
                    p, new_u, new_psi, tau, new_share, new_columns, new_gradient
                )
                promised = slope * (new_psi - psi)
                for j in range(n):
                    promised += gradient[j] * (new_u[j] - u[j])
                if new_dual >= dual + 1e-4 * promised - noise:
                    moved = True
                    break
                step *= 0.4
        if moved:
            u, new_u = new_u, u
            columns, new_columns = new_columns, columns
            gradient, new_gradient = new_gradient, gradient
            share, new_share = new_share, share
            psi, dual, slope, residual = new_psi, new_dual, new_slope, new_residual
            stuck = 0 if settled else stuck
        else:
            stuck += 1
        # Temperatures below this are lost in float64's rounding of u / tau.
        largest = 0.0
        for j in range(n):
            largest = max(largest, abs(u[j]))
        if tau < 1e-13 * (1 + largest) or final and stuck >= 3:
            break
    return steps


@compiled()
def _follow_images(images, moves, goal, settings, known):  # type: ignore[no-untyped-def]
    cell = np.empty(images.x[0].size, dtype=np.int64)
    for m in range(images.x.shape[0]):
        p, start, best_flow, best_u, found = opened(images, moves, goal, known, m, cell)
        steps, done = 0, False
        if p.linear and images.tau_end[m] == 0.0:
            steps, done = without_box(p, goal, start, best_flow, best_u, found)
        if not done:
            steps += _follow(
                p, goal, settings.damping, start.copy(), images.tau_start[m], images.tau_end[m], images.offset[m],
                images.floor[m], best_flow, best_u, found,
            )  # fmt: skip
        known.n_iter[m] = steps
        store(known, m, p, cell, images.target[m], best_flow, best_u, found)
