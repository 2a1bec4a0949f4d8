r"""Newton's method for the dual of exact and entropic plans in plain PyTorch, at one temperature.

Potentials ``u`` of the columns and a price ``psi >= 0`` of cost have the plan

.. math::
    P_{ij} = x_i\, \mathrm{softmax}_j \big((u_j - \psi C_{ij}) / heat\big),

at which the dual function

.. math::
    \sum_j \min_z \big(f_j(z) + u_j z\big) - \psi E
    - heat \sum_i x_i \log \sum_j \exp \big((u_j - \psi C_{ij}) / heat\big)

has the gradient ``(z(u) - P^T 1, <P, C> - E)``. Columns are quadratic: linear ones get a proximal
term, ``f(z) = (z - centre)^2 / (2 room) - g z``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from wball.inputs import dot, per_image
from wball.kernels.column_problem import Problem

CG_TOL, CG_MAX, HALVINGS = 0.03, 300, 30
"""Conjugate gradients end at this share of the residual, or after so many steps, and a line search
after so many halvings."""
DAMPING, RELAX = 0.3, 0.25
"""Newton's matrix gets a damping times a residual over the temperature on its diagonal, so that a
column alone changes by ``heat / damping`` at most. It begins at ``DAMPING``; a step that need not
be shortened takes it times ``RELAX``, and another one takes that back."""


class DualState(NamedTuple):
    """Where images are: duals, temperature, the proximal term of linear columns, and damping."""

    u: Tensor
    psi: Tensor
    heat: Tensor
    centre: Tensor
    room: Tensor
    damping: Tensor

    def where(self, mask: Tensor, other: DualState) -> DualState:
        pairs = zip(self, other, strict=True)
        return DualState(
            *(torch.where(per_image(mask, mine), mine, theirs) for mine, theirs in pairs)
        )


class Dual:
    """The dual at a state, the plan there and the columns that it should have."""

    def __init__(self, problem: Problem, s: DualState) -> None:
        x, moves, f, u, room = (
            problem.x,
            problem.moves,
            problem.columns,
            s.u,
            per_image(s.room, s.u),
        )
        score = moves.gather(u) - per_image(s.psi, x)[..., None] * moves.cost
        score = torch.where(moves.allowed, score / per_image(s.heat, x)[..., None], -math.inf)
        self.problem, self.at, self.share = problem, s, torch.softmax(score, 2)
        self.flow = x[:, :, None] * self.share
        self.columns, cost = moves.scatter(self.flow), dot(self.flow, moves.cost)
        free = s.centre + room * (f.target - u)
        # Columns are never negative anyway: without a clip at 0 the dual stays strongly concave.
        self.z = free.clamp(f.lo if f.lo > 0 else -math.inf, f.hi)
        least = (self.z - s.centre).square() / (2 * room) + (u - f.target) * self.z
        soft = dot(x, torch.logsumexp(score, 2))
        self.value = least.flatten(1).sum(1) - s.psi * problem.budget - s.heat * soft
        slope = cost - problem.budget
        self.slope = torch.where((s.psi <= 0) & (slope <= 0), 0.0, slope)
        self.gradient = self.z - self.columns
        self.curvature = torch.where(self.z == free, room, 0.0)

    def direction(self) -> tuple[Tensor, Tensor]:
        """Newton's step by conjugate gradients with a diagonal preconditioner."""
        moves, s, free = self.problem.moves, self.at, (self.at.psi > 0) | (self.slope > 0)
        heat, stiff = per_image(s.heat, s.u), self.flow / per_image(s.heat, self.flow)
        apart = moves.cost - (self.share * moves.cost).sum(2, keepdim=True)
        lean, bend = moves.scatter(stiff * apart), dot(stiff, apart.square())
        diagonal = self.curvature + moves.scatter(stiff * (1 - self.share))
        least = per_image(1e-12 * diagonal.flatten(1).amax(1) + 1e-300, diagonal)
        ridge = (per_image(s.damping, heat) * self.gradient.abs() / heat).maximum(least)
        column, diagonal = self.curvature + ridge, diagonal + ridge
        bend = bend + s.damping * moves.dearest * self.slope.abs() / s.heat + 1e-300

        def apply(d: Tensor, d_psi: Tensor) -> tuple[Tensor, Tensor]:
            ends = moves.gather(d)
            change = moves.scatter(stiff * (ends - (self.share * ends).sum(2, keepdim=True)))
            change += column * d - per_image(d_psi, d) * lean
            return change, torch.where(free, bend * d_psi - dot(lean, d), 0.0)

        d, d_psi = torch.zeros_like(s.u), torch.zeros_like(s.psi)
        r, r_psi = self.gradient, torch.where(free, self.slope, 0.0)
        q, q_psi = r / diagonal, r_psi / bend
        size = dot(r, q) + r_psi * q_psi
        goal = CG_TOL**2 * size
        for _ in range(CG_MAX):
            h, h_psi = apply(q, q_psi)
            curve = dot(q, h) + q_psi * h_psi
            going = (curve > 0) & (size > goal)
            if self.problem.deadline.late or not bool(going.any()):
                break
            length = torch.where(going, size / curve.clamp(min=1e-300), 0.0)
            d, d_psi = d + per_image(length, d) * q, d_psi + length * q_psi
            r, r_psi = r - per_image(length, r) * h, r_psi - length * h_psi
            new = torch.where(going, dot(r, r / diagonal) + r_psi * r_psi / bend, size)
            turn = new / size.clamp(min=1e-300)
            q, q_psi = r / diagonal + per_image(turn, q) * q, r_psi / bend + turn * q_psi
            size = new
        return d, d_psi


def ascend(at: Dual) -> tuple[Dual, Tensor]:
    """A Newton step, shortened until the dual rises, and which images it moved."""
    problem, s = at.problem, at.at
    d, d_psi = at.direction()
    # Stop where psi reaches 0: beyond it another set of variables is free.
    stops = (d_psi < 0) & (s.psi > 0)
    most = (s.psi / torch.where(stops, -d_psi, 1.0)).clamp(max=1)
    whole = length = torch.where(stops, most, 1.0)
    rounding = 1e-14 * (at.value.abs() + problem.noise)
    for _ in range(HALVINGS):
        psi = s.psi + length * d_psi
        psi = torch.where(psi > 1e-14 * s.psi, psi, 0.0)  # exactly 0, despite rounding
        new = Dual(problem, s._replace(u=s.u + per_image(length, d) * d, psi=psi))
        promised = length * dot(at.gradient, d) + at.slope * (psi - s.psi)
        rises = new.value >= at.value + 1e-4 * promised - rounding
        if bool(rises.all()):
            break
        length = torch.where(rises, length, 0.5 * length)
    else:
        new = Dual(problem, new.at.where(rises, s))
    stiffer = (s.damping / RELAX).clamp(max=DAMPING)
    damping = torch.where(length == whole, RELAX * s.damping, stiffer)
    new.at = new.at._replace(damping=damping)
    return new, rises
