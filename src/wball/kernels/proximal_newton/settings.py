"""Settings of the proximal Newton method, the same for every kernel."""

FIRST, FIRST_LINEAR = 0.5, 6.0
"""The first ``sigma``, in units of 1 / range of ``u``: shares then move by about so much. Where columns are linear the
first potentials are those without a box, and most rows are content with them. With 15, photographs with directions of
signs were not solved at all."""
WARM = 8.0
"""What the first ``sigma`` is multiplied by where ``u`` is the solution of a similar problem."""
GROWTH, QUICK, SLOW, SHRINK = 1.4, 6, 12, 4.0
"""``sigma`` grows after steps of at most ``QUICK`` Newton steps and falls by as much after more than ``SLOW``;
it shrinks after steps that were not solved."""
INNER = 20
"""Newton steps at most for one proximal step."""
SETTLED, SETTLED_LINEAR, SPENT, SPENT_LINEAR = 0.2, 0.05, 0.02, 0.3
"""A step is solved when the columns' residual is this fraction of what the plan moved, and the cost is that near to the
budget; with 0.5 for the residual some digits took twice the steps. What linear columns do not spend is all that is left
in the end: there the cost must also be within this fraction of what the plan moved, or at a price a little too high
plans drift back step by step."""
CG_TOL, CG_TOL_LINEAR, CG_MAX = 0.1, 0.03, 300
"""Conjugate gradients end at this fraction of the residual. Of projections, Newton steps end early anyway, where moves
come into use or fall out of it: with 0.03 they needed half as many products again."""
DAMPING, DAMPING_LINEAR = 1.0, 4.0
"""Newton's matrix gets this times residual / range of ``u`` on its diagonal: full pixels that exchange mass with nobody
else leave directions without curvature, and linear columns have none of their own. Steps end where moves come into use
or fall out of it, which is soon: with a hundredth of this the line search tried two or three lengths a step, and the
more the larger the image. With four times this, points far from two full pixels took hundreds of steps."""
HALVINGS = 25
LEAST = 1e-9
"""Below this multiple of the first ``sigma`` an image is given up."""
MOST = 1e8
"""The largest ``sigma`` times the range of ``u``: beyond it, shares are lost in the rounding of their sums."""
PATIENCE = 12
"""Likewise after so many proximal steps that did not narrow the gap."""
PROMISING = 1.5
"""A plan is repaired when its own gap is at most this times what is allowed, or when it is the last: the repair, which
mends what the plan breaks of box and budget, costs more than a step and never narrows the gap."""

ALL = (
    FIRST, FIRST_LINEAR, WARM, GROWTH, QUICK, SLOW, SHRINK, INNER, SETTLED, SETTLED_LINEAR, SPENT, SPENT_LINEAR,
    CG_TOL, CG_TOL_LINEAR, CG_MAX, DAMPING, DAMPING_LINEAR, HALVINGS, LEAST, MOST, PATIENCE, PROMISING,
)  # fmt: skip
