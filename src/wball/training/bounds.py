r"""Differentiable bounds for training: intervals and CROWN over an l-inf ball, linear maxima over a
Wasserstein ball.

Intervals go forward: with centre ``c`` and radius ``r`` an affine layer gives ``W c + b`` and ``|W|
r``. CROWN goes backward from the margins ``f_y - f_k`` and replaces each ReLU by linear bounds
(:mod:`wball.certificates.relaxation`); the resulting linear function has its minimum at a corner.
The mix

.. math::
    \underline m = \beta\, \underline m_{CROWN} + (1 - \beta)\, \underline m_{interval}

is sound for every ``beta`` in [0, 1] (CROWN-IBP; Zhang et al., 2020). Bounds are computed in the
images' precision without outward rounding, for training only. Certificates come from
:func:`wball.certificates.certify`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.ball import WassersteinBall
from wball.certificates.graph import (
    Activation,
    Affine,
    Conv2d,
    Diagonal,
    Graph,
    Input,
    Interval,
    Linear,
    Reshape,
    Sum,
    back,
)
from wball.certificates.relaxation import adaptive_slope, upper_line
from wball.certificates.tracing import trace
from wball.certificates.trust import UnsupportedModule
from wball.cost import DenseCost
from wball.input_sets.rows import Rows
from wball.inputs import dot
from wball.kernels.linear_maximum import linear_maximum


class LinfBounds:
    """Bounds of a model's margins over ``{z : |z - x| <= eps, 0 <= z <= 1}``.

    The model is traced once; its parameters may change afterwards, and gradients reach them.
    """

    def __init__(self, model: nn.Module, like: Tensor) -> None:
        self.graph: Graph = trace(model, like)
        for op in self.graph.ops:
            if not isinstance(op, (Input, Linear, Conv2d, Diagonal, Sum, Reshape, Activation)):
                raise UnsupportedModule(
                    f"provable training has no interval bound for {op.name!r} ({type(op).__name__}); "
                    "use Linear, Conv2d, ReLU, Flatten, sums and normalisation by constants"
                )

    def margins(self, x: Tensor, y: Tensor, eps: float, crown: float = 0.0) -> Tensor:
        """Lower bounds of ``f_y - f_k``, ``(B, classes)``, 0 at ``k = y``."""
        low, high = (x - eps).clamp(min=0.0), (x + eps).clamp(max=1.0)
        values = self._intervals(((low + high) / 2, (high - low) / 2))
        out = x.new_zeros(())
        if crown < 1:
            out = out + (1 - crown) * self._interval_margins(values, y)
        if crown > 0:
            out = out + crown * self._crown_margins(values, y)
        return out

    def _intervals(self, image: Interval) -> list[Interval]:
        values: list[Interval] = []
        for op in self.graph.ops:
            sources = [values[k] for k in op.inputs]
            if isinstance(op, Input):
                values.append(image)
            elif isinstance(op, Activation):
                centre, radius = sources[0]
                values.append(op.interval(centre - radius, centre + radius))
            else:
                assert isinstance(op, Affine)
                found = op.interval(*sources)
                assert found is not None
                values.append(found)
        return values

    def _interval_margins(self, values: list[Interval], y: Tensor) -> Tensor:
        last = self.graph.ops[-1]
        if isinstance(last, Linear):  # bound differences of rows: common parts cancel
            centre, radius = values[last.inputs[0]]
            rows = last.weight[y][:, None] - last.weight
            bias = 0.0 if last.bias is None else last.bias[y][:, None] - last.bias
            return (rows @ centre[..., None] - rows.abs() @ radius[..., None]).squeeze(-1) + bias
        centre, radius = values[-1]
        margin = (centre - radius).gather(1, y[:, None]) - (centre + radius)
        return margin.scatter(1, y[:, None], 0.0)

    def _crown_margins(self, values: list[Interval], y: Tensor) -> Tensor:
        classes, batch = self.graph.ops[-1].shape[0], y.shape[0]
        eye = torch.eye(classes, dtype=values[0][0].dtype, device=y.device)
        rows = Rows(
            (eye[y][:, None] - eye).reshape(-1, classes),
            torch.arange(batch, device=y.device).repeat_interleave(classes),
        )

        def relax(position: int, rows: Rows) -> tuple[Tensor, Rows]:
            op = self.graph.ops[position]
            assert isinstance(op, Activation)
            centre, radius = values[op.inputs[0]]
            low, up = centre - radius, centre + radius
            slope, shift = upper_line(low, up, op.leak)
            under = adaptive_slope(low, up, slope, op.leak)
            positive, negative = rows.coeff.clamp(min=0), rows.coeff.clamp(max=0)
            constant = dot(negative, rows.read(shift))
            return constant, rows.like(positive * rows.read(under) + negative * rows.read(slope))

        constant, at_image = back(self.graph, len(self.graph.ops) - 1, rows, relax)
        centre, radius = (at_image.read(v) for v in values[0])
        least = (at_image.coeff * centre - at_image.coeff.abs() * radius).flatten(1).sum(1)
        return (constant + least).view(batch, classes)


@torch.no_grad()
def verified(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Which images are certified over the l-inf ball, by intervals or CROWN (bool, ``(B,)``)."""
    bounds = LinfBounds(model, x)
    own = F.one_hot(y, bounds.graph.ops[-1].shape[0]).bool()
    best = [
        bounds.margins(x, y, eps, crown).masked_fill(own, torch.inf).amin(1) for crown in (0.0, 1.0)
    ]
    return torch.maximum(*best) > 0


def linear_gain(g: Tensor, x: Tensor, ball: WassersteinBall, max_iter: int = 16) -> Tensor:
    r"""The maximum of ``<g, z - x>`` over the ball without its box, ``(B,)``, differentiable in
    ``g``.

    .. math:: \max_z\; \langle g, z - x \rangle \quad\text{over the moves of the ball's window}

    The gradient is ``z - x`` at the maximum (Danskin). ``z`` mixes two plans so that the budget is
    spent exactly.
    """
    if isinstance(ball.cost, DenseCost):
        raise TypeError("linear_gain needs a cost by moves (GridCost or StencilCost), got a matrix")
    moves, budget = ball.cost.arcs(int(x.shape[-2]), int(x.shape[-1]), x), ball.budget(x)
    with torch.no_grad():
        found = linear_maximum(g.detach(), x, budget, moves, point=True, max_iter=max_iter)
        assert found.z is not None
        moved = found.z.to(g.dtype) - x
    return dot(g, moved)
