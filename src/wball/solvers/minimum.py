"""The common solver of projection and support: the best plan and the best bound of each image."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wball.inputs import dot
from wball.kernels import dispatch
from wball.kernels.books import Best, Problem
from wball.kernels.linear_maximum.reference import maximising_plan
from wball.kernels.proximal_newton import proximal_newton
from wball.plan import Plan


class Minimum:
    """Minimises over a chunk of images with one kernel after another.

    Attributes:
        problem: the problem.
        best: the best plan and bound of each image; at first, its centre.
        n_iter: steps used, per image.
        served: the kernels that were used.
    """

    def __init__(self, problem: Problem, centre: Tensor, bound: Tensor | None = None) -> None:
        """``centre``: the objective at the images; ``bound``: a lower bound of the optimum, if
        known."""
        x = problem.x
        self.problem = problem
        still = Plan.identity(problem.moves, x).flow
        dual = torch.full_like(centre, -math.inf) if bound is None else bound
        zero, free = torch.zeros_like(x), torch.zeros_like(dual)
        self.best = Best(still, x.clone(), centre, dual, dual.clone(), zero, free)
        self.n_iter = torch.zeros_like(dual, dtype=torch.long)
        self.served = set[str]()

    @property
    def done(self) -> Tensor:
        """Which images are solved."""
        return self.problem.done(self.best)

    @property
    def todo(self) -> Tensor:
        """Positions of the images that are not solved and have more than one point."""
        return (~self.problem.single & ~self.done).nonzero().squeeze(1)

    def newton(self, start: Tensor, max_iter: int, *, warm: bool = False) -> None:
        """Newton steps; images that one kernel leaves unsolved continue with the next."""
        x, moves = self.problem.x, self.problem.moves
        kernel: str | None = dispatch.choose("proximal_newton", x, moves)
        while kernel is not None:
            solve = partial(proximal_newton, kernel=kernel, warm=warm)
            if kernel not in dispatch.NEVER_READS or self.problem.exact:
                self._improve(kernel, solve, (start,), max_iter)
                start, warm = self.best.u.clone(), True
            kernel = dispatch.successor("proximal_newton", kernel, x, moves)

    def without_box(self, max_iter: int) -> None:
        """Maximise linear functions exactly without the box, where ``u = g`` is optimal."""
        self._improve("torch", _without_box, (), max_iter)

    def _improve(
        self, kernel: str, solve: Callable[..., Tensor], start: tuple[Tensor, ...], max_iter: int
    ) -> None:
        """Improve unsolved images by ``solve(problem, *start, max_iter, best)``, on the device of
        the kernel."""
        todo, home = self.todo, dispatch.home(kernel, self.problem.x)
        if not todo.numel():
            return
        self.served.add(kernel)
        if len(todo) == len(self.problem.x) and home == self.problem.x.device:
            self.n_iter += solve(self.problem, *start, max_iter, self.best)
            return
        part = self.best.take(todo, home)
        first = (values[todo].to(home) for values in start)
        steps = solve(self.problem.take(todo).to(home), *first, max_iter, part)
        self.n_iter[todo] += steps.to(self.n_iter.device)
        self.best.put(todo, part)

    def hold_back(self, spend: Tensor) -> Best:
        """What is known, with plans shrunk to a cost of at most ``spend``, so that their points may
        be rounded."""
        held = spend < self.problem.budget
        if bool(held.any()):
            plan = Plan(self.problem.moves, self.best.flow)
            over = held & (plan.cost() > spend)
            plan = plan.within(torch.where(over, spend, math.inf))
            self.best.flow.copy_(plan.flow)
            self.best.z.copy_(plan.columns())
            primal = torch.where(over, self.problem.objective(plan), self.best.primal)
            self.best.primal.copy_(primal)
        return self.best


def _without_box(problem: Problem, max_iter: int, best: Best) -> Tensor:
    """Keep the best plans without the box, repaired into it, and their bounds."""
    x, g = problem.x, problem.columns.target
    plan, found = maximising_plan(g, x, problem.budget, problem.moves, max_iter=max_iter)
    bound = -(found.upper + 1e-14 * (found.upper.abs() + dot(g.abs(), x)))
    everyone = torch.arange(len(x), device=x.device)
    best.keep_duals(everyone, g, found.psi, (bound, bound))
    plan = problem.repaired(plan)
    best.keep_plan(everyone, plan, problem.objective(plan))
    return found.n_iter
