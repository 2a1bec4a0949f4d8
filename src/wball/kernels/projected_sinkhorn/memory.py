r"""Anderson's method for sweeps of projected Sinkhorn, compiled for a CPU.

A sweep maps potentials ``beta`` to ``new``. The changes ``new - beta`` of the last sweeps are
combined such that they cancel best, in the metric by which columns resist a change, and the next
sweep starts from the same combination of the ``new``. A combination far from where the sweep ended
is not used: with few pixels it consists of noise.
"""

from __future__ import annotations

import numpy as np

from wball.kernels.compiled import compiled
from wball.kernels.factors import SUMS, TINY
from wball.kernels.projected_sinkhorn import FAR, LONGEST, MEMORY
from wball.kernels.projected_sinkhorn.sweeps import BETA, LAST, NEW, OWN

CHANGE, METRIC, CHANGES = 0, 1, 2
STEPS = CHANGES + MEMORY
ROWS = STEPS + MEMORY
"""Rows of the second working memory."""


@compiled(inner=True, fastmath=SUMS)
def _product(a, b, metric):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(a.size):
        total += metric[i] * a[i] * b[i]
    return total


@compiled(inner=True)
def _combine(gram, share, held):  # type: ignore[no-untyped-def]
    """Least squares from the normal equations, by elimination; ``share`` is the right-hand side,
    then the solution."""
    a = gram.copy()
    ridge = TINY
    for j in range(held):
        ridge += 1e-10 * gram[j, j]
    for j in range(held):
        a[j, j] += ridge
    for j in range(held):
        for i in range(j + 1, held):
            factor = a[i, j] / a[j, j]
            for k in range(j, held):
                a[i, k] -= factor * a[j, k]
            share[i] -= factor * share[j]
    for t in range(held):
        j = held - 1 - t
        for k in range(j + 1, held):
            share[j] -= a[j, k] * share[k]
        share[j] /= a[j, j]


@compiled(inner=True, fastmath=SUMS)
def advance(work, past, count, held, gram):  # type: ignore[no-untyped-def]
    """The next ``beta`` from ``NEW`` and the ``held`` sweeps before it; -1 forgets them. Returns
    the number then held."""
    new, last, beta = work[NEW, :count], work[LAST, :count], work[BETA, :count]
    change, metric, resists = past[CHANGE, :count], past[METRIC, :count], work[OWN, :count]
    slot = held % MEMORY
    latest, step = past[CHANGES + slot, :count], past[STEPS + slot, :count]
    for i in range(count):
        now = new[i] - beta[i]
        latest[i] = now - change[i]
        change[i] = now
    for i in range(count):
        step[i] = new[i] - last[i]
        last[i] = new[i]
    if held < 0:
        for i in range(count):
            metric[i] = max(resists[i], 1e-12)
        for i in range(count):
            beta[i] = new[i]
        return 0
    size, share = min(held + 1, MEMORY), np.empty(MEMORY)
    for j in range(size):
        gram[slot, j] = gram[j, slot] = _product(past[CHANGES + j, :count], latest, metric)
        share[j] = _product(past[CHANGES + j, :count], change, metric)
    _combine(gram, share, size)
    for i in range(count):
        beta[i] = 0.0
    for j in range(size):
        step, part = past[STEPS + j, :count], share[j]
        for i in range(count):
            beta[i] += part * step[i]
    further, far = 0.0, FAR
    for i in range(count):
        further, far = max(further, abs(beta[i])), max(far, abs(change[i]))
    part = 1.0 if further <= LONGEST * far else 0.0
    for i in range(count):
        beta[i] = new[i] - part * beta[i]
    return held + 1
