r"""Bounds of a network over a set of images, with every rounding error accounted for.

Rows are carried from the logits back to the image, node by node. With ``l <= v <= u`` the
activation ``f(v) = max(v, s v)`` lies above every line through 0 with a slope in ``[s, 1]``.
Because it is convex, it lies below any line, or pair of lines, that is not below it at ``l``, at
``u`` and where the lines meet. Two upper bounds are used: the chord, and for transport plans the
pair of lines that meets at the image itself, whose second slope is charged to the mass that moves.
Curves have a line on either side (:mod:`.lines`). Coefficients are plain numbers. Their errors are
multiplied by the largest value of what they multiply, and subtracted.

A part of the ball in which some values have limits is bounded by the same code: where ``l <= v <=
u`` holds, ``m >= m - p (v - l)`` and ``m >= m - p (u - v)`` for any price ``p >= 0``. So is a proof
by contradiction: only images with a margin ``m <= 0`` matter, and there ``v >= v + w m`` for any
``w >= 0``. Bounds of ``v`` that hold for them alone give a better bound of ``m``. Once it is above
0, or bounds cross, there is no such image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wball.certificates.checking.lines import LinePair, known, lines, product
from wball.certificates.checking.network import (
    UNIT,
    Bend,
    Bow,
    Kink,
    LinearMap,
    Network,
    PairProduct,
    Unfollowed,
    gamma,
)
from wball.certificates.checking.plans import Cube, Transport

CHUNK = 2**24
"""Numbers that rows may hold at a time."""

NARROW = 1e-7
"""Ranges of curves and products that are narrower than this are not tightened."""

KEPT = 2**26
"""Numbers that the gains of one activation may hold; units beyond keep the chord."""

WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Weights of the margin in proofs by contradiction, relative to the fall of a value over that of
the margin."""

Parameters = dict[tuple[str, int], Tensor]
"""What a certificate says about its bound, by kind and node. Any values are sound: ``slope`` below
an activation, ``share`` of the anchored bound above it, ``price`` of the limits of what it reads
(positive: of the lower one), ``box`` prices of the image."""

Signs = dict[int, Tensor]
"""By bend, the signs of what it reads in a part: 1, -1, or 0 where both occur; flat."""


@dataclass
class ChargedUnits:
    """Units of one activation, with their values at the image and the gains of every move."""

    unit: Tensor
    centre: Tensor
    gain: Tensor  # (units, options), rounded up


@dataclass
class ImageRows:
    """``<row, h> >= const + <at_image, z> - charges``: lower bounds as functions of the image."""

    const: Tensor
    at_image: Tensor
    charges: Tensor | None


RowStep = tuple[Tensor, Tensor, Sequence[Tensor]]
"""What rows gain at a node, the magnitudes that enter it, and rows over the values it reads."""


@dataclass
class Margin:
    """A lower bound of the margin to one class over a part, with its row and box prices."""

    value: float
    row: ImageRows
    prices: Tensor | None


@dataclass
class Checker:
    """Computes the bounds of one image, node by node.

    Args:
        limits: what is known about the part of the ball.
        known: bounds of a part that contains this one; rows are then carried back for the margin
            alone.
        against: a bound of the margin over ``known``: bounds hold for images with a margin of at
            most 0.
    """

    network: Network
    domain: Cube | Transport
    signs: Signs = field(default_factory=dict)
    known: Checker | None = None
    against: Margin | None = None
    low: list[Tensor] = field(default_factory=list)  # of every node, flat
    high: list[Tensor] = field(default_factory=list)
    anchors: dict[int, ChargedUnits] = field(default_factory=dict)
    curves: dict[int, LinePair] = field(default_factory=dict)
    sizes: dict[int, Tensor] = field(default_factory=dict)  # magnitudes that enter affine nodes
    off: list[Tensor] = field(default_factory=list)  # what the model's values may be off by
    empty: bool = False  # no image is in this part
    parallel: bool = False  # lines below activations are parallel to those above

    def __post_init__(self) -> None:
        for index, node in enumerate(self.network.nodes):
            if node is None:
                low, high = self.domain.ranges()
                off = torch.zeros_like(low)
            elif isinstance(node, LinearMap):
                low, high, off = self._intervals(index, node)
            else:
                self._bound(index, node)
                if self.empty:
                    return
                low, high, off = self._after(index, node)
            low, high = known(low - off, -math.inf), known(high + off, math.inf)
            if self.known is not None:
                low = torch.maximum(low, self.known.low[index])
                high = torch.minimum(high, self.known.high[index])
            self.low.append(low)
            self.high.append(high)
            self.off.append(off)

    def most(self, node: int) -> Tensor:
        """The largest magnitude of every value of a node."""
        return torch.maximum(self.low[node].abs(), self.high[node].abs())

    # ---- layers

    def _range(self, node: int) -> tuple[Tensor, Tensor]:
        """Middle and half width of every value of a node."""
        low, high = self.low[node], self.high[node]
        middle = (low + high) / 2
        return middle, torch.maximum(high - middle, middle - low) * (1 + 4 * UNIT)

    def _intervals(self, index: int, node: LinearMap) -> tuple[Tensor, Tensor, Tensor]:
        """Bounds of an affine node from the ranges of its inputs, and the model's rounding."""
        ranges = [self._range(k) for k in node.before]
        centre = node.run([middle for middle, _ in ranges])
        radius = node.run([half for _, half in ranges], absolute=True) - node.summed
        size = node.run([middle.abs() + half for middle, half in ranges], absolute=True)
        radius = radius.clamp(min=0) * (1 + 1e-12) + gamma(2 * node.terms) * size
        self.sizes[index], kind = size, self.network.kind
        read = sum(int((self.most(k) > 0).sum()) for k in node.before)  # 0 adds no rounding
        rounding = 0.55 * kind.eps * min(node.terms, read + 4)  # 1.1 units each, if they are few
        off = torch.where((size <= kind.max / 2) & (rounding < 0.05), rounding * size, math.inf)
        return centre - radius, centre + radius, off

    def _bound(self, index: int, bend: Bend) -> None:
        """Tighten the input bounds of a bend, by rows where they may help."""
        if index in self.signs:
            before, sign = bend.before[0], self.signs[index]
            self.low[before] = torch.where(
                sign > 0, self.low[before].clamp(min=0), self.low[before]
            )
            self.high[before] = torch.where(
                sign < 0, self.high[before].clamp(max=0), self.high[before]
            )
        if self.known is not None and index in self.known.anchors:
            self.anchors[index] = self.known.anchors[index]
        for before in bend.before:
            low, high = self.low[before], self.high[before]
            if (self.known is None or self.against is not None) and not bool((low > high).any()):
                self._tighten(index, bend, before)
            if bool((low > high).any()):
                self.empty = True
                return
        if isinstance(bend, Bow):
            low, high = self.low[bend.before[0]], self.high[bend.before[0]]
            self.curves[index] = lines(bend.chain, low, high, self.network.kind)

    def _tighten(self, index: int, bend: Bend, before: int) -> None:
        low, high = self.low[before], self.high[before]
        gains: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in self._open(bend, low, high).split(self._chunk()):
            for sign in (1.0, -1.0):
                if isinstance(bend, Kink):  # the lower bound may have shown that it is linear
                    part = part[(low[part] < 0) & (high[part] > 0)]
                if part.numel() == 0:
                    break
                rows = torch.zeros((part.shape[0], low.shape[0]), dtype=torch.float64)
                rows[torch.arange(part.shape[0]), part] = sign
                found, back = self._lowest(before, rows)
                if sign > 0:
                    low[part] = torch.maximum(low[part], found)
                    continue
                high[part] = torch.minimum(high[part], -found)
                if isinstance(bend, Kink) and isinstance(self.domain, Transport):
                    gains.append((part, *self._gains(self.domain, back)))
        if not gains:
            return
        unit, centre, gain = (torch.cat(group) for group in zip(*gains, strict=True))
        bends = (low[unit] < 0) & (high[unit] > 0) & (low[unit] < centre) & (centre < high[unit])
        keep = bends.nonzero()[:, 0][: max(1, KEPT // max(1, gain.shape[1]))]
        if keep.numel():
            self.anchors[index] = ChargedUnits(unit[keep], centre[keep], gain[keep])

    def _open(self, bend: Bend, low: Tensor, high: Tensor) -> Tensor:
        """The inputs whose bounds matter: of unstable kinks, and of what is not narrow."""
        if isinstance(bend, Kink):
            return ((low < 0) & (high > 0)).nonzero()[:, 0]
        return (~(high - low <= NARROW * (1 + high.abs()))).nonzero()[:, 0]

    def _after(self, index: int, bend: Bend) -> tuple[Tensor, Tensor, Tensor]:
        """The range of the values of a bend, and the model's rounding."""
        low, high = self.low[bend.before[0]], self.high[bend.before[0]]
        if isinstance(bend, Bow):  # lines account for it
            line = self.curves[index]
            return line.least, line.most, torch.zeros_like(low)
        if isinstance(bend, PairProduct):
            first, second = bend.before
            lows = bend.seen([self.low[first], self.low[second]])
            highs = bend.seen([self.high[first], self.high[second]])
            low, high = product((lows[0], highs[0]), (lows[1], highs[1]))
            rounding = 1.0
        else:
            low, high = (torch.where(end > 0, end, bend.leak * end) for end in (low, high))
            rounding = 4 * bend.leak
        size = torch.maximum(low.abs(), high.abs())
        low, high = low - 2 * UNIT * size, high + 2 * UNIT * size
        kind = self.network.kind
        off = torch.where(size <= kind.max / 2, rounding * (kind.eps * size + kind.tiny), math.inf)
        return low, high, off

    def _chunk(self) -> int:
        widest = max(low.shape[0] for low in self.low)
        options = self.domain.options * 4 if isinstance(self.domain, Transport) else 0
        return max(1, CHUNK // (widest + options + 1))

    # ---- rows

    def _lowest(self, node: int, rows: Tensor) -> tuple[Tensor, ImageRows]:
        """Lower bounds of rows over a node, and the corresponding rows over the image, which define
        gains."""
        kept = self._back(node, rows)
        ways = [kept]
        if self.anchors:
            kept = self._back(node, rows, anchored=True)
            ways.append(kept)
        values = [self._value(way) for way in ways]
        if self.against is not None:
            values += [
                self._contradicted(way, value) for way, value in zip(ways, values, strict=True)
            ]
        return torch.stack(values).amax(0), kept

    def _contradicted(self, rows: ImageRows, best: Tensor) -> Tensor:
        """Lower bounds of rows over the images whose margin is at most 0, from those over all
        images."""
        assert self.against is not None
        centre, margin = self.domain.centre, self.against.row
        fall = (margin.const + margin.at_image @ centre - self.against.value).clamp(min=1e-30)
        unit = (rows.const + rows.at_image @ centre - best).clamp(min=0) / fall
        for times in WEIGHTS:
            best = torch.maximum(best, self._with_margin(rows, times * unit))
        return best

    def _with_margin(self, rows: ImageRows, weight: Tensor) -> Tensor:
        """Bounds of rows plus a multiple of the margin, which is at most the row itself where the
        margin is at most 0."""
        assert self.against is not None
        margin, prices = self.against.row, self.against.prices
        by = torch.where(torch.isfinite(weight), weight, 0.0)[:, None]
        const = rows.const + by[:, 0] * margin.const
        at_image = rows.at_image + by * margin.at_image
        size = (rows.at_image.abs() + by * margin.at_image.abs()) @ self.most(0)
        room = 4 * UNIT * (size + rows.const.abs() + by[:, 0] * margin.const.abs())
        charges = rows.charges
        if margin.charges is not None:
            charges = by * margin.charges + (0.0 if charges is None else charges)
            charges = charges * (1 + 8 * UNIT)
        whole = ImageRows(const - room * (1 + 1e-9), at_image, charges)
        return self._value(whole, None if prices is None else by * prices)

    def _value(self, rows: ImageRows, prices: Tensor | None = None) -> Tensor:
        top = self.domain.highest(-rows.at_image, rows.charges, prices)
        value = rows.const - top - 4 * UNIT * (rows.const.abs() + top.abs())
        return known(value, -math.inf)

    def _gains(self, domain: Transport, rows: ImageRows) -> tuple[Tensor, Tensor]:
        """For rows that bound ``-v``: the upper bound of ``v`` at the image, and the gains of every
        move."""
        image = domain.centre
        at = rows.at_image @ image
        room = gamma(image.shape[0]) * (rows.at_image.abs() @ image) + 4 * UNIT * rows.const.abs()
        return -(rows.const + at) + room, domain.gains(-rows.at_image, rows.charges)

    def _back(
        self, node: int, rows: Tensor, anchored: bool = False, given: Parameters | None = None
    ) -> ImageRows:
        """Rows over a node as rows over the image, with the slopes of CROWN or those ``given``."""
        if time.monotonic() > self.network.deadline:
            raise Unfollowed("time_limit ended before the checker had a bound")
        const, size = torch.zeros((2, rows.shape[0]), dtype=torch.float64)
        pending: dict[int, Tensor] = {node: rows}
        charges: Tensor | None = None
        given = given or {}
        for index in range(node, 0, -1):
            row = pending.pop(index, None)
            if row is None:
                continue
            at = self.network.nodes[index]
            assert at is not None
            if isinstance(at, Kink):
                anchor = self._anchor(index, at.before[0]) if anchored else None
                (more, entered, parts), charge = self._activation(index, at, row, anchor, given)
                if charge is not None:
                    charges = charge if charges is None else (charges + charge) * (1 + 4 * UNIT)
            elif isinstance(at, LinearMap):
                entered, parts = row.abs() @ self.sizes[index], at.transposed(row)
                more = row @ at.const
            elif isinstance(at, Bow):
                more, entered, parts = self._curve(index, at, row)
            else:
                more, entered, parts = self._factors(at, row)
            off = row.abs() @ self.off[index]
            const, size = const + more - off, size + entered + off
            for place, part in zip(at.before, parts, strict=True):
                pending[place] = pending[place] + part if place in pending else part
        terms = sum(max(counts) for counts in zip(*self._counts, strict=True))
        image = pending.get(0, torch.zeros((rows.shape[0], len(self.low[0])), dtype=torch.float64))
        return ImageRows(const - gamma(4 * (terms + len(self._counts))) * size, image, charges)

    @property
    def _counts(self) -> list[tuple[float, float]]:
        """Values and terms of the nodes so far."""
        nodes = zip(self.low, self.network.nodes, strict=False)
        return [
            (len(low), node.terms if isinstance(node, LinearMap) else 0.0) for low, node in nodes
        ]

    # ---- bends

    def _anchor(self, index: int, before: int) -> ChargedUnits | None:
        """The anchor of the unstable units whose value at the image is between their bounds."""
        anchor = self.anchors.get(index)
        if anchor is None:
            return None
        low, high = self.low[before][anchor.unit], self.high[before][anchor.unit]
        keep = (low < 0) & (high > 0) & (low < anchor.centre) & (anchor.centre < high)
        return ChargedUnits(anchor.unit[keep], anchor.centre[keep], anchor.gain[keep])

    def _activation(
        self,
        index: int,
        bend: Kink,
        row: Tensor,
        anchor: ChargedUnits | None,
        given: Parameters,
    ) -> tuple[RowStep, Tensor | None]:
        """Relax an activation: lines below with the given slopes; above, the chord and a share of
        the anchored bound. The price of a limit of what it reads is added."""
        low, high, leak = self.low[bend.before[0]], self.high[bend.before[0]], bend.leak
        crossing = (low < 0) & (high > 0)
        one = torch.ones_like(low)  # plain numbers would be rounded to float32
        stable = torch.where(low >= 0, one, leak)
        chord = ((high - leak * low) / (high - low).clamp(min=1e-300)).clamp(leak, 1.0)
        over = torch.where(crossing, chord, stable)
        shift = torch.where(crossing, _above(leak, over, [low, high]), 0.0)
        nearer = over if self.parallel else torch.where(high > -low, one, leak)
        under = torch.where(crossing, nearer, stable)
        charge: Tensor | None = None
        if anchor is not None:
            unit, at = anchor.unit, anchor.centre
            under[unit] = torch.where(at > 0, one[unit], leak)
            value = torch.where(at > 0, at, leak * at)
            left = ((value - leak * low[unit]) / (at - low[unit])).clamp(leak, 1.0)
            more = ((high[unit] - value) / (high[unit] - at) - left).clamp(min=0)
            above = _above(leak, left, [low[unit], high[unit], at], at, more)
            share = given.get(("share", index), torch.ones_like(low))[unit].clamp(0.0, 1.0)
            over = over.index_copy(0, unit, (1 - share) * over[unit] + share * left)
            shift = shift.index_copy(0, unit, (1 - share) * shift[unit] + share * above)
            charge = (-row.clamp(max=0)[:, unit] * (share * more)) @ anchor.gain
            charge = charge * (1 + gamma(anchor.gain.shape[0] + 4))
        if ("slope", index) in given:
            under = torch.where(crossing, given["slope", index].clamp(leak, 1.0), stable)
        negative, most = row.clamp(max=0), self.most(bend.before[0])
        price = given.get(("price", index), torch.zeros_like(low))
        limit = torch.where(price > 0, low, torch.where(price < 0, high, 0.0))
        out = row.clamp(min=0) * under + negative * over - price
        size = negative.abs() @ shift.abs() + row.abs() @ most + price.abs() @ most
        return (negative @ shift + price @ limit, size, [out]), charge

    def _factors(self, node: PairProduct, row: Tensor) -> RowStep:
        """With ``|x - c| <= r`` and ``|y - d| <= s``, ``|x y - (d x + c y - c d)| <= r s``."""
        (c, r), (d, s) = map(self._range, node.before)
        (c, d), (r, s) = node.seen([c, d]), node.seen([r, s])
        size = 4 * row.abs() @ ((c.abs() + r) * (d.abs() + s))
        pairs = zip(node.views, (row * d, row * c), strict=True)
        parts = [view.transposed(part)[0] for view, part in pairs]
        return -(row @ (c * d)) - row.abs() @ (r * s), size, parts

    def _curve(self, index: int, node: Bow, row: Tensor) -> RowStep:
        line, positive, negative = self.curves[index], row.clamp(min=0), row.clamp(max=0)
        out = positive * line.under + negative * line.over
        size = positive @ line.under_shift.abs() - negative @ line.over_shift.abs()
        size = size + 2 * out.abs() @ self.most(node.before[0])
        return positive @ line.under_shift + negative @ line.over_shift, size, [out]

    # ---- the answer

    def margins(self, label: int) -> Tensor:
        """Lower bounds of ``logit[label]`` less each other logit, with the slopes of CROWN and with
        those of the dual."""
        others = [k for k in range(len(self.low[-1])) if k != label]
        rows = torch.cat([self._difference(label, k) for k in others]).split(self._chunk())
        node = len(self.network.nodes) - 1
        ways = [
            torch.cat([self._lowest(node, part)[0] for part in rows])
            for self.parallel in (True, False)
        ]
        return torch.maximum(*ways)

    def margin(self, label: int, other: int, given: Parameters) -> Margin:
        """The best bound of one margin, with the given parameters or the default ones."""
        node, rows = len(self.network.nodes) - 1, self._difference(label, other)
        prices = given.get(("box", 0)) if isinstance(self.domain, Transport) else None
        ways = [(self._back(node, rows, bool(self.anchors), given), prices)]
        ways += [(self._back(node, rows, anchored), None) for anchored in (False, True)]
        found = [Margin(float(self._value(row, paid)), row, paid) for row, paid in ways]
        return max(found, key=lambda margin: margin.value)

    def _difference(self, label: int, other: int) -> Tensor:
        row = torch.zeros((1, len(self.low[-1])), dtype=torch.float64)
        row[0, label], row[0, other] = 1.0, -1.0
        return row


def _above(
    leak: float,
    slope: Tensor,
    ends: list[Tensor],
    centre: Tensor | None = None,
    more: Tensor | None = None,
) -> Tensor:
    """The largest height of the activation over a line without a shift at ``ends``, rounded up.

    With a ``centre``, the line has slope ``slope + more`` beyond it.
    """

    def gap(v: Tensor) -> Tensor:
        value = torch.where(v > 0, v, leak * v)
        line, size = slope * v, (slope * v).abs()
        if centre is not None and more is not None:
            line = line + more * (v - centre).clamp(min=0)
            size = size + more * (v.abs() + centre.abs())
        return value - line + 8 * UNIT * (value.abs() + size)

    return torch.stack([gap(v) for v in ends]).amax(0)
