r"""Projection onto the Wasserstein ball: the nearest point of the ball to an image.

.. math::
    \mathrm{proj}(w) = \operatorname*{argmin}_{z \in B(x, \epsilon)} \tfrac12 \|w - z\|^2
    \;\Big[ + \tfrac{m^2}{\lambda} \sum_{ij} \hat P_{ij} \log \hat P_{ij},\ \hat P = P / m \Big]

``reg = inf`` leaves the bracket out: the exact Euclidean projection, solved by
:mod:`wball.kernels.proximal_newton`. Finite ``reg`` is the paper's ``lambda``, in the units of an
image scaled to mass 1, so that in image units the temperature is ``tau = m / reg``. It is solved by
:mod:`wball.kernels.projected_sinkhorn`, from a cold start or a warm one. Sweeps converge slowly
where ``tau`` is small: images that are not solved
continue with :mod:`wball.kernels.proximal_newton` as well.

The box is part of the ball. Whatever stops the solver, the returned point is the column sum of a
repaired plan, hence in the ball, and ``gap`` bounds its distance from the optimum, because the dual
value is a lower bound at every iterate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wball import inputs
from wball.cost import Moves, StencilMoves
from wball.inputs import dot, largest, per_image
from wball.kernels.books import Problem, Tolerance
from wball.kernels.columns import Quadratic
from wball.kernels.deadline import Deadline
from wball.kernels.projected_sinkhorn import (
    PARTS,
    ProjectedSinkhorn,
    Projection,
    entropy_at_rest,
    projected_sinkhorn,
)
from wball.plan import FactoredPlan, Plan
from wball.result import Duals, ProjectionResult, Status, joined_kernels, joined_results, statuses
from wball.solvers.minimum import Minimum
from wball.solvers.problem import (
    TIME_LIMIT,
    PackedPlans,
    TransportProblem,
    as_given,
    as_grid,
    as_images,
    chunks,
)

SWEEPS = 400
"""Sweeps of an image at most, before Newton's method takes over."""

PAPER_TOL = 0.01
"""Share of the tolerance for the paper's points: ``w - u`` is off by the root of the gap."""


def project(
    problem: TransportProblem,
    w: Tensor,
    *,
    reg: float = math.inf,
    tol: float = 1e-5,
    max_iter: int = 500,
    init: Duals | None = None,
    mode: Literal["exact", "paper"] = "exact",
    time_limit: float = TIME_LIMIT,
) -> ProjectionResult:
    """The point of the ball nearest to ``w``.

    Args:
        problem: centres, moves, budget and box.
        w: points to project, any finite values of the same shape. The ball checks it, and ``init``.
        reg: the paper's lambda in mass-1 units; ``inf`` is the exact projection.
        tol: relative duality gap at which an image is done.
        max_iter: Newton steps per image.
        init: dual variables of an earlier, similar projection.
        mode: ``"paper"`` is the original procedure for comparison: the limit of Algorithm 2,
            without a box, then a clamp, which destroys mass. Its points are in no ball; all others
            are.
        time_limit: seconds per image, on average over those solved together. An image that takes
            longer gets the best point found, which is in the ball, and the status ``TIME_LIMIT``.

    Returns:
        A :class:`~wball.result.ProjectionResult`. An image is ``CONVERGED`` only if its gap is at
        most
        ``tol * d + tol^2 * 1/2 |w - x|^2`` with ``d = 1/2 |w - z|^2``, so that ``z`` is within
        ``sqrt(tol) |w - z|`` of the optimum. The second term is for points inside the ball, where
        ``d`` vanishes; where ``d`` is below 3 % of ``d`` and the entropy together, that share of
        them counts instead.
    """
    w = w.detach()
    reg = inputs.check_positive("reg", reg, inf=True)
    tol = inputs.check_positive("tol", tol)
    inputs.check_count("max_iter", max_iter)
    effort = tol, max_iter, inputs.check_positive("time_limit", time_limit, inf=True)
    if mode not in ("exact", "paper"):
        raise ValueError(f'mode must be "exact" or "paper", got {mode!r}')
    if not isinstance(init, Duals | None):
        raise TypeError(
            f"init must be the duals of a projection (result.duals), got {type(init).__name__}"
        )
    if mode == "paper":
        if math.isinf(reg):
            raise ValueError(
                'mode="paper" needs a finite reg (the paper uses 1000 for MNIST, 3000 for CIFAR-10)'
            )
        return _paper(problem, w, reg, tol, max_iter)
    if math.isinf(reg):
        return _by_newton(problem, w, reg, effort, init)
    return _entropic(problem, w, reg, effort, init)


def _entropic(
    problem: TransportProblem,
    w: Tensor,
    reg: float,
    effort: tuple[float, int, float],
    init: Duals | None,
) -> ProjectionResult:
    """Sweeps; images that they leave unsolved take Newton steps."""
    if not isinstance(problem.moves(as_images(problem.x)), StencilMoves):
        return _by_newton(problem, w, reg, effort, init)  # sweeps over a matrix are slow
    found = _swept(problem, w, reg, (effort[0], SWEEPS), init)
    left = [k for k, status in enumerate(found.status) if status is not Status.CONVERGED]
    if not left:
        return found
    index = torch.tensor(left, device=w.device)
    return _patched(found, index, _by_newton(problem.take(index), w[index], reg, effort, None))


def _swept(
    problem: TransportProblem,
    w: Tensor,
    reg: float,
    effort: tuple[float, int],
    init: Duals | None,
) -> ProjectionResult:
    """The entropic projection of ``w`` by projected Sinkhorn, for all images at once."""
    x, budget, spend = problem.x, problem.budget, problem.spendable()
    grid, tau = as_images(x), problem.mass / reg
    moves = problem.moves(grid)
    u, psi = (None, None) if init is None else (as_images(init.beta), init.psi)
    answer = projected_sinkhorn(Projection(
        grid, as_images(w), spend, moves, problem.box, tau,
        u=u, psi=psi, tol=effort[0], max_iter=effort[1], factors=True,
    ))  # fmt: skip
    gap, solved = answer.gap, answer.gap <= answer.allowed
    if spend is not budget:  # something is held back
        gap = gap + answer.psi * (budget - spend).clamp(min=0)
        solved = (gap <= answer.allowed) & ~((spend <= 0) & (budget > 0))
    # The kernel treats a ball without budget as one point, even if moves are free.
    if moves.has_free:
        solved = solved & ~((spend <= 0) & _escapes(moves, grid))
    return ProjectionResult(
        point=answer.z.reshape(x.shape).to(grid.dtype),
        objective=answer.objective,
        gap=gap,
        residual=answer.residual,
        status=statuses(solved),
        n_iter=answer.n_iter,
        duals=Duals(answer.u.reshape(x.shape), answer.psi),
        write=partial(_plan, moves, grid, tau, answer),
        kernel=answer.kernel,
    )


def _plan(moves: Moves, grid: Tensor, tau: Tensor, answer: ProjectedSinkhorn) -> FactoredPlan:
    assert answer.keep is not None and answer.give is not None
    return FactoredPlan.tempered(moves, grid, answer.u, answer.psi, tau, answer.keep, answer.give)


def _escapes(moves: Moves, x: Tensor) -> Tensor:
    """Whether some of an image's mass can leave its pixel at no cost, per image."""
    return ((moves.free() & ~moves.stay()).any(0) & (x > 0)).flatten(1).any(1)


def _by_newton(
    problem: TransportProblem,
    w: Tensor,
    reg: float,
    effort: tuple[float, int, float],
    init: Duals | None,
) -> ProjectionResult:
    """The projection by Newton's method, in chunks of images whose plans fit in memory."""
    x = problem.x
    moves = problem.moves(as_grid(x[:0]))
    plans = PackedPlans(moves)
    parts = [
        _solved(problem.take(part), w[part], moves, reg, effort, init and init.take(part), plans)
        for part in chunks(x, moves)
    ]
    return joined_results(parts, plans.written)


def _solved(
    problem: TransportProblem,
    w: Tensor,
    moves: Moves,
    reg: float,
    effort: tuple[float, int, float],
    init: Duals | None,
    plans: PackedPlans,
) -> ProjectionResult:
    """The answer for a chunk of images, whose plans are added to ``plans``."""
    tol, max_iter, time_limit = effort
    deadline = Deadline(time_limit * len(problem.x))
    x, target, lo_hi = as_grid(problem.x), as_grid(w), problem.limits
    none, exact = torch.zeros_like(problem.mass), math.isinf(reg)
    tau = none if exact else problem.mass / reg
    columns = Quadratic(target, *lo_hi)
    centre = columns.objective(x)  # mass that stays has no entropy
    rounding = 1e-18 * (1 + dot(target, target))
    tolerance = Tolerance(tol, PARTS, none, torch.add(rounding, centre, alpha=tol**2))
    goal = Problem(x, problem.budget, moves, columns, tau, exact, tolerance, deadline)
    alone = goal.single & ~_escapes(moves, x) if moves.has_free else goal.single
    # Zero prices give a bound, so that the gap is finite wherever the solver stops.
    run = Minimum(goal, centre, torch.where(alone, centre, goal.bound_without_prices()))
    start = target - x
    if init is not None:
        start = as_grid(init.beta)
        run.best.psi.copy_(init.psi)
    run.newton(start, max_iter, warm=init is not None)
    best = run.hold_back(problem.spendable())
    plans.add(best.flow)
    off = best.z - (target - best.u).clamp(*lo_hi)
    return ProjectionResult(
        point=as_given(best.z, problem.x, problem.box),
        objective=best.primal if exact else best.primal + entropy_at_rest(x, tau),
        gap=(best.primal - best.dual).clamp(min=0),
        residual=largest(off).masked_fill(goal.single, 0.0),
        status=statuses(run.done, lambda: (run.n_iter < max_iter) & ~goal.single, deadline.late),
        n_iter=run.n_iter,
        duals=Duals(best.u.reshape(problem.x.shape), best.psi),
        kernel=joined_kernels(run.served),
    )


def _patched(found: ProjectionResult, index: Tensor, others: ProjectionResult) -> ProjectionResult:
    """The result with the images at ``index`` replaced; their steps are added."""

    def put(mine: Tensor, theirs: Tensor) -> Tensor:
        return mine.index_copy(0, index, theirs.to(mine))

    def written() -> Plan:
        mine, theirs = found.plan, others.plan
        assert mine is not None and theirs is not None
        return mine.put(index, theirs)

    assert found.duals is not None and others.duals is not None
    status = list(found.status)
    for place, new in zip(index.tolist(), others.status, strict=True):
        status[place] = new
    return ProjectionResult(
        point=put(found.point, others.point),
        objective=put(found.objective, others.objective),
        gap=put(found.gap, others.gap),
        residual=put(found.residual, others.residual),
        status=tuple(status),
        n_iter=found.n_iter.index_add(0, index, others.n_iter.to(found.n_iter)),
        duals=Duals(
            put(found.duals.beta, others.duals.beta), put(found.duals.psi, others.duals.psi)
        ),
        write=written,
        kernel=joined_kernels((found.kernel, others.kernel)),
    )


def _paper(
    problem: TransportProblem, w: Tensor, reg: float, tol: float, max_iter: int
) -> ProjectionResult:
    """The limit of Algorithm 2: ``w - u`` of the problem without a box, clamped.

    No plan is returned, because none proves this point. ``residual`` is the largest difference
    between the unclamped point and the columns of the plan.
    """
    unboxed = replace(problem, box=None)
    found = _entropic(unboxed, w, reg, (PAPER_TOL * tol, max_iter, math.inf), None)
    assert found.duals is not None
    still = per_image((problem.budget <= 0) | (problem.mass <= 0), w)
    point = torch.where(still, problem.x, w - found.duals.beta)
    residual = largest(found.point - point)
    return replace(found, point=as_given(point, w, problem.box), residual=residual, write=None)
