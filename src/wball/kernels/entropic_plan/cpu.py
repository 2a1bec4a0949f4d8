r"""The entropic plan on a CPU: one image at a time per thread, compiled by numba.

The plan of :mod:`wball.kernels.entropic_plan` is a product of three factors: with
``E_j = exp(b_j + q_j)``, ``w_k = exp(-psi C_k)`` and ``A_i = x_i / sum_k w_k E_{i + k}``,

.. math::
    P_{i, i+k} = A_i\, w_k\, E_{i+k},

so normalisers, column sums, box factors and costs are correlations of one image with the small
kernel ``w``: one multiplication a move and *no exponential*. The box step on ``q`` is a
multiplication of ``E``. All arithmetic is in float64 for any input.

Images are cropped and flat (:mod:`wball.kernels.dispatch`). The working set is a few dozen such
images per thread and stays in the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from wball.kernels.compiled import compiled
from wball.kernels.dispatch import PART, flat_moves, split
from wball.kernels.entropic_plan import (
    COST_TOL,
    EntropicPlan,
    PlanRequest,
    narrowed,
    pulled_back,
)
from wball.kernels.factors import (
    EXACT,
    SUMS,
    TINY,
    Box,
    Factors,
    Flat,
    PlanLines,
    correlate,
    mass_box,
    receive,
    repair,
    solve_price,
    weights,
)

# Rows of the working memory; the rings follow.
_X, _E, _A, _NORM, _Q, _KEEP, _GIVE, _SENT, _RECEIVED, _TMP, _FIRST, _SECOND, _BEFORE = range(13)
_RINGS = 13

_SMALLEST = 1e-200  # a factor of E that may still be multiplied by another


class _PlanSettings(NamedTuple):
    """Settings shared by all images; see :mod:`wball.kernels.entropic_plan`."""

    box: Box
    sweeps: int
    newton: int
    momentum: float


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`."""
    x, box, moves = request.x, request.box, flat_moves(request.moves)
    shape = tuple(x.shape)
    # Always the same types: numba would compile another version for an integer.
    lo, hi = (float(v) for v in (box or (0.0, math.inf)))
    slack = 4 * torch.finfo(x.dtype).eps * max(1.0, hi if math.isfinite(hi) else 1.0)
    settings = _PlanSettings(
        Box(lo, hi, slack),
        request.sweeps if box is not None else 0,
        request.newton,
        float(request.momentum),
    )
    start, q = request.start()
    given = [t.detach().to(x.dtype).numpy() for t in (x, narrowed(request.b), q)]
    out = np.empty((4, *shape), dtype=given[0].dtype)
    psi = start.detach().double().contiguous().numpy().copy()
    limit = request.spend.detach().contiguous().numpy()
    cost, net = np.zeros(shape[0]), np.zeros(shape[0])

    def work(start: int, stop: int) -> None:
        part = slice(start, stop)
        image, b, shift = (np.array(t[part], dtype=np.float64, order="C") for t in given)
        result = np.empty((4, *image.shape))
        _plan_images(
            (image, b, shift, limit[part]), moves, settings, moves.memory(_RINGS, shape),
            (result, psi[part], cost[part], net[part]),
        )  # fmt: skip
        out[:, part] = result

    split(shape[0], work, math.prod(shape[1:]) * len(request.moves), PART)
    z, q_new, keep, give = (torch.from_numpy(a) for a in out)
    costs, price = (torch.from_numpy(cost), torch.from_numpy(net)), torch.from_numpy(psi)
    return pulled_back(request, z, costs, price.to(x.dtype), q_new, (keep, give))


# The functions below work on the flat image between ``pad`` and ``pad + n``.


@compiled(inner=True, fastmath=SUMS)
def _rings(work, flat, ring, ones):  # type: ignore[no-untyped-def]
    """For each distinct cost, the sum of ``E`` over the moves of that cost."""
    for d in range(ring.size - 1):
        correlate(
            work[_RINGS + d], work[_E], flat.pad, flat.n, flat.shift, ones, ring[d], ring[d + 1]
        )


@compiled(inner=True, fastmath=SUMS)
def _normalise(lines, a):  # type: ignore[no-untyped-def]
    """Set the factor ``A`` of each row so that the row sums to its pixel."""
    for i in range(a.size):
        a[i] = lines.x[i] / max(lines.norm[i], TINY)


@compiled(inner=True, fastmath=EXACT)
def _shift_potentials(work, pad, n, lo, hi, momentum):  # type: ignore[no-untyped-def]
    """The coordinate step on ``q`` from the column sums in ``_RECEIVED``, and ``momentum`` times as
    far again. ``_Q`` holds ``exp(q)``."""
    z, q, e = work[_RECEIVED, pad : pad + n], work[_Q, pad : pad + n], work[_E, pad : pad + n]
    before, most = work[_BEFORE, pad : pad + n], math.exp(50.0)
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


@compiled(inner=True, fastmath=SUMS)
def _costs(work, flat, fee_back, psi):  # type: ignore[no-untyped-def]
    """The cost of the plan, and its cost after opposite flows cancel."""
    pad, n, fee = flat.pad, flat.n, flat.fee
    length = n + 2 * pad
    start, end = work[_FIRST, :length], work[_SECOND, :length]
    a, e = work[_A, :length], work[_E, :length]
    give, keep = work[_GIVE, :length], work[_KEEP, :length]
    for i in range(length):
        start[i] = a[i] * give[i]
        end[i] = e[i] * keep[i]
    cost, net = 0.0, 0.0
    a0, e0 = start[pad : pad + n], end[pad : pad + n]
    for k in range(flat.first, fee.size):
        if fee[k] == math.inf:
            continue
        o = pad + flat.shift[k]
        a1, e1 = start[o : o + n], end[o : o + n]
        moved, left = 0.0, 0.0
        w, w_back = math.exp(-psi * fee[k]), 0.0
        if fee_back[k] < math.inf:
            w_back = math.exp(-psi * fee_back[k])
        for i in range(n):
            flow = w * a0[i] * e1[i]
            moved += flow
            left += max(flow - w_back * a1[i] * e0[i], 0.0)
        cost += fee[k] * moved
        net += fee[k] * left
    return cost, net


@compiled()
def _plan_images(given, moves, settings, work, answer):  # type: ignore[no-untyped-def]
    """Compute the plans of all images: images (point, box potentials, factors), prices (initially
    the starting prices), costs and net costs."""
    x, b, q, budget = given
    out, prices, costs, net_costs = answer
    rows, columns, over, fee, fee_back, ring_cost, ring, (rr, rc, rs) = moves
    box, sweeps, newton, momentum = settings
    lo, hi, _ = box
    _, channels, full_height, full_width = x.shape
    weight, ones = np.empty(fee.size), np.empty(fee.size)
    weights(fee, 0.0, ones)
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
        plane = height * width
        n, pad = channels * plane, rs * plane + rr * width + rc
        shift = over * plane + rows * width + columns
        first_row, last_row = max(top - rr, 0), min(bottom + rr, full_height)
        first_column, last_column = max(left - rc, 0), min(right + rc, full_width)
        low, high = math.inf, -math.inf
        for c in range(channels):
            for r in range(first_row, last_row):
                for j in range(first_column, last_column):
                    s = b[m, c, r, j] + q[m, c, r, j]
                    low, high = min(low, s), max(high, s)
        middle = 0.5 * (low + high)
        for row in range(_RINGS):
            empty = 1.0 if row in (_KEEP, _GIVE, _Q, _BEFORE) else 0.0
            line = work[row]
            for i in range(n + 2 * pad):
                line[i] = empty
        for c in range(channels):
            for r in range(first_row, last_row):
                at = pad + (c * height + r - top + rr) * width + rc - left
                for j in range(first_column, last_column):
                    p = q[m, c, r, j]
                    work[_X, at + j] = x[m, c, r, j]
                    work[_E, at + j] = math.exp(b[m, c, r, j] + p - middle)
                    work[_Q, at + j] = work[_BEFORE, at + j] = math.exp(p)

        psi, flat = prices[m], Flat(pad, n, shift, -shift, fee, ring[1])
        factors = Factors(
            work[_X], work[_A], work[_E], work[_KEEP], work[_GIVE], work[_SENT], work[_RECEIVED],
            work[_FIRST], work[_SECOND], work[_TMP],
        )  # fmt: skip
        lines = PlanLines(
            work[_X, pad : pad + n], work, _RINGS, pad, work[_NORM, pad : pad + n],
            work[_FIRST, pad : pad + n], work[_SECOND, pad : pad + n],
        )  # fmt: skip
        for sweep in range(sweeps + 1):
            if sweep > 0:
                weights(fee, psi, weight)
                receive(factors, flat, weight, ring[0])
                _shift_potentials(work, pad, n, lo, hi, momentum if sweep < sweeps else 0.0)
            _rings(work, flat, ring, ones)
            psi, _ = solve_price(lines, psi, budget[m], ring_cost, newton, COST_TOL, math.inf)
            _normalise(lines, work[_A, pad : pad + n])
        weights(fee, psi, weight)
        repair(factors, flat, weight, box)
        costs[m], net_costs[m] = _costs(work, flat, fee_back, psi)
        prices[m] = psi

        for c in range(channels):
            for r in range(first_row, last_row):
                at = pad + (c * height + r - top + rr) * width + rc - left
                for j in range(first_column, last_column):
                    i = at + j
                    keep, give, p = work[_KEEP, i], work[_GIVE, i], work[_Q, i]
                    z = work[_X, i] - give * work[_SENT, i] + keep * work[_RECEIVED, i]
                    out[0, m, c, r, j] = min(max(z, lo), hi)
                    if sweeps > 0:
                        out[1, m, c, r, j] = 0.0 if p == 1.0 else math.log(p)
                    out[2, m, c, r, j] = keep
                    out[3, m, c, r, j] = give
