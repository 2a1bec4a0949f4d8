r"""Exact and entropic plans: a proximal point method whose steps are solved by Newton's method.

The projection minimises ``1/2 |w - z|^2`` over the plans ``P_ij = x_i pi_ij`` of a ball (see
:mod:`wball.kernels.books`). Instead of an entropy, a step from the shares ``pi^k`` adds

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

from torch import Tensor

from wball.kernels import dispatch
from wball.kernels.books import Best, Problem


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, kernel: str, warm: bool = False
) -> Tensor:
    """Improve ``best`` for every image; returns the Newton steps used.

    Args:
        problem: what to minimise. Triton takes exact problems only, and linear columns in a box.
        start: column potentials to start from.
        max_iter: Newton steps.
        best: the best plans and bounds, improved in place.
        kernel: the kernel chosen by :func:`wball.kernels.dispatch.choose`.
        warm: whether ``start`` and ``best.psi`` solve a similar problem.
    """
    solve = dispatch.load("proximal_newton", kernel).proximal_newton
    steps: Tensor = solve(problem, start, max_iter, best, warm=warm)
    return steps
