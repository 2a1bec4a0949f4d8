"""Exact plans (:mod:`wball.kernels.proximal_newton`) in plain PyTorch for any moves, which the
other kernels must match.

A batch takes its steps together. Images that are done, or whose proximal step is solved, are left
unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from wball.inputs import dot, per_image
from wball.kernels import proximal_newton as settings
from wball.kernels.column_problem import Best, Problem
from wball.plan import Plan


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`."""
    n_iter = torch.zeros(len(problem.x), dtype=torch.long, device=problem.x.device)
    active, method = torch.arange(len(n_iter), device=n_iter.device), settings.method(problem)
    sigma = method.first * (settings.WARM if warm else 1.0) / _range(start)
    coldest = 1 / problem.tau  # infinite without entropy
    stay = problem.moves.stay().to(problem.x).expand(*problem.x.shape[:2], -1, -1, -1)
    at = _Step(stay, torch.minimum(sigma, coldest), torch.ones_like(sigma), start, best.psi.clone())
    if not warm:
        at = replace(at, psi=_first_price(problem, at))
    narrow, idle = torch.full_like(best.psi, math.inf), torch.zeros_like(n_iter)
    while active.numel():
        here = problem.take(active)
        end, taken, solved = _solve_step(here, at, max_iter - n_iter[active])
        n_iter[active] += taken
        bounds = here.lower_bounds(end.u, end.psi)
        best.keep_duals(active, end.u, end.psi, bounds)
        done = (n_iter[active] >= max_iter) | problem.deadline.late
        if problem.exact:
            # The gap of the plan before its repair.
            rest = end.dual - end.pull + end.psi * end.slope.abs() - bounds[0]
            idle[active] = torch.where(rest < 0.999 * narrow[active], 0, idle[active] + 1)
            narrow[active] = torch.minimum(rest, narrow[active])
            done |= idle[active] > settings.PATIENCE
            if problem.columns.linear:  # only rounding errors remain
                off = end.gradient.flatten(1).norm(dim=1) * _range(end.u)
                done |= solved & (rest + off <= 3e-13 * (end.dual.abs() + _noise(here)))
            # The best plan may still be the centre: use this plan's objective for the allowed gap.
            limits, reached = here.tolerance, bounds[0] + rest
            near = limits.tol * (reached + limits.offset).abs() + limits.floor
            shown = done | (idle[active] == 1) | (rest <= settings.PROMISING * near)
            slides = (taken <= 1) & (idle[active] > 0)
            at = _next_centre(at, end, taken, solved, slides)
        else:
            final, ends = at.sigma >= coldest[active], solved | (taken < settings.INNER)
            done |= final & ends & (at.precision <= settings.SHARPEST)
            shown = done | final
            sharper = torch.where(final, settings.SHARPER, 1.0) * at.precision
            colder = torch.minimum(settings.COOLING * at.sigma, coldest[active])
            sigma = torch.where(ends, colder, at.sigma)
            precision = torch.where(ends, sharper, at.precision)
            at = _Step(at.centre, sigma, precision, end.u, end.psi)
        _repair(here.take(shown), end.share[shown], active[shown], best)
        done |= here.done(best, active)
        if bool(done.any()):
            at, active = at.take(~done), active[~done]
    return n_iter


def _next_centre(at: _Step, end: _Point, taken: Tensor, solved: Tensor, slides: Tensor) -> _Step:
    """The proximal step after one that ended at ``end``."""
    growth = torch.where(slides, settings.SLIDE, settings.GROWTH)
    grown = torch.minimum(at.sigma * growth, settings.MOST / _range(end.u))
    sigma = torch.where(taken <= settings.QUICK, grown, at.sigma)
    sigma = torch.where(taken > settings.SLOW, sigma / settings.GROWTH, sigma)
    sigma = torch.where(solved, sigma, at.sigma / settings.SHRINK)
    centre = torch.where(per_image(solved, end.share), end.share, at.centre)
    return _Step(centre, sigma, at.precision, end.u, end.psi)


@dataclass(frozen=True)
class _Step:
    """The start of a proximal step: its centre, its length, a factor on the precision that it is
    solved to, and the duals."""

    centre: Tensor
    sigma: Tensor
    precision: Tensor
    u: Tensor
    psi: Tensor

    def take(self, index: Tensor) -> _Step:
        return _Step(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True)
class _Point:
    """A dual point of a step, with the quantities computed from it."""

    u: Tensor
    psi: Tensor
    dual: Tensor
    share: Tensor
    weight: Tensor  # derivative of shares by scores: diagonal, before a row's mean is taken off
    come: Tensor  # columns of the plan
    gradient: Tensor
    slope: Tensor
    moved: Tensor
    pull: Tensor  # value of the proximal term

    def where(self, mask: Tensor, other: _Point) -> _Point:
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return _Point(*(torch.where(per_image(mask, mine), mine, theirs) for mine, theirs in pairs))


def _noise(problem: Problem) -> Tensor:
    """The size of the terms whose sum is the dual, to which its rounding error is proportional."""
    size = dot(problem.columns.target.abs(), problem.x)
    cancels = problem.columns.linear or not problem.exact
    return size if cancels else torch.zeros_like(size)


def _range(values: Tensor) -> Tensor:
    flat = values.flatten(1)
    span = torch.maximum(flat.amax(1) - flat.amin(1), 1e-3 * flat.abs().amax(1))
    return torch.where(span > 1e-200, span, 1.0)


def _project_rows(score: Tensor) -> Tensor:
    """Project rows onto the simplex: Newton's method for the threshold, from the left, where it is
    monotone."""
    level = score.amax(2, keepdim=True) - 1
    used = torch.zeros_like(level)
    for _ in range(score.shape[2]):
        above = score > level
        count = above.sum(2, keepdim=True).to(score.dtype)
        if bool((count == used).all()):
            break
        used = count
        level = torch.maximum(
            level, (torch.where(above, score, 0.0).sum(2, keepdim=True) - 1) / count.clamp(min=1)
        )
    return (score - level).clamp(min=0)


def _evaluate(problem: Problem, step: _Step, u: Tensor, psi: Tensor) -> _Point:
    """The dual point at potential ``u`` and price ``psi``."""
    x, moves, sigma = problem.x, problem.moves, per_image(step.sigma, step.centre)
    gain = moves.gather(u) - per_image(psi, step.centre) * moves.cost
    if problem.exact:
        share = _project_rows(torch.where(moves.allowed, step.centre + sigma * gain, -math.inf))
        weight = (share > 0).to(x.dtype)
        away = (share - step.centre).square().sum(2)
        pull = dot(x, away) / (2 * step.sigma)
        rows = dot(x, torch.where(share > 0, gain * share, 0.0).sum(2)) - pull
        moved = torch.sqrt((x.square() * away).flatten(1).sum(1))
    else:
        score = torch.where(moves.allowed, sigma * gain, -math.inf)
        weight = share = torch.softmax(score, 2)
        pull = torch.zeros_like(psi)
        rows = dot(x, torch.logsumexp(score, 2)) / step.sigma
    flow = x.unsqueeze(2) * share
    come = moves.scatter(flow)
    if not problem.exact:
        moved = come.flatten(1).norm(dim=1)
    slope = (flow * moves.cost).flatten(1).sum(1) - problem.budget
    dual = problem.columns.value(u) - psi * problem.budget - rows
    gradient = problem.columns.gradient(u, come)
    slope = torch.where((psi <= 0) & (slope <= 0), 0.0, slope)
    return _Point(u, psi, dual, share, weight, come, gradient, slope, moved, pull)


def _first_price(problem: Problem, step: _Step) -> Tensor:
    """A price slightly above the one at which the first step's plan costs the budget."""

    def costs_too_much(psi: Tensor) -> Tensor:
        return _evaluate(problem, step, step.u, psi).slope > 0

    low = torch.zeros_like(step.psi)
    high = torch.maximum(step.psi, 1e-3 * _range(step.u))
    high = torch.where(costs_too_much(low), high, 0.0)
    for _ in range(80):
        over = costs_too_much(high)
        if not bool(over.any()):
            break
        low, high = torch.where(over, high, low), torch.where(over, 4 * high, high)
    for _ in range(30):
        if bool((high - low <= 0.02 * high).all()):
            break
        middle = 0.5 * (low + high)
        over = costs_too_much(middle)
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return high


def _solve_step(problem: Problem, step: _Step, left: Tensor) -> tuple[_Point, Tensor, Tensor]:
    """Newton's method for one proximal step, at most ``left`` iterations: its end, iterations used,
    and whether solved."""
    at = _evaluate(problem, step, step.u, step.psi)
    taken, ascends = torch.zeros_like(left), torch.ones_like(left, dtype=torch.bool)
    precise = settings.method(problem).settled * step.precision
    while True:
        settled = at.gradient.flatten(1).norm(dim=1) <= precise * at.moved
        solved = settled & (at.slope.abs() <= settings.SPENT * step.precision * problem.budget)
        if problem.exact and problem.columns.linear:
            solved &= at.slope.abs() <= settings.SPENT_LINEAR * at.moved + 1e-13 * problem.budget
            solved &= taken > 0  # otherwise plans drift along prices that are never corrected
        going = ~solved & ascends & (taken < settings.INNER) & (taken < left)
        if problem.deadline.late or not bool(going.any()):
            return at, taken, solved
        new, ascends = _ascend(problem, step, at, *_direction(problem, step, at))
        taken += going.long()
        at = new.where(going & ascends, at)
        ascends |= ~going


def _direction(problem: Problem, step: _Step, at: _Point) -> tuple[Tensor, Tensor]:
    """Newton's step by conjugate gradients with a diagonal preconditioner."""
    x, moves, cost = problem.x, problem.moves, problem.moves.cost
    method = settings.method(problem)
    still = problem.columns.held(at.u, at.come)
    used = at.weight
    ways = used.sum(2, keepdim=True).clamp(min=1)
    stiff = per_image(step.sigma, used) * x.unsqueeze(2) * used
    column = problem.columns.curvature(at.u)
    diagonal = column + moves.scatter(stiff * (1 - used / ways))
    span = _range(problem.columns.target if problem.columns.linear else at.u)
    ridge = method.damping * at.gradient.flatten(1).square().mean(1).sqrt() / span
    ridge = per_image(
        torch.maximum(ridge, 1e-12 * diagonal.flatten(1).amax(1)).clamp(min=1e-300), diagonal
    )
    column, diagonal = column + ridge, diagonal + ridge
    free = (at.psi > 0) | (at.slope > 0)
    mean_cost = (used * cost).sum(2, keepdim=True) / ways
    curvature = (stiff * (cost - mean_cost).square()).flatten(1).sum(1)
    diagonal_psi = torch.where(free & (curvature > 0), curvature, 1.0)

    def apply(d: Tensor, d_psi: Tensor) -> tuple[Tensor, Tensor]:
        change = moves.gather(d) - per_image(d_psi, used) * cost
        change = stiff * (change - (used * change).sum(2, keepdim=True) / ways)
        out_psi = 1e-12 * diagonal_psi * d_psi - (change * cost).flatten(1).sum(1)
        out = torch.where(still, 0.0, column * d + moves.scatter(change))
        return out, torch.where(free, out_psi, 0.0)

    d, d_psi = torch.zeros_like(at.u), torch.zeros_like(at.psi)
    r, r_psi = at.gradient, torch.where(free, at.slope, 0.0)
    q, q_psi = r / diagonal, r_psi / diagonal_psi
    size = dot(r, q) + r_psi * q_psi
    goal = method.cg_tol**2 * size
    patience = 8 if size.is_cuda else 1  # reading from a GPU takes longer than a few steps
    for k in range(1, settings.CG_MAX + 1):
        h, h_psi = apply(q, q_psi)
        curve = dot(q, h) + q_psi * h_psi
        going = (curve > 0) & (size > goal)
        length = torch.where(going, size / curve.clamp(min=1e-300), 0.0)
        d, d_psi = d + per_image(length, d) * q, d_psi + length * q_psi
        r, r_psi = r - per_image(length, r) * h, r_psi - length * h_psi
        new = dot(r, r / diagonal) + r_psi * r_psi / diagonal_psi
        if k % patience == 0 and (problem.deadline.late or not bool((going & (new > goal)).any())):
            break
        turn = torch.where(going, new / size.clamp(min=1e-300), 0.0)
        q, q_psi = r / diagonal + per_image(turn, q) * q, r_psi / diagonal_psi + turn * q_psi
        size = torch.where(going, new, size)
    return d, d_psi


def _ascend(
    problem: Problem, step: _Step, at: _Point, d: Tensor, d_psi: Tensor
) -> tuple[_Point, Tensor]:
    """Take a backtracking step. Also returns which images moved."""
    # Stop where psi reaches 0: beyond it another set of variables is free.
    stops = (d_psi < 0) & (at.psi > 0)
    length = torch.where(stops, (at.psi / torch.where(stops, -d_psi, 1.0)).clamp(max=1), 1.0)
    rounding = 1e-14 * (at.dual.abs() + _noise(problem))
    for _ in range(settings.HALVINGS):
        psi = at.psi + length * d_psi
        psi = torch.where(psi > 1e-14 * at.psi, psi, 0.0)  # exactly 0, despite rounding
        u = problem.columns.retract(at.u, at.come, at.u + per_image(length, d) * d)
        new = _evaluate(problem, step, u, psi)
        promised = dot(at.gradient, u - at.u) + at.slope * (psi - at.psi)
        ascends = new.dual >= at.dual + 1e-4 * promised - rounding
        if bool(ascends.all()):
            break
        # The point at which a linear slope along the direction would vanish.
        rise, bend = promised / length, dot(new.gradient, d) + new.slope * d_psi
        fall = torch.where(bend < 0, rise / (rise - bend), 0.5).clamp(0.1, 0.5)
        length = torch.where(ascends, length, fall * length)
    return new, ascends


def _repair(problem: Problem, share: Tensor, index: Tensor, best: Best) -> None:
    """Repair plans, and keep those that are better than the best so far."""
    x, moves = problem.x, problem.moves
    total = share.sum(2, keepdim=True)
    share = torch.where((total > 0.5) & (total < 2), share / total, moves.stay().to(x.dtype))
    plan = problem.repaired(Plan(moves, x.unsqueeze(2) * share))
    best.keep_plan(index, plan, problem.objective(plan))
