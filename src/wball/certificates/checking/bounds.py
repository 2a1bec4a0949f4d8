r"""Bounds of a network over a set of images, with every rounding error accounted for.

Rows are carried from the logits back to the image, node by node. With ``l <= v <= u`` the activation
``f(v) = max(v, s v)`` lies above every line through 0 with a slope in ``[s, 1]``; because it is convex it lies below
any line, or pair of lines, that is not below it at ``l``, at ``u`` and where the lines meet. Two upper bounds are
tried: the chord, and for transport plans the pair of lines that meets at the image itself, whose second slope is
charged to the mass that moves. Curves have a line on either side (:mod:`.lines`). Coefficients are plain numbers; what
they are off by is multiplied by the largest value of what they multiply and taken off the bound.

A case in which the signs of some activations are known is bounded by the same code: there ``sigma v >= 0``, so
``m >= m - beta sigma v`` for any ``beta >= 0``.
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

Parameters = dict[tuple[str, int], Tensor]
"""What a bound may be optimised over, by kind and node: lower slopes, multipliers of known signs, prices of the box."""


@dataclass
class Anchor:
    """Units of one activation with the value at the image and the gains of every move."""

    unit: Tensor
    centre: Tensor
    gain: Tensor  # (units, options), rounded up

    def take(self, keep: Tensor) -> Anchor:
        return self if bool(keep.all()) else Anchor(self.unit[keep], self.centre[keep], self.gain[keep])


@dataclass
class Rows:
    """``<row, h> >= const + <at_image, z> - charges``: lower bounds as functions of the image."""

    const: Tensor
    at_image: Tensor
    charges: Tensor | None

    def take(self, keep: Tensor) -> Rows:
        return Rows(self.const[keep], self.at_image[keep], None if self.charges is None else self.charges[keep])


@dataclass
class Checker:
    """The bounds of one image, node after node.

    Args:
        steps: gradient steps on the slopes of every row.
        signs: by activation, 1 and -1 where the sign of what it reads is known in this case, flat.
        known: bounds of a case that contains this one; rows are then carried back for the margin alone.
    """

    network: Network
    domain: Cube | Transport
    steps: int = 0
    signs: dict[int, Tensor] = field(default_factory=dict)
    known: Checker | None = None
    low: list[Tensor] = field(default_factory=list)  # of every node, flat
    high: list[Tensor] = field(default_factory=list)
    anchors: dict[int, Anchor] = field(default_factory=dict)
    curves: dict[int, Lines] = field(default_factory=dict)
    reach: dict[int, Tensor] = field(default_factory=dict)
    empty: bool = False  # no image has these signs

    def __post_init__(self) -> None:
        for index, node in enumerate(self.network.nodes):
            if node is None:
                low, high = self.domain.ranges()
            elif isinstance(node, Affine):
                low, high = self._intervals(node)
            else:
                self._bound(index, node)
                low, high = self._after(node)
            if self.known is not None:
                low, high = torch.maximum(low, self.known.low[index]), torch.minimum(high, self.known.high[index])
            self.low.append(low)
            self.high.append(high)
            if self.empty:
                return

    def most(self, node: int) -> Tensor:
        """The largest magnitude of every number of a node."""
        return torch.maximum(self.low[node].abs(), self.high[node].abs())

    # ---- layers

    def _bound(self, index: int, bend: Bend) -> None:
        """Tighten what a bend reads, by rows where that may help."""
        low, high = self.low[bend.before], self.high[bend.before]
        sign = self.signs.get(index)
        if sign is not None:
            low, high = torch.where(sign > 0, low.clamp(min=0), low), torch.where(sign < 0, high.clamp(max=0), high)
            self.low[bend.before], self.high[bend.before] = low, high
        if self.known is None:
            self._tighten(index, bend, low, high)
        elif index in self.known.anchors:
            self.anchors[index] = self.known.anchors[index]
        if bool((low > high).any()):
            if not self.signs:
                raise ArithmeticError("bounds cross: the checker is wrong")
            self.empty = True
        if bend.curve:
            self.curves[index] = lines(bend.curve, bend.ends, low, high)

    def _tighten(self, index: int, bend: Bend, low: Tensor, high: Tensor) -> None:
        gains: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in self._open(bend, low, high).split(self._chunk()):
            for sign in (1.0, -1.0):
                if bend.straight:
                    part = part[(low[part] < 0) & (high[part] > 0)]  # one side may have shown that it does not bend
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
        keep = ((low[unit] < 0) & (high[unit] > 0) & (low[unit] < centre) & (centre < high[unit])).nonzero()[:, 0]
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
        first, last = torch.where(low > 0, low, bend.leak * low), torch.where(high > 0, high, bend.leak * high)
        room = 2 * UNIT * (first.abs() + last.abs()) if bend.leak else 0.0
        return first - room, last + room

    def _intervals(self, node: Affine) -> tuple[Tensor, Tensor]:
        """Bounds from the ranges of what an affine node reads."""
        centre, radius = node.const, torch.zeros_like(node.const)
        size = node.const.abs()
        for part in node.maps:
            low, high = self.low[part.source], self.high[part.source]
            middle, half = ((low + high) / 2).reshape(part.shape), ((high - low) / 2).reshape(part.shape)
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

    def _lowest(self, node: int, rows: Tensor, margin: bool = False) -> tuple[Tensor, Rows]:
        """Lower bounds of rows over a node; and the rows behind the better of both kinds for gains.

        The box has prices where that may help: in margins that are not above 0, and with ``steps`` in every row.
        """
        plain = self._back(node, rows)
        best, kept = self._value(plain), plain
        bent = any(k <= node for k in self.network.bends)
        if self.steps and bent:
            best = torch.maximum(best, self._value(self._back(node, rows, parallel=True)))
        if self.anchors:
            kept = self._back(node, rows, anchored=True)
            best = torch.maximum(best, self._value(kept))
        if self.steps and bent:
            best = torch.maximum(best, self._climb(node, rows))
        if (margin or self.steps) and isinstance(self.domain, Transport):
            for way in (plain, kept) if kept is not plain else (plain,):
                for k in ((best <= 0) if margin else torch.isfinite(best)).nonzero()[:, 0].tolist():
                    charges = None if way.charges is None else way.charges[k : k + 1]
                    found = self.domain.box_prices(-way.at_image[k], charges)
                    if found is not None:
                        top = self.domain.highest(-way.at_image[k : k + 1], charges, found[None])
                        best[k] = torch.maximum(best[k], (way.const[k] - top[0]) - 4 * UNIT * way.const[k].abs())
        return best, kept

    def _climb(self, node: int, rows: Tensor, given: Parameters | None = None) -> Tensor:
        """The best bound that gradient steps find: any slopes in range and any multipliers are right."""
        given = {} if given is None else given
        best = torch.full((rows.shape[0],), -math.inf, dtype=torch.float64)
        unit = torch.ones((rows.shape[0], 1), dtype=torch.float64)  # prices are in that of the rows
        optimiser: torch.optim.Adam | None = None
        for _ in range(self.steps):
            self._clamp(given)
            with torch.enable_grad():
                back = self._back(node, rows, anchored=bool(self.anchors), given=given)
                prices = given.get(("box", 0))
                bound = self._value(back, None if prices is None else prices * unit)
            best = torch.maximum(best, bound.detach())
            if not given or (self.known is not None and bool((best > 0).all())):
                break
            if optimiser is None:
                if self.known is not None and isinstance(self.domain, Transport) and self.domain.box is not None:
                    unit = back.at_image.detach().abs().amax(1, keepdim=True)
                    given["box", 0] = torch.zeros_like(back.at_image).requires_grad_(True)
                groups = [{"params": [v], "lr": 0.05 if kind == "box" else 0.2} for (kind, _), v in given.items()]
                optimiser = torch.optim.Adam(groups, betas=(0.9, 0.9))
                continue
            optimiser.zero_grad()
            bound.sum().neg().backward()
            optimiser.step()
            for group in optimiser.param_groups:
                group["lr"] *= 0.95
        return best

    def _clamp(self, given: Parameters) -> None:
        for (kind, index), value in given.items():
            bend = self.network.nodes[index]
            if kind == "slope" and isinstance(bend, Bend):
                value.data.clamp_(bend.leak, 1.0)
            elif kind == "price":
                value.data.clamp_(min=0.0)

    def _value(self, rows: Rows, prices: Tensor | None = None) -> Tensor:
        top = self.domain.highest(-rows.at_image, rows.charges, prices)
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
                row, const = self._pool(at, row, const)
            elif at.curve:
                row, const = self._curve(index, at, row, const)
            else:
                anchor = self._anchor(index, at) if anchored else None
                under = self._lower_slopes(index, at, row, anchor, parallel, given)
                row, const, charge = self._activation(at, row, const, under, anchor)
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

    def _through(self, node: Affine, rows: Tensor, const: Tensor, pending: dict[int, Tensor]) -> Tensor:
        """Rows over an affine node become rows over what it reads; errors are taken off the constant."""
        size = rows.abs()
        error = gamma(rows.shape[1] + 4) * (size @ node.const.abs())
        const = const + rows @ node.const
        for part in node.maps:
            error = error + gamma(node.terms) * (size @ self._reach(part))
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
        low, high, at = self.low[bend.before][anchor.unit], self.high[bend.before][anchor.unit], anchor.centre
        anchor = anchor.take((low < 0) & (high > 0) & (low < at) & (at < high))
        return anchor if anchor.unit.numel() else None

    def _chord(self, bend: Bend) -> tuple[Tensor, Tensor]:
        """Which units may bend, and the slope of the chord; of the others, their only slope."""
        low, high, leak = self.low[bend.before], self.high[bend.before], bend.leak
        crossing = (low < 0) & (high > 0)
        chord = ((high - leak * low) / (high - low).clamp(min=1e-300)).clamp(leak, 1.0)
        return crossing, torch.where(crossing, chord, torch.where(low >= 0, torch.ones_like(chord), leak))

    def _lower_slopes(
        self, index: int, bend: Bend, row: Tensor, anchor: Anchor | None, parallel: bool, given: Parameters | None
    ) -> Tensor:
        crossing, chord = self._chord(bend)
        if parallel:
            return chord
        if given is not None and ("slope", index) in given:
            return torch.where(crossing, given["slope", index], chord)
        low, high, leak = self.low[bend.before], self.high[bend.before], bend.leak
        under = torch.where(crossing, torch.where(high > -low, torch.ones_like(chord), leak), chord)
        if anchor is not None:
            under[anchor.unit] = torch.where(anchor.centre > 0, torch.ones_like(anchor.centre), leak)
        if given is not None and bool(crossing.any()):
            given["slope", index] = under.expand(row.shape).clone().requires_grad_(True)
            return torch.where(crossing, given["slope", index], chord)
        return under

    def _activation(
        self, bend: Bend, row: Tensor, const: Tensor, under: Tensor, anchor: Anchor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        low, high, leak = self.low[bend.before], self.high[bend.before], bend.leak
        crossing, chord = self._chord(bend)
        bend_by = torch.zeros_like(chord)
        centre = torch.zeros_like(chord)
        if anchor is not None:
            at = anchor.centre
            value = torch.where(at > 0, at, leak * at)
            left = (value - leak * low[anchor.unit]) / (at - low[anchor.unit])
            right = (high[anchor.unit] - value) / (high[anchor.unit] - at)
            chord[anchor.unit] = left.clamp(leak, 1.0)
            bend_by[anchor.unit] = (right - left).clamp(min=0)
            centre[anchor.unit] = at

        def above(v: Tensor) -> Tensor:
            """How far the activation is above the lines without a shift."""
            lines = chord * v + bend_by * (v - centre).clamp(min=0)
            value = torch.where(v > 0, v, leak * v)
            return value - lines + 8 * UNIT * (value.abs() + (chord * v).abs() + bend_by * (v.abs() + centre.abs()))

        shift = torch.where(crossing, torch.maximum(torch.maximum(above(low), above(high)), above(centre)), 0.0)
        shift = torch.where(crossing & (bend_by == 0), torch.maximum(above(low), above(high)), shift)
        positive, negative = row.clamp(min=0), row.clamp(max=0)
        out = positive * under + negative * chord
        const = const + negative @ shift
        error = gamma(row.shape[1]) * (negative.abs() @ shift.abs()) + 4 * UNIT * (out.abs() @ self.most(bend.before))
        const = const - error * (1 + 1e-9) - 4 * UNIT * const.abs()
        if anchor is None:
            return out, const, None
        weight = -negative[:, anchor.unit] * bend_by[anchor.unit]
        return out, const, (weight @ anchor.gain) * (1 + gamma(anchor.unit.shape[0]))

    def _priced(
        self, index: int, bend: Bend, row: Tensor, const: Tensor, given: Parameters | None
    ) -> tuple[Tensor, Tensor]:
        """Multipliers of the signs that are known."""
        sign = self.signs.get(index)
        if sign is None or given is None:
            return row, const
        if ("price", index) not in given:
            given["price", index] = torch.zeros_like(row).requires_grad_(True)
        out = row - given["price", index] * sign
        return out, const - 4 * UNIT * ((out.abs() + row.abs()) @ self.most(bend.before))

    def _curve(self, index: int, bend: Bend, row: Tensor, const: Tensor) -> tuple[Tensor, Tensor]:
        line, many = self.curves[index], row.shape[1]
        positive, negative = row.clamp(min=0), row.clamp(max=0)
        out = positive * line.under + negative * line.over
        const = const + positive @ line.under_shift + negative @ line.over_shift
        error = gamma(many) * (positive @ line.under_shift.abs() - negative @ line.over_shift.abs())
        error = error + 4 * UNIT * (out.abs() @ self.most(bend.before))
        return out, const - error * (1 + 1e-9) - 8 * UNIT * const.abs()

    def _pool(self, bend: Bend, row: Tensor, const: Tensor) -> tuple[Tensor, Tensor]:
        assert bend.windows is not None
        low, high, place = self.low[bend.before], self.high[bend.before], bend.windows.clamp(min=0)
        inside = bend.windows >= 0
        least = torch.where(inside, low[place], -math.inf)
        most = torch.where(inside, high[place], -math.inf)
        floor = least.amax(1)
        tied = least >= floor[:, None] - 1e-9 * (most.amax(1) - floor)[:, None]
        pick = torch.where(tied, most, -math.inf).argmax(1)  # of those with the highest floor, the highest ceiling
        chosen = place.gather(1, pick[:, None])[:, 0]
        others = most.scatter(1, pick[:, None], -math.inf).amax(1)
        sure = least.gather(1, pick[:, None])[:, 0] >= others
        kept = torch.where((row > 0) | sure, row, 0.0)
        out = torch.zeros((row.shape[0], low.shape[0]), dtype=torch.float64).index_add(1, chosen, kept)
        ceiling = most.amax(1)
        left = row - kept
        const = const + left @ ceiling
        error = gamma(row.shape[1]) * (left.abs() @ ceiling.abs() + out.abs() @ self.most(bend.before))
        return out, const - error * (1 + 1e-9) - 4 * UNIT * const.abs()

    # ---- the answer

    def margins(self, label: int, others: list[int] | None = None, given: Parameters | None = None) -> Tensor:
        """Lower bounds of ``logit[label]`` less each other logit, or of some of them; ``given`` is a first guess."""
        others = [k for k in range(self._classes()) if k != label] if others is None else others
        if self.empty or not others:
            return torch.full((len(others),), math.inf, dtype=torch.float64)
        node, rows = len(self.network.nodes) - 1, self._differences(label, others)
        if self.known is not None:
            return self._climb(node, rows, given)
        return torch.cat([self._lowest(node, part, margin=True)[0] for part in rows.split(self._chunk())])

    def margin(self, label: int) -> float:
        """A lower bound of ``logit[label] - best other logit``."""
        return float(self.margins(label).amin())

    def weights(self, label: int, other: int) -> dict[int, Tensor]:
        """How much each number of each bend counts in the margin, by node."""
        passed: dict[int, Tensor] = {}
        with torch.no_grad():
            self._back(len(self.network.nodes) - 1, self._differences(label, [other]), passed=passed)
        return {node: row[0].abs() for node, row in passed.items()}

    def _classes(self) -> int:
        return math.prod(self.network.shape_of(len(self.network.nodes) - 1))

    def _differences(self, label: int, others: list[int]) -> Tensor:
        rows = torch.zeros((len(others), self._classes()), dtype=torch.float64)
        rows[:, label] = 1.0
        rows[torch.arange(len(others)), torch.tensor(others)] = -1.0
        return rows
