"""Settings of the proximal Newton method, the same for every kernel."""

from typing import NamedTuple

from wball.kernels.books import Problem


class Method(NamedTuple):
    """Settings that depend on the columns and on the entropy.

    Attributes:
        first: the first ``sigma`` times the range of ``u``, about the largest change of a share.
            Linear columns start at the potentials without a box, which suit most rows; with 15,
            photographs with directions of signs were not solved.
        settled: a step is solved when the residual of the columns is this fraction of what the plan
            moved; with entropy, of the plan's columns. With 0.5, some digits took twice the steps.
        cg_tol: conjugate gradients end at this fraction of the residual. Steps of projections end
            early, where moves come into use or fall out of it: with 0.03 they needed half as many
            products again. Linear columns have no curvature of their own: with 0.03, small boxed
            images took up to 300 steps.
        damping: Newton's matrix gets this times residual / range of ``u`` on its diagonal (of ``g``
            for linear columns, whose potentials may all come to be equal). Full
            pixels that exchange mass only with each other leave directions without curvature. With
            a hundredth of this, the line search tried two or three lengths a step; with four times
            this, points far from two full pixels took hundreds of steps.
    """

    first: float
    settled: float
    cg_tol: float
    damping: float


QUADRATIC = Method(first=0.5, settled=0.2, cg_tol=0.1, damping=1.0)
LINEAR = Method(first=6.0, settled=0.2, cg_tol=0.003, damping=4.0)
ENTROPIC_QUADRATIC = Method(first=4.0, settled=3e-4, cg_tol=1e-2, damping=1e-2)
ENTROPIC_LINEAR = Method(first=4.0, settled=3e-4, cg_tol=1e-2, damping=1.0)


def method(problem: Problem) -> Method:
    """The settings for these problems."""
    if problem.exact:
        return LINEAR if problem.columns.linear else QUADRATIC
    return ENTROPIC_LINEAR if problem.columns.linear else ENTROPIC_QUADRATIC


SPENT, SPENT_LINEAR = 0.02, 0.3
"""The cost of a solved step is within this fraction of the budget from it, and with linear columns
also within this fraction of what the plan moved: at a price a little too high, their plans drift
back step by step."""
WARM = 8.0
"""Factor on the first ``sigma`` where ``u`` is the solution of a similar problem."""
GROWTH, QUICK, SLOW, SHRINK = 1.4, 6, 12, 4.0
"""``sigma`` grows after steps of at most ``QUICK`` Newton steps and falls by as much after more
than ``SLOW``; it shrinks after steps that were not solved."""
COOLING = 6.0
"""With entropy, ``sigma`` grows by this after each solved step until it is ``1 / tau``."""
SHARPER, SHARPEST = 0.05, 1e-9
"""Repeated steps at ``1 / tau`` are solved this much more precisely each time, and this precisely
at last."""
INNER, CG_MAX, HALVINGS = 20, 300, 25
"""Newton steps of a proximal step, conjugate gradients of a Newton step, and trials of a line
search, at most."""
MOST = 1e8
"""The largest ``sigma`` times the range of ``u``: beyond it, shares are lost in the rounding of
their sums."""
PATIENCE = 12
"""An image is given up after this many proximal steps that did not narrow the gap."""
PROMISING = 1.5
"""A plan is repaired when its own gap is at most this times the allowed one, or when it is the
last. The repair costs more than a step and never narrows the gap."""
