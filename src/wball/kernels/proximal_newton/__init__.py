r"""Exact and entropic plans: a proximal point method whose steps are solved by Newton's method.

The projection minimises ``1/2 |w - z|^2`` over the plans ``P_ij = x_i pi_ij`` of a ball (see
:mod:`wball.kernels.column_problem`). Instead of an entropy, a step from the shares ``pi^k`` adds

.. math:: \frac{1}{2 \sigma} \sum_i x_i \sum_j (\pi_{ij} - \pi^k_{ij})^2.

Rows and columns are then eliminated in closed form: with potentials ``u`` of the columns and a
    price ``psi`` of cost,

.. math::
    \pi_i = \mathrm{proj}_{simplex}\big(\pi^k_i + \sigma (u - \psi C_i)\big), \qquad
    z_j(u) = \mathrm{clip}(w_j - u_j),

which leaves a smooth concave dual in ``(u, psi)`` whose gradient is piecewise linear. Its
generalised Hessian is the columns' curvature plus, for each row, ``sigma x_i`` times a projection
on the few moves in use: two or three a row from the first step on, so that conjugate gradients walk
over those alone. The centre ``pi^k`` moves to the solution of its own step, which converges for any
``sigma``; a step that Newton's method solves at once lets ``sigma`` grow, one that it cannot solve
makes it shrink.

With entropy one step is the whole problem: :math:`\pi_i = \mathrm{softmax}((u - \psi C_i) / \tau)`,
whose derivative has the shares as weights instead of equal ones. Steps at higher temperatures
(``sigma = 1 / tau`` grows to its last value) only find its starting point.

For the support function columns are linear, ``-g z``: a column sits at its kink ``u = g`` while it
is neither full nor drained, takes what the plan gives it, and potentials never cross it within a
step.

After each step the plan is repaired and the bound of ``(u, psi)`` is taken without any proximal
term: both are sound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from wball.inputs import per_image
from wball.kernels import dispatch
from wball.kernels.column_problem import Best, Problem
from wball.plan import Plan


class Method(NamedTuple):
    """Settings that depend on the kind of columns and on the entropy. The numbers were found by
    trial on digits and small colour images; any others are as correct, and slower or faster.

    Attributes:
        first: the first ``sigma`` times the range of ``u``: about the largest change of a share.
            Without entropy, columns that are quadratic begin at half a share, because ``w - x`` is
            far from their solution; linear ones begin near it, and with entropy a step has no
            centre that it could leave.
        settled: a step is solved when the residual of the columns is this fraction of what the plan
            moved (with entropy, of the plan's columns). A residual costs a gap of the order of its
            size times the error of ``u``, and the repair of the plan costs as much again.
        cg_tol: conjugate gradients end at this fraction of the residual. Newton's method on a
            piecewise linear gradient gains at most the pieces it crosses, so that precision is
            wasted on quadratic columns. Linear ones have no curvature of their own, and their
            errors along rows that tie are not damped by anything else.
        stiffness: Newton's matrix gets this times ``sigma`` times a column's residual on its
            diagonal, so that a column alone changes shares (with entropy, their logarithms) by at
            most 1 / ``stiffness``. Where few rows have a choice, single columns would run far
            beyond the next such row otherwise, and the line search would hold up all.
    """

    first: float
    settled: float
    cg_tol: float
    stiffness: float


QUADRATIC = Method(first=0.5, settled=0.2, cg_tol=0.1, stiffness=4.0)
LINEAR = Method(first=6.0, settled=0.05, cg_tol=0.01, stiffness=4.0)
ENTROPIC_QUADRATIC = Method(first=4.0, settled=3e-4, cg_tol=1e-2, stiffness=0.3)
ENTROPIC_LINEAR = Method(first=20.0, settled=3e-4, cg_tol=1e-2, stiffness=0.3)


def method(problem: Problem) -> Method:
    """The settings for these problems."""
    if problem.exact:
        return LINEAR if problem.columns.linear else QUADRATIC
    return ENTROPIC_LINEAR if problem.columns.linear else ENTROPIC_QUADRATIC


SPENT, SPENT_LINEAR = 0.02, 0.3
"""The cost of a solved step is within this fraction of the budget from it, and with linear columns
also within this fraction of what the plan moved: at a price a little too high, their plans drift
back step by step."""
ROUNDING = 1e-15
"""Residuals are rounded by this times ``sigma``, the range of ``u`` and the mass. A step whose
centre is the solution moves nothing, and no residual is small beside that."""
WARM = 8.0
"""Factor on the first ``sigma`` where ``u`` is the solution of a similar problem."""
GROWTH, QUICK, SHRINK = 1.4, 6, 4.0
"""``sigma`` grows after steps of at most ``QUICK`` Newton steps, and shrinks after steps that were
not solved."""
SLIDE = 2.0
"""``sigma`` grows by this after a single Newton step that did not narrow the gap: the plan slides
along an edge, as with directions of signs, whose moves nearly tie."""
COOLING = 6.0
"""With entropy, ``sigma`` grows by this after each solved step until it is ``1 / tau``."""
SPARSE = 32.0
"""With entropy, nats below the largest share of a row (in Triton, below 1) at which a share counts
as 0: e^-32 is a hundredth of float64's rounding."""
SHARPER, SHARPEST = 0.05, 1e-9
"""Repeated steps at ``1 / tau`` are solved this much more precisely each time, and this precisely
at last."""
SHARP = 0.25
"""The same without entropy, after a step whose repair lost more than its gap."""
RELAX = 0.25
"""Factor on ``stiffness`` after each Newton step that was not shortened: some columns have far to
go. It grows by as much after one that was."""
INNER, CG_MAX, HALVINGS = 45, 300, 25
"""Newton steps of a proximal step, conjugate gradients of a Newton step, and trials of a line
search, at most. They only end what does not converge: a step that ends early begins again with a
smaller ``sigma``, and its Newton steps are lost."""
MOST = 1e8
"""The largest ``sigma`` times the range of ``u``: beyond it, shares are lost in the rounding of
their sums."""
NEARLY = 1e-6
"""Columns this close to ``hi`` count as full while a problem is solved. Resized photographs have
white pixels a rounding error below 1: such room is worth nothing, but is a kink of the dual."""
PATIENCE = 30
"""An image is given up after this many proximal steps that did not narrow the gap."""
PROMISING = 1.5
"""A plan is repaired when its own gap is at most this times the one allowed for what it reaches, or
when it is the last. The repair costs more than a step and never narrows the gap."""


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> tuple[Tensor, str]:
    """Improve ``best`` for the unsolved images.

    Args:
        problem: what to minimise.
        start: column potentials to start from.
        max_iter: Newton steps per image.
        best: the best plans and bounds, improved in place.
        warm: whether ``start`` and ``best.psi`` solve a similar problem.

    Returns:
        The Newton steps used per image, and the name of the kernel that served.
    """
    x, hi = problem.x, problem.columns.hi
    near = (x < hi) & (x > hi * (1 - NEARLY)) & ~per_image(problem.single, x)
    index, todo = near.flatten(1).any(1).nonzero().flatten(), problem.todo(best)
    kernel = dispatch.choose("proximal_newton", x, problem.moves)
    n_iter = torch.zeros_like(best.primal, dtype=torch.long)
    if not todo.numel():
        return n_iter, "none"
    solve = dispatch.load("proximal_newton", kernel).proximal_newton
    home = torch.device("cpu") if kernel == "cpu" else x.device
    if len(todo) == len(x) and home == x.device and not index.numel():
        return solve(problem, start, max_iter, best, warm=warm), kernel
    # Images with pixels that are nearly full, as if these were; then those that are left.
    for full, part in ((torch.where(near, hi, x), 0.5), (x, 1.0)):
        todo = index if part < 1 else problem.todo(best)
        if not todo.numel():
            continue
        here = problem.take(todo)
        limits = here.tolerance
        strict = replace(limits, tol=part * limits.tol, floor=part * limits.floor)
        nearby = replace(here, x=full[todo], tolerance=strict)
        found = nearby.at_centre(here.columns.objective(nearby.x))
        found.psi.copy_(best.psi[todo])
        found = found.to(home)
        steps = solve(nearby.to(home), start[todo].to(home), max_iter, found, warm=warm)
        n_iter[todo] += steps.to(x.device)
        found = found.to(x.device)
        share = (here.x / nearby.x).nan_to_num(1.0).unsqueeze(2)
        plan = Plan(here.moves, found.flow.mul_(share))
        best.keep_plan(todo, plan, here.objective(plan))
        best.keep_duals(todo, found.u, found.psi, here.lower_bounds(found.u, found.psi))
    return n_iter, kernel
