r"""Bounds of a network over a set of images, with every rounding error accounted for.

Rows are carried from the logits back to the image, node by node. With ``l <= v <= u`` the ReLU
``max(v, 0)`` lies above every line through 0 with a slope in ``[0, 1]``. Because it is convex, it
lies below any line, or pair of lines, that is not below it at ``l``, at ``u`` and where the lines
meet. Two upper bounds are used: the chord, and for transport plans the pair of lines that meets at
the image itself, whose second slope is charged to the mass that moves. Curves have a line on either
side (:mod:`.lines`). A product with ``|x - c| <= r`` and ``|y - d| <= s`` has ``|x y - (d x + c y -
c d)| <= r s``. Coefficients are plain numbers. Their errors are multiplied by the largest value of
what they multiply, and subtracted.

A part of the ball in which some values have limits is bounded by the same code: where ``l <= v <=
u`` holds, ``m >= m - p (v - l)`` and ``m >= m - p (u - v)`` for any price ``p >= 0``. So is a proof
by contradiction: only images with a margin ``m <= 0`` matter, and there ``v >= v + w m`` for any
``w >= 0``. Bounds of ``v`` that hold for them alone give a better bound of ``m``. Once it is above
0, or bounds cross, there is no such image.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wball.certificates.checking.lines import UNIT, LinePair, Unfollowed, gamma, known, lines
from wball.certificates.checking.network import CurveNode, Kink, LinearNode, Network
from wball.certificates.checking.plans import Supported, Transport

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


@dataclass(frozen=True)
class Way:
    """Which lines bound activations where the parameters ``given`` do not say it: above, the chord
    or an ``anchored`` bound; below, a line through 0, which may be ``parallel`` to the chord."""

    anchored: bool = True
    parallel: bool = False
    given: Parameters = field(default_factory=dict)


@dataclass
class Margin:
    """A lower bound of the margin to one class, with its row over the image and box prices."""

    value: float
    row: Tensor
    prices: Tensor | None


class Overflow(ArithmeticError):
    """A value of the model may be infinite, so that nothing is known about its logits."""


class Empty(ArithmeticError):
    """Bounds cross: no image is in this part."""


class Enclosures:
    """Bounds of every value of a network, node by node.

    A row over the image has a coefficient for 1, for each pixel, and for the mass of each move.

    Args:
        outer: bounds that hold already; rows are then carried back for the margin alone.
        against: a bound of the margin over ``outer``: bounds hold for images with a margin of at
            most 0.

    Attributes:
        low, high: of the values of every node, flat.
        off: what the model's values may be off by; ``size``: the magnitudes that enter them.
        anchors: of activations: units, their values at the image, and the gains of every move for
            them (units, moves), rounded up.
        points: of linear nodes: where they are developed, their values there, and the rest.
    """

    def __init__(
        self,
        network: Network,
        images: Supported | Transport,
        outer: Enclosures | None = None,
        against: Margin | None = None,
    ) -> None:
        self.network, self.images, self.against = network, images, against
        self.tightens = outer is None or against is not None
        self.low: list[Tensor] = []
        self.high: list[Tensor] = []
        self.off: list[Tensor] = []
        self.size: list[Tensor] = []
        self.anchors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.anchors.update({} if outer is None else outer.anchors)
        self.lines: dict[int, LinePair] = {}
        self.points: dict[int, tuple[list[Tensor], Tensor, Tensor]] = {}
        for index in range(len(network.nodes)):
            low, high, off = self._values(index)
            low, high = low - off, high + off
            if not bool(torch.isfinite(high - low).all()):
                raise Overflow
            if outer is not None:
                low = torch.maximum(low, outer.low[index])
                high = torch.minimum(high, outer.high[index])
            self.low.append(low)
            self.high.append(high)
            self.off.append(off)
            self._check(index)

    def _check(self, node: int) -> None:
        if bool((self.low[node] > self.high[node]).any()):
            raise Empty("bounds cross: the checker is wrong, unless this part has no images")

    def most(self, node: int) -> Tensor:
        """The largest magnitude of every value of a node."""
        return torch.maximum(self.low[node].abs(), self.high[node].abs())

    # ---- nodes

    def _values(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The range of the values of a node, and what the model's rounding adds to it."""
        node = self.network.nodes[index]
        if node is None:
            self.size.append(0 * self.images.low)
            return self.images.low, self.images.high, self.size[0]
        if not isinstance(node, LinearNode) or node.factors:
            for before in node.before:
                self._limit(index, isinstance(node, Kink), before)
        if isinstance(node, LinearNode):
            return self._linear(index, node)
        before = node.before[0]
        low, high = self.low[before], self.high[before]
        if isinstance(node, CurveNode):
            line = self.lines[index] = lines(node.function, low, high, self.network.kind)
            self.size.append(line.size)
            return line.least, line.most, 0 * low  # lines account for rounding
        self.size.append(4 * self.most(before))
        return low.clamp(min=0), high.clamp(min=0), 0 * low

    def _linear(self, index: int, node: LinearNode) -> tuple[Tensor, Tensor, Tensor]:
        """A linear node, or a product, from the ranges of what it reads."""
        middles = [(self.low[k] + self.high[k]) / 2 for k in node.before]
        radii = [
            torch.maximum(self.high[k] - c, c - self.low[k]) * (1 + 4 * UNIT)
            for k, c in zip(node.before, middles, strict=True)
        ]
        at = [c if node.factors else 0 * c for c in middles]
        size, less, more = (
            node.run([c.abs() + r for c, r in zip(here, around, strict=True)], absolute=True)
            for here, around in ((middles, radii), (at, [0 * r for r in radii]), (at, radii))
        )
        rest = node.run(radii, absolute=True) if node.factors else 0 * size
        self.size.append(4 * size)
        self.points[index] = at, node.run(at), rest
        radius = (more - less).clamp(min=0) * (1 + 1e-12) + gamma(2 * node.terms) * size
        read = sum(int((self.most(k) > 0).sum()) for k in node.before)  # 0 adds no rounding
        kind, centre = self.network.kind, node.run(middles)
        rounding = 0.55 * kind.eps * min(node.terms, read + 4)  # 1.1 units each, if they are few
        exact = (size <= kind.max / 2) & (rounding < 0.05)
        return centre - radius, centre + radius, torch.where(exact, rounding * size, math.inf)

    def _limit(self, index: int, kink: bool, before: int) -> None:
        """Tighten the bounds of what a node reads, by rows where they may help."""
        low, high = self.low[before], self.high[before]
        wide = (low < 0) & (high > 0) if kink else ~(high - low <= NARROW * (1 + high.abs()))
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        tightens = self.tightens and bool(wide.any())
        for unit in wide.nonzero()[:, 0].split(self._chunk()) if tightens else ():
            rows = torch.zeros((len(unit), len(low)), dtype=torch.float64)
            rows[torch.arange(len(unit)), unit] = 1.0
            low[unit] = torch.maximum(low[unit], self._lowest(before, rows)[0])
            negative, back = self._lowest(before, -rows)
            high[unit] = torch.minimum(high[unit], -negative)
            if kink and isinstance(self.images, Transport):
                point = self.images.point
                at = gamma(len(point)) * (back.abs() @ point) - back @ point
                found.append((unit, at, self.images.gains(-back).clamp(min=0).flatten(1)))
        if found:
            few = slice(max(1, KEPT // max(1, found[0][2].shape[1])))
            unit, at, gain = (torch.cat(parts)[few] for parts in zip(*found, strict=True))
            self.anchors[index] = unit, at, gain
        self._check(before)

    def _chunk(self) -> int:
        return max(1, CHUNK // (max(map(len, self.low)) + 4 * len(self.images.point)))

    # ---- rows

    def _lowest(self, node: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bounds of rows over a node, and the corresponding rows over the image, which define
        gains."""
        ways = [self._back(node, rows, Way(False))]
        if self.anchors:
            ways.append(self._back(node, rows, Way()))
        return torch.stack([self._value(way) for way in ways]).amax(0), ways[-1]

    def _value(self, rows: Tensor) -> Tensor:
        """Lower bounds of rows over the image; of images with a margin of at most 0, if this is a
        proof by contradiction: there a row plus a multiple of the margin is at most the row
        itself."""
        best, point = self._over(rows), self.images.point
        if self.against is None:
            return best
        margin, paid = self.against.row, self.against.prices
        fall = (margin @ point - self.against.value).clamp(min=1e-30)
        for times in WEIGHTS:
            weight = (times * (rows @ point - best).clamp(min=0) / fall).nan_to_num(0.0, 0.0)
            more = weight[:, None] * margin
            room = 4 * UNIT * ((rows.abs() + more.abs()) @ self.images.most)
            prices = None if paid is None else weight[:, None] * paid
            best = torch.maximum(best, self._over(rows + more, prices) - room)
        return best

    def _over(self, rows: Tensor, prices: Tensor | None = None) -> Tensor:
        return known(-self.images.highest(-rows, prices), -math.inf)

    def _back(self, node: int, rows: Tensor, way: Way) -> Tensor:
        """Rows over a node as rows over the image."""
        if time.monotonic() > self.network.deadline:
            raise Unfollowed("time_limit ended before the checker had a bound")
        const, size = torch.zeros((2, len(rows)), dtype=torch.float64)
        found = torch.zeros((len(rows), len(self.images.point)), dtype=torch.float64)
        pending = {node: rows}
        for index in range(node, 0, -1):
            row = pending.pop(index, None)
            if row is None:
                continue
            at = self.network.nodes[index]
            assert at is not None
            const, size = const - row.abs() @ self.off[index], size + row.abs() @ self.size[index]
            if isinstance(at, LinearNode):
                points, value, rest = self.points[index]
                parts = at.pull(row, points)
                const = const + row @ value - row.abs() @ rest
                const = const - sum(part @ point for part, point in zip(parts, points, strict=True))
            else:
                before, up, down = at.before[0], row.clamp(min=0), row.clamp(max=0)
                if isinstance(at, CurveNode):
                    line = self.lines[index]
                else:
                    line, more = self._kink(index, at, way)
                    if bool((more > 0).any()):
                        unit, _, gain = self.anchors[index]
                        found[:, -gain.shape[1] :] += (down * more)[:, unit] @ gain
                price = way.given.get(("price", index), torch.zeros_like(self.low[before]))
                limit = torch.where(price > 0, self.low[before], self.high[before])
                const = const + up @ line.under_shift + down @ line.over_shift + price @ limit
                size = size + price.abs() @ self.most(before)
                parts = [up * line.under + down * line.over - price]
            for place, part in zip(at.before, parts, strict=True):
                pending[place] = pending[place] + part if place in pending else part
        if 0 in pending:
            found[:, 1 : 1 + len(self.low[0])] = pending[0]
        terms = gamma(8 * (max(map(len, self.low)) + len(self.low)))
        found[:, 0] = const - terms * (size + const.abs() + found.abs() @ self.images.most)
        return found

    def _kink(self, index: int, node: Kink, way: Way) -> tuple[LinePair, Tensor]:
        """Lines of an activation, and how much steeper the one above it is beyond the anchor."""
        low, high = self.low[node.before[0]], self.high[node.before[0]]
        crossing = (low < 0) & (high > 0)
        stable, under = (low >= 0).double(), (high > -low).double()
        over = torch.where(crossing, (high / (high - low).clamp(min=1e-300)).clamp(0, 1), stable)
        under, at, more = over if way.parallel else under, low, 0 * low
        if way.anchored and index in self.anchors:
            unit, centre, _ = self.anchors[index]
            at = low.index_copy(0, unit, centre)
            keep = crossing & (low < at) & (at < high)
            at = torch.where(keep, at, low)
            value = at.clamp(min=0)
            left, right = (value / (at - low)).clamp(0, 1), (high - value) / (high - at)
            share = way.given.get(("share", index), torch.ones_like(low)).clamp(0, 1)
            more = torch.where(keep, share * (right - left).clamp(min=0), 0.0)
            over = torch.where(keep, over + share * (left - over), over)
            under = torch.where(keep, (at > 0).double(), under)
        under = torch.where(crossing, way.given.get(("slope", index), under).clamp(0, 1), stable)
        heights = []  # over a line through 0, where the activation may be highest
        for v in (low, at, high):
            value, line = v.clamp(min=0), over * v
            steeper, room = more * (v - at).clamp(min=0), more * (v.abs() + at.abs())
            heights.append(value - line - steeper + 8 * UNIT * (value.abs() + line.abs() + room))
        shift = torch.where(crossing, torch.stack(heights).amax(0), 0.0)
        return LinePair(under, 0 * under, over, shift, low, high, low), more

    # ---- the answer

    def margin(self, label: int, other: int, given: Parameters) -> Margin:
        """The best bound of ``logit[label] - logit[other]``, with the given parameters or
        without."""
        row = torch.zeros((1, len(self.low[-1])), dtype=torch.float64)
        row[0, label], row[0, other] = 1.0, -1.0
        found = []
        for way in (Way(given=given), Way(), Way(False), Way(False, True)):
            back, prices = self._back(len(self.low) - 1, row, way), way.given.get(("box", 0))
            found.append(Margin(float(self._over(back, prices)), back, prices))
        return max(found, key=lambda margin: margin.value)
