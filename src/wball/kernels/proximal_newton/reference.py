"""Exact and entropic plans (:mod:`wball.kernels.proximal_newton`) in plain PyTorch for any moves,
which the other kernels must match.

A batch takes its steps together. Images that are done, or whose proximal step is solved, are left
unchanged. The dual of a step is in :mod:`wball.kernels.proximal_newton.reference_dual`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball.inputs import dot, per_image
from wball.kernels import proximal_newton as settings
from wball.kernels.column_problem import Best, Problem
from wball.kernels.proximal_newton.reference_dual import Point, Step, direction, evaluate, spread
from wball.plan import Plan


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`."""
    n_iter = torch.zeros_like(best.psi, dtype=torch.long)
    active = torch.arange(len(n_iter), device=n_iter.device)
    first = settings.method(problem).first * (settings.WARM if warm else 1.0)
    coldest = 1 / problem.tau  # infinite without entropy
    sigma = torch.minimum(first / spread(start), coldest)
    stay = problem.moves.stay().to(problem.x).expand(*problem.x.shape[:2], -1, -1, -1)
    at = Step(stay, sigma, torch.ones_like(sigma), start, best.psi.clone())
    narrow, idle = torch.full_like(best.psi, math.inf), torch.zeros_like(n_iter)
    while active.numel():
        here = problem.take(active)
        end, taken, solved = _solve_step(here, at, max_iter - n_iter[active])
        n_iter[active] += taken
        bounds = here.lower_bounds(end.u, end.psi)
        best.keep_duals(active, end.u, end.psi, bounds)
        done = (n_iter[active] >= max_iter) | problem.deadline.late
        if problem.exact:  # `rest` is the gap of the plan before its repair
            rest = end.dual - end.pull + end.psi * end.slope.abs() - bounds[0]
            idle[active] = torch.where(rest < 0.999 * narrow[active], 0, idle[active] + 1)
            narrow[active] = torch.minimum(rest, narrow[active])
            done |= idle[active] > settings.PATIENCE
            if problem.columns.linear:  # only rounding errors remain
                off = end.gradient.flatten(1).norm(dim=1) * spread(end.u)
                done |= solved & (rest + off <= 3e-13 * (end.dual.abs() + here.noise))
            # The best plan may still be the centre: use this plan's objective for the allowed gap.
            limits, reached = here.tolerance, bounds[0] + rest
            near = limits.tol * (reached + limits.offset).abs() + limits.floor
            shown = done | (rest <= settings.PROMISING * near)
            at = _next_centre(at, end, taken, solved, idle[active])
        else:
            final, ends = at.sigma >= coldest[active], solved | (taken < settings.INNER)
            done |= final & ends & (at.precision <= settings.SHARPEST)
            shown = done | final
            precision = torch.where(final & ends, settings.SHARPER, 1.0) * at.precision
            colder = torch.where(ends, settings.COOLING, 1.0) * at.sigma
            sigma = torch.minimum(colder, coldest[active])
            at = Step(at.centre, sigma, precision, end.u, end.psi)
        _repair(here.take(shown), end.share[shown], active[shown], best)
        if problem.exact:
            lost = shown & (rest <= here.allowed(best, active))
            at = at._replace(precision=torch.where(lost, settings.SHARP * at.precision, 1.0))
        done |= here.done(best, active)
        if bool(done.any()):
            at, active = at.take(~done), active[~done]
    return n_iter


def _next_centre(at: Step, end: Point, taken: Tensor, solved: Tensor, idle: Tensor) -> Step:
    """The proximal step after one that ended at ``end``."""
    growth = torch.where((taken <= 1) & (idle > 0), settings.SLIDE, settings.GROWTH)
    grown = torch.minimum(at.sigma * growth, settings.MOST / spread(end.u))
    sigma = torch.where(taken <= settings.QUICK, grown, at.sigma)
    sigma = torch.where(solved, sigma, at.sigma / settings.SHRINK)
    centre = torch.where(per_image(solved, end.share), end.share, at.centre)
    return Step(centre, sigma, at.precision, end.u, end.psi)


def _solve_step(problem: Problem, step: Step, left: Tensor) -> tuple[Point, Tensor, Tensor]:
    """Newton's method for one proximal step, at most ``left`` iterations: its end, iterations used,
    and whether solved."""
    at = evaluate(problem, step, step.u, step.psi)
    taken, ascends = torch.zeros_like(left), torch.ones_like(left, dtype=torch.bool)
    method = settings.method(problem)
    off = settings.ROUNDING * step.sigma * spread(step.u) * problem.x.flatten(1).sum(1)
    precise, stiffness = method.settled * step.precision, torch.full_like(at.psi, method.stiffness)
    while True:
        settled = at.gradient.flatten(1).norm(dim=1) <= precise * at.moved + off
        solved = settled & (at.slope.abs() <= settings.SPENT * step.precision * problem.budget)
        if problem.exact and problem.columns.linear:
            solved &= at.slope.abs() <= settings.SPENT_LINEAR * at.moved + off
            solved &= taken > 0  # otherwise plans drift along prices that are never corrected
        going = ~solved & ascends & (taken < settings.INNER) & (taken < left)
        if problem.deadline.late or not bool(going.any()):
            return at, taken, solved
        new, ascends, whole = _ascend(problem, step, at, stiffness)
        tighter = (stiffness / settings.RELAX).clamp(min=method.stiffness)
        stiffness = torch.where(whole, settings.RELAX * stiffness, tighter)
        taken += going
        at = new.where(going & ascends, at)
        ascends |= ~going


def _ascend(
    problem: Problem, step: Step, at: Point, stiffness: Tensor
) -> tuple[Point, Tensor, Tensor]:
    """Take a Newton step, shortened until the dual rises. Also returns which images moved, and
    which by a whole step."""
    d, d_psi = direction(problem, step, at, stiffness)
    # Stop where psi reaches 0: beyond it another set of variables is free.
    stops = (d_psi < 0) & (at.psi > 0)
    whole = length = torch.where(
        stops, (at.psi / torch.where(stops, -d_psi, 1.0)).clamp(max=1), 1.0
    )
    rounding = 1e-14 * (at.dual.abs() + problem.noise)
    for _ in range(settings.HALVINGS):
        psi = at.psi + length * d_psi
        psi = torch.where(psi > 1e-14 * at.psi, psi, 0.0)  # exactly 0, despite rounding
        u = problem.columns.retract(at.u, at.come, at.u + per_image(length, d) * d)
        new = evaluate(problem, step, u, psi)
        promised = dot(at.gradient, u - at.u) + at.slope * (psi - at.psi)
        ascends = new.dual >= at.dual + 1e-4 * promised - rounding
        if bool(ascends.all()):
            break
        # The point at which a linear slope along the direction would vanish.
        rise, bend = promised / length, dot(new.gradient, d) + new.slope * d_psi
        fall = torch.where(bend < 0, rise / (rise - bend), 0.5).clamp(0.1, 0.5)
        length = torch.where(ascends, length, fall * length)
    return new, ascends, length == whole


def _repair(problem: Problem, share: Tensor, index: Tensor, best: Best) -> None:
    """Repair plans, and keep those that are better than the best so far."""
    total, stay = share.sum(2, keepdim=True), problem.moves.stay().to(share)
    share = torch.where((total > 0.5) & (total < 2), share / total, stay)
    plan = problem.repaired(Plan(problem.moves, problem.x.unsqueeze(2) * share))
    best.keep_plan(index, plan, problem.objective(plan))
