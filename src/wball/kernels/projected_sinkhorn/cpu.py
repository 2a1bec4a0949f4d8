r"""Projected Sinkhorn on a CPU: one image at a time, compiled by numba.

Arithmetic is float64 whatever the images are, so that any tolerance can be met. With ``E = exp(beta - middle)``,
``w_k = exp(-psi C_k / tau)`` and ``A_i = x_i / sum_k w_k E_{i + k}``, rows and columns are correlations with a small
kernel, as in ``entropic_plan/cpu.py``. What is left per pixel and sweep is one exponential for ``E`` and, for the
columns, a logarithm and an exponential: with ``log s_j = log(sum_k w_k A_{j - k}) - middle`` the logarithm ``v`` of
``z_j / tau`` solves

.. math::
    e^v + v = w_j / \tau + \log(s_j / \tau), \qquad \beta_j = clip(v + \log \tau,\ \log lo,\ \log hi) - \log s_j,

and a step of Halley's method from the ``v`` of the sweep before is exact enough once sweeps change little. Sweeps start
from extrapolated points as in the torch version.

Rows without mass send nothing, and what belongs to the others stands behind each other; likewise columns that mass can
reach. The others stay at 0, and their potential has a closed form, ``u = w``. Images whose potentials grow too wide to
do without logs (large ``lambda``) are continued by the torch version.

Every loop either only sums or writes to one or two arrays and reads few: with more than eight pairs of arrays that
could overlap, the compiler would not vectorise it.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from wball.kernels.compiled import compiled, exp, log, split
from wball.kernels.compiled import why_not as why_not
from wball.kernels.layout import GROUP, LINEAR_SPREAD, PART, Stencil, mass_box
from wball.kernels.projected_sinkhorn import ProjectedSinkhorn, reference
from wball.moves import StencilMoves

# Rows of the working memory; the rings follow.
_X, _E, _A, _ARRIVING, _KEEP, _GIVE, _SENT, _RECEIVED, _TMP = range(9)
# Of the columns that mass can reach, behind each other; likewise of the rows that have mass.
_GOAL, _BETA, _NEW, _LAST, _V, _Z, _FACTOR = range(9, 16)
_MASS, _NORM, _FIRST, _SECOND, _RINGS = range(16, 21)

# What an image's answer comes down to.
_COST, _PSI, _OBJECTIVE, _GAP, _ALLOWED, _RESIDUAL = range(6)

_FUSED = 5  # rings beside the first that one pass takes
_TINY = 1e-300
_SUMS = {"contract", "nsz", "reassoc", "nnan"}  # order of sums and maxima; there are no NaNs
_EXACT = {"contract", "nsz"}


def projected_sinkhorn(
    x: Tensor,
    w: Tensor,
    budget: Tensor,
    moves: StencilMoves,
    box: tuple[float, float] | None,
    tau: Tensor,
    *,
    u: Tensor,
    psi: Tensor,
    tol: float = 1e-4,
    max_iter: int = 500,
    factors: bool = False,
) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`.

    With ``factors`` images that would have to be continued in logs are left with an infinite gap.
    """
    stencil, shape = Stencil(moves), tuple(x.shape)
    rows, columns, price, _, ring_cost, ring = stencil.arrays
    lo, hi = (max(float(box[0]), 0.0), float(box[1])) if box is not None else (0.0, math.inf)
    dtype = torch.float64 if factors else x.dtype
    slack = reference.SLACK if dtype == torch.float32 else reference.EXACT_SLACK
    settings = (
        lo, hi, slack * max(1.0, hi if math.isfinite(hi) else 1.0), float(tol), reference.PARTS, max(max_iter, 1),
        np.array([reference.FIRST, reference.LEAST, reference.PSI_TOL, reference.MOMENTUM]),
        reference.ROUNDS, reference.REPAIR_SWEEPS,
    )  # fmt: skip
    given = [t.detach().to(x.dtype).numpy() for t in (x, w, u)]
    single = [t.detach().to(torch.float64).contiguous().numpy() for t in (budget, tau, psi)]
    out = np.empty((2, *shape), dtype=np.float64 if factors else given[0].dtype)
    numbers, n_iter = np.zeros((shape[0], 6)), np.zeros(shape[0], dtype=np.int64)
    wide = np.zeros(shape[0], dtype=np.bool_)
    plan = np.ones((shape[0], 2, *shape[1:])) if factors else np.empty((shape[0], 2, 0, 0, 0))

    def work(start: int, stop: int) -> None:
        scratch = np.zeros((_RINGS + max(stencil.rings, _FUSED + 1), stencil.length(shape)))
        for first in range(start, stop, PART):
            part = slice(first, min(stop, first + PART))
            image, target, potential = (np.array(t[part], dtype=np.float64, order="C") for t in given)
            result = np.empty((2, *image.shape))
            _project_images(
                image, target, potential, *(t[part] for t in single),
                rows, columns, price, ring_cost, ring, *settings,
                scratch, result, numbers[part], n_iter[part], wide[part], plan[part],
            )  # fmt: skip
            out[:, part] = result

    split(shape[0], work, entries=20 * math.prod(shape[1:]) * len(moves))
    z, potential = (torch.from_numpy(a) for a in out)
    cost, psi_out, objective, gap, allowed, residual = torch.from_numpy(numbers).unbind(1)
    answer = ProjectedSinkhorn(
        z, cost, potential, psi_out.to(dtype), objective, gap, allowed, residual.to(dtype),
        torch.from_numpy(n_iter),
    )  # fmt: skip
    if factors:
        gap[torch.from_numpy(wide)] = math.inf
        keep, give = torch.from_numpy(plan).unbind(1)
        return replace(answer, keep=keep, give=give)
    if wide.any():
        _continue_in_logs(answer, torch.from_numpy(wide), x, w, budget, moves, box, tau, tol, max_iter)
    return answer


def _continue_in_logs(
    answer: ProjectedSinkhorn,
    wide: Tensor,
    x: Tensor,
    w: Tensor,
    budget: Tensor,
    moves: StencilMoves,
    box: tuple[float, float] | None,
    tau: Tensor,
    tol: float,
    max_iter: int,
) -> None:
    """Let the torch version take over for the images in ``wide``, from where they are, and put its answers in place."""
    taken = answer.n_iter[wide]
    rest = reference.projected_sinkhorn(
        x[wide], w[wide], budget[wide], moves, box, tau[wide],
        u=answer.u[wide], psi=answer.psi[wide], tol=tol, max_iter=max(max_iter - int(taken.max()), 1),
    )  # fmt: skip
    for field in fields(answer):
        value = getattr(answer, field.name)
        if isinstance(value, Tensor):
            value[wide] = getattr(rest, field.name).to(value.dtype)
    answer.n_iter[wide] += taken


# The functions below work on the flat image between ``pad`` and ``pad + n``.


@compiled(inner=True, fastmath=_SUMS)
def _exponentials(work, middle, reached):  # type: ignore[no-untyped-def]
    """``_E``, and the sum of the eighth powers of the exponents, whose root bounds them: maxima do not vectorise."""
    e, beta = work[_FACTOR, : reached.size], work[_BETA, : reached.size]
    total = 0.0
    for i in range(reached.size):
        t = beta[i] - middle
        e[i] = exp(t)
        t *= t
        t *= t
        total += t * t
    for i in range(reached.size):
        work[_E, reached[i]] = e[i]
    return total


@compiled(inner=True)
def _extent(work, count):  # type: ignore[no-untyped-def]
    """The middle of ``beta`` and how far it goes from there."""
    low, high = math.inf, -math.inf
    for i in range(count):
        low, high = min(low, work[_BETA, i]), max(high, work[_BETA, i])
    return 0.5 * (low + high), 0.5 * (high - low)


@compiled(inner=True, fastmath=_SUMS)
def _correlate(out, values, pad, n, shift, weight, first, last):  # type: ignore[no-untyped-def]
    """``out[i] = sum_k weight[k] * values[i + shift[k]]`` over ``first <= k < last``, in groups of four moves."""
    o = out[pad : pad + n]
    for k in range(first, last, GROUP):
        s0, s1, s2, s3 = pad + shift[k], pad + shift[k + 1], pad + shift[k + 2], pad + shift[k + 3]
        a0, a1, a2, a3 = values[s0 : s0 + n], values[s1 : s1 + n], values[s2 : s2 + n], values[s3 : s3 + n]
        w0, w1, w2, w3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
        if k == first:
            for i in range(n):
                o[i] = w0 * a0[i] + w1 * a1[i] + w2 * a2[i] + w3 * a3[i]
        else:
            for i in range(n):
                o[i] += w0 * a0[i] + w1 * a1[i] + w2 * a2[i] + w3 * a3[i]
    for i in range(n if first >= last else 0):
        o[i] = 0.0


# ``lit`` are the places of rows with mass: ``_MASS``, ``_NORM`` and the rings, the first of which is ``E`` itself.


@compiled(inner=True)
def _rings(work, pad, n, shift, ones, ring, lit):  # type: ignore[no-untyped-def]
    """Per distinct cost, the sum of ``E`` over the moves of that cost."""
    for d in range(ring.size - 1):
        if d > 0:
            _correlate(work[_TMP], work[_E], pad, n, shift, ones, ring[d], ring[d + 1])
        source, out = work[_TMP if d > 0 else _E], work[_RINGS + d]
        for t in range(lit.size):
            out[t] = source[lit[t]]


@compiled(inner=True)
def _ring(ring_cost, d, price):  # type: ignore[no-untyped-def]
    """Cost and weight of ring ``d``, nothing if there is none."""
    return (ring_cost[d], math.exp(-price * ring_cost[d])) if d < ring_cost.size else (0.0, 0.0)


@compiled(inner=True, fastmath=_SUMS)
def _moments(work, count, price, ring_cost):  # type: ignore[no-untyped-def]
    """Cost of the plan at ``price`` and minus its derivative."""
    x, e = work[_MASS, :count], work[_RINGS, :count]
    cost, slope = 0.0, 0.0
    if ring_cost.size <= _FUSED + 1:
        (c0, t0), (c1, t1) = _ring(ring_cost, 1, price), _ring(ring_cost, 2, price)
        (c2, t2), (c3, t3) = _ring(ring_cost, 3, price), _ring(ring_cost, 4, price)
        c4, t4 = _ring(ring_cost, 5, price)
        r0, r1, r2 = work[_RINGS + 1, :count], work[_RINGS + 2, :count], work[_RINGS + 3, :count]
        r3, r4 = work[_RINGS + 4, :count], work[_RINGS + 5, :count]
        for i in range(count):
            b0, b1, b2, b3, b4 = t0 * r0[i], t1 * r1[i], t2 * r2[i], t3 * r3[i], t4 * r4[i]
            scale = 1.0 / (e[i] + (b0 + b1) + (b2 + b3) + b4)
            b0, b1, b2, b3, b4 = c0 * b0, c1 * b1, c2 * b2, c3 * b3, c4 * b4
            mean = (b0 + b1 + b2 + (b3 + b4)) * scale
            square = (c0 * b0 + c1 * b1 + c2 * b2 + (c3 * b3 + c4 * b4)) * scale
            cost += x[i] * mean
            slope += x[i] * (square - mean * mean)
        return cost, slope
    norm, first, second = work[_NORM, :count], work[_FIRST, :count], work[_SECOND, :count]
    for i in range(count):
        norm[i] = e[i]
        first[i] = second[i] = 0.0
    for d in range(1, ring_cost.size):
        r, c = work[_RINGS + d, :count], ring_cost[d]
        weight = math.exp(-price * c)
        for i in range(count):
            b = weight * r[i]
            norm[i] += b
            first[i] += c * b
            second[i] += c * c * b
    for i in range(count):
        scale = 1.0 / norm[i]
        mean = first[i] * scale
        cost += x[i] * mean
        slope += x[i] * (second[i] * scale - mean * mean)
    return cost, slope


@compiled(inner=True, fastmath=_SUMS)
def _normalise(work, price, ring_cost, lit):  # type: ignore[no-untyped-def]
    """The rows' normalisers in ``_NORM``, and ``_A``."""
    x, norm, e, share = (
        work[_MASS, : lit.size],
        work[_NORM, : lit.size],
        work[_RINGS, : lit.size],
        work[_FIRST, : lit.size],
    )
    for i in range(lit.size):
        norm[i] = e[i]
    for d in range(1, ring_cost.size):
        r, weight = work[_RINGS + d, : lit.size], math.exp(-price * ring_cost[d])
        for i in range(lit.size):
            norm[i] += weight * r[i]
    for i in range(lit.size):
        share[i] = x[i] / norm[i]
    for i in range(lit.size):
        work[_A, lit[i]] = share[i]


@compiled(inner=True, fastmath=_SUMS)
def _log_sums(work, count):  # type: ignore[no-untyped-def]
    """``sum_i x_i log(norm_i)``."""
    x, norm = work[_MASS, :count], work[_NORM, :count]
    total = 0.0
    for i in range(count):
        total += x[i] * log(norm[i])
    return total


@compiled(inner=True)
def _solve_price(work, count, price, budget, ring_cost, newton, miss, most):  # type: ignore[no-untyped-def]
    """The root of ``cost(price) = budget``: Newton on the logarithm of the cost, kept in a bracket.

    What is left of the budget may be worth ``miss``, and ``most`` of the budget.
    """
    low, high = -1.0, math.inf
    for attempt in range(newton + 1):
        cost, slope = _moments(work, count, price, ring_cost)
        tolerance = min(max(miss / max(price * budget, _TINY), 4e-15), most)
        if attempt == newton or cost <= budget and (cost >= budget * (1 - tolerance) or price == 0.0):
            break
        target = budget * (1 - tolerance / 2)
        if cost <= budget:
            high = price
        else:
            low = price
        step = max(price + cost * math.log(cost / target) / slope, 0.0) if cost > 0.0 and slope > 0.0 else -1.0
        if not (low < step < min(high, 100 * price + 100)):
            step = 2 * price + 1 if math.isinf(high) else (max(low, 0.0) + high) / 2
        price = step
    return price, cost


@compiled(inner=True)
def _gather(out, values, places):  # type: ignore[no-untyped-def]
    for i in range(places.size):
        out[i] = values[places[i]]


@compiled(inner=True, fastmath=_SUMS)
def _first_logs(work, count, middle, log_tau):  # type: ignore[no-untyped-def]
    """A start for ``v`` from either asymptote of its equation: ``y - e^y`` where ``y`` is small, else ``log(y)``."""
    v, goal, arriving = work[_V, :count], work[_GOAL, :count], work[_Z, :count]
    for i in range(count):
        y = goal[i] + log(max(arriving[i], _TINY)) - middle - log_tau
        v[i] = y - min(exp(min(y, 1.0)), 0.5) if y < 1.0 else log(max(y, 1.0))


@compiled(inner=True, fastmath=_SUMS)
def _column_step(work, count, middle, log_tau, least, most):  # type: ignore[no-untyped-def]
    """One of Halley's steps on ``v``, and ``beta`` there in ``_NEW``. Returns the sum of the steps' fourth powers."""
    v, new, goal, arriving = work[_V, :count], work[_NEW, :count], work[_GOAL, :count], work[_Z, :count]
    total = 0.0
    for i in range(count):
        log_s = log(max(arriving[i], _TINY)) - middle
        o = exp(v[i])
        f, slope = o + v[i] - (goal[i] + log_s - log_tau), 1.0 + o
        step = f * slope / (slope * slope - 0.5 * f * o)
        total += step * step * step * step
        after = v[i] - step
        v[i] = after
        new[i] = min(max(after + log_tau, least), most) - log_s
    return total


@compiled(inner=True)
def _solve_columns(work, count, middle, log_tau, least, most, fresh):  # type: ignore[no-untyped-def]
    """The columns' block: ``_NEW`` from what arrives, in ``_Z``."""
    for attempt in range(8):
        if attempt == 0 and fresh:
            _first_logs(work, count, middle, log_tau)
        moved = _column_step(work, count, middle, log_tau, least, most)
        if moved <= 0.02**4:  # the largest step is below 0.02, and its cube is what is left
            return
        if attempt == 0 and moved > 1.0:  # from afar Halley's steps may go astray
            _first_logs(work, count, middle, log_tau)


@compiled(inner=True, fastmath=_SUMS)
def _estimate(work, count, tau, lo, hi):  # type: ignore[no-untyped-def]
    """Sums over the image: misfit, mass outside the box, distance, ``<beta, z>``."""
    e, arriving = work[_FACTOR, :count], work[_Z, :count]
    goal, beta = work[_GOAL, :count], work[_BETA, :count]
    misfit, outside, distance, inner = 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        z = e[i] * arriving[i]
        kept = min(max(z, lo), hi)
        v = tau * (goal[i] - beta[i])
        c = min(max(v, lo), hi)
        away = kept - c
        misfit += away * (0.5 * away - (v - c))
        outside += abs(z - kept)
        off = tau * goal[i] - z
        distance += 0.5 * off * off
        inner += beta[i] * z
    return misfit, outside, distance, inner


@compiled(inner=True, fastmath=_SUMS)
def _turned(work, count):  # type: ignore[no-untyped-def]
    """Negative if the sweep turned back."""
    beta, new, last = work[_BETA, :count], work[_NEW, :count], work[_LAST, :count]
    total = 0.0
    for i in range(count):
        total += (new[i] - beta[i]) * (new[i] - last[i])
    return total


@compiled(inner=True, fastmath=_SUMS)
def _extrapolate(work, count, weight):  # type: ignore[no-untyped-def]
    """The next ``beta`` along the last step."""
    beta, new, last = work[_BETA, :count], work[_NEW, :count], work[_LAST, :count]
    for i in range(count):
        beta[i] = new[i] + weight * (new[i] - last[i])
        last[i] = new[i]


@compiled(inner=True, fastmath=_SUMS)
def _judge(work, count, tau, lo, hi):  # type: ignore[no-untyped-def]
    """Sums over the image at the point in ``_Z``: misfit, distance, ``<beta, z>``."""
    z, goal, beta = work[_Z, :count], work[_GOAL, :count], work[_BETA, :count]
    misfit, distance, inner = 0.0, 0.0, 0.0
    for i in range(count):
        v = tau * (goal[i] - beta[i])
        c = min(max(v, lo), hi)
        away = z[i] - c
        misfit += away * (0.5 * away - (v - c))
        off = tau * goal[i] - z[i]
        distance += 0.5 * off * off
        inner += beta[i] * z[i]
    return misfit, distance, inner


@compiled(inner=True, fastmath=_SUMS)
def _exchange(work, pad, n, shift, back, weight, first):  # type: ignore[no-untyped-def]
    """``_SENT`` and ``_RECEIVED``: what each pixel would send if ``give`` were 1, and get if ``keep`` were 1."""
    a, e, tmp = work[_A, pad : pad + n], work[_E, pad : pad + n], work[_TMP, pad : pad + n]
    keep, give = work[_KEEP, pad : pad + n], work[_GIVE, pad : pad + n]
    sent, received = work[_SENT, pad : pad + n], work[_RECEIVED, pad : pad + n]
    for i in range(n):
        tmp[i] = e[i] * keep[i]
    _correlate(work[_SENT], work[_TMP], pad, n, shift, weight, first, shift.size)
    for i in range(n):
        sent[i] *= a[i]
    for i in range(n):
        tmp[i] = a[i] * give[i]
    _correlate(work[_RECEIVED], work[_TMP], pad, n, back, weight, first, shift.size)
    for i in range(n):
        received[i] *= e[i]


@compiled(inner=True, fastmath=_SUMS)
def _broken(work, pad, n, lo, hi):  # type: ignore[no-untyped-def]
    """How many columns lie outside the box. Margins, where x and z are 0, do not count as below it."""
    x, keep, give = work[_X, pad : pad + n], work[_KEEP, pad : pad + n], work[_GIVE, pad : pad + n]
    sent, received = work[_SENT, pad : pad + n], work[_RECEIVED, pad : pad + n]
    broken = 0.0
    for i in range(n):
        z = x[i] - give[i] * sent[i] + keep[i] * received[i]
        broken += 1.0 if z > hi else 0.0
        broken += 1.0 if (z < lo) & (x[i] > 0.0) else 0.0
    return broken


@compiled(inner=True, fastmath=_EXACT)
def _tighten(work, pad, n, lo, hi, slack, share, more):  # type: ignore[no-untyped-def]
    """Factors that would keep the box if only ``share`` of what a pixel exchanges the other way were counted on.

    Pixels outside the box go ``more`` times as far inside it.
    """
    x, keep, give = work[_X, pad : pad + n], work[_KEEP, pad : pad + n], work[_GIVE, pad : pad + n]
    sent, received, tmp = work[_SENT, pad : pad + n], work[_RECEIVED, pad : pad + n], work[_TMP, pad : pad + n]
    every = share == 0.0
    for i in range(n):
        tmp[i] = keep[i]
    for i in range(n):
        z = x[i] - give[i] * sent[i] + keep[i] * received[i]
        room = max((hi - x[i] + share * give[i] * sent[i] - more * (z - hi)) / max(received[i], _TINY), 0.0)
        keep[i] = min(keep[i], room) if every or z > hi + slack else keep[i]
    if lo > 0.0:
        for i in range(n):
            z = x[i] - give[i] * sent[i] + tmp[i] * received[i]
            spare = max((x[i] - lo + share * tmp[i] * received[i] - more * (lo - z)) / max(sent[i], _TINY), 0.0)
            give[i] = min(give[i], spare) if every or z < lo - slack else give[i]


@compiled(inner=True, fastmath=_EXACT)
def _repair(work, pad, n, shift, back, weight, first, lo, hi, slack, sweeps):  # type: ignore[no-untyped-def]
    """``_KEEP`` and ``_GIVE`` such that the box holds; ``_SENT`` and ``_RECEIVED`` are then what is exchanged."""
    x, keep, give = work[_X, pad : pad + n], work[_KEEP, pad : pad + n], work[_GIVE, pad : pad + n]
    sent, received = work[_SENT, pad : pad + n], work[_RECEIVED, pad : pad + n]
    kept, had_sent = work[_FIRST, pad : pad + n], work[_SECOND, pad : pad + n]
    for i in range(n):
        keep[i] = 1.0
        give[i] = 1.0
    _exchange(work, pad, n, shift, back, weight, first)
    for sweep in range(sweeps + 1):
        if _broken(work, pad, n, lo - slack, hi + slack) == 0.0:
            break
        final = sweep == sweeps
        if final:
            for i in range(n):
                kept[i] = keep[i]
                had_sent[i] = give[i] * sent[i]
        # What circulates among full pixels would take forever to die out if no one gave back more than the excess.
        more = 0.0 if final or sweep < 6 else 2.0 ** min(sweep - 6, 10)
        _tighten(work, pad, n, lo, hi, slack, 0.0 if final else 1.0, more)
        if final:
            # ``received`` does not depend on ``keep``, nor ``give`` on anything where lo is 0.
            _exchange(work, pad, n, shift, back, weight, first)
            if lo <= 0.0:
                way = 0.0
                for i in range(n):
                    excess = x[i] - had_sent[i] + kept[i] * received[i] - hi
                    if excess > slack:
                        below = max(hi - (x[i] - give[i] * sent[i] + keep[i] * received[i]), 0.0)
                        way = max(way, excess / (excess + below))
                for i in range(n):
                    keep[i] = kept[i] + way * (keep[i] - kept[i])
                    sent[i] = had_sent[i] + way * (give[i] * sent[i] - had_sent[i])
            break
        _exchange(work, pad, n, shift, back, weight, first)
    for i in range(n):
        sent[i] *= give[i]
    for i in range(n):
        received[i] *= keep[i]


@compiled(inner=True, fastmath=_SUMS)
def _spent(work, pad, n, shift, weight, price, first):  # type: ignore[no-untyped-def]
    """``<P, C>``."""
    a, e, tmp = work[_A, pad : pad + n], work[_E, pad : pad + n], work[_TMP, pad : pad + n]
    keep, give, paid = work[_KEEP, pad : pad + n], work[_GIVE, pad : pad + n], work[_FIRST, pad : pad + n]
    priced = np.zeros(price.size)
    for k in range(first, price.size):
        priced[k] = weight[k] * price[k] if weight[k] > 0.0 else 0.0
    for i in range(n):
        tmp[i] = e[i] * keep[i]
    _correlate(work[_FIRST], work[_TMP], pad, n, shift, priced, first, price.size)
    total = 0.0
    for i in range(n):
        total += a[i] * give[i] * paid[i]
    return total


@compiled(inner=True, fastmath=_SUMS)
def _divergence(work, pad, n, share):  # type: ignore[no-untyped-def]
    """``KL(Q | P)`` of the repaired plan ``Q``, its moves scaled by ``share``."""
    x, a, e = work[_X, pad : pad + n], work[_A, pad : pad + n], work[_E, pad : pad + n]
    keep, give = work[_KEEP, pad : pad + n], work[_GIVE, pad : pad + n]
    sent, received = work[_SENT, pad : pad + n], work[_RECEIVED, pad : pad + n]
    total, scaled = 0.0, math.log(share)
    for i in range(n):
        out, stay = share * sent[i], max(x[i] - share * sent[i], 0.0)
        total += out * (scaled + log(max(give[i], _TINY))) + share * received[i] * log(max(keep[i], _TINY))
        total += stay * log(max(stay, _TINY) / max(a[i] * e[i], _TINY))
    return total


@compiled(inner=True, fastmath=_SUMS)
def _arrive(work, pad, n, share, lo, hi):  # type: ignore[no-untyped-def]
    """The point, in ``_TMP``."""
    x, z = work[_X, pad : pad + n], work[_TMP, pad : pad + n]
    sent, received = work[_SENT, pad : pad + n], work[_RECEIVED, pad : pad + n]
    for i in range(n):
        z[i] = min(max(x[i] + share * (received[i] - sent[i]), lo), hi)


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
    for row in (_X, _E, _A, _TMP):  # whose margins are read
        line = work[row]
        for i in range(n + 2 * pad):
            line[i] = 0.0
    lit, reached, spots = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    count = 0
    for c in range(channels):
        for r in range(top, bottom):
            at = pad + (c * height + r - top + rr) * width + rc - left
            for j in range(left, right):
                if x[c, r, j] > 0.0:
                    work[_X, at + j] = x[c, r, j]
                    work[_MASS, count] = x[c, r, j]
                    lit[count] = at + j
                    count += 1
    lit = lit[:count]
    _correlate(work[_TMP], work[_X], pad, n, -(rows * width + columns), ones, ring[0], ring[-1])
    count = 0
    for c in range(channels):
        for r in range(max(top - rr, 0), min(bottom + rr, full_height)):
            at = pad + (c * height + r - top + rr) * width + rc - left
            for j in range(max(left - rc, 0), min(right + rc, full_width)):
                if work[_TMP, at + j] > 0.0:
                    work[_GOAL, count] = w[c, r, j] / tau
                    work[_BETA, count] = work[_LAST, count] = u[c, r, j] / tau
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
        point[c, r, j], potential[c, r, j] = work[_Z, i], tau * work[_BETA, i]
        v = tau * (work[_GOAL, i] - work[_BETA, i])
        residual = max(residual, abs(work[_Z, i] - min(max(v, lo), hi)))
    return residual


@compiled(inner=True)
def _write_factors(factors, work, reached, spots, lit, pad, width, box, share, x):  # type: ignore[no-untyped-def]
    """Column and row factors of the repaired plan into images that are 1 elsewhere; moves are scaled by ``share``."""
    _, height, columns = x.shape
    top, _, left, _ = box
    rr, rc = pad // width, pad % width
    stacked = box[1] - top + 2 * rr
    for i in range(spots.size):
        row = spots[i] // columns
        factors[0, row // height, row % height, spots[i] % columns] = work[_KEEP, reached[i]]
    for i in range(lit.size):
        line = (lit[i] - pad) // width
        c, r, j = line // stacked, line % stacked + top - rr, (lit[i] - pad) % width + left - rc
        factors[1, c, r, j] = share * work[_GIVE, lit[i]]


@compiled()
def _project_images(  # type: ignore[no-untyped-def]
    x, w, u, budget, tau, psi, rows, columns, price, ring_cost, ring,
    lo, hi, slack, tol, parts, max_iter, shares, rounds, repairs, work, out, numbers, n_iter, wide, factors,
):  # fmt: skip
    first_share, least_share, price_share, momentum = shares
    weight, ones = np.empty(price.size), np.empty(price.size)
    for k in range(price.size):
        ones[k] = 1.0 if price[k] < math.inf else 0.0
    least, most = math.log(lo) if lo > 0.0 else -math.inf, math.log(hi)
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

        n, pad, width, lit, reached, spots = _lay_out(work, x[m], w[m], u[m], heat, box, rows, columns, ones, ring)
        shift, count = rows * width + columns, reached.size
        back = -shift
        beyond, log_heat = _beyond(w[m], spots), math.log(heat)
        toll, middle = psi[m] / heat, _extent(work, count)[0]
        target, offers, size, share = first_share * tol, 0, at_centre, 1.0
        steps, streak, log_sums = 0, 0.0, 0.0
        while True:
            # Rows and price.
            if not _exponentials(work, middle, reached) <= (LINEAR_SPREAD / 2) ** 8:
                middle, reach = _extent(work, count)
                if not reach <= LINEAR_SPREAD / 2:
                    wide[m] = True
                    break
                _exponentials(work, middle, reached)
            _rings(work, pad, n, shift, ones, ring, lit)
            newton, miss = 2 if steps > 0 else 12, price_share * target * size / heat
            toll, cost = _solve_price(work, lit.size, toll, budget[m], ring_cost, newton, miss, price_share)
            _normalise(work, toll, ring_cost, lit)
            for d in range(ring_cost.size):
                _, factor = _ring(ring_cost, d, toll)
                for k in range(ring[d], ring[d + 1]):
                    weight[k] = factor * ones[k]
            _correlate(work[_ARRIVING], work[_A], pad, n, back, weight, ring[0], ring[-1])
            _gather(work[_Z], work[_ARRIVING], reached)
            # Columns.
            _solve_columns(work, count, middle, log_heat, least, most, steps == 0)
            steps += 1

            # About the gap after a repair: columns above hi will send mass back, unspent.
            misfit, outside, distance, inner = _estimate(work, count, heat, lo, hi)
            about = misfit + heat * toll * (abs(budget[m] - cost) + 1.5 * outside)
            # The size changes little from sweep to sweep.
            if steps == 1 or about <= 2 * target * size or steps >= max_iter:
                log_sums = _log_sums(work, lit.size) + middle * mass
                entropy = heat * (inner - toll * cost - log_sums)
                size = max(distance + beyond, parts * (distance + beyond - entropy)) + tol * at_centre
            if about <= target * size or steps >= max_iter:
                _repair(work, pad, n, shift, back, weight, ring[1], lo, hi, slack, repairs)
                spent = _spent(work, pad, n, shift, weight, price, ring[1])
                share = min(budget[m] / max(spent, _TINY), 1.0)
                spent *= share
                divergence = _divergence(work, pad, n, share)
                _arrive(work, pad, n, share, lo, hi)
                _gather(work[_Z], work[_TMP], reached)
                misfit, distance, inner = _judge(work, count, heat, lo, hi)
                distance += beyond
                gap = misfit + heat * (toll * (budget[m] - spent) + divergence)
                entropy = heat * (divergence + inner - toll * spent - log_sums)
                allowed = tol * max(distance, parts * (distance - entropy)) + tol * tol * at_centre
                offers += 1
                if gap <= allowed or offers == rounds or steps >= max_iter:
                    numbers[m, _COST], numbers[m, _OBJECTIVE] = spent, distance + entropy
                    numbers[m, _GAP], numbers[m, _ALLOWED] = gap, allowed
                    break
                target = max(0.5 * target, least_share * tol)
            # Momentum, restarted when a sweep turns back.
            streak = 0.0 if steps == 1 or _turned(work, count) < 0.0 else streak + 1.0
            _extrapolate(work, count, min(streak / (streak + 3.0), momentum))

        n_iter[m], numbers[m, _PSI] = steps, heat * toll
        numbers[m, _RESIDUAL] = _write(work, heat, lo, hi, spots, out[0, m], out[1, m])
        if factors.size > 0 and not wide[m]:
            _write_factors(factors[m], work, reached, spots, lit, pad, width, box, share, x[m])
