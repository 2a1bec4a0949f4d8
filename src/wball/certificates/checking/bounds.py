r"""Bounds of a network over a set of images, with every rounding error accounted for.

Rows are carried from the logits back to the image, activation by activation. With ``l <= v <= u`` the activation
``f(v) = max(v, s v)`` lies above every line through 0 with a slope in ``[s, 1]``; because it is convex it lies below
any line, or pair of lines, that is not below it at ``l``, at ``u`` and where the lines meet. Two upper bounds are
tried: the chord, and for transport plans the pair of lines that meets at the image itself, whose second slope is
charged to the mass that moves. Coefficients are plain numbers; what they are off by is multiplied by the largest value
of what they multiply and taken off the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wball.certificates.checking.network import UNIT, Bend, Form, Network, gamma
from wball.certificates.checking.plans import Cube, Transport

CHUNK = 2**24
"""Numbers that rows may hold at a time."""

KEPT = 2**26
"""Numbers that the gains of one activation may hold; units beyond keep the chord."""


@dataclass
class Anchor:
    """Units of one activation with the value at the image and the gains of every move."""

    unit: Tensor
    centre: Tensor
    gain: Tensor  # (units, options), rounded up


@dataclass
class Rows:
    """``<row, h> >= const + <at_image, z> - charges``: lower bounds as functions of the image."""

    const: Tensor
    at_image: Tensor
    charges: Tensor | None


@dataclass
class Checker:
    """The bounds of one image, activation after activation."""

    network: Network
    domain: Cube | Transport
    steps: int = 0  # gradient steps on the slopes of every row
    low: list[Tensor] = field(default_factory=list)  # of what each activation reads, flat
    high: list[Tensor] = field(default_factory=list)
    most: list[Tensor] = field(default_factory=list)  # largest magnitude of every source, the image first
    ends: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # range of every source
    anchors: dict[int, Anchor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        low, high = self.domain.ranges()
        self.ends.append((low, high))
        self.most.append(torch.maximum(low.abs(), high.abs()))
        for bend in self.network.bends:
            self._bound(bend)

    # ---- layers

    def _bound(self, bend: Bend) -> None:
        low, high = self._intervals(bend.before)
        gains: list[tuple[Tensor, Tensor, Tensor]] = []
        relu = bend.windows is None
        for part in self._open(bend, low, high).split(self._chunk()):
            for sign in (1.0, -1.0):
                rows = torch.zeros((part.shape[0], low.shape[0]), dtype=torch.float64)
                rows[torch.arange(part.shape[0]), part] = sign
                found, back = self._lowest(bend.before, rows)
                if sign > 0:
                    low[part] = torch.maximum(low[part], found)
                else:
                    high[part] = torch.minimum(high[part], -found)
                    if relu and isinstance(self.domain, Transport):
                        gains.append((part, *self._gains(back)))
        crossing = (low < 0) & (high > 0)
        if gains:
            unit, centre, gain = (torch.cat(group) for group in zip(*gains, strict=True))
            keep = (crossing[unit] & (low[unit] < centre) & (centre < high[unit])).nonzero()[:, 0]
            keep = keep[: max(1, KEPT // max(1, gain.shape[1]))]
            if keep.numel():
                self.anchors[len(self.low)] = Anchor(unit[keep], centre[keep], gain[keep])
        self.low.append(low)
        self.high.append(high)
        self._add_source(bend, low, high)

    def _open(self, bend: Bend, low: Tensor, high: Tensor) -> Tensor:
        """Numbers whose bounds matter: activations that may bend, candidates of windows that are not decided."""
        if bend.windows is None:
            return ((low < 0) & (high > 0)).nonzero()[:, 0]
        inside = bend.windows >= 0
        floor = torch.where(inside, low[bend.windows.clamp(min=0)], -math.inf).amax(1, keepdim=True)
        may = inside & (high[bend.windows.clamp(min=0)] >= floor)
        may &= may.sum(1, keepdim=True) > 1
        return bend.windows[may].unique()

    def _add_source(self, bend: Bend, low: Tensor, high: Tensor) -> None:
        if bend.windows is None:
            ends = torch.where(low > 0, low, bend.leak * low), torch.where(high > 0, high, bend.leak * high)
        else:
            inside, place = bend.windows >= 0, bend.windows.clamp(min=0)
            ends = (
                torch.where(inside, low[place], -math.inf).amax(1),
                torch.where(inside, high[place], -math.inf).amax(1),
            )
        if bend.leak:
            room = 2 * UNIT * (ends[0].abs() + ends[1].abs())
            ends = ends[0] - room, ends[1] + room
        self.ends.append(ends)
        self.most.append(torch.maximum(ends[0].abs(), ends[1].abs()))

    def _intervals(self, form: Form) -> tuple[Tensor, Tensor]:
        """Bounds from the ranges of the sources."""
        centre, radius = form.const.flatten(), form.slack.flatten()
        size = centre.abs() + radius
        for source, values in form.mid.items():
            low, high = self.ends[source]
            middle, half = (low + high) / 2, (high - low) / 2
            mid, rad = values.flatten(1), form.rad[source].flatten(1)
            centre = centre + middle @ mid
            radius = radius + half @ mid.abs() + self.most[source] @ rad
            size = size + (middle.abs() + half) @ mid.abs()
        radius = radius * (1 + 1e-12) + gamma(sum(len(v) for v in form.mid.values()) + 8) * size
        return centre - radius, centre + radius

    def _chunk(self) -> int:
        widest = max([len(most) for most in self.most])
        options = self.domain.options * 4 if isinstance(self.domain, Transport) else 0
        return max(1, CHUNK // (widest + options + 1))

    # ---- rows

    def _lowest(self, form: Form, rows: Tensor, prices: bool = False) -> tuple[Tensor, Rows]:
        """Lower bounds of rows over a form; and the rows behind the better of both kinds for gains."""
        plain = self._back(form, rows)
        best, kept = self._value(plain), plain
        if self.steps and self.ends[1:]:
            best = torch.maximum(best, self._value(self._back(form, rows, parallel=True)))
        if self.anchors:
            kept = self._back(form, rows, anchored=True)
            best = torch.maximum(best, self._value(kept))
        if self.steps and self.ends[1:]:
            best = torch.maximum(best, self._climb(form, rows))
        if prices and isinstance(self.domain, Transport):
            for way in (plain, kept) if kept is not plain else (plain,):
                for k in (best <= 0).nonzero()[:, 0].tolist():
                    charges = None if way.charges is None else way.charges[k : k + 1]
                    found = self.domain.box_prices(-way.at_image[k], charges)
                    if found is not None:
                        top = self.domain.highest(-way.at_image[k : k + 1], charges, found[None])
                        best[k] = torch.maximum(best[k], (way.const[k] - top[0]) - 4 * UNIT * way.const[k].abs())
        return best, kept

    def _climb(self, form: Form, rows: Tensor) -> Tensor:
        """The best bound that gradient steps on the lower slopes find: any slopes are right."""
        slopes: dict[int, Tensor] = {}
        best = torch.full((rows.shape[0],), -math.inf, dtype=torch.float64)
        optimiser: torch.optim.Adam | None = None
        for _ in range(self.steps):
            for index, slope in slopes.items():
                slope.data.clamp_(self.network.bends[index].leak, 1.0)
            with torch.enable_grad():
                value = self._value(self._back(form, rows, anchored=bool(self.anchors), slopes=slopes))
            best = torch.maximum(best, value.detach())
            if not slopes:
                break
            if optimiser is None:
                optimiser = torch.optim.Adam(slopes.values(), lr=0.2, betas=(0.9, 0.9))
            optimiser.zero_grad()
            value.sum().neg().backward()
            optimiser.step()
            optimiser.param_groups[0]["lr"] *= 0.95
        return best

    def _value(self, rows: Rows) -> Tensor:
        top = self.domain.highest(-rows.at_image, rows.charges)
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
        form: Form,
        rows: Tensor,
        anchored: bool = False,
        parallel: bool = False,
        slopes: dict[int, Tensor] | None = None,
    ) -> Rows:
        """Rows over a form as rows over the image.

        Lower slopes are those of CROWN, ``parallel`` ones, or those given, which are filled in where they are missing.
        """
        const = torch.zeros(rows.shape[0], dtype=torch.float64)
        pending: dict[int, Tensor] = {}
        charges: Tensor | None = None
        const = self._through(form, rows, const, pending)
        for source in range(len(self.ends) - 1, 0, -1):
            row = pending.pop(source, None)
            if row is None:
                continue
            bend, index = self.network.bends[source - 1], source - 1
            if bend.windows is not None:
                row, const = self._pool(bend, index, row, const)
            else:
                under = self._lower_slopes(bend, index, row, anchored, parallel, slopes)
                row, const, charge = self._activation(bend, index, row, const, under, anchored)
                if charge is not None:
                    charges = charge if charges is None else (charges + charge) * (1 + 4 * UNIT)
            const = self._through(bend.before, row, const, pending)
        image = pending.get(0)
        if image is None:
            image = torch.zeros((rows.shape[0], len(self.most[0])), dtype=torch.float64)
        return Rows(const, image, charges)

    def _through(self, form: Form, rows: Tensor, const: Tensor, pending: dict[int, Tensor]) -> Tensor:
        """Rows over a form become rows over its sources; errors are taken off the constant."""
        size = rows.abs()
        base, slack = form.const.flatten(), form.slack.flatten()
        many = rows.shape[1]
        error = size @ (slack * (1 + 1e-9) + gamma(many) * base.abs())
        const = const + rows @ base
        for source, values in form.mid.items():
            mid, rad = values.flatten(1).T, form.rad[source].flatten(1).T  # (numbers of the form, of the source)
            part = rows @ mid
            weight = self.most[source]
            error = error + (size @ (rad + gamma(many) * mid.abs())) @ weight
            if source in pending:
                part = pending[source] + part
                error = error + 2 * UNIT * (part.abs() @ weight)
            pending[source] = part
        return const - error * (1 + 1e-9) - 4 * UNIT * const.abs()

    def _chord(self, bend: Bend, index: int) -> tuple[Tensor, Tensor]:
        """Which units may bend, and the slope of the chord; of the others, their only slope."""
        low, high, leak = self.low[index], self.high[index], bend.leak
        crossing = (low < 0) & (high > 0)
        chord = ((high - leak * low) / (high - low).clamp(min=1e-300)).clamp(leak, 1.0)
        return crossing, torch.where(crossing, chord, torch.where(low >= 0, 1.0, leak).to(chord))

    def _lower_slopes(
        self, bend: Bend, index: int, row: Tensor, anchored: bool, parallel: bool, slopes: dict[int, Tensor] | None
    ) -> Tensor:
        crossing, chord = self._chord(bend, index)
        if parallel:
            return chord
        if slopes is not None and index in slopes:
            return torch.where(crossing, slopes[index], chord)
        low, high, leak = self.low[index], self.high[index], bend.leak
        under = torch.where(crossing, torch.where(high > -low, 1.0, leak).to(chord), chord)
        anchor = self.anchors.get(index) if anchored else None
        if anchor is not None:
            under[anchor.unit] = torch.where(anchor.centre > 0, 1.0, leak).to(chord)
        if slopes is not None and bool(crossing.any()):
            slopes[index] = under.expand(row.shape).clone().requires_grad_(True)
            return torch.where(crossing, slopes[index], chord)
        return under

    def _activation(
        self, bend: Bend, index: int, row: Tensor, const: Tensor, under: Tensor, anchored: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        low, high, leak = self.low[index], self.high[index], bend.leak
        crossing, chord = self._chord(bend, index)
        bend_by = torch.zeros_like(chord)
        centre = torch.zeros_like(chord)
        anchor = self.anchors.get(index) if anchored else None
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
        largest = torch.maximum(low.abs(), high.abs())
        const = const + negative @ shift
        error = gamma(row.shape[1]) * (negative.abs() @ shift.abs()) + 4 * UNIT * (out.abs() @ largest)
        const = const - error * (1 + 1e-9) - 4 * UNIT * const.abs()
        if anchor is None:
            return out, const, None
        weight = -negative[:, anchor.unit] * bend_by[anchor.unit]
        return out, const, (weight @ anchor.gain) * (1 + gamma(anchor.unit.shape[0]))

    def _pool(self, bend: Bend, index: int, row: Tensor, const: Tensor) -> tuple[Tensor, Tensor]:
        assert bend.windows is not None
        low, high, place = self.low[index], self.high[index], bend.windows.clamp(min=0)
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
        out = torch.zeros((row.shape[0], low.shape[0]), dtype=torch.float64)
        out.index_add_(1, chosen, kept)
        ceiling = most.amax(1)
        left = row - kept
        const = const + left @ ceiling
        largest = torch.maximum(low.abs(), high.abs())
        error = gamma(row.shape[1]) * (left.abs() @ ceiling.abs() + out.abs() @ largest)
        return out, const - error * (1 + 1e-9) - 4 * UNIT * const.abs()

    # ---- the answer

    def margin(self, label: int) -> float:
        """A lower bound of ``logit[label] - best other logit``."""
        logits = self.network.logits
        assert logits is not None
        classes = math.prod(logits.shape)
        others = [k for k in range(classes) if k != label]
        rows = torch.zeros((len(others), classes), dtype=torch.float64)
        rows[:, label] = 1.0
        rows[torch.arange(len(others)), torch.tensor(others)] = -1.0
        found = [self._lowest(logits, part, prices=True)[0] for part in rows.split(self._chunk())]
        return float(torch.cat(found).min())
