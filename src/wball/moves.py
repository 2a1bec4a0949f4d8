"""Moves: which ways a unit of mass may go on a grid, and what each costs, laid out as one tensor.

Solvers see a ground cost (:mod:`wball.cost`) as :class:`Moves`: the list of moves ``i -> j`` it allows on a given grid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


class Moves(ABC):
    """The moves a cost allows on an ``H x W`` grid.

    An *arc tensor* has shape ``(B, C, K, H, W)``: entry ``[..., k, r, c]`` belongs to the ``k``-th move out of pixel
    ``(r, c)``. ``cost`` broadcasts against it. Moves that would leave the image exist in the layout but carry no mass.
    """

    cost: Tensor  # (K, 1, 1) for stencils, (K, H, W) for matrices
    allowed: Tensor  # (K, H, W), bool: the move ends inside the image and has finite cost

    @abstractmethod
    def gather(self, values: Tensor) -> Tensor:
        """``(B, C, H, W) -> (B, C, K, H, W)``: the value at the pixel where each move ends (0 outside the image)."""

    @abstractmethod
    def scatter(self, arcs: Tensor) -> Tensor:
        """``(B, C, K, H, W) -> (B, C, H, W)``: sum of what arrives at each pixel, the adjoint of :meth:`gather`."""

    @abstractmethod
    def scatter_max(self, arcs: Tensor) -> Tensor:
        """``(B, C, K, H, W) -> (B, C, H, W)``: the largest of what arrives at each pixel by allowed moves."""

    @abstractmethod
    def opposite(self, arcs: Tensor) -> Tensor:
        """The arc tensor whose entry at ``i -> j`` is the given entry at ``j -> i`` (0 where no such move exists)."""

    @abstractmethod
    def stay(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that go nowhere."""

    def free(self) -> Tensor:
        """``(K, H, W)``, bool: the moves that cost nothing. Most costs have none but those that stay."""
        return self.allowed & (self.cost == 0)


class StencilMoves(Moves):
    """The moves of a stencil cost: the same list of offsets at every pixel."""

    def __init__(self, moves: Sequence[tuple[int, int, float]], shape: tuple[int, int], like: Tensor) -> None:
        self.offsets, self.shape = [(r, c) for r, c, _ in moves], shape
        self.radius = (max(abs(r) for r, _ in self.offsets), max(abs(c) for _, c in self.offsets))
        self.cost = torch.tensor([cost for *_, cost in moves], dtype=like.dtype, device=like.device).view(-1, 1, 1)
        ones = torch.ones((1, 1, *shape), dtype=torch.float32, device=like.device)
        self.allowed = self.gather(ones)[0, 0] > 0
        index = {offset: k for k, offset in enumerate(self.offsets)}
        self._reverse = [index.get((-r, -c)) for r, c in self.offsets]

    def _slice(self, padded: Tensor, offset: tuple[int, int]) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        return padded[..., rr + offset[0] : rr + offset[0] + height, rc + offset[1] : rc + offset[1] + width]

    def gather(self, values: Tensor) -> Tensor:
        padded = F.pad(values, (self.radius[1],) * 2 + (self.radius[0],) * 2)
        return torch.stack([self._slice(padded, offset) for offset in self.offsets], dim=2)

    def scatter(self, arcs: Tensor) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        total = arcs.new_zeros((*arcs.shape[:2], height + 2 * rr, width + 2 * rc))
        for k, offset in enumerate(self.offsets):
            self._slice(total, offset).add_(arcs[:, :, k])
        return total[..., rr : rr + height, rc : rc + width]

    def scatter_max(self, arcs: Tensor) -> Tensor:
        (rr, rc), (height, width) = self.radius, self.shape
        top = arcs.new_full((*arcs.shape[:2], height + 2 * rr, width + 2 * rc), -math.inf)
        for k, offset in enumerate(self.offsets):
            part = self._slice(top, offset)
            torch.maximum(part, arcs[:, :, k], out=part)
        return top[..., rr : rr + height, rc : rc + width]

    def opposite(self, arcs: Tensor) -> Tensor:
        out = torch.zeros_like(arcs)
        for k, (offset, reverse) in enumerate(zip(self.offsets, self._reverse, strict=True)):
            if reverse is not None:
                padded = F.pad(arcs[:, :, reverse], (self.radius[1],) * 2 + (self.radius[0],) * 2)
                out[:, :, k] = self._slice(padded, offset)
        return out

    def stay(self) -> Tensor:
        centre = torch.zeros_like(self.allowed)
        centre[self.offsets.index((0, 0))] = True
        return centre


class DenseMoves(Moves):
    """The moves of a matrix cost: from every pixel to every pixel. ``K = H * W`` counts the targets."""

    def __init__(self, matrix: Tensor, shape: tuple[int, int], like: Tensor) -> None:
        self.shape = shape
        matrix = matrix.to(device=like.device)
        finite = torch.isfinite(matrix)
        by_target = torch.where(finite, matrix, torch.zeros_like(matrix)).T.reshape(-1, *shape)
        self.cost = by_target.to(like.dtype)
        self.allowed = finite.T.reshape(-1, *shape)

    def gather(self, values: Tensor) -> Tensor:
        ends = values.flatten(2)[..., None, None].expand(-1, -1, -1, *self.shape)
        return torch.where(self.allowed, ends, torch.zeros_like(ends))

    def scatter(self, arcs: Tensor) -> Tensor:
        kept = torch.where(self.allowed, arcs, torch.zeros_like(arcs))
        return kept.sum((-2, -1)).reshape(*arcs.shape[:2], *self.shape)

    def scatter_max(self, arcs: Tensor) -> Tensor:
        kept = torch.where(self.allowed, arcs, torch.full_like(arcs, -math.inf))
        return kept.amax((-2, -1)).reshape(*arcs.shape[:2], *self.shape)

    def opposite(self, arcs: Tensor) -> Tensor:
        square = arcs.flatten(3)
        return torch.where(self.allowed, square.transpose(2, 3).reshape(arcs.shape), torch.zeros_like(arcs))

    def stay(self) -> Tensor:
        n = self.allowed.shape[0]
        return torch.eye(n, dtype=torch.bool, device=self.allowed.device).reshape(n, *self.shape)
