r"""The entropic plan on a CPU: one image at a time per thread, compiled by numba.

The plan of :mod:`wball.kernels.entropic_plan` is a product of three factors: with ``E_j = exp(b_j + q_j)``,
``w_k = exp(-psi C_k)`` and ``A_i = x_i / sum_k w_k E_{i + k}``,

.. math::
    P_{i, i+k} = A_i\, w_k\, E_{i+k},

so normalisers, column sums, box factors and costs are correlations of one image with the small kernel ``w``: one
multiplication a move and *no exponential*; the box step on ``q`` is a multiplication of ``E`` as well. All of it runs
in float64 whatever the images are, which leaves room for potentials that differ by ``LINEAR_SPREAD`` nats; images
beyond that take the same steps on the logarithms of ``E`` and ``A``, at one exponential a move.

Memory: an image is cropped to the box around its mass, widened by the reach of the moves, and laid out flat with all
channels behind each other. The margins are wide enough that a move is a constant shift of the whole flat image, so that
every inner loop runs over contiguous numbers and vectorises; a digit's black frame costs nothing. The working set is a
few dozen such images per thread and stays in the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from wball.kernels.compiled import compiled, exp, split
from wball.kernels.compiled import why_not as why_not
from wball.kernels.entropic_plan import COST_TOL, REPAIR_COUNTED, EntropicPlan, PlanRequest
from wball.kernels.factors import (
    EXACT,
    SUMS,
    TINY,
    Box,
    Factors,
    Flat,
    Schedule,
    correlate,
    receive,
    repair,
)
from wball.kernels.layout import LINEAR_SPREAD, PART, mass_box, stencil_of
from wball.kernels.price import narrowed, smooth_step

# Rows of the working memory; the rings follow.
_X, _E, _A, _NORM, _Q, _KEEP, _GIVE, _SENT, _RECEIVED, _TMP, _FIRST, _SECOND, _TOP, _BEFORE = range(
    14
)
_RINGS = 14

_SMALLEST = 1e-200  # a factor of E that may still be multiplied by another
_NOTHING = -1e30  # the logarithm of no mass; finite, so that differences are numbers


class _Settings(NamedTuple):
    """What is the same for all images; see :mod:`wball.kernels.entropic_plan`."""

    box: Box
    schedule: Schedule
    sweeps: int
    newton: int
    cost_tol: float
    momentum: float


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`."""
    x, box, stencil, shape = (
        request.x,
        request.box,
        stencil_of(request.moves),
        tuple(request.x.shape),
    )
    # One set of types, whatever the caller's numbers are: another would be compiled anew.
    lo, hi = (float(v) for v in (box if box is not None else (0.0, math.inf)))
    rounding = 4 * torch.finfo(x.dtype).eps
    slack = rounding * max(1.0, hi if math.isfinite(hi) else 1.0)
    counted = np.asarray(REPAIR_COUNTED)
    settings = _Settings(
        Box(lo, hi, slack, rounding, TINY),  # a row may send no more than it has, but for rounding
        Schedule(counted, np.zeros_like(counted)),
        request.sweeps if box is not None else 0,
        request.newton,
        COST_TOL,
        float(request.momentum),
    )
    start, q = request.start()
    given = [t.detach().to(x.dtype).numpy() for t in (x, request.b, q)]
    out = np.empty((4, *shape), dtype=given[0].dtype)
    psi = start.detach().to(torch.float64).contiguous().numpy().copy()
    limit = request.budget.detach().to(torch.float64).contiguous().numpy()
    cost, net = np.zeros(shape[0]), np.zeros(shape[0])

    def work(start: int, stop: int) -> None:
        scratch = np.zeros((_RINGS + stencil.rings, stencil.length(shape)))
        for first in range(start, stop, PART):
            part = slice(first, min(stop, first + PART))
            image, potential, shift = (
                np.array(t[part], dtype=np.float64, order="C") for t in given
            )
            result = np.empty((4, *image.shape))
            _plan_images(
                image, potential, shift, limit[part], stencil.arrays, settings, scratch,
                result, psi[part], cost[part], net[part],
            )  # fmt: skip
            out[:, part] = result

    split(shape[0], work, entries=math.prod(shape[1:]) * len(request.moves))
    z, q_new, keep, give = (torch.from_numpy(a) for a in out)
    tensors = (torch.from_numpy(cost), torch.from_numpy(net), torch.from_numpy(psi).to(x.dtype))
    return EntropicPlan(z, *tensors, q_new, keep, give, balanced=True)


# The functions below work on the flat image between ``pad`` and ``pad + n``. With ``logs``, ``_E``, ``_A``, ``_Q`` and
# the rings hold logarithms.


@compiled(inner=True)
def _weights(fee, psi, out):  # type: ignore[no-untyped-def]
    """``w_k``; 0 for the moves that fill up a ring."""
    for k in range(fee.size):
        out[k] = math.exp(-psi * fee[k]) if fee[k] < math.inf else 0.0


@compiled(inner=True, fastmath=SUMS)
def _rings(work, pad, n, shift, fee, ring, logs):  # type: ignore[no-untyped-def]
    """Per distinct cost, the sum of ``E`` over the moves of that cost."""
    for d in range(ring.size - 1):
        if not logs:
            ones = np.empty(fee.size)
            _weights(fee, 0.0, ones)
            correlate(work[_RINGS + d], work[_E], pad, n, shift, ones, ring[d], ring[d + 1])
            continue
        out, total = work[_RINGS + d, pad : pad + n], work[_TMP, pad : pad + n]
        for i in range(n):
            out[i] = _NOTHING
            total[i] = 0.0
        for k in range(ring[d], ring[d + 1]):
            end = work[_E, pad + shift[k] : pad + shift[k] + n]
            for i in range(n):
                out[i] = max(out[i], end[i]) if fee[k] < math.inf else out[i]
        for k in range(ring[d], ring[d + 1]):
            end = work[_E, pad + shift[k] : pad + shift[k] + n]
            for i in range(n):
                total[i] += exp(end[i] - out[i]) if fee[k] < math.inf else 0.0
        for i in range(n):
            out[i] += math.log(total[i])


@compiled(inner=True, fastmath=SUMS)
def _moments(work, pad, n, psi, ring_cost, logs):  # type: ignore[no-untyped-def]
    """Cost of the plan at ``psi`` and minus its derivative; the rows' normalisers go to ``_NORM`` and ``_TOP``."""
    x, norm, top = work[_X, pad : pad + n], work[_NORM, pad : pad + n], work[_TOP, pad : pad + n]
    first, second = work[_FIRST, pad : pad + n], work[_SECOND, pad : pad + n]
    for i in range(n):
        norm[i] = first[i] = second[i] = 0.0
        top[i] = 2 * _NOTHING
    for d in range(ring_cost.size if logs else 0):
        ring, toll = work[_RINGS + d, pad : pad + n], psi * ring_cost[d]
        for i in range(n):
            top[i] = max(top[i], ring[i] - toll)
    for d in range(ring_cost.size):
        ring, c = work[_RINGS + d, pad : pad + n], ring_cost[d]
        w, toll = math.exp(-psi * c), psi * c
        if not logs:
            for i in range(n):
                t = w * ring[i]
                norm[i] += t
                first[i] += c * t
                second[i] += c * c * t
        else:
            for i in range(n):
                t = exp(ring[i] - toll - top[i])
                norm[i] += t
                first[i] += c * t
                second[i] += c * c * t
    cost, slope = 0.0, 0.0
    for i in range(n):
        scale = 1.0 / max(norm[i], 1e-300)
        mean = first[i] * scale
        cost += x[i] * mean
        slope += x[i] * max(second[i] * scale - mean * mean, 0.0)
    return cost, slope


@compiled(inner=True)
def _solve_psi(work, pad, n, psi, budget, ring_cost, newton, cost_tol, logs):  # type: ignore[no-untyped-def]
    """The root of ``cost(psi) = budget``: Newton on the logarithm of the cost, kept in a bracket. Sets ``A``."""
    low, high = -1.0, math.inf
    target = budget * (1 - cost_tol / 2)
    for attempt in range(newton + 1):
        cost, slope = _moments(work, pad, n, psi, ring_cost, logs)
        if attempt == newton or cost <= budget and (cost >= budget * (1 - cost_tol) or psi == 0.0):
            break
        low, high = narrowed(psi, cost, budget, low, high)
        psi = smooth_step(psi, cost, slope, target, low, high)
    x, norm, top = work[_X, pad : pad + n], work[_NORM, pad : pad + n], work[_TOP, pad : pad + n]
    a = work[_A, pad : pad + n]
    if logs:
        for i in range(n):
            a[i] = math.log(x[i] / norm[i]) - top[i] if x[i] > 0.0 else _NOTHING
    else:
        for i in range(n):
            a[i] = x[i] / max(norm[i], 1e-300)
    return psi


@compiled(inner=True, fastmath=EXACT)
def _shift_potentials(work, pad, n, lo, hi, momentum, logs):  # type: ignore[no-untyped-def]
    """The coordinate step on ``q`` from the column sums in ``_RECEIVED``, and ``momentum`` times as far again."""
    z, q, e = work[_RECEIVED, pad : pad + n], work[_Q, pad : pad + n], work[_E, pad : pad + n]
    before, most = work[_BEFORE, pad : pad + n], math.exp(50.0)
    if not logs:
        for i in range(n):
            scale = q[i] / max(z[i], 1e-12)
            new = min(min(max(scale * lo, 1.0), most), scale * hi)
            ahead = new
            if momentum > 0.0:
                if new != 1.0 and new > _SMALLEST and (new - q[i]) * (new - before[i]) >= 0.0:
                    ahead = new * (new / before[i]) ** momentum
                    ahead = min(ahead, 1.0) if new < 1.0 else min(max(ahead, 1.0), most)
                before[i] = new
            e[i] *= ahead / q[i]
            q[i] = ahead
        return
    for i in range(n):
        up = q[i] - math.log(max(z[i], 1e-12))
        new = min(min(max(up + math.log(lo), 0.0) if lo > 0.0 else 0.0, 50.0), up + math.log(hi))
        if e[i] > 0.5 * _NOTHING:
            ahead = new
            if momentum > 0.0:
                if new != 0.0 and (new - q[i]) * (new - before[i]) >= 0.0:
                    ahead = new + momentum * (new - before[i])
                    ahead = min(ahead, 0.0) if new < 0.0 else min(max(ahead, 0.0), 50.0)
                before[i] = new
            e[i] += ahead - q[i]
            q[i] = ahead


@compiled(inner=True, fastmath=SUMS)
def _costs(work, pad, n, shift, fee, fee_back, psi, first, logs):  # type: ignore[no-untyped-def]
    """Cost of the plan, and of what is left of it when opposite flows cancel."""
    start, end = work[_A], work[_E]
    give, keep = work[_GIVE], work[_KEEP]
    if not logs:
        start, end = work[_FIRST, : n + 2 * pad], work[_SECOND, : n + 2 * pad]
        a, e = work[_A, : n + 2 * pad], work[_E, : n + 2 * pad]
        for i in range(n + 2 * pad):
            start[i] = a[i] * give[i]
            end[i] = e[i] * keep[i]
    cost, net = 0.0, 0.0
    a0, e0, g0, k0 = (
        start[pad : pad + n],
        end[pad : pad + n],
        give[pad : pad + n],
        keep[pad : pad + n],
    )
    for k in range(first, fee.size):
        if fee[k] == math.inf:
            continue
        o = pad + shift[k]
        a1, e1, g1, k1 = start[o : o + n], end[o : o + n], give[o : o + n], keep[o : o + n]
        moved, left = 0.0, 0.0
        toll, toll_back = psi * fee[k], psi * fee_back[k] if fee_back[k] < math.inf else -_NOTHING
        if not logs:
            w, w_back = math.exp(-toll), math.exp(-toll_back)
            for i in range(n):
                flow = w * a0[i] * e1[i]
                moved += flow
                left += max(flow - w_back * a1[i] * e0[i], 0.0)
        else:
            for i in range(n):
                flow = exp(a0[i] + e1[i] - toll) * g0[i] * k1[i]
                moved += flow
                left += max(flow - exp(a1[i] + e0[i] - toll_back) * g1[i] * k0[i], 0.0)
        cost += fee[k] * moved
        net += fee[k] * left
    return cost, net


@compiled()
def _plan_images(x, b, q, budget, moves, settings, work, out, psi, cost, net):  # type: ignore[no-untyped-def]
    rows, columns, fee, ring, sweeps = (
        moves.rows,
        moves.columns,
        moves.fee,
        moves.ring,
        settings.sweeps,
    )
    lo, hi = settings.box.lo, settings.box.hi
    rr, rc = 0, 0
    for k in range(rows.size):
        rr, rc = max(rr, abs(rows[k])), max(rc, abs(columns[k]))
    _, channels, full_height, full_width = x.shape
    weight = np.empty(fee.size)
    for m in range(x.shape[0]):
        top, bottom, left, right = mass_box(x[m])
        moving = bottom > 0 and budget[m] > 0.0
        for c in range(channels):
            for r in range(full_height):
                for j in range(full_width):
                    out[0, m, c, r, j] = x[m, c, r, j]
                    out[1, m, c, r, j] = 0.0 if moving and sweeps > 0 else q[m, c, r, j]
                    out[2, m, c, r, j] = 1.0
                    out[3, m, c, r, j] = 1.0
        if not moving:
            continue

        height, width = bottom - top + 2 * rr, right - left + 2 * rc
        n, pad = channels * height * width, rr * width + rc
        shift = rows * width + columns
        first_row, last_row = max(top - rr, 0), min(bottom + rr, full_height)
        first_column, last_column = max(left - rc, 0), min(right + rc, full_width)
        low, high = math.inf, -math.inf
        for c in range(channels):
            for r in range(first_row, last_row):
                for j in range(first_column, last_column):
                    s = b[m, c, r, j] + q[m, c, r, j]
                    low, high = min(low, s), max(high, s)
        logs = high - low > LINEAR_SPREAD
        middle = 0.5 * (low + high)
        for row in range(_RINGS):
            one = row in (_KEEP, _GIVE) or row in (_Q, _BEFORE) and not logs
            empty = 1.0 if one else _NOTHING if logs and row in (_E, _A) else 0.0
            line = work[row]
            for i in range(n + 2 * pad):
                line[i] = empty
        for c in range(channels):
            for r in range(first_row, last_row):
                at = pad + (c * height + r - top + rr) * width + rc - left
                for j in range(first_column, last_column):
                    s, p = b[m, c, r, j] + q[m, c, r, j], q[m, c, r, j]
                    work[_X, at + j] = x[m, c, r, j]
                    work[_E, at + j] = s if logs else exp(s - middle)
                    work[_Q, at + j] = work[_BEFORE, at + j] = p if logs else exp(p)

        p, flat = psi[m], Flat(pad, n, shift, -shift, fee, ring[1])
        factors = Factors(
            work[_X], work[_A], work[_E], work[_KEEP], work[_GIVE], work[_SENT], work[_RECEIVED],
            work[_FIRST], work[_SECOND], work[_TMP],
        )  # fmt: skip
        for sweep in range(sweeps + 1):
            if sweep > 0:
                _weights(fee, p, weight)
                receive(factors, flat, weight, p, ring[0], logs)
                _shift_potentials(
                    work, pad, n, lo, hi, settings.momentum if sweep < sweeps else 0.0, logs
                )
            _rings(work, pad, n, shift, fee, ring, logs)
            p = _solve_psi(
                work,
                pad,
                n,
                p,
                budget[m],
                moves.ring_cost,
                settings.newton,
                settings.cost_tol,
                logs,
            )
        _weights(fee, p, weight)
        repair(factors, flat, weight, p, settings.box, settings.schedule, logs)
        cost[m], net[m] = _costs(work, pad, n, shift, fee, moves.fee_back, p, ring[1], logs)
        psi[m] = p

        for c in range(channels):
            for r in range(first_row, last_row):
                at = pad + (c * height + r - top + rr) * width + rc - left
                for j in range(first_column, last_column):
                    i = at + j
                    keep, give, p = work[_KEEP, i], work[_GIVE, i], work[_Q, i]
                    z = work[_X, i] - give * work[_SENT, i] + keep * work[_RECEIVED, i]
                    out[0, m, c, r, j] = min(max(z, lo), hi)
                    if sweeps > 0:
                        out[1, m, c, r, j] = p if logs else 0.0 if p == 1.0 else math.log(p)
                    out[2, m, c, r, j] = keep
                    out[3, m, c, r, j] = give
