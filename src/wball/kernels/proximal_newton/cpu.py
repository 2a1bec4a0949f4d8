"""Exact plans (:mod:`wball.kernels.proximal_newton`) on a CPU: one image at a time, compiled by
numba.

Only rows with mass and columns within their reach exist (:mod:`wball.kernels.image_rows`), an image
takes as many steps as *it* needs, and conjugate gradients walk over lists of the moves in use.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball.cost import Moves, StencilMoves
from wball.kernels import proximal_newton as settings
from wball.kernels.column_problem import Best, Images, Problem
from wball.kernels.compiled import compiled, exp
from wball.kernels.dispatch import split
from wball.kernels.image_rows import (
    Goal,
    Window,
    allowed,
    copy,
    fill,
    lower_bounds,
    opened,
    repaired,
    store,
)
from wball.plan import REPAIR_SWEEPS


def why_not(x: Tensor, moves: Moves) -> str | None:
    """The reason why this kernel does not support such images, or ``None``. Images on a GPU are
    solved on the host."""
    return (
        None if isinstance(moves, StencilMoves) else "only the torch kernel supports matrix costs"
    )


class _NewtonSettings(NamedTuple):
    """The settings that depend on the columns, and whether the start is warm."""

    method: settings.Method
    warm: bool


class _Shares(NamedTuple):
    """The moves in use, by row: their number, their indices, and the share of each."""

    count: Any  # (R,)
    move: Any  # (R, K)
    part: Any  # (R, K)


class _ImageStep(NamedTuple):
    """The proximal step of one image."""

    sigma: float  # its length
    precision: float  # factor on the residual that it is solved to
    centre: _Shares  # the shares it starts from
    end: Any  # (R, K): where moves end; the number of columns if outside the image
    method: settings.Method


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`."""
    columns, limits, batch = problem.columns, problem.tolerance, len(problem.x)
    given = [t.detach().double().contiguous().numpy() for t in problem.images(start)]
    n_iter = np.zeros(batch, dtype=np.int64)
    state: Any = (Images, given), (Best, [values.numpy() for values in best])
    assert isinstance(problem.moves, StencilMoves)
    moves, chosen = _window(problem.moves), _NewtonSettings(settings.method(problem), warm)
    box, effort = (columns.lo, columns.hi, columns.linear), (max_iter, REPAIR_SWEEPS)

    def run(part: slice, stop: NDArray[np.int64]) -> None:
        goal = Goal(*box, limits.tol, limits.parts, *effort, stop)
        here, found = (kind(*(a[part] for a in arrays)) for kind, arrays in state)
        _solve_images(here, moves, goal, chosen, found, n_iter[part])

    begin = time.monotonic()
    run(slice(0, 0), np.zeros(1, dtype=np.int64))  # compile
    problem.deadline.put_off(time.monotonic() - begin)
    with problem.deadline.flag() as stop:
        split(batch, lambda first, last: run(slice(first, last), stop), entries=1_000_000)
    return torch.from_numpy(n_iter)


def _window(moves: StencilMoves) -> Window:
    """The moves, cheapest first, as arrays."""
    down, across, over, fee = (np.asarray(column) for column in zip(*moves, strict=True))
    reverse = np.asarray([-1 if back is None else back for back in moves.reverse])
    return Window(down, across, over, fee.astype(np.float64), reverse)


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
    """The ``z`` in ``[lo, hi]`` that minimises ``1/2 (w - z)^2 + u z``, whether it is inside the
    range (1 or 0), and the minimum."""
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
    """The gain of each move of row ``a``, and the largest gain."""
    top = -math.inf
    for k in range(toll.size):
        row[k] = gain[ends[a, k]] - toll[k]
        top = max(top, row[k])
    return top


@compiled(inner=True, fastmath={"contract", "nsz"})
def _evaluate(p, step, u, psi, shares, gradient):  # type: ignore[no-untyped-def]
    """Fill shares and gradient. Returns the dual, its derivative in ``psi``, the distance of the
    plan from the centre (with entropy, the size of its columns), and the proximal term."""
    n, sigma = u.size, step.sigma
    gain, toll = np.empty(n + 1), np.empty(p.fee.size)
    for j in range(n):
        gain[j] = sigma * u[j]
        gradient[j] = 0.0
    gain[n] = -math.inf
    for k in range(p.fee.size):
        toll[k] = sigma * (psi * p.fee[k])
    if p.tau > 0.0:
        cost, rows = _entropic_rows(p, step, gain, toll, shares, gradient)
        moved, pull = _norm(gradient), 0.0
    else:
        cost, rows, moved, pull = _proximal_rows(p, step, gain, toll, shares, gradient)
    dual = p.beyond - psi * p.budget - rows
    target, lo, hi = p.target, p.lo, p.hi
    for j in range(n):
        if p.linear:
            z, value = _linear_column(target[j], u[j], -gradient[j], lo, hi)
        else:
            z, _, value = _column(target[j], u[j], lo, hi)
        dual += value
        gradient[j] += z
    slope = cost - p.budget
    if psi <= 0.0 and slope <= 0.0:
        slope = 0.0
    return dual, slope, moved, pull


@compiled(inner=True, fastmath={"contract", "nsz"})
def _entropic_rows(p, step, gain, toll, shares, gradient):  # type: ignore[no-untyped-def]
    """Fill the shares, and subtract the columns of their plan from the gradient. Returns their cost
    and the rows' part of the dual."""
    n_rows, n_moves = p.end.shape
    cost, rows, row = 0.0, 0.0, np.empty(n_moves)
    for a in range(n_rows):
        top = _scores(gain, step.end, a, toll, row)
        total, used = 0.0, 0
        for k in range(n_moves):
            if row[k] > top - settings.SPARSE:
                shares.move[a, used], shares.part[a, used] = k, exp(row[k] - top)
                total += shares.part[a, used]
                used += 1
        shares.count[a] = used
        for i in range(used):
            shares.part[a, i] /= total
            sent = p.mass[a] * shares.part[a, i]
            cost += sent * p.fee[shares.move[a, i]]
            gradient[step.end[a, shares.move[a, i]]] -= sent
        rows += p.mass[a] * (top + math.log(total)) / step.sigma
    return cost, rows


@compiled(inner=True, fastmath={"contract", "nsz"})
def _proximal_rows(p, step, gain, toll, shares, gradient):  # type: ignore[no-untyped-def]
    """Likewise without entropy; also returns the distance from the centre and the proximal term.

    A row looks at all of its moves once. Most rows began with one move and find none better;
    otherwise moves in use are within 1 of the best, and they are few.
    """
    n_rows, n_moves = p.end.shape
    sigma, ends = step.sigma, step.end
    held_count, held_move, held_part = step.centre.count, step.centre.move, step.centre.part
    counts, move, parts = shares.count, shares.move, shares.part
    mass, fee = p.mass, p.fee
    near, values, held = np.empty(n_moves, np.int64), np.empty(n_moves), np.zeros(n_moves)
    cost, rows, moved, pull, row = 0.0, 0.0, 0.0, 0.0, np.empty(n_moves)
    for a in range(n_rows):
        top, k = _scores(gain, ends, a, toll, row), held_move[a, 0]
        if held_count[a] == 1 and row[k] >= top:
            counts[a], move[a, 0], parts[a, 0] = 1, k, 1.0
            gradient[ends[a, k]] -= mass[a]
            cost += mass[a] * fee[k]
            rows += mass[a] * top / sigma
            continue
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
                value += (values[i] - held[k]) * part
                paid += fee[k] * part
                gradient[ends[a, k]] -= m * part
                away += (part - held[k]) ** 2
        counts[a] = used
        for i in range(held_count[a]):
            k = held_move[a, i]
            away += held[k] ** 2 if row[k] <= t else 0.0
            held[k] = 0.0
        cost += m * paid
        rows += m * (value - 0.5 * away) / sigma
        pull += m * away / (2.0 * sigma)
        moved += m * m * away
    return cost, rows, math.sqrt(moved), pull


@compiled(inner=True)
def _normalise(shares):  # type: ignore[no-untyped-def]
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
            count[a], move[a, 0], part[a, 0] = 1, 0, 1.0


@compiled(inner=True)
def _write(p, shares, flow):  # type: ignore[no-untyped-def]
    """Write the plan of the shares, with one number for each move, to ``flow``."""
    count, move, part = shares.count, shares.move, shares.part
    fill(flow, 0.0)
    for a in range(count.size):
        for i in range(count[a]):
            flow[a, move[a, i]] = p.mass[a] * part[a, i]


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


@compiled(inner=True, fastmath={"contract", "nsz", "reassoc"})
def _direction(p, step, u, psi, shares, gradient, slope, stiffness, d):  # type: ignore[no-untyped-def]
    """Newton's step ``d`` by conjugate gradients with a diagonal preconditioner. Returns the step
    of ``psi``."""
    n_rows, method, linear, target = p.mass.size, step.method, p.linear, p.target
    counts, move, fees = shares.count, shares.move, p.fee
    # Linear columns at their kinks do not move: they are one entry after the others, always 0.
    n, edges = 0, move.size
    place, moving = np.empty(u.size, np.int64), np.empty(u.size, np.int64)
    for j in range(u.size):
        d[j] = 0.0
        place[j], moving[n] = n, j
        if not linear or u[j] != target[j] or gradient[j] != 0.0:
            n += 1
        else:
            place[j] = -1
    first, end = np.empty(n_rows + 1, np.int64), np.empty(edges, np.int64)
    fee, part, weight, score = np.empty((4, edges))
    diagonal, column = np.zeros(n + 1), np.empty(n)
    used, count, curvature = 0, 0, 0.0
    first[0] = 0
    for a in range(n_rows):
        ways, total, square = counts[a], 0.0, 0.0
        if ways > 1:  # rows with a single move are fixed
            # Shares of a row change by weights times scores, less their mean: equal weights, or
            # with entropy the shares.
            stiff = step.sigma * p.mass[a] * (1.0 if p.tau > 0.0 else ways)
            for i in range(ways):
                k, e = move[a, i], count + i
                j, fee[e] = place[p.end[a, k]], fees[k]
                end[e] = j if j >= 0 else n
                part[e] = shares.part[a, i] if p.tau > 0.0 else 1.0 / ways
                total += part[e] * fees[k]
                square += part[e] * fees[k] * fees[k]
                weight[e] = stiff * part[e]
                diagonal[end[e]] += weight[e] * (1.0 - part[e])
            curvature += stiff * (square - total * total)
            count += ways
            used += 1
            first[used] = count
    largest = 1e-200  # its inverse must be finite even if no move is in use
    for i in range(n):
        # Linear columns have no curvature.
        column[i] = 0.0 if linear else _column(target[moving[i]], u[moving[i]], p.lo, p.hi)[1]
        diagonal[i] += column[i]
        largest = max(largest, diagonal[i])
    free = psi > 0.0 or slope > 0.0
    diagonal_psi = curvature if free and curvature > 0.0 else 1.0

    r, q, h, total_step = np.empty(n), np.zeros(n + 1), np.empty(n + 1), np.zeros(n)
    r_psi = slope if free else 0.0
    q_psi = r_psi / diagonal_psi
    size, d_psi = r_psi * q_psi, 0.0
    for j in range(n):
        r[j] = gradient[moving[j]]
        ridge = max(1e-12 * largest, stiffness * step.sigma * abs(r[j]))
        column[j] += ridge
        diagonal[j] = 1.0 / (diagonal[j] + ridge)
        q[j] = r[j] * diagonal[j]
        size += r[j] * q[j]
    goal = method.cg_tol * method.cg_tol * size
    for _ in range(settings.CG_MAX):
        if p.stop[0] != 0:
            break
        for j in range(n):
            h[j] = column[j] * q[j]
        h_psi = 1e-12 * diagonal_psi * q_psi
        for a in range(used):
            mean = 0.0
            for e in range(first[a], first[a + 1]):
                score[e] = q[end[e]] - q_psi * fee[e]
                mean += part[e] * score[e]
            for e in range(first[a], first[a + 1]):
                change = weight[e] * (score[e] - mean)
                h[end[e]] += change
                h_psi -= change * fee[e]
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
            total_step[j] += length * q[j]
            r[j] -= length * h[j]
            new += r[j] * r[j] * diagonal[j]
        if new <= goal:
            break
        turn = new / size
        for j in range(n):
            q[j] = r[j] * diagonal[j] + turn * q[j]
        q_psi = r_psi / diagonal_psi + turn * q_psi
        size = new
    for j in range(n):
        d[moving[j]] = total_step[j]
    return d_psi


@compiled(inner=True)
def _solve_step(p, step, left, u, psi, shares, gradient):  # type: ignore[no-untyped-def]
    """Newton's method for one proximal step from ``u`` and ``psi``, at most ``left`` iterations;
    ``u``, ``shares`` and ``gradient`` end at its solution.

    Returns the price, an upper estimate of the plan's objective within the budget, the
    iterations used, and whether it is solved.
    """
    n, target, linear, method = u.size, p.target, p.linear, step.method
    new_u, new_gradient, d = np.empty(n), np.empty(n), np.empty(n)
    dual, slope, moved, pull = _evaluate(p, step, u, psi, shares, gradient)
    taken, stiffness = 0, method.stiffness
    off = settings.ROUNDING * step.sigma * _range(u) * p.mass.sum()
    while True:
        solved = _norm(gradient) <= method.settled * step.precision * moved + off
        solved = solved and abs(slope) <= settings.SPENT * step.precision * p.budget
        if linear and p.tau == 0.0:
            solved = solved and abs(slope) <= settings.SPENT_LINEAR * moved + off
            solved = solved and taken > 0  # or plans drift along prices that are never corrected
        if solved or taken >= min(settings.INNER, left) or p.stop[0] != 0:
            return psi, dual - pull + psi * abs(slope), taken, solved
        d_psi = _direction(p, step, u, psi, shares, gradient, slope, stiffness, d)
        taken += 1
        # Stop where psi reaches 0: beyond it the direction was computed for another set of free
        # variables.
        whole = length = min(psi / -d_psi, 1.0) if d_psi < 0.0 and psi > 0.0 else 1.0
        ascends = False
        for _ in range(settings.HALVINGS):
            new_psi = psi + length * d_psi
            new_psi = new_psi if new_psi > 1e-14 * psi else 0.0  # exactly 0, despite rounding
            promised = slope * (new_psi - psi)
            for j in range(n):
                new_u[j] = u[j] + length * d[j]
                if linear:  # on the same side of the kink
                    drained = u[j] > target[j] or u[j] == target[j] and gradient[j] > 0.0
                    new_u[j] = max(new_u[j], target[j]) if drained else min(new_u[j], target[j])
                promised += gradient[j] * (new_u[j] - u[j])
            new_dual, new_slope, moved, pull = _evaluate(
                p, step, new_u, new_psi, shares, new_gradient
            )
            if new_dual >= dual + 1e-4 * promised - 1e-14 * (abs(dual) + p.noise):
                ascends = True
                break
            # The point at which a linear slope along the direction would vanish.
            rise, bend = promised / length, new_slope * d_psi
            for j in range(n):
                bend += new_gradient[j] * d[j]
            length *= min(max(rise / (rise - bend), 0.1), 0.5) if bend < 0.0 else 0.5
        if not ascends:
            dual, slope, _, pull = _evaluate(p, step, u, psi, shares, gradient)
            return psi, dual - pull + psi * abs(slope), taken, False
        tighter = max(stiffness / settings.RELAX, method.stiffness)
        stiffness = settings.RELAX * stiffness if length == whole else tighter
        copy(new_u, u)
        copy(new_gradient, gradient)
        psi, dual, slope = new_psi, new_dual, new_slope


@compiled(inner=True)
def _solve(p, goal, chosen, u, best_flow, best_u, found):  # type: ignore[no-untyped-def]
    """Solve one image from ``u`` and the price that is known. Returns the steps used.

    ``found`` as in :func:`wball.kernels.image_rows.opened`.
    """
    n, shape, steps, method = u.size, p.end.shape, 0, chosen.method
    gradient, z, flow = np.empty(n), np.empty(n), np.empty(shape)
    shares, centre = _shares(shape), _shares(shape)
    _normalise(centre)  # all mass stays
    end = np.empty(shape, np.uint32)
    for a in range(shape[0]):
        for k in range(shape[1]):
            end[a, k] = p.end[a, k] if p.end[a, k] >= 0 else n
    exact = p.tau == 0.0
    coldest = math.inf if exact else 1.0 / p.tau
    sigma = min(method.first * (settings.WARM if chosen.warm else 1.0) / _range(u), coldest)
    step = _ImageStep(sigma, 1.0, centre, end, method)
    idle, narrow, entropy, psi = 0, math.inf, 0.0, found[3]
    while steps < goal.max_iter:
        psi, value, taken, solved = _solve_step(
            p, step, goal.max_iter - steps, u, psi, shares, gradient
        )
        steps += taken
        _normalise(shares)
        bound, plain = lower_bounds(p, u, psi)
        if bound > found[1]:
            found[1], found[3] = bound, psi
            copy(u, best_u)
        found[2] = max(found[2], plain)
        last, precision = steps >= goal.max_iter or p.stop[0] != 0, step.precision
        if exact:
            rest = value - bound  # the gap of the plan before its repair
            idle = 0 if rest < 0.999 * narrow else idle + 1
            narrow = min(rest, narrow)
            last = last or idle > settings.PATIENCE
            # Only rounding errors remain:
            if p.linear and solved:
                off = _norm(gradient) * _range(u)
                last = last or rest + off <= 3e-13 * (abs(value) + p.noise)
            shown = last or rest <= settings.PROMISING * allowed(p, goal, value, entropy)
            if not solved:
                sigma /= settings.SHRINK
            elif taken <= settings.QUICK:
                growth = settings.SLIDE if idle > 0 and taken <= 1 else settings.GROWTH
                sigma = min(sigma * growth, settings.MOST / _range(u))
        else:
            final, ends = sigma >= coldest, solved or taken < settings.INNER
            last = last or final and ends and precision <= settings.SHARPEST
            shown = last or final
            if ends:
                precision *= settings.SHARPER if final else 1.0
                sigma = min(settings.COOLING * sigma, coldest)
        if shown:
            _write(p, shares, flow)
            primal, spread = repaired(p, goal.repair_sweeps, flow, z)
            if primal < found[0]:
                found[0], entropy = primal, spread
                copy(flow, best_flow)
        enough = allowed(p, goal, found[0], entropy)
        if last or found[0] - found[1] <= enough:
            break
        if exact:
            precision = settings.SHARP * precision if shown and rest <= enough else 1.0
            if solved:
                shares, centre = centre, shares
        step = _ImageStep(sigma, precision, centre, end, method)
    return steps


@compiled()
def _solve_images(images, moves, goal, chosen, known, n_iter):  # type: ignore[no-untyped-def]
    cell = np.empty(images.x[0:1].size, np.int64)
    for m in range(images.x.shape[0]):
        p, u, best_flow, best_u, found = opened(images, moves, goal, known, m, cell)
        n_iter[m] = _solve(p, goal, chosen, u, best_flow, best_u, found)
        store(known, m, p, cell, images.target[m], best_flow, best_u, found)
