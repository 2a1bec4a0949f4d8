r"""The paper's own projection: block ascent on the dual (Algorithm 2), in logs, without a box.

With ``tau = m / lambda`` in image units, ``beta`` the column potential divided by ``tau`` and ``psi`` the price of cost
divided by ``tau``, one iteration is

.. math::
    \alpha_i = \log x_i - \mathrm{lse}_j(\beta_j - \psi C_{ij}), \qquad
    \log s_j = \mathrm{lse}_i(\alpha_i - \psi C_{ij}), \qquad
    \beta_j = w_j / \tau - \omega(w_j / \tau + \log (s_j / \tau)),

followed by a Newton step on ``psi`` halved until it is not negative. Lambert's ``W(e^y) = omega(y)`` (the Wright omega
function) is computed from ``y`` itself, so that nothing overflows at any ``lambda``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wball.batch import dot, per_image
from wball.kernels.projected_sinkhorn.reference import wright_omega
from wball.moves import Moves
from wball.plan import Plan
from wball.result import Duals, ProjectionResult, statuses
from wball.solvers.problem import TransportProblem, as_given, as_grid


def paper_projection(
    problem: TransportProblem, w: Tensor, *, reg: float, tol: float, max_iter: int
) -> ProjectionResult:
    """Algorithm 2 followed by a clamp to the box, as the original procedure does. For comparison only.

    The point is ``w - tau beta`` clamped, so mass and distance hold only approximately. ``gap`` is that of the
    entropic problem without a box, at the unclamped point; ``residual`` is the largest difference between the
    point and the columns of the plan. No plan is handed out, because none proves this point.
    """
    x, budget = problem.x, problem.budget
    grid, target = as_grid(x), as_grid(w)
    moves = problem.moves(grid)
    batch = grid.shape[0]
    mass = grid.flatten(1).sum(1)
    tau = mass.clamp(min=1e-300) / reg
    scale = per_image(tau, grid)
    log_x = torch.log(grid.clamp(min=1e-300))
    log_x = torch.where(grid > 0, log_x, -torch.inf)
    pixels = grid[0:1].numel() or 1
    beta = torch.full_like(grid, -torch.log(torch.tensor(float(pixels))).item())
    psi = torch.ones_like(mass)
    goal = target / scale
    n_iter = torch.zeros(batch, dtype=torch.long, device=x.device)
    done = (mass <= 0) | (budget <= 0)
    alpha = log_x
    for _ in range(max_iter):
        if bool(done.all()):
            break
        toll = per_image(psi, moves.cost.expand(1, 1, -1, -1, -1)) * moves.cost
        score = torch.where(moves.allowed, moves.gather(beta) - toll, -torch.inf)
        alpha = log_x - torch.logsumexp(score, 2)
        arriving = _log_scatter(moves, alpha.unsqueeze(2) - toll)
        new = goal - wright_omega(goal + arriving - torch.log(scale))
        flow = torch.exp(
            torch.where(moves.allowed, alpha.unsqueeze(2) - toll + moves.gather(new), -torch.inf)
        )
        first = (flow * moves.cost).flatten(1).sum(1) - budget
        second = (flow * moves.cost.square()).flatten(1).sum(1).clamp(min=1e-300)
        step = first / second
        # Halve until psi stays >= 0, in closed form.
        halvings = torch.ceil(torch.log2((-step / psi.clamp(min=1e-300)).clamp(min=1.0)))
        moved = torch.maximum((new - beta).flatten(1).abs().amax(1) * tau, step.abs() / (1 + psi))
        beta = torch.where(per_image(done, beta), beta, new)
        psi = torch.where(done, psi, psi + step * torch.exp2(-halvings)).clamp(min=0)
        n_iter += (~done).long()
        done = done | (moved <= tol)
    still = (mass <= 0) | (budget <= 0)
    point = torch.where(per_image(still, grid), grid, target - scale * beta)
    toll = per_image(psi, moves.cost.expand(1, 1, -1, -1, -1)) * moves.cost
    score = torch.where(moves.allowed, moves.gather(beta) - toll, -torch.inf)
    share = torch.softmax(score, 2)
    plan = Plan(moves, grid.unsqueeze(2) * share).repair(budget, None)
    z = plan.columns()
    part = plan.flow / grid.unsqueeze(2).clamp(min=1e-300)
    entropy = (plan.flow * torch.log(part.clamp(min=1e-300))).flatten(1).sum(1)
    primal = 0.5 * (target - z).square().flatten(1).sum(1) + tau * entropy
    u = scale * beta
    dual = dot(0.5 * u.square() + u * (target - u), torch.ones_like(u))
    dual = dual - tau * psi * budget - tau * dot(grid, torch.logsumexp(score, 2))
    gap = torch.where(still, torch.zeros_like(primal), (primal - dual).clamp(min=0))
    residual = torch.where(still, torch.zeros_like(primal), (z - point).flatten(1).abs().amax(1))
    ok = gap <= tol * (primal - 2 * tau * entropy)
    return ProjectionResult(
        point=as_given(point, x, problem.box),
        objective=primal,
        gap=gap,
        residual=residual,
        status=statuses(ok | still),
        n_iter=n_iter,
        duals=Duals(u.reshape(x.shape), tau * psi),
    )


def _log_scatter(moves: Moves, score: Tensor) -> Tensor:
    """``lse`` over what arrives at each pixel: a scatter in logs, stabilised pixel by pixel."""
    masked = torch.where(moves.allowed, score, -torch.inf)
    top = moves.scatter_max(masked)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    return torch.log(moves.scatter(torch.exp(masked - moves.gather(top)))) + top
