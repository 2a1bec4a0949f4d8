"""The bound of one image's margin, part by part where the certificate has parts.

Every cut is made here, both sides of it, so the parts cover the ball whatever the certificate says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING

import torch

from wball.certificates.checking.bounds import Empty, Enclosures, Parameters
from wball.certificates.checking.network import Kink, Network
from wball.certificates.checking.plans import Supported, Transport

if TYPE_CHECKING:
    from wball.certificates.complete import Leaf

ROUNDS, PROGRESS = 12, 0.03
"""Rounds of a proof by contradiction; it ends when one lifts the bound by less than this share of
it."""

POSITIVE = torch.finfo(torch.float64).tiny
"""Margin of a part that was proved by contradiction: nothing more is known."""

Part = dict[tuple[int, int], int]
"""Signs of units: by kink and place of the unit in what it reads."""


class Proof:
    """Proves the bound of one image's margin, with the ``leaves`` of its certificate. What they say
    is used only where it fits the network."""

    def __init__(self, network: Network, label: int, leaves: tuple[Leaf, ...]) -> None:
        self.network, self.label, self.leaves = network, label, leaves
        self.kinks = {
            node.name: (index, math.prod(network.shapes[index]))
            for index, node in enumerate(network.nodes)
            if isinstance(node, Kink)
        }

    def margin(self, domains: Iterable[Supported | Transport]) -> float:
        """A lower bound of the margin: the first one above 0, or the best one found."""
        best: dict[int, float] = {}
        listed = None
        for images in domains:
            if len(images.point) == listed:
                continue
            whole, listed = Enclosures(self.network, images), len(images.point)
            for other in range(len(whole.low[-1])):
                if other != self.label:
                    found = whole.margin(self.label, other, {}).value
                    best[other] = max(found, best.get(other, -math.inf))
            if min(best.values()) > 0:
                break
        for other, value in best.items():
            leaves = [self._read(leaf) for leaf in self.leaves if leaf.other == other]
            if not value > 0 and leaves:
                best[other] = max(value, self._part({}, whole, other, leaves))
            if not best[other] > 0:
                break
        return min(best.values())

    def _part(
        self, part: Part, outer: Enclosures, other: int, leaves: list[tuple[Part, Parameters]]
    ) -> float:
        """The bound of one part inside an ``outer`` one; ``leaves`` are those of the certificate in
        it."""
        cuts = [signs.keys() - part.keys() for signs, _ in leaves]
        shared = set.intersection(*cuts) if len(leaves) > 1 else None
        if not shared:
            return self._bounded(part, outer, other, leaves[0][1] if leaves else {})
        cut, least = min(shared), math.inf
        for sign in (1, -1):
            inside = [leaf for leaf in leaves if leaf[0][cut] == sign]
            least = min(least, self._part({**part, cut: sign}, outer, other, inside))
            if not least > 0:
                break
        return least

    def _bounded(self, part: Part, outer: Enclosures, other: int, given: Parameters) -> float:
        """Bound one part, and then bound it again assuming that the margin is at most 0."""
        case, against = copy(outer), None
        case.low, case.high = ([v.clone() for v in ends] for ends in (outer.low, outer.high))
        for (kink, unit), sign in part.items():
            node = self.network.nodes[kink]
            assert node is not None
            ends = (case.low if sign > 0 else case.high)[node.before[0]]
            ends[unit] = sign * (sign * ends[unit]).clamp(min=0)
        try:
            for _ in range(ROUNDS):
                case = Enclosures(self.network, outer.images, case, against)
                found = case.margin(self.label, other, given)
                if found.value > 0:
                    return found.value if against is None else POSITIVE
                if against is not None and found.value < (1 - PROGRESS) * against.value:
                    break
                against = found
        except Empty:
            return math.inf if against is None else POSITIVE
        return found.value

    def _read(self, leaf: Leaf) -> tuple[Part, Parameters]:
        """The signs of a leaf and its relaxation parameters."""
        signs, given = Part(), Parameters()
        for kind, values in (("slope", leaf.slopes), ("share", leaf.shares)):
            for name, tensor in values.items():
                kink, size = self.kinks.get(name, (0, -1))
                if tensor.numel() == size:
                    given[kind, kink] = tensor.to("cpu", torch.float64).flatten()
        if leaf.box is not None and leaf.box.numel() == math.prod(self.network.shapes[0]):
            given["box", 0] = leaf.box.to("cpu", torch.float64).reshape(1, -1)
        for (name, unit, sign), price in zip(leaf.splits, leaf.prices, strict=True):
            kink, size = self.kinks.get(name, (0, -1))
            if 0 <= unit < size:
                signs[kink, unit] = sign
                zero = torch.zeros(size, dtype=torch.float64)
                given.setdefault(("price", kink), zero)[unit] = sign * max(0.0, price)
        return signs, given
