r"""Support function of the Wasserstein ball: the largest ``<g, z>`` over its points. The paper
calls it the conjugate.

.. math::
    \sigma(g) = \max_{z \in B(x, \epsilon)} \langle g, z \rangle
    \;\Big[ - \tfrac{m}{\lambda} \sum_{ij} \hat P_{ij} \log \hat P_{ij} \Big]

It is the Frank-Wolfe oracle of the attacks and the input bound of the certificates. Any prices give
an upper bound: for ``psi >= 0`` on cost and any potential ``u`` on the columns

.. math::
    \sigma(g) \le \psi E + \sum_i x_i \max_j (u_j - \psi C_{ij})
    + \sum_j \max_{lo \le z \le hi} (g_j - u_j) z,

so ``upper`` is sound at every iteration. Without a box ``u = g`` is optimal and one scalar ``psi``
is left: a convex, piecewise linear function whose kink is found exactly, and the maximiser mixes
the two plans that meet there so that their cost is the budget. With a box, and with entropy,
Newton's method solves the problem (:mod:`wball.kernels.proximal_newton`). Finite ``reg`` is the
Conjugate Sinkhorn problem: the plan is ``x_i softmax_j(reg g_j - psi C_ij)``, in the units of an
image scaled to mass 1.
"""

import math

import torch
from torch import Tensor

from wball.cost import Moves
from wball.inputs import dot, dot_and_size, largest, per_image
from wball.kernels.column_problem import Best, Deadline, LinearColumns, Problem, Tolerance
from wball.kernels.proximal_newton import proximal_newton
from wball.kernels.row_maximum import linear_maximum
from wball.kernels.row_maximum.reference import maximising_plan
from wball.result import Duals, SupportResult
from wball.solvers.problem import (
    Effort,
    PackedFlow,
    TransportProblem,
    as_given,
    as_grid,
    in_chunks,
    packed,
    statuses,
)


def support(problem: TransportProblem, g: Tensor, effort: Effort) -> SupportResult:
    """``max <g, z>`` over the ball.

    Args:
        problem: centres, moves, budget and box.
        g: directions, of the shape of the centres. The ball checks it with its images.
        effort: the entropy (finite ``reg``: the paper's Conjugate Sinkhorn), and when to stop. An
            image is done when ``gap <= tol * (what moving gained + 1e-2 <|g|, x>)``.

    Returns:
        A :class:`~wball.result.SupportResult`. For finite ``reg``, ``value`` and ``upper`` still
        bound the exact maximum, so that ``gap`` includes what the entropy costs; ``CONVERGED`` then
        refers to the entropic problem.
    """
    g, effort = g.detach(), effort.checked()

    def solve(
        problem: TransportProblem, part: slice, moves: Moves
    ) -> tuple[SupportResult, PackedFlow]:
        return _solved(problem, g[part], moves, effort)

    return in_chunks(problem, solve)


def _solved(
    problem: TransportProblem, g: Tensor, moves: Moves, effort: Effort
) -> tuple[SupportResult, PackedFlow]:
    """The result for a chunk of images, and their plans."""
    x, budget, tol, exact = problem.x, problem.budget, effort.tol, effort.exact
    deadline = Deadline(effort.time_limit * len(x))
    grid, direction = as_grid(x), as_grid(g)
    # The exact maximum scales with g, and tolerances suit directions of size 1. Powers
    # of 2 are exact.
    size = _size(direction) if exact else torch.ones_like(budget)
    scaled = direction / per_image(size, direction)
    tau = torch.full_like(budget, 0.0 if exact else 1.0 / effort.reg)
    still, most = dot_and_size(scaled, grid)
    floor = torch.add(1e-300 / size, most, alpha=tol * 1e-2)  # a gap this small counts as 0
    tolerance = Tolerance(tol, 0.0, still, floor)
    goal = Problem(
        grid, budget, moves, LinearColumns(scaled, *problem.limits), tau, exact, tolerance, deadline
    )
    best = goal.at_centre(-still)
    if bool(goal.single.any()):
        _bound_single(goal, best)
    if exact and math.isinf(goal.columns.hi):
        n_iter, kernel = _without_box(goal, effort.max_iter, best)
    else:
        n_iter, kernel = proximal_newton(goal, scaled, effort.max_iter, best)
    goal.hold_back(best, problem.spendable(z=best.z.view_as(x)))
    point = as_given(best.z, x, problem.box)
    reached = as_grid(point)
    value, weight = dot_and_size(direction, reached)
    upper, done = torch.maximum(-size * best.hard, value), goal.done(best)
    if exact:
        # Sums over images of denormal mass may round to 0: check the gap of the returned point.
        heft = size * most
        allowed = torch.add(torch.addcmul(value, size, still, value=-1).abs(), heft, alpha=1e-2)
        rounding = 0.5 * torch.finfo(point.dtype).eps + 1e-12
        allowed = torch.add(tol * allowed, heft + weight, alpha=rounding)
        done = done & (upper - value <= allowed + 1e-300)
    status = statuses(done, lambda: n_iter < effort.max_iter, deadline.late)
    duals = Duals((per_image(size, best.u) * best.u).reshape(x.shape), size * best.psi)
    result = SupportResult(point, value, upper, status, n_iter, duals, kernel=kernel)
    return result, packed(best.flow)


def _bound_single(problem: Problem, best: Best) -> None:
    """Bound ``-max <g, z>`` of balls without a budget, where only free moves are possible."""
    moves = problem.moves
    gained = torch.where(moves.free(), moves.gather(problem.columns.target), -math.inf)
    reached = dot(problem.x, gained.amax(2))
    best.dual.copy_(torch.where(problem.single, -reached, best.dual))
    best.hard.copy_(best.dual)


def _without_box(problem: Problem, max_iter: int, best: Best) -> tuple[Tensor, str]:
    """Keep the best plans of the problem without a box, where ``u = g`` is optimal, after repairing
    them into the box, and their bounds. Returns the steps used, and the kernel."""
    n_iter, todo = torch.zeros_like(best.primal, dtype=torch.long), problem.todo(best)
    if not todo.numel():
        return n_iter, "none"
    part = problem.take(todo)
    x, g = part.x, part.columns.target
    found = linear_maximum(g, x, part.budget, part.moves, rounds=max_iter, exact=True)
    plan = maximising_plan(g, x, part.budget, part.moves, found)
    bound = -(found.value + 1e-14 * (found.value.abs() + dot(g.abs(), x)))
    best.keep_duals(todo, g, found.psi, (bound, bound))
    plan = part.repaired(plan)
    best.keep_plan(todo, plan, part.objective(plan))
    n_iter[todo] = found.n_iter
    return n_iter, "torch"


def _size(direction: Tensor) -> Tensor:
    """The power of 2 below each image's largest entry; any positive number where all entries are
    0."""
    return torch.exp2((torch.frexp(largest(direction)).exponent - 1).double())
