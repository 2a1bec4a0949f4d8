"""Open nodes of branch and bound: their problem, the units whose sign is known, and the
multipliers found so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[tuple[str, int], Tensor]
"""By kind and operation, one row a node: ``alpha`` (lower slopes), ``share`` (of the anchored upper
bound), ``beta`` (multipliers of the splits) and ``sign`` (1 and -1 where a unit's sign is known,
else 0); ``("box", 0)`` prices the box. Any values in range are sound, so they are kept in half
precision between two visits."""

KEPT = {
    "alpha": torch.float16,
    "share": torch.float16,
    "beta": torch.float32,
    "sign": torch.int8,
    "box": torch.float32,
}


@dataclass
class Nodes:
    """``N`` nodes: the problem of each, a sound lower bound of the margin in it (float64),
    and its state.
    """

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

    def kept(self) -> Nodes:
        """The same nodes as they are stored."""
        return Nodes(
            self.problem,
            self.bound,
            {key: value.to(KEPT[key[0]]) for key, value in self.state.items()},
        )

    def working(self) -> Nodes:
        """The same nodes as they are computed with."""
        return Nodes(
            self.problem, self.bound, {key: value.float() for key, value in self.state.items()}
        )

    def plus(self, other: Nodes) -> Nodes:
        if not len(self) or not len(other):
            return other if len(other) else self
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
