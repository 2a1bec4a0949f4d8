r"""Linear functions over the ball without its box, in plain PyTorch: ring maxima and the kink of a scalar function.

.. math::
    \max_{z \in B} \langle a, z \rangle = \min_{\psi \ge 0} h(\psi), \qquad
    h(\psi) = \psi E + \sum_i x_i \max_d \big( M_d(i) - \psi d \big),

with ``M_d(i)`` the largest ``a`` over the moves of cost ``d`` out of pixel ``i``. Every ``psi >= 0`` is a sound upper
bound, so the search may stop anywhere. ``h`` is convex and piecewise linear with slope ``E - cost(psi)``: where the
tangents at both ends of a bracket meet is the minimum or a new end, and every third step halves, against creeping
brackets. The maximiser sends mass by the best moves at both ends of the last bracket, mixed so that it costs ``E``.

Certificates ask for many rows ``a`` of few images: ``image`` says whose. ``far`` adds, for full plans, any move that is
not listed, at that cost and to the best pixel of the channel: this only enlarges the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wball.kernels.entropic_plan.reference import per_image
from wball.moves import Moves

FLAT = 1e-7
"""Tangents have met when the function is this close to them, relative to its size."""


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Serves any images and stencil costs."""
    return None


@dataclass(frozen=True)
class LinearMaximum:
    """The maximum of each row.

    Attributes:
        psi: the minimising price, ``(N,)``, in the rows' dtype.
        upper: ``h(psi)``, float64: the maximum, up to the search and rounding.
        cost: what the cheapest best moves at ``psi`` cost, float64.
        z: the maximiser, like the rows; ``None`` if not asked for.
        n_iter: evaluations per row.
    """

    psi: Tensor
    upper: Tensor
    cost: Tensor
    z: Tensor | None
    n_iter: Tensor
    kernel: str = ""


def linear_maximum(
    a: Tensor,
    x: Tensor,
    budget: Tensor,
    moves: Moves,
    *,
    image: Tensor | None = None,
    far: float | None = None,
    point: bool = False,
    max_iter: int = 60,
) -> LinearMaximum:
    """``max <a, z>`` over the points that mass from ``x`` can reach at a cost of ``budget``.

    Args:
        a: rows, ``(N, C, H, W)``, float32 or float64.
        x: images, ``(B, C, H, W)``, like the rows.
        budget: cost that may be spent per image, ``(B,)``.
        moves: ``(dr, dc, cost)``, cheapest first, the first being ``(0, 0, 0)``.
        image: position in ``x`` of each row's image, ``(N,)``; by default row ``n`` belongs to image ``n``.
        far: cost of every move that is not listed; ``None`` forbids them.
        point: whether to return the maximiser (not with ``far``, whose moves name no target).
        max_iter: at most so many evaluations per row.
    """
    if point and far is not None:
        raise ValueError("point=True needs far=None: a far move is a bound, it has no target")
    if image is None:
        if len(a) != len(x):
            raise ValueError(f"a has {len(a)} rows for {len(x)} images; say with image= whose they are")
        image = torch.arange(len(a), device=a.device)
    mass, limit = x[image], budget.to(torch.float64)[image].clamp(min=0.0)
    search = _Search(a, mass, limit, moves.like(a), far)
    low, high, n_iter = search.run(max_iter)
    psi = torch.where(low.value <= high.value, low.psi, high.psi)
    upper = torch.minimum(low.value, high.value)
    cost = torch.where(low.value <= high.value, low.cost, high.cost)
    z = None
    if point:
        spread = low.cost - high.cost
        blend = torch.where(spread > 0, (limit - high.cost) / spread.clamp(min=1e-300), torch.zeros_like(spread)).clamp(
            0, 1
        )
        z = search.columns(high.psi, 1 - blend) + search.columns(low.psi, blend)
    return LinearMaximum(psi, upper, cost, z, n_iter)


@dataclass(frozen=True)
class _End:
    """A price, the function there, and what the cheapest best moves cost."""

    psi: Tensor
    value: Tensor
    cost: Tensor

    def where(self, mask: Tensor, other: _End) -> _End:
        return _End(
            torch.where(mask, self.psi, other.psi),
            torch.where(mask, self.value, other.value),
            torch.where(mask, self.cost, other.cost),
        )


class _Search:
    def __init__(self, a: Tensor, x: Tensor, budget: Tensor, moves: Moves, far: float | None) -> None:
        self.a, self.x, self.budget, self.moves = a, x, budget, moves
        ends = moves.ends(a, -math.inf)
        self.rings = []
        for ring in moves.rings:
            best = ends(ring[0])
            for k in ring[1:]:
                best = torch.maximum(best, ends(k))
            self.rings.append(best)
        self.prices = [float(price) for price in moves.ring_cost.flatten()]
        if far is not None:
            self.rings.append(a.flatten(2).amax(2)[..., None, None].expand_as(a))
            self.prices.append(far)

    def at(self, psi: Tensor) -> _End:
        best, toll = self.rings[0], torch.zeros_like(self.a)
        for ring, price in zip(self.rings[1:], self.prices[1:], strict=True):
            score = ring - per_image(psi) * price
            toll = torch.where(score > best, torch.full_like(toll, price), toll)
            best = torch.maximum(best, score)
        value = (self.x.double() * best).sum((1, 2, 3)) + psi.double() * self.budget
        return _End(psi, value, (self.x.double() * toll).sum((1, 2, 3)))

    def run(self, max_iter: int) -> tuple[_End, _End, Tensor]:
        low = self.at(torch.zeros_like(self.a[:, 0, 0, 0]))
        free = low.cost <= self.budget
        # Above the steepest gain per unit of cost nobody moves.
        steepest = torch.zeros_like(low.psi)
        for ring, price in zip(self.rings, self.prices, strict=True):
            if price > 0:
                gain = torch.where(self.x > 0, ring - self.a, torch.zeros_like(ring)) / price
                steepest = torch.maximum(steepest, gain.flatten(1).amax(1))
        high = low.where(free, self.at(steepest * (1 + 1e-6) + 1e-30))
        settled, n_iter = free, torch.full_like(low.psi, 2, dtype=torch.long)
        for step in range(max_iter - 2):
            if bool(settled.all()):
                break
            left, right = self.budget - low.cost, self.budget - high.cost
            reach = (low.value - high.value + right * (high.psi.double() - low.psi.double())) / (right - left).clamp(
                min=1e-300
            )
            meet = (low.psi.double() + reach).to(low.psi.dtype)
            middle = 0.5 * (low.psi + high.psi)
            trial = meet if step % 3 < 2 else middle
            trial = torch.where((trial > low.psi) & (trial < high.psi), trial, middle)
            new = self.at(trial)
            tangent = torch.maximum(
                low.value + left * (trial - low.psi).double(), high.value - right * (high.psi - trial).double()
            )
            flat = (new.value - tangent <= FLAT * (new.value.abs() + low.value.abs())) & (step % 3 < 2)
            goes_high = new.cost <= self.budget
            high = new.where(goes_high & ~settled, high)
            low = new.where(~goes_high & ~settled, low)
            n_iter += ~settled
            settled = settled | flat | (high.psi - low.psi <= 4 * torch.finfo(trial.dtype).eps * high.psi)
        return low, high, n_iter

    def columns(self, psi: Tensor, share: Tensor) -> Tensor:
        """Where the cheapest best moves at ``psi`` take the mass, times ``share``."""
        ends = self.moves.ends(self.a, -math.inf)
        best, choice = self.a, torch.zeros_like(self.a, dtype=torch.long)
        for k, cost in enumerate(self.moves.costs):
            score = ends(k) - per_image(psi) * cost
            choice = torch.where(score > best, torch.full_like(choice, k), choice)
            best = torch.maximum(best, score)
        total = self.moves.arrivals(self.a)
        sending = self.x * per_image(share.to(self.x.dtype))
        for k in range(len(self.moves)):
            total.add(k, torch.where(choice == k, sending, torch.zeros_like(sending)))
        return total.total()
