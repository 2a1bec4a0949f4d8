"""Proofs by cases and by contradiction: the ball is cut by what activations read, and the margin bounded in every part.

A certificate of ``method="complete"`` leaves behind the parts its tree ended in. They are cut here again, one
activation after another, both sides each time, so what is looked at covers the ball whatever the certificate says; its
parts only tell where to cut, and its slopes and prices where to start. In each part images with a margin of at most 0
are assumed, and bounds tightened under that assumption until it is refuted. A part that is not proved is cut further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wball.certificates.checking.bounds import Checker, Limits, Margin, Parameters
from wball.certificates.checking.network import Bend
from wball.certificates.checking.program import Program, Solution
from wball.certificates.complete import Leaf

Cut = tuple[int, int]  # a bend of the network, and a number that it reads
Part = dict[Cut, tuple[float, float]]  # what numbers are known to lie between
Signs = dict[Cut, int]

STEPS, CUTS = 20, 64
"""Gradient steps in parts that are too large for programs; cuts of one class besides those of the certificate, and for
each of its parts."""

ROUNDS, PROGRESS = 12, 0.03
"""Rounds of a proof by contradiction; it ends when one lifts the bound by less than this share of what is missing."""

SMALL = 1000
"""Numbers that activations read up to which every part is tightened, and not the ball alone."""

POSITIVE = torch.finfo(torch.float64).tiny
"""Margin of a part that was proved by contradiction: nothing more is known."""


@dataclass
class Cases:
    """The parts of one image's ball in which the margin to one class is bounded."""

    whole: Checker
    label: int
    other: int
    slack: float = 0.0  # what the margin may be off by as the model computes it
    left: int = CUTS

    def margin(self, leaves: Sequence[Leaf]) -> float:
        """The least bound of all parts, or the first that is not above 0."""
        bends = self.whole.network.bends
        known = [
            leaf
            for leaf in leaves
            if leaf.other == self.other and all(s[0] < len(bends) for s in leaf.splits)
        ]
        self.left = CUTS * (1 + len(known))
        self.small = sum(len(self.whole.low[self._at(k).before]) for k in bends) <= SMALL
        self.row = self.whole.difference(self.label, self.other)
        return self._part(
            {},
            self.whole,
            [({(bends[a], u): s for a, u, s in leaf.splits}, leaf) for leaf in known],
        )

    def _part(self, part: Part, known: Checker, leaves: list[tuple[Signs, Leaf]]) -> float:
        """The bound of a part inside a ``known`` one; ``leaves`` are those of the certificate inside it."""
        cut = _common(part, leaves)
        if cut is None or not part:
            start = next((leaf for held, leaf in leaves if held.keys() <= part.keys()), None)
            known, found, worst = self._bounded(part, known, start)
            if found > 0 or self._refuted(worst):
                return found
            cut = cut or self._widest(known, part, worst)
            if cut is None or self.left <= 0:
                return found
            self.left -= 1
        (node, unit), where = cut
        low, high = part.get((node, unit), (-math.inf, math.inf))
        least = math.inf
        for sign, limits in ((1, (where, high)), (-1, (low, where))):
            inside = [leaf for leaf in leaves if leaf[0].get((node, unit), sign) == sign]
            least = min(least, self._part({**part, (node, unit): limits}, known, inside))
            if not least > 0:
                break
        return least

    def _bounded(
        self, part: Part, known: Checker, start: Leaf | None
    ) -> tuple[Checker, float, Solution | None]:
        """The bounds of a part, the bound of the margin in it, and where it is attained: tightened by contradiction."""
        limits = self._limits(part)
        case = Checker(known.network, known.domain, limits, known)
        if case.empty:
            return case, math.inf, None
        best, worst = self._margin(case, start)
        for _ in range(ROUNDS if self.small or not part else 0):
            if best.value > 0:
                break
            tighter = Checker(case.network, case.domain, limits, case, best)
            if tighter.empty:
                return case, POSITIVE, None
            case, before = tighter, best
            best, worst = self._margin(case, start)
            if best.value > 0:
                return case, POSITIVE, None
            if best.value - before.value < -PROGRESS * before.value:
                break
        return case, best.value, worst

    def _margin(self, case: Checker, start: Leaf | None) -> tuple[Margin, Solution | None]:
        found, worst = self._exact_margin(case, start)
        row = replace(found.row, const=found.row.const - self.slack)
        return replace(found, value=found.value - self.slack, row=row), worst

    def _exact_margin(self, case: Checker, start: Leaf | None) -> tuple[Margin, Solution | None]:
        program = Program.of(case)
        found = None if program is None else program.solve(self.row)
        if found is not None:
            with torch.no_grad():
                return case.evaluated(self.row, found.given), found
        if program is not None and case.partial:
            nothing = torch.zeros_like(self.row)
            empty = program.solve(nothing, elastic=True)
            if empty is not None:
                with torch.no_grad():
                    proved = case.evaluated(nothing, empty.given)
                if proved.value > 0:
                    return replace(proved, value=math.inf), None
        return case.climb(self.row, STEPS, self._start(case, start)), None

    def _refuted(self, worst: Solution | None) -> bool:
        """Whether the worst image for the relaxation gets another label: then the certificate is wrong."""
        return (
            worst is not None and float(self.row[0] @ self.whole.network.logits(worst.image)) <= 0
        )

    def _limits(self, part: Part) -> Limits:
        limits: Limits = {}
        for (node, unit), ends in part.items():
            if node not in limits:
                none = torch.full_like(self.whole.low[self._at(node).before], math.inf)
                limits[node] = -none, none
            for tensor, end in zip(limits[node], ends, strict=True):
                tensor[unit] = end
        return limits

    def _start(self, case: Checker, leaf: Leaf | None) -> Parameters:
        """Slopes and prices of a certificate, as the first guess."""
        given: Parameters = {}
        if leaf is None:
            return given
        bends = case.network.bends
        for number, slopes in leaf.slopes.items():
            if number < len(bends) and slopes.numel() == len(
                case.low[self._at(bends[number]).before]
            ):
                given["slope", bends[number]] = slopes[None].to("cpu", torch.float64).clone()
        for (number, unit, sign), price in zip(leaf.splits, leaf.prices, strict=True):
            key = "price", bends[number]
            if bends[number] in case.limits:
                if key not in given:
                    given[key] = torch.zeros(
                        (1, len(case.low[self._at(bends[number]).before])), dtype=torch.float64
                    )
                given[key][0, unit] = sign * max(0.0, price)
        return {key: value.detach().requires_grad_(True) for key, value in given.items()}

    def _at(self, node: int) -> Bend:
        bend = self.whole.network.nodes[node]
        assert isinstance(bend, Bend)
        return bend

    def _widest(
        self, case: Checker, part: Part, worst: Solution | None
    ) -> tuple[Cut, float] | None:
        """The number to cut, and where: that of the bend whose relaxation is off by most, weighted, at the worst point.

        Without such a point it is the activation whose chord is highest above it.
        """
        best, found = 0.0, None
        for node, weight in case.weights(self.row).items():
            bend = self._at(node)
            low, high = case.low[bend.before], case.high[bend.before]
            if worst is None:
                if not bend.straight:
                    continue
                off = torch.where(
                    (low < 0) & (high > 0), -low * high / (high - low).clamp(min=1e-300), 0.0
                )
                off = off * (1 - bend.leak)
            else:
                read, out = worst.at[node]
                off = (out - bend.value(read)).abs()
            score, unit = (off * weight).max(0)
            if float(score) > best:
                number, where = self._place(bend, int(unit), low, high)
                if (bend.straight and (node, number) in part) or not low[number] < where < high[
                    number
                ]:
                    continue
                best, found = float(score), ((node, number), where)
        return found

    @staticmethod
    def _place(bend: Bend, unit: int, low: Tensor, high: Tensor) -> tuple[int, float]:
        """Which number of a bend to cut for one of its outputs, and where."""
        if bend.windows is not None:  # that with the highest ceiling
            taps = bend.windows[unit]
            taps = taps[taps >= 0]
            unit = int(taps[(high[taps] - low[taps]).argmax()])
        return unit, 0.0 if bend.straight else float(low[unit] + high[unit]) / 2


def _common(part: Part, leaves: list[tuple[Signs, Leaf]]) -> tuple[Cut, float] | None:
    """An activation that all of these leaves have a sign of, both occurring; ``None`` if there is none."""
    if len(leaves) < 2:
        return None
    shared = set(leaves[0][0]).intersection(*(held for held, _ in leaves[1:])) - part.keys()
    for cut in sorted(shared):
        if len({held[cut] for held, _ in leaves}) == 2:
            return cut, 0.0
    return None
