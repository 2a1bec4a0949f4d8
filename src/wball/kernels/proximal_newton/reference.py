"""Exact and entropic plans (:mod:`wball.kernels.proximal_newton`) in plain PyTorch, for any moves.

The other kernels are tested against it, and it serves costs that are matrices. Its method is the
plainest that converges: a path of temperatures, from the size of the potentials down to that of
the problem or, without entropy, until plan and bound meet. At each of them Newton's method
maximises the dual (:mod:`wball.kernels.proximal_newton.reference_dual`), the plan is repaired, and
the bound is taken. The proximal term of linear columns fades along the path.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wball.inputs import largest, per_image
from wball.kernels.column_problem import Best, Problem
from wball.kernels.proximal_newton.reference_dual import DAMPING, Dual, DualState, ascend
from wball.plan import Plan

FIRST, COOLING, COLDEST = 0.5, 6.0, 1e-13
"""The first temperature is this share of the largest potential, each is this factor below the
one before it, and the last without entropy is this share of the first."""
PRECISE, SMOOTH, ROUNDING = 0.1, 0.03, 1e-15
"""A temperature is left when the residual is worth this share of the allowed gap, this share of
what the temperature itself may cost, or as much as rounding errors."""
SHARPER, SHARPEST = 0.1, 1e-6
"""Factor on ``PRECISE`` each time that the last temperature was not enough, and its least value."""


def proximal_newton(
    problem: Problem, start: Tensor, max_iter: int, best: Best, *, warm: bool = False
) -> Tensor:
    """See :func:`wball.kernels.proximal_newton.proximal_newton`. A warm start shortens no path."""
    linear, active = problem.columns.linear, torch.arange(len(start), device=start.device)
    n_iter, sharp = torch.zeros_like(active), torch.ones_like(best.psi)
    size = largest(start)
    heat = (FIRST * torch.where(size > 1e-200, size, 1.0)).maximum(problem.tau)
    coldest = torch.maximum(COLDEST * heat, problem.tau)
    centre, room = (problem.x, 1 / heat) if linear else (torch.zeros_like(start), sharp)
    last = s = DualState(
        start, best.psi.clone(), heat, centre, room, torch.full_like(heat, DAMPING)
    )
    at, rises = Dual(problem, s), sharp > 0
    while True:
        here, s = at.problem, at.at
        cold, mass, span = s.heat <= coldest, here.x.flatten(1).sum(1), largest(s.u)
        steep = here.columns.target if linear else here.columns.target - at.columns
        span = span.maximum(largest(steep))  # what a repair of the residual costs
        worth = at.gradient.abs().flatten(1).sum(1) * span + s.psi * at.slope.abs()
        goal = PRECISE * sharp * here.allowed(best, active)
        goal = torch.where(s.heat > here.tau, goal.maximum(SMOOTH * s.heat * mass), goal)
        settled = ~rises | (worth <= goal.maximum(ROUNDING * mass * span * span / s.heat))
        ends = (n_iter[active] >= max_iter) | (settled & cold & (sharp <= SHARPEST))
        settled |= ends | problem.deadline.late
        if bool(settled.any()):
            _keep(here.take(settled), at, settled, active[settled], best)
            left = ~(ends | problem.deadline.late | (settled & here.done(best, active)))
            # Potentials are nearly linear in the temperature.
            far, far_psi = (s.u - last.u) / COOLING, (s.psi - last.psi) / COOLING
            further = DualState(
                torch.where(per_image(cold, far), s.u, s.u + far),
                torch.where(cold, s.psi, (s.psi + far_psi).clamp(min=0)),
                (s.heat / COOLING).maximum(coldest),
                at.columns if linear else s.centre,
                COOLING * s.room if linear else s.room,
                torch.full_like(s.heat, DAMPING),
            )
            sharp = torch.where(settled & cold, SHARPER * sharp, sharp)[left]
            last, s = s.where(settled, last), further.where(settled, s)
            active, coldest = active[left], coldest[left]
            last, s = (DualState(*(values[left] for values in state)) for state in (last, s))
            if not active.numel():
                return n_iter
            at = Dual(problem.take(active), s)
        at, rises = ascend(at)
        n_iter[active] += 1


def _keep(problem: Problem, at: Dual, which: Tensor, index: Tensor, best: Best) -> None:
    """Keep the bounds of some images and their plans, repaired, that are better than the best."""
    columns, u, z, psi = problem.columns, at.at.u[which], at.z[which], at.at.psi[which]
    if columns.linear:  # without the proximal term, columns are at a bound or at their kink
        drained = torch.where(z <= columns.lo, u.maximum(columns.target), columns.target)
        u = torch.where(z >= columns.hi, u.minimum(columns.target), drained)
    best.keep_duals(index, u, psi, problem.lower_bounds(u, psi))
    plan = problem.repaired(Plan(problem.moves, at.flow[which]))
    best.keep_plan(index, plan, problem.objective(plan))
