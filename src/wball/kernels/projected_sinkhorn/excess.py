r"""Into the box on a CPU: mass above ``hi`` goes back where it came from, pixel by pixel, until somebody has room.

With ``keep_j`` the share of what pixel ``j`` receives that it takes, ``z_j = x_j - sum_k P_jk keep_k + keep_j r_j``. A
pixel above ``hi`` lowers its ``keep`` until it is not; those who sent the mass have it again, and may be above ``hi``
then. Only pixels above ``hi`` are looked at, one after another. In the middle of a large full area excess finds room
only at some distance: hundreds of sweeps over whole images away. It is small there, but a repair that gives up on one
pixel gives up on the image. Every pixel goes somewhat below ``hi`` (successive
overrelaxation), so that mass does not go to and fro.

What was sent back is budget that nobody spends. Where that is too much, ``beta + log(keep)`` are better potentials than
a sweep's: full columns have what they may have there. Such steps are combined like those of sweeps
(:mod:`wball.kernels.projected_sinkhorn.memory`): an image of 512 x 512 x 3 with large full areas takes about 15 sweeps
instead of 301.
"""

from __future__ import annotations

import numpy as np

from wball.kernels.compiled import compiled, log
from wball.kernels.factors import SUMS, TINY, receive, send
from wball.kernels.projected_sinkhorn.sweeps import BETA, KEEP, NEW

FURTHER = 1.9
"""Pixels send back so many times their excess."""
VISITS = 1
"""Give up after so many visits for every pixel of the image, on average."""
ROUNDS = 3
"""Sums of what was sent back drift by rounding: they are made anew so often."""
LEAST = 0.1
"""No more than this factor on a potential at a time."""


@compiled(inner=True)
def drain(f, flat, weight, box):  # type: ignore[no-untyped-def]
    """``keep`` such that no column is above the box, ``give`` being 1, or ``False`` if that takes too long."""
    pad, n = flat.pad, flat.n
    x, keep, sent, received = f.x, f.keep, f.sent, f.received
    for i in range(pad, pad + n):
        keep[i] = 1.0
        f.give[i] = 1.0
    receive(f, flat, weight, flat.first)
    column, queue, waits = (
        np.zeros(n + 2 * pad),
        np.empty(n, dtype=np.int64),
        np.zeros(n + 2 * pad, dtype=np.bool_),
    )
    visits, most = 0, VISITS * n
    for _ in range(ROUNDS + 1):
        send(f, flat, weight)
        head, waiting = 0, 0
        for i in range(pad, pad + n):
            column[i] = x[i] - sent[i] + keep[i] * received[i]
            if column[i] > box.hi + box.slack:
                queue[waiting] = i
                waits[i] = True
                waiting += 1
        if waiting == 0:
            return True
        while waiting > 0 and visits < most:
            j = queue[head]
            head = head + 1 if head + 1 < n else 0
            waiting -= 1
            visits += 1
            waits[j] = False
            back = min(FURTHER * (column[j] - box.hi), keep[j] * received[j])
            column[j] -= back
            share = min(
                back / max(received[j], TINY), keep[j]
            )  # rounded, it may be more than there is
            keep[j] -= share
            for k in range(flat.first, weight.size):
                i = j + flat.back[k]
                column[i] += f.a[i] * weight[k] * f.e[j] * share
                if column[i] > box.hi + 0.5 * box.slack and not waits[i]:
                    waits[i] = True
                    queue[(head + waiting) % n] = i
                    waiting += 1
    return False


@compiled(inner=True, fastmath=SUMS)
def absorb(work, count, reached):  # type: ignore[no-untyped-def]
    """``beta + log(keep)`` in ``NEW``."""
    beta, new, keep = work[BETA, :count], work[NEW, :count], work[KEEP]
    for i in range(count):
        new[i] = beta[i] + log(max(keep[reached[i]], LEAST))
