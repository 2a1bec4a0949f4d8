r"""The entropic path of :mod:`wball.kernels.entropic_path.reference` on a CPU: one image at a time, compiled by numba.

The mathematics is that of the torch version: Newton's method on the dual with conjugate gradients, level after level,
each entered along the tangent; plans are repaired and bounds kept as in :mod:`wball.solvers.projection` and
:mod:`wball.solvers.support`, with the support function written as the minimum of ``-<g, z>``. What differs is the work:

* the support function without box is the kink of a convex function of the price alone and is found first;
* an image stops when *it* is done, and takes as many steps as *it* needs;
* only rows with mass and columns within their reach exist. A column beyond reach stays at ``z = 0``, and its dual
  variable has a closed form (``u = w``, or ``u = g``);
* shares below ``e^-SPARSE`` of the largest in their row are 0. At low temperatures that leaves one or two moves a row,
  and a step of conjugate gradients walks over those alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, exp, split
from wball.moves import Moves, StencilMoves

SPARSE = 32.0
"""Nats below the largest share of a row at which a share counts as 0: e^-32 is a hundredth of float64's rounding."""


@dataclass(frozen=True)
class Best:
    """What is known about each image, in float64 and improved in place; a minimum is sought.

    Attributes:
        flow: the best plan, ``(B, C, K, H, W)``.
        primal: its objective.
        dual: the best lower bound of the optimum.
        hard: the best lower bound of the optimum without entropy.
        u: column potentials of that bound, ``(B, C, H, W)``.
        psi: price of that bound.
    """

    flow: Tensor
    primal: Tensor
    dual: Tensor
    hard: Tensor
    u: Tensor
    psi: Tensor


@dataclass(frozen=True)
class Tolerance:
    """When an image is done.

    That is, when ``primal - dual <= tol * max(|primal - entropy + offset|, parts * (primal - 2 entropy)) + floor``.
    """

    tol: float
    parts: float
    offset: Tensor
    floor: Tensor


class _Levels(NamedTuple):
    """Settings of :mod:`wball.kernels.entropic_path.reference`."""

    ratio: float
    level_tol: float
    cg_tol: float
    cg_max: int
    halvings: int
    repair_sweeps: int
    max_iter: int


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``.

    Images of a GPU are solved on the host: steps in float64 that differ from image to image are hundreds of small
    launches and read-backs in torch, and a few milliseconds of one core.
    """
    return None if isinstance(moves, StencilMoves) else "matrix costs are served by the torch kernel only"


def follow_path(
    x: Tensor,
    moves: StencilMoves,
    budget: Tensor,
    target: Tensor,
    box: tuple[float, float],
    start: Tensor,
    tau_start: Tensor,
    tau_end: Tensor,
    max_iter: int,
    tolerance: Tolerance,
    best: Best,
    *,
    linear: bool,
) -> Tensor:
    """Follow the path of every image and improve ``best``; returns the Newton steps used.

    Args:
        x: images with mass, ``(B, C, H, W)``.
        moves: the moves of the ground cost.
        budget: positive, per image.
        target: ``w`` of the quadratic columns, ``g`` of the linear ones.
        box: ``(lo, hi)``, possibly infinite.
        start: column potentials to start from.
        tau_start: temperature of the first level.
        tau_end: temperature of the problem; 0 is the exact one (for all images or none).
        max_iter: Newton steps.
        tolerance: when an image is done.
        best: what is known, improved in place.
        linear: whether the columns are linear. With an infinite ``hi``, only the kink is then searched for.
    """
    from wball import plan
    from wball.kernels.entropic_path import reference as path

    levels = _Levels(
        path.RATIO, path.LEVEL_TOL, path.CG_TOL, path.CG_MAX, path.MAX_HALVINGS, plan.REPAIR_SWEEPS, max_iter
    )
    down, across, price = (np.asarray(column) for column in zip(*moves, strict=True))
    reverse = np.asarray([-1 if back is None else back for back in moves.reverse])
    stencil = (down, across, price.astype(np.float64), reverse, 0)
    given = [
        t.detach().to(torch.float64).contiguous().numpy()
        for t in (x, budget, target, start, tau_start, tau_end, tolerance.offset, tolerance.floor)
    ]
    known = [t.numpy() for t in (best.flow, best.primal, best.dual, best.hard, best.u, best.psi)]
    n_iter = np.zeros(x.shape[0], dtype=np.int64)
    limits = (float(box[0]), float(box[1]), tolerance.tol, tolerance.parts)

    def work(first: int, last: int) -> None:
        part = slice(first, last)
        _follow_images(
            *(a[part] for a in given), *limits, *stencil, levels, linear, *(a[part] for a in known), n_iter[part]
        )

    split(x.shape[0], work, entries=1_000_000)
    return torch.from_numpy(n_iter)


class _Problem(NamedTuple):
    """One image: rows with mass, columns within reach."""

    mass: Any  # (R,)
    home: Any  # (R,): the row's own column
    row: Any  # (J,): the column's own row, or -1
    end: Any  # (R, K): column where the move ends, or -1
    price: Any  # (K,)
    reverse: Any  # (K,)
    stay: int
    target: Any  # (J,)
    lo: float
    hi: float
    budget: float
    linear: bool
    beyond: float  # value of the columns out of reach


class _Sparse(NamedTuple):
    """The moves that matter, row after row."""

    first: Any  # (R + 1,)
    end: Any
    price: Any
    share: Any


# Loops instead of array expressions: numba takes seconds to compile each of those.


@compiled(inner=True)
def _fill(values, number):  # type: ignore[no-untyped-def]
    flat = values.reshape(-1)
    for i in range(flat.size):
        flat[i] = number


@compiled(inner=True)
def _copy(source, into):  # type: ignore[no-untyped-def]
    a, b = source.reshape(-1), into.reshape(-1)
    for i in range(a.size):
        b[i] = a[i]


@compiled(inner=True, fastmath={"contract", "nsz", "reassoc"})
def _exp_row(row, top, scale):  # type: ignore[no-untyped-def]
    """``exp((row - top) * scale)`` in place, 0 where that is below ``e^-SPARSE``; returns the sum."""
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
    """Fill shares, columns and gradient; returns the dual, its derivative in ``psi``, and the residual."""
    n_rows, n_moves = p.end.shape
    _fill(columns, 0.0)
    cost, rows = 0.0, 0.0
    for a in range(n_rows):
        row, top = share[a], -math.inf
        for k in range(n_moves):
            j = p.end[a, k]
            row[k] = u[j] - psi * p.price[k] if j >= 0 else -math.inf
            top = max(top, row[k])
        total = _exp_row(row, top, 1.0 / tau)
        mean, m = 0.0, p.mass[a]
        for k in range(n_moves):
            if row[k] > 0.0:
                row[k] /= total
                columns[p.end[a, k]] += m * row[k]
                mean += row[k] * p.price[k]
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
            # Columns are never negative anyway; without a clip at 0 the dual stays strongly concave there.
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
    """The plan's part of the Hessian times ``(d, d_psi)``; returns the part that belongs to ``psi``."""
    _fill(out, 0.0)
    out_psi = 0.0
    for a in range(weight.size):
        mean = 0.0
        for e in range(s.first[a], s.first[a + 1]):
            mean += s.share[e] * (d[s.end[e]] - d_psi * s.price[e])
        for e in range(s.first[a], s.first[a + 1]):
            change = weight[a] * s.share[e] * (d[s.end[e]] - d_psi * s.price[e] - mean)
            out[s.end[e]] += change
            out_psi -= change * s.price[e]
    return out_psi


@compiled(inner=True)
def _solve_newton(p, levels, u, psi, tau, share, columns, slope, rhs, rhs_psi, d):  # type: ignore[no-untyped-def]
    """``-D''(u, psi) d = rhs`` by conjugate gradients with a diagonal preconditioner; returns ``d_psi``."""
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
                s.end[count], s.price[count], s.share[count] = j, p.price[k], part
                count += 1
                diagonal[j] += weight[a] * part * (1 - part)
                mean += part * p.price[k]
                square += part * p.price[k] ** 2
        curvature += weight[a] * max(square - mean * mean, 0.0)
        s.first[a + 1] = count
    moving = np.ones(n)
    largest = 1e-12
    for j in range(n):
        if p.linear:
            moving[j] = 0.0 if _side(p, j, u[j], columns[j]) == 0 else 1.0
        else:
            free = p.target[j] - u[j]
            column[j] = 1.0 if free < p.hi and (free > p.lo or p.lo <= 0.0) else 0.0
        diagonal[j] += column[j]
        largest = max(largest, diagonal[j])
    # A pixel that nobody can reach or leave has no curvature at all: any positive number will do there.
    ridge = 1e-12 * largest
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
    goal = levels.cg_tol**2 * size
    for _ in range(levels.cg_max):
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
    """Add ``distance`` times the gradient's derivative in ``tau`` to ``rhs``; returns what ``psi`` gets of it."""
    out = 0.0
    for a in range(p.end.shape[0]):
        mean = 0.0
        for k in range(p.end.shape[1]):
            if share[a, k] > 0.0:
                mean += share[a, k] * (u[p.end[a, k]] - psi * p.price[k])
        for k in range(p.end.shape[1]):
            if share[a, k] > 0.0:
                change = p.mass[a] * share[a, k] * (u[p.end[a, k]] - psi * p.price[k] - mean) / (tau * tau)
                rhs[p.end[a, k]] += distance * change
                out -= distance * change * p.price[k]
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
    for k in range(p.price.size):
        if p.price[k] > 0.0:
            least, total = min(least, p.price[k]), total + p.price[k]
    if total == 0.0:
        return 0.0
    mass, smallest, largest = 0.0, math.inf, -math.inf
    for a in range(p.mass.size):
        mass += p.mass[a]
    for j in range(u.size):
        smallest, largest = min(smallest, u[j]), max(largest, u[j])
    # Above this price all but a fraction budget / (mass * dearest move) of every row stays.
    dearest = (largest - smallest + tau * math.log(max(mass * total / p.budget, 1.0))) / least
    low, high, psi = 0.0, dearest, 0.0
    for _ in range(60):
        _evaluate(p, u, psi, tau, share, columns, gradient)
        over, variance = -p.budget, 0.0
        for a in range(p.end.shape[0]):
            mean, square = 0.0, 0.0
            for k in range(p.price.size):
                mean += share[a, k] * p.price[k]
                square += share[a, k] * p.price[k] ** 2
            over += p.mass[a] * mean
            variance += p.mass[a] * max(square - mean * mean, 0.0)
        if over > 0.0:
            low = psi
        else:
            high = psi
        if over <= 0.0 and (over > -1e-3 * p.budget or psi == 0.0) or high - low <= 1e-15 * high:
            break
        newton = psi + over * tau / max(variance, 1e-300)
        psi = newton if low < newton < high else 0.5 * (low + high)
    return high


# Plans and bounds ----------------------------------------------------------------------------------------------


@compiled(inner=True)
def _columns_of(p, flow, z):  # type: ignore[no-untyped-def]
    _fill(z, 0.0)
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            if flow[a, k] > 0.0:
                z[p.end[a, k]] += flow[a, k]


@compiled(inner=True)
def _cancel(p, flow):  # type: ignore[no-untyped-def]
    """Of opposite flows only the difference moves."""
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            if flow[a, k] > 0.0 and p.reverse[k] >= 0:
                b = p.row[p.end[a, k]]
                if b > a:
                    common = min(flow[a, k], flow[b, p.reverse[k]])
                    flow[a, k] -= common
                    flow[b, p.reverse[k]] -= common
                    flow[a, p.stay] += common
                    flow[b, p.stay] += common


@compiled(inner=True)
def _shrink(p, flow, share):  # type: ignore[no-untyped-def]
    """Scale all that moves."""
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            if k != p.stay:
                flow[a, p.stay] += (1 - share) * flow[a, k]
                flow[a, k] *= share


@compiled(inner=True)
def _into_box(p, flow, sweeps, z):  # type: ignore[no-untyped-def]
    """Send excess back along the moves it came by, recall what drained pixels sent: see ``Plan.repair``."""
    n_rows, n_moves = flow.shape
    # Where every pixel is full, nothing but rounding is ever left over and no sweep can remove it.
    rounding = 1e-13 * max(1.0, p.hi)
    n, tiny = z.size, 2.2250738585072014e-308
    easy, full, rate, rest = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    for sweep in range(sweeps + 1):
        _columns_of(p, flow, z)
        over, under = 0, 0
        for j in range(n):
            over += int(z[j] > p.hi + rounding)
            under += int(z[j] < p.lo - rounding)
        if over + under == 0:
            return
        if sweep == sweeps:
            break
        # The last sweeps return ever more than the excess, so that what circulates among full pixels dies out.
        more = 2.0 ** max(0, sweep - sweeps + 40)
        _fill(easy, 0.0)
        _fill(full, 0.0)
        for a in range(n_rows):
            room = max(p.hi - z[p.home[a]], 0.0)
            for k in range(n_moves):
                if flow[a, k] > 0.0 and k != p.stay:
                    easy[p.end[a, k]] += min(flow[a, k], room)
                    full[p.end[a, k]] += flow[a, k]
        for j in range(n):
            excess = more * (z[j] - p.hi) if z[j] > p.hi + rounding else 0.0
            enough = easy[j] >= excess
            rate[j] = excess / max(easy[j], tiny) if enough else 0.0
            rest[j] = 0.0 if enough else excess / max(full[j], tiny)
        for a in range(n_rows):
            room, own = max(p.hi - z[p.home[a]], 0.0), z[p.home[a]]
            recall, recall_rest = 0.0, 0.0
            if own < p.lo - rounding:
                lack, plenty, sent = more * (p.lo - own), 0.0, 0.0
                for k in range(n_moves):
                    if flow[a, k] > 0.0 and k != p.stay:
                        plenty += min(flow[a, k], max(z[p.end[a, k]] - p.lo, 0.0))
                        sent += flow[a, k]
                if plenty >= lack:
                    recall = lack / max(plenty, tiny)
                else:
                    recall_rest = lack / max(sent, tiny)
            for k in range(n_moves):
                if flow[a, k] > 0.0 and k != p.stay:
                    j, f = p.end[a, k], flow[a, k]
                    back = min(f, room) * rate[j] + f * rest[j]
                    called = min(f, max(z[j] - p.lo, 0.0)) * recall + f * recall_rest
                    returned = min(max(back, called), f)
                    flow[a, k] -= returned
                    flow[a, p.stay] += returned
    _shrink(p, flow, 0.0)


@compiled(inner=True)
def _repaired(p, share, tau_end, sweeps, flow, z):  # type: ignore[no-untyped-def]
    """The feasible plan near the shares, in ``flow``; returns its objective and its entropy term."""
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            flow[a, k] = p.mass[a] * share[a, k]
    if tau_end == 0.0:  # opposite flows are waste, but the entropy asks for them
        _cancel(p, flow)
    if p.hi < math.inf or p.lo > 0.0:
        _into_box(p, flow, sweeps, z)
    cost = 0.0
    for a in range(flow.shape[0]):
        for k in range(flow.shape[1]):
            cost += flow[a, k] * p.price[k]
    if cost > p.budget:
        _shrink(p, flow, p.budget / cost)
    _columns_of(p, flow, z)
    value = p.beyond
    for j in range(z.size):
        value += -p.target[j] * z[j] if p.linear else 0.5 * (p.target[j] - z[j]) ** 2
    entropy = 0.0
    if tau_end > 0.0:
        for a in range(flow.shape[0]):
            for k in range(flow.shape[1]):
                if flow[a, k] > 0.0:
                    entropy += flow[a, k] * math.log(flow[a, k] / p.mass[a])
    return value + tau_end * entropy, tau_end * entropy


@compiled(inner=True)
def _bounds(p, u, psi, tau_end):  # type: ignore[no-untyped-def]
    """Lower bounds of the optimum at ``tau_end`` and without entropy, sound for any ``u`` and ``psi >= 0``."""
    hard, soft, size = 0.0, 0.0, 0.0
    for a in range(p.end.shape[0]):
        top = -math.inf
        for k in range(p.end.shape[1]):
            if p.end[a, k] >= 0:
                top = max(top, u[p.end[a, k]] - psi * p.price[k])
        hard += p.mass[a] * top
        size += p.mass[a] * abs(top)
        if tau_end > 0.0:
            total = 0.0
            for k in range(p.end.shape[1]):
                if p.end[a, k] >= 0:
                    total += math.exp((u[p.end[a, k]] - psi * p.price[k] - top) / tau_end)
            soft += p.mass[a] * (top + tau_end * math.log(total))
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
    entropic = value - soft if tau_end > 0.0 else plain
    return entropic if math.isfinite(entropic) else -math.inf, plain if math.isfinite(plain) else -math.inf


# Without box ----------------------------------------------------------------------------------------------------


@compiled(inner=True)
def _best_moves(p, psi, choice):  # type: ignore[no-untyped-def]
    """Each row's best move at the price ``psi``, the cheapest of several; returns their cost and ``h(psi)``."""
    cost, value = 0.0, psi * p.budget
    for a in range(p.mass.size):
        top = -math.inf
        for k in range(p.price.size):  # cheapest first
            if p.end[a, k] >= 0 and p.target[p.end[a, k]] - psi * p.price[k] > top:
                top = p.target[p.end[a, k]] - psi * p.price[k]
                choice[a] = k
        cost += p.mass[a] * p.price[choice[a]]
        value += p.mass[a] * top
    return cost, value


@compiled(inner=True)
def _kink(p, max_iter, share):  # type: ignore[no-untyped-def]
    """The support function without box: the kink of ``h``, a plan there in ``share``, and a sound upper bound.

    Two lines bracket the kink; they are intersected until they meet. See :mod:`wball.solvers.support`.
    """
    n_rows = p.mass.size
    at_low, at_high, trial = (np.empty(n_rows, np.int64), np.empty(n_rows, np.int64), np.empty(n_rows, np.int64))
    least, smallest, largest, size = math.inf, math.inf, -math.inf, 0.0
    for k in range(p.price.size):
        least = min(least, p.price[k]) if p.price[k] > 0.0 else least
    for j in range(p.target.size):
        smallest, largest = min(smallest, p.target[j]), max(largest, p.target[j])
    for a in range(n_rows):
        size += p.mass[a] * abs(p.target[p.home[a]])
    low, high = 0.0, 2 * (largest - smallest) / (least if least < math.inf else 1.0) + 1e-30
    cost_low, h_low = _best_moves(p, low, at_low)
    cost_high, h_high = _best_moves(p, high, at_high)
    upper, blend, steps = min(h_low, h_high), 0.0, 1
    if cost_low <= p.budget:
        _copy(at_low, at_high)
    else:
        for step in range(max_iter):
            # Slopes budget - cost: negative on the left, not negative on the right.
            lines = h_low - h_high + (p.budget - cost_high) * high - (p.budget - cost_low) * low
            psi = lines / max(cost_low - cost_high, 1e-300)
            if step % 3 == 2 or not (low < psi < high):  # every third step halves, against creeping brackets
                psi = 0.5 * (low + high)
            cost, h = _best_moves(p, psi, trial)
            line = max(h_low + (p.budget - cost_low) * (psi - low), h_high - (p.budget - cost_high) * (high - psi))
            flat = h - line <= 1e-15 * (abs(h) + abs(h_low))
            upper = min(upper, h)
            steps += 1
            if cost <= p.budget:
                high, cost_high, h_high = psi, cost, h
                _copy(trial, at_high)
            else:
                low, cost_low, h_low = psi, cost, h
                _copy(trial, at_low)
            if flat and step % 3 < 2 or high - low <= 4e-16 * high:
                break
        if cost_low > cost_high:
            blend = min(max((p.budget - cost_high) / (cost_low - cost_high), 0.0), 1.0)
    _fill(share, 0.0)
    for a in range(n_rows):
        share[a, at_high[a]] += 1 - blend
        share[a, at_low[a]] += blend
    return upper + 1e-14 * (abs(upper) + size), steps


# One image -----------------------------------------------------------------------------------------------------


@compiled(inner=True)
def _problem(x, target, budget, down, across, price, reverse, stay, lo, hi, linear, cell):  # type: ignore[no-untyped-def]
    """Rows, columns and moves of an image; fills ``cell`` with the pixel of each column and returns its number."""
    channels, height, width = x.shape
    number = np.empty(x.size, dtype=np.int64)
    _fill(number, -1)
    n_rows = 0
    for c in range(channels):
        for r in range(height):
            for j in range(width):
                if x[c, r, j] > 0.0:
                    n_rows += 1
                    for k in range(price.size):
                        rr, jj = r + down[k], j + across[k]
                        if 0 <= rr < height and 0 <= jj < width:
                            number[(c * height + rr) * width + jj] = 0
    n_columns, beyond = 0, 0.0
    for i in range(x.size):
        w = target[i // (height * width), i // width % height, i % width]
        if number[i] == 0:
            number[i] = n_columns
            cell[n_columns] = i
            n_columns += 1
        elif not linear:
            beyond += 0.5 * w * w
    mass, home, row = np.empty(n_rows), np.empty(n_rows, dtype=np.int64), np.empty(n_columns, dtype=np.int64)
    end, wanted = np.empty((n_rows, price.size), dtype=np.int64), np.empty(n_columns)
    _fill(row, -1)
    _fill(end, -1)
    a = 0
    for i in range(x.size):
        c, r, j = i // (height * width), i // width % height, i % width
        if number[i] >= 0:
            wanted[number[i]] = target[c, r, j]
        if x[c, r, j] > 0.0:
            mass[a], home[a], row[number[i]] = x[c, r, j], number[i], a
            for k in range(price.size):
                rr, jj = r + down[k], j + across[k]
                if 0 <= rr < height and 0 <= jj < width:
                    end[a, k] = number[(c * height + rr) * width + jj]
            a += 1
    return _Problem(mass, home, row, end, price, reverse, stay, wanted, lo, hi, budget, linear, beyond)


@compiled(inner=True)
def _follow(p, start, tau_start, tau_end, levels, tol, parts, offset, floor, best_flow, best_u, known):  # type: ignore[no-untyped-def]
    """Follow one image's path. ``known``: primal, dual, bound without entropy, price of the dual. Returns the steps."""
    n, shape = start.size, p.end.shape
    exact = tau_end == 0.0
    u, columns, gradient, share = start, np.empty(n), np.empty(n), np.zeros(shape)
    new_u, new_columns, new_gradient, new_share = np.empty(n), np.empty(n), np.empty(n), np.zeros(shape)
    rhs, d, z, flow = np.empty(n), np.empty(n), np.empty(n), np.empty(shape)
    tau = tau_start
    psi = _price_root(p, u, tau, share, columns, gradient)
    dual, slope, residual = _evaluate(p, u, psi, tau, share, columns, gradient)
    stuck, steps, best_entropy, total, largest = 0, 0, 0.0, 0.0, 0.0
    for a in range(p.mass.size):
        total += p.mass[a]
    for j in range(n):
        largest = max(largest, abs(u[j]))
    for _ in range(levels.max_iter):
        final = tau <= tau_end * (1 + 1e-9)
        settled = residual <= min(max(tau, 1e-9), levels.level_tol) and not final or stuck >= 3
        _copy(gradient, rhs)
        rhs_psi = slope
        if settled:
            rhs_psi += _add_tangent(p, u, psi, tau, share, tau_end - tau, rhs)
        d_psi = _solve_newton(p, levels, u, psi, tau, share, columns, slope, rhs, rhs_psi, d)
        steps += 1

        if settled if exact else final:
            primal, entropy = _repaired(p, share, tau_end, levels.repair_sweeps, flow, z)
            if primal < known[0]:
                known[0], best_entropy = primal, entropy
                _copy(flow, best_flow)
            for trial in range(2 if exact else 1):
                ahead = exact and trial == 0
                if ahead:
                    price = _stepped(p, u, columns, psi, d, d_psi, 1.0, new_u)
                else:
                    price = psi
                    _copy(u, new_u)
                bound, plain = _bounds(p, new_u, price, tau_end)
                known[2] = max(known[2], plain)
                if bound > known[1]:
                    known[1], known[3] = bound, price
                    _copy(new_u, best_u)
            scale = max(abs(known[0] - best_entropy + offset), parts * (known[0] - 2 * best_entropy))
            if known[0] - known[1] <= tol * scale + floor:
                break

        moved = True
        if settled and not final:
            # Down one level along the tangent, or from where we are if that is better.
            lower = max(tau / levels.ratio, tau_end)
            travelled = (tau - lower) / max(tau - tau_end, 1e-300)
            new_psi = _stepped(p, u, columns, psi, d, d_psi, travelled, new_u)
            new_dual, new_slope, new_residual = _evaluate(
                p, new_u, new_psi, lower, new_share, new_columns, new_gradient
            )
            plain_dual, plain_slope, plain_residual = _evaluate(p, u, psi, lower, share, columns, gradient)
            if not (math.isfinite(new_dual) and new_dual >= plain_dual):
                new_psi, new_dual, new_slope, new_residual = psi, plain_dual, plain_slope, plain_residual
                _copy(u, new_u)
                _copy(columns, new_columns)
                _copy(gradient, new_gradient)
                _copy(share, new_share)
            tau = lower
        else:
            # Stop where psi reaches 0: beyond it the direction was computed for another set of free variables.
            step = min(psi / -d_psi, 1.0) if d_psi < 0.0 and psi > 0.0 else 1.0
            # The dual is a difference of sums, which round in proportion to their own size.
            noise, moved = 1e-14 * (abs(dual) + total * largest), False
            new_psi, new_dual, new_slope, new_residual = psi, dual, slope, residual
            for _ in range(levels.halvings):
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
def _follow_images(  # type: ignore[no-untyped-def]
    x, budget, target, start, tau_start, tau_end, offset, floor, lo, hi, tol, parts, down, across, price, reverse, stay,
    levels, linear, flow, primal, dual, hard, u, psi, n_iter,
):  # fmt: skip
    _, _, height, width = x.shape
    area = height * width
    cell = np.empty(x[0].size, dtype=np.int64)
    known = np.empty(4)
    for m in range(x.shape[0]):
        p = _problem(x[m], target[m], budget[m], down, across, price, reverse, stay, lo, hi, linear, cell)
        n = p.target.size
        begin, best_u, best_flow = np.empty(n), np.empty(n), np.zeros(p.end.shape)
        for t in range(n):
            i = cell[t]
            begin[t] = start[m, i // area, i // width % height, i % width]
        known[0], known[1], known[2], known[3] = primal[m], dual[m], hard[m], psi[m]
        n_iter[m] = 0
        if linear and tau_end[m] == 0.0:
            # Without box u = g is optimal; with it, that pair is tried first.
            share, trial, z = np.empty(p.end.shape), np.empty(p.end.shape), np.empty(n)
            upper, n_iter[m] = _kink(p, levels.max_iter, share)
            value, _ = _repaired(p, share, 0.0, levels.repair_sweeps, trial, z)
            if value < known[0]:
                known[0] = value
                _copy(trial, best_flow)
            known[1], known[2] = max(known[1], -upper), max(known[2], -upper)
        done = known[0] - known[1] <= tol * abs(known[0] + offset[m]) + floor[m]
        if not done and (hi < math.inf or not linear):
            n_iter[m] += _follow(
                p, begin, tau_start[m], tau_end[m], levels, tol, parts, offset[m], floor[m], best_flow, best_u, known
            )
        if known[0] < primal[m]:
            for c in range(x.shape[1]):
                for k in range(price.size):
                    for r in range(height):
                        for j in range(width):
                            flow[m, c, k, r, j] = 0.0
            for a in range(p.mass.size):
                i = cell[p.home[a]]
                for k in range(price.size):
                    flow[m, i // area, k, i // width % height, i % width] = best_flow[a, k]
        if known[1] > dual[m]:
            # Out of reach nothing arrives: u = w makes z(u) = 0, and u = g costs nothing.
            for c in range(x.shape[1]):
                for r in range(height):
                    for j in range(width):
                        u[m, c, r, j] = target[m, c, r, j]
            for t in range(n):
                i = cell[t]
                u[m, i // area, i // width % height, i % width] = best_u[t]
        primal[m], dual[m], hard[m], psi[m] = known[0], known[1], known[2], known[3]
