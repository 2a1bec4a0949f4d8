"""Conjugate steps for sweeps of projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn`),
compiled for a CPU."""

from __future__ import annotations

from wball.kernels.compiled import compiled
from wball.kernels.factors import SUMS
from wball.kernels.projected_sinkhorn import DEPENDENT, MEMORY
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


@compiled(inner=True, fastmath=SUMS)
def _subtract(a, share, b):  # type: ignore[no-untyped-def]
    for i in range(a.size):
        a[i] -= share * b[i]


@compiled(inner=True, fastmath=SUMS)
def advance(work, past, count, held, sizes):  # type: ignore[no-untyped-def]
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
    for i in range(count):
        beta[i] = new[i]
    sizes[slot] = 0.0
    whole, size = 0.0, 0.0
    if held >= 0:
        whole = _product(latest, latest, metric)
        for j in range(MEMORY):
            if sizes[j] > 0.0:
                share = _product(past[CHANGES + j, :count], latest, metric) / sizes[j]
                _subtract(latest, share, past[CHANGES + j, :count])
                _subtract(step, share, past[STEPS + j, :count])
        size = _product(latest, latest, metric)
    if size <= DEPENDENT * whole:
        sizes[:] = 0.0
        for i in range(count):
            metric[i] = max(resists[i], 1e-12)
        return 0
    sizes[slot] = size
    for j in range(MEMORY):
        if sizes[j] > 0.0:
            share = _product(past[CHANGES + j, :count], change, metric) / sizes[j]
            _subtract(beta, share, past[STEPS + j, :count])
    return held + 1
