r"""Into the box in plain PyTorch: mass above ``hi`` goes back where it came from, all pixels at once.

With ``back_j`` the share that pixel ``j`` sends back of the ``r_j`` it receives, and flows ``P_jk = A_j w_jk E_k``,

.. math::
    z_j = z^0_j - r_j back_j + A_j \sum_k w_{jk} E_k back_k.

The least ``0 <= back <= 1`` with ``z <= hi`` solves a quadratic program with bounds: divided by ``A_j``, the equations
are symmetric in ``E_k back_k`` where a move costs what its reverse costs. Steps ``back_j += (z_j - hi) / r_j`` follow
its gradient in the metric of its diagonal. With Nesterov's momentum excess gets out of a full area in about as
many steps as the area is wide, not in the square of that.
:mod:`wball.kernels.projected_sinkhorn.excess` does the same pixel by pixel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wball.batch import per_image
from wball.kernels.plan_rows import PlanRows

STEP = 0.5
"""Part of a step that is made: in that metric eigenvalues go up to 2, where flows go to the next pixels only."""
MOST, OFTEN = 240, 8
"""At most so many steps. The host asks every few of them whether that was enough."""


def drain(
    rows: PlanRows, received: Tensor, columns: Tensor, aim: Tensor, most: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``keep`` such that no column is above ``most``, for which images it was found in time, and for which at all.

    Columns aim at ``aim``, one number per image and below ``most``, or they would come near it forever.
    """
    x, factors, narrow = rows.x, rows.factors, rows.factors.fit
    returned = rows.moves.sums(factors.weights)

    def column(back: Tensor) -> Tensor:
        """Columns of the plan if these shares are sent back."""
        mass = returned(factors.column * back)
        return torch.addcmul(columns, mass, factors.row).addcmul_(received, back, value=-1.0)

    per_share = STEP / received.clamp(min=1e-300)
    goal = per_image(aim, x)
    back = ahead = torch.zeros_like(x)
    found = torch.zeros_like(narrow)
    for step in range(MOST + 1):
        if step % OFTEN == 0:
            found = narrow & ((column(back) if step else columns).flatten(1).amax(1) <= most)
            if step == MOST or bool((found | ~narrow).all()):
                break
        last, back = back, torch.addcmul(ahead, column(ahead) - goal, per_share).clamp_(0.0, 1.0)
        ahead = torch.add(back, back - last, alpha=step / (step + 3))
    return 1 - back, found, narrow
