r"""Projected Sinkhorn: the paper's entropic projection with the box inside, and O(n) state.

.. math::
    \min_{P \ge 0,\ P1 = x,\ \langle P, C\rangle \le E,\ lo \le z \le hi}
    \tfrac12 \|w - z\|^2 + \tau \sum_{ij} P_{ij} \log (P_{ij} / x_i), \qquad z = P^T 1

has the dual ``D(u, psi) = sum_j phi_j(u_j) - psi E - tau sum_i x_i lse_j((u_j - psi C_ij) / tau)``
with ``phi_j(u) = min over the box of 1/2 (w_j - z)^2 + u z``. The dual is maximised in two blocks,
in logs (``beta = u / tau``):

* rows and price: the rows have a closed form, and ``psi`` is the root of a scalar equation;
* columns: with ``s_j`` the arriving mass per unit of ``e^beta_j``, the solution is
  ``beta = w / tau - omega(w / tau + log(s / tau))`` (Wright omega) where the box does not bind, and
  ``log(bound / s)`` where it does.

Plain block ascent is slow if ``tau`` is small or many pixels are full. All kernels therefore use:

**Scaled steps.** A column resists a change of its potential by ``M_j = z_j + tau`` (``z_j`` where
the box binds) less what the rows undo, ``P^T diag(1 / x) P``. Most mass does not move, so the
diagonal of that is about ``P_jj^2 / x_j``, nearly ``z_j``. The step of a sweep is therefore scaled
by ``M_j / (M_j - P_jj^2 / x_j)`` (Jacobi's scaling of the Newton equations).

**Conjugate steps.** A sweep maps potentials ``beta`` to ``new``. Near the solution its change ``f =
new - beta`` is linear in ``beta``, and self-adjoint in the metric by which a column resists a
change (what its scaled step is divided by). So the difference ``d`` between the changes of two
sweeps is made orthogonal to those before it, and with it the step ``s`` that it belongs to; what
``f`` has along each ``d`` is removed by going along its ``s``:

.. math::
    \beta \leftarrow new - \sum_j \frac{\langle f, d_j \rangle_M}{\langle d_j, d_j \rangle_M}\, s_j

(conjugate residuals, or Anderson's method in an orthogonal basis, without equations to solve). If
the estimated gap rises, the memory is dropped and later steps are scaled by less.

**Range.** Potentials more than ``SPREAD`` below the largest of their image are raised to that: the
plan is then a product of factors. The sweeps of such an image end, with whatever gap it has.

**Margin.** A repair sends the excess of full columns back, and inside a full area there is no room
for it. Full columns therefore aim below ``hi``, by an amount that costs a share of the gap and is a
share of what moves: what stays cannot leave at any price.

**Stopping.** For a plan ``Q`` with rows ``x`` and the plan ``P`` of ``(u, psi)``, with ``v = w -
u``, ``c = clip(v)``,

.. math::
    primal(Q) - D(u, \psi) = \sum_j \big( \tfrac12 (z_j - c_j)^2 - (z_j - c_j)(v_j - c_j) \big)
    + \psi (E - \langle Q, C \rangle) + \tau\, KL(Q \,|\, P),

a sum of small terms without cancellation, so float32 resolves gaps far below its rounding of the
objective. When an estimate of the gap is within the tolerance, an image offers its plan: the plan
is repaired (box, then budget) and its gap computed. If that gap is too large, sweeps continue.

**Repair.** Full columns send their excess back, which may overfill the pixels it came from. The
little that remains after a few sweeps is removed by mixing in a plan in which no column counts on
the mass that it sends away.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from wball.cost import Moves
from wball.kernels import dispatch

COLD_PRICE = 0.1
"""Initial price of a cold start."""

FAR = 1.0
"""A scaled step changes a potential by at most this, in units of ``tau``, or as far as the sweep
itself does."""

LESS = 0.8
"""Factor on the scale of all later steps when the estimated gap rises."""

DOUBT = 3.0
"""The gap has risen if it is more than this factor above the lowest one."""

MEMORY, DEPENDENT = 4, 1e-5
"""Number of earlier sweeps that are remembered. The memory is dropped when what is new in a sweep
is below this share of its difference to the last."""

MARGIN, WIDEST_MARGIN = 0.2, 5e-4
"""Full columns aim below ``hi`` such that it costs this share of the allowed gap, to first and to
second order, but at most by this share of the budget per pixel, and by this share of the box."""

FIRST, LEAST = 0.5, 0.02
"""An image offers its plan when the estimate is below ``FIRST`` times the tolerance, halved after
each offer down to ``LEAST`` times the tolerance."""

PAUSE = 4
"""An offer puts the next off by this many sweeps, twice as many the second time, and so on: in a
large full area sweeps must make room for a repair."""

EXCESS = 10.0
"""Cost of mass above the box in the estimate of the gap, in units of its price: a repair sends it
back unspent."""

SLACK, EXACT_SLACK = 5e-7, 1e-12
"""Mass above ``hi`` that float32 and float64 may leave. It is cut off, and is far below the
precision of images."""

PARTS = 0.03
"""Gaps are relative to at least this share of distance and entropy."""

PSI_TOL = 0.2
"""The price is solved until the budget left is worth this share of the allowed gap."""


@dataclass(frozen=True)
class Projection:
    """Points to project onto balls around images, at temperature ``tau`` (``m / lambda`` in image
    units).

    Attributes:
        x: images in the box, float32 or float64, ``(B, C, H, W)``.
        w: points to project, like ``x``.
        budget: cost that may be spent per image, ``(B,)``. Not positive: the point is ``x``.
        moves: the moves of the ground cost on these images.
        box: ``(lo, hi)`` or ``None``.
        tau: temperature per image, ``(B,)``, positive where the image has mass.
        u: starting potential, like ``x``; ``None`` for ``w - x``, which is a good one.
        psi: starting price, ``(B,)``; ``None`` for 0.1.
        tol: an image is done when its gap is at most ``tol * max(d, PARTS * (d + tau |entropy|)) +
            tol^2 * 1/2 |w - x|^2`` with ``d = 1/2 |w - z|^2``.
        max_iter: maximum number of sweeps per image.
        factors: whether to return the plan. It is then the plan of point, cost and gap in float64:
            to the last bit, and for gaps that float32 does not resolve.
    """

    x: Tensor
    w: Tensor
    budget: Tensor
    moves: Moves
    box: tuple[float, float] | None
    tau: Tensor
    _: KW_ONLY
    u: Tensor | None = None
    psi: Tensor | None = None
    tol: float = 1e-4
    max_iter: int = 500
    factors: bool = False

    def start(self) -> tuple[Tensor, Tensor]:
        """The potential and the price to start from."""
        u = self.w - self.x if self.u is None else self.u
        return u, torch.full_like(self.tau, COLD_PRICE) if self.psi is None else self.psi

    @property
    def ends(self) -> tuple[float, float]:
        """The range of the columns, which are never negative."""
        return self.box or (0.0, math.inf)

    @property
    def unit(self) -> float:
        """The scale of rounding errors: that of a full pixel."""
        return max(1.0, self.box[1]) if self.box is not None else 1.0


@dataclass(frozen=True)
class ProjectedSinkhorn:
    """A feasible point near the entropic projection, with its gap.

    Attributes:
        z: columns of a plan that keeps box and budget, in the box, ``(B, C, H, W)``.
        cost: what that plan costs, per image, float64.
        u: potential of the columns, to warm-start the next call.
        psi: price of cost per image, to warm-start the next call.
        objective: the paper's, ``1/2 |w - z|^2 + tau sum P log(P / m)`` of that plan, ``m`` the
            image's mass, float64.
        gap: proven distance of ``objective`` from the optimum, float64, not negative.
        allowed: the gap at which an image counts as solved, float64.
        residual: largest difference between ``z`` and ``clip(w - u)``.
        n_iter: sweeps per image.
        keep, give: column and row factors of that plan, like ``x``, in float64, where they were
            asked for.
        kernel: which implementation computed it.
    """

    z: Tensor
    cost: Tensor
    u: Tensor
    psi: Tensor
    objective: Tensor
    gap: Tensor
    allowed: Tensor
    residual: Tensor
    n_iter: Tensor
    keep: Tensor | None = None
    give: Tensor | None = None
    kernel: str = ""


def entropy_at_rest(x: Tensor, tau: Tensor) -> Tensor:
    """``tau sum x log(x / m)`` per image, float64: from entropy relative to ``x`` to entropy
    relative to the mass."""
    exact = x.double().flatten(1)
    return tau.double() * (torch.special.entr(exact.sum(1)) - torch.special.entr(exact).sum(1))


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """Compute entropic projections with the kernel chosen for such images."""
    name = dispatch.choose("projected_sinkhorn", problem.x, problem.moves)
    solve = dispatch.load("projected_sinkhorn", name).projected_sinkhorn
    answer: ProjectedSinkhorn = solve(problem)
    return replace(answer, kernel=name)
