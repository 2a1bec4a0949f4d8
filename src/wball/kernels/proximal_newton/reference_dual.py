"""The dual of a proximal step in plain PyTorch: the plan and the residual at given potentials, and
Newton's direction there."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wball.inputs import dot, per_image
from wball.kernels import proximal_newton as settings
from wball.kernels.column_problem import Problem


class Step(NamedTuple):
    """The start of a proximal step: its centre, its length, a factor on the precision that it is
    solved to, and the duals."""

    centre: Tensor
    sigma: Tensor
    precision: Tensor
    u: Tensor
    psi: Tensor

    def take(self, index: Tensor) -> Step:
        return Step(*(values[index] for values in self))


class Point(NamedTuple):
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

    def where(self, mask: Tensor, other: Point) -> Point:
        pairs = zip(self, other, strict=True)
        return Point(*(torch.where(per_image(mask, mine), mine, theirs) for mine, theirs in pairs))


def _project_rows(score: Tensor) -> Tensor:
    """Project rows onto the simplex: Newton's method for the threshold, monotone from the left."""
    level = score.amax(2, keepdim=True) - 1
    used = torch.zeros_like(level)
    for _ in range(score.shape[2]):
        above = score > level
        count = above.sum(2, keepdim=True).to(score.dtype)
        if bool((count == used).all()):
            break
        used = count
        excess = torch.where(above, score, 0.0).sum(2, keepdim=True) - 1
        level = torch.maximum(level, excess / count.clamp(min=1))
    return (score - level).clamp(min=0)


def evaluate(problem: Problem, step: Step, u: Tensor, psi: Tensor) -> Point:
    """The dual point at potential ``u`` and price ``psi``."""
    x, moves, sigma = problem.x, problem.moves, per_image(step.sigma, step.centre)
    gain = moves.gather(u) - per_image(psi, step.centre) * moves.cost
    if problem.exact:
        share = _project_rows(torch.where(moves.allowed, step.centre + sigma * gain, -math.inf))
        weight = (share > 0).to(x.dtype)
        away = (share - step.centre).square().sum(2)
        pull = dot(x, away) / (2 * step.sigma)
        rows = dot(x, torch.where(share > 0, gain * share, 0.0).sum(2)) - pull
    else:
        score = torch.where(moves.allowed, sigma * gain, -math.inf)
        weight = share = torch.softmax(score, 2)
        pull = torch.zeros_like(psi)
        rows = dot(x, torch.logsumexp(score, 2)) / step.sigma
    flow = x.unsqueeze(2) * share
    come = moves.scatter(flow)
    moved = dot(x.square(), away).sqrt() if problem.exact else come.flatten(1).norm(dim=1)
    slope = dot(flow, moves.cost) - problem.budget
    dual = problem.columns.value(u) - psi * problem.budget - rows
    gradient = problem.columns.gradient(u, come)
    slope = torch.where((psi <= 0) & (slope <= 0), 0.0, slope)
    return Point(u, psi, dual, share, weight, come, gradient, slope, moved, pull)


def direction(problem: Problem, step: Step, at: Point, stiffness: Tensor) -> tuple[Tensor, Tensor]:
    """Newton's step by conjugate gradients with a diagonal preconditioner."""
    moves, cost, method = problem.moves, problem.moves.cost, settings.method(problem)
    used, still = at.weight, problem.columns.held(at.u, at.come)
    ways = used.sum(2, keepdim=True).clamp(min=1)
    stiff = per_image(step.sigma, used) * problem.x.unsqueeze(2) * used
    column = problem.columns.curvature(at.u)
    diagonal = column + moves.scatter(stiff * (1 - used / ways))
    least = per_image(1e-12 * diagonal.flatten(1).amax(1) + 1e-300, diagonal)
    ridge = torch.maximum(per_image(stiffness * step.sigma, diagonal) * at.gradient.abs(), least)
    column, diagonal = column + ridge, diagonal + ridge
    free = (at.psi > 0) | (at.slope > 0)
    mean_cost = (used * cost).sum(2, keepdim=True) / ways
    curvature = dot(stiff, (cost - mean_cost).square())
    diagonal_psi = torch.where(free & (curvature > 0), curvature, 1.0)

    def apply(d: Tensor, d_psi: Tensor) -> tuple[Tensor, Tensor]:
        change = moves.gather(d) - per_image(d_psi, used) * cost
        change = stiff * (change - (used * change).sum(2, keepdim=True) / ways)
        out_psi = 1e-12 * diagonal_psi * d_psi - dot(change, cost)
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
        scaled = r / diagonal
        new = dot(r, scaled) + r_psi * r_psi / diagonal_psi
        if k % patience == 0 and (problem.deadline.late or not bool((going & (new > goal)).any())):
            break
        turn = torch.where(going, new / size.clamp(min=1e-300), 0.0)
        q, q_psi = scaled + per_image(turn, q) * q, r_psi / diagonal_psi + turn * q_psi
        size = torch.where(going, new, size)
    return d, d_psi


def spread(values: Tensor) -> Tensor:
    """The range of the values per image, or any positive number where all are equal."""
    flat = values.flatten(1)
    span = torch.maximum(flat.amax(1) - flat.amin(1), 1e-3 * flat.abs().amax(1))
    return torch.where(span > 1e-200, span, 1.0)
