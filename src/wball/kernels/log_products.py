"""Products of ``K = exp(-psi C)`` with vectors that are given, and wanted, as logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wball.cost import DenseMoves, Moves, StencilMoves
from wball.inputs import per_image

SPREAD = 600.0
"""Logarithms that differ by at most this are summed as numbers, relative to the largest."""


class LogProducts:
    """``log (C^p K exp(b))``, for a price per image. Nothing overflows, whatever ``b`` is."""

    def __init__(self, moves: Moves, price: Tensor, like: Tensor) -> None:
        self.moves, self.price = moves, per_image(price, like)
        inside, cost = moves.factors[1:3]
        kernel = inside * torch.exp(-self.price * cost)
        paid = cost * kernel
        self.weights = torch.stack((kernel, paid, cost * paid))

    def __call__(self, b: Tensor, *, back: bool = False) -> Tensor:
        """``log (K exp(b))``; ``back`` transposes ``K``."""
        return self._sums(b, [0], back)[0]

    def moments(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """The same with ``C K`` and ``C^2 K``."""
        paid, squares = self._sums(b, [1, 2], back=False)
        return paid, squares

    def _sums(self, b: Tensor, powers: Sequence[int], back: bool) -> tuple[Tensor, ...]:
        finite = b.isfinite()
        top = b.amax(self.moves.together, keepdim=True).clamp(min=-1e300)
        if bool((top - torch.where(finite, b, top) <= SPREAD).all()):
            sums = self.moves.sums(torch.exp(b - top), self.weights[powers], back)
            return (sums.log() + top[:, :, None]).unbind(2)
        moves = _reversed(self.moves) if back else self.moves
        ends, costs = moves.ends(b, -math.inf), list(moves.cost)
        logs = torch.stack([ends(k) - self.price * cost for k, cost in enumerate(costs)])
        tables = (torch.stack(costs)[:, None, None].pow(p).log() for p in powers)
        return tuple(torch.logsumexp(logs + table, 0) for table in tables)


def _reversed(moves: Moves) -> Moves:
    """The moves from where they end to where they start."""
    if isinstance(moves, StencilMoves):
        return StencilMoves(
            [(-r, -c, -s, cost) for r, c, s, cost in moves], moves.shape, moves.cost
        )
    by_target = torch.where(moves.allowed, moves.cost, math.inf).flatten(1)  # the transpose
    return DenseMoves(by_target, moves.shape, moves.cost)
