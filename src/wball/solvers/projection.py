r"""Projection onto the Wasserstein ball: the nearest point of the ball to an image.

.. math::
    \mathrm{proj}(w) = \operatorname*{argmin}_{z \in B(x, \epsilon)} \tfrac12 \|w - z\|^2
    \;\Big[ + \tfrac{m^2}{\lambda} \sum_{ij} \hat P_{ij} \log \hat P_{ij},\ \hat P = P / m \Big]

``reg = inf`` leaves the bracket out: the exact Euclidean projection. Finite ``reg`` is the paper's ``lambda``, in the
units of an image scaled to mass 1, so that in image units the temperature is ``tau = m / reg``. Both follow the same
path of entropic problems (:mod:`wball.kernels.entropic_path`); the box is part of the ball throughout. Whatever stops
the solver, the returned point is the column sum of a repaired plan, hence in the ball, and ``gap`` is a proof of how
far from optimal it can be, because the dual value bounds the optimum from below at every iterate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from wball import inputs
from wball.kernels import dispatch
from wball.kernels.books import Best, Tolerance
from wball.kernels.entropic_path import reference as path
from wball.kernels.entropic_path.reference import dot, per_image
from wball.kernels.projected_sinkhorn import projected_sinkhorn
from wball.kernels.projected_sinkhorn.reference import PARTS
from wball.kernels.proximal_newton import proximal_newton
from wball.moves import Moves
from wball.plan import Plan
from wball.result import Duals, ProjectionResult, Status, joined_kernels, statuses
from wball.solvers.entropic import SWEEP_TOL, entropy_of, escapes, swept
from wball.solvers.problem import PackedPlans, TransportProblem, as_given, as_grid, as_images, chunks, held_back
from wball.solvers.sinkhorn import paper_projection

_EVERYWHERE = (-math.inf, math.inf)
PAPER_TOL = 0.01
"""Share of the tolerance for the paper's points: ``w - u`` is off by the root of the gap, and the path is fast."""


def project(
    problem: TransportProblem,
    w: Tensor,
    *,
    reg: float = math.inf,
    tol: float = 1e-5,
    max_iter: int = 500,
    init: Duals | None = None,
    mode: Literal["exact", "paper"] = "exact",
) -> ProjectionResult:
    """The point of the ball nearest to ``w``.

    Args:
        problem: centres, moves, budget and box.
        w: points to project, any finite values of the same shape.
        reg: the paper's lambda in mass-1 units; ``inf`` is the exact projection.
        tol: relative duality gap at which an image is done.
        max_iter: Newton steps per image.
        init: dual variables of an earlier, similar projection.
        mode: ``"paper"`` is the original procedure for comparison: Algorithm 2 (or a faster way to its limit) without a
            box, then a clamp, which destroys mass. Its points are in no ball; everything else in this library is.

    Returns:
        A :class:`~wball.result.ProjectionResult`. An image is ``CONVERGED`` only if its gap is at most
        ``tol * d + tol^2 * 1/2 |w - x|^2`` with ``d = 1/2 |w - z|^2``, so that ``z`` is within ``sqrt(tol) |w - z|`` of
        the optimum. The second term is for points inside the ball, where ``d`` vanishes; where ``d`` is below 3 % of
        ``d`` and the entropy together, that share of them counts instead.
    """
    x = problem.x
    w = inputs.check_like("w", w, x).detach()
    reg = inputs.check_positive("reg", reg, inf=True)
    tol = inputs.check_positive("tol", tol)
    inputs.check_count("max_iter", max_iter)
    if mode not in ("exact", "paper"):
        raise ValueError(f'mode must be "exact" or "paper", got {mode!r}')
    if init is not None:
        if not isinstance(init, Duals):
            raise TypeError(f"init must be the duals of a projection (result.duals), got {type(init).__name__}")
        inputs.check_like("init.beta", init.beta, x)
    if mode == "paper":
        if math.isinf(reg):
            raise ValueError('mode="paper" needs a finite reg (the paper uses 1000 for MNIST, 3000 for CIFAR-10)')
        return _paper(problem, w, reg, tol, max_iter)

    images = as_images(x)
    cold = init is None and math.isfinite(reg)
    if not cold or not dispatch.has_kernel("projected_sinkhorn", images, problem.moves(images)):
        return _followed(problem, w, reg, tol, max_iter, init)
    found = swept(problem, w, reg=reg, tol=tol)
    left = [k for k, status in enumerate(found.status) if status is not Status.CONVERGED]
    if not left:
        return found
    index = torch.tensor(left, device=x.device)
    return _patched(found, index, _followed(problem.take(index), w[index], reg, tol, max_iter, None))


def _followed(
    problem: TransportProblem, w: Tensor, reg: float, tol: float, max_iter: int, init: Duals | None
) -> ProjectionResult:
    """The projection by following the path, in chunks of images whose plans fit in memory."""
    x = problem.x
    moves = problem.moves(as_grid(x[:0]))
    parts: list[_Solved] = []
    plans, served = PackedPlans(moves), set[str]()
    for part in chunks(x, moves):
        here, grid = problem.take(part), as_grid(x[part])
        kernel = dispatch.choose("proximal_newton" if math.isinf(reg) else "entropic_path", grid, moves)
        warm = None if init is None else Duals(as_grid(init.beta[part]), init.psi[part].to(torch.float64))
        run = _Projection(moves, grid, as_grid(w[part]), here.budget, problem.box, reg, tol, kernel, served)
        solved = run.run(max_iter, warm, here.spendable())
        parts.append(replace(solved, point=as_given(solved.point, here.x, problem.box)))
        plans.add(run.flow)
    joined = _join(parts)
    return ProjectionResult(
        point=joined.point,
        objective=joined.objective,
        gap=joined.gap,
        residual=joined.residual,
        status=joined.status,
        n_iter=joined.n_iter,
        duals=Duals(joined.beta.reshape(x.shape), joined.psi),
        write=plans.written,
        kernel=joined_kernels(served),
    )


def _patched(found: ProjectionResult, index: Tensor, others: ProjectionResult) -> ProjectionResult:
    """The result with the images at ``index`` replaced; their steps are counted on top."""

    def put(mine: Tensor, theirs: Tensor) -> Tensor:
        return mine.index_copy(0, index, theirs.to(mine))

    def written() -> Plan:
        mine, theirs = found.plan, others.plan
        assert mine is not None and theirs is not None
        return mine.put(index, theirs)

    assert found.duals is not None and others.duals is not None
    status = list(found.status)
    for place, new in zip(index.tolist(), others.status, strict=True):
        status[place] = new
    return ProjectionResult(
        point=put(found.point, others.point),
        objective=put(found.objective, others.objective),
        gap=put(found.gap, others.gap),
        residual=put(found.residual, others.residual),
        status=tuple(status),
        n_iter=found.n_iter.index_add(0, index, others.n_iter.to(found.n_iter)),
        duals=Duals(put(found.duals.beta, others.duals.beta), put(found.duals.psi, others.duals.psi)),
        write=written,
        kernel=joined_kernels((found.kernel, others.kernel)),
    )


def _paper(problem: TransportProblem, w: Tensor, reg: float, tol: float, max_iter: int) -> ProjectionResult:
    """Where Algorithm 2 ends: ``w - u`` of the problem without a box, clamped. A kernel that is faster there serves."""
    x, budget = problem.x, problem.budget
    grid, target = as_grid(x), as_grid(w)
    moves = problem.moves(grid)
    mass = grid.flatten(1).sum(1)
    still = per_image((budget <= 0) | (mass <= 0), grid)
    if dispatch.choose("projected_sinkhorn", grid.float(), moves) == "triton":
        answer = projected_sinkhorn(
            grid.float(), target.float(), budget, moves, None, (mass / reg).float(),
            u=(target - grid).float(), psi=torch.full_like(mass, 0.1).float(),
            tol=max(tol, SWEEP_TOL), max_iter=max_iter,
        )  # fmt: skip
        point = torch.where(still, grid, target - answer.u)
        return ProjectionResult(
            point=as_given(point, x, problem.box),
            objective=answer.objective + entropy_of(grid, mass / reg),
            gap=answer.gap,
            residual=(answer.z - point).flatten(1).abs().amax(1),
            status=statuses(answer.gap <= answer.allowed),
            n_iter=answer.n_iter,
            duals=Duals(answer.u.double().reshape(x.shape), answer.psi.double()),
            kernel=answer.kernel,
        )
    if dispatch.choose("entropic_path", grid, moves) == "torch":
        found = paper_projection(problem, w, reg=reg, tol=tol, max_iter=max_iter)
        return replace(found, objective=found.objective + entropy_of(grid, mass / reg))
    found = project(replace(problem, box=None), w, reg=reg, tol=PAPER_TOL * tol, max_iter=max_iter)
    assert found.duals is not None
    point = torch.where(still, grid, target - as_grid(found.duals.beta))
    residual = (as_grid(found.point) - point).flatten(1).abs().amax(1)
    return replace(found, point=as_given(point, x, problem.box), residual=residual, write=None)


@dataclass
class _Solved:
    """The best found so far for a chunk, per image."""

    point: Tensor
    objective: Tensor
    gap: Tensor
    residual: Tensor
    beta: Tensor
    psi: Tensor
    n_iter: Tensor
    status: tuple[Status, ...]


class _Projection:
    """One chunk: keeps each image's best feasible plan and best dual bound while the path is followed."""

    def __init__(
        self,
        moves: Moves,
        x: Tensor,
        w: Tensor,
        budget: Tensor,
        box: tuple[float, float] | None,
        reg: float,
        tol: float,
        kernel: str,
        served: set[str],
    ) -> None:
        self.moves, self.x, self.w, self.budget, self.box, self.tol = moves, x, w, budget, box, tol
        self.kernel, self.served = kernel, served  # who follows the path; who did anything at all
        mass = x.flatten(1).sum(1)
        self.tau = torch.zeros_like(mass) if math.isinf(reg) else mass / reg
        lo, hi = box if box is not None else (-math.inf, math.inf)
        # Columns are never negative anyway; without a clip at 0 the dual stays strongly concave there.
        self.columns = path.Quadratic(w, lo if lo > 0 else -math.inf, hi)
        still = Plan.identity(moves, x)
        self.offset = entropy_of(x, self.tau)
        self.flow = still.flow
        self.at_centre = 0.5 * (w - x).square().flatten(1).sum(1)
        self.primal = self.at_centre.clone()  # what stays has no entropy
        self.dual = torch.full_like(mass, -math.inf)
        self.beta, self.psi = torch.zeros_like(w), torch.zeros_like(mass)

    def entropic(self, flow: Tensor, index: Tensor | None = None) -> Tensor:
        """``tau sum P log(pi)`` of rows that sum to x, per image."""
        x, tau = (self.x, self.tau) if index is None else (self.x[index], self.tau[index])
        if not bool((tau > 0).any()):
            return torch.zeros_like(tau)
        share = flow / x.unsqueeze(2).clamp(min=1e-300)
        return tau * (flow * torch.log(share.clamp(min=1e-300))).flatten(1).sum(1)

    def run(self, max_iter: int, init: Duals | None, spend: Tensor) -> _Solved:
        x, w = self.x, self.w
        scale = (w - x).flatten(1).abs().amax(1).clamp(min=1e-12)
        start = w - x if init is None else init.beta
        if init is not None:
            self.psi = init.psi.clone()
        tau_start = torch.maximum((0.25 if init is None else 0.02) * scale, self.tau)
        n_iter = torch.zeros_like(scale, dtype=torch.long)
        # Without mass or budget the centre is the answer, and the only point unless there are free moves.
        single = (self.budget <= 0) | (x.flatten(1).sum(1) <= 0)
        # No prices at all are a bound, too: wherever the path is stopped, the gap is a number.
        alone = single & ~escapes(self.moves, x)
        self.dual = torch.where(alone, self.primal, self._bound_without_prices())
        todo = (~single).nonzero().squeeze(1)
        if todo.numel():
            self.served.add(self.kernel)
        steps = torch.full_like(n_iter, max_iter)
        if todo.numel() and (self.kernel == "cpu" or not bool(self.tau.any())):
            steps[todo] = self._improve(todo, start[todo], tau_start[todo], max_iter, warm=init is not None)
        elif todo.numel():
            problem = path.Problem(x, self.budget, self.moves, self.columns).take(todo)

            def accept(index: Tensor, plan: Plan, duals: list[tuple[Tensor, Tensor]]) -> Tensor:
                return self.accept(todo[index], plan, duals)

            steps[todo] = path.follow(problem, start[todo], tau_start[todo], self.tau[todo], max_iter, accept)
        n_iter[todo] += steps[todo]
        best, self.primal = held_back(Plan(self.moves, self.flow), self.budget, spend, self.primal, self._primal)
        self.flow = best.flow
        gap = (self.primal - self.dual).clamp(min=0)
        point = best.columns()
        lo, hi = self.box if self.box is not None else (0.0, math.inf)
        residual = (point - (w - self.beta).clamp(lo, hi)).flatten(1).abs().amax(1)
        residual = torch.where(single, torch.zeros_like(residual), residual)
        status = statuses(gap <= self.allowed(self.primal, self.flow), steps < max_iter)
        objective = self.primal + self.offset
        return _Solved(point, objective, gap, residual, self.beta, self.psi, n_iter, status)

    def _primal(self, plan: Plan, index: Tensor | None = None) -> Tensor:
        """``1/2 |w - z|^2``, plus the plan's entropy at ``tau``."""
        w = self.w if index is None else self.w[index]
        return 0.5 * (w - plan.columns()).square().flatten(1).sum(1) + self.entropic(plan.flow, index)

    def _bound_without_prices(self) -> Tensor:
        """:meth:`lower_bound` at ``u = 0`` and ``psi = 0``, where every row is spread evenly."""
        lo, hi = self.box if self.box is not None else (-math.inf, math.inf)
        least = 0.5 * (self.w - self.w.clamp(lo, hi)).square().flatten(1).sum(1)
        ways = self.moves.allowed.sum(-3).to(self.x.dtype)
        return least - self.tau * (self.x * torch.log(ways)).flatten(1).sum(1)

    def _improve(self, todo: Tensor, start: Tensor, tau_start: Tensor, max_iter: int, *, warm: bool) -> Tensor:
        """A kernel that keeps the books that :meth:`accept` and :meth:`allowed` keep, where it works: on the host
        if it is compiled for a CPU, wherever the images are."""
        home = torch.device("cpu") if self.kernel == "cpu" else self.x.device
        books = (self.flow, self.primal, self.dual, self.beta, self.psi)
        flow, primal, dual, beta, psi = (book[todo].to(home).contiguous() for book in books)
        best = Best(flow, primal, dual, dual.clone(), beta, psi)
        given = (self.x, self.budget, self.w, self.tau, self._floor(slice(None)))
        x, budget, w, tau, floor = (part[todo].to(home) for part in given)
        tolerance = Tolerance(self.tol, PARTS, torch.zeros_like(tau), floor)
        box, start = self.box or _EVERYWHERE, start.to(home)
        if bool(tau.any()):
            n_iter: Tensor = dispatch.load("entropic_path", self.kernel).follow_path(
                x, self.moves, budget, w, box, start, tau_start.to(home), tau, max_iter, tolerance, best, linear=False
            )
        else:
            n_iter = proximal_newton(
                x, self.moves, budget, w, box, start, max_iter, tolerance, best, kernel=self.kernel, warm=warm
            )
            left = (best.primal - best.dual > self.tol * best.primal + floor).nonzero().squeeze(1)
            if self.kernel == "triton" and left.numel():
                n_iter[left] += self._finish(todo, left, best, tolerance, max_iter)
        for book, better in zip(books, (best.flow, best.primal, best.dual, best.u, best.psi), strict=True):
            book[todo] = better.to(book.device)
        return n_iter.to(todo.device)

    def _finish(self, todo: Tensor, left: Tensor, best: Best, tolerance: Tolerance, max_iter: int) -> Tensor:
        """Images that one program a picture did not solve: on the host, or else by torch, from where it stopped."""
        kernel = "cpu" if dispatch.why_not("proximal_newton", "cpu", self.x, self.moves) is None else "torch"
        self.served.add(kernel)
        home = torch.device("cpu") if kernel == "cpu" else self.x.device
        books = [getattr(best, f.name) for f in fields(Best)]
        part = Best(*(book[left].to(home).contiguous() for book in books))
        x, budget, w = (given[todo][left].to(home) for given in (self.x, self.budget, self.w))
        goal = replace(tolerance, offset=tolerance.offset[left].to(home), floor=tolerance.floor[left].to(home))
        box, start = self.box or _EVERYWHERE, part.u.clone()
        steps = proximal_newton(x, self.moves, budget, w, box, start, max_iter, goal, part, kernel=kernel, warm=True)
        for book, f in zip(books, fields(Best), strict=True):
            book[left] = getattr(part, f.name).to(book.device)
        return steps.to(left.device)

    def allowed(self, primal: Tensor, flow: Tensor, index: Tensor | None = None) -> Tensor:
        """The gap at which an image counts as solved."""
        entropy = self.entropic(flow, index)
        size = torch.maximum(primal - entropy, PARTS * (primal - 2 * entropy))
        return self.tol * size + self._floor(slice(None) if index is None else index)

    def _floor(self, pick: Tensor | slice) -> Tensor:
        rounding = 1e-18 * (1 + self.w[pick].square().flatten(1).sum(1))
        return self.tol**2 * self.at_centre[pick] + rounding

    def accept(self, index: Tensor, plan: Plan, duals: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Keep the plan, repaired, and the duals where they are the best so far; who is within the tolerance?"""
        # Opposite flows are waste, but the entropy asks for them.
        plan = plan if bool(self.tau.any()) else plan.cancelled()
        plan = plan.repair(self.budget[index], self.box)
        primal = self._primal(plan, index)
        better = primal < self.primal[index]
        self.primal[index] = torch.where(better, primal, self.primal[index])
        self.flow[index] = torch.where(per_image(better, plan.flow), plan.flow, self.flow[index])
        for u, psi in duals:
            bound = self.lower_bound(index, u, psi)
            better = bound > self.dual[index]
            self.dual[index] = torch.where(better, bound, self.dual[index])
            self.beta[index] = torch.where(per_image(better, u), u, self.beta[index])
            self.psi[index] = torch.where(better, psi, self.psi[index])
        return self.primal[index] - self.dual[index] <= self.allowed(self.primal[index], self.flow[index], index)

    def lower_bound(self, index: Tensor, u: Tensor, psi: Tensor) -> Tensor:
        """The dual value at ``tau`` (a maximum over each row for ``tau = 0``): sound for any ``u`` and ``psi >= 0``."""
        x, w, tau = self.x[index], self.w[index], self.tau[index]
        score = self.moves.gather(u) - per_image(psi, self.flow) * self.moves.cost
        score = torch.where(self.moves.allowed, score, -math.inf)
        if bool((tau > 0).any()):
            row = per_image(tau, u) * torch.logsumexp(score / per_image(tau, score), 2)
        else:
            row = score.amax(2)
        lo, hi = self.box if self.box is not None else (-math.inf, math.inf)
        z = (w - u).clamp(lo, hi)
        value = dot(0.5 * (w - z).square() + u * z, torch.ones_like(u)) - psi * self.budget[index] - dot(x, row)
        return torch.where(torch.isfinite(value), value, -math.inf)


def _join(parts: list[_Solved]) -> _Solved:
    if len(parts) == 1:
        return parts[0]
    tensors = {
        f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(_Solved) if f.name != "status"
    }
    return _Solved(**tensors, status=tuple(s for part in parts for s in part.status))
