r"""Bounds of a network over a set of images, with every rounding error accounted for.

Rows are carried from the logits back to the image, node by node. With ``l <= v <= u`` the activation
``f(v) = max(v, s v)`` lies above every line through 0 with a slope in ``[s, 1]``; because it is convex it lies below
any line, or pair of lines, that is not below it at ``l``, at ``u`` and where the lines meet. Two upper bounds are
tried: the chord, and for transport plans the pair of lines that meets at the image itself, whose second slope is
charged to the mass that moves. Curves have a line on either side (:mod:`.lines`). Coefficients are plain numbers; what
they are off by is multiplied by the largest value of what they multiply and taken off the bound.

A part of the ball in which some of these numbers have limits is bounded by the same code: where ``l <= v <= u`` holds,
``m >= m - p (v - l)`` and ``m >= m - p (u - v)`` for any price ``p >= 0``. So is a proof by contradiction: only images
with a margin ``m <= 0`` matter, and there ``v >= v + w m`` for any ``w >= 0``. Bounds of ``v`` that hold for them alone
give a better bound of ``m``, and so on; once it is above 0, or bounds cross, there is no such image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wball.certificates.checking.lines import Lines, lines, values_between
from wball.certificates.checking.network import UNIT, Affine, Bend, Map, Network, gamma
from wball.certificates.checking.plans import Cube, Transport

CHUNK = 2**24
"""Numbers that rows may hold at a time."""

KEPT = 2**26
"""Numbers that the gains of one activation may hold; units beyond keep the chord."""

WEIGHTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the margin in proofs by contradiction, relative to what a number can fall for what the margin can fall."""

Parameters = dict[tuple[str, int], Tensor]
"""What a bound may be optimised over, by kind and node; any values are right: ``slope`` below an activation, ``share``
of the anchored bound above it, ``pick`` of a window's numbers below its maximum, ``price`` of the limits of what a bend
reads (positive: of the lower one), and for the image ``box`` prices and the price ``psi`` of the budget."""

Limits = dict[int, tuple[Tensor, Tensor]]
"""By bend, what the numbers that it reads are known to lie between in a part, flat."""


@dataclass
class Anchor:
    """Units of one activation with the value at the image and the gains of every move."""

    unit: Tensor
    centre: Tensor
    gain: Tensor  # (units, options), rounded up

    def take(self, keep: Tensor) -> Anchor:
        return (
            self
            if bool(keep.all())
            else Anchor(self.unit[keep], self.centre[keep], self.gain[keep])
        )


@dataclass
class Rows:
    """``<row, h> >= const + <at_image, z> - charges``: lower bounds as functions of the image."""

    const: Tensor
    at_image: Tensor
    charges: Tensor | None

    def take(self, keep: Tensor) -> Rows:
        return Rows(
            self.const[keep],
            self.at_image[keep],
            None if self.charges is None else self.charges[keep],
        )

    def where(self, mine: Tensor, other: Rows) -> Rows:
        """These rows where ``mine``, and elsewhere the other ones."""
        charges = None
        if self.charges is not None or other.charges is not None:
            ways = [
                torch.zeros((), dtype=torch.float64) if r.charges is None else r.charges
                for r in (self, other)
            ]
            charges = torch.where(mine[:, None], ways[0], ways[1])
        at_image = torch.where(mine[:, None], self.at_image, other.at_image)
        return Rows(torch.where(mine, self.const, other.const), at_image, charges)


@dataclass
class Margin:
    """A lower bound of the margin to one class over a part, with the row and the box prices behind it."""

    value: float
    row: Rows
    prices: Tensor | None


@dataclass
class Checker:
    """The bounds of one image, node after node.

    Args:
        limits: what is known about the part of the ball.
        known: bounds of a part that contains this one; rows are then carried back for the margin alone.
        against: a bound of the margin over ``known``: bounds hold for images with a margin of at most 0.
    """

    network: Network
    domain: Cube | Transport
    limits: Limits = field(default_factory=dict)
    known: Checker | None = None
    against: Margin | None = None
    low: list[Tensor] = field(default_factory=list)  # of every node, flat
    high: list[Tensor] = field(default_factory=list)
    anchors: dict[int, Anchor] = field(default_factory=dict)
    curves: dict[int, Lines] = field(default_factory=dict)
    reach: dict[int, Tensor] = field(default_factory=dict)
    empty: bool = False  # no image is in this part

    def __post_init__(self) -> None:
        for index, node in enumerate(self.network.nodes):
            if node is None:
                low, high = self.domain.ranges()
            elif isinstance(node, Affine):
                low, high = self._intervals(node)
            else:
                self._bound(index, node)
                if self.empty:
                    return
                low, high = self._after(node)
            if self.known is not None:
                low, high = (
                    torch.maximum(low, self.known.low[index]),
                    torch.minimum(high, self.known.high[index]),
                )
            self.low.append(low)
            self.high.append(high)

    @property
    def partial(self) -> bool:
        """Whether the bounds hold for less than the whole ball."""
        return (
            bool(self.limits)
            or self.against is not None
            or (self.known is not None and self.known.partial)
        )

    def most(self, node: int) -> Tensor:
        """The largest magnitude of every number of a node."""
        return torch.maximum(self.low[node].abs(), self.high[node].abs())

    # ---- layers

    def _bound(self, index: int, bend: Bend) -> None:
        """Tighten what a bend reads, by rows where that may help."""
        low, high = self.low[bend.before], self.high[bend.before]
        if index in self.limits:
            floor, ceiling = self.limits[index]
            low, high = torch.maximum(low, floor), torch.minimum(high, ceiling)
            self.low[bend.before], self.high[bend.before] = low, high
        if self.known is not None and index in self.known.anchors:
            self.anchors[index] = self.known.anchors[index]
        if (self.known is None or self.against is not None) and not bool((low > high).any()):
            self._tighten(index, bend, low, high)
        if bool((low > high).any()):
            if (
                not self.limits
                and self.against is None
                and (self.known is None or not self.known.partial)
            ):
                raise ArithmeticError("bounds cross: the checker is wrong")
            self.empty = True
            return
        if bend.curve:
            self.curves[index] = lines(bend.curve, bend.ends, low, high)

    def _tighten(self, index: int, bend: Bend, low: Tensor, high: Tensor) -> None:
        gains: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in self._open(bend, low, high).split(self._chunk()):
            for sign in (1.0, -1.0):
                if bend.straight:
                    part = part[
                        (low[part] < 0) & (high[part] > 0)
                    ]  # one side may have shown that it does not bend
                if part.numel() == 0:
                    break
                rows = torch.zeros((part.shape[0], low.shape[0]), dtype=torch.float64)
                rows[torch.arange(part.shape[0]), part] = sign
                found, back = self._lowest(bend.before, rows)
                if sign > 0:
                    low[part] = torch.maximum(low[part], found)
                else:
                    high[part] = torch.minimum(high[part], -found)
                    if bend.straight and isinstance(self.domain, Transport):
                        keep = (high[part] > 0).nonzero()[:, 0]
                        gains.append((part[keep], *self._gains(back.take(keep))))
        if not gains:
            return
        unit, centre, gain = (torch.cat(group) for group in zip(*gains, strict=True))
        keep = (
            (low[unit] < 0) & (high[unit] > 0) & (low[unit] < centre) & (centre < high[unit])
        ).nonzero()[:, 0]
        keep = keep[: max(1, KEPT // max(1, gain.shape[1]))]
        if keep.numel():
            self.anchors[index] = Anchor(unit[keep], centre[keep], gain[keep])

    def _open(self, bend: Bend, low: Tensor, high: Tensor) -> Tensor:
        """Numbers whose bounds matter: activations that may bend, candidates of windows that are not decided."""
        if bend.curve == "clamp":
            inside = [(low < e) & (high > e) for e in bend.ends]
            return (inside[0] | inside[1]).nonzero()[:, 0]
        if bend.curve:
            return (low < high).nonzero()[:, 0]
        if bend.windows is None:
            return ((low < 0) & (high > 0)).nonzero()[:, 0]
        inside_window, place = bend.windows >= 0, bend.windows.clamp(min=0)
        floor = torch.where(inside_window, low[place], -math.inf).amax(1, keepdim=True)
        may = inside_window & (high[place] >= floor)
        may &= may.sum(1, keepdim=True) > 1
        return bend.windows[may].unique()

    def _after(self, bend: Bend) -> tuple[Tensor, Tensor]:
        """The range of a bend's own numbers."""
        low, high = self.low[bend.before], self.high[bend.before]
        if bend.curve:
            return values_between(bend.curve, bend.ends, low, high)
        if bend.windows is not None:
            inside, place = bend.windows >= 0, bend.windows.clamp(min=0)
            return (
                torch.where(inside, low[place], -math.inf).amax(1),
                torch.where(inside, high[place], -math.inf).amax(1),
            )
        first, last = (
            torch.where(low > 0, low, bend.leak * low),
            torch.where(high > 0, high, bend.leak * high),
        )
        room = 2 * UNIT * (first.abs() + last.abs()) if bend.leak else 0.0
        return first - room, last + room

    def _intervals(self, node: Affine) -> tuple[Tensor, Tensor]:
        """Bounds from the ranges of what an affine node reads."""
        centre, radius = node.const, torch.zeros_like(node.const)
        size = node.const.abs()
        for part in node.maps:
            low, high = self.low[part.source], self.high[part.source]
            middle, half = (
                ((low + high) / 2).reshape(part.shape),
                ((high - low) / 2).reshape(part.shape),
            )
            centre = centre + part.run(middle).flatten()
            radius = radius + part.size(half).flatten()
            size = size + part.size(middle.abs() + half).flatten()
        radius = radius * (1 + 1e-12) + gamma(node.terms + 4 * len(node.maps) + 8) * size
        return centre - radius, centre + radius

    def _chunk(self) -> int:
        widest = max(low.shape[0] for low in self.low)
        options = self.domain.options * 4 if isinstance(self.domain, Transport) else 0
        return max(1, CHUNK // (widest + options + 1))

    # ---- rows

    def _lowest(self, node: int, rows: Tensor) -> tuple[Tensor, Rows]:
        """Lower bounds of rows over a node; and the rows behind the better of both kinds for gains."""
        kept = better = self._back(node, rows)
        best = self._value(kept)
        ways = []
        if self.against is not None and any(k <= node for k in self.network.bends):
            ways.append(self._back(node, rows, parallel=True))
        if self.anchors:
            kept = self._back(node, rows, anchored=True)
            ways.append(kept)
        for way in ways:
            value = self._value(way)
            better, best = better.where(value <= best, way), torch.maximum(best, value)
        return (best if self.against is None else self._contradicted(better, best)), kept

    def _contradicted(self, rows: Rows, best: Tensor) -> Tensor:
        """Lower bounds of rows over images with a margin of at most 0, from those over all."""
        assert self.against is not None
        centre, margin = self.domain.centre, self.against.row
        fall = (margin.const + margin.at_image @ centre - self.against.value).clamp(min=1e-30)
        unit = (rows.const + rows.at_image @ centre - best).clamp(min=0) / fall
        for times in WEIGHTS:
            best = torch.maximum(best, self._with_margin(rows, times * unit))
        return best

    def _with_margin(self, rows: Rows, weight: Tensor) -> Tensor:
        """Bounds of rows and the margin times a weight, which is at most 0."""
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
        whole = Rows(const - room * (1 + 1e-9), at_image, charges)
        return self._value(whole, None if prices is None else by * prices)

    def climb(self, rows: Tensor, steps: int, given: Parameters) -> Margin:
        """The best bound of the margin that gradient steps find, from a first guess of some parameters."""
        node, optimiser = len(self.network.nodes) - 1, None
        unit = torch.ones((1, 1), dtype=torch.float64)  # prices of the box are in that of the row
        best: Margin | None = None
        for _ in range(steps):
            self._clamp(given)
            with torch.enable_grad():
                back = self._back(node, rows, anchored=bool(self.anchors), given=given)
                prices = given["box", 0] * unit if ("box", 0) in given else None
                bound = self._value(back, prices)
            value = float(bound.detach())
            if best is None or value > best.value:
                charges = None if back.charges is None else back.charges.detach()
                row = Rows(back.const.detach(), back.at_image.detach(), charges)
                best = Margin(value, row, None if prices is None else prices.detach())
            if not given or best.value > 0:
                break
            if optimiser is None:
                if isinstance(self.domain, Transport) and self.domain.box is not None:
                    unit = back.at_image.detach().abs().amax(1, keepdim=True)
                    given["box", 0] = torch.zeros_like(back.at_image).requires_grad_(True)
                groups = [
                    {"params": [v], "lr": 0.05 if kind == "box" else 0.2}
                    for (kind, _), v in given.items()
                ]
                optimiser = torch.optim.Adam(groups, betas=(0.9, 0.9))
                continue
            optimiser.zero_grad()
            bound.sum().neg().backward()
            optimiser.step()
            for group in optimiser.param_groups:
                group["lr"] *= 0.95
        assert best is not None
        return best

    def evaluated(self, rows: Tensor, given: Parameters) -> Margin:
        """The bound of the margin that given parameters prove, or the usual ones if those are better."""
        node, prices = len(self.network.nodes) - 1, given.get(("box", 0))
        back = self._back(node, rows, anchored=bool(self.anchors), given=given)
        found = [Margin(float(self._value(back, prices, given.get(("psi", 0)))), back, prices)]
        for anchored in (False, True) if self.anchors else (False,):
            back = self._back(node, rows, anchored=anchored)
            found.append(Margin(float(self._value(back)), back, None))
        return max(found, key=lambda margin: margin.value)

    def _clamp(self, given: Parameters) -> None:
        for (kind, index), value in given.items():
            bend = self.network.nodes[index]
            if kind == "slope" and isinstance(bend, Bend):
                value.data.clamp_(bend.leak, 1.0)
            elif kind == "price":
                floor, ceiling = self.limits[index]
                value.data.clamp_(
                    torch.where(ceiling < math.inf, -math.inf, 0.0),
                    torch.where(floor > -math.inf, math.inf, 0.0),
                )

    def _value(self, rows: Rows, prices: Tensor | None = None, psi: Tensor | None = None) -> Tensor:
        top = self.domain.highest(-rows.at_image, rows.charges, prices, psi)
        return rows.const - top - 4 * UNIT * (rows.const.abs() + top.abs())

    def _gains(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Of rows that bound ``-v``: the value of the upper bound at the image, and the gains of every move."""
        assert isinstance(self.domain, Transport)
        image = self.domain.x.flatten()
        at = rows.at_image @ image
        room = gamma(image.shape[0]) * (rows.at_image.abs() @ image) + 4 * UNIT * rows.const.abs()
        return -(rows.const + at) + room, self.domain.gains(-rows.at_image, rows.charges)

    def _back(
        self,
        node: int,
        rows: Tensor,
        anchored: bool = False,
        parallel: bool = False,
        given: Parameters | None = None,
        passed: dict[int, Tensor] | None = None,
    ) -> Rows:
        """Rows over a node as rows over the image.

        Lower slopes are those of CROWN, ``parallel`` ones, or those given, which are filled in where they are missing.
        ``passed`` takes the rows as they reach each bend.
        """
        const = torch.zeros(rows.shape[0], dtype=torch.float64)
        pending: dict[int, Tensor] = {node: rows}
        charges: Tensor | None = None
        for index in range(node, 0, -1):
            row = pending.pop(index, None)
            if row is None:
                continue
            at = self.network.nodes[index]
            if isinstance(at, Affine):
                const = self._through(at, row, const, pending)
                continue
            assert isinstance(at, Bend)
            if passed is not None:
                passed[index] = row
            if at.windows is not None:
                row, const = self._pool(index, at, row, const, given)
            elif at.curve:
                row, const = self._curve(index, at, row, const)
            else:
                anchor = self._anchor(index, at) if anchored else None
                under = self._lower_slopes(index, at, row, anchor, parallel, given)
                share = None if given is None else given.get(("share", index))
                row, const, charge = self._activation(index, at, row, const, under, anchored, share)
                if charge is not None:
                    charges = charge if charges is None else (charges + charge) * (1 + 4 * UNIT)
            row, const = self._priced(index, at, row, const, given)
            const = self._add(pending, at.before, row, const)
        image = pending.get(0)
        if image is None:
            image = torch.zeros((rows.shape[0], len(self.low[0])), dtype=torch.float64)
        return Rows(const, image, charges)

    def _add(self, pending: dict[int, Tensor], node: int, row: Tensor, const: Tensor) -> Tensor:
        if node not in pending:
            pending[node] = row
            return const
        pending[node] = pending[node] + row
        return const - 2 * UNIT * (1 + 1e-9) * (pending[node].abs() @ self.most(node))

    def _through(
        self, node: Affine, rows: Tensor, const: Tensor, pending: dict[int, Tensor]
    ) -> Tensor:
        """Rows over an affine node become rows over what it reads; errors are taken off the constant."""
        size = rows.abs()
        error = gamma(rows.shape[1] + 4) * (size @ node.const.abs())
        const = const + rows @ node.const
        for part in node.maps:
            error = error + gamma(node.terms + rows.shape[1]) * (size @ self._reach(part))
            const = self._add(pending, part.source, part.transposed(rows), const)
        return const - error * (1 + 1e-9) - 4 * UNIT * const.abs()

    def _reach(self, part: Map) -> Tensor:
        """The largest magnitude of every number of a map's result."""
        if id(part) not in self.reach:
            self.reach[id(part)] = part.size(self.most(part.source).reshape(part.shape)).flatten()
        return self.reach[id(part)]

    # ---- bends

    def _anchor(self, index: int, bend: Bend) -> Anchor | None:
        anchor = self.anchors.get(index)
        if anchor is None:
            return None
        low, high, at = (
            self.low[bend.before][anchor.unit],
            self.high[bend.before][anchor.unit],
            anchor.centre,
        )
        anchor = anchor.take((low < 0) & (high > 0) & (low < at) & (at < high))
        return anchor if anchor.unit.numel() else None

    def _chord(self, bend: Bend) -> tuple[Tensor, Tensor]:
        """Which units may bend, and the slope of the chord; of the others, their only slope."""
        low, high, leak = self.low[bend.before], self.high[bend.before], bend.leak
        crossing = (low < 0) & (high > 0)
        chord = ((high - leak * low) / (high - low).clamp(min=1e-300)).clamp(leak, 1.0)
        return crossing, torch.where(
            crossing, chord, torch.where(low >= 0, torch.ones_like(chord), leak)
        )

    def _lower_slopes(
        self,
        index: int,
        bend: Bend,
        row: Tensor,
        anchor: Anchor | None,
        parallel: bool,
        given: Parameters | None,
    ) -> Tensor:
        crossing, chord = self._chord(bend)
        if parallel:
            return chord
        if given is not None and ("slope", index) in given:
            return torch.where(crossing, given["slope", index].clamp(bend.leak, 1.0), chord)
        low, high, leak = self.low[bend.before], self.high[bend.before], bend.leak
        under = torch.where(crossing, torch.where(high > -low, torch.ones_like(chord), leak), chord)
        if anchor is not None:
            under[anchor.unit] = torch.where(
                anchor.centre > 0, torch.ones_like(anchor.centre), leak
            )
        if given is not None and bool(crossing.any()):
            given["slope", index] = under.expand(row.shape).clone().requires_grad_(True)
            return torch.where(crossing, given["slope", index].clamp(bend.leak, 1.0), chord)
        return under

    def chord_above(self, bend: Bend) -> tuple[Tensor, Tensor]:
        """The chord of every unit, and its shift; of units that do not bend their only slope."""
        crossing, chord = self._chord(bend)
        return chord, torch.where(crossing, self._above(bend, chord), 0.0)

    def anchored_above(
        self, index: int, bend: Bend
    ) -> tuple[Anchor, Tensor, Tensor, Tensor] | None:
        """Units with an anchor, the slope and the shift of the first line above them, and what the second adds."""
        anchor = self._anchor(index, bend)
        if anchor is None:
            return None
        at, leak = anchor.centre, bend.leak
        low, high = self.low[bend.before][anchor.unit], self.high[bend.before][anchor.unit]
        value = torch.where(at > 0, at, leak * at)
        slope = ((value - leak * low) / (at - low)).clamp(leak, 1.0)
        more = ((high - value) / (high - at) - slope).clamp(min=0)
        return anchor, slope, self._above(bend, slope, anchor, more), more

    def _activation(
        self,
        index: int,
        bend: Bend,
        row: Tensor,
        const: Tensor,
        under: Tensor,
        anchored: bool,
        share: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """``share`` of the anchored bound above, of units that have one, and the chord for the rest: 1 unless given."""
        chord, shift = self.chord_above(bend)
        pair = self.anchored_above(index, bend) if anchored else None
        gain, weight = chord, chord
        if pair is not None:
            anchor, left, over, more = pair
            unit, gain = anchor.unit, anchor.gain
            part = torch.ones_like(left) if share is None else share[unit].clamp(0.0, 1.0)
            chord = chord.index_copy(0, unit, (1 - part) * chord[unit] + part * left)
            shift = shift.index_copy(0, unit, (1 - part) * shift[unit] + part * over)
            weight = -row.clamp(max=0)[:, unit] * (part * more)
        positive, negative = row.clamp(min=0), row.clamp(max=0)
        out = positive * under + negative * chord
        const = const + negative @ shift
        error = gamma(row.shape[1]) * (negative.abs() @ shift.abs()) + 8 * UNIT * (
            out.abs() @ self.most(bend.before)
        )
        const = const - error * (1 + 1e-9) - 4 * UNIT * const.abs()
        return out, const, None if pair is None else (weight @ gain) * (1 + gamma(gain.shape[0]))

    def _above(
        self, bend: Bend, slope: Tensor, anchor: Anchor | None = None, more: Tensor | None = None
    ) -> Tensor:
        """How far the activation is above the line without a shift, or the pair of lines that meets at an anchor."""
        low, high = self.low[bend.before], self.high[bend.before]
        ends = (
            [low, high] if anchor is None else [low[anchor.unit], high[anchor.unit], anchor.centre]
        )

        def gap(v: Tensor) -> Tensor:
            value = torch.where(v > 0, v, bend.leak * v)
            line, size = slope * v, (slope * v).abs()
            if anchor is not None and more is not None:
                rest = (v - anchor.centre).clamp(min=0)
                line, size = line + more * rest, size + more * (v.abs() + anchor.centre.abs())
            return value - line + 8 * UNIT * (value.abs() + size)

        return torch.stack([gap(v) for v in ends]).amax(0)

    def _priced(
        self, index: int, bend: Bend, row: Tensor, const: Tensor, given: Parameters | None
    ) -> tuple[Tensor, Tensor]:
        """Prices of the limits of what a bend reads."""
        if given is None:
            return row, const
        if ("price", index) not in given:
            if index not in self.limits:
                return row, const
            given["price", index] = torch.zeros_like(row).requires_grad_(True)
        price, low, high = given["price", index], self.low[bend.before], self.high[bend.before]
        limit = torch.where(price > 0, low, high)
        if index in self.limits:  # the derivative at 0 is that of the limit which was set
            limit = torch.where((price == 0) & torch.isfinite(self.limits[index][0]), low, limit)
        out, paid = row - price, price * limit
        room = 4 * UNIT * ((out.abs() + row.abs()) @ self.most(bend.before)) + gamma(
            row.shape[1]
        ) * paid.abs().sum(1)
        return out, const + paid.sum(1) - room - 4 * UNIT * const.abs()

    def _curve(self, index: int, bend: Bend, row: Tensor, const: Tensor) -> tuple[Tensor, Tensor]:
        line, many = self.curves[index], row.shape[1]
        positive, negative = row.clamp(min=0), row.clamp(max=0)
        out = positive * line.under + negative * line.over
        const = const + positive @ line.under_shift + negative @ line.over_shift
        error = gamma(many) * (positive @ line.under_shift.abs() - negative @ line.over_shift.abs())
        error = error + 4 * UNIT * (out.abs() @ self.most(bend.before))
        return out, const - error * (1 + 1e-9) - 8 * UNIT * const.abs()

    def _pool(
        self, index: int, bend: Bend, row: Tensor, const: Tensor, given: Parameters | None
    ) -> tuple[Tensor, Tensor]:
        """The largest number of a window is at least any mean of them, and at most its ceiling."""
        assert bend.windows is not None
        place, (pick, sure, ceiling) = bend.windows.clamp(min=0), self.windows(bend)
        kept = torch.where((row > 0) | sure, row, 0.0)
        out = torch.zeros((row.shape[0], len(self.low[bend.before])), dtype=torch.float64)
        if given is not None and ("pick", index) in given:
            mean = torch.where(
                bend.windows >= 0, given["pick", index].clamp(min=0), 0.0
            )  # (windows, numbers of each)
            total, alone = (
                mean.sum(1, keepdim=True),
                torch.zeros_like(mean).scatter(1, pick[:, None], 1.0),
            )
            mean = torch.where(
                sure[:, None] | ~(total > 1e-30), alone, mean / total.clamp(min=1e-30)
            )
            for k in range(place.shape[1]):
                out = out.index_add(1, place[:, k], kept * mean[:, k])
        else:
            out = out.index_add(1, place.gather(1, pick[:, None])[:, 0], kept)
        left = row - kept
        const = const + left @ ceiling
        error = gamma(row.shape[1] + place.shape[1]) * (
            left.abs() @ ceiling.abs()
            + kept.abs() @ torch.maximum(ceiling.abs(), self._window_size(bend))
        )
        return out, const - error * (1 + 1e-9) - 4 * UNIT * const.abs()

    def windows(self, bend: Bend) -> tuple[Tensor, Tensor, Tensor]:
        """By window: the place of its likely maximum, whether it is the maximum for sure, and the window's ceiling."""
        assert bend.windows is not None
        inside, place = bend.windows >= 0, bend.windows.clamp(min=0)
        least = torch.where(inside, self.low[bend.before][place], -math.inf)
        most = torch.where(inside, self.high[bend.before][place], -math.inf)
        floor, ceiling = least.amax(1), most.amax(1)
        tied = least >= floor[:, None] - 1e-9 * (ceiling - floor)[:, None]
        pick = torch.where(tied, most, -math.inf).argmax(
            1
        )  # of those with the highest floor, the highest ceiling
        others = most.scatter(1, pick[:, None], -math.inf).amax(1)
        return pick, least.gather(1, pick[:, None])[:, 0] >= others, ceiling

    def _window_size(self, bend: Bend) -> Tensor:
        assert bend.windows is not None
        size = self.most(bend.before)[bend.windows.clamp(min=0)]
        return torch.where(bend.windows >= 0, size, 0.0).amax(1)

    # ---- the answer

    def margins(self, label: int) -> Tensor:
        """Lower bounds of ``logit[label]`` less each other logit."""
        others = [k for k in range(self._classes()) if k != label]
        if not others:
            return torch.zeros(0, dtype=torch.float64)
        node, rows = (
            len(self.network.nodes) - 1,
            torch.cat([self.difference(label, k) for k in others]),
        )
        return torch.cat([self._lowest(node, part)[0] for part in rows.split(self._chunk())])

    def weights(self, rows: Tensor) -> dict[int, Tensor]:
        """How much each number of each bend counts in one row over the logits, by node."""
        passed: dict[int, Tensor] = {}
        with torch.no_grad():
            self._back(len(self.network.nodes) - 1, rows, passed=passed)
        return {node: row[0].abs() for node, row in passed.items()}

    def difference(self, label: int, other: int) -> Tensor:
        """``logit[label] - logit[other]``, as a row over the logits."""
        row = torch.zeros((1, self._classes()), dtype=torch.float64)
        row[0, label], row[0, other] = 1.0, -1.0
        return row

    def _classes(self) -> int:
        return math.prod(self.network.shape_of(len(self.network.nodes) - 1))
