r"""The largest value of linear functions over an input set: all that a linear relaxation asks of a threat model.

For a row ``a`` and a Wasserstein ball with budget ``E`` and box ``[lo, hi]``, every ``psi >= 0`` and every price
``r`` (one number per pixel) gives an upper bound of the maximum:

.. math::
    \max_{z \in B} \langle a, z \rangle \;\le\; \psi E + \sum_i x_i \max_j \big( a_j - r_j - \psi C_{ij} \big)
        + \sum_j \big( hi\, r_j^+ - lo\, r_j^- \big)

(weak duality: ``psi`` prices the transport budget, ``r`` the box, i.e. ``inf over a1 + a2 = a`` of
``sigma_ball(a1) + sigma_box(a2)``). So a search over ``psi`` and ``r`` may stop anywhere, and may run in float32: the
bound that counts is one evaluation of the right-hand side in float64. Charges ``M_ij`` on moves, which an anchored
relaxation brings along (:mod:`wball.certificates.anchor`), are added to ``a_j``.

Full plans on a large grid: moves shorter than a *reach* are listed one by one. Longer ones are sorted into tiers of
length: one of a tier costs at least the tier's shortest length, and the best it can do is the largest ``a_j - r_j``
within the tier's longest. This only ever enlarges the bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from wball.ball import Ball, LinfBall, Plans, WassersteinBall
from wball.certificates.anchor import Anchor, Charges, spread
from wball.certificates.boxed import BoxProgram
from wball.certificates.rows import Rows, inside, read_patches, units
from wball.cost import DenseCost, GridCost
from wball.kernels import dispatch

NOWHERE = -1e30
"""Value of a move that leaves the image: finite, so that it vanishes when multiplied by no mass."""


LIST_ALL = 8192
"""Images with at most this many (pixel, move) pairs have every move listed: full plans are then exact."""

ROUNDS = 10
"""Steps of the search for ``psi``."""

DOWN = 0.55
"""Share of ``psi`` that is tried next as long as no smaller one is known to spend the budget."""

Charged = Sequence[tuple[Anchor, Rows]]
"""Anchors with the weights that rows put on their units."""


class InputSet(ABC):
    """A set of images around each of ``B`` centres."""

    shape: tuple[int, ...]  # of one image
    compiled = False  # whether a full search costs hardly more than a short one

    @property
    def kernel(self) -> str:
        """The kernel behind :meth:`maximum`."""
        return "cpu" if self.compiled else "torch"

    @abstractmethod
    def maximum(
        self,
        rows: Rows,
        charged: Charged = (),
        box: Tensor | None = None,
        reg: float = math.inf,
        rounds: int = ROUNDS,
    ) -> Tensor:
        """A sound upper bound of ``max <rows, z>`` plus charges, ``(N,)``, in the rows' precision.

        ``box`` holds prices of the box; a finite ``reg`` takes ``psi`` from the entropic plan instead of the best,
        which is searched for in ``rounds``.
        Differentiable in coefficients, weights and prices: at the best ``psi`` its own slope is 0 (envelope theorem).
        """

    @abstractmethod
    def ranges(self) -> tuple[Tensor, Tensor]:
        """Least and largest value of every pixel that is known without searching, ``(B, *shape)`` each."""

    @abstractmethod
    def box_prices(self, rows: Rows) -> Tensor | None:
        """Box prices of 0 for these rows, to be optimised; ``None`` if the set has no use for them."""

    @abstractmethod
    def floats(self, rows: Rows, charged: bool = False) -> int:
        """About how many numbers :meth:`maximum` keeps per row, to choose chunks that fit."""


class IntervalSet(InputSet):
    """``low <= z <= high`` in every pixel: the maximum is closed form, and there is nothing to search."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low.to(torch.float64), high.to(torch.float64)
        self.shape = tuple(low.shape[1:])

    def maximum(
        self,
        rows: Rows,
        charged: Charged = (),
        box: Tensor | None = None,
        reg: float = math.inf,
        rounds: int = ROUNDS,
    ) -> Tensor:
        if charged:
            raise ValueError("an interval set has no plans to charge")
        dtype = rows.coeff.dtype
        high, low = rows.read(self.high.to(dtype)), rows.read(self.low.to(dtype))
        return (rows.coeff * torch.where(rows.coeff > 0, high, low)).flatten(1).sum(1)

    def ranges(self) -> tuple[Tensor, Tensor]:
        return self.low, self.high

    def box_prices(self, rows: Rows) -> Tensor | None:
        return None

    def floats(self, rows: Rows, charged: bool = False) -> int:
        return 3 * rows.coeff[0].numel()


@dataclass(frozen=True)
class _Field:
    """Rows seen from the pixels that hold mass: what staying is worth, and every other option with its cost.

    ``mass`` and ``stay`` cover the sources, ``(N, C, S)``; ``worth`` the options, ``(N, C, L, S)``, with their cost
    ``(L, 1)`` or ``(L, S)``. Rows on patches cannot see all pixels: ``elsewhere`` (N, C, T) is the mass at several
    distances from the patch, ``away`` (T,) what it costs to come from there, ``far`` (N, C) what that is worth.
    """

    mass: Tensor
    stay: Tensor
    worth: Tensor
    cost: Tensor
    far: Tensor | None = None
    elsewhere: Tensor | None = None
    away: Tensor | None = None

    def single(self) -> _Field:
        """The same in float32, for searching."""
        held = (self.mass, self.stay, self.worth, self.cost, self.far, self.elsewhere, self.away)
        return _Field(*(None if part is None else part.float() for part in held))  # type: ignore[arg-type]


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
        self.tiers: list[tuple[float, int]] = []  # least cost and reach in pixels of unlisted moves, sorted by length
        self.moves: list[tuple[int, int, float]] = []
        cost = ball.cost
        full = isinstance(cost, GridCost) and plans == "full"
        self.power = cost.p if full and isinstance(cost, GridCost) else None  # all moves, each at length ** power
        if isinstance(cost, DenseCost):
            if cost.size != height * width:
                raise ValueError(f"the cost matrix is for {cost.size} pixels, but the images have {height * width}")
            self.matrix = cost.matrix.to(x.device)
        elif isinstance(cost, GridCost) and plans == "full":
            every = cost.full(height, width).moves(height, width)
            limit = reach**cost.p if len(every) * height * width > LIST_ALL else math.inf
            self.moves = [m for m in every if m[2] < limit]
            beyond = [m[2] for m in every if m[2] >= limit]
            if beyond:
                self.far = min(beyond)
                self.tiers = _tiers(reach, self.far, cost.p, max(height, width))
        else:
            self.moves = cost.moves(height, width)
        self.radius = max((max(abs(r), abs(c)) for r, c, _ in self.moves), default=0)
        self.distances = sorted({d for *_, d in self.moves})
        self._active = self._list_active()
        self.compiled = dispatch.choose("entropic_plan", x, cost.arcs(height, width, grid)) == "cpu"

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

    def ranges(self) -> tuple[Tensor, Tensor]:
        whole = self.x.reshape(-1, *self.shape)
        if self.box is not None:
            return torch.full_like(whole, self.box[0]), torch.full_like(whole, self.box[1])
        most = self.x.sum((2, 3), keepdim=True).expand(self.x.shape) * (1 + 1e-12)
        return torch.zeros_like(whole), most.reshape(whole.shape)

    # ---- from rows to fields

    def _patched(self, rows: Rows, charged: Charged = ()) -> Rows:
        """Rows that are dense, unless their patch with its surroundings is clearly smaller than the image."""
        if rows.coeff.ndim == 2:
            rows = rows.like(rows.coeff[:, None, None, :])
        if rows.corner is None:
            return rows
        height, width = rows.coeff.shape[-2:]
        wide = 2 * self.radius
        large = (height + wide) * (width + wide) > 0.5 * self.x.shape[2] * self.x.shape[3]
        if self.matrix is not None or large or not all(anchor.aligned(w, rows) for anchor, w in charged):
            return rows.dense(tuple(self.x.shape[1:]))
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

    @property
    def active(self) -> Tensor | None:
        """Sources of dense rows, ``(B, C, S)``; ``None``: every pixel."""
        return None if self._active is None else self._active[0]

    def _charges(self, rows: Rows, charged: Charged) -> Charges | None:
        total: Charges | None = None
        for anchor, weights in charged:
            if rows.corner is None and weights.corner is not None:
                raise ValueError("dense image rows need dense weights")
            part = anchor.charge(weights, rows, self.active)
            total = part if total is None else total.plus(part)
        return total

    def _field(
        self, rows: Rows, box: Tensor | None = None, charges: Charges | None = None, reg: float = math.inf
    ) -> _Field:
        """What every pixel with mass can do. Moves of equal cost merge: by their maximum, or softly for ``reg``."""
        mass = self._mass(rows)
        dtype = rows.coeff.dtype
        if self.matrix is not None:
            value = (rows.coeff if box is None else rows.coeff - box).flatten(2)
            free = torch.isfinite(self.matrix).T  # (targets, sources)
            worth = torch.where(free, value[..., None], NOWHERE)
            if charges is not None:
                worth = worth + charges.moves
            return _Field(mass, value, worth, torch.where(free, self.matrix.T, 0.0).to(dtype))
        padded = self._targets(rows, box)
        stay = self._sources(rows, self._slice(padded, 0, 0))
        rings: dict[float, Tensor] = {}
        listed = [m for m in self.moves if m[:2] != (0, 0)]
        for k, (r, c, d) in enumerate(listed):
            worth = self._slice(padded, r, c)
            if charges is not None:
                worth = self._sources(rows, worth) + charges.moves[:, :, k]
            if d not in rings:
                rings[d] = worth
            elif reg == math.inf:
                rings[d] = torch.maximum(rings[d], worth)
            else:
                rings[d] = torch.logaddexp(reg * rings[d], reg * worth) / reg
        levels = [ring if charges is not None else self._sources(rows, ring) for ring in rings.values()]
        costs = list(rings)
        far, elsewhere, away = None, None, None
        if self.far is not None:
            ends = self._slice(padded, 0, 0)
            if charges is not None:
                ends = ends + charges.into
            within, around = 0, ends
            for least, wide in self.tiers:
                if wide < max(ends.shape[-2:]) - 1:
                    around, within = _widen(around, wide - within), wide
                    best = self._sources(rows, around)
                else:
                    best = ends.flatten(2).amax(2, keepdim=True)
                if rows.corner is not None:
                    best = best.clamp(min=0)  # pixels beyond the patch
                levels.append((best if charges is None else best + charges.out).expand_as(stay))
                costs.append(least)
            if rows.corner is not None:
                elsewhere, prices = self._elsewhere(rows)
                far = ends.flatten(2).amax(2).clamp(min=0)
                away = torch.tensor(prices, dtype=dtype, device=stay.device)
        cost = torch.tensor(costs, dtype=dtype, device=stay.device).view(-1, 1)
        options = torch.stack(levels, 2) if levels else stay[:, :, None] + NOWHERE
        return _Field(mass, stay, options, cost if levels else cost.new_ones(1, 1), far, elsewhere, away)

    def _elsewhere(self, rows: Rows) -> tuple[Tensor, tuple[float, ...]]:
        """``(N, C, T)``: mass at several distances from each row's patch; and the least cost of coming from there."""
        assert rows.corner is not None
        height, width = self.x.shape[2:]
        first = rows.corner
        last = (first[0] + rows.coeff.shape[2], first[1] + rows.coeff.shape[3])
        sums = F.pad(self.x.cumsum(2).cumsum(3), (1, 0, 1, 0))

        def within(reach: int) -> Tensor:
            top, bottom = (first[0] - reach).clamp(0, height), (last[0] + reach).clamp(0, height)
            left, right = (first[1] - reach).clamp(0, width), (last[1] + reach).clamp(0, width)
            corners = [
                sums[rows.image, :, r, c] for r, c in ((bottom, right), (top, right), (bottom, left), (top, left))
            ]
            return corners[0] - corners[1] - corners[2] + corners[3]

        edges = [within(self.radius), *(within(wide) for _, wide in self.tiers[:-1]), self.x.sum((2, 3))[rows.image]]
        bands = [(b - a).clamp(min=0) for a, b in pairwise(edges)]
        return torch.stack(bands, 2).to(rows.coeff.dtype), tuple(price for price, _ in self.tiers)

    # ---- the bound

    def maximum(
        self,
        rows: Rows,
        charged: Charged = (),
        box: Tensor | None = None,
        reg: float = math.inf,
        rounds: int = ROUNDS,
    ) -> Tensor:
        rows, charged = self._align(rows, charged)
        budget = self.budget[rows.image]
        if self.compiled and not charged and box is None and reg == math.inf and not rows.coeff.requires_grad:
            value = self._largest(rows, budget, rounds)
            return value if self.box is None else torch.minimum(value, self._box_alone(rows))
        charges = self._charges(rows, charged)
        field = self._field(rows, box, charges)
        with torch.no_grad():
            if reg < math.inf:
                psi = _entropic(self._field(rows, box, charges, reg).single(), budget.float(), reg)
            else:
                psi = _best_psi(field.single(), budget.float(), self.step, rounds)
        psi = psi.to(rows.coeff.dtype)
        value = _worth(field, psi) + psi * budget.to(rows.coeff.dtype)
        if self.box is None:
            return value
        lo, hi = self.box
        if box is not None:
            value = value + (hi * box.clamp(min=0) + lo * box.clamp(max=0)).flatten(1).sum(1)
        if charges is not None:
            return value
        return torch.minimum(value, self._box_alone(rows))

    def _box_alone(self, rows: Rows) -> Tensor:
        """The bound with ``psi = 0`` and ``r = a``."""
        assert self.box is not None
        lo, hi = self.box
        return torch.maximum(hi * rows.coeff, lo * rows.coeff).flatten(1).sum(1)

    def _largest(self, rows: Rows, budget: Tensor, rounds: int) -> Tensor:
        """The bound of rows that nothing charges, compiled."""
        from wball.kernels.linear_maximum.cpu import largest  # compiles

        beyond = self._elsewhere(rows)[0] if rows.corner is not None and self.far is not None else None
        value = largest(rows, self.x, budget, self.moves, self.tiers, beyond, self.step, 2 * rounds)
        return value.to(rows.coeff.dtype)

    def _align(self, rows: Rows, charged: Charged) -> tuple[Rows, Charged]:
        """Rows and weights that are all patches, or all dense."""
        rows = self._patched(rows, charged)
        if rows.corner is None:
            charged = [(anchor, w if w.corner is None else w.dense(anchor.layer)) for anchor, w in charged]
        return rows, charged

    def gains(self, rows: Rows, charged: Charged) -> tuple[Tensor, Tensor, Tensor]:
        """``max(a_j - a_i + M_ij, 0)`` on the sources of dense rows: listed moves, out of a source, into a target."""
        rows, charged = self._align(rows, charged)
        charges = self._charges(rows, charged)
        if self.matrix is not None:
            value = rows.coeff.flatten(2)
            moves = value[:, :, :, None] - value[:, :, None, :]
            if charges is not None:
                moves = moves + charges.moves
            moves = torch.where(torch.isfinite(self.matrix.T), moves, 0.0)
            return moves.clamp(min=0), torch.zeros_like(value), torch.zeros_like(rows.coeff)
        padded = self._targets(rows, None)
        stay = self._slice(padded, 0, 0)
        listed = [m for m in self.moves if m[:2] != (0, 0)]
        source = self._sources(rows, stay)
        moves = source[:, :, None].repeat(1, 1, len(listed), 1)
        for k, (r, c, _) in enumerate(listed):
            moves[:, :, k] = self._sources(rows, self._slice(padded, r, c)) - source
        out, into = -source, stay
        if charges is not None:
            moves, out, into = moves + charges.moves, out + charges.out, into + charges.into
        moves, out, into = moves.clamp(min=0), out.clamp(min=0), into.clamp(min=0)
        if rows.corner is None:
            return moves, out, into
        # Outside the image NOWHERE - NOWHERE and -NOWHERE are meaningless: no mass starts there.
        corner = (rows.corner[0] - self.radius, rows.corner[1] - self.radius)
        size, shape = (stay.shape[2], stay.shape[3]), tuple(self.x.shape[1:])
        maps = torch.cat([moves, out[:, :, None]], 2)
        read = spread(maps.reshape(*maps.shape[:3], *size), corner, rows.image, self.active, shape)
        return read[:, :, :-1], read[:, :, -1], Rows(into, rows.image, corner).dense(shape).coeff

    @property
    def gain_size(self) -> int:
        """How many numbers :meth:`gains` returns per row."""
        channels, height, width = self.x.shape[1:]
        sources = height * width if self.active is None else self.active.shape[2]
        moves = sources if self.matrix is not None else len(self.moves)
        return channels * (sources * (moves + 1) + height * width)

    def exact_box_prices(self, rows: Rows, charged: Charged = ()) -> Tensor | None:
        """The best box prices of each row, by one linear program a row; ``None`` if there is no box."""
        if self.box is None:
            return None
        rows = rows if rows.corner is None else rows.dense(tuple(self.x.shape[1:]))
        rows, charged = self._align(rows, charged)
        charges = self._charges(rows, charged)
        worth, price = self._listed(rows, charges)  # (N, C, K + 1, S), (K + 1, S) or (K + 1, 1)
        ends = rows.coeff if charges is None else rows.coeff + charges.into
        out = torch.zeros_like(worth[:, :, 0]) if charges is None else charges.out
        prices = torch.zeros_like(rows.coeff)
        programs: dict[int, BoxProgram] = {}
        for n, image in enumerate(rows.image.tolist()):
            if image not in programs:
                programs[image] = self._program(image, price)
            found = programs[image].prices(
                worth[n].transpose(1, 2).flatten(0, 1).cpu().double().numpy(),
                out[n].flatten().cpu().double().numpy(),
                ends[n].flatten().cpu().double().numpy(),
            )
            if found is not None:
                prices[n] = torch.as_tensor(found, dtype=prices.dtype, device=prices.device).reshape(prices[n].shape)
        return prices

    def _places(self) -> Tensor:
        """``(B, C, S)``: the pixel of each source of dense rows."""
        if self.active is not None:
            return self.active
        count = self.x.shape[2] * self.x.shape[3]
        return torch.arange(count, device=self.x.device).expand(*self.x.shape[:2], count)

    def _listed(self, rows: Rows, charges: Charges | None) -> tuple[Tensor, Tensor]:
        """What staying and every listed move earn at each source of dense rows, and what they cost."""
        if self.matrix is not None:
            value = rows.coeff.flatten(2)
            moves = value[:, :, :, None].expand(-1, -1, -1, value.shape[2])
            costs = self.matrix.T
        else:
            padded = self._targets(rows, None)
            listed = [m for m in self.moves if m[:2] != (0, 0)]
            value = self._sources(rows, self._slice(padded, 0, 0))
            moves = value[:, :, None].repeat(1, 1, len(listed), 1)
            for k, (r, c, _) in enumerate(listed):
                moves[:, :, k] = self._sources(rows, self._slice(padded, r, c))
            costs = torch.tensor([d for *_, d in listed], dtype=torch.float64, device=padded.device)[:, None]
        if charges is not None:
            moves = moves + charges.moves
        return torch.cat([value[:, :, None], moves], 2), torch.cat([costs.new_zeros(1, costs.shape[1]), costs])

    def _program(self, image: int, price: Tensor) -> BoxProgram:
        channels, height, width = self.x.shape[1:]
        place = self._places()[image]  # (C, S)
        if self.matrix is not None:
            every = torch.arange(height * width, device=place.device).view(1, 1, -1).expand(*place.shape, -1)
            target = torch.where(torch.isfinite(self.matrix)[None], every, -1)
        else:
            listed = [m for m in self.moves if m[:2] != (0, 0)]
            shift = torch.tensor([m[:2] for m in listed], dtype=torch.long, device=place.device).reshape(-1, 2)
            row, column = place[..., None] // width + shift[:, 0], place[..., None] % width + shift[:, 1]
            keep = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            target = torch.where(keep, row * width + column, -1)
        target = torch.cat([place[..., None], target], 2)
        channel = torch.arange(channels, device=place.device)[:, None].expand(*place.shape)
        target = torch.where(target >= 0, target + channel[..., None] * height * width, -1)
        mass = self.x[image].flatten(1).gather(1, place)
        cost = price.T.expand(place.shape[1], -1) if price.shape[1] == 1 else price.T
        cost = cost.repeat(channels, 1)
        holds = (mass > 0).flatten()
        target = torch.where(holds[:, None], target.flatten(0, 1), -1)
        target[~holds, 0] = (place + channel * height * width).flatten()[~holds]
        assert self.box is not None
        return BoxProgram(
            mass.flatten().cpu().numpy(),
            target.cpu().numpy(),
            cost.cpu().double().numpy(),
            channels * height * width,
            channel.flatten().cpu().numpy(),
            channels,
            self.far,
            float(self.budget[image]),
            self.box,
        )

    @property
    def small(self) -> bool:
        """Whether a linear program over all plans is a matter of milliseconds."""
        pixels = self.x[0].numel()
        return pixels * (self.x.shape[2] * self.x.shape[3] if self.matrix is not None else len(self.moves)) <= 2048

    @property
    def step(self) -> float:
        """The cheapest move that costs anything."""
        if self.matrix is not None:
            costs = self.matrix[torch.isfinite(self.matrix) & (self.matrix > 0)]
            return float(costs.min()) if costs.numel() else 1.0
        return min([d for d in (*self.distances, self.far or 0.0) if d > 0], default=1.0)

    def box_prices(self, rows: Rows) -> Tensor | None:
        if self.box is None:
            return None
        rows = self._patched(rows)
        return torch.zeros_like(rows.coeff if rows.corner is None else F.pad(rows.coeff, (self.radius,) * 4))

    def floats(self, rows: Rows, charged: bool = False) -> int:
        rows = self._patched(rows)
        around = 0 if rows.corner is None else 4 * self.radius
        sources = rows.coeff.shape[1] * (rows.coeff.shape[2] + around) * (rows.coeff.shape[3] + around)
        listed = sources
        if rows.corner is None and self.active is not None:
            listed = self.active.shape[1] * self.active.shape[2]
        if self.matrix is not None:
            return 4 * rows.coeff.shape[1] * self.matrix.numel()
        if charged:
            return 2 * sources + (2 * len(self.moves) + 6) * max(listed, sources // 2)
        return 2 * sources + (len(self.distances) + len(self.tiers) + 4) * listed


def _tiers(reach: float, least: float, p: float, side: int) -> list[tuple[float, int]]:
    """Lengths from ``reach`` on in a few tiers: what the shortest of each costs, and how many pixels it spans."""
    lengths = [length for length in (reach, reach * 4 / 3, reach * 2, reach * 10 / 3) if length < side] or [reach]
    spans = [math.ceil(length) - 1 for length in lengths[1:]] + [2 * side]
    return [(max(least, length**p), span) for length, span in zip(lengths, spans, strict=True)]


def _widen(maps: Tensor, reach: int) -> Tensor:
    """The largest value within ``reach`` pixels in rows and columns."""
    if reach <= 0:
        return maps
    maps = F.max_pool2d(maps, (1, 2 * reach + 1), stride=1, padding=(0, reach))
    return F.max_pool2d(maps, (2 * reach + 1, 1), stride=1, padding=(reach, 0))


def _choose(where: Tensor, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(where, a, b) for a, b in zip(first, second, strict=True))


def _elsewhere(field: _Field, psi: Tensor) -> tuple[Tensor, Tensor] | None:
    """What mass beyond the patch is worth and pays, ``(N,)`` each."""
    if field.elsewhere is None or field.far is None or field.away is None:
        return None
    gain = field.far[..., None] - psi.view(-1, 1, 1) * field.away
    paid = torch.where(gain > 0, field.away, 0.0)
    return (gain.clamp(min=0) * field.elsewhere).sum((1, 2)), (paid * field.elsewhere).sum((1, 2))


def _worth(field: _Field, psi: Tensor) -> Tensor:
    """``sum_i x_i max_j (a_j - psi C_ij)``, ``(N,)``."""
    best = torch.maximum(field.stay, (field.worth - psi.view(-1, 1, 1, 1) * field.cost).amax(2))
    total = (best * field.mass).sum((1, 2))
    rest = _elsewhere(field, psi)
    return total if rest is None else total + rest[0]


def _evaluate(field: _Field, psi: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and what the maximising plan pays, ``(N,)`` each."""
    best, choice = (field.worth - psi.view(-1, 1, 1, 1) * field.cost).max(2)
    moves = best > field.stay
    if field.cost.shape[1] == 1:
        cost = field.cost[:, 0][choice]
    else:
        cost = field.cost.expand(field.worth.shape).gather(2, choice[:, :, None])[:, :, 0]
    worth = (torch.where(moves, best, field.stay) * field.mass).sum((1, 2))
    total = (torch.where(moves, cost, 0.0) * field.mass).sum((1, 2))
    rest = _elsewhere(field, psi)
    return (worth, total) if rest is None else (worth + rest[0], total + rest[1])


def _best_psi(field: _Field, budget: Tensor, step: float, rounds: int) -> Tensor:
    """The ``psi`` that minimises ``psi E + sum_i x_i max_j (a_j - psi C_ij)``, up to a few rounds of search.

    Most pixels around most rows hold no mass: rows are grouped by how many do, and the others are left out.
    """
    holds = (field.mass > 0).flatten(1)
    count = holds.sum(1)
    if holds.shape[1] < 16 or field.cost.shape[1] > 1:
        return _search(field, budget, step, rounds)
    order = count.argsort()
    groups = [g for g in order.chunk(4 if order.shape[0] >= 64 else 1) if g.numel()]
    psi = torch.zeros_like(budget)
    for group, most in zip(groups, torch.stack([count[g].max() for g in groups]).tolist(), strict=True):
        if most > 0.7 * holds.shape[1]:
            part = _pick(field, group)
        else:
            part = _pick(field, group, _listing(holds[group], max(1, most)))
        psi[group] = _search(part, budget[group], step, rounds)
    return psi


def _listing(holds: Tensor, most: int) -> Tensor:
    """``(N, most)``: positions of the true entries of each row, padded with the row's size."""
    size = holds.shape[1]
    rank = torch.where(holds, holds.cumsum(1) - 1, most)
    out = torch.full((holds.shape[0], most + 1), size, dtype=torch.long, device=holds.device)
    return out.scatter(1, rank, torch.arange(size, device=holds.device).expand_as(holds))[:, :most]


def _pick(field: _Field, group: Tensor, place: Tensor | None = None) -> _Field:
    """Some rows of a field and, of each, the sources at ``place`` (one beyond the end: no mass)."""

    def read(values: Tensor) -> Tensor:
        values = values[group]
        if place is None:
            return values
        if values.ndim == 3:
            return values.flatten(1).gather(1, reach)[:, None]
        flat = values.transpose(1, 2).flatten(2)
        return flat.gather(2, reach[:, None].expand(-1, flat.shape[1], -1))[:, None]

    sources = field.mass.shape[1] * field.mass.shape[2]
    reach = torch.empty(0) if place is None else place.clamp(max=sources - 1)
    mass = read(field.mass)
    if place is not None:
        mass = mass * (place < sources)[:, None]
    far = None if field.far is None else field.far[group]
    elsewhere = None if field.elsewhere is None else field.elsewhere[group]
    return _Field(mass, read(field.stay), read(field.worth), field.cost, far, elsewhere, field.away)


def _search(field: _Field, budget: Tensor, step: float, rounds: int) -> Tensor:
    low = torch.zeros_like(budget)
    value_low, cost_low = _evaluate(field, low)
    # Above the steepest gain per unit of cost nobody moves.
    holds = (field.mass > 0).to(field.stay.dtype)
    apart = torch.where(field.cost > 0, field.cost, step)
    gain = (((field.worth - field.stay[:, :, None]) / apart).amax(2) * holds).amax((1, 2))
    steepest = gain.clamp(min=0)
    if field.far is not None and field.elsewhere is not None:
        steepest = torch.maximum(steepest, field.far.amax(1) / step)
    high = steepest * (1 + 1e-6)
    value_high, cost_high = _evaluate(field, high)
    value_high = value_high + budget * high
    best, psi = value_low, low
    better = value_high < best
    best, psi = torch.where(better, value_high, best), torch.where(better, high, psi)
    for k in range(rounds):
        # Convex and piecewise linear: the tangents at both ends meet below the minimum, and soon at it.
        slope_low, slope_high = budget - cost_low, budget - cost_high
        drop = slope_high - slope_low
        meet = (value_low - value_high + slope_high * high - slope_low * low) / drop.clamp(min=1e-30)
        trial = 0.5 * (low + high) if k % 3 == 2 else torch.where(drop > 0, meet, high)
        # The budget is small against the mass: the best psi is near the top, and 0 a bad end of the bracket.
        trial = torch.where(low > 0, trial, DOWN * high)
        trial = torch.maximum(torch.minimum(trial, high), low)
        worth, cost = _evaluate(field, trial)
        value = worth + budget * trial
        better = value < best
        best, psi = torch.where(better, value, best), torch.where(better, trial, psi)
        over = cost > budget
        low, value_low, cost_low = _choose(over, (trial, value, cost), (low, value_low, cost_low))
        high, value_high, cost_high = _choose(over, (high, value_high, cost_high), (trial, value, cost))
    return psi


def _entropic(field: _Field, budget: Tensor, reg: float, steps: int = 30) -> Tensor:
    r"""``psi`` of the paper's conjugate: the entropic plan ``P ~ x_i exp(reg (a_j - psi C_ij))`` costs ``E``."""
    options = torch.cat([field.stay[:, :, None], field.worth], 2)
    costs = torch.cat([torch.zeros_like(field.cost[:1]), field.cost])
    low = torch.zeros_like(budget)
    top = options.amax((1, 2, 3))
    bottom = torch.where(field.stay > 0.5 * NOWHERE, field.stay, 0.0).amin((1, 2))
    high = (top - bottom + 30.0 / reg).clamp(min=0) * 2
    for _ in range(steps):
        psi = 0.5 * (low + high)
        weight = (reg * (options - psi.view(-1, 1, 1, 1) * costs)).softmax(2)
        over = (field.mass * (weight * costs).sum(2)).sum((1, 2)) > budget
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
        for part in torch.split(every, chunk):
            signs = torch.full((part.shape[0],), sign, dtype=torch.float64, device=device)
            rows = units(source.shape, part // size, part % size, signs, like)
            found.append(sign * source.maximum(rows))
        ends.append(torch.cat(found).reshape(images, *source.shape))
    return IntervalSet(ends[0], ends[1])
