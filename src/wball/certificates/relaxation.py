r"""Linear relaxation (CROWN) of a network over an input set, with fixed or optimised slopes.

For a unit ``v`` with ``l <= v <= u``, ``l < 0 < u``, and leak ``s`` (0 for ReLU)

.. math::
    \alpha v \;\le\; \max(v, s v) \;\le\; k v + (s - k)\, l, \qquad k = \frac{u - s\,l}{u - l}, \quad s \le \alpha \le 1

holds for every ``alpha``. A row with coefficient ``a`` on the unit is bounded from below by the
left line where ``a >= 0`` and by the right one where ``a < 0``; what is left at the end is a linear
function of the image, and its minimum over the ball is the support function of
:mod:`wball.input_sets`. No interval of pixels ever appears. Upper lines that also know the budget
are in :mod:`wball.certificates.anchor`.

Soundness. Every bound holds for *any* slopes in range, any ``psi >= 0`` and any box prices, so all
searching may run in float32. The evaluation that counts is in float64 (rows, constants, charges,
input maximum), from float64 bounds of earlier layers, and is lowered by ``ROUNDING`` times the sum
of the magnitudes that entered it. The network that is certified is the one with the given weights
in exact arithmetic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
from wball.certificates.bounds import (
    ROUNDING,
    Bounds,
    Intervals,
    anchored_line,
    either,
    relax_curve,
    upper_line,
)
from wball.certificates.condition import Condition
from wball.certificates.graph import Activation, Curved, Graph, back
from wball.input_sets import InputSet
from wball.input_sets.base import ROUNDS
from wball.input_sets.rows import Rows, units

QUICK, MARGIN_ROUNDS = 3, 3 * ROUNDS
"""Rounds of search that settle most units which are stable anyway, and for the few rows that
decide."""

LARGE, SAMPLE, HOPE = 512, 64, 0.05
"""Minimum units of a layer that is sampled first, and units sampled per image; it is left alone if
fewer than this share of the sample, and of the whole layer before it, turns out stable."""

Lower = Literal["adaptive", "parallel"]


class Relaxation:
    """Backward bounds of one graph over one input set.

    Args:
        graph: the traced network.
        source: the input set of all images.
        lower: initial lower slopes: ``adaptive`` (CROWN: 1 where ``u > -l``, else the leak) or
            ``parallel`` (the upper line's slope, as in the dual of Wong and Kolter).
        budget: how many numbers a chunk of rows may hold.
        centre: what each relaxed operation reads at the images themselves, in float64.

    Attributes:
        condition: bounds need hold only for images that satisfy it, if there is one.
        deadline: of ``time.monotonic``; no rows are bounded after it.
        limit: numbers per image and pixel that the gains of one layer may hold.
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
        self.deadline, self.limit = math.inf, LIMIT
        low, _ = source.ranges()
        self.images, self.like = low.shape[0], low.new_zeros(0, dtype=torch.float64)
        self._intervals = Intervals(graph, source)
        self.anchors: dict[int, tuple[Anchor, Tensor]] = {}  # with the units' values at the images
        self._chunks: dict[tuple[int, bool], int] = {}

    # ---- one batch of rows

    def _relax(
        self,
        bounds: Bounds,
        charged: list[tuple[Anchor, Rows]] | None = None,
        scale: list[Tensor] | None = None,
    ) -> Callable[[int, Rows], tuple[Tensor, Rows]]:
        """The relaxation step of :func:`wball.certificates.graph.back`.

        With ``charged``, units that have an anchor are bounded by it, and their weights are added
        to the list. ``scale`` collects the magnitudes of the constants.
        """

        def relax(position: int, rows: Rows) -> tuple[Tensor, Rows]:
            op = self.graph.ops[position]
            if isinstance(op, Curved):
                constant, rows, size = relax_curve(
                    op, rows, bounds.lower[position], bounds.upper[position]
                )
                if scale is not None:
                    scale.append(size)
                return constant, rows
            assert isinstance(op, Activation)
            dtype = rows.coeff.dtype
            low, up = bounds.lower[position].to(dtype), bounds.upper[position].to(dtype)
            slope, shift = upper_line(low, up, op.leak)
            under = self._initial(low, up, slope, op.leak)
            positive, negative = rows.coeff.clamp(min=0), rows.coeff.clamp(max=0)
            if charged is not None and position in self.anchors:
                anchor, centre = self.anchors[position]
                bend, slope, shift, inside = anchored_line(
                    low, up, centre.to(dtype), op.leak, slope, shift
                )
                under = torch.where(inside, either(centre > 0, op.leak, under), under)
                if bend.is_cuda or bool(bend.any()):  # first layers are often stable
                    charged.append((anchor, rows.like(-negative * rows.read(bend))))
            constant = (negative * rows.read(shift)).flatten(1).sum(1)
            if scale is not None:
                scale.append(constant.abs())
            return constant, rows.like(positive * rows.read(under) + negative * rows.read(slope))

        return relax

    def _initial(self, low: Tensor, up: Tensor, slope: Tensor, leak: float) -> Tensor:
        if self.kind == "parallel":
            return slope
        return torch.where((low < 0) & (up > 0), either(up > -low, leak, slope), slope)

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
        search: bool = True,
    ) -> Bound:
        """A sound lower bound of each row over the value of operation ``target``, evaluated in
        float64.

        ``known`` are bounds of the rows that hold already, which a condition needs. Without
        ``search`` only the linear function is found, and the bound is ``-inf``.
        """
        charged: list[tuple[Anchor, Rows]] = []
        scale: list[Tensor] = []
        relax = self._relax(bounds, charged if anchored else None, scale)
        constant, at_input = back(
            self.graph, target, rows.like(rows.coeff.to(torch.float64)), relax
        )
        size = sum(scale, constant.abs() + at_input.coeff.abs().flatten(1).sum(1))
        at_input, charges = charge(self.source, at_input, charged, dense=self.condition is not None)
        if not search:
            return Bound(torch.full_like(constant, -math.inf), at_input, charges, constant)
        negated = at_input.like(-at_input.coeff)
        if self.condition is not None:
            assert known is not None
            largest, more = self.condition.maximum(
                self.source, negated, charges, constant - known, rounds
            )
            size = size + more
        else:
            largest = self.source.maximum(negated, charges, rounds=rounds)
        value = constant - largest - ROUNDING * (size + largest.abs())
        return Bound(value, at_input, charges, constant)

    # ---- whole layers

    def _chunk(
        self, target: int, rows_of: Callable[[Tensor], Rows], bounds: Bounds, anchored: bool
    ) -> int:
        """How many rows over ``target`` fit into the budget, by one trial."""
        if (target, anchored) not in self._chunks:
            largest = [1]
            step = self._relax(bounds)

            def relax(position: int, rows: Rows) -> tuple[Tensor, Rows]:
                constant, out = step(position, rows)
                largest.extend((rows.coeff[0].numel(), out.coeff[0].numel()))
                return constant, out

            one = rows_of(torch.zeros(1, dtype=torch.long))
            _, at_input = back(self.graph, target, one, relax)
            numbers = max(sum(largest), self.source.floats(at_input, anchored))
            self._chunks[target, anchored] = max(1, self.budget // numbers)
        return self._chunks[target, anchored]

    @torch.no_grad()
    def bound_layer(
        self,
        position: int,
        bounds: Bounds,
        *,
        anchored: bool = False,
        sparing: bool = False,
    ) -> None:
        """Bound what relaxed operation ``position`` reads: all units at first, then only its
        unstable units again.

        New bounds replace old ones only where they are tighter. Units found stable need no second
        bound: theirs may stay infinite. ``anchored`` uses the anchors of earlier layers and leaves
        one for this layer. ``sparing`` leaves out bounds that an anchor does not use: lower ones of
        units below 0 at the image, and upper ones of the others.
        """
        op = self.graph.ops[position]
        shape = self.graph.ops[op.inputs[0]].shape
        size = math.prod(shape)
        known = position in bounds.lower
        gains = None
        if anchored and isinstance(op, Activation):
            gains = Collector(self.source, self.images, shape, self.like.device, self.limit)
        ready = gains is not None and self._shared_gains(position)
        if not known:
            self._intervals.start(position, bounds)
        if ready and known and self.condition is None:
            return  # rows could not improve on it
        every = torch.arange(self.images * size, device=self.like.device)
        done: Tensor | None = None
        if isinstance(op, Activation):
            every = bounds.worth_a_row(position).flatten().nonzero()[:, 0]
            if not known and self.centre is not None:
                # The side that could prove a unit stable comes first: then the other one is not
                # needed.
                likely = torch.where(self.centre[position].flatten() > 0, 1.0, -1.0)
                every = self._without_hope(position, bounds, every, likely)
                # A compiled search need not be repeated; in torch, a short one settles what is
                # stable anyway.
                once = self.source.compiled and gains is None
                rounds, done = (ROUNDS, likely) if once else (QUICK, None)
                self._bound_units(position, bounds, every, likely[every], rounds=rounds)
                every = every[bounds.worth_a_row(position).flatten()[every]]
        if gains is not None and not ready:
            self._bound_with_gains(position, bounds, every, gains, sparing)
            return
        for side in (-1.0, 1.0):
            some = every if done is None else every[done[every] != side]
            sign = torch.full(some.shape, side, device=self.like.device)
            self._bound_units(position, bounds, some, sign, anchored)

    def _bound_with_gains(
        self,
        position: int,
        bounds: Bounds,
        every: Tensor,
        gains: Collector,
        sparing: bool,
    ) -> None:
        """Bound units from below, those that stay unstable from above, and leave an anchor
        with the gains of these.
        """
        assert self.centre is not None
        wanted = gains.choose(bounds.lower[position], bounds.upper[position]).flatten()
        above = self.centre[position].flatten() > 0
        some = every[(above | ~wanted)[every]] if sparing else every
        self._bound_units(position, bounds, some, self.like.new_ones(some.shape), True)
        every = every[bounds.worth_a_row(position).flatten()[every]]
        spared = above & wanted & sparing
        for some, search in ((every[~spared[every]], True), (every[spared[every]], False)):
            sign = -self.like.new_ones(some.shape)
            self._bound_units(position, bounds, some, sign, True, gains, search=search)
        found = gains.anchor()
        if found is not None:
            self.anchors[position] = found

    def _shared_gains(self, position: int) -> bool:
        """Units of a first convolution share their gains: their anchor is ready without rows,
        or was given.
        """
        if position in self.anchors:
            return True
        if not self.source.shares_moves or self.centre is None:
            return False
        if (convolution := image_convolution(self.graph, position)) is None:
            return False
        self.anchors[position] = (ConvAnchor(convolution, self.source.moves), self.centre[position])
        return True

    def _without_hope(self, position: int, bounds: Bounds, every: Tensor, sign: Tensor) -> Tensor:
        """Leave out images for which rows do not help: a large layer, hardly a unit of which can be
        proved stable.

        Bounds over such a layer mean nothing whatever is done, and its rows would take minutes. A
        sample decides, image by image; the units keep their intervals, where they have one.
        ``sign`` is the side that could prove each unit of the batch stable.
        """
        size = math.prod(self.graph.ops[position].shape)
        if size < LARGE or image_convolution(self.graph, position) is not None:
            return every  # rows over a first convolution are cheap
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
        rounds: int = ROUNDS,
        search: bool = True,
    ) -> None:
        """Bound units from below (``sign`` 1) or above (-1), chunk by chunk, and keep what is
        tighter.

        ``every`` lists them by flat position in the whole batch.
        """
        if every.shape[0] == 0 or time.monotonic() > self.deadline:
            return
        target = self.graph.ops[position].inputs[0]
        shape = self.graph.ops[target].shape
        size = math.prod(shape)
        low, up = (b[position].view(-1) for b in (bounds.lower, bounds.upper))

        def rows_of(index: Tensor) -> Rows:
            index = index.to(every.device)
            here = every[index]
            return units(shape, here // size, here % size, sign[index], self.like)

        step = self._chunk(target, rows_of, bounds, anchored)
        for index in torch.arange(every.shape[0], device=self.like.device).split(step):
            if time.monotonic() > self.deadline:
                return
            here = every[index]
            bound = self.lower_bound(
                target,
                rows_of(index),
                bounds,
                anchored=anchored,
                rounds=rounds,
                known=torch.where(sign[index] > 0, low[here], -up[here]),
                search=search,
            )
            if gains is not None:
                gains.add(here // size, here % size, bound)
            below = sign[index] > 0
            low[here] = torch.where(below, torch.fmax(low[here], bound.value), low[here])
            up[here] = torch.where(below, up[here], torch.fmin(up[here], -bound.value))

    def bound_all(self) -> Bounds:
        """Bounds for every relaxed operation, in order, with the initial slopes."""
        bounds = Bounds()
        for position in self.graph.relaxed():
            self.bound_layer(position, bounds)
        return bounds

    @torch.no_grad()
    def margins(self, y: Tensor, bounds: Bounds, *, anchored: bool = False) -> Tensor:
        """Lower bounds of ``logit[y] - logit[k]``, ``(B, classes)``, with ``inf`` at ``k = y``.

        Bounds that are not known by the deadline are ``-inf``.
        """
        target = len(self.graph.ops) - 1
        classes = self.graph.ops[target].shape[0]
        out = torch.full(
            (y.shape[0], classes), -math.inf, dtype=torch.float64, device=self.like.device
        )
        out.scatter_(1, y[:, None], math.inf)
        image, other = (torch.arange(classes, device=y.device) != y[:, None]).nonzero(as_tuple=True)

        def rows_of(index: Tensor) -> Rows:
            index = index.to(y.device)
            coeff = self.like.new_zeros((index.shape[0], classes))
            coeff.scatter_(1, y[image[index]][:, None], 1.0)
            coeff.scatter_(1, other[index][:, None], -1.0)
            return Rows(coeff, image[index])

        if time.monotonic() > self.deadline:
            return out
        step = self._chunk(target, rows_of, bounds, anchored)
        for index in torch.arange(image.shape[0], device=self.like.device).split(step):
            if time.monotonic() > self.deadline:
                break
            bound = self.lower_bound(
                target, rows_of(index), bounds, anchored=anchored, rounds=MARGIN_ROUNDS
            )
            slack = self.graph.slack_of(y[image[index]], other[index])
            out[image[index], other[index]] = bound.value - slack
        return out
