"""Proofs by cases: the ball is cut by the signs of activations, and the margin bounded in every part.

A certificate of ``method="complete"`` leaves behind the parts its tree ended in. They are cut here again, one
activation after another, both signs each time, so what is looked at covers the ball whatever the certificate says; its
parts only tell where to cut, and its slopes and prices where to start. A part that is not proved is cut further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wball.certificates.checking.bounds import Checker, Parameters
from wball.certificates.checking.network import Bend
from wball.certificates.complete import Leaf

Cut = tuple[int, int]  # a node of the network that is an activation, and a number that it reads
Signs = dict[Cut, int]

STEPS, CUTS = 20, 16
"""Gradient steps in every part; cuts of one class besides those of the certificate, and for each of its parts."""

SMALL = 1000
"""Numbers that activations read up to which a part gets bounds of its own."""


@dataclass
class Cases:
    """The parts of one image's ball in which the margin to one class is bounded."""

    whole: Checker
    label: int
    other: int
    left: int = CUTS

    def margin(self, leaves: Sequence[Leaf]) -> float:
        """The least bound of all parts, or the first that is not above 0."""
        bends = self.whole.network.bends
        known = [leaf for leaf in leaves if leaf.other == self.other and all(s[0] < len(bends) for s in leaf.splits)]
        self.left = CUTS * (1 + len(known))
        return self._part({}, [({(bends[a], u): s for a, u, s in leaf.splits}, leaf) for leaf in known])

    def _part(self, signs: Signs, leaves: list[tuple[Signs, Leaf]]) -> float:
        """The bound of a part; ``leaves`` are those of the certificate inside it."""
        cut = _common(signs, leaves)
        if cut is None:
            start = next((leaf for held, leaf in leaves if held.keys() <= signs.keys()), None)
            case, found = self._bounded(signs, start)
            if found > 0:
                return found
            cut = self._widest(case, signs)
            if cut is None or self.left <= 0:
                return found
            self.left -= 1
        least = math.inf
        for sign in (1, -1):
            inside = [leaf for leaf in leaves if leaf[0].get(cut, sign) == sign]
            least = min(least, self._part({**signs, cut: sign}, inside))
            if not least > 0:
                break
        return least

    def _bounded(self, signs: Signs, start: Leaf | None) -> tuple[Checker, float]:
        """The bounds of a part, and of the margin in it: first by those of the ball, then by its own."""
        fixed: dict[int, Tensor] = {}
        for (node, unit), sign in signs.items():
            numbers = len(self.whole.low[self._reads(node)])
            fixed.setdefault(node, torch.zeros(numbers, dtype=torch.float64))[unit] = sign
        network, domain = self.whole.network, self.whole.domain
        case = Checker(network, domain, STEPS, fixed, self.whole)
        found = float(case.margins(self.label, [self.other], self._start(start)))
        if not found > 0 and signs and sum(len(self.whole.low[self._reads(k)]) for k in network.bends) <= SMALL:
            case = Checker(network, domain, STEPS, fixed, Checker(network, domain, 0, fixed))
            found = max(found, float(case.margins(self.label, [self.other], self._start(start))))
        return case, found

    def _start(self, leaf: Leaf | None) -> Parameters:
        """Slopes and prices of a certificate, as the first guess."""
        given: Parameters = {}
        if leaf is None:
            return given
        bends = self.whole.network.bends
        for number, slopes in leaf.slopes.items():
            if number < len(bends) and slopes.numel() == len(self.whole.low[self._reads(bends[number])]):
                given["slope", bends[number]] = slopes[None].to("cpu", torch.float64).clone().requires_grad_(True)
        for (number, unit, _), price in zip(leaf.splits, leaf.prices, strict=True):
            key = "price", bends[number]
            if key not in given:
                given[key] = torch.zeros((1, len(self.whole.low[self._reads(bends[number])])), dtype=torch.float64)
            given[key][0, unit] = max(0.0, price)
        return {key: value.detach().requires_grad_(True) for key, value in given.items()}

    def _reads(self, node: int) -> int:
        bend = self.whole.network.nodes[node]
        assert isinstance(bend, Bend)
        return bend.before

    def _widest(self, case: Checker, signs: Signs) -> Cut | None:
        """The activation whose chord is highest above it, weighted, of those whose sign is open."""
        best, found = 0.0, None
        for node, weight in case.weights(self.label, self.other).items():
            bend = case.network.nodes[node]
            assert isinstance(bend, Bend)
            if not bend.straight:
                continue
            low, high = case.low[bend.before], case.high[bend.before]
            height = torch.where((low < 0) & (high > 0), -low * high / (high - low).clamp(min=1e-300), 0.0)
            height = height * (1 - bend.leak) * weight
            for unit in height.argsort(descending=True).tolist():
                if (node, unit) not in signs:
                    if float(height[unit]) > best:
                        best, found = float(height[unit]), (node, unit)
                    break
        return found


def _common(signs: Signs, leaves: list[tuple[Signs, Leaf]]) -> Cut | None:
    """An activation that all of these leaves have a sign of, both occurring; ``None`` if there is none."""
    if len(leaves) < 2:
        return None
    shared = set(leaves[0][0]).intersection(*(held for held, _ in leaves[1:])) - signs.keys()
    for cut in sorted(shared):
        if len({held[cut] for held, _ in leaves}) == 2:
            return cut
    return None
