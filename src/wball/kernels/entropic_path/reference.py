r"""Following the entropic path: the engine behind the exact support function and entropic
projections.

The problem is that of :mod:`wball.kernels.books`. With a potential ``u`` for the columns and a
price ``psi >= 0`` for cost, rows and columns can be eliminated in closed form,

.. math::
    \pi_{ij} \propto e^{(u_j - \psi C_{ij}) / \tau}, \qquad
    z_j(u) = \operatorname*{argmin}_{lo \le z \le hi} f_j(z) + u_j z,

which leaves a concave dual ``D(u, psi)`` with gradient ``(z(u) - P^T 1, <P, C> - E)``. Its Hessian
is a diagonal plus a covariance of the plan, so that Newton's equation is solved by conjugate
gradients: one gather and one scatter over the moves per step, nothing factorised. Block ascent (the
paper's iteration) crawls when ``tau`` is small; this does not, because the solution is nearly
linear in ``tau``: each level starts from the tangent of the path at the level above it, and the
tangent carried on to ``tau = 0`` yields the exact duals long before ``tau`` gets there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wball.batch import dot, per_image
from wball.kernels.books import Best, Problem
from wball.kernels.plan_rows import newton_step
from wball.kernels.proximal_newton.reference import without_box as exact_without_box
from wball.plan import Plan

RATIO = 6.0
"""How fast ``tau`` falls from level to level."""
LEVEL_TOL = 3e-3
"""Residual (pixels) at which a level is left, or ``tau`` if that is less: the tangent removes what
is left of it."""
CG_TOL, CG_MAX = 1e-3, 250
LINGER = 60
"""Newton steps after which a level is left in any case: rounding may keep its residual from
falling."""
MAX_HALVINGS = 30


@dataclass
class Iterate:
    """A dual point and what follows from it at temperature ``tau``."""

    u: Tensor
    psi: Tensor
    tau: Tensor
    dual: Tensor
    share: Tensor  # pi, an arc tensor whose rows sum to 1
    columns: Tensor
    gradient_u: Tensor
    gradient_psi: Tensor
    residual: Tensor

    def take(self, index: Tensor) -> Iterate:
        return Iterate(*(getattr(self, f.name)[index] for f in fields(self)))


def evaluate(problem: Problem, u: Tensor, psi: Tensor, tau: Tensor) -> Iterate:
    """The dual, its gradient and the rows' shares at ``(u, psi)``."""
    x, moves = problem.x, problem.moves
    score = moves.gather(u) - per_image(psi, problem.x.unsqueeze(2)) * moves.cost
    score = torch.where(moves.allowed, score / per_image(tau, score), -torch.inf)
    log_sum = torch.logsumexp(score, 2, keepdim=True)
    share = torch.softmax(score, 2)  # sums to 1 where scores of size 1e8 leave log_sum few digits
    flow = x.unsqueeze(2) * share
    columns = moves.scatter(flow)
    dual = problem.columns.value(u) - psi * problem.budget - tau * dot(x, log_sum.squeeze(2))
    gradient_u = problem.columns.gradient(u, columns)
    gradient_psi = (flow * moves.cost).flatten(1).sum(1) - problem.budget
    gradient_psi = torch.where((psi > 0) | (gradient_psi > 0), gradient_psi, torch.zeros_like(psi))
    relative = gradient_psi.abs() / problem.budget.clamp(min=1e-300)
    residual = torch.maximum(gradient_u.flatten(1).abs().amax(1), relative)
    return Iterate(u, psi, tau, dual, share, columns, gradient_u, gradient_psi, residual)


def solve_newton(
    problem: Problem, at: Iterate, rhs_u: Tensor, rhs_psi: Tensor
) -> tuple[Tensor, Tensor]:
    """``-D''(u, psi) d = rhs`` by conjugate gradients with a diagonal preconditioner, each image to
    ``CG_TOL``."""
    moves, tau = problem.moves, at.tau
    weight = problem.x.unsqueeze(2) * at.share / per_image(tau, at.share)
    free = (at.psi > 0) | (at.gradient_psi > 0)
    column = problem.columns.curvature(at.u)
    moving = ~problem.columns.held(at.u, at.columns)
    diagonal = column + moves.scatter(weight * (1 - at.share))
    # A pixel that no mass can reach or leave has no curvature at all: any positive number will do
    # there.
    ridge = 1e-12 * diagonal.flatten(1).amax(1).clamp(min=1e-12)
    span = at.u.flatten(1).amax(1) - at.u.flatten(1).amin(1)
    ridge = torch.maximum(ridge, problem.columns.damping * at.residual / span.clamp(min=1e-300))
    diagonal = diagonal + per_image(ridge, diagonal)
    mean_cost = (at.share * moves.cost).sum(2, keepdim=True)
    curvature = (weight * (moves.cost - mean_cost).square()).flatten(1).sum(1)
    diagonal_psi = torch.where(free & (curvature > 0), curvature, torch.ones_like(curvature))

    def apply(d: Tensor, d_psi: Tensor) -> tuple[Tensor, Tensor]:
        change = moves.gather(d) - per_image(d_psi, at.share) * moves.cost
        change = weight * (change - (at.share * change).sum(2, keepdim=True))
        out_psi = -(change * moves.cost).flatten(1).sum(1)
        return (
            torch.where(moving, column * d + per_image(ridge, d) * d + moves.scatter(change), d),
            torch.where(free, out_psi + 1e-12 * diagonal_psi * d_psi, d_psi),
        )

    rhs_u = torch.where(moving, rhs_u, torch.zeros_like(rhs_u))
    rhs_psi = torch.where(free, rhs_psi, torch.zeros_like(rhs_psi))
    d, d_psi = torch.zeros_like(rhs_u), torch.zeros_like(rhs_psi)
    r, r_psi = rhs_u.clone(), rhs_psi.clone()
    y, y_psi = r / diagonal, r_psi / diagonal_psi
    p, p_psi = y, y_psi
    size = dot(r, y) + r_psi * y_psi
    target = CG_TOL**2 * size
    patience = (
        8 if size.is_cuda else 1
    )  # reading from a GPU takes longer than a few steps, which do no harm
    for k in range(1, CG_MAX + 1):
        h, h_psi = apply(p, p_psi)
        curve = dot(p, h) + p_psi * h_psi
        step = torch.where(
            (curve > 0) & (size > target), size / curve.clamp(min=1e-300), torch.zeros_like(size)
        )
        d, d_psi = d + per_image(step, d) * p, d_psi + step * p_psi
        r, r_psi = r - per_image(step, r) * h, r_psi - step * h_psi
        y, y_psi = r / diagonal, r_psi / diagonal_psi
        new = dot(r, y) + r_psi * y_psi
        if k % patience == 0 and (
            problem.deadline.late or bool((new <= target).all() | (step == 0).all())
        ):
            break
        turn = torch.where(step > 0, new / size.clamp(min=1e-300), torch.zeros_like(size))
        p, p_psi = y + per_image(turn, y) * p, y_psi + turn * p_psi
        size = torch.where(step > 0, new, size)
    return d, d_psi


def path_tangent(problem: Problem, at: Iterate) -> tuple[Tensor, Tensor]:
    """The derivative of the gradient with respect to ``tau`` at fixed duals."""
    moves, tau = problem.moves, at.tau
    score = moves.gather(at.u) - per_image(at.psi, at.share) * moves.cost
    score = torch.where(moves.allowed, score, torch.zeros_like(score))
    centred = score - (at.share * score).sum(2, keepdim=True)
    flow = -problem.x.unsqueeze(2) * at.share * centred / per_image(tau.square(), centred)
    return -moves.scatter(flow), (flow * moves.cost).flatten(1).sum(1)


def ascend(problem: Problem, at: Iterate, d: Tensor, d_psi: Tensor) -> tuple[Iterate, Tensor]:
    """A backtracking step along ``(d, d_psi)``; also returns which images moved at all."""
    # Stop where psi reaches 0: beyond it the direction was computed for another set of free
    # variables.
    longest = torch.where(
        d_psi < 0, (at.psi / (-d_psi).clamp(min=1e-300)).clamp(max=1), torch.ones_like(d_psi)
    )
    longest = torch.where(longest > 0, longest, torch.ones_like(longest))
    # The dual is a difference of sums, which round in proportion to their own size.
    size = at.dual.abs() + problem.x.flatten(1).sum(1) * at.u.flatten(1).abs().amax(1)
    step, noise = longest, 1e-14 * size
    for _ in range(MAX_HALVINGS):
        u, psi = _stepped(problem, at, d, d_psi, step)
        new = evaluate(problem, u, psi, at.tau)
        promised = dot(at.gradient_u, u - at.u) + at.gradient_psi * (psi - at.psi)
        accepted = new.dual >= at.dual + 1e-4 * promised - noise
        if bool(accepted.all()):
            return new, torch.ones_like(accepted)
        step = torch.where(accepted, step, 0.4 * step)
    step = torch.where(accepted, step, torch.zeros_like(step))
    return evaluate(problem, *_stepped(problem, at, d, d_psi, step), at.tau), accepted


def _stepped(
    problem: Problem, at: Iterate, d: Tensor, d_psi: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """The dual point a step away, kept on its side of every kink."""
    u = problem.columns.retract(at.u, at.columns, at.u + per_image(step, d) * d)
    return u, (at.psi + step * d_psi).clamp(min=0)


def price_root(
    problem: Problem, u: Tensor, tau: Tensor, tol: float = 1e-3, max_iter: int = 60
) -> Tensor:
    """The price at which the cost of the rows' shares meets the budget: bracketed Newton, feasible
    side."""
    moves, x, budget = problem.moves, problem.x, problem.budget
    gathered = moves.gather(u)
    positive = moves.cost[moves.cost > 0]
    if positive.numel() == 0:
        return torch.zeros_like(budget)
    # Above this price all but a fraction budget / (mass * dearest move) of every row stays.
    spread = u.flatten(1).amax(1) - u.flatten(1).amin(1)
    most = (x.flatten(1).sum(1) * positive.sum() / budget.clamp(min=1e-300)).clamp(min=1)
    low, high = torch.full_like(budget, -1.0), (spread + tau * torch.log(most)) / positive.amin()
    psi = torch.zeros_like(budget)
    for _ in range(max_iter):
        score = gathered - per_image(psi, gathered) * moves.cost
        share = torch.softmax(
            torch.where(moves.allowed, score / per_image(tau, score), -torch.inf), 2
        )
        mean = (share * moves.cost).sum(2)
        variance = (share * (moves.cost - mean.unsqueeze(2)).square()).sum(2)
        psi, low, high, found = newton_step(
            psi, low, high, dot(x, mean), dot(x, variance) / tau, budget, tol
        )
        if bool((found | (high - low <= 1e-15 * high)).all()):
            break
    return torch.where(found, psi, high)


def entropic_path(
    problem: Problem, start: Tensor, tau_start: Tensor, max_iter: int, best: Best
) -> Tensor:
    """Follow the path of every image and improve ``best``; returns the Newton steps used.

    Exact linear problems are solved without their box first.

    Args:
        problem: exact with linear columns, or entropic.
        start: column potentials to start from.
        tau_start: temperature of the first level.
        max_iter: Newton steps.
        best: the best plan and bound so far, improved in place.
    """
    if not (problem.columns.linear and problem.exact):
        return _follow(problem, start, tau_start, max_iter, best)
    n_iter = without_box(problem, max_iter, best)
    left = (~problem.done(best)).nonzero().squeeze(1)
    if problem.boxed and left.numel():
        part = best.take(left, problem.x.device)
        n_iter[left] += _follow(problem.take(left), start[left], tau_start[left], max_iter, part)
        best.put(left, part)
    return n_iter


def without_box(problem: Problem, max_iter: int, best: Best) -> Tensor:
    """Linear columns without their box: ``u = g`` is optimal, and one scalar equation in ``psi`` is
    left.

    Plans are then repaired into the box, which already solves many images.
    """
    if problem.exact:
        return exact_without_box(problem, max_iter, best)
    x, moves, g = problem.x, problem.moves, problem.columns.target
    everyone = torch.arange(len(x), device=x.device)
    psi = price_root(problem, g, problem.tau, tol=0.1 * problem.tolerance.tol)
    score = torch.where(
        moves.allowed, moves.gather(g) - per_image(psi, best.flow) * moves.cost, -torch.inf
    )
    plan = Plan(moves, x.unsqueeze(2) * torch.softmax(score / per_image(problem.tau, score), 2))
    best.keep_duals(everyone, g, psi, problem.lower_bounds(g, psi))
    plan = problem.repaired(plan)
    best.keep_plan(everyone, plan, problem.objective(plan))
    return torch.ones_like(everyone)


def _offer(
    problem: Problem, best: Best, index: Tensor, plan: Plan, duals: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Keep the plan, repaired, and the duals where they are the best so far; who is done?"""
    part = problem.take(index)
    plan = part.repaired(plan)
    best.keep_plan(index, plan, part.objective(plan))
    for u, psi in duals:
        best.keep_duals(index, u, psi, part.lower_bounds(u, psi))
    return part.done(best, index)


def _follow(
    problem: Problem, start: Tensor, tau_start: Tensor, max_iter: int, best: Best
) -> Tensor:
    """Follow the path from ``u = start`` at ``tau_start`` down to ``tau``; returns the Newton steps
    used per image.

    With ``tau > 0`` (finite ``reg``), the iterate at ``tau`` is offered after every Newton step.
    With ``tau = 0`` every level is: its plan, which is off by little more than the level's
    temperature, and the duals at the end of the tangent, which are off by far less.
    """
    tau_end, exact = problem.tau, problem.exact
    batch = problem.x.shape[0]
    device = problem.x.device
    n_iter = torch.zeros(batch, dtype=torch.long, device=device)
    active = torch.arange(batch, device=device)
    at = evaluate(problem, start, price_root(problem, start, tau_start), tau_start)
    stuck, lingered = torch.zeros((2, batch), dtype=torch.long, device=device)
    for _ in range(max_iter):
        if active.numel() == 0:
            break
        sub = problem.take(active)
        final = at.tau <= tau_end[active] * (1 + 1e-9)
        settled = (
            (at.residual <= at.tau.clamp(1e-9, LEVEL_TOL)) | (lingered[active] >= LINGER)
        ) & ~final
        settled = settled | (stuck[active] >= 3)
        lingered[active] = torch.where(settled, 0, lingered[active] + 1)
        rhs_u, rhs_psi = at.gradient_u, at.gradient_psi
        if bool(settled.any()):
            drift_u, drift_psi = path_tangent(sub, at)
            distance = torch.where(settled, tau_end[active] - at.tau, torch.zeros_like(at.tau))
            rhs_u, rhs_psi = (
                rhs_u + per_image(distance, drift_u) * drift_u,
                rhs_psi + distance * drift_psi,
            )
        d, d_psi = solve_newton(sub, at, rhs_u, rhs_psi)
        n_iter[active] += 1

        done, late = torch.zeros_like(settled), problem.deadline.late
        offered = (settled if exact else final) | late
        if bool(offered.any()):
            index = offered.nonzero().squeeze(1)
            part, point = sub.take(index), at.take(index)
            plan = Plan(problem.moves, part.x.unsqueeze(2) * point.share)
            ahead = _stepped(part, point, d[index], d_psi[index], torch.ones_like(point.psi))
            duals = [ahead, (point.u, point.psi)] if exact else [(point.u, point.psi)]
            done[index] = _offer(problem, best, active[index], plan, duals)
        if late:
            break

        # A settled image goes down one level along the tangent; the others take a Newton step where
        # they are.
        lower = torch.maximum(at.tau / RATIO, tau_end[active]) if not exact else at.tau / RATIO
        tau = torch.where(settled & ~final, lower, at.tau)
        travelled = torch.where(
            settled & ~final,
            (at.tau - tau) / (at.tau - tau_end[active]).clamp(min=1e-300),
            torch.ones_like(tau),
        )
        moved = torch.ones_like(settled)
        if bool((settled & ~final).all()):
            new = _descend(sub, at, d, d_psi, travelled, tau)
        else:
            new, moved = ascend(sub, at, d, d_psi)
            if bool((settled & ~final).any()):
                index = (settled & ~final).nonzero().squeeze(1)
                part = sub.take(index)
                down = _descend(
                    part, at.take(index), d[index], d_psi[index], travelled[index], tau[index]
                )
                for f in fields(Iterate):
                    getattr(new, f.name)[index] = getattr(down, f.name)
                moved[index] = True
        counted = stuck[active]
        stuck[active] = torch.where(
            moved, torch.where(settled, torch.zeros_like(counted), counted), counted + 1
        )
        # Temperatures below this are lost in float64's rounding of u / tau.
        spent = (new.tau < 1e-13 * (1 + new.u.flatten(1).abs().amax(1))) | (
            final & (stuck[active] >= 3)
        )
        keep = ~(done | spent)
        at, active = (new, active) if bool(keep.all()) else (new.take(keep), active[keep])
    return n_iter


def _descend(
    problem: Problem, at: Iterate, d: Tensor, d_psi: Tensor, travelled: Tensor, tau: Tensor
) -> Iterate:
    """The next level, entered along the tangent, or from where we are if that is better."""
    along = evaluate(problem, *_stepped(problem, at, d, d_psi, travelled), tau)
    plain = evaluate(problem, at.u, at.psi, tau)
    better = torch.isfinite(along.dual) & (along.dual >= plain.dual)
    if bool(better.all()):
        return along
    return Iterate(
        *(
            torch.where(
                per_image(better, getattr(along, f.name)),
                getattr(along, f.name),
                getattr(plain, f.name),
            )
            for f in fields(Iterate)
        )
    )
