r"""Projection onto the Wasserstein ball: the nearest point of the ball to an image.

.. math::
    \mathrm{proj}(w) = \operatorname*{argmin}_{z \in B(x, \epsilon)} \tfrac12 \|w - z\|^2
    \;\Big[ + \tfrac{m^2}{\lambda} \sum_{ij} \hat P_{ij} \log \hat P_{ij},\ \hat P = P / m \Big]

``reg = inf`` leaves the bracket out: the exact Euclidean projection, solved by
:mod:`wball.kernels.proximal_newton`. Finite ``reg`` is the paper's ``lambda``, in the units of an
image scaled to mass 1, so that in image units the temperature is ``tau = m / reg``. It is solved by
:mod:`wball.kernels.projected_sinkhorn`, from a cold start or a warm one. Sweeps converge slowly
where ``tau`` is small, and the factors of plans lose digits: such images continue with
:mod:`wball.kernels.proximal_newton` as well.

The box is part of the ball. Whatever stops the solver, the returned point is the column sum of a
repaired plan, hence in the ball, and ``gap`` bounds its distance from the optimum, because the dual
value is a lower bound at every iterate.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from wball.cost import DenseCost, Moves
from wball.inputs import dot, largest
from wball.kernels.column_problem import Deadline, Problem, QuadraticColumns, Tolerance
from wball.kernels.projected_sinkhorn import (
    PARTS,
    Projection,
    entropy_at_rest,
    projected_sinkhorn,
)
from wball.kernels.proximal_newton import proximal_newton
from wball.plan import FactoredPlan, Plan
from wball.result import Duals, ProjectionResult, Status, joined_kernels
from wball.solvers.problem import (
    Effort,
    PackedFlow,
    TransportProblem,
    as_given,
    as_grid,
    as_images,
    in_chunks,
    packed,
    statuses,
)

SWEEPS = 400
"""Sweeps of an image at most before Newton's method takes over; its height and width together, if
that is more, because sweeps carry what happens at one end of a full area to the other."""


def project(
    problem: TransportProblem,
    w: Tensor,
    effort: Effort,
    init: Duals | None = None,
) -> ProjectionResult:
    """The point of the ball nearest to ``w``.

    Args:
        problem: centres, moves, budget and box.
        w: points to project, any finite values of the same shape. The ball checks it, and ``init``.
        effort: the entropy, and when to stop.
        init: dual variables of an earlier, similar projection.

    Returns:
        A :class:`~wball.result.ProjectionResult`. An image is ``CONVERGED`` only if its gap is at
        most ``tol * d + tol^2 * 1/2 |w - x|^2`` with ``d = 1/2 |w - z|^2``, so that ``z`` is within
        ``sqrt(tol) |w - z|`` of the optimum. The second term is for points inside the ball, where
        ``d`` vanishes; where ``d`` is below 3 % of ``d`` and the entropy together, that share of
        them counts instead.
    """
    w, effort = w.detach(), effort.checked()
    if not isinstance(init, Duals | None):
        raise TypeError(
            f"init must be the duals of a projection (result.duals), got {type(init).__name__}"
        )
    if effort.exact or isinstance(problem.cost, DenseCost):  # sweeps over a matrix are slow
        return _by_newton(problem, w, effort, init)
    found = _swept(problem, w, effort, init)
    left = [k for k, status in enumerate(found.status) if status is not Status.CONVERGED]
    if not left:
        return found
    index = torch.tensor(left, device=w.device)
    near = init and init.take(index)
    return _patched(found, index, _by_newton(problem.take(index), w[index], effort, near))


def _swept(
    problem: TransportProblem, w: Tensor, effort: Effort, init: Duals | None
) -> ProjectionResult:
    """The entropic projection of ``w`` by projected Sinkhorn, for all images at once."""
    x, budget = problem.x, problem.budget
    grid, tau = as_images(x), problem.mass / effort.reg
    moves = problem.moves(grid)
    u, psi = (None, None) if init is None else (as_images(init.beta), init.psi)
    answer = projected_sinkhorn(Projection(
        grid, as_images(w), budget, moves, problem.box, tau,
        u=u, psi=psi, tol=effort.tol, max_iter=max(SWEEPS, sum(grid.shape[2:])), factors=True,
    ))  # fmt: skip
    # The exponents of a plan in factors are rounded in proportion to |u| / tau.
    solved = (largest(answer.u) <= 1e8 * tau) | (tau <= 0)
    # The kernel treats a ball without budget as one point, even if moves are free.
    if moves.has_free:
        solved = solved & ~((budget <= 0) & _escapes(moves, grid))
    assert answer.keep is not None and answer.give is not None
    factors = answer.u, answer.psi, tau, answer.keep, answer.give
    write = partial(FactoredPlan.tempered, moves, grid, *factors)
    spend = problem.spendable(z=answer.z.view_as(x))
    if spend is not budget:  # rounding costs something, but opposite flows leave budget for it
        solved = solved & (write().net_cost() <= spend)
    return ProjectionResult(
        point=answer.z.reshape(x.shape).to(grid.dtype),
        objective=answer.objective,
        gap=answer.gap,
        residual=answer.residual,
        status=statuses(solved & (answer.gap <= answer.allowed)),
        n_iter=answer.n_iter,
        duals=Duals(answer.u.reshape(x.shape), answer.psi),
        write=write,
        kernel=answer.kernel,
    )


def _escapes(moves: Moves, x: Tensor) -> Tensor:
    """Whether some of an image's mass can leave its pixel at no cost, per image."""
    return ((moves.free() & ~moves.stay()).any(-3) & (x > 0)).flatten(1).any(1)


def _by_newton(
    problem: TransportProblem, w: Tensor, effort: Effort, init: Duals | None
) -> ProjectionResult:
    """The projection by Newton's method, in chunks of images whose plans fit in memory."""

    def solve(
        problem: TransportProblem, part: slice, moves: Moves
    ) -> tuple[ProjectionResult, PackedFlow]:
        return _solved(problem, w[part], moves, effort, init and init.take(part))

    return in_chunks(problem, solve)


def _solved(
    problem: TransportProblem, w: Tensor, moves: Moves, effort: Effort, init: Duals | None
) -> tuple[ProjectionResult, PackedFlow]:
    """The result for a chunk of images, and their plans."""
    tol, max_iter, exact = effort.tol, effort.max_iter, effort.exact
    deadline = Deadline(effort.time_limit * len(problem.x))
    x, target = as_grid(problem.x), as_grid(w)
    none = torch.zeros_like(problem.mass)
    tau = none if exact else problem.mass / effort.reg
    columns = QuadraticColumns(target, *problem.limits)
    centre = columns.objective(x)  # mass that stays has no entropy
    rounding = 1e-18 * (1 + dot(target, target))
    tolerance = Tolerance(tol, PARTS, none, torch.add(rounding, centre, alpha=tol**2))
    goal = Problem(x, problem.budget, moves, columns, tau, exact, tolerance, deadline)
    alone = goal.single & ~_escapes(moves, x) if moves.has_free else goal.single
    # Zero prices give a bound, so that the gap is finite wherever the solver stops.
    best = goal.at_centre(centre, torch.where(alone, centre, goal.bound_without_prices()))
    start = target - x
    if init is not None:
        start = as_grid(init.beta)
        best.psi.copy_(init.psi)
    n_iter, kernel = proximal_newton(goal, start, max_iter, best, warm=init is not None)
    goal.hold_back(best, problem.spendable(z=best.z.view_as(problem.x)))
    off = best.z - (target - best.u).clamp(*problem.limits)
    result = ProjectionResult(
        point=as_given(best.z, problem.x, problem.box),
        objective=best.primal if exact else best.primal + entropy_at_rest(x, tau),
        gap=(best.primal - best.dual).clamp(min=0),
        residual=largest(off).masked_fill(goal.single, 0.0),
        status=statuses(goal.done(best), lambda: (n_iter < max_iter) & ~goal.single, deadline.late),
        n_iter=n_iter,
        duals=Duals(best.u.reshape(problem.x.shape), best.psi),
        kernel=kernel,
    )
    return result, packed(best.flow)


def _patched(found: ProjectionResult, index: Tensor, others: ProjectionResult) -> ProjectionResult:
    """The result with the images at ``index`` replaced by ``others``; iterations are added."""

    def put(mine: Tensor, theirs: Tensor) -> Tensor:
        return mine.index_copy(0, index, theirs.to(mine))

    names = ("point", "objective", "gap", "residual")
    better = {name: put(getattr(found, name), getattr(others, name)) for name in names}

    def written() -> Plan:
        mine, theirs = found.plan, others.plan
        assert mine is not None and theirs is not None
        return mine.put(index, theirs)

    assert found.duals is not None and others.duals is not None
    status = list(found.status)
    for place, new in zip(index.tolist(), others.status, strict=True):
        status[place] = new
    return replace(
        found,
        **better,
        status=tuple(status),
        n_iter=found.n_iter.index_add(0, index, others.n_iter.to(found.n_iter)),
        duals=Duals(
            put(found.duals.beta, others.duals.beta), put(found.duals.psi, others.duals.psi)
        ),
        write=written,
        kernel=joined_kernels((found.kernel, others.kernel)),
    )
