r"""The entropic plan: the attack step's oracle.

For an image ``x`` (rows), potentials ``b`` and ``q`` (columns), a price ``psi`` per image and
factors ``keep`` and ``give`` in [0, 1], the plan is

.. math::
    P_{ij} = x_i\, \mathrm{softmax}_j(b_j + q_j - \psi C_{ij}) \, give_i\, keep_j
    \quad (i \ne j), \qquad
    P_{ii} = x_i - \sum_{j \ne i} P_{ij},

so its rows sum to ``x`` for any value of the other quantities, and five images describe it.
:func:`entropic_plan` chooses

* ``psi >= 0`` so that the cost meets the budget: the root of a decreasing function per image, found
  by bracketed Newton steps on its logarithm. Moves of equal cost form a *ring*; once their
  logsumexp is known, a step costs one term a ring instead of one a move;
* ``q`` by coordinate steps ``q_j <- clip(0, q_j + log(lo / z_j), q_j + log(hi / z_j))``: the
  multipliers of the box. The plainer the potentials, the better such steps are; where mass crowds
  into few columns they fall short again and again, and ``momentum`` carries them on: the next step
  starts at ``q_j + momentum * (q_j - what it was before)``, as long as steps agree on the
  direction, and never beyond 0;
* ``keep`` and ``give`` so that the box holds exactly: a column above ``hi`` sends its excess back
  along the arcs it came by, a row that would leave less than ``lo`` sends less.

Potentials are within ``SPREAD`` of the largest of their image (:func:`narrowed`): the plan is then
a product of factors in float64, and sums over moves need no exponentials.

No tensor with one entry per arc exists: every pass loops over the moves.

The columns ``z`` of the plan then move towards the centre until they are provably in the ball:

.. math::
    z \leftarrow x + t\,(z - x), \qquad t = \min(1,\; (1 - \delta)\, budget / cost(\bar P)).

``bar P`` is the plan after opposite flows cancel, and ``delta`` bounds the rounding error of the
flows. Exponents are sums of potentials and prices. In float32 a sum of size ``M`` has an error of
a few ``M eps``, and each flow has this relative error: the flows that are priced and the flows that
arrive may differ by that much. The next plan is requested with the budget ``kappa * budget``.
``kappa`` is adapted until the *net* cost is the budget.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from wball.cost import Moves
from wball.inputs import per_image
from wball.kernels import dispatch
from wball.plan import SPREAD

COLD_PRICE = 10.0
"""First price of the search when no warm start is given."""

COST_TOL = 1e-3
"""``psi`` is good enough when the cost lies within this relative distance below the budget."""


KAPPA = (0.5, 8.0)
"""Range of ``kappa``. Values below 1 occur when the Newton steps end above the requested cost."""

PACE, PACING = (0.5, 2.0), 0.7
"""``kappa`` follows ``budget / cost`` within this range, to this power."""

DOUBT = 6
"""Rounding errors of an exponent by which two copies of a flow may differ."""


@dataclass(frozen=True)
class PlanRequest:
    """A request for the feasible plan of potentials ``b`` at a cost of about ``kappa * budget``.

    Attributes:
        x: images in the box, float32 or float64, ``(B, C, H, W)``.
        b: potentials, like ``x``. Only differences inside a channel's window matter.
        budget: the ball's budget per image, ``(B,)``. Not positive: images stay unchanged.
        moves: the moves of the ground cost on these images.
        box: ``(lo, hi)`` or ``None``.
        psi: starting price per image, ``(B,)``; ``None`` for :data:`COLD_PRICE`.
        q: starting box potentials, like ``x`` (zeros without a box); ``None`` for zeros.
        kappa: factor on the budget of this plan, per image, float64; ``None`` for 1.
        sweeps: coordinate steps on the box potentials; none without a box.
        newton: largest number of Newton steps after each of them.
        momentum: share of a coordinate step that is added to the next one, in [0, 1).
    """

    x: Tensor
    b: Tensor
    budget: Tensor
    moves: Moves
    box: tuple[float, float] | None
    _: KW_ONLY
    psi: Tensor | None = None
    q: Tensor | None = None
    kappa: Tensor | None = None
    sweeps: int = 3
    newton: int = 12
    momentum: float = 0.0

    def start(self) -> tuple[Tensor, Tensor]:
        """The price and the box potentials to start from."""
        psi = self.psi
        if psi is None:
            psi = torch.full_like(self.budget, COLD_PRICE, dtype=self.x.dtype)
        return psi, torch.zeros_like(self.x) if self.q is None else self.q

    @property
    def spend(self) -> Tensor:
        """Cost of the requested plan, per image, float64."""
        budget = self.budget.double()
        return budget if self.kappa is None else budget * self.kappa


@dataclass(frozen=True)
class EntropicPlan:
    """A plan of the family above that satisfies the box, the images that describe it, and its
    point.

    Attributes:
        z: the point, in the ball, ``(B, C, H, W)``.
        cost: ``<P, C>`` per image, float64. At most ``kappa * budget`` where the Newton steps
            sufficed.
        net_cost: cost after opposite flows ``i -> j`` and ``j -> i`` cancel (rows and columns
            stay), float64.
        scale: ``t``, per image, float64; 0 where the plan is not finite. ``z`` costs
            ``scale * net_cost``.
        kappa: for the next plan, per image, float64.
        psi: price of cost per image, to warm-start the next call.
        q: box potentials, to warm-start the next call.
        keep: column factors on the moving mass.
        give: row factors on the moving mass.
        chosen: the potentials of the plan, ``b + q``, like ``x``.
        kernel: which implementation computed it.
    """

    z: Tensor
    cost: Tensor
    net_cost: Tensor
    scale: Tensor
    kappa: Tensor
    psi: Tensor
    q: Tensor
    keep: Tensor
    give: Tensor
    chosen: Tensor
    kernel: str = ""


def narrowed(b: Tensor) -> Tensor:
    """Raise potentials that are more than ``SPREAD`` below the largest one of their image."""
    return torch.maximum(b, per_image(b.flatten(1).amax(1) - SPREAD, b))


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """Compute the plan with the kernel chosen for such images."""
    name = dispatch.choose("entropic_plan", request.x, request.moves)
    plan: EntropicPlan = dispatch.load("entropic_plan", name).entropic_plan(request)
    return replace(plan, kernel=name)


def pulled_back(
    request: PlanRequest,
    columns: Tensor,
    costs: tuple[Tensor, Tensor],
    psi: Tensor,
    q: Tensor,
    factors: tuple[Tensor, Tensor],
) -> EntropicPlan:
    """The answer to ``request`` by a plan with these ``columns``, costs (gross and net), price, box
    potentials and factors. An image whose plan is not finite stays unchanged."""
    x, cost, net_cost = request.x, costs[0], costs[1].nan_to_num(posinf=0.0)
    chosen = narrowed(request.b) + q
    size = chosen.flatten(1).abs().amax(1) + psi * request.moves.dearest
    doubt = (DOUBT * torch.finfo(x.dtype).eps * size.double()).clamp(max=0.5)
    room = request.budget.clamp(min=0.0) * (1 - doubt)
    slack = room / costs[1].clamp(min=1e-300)
    slack = torch.where(columns.flatten(1).sum(1).isfinite(), slack, 0.0).nan_to_num()
    scale = slack.clamp(max=1.0)
    change = (columns - x).nan_to_num(0.0, 0.0, 0.0)
    z = x + per_image(scale.to(x.dtype), x) * change
    if request.box is not None:
        z = z.clamp(*request.box)  # rounding only
    paced = slack.clamp(*PACE) ** PACING
    kappa = (paced if request.kappa is None else request.kappa * paced).clamp(*KAPPA)
    return EntropicPlan(z, cost, net_cost, scale, kappa, psi, q, *factors, chosen)
