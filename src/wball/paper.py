r"""The algorithms of the 2019 paper, as printed: projected Sinkhorn (Algorithm 2) and conjugate
Sinkhorn (appendix D).

Both are block ascent on the dual of a problem over the plans of an image ``x`` of mass 1:

.. math::
    \max_{\alpha, \beta, \psi \ge 0}\; -\tfrac{1}{2 \lambda} \|\beta\|^2 - \psi \epsilon
    + \alpha^T x + \beta^T w - \sum_{ij} \Pi_{ij},
    \qquad \Pi_{ij} = \exp(\alpha_i)\, K_{ij} \exp(\beta_j), \quad K = \exp(-\psi C - 1)

Images are scaled to mass 1 and points back; sums are taken in logarithms, which do not overflow.
Channels share cost, price ``psi`` and budget, and have a plan each.

Points that have not converged miss the mass or the budget. ``ball.project`` is the projection for
use. For ``p = 1`` duality is faster, as the paper remarks: ``ball.distance`` uses it (Kantorovich:
the dual of a cheapest flow is one potential per pixel). docs/reproduction.md says where the
released code departs from the paper: in the start and the step of ``psi``, this follows the code.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from wball import inputs
from wball.inputs import dot, per_image
from wball.kernels.log_products import LogProducts
from wball.kernels.projected_sinkhorn.reference import log_omega
from wball.result import ProjectionResult, SinkhornResult
from wball.solvers.problem import TransportProblem, as_given, as_grid, statuses

HALVINGS = 7
"""Of a step of ``psi``, at most; what is still negative becomes 0. (The paper sets no limit.)"""


class HasProblem(Protocol):
    """A ball whose points are reached by transport: :class:`wball.WassersteinBall`."""

    @property
    def box(self) -> tuple[float, float] | None: ...

    def problem(self, x: Tensor) -> TransportProblem: ...


def projected_sinkhorn(
    x: Tensor, w: Tensor, ball: HasProblem, reg: float, max_iter: int = 50, tol: float = 1e-4
) -> SinkhornResult:
    """Algorithm 2: the point ``w - beta / reg``, near the point of the ball that is nearest to
    ``w``.

    ``reg`` is the paper's lambda. ``tol=0`` does exactly ``max_iter`` iterations. The pixel range
    of the ball is not enforced.

    >>> import wball
    >>> x = torch.eye(4)[None, None]
    >>> projected_sinkhorn(x, x.flip(3), wball.WassersteinBall(0.1), 100.0, tol=0).n_iter
    tensor([50])
    """
    problem = ball.problem(inputs.check_images(x, ball.box, w=inputs.as_pixels(w)))
    mass = _mass(problem)
    w = as_grid(w) / per_image(mass, as_grid(w))

    def columns(plan: LogProducts, alpha: Tensor) -> tuple[Tensor, Tensor]:
        log_s = plan(alpha, back=True) - 1
        beta = reg * w - log_omega(math.log(reg) + reg * w + log_s).exp()  # Lambert W of exp
        return beta, dot(beta, w) - dot(beta, beta) / (2 * reg) - _total(beta + log_s)

    start = torch.full_like(w, math.log(math.prod(w.shape[1:])))
    found, _ = _ascend(problem, reg, start, columns, max_iter, tol)
    return replace(found, point=as_given(per_image(mass, w) * (w - found.beta / reg), x, None))


def conjugate_sinkhorn(
    x: Tensor, g: Tensor, ball: HasProblem, reg: float, max_iter: int = 50, tol: float = 1e-4
) -> SinkhornResult:
    """The same for ``max <g, z>``: ``beta`` stays ``reg * g``, and the point is the columns of the
    last plan.

    Arguments are those of :func:`projected_sinkhorn`.
    """
    problem = ball.problem(inputs.check_images(x, ball.box, g=g))
    beta, mass = reg * as_grid(g), per_image(_mass(problem), as_grid(g))
    found, plan = _ascend(problem, reg, beta, lambda *_: (beta, -1.0), max_iter, tol)
    point = mass * (beta + plan(found.alpha, back=True) - 1).exp()
    return replace(found, point=as_given(point, x, None))


def _ascend(
    problem: TransportProblem,
    reg: float,
    beta: Tensor,
    columns: Callable[[LogProducts, Tensor], tuple[Tensor, Tensor | float]],
    max_iter: int,
    tol: float,
) -> tuple[SinkhornResult, LogProducts]:
    """The result without its point, and the last ``K``. ``columns`` returns ``beta`` and its part
    of the dual value."""
    inputs.check_positive("reg", reg)
    inputs.check_count("max_iter", max_iter)
    if not tol >= 0:
        raise ValueError(f"tol must be at least 0, got {tol}; 0 never stops early")
    x, eps = as_grid(problem.x), problem.budget / _mass(problem)
    x, moves = x / per_image(_mass(problem), x), problem.moves(x)
    none, no = torch.zeros_like(eps), torch.zeros_like(eps, dtype=torch.bool)
    now = SinkhornResult(x, x, beta, none + 1, none - math.inf, none.long(), no)
    for _ in range(max_iter):
        plan = LogProducts(moves, now.psi, x)
        alpha = x.log() - (plan(now.beta) - 1)
        beta, part = columns(plan, alpha)
        paid, squares = (_total(alpha + logs - 1) for logs in plan.moments(beta))
        value = part + dot(torch.where(x > 0, alpha, 0.0), x) - now.psi * eps
        step = (paid - eps) / squares.clamp(min=1e-300)  # -g / h
        t = torch.ones_like(step)
        for _ in range(HALVINGS):
            t = torch.where(now.psi + t * step < 0, t / 2, t)
        psi = (now.psi + t * step).clamp(min=0)
        done = (value - now.value).abs() < tol * (1 + value.abs())
        new = SinkhornResult(x, alpha, beta, psi, value, now.n_iter + 1, done)
        now = new.where(~now.converged, now)
        if now.converged.all():
            break
    return now, LogProducts(moves, now.psi, x)


def _mass(problem: TransportProblem) -> Tensor:
    """What images are divided by: their mass, or 1."""
    return torch.where(problem.mass > 0, problem.mass, 1.0)


def _total(logs: Tensor) -> Tensor:
    return logs.exp().flatten(1).sum(1)


def clamped(
    x: Tensor, w: Tensor, ball: HasProblem, reg: float, max_iter: int, tol: float
) -> ProjectionResult:
    """Algorithm 2 and a clamp to the pixel range, as the released attack: ``mode="paper"`` of
    ``ball.project``. Nothing bounds the gap (nan)."""
    found, problem = projected_sinkhorn(x, w, ball, reg, max_iter, tol), ball.problem(x)
    still = per_image((problem.budget <= 0) | (problem.mass <= 0), x)
    point = as_given(torch.where(still, x, found.point), x, ball.box)
    away, unknown = (w - point).double(), torch.full_like(found.value, math.nan)
    return ProjectionResult(
        point, dot(away, away) / 2, unknown, unknown, statuses(found.converged), found.n_iter
    )
