r"""The largest value of linear functions over an input set: all that a linear relaxation asks of a threat model.

For a row ``a`` and a Wasserstein ball with budget ``E`` and box ``[lo, hi]``, every ``psi >= 0`` and every price
``r`` (one number per pixel) gives an upper bound of the maximum:

.. math::
    \max_{z \in B} \langle a, z \rangle \;\le\; \psi E + \sum_i x_i \max_j \big( a_j - r_j - \psi C_{ij} \big)
        + \sum_j \big( hi\, r_j^+ - lo\, r_j^- \big)

(weak duality: ``psi`` prices the transport budget, ``r`` the box, i.e. ``inf over a1 + a2 = a`` of
``sigma_ball(a1) + sigma_box(a2)``). So a search over ``psi`` and ``r`` may stop anywhere, and may run in float32: the
bound that counts is one evaluation of the right-hand side in float64.

Full plans on a large grid: moves shorter than a *reach* are listed, any other move costs at least the next distance
``far``, and the best it can do is ``max_j (a_j - r_j) - psi * far``. This only ever enlarges the bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.ball import Ball, LinfBall, Plans, WassersteinBall
from wball.certify.rows import Rows, inside, read_patches, units
from wball.ground import DenseCost, GridCost

NOWHERE = -1e30
"""Value of a move that leaves the image: finite, so that it vanishes when multiplied by no mass."""


@dataclass(frozen=True)
class Prices:
    """Dual variables of ``max <a, z>``: ``psi`` (N,) for the budget, ``box`` per pixel (``None``: 0)."""

    psi: Tensor
    box: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Prices:
        return Prices(self.psi.to(dtype), None if self.box is None else self.box.to(dtype))


class InputSet(ABC):
    """A set of images around each of ``B`` centres."""

    shape: tuple[int, ...]  # of one image

    @abstractmethod
    def search(self, rows: Rows, box: Tensor | None = None, steps: int = 14, reg: float = math.inf) -> Prices:
        """Good dual variables for ``max <rows, z>``, given box prices. Not differentiable."""

    @abstractmethod
    def upper(self, rows: Rows, prices: Prices) -> Tensor:
        """A sound upper bound of ``max <rows, z>``, ``(N,)``, whatever the prices are."""

    @abstractmethod
    def maximiser(self, rows: Rows, prices: Prices) -> Tensor:
        """Where the bound's slope points: ``z`` (in the places of ``rows.coeff``) with ``d upper / d coeff = z``."""

    @abstractmethod
    def zero_box_prices(self, rows: Rows) -> Tensor | None:
        """Box prices of 0 for these rows, to be optimised; ``None`` if the set has no use for them."""

    @abstractmethod
    def box_slope(self, rows: Rows, prices: Prices) -> Tensor:
        """``d upper / d box prices``."""

    @abstractmethod
    def floats(self, rows: Rows) -> int:
        """About how many numbers the search keeps per row, to choose chunks that fit."""


class IntervalSet(InputSet):
    """``low <= z <= high`` in every pixel: the maximum is closed form, and there is nothing to search."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low.to(torch.float64), high.to(torch.float64)
        self.shape = tuple(low.shape[1:])

    def search(self, rows: Rows, box: Tensor | None = None, steps: int = 14, reg: float = math.inf) -> Prices:
        return Prices(rows.coeff.new_zeros(rows.coeff.shape[0]))

    def upper(self, rows: Rows, prices: Prices) -> Tensor:
        return (rows.coeff * self.maximiser(rows, prices)).flatten(1).sum(1)

    def maximiser(self, rows: Rows, prices: Prices) -> Tensor:
        dtype = rows.coeff.dtype
        return torch.where(rows.coeff > 0, rows.read(self.high.to(dtype)), rows.read(self.low.to(dtype)))

    def zero_box_prices(self, rows: Rows) -> Tensor | None:
        return None

    def box_slope(self, rows: Rows, prices: Prices) -> Tensor:
        raise NotImplementedError("an interval set has no box prices")

    def floats(self, rows: Rows) -> int:
        return 3 * rows.coeff[0].numel()


@dataclass(frozen=True)
class _Field:
    """Rows seen from the pixels that hold mass: what staying is worth, and every other option with its cost.

    ``value`` covers the targets, ``(N, C, T)``; ``mass`` the sources, ``(N, C, S)``. ``base`` is each source's own
    target index. The last source of each channel, if ``outside``, stands for all pixels far from the row's patch.
    """

    value: Tensor
    mass: Tensor
    stay: Tensor
    best: Tensor | None  # (N, C, 1): the best value anywhere in the channel, for far moves
    levels: list[tuple[Tensor, float | Tensor]]


class TransportSet(InputSet):
    """A Wasserstein ball. ``reach`` is the length below which moves of full plans are listed one by one."""

    def __init__(self, ball: WassersteinBall, x: Tensor, plans: Plans, reach: float = 3.0) -> None:
        self.shape = tuple(x.shape[1:])
        self.box = ball.box
        self.budget = ball.budget(x)
        grid = x if x.ndim == 4 else x[:, None, None, :]
        self.x = grid.to(torch.float64)
        height, width = grid.shape[-2:]
        self.matrix: Tensor | None = None
        self.far: float | None = None
        self.moves: list[tuple[int, int, float]] = []
        cost = ball.cost
        if isinstance(cost, DenseCost):
            if cost.size != height * width:
                raise ValueError(f"the cost matrix is for {cost.size} pixels, but the images have {height * width}")
            self.matrix = cost.matrix.to(x.device)
        elif isinstance(cost, GridCost) and plans == "full":
            every = cost.full(height, width).moves(height, width)
            limit = reach**cost.p
            self.moves = [m for m in every if m[2] < limit]
            beyond = [m[2] for m in every if m[2] >= limit]
            self.far = min(beyond) if beyond else None
        else:
            self.moves = cost.moves(height, width)
        self.radius = max((max(abs(r), abs(c)) for r, c, _ in self.moves), default=0)
        self.distances = sorted({d for *_, d in self.moves})
        self._active = self._list_active()

    def _list_active(self) -> tuple[Tensor, Tensor] | None:
        """Positions (B, C, n) of the pixels that hold mass and their mass, where that is worth the indexing."""
        flat = self.x.flatten(2)
        if self.matrix is not None or flat.numel() == 0:
            return None
        count = int((flat > 0).sum(2).max())
        if count > 0.6 * flat.shape[2] or count == 0:
            return None
        mass, place = flat.topk(count, dim=2)
        return place, mass

    # ---- from rows to fields

    def _patched(self, rows: Rows) -> Rows:
        """Rows that are dense, unless their patch with its surroundings is clearly smaller than the image."""
        coeff = rows.coeff
        if coeff.ndim == 2:
            rows = rows.like(coeff[:, None, None, :])
        if rows.corner is None:
            return rows
        height, width = rows.coeff.shape[-2:]
        wide = 2 * self.radius
        if self.matrix is not None or (height + wide) * (width + wide) > 0.5 * self.x.shape[2] * self.x.shape[3]:
            return rows.dense((self.x.shape[1], *self.x.shape[2:]))
        return rows

    def _targets(self, rows: Rows, box: Tensor | None) -> Tensor:
        """``a - r`` on the sources' grid widened by the radius, :data:`NOWHERE` outside the image."""
        coeff, radius = rows.coeff, self.radius
        if rows.corner is None:
            value = coeff if box is None else coeff - box
            return F.pad(value, (radius,) * 4, value=NOWHERE)
        value = F.pad(coeff, (radius,) * 4)
        if box is not None:
            value = value - box
        value = F.pad(value, (radius,) * 4)
        corner = (rows.corner[0] - 2 * radius, rows.corner[1] - 2 * radius)
        keep = inside(corner, (value.shape[2], value.shape[3]), self.x.shape[1:])
        return value.masked_fill(~keep, NOWHERE)

    def _slice(self, padded: Tensor, row: int, column: int) -> Tensor:
        radius = self.radius
        height, width = padded.shape[-2] - 2 * radius, padded.shape[-1] - 2 * radius
        return padded[..., radius + row : radius + row + height, radius + column : radius + column + width]

    def _sources(self, rows: Rows, flat: Tensor) -> Tensor:
        """Pick the sources out of a map on the sources' grid, ``(N, C, h, w) -> (N, C, S)``."""
        flat = flat.flatten(2)
        if rows.corner is None and self._active is not None:
            return flat.gather(2, self._active[0][rows.image])
        return flat

    def _mass(self, rows: Rows) -> Tensor:
        dtype = rows.coeff.dtype
        if rows.corner is None:
            return (self.x.flatten(2) if self._active is None else self._active[1]).to(dtype)[rows.image]
        radius = self.radius
        size = (rows.coeff.shape[2] + 2 * radius, rows.coeff.shape[3] + 2 * radius)
        corner = (rows.corner[0] - radius, rows.corner[1] - radius)
        return read_patches(self.x.to(dtype), rows.image, corner, size).flatten(2)

    def _field(self, rows: Rows, box: Tensor | None, reg: float = math.inf) -> _Field:
        """What every pixel with mass can do. Moves of equal cost are merged: by their maximum, or softly for ``reg``."""
        mass = self._mass(rows)
        if self.matrix is not None:
            value = (rows.coeff if box is None else rows.coeff - box).flatten(2)
            listed: list[tuple[Tensor, float | Tensor]] = []
            for j in range(value.shape[2]):
                free = torch.isfinite(self.matrix[:, j])
                price = torch.where(free, self.matrix[:, j], 0.0).to(value.dtype)
                listed.append((torch.where(free, value[:, :, j : j + 1], NOWHERE), price))
            return _Field(value, mass, value, None, listed)
        padded = self._targets(rows, box)
        stay = self._sources(rows, self._slice(padded, 0, 0))
        levels: list[tuple[Tensor, float | Tensor]] = []
        for distance in self.distances:
            ring = [self._slice(padded, r, c) for r, c, d in self.moves if d == distance and (r, c) != (0, 0)]
            if not ring:
                continue
            top = ring[0]
            for other in ring[1:]:
                top = torch.maximum(top, other) if reg == math.inf else torch.logaddexp(reg * top, reg * other) / reg
            levels.append((self._sources(rows, top), distance))
        best: Tensor | None = None
        if self.far is not None:
            best = padded.flatten(2).amax(2, keepdim=True)
            if rows.corner is not None:
                best = best.clamp(min=0)
            levels.append((best, self.far))
        return _Field(padded, mass, stay, best, levels)

    def _elsewhere(self, rows: Rows, field: _Field) -> Tensor | None:
        """``(N, C)``: mass too far from the row's patch to see it; only far moves concern it."""
        if rows.corner is None or self.far is None:
            return None
        total = self.x.flatten(2).sum(2).to(field.mass.dtype)[rows.image]
        return (total - field.mass.sum(2)).clamp(min=0)

    # ---- the bound

    @torch.no_grad()
    def search(self, rows: Rows, box: Tensor | None = None, steps: int = 14, reg: float = math.inf) -> Prices:
        rows = self._patched(rows)
        budget = self.budget.to(rows.coeff.dtype)[rows.image]
        if math.isfinite(reg):
            return Prices(_entropic(self._field(rows, box, reg), budget, reg), box)
        field = self._field(rows, box)
        elsewhere = self._elsewhere(rows, field)

        low = torch.zeros_like(budget)
        value_low, cost_low = _evaluate(field, elsewhere, low)
        least = min(d for d in self._costs() if d > 0) if any(d > 0 for d in self._costs()) else 1.0
        top = torch.stack([v.amax((1, 2)) for v, _ in field.levels] or [field.stay.amax((1, 2))]).amax(0)
        bottom = torch.where(field.stay > 0.5 * NOWHERE, field.stay, field.stay.new_tensor(math.inf)).amin((1, 2))
        if elsewhere is not None:
            bottom = bottom.clamp(max=0)
        high = (torch.maximum(top, field.stay.amax((1, 2))) - bottom).clamp(min=0) / least
        value_high, cost_high = (field.stay * field.mass).sum((1, 2)) + budget * high, torch.zeros_like(high)
        best, psi = value_low, low
        better = value_high < best
        best, psi = torch.where(better, value_high, best), torch.where(better, high, psi)
        for step in range(steps):
            # Convex and piecewise linear: the tangents at both ends meet below the minimum, and soon at it.
            slope_low, slope_high = budget - cost_low, budget - cost_high
            drop = slope_high - slope_low
            meet = (value_low - value_high + slope_high * high - slope_low * low) / drop.clamp(min=1e-30)
            trial = 0.5 * (low + high) if step % 2 else torch.where(drop > 0, meet, high)
            trial = torch.maximum(torch.minimum(trial, high), low)
            worth, cost = _evaluate(field, elsewhere, trial)
            value = worth + budget * trial
            better = value < best
            best, psi = torch.where(better, value, best), torch.where(better, trial, psi)
            over = cost > budget
            low, value_low, cost_low = _choose(over, (trial, value, cost), (low, value_low, cost_low))
            high, value_high, cost_high = _choose(over, (high, value_high, cost_high), (trial, value, cost))
        return Prices(psi, box)

    def _costs(self) -> list[float]:
        if self.matrix is not None:
            return [float(v) for v in self.matrix[torch.isfinite(self.matrix)].unique()]
        return [*self.distances, *([] if self.far is None else [self.far])]

    def upper(self, rows: Rows, prices: Prices) -> Tensor:
        rows = self._patched(rows)
        field = self._field(rows, prices.box)
        worth, _ = _evaluate(field, self._elsewhere(rows, field), prices.psi)
        value = worth + prices.psi * self.budget.to(rows.coeff.dtype)[rows.image]
        if self.box is None:
            return value
        lo, hi = self.box
        if prices.box is not None:
            value = value + (hi * prices.box.clamp(min=0) + lo * prices.box.clamp(max=0)).flatten(1).sum(1)
        # psi = 0 and r = a: the box alone.
        return torch.minimum(value, torch.maximum(hi * rows.coeff, lo * rows.coeff).flatten(1).sum(1))

    # ---- slopes, for those who optimise what the rows depend on

    @torch.no_grad()
    def maximiser(self, rows: Rows, prices: Prices) -> Tensor:
        patched = self._patched(rows)
        arrivals = self._arrivals(patched, prices)
        radius = self.radius
        if rows.corner is None:
            return arrivals.reshape(rows.coeff.shape)
        if patched.corner is None:
            return _read_rows(rows, arrivals)
        return arrivals[..., radius:-radius, radius:-radius] if radius else arrivals

    @torch.no_grad()
    def box_slope(self, rows: Rows, prices: Prices) -> Tensor:
        assert self.box is not None and prices.box is not None
        lo, hi = self.box
        return torch.where(prices.box >= 0, hi, lo) - self._arrivals(self._patched(rows), prices)

    def zero_box_prices(self, rows: Rows) -> Tensor | None:
        if self.box is None:
            return None
        rows = self._patched(rows)
        if rows.corner is None:
            return torch.zeros_like(rows.coeff)
        return torch.zeros_like(F.pad(rows.coeff, (self.radius,) * 4))

    def _options(self, rows: Rows, field: _Field) -> Iterator[tuple[Tensor, float | Tensor, int]]:
        """Every listed move: its value at each source, its cost, and how far away its target is in the layout."""
        if self.matrix is not None:
            for j, (value, price) in enumerate(field.levels):
                yield value, price, j
            return
        width = field.value.shape[-1]
        for r, c, d in self.moves:
            if (r, c) != (0, 0):
                yield self._sources(rows, self._slice(field.value, r, c)), d, r * width + c

    def _arrivals(self, rows: Rows, prices: Prices) -> Tensor:
        """``z`` of the plan that attains the bound's inner maxima, on the sources' grid."""
        field = self._field(rows, prices.box)
        psi = prices.psi.view(-1, 1, 1)
        n, channels = field.mass.shape[:2]
        if self.matrix is not None:
            base = torch.arange(field.value.shape[2], device=psi.device).expand(n, channels, -1)
        else:
            index = torch.arange(field.value[0, 0].numel(), device=psi.device).reshape(1, 1, *field.value.shape[2:])
            base = self._slice(index, 0, 0).expand(n, channels, -1, -1)
            base = self._sources(rows, base)
        best, target = field.stay, base
        for value, price, where in self._options(rows, field):
            candidate = value - psi * price
            better = candidate > best
            best = torch.where(better, candidate, best)
            target = torch.where(better, where if self.matrix is not None else base + where, target)
        flat = field.value.flatten(2)
        if self.far is not None:
            top, place = flat.max(2, keepdim=True)
            target = torch.where(top - psi * self.far > best, place, target)
        arrived = torch.zeros_like(flat).scatter_add(2, target, field.mass)
        if self.matrix is not None:
            return arrived.reshape(n, channels, *self.x.shape[2:])
        return self._slice(arrived.reshape(field.value.shape), 0, 0)

    def floats(self, rows: Rows) -> int:
        rows = self._patched(rows)
        around = 0 if rows.corner is None else 4 * self.radius
        sources = rows.coeff.shape[1] * (rows.coeff.shape[2] + around) * (rows.coeff.shape[3] + around)
        if rows.corner is None and self._active is not None:
            listed = self._active[0].shape[1] * self._active[0].shape[2]
        else:
            listed = sources
        levels = rows.coeff[0].numel() if self.matrix is not None else len(self.distances) + 4
        return 2 * sources + levels * listed


def _read_rows(rows: Rows, dense: Tensor) -> Tensor:
    """The entries of per-row dense maps where patch rows live."""
    own = torch.arange(dense.shape[0], device=dense.device)
    assert rows.corner is not None
    return read_patches(dense, own, rows.corner, (rows.coeff.shape[2], rows.coeff.shape[3]))


def _choose(where: Tensor, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(where, a, b) for a, b in zip(first, second, strict=True))


def _evaluate(field: _Field, elsewhere: Tensor | None, psi: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_i x_i max_j (a_j - psi C_ij)`` and what the maximising plan pays, ``(N,)`` each."""
    price = psi.view(-1, 1, 1)
    best, paid = field.stay, torch.zeros_like(field.stay)
    for value, cost in field.levels:
        candidate = value - price * cost
        better = candidate > best
        best = torch.where(better, candidate, best)
        paid = torch.where(better, cost, paid)
    worth, total = (best * field.mass).sum((1, 2)), (paid * field.mass).sum((1, 2))
    if elsewhere is not None and field.best is not None:
        far = field.levels[-1][1]
        gain = field.best[..., 0] - price[..., 0] * far
        worth = worth + (gain.clamp(min=0) * elsewhere).sum(1)
        total = total + (torch.where(gain > 0, far, 0.0) * elsewhere).sum(1)
    return worth, total


def _entropic(field: _Field, budget: Tensor, reg: float, steps: int = 30) -> Tensor:
    r"""``psi`` of the paper's conjugate: the entropic plan ``P ~ x_i exp(reg (a_j - psi C_ij))`` costs ``E``."""
    options = [(field.stay, 0.0), *field.levels]
    low = torch.zeros_like(budget)
    top = torch.stack([v.amax((1, 2)) for v, _ in options]).amax(0)
    bottom = torch.where(field.stay > 0.5 * NOWHERE, field.stay, 0.0).amin((1, 2))
    high = (top - bottom + 30.0 / reg).clamp(min=0) * 2
    for _ in range(steps):
        psi = 0.5 * (low + high)
        exponents = [reg * (v - psi.view(-1, 1, 1) * d) for v, d in options]
        peak = exponents[0]
        for exponent in exponents[1:]:
            peak = torch.maximum(peak, exponent)
        total, paid = torch.zeros_like(peak), torch.zeros_like(peak)
        for exponent, (_, d) in zip(exponents, options, strict=True):
            weight = (exponent - peak).exp()
            total, paid = total + weight, paid + weight * d
        over = (field.mass * paid / total).sum((1, 2)) > budget
        low, high = torch.where(over, psi, low), torch.where(over, high, psi)
    return high


def input_set(ball: Ball, x: Tensor, plans: Plans, reach: float = 3.0) -> InputSet:
    """The input set of a ball around images ``x``."""
    if isinstance(ball, LinfBall):
        low, high = ball.bounds(x.to(torch.float64))
        return IntervalSet(low, high)
    if isinstance(ball, WassersteinBall):
        return TransportSet(ball, x, plans, reach)
    raise TypeError(f"ball must be a WassersteinBall or LinfBall to be certified, got {type(ball).__name__}")


@torch.no_grad()
def intervals(source: InputSet, images: int, device: torch.device, chunk: int = 4096) -> IntervalSet:
    """The smallest box of per-pixel intervals around each ball: what the paper's roadblock passes through."""
    size = math.prod(source.shape)
    like = torch.zeros(0, dtype=torch.float64, device=device)
    ends = []
    for sign in (-1.0, 1.0):
        found = []
        every = torch.arange(images * size, device=device)
        for part in every.split(chunk):
            signs = torch.full((part.shape[0],), sign, dtype=torch.float64, device=device)
            rows = units(source.shape, part // size, part % size, signs, like)
            found.append(sign * source.upper(rows, source.search(rows)))
        ends.append(torch.cat(found).reshape(images, *source.shape))
    return IntervalSet(ends[0], ends[1])
