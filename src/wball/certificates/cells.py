"""Rows of one image carried backwards side by side, cell by cell: what is known to be 0 costs nothing.

Behind a unit that is inactive all over the ball every row has coefficient 0, so of a layer's cells only the others are
computed, and only from each other. On a CPU that is several times faster than rows one by one
(:class:`wball.input_sets.rows.Rows`), which each have a patch of their own. Rows of units that lie close together share
most of the cells they reach: :func:`neighbours` puts them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wball.certificates.graph import (
    Activation,
    Affine,
    Conv2d,
    Diagonal,
    Graph,
    Input,
    Linear,
    Reshape,
    Shape,
    Sum,
)
from wball.input_sets.rows import Rows
from wball.kernels import dispatch
from wball.kernels.sparse_transpose import Geometry, sparse_transpose

FEW, MANY = 32, 128
"""Rows that should stand side by side, and how many do at most."""


@dataclass(frozen=True)
class Cells:
    """Coefficients of ``N`` rows over a layer: ``value`` (L, N) in float64 at the cells ``at`` (L,), 0 elsewhere.

    ``at`` is in order.
    """

    value: Tensor
    at: Tensor

    def __add__(self, other: Cells) -> Cells:
        if torch.equal(self.at, other.at):
            return Cells(self.value + other.value, self.at)
        at, place = torch.cat([self.at, other.at]).unique(return_inverse=True)
        value = self.value.new_zeros((at.shape[0], self.value.shape[1]))
        mine, others = place.split([self.at.shape[0], other.at.shape[0]])
        value[mine] = self.value
        value.index_add_(0, others, other.value)
        return Cells(value, at)


def follows(graph: Graph, target: int, like: Tensor) -> bool:
    """Whether rows over operation ``target`` can be carried back so, and fast."""
    if like.device.type != "cpu" or dispatch.choose("sparse_transpose", like) == "torch":
        return False
    kinds = (Input, Conv2d, Linear, Diagonal, Sum, Reshape, Activation)
    return all(isinstance(op, kinds) for op in graph.ops[: target + 1])


def neighbours(shape: Shape, unit: Tensor) -> list[Tensor]:
    """Units of a layer in groups of neighbours: of each group the places in the list."""
    height, width = shape[1:] if len(shape) == 3 else (1, 1)
    place = unit % (height * width)
    side, most = 1, max(height, width)
    while True:
        tile = (place // width // side) * (-(-width // side)) + place % width // side
        kinds, group, count = tile.unique(return_inverse=True, return_counts=True)
        if side >= most or unit.shape[0] >= FEW * kinds.shape[0]:
            break
        side *= 2
    parts = group.argsort(stable=True).split(count.tolist())
    return [some for part in parts for some in part.split(MANY)]


class Carrier:
    """Carries rows of one image back to it.

    Args:
        graph: the traced network.
        lines: slope and shift of the line above an activation and the slope of the one below, cell by cell.
    """

    def __init__(self, graph: Graph, lines: Callable[[int], tuple[Tensor, Tensor, Tensor]]) -> None:
        self.graph, self._lines = graph, lines
        self._known: dict[int, tuple[Tensor, ...]] = {}

    def back(self, target: int, unit: Tensor, sign: Tensor) -> tuple[Tensor, Rows, list[Tensor]]:
        """``sign`` times units of operation ``target`` as in :func:`wball.certificates.graph.back`.

        The last ones are the magnitudes of the constants.
        """
        at, place = unit.unique(return_inverse=True)
        value = torch.zeros((at.shape[0], unit.shape[0]), dtype=torch.float64)
        value[place, torch.arange(unit.shape[0])] = sign.to(torch.float64)
        pending = {target: Cells(value, at)}
        constant, scale = torch.zeros(unit.shape[0], dtype=torch.float64), []
        for position in range(target, 0, -1):
            here = pending.pop(position, None)
            if here is None:
                continue
            op = self.graph.ops[position]
            if isinstance(op, Affine):
                shift, parts = _affine(op, here, [self._wanted(source) for source in op.inputs])
            else:
                shift, part = self._relax(position, here)
                scale.append(shift.abs())
                parts = [part]
            constant = constant + shift
            for source, part in zip(op.inputs, parts, strict=True):
                pending[source] = pending[source] + part if source in pending else part
        return constant, _rows(pending[0], self.graph.ops[0].shape), scale

    def _wanted(self, source: int) -> Tensor:
        """The cells of an operation that matter to what it reads."""
        op = self.graph.ops[source]
        return (
            self._at(source)[3]
            if isinstance(op, Activation)
            else torch.ones(math.prod(op.shape), dtype=torch.bool)
        )

    def _at(self, position: int) -> tuple[Tensor, ...]:
        if position not in self._known:
            line, height, below = self._lines(position)
            self._known[position] = (
                line,
                height,
                below,
                (line != 0) | (below != 0) | (height != 0),
            )
        return self._known[position]

    def _relax(self, position: int, cells: Cells) -> tuple[Tensor, Cells]:
        line, height, below, matter = self._at(position)
        keep = matter[cells.at]
        if not bool(keep.all()):
            cells = Cells(cells.value[keep], cells.at[keep])
        bent = ((line != 1) | (below != 1) | (height != 0))[cells.at].nonzero()[:, 0]
        if bent.shape[0] == 0:
            return cells.value.new_zeros(cells.value.shape[1]), cells
        place, some, value = cells.at[bent], cells.value[bent], cells.value.clone()
        positive, negative = some.clamp(min=0), some.clamp(max=0)
        value[bent] = positive * below[place, None] + negative * line[place, None]
        return height[place] @ negative, Cells(value, cells.at)


def _affine(op: Affine, cells: Cells, wanted: list[Tensor]) -> tuple[Tensor, list[Cells]]:
    """As :meth:`wball.certificates.graph.Affine.back`, at the ``wanted`` cells of every source."""
    value, at = cells.value, cells.at
    none = value.new_zeros(value.shape[1])
    if isinstance(op, Conv2d):
        geometry = Geometry(op.before, op.shape, op.stride, op.padding, op.dilation, op.groups)
        found = Cells(*sparse_transpose(value, at, op.weight.to(value.dtype), wanted[0], geometry))
        channel = at // math.prod(op.shape[1:])
        return none if op.bias is None else op.bias.to(value.dtype)[channel] @ value, [found]
    if isinstance(op, Linear):
        columns = wanted[0].nonzero()[:, 0]
        product = op.weight.to(value.dtype)[at][:, columns].T @ value
        return none if op.bias is None else op.bias.to(value.dtype)[at] @ value, [
            Cells(product, columns)
        ]
    if isinstance(op, Diagonal):
        scale, shift = (
            part.to(value.dtype).expand(1, *op.shape).flatten()[at] for part in (op.scale, op.shift)
        )
        return shift @ value, [Cells(value * scale[:, None], at)]
    if isinstance(op, Sum):
        return none, [cells, cells if op.sign == 1 else Cells(value * op.sign, at)]
    assert isinstance(op, Reshape)
    return none, [cells]


def _rows(cells: Cells, shape: Shape) -> Rows:
    """Rows over the image, cut to the patch where any of them is not 0."""
    count = cells.value.shape[1]
    image = torch.zeros(count, dtype=torch.long)
    whole = cells.value.new_zeros((count, math.prod(shape)))
    whole[:, cells.at] = cells.value.T
    coeff = whole.reshape(count, *shape)
    if len(shape) != 3 or cells.at.shape[0] == 0:
        return Rows(coeff, image)
    place = cells.at % (shape[1] * shape[2])
    down, across = place // shape[2], place % shape[2]
    top, bottom, left, right = (
        int(end) for line in (down, across) for end in (line.min(), line.max() + 1)
    )
    if (bottom - top) * (right - left) >= 0.7 * shape[1] * shape[2]:
        return Rows(coeff, image)
    corner = (torch.full_like(image, top), torch.full_like(image, left))
    return Rows(coeff[:, :, top:bottom, left:right].contiguous(), image, corner)
