r"""Projected Sinkhorn on a CPU: one image at a time, compiled by numba.

Arithmetic is float64 for all images, so that any tolerance can be met. The blocks of a sweep are in
:mod:`wball.kernels.projected_sinkhorn.sweeps`, the repair in :mod:`wball.kernels.factors`. This
module lays out an image, sweeps until an estimate of the gap is small enough, repairs the plan,
computes its gap, and writes the answer.

Rows with mass are packed contiguously, and so are the columns that mass can reach. The other
columns stay at 0, and their potential is ``u = w``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from wball.kernels.compiled import compiled, log
from wball.kernels.dispatch import PART, flat_moves, split
from wball.kernels.factors import (
    SUMS,
    TINY,
    Box,
    Factors,
    Flat,
    PlanLines,
    correlate,
    mass_box,
    repair,
    solve_price,
    weights,
)
from wball.kernels.projected_sinkhorn import (
    DOUBT,
    EXACT_SLACK,
    EXCESS,
    FIRST,
    LEAST,
    LESS,
    MARGIN,
    MEMORY,
    PARTS,
    PAUSE,
    PSI_TOL,
    SLACK,
    WIDEST_MARGIN,
    ProjectedSinkhorn,
    Projection,
    entropy_at_rest,
    sweeps,
)
from wball.kernels.projected_sinkhorn.sweeps import (
    ARRIVING,
    BETA,
    GIVE,
    GOAL,
    INVERSE,
    KEEP,
    MASS,
    NORM,
    RECEIVED,
    RINGS,
    SCRATCH,
    SENT,
    SPARE,
    TMP,
    A,
    E,
    X,
    Z,
)

# Indices of the scalar results of an image.
_COST, _PSI, _OBJECTIVE, _GAP, _ALLOWED, _RESIDUAL = range(6)


class _Settings(NamedTuple):
    """Settings shared by all images."""

    box: Box
    tol: float
    max_iter: int


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    x, factors = problem.x, problem.factors
    moves, shape = flat_moves(problem.moves), tuple(x.shape)
    lo, hi = problem.ends
    dtype = torch.float64 if factors else x.dtype
    slack = problem.unit * (SLACK if dtype == torch.float32 else EXACT_SLACK)
    settings = _Settings(Box(lo, hi, slack), float(problem.tol), max(problem.max_iter, 1))
    u, psi = problem.start()
    given = [
        t.detach().to(torch.promote_types(t.dtype, torch.float32)).numpy()
        for t in (x, problem.w, u)
    ]
    numbers_of = (problem.budget, problem.tau, psi)
    single = [t.detach().double().contiguous().numpy() for t in numbers_of]
    out = np.empty((2, *shape), dtype=np.float64 if factors else given[0].dtype)
    numbers, n_iter = np.zeros((shape[0], 6)), np.zeros(shape[0], dtype=np.int64)
    plan = np.ones((shape[0], 2, *shape[1:])) if factors else np.empty((shape[0], 2, 0, 0, 0))

    def work(start: int, stop: int) -> None:
        scratch, past = (moves.memory(n, shape) for n in (sweeps.RINGS, sweeps.PAST_ROWS))
        part = slice(start, stop)
        images = (np.array(t[part], dtype=np.float64, order="C") for t in given)
        result = np.empty((2, stop - start, *shape[1:]))
        _project_images(
            (*images, *(t[part] for t in single)), moves, settings,
            scratch, past, (result, numbers[part], n_iter[part], plan[part]),
        )  # fmt: skip
        out[:, part] = result

    split(shape[0], work, 20 * math.prod(shape[1:]) * len(problem.moves), PART)
    z, potential = (torch.from_numpy(a) for a in out)
    cost, psi_out, objective, gap, allowed, residual = torch.from_numpy(numbers).unbind(1)
    objective = objective + entropy_at_rest(x.detach(), problem.tau)
    keep, give = torch.from_numpy(plan).unbind(1) if factors else (None, None)
    return ProjectedSinkhorn(
        z, cost, potential, psi_out.to(dtype), objective, gap.clamp(min=0), allowed,
        residual.to(dtype), torch.from_numpy(n_iter), keep, give,
    )  # fmt: skip


# Finishing an image.


@compiled(inner=True, fastmath=SUMS)
def _repair(work, f, flat, weight, box):  # type: ignore[no-untyped-def]
    """Compute the factors of the repaired plan; ``SENT`` and ``RECEIVED`` hold the mass it
    exchanges."""
    pad, n = flat.pad, flat.n
    repair(f, flat, weight, box)
    keep, give = work[KEEP, pad : pad + n], work[GIVE, pad : pad + n]
    sent, received = work[SENT, pad : pad + n], work[RECEIVED, pad : pad + n]
    for i in range(n):
        sent[i] *= give[i]
    for i in range(n):
        received[i] *= keep[i]


@compiled(inner=True, fastmath=SUMS)
def _spent(work, flat, toll):  # type: ignore[no-untyped-def]
    """The cost ``<P, C>`` of the plan; ``toll`` is weight times cost of each move."""
    pad, n = flat.pad, flat.n
    a, e, tmp = work[A, pad : pad + n], work[E, pad : pad + n], work[TMP, pad : pad + n]
    keep, give, paid = (
        work[KEEP, pad : pad + n],
        work[GIVE, pad : pad + n],
        work[SCRATCH, pad : pad + n],
    )
    for i in range(n):
        tmp[i] = e[i] * keep[i]
    correlate(work[SCRATCH], work[TMP], pad, n, flat.shift, toll, flat.first, toll.size)
    total = 0.0
    for i in range(n):
        total += a[i] * give[i] * paid[i]
    return total


@compiled(inner=True, fastmath=SUMS)
def _divergence(work, pad, n, scale):  # type: ignore[no-untyped-def]
    """``KL(Q | P)`` of the repaired plan ``Q``, its moves scaled by ``scale``."""
    x, a, e = (
        work[X, pad : pad + n],
        work[A, pad : pad + n],
        work[E, pad : pad + n],
    )
    keep, give = work[KEEP, pad : pad + n], work[GIVE, pad : pad + n]
    sent, received = work[SENT, pad : pad + n], work[RECEIVED, pad : pad + n]
    total, scaled = 0.0, math.log(scale)
    for i in range(n):
        out, stay = scale * sent[i], max(x[i] - scale * sent[i], 0.0)
        total += out * (scaled + log(max(give[i], TINY))) + scale * received[i] * log(
            max(keep[i], TINY)
        )
        total += stay * log(max(stay, TINY) / max(a[i] * e[i], TINY))
    return total


@compiled(inner=True, fastmath=SUMS)
def _arrive(work, pad, n, scale, lo, hi):  # type: ignore[no-untyped-def]
    """Compute the point of the plan, in ``TMP``."""
    x, z = work[X, pad : pad + n], work[TMP, pad : pad + n]
    sent, received = work[SENT, pad : pad + n], work[RECEIVED, pad : pad + n]
    for i in range(n):
        z[i] = min(max(x[i] + scale * (received[i] - sent[i]), lo), hi)


# From images to flat images, and back.


@compiled(inner=True)
def _lay_out(work, image, tau, moves, ones, shift, back):  # type: ignore[no-untyped-def]
    """Fill the working memory and the shifts of the moves. Returns the places of rows with mass and
    of columns they reach, there and in the image."""
    x, w, u = image
    rows, columns, over, _, _, _, ring, (rr, rc, rs) = moves
    channels, full_height, full_width = x.shape
    top, bottom, left, right = mass_box(x)
    height, width = bottom - top + 2 * rr, right - left + 2 * rc
    plane = height * width
    n, pad = channels * plane, rs * plane + rr * width + rc
    for k in range(rows.size):
        shift[k] = over[k] * plane + rows[k] * width + columns[k]
        back[k] = -shift[k]
    for row in (X, E, A, TMP):  # whose margins are read
        line = work[row]
        for i in range(n + 2 * pad):
            line[i] = 0.0
    lit, lit_spots = np.empty(n, np.int64), np.empty(n, np.int64)
    reached, spots = np.empty(n, np.int64), np.empty(n, np.int64)
    count = 0
    for c in range(channels):
        for r in range(top, bottom):
            at = pad + (c * height + r - top + rr) * width + rc - left
            for j in range(left, right):
                if x[c, r, j] > 0.0:
                    work[X, at + j] = x[c, r, j]
                    work[MASS, count] = x[c, r, j]
                    lit[count] = at + j
                    lit_spots[count] = (c * full_height + r) * full_width + j
                    count += 1
    lit, lit_spots = lit[:count], lit_spots[:count]
    correlate(work[TMP], work[X], pad, n, back, ones, ring[0], ring[-1])
    count = 0
    for c in range(channels):
        for r in range(max(top - rr, 0), min(bottom + rr, full_height)):
            at = pad + (c * height + r - top + rr) * width + rc - left
            for j in range(max(left - rc, 0), min(right + rc, full_width)):
                if work[TMP, at + j] > 0.0:
                    work[GOAL, count] = w[c, r, j] / tau
                    work[BETA, count] = u[c, r, j] / tau
                    mass = work[X, at + j]
                    work[INVERSE, count] = 1.0 / mass if mass > 0.0 else 0.0
                    reached[count] = at + j
                    spots[count] = (c * full_height + r) * full_width + j
                    count += 1
    return n, pad, lit, lit_spots, reached[:count], spots[:count]


@compiled(inner=True)
def _write(work, tau, lo, hi, spots, point, potential):  # type: ignore[no-untyped-def]
    """Write point and potential to the flat image. Returns the residual."""
    residual = 0.0
    for i in range(spots.size):
        point[spots[i]], potential[spots[i]] = work[Z, i], tau * work[BETA, i]
        v = tau * (work[GOAL, i] - work[BETA, i])
        residual = max(residual, abs(work[Z, i] - min(max(v, lo), hi)))
    return residual


@compiled()
def _project_images(given, moves, settings, work, past, answer):  # type: ignore[no-untyped-def]
    """Project all images: points and potentials, numbers, sweeps, and the factors of the plans."""
    x, w, u, budget, tau, psi = given
    rows, _, _, fee, _, ring_cost, ring, _ = moves
    out, numbers, n_iter, factors = answer
    box, tol, max_iter = settings
    lo, hi, _ = box
    f = Factors(
        work[X], work[A], work[E], work[KEEP], work[GIVE],
        work[SENT], work[RECEIVED], work[SCRATCH], work[SPARE], work[TMP],
    )  # fmt: skip
    sizes = np.zeros(MEMORY)
    weight, ones = np.empty(fee.size), np.empty(fee.size)
    weights(fee, 0.0, ones)
    toll, shift, back = np.empty(fee.size), np.empty_like(rows), np.empty_like(rows)
    least = math.log(lo) if lo > 0.0 else -math.inf
    for m in range(x.shape[0]):
        heat, flat_x, flat_w, start = tau[m], x[m].reshape(-1), w[m].reshape(-1), u[m].reshape(-1)
        point, potential = out[0, m].reshape(-1), out[1, m].reshape(-1)
        mass, at_centre = 0.0, 0.0
        for i in range(flat_x.size):  # loops compile much faster than expressions of arrays
            mass += flat_x[i]
            at_centre += 0.5 * (flat_w[i] - flat_x[i]) ** 2
        single = mass <= 0.0 or budget[m] <= 0.0
        for i in range(flat_x.size):
            point[i], potential[i] = flat_x[i], start[i] if single else flat_w[i]
        numbers[m, _PSI], numbers[m, _OBJECTIVE], numbers[m, _ALLOWED] = (
            psi[m],
            at_centre,
            tol * at_centre,
        )
        keep, give = factors[m, 0].reshape(-1), factors[m, 1].reshape(-1)
        for i in range(give.size):
            give[i] = 0.0
        if single:
            continue

        n, pad, lit, lit_spots, reached, spots = _lay_out(
            work, (x[m], w[m], u[m]), heat, moves, ones, shift, back
        )
        count, near = reached.size, 0.0
        flat = Flat(pad, n, shift, back, fee, ring[1])
        for i in spots:
            near += 0.5 * (flat_w[i] - flat_x[i]) ** 2
        beyond = max(at_centre - near, 0.0)  # no mass reaches these columns
        lines = PlanLines(
            work[MASS, : lit.size], work, RINGS, 0,
            work[NORM, : lit.size], work[SCRATCH, : lit.size], work[SPARE, : lit.size],
        )  # fmt: skip
        price, log_heat = psi[m] / heat, math.log(heat)
        target, offers, wait, size, scale = (FIRST - MARGIN) * tol, 0, 0, at_centre, 1.0
        steps, log_sums, held, lowest, bold = 0, 0.0, 0, math.inf, 1.0
        while True:
            # Rows and price.
            middle, wide = sweeps.narrow(work, count)
            sweeps.exponentials(work, middle, reached)
            sweeps.rings(work, pad, n, shift, ones, ring, lit)
            miss = PSI_TOL * target * size / heat
            price, cost = solve_price(
                lines, price, budget[m], ring_cost, 2 if steps > 0 else 12, PSI_TOL, miss
            )
            sweeps.normalise(work, lit)
            weights(fee, price, weight)
            correlate(work[ARRIVING], work[A], pad, n, flat.back, weight, ring[0], ring[-1])
            sweeps.arrive(work, reached)
            # Columns.
            pressed = sweeps.pressure(work, count, heat, hi)
            margin = MARGIN * tol * size
            margin = min(margin / max(pressed, TINY), math.sqrt(2 * margin / count))
            margin = min(margin, MARGIN * budget[m] / count)
            margin = min(margin, WIDEST_MARGIN * (hi - lo)) if hi < math.inf else 0.0
            most = math.log(hi - margin)
            sweeps.solve_columns(work, count, log_heat, least, most, steps == 0)
            steps += 1
            last = wide or steps >= max_iter

            # An estimate of the gap after a repair, without the margin.
            misfit, outside, distance, inner = sweeps.judge(work, count, heat, lo, hi)
            about = misfit - margin * pressed
            about += heat * price * (abs(budget[m] - cost) + EXCESS * outside)
            # The size changes little from sweep to sweep.
            if steps == 1 or about <= 2 * target * size or last:
                log_sums = sweeps.log_sums(work, lit.size) + middle * mass
                entropy = heat * (inner - price * cost - log_sums)
                distance += beyond
                size = max(distance, PARTS * (distance - entropy)) + tol * at_centre
            if about <= target * size and steps >= wait or last:
                offers += 1
                _repair(work, f, flat, weight, box)
                for k in range(fee.size):
                    toll[k] = weight[k] * fee[k] if fee[k] < math.inf else 0.0
                spent = _spent(work, flat, toll)
                scale = min(budget[m] / max(spent, TINY), 1.0)
                spent *= scale
                divergence = _divergence(work, pad, n, scale)
                _arrive(work, pad, n, scale, lo, hi)
                sweeps.gather(work[Z], work[TMP], reached)
                misfit, _, distance, inner = sweeps.judge(work, count, heat, lo, hi)
                distance += beyond
                gap = misfit + heat * (price * (budget[m] - spent) + divergence)
                entropy = heat * (divergence + inner - price * spent - log_sums)
                allowed = tol * max(distance, PARTS * (distance - entropy)) + tol * tol * at_centre
                if gap <= allowed or last:
                    numbers[m, _COST], numbers[m, _OBJECTIVE] = spent, distance + entropy
                    numbers[m, _GAP], numbers[m, _ALLOWED] = gap, allowed
                    break
                sweeps.arrive(work, reached)
                target, wait = max(0.5 * target, LEAST * tol), steps + PAUSE * offers
            # Starting point of the next sweep.
            misled = about > DOUBT * max(lowest, target * size)
            if misled:
                bold *= LESS
            lowest = about if misled else min(lowest, about)
            sweeps.follow(work, count, reached, heat, log_heat, least, most, bold)
            held = sweeps.advance(work, past, count, -1 if steps == 1 or misled else held, sizes)

        n_iter[m] = steps
        numbers[m, _PSI] = heat * price
        numbers[m, _RESIDUAL] = _write(work, heat, lo, hi, spots, point, potential)
        if keep.size > 0:
            for i in range(count):
                keep[spots[i]] = work[KEEP, reached[i]]
            for i in range(lit.size):
                give[lit_spots[i]] = scale * work[GIVE, lit[i]]
