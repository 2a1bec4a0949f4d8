r"""Projected Sinkhorn on a CPU: one image at a time, compiled by numba.

Arithmetic is float64 whatever the images are, so that any tolerance can be met. The blocks of a sweep are in
:mod:`wball.kernels.projected_sinkhorn.sweeps`, the repair in :mod:`wball.kernels.factors`; here an image is laid out,
swept until a cheap estimate says that it is done, repaired, judged, and written back.

Rows without mass send nothing: rows with mass are packed contiguously, and so are the columns that mass can reach. The
others stay at 0, and their potential has a closed form, ``u = w``. Images whose potentials grow too wide to
do without logs (large ``lambda``) are continued by the torch version.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, log, split
from wball.kernels.compiled import why_not as why_not
from wball.kernels.factors import SUMS, TINY, Box, Factors, Flat, Schedule, correlate, repair
from wball.kernels.layout import LINEAR_SPREAD, PART, mass_box, stencil_of
from wball.kernels.projected_sinkhorn import (
    FAR,
    MARGIN,
    MEMORY,
    WIDEST_MARGIN,
    ProjectedSinkhorn,
    Projection,
    entropy_at_rest,
    excess,
    memory,
    reference,
    sweeps,
)

# What an image's answer comes down to.
_COST, _PSI, _OBJECTIVE, _GAP, _ALLOWED, _RESIDUAL = range(6)


class _Settings(NamedTuple):
    """What is the same for all images; see :mod:`wball.kernels.projected_sinkhorn.reference`."""

    box: Box
    schedule: Schedule
    tol: float
    parts: float
    max_iter: int
    first: float
    least: float
    price_tol: float
    momentum: float
    far: float
    less: float
    wild: float
    timid: float
    rounds: int
    drained: int
    longest: float
    doubt: float
    margin: float
    widest_margin: float
    excess: float
    harder: float


class _Given(NamedTuple):
    """A batch of problems."""

    x: Any
    w: Any
    u: Any
    budget: Any
    tau: Any
    psi: Any


class _Answer(NamedTuple):
    """Where the answers go: point and potential, numbers, sweeps, which images need logs, and the plans' factors."""

    out: Any
    numbers: Any
    n_iter: Any
    wide: Any
    factors: Any


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    x, factors = problem.x, problem.factors
    stencil, shape = stencil_of(problem.moves), tuple(x.shape)
    lo, hi = problem.ends
    dtype = torch.float64 if factors else x.dtype
    slack = problem.unit * (reference.SLACK if dtype == torch.float32 else reference.EXACT_SLACK)
    settings = _Settings(
        Box(lo, hi, slack, 0.0, slack),
        Schedule(*(np.asarray(column) for column in reference.SCHEDULE)),
        float(problem.tol), reference.PARTS, max(problem.max_iter, 1),
        reference.FIRST - MARGIN, reference.LEAST, reference.PSI_TOL, reference.MOMENTUM,
        FAR, reference.LESS, reference.WILD, reference.TIMID, reference.ROUNDS, reference.DRAINED,
        reference.LONGEST, reference.DOUBT,
        MARGIN, WIDEST_MARGIN, reference.EXCESS, reference.HARDER,
    )  # fmt: skip
    u, psi = problem.start()
    given = [
        t.detach().to(torch.promote_types(t.dtype, torch.float32)).numpy()
        for t in (x, problem.w, u)
    ]
    numbers_of = (problem.budget, problem.tau, psi)
    single = [t.detach().to(torch.float64).contiguous().numpy() for t in numbers_of]
    out = np.empty((2, *shape), dtype=np.float64 if factors else given[0].dtype)
    numbers, n_iter = np.zeros((shape[0], 6)), np.zeros(shape[0], dtype=np.int64)
    wide = np.zeros(shape[0], dtype=np.bool_)
    plan = np.ones((shape[0], 2, *shape[1:])) if factors else np.empty((shape[0], 2, 0, 0, 0))

    def work(start: int, stop: int) -> None:
        scratch = np.zeros(
            (sweeps.RINGS + max(stencil.rings, sweeps.FUSED + 1), stencil.length(shape))
        )
        past = np.zeros((memory.ROWS, stencil.length(shape)))
        for first in range(start, stop, PART):
            part = slice(first, min(stop, first + PART))
            image, target, potential = (
                np.array(t[part], dtype=np.float64, order="C") for t in given
            )
            result = np.empty((2, *image.shape))
            problems = _Given(image, target, potential, *(t[part] for t in single))
            answers = _Answer(result, numbers[part], n_iter[part], wide[part], plan[part])
            _project_images(problems, stencil.arrays, settings, scratch, past, answers)
            out[:, part] = result

    split(shape[0], work, entries=20 * math.prod(shape[1:]) * len(problem.moves))
    z, potential = (torch.from_numpy(a) for a in out)
    cost, psi_out, objective, gap, allowed, residual = torch.from_numpy(numbers).unbind(1)
    objective = objective + entropy_at_rest(x.detach(), problem.tau)
    gap = gap.clamp(min=0)
    answer = ProjectedSinkhorn(
        z, cost, potential, psi_out.to(dtype), objective, gap, allowed, residual.to(dtype),
        torch.from_numpy(n_iter),
    )  # fmt: skip
    if factors:
        gap[torch.from_numpy(wide)] = math.inf
        keep, give = torch.from_numpy(plan).unbind(1)
        return replace(answer, keep=keep, give=give)
    if wide.any():
        _continue_in_logs(answer, torch.from_numpy(wide), problem)
    return answer


def _continue_in_logs(answer: ProjectedSinkhorn, wide: Tensor, problem: Projection) -> None:
    """Let the torch version take over for the images in ``wide``, from where they are, and put its answers in place."""
    taken = answer.n_iter[wide]
    mine = {name: getattr(problem, name)[wide] for name in ("x", "w", "budget", "tau")}
    left = max(problem.max_iter - int(taken.max()), 1)
    rest = reference.projected_sinkhorn(
        replace(problem, **mine, u=answer.u[wide], psi=answer.psi[wide], max_iter=left)
    )
    for field in fields(answer):
        value = getattr(answer, field.name)
        if isinstance(value, Tensor):
            value[wide] = getattr(rest, field.name).to(value.dtype)
    answer.n_iter[wide] += taken


# Finishing an image.


@compiled(inner=True, fastmath=SUMS)
def _repair(work, f, flat, weight, settings, final):  # type: ignore[no-untyped-def]
    """The factors of the repaired plan; ``SENT`` and ``RECEIVED`` are what is then exchanged.

    ``False`` if that would take long and is not the ``final`` attempt: ``KEEP`` is then on its way to them.
    """
    pad, n = flat.pad, flat.n
    if settings.box.lo > 0.0 or not excess.drain(f, flat, weight, settings.box):
        if settings.box.lo <= 0.0 and not final:
            return False
        repair(f, flat, weight, settings.box, settings.schedule)
    keep, give = work[sweeps.KEEP, pad : pad + n], work[sweeps.GIVE, pad : pad + n]
    sent, received = work[sweeps.SENT, pad : pad + n], work[sweeps.RECEIVED, pad : pad + n]
    for i in range(n):
        sent[i] *= give[i]
    for i in range(n):
        received[i] *= keep[i]
    return True


@compiled(inner=True, fastmath=SUMS)
def _spent(work, pad, n, shift, weight, fee, first):  # type: ignore[no-untyped-def]
    """``<P, C>``."""
    a, e, tmp = (
        work[sweeps.A, pad : pad + n],
        work[sweeps.E, pad : pad + n],
        work[sweeps.TMP, pad : pad + n],
    )
    keep, give, paid = (
        work[sweeps.KEEP, pad : pad + n],
        work[sweeps.GIVE, pad : pad + n],
        work[sweeps.FIRST, pad : pad + n],
    )
    paid_for = np.zeros(fee.size)
    for k in range(first, fee.size):
        paid_for[k] = weight[k] * fee[k] if weight[k] > 0.0 else 0.0
    for i in range(n):
        tmp[i] = e[i] * keep[i]
    correlate(work[sweeps.FIRST], work[sweeps.TMP], pad, n, shift, paid_for, first, fee.size)
    total = 0.0
    for i in range(n):
        total += a[i] * give[i] * paid[i]
    return total


@compiled(inner=True, fastmath=SUMS)
def _divergence(work, pad, n, scale):  # type: ignore[no-untyped-def]
    """``KL(Q | P)`` of the repaired plan ``Q``, its moves scaled by ``scale``."""
    x, a, e = (
        work[sweeps.X, pad : pad + n],
        work[sweeps.A, pad : pad + n],
        work[sweeps.E, pad : pad + n],
    )
    keep, give = work[sweeps.KEEP, pad : pad + n], work[sweeps.GIVE, pad : pad + n]
    sent, received = work[sweeps.SENT, pad : pad + n], work[sweeps.RECEIVED, pad : pad + n]
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
    """The point, in ``TMP``."""
    x, z = work[sweeps.X, pad : pad + n], work[sweeps.TMP, pad : pad + n]
    sent, received = work[sweeps.SENT, pad : pad + n], work[sweeps.RECEIVED, pad : pad + n]
    for i in range(n):
        z[i] = min(max(x[i] + scale * (received[i] - sent[i]), lo), hi)


# From images to flat images, and back.


@compiled(inner=True)
def _lay_out(work, x, w, u, tau, box, rows, columns, ones, ring):  # type: ignore[no-untyped-def]
    """Fill the working memory; where rows with mass and columns within their reach lie, there and in the image."""
    channels, full_height, full_width = x.shape
    top, bottom, left, right = box
    rr, rc = 0, 0
    for k in range(rows.size):
        rr, rc = max(rr, abs(rows[k])), max(rc, abs(columns[k]))
    height, width = bottom - top + 2 * rr, right - left + 2 * rc
    n, pad = channels * height * width, rr * width + rc
    for row in (sweeps.X, sweeps.E, sweeps.A, sweeps.TMP):  # whose margins are read
        line = work[row]
        for i in range(n + 2 * pad):
            line[i] = 0.0
    lit, reached, spots = (
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.empty(n, dtype=np.int64),
    )
    count = 0
    for c in range(channels):
        for r in range(top, bottom):
            at = pad + (c * height + r - top + rr) * width + rc - left
            for j in range(left, right):
                if x[c, r, j] > 0.0:
                    work[sweeps.X, at + j] = x[c, r, j]
                    work[sweeps.MASS, count] = x[c, r, j]
                    lit[count] = at + j
                    count += 1
    lit = lit[:count]
    correlate(
        work[sweeps.TMP], work[sweeps.X], pad, n, -(rows * width + columns), ones, ring[0], ring[-1]
    )
    count = 0
    for c in range(channels):
        for r in range(max(top - rr, 0), min(bottom + rr, full_height)):
            at = pad + (c * height + r - top + rr) * width + rc - left
            for j in range(max(left - rc, 0), min(right + rc, full_width)):
                if work[sweeps.TMP, at + j] > 0.0:
                    work[sweeps.GOAL, count] = w[c, r, j] / tau
                    work[sweeps.BETA, count] = u[c, r, j] / tau
                    mass = work[sweeps.X, at + j]
                    work[sweeps.INVERSE, count] = 1.0 / mass if mass > 0.0 else 0.0
                    reached[count] = at + j
                    spots[count] = (c * full_height + r) * full_width + j
                    count += 1
    return n, pad, width, lit, reached[:count], spots[:count]


@compiled(inner=True)
def _copy(x, w, u, point, potential):  # type: ignore[no-untyped-def]
    """What holds where no mass gets to; the image's mass and the objective at its centre."""
    mass, at_centre = 0.0, 0.0
    for c in range(x.shape[0]):
        for r in range(x.shape[1]):
            for j in range(x.shape[2]):
                point[c, r, j], potential[c, r, j] = x[c, r, j], u[c, r, j]
                mass += x[c, r, j]
                at_centre += 0.5 * (w[c, r, j] - x[c, r, j]) * (w[c, r, j] - x[c, r, j])
    return mass, at_centre


@compiled(inner=True)
def _beyond(w, spots):  # type: ignore[no-untyped-def]
    """Half the squares of ``w`` where no mass gets to. ``spots`` are in order."""
    total, t = 0.0, 0
    for c in range(w.shape[0]):
        for r in range(w.shape[1]):
            for j in range(w.shape[2]):
                if t < spots.size and spots[t] == (c * w.shape[1] + r) * w.shape[2] + j:
                    t += 1
                else:
                    total += 0.5 * w[c, r, j] * w[c, r, j]
    return total


@compiled(inner=True)
def _write(work, tau, lo, hi, spots, point, potential):  # type: ignore[no-untyped-def]
    """Point and potential into the image. Returns the residual."""
    _, height, width = point.shape
    residual = 0.0
    for i in range(spots.size):
        row = spots[i] // width
        c, r, j = row // height, row % height, spots[i] % width
        point[c, r, j], potential[c, r, j] = work[sweeps.Z, i], tau * work[sweeps.BETA, i]
        v = tau * (work[sweeps.GOAL, i] - work[sweeps.BETA, i])
        residual = max(residual, abs(work[sweeps.Z, i] - min(max(v, lo), hi)))
    return residual


@compiled(inner=True)
def _write_factors(factors, work, reached, spots, lit, pad, width, box, scale, x):  # type: ignore[no-untyped-def]
    """Column and row factors of the repaired plan into images that are 1 elsewhere; moves are scaled by ``scale``."""
    _, height, columns = x.shape
    top, _, left, _ = box
    rr, rc = pad // width, pad % width
    stacked = box[1] - top + 2 * rr
    for i in range(spots.size):
        row = spots[i] // columns
        factors[0, row // height, row % height, spots[i] % columns] = work[sweeps.KEEP, reached[i]]
    for i in range(lit.size):
        line = (lit[i] - pad) // width
        c, r, j = line // stacked, line % stacked + top - rr, (lit[i] - pad) % width + left - rc
        factors[1, c, r, j] = scale * work[sweeps.GIVE, lit[i]]


@compiled(inner=True)
def _remember(work, past, count, held, sums, longest):  # type: ignore[no-untyped-def]
    """The next ``beta`` from ``NEW`` and the ``held`` steps before it, -1 to begin anew; how many there are then."""
    gram, eliminated, products, combination = sums
    if held < 0:
        memory.begin(work, past, count)
        gram[:] = 0.0
        return 0
    memory.remember(work, past, count, held % MEMORY, gram, products)
    memory.combine(gram, products, min(held + 1, MEMORY), eliminated, combination)
    memory.extrapolate(work, past, count, combination, longest)
    return held + 1


@compiled()
def _project_images(given, moves, settings, work, past, answer):  # type: ignore[no-untyped-def]
    x, w, u, budget, tau, psi = given
    rows, columns, fee, ring_cost, ring = (
        moves.rows,
        moves.columns,
        moves.fee,
        moves.ring_cost,
        moves.ring,
    )
    out, numbers, n_iter, wide, factors = answer
    lo, hi, tol, parts, max_iter = (
        settings.box.lo,
        settings.box.hi,
        settings.tol,
        settings.parts,
        settings.max_iter,
    )
    f = Factors(
        work[sweeps.X], work[sweeps.A], work[sweeps.E], work[sweeps.KEEP], work[sweeps.GIVE],
        work[sweeps.SENT], work[sweeps.RECEIVED], work[sweeps.FIRST], work[sweeps.SECOND], work[sweeps.TMP],
    )  # fmt: skip
    sums = (
        np.zeros((MEMORY, MEMORY)), np.zeros((MEMORY, MEMORY)),
        np.zeros(MEMORY), np.zeros(MEMORY),
    )  # fmt: skip
    weight, ones = np.empty(fee.size), np.empty(fee.size)
    for k in range(fee.size):
        ones[k] = 1.0 if fee[k] < math.inf else 0.0
    least = math.log(lo) if lo > 0.0 else -math.inf
    for m in range(x.shape[0]):
        box, heat = mass_box(x[m]), tau[m]
        single = box[1] == 0 or budget[m] <= 0.0
        mass, at_centre = _copy(x[m], w[m], u[m] if single else w[m], out[0, m], out[1, m])
        if single:
            numbers[m, _PSI] = psi[m]
            numbers[m, _OBJECTIVE] = at_centre
            numbers[m, _ALLOWED] = tol * at_centre
            if factors.size > 0:
                factors[m, 1] = 0.0
            continue

        n, pad, width, lit, reached, spots = _lay_out(
            work, x[m], w[m], u[m], heat, box, rows, columns, ones, ring
        )
        shift, count = rows * width + columns, reached.size
        flat = Flat(pad, n, shift, -shift, fee, ring[1])
        beyond, log_heat = _beyond(w[m], spots), math.log(heat)
        price, middle = psi[m] / heat, sweeps.extent(work, count)[0]
        target, offers, size, scale = settings.first * tol, 0, at_centre, 1.0
        steps, streak, log_sums, held, lowest, bold, severity = (
            0,
            0.0,
            0.0,
            0,
            math.inf,
            1.0,
            settings.excess,
        )
        drained, best = 0, math.inf
        while True:
            # Rows and price.
            if not sweeps.exponentials(work, middle, reached) <= (LINEAR_SPREAD / 2) ** 8:
                middle, reach = sweeps.extent(work, count)
                if not reach <= LINEAR_SPREAD / 2:
                    wide[m] = True
                    break
                sweeps.exponentials(work, middle, reached)
            sweeps.rings(work, pad, n, shift, ones, ring, lit)
            newton, tolerated = 2 if steps > 0 else 12, settings.price_tol
            miss = tolerated * target * size / heat
            price, cost = sweeps.solve_price(
                work, lit.size, price, budget[m], ring_cost, newton, miss, tolerated
            )
            sweeps.normalise(work, price, ring_cost, lit)
            for d in range(ring_cost.size):
                _, factor = sweeps.ring(ring_cost, d, price)
                for k in range(ring[d], ring[d + 1]):
                    weight[k] = factor * ones[k]
            correlate(
                work[sweeps.ARRIVING], work[sweeps.A], pad, n, flat.back, weight, ring[0], ring[-1]
            )
            sweeps.gather(work[sweeps.Z], work[sweeps.ARRIVING], reached)
            # Columns.
            pressed = sweeps.pressure(work, count, heat, hi)
            margin = settings.margin * tol * size
            margin = min(margin / max(pressed, TINY), math.sqrt(2 * margin / count))
            margin = min(margin, settings.widest_margin * (hi - lo)) if hi < math.inf else 0.0
            most = math.log(hi - margin)
            sweeps.solve_columns(work, count, middle, log_heat, least, most, steps == 0)
            steps += 1

            # About the gap after a repair, but for the margin: columns above hi will send mass back, unspent.
            misfit, outside, distance, inner = sweeps.estimate(work, count, heat, lo, hi)
            about = (
                misfit
                - margin * pressed
                + heat * price * (abs(budget[m] - cost) + settings.excess * outside)
            )
            strictly = about + (severity - settings.excess) * heat * price * outside
            # The size changes little from sweep to sweep.
            if steps == 1 or strictly <= 2 * target * size or steps >= max_iter:
                log_sums = sweeps.log_sums(work, lit.size) + middle * mass
                entropy = heat * (inner - price * cost - log_sums)
                size = (
                    max(distance + beyond, parts * (distance + beyond - entropy)) + tol * at_centre
                )
            if strictly <= target * size or steps >= max_iter:
                offers += 1
                final = offers == settings.rounds or steps >= max_iter
                gap, unspent = math.inf, math.inf
                if _repair(work, f, flat, weight, settings, final):
                    spent = _spent(work, pad, n, shift, weight, fee, ring[1])
                    scale = min(budget[m] / max(spent, TINY), 1.0)
                    spent *= scale
                    divergence = _divergence(work, pad, n, scale)
                    _arrive(work, pad, n, scale, lo, hi)
                    sweeps.gather(work[sweeps.Z], work[sweeps.TMP], reached)
                    misfit, distance, inner = sweeps.judge(work, count, heat, lo, hi)
                    distance += beyond
                    unspent = heat * price * (budget[m] - spent)
                    gap = misfit + unspent + heat * divergence
                    entropy = heat * (divergence + inner - price * spent - log_sums)
                    allowed = (
                        tol * max(distance, parts * (distance - entropy)) + tol * tol * at_centre
                    )
                    if gap <= allowed or final:
                        numbers[m, _COST], numbers[m, _OBJECTIVE] = spent, distance + entropy
                        numbers[m, _GAP], numbers[m, _ALLOWED] = gap, allowed
                        break
                if (
                    lo <= 0.0
                    and 2.0 * unspent >= gap
                    and drained < settings.drained
                    and gap <= settings.doubt * best
                ):
                    # What was sent back is what the plan lacks.
                    excess.absorb(work, count, reached)
                    held = _remember(
                        work, past, count, held if drained > 0 else -1, sums, settings.longest
                    )
                    drained, best, lowest = drained + 1, min(best, gap), math.inf
                    continue
                sweeps.gather(work[sweeps.Z], work[sweeps.ARRIVING], reached)
                target = max(0.5 * target, settings.least * tol)
                severity *= settings.harder
            # Where to sweep from next.
            misled = about > settings.doubt * max(lowest, target * size)
            if misled:
                bold *= 0.0 if sweeps.longest(work, count) > settings.wild else settings.less
            lowest = about if misled else min(lowest, about)
            if bold < settings.timid:  # momentum, restarted when a sweep turns back
                streak = 0.0 if misled or sweeps.turned(work, count) < 0.0 else streak + 1.0
                sweeps.extrapolate(work, count, min(streak / (streak + 3.0), settings.momentum))
                continue
            sweeps.follow(work, count, reached, heat, log_heat, least, most, bold, settings.far)
            held = _remember(
                work,
                past,
                count,
                -1 if steps == 1 or misled or drained > 0 else held,
                sums,
                settings.longest,
            )
            drained, best = 0, math.inf

        n_iter[m], numbers[m, _PSI] = steps, heat * price
        numbers[m, _RESIDUAL] = _write(work, heat, lo, hi, spots, out[0, m], out[1, m])
        if factors.size > 0 and not wide[m]:
            _write_factors(factors[m], work, reached, spots, lit, pad, width, box, scale, x[m])
