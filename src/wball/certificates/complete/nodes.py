"""Nodes of branch and bound, and the leaves that a finished tree leaves behind.

The leaves of one class cover the ball: the first split's unit is in all of them, positive in one
half and negative in the other, and so on in each half. Any slopes in range and any prices of at
least 0 give a sound bound, so a checker may start from these numbers without trusting them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

State = dict[tuple[str, int], Tensor]
"""By kind and operation, one row a node: ``alpha`` (lower slopes), ``share`` (of the anchored upper
bound), ``beta`` (multipliers of the splits) and ``sign`` (1 and -1 where a unit's sign is known,
else 0); ``("box", 0)`` prices the box. Any values in range are sound."""

MOST = 1024
"""Parts kept for one class of one image: larger trees leave nothing behind."""


@dataclass
class Nodes:
    """``N`` nodes: the problem of each, a sound lower bound of its margin (float64), and its
    state."""

    problem: Tensor
    bound: Tensor
    state: State

    def __len__(self) -> int:
        return self.problem.shape[0]

    def take(self, index: Tensor) -> Nodes:
        return Nodes(
            self.problem[index],
            self.bound[index],
            {key: value[index] for key, value in self.state.items()},
        )

    def plus(self, other: Nodes) -> Nodes:
        if not len(self) or not len(other):
            return other if len(other) else self
        state = {key: torch.cat([value, other.state[key]]) for key, value in self.state.items()}
        return Nodes(
            torch.cat([self.problem, other.problem]), torch.cat([self.bound, other.bound]), state
        )

    def unproved(self) -> Nodes:
        """Those whose bound is not above 0."""
        return self.take((self.bound <= 0).nonzero()[:, 0])

    def split(self, position: Tensor, unit: Tensor) -> Nodes:
        """Both children of every node: unit ``unit[n]`` of operation ``position[n]`` is
        positive, or negative.
        """
        count = len(self)
        both = self.take(torch.arange(count, device=unit.device).repeat(2))
        for key, value in both.state.items():
            if key[0] != "sign":
                continue
            mine = (position == key[1]).nonzero()[:, 0]
            flat = value.flatten(1)
            flat[mine, unit[mine]] = 1
            flat[count + mine, unit[mine]] = -1
        return both


@dataclass(frozen=True)
class Leaf:
    """A part of the ball in which units have the given signs and the margin to class ``other`` was
    proved positive.

    Attributes:
        other: the class.
        splits: ``(activation, unit, sign)``: the activation by the name of its node in the program,
            the unit by its flat position in it, the sign of what it reads.
        prices: of the splits, in their order.
        slopes: lower slopes of every unit, by activation.
        shares: shares of the anchored upper bound, likewise.
        box: prices of the box, if the input set has one.
    """

    other: int
    splits: tuple[tuple[str, int, int], ...]
    prices: tuple[float, ...]
    slopes: dict[str, Tensor]
    shares: dict[str, Tensor]
    box: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        held = {f"slopes.{k}": value for k, value in self.slopes.items()}
        held |= {f"shares.{k}": value for k, value in self.shares.items()}
        return held if self.box is None else {**held, "box.0": self.box}

    @staticmethod
    def read(plain: list[Any], tensors: dict[str, Tensor]) -> Leaf:
        """Build the leaf from these tensors and a list of class, splits and prices."""
        held: dict[str, dict[str, Tensor]] = {"slopes": {}, "shares": {}, "box": {}}
        for name, value in tensors.items():
            kind, _, activation = name.partition(".")
            held[kind][activation] = value
        other, splits, prices = plain
        slopes, shares, box = held.values()
        return Leaf(other, tuple(map(tuple, splits)), tuple(prices), slopes, shares, box.get("0"))


@dataclass
class Closed:
    """The nodes closed so far, by problem of the search."""

    names: dict[int, str]  # of the graph's activations
    parts: list[Nodes] = field(default_factory=list)
    count: Counter[int] = field(default_factory=Counter)

    def add(self, nodes: Nodes, problem: Tensor) -> None:
        """Add nodes whose bound is above 0; ``problem`` is the number of each node's problem in the
        search."""
        if not len(nodes):
            return
        self.count.update(problem.tolist())
        keep = torch.tensor(
            [self.count[k] <= MOST for k in problem.tolist()], device=problem.device
        ).nonzero()[:, 0]
        if keep.numel():
            some = Nodes(problem, nodes.bound, nodes.state).take(keep)
            self.parts.append(
                Nodes(
                    some.problem.cpu(),
                    some.bound.cpu(),
                    {key: value.cpu() for key, value in some.state.items()},
                )
            )

    def forget(self, problem: Tensor) -> None:
        """Delete the nodes of these problems."""
        gone = problem.cpu()
        if not any(self.count.pop(k, 0) for k in gone.tolist()):
            return
        kept = [
            nodes.take((~torch.isin(nodes.problem, gone)).nonzero()[:, 0]) for nodes in self.parts
        ]
        self.parts = [nodes for nodes in kept if len(nodes)]

    def leaves(self, problem: int, other: int) -> tuple[Leaf, ...] | None:
        """The leaves of one problem; ``None`` if there were too many to keep."""
        if self.count[problem] > MOST:
            return None
        found: list[Leaf] = []
        for nodes in self.parts:
            found += [
                leaf_of(nodes, n, other, self.names)
                for n in (nodes.problem == problem).nonzero()[:, 0].tolist()
            ]
        return tuple(found)


def leaf_of(nodes: Nodes, n: int, other: int, names: dict[int, str]) -> Leaf:
    """One node as a leaf; ``names`` are those of the graph's activations."""
    splits: list[tuple[str, int, int]] = []
    prices: list[float] = []
    slopes: dict[str, Tensor] = {}
    shares: dict[str, Tensor] = {}
    for position, name in names.items():
        sign, beta, alpha, share = (
            nodes.state[kind, position][n].flatten() for kind in ("sign", "beta", "alpha", "share")
        )
        unit = sign.nonzero()[:, 0]
        splits += [
            (name, u, s) for u, s in zip(unit.tolist(), sign[unit].int().tolist(), strict=True)
        ]
        prices += beta[unit].tolist()
        slopes[name], shares[name] = alpha.clone().cpu(), share.clone().cpu()
    box = nodes.state["box", 0][n].flatten().clone().cpu() if ("box", 0) in nodes.state else None
    return Leaf(other, tuple(splits), tuple(prices), slopes, shares, box)
