r"""Support function of the Wasserstein ball: the largest ``<g, z>`` over its points. The paper
calls it the conjugate.

.. math::
    \sigma(g) = \max_{z \in B(x, \epsilon)} \langle g, z \rangle
    \;\Big[ - \tfrac{m}{\lambda} \sum_{ij} \hat P_{ij} \log \hat P_{ij} \Big]

It is the Frank-Wolfe oracle of the attacks and the input bound of the certificates. Any prices give
an upper bound: for ``psi >= 0`` on cost and any potential ``u`` on the columns

.. math::
    \sigma(g) \le \psi E + \sum_i x_i \max_j (u_j - \psi C_{ij}) + \sum_j \max_{lo \le z \le hi} (g_j - u_j) z,

so ``upper`` is sound at every iteration. Without a box ``u = g`` is optimal and one scalar ``psi``
is left: a convex, piecewise linear function whose kink is found exactly, and the maximiser mixes
the two plans that meet there so that their cost is the budget. With a box, and with entropy,
Newton's method solves the problem (:mod:`wball.kernels.proximal_newton`). Finite ``reg`` is the
Conjugate Sinkhorn problem: the plan is ``x_i softmax_j(reg g_j - psi C_ij)``, in the units of an
image scaled to mass 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball import inputs
from wball.cost import Moves
from wball.inputs import dot, dot_and_size, largest, per_image
from wball.kernels.books import Problem, Tolerance
from wball.kernels.columns import Linear
from wball.kernels.deadline import Deadline
from wball.result import SupportResult, joined_kernels, joined_results, statuses
from wball.solvers.minimum import Minimum
from wball.solvers.problem import (
    TIME_LIMIT,
    PackedPlans,
    TransportProblem,
    as_given,
    as_grid,
    chunks,
)


def support(
    problem: TransportProblem,
    g: Tensor,
    *,
    reg: float = math.inf,
    tol: float = 1e-6,
    max_iter: int = 500,
    time_limit: float = TIME_LIMIT,
) -> SupportResult:
    """``max <g, z>`` over the ball.

    Args:
        problem: centres, moves, budget and box.
        g: directions, of the shape of the centres. The ball checks it with its images.
        reg: ``inf`` for the exact maximum; finite for the entropic problem, the paper's Conjugate
            Sinkhorn.
        tol: relative gap at which an image is done: ``gap <= tol * (what moving gained + 1e-2 <|g|, x>)``.
        max_iter: steps per image.
        time_limit: seconds for each image, on average of those solved together. An image that takes
            longer gets the best point found, which is in the ball, and the status ``TIME_LIMIT``.

    Returns:
        A :class:`~wball.result.SupportResult`. For finite ``reg``, ``value`` and ``upper`` still
        bound the exact maximum, so that ``gap`` includes what the entropy costs; ``CONVERGED`` then
        refers to the entropic problem.
    """
    x = problem.x
    g = g.detach()
    reg = inputs.check_positive("reg", reg, inf=True)
    tol = inputs.check_positive("tol", tol)
    inputs.check_count("max_iter", max_iter)
    time_limit = inputs.check_positive("time_limit", time_limit, inf=True)
    moves = problem.moves(as_grid(x[:0]))
    plans = PackedPlans(moves)
    effort = tol, max_iter, time_limit
    parts = [
        _solved(problem.take(part), g[part], moves, reg, effort, plans) for part in chunks(x, moves)
    ]
    return joined_results(parts, plans.written)


def _solved(
    problem: TransportProblem,
    g: Tensor,
    moves: Moves,
    reg: float,
    effort: tuple[float, int, float],
    plans: PackedPlans,
) -> SupportResult:
    """The answer for a chunk of images, whose plans are added to ``plans``."""
    x, budget, (tol, max_iter, time_limit) = problem.x, problem.budget, effort
    deadline = Deadline(time_limit * len(x))
    grid, direction = as_grid(x), as_grid(g)
    # The exact maximum scales with g, and tolerances suit directions of size 1. Powers
    # of 2 are exact.
    exact = math.isinf(reg)
    size = _size(direction) if exact else torch.ones_like(budget)
    scaled = direction / per_image(size, direction)
    tau = torch.full_like(budget, 0.0 if exact else 1.0 / reg)
    still, most = dot_and_size(scaled, grid)
    floor = torch.add(1e-300 / size, most, alpha=tol * 1e-2)  # a gap this small counts as 0
    tolerance = Tolerance(tol, 0.0, still, floor)
    goal = Problem(
        grid, budget, moves, Linear(scaled, *problem.limits), tau, exact, tolerance, deadline
    )
    run = Minimum(goal, -still)
    if run.todo.numel() < len(x):
        _bound_single(run)
    if exact and math.isinf(goal.columns.hi):
        run.without_box(max_iter)
    else:
        run.newton(scaled, max_iter)
    best = run.hold_back(problem.spendable())
    plans.add(best.flow)
    point = as_given(best.z, x, problem.box)
    reached = as_grid(point)
    value, weight = dot_and_size(direction, reached)
    upper, done = torch.maximum(-size * best.hard, value), run.done
    if exact:
        # Sums over images of denormal mass may round to 0: check the gap of what is returned.
        heft = size * most
        allowed = torch.add(torch.addcmul(value, size, still, value=-1).abs(), heft, alpha=1e-2)
        rounding = 0.5 * torch.finfo(point.dtype).eps + 1e-12
        allowed = torch.add(tol * allowed, heft + weight, alpha=rounding)
        done = done & (upper - value <= allowed + 1e-300)
    status = statuses(done, lambda: run.n_iter < max_iter, deadline.late)
    return SupportResult(point, value, upper, status, run.n_iter, kernel=joined_kernels(run.served))


def _bound_single(run: Minimum) -> None:
    """Bound ``-max <g, z>`` of balls without a budget, where only free moves are possible."""
    problem, moves, best = run.problem, run.problem.moves, run.best
    reached = dot(
        problem.x,
        torch.where(moves.free(), moves.gather(problem.columns.target), -math.inf).amax(2),
    )
    best.dual.copy_(torch.where(problem.single, -reached, best.dual))
    best.hard.copy_(best.dual)


def _size(direction: Tensor) -> Tensor:
    """The power of 2 below each image's largest entry; some number where all are 0."""
    return torch.exp2((torch.frexp(largest(direction)).exponent - 1).to(torch.float64))
