"""One solver for both problems: each image's best plan and best bound, and whether they are near enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from wball.kernels import dispatch
from wball.kernels.books import Best, Problem
from wball.kernels.entropic_path import entropic_path, without_box
from wball.kernels.proximal_newton import proximal_newton
from wball.plan import Plan
from wball.solvers.problem import held_back


class Minimum:
    """The minimum over a chunk of images, approached by kernels wherever they work.

    Attributes:
        problem: what is minimised.
        best: what is known about each image; at first, its centre.
        n_iter: steps used, per image.
        served: the kernels that did anything at all.
    """

    def __init__(self, problem: Problem, centre: Tensor, bound: Tensor | None = None) -> None:
        """``centre``: what is minimised, at the images; ``bound``: a lower bound of each one's optimum, if known."""
        x = problem.x
        self.problem = problem
        still = Plan.identity(problem.moves, x).flow
        dual = torch.full_like(centre, -math.inf) if bound is None else bound
        self.best = Best(
            still,
            x.clone(),
            centre,
            dual,
            dual.clone(),
            torch.zeros_like(x),
            torch.zeros_like(dual),
        )
        self.n_iter = torch.zeros_like(dual, dtype=torch.long)
        self.served = set[str]()
        self._done: Tensor | None = None
        self._todo = None if bound is not None else self._several.nonzero().squeeze(1)

    @property
    def done(self) -> Tensor:
        """Which images are solved."""
        if self._done is None:
            self._done = self.problem.done(self.best)
        return self._done

    @property
    def todo(self) -> Tensor:
        """Positions of the images that are not solved and have more than one point; asks the device."""
        if self._todo is None:
            self._todo = (self._several & ~self.done).nonzero().squeeze(1)
        return self._todo

    @cached_property
    def _several(self) -> Tensor:
        """Which images have more than one point."""
        return ~self.problem.single

    def changed(self) -> None:
        """Whoever writes into the books says so."""
        self._done = self._todo = None

    def without_box(self, max_iter: int) -> None:
        """Linear columns without their box, where the images are."""
        self._improve("torch", without_box, (), max_iter)

    def follow_path(self, start: Tensor, tau_start: Tensor, max_iter: int) -> None:
        """The exact support function, and entropic problems."""
        kernel = dispatch.choose("entropic_path", self.problem.x, self.problem.moves)
        self._improve(kernel, partial(entropic_path, kernel=kernel), (start, tau_start), max_iter)

    def newton_for_support(self, start: Tensor, max_iter: int) -> None:
        """The exact support function with a box."""
        kernel = dispatch.choose("proximal_newton", self.problem.x, self.problem.moves)
        self._improve(kernel, partial(proximal_newton, kernel=kernel), (start,), max_iter)

    def newton(self, start: Tensor, max_iter: int, *, warm: bool) -> None:
        """The exact projection. What a kernel leaves undone goes to the next one, from where it stopped."""
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
        """Improve what is not solved by ``solve(problem, *start, max_iter, best)``, where the kernel works."""
        todo, home = self.todo, dispatch.home(kernel, self.problem.x)
        if not todo.numel():
            return
        self.served.add(kernel)
        self.changed()
        if len(todo) == len(self.problem.x) and home == self.problem.x.device:
            self.n_iter += solve(self.problem, *start, max_iter, self.best)
            return
        part = self.best.take(todo, home)
        first = (values[todo].to(home) for values in start)
        steps = solve(self.problem.take(todo).to(home), *first, max_iter, part)
        self.n_iter[todo] += steps.to(self.n_iter.device)
        self.best.put(todo, part)

    def hold_back(self, spend: Tensor) -> Best:
        """What is known, its plans shrunk to what may be spent on points that will be rounded."""
        plan = Plan(self.problem.moves, self.best.flow)
        plan, primal = held_back(
            plan, self.problem.budget, spend, self.best.primal, self.problem.objective
        )
        if plan.flow is not self.best.flow:
            self.best.flow.copy_(plan.flow)
            self.best.z.copy_(plan.columns())
            self.best.primal.copy_(primal)
            self.changed()
        return self.best
