"""Linear maxima over a Wasserstein ball, differentiable: the penalty of first-order robustness."""

import torch
from torch import Tensor

from wball.ball import WassersteinBall
from wball.cost import DenseCost
from wball.inputs import dot
from wball.kernels.row_maximum import linear_maximum
from wball.kernels.row_maximum.reference import maximiser


def linear_gain(g: Tensor, x: Tensor, ball: WassersteinBall, max_iter: int = 16) -> Tensor:
    r"""The maximum of ``<g, z - x>`` over the ball without its box, ``(B,)``, differentiable in
    ``g``.

    .. math:: \max_z\; \langle g, z - x \rangle \quad\text{over the moves of the ball's window}

    The gradient is ``z - x`` at the maximum (Danskin). ``z`` mixes two plans so that the budget is
    spent exactly.
    """
    if isinstance(ball.cost, DenseCost):
        raise TypeError("linear_gain needs a cost by moves (GridCost or StencilCost), got a matrix")
    moves, budget = ball.cost.arcs(x), ball.budget(x)
    with torch.no_grad():
        a = g.detach()
        found = linear_maximum(a, x, budget, moves, rounds=max_iter)
        moved = maximiser(a, x, budget, moves, found) - x
    return dot(g, moved)
