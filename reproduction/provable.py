r"""Provable training in the l-inf ball, for the paper's defences: a loss for
:func:`wball.training.train`.

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

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wball.certificates.graph import (
    Affine,
    Conv2d,
    Diagonal,
    Graph,
    Input,
    Interval,
    Linear,
    Move,
    Relu,
    Sum,
    back,
)
from wball.certificates.operators import read_graph
from wball.certificates.program import UnsupportedModule
from wball.certificates.relaxation import adaptive_slope, upper_line
from wball.input_sets.rows import Rows
from wball.inputs import check_positive, dot


class LinfBounds:
    """Bounds of a model's margins over ``{z : |z - x| <= eps, 0 <= z <= 1}``.

    The model is read once; its parameters may change afterwards, and gradients reach them.
    """

    def __init__(self, model: nn.Module, like: Tensor) -> None:
        self.graph: Graph = read_graph(model, like)
        for op in self.graph.ops:
            if not isinstance(op, (Input, Linear, Conv2d, Diagonal, Sum, Move, Relu)):
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
            elif isinstance(op, Relu):
                centre, radius = sources[0]
                low, up = (centre - radius).relu(), (centre + radius).relu()
                values.append(((low + up) / 2, (up - low) / 2))
            else:
                assert isinstance(op, Affine)
                centres, radii = zip(*sources, strict=True)
                values.append((op.forward(*centres), op.spread(*radii)))
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

        def relax(position: int, rows: Rows) -> tuple[Tensor, list[Rows]]:
            op = self.graph.ops[position]
            assert isinstance(op, Relu)
            centre, radius = values[op.inputs[0]]
            low, up = centre - radius, centre + radius
            slope, shift = upper_line(low, up)
            under = adaptive_slope(low, up, slope)
            positive, negative = rows.coeff.clamp(min=0), rows.coeff.clamp(max=0)
            constant = dot(negative, rows.read(shift))
            return constant, [rows.like(positive * rows.read(under) + negative * rows.read(slope))]

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


@dataclass(frozen=True)
class Provable:
    """Certified training in the l-inf ball: interval bounds mixed with CROWN.

    The loss is ``kappa CE(f(x)) + (1 - kappa) CE(worst logits)``. During the ramp the radius grows
    from 0 to ``eps``, ``kappa`` falls from 1 to its value, and the share of CROWN in the bounds
    (:class:`LinfBounds`) goes from ``crown`` to ``crown_end``.

    Attributes:
        eps: radius in pixel values.
        kappa: weight of the clean loss at the end.
        ramp: the shares of the run at which the ramp begins and ends.
        crown, crown_end: share of CROWN when the ramp begins (0: intervals only) and ends.
    """

    eps: float
    kappa: float = 0.5
    ramp: tuple[float, float] = (0.05, 0.5)
    crown: float = 1.0
    crown_end: float = 0.0

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)
        for name in ("kappa", "crown", "crown_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        ramp = self.ramp
        if not isinstance(ramp, tuple) or len(ramp) != 2 or not 0 <= ramp[0] < ramp[1] <= 1:
            raise ValueError(f"ramp must be two rising shares of the run in [0, 1], got {ramp}")

    def ramped(self, progress: float) -> float:
        """Progress of the ramp, in [0, 1]."""
        begin, end = self.ramp
        return min(1.0, max(0.0, (progress - begin) / (end - begin)))

    def __call__(
        self, network: nn.Module, x: Tensor, z: Tensor, y: Tensor, progress: float
    ) -> tuple[Tensor, Tensor]:
        """The loss at a share ``progress`` of the run, and the logits."""
        logits: Tensor = network(x)
        clean, ramp = F.cross_entropy(logits, y), self.ramped(progress)
        if ramp == 0:
            return clean, logits
        crown = self.crown + ramp * (self.crown_end - self.crown)
        margins = _bounds(network, x).margins(x, y, ramp * self.eps, crown)
        kappa = 1 + ramp * (self.kappa - 1)
        return kappa * clean + (1 - kappa) * F.cross_entropy(-margins, y), logits


_made: WeakKeyDictionary[nn.Module, LinfBounds] = WeakKeyDictionary()


def _bounds(network: nn.Module, like: Tensor) -> LinfBounds:
    """The bounds of a network, read once; refuses batch normalisation."""
    if network not in _made:
        model = getattr(network, "model", network)  # behind the precision of training
        for name, module in model.named_modules():
            # The program would keep the statistics of the untrained network.
            if getattr(module, "running_mean", None) is not None:
                raise UnsupportedModule(
                    f"provable training has no bound for {name!r} ({type(module).__name__}), whose "
                    "statistics change; use a network without batch normalisation"
                )
        _made[network] = LinfBounds(model, like)
    return _made[network]


def verified_accuracy(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> float:
    """Share of the images that are certified over the l-inf ball of radius ``eps``."""
    parts = zip(x.split(200), y.split(200), strict=True)
    return float(torch.cat([verified(model.eval(), *part, eps) for part in parts]).double().mean())
