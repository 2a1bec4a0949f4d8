"""The common solver of projection and support: the best plan and the best bound of each image."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from wball.kernels import dispatch
from wball.kernels.books import Best, Problem
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

    def without_box(self, max_iter: int) -> None:
        """Solve linear problems without the box, on the device of the images."""
        self._improve("torch", dispatch.load("entropic_path", "torch").without_box, (), max_iter)

    def follow_path(self, start: Tensor, tau_start: Tensor, max_iter: int) -> None:
        """Follow the entropic path: the exact support function, and entropic problems."""
        kernel = dispatch.choose("entropic_path", self.problem.x, self.problem.moves)
        solve = dispatch.load("entropic_path", kernel).entropic_path
        self._improve(kernel, solve, (start, tau_start), max_iter)

    def newton_for_support(self, start: Tensor, max_iter: int) -> None:
        """Newton steps for the exact support function with a box."""
        kernel = dispatch.choose("proximal_newton", self.problem.x, self.problem.moves)
        self._improve(kernel, partial(proximal_newton, kernel=kernel), (start,), max_iter)

    def newton(self, start: Tensor, max_iter: int, *, warm: bool) -> None:
        """Newton steps for the exact projection; images that one kernel leaves unsolved continue
        with the next."""
        x, moves = self.problem.x, self.problem.moves
        kernel = dispatch.choose("proximal_newton", x, moves)
        self._improve(
            kernel, partial(proximal_newton, kernel=kernel, warm=warm), (start,), max_iter
        )
        other = dispatch.successor("proximal_newton", kernel, x, moves)
        if other is not None:
            self._improve(
                other,
                partial(proximal_newton, kernel=other, warm=True),
                (self.best.u.clone(),),
                max_iter,
            )

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
