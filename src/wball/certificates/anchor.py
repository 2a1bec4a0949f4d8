r"""Anchored relaxation: bounds that are exact at the image itself and grow only with the mass that
moves.

The usual upper line of an unstable unit lies above the activation at *every* point, so each of
hundreds of unstable units costs something even if nothing moves, as if the attacker could spend the
whole budget on all of them at once. In terms of a transport plan ``P`` this is avoidable. Let ``v``
be the unit's input, ``v0`` its value at the image, and ``l <= v <= u`` over the ball. Interpolating
the convex activation ``f`` at ``l``, ``v0`` and ``u`` gives

.. math::
    f(v) \le f(v_0) + \beta\,(v - v_0) + \omega\,(v - v_0)^+, \qquad
    \beta = \frac{f(v_0) - f(l)}{v_0 - l}, \quad \beta + \omega = \frac{f(u) - f(v_0)}{u - v_0}

and if ``v - v0 <= sum_ij P_ij g_ij`` for every plan (``g_ii = 0``), then ``(v - v0)^+ <= sum_ij
P_ij max(g_ij, 0)``. So a row that multiplies the unit by ``-b < 0`` is bounded by a linear function
of the image minus ``sum_ij P_ij * b * omega * max(g_ij, 0)``: each unit of moved mass pays a
*charge* that depends on where it comes from and where it goes. The minimum over the ball is the
same scalar search over ``psi`` as before, with charges added to the gains of the moves:

.. math::
    \max_P \sum_{ij} P_{ij} (a_j + M_{ij})
    \le \psi E + \sum_i x_i \max_j (a_j + M_{ij} - \psi C_{ij})

An :class:`Anchor` knows ``max(g_ij, 0)`` for the units of one activation. In a first convolution
``g_ij = w_j - w_i`` is the same for all positions, so the charges are one transposed convolution;
for later layers ``g`` comes from the units' own backward bounds.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.certificates.graph import Conv2d, Diagonal, Graph, Input, transposed
from wball.cost import Move, moving
from wball.input_sets import InputSet
from wball.input_sets.rows import Charges, Rows
from wball.inputs import dot, per_image

LIMIT = 2**15
"""Numbers per image and pixel that the gains of one layer may hold on a CPU."""

COPIES = 6
"""Gains are in memory so often while they are computed, padded and read in float64."""

AROUND, PRICES = 6.0, tuple(0.85**k for k in range(20))
"""Length of moves of a first convolution that are followed, and prices ``psi`` that are tried,
relative to the kernel's steepest slope, above which nothing moves."""


class Anchor(ABC):
    """Positive gains of the units of one activation; ``layer`` is the shape of the activation."""

    layer: tuple[int, ...]

    def aligned(self, weights: Rows, rows: Rows) -> bool:
        """Whether charges can be computed on the patches of ``rows`` (image rows); on dense rows
        they always can."""
        return False

    @abstractmethod
    def charge(self, weights: Rows, rows: Rows, active: Tensor | None) -> Charges:
        """Charges for weights ``b * omega >= 0`` on the units, on the sources of image rows
        ``rows``.

        ``active`` lists the sources ``(B, C, S)`` of dense rows (``None``: all pixels).
        """


Charged = Sequence[tuple[Anchor, Rows]]
"""Anchors with the weights that rows put on their units."""


def charge(
    source: InputSet, rows: Rows, charged: Charged, dense: bool = False
) -> tuple[Rows, Charges | None]:
    """The image rows in the form that the input set expects, and the charges of all anchors on
    them.

    ``dense`` asks for dense rows.
    """
    if dense:
        rows = rows.dense(source.shape)
    aligned = rows.corner is None or all(anchor.aligned(w, rows) for anchor, w in charged)
    rows = source.patched(rows, aligned)
    total: Charges | None = None
    for anchor, weights in charged:
        if rows.corner is None:
            weights = weights.dense(anchor.layer)
        part = anchor.charge(weights, rows, source.active)
        total = part if total is None else total.plus(part)
    return rows, total


class ConvAnchor(Anchor):
    """The units of a convolution of the image, whose gains are the same at every position and for
    every image."""

    def __init__(self, convolution: ImageConvolution, moves: list[Move]) -> None:
        self.layer, self.shape = convolution.layer, convolution.image
        self.stride, self.padding = convolution.stride, convolution.padding
        self.moves = moving(moves)
        self.size = convolution.kernel.shape[2:]
        rises, wide = convolution.rises(self.moves)
        self.radius = (wide.shape[2] - self.size[0]) // 2
        stacked = torch.stack([*rises, -wide, wide], 2).clamp(min=0)  # (units, C, K + 2, h, w)
        self.kernel = stacked.flatten(1, 2)

    def aligned(self, weights: Rows, rows: Rows) -> bool:
        if weights.corner is None or rows.corner is None:
            return False
        for k in (0, 1):
            side = (weights.coeff.shape[2 + k] - 1) * self.stride[k] + self.size[k]
            corner = weights.corner[k] * self.stride[k] - self.padding[k]
            if side != rows.coeff.shape[2 + k] or not torch.equal(corner, rows.corner[k]):
                return False
        return True

    def charge(self, weights: Rows, rows: Rows, active: Tensor | None) -> Charges:
        kernel = self.kernel.to(weights.coeff.dtype)
        count, channels = len(self.moves), self.shape[0]
        raw = transposed(weights.coeff, kernel, self.stride)
        if rows.corner is None:
            top, left = (self.padding[k] + self.radius for k in (0, 1))
            bottom, right = (
                self.shape[1] + top - raw.shape[2],
                self.shape[2] + left - raw.shape[3],
            )
            raw = F.pad(raw, (-left, right, -top, bottom))
        raw = raw.unflatten(1, (channels, count + 2))
        moves, out, into = (
            raw[:, :, :count].flatten(3),
            raw[:, :, count].flatten(2),
            raw[:, :, count + 1],
        )
        if rows.corner is None and active is not None:
            place = active[rows.image]
            moves = moves.gather(3, place[:, :, None].expand(-1, -1, count, -1))
            out = out.gather(2, place)
        return Charges(moves, out, into)


class UnitAnchor(Anchor):
    """Units with individual gains, listed image by image; units that are not listed must not be
    charged.

    Args:
        layer: shape of the activation.
        image, unit: ``(U,)`` each, the image and the flat position of every unit, sorted by image.
        gains: their positive gains on the sources of dense rows.
        images: number of images.
    """

    def __init__(
        self,
        layer: tuple[int, ...],
        image: Tensor,
        unit: Tensor,
        gains: Charges,
        images: int,
    ) -> None:
        self.layer = layer
        parts = (gains.moves, gains.out, gains.into)
        self.shapes = [part.shape[1:] for part in parts]
        order, place, count = ranked(image, images)
        most = int(count.max()) if images else 0
        units = torch.zeros((images, most), dtype=torch.long, device=image.device)
        units[image[order], place] = unit[order]
        flat = torch.cat([part.flatten(1) for part in parts], 1)
        gains_of = flat.new_zeros((images, most, flat.shape[1]))
        gains_of[image[order], place] = flat[order]
        self.gains, self.units = gains_of, units
        self.table = torch.arange(images, device=image.device)  # the row of each image in both

    def take(self, index: Tensor) -> UnitAnchor:
        """The anchor for the images at ``index``, which may repeat; gains are not copied."""
        out = copy(self)
        out.table = self.table[index]
        return out

    def _parts(self, flat: Tensor) -> Charges:
        parts = flat.split([shape.numel() for shape in self.shapes], 1)
        moves, out, into = (
            part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)
        )
        return Charges(moves, out, into)

    def charge(self, weights: Rows, rows: Rows, active: Tensor | None) -> Charges:
        table = self.table[rows.image]  # spare places have no gains
        weight = weights.coeff.flatten(1).gather(1, self.units[table])
        return self._parts(multiplied(weight, table, self.gains))


@dataclass(frozen=True)
class ImageConvolution:
    """An activation's input as a convolution of the image plus a constant: ``kernel`` (units,
    C, h, w), in float64.
    """

    kernel: Tensor
    stride: tuple[int, int]
    padding: tuple[int, int]
    image: tuple[int, ...]
    layer: tuple[int, ...]

    def rises(self, moves: list[Move], sign: float = 1.0) -> tuple[list[Tensor], Tensor]:
        """``sign (w_j - w_i)`` for each move from ``i`` to ``j``, and ``sign w_i``, both
        ``(units, C, h, w)`` on the kernel widened by the reach of the moves."""
        around = max((max(abs(r), abs(c)) for r, c, *_ in moves), default=0)
        wide = F.pad(sign * self.kernel, (around,) * 4)
        wider = F.pad(sign * self.kernel, (2 * around,) * 4)
        ends, (height, width) = (wider, wider.amax(1, keepdim=True)), wide.shape[2:]
        parts = [
            ends[s][..., around + r : around + r + height, around + c : around + c + width] - wide
            for r, c, s, _ in moves
        ]
        return parts, wide

    def gain(self, sign: float, source: InputSet, deadline: float) -> Tensor:
        r"""How far ``sign`` times each unit can rise over the ball, ``(B, *layer)``.

        .. math::
            v(z) - v(x) \le \psi E + \sum_i x_i \max_j \big( w_j - w_i - \psi C_{ij} \big)

        holds for every ``psi >= 0``; the inner maxima are a larger kernel, the same at every
        position. Moves may end outside the image here, which only enlarges the bound.
        """
        finer, x = source.finer(AROUND), source.x
        moves = moving(finer.moves)
        (parts, wide), fees = self.rises(moves, sign), [cost for *_, cost in moves]
        around, most = (wide.shape[2] - self.kernel.shape[2]) // 2, wide.flatten(1).amax(1)
        padding = [side + around for side in self.padding]
        inside = product(*(range(1 - side, side) for side in self.kernel.shape[2:]))
        if finer.far is not None and not {move[:2] for move in finer.moves}.issuperset(inside):
            # Moves that are not listed may start and end inside the kernel.
            parts, fees = [*parts, most.view(-1, 1, 1, 1) - wide], [*fees, finer.far]
        rises, costs = torch.stack(parts, 2), x.new_tensor(fees).view(-1, 1, 1)
        steepest = (rises / costs.clamp(min=1e-12)).flatten(1).amax(1).clamp(min=1e-12)
        # At these prices no mass from outside the kernel gains by moves that are not listed.
        least = most / finer.far if finer.far is not None else 0 * steepest
        best = x.new_full((x.shape[0], *self.layer), math.inf)
        for share in PRICES:
            if time.monotonic() > deadline:
                break
            price = torch.maximum(share * steepest, least).view(-1, 1, 1, 1)
            gains = (rises - price[..., None] * costs).amax(2).clamp(min=0)
            moved = F.conv2d(x, gains, None, self.stride, padding)
            best = torch.minimum(best, moved + price[:, 0] * per_image(source.budget, x))
        return best


def image_convolution(graph: Graph, position: int) -> ImageConvolution | None:
    """The convolution of the image that activation ``position`` reads, up to a scaling of channels;
    ``None`` if it reads something else, or if the convolution has groups or dilation."""
    scale: Tensor | float = 1.0
    convolution: Conv2d | None = None
    place = graph.ops[position].inputs[0]
    while not isinstance(graph.ops[place], Input):
        op = graph.ops[place]
        if isinstance(op, Diagonal) and op.scale.shape[2:] == (1, 1):
            channels = op.scale.to(torch.float64)
            scale = scale * (channels.transpose(0, 1) if convolution is None else channels)
        elif isinstance(op, Conv2d) and (convolution, op.groups, op.dilation) == (None, 1, (1, 1)):
            convolution = op
        else:
            return None
        place = op.inputs[0]
    if convolution is None or len(graph.ops[place].shape) != 3:
        return None
    kernel = convolution.weight.detach().to(torch.float64) * scale
    image, layer = graph.ops[place].shape, graph.ops[position].shape
    return ImageConvolution(kernel, convolution.stride, convolution.padding, image, layer)


@dataclass(frozen=True)
class Bound:
    """Lower bounds of rows, and the linear functions of the plan that prove them."""

    value: Tensor  # (N,), sound
    at_input: Rows
    charges: Charges | None
    constant: Tensor


class Collector:
    """Collects the gains of the units of one layer: of the most unstable ones of each image, at
    most ``limit`` numbers per pixel, as many as fit into memory. The others keep the usual
    lines."""

    def __init__(self, source: InputSet, lower: Tensor, upper: Tensor, limit: int) -> None:
        self.source, self.shape = source, lower.shape
        depth = torch.minimum(upper, -lower).flatten(1)
        self._centre = torch.full_like(depth, math.inf)
        self._parts: list[tuple[Tensor, ...]] = []
        self.chosen = torch.ones_like(depth, dtype=torch.bool)
        most = max(1, limit * math.prod(source.shape) // source.gain_size)
        if most < depth.shape[1]:
            best = depth.topk(most, 1)
            self.chosen = torch.zeros_like(self.chosen).scatter(1, best.indices, best.values > 0)

    def add(self, image: Tensor, unit: Tensor, bound: Bound) -> None:
        """Add the units ``v`` whose rows bound ``-v`` from below: their values at the image and
        their gains, if ``v`` may be above 0."""
        keep = ((bound.value <= 0) & self.chosen[image, unit]).nonzero()[:, 0]
        if keep.shape[0] == 0:
            return
        at_input, charges, constant = bound.at_input, bound.charges, bound.constant
        if keep.shape[0] < image.shape[0]:
            image, unit, constant, at_input = (
                image[keep],
                unit[keep],
                constant[keep],
                at_input.take(keep),
            )
            charges = None if charges is None else charges.take(keep)
        centre = at_input.read(self.source.x)
        self._centre[image, unit] = -(constant + dot(at_input.coeff, centre))
        gains = self.source.gains(at_input.like(-at_input.coeff), charges)
        self._parts.append((image, unit, gains.moves, gains.out, gains.into))

    def anchor(self) -> tuple[UnitAnchor, Tensor] | None:
        """The anchor and the units' values at the images; ``None`` if no unit was added."""
        if not self._parts:
            return None
        image, unit, *gains = (torch.cat(part) for part in zip(*self._parts, strict=True))
        layer, images = tuple(self.shape[1:]), self.shape[0]
        anchor = UnitAnchor(layer, image, unit, Charges(*gains), images)
        return anchor, self._centre.view(self.shape)


def gain_bytes(source: InputSet) -> int:
    """Approximate number of bytes that the gains of one unit take."""
    return 4 * COPIES * source.gain_size


def multiplied(weight: Tensor, table: Tensor, values: Tensor) -> Tensor:
    """Multiply every row of ``weight`` (N, U) by its table of ``values`` (tables, U, M); ``(N,
    M)``. All rows of a table are multiplied at once."""
    if len(values) == 1 or not len(table):
        return weight @ values[0].to(weight.dtype)
    first, last = table.aminmax()
    some = values[int(first) : int(last) + 1]
    order, place, count = ranked(table - first, len(some))
    most, sorted_rows = int(count.max()), weight[order]
    # Where few tables have most of the rows, padding would cost more than it saves.
    if weight.device.type == "cpu" or most * len(count) > 2 * len(table):
        parts = zip(some, sorted_rows.split(count.tolist()), strict=True)
        found = torch.cat([rows @ held.to(rows.dtype) for held, rows in parts if len(rows)])
    else:
        index = (table - first)[order], place
        padded = weight.new_zeros((len(some), most, weight.shape[1]))
        found = (padded.index_put(index, sorted_rows) @ some.to(weight.dtype))[index]
    return found[order.argsort()]


def ranked(group: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """A sorting order by group, the rank of each member inside its group (in that order), and the
    size of each group."""
    order = group.argsort(stable=True)
    count = torch.bincount(group, minlength=groups)
    start = count.cumsum(0) - count
    return order, torch.arange(group.shape[0], device=group.device) - start[group[order]], count
