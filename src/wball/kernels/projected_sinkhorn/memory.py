r"""Sweeps remember the last few of them (Anderson's method), here compiled for a CPU.

A sweep maps potentials ``beta`` to ``new``. The changes ``new - beta`` of the last sweeps are combined such that they
cancel best, in the metric by which columns resist a change, and the next sweep starts from the same combination of the
``new``: 0.6 times the sweeps of momentum on MNIST at ``lambda = 1000``. Where the gap rises instead, the memory
misleads and is dropped, and steps are scaled by less from then on; in the end momentum takes over. Nor does a
combination count that is far from where the sweep ended: with few pixels, noise is all that it is made of.
"""

from __future__ import annotations

from wball.kernels.compiled import compiled
from wball.kernels.factors import SUMS, TINY
from wball.kernels.projected_sinkhorn import FAR, MEMORY
from wball.kernels.projected_sinkhorn.sweeps import BETA, LAST, NEW, OWN

CHANGE, METRIC, CHANGES = 0, 1, 2
STEPS = CHANGES + MEMORY
ROWS = STEPS + MEMORY
"""Rows of a second working memory."""


@compiled(inner=True, fastmath=SUMS)
def begin(work, memory, count):  # type: ignore[no-untyped-def]
    """What a first sweep leaves: what resisted it, and itself. The next starts where it ended."""
    metric, change, resists = memory[METRIC, :count], memory[CHANGE, :count], work[OWN, :count]
    new, last, beta = work[NEW, :count], work[LAST, :count], work[BETA, :count]
    for i in range(count):
        metric[i] = max(resists[i], 1e-12)
    for i in range(count):
        change[i] = new[i] - beta[i]
        last[i] = new[i]
    for i in range(count):
        beta[i] = new[i]


@compiled(inner=True, fastmath=SUMS)
def remember(work, memory, count, slot, gram, products):  # type: ignore[no-untyped-def]
    """The sweep's change against that of the sweep before goes to ``slot``, and its products with the others."""
    change, new, last, beta = (
        memory[CHANGE, :count],
        work[NEW, :count],
        work[LAST, :count],
        work[BETA, :count],
    )
    d, step, metric = (
        memory[CHANGES + slot, :count],
        memory[STEPS + slot, :count],
        memory[METRIC, :count],
    )
    for i in range(count):
        now = new[i] - beta[i]
        d[i] = now - change[i]
        change[i] = now
    for i in range(count):
        step[i] = new[i] - last[i]
        last[i] = new[i]
    d0, d1, d2 = memory[CHANGES, :count], memory[CHANGES + 1, :count], memory[CHANGES + 2, :count]
    d3, d4 = memory[CHANGES + 3, :count], memory[CHANGES + 4, :count]
    g0, g1, g2, g3, g4, p0, p1, p2, p3, p4 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        f, g = metric[i] * change[i], metric[i] * d[i]
        g0 += g * d0[i]
        g1 += g * d1[i]
        g2 += g * d2[i]
        g3 += g * d3[i]
        g4 += g * d4[i]
        p0 += f * d0[i]
        p1 += f * d1[i]
        p2 += f * d2[i]
        p3 += f * d3[i]
        p4 += f * d4[i]
    gram[slot, 0], gram[slot, 1], gram[slot, 2], gram[slot, 3], gram[slot, 4] = g0, g1, g2, g3, g4
    for j in range(MEMORY):
        gram[j, slot] = gram[slot, j]
    products[0], products[1], products[2], products[3], products[4] = p0, p1, p2, p3, p4


@compiled(inner=True)
def combine(gram, products, held, a, out):  # type: ignore[no-untyped-def]
    """Least squares from its normal equations, by elimination."""
    trace = 0.0
    for j in range(held):
        trace += gram[j, j]
    for j in range(MEMORY):
        for k in range(MEMORY):
            a[j, k] = gram[j, k]
        a[j, j] += 1e-10 * trace + TINY
        out[j] = products[j] if j < held else 0.0
    for j in range(held):
        for i in range(j + 1, held):
            factor = a[i, j] / a[j, j]
            for k in range(j, held):
                a[i, k] -= factor * a[j, k]
            out[i] -= factor * out[j]
    for t in range(held):
        j = held - 1 - t
        for k in range(j + 1, held):
            out[j] -= a[j, k] * out[k]
        out[j] /= a[j, j]


@compiled(inner=True, fastmath=SUMS)
def extrapolate(work, memory, count, share, longest):  # type: ignore[no-untyped-def]
    """The next ``beta``, or ``NEW`` if that is more than ``longest`` times as far from it as the sweep went."""
    beta, new, change = work[BETA, :count], work[NEW, :count], memory[CHANGE, :count]
    s0, s1, s2 = memory[STEPS, :count], memory[STEPS + 1, :count], memory[STEPS + 2, :count]
    s3, s4 = memory[STEPS + 3, :count], memory[STEPS + 4, :count]
    c0, c1, c2, c3, c4 = share[0], share[1], share[2], share[3], share[4]
    for i in range(count):
        beta[i] = c0 * s0[i] + c1 * s1[i] + c2 * s2[i] + (c3 * s3[i] + c4 * s4[i])
    further, far = 0.0, FAR**8  # sums of eighth powers stand for maxima, which do not vectorise
    for i in range(count):
        t = beta[i] * beta[i]
        t *= t
        further += t * t
    for i in range(count):
        t = change[i] * change[i]
        t *= t
        far += t * t
    part = 1.0 if further <= longest**8 * far else 0.0
    for i in range(count):
        beta[i] = new[i] - part * beta[i]
