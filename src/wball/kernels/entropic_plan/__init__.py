r"""The entropic plan: the attack step's oracle.

For an image ``x`` (rows), potentials ``b`` and ``q`` (columns), a price ``psi`` per image and
factors ``keep`` and ``give`` in [0, 1], the plan is

.. math::
    P_{ij} = x_i\, \mathrm{softmax}_j(b_j + q_j - \psi C_{ij}) \, give_i\, keep_j \quad (i \ne j), \qquad
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
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from wball.batch import per_image
from wball.kernels import dispatch
from wball.kernels.plan_rows import SPREAD
from wball.moves import Moves

COLD_PRICE = 10.0
"""First price of the search when no warm start is given."""

COST_TOL = 1e-3
"""``psi`` is good enough when the cost lies within this relative distance below the budget."""


@dataclass(frozen=True)
class PlanRequest:
    """The feasible plan that ``b`` proposes at a cost of about ``budget``.

    Attributes:
        x: images in the box, float32 or float64, ``(B, C, H, W)``.
        b: potentials, like ``x``, :func:`narrowed`. Only differences inside a channel's window
            matter.
        budget: cost to spend per image, ``(B,)``. Not positive: the plan is not used, any psi will
            do.
        moves: the moves of the ground cost on these images.
        box: ``(lo, hi)`` or ``None``.
        psi: starting price per image, ``(B,)``; ``None`` for :data:`COLD_PRICE`.
        q: starting box potentials, like ``x`` (zeros without a box); ``None`` for zeros.
        sweeps: coordinate steps on the box potentials; none without a box.
        newton: largest number of Newton steps after each of them.
        momentum: what part of a coordinate step the next one goes on by, in [0, 1).
    """

    x: Tensor
    b: Tensor
    budget: Tensor
    moves: Moves
    box: tuple[float, float] | None
    _: KW_ONLY
    psi: Tensor | None = None
    q: Tensor | None = None
    sweeps: int = 3
    newton: int = 12
    momentum: float = 0.0

    def start(self) -> tuple[Tensor, Tensor]:
        """The price and the box potentials to start from."""
        psi = self.psi
        if psi is None:
            psi = torch.full_like(self.budget, COLD_PRICE, dtype=self.x.dtype)
        return psi, torch.zeros_like(self.x) if self.q is None else self.q


@dataclass(frozen=True)
class EntropicPlan:
    """A plan of the family above that keeps the box, as column sums and the images that describe
    it.

    Attributes:
        z: column sums, inside the box, ``(B, C, H, W)``.
        cost: ``<P, C>`` per image, float64. At most ``budget`` where the Newton steps sufficed; the
            caller scales.
        net_cost: cost after opposite flows ``i -> j`` and ``j -> i`` cancel (rows and columns
            stay), float64.
        psi: price of cost per image, to warm-start the next call.
        q: box potentials, to warm-start the next call.
        keep: column factors on the moving mass.
        give: row factors on the moving mass.
        balanced: whether ``z`` has the mass of ``x``, as sums in float64 have it.
        kernel: which implementation computed it.
    """

    z: Tensor
    cost: Tensor
    net_cost: Tensor
    psi: Tensor
    q: Tensor
    keep: Tensor
    give: Tensor
    balanced: bool = False
    kernel: str = ""


def narrowed(b: Tensor) -> Tensor:
    """Potentials, raised where they are more than ``SPREAD`` below the largest of their image."""
    return torch.maximum(b, per_image(b.flatten(1).amax(1) - SPREAD, b))


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """The plan, by whichever kernel serves such images."""
    name = dispatch.choose("entropic_plan", request.x, request.moves)
    plan: EntropicPlan = dispatch.load("entropic_plan", name).entropic_plan(request)
    return replace(plan, kernel=name)
