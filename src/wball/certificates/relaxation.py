r"""Linear relaxation (CROWN) of a network over an input set, with fixed or optimised slopes.

For a unit ``v`` with ``l <= v <= u``, ``l < 0 < u``

.. math::
    \alpha v \;\le\; \max(v, 0) \;\le\; k (v - l), \qquad
    k = \frac{u}{u - l}, \quad 0 \le \alpha \le 1

holds for every ``alpha``. A row with coefficient ``a`` on the unit is bounded from below by the
left line where ``a >= 0`` and by the right one where ``a < 0``; what is left at the end is a linear
function of the image, and its minimum over the ball is the support function of
:mod:`wball.input_sets`. No interval of pixels ever appears. Upper lines that also know the budget
are in :mod:`wball.certificates.anchor`.

Soundness. Every bound holds for *any* slopes in range, any ``psi >= 0`` and any box prices, so all
searching may run in float32. The evaluation that counts is in float64 (rows, constants, charges,
input maximum), from float64 bounds of earlier layers, and is lowered by ``Graph.allowance`` times
the sum of the magnitudes that entered it.

The model computes in its own precision. At every operation its values are off by some ``delta``,
bounded from the magnitudes that the operation reads anywhere in the set (:meth:`Op.rounding`). So
the network that is certified is the exact one with these perturbations: a row with coefficients
``a`` loses ``<|a|, delta>`` at each operation that it crosses. The bounds of units hold for the
values that the model computes, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from wball.certificates.anchor import (
    LIMIT,
    Anchor,
    Bound,
    Collector,
    ConvAnchor,
    charge,
    image_convolution,
)
from wball.certificates.condition import Condition
from wball.certificates.curves import UNKNOWN, Curve, Lines, curve_lines, interval_product
from wball.certificates.graph import (
    Affine,
    Curved,
    Graph,
    Input,
    Interval,
    Known,
    Linear,
    Op,
    Product,
    Relu,
    back,
    rounded,
    size_of,
)
from wball.input_sets import InputSet
from wball.input_sets.base import ROUNDS
from wball.input_sets.rows import Rows, units
from wball.inputs import dot

NEGLIGIBLE = 1e-7
"""Share of its range by which a unit may cross 0 without being bounded again."""

MARGIN_ROUNDS = 3 * ROUNDS
"""Rounds of search for the few rows that decide."""

LARGE, SAMPLE, HOPE = 512, 64, 0.05
"""Minimum units of a layer that is sampled first, and units sampled per image; it is left alone if
fewer than this share of the sample, and of the whole layer before it, turns out stable."""

Lower = Literal["adaptive", "parallel"]


@dataclass
class Bounds:
    """Bounds ``[lower, upper]`` of the input of each relaxed operation, ``(B, *shape)``, in
    float64.

    ``errors``: of every operation that rounds, what the model's values may be off by.
    """

    lower: dict[int, Tensor] = field(default_factory=dict)
    upper: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, Tensor] = field(default_factory=dict)
    _lines: dict[int, Lines] = field(default_factory=dict, init=False)

    def take(self, index: Tensor) -> Bounds:
        """The bounds of a subset of the images."""
        return Bounds(*({k: v[index] for k, v in table.items()} for table in self._tables()))

    def _tables(self) -> tuple[dict[int, Tensor], ...]:
        return self.lower, self.upper, self.errors

    def lines(self, position: int, curve: Curve) -> Lines:
        """Lines below and above a curve, computed once for the bounds of its layer."""
        if position not in self._lines:
            low, up = self.lower[position], self.upper[position]
            self._lines[position] = curve_lines(curve, low, up)
        return self._lines[position]

    def changed(self, position: int) -> None:
        """Forget what followed from the bounds of a layer."""
        self._lines.pop(position, None)

    def range_of(self, position: int) -> Interval:
        """Centre and radius of the input of a relaxed operation."""
        # What is beyond may overflow, and then the image has no bound at all.
        low, up = (v[position].clamp(-UNKNOWN, UNKNOWN) for v in (self.lower, self.upper))
        centre = (low + up) / 2
        return centre, torch.maximum(up - centre, centre - low)

    def set(self, position: int, lower: Tensor, upper: Tensor) -> None:
        """Store bounds in the order of the units, regardless of the memory format of the
        network."""
        self.lower[position] = lower.nan_to_num(
            -math.inf, math.inf, -math.inf
        ).contiguous()  # NaN is no bound
        self.upper[position] = upper.nan_to_num(math.inf, math.inf, -math.inf).contiguous()
        self.changed(position)

    def put(self, index: Tensor, other: Bounds) -> None:
        """Write the bounds of a subset of the images."""
        for mine, found in zip(self._tables(), other._tables(), strict=True):
            for position, value in found.items():
                mine[position][index] = value
        self._lines.clear()

    def unstable(self, position: int) -> Tensor:
        return (self.lower[position] < 0) & (self.upper[position] > 0)

    def wide(self, position: int) -> Tensor:
        """Units of curves and products whose range is more than rounding."""
        low, up = self.lower[position], self.upper[position]
        return up - low > NEGLIGIBLE * (1 + low.abs())

    def worth_a_row(self, position: int) -> Tensor:
        """Units for which a better bound matters: those that cross 0 by more than rounding."""
        low, up = self.lower[position], self.upper[position]
        small = (torch.minimum(-low, up) <= NEGLIGIBLE * (up - low)) & torch.isfinite(up - low)
        return (low < 0) & (up > 0) & ~small


class Relaxation:
    """Backward bounds of one graph over one input set.

    Args:
        graph: the traced network.
        source: the input set of all images.
        lower: lower slopes: ``adaptive`` (CROWN: 1 where ``u > -l``, else 0) or
            ``parallel`` (the upper line's slope, as in the dual of Wong and Kolter).
        budget: how many numbers a chunk of rows may hold.
        centre: what each relaxed operation reads at the images themselves, in float64.

    Attributes:
        condition: bounds need hold only for images that satisfy it, if there is one.
        deadline: of ``time.monotonic``; no rows are bounded after it.
        limit: numbers per image and pixel that the gains of one layer may hold.
        single: whether the gains of first convolutions are kept unit by unit, so that one product
            charges many rows.
    """

    def __init__(
        self,
        graph: Graph,
        source: InputSet,
        lower: Lower = "adaptive",
        budget: int = 2**22,
        centre: dict[int, Tensor] | None = None,
    ) -> None:
        self.graph, self.source, self.kind, self.budget = graph, source, lower, budget
        self.centre = centre
        self.condition: Condition | None = None
        self.deadline, self.limit, self.single = math.inf, LIMIT, False
        low, _ = source.ranges()
        self.images, self.like = low.shape[0], low.new_zeros(0, dtype=torch.float64)
        self._found: dict[int, Interval] = {}  # of the values of operations
        self._lost = torch.zeros(self.images, dtype=torch.bool, device=low.device)
        self.anchors: dict[int, tuple[Anchor, Tensor]] = {}  # with the units' values at the images
        self._chunks: dict[tuple[int, bool], int] = {}

    # ---- one batch of rows

    def _relax(
        self,
        bounds: Bounds,
        charged: list[tuple[Anchor, Rows]] | None = None,
        scale: list[Tensor] | None = None,
    ) -> Callable[[int, Rows], tuple[Tensor, list[Rows]]]:
        """The relaxation step of :func:`wball.certificates.graph.back`.

        With ``charged``, units that have an anchor are bounded by it, and their weights are added
        to the list. ``scale`` collects the magnitudes of the constants.
        """

        def relax(position: int, rows: Rows) -> tuple[Tensor, list[Rows]]:
            op = self.graph.ops[position]
            if not isinstance(op, Relu):
                constant, parts, size = relaxed(self.graph, position, rows, bounds)
                if scale is not None:
                    scale.append(size)
                return constant, parts
            dtype = rows.coeff.dtype
            low, up = bounds.lower[position].to(dtype), bounds.upper[position].to(dtype)
            slope, shift = upper_line(low, up)
            under = slope if self.kind == "parallel" else adaptive_slope(low, up, slope)
            positive, negative = rows.coeff.clamp(min=0), rows.coeff.clamp(max=0)
            if charged is not None and position in self.anchors:
                anchor, centre = self.anchors[position]
                bend, slope, shift, inside = anchored_line(low, up, centre.to(dtype), slope, shift)
                under = torch.where(inside, (centre > 0).to(dtype), under)
                if bend.is_cuda or bool(bend.any()):  # first layers are often stable
                    charged.append((anchor, rows.like(-negative * rows.read(bend))))
            constant = dot(negative, rows.read(shift))
            if scale is not None:
                scale.append(constant.abs())
            return constant, [rows.like(positive * rows.read(under) + negative * rows.read(slope))]

        return relax

    @torch.no_grad()
    def lower_bound(
        self,
        target: int,
        rows: Rows,
        bounds: Bounds,
        *,
        anchored: bool = False,
        rounds: int = ROUNDS,
        known: Tensor | None = None,
        settle: bool = False,
    ) -> Bound:
        """A sound lower bound of each row over the value of operation ``target``, evaluated in
        float64.

        ``known`` are bounds of the rows that hold already, which a condition needs. With
        ``settle``, a rough bound is enough for rows that it proves to be positive.
        """
        charged: list[tuple[Anchor, Rows]] = []
        scale: list[Tensor] = []
        relax = self._relax(bounds, charged if anchored else None, scale)
        self.reach(target, bounds)
        constant, at_input = back(
            self.graph, target, rows.like(rows.coeff.to(torch.float64)), relax, bounds.errors
        )
        size = sum(scale, constant.abs() + at_input.coeff.abs().flatten(1).sum(1))
        at_input, charges = charge(self.source, at_input, charged, dense=self.condition is not None)
        negated = at_input.like(-at_input.coeff)
        if self.condition is not None:
            assert known is not None
            largest, more = self.condition.maximum(
                self.source, negated, charges, constant - known, rounds
            )
            size = size + more
        elif settle and (steepest := self.source.steepest(at_input)) is not None:
            largest = dot(negated.coeff, at_input.read(self.source.x))
            largest += steepest * self.source.budget[rows.image]
            rough = constant - largest - 2 * self.graph.allowance * (size + largest.abs())
            left = (rough <= 0).nonzero()[:, 0]
            largest[left] = self.source.maximum(negated.take(left), rounds=rounds)
        else:
            largest = self.source.maximum(negated, charges, rounds=rounds)
        value = constant - largest - self.graph.allowance * (size + largest.abs())
        return Bound(value, at_input, charges, constant)

    # ---- intervals and rounding

    def reach(self, target: int, bounds: Bounds) -> None:
        """Find the intervals of all operations up to ``target``, coordinate by coordinate from the
        known bounds, and what the model's values may be off by."""
        for place in range(target + 1):
            if place not in self._found:
                self._found[place] = self._interval(place, bounds)

    def _interval(self, place: int, bounds: Bounds) -> Interval:
        op = self.graph.ops[place]
        if isinstance(op, Input):
            low, up = self.source.ranges()
            return (low + up) / 2, (up - low) / 2
        if isinstance(op, Affine):
            read = [self._found[k] for k in op.inputs]
            centre = op.forward(*(c for c, _ in read))
            summed = op.spread(*map(size_of, read)) + op.constants() + centre.abs()
            radius = op.spread(*(r for _, r in read)) + self.graph.allowance * summed
        else:
            product = isinstance(op, Product)
            read = [self._found[k] for k in op.inputs] if product else [bounds.range_of(place)]
            centre, radius = self._relaxed(place, op, read, bounds)
            summed = centre.abs() + radius
        rounding = op.rounding(*read)
        if isinstance(op, Curved):
            rounding = bounds.lines(place, op.curve).error
        error = self._error(rounding, summed, place)
        if error is not None:
            error = error.expand(radius.shape)
            bounds.errors[place] = torch.minimum(error, bounds.errors.get(place, error))
            radius = radius + error
        assert not bool((radius < 0).any()), f"{op.name}: negative radius"
        return centre, radius.clamp(max=UNKNOWN)

    def _relaxed(self, place: int, op: Op, read: list[Interval], bounds: Bounds) -> Interval:
        """The values of an operation that is not affine."""
        low, up = read[0][0] - read[0][1], read[0][0] + read[0][1]
        if isinstance(op, Product):
            centre, radius = read[1]
            low, up = interval_product(low, up, centre - radius, centre + radius)
        elif isinstance(op, Curved):
            lines = bounds.lines(place, op.curve)
            low, up = lines.least, lines.most
        else:
            low, up = op.forward(low), op.forward(up)
        low, up = low.clamp(min=-UNKNOWN), up.clamp(max=UNKNOWN)
        return (low + up) / 2, (up - low) / 2 * (1 + 1e-15)

    def _error(self, rounding: Tensor | float, size: Tensor, place: int) -> Tensor | None:
        """What the model's values may be off by; ``None`` if they are exact.

        An image for which any value may overflow has no bound, because 0 times infinity is not 0:
        its logits may be off by anything.
        """
        error = torch.zeros_like(size) + (1.001 * self.graph.unit) * rounding
        known = ((size <= self.graph.limit) & (error < UNKNOWN)).flatten(1).all(1)
        self._lost = self._lost | ~known
        if place == len(self.graph.ops) - 1:
            error[self._lost] = UNKNOWN
        elif isinstance(rounding, float) and rounding == 0.0:
            return None
        return error.nan_to_num(UNKNOWN).clamp(max=UNKNOWN)

    # ---- whole layers

    def _portions(
        self,
        count: int,
        target: int,
        rows_of: Callable[[Tensor], Rows],
        bounds: Bounds,
        anchored: bool = False,
    ) -> Iterator[tuple[Tensor, Rows]]:
        """``count`` rows over ``target``, as many at a time as fit into the budget, until the
        deadline. One trial finds how many they are."""
        if count == 0 or time.monotonic() > self.deadline:
            return
        if (target, anchored) not in self._chunks:
            largest = [1]
            step = self._relax(bounds)

            def relax(position: int, rows: Rows) -> tuple[Tensor, list[Rows]]:
                constant, parts = step(position, rows)
                largest.extend(part.coeff[0].numel() for part in (rows, *parts))
                return constant, parts

            one = rows_of(torch.zeros(1, dtype=torch.long, device=self.like.device))
            _, at_input = back(self.graph, target, one, relax)
            numbers = max(sum(largest), self.source.floats(at_input, anchored))
            self._chunks[target, anchored] = max(1, self.budget // numbers)
        every = torch.arange(count, device=self.like.device)
        for index in every.split(self._chunks[target, anchored]):
            if time.monotonic() > self.deadline:
                return
            yield index, rows_of(index)

    @torch.no_grad()
    def bound_sums(self, bounds: Bounds) -> None:
        """Tighten what matrix products may be off by: the terms of a sum cannot all be largest at
        once, so its positive and its negative terms are bounded over the set like any rows."""
        for place, op in enumerate(self.graph.ops):
            if not isinstance(op, Linear) or op.weight.shape[0] >= op.weight.shape[1]:
                continue
            if len(op.shape) > 1:
                continue
            self.reach(place, bounds)
            centre, radius = self._found[op.inputs[0]]
            weight = op.weight.to(self.like)
            signed = torch.cat([weight.clamp(min=0), -weight.clamp(max=0)])

            def rows_of(index: Tensor, signed: Tensor = signed) -> Rows:
                return Rows(-signed[index % len(signed)], index // len(signed))

            most = self.like.new_full((self.images * len(signed),), math.inf)
            for index, rows in self._portions(len(most), op.inputs[0], rows_of, bounds):
                most[index] = -self.lower_bound(op.inputs[0], rows, bounds).value
            below = op.spread((radius - centre).clamp(min=0))  # where values may be negative
            parts = most.view(self.images, 2, -1).clamp(min=0) + below[:, None] + op.constants()
            error = rounded(op.terms(size_of((centre, radius))), parts.amax(1), parts.sum(1))
            error = (1.001 * self.graph.unit * error).nan_to_num(math.inf)
            bounds.errors[place] = torch.minimum(bounds.errors[place], error)

    @torch.no_grad()
    def bound_layer(
        self,
        position: int,
        bounds: Bounds,
        *,
        anchored: bool = False,
    ) -> None:
        """Bound the input of relaxed operation ``position``: all units the first time, later only
        its unstable units.

        New bounds replace old ones only where they are tighter. Units found stable need no second
        bound: theirs may stay infinite. ``anchored`` uses the anchors of earlier layers and leaves
        one for this layer.
        """
        op, first = self.graph.ops[position], position not in bounds.lower
        bends = isinstance(op, Relu)
        if first:
            self.reach(op.inputs[0], bounds)
            centre, radius = self._found[op.inputs[0]]
            bounds.set(position, centre - radius, centre + radius)
        shared = anchored and bends and self._shared_gains(position, bounds)
        known = not first or self._bound_convolution(position, bounds)
        ready = shared or (first and known)
        if ready and known and self.condition is None:
            return  # rows could not improve on it
        gains = anchored and bends and not ready
        worth = bounds.worth_a_row if bends else bounds.wide
        every = worth(position).flatten().nonzero()[:, 0]
        sides = [-self.like.new_ones(every.shape), self.like.new_ones(every.shape)]
        if bends and not known and self.centre is not None:
            # The side that could prove a unit stable comes first: then the other one is not needed.
            likely = torch.where(self.centre[position].flatten() > 0, 1.0, -1.0)
            every = self._without_hope(position, bounds, every, likely)
            self._bound_units(position, bounds, every, likely[every])
            every = every[worth(position).flatten()[every]]
            sides = [-likely[every]]
        if gains:
            self._bound_with_gains(position, bounds, every)
            return
        for sign in sides:
            self._bound_units(position, bounds, every, sign, anchored)
        bounds.changed(position)

    def _bound_convolution(self, position: int, bounds: Bounds) -> bool:
        """Bound the units of a first convolution without rows, if possible."""
        layer = image_convolution(self.graph, position)
        several = self.source.shares_moves and len(self.source.moves) > 1
        if layer is None or self.centre is None or not several:
            return False
        low, up, centre = bounds.lower[position], bounds.upper[position], self.centre[position]
        room = self.graph.allowance * (centre.abs() + up - low) + self._path_error(position, bounds)
        fall, rise = (
            (1 + self.graph.allowance) * layer.gain(sign, self.source, self.deadline) + room
            for sign in (-1.0, 1.0)
        )
        bounds.set(position, torch.maximum(low, centre - fall), torch.minimum(up, centre + rise))
        return True

    def _path_error(self, position: int, bounds: Bounds) -> Tensor:
        """What the model's values may be off by in a first convolution, with what is around it."""
        path, place = list[int](), self.graph.ops[position].inputs[0]
        while not isinstance(self.graph.ops[place], Input):
            path.append(place)
            (place,) = self.graph.ops[place].inputs
        error = torch.zeros_like(self.source.ranges()[0], dtype=torch.float64)
        for place in reversed(path):
            op = self.graph.ops[place]
            assert isinstance(op, Affine)
            error = op.spread(error) + bounds.errors.get(place, 0.0)
        return error

    def _bound_with_gains(self, position: int, bounds: Bounds, every: Tensor) -> None:
        """Bound units from below, then those still unstable from above, and create an anchor from
        the gains of the latter. Those of a first convolution are bounded already: only the gains
        are missing."""
        gains = Collector(self.source, bounds.lower[position], bounds.upper[position], self.limit)
        if self.condition is None and image_convolution(self.graph, position) is not None:
            every = every[gains.chosen.flatten()[every]]
        else:
            self._bound_units(position, bounds, every, self.like.new_ones(every.shape), True)
            every = every[bounds.worth_a_row(position).flatten()[every]]
        self._bound_units(position, bounds, every, -self.like.new_ones(every.shape), True, gains)
        found = gains.anchor()
        if found is not None:
            self.anchors[position] = found

    def _shared_gains(self, position: int, bounds: Bounds) -> bool:
        """Whether the units share their gains, as those of a first convolution do: their anchor
        needs no rows."""
        if self.single or not self.source.shares_moves or self.centre is None:
            return False
        if (convolution := image_convolution(self.graph, position)) is None:
            return False
        self.reach(self.graph.ops[position].inputs[0], bounds)
        centre = self.centre[position] + self._path_error(position, bounds)
        self.anchors[position] = (ConvAnchor(convolution, self.source.moves), centre)
        return True

    def _without_hope(self, position: int, bounds: Bounds, every: Tensor, sign: Tensor) -> Tensor:
        """Remove images for which rows do not help: those with a large layer in which hardly any
        unit can be proved stable.

        Bounds over such a layer are useless in any case, and its rows would take minutes. A sample
        decides, image by image; the units keep their intervals, where they have one.
        ``sign`` is the side that could prove each unit of the batch stable.
        """
        size = math.prod(self.graph.ops[position].shape)
        if size < LARGE:
            return every
        image = every // size
        many = torch.bincount(image, minlength=self.images) >= (1 - HOPE) * size
        sample = every[many[image] & (every % size % ((size // SAMPLE) | 1) == 0)]
        self._bound_units(position, bounds, sample, sign[sample])
        settled = sample[~bounds.unstable(position).flatten()[sample]]
        drawn, stable = (
            torch.bincount(part // size, minlength=self.images) for part in (sample, settled)
        )
        share = stable / drawn.clamp(min=1)
        known = torch.isfinite(bounds.upper[position] - bounds.lower[position]).flatten()
        return every[~(many & (share < HOPE))[image] | ~known[every]]

    def _bound_units(
        self,
        position: int,
        bounds: Bounds,
        every: Tensor,
        sign: Tensor,
        anchored: bool = False,
        gains: Collector | None = None,
    ) -> None:
        """Bound units from below (``sign`` 1) or above (-1), chunk by chunk, and keep tighter
        bounds.

        ``every`` lists them by flat position in the whole batch.
        """
        target = self.graph.ops[position].inputs[0]
        shape = self.graph.ops[target].shape
        size = math.prod(shape)
        low, up = (b[position].view(-1) for b in (bounds.lower, bounds.upper))

        def rows_of(index: Tensor) -> Rows:
            here = every[index]
            return units(shape, here // size, here % size, sign[index], self.like)

        # How far a unit is from 0 does not matter. On a GPU, counting such units takes longer.
        bends = isinstance(self.graph.ops[position], Relu)
        settle = bends and not (anchored or every.is_cuda)
        for index, rows in self._portions(len(every), target, rows_of, bounds, anchored):
            here = every[index]
            bound = self.lower_bound(
                target,
                rows,
                bounds,
                anchored=anchored,
                known=torch.where(sign[index] > 0, low[here], -up[here]),
                settle=settle,
            )
            if gains is not None:
                gains.add(here // size, here % size, bound)
            below = sign[index] > 0
            low[here] = torch.where(below, torch.fmax(low[here], bound.value), low[here])
            up[here] = torch.where(below, up[here], torch.fmin(up[here], -bound.value))

    @torch.no_grad()
    def margins(self, y: Tensor, bounds: Bounds, *, anchored: bool = False) -> Tensor:
        """Lower bounds of ``logit[y] - logit[k]``, ``(B, classes)``, with ``inf`` at ``k = y``.

        Bounds that are not known by the deadline are ``-inf``.
        """
        target = len(self.graph.ops) - 1
        self.reach(target, bounds)
        classes = self.graph.ops[target].shape[0]
        out = torch.full(
            (y.shape[0], classes), -math.inf, dtype=torch.float64, device=self.like.device
        )
        out.scatter_(1, y[:, None], math.inf)
        image, other = (torch.arange(classes, device=y.device) != y[:, None]).nonzero(as_tuple=True)

        def rows_of(index: Tensor) -> Rows:
            coeff = self.like.new_zeros((index.shape[0], classes))
            coeff.scatter_(1, y[image[index]][:, None], 1.0)
            coeff.scatter_(1, other[index][:, None], -1.0)
            return Rows(coeff, image[index])

        for index, rows in self._portions(len(image), target, rows_of, bounds, anchored):
            bound = self.lower_bound(target, rows, bounds, anchored=anchored, rounds=MARGIN_ROUNDS)
            out[image[index], other[index]] = bound.value.nan_to_num(-math.inf)
        return out


def anchored_line(
    low: Tensor, up: Tensor, centre: Tensor, slope: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bend, slope and shift of the interpolation at ``low``, ``centre`` and ``up``, and a mask of
    where it exists.

    Where the unit is stable or its centre is not strictly inside, the given line stays, without a
    bend.
    """
    inside = (low < 0) & (up > 0) & (low < centre) & (centre < up)
    at = torch.where(inside, centre, 0.5 * (low + up))
    value = at.relu()
    left = value / (at - low)
    bend = torch.where(inside, (up - value) / (up - at) - left, torch.zeros_like(slope))
    return (
        bend.clamp(min=0),
        torch.where(inside, left, slope),
        torch.where(inside, value - left * at, shift),
        inside,
    )


def adaptive_slope(low: Tensor, up: Tensor, slope: Tensor) -> Tensor:
    """The lower slope of CROWN: 1 or 0, whichever is nearer; that of the upper line where the unit
    is stable."""
    return torch.where((low < 0) & (up > 0), (up > -low).to(slope), slope)


def upper_line(low: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and shift of the upper line, exact where the unit is stable."""
    crossing = (low < 0) & (up > 0)
    width = torch.where(crossing, up - low, torch.ones_like(up))
    slope = torch.where(crossing, up / width, (up > 0).to(up))
    return slope, torch.where(crossing, -slope * low, torch.zeros_like(slope))


def relaxed(
    graph: Graph, position: int, rows: Rows, bounds: Bounds
) -> tuple[Tensor, list[Rows], Tensor]:
    """Lines or planes on the right side of a curve or of a product: what they add, the rows over
    what it reads, and the sum of the magnitudes that entered the constant."""
    op = graph.ops[position]
    if isinstance(op, Known):
        nothing = rows.coeff.new_zeros(rows.coeff.shape[0])
        return nothing, [op.back(rows)], nothing
    if isinstance(op, Product):
        factors = list[Interval]()
        for place in op.inputs:
            factor, (centre, radius) = graph.ops[place], bounds.range_of(place)
            assert isinstance(factor, Known)
            factors.append((factor.forward(centre), factor.forward(radius)))
        return op.relaxed(factors[0], factors[1], rows)
    assert isinstance(op, Curved)
    constant, row, size = op.relaxed(bounds.lines(position, op.curve), rows)
    return constant, [row], size
