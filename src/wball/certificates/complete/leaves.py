"""What a tree leaves behind: the parts of the ball it was split into, each with what bounded it.

The parts of one class cover the ball: the first split's unit is in all of them, one half has it
positive, the other
negative, and so on in each half. Any slopes in range and any prices of at least 0 give a sound
bound, so whoever proves a part again may start from these numbers without believing them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wball.certificates.complete.nodes import Nodes

MOST = 1024
"""Parts kept for one class of one image: larger trees leave nothing behind."""


@dataclass(frozen=True)
class Leaf:
    """Images of the ball whose units have these signs: the margin to class ``other`` was proved
    positive there.

    Attributes:
        other: the class.
        splits: ``(activation, unit, sign)``: the activation by its place among the network's
            activations and pooling layers, the unit by its flat position in it, the sign of what it
            reads.
        prices: of the splits, in their order.
        slopes: lower slopes of every unit, by activation, in half precision.
        shares: shares of the anchored upper bound, likewise.
        box: prices of the box, if the input set has one.
    """

    other: int
    splits: tuple[tuple[int, int, int], ...]
    prices: tuple[float, ...]
    slopes: dict[int, Tensor]
    shares: dict[int, Tensor]
    box: Tensor | None


@dataclass
class Closed:
    """The nodes that were closed so far, by problem of the search."""

    layers: list[int]  # the graph's relaxed operations
    parts: list[Nodes] = field(default_factory=list)
    count: Counter[int] = field(default_factory=Counter)

    def add(self, nodes: Nodes, problem: Tensor) -> None:
        """Nodes whose bound is above 0; ``problem`` is the number each has in the search."""
        if not len(nodes):
            return
        self.count.update(problem.tolist())
        keep = torch.tensor(
            [self.count[k] <= MOST for k in problem.tolist()], device=problem.device
        ).nonzero()[:, 0]
        if keep.numel():
            some = Nodes(problem, nodes.bound, nodes.kept().state).take(keep)
            self.parts.append(
                Nodes(
                    some.problem.cpu(),
                    some.bound.cpu(),
                    {key: value.cpu() for key, value in some.state.items()},
                )
            )

    def forget(self, problem: Tensor) -> None:
        """Drop what was kept of these problems."""
        gone = problem.cpu()
        if not any(self.count.pop(k, 0) for k in gone.tolist()):
            return
        kept = [
            nodes.take((~torch.isin(nodes.problem, gone)).nonzero()[:, 0]) for nodes in self.parts
        ]
        self.parts = [nodes for nodes in kept if len(nodes)]

    def leaves(self, problem: int, other: int) -> tuple[Leaf, ...] | None:
        """The parts of one problem; ``None`` if there were too many to keep."""
        if self.count[problem] > MOST:
            return None
        found: list[Leaf] = []
        for nodes in self.parts:
            found += [
                _leaf(nodes, n, other, self.layers)
                for n in (nodes.problem == problem).nonzero()[:, 0].tolist()
            ]
        return tuple(found)


def _leaf(nodes: Nodes, n: int, other: int, layers: list[int]) -> Leaf:
    splits: list[tuple[int, int, int]] = []
    prices: list[float] = []
    slopes: dict[int, Tensor] = {}
    shares: dict[int, Tensor] = {}
    for number, position in enumerate(layers):
        if ("sign", position) not in nodes.state:
            continue
        sign, beta = (nodes.state[kind, position][n].flatten() for kind in ("sign", "beta"))
        unit = sign.nonzero()[:, 0]
        splits += [(number, u, s) for u, s in zip(unit.tolist(), sign[unit].tolist(), strict=True)]
        prices += beta[unit].tolist()
        slopes[number] = nodes.state["alpha", position][n].flatten().clone()
        shares[number] = nodes.state["share", position][n].flatten().clone()
    box = nodes.state["box", 0][n].flatten().clone() if ("box", 0) in nodes.state else None
    return Leaf(other, tuple(splits), tuple(prices), slopes, shares, box)
