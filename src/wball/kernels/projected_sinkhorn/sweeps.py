r"""The sweeps of projected Sinkhorn on a CPU: rows with the price, then columns, then how far to
follow them.

With ``E = exp(beta - middle)``, ``w_k = exp(-psi C_k / tau)`` and ``A_i = x_i / sum_k w_k E_{i +
k}``, rows and columns are correlations with a small kernel. What is left per pixel and sweep is one
exponential for ``E`` and, for the columns, a logarithm and an exponential: with ``log s_j =
log(sum_k w_k A_{j - k}) - middle`` the logarithm ``v`` of ``z_j / tau`` solves

.. math::
    e^v + v = w_j / \tau + \log(s_j / \tau), \qquad \beta_j = clip(v + \log \tau,\ \log lo,\ \log
    hi) - \log s_j,

and a step of Halley's method from the ``v`` of the sweep before is exact enough once sweeps change
little.

Every loop either only sums or writes to one or two arrays and reads few: with more than eight pairs
of arrays that could overlap, the compiler would not vectorise it. All work on the flat image
between ``pad`` and ``pad + n``.
"""

from __future__ import annotations

import math

from wball.kernels.compiled import compiled, exp, log
from wball.kernels.factors import SUMS, TINY, correlate
from wball.kernels.projected_sinkhorn import DEPENDENT, FAR, MEMORY
from wball.plan import SPREAD

# Rows of the working memory; the rings follow.
X, E, A, ARRIVING, KEEP, GIVE, SENT, RECEIVED, TMP = range(9)
# Packed: the columns that mass can reach, then the rows that have mass.
GOAL, BETA, NEW, LAST, V, Z, FACTOR, INVERSE, OWN = range(9, 18)
MASS, NORM, SCRATCH, SPARE, RINGS = range(18, 23)
# Rows of the second working memory: what is remembered of earlier sweeps.
CHANGE, METRIC, CHANGES = 0, 1, 2
STEPS = CHANGES + MEMORY
PAST_ROWS = STEPS + MEMORY


@compiled(inner=True, fastmath=SUMS)
def exponentials(work, middle, reached):  # type: ignore[no-untyped-def]
    """Compute ``E``, also into ``FACTOR``."""
    e, beta = work[FACTOR, : reached.size], work[BETA, : reached.size]
    for i in range(reached.size):
        e[i] = exp(beta[i] - middle)
    for i in range(reached.size):
        work[E, reached[i]] = e[i]


@compiled(inner=True)
def narrow(work, count):  # type: ignore[no-untyped-def]
    """Raise ``beta`` to a range of ``SPREAD``. Returns its middle, and whether it was wider."""
    low, high = math.inf, -math.inf
    for i in range(count):
        low, high = min(low, work[BETA, i]), max(high, work[BETA, i])
    wide = high - low > SPREAD
    if wide:
        low = high - SPREAD
        for i in range(count):
            work[BETA, i] = max(work[BETA, i], low)
    return 0.5 * (low + high), wide


# ``lit`` are the places of rows with mass: ``MASS``, ``NORM`` and the rings, the first of which is
# ``E`` itself.


@compiled(inner=True)
def rings(work, pad, n, shift, ones, ring, lit):  # type: ignore[no-untyped-def]
    """For each distinct cost, the sum of ``E`` over the moves of that cost."""
    for d in range(ring.size - 1):
        if d > 0:
            correlate(work[TMP], work[E], pad, n, shift, ones, ring[d], ring[d + 1])
        source, out = work[TMP if d > 0 else E], work[RINGS + d]
        for t in range(lit.size):
            out[t] = source[lit[t]]


@compiled(inner=True, fastmath=SUMS)
def normalise(work, lit):  # type: ignore[no-untyped-def]
    """Compute ``A`` from the normalisers of the rows."""
    x, norm, share = work[MASS, : lit.size], work[NORM, : lit.size], work[SCRATCH, : lit.size]
    for i in range(lit.size):
        share[i] = x[i] / norm[i]
    for i in range(lit.size):
        work[A, lit[i]] = share[i]


@compiled(inner=True, fastmath=SUMS)
def log_sums(work, count):  # type: ignore[no-untyped-def]
    """``sum_i x_i log(norm_i)``."""
    x, norm = work[MASS, :count], work[NORM, :count]
    total = 0.0
    for i in range(count):
        total += x[i] * log(norm[i])
    return total


@compiled(inner=True)
def gather(out, values, places):  # type: ignore[no-untyped-def]
    for i in range(places.size):
        out[i] = values[places[i]]


@compiled(inner=True)
def arrive(work, reached):  # type: ignore[no-untyped-def]
    """Compute the columns of the plan into ``Z``."""
    for i in range(reached.size):
        work[Z, i] = work[FACTOR, i] * work[ARRIVING, reached[i]]


@compiled(inner=True, fastmath=SUMS)
def _first_logs(work, count, log_tau):  # type: ignore[no-untyped-def]
    """Initial ``v`` from an asymptote of its equation: ``y - e^y`` where ``y`` is small, else
    ``log(y)``."""
    v, goal, z, beta = work[V, :count], work[GOAL, :count], work[Z, :count], work[BETA, :count]
    for i in range(count):
        y = goal[i] + log(max(z[i], TINY)) - beta[i] - log_tau
        v[i] = y - min(exp(min(y, 1.0)), 0.5) if y < 1.0 else log(max(y, 1.0))


@compiled(inner=True, fastmath=SUMS)
def _column_step(work, count, log_tau, least, most):  # type: ignore[no-untyped-def]
    """One Halley step on ``v``, with the resulting ``beta`` in ``NEW``. Returns the sum of the
    steps' fourth powers."""
    v, new, goal = work[V, :count], work[NEW, :count], work[GOAL, :count]
    z, beta = work[Z, :count], work[BETA, :count]
    total = 0.0
    for i in range(count):
        log_s = log(max(z[i], TINY)) - beta[i]
        o = exp(v[i])
        f, slope = o + v[i] - (goal[i] + log_s - log_tau), 1.0 + o
        step = f * slope / (slope * slope - 0.5 * f * o)
        total += step * step * step * step
        after = v[i] - step
        v[i] = after
        new[i] = min(max(after + log_tau, least), most) - log_s
    return total


@compiled(inner=True)
def solve_columns(work, count, log_tau, least, most, fresh):  # type: ignore[no-untyped-def]
    """Solve the column block: ``NEW`` from the columns in ``Z``."""
    for attempt in range(8):
        if attempt == 0 and fresh:
            _first_logs(work, count, log_tau)
        moved = _column_step(work, count, log_tau, least, most)
        if moved <= 0.02**4:  # the largest step is below 0.02, and the error is about its cube
            return
        if attempt == 0 and moved > 1.0:  # far from the solution, Halley's steps may diverge
            _first_logs(work, count, log_tau)


@compiled(inner=True, fastmath=SUMS)
def pressure(work, count, tau, hi):  # type: ignore[no-untyped-def]
    """The derivative of the gap in the margin of full columns below ``hi``."""
    goal, beta = work[GOAL, :count], work[BETA, :count]
    total = 0.0
    for i in range(count):
        total += max(tau * (goal[i] - beta[i]) - hi, 0.0)
    return total


@compiled(inner=True, fastmath=SUMS)
def judge(work, count, tau, lo, hi):  # type: ignore[no-untyped-def]
    """Compute sums over the image at the columns in ``Z``: misfit, mass outside the box, distance,
    ``<beta, z>``."""
    z, goal, beta = work[Z, :count], work[GOAL, :count], work[BETA, :count]
    misfit, outside, distance, inner = 0.0, 0.0, 0.0, 0.0
    for i in range(count):
        kept = min(max(z[i], lo), hi)
        v = tau * (goal[i] - beta[i])
        c = min(max(v, lo), hi)
        away = kept - c
        misfit += away * (0.5 * away - (v - c))
        outside += abs(z[i] - kept)
        off = tau * goal[i] - z[i]
        distance += 0.5 * off * off
        inner += beta[i] * z[i]
    return misfit, outside, distance, inner


@compiled(inner=True, fastmath=SUMS)
def follow(work, count, reached, tau, log_tau, least, most, bold):  # type: ignore[no-untyped-def]
    """Scaled steps (:mod:`wball.kernels.projected_sinkhorn`); the resistance of the columns goes to
    ``OWN``."""
    e, z, v, inverse = work[FACTOR, :count], work[Z, :count], work[V, :count], work[INVERSE, :count]
    beta, new, own = work[BETA, :count], work[NEW, :count], work[OWN, :count]
    gather(own, work[A], reached)
    for i in range(count):
        stays = e[i] * own[i]
        level = v[i] + log_tau
        whole = z[i] + (tau if least < level < most else 0.0)
        resists = max(whole - stays * stays * inverse[i], 1e-9 * whole)
        step = new[i] - beta[i]
        reach = max(abs(step), FAR)
        new[i] = beta[i] + min(
            max(step * max(bold * whole / max(resists, TINY), 1.0), -reach), reach
        )
        own[i] = resists


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
    """A conjugate step (:mod:`wball.kernels.projected_sinkhorn`): the next ``beta`` from ``NEW``
    and the ``held`` sweeps before it (-1 drops them). Returns the number of sweeps held
    afterwards."""
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
