"""Nodes of branch and bound, and the leaves that a finished tree leaves behind.

The leaves of one class cover the ball: the first split's unit is in all of them, positive in one
half and negative in the other, and so on in each half. Any slopes in range and any prices of at
least 0 give a sound bound, so a checker may start from these numbers without trusting them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Nodes:
        state = {key: change(value) for key, value in self.state.items()}
        return Nodes(change(self.problem), change(self.bound), state)

    def take(self, index: Tensor) -> Nodes:
        return self.mapped(lambda value: value[index])

    def plus(self, other: Nodes) -> Nodes:
        state = {key: torch.cat([value, other.state[key]]) for key, value in self.state.items()}
        return Nodes(
            torch.cat([self.problem, other.problem]), torch.cat([self.bound, other.bound]), state
        )

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
            kind, dot, activation = name.partition(".")
            odd = kind not in held or not dot or (kind == "box" and activation != "0")
            if odd or not value.is_floating_point():
                raise ValueError(f"a leaf has an unknown tensor {name!r}")
            held[kind][activation] = value
        other, splits, prices = plain
        if len(splits) != len(prices):
            raise ValueError("a leaf has a price for each split only")
        slopes, shares, box = held.values()
        return Leaf(other, tuple(map(tuple, splits)), tuple(prices), slopes, shares, box.get("0"))


@dataclass(frozen=True)
class Closed:
    """The nodes that are proved, by problem of the search."""

    names: dict[int, str]  # of the graph's activations
    parts: list[Nodes] = field(default_factory=list)
    count: Counter[int] = field(default_factory=Counter)

    def add(self, nodes: Nodes) -> None:
        problem = nodes.problem.tolist()
        self.count.update(problem)
        few = [n for n, k in enumerate(problem) if self.count[k] <= MOST]
        if few:
            some = torch.tensor(few, device=nodes.problem.device)
            self.parts.append(nodes.take(some).mapped(Tensor.cpu))

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
