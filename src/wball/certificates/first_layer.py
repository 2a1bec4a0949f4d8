r"""Bounds of a first convolution over a Wasserstein ball: one convolution of the image for each ``psi``.

A unit of the first layer is ``v = <w, z> + b`` with the same kernel ``w`` at every position, so the
inner maxima of

.. math::
    v(z) - v(x) \le \psi E + \sum_i x_i \max_j \big( w_j - w_i - \psi C_{ij} \big)

are a kernel themselves, larger than ``w`` by the reach of the moves, and the same for all positions
and images. Every ``psi >= 0`` is sound; the bound is the smallest over a fixed grid of them,
relative to the kernel's steepest slope, and no larger than what the box allows. Mass beyond the
enlarged kernel comes from at least its margin away. Moves may end outside the image here, which
only enlarges the bound of units at the border.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.certificates.anchor import ImageConvolution, image_convolution
from wball.certificates.graph import Activation, Curved, Graph
from wball.input_sets import InputSet

MARGIN = 5
"""How far around the kernel mass is followed pixel by pixel."""

GRID = (*(0.95**k for k in range(12)), *(0.56 * 0.85**k for k in range(16)))
"""Prices ``psi``, relative to the steepest slope, above which nothing moves."""

AT_ONCE = 2**27
"""Numbers that the gains of several prices may hold on a GPU."""


class FirstLayer:
    """Bounds of every activation that reads a convolution of the image, for full plans of a grid
    cost.

    Other input sets leave ``layers`` empty. The kernels serve every image and radius of the same
    geometry.
    """

    def __init__(self, graph: Graph, source: InputSet) -> None:
        self.layers: dict[int, ImageConvolution] = {}
        self._kernels: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self.plans = source.has_plans
        self.kernel = source.kernel
        if source.power is None:
            return
        for position in graph.relaxed():
            found = (
                image_convolution(graph, position)
                if isinstance(graph.ops[position], (Activation, Curved))
                else None
            )
            if found is not None:
                self.layers[position] = found

    def bounds(
        self, position: int, source: InputSet, centre: Tensor, rounding: float
    ) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of what activation ``position`` reads, given its value
        ``centre`` at the images.
        """
        layer = self.layers[position]
        size = centre.abs() + layer.kernel.abs().sum((1, 2, 3)).view(-1, 1, 1)
        ends = []
        for sign in (-1.0, 1.0):
            gain = self._gain(position, layer, source, sign)
            ends.append(centre + sign * (gain + rounding * (gain + size)))
        return ends[0], ends[1]

    def _gain(
        self, position: int, layer: ImageConvolution, source: InputSet, sign: float
    ) -> Tensor:
        """The most ``sign * v`` can grow, ``(B, *layer)``."""
        assert source.power is not None
        kernel = sign * layer.kernel
        if (position, sign) not in self._kernels:
            self._kernels[position, sign] = _kernels(kernel, source.power)
        kernels, prices = self._kernels[position, sign]  # (T, units, C, h, w), (T, units)
        x, budget = source.x, source.budget.view(-1, 1, 1, 1)
        padding = [side + MARGIN for side in layer.padding]
        window = torch.ones((1, 1, *kernels.shape[3:]), dtype=x.dtype, device=x.device)
        seen = F.conv2d(x.flatten(0, 1)[:, None], window, stride=layer.stride, padding=padding)
        total = x.sum((2, 3))[..., None, None]
        beyond = (total - seen.reshape(*x.shape[:2], *seen.shape[2:])).clamp(min=0) + 1e-12 * total
        far, top = (
            (MARGIN + 1.0) ** source.power,
            kernel.flatten(2).amax(2).clamp(min=0),
        )  # (units, C)
        best: Tensor | None = None
        if source.box is not None:
            lo, hi = source.box
            best = F.conv2d(hi - x, kernel.clamp(min=0), stride=layer.stride, padding=layer.padding)
            best = best + F.conv2d(
                lo - x, kernel.clamp(max=0), stride=layer.stride, padding=layer.padding
            )
        # Many prices at once on a GPU, one on a CPU: their gains are as many numbers as the layer
        # has.
        step = max(1, AT_ONCE // (x.shape[0] * math.prod(layer.layer))) if x.is_cuda else 1
        for some, price in zip(kernels.split(step), prices.split(step), strict=True):
            units = some.flatten(0, 1)
            reach = (top - price[..., None] * far).clamp(min=0)  # (t, units, C)
            gain = F.conv2d(x, units, stride=layer.stride, padding=padding)
            gain = (
                gain
                + torch.einsum("uc,bchw->buhw", reach.flatten(0, 1), beyond)
                + price.view(-1, 1, 1) * budget
            )
            least = gain.unflatten(1, price.shape).amin(1)
            best = least if best is None else torch.minimum(best, least)
        assert best is not None
        return best


def _kernels(kernel: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """``max_j (w_j - w_i - psi C_ij)`` on the enlarged kernel, one for every ``psi``; and the
    ``psi``, (T, units).
    """
    wide = F.pad(kernel, (MARGIN,) * 4)  # (units, C, h, w)
    height, width = wide.shape[2:]
    place = torch.arange(height * width, device=kernel.device)
    row, column = place // width, place % width
    # Outside the kernel all targets are worth 0, and the nearest ones lie next to it.
    inner = (
        (row >= MARGIN - 1)
        & (row <= height - MARGIN)
        & (column >= MARGIN - 1)
        & (column <= width - MARGIN)
    )
    target = inner.nonzero()[:, 0]
    squared = (row[:, None] - row[target]) ** 2 + (column[:, None] - column[target]) ** 2
    costs = squared.to(kernel.dtype) ** (power / 2)  # (from, to)
    value = wide.flatten(2)
    gains = value[:, :, None, target] - value[..., None]  # (units, C, from, to)
    steepest = (
        (gains / torch.where(costs > 0, costs, torch.inf)).flatten(1).amax(1).clamp(min=1e-12)
    )
    prices = torch.tensor(GRID, dtype=kernel.dtype, device=kernel.device)[:, None] * steepest
    found = [
        (gains - price.view(-1, 1, 1, 1) * costs).amax(3).clamp(min=0).reshape(wide.shape)
        for price in prices
    ]
    return torch.stack(found), prices
