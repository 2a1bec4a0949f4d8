r"""Support function of the Wasserstein ball: the largest ``<g, z>`` over its points. The paper calls it the conjugate.

.. math::
    \sigma(g) = \max_{z \in B(x, \epsilon)} \langle g, z \rangle
    \;\Big[ - \tfrac{m}{\lambda} \sum_{ij} \hat P_{ij} \log \hat P_{ij} \Big]

It is the Frank-Wolfe oracle of the attacks and the input bound of the certificates. Any prices give an upper bound:
for ``psi >= 0`` on cost and any potential ``u`` on the columns

.. math::
    \sigma(g) \le \psi E + \sum_i x_i \max_j (u_j - \psi C_{ij}) + \sum_j \max_{lo \le z \le hi} (g_j - u_j) z,

so ``upper`` is sound at every iteration. Without a box ``u = g`` is optimal and one scalar ``psi`` is left: a convex,
piecewise linear function whose kink is found exactly, and the maximiser mixes the two plans that meet there so that
their cost is the budget. With a box the same pair is tried first; images whose pixels it overfills follow the entropic
path (:mod:`wball.kernels.entropic_path.reference`). Finite ``reg`` is the Conjugate Sinkhorn
problem: the plan is ``x_i softmax_j(reg g_j - psi C_ij)``, in the units of an image scaled to mass 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wball import inputs
from wball.kernels import dispatch
from wball.kernels.books import Best, Tolerance
from wball.kernels.entropic_path import reference as path
from wball.kernels.entropic_path.reference import dot, per_image
from wball.moves import Moves
from wball.plan import Plan
from wball.result import SupportResult, joined_kernels, statuses
from wball.solvers.problem import PackedPlans, TransportProblem, as_given, as_grid, chunks, held_back


def support(
    problem: TransportProblem, g: Tensor, *, reg: float = math.inf, tol: float = 1e-6, max_iter: int = 200
) -> SupportResult:
    """``max <g, z>`` over the ball.

    Args:
        problem: centres, moves, budget and box.
        g: directions, of the shape of the centres.
        reg: ``inf`` for the exact maximum; finite for the entropic problem, the paper's Conjugate Sinkhorn.
        tol: relative gap at which an image is done: ``gap <= tol * (what moving gained + 1e-2 <|g|, x>)``.
        max_iter: steps per image, of the search for the kink and of the path each.

    Returns:
        A :class:`~wball.result.SupportResult`. For finite ``reg``, ``value`` and ``upper`` still bound the exact
        maximum, so that ``gap`` includes what the entropy costs; ``CONVERGED`` then refers to the entropic problem.
    """
    x = problem.x
    g = inputs.check_like("g", g, x).detach()
    reg = inputs.check_positive("reg", reg, inf=True)
    tol = inputs.check_positive("tol", tol)
    inputs.check_count("max_iter", max_iter)
    moves = problem.moves(as_grid(x[:0]))
    plans = PackedPlans(moves)
    parts = [_solved(problem.take(part), g[part], moves, reg, tol, max_iter, plans) for part in chunks(x, moves)]
    return SupportResult(
        point=torch.cat([part.point for part in parts]),
        value=torch.cat([part.value for part in parts]),
        upper=torch.cat([part.upper for part in parts]),
        status=tuple(status for part in parts for status in part.status),
        n_iter=torch.cat([part.n_iter for part in parts]),
        write=plans.written,
        kernel=joined_kernels(part.kernel for part in parts),
    )


def _solved(
    problem: TransportProblem, g: Tensor, moves: Moves, reg: float, tol: float, max_iter: int, plans: PackedPlans
) -> SupportResult:
    """The answer for a chunk of images, whose plans are added to ``plans``."""
    x, budget = problem.x, problem.budget
    grid, direction = as_grid(x), as_grid(g)
    # The exact maximum scales with g, and the path's tolerances suit directions of size 1. Powers of 2 are exact.
    size = _size(direction) if math.isinf(reg) else torch.ones_like(budget)
    scaled, nothing = direction / per_image(size, direction), 1e-300 / size
    kernel = dispatch.choose("entropic_path", grid, moves)
    run = _Support(moves, grid, scaled, budget, problem.box, reg, tol, nothing, kernel)
    run.run(max_iter).hold_back(problem.spendable())
    plans.add(run.flow)
    point = as_given(Plan(moves, run.flow).columns(), x, problem.box)
    value = dot(direction, as_grid(point))
    upper, done = torch.maximum(size * run.upper, value), run.done
    if math.isinf(reg):
        # Sums over images of denormal mass may round to nothing, and so would their gap: what is returned must show it.
        weight = direction.abs()
        allowed = tol * ((value - dot(direction, grid)).abs() + 1e-2 * dot(weight, grid))
        rounding = (0.5 * torch.finfo(point.dtype).eps + 1e-12) * dot(weight, grid + as_grid(point))
        done = done & (upper - value <= allowed + rounding + 1e-300)
    status = statuses(done, run.n_iter < max_iter)
    return SupportResult(point, value, upper, status, run.n_iter, kernel=joined_kernels(run.served))


def _size(direction: Tensor) -> Tensor:
    """The power of 2 next to each image's largest entry; 1 where all are 0."""
    largest = direction.flatten(1).abs().amax(1)
    power = torch.log2(largest).round().clamp(-1000, 1000)
    return torch.where(largest > 0, torch.exp2(power), torch.ones_like(largest))


class _Support:
    """One chunk: keeps each image's best feasible plan and least upper bound."""

    def __init__(
        self,
        moves: Moves,
        x: Tensor,
        g: Tensor,
        budget: Tensor,
        box: tuple[float, float] | None,
        reg: float,
        tol: float,
        nothing: Tensor,
        kernel: str,
    ) -> None:
        self.moves, self.x, self.g, self.budget, self.box, self.tol = moves, x, g, budget, box, tol
        self.kernel, self.served = kernel, set[str]()  # who follows the path; who did anything at all
        self.nothing = nothing  # a gap that counts as none, however small everything is
        mass = x.flatten(1).sum(1)
        self.tau = torch.full_like(mass, 0.0 if math.isinf(reg) else 1.0 / reg)
        self.flow = Plan.identity(moves, x).flow
        self.primal = dot(g, x)
        # The entropic problem's own bound decides when it is solved; upper bounds the exact maximum.
        self.upper, self.dual = torch.full_like(mass, math.inf), torch.full_like(mass, math.inf)
        self.n_iter = torch.zeros_like(mass, dtype=torch.long)
        # Without mass or budget the centre is the answer, and the only point unless there are free moves.
        self.single = (budget <= 0) | (mass <= 0)
        if bool(self.single.any()):
            reached = dot(x, torch.where(moves.free(), moves.gather(g), -math.inf).amax(2))
            self.upper, self.dual = (torch.where(self.single, reached, bound) for bound in (self.upper, self.dual))

    def run(self, max_iter: int) -> _Support:
        todo = (~self.single).nonzero().squeeze(1)
        if todo.numel() and not bool(self.tau.any()) and self.kernel != "torch" and self.x.device.type == "cpu":
            self._follow_path(todo, max_iter)  # finds the kink first; a GPU finds it by itself
            return self
        if todo.numel():
            self.served.add("torch")
            if bool(self.tau.any()):
                self._unboxed(todo)
            else:
                self._kink(todo, max_iter)
        left = (~self.done & ~self.single).nonzero().squeeze(1)
        if left.numel() and self.box is not None:
            self._follow_path(left, max_iter)
        return self

    def hold_back(self, spend: Tensor) -> _Support:
        """Shrink the plans to what may be spent on points that will be rounded."""
        plan = Plan(self.moves, self.flow)
        plan, self.primal = held_back(plan, self.budget, spend, self.primal, self._primal)
        self.flow = plan.flow
        return self

    @property
    def done(self) -> Tensor:
        return self.dual - self.primal <= self._allowed()

    def _allowed(self, index: Tensor | None = None) -> Tensor:
        here = (self.x, self.g, self.primal, self.nothing)
        x, g, primal, nothing = here if index is None else (part[index] for part in here)
        return self.tol * ((primal - dot(g, x)).abs() + 1e-2 * dot(g.abs(), x)) + nothing

    def _kink(self, index: Tensor, max_iter: int) -> None:
        """Exact, without box: bracket the slope's change of sign and intersect the two lines until they meet."""
        x, g, budget, moves = self.x[index], self.g[index], self.budget[index], self.moves
        ends = torch.where(moves.allowed, moves.gather(g), -math.inf)

        def best(psi: Tensor, *, cheapest: bool) -> tuple[Tensor, Tensor, Tensor]:
            score = ends - per_image(psi, ends) * moves.cost
            top = score.amax(2, keepdim=True)
            # Among equal moves take the cheapest or the dearest: the two sides of a kink.
            tied = score >= top
            toll = moves.cost.expand_as(score)
            key = torch.where(tied, -toll if cheapest else toll, torch.full_like(score, -math.inf))
            choice = key.argmax(2, keepdim=True)
            cost = dot(x, toll.gather(2, choice).squeeze(2))
            return choice, cost, psi * budget + dot(x, top.squeeze(2))

        lo = torch.zeros_like(budget)
        move_lo, cost_lo, h_lo = best(lo, cheapest=True)
        free = cost_lo <= budget
        spread = g.flatten(1).amax(1) - g.flatten(1).amin(1)
        least = moves.cost[moves.cost > 0].amin() if bool((moves.cost > 0).any()) else torch.tensor(1.0)
        hi = 2 * spread / least.to(spread) + 1e-30
        move_hi, cost_hi, h_hi = best(hi, cheapest=True)
        upper = torch.minimum(h_lo, h_hi)
        move_hi = torch.where(per_image(free, move_hi), move_lo, move_hi)
        cost_hi, hi = torch.where(free, cost_lo, cost_hi), torch.where(free, lo, hi)
        settled, steps = free.clone(), torch.ones_like(index)
        for step in range(max_iter):
            if bool(settled.all()):
                break
            # Slopes budget - cost: negative on the left, not negative on the right.
            meet = (h_lo - h_hi + (budget - cost_hi) * hi - (budget - cost_lo) * lo) / (cost_lo - cost_hi).clamp(
                min=1e-300
            )
            middle = 0.5 * (lo + hi)
            psi = meet if step % 3 < 2 else middle  # every third step halves, against creeping brackets
            psi = torch.where((psi > lo) & (psi < hi), psi, middle)
            move, cost, h = best(psi, cheapest=True)
            line = h_lo + (budget - cost_lo) * (psi - lo)
            upper = torch.where(settled, upper, torch.minimum(upper, h))
            flat = h - torch.maximum(line, h_hi - (budget - cost_hi) * (hi - psi)) <= 1e-15 * (h.abs() + h_lo.abs())
            right = cost <= budget
            go_right, go_left = right & ~settled, ~right & ~settled
            move_hi = torch.where(per_image(go_right, move), move, move_hi)
            move_lo = torch.where(per_image(go_left, move), move, move_lo)
            hi, cost_hi, h_hi = (torch.where(go_right, a, b) for a, b in ((psi, hi), (cost, cost_hi), (h, h_hi)))
            lo, cost_lo, h_lo = (torch.where(go_left, a, b) for a, b in ((psi, lo), (cost, cost_lo), (h, h_lo)))
            steps += (~settled).long()
            settled = settled | (flat & (step % 3 < 2)) | (hi - lo <= 4e-16 * hi)
        blend = torch.where(
            cost_lo > cost_hi, (budget - cost_hi) / (cost_lo - cost_hi).clamp(min=1e-300), torch.zeros_like(budget)
        )
        blend = torch.where(free, torch.zeros_like(blend), blend.clamp(0, 1))
        flow = torch.zeros_like(ends)
        flow.scatter_add_(2, move_hi, per_image(1 - blend, ends) * x.unsqueeze(2))
        flow.scatter_add_(2, move_lo, per_image(blend, ends) * x.unsqueeze(2))
        self.n_iter[index] += steps
        self._offer(index, Plan(moves, flow), [])
        rounding = 1e-14 * (upper.abs() + dot(g.abs(), x))
        self.upper[index] = torch.minimum(self.upper[index], upper + rounding)
        self.dual[index] = self.upper[index]

    def _unboxed(self, index: Tensor) -> None:
        """The entropic problem without box: ``u = g``, and ``psi`` is a scalar root."""
        x, g, tau = self.x[index], self.g[index], self.tau[index]
        psi = path.price_root(self._problem(index), g, tau, tol=0.1 * self.tol)
        score = self.moves.gather(g) - per_image(psi, self.flow) * self.moves.cost
        share = torch.softmax(torch.where(self.moves.allowed, score / per_image(tau, score), -math.inf), 2)
        self.n_iter[index] += 1
        self._offer(index, Plan(self.moves, x.unsqueeze(2) * share), [(g, psi)])

    def _problem(self, index: Tensor) -> path.Problem:
        lo, hi = self.box if self.box is not None else (0.0, math.inf)
        return path.Problem(self.x[index], self.budget[index], self.moves, path.Linear(self.g[index], lo, hi))

    def _follow_path(self, index: Tensor, max_iter: int) -> None:
        g = self.g[index]
        spread = (g.flatten(1).amax(1) - g.flatten(1).amin(1)).clamp(min=1e-30)
        tau_start = torch.maximum(0.25 * spread, self.tau[index])
        self.served.add(self.kernel)
        if self.kernel != "torch":
            self.n_iter[index] += self._follow_compiled(index, tau_start, max_iter)
            return

        def accept(part: Tensor, plan: Plan, duals: list[tuple[Tensor, Tensor]]) -> Tensor:
            return self._offer(index[part], plan, duals)

        self.n_iter[index] += path.follow(self._problem(index), g, tau_start, self.tau[index], max_iter, accept)

    def _follow_compiled(self, index: Tensor, tau_start: Tensor, max_iter: int) -> Tensor:
        """The same path by a compiled kernel, which minimises and keeps the books that :meth:`_offer` keeps.

        It works on the host, wherever the images are.
        """
        kernel, device = dispatch.load("entropic_path", self.kernel), self.x.device
        given = (self.x, self.g, self.budget, self.tau, self.nothing)
        x, g, budget, tau, nothing = (part[index].cpu() for part in given)
        box = self.box if self.box is not None else (0.0, math.inf)
        primal, dual, hard = (-bound[index].cpu() for bound in (self.primal, self.dual, self.upper))
        best = Best(self.flow[index].cpu().contiguous(), primal, dual, hard, g.clone(), torch.zeros_like(tau))
        tolerance = Tolerance(self.tol, 0.0, dot(g, x), self.tol * 1e-2 * dot(g.abs(), x) + nothing)
        n_iter: Tensor = kernel.follow_path(
            x, self.moves, budget, g, box, g, tau_start.cpu(), tau, max_iter, tolerance, best,
            linear=True,
        )  # fmt: skip
        self.flow[index], self.primal[index] = best.flow.to(device), -best.primal.to(device)
        self.dual[index], self.upper[index] = -best.dual.to(device), -best.hard.to(device)
        return n_iter.to(device)

    def _offer(self, index: Tensor, plan: Plan, duals: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Keep the plan, repaired, and the bounds where they are the best so far; who is within the tolerance?"""
        # Opposite flows are waste, but the entropy asks for them.
        plan = plan if bool(self.tau.any()) else plan.cancelled()
        plan = plan.repair(self.budget[index], self.box)
        primal, tau = self._primal(plan, index), self.tau[index]
        better = primal > self.primal[index]
        self.primal[index] = torch.where(better, primal, self.primal[index])
        self.flow[index] = torch.where(per_image(better, plan.flow), plan.flow, self.flow[index])
        for u, psi in duals:
            exact, entropic = self._bounds(index, u, psi)
            self.upper[index] = torch.minimum(self.upper[index], exact)
            self.dual[index] = torch.minimum(self.dual[index], entropic if bool(tau.any()) else exact)
        return self.dual[index] - self.primal[index] <= self._allowed(index)

    def _primal(self, plan: Plan, pick: Tensor | slice = slice(None)) -> Tensor:
        """``<g, z>``, less the plan's entropy at ``tau``."""
        x, tau = self.x[pick], self.tau[pick]
        primal = dot(self.g[pick], plan.columns())
        if bool(tau.any()):
            share = plan.flow / x.unsqueeze(2).clamp(min=1e-300)
            primal = primal - tau * (plan.flow * torch.log(share.clamp(min=1e-300))).flatten(1).sum(1)
        return primal

    def _bounds(self, index: Tensor, u: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Upper bounds of the exact and of the entropic maximum, sound for any ``u`` and ``psi >= 0``."""
        x, g, tau = self.x[index], self.g[index], self.tau[index]
        score = self.moves.gather(u) - per_image(psi, self.flow) * self.moves.cost
        score = torch.where(self.moves.allowed, score, -math.inf)
        excess = g - u
        if self.box is None:
            rest = (
                torch.where(excess == 0, torch.zeros_like(excess), torch.full_like(excess, math.inf)).flatten(1).sum(1)
            )
        else:
            lo, hi = self.box
            rest = (hi * excess.clamp(min=0) + lo * excess.clamp(max=0)).flatten(1).sum(1)
        rows = score.amax(2)
        common = psi * self.budget[index] + rest
        # float64 sums of n terms: widen by far more than they can be off.
        rounding = 1e-13 * (dot(rows.abs(), x) + common.abs())
        exact = common + dot(x, rows) + rounding
        if bool(tau.any()):
            soft = per_image(tau, u) * torch.logsumexp(score / per_image(tau.clamp(min=1e-300), score), 2)
            entropic = common + dot(x, soft)
        else:
            entropic = exact
        bad = torch.full_like(exact, math.inf)
        return torch.where(exact.isfinite(), exact, bad), torch.where(entropic.isfinite(), entropic, bad)
