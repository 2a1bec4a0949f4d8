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
within the tier's longest. This only ever enlarges the bound. Charged rows also tell apart the moves that are two listed
ones (:mod:`wball.input_sets.detours`), where all pixels are sources.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from wball.cost import DenseCost, GridCost, GroundCost
from wball.input_sets.base import ROUNDS, Constraints, InputSet, Plans
from wball.input_sets.box_program import BoxProgram
from wball.input_sets.charges import Charged, Charges, Kept, rounded_up, spread
from wball.input_sets.detours import Detours, detours, tiers_from
from wball.input_sets.rows import Rows, inside, read_patches
from wball.kernels import dispatch
from wball.kernels.row_maximum import NOWHERE, Field, RowProblem, row_maximum
from wball.kernels.row_maximum.reference import entropic_psi, worth_of

LIST_ALL = 8192
"""Images with at most this many (pixel, move) pairs have every move listed: full plans are then exact."""

ENOUGH = 3.0
"""The longest reach where longer moves are known as two listed ones: 4 pixels tighten bounds by a hundredth of what 3
do, at twice the price."""


class TransportSet(InputSet):
    """A Wasserstein ball around each image: budgets ``(B,)`` in float64, moves priced by ``cost``, pixels in ``box``.

    ``reach`` is the length below which moves of full plans are listed one by one.
    """

    def __init__(
        self,
        x: Tensor,
        cost: GroundCost,
        budget: Tensor,
        box: tuple[float, float] | None,
        plans: Plans,
        reach: float = 3.0,
    ) -> None:
        self._given = (cost, box, plans)
        self._x, self._reach = x, reach
        self.shape = tuple(x.shape[1:])
        self.box, self.budget = box, budget
        grid = x if x.ndim == 4 else x[:, None, None, :]
        self.x = grid.to(torch.float64)
        height, width = grid.shape[-2:]
        self.matrix: Tensor | None = None
        self.far: float | None = None
        self.tiers: list[
            tuple[float, int]
        ] = []  # least cost and reach in pixels of unlisted moves, sorted by length
        self.moves: list[tuple[int, int, float]] = []
        full = isinstance(cost, GridCost) and plans == "full"
        self.power = (
            cost.p if full and isinstance(cost, GridCost) else None
        )  # all moves, each at length ** power
        if isinstance(cost, DenseCost):
            if cost.size != height * width:
                raise ValueError(
                    f"the cost matrix is for {cost.size} pixels, but the images have {height * width}"
                )
            self.matrix = cost.matrix.to(x.device)
        elif isinstance(cost, GridCost) and plans == "full":
            every = cost.full(height, width).moves(height, width)
            limit = reach**cost.p if len(every) * height * width > LIST_ALL else math.inf
            self.moves = [m for m in every if m[2] < limit]
            beyond = [m[2] for m in every if m[2] >= limit]
            if beyond:
                self.far = min(beyond)
                self.tiers = tiers_from(reach, self.far, cost.p, max(height, width))
        else:
            self.moves = cost.moves(height, width)
        self.radius = max((max(abs(r), abs(c)) for r, c, _ in self.moves), default=0)
        self.listed = [
            m for m in self.moves if m[:2] != (0, 0)
        ]  # in the order of all lists of gains and charges
        prices = [d for *_, d in self.listed]
        self.rings = {
            d: slice(prices.index(d), prices.index(d) + prices.count(d))
            for d in sorted(set(prices))
        }
        self._active = self._list_active()
        self.kernel = dispatch.choose("row_maximum", x, cost.arcs(height, width, grid))
        self.compiled = self.kernel != "torch"

    @property
    def transport(self) -> TransportSet:
        return self

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

    @property
    def detours(self) -> Detours | None:
        """Moves that follow the listed ones, where charges of both halves are known: if every pixel is a source."""
        if self.far is None or self.power is None or self._active is not None:
            return None
        return detours(
            tuple(m[:2] for m in self.listed), self.power, self.x.shape[2], self.x.shape[3]
        )

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
        if (
            self.matrix is not None
            or large
            or not all(anchor.aligned(w, rows) for anchor, w in charged)
        ):
            return rows.dense(tuple(self.x.shape[1:]))
        return rows

    def _targets(self, rows: Rows, box: Tensor | None, times: int = 1) -> Tensor:
        """``a - r`` on the sources' grid widened by so many times the radius, :data:`NOWHERE` outside the image."""
        coeff, radius = rows.coeff, self.radius
        if rows.corner is None:
            value = coeff if box is None else coeff - box
            return F.pad(value, (times * radius,) * 4, value=NOWHERE)
        value = F.pad(coeff, (radius,) * 4)
        if box is not None:
            value = value - box
        value = F.pad(value, (times * radius,) * 4)
        corner = (rows.corner[0] - (1 + times) * radius, rows.corner[1] - (1 + times) * radius)
        keep = inside(corner, (value.shape[2], value.shape[3]), self.x.shape[1:])
        return value.masked_fill(~keep, NOWHERE)

    def _slice(self, padded: Tensor, row: int, column: int) -> Tensor:
        radius = self.radius
        height, width = padded.shape[-2] - 2 * radius, padded.shape[-1] - 2 * radius
        return padded[
            ..., radius + row : radius + row + height, radius + column : radius + column + width
        ]

    def _sources(self, rows: Rows, flat: Tensor) -> Tensor:
        """Pick the sources out of a map on the sources' grid, ``(N, C, h, w) -> (N, C, S)``."""
        flat = flat.flatten(2)
        if rows.corner is None and self._active is not None:
            return flat.gather(2, self._active[0][rows.image])
        return flat

    def _moved(self, rows: Rows, padded: Tensor) -> Tensor:
        """What every source finds at the end of each listed move, ``(N, C, K, S)``."""
        width = padded.shape[3]
        inner = (padded.shape[2] - 2 * self.radius, width - 2 * self.radius)
        everywhere = rows.corner is not None or self._active is None
        place = torch.arange(inner[0] * inner[1], device=padded.device)
        if not everywhere and self._active is not None:
            place = self._active[0][rows.image]
        centre = (place // inner[1] + self.radius) * width + place % inner[1] + self.radius
        shift = _constant(
            tuple(r * width + c for r, c, _ in self.listed), torch.long, padded.device
        )
        index = centre[..., None, :] + shift[:, None]
        if everywhere:
            return padded.flatten(2).index_select(2, index.flatten()).unflatten(2, index.shape)
        return padded.flatten(2).gather(2, index.flatten(2)).reshape(index.shape)

    def _mass(self, rows: Rows) -> Tensor:
        dtype = rows.coeff.dtype
        if rows.corner is None:
            return (self.x.flatten(2) if self._active is None else self._active[1]).to(dtype)[
                rows.image
            ]
        radius = self.radius
        size = (rows.coeff.shape[2] + 2 * radius, rows.coeff.shape[3] + 2 * radius)
        corner = (rows.corner[0] - radius, rows.corner[1] - radius)
        return read_patches(self.x.to(dtype), rows.image, corner, size).flatten(2)

    @property
    def active(self) -> Tensor | None:
        """Sources of dense rows, ``(B, C, S)``; ``None``: every pixel."""
        return None if self._active is None else self._active[0]

    def _charges(self, rows: Rows, charged: Charged, given: Charged = ()) -> Charges | None:
        """What all anchors charge to rows that are aligned with them; ``given`` before that was done."""
        if isinstance(given, Kept) and given.total is not None:
            return given.total
        total: Charges | None = None
        for anchor, weights in charged:
            if rows.corner is None and weights.corner is not None:
                raise ValueError("dense image rows need dense weights")
            part = anchor.charge(weights, rows, self.active)
            total = part if total is None else total.plus(part)
        if isinstance(given, Kept):
            given.total = total
        return total

    def _field(
        self,
        rows: Rows,
        box: Tensor | None = None,
        charges: Charges | None = None,
        reg: float = math.inf,
    ) -> Field:
        """What every pixel with mass can do. Moves of equal cost merge: by their maximum, or softly for ``reg``."""
        mass = self._mass(rows)
        dtype = rows.coeff.dtype
        if self.matrix is not None:
            value = (rows.coeff if box is None else rows.coeff - box).flatten(2)
            free = torch.isfinite(self.matrix).T  # (targets, sources)
            worth = torch.where(free, value[..., None], NOWHERE)
            if charges is not None:
                worth = worth + charges.moves
            return Field(mass, value, worth, torch.where(free, self.matrix.T, 0.0).to(dtype))
        padded = self._targets(rows, box)
        stay = self._sources(rows, self._slice(padded, 0, 0))
        worth = self._moved(rows, padded)
        if charges is not None:
            worth = worth + charges.moves
        costs = list(self.rings)
        levels = [_merged(worth[:, :, ring], reg) for ring in self.rings.values()]
        far, elsewhere, away = None, None, None
        if self.far is not None:
            ends, tiers = self._slice(padded, 0, 0), self.tiers
            if charges is not None and (longer := self.detours) is not None:
                size = (ends.shape[2], ends.shape[3])
                paid = longer.worth(charges.moves, self._targets(rows, box, 2), size, self.radius)
                levels += [_merged(paid[:, :, ring], reg) for ring in longer.rings.values()]
                costs += list(longer.rings)
                tiers = longer.tiers
            if charges is not None:
                ends = ends + charges.into
            within, around = 0, ends
            for least, wide in tiers:
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
                away = _constant(prices, dtype, stay.device)
        cost = _constant(tuple(costs), dtype, stay.device).view(-1, 1)
        options = torch.stack(levels, 2) if levels else stay[:, :, None] + NOWHERE
        return Field(
            mass, stay, options, cost if levels else cost.new_ones(1, 1), far, elsewhere, away
        )

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
                sums[rows.image, :, r, c]
                for r, c in ((bottom, right), (top, right), (bottom, left), (top, left))
            ]
            return corners[0] - corners[1] - corners[2] + corners[3]

        edges = [
            within(self.radius),
            *(within(wide) for _, wide in self.tiers[:-1]),
            self.x.sum((2, 3))[rows.image],
        ]
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
        given, (rows, charged) = charged, self._align(rows, charged)
        budget = self.budget[rows.image]
        charges = self._charges(rows, charged, given)
        recorded = torch.is_grad_enabled() and any(
            part.requires_grad
            for part in (
                rows.coeff,
                *([] if box is None else [box]),
                *(w.coeff for _, w in charged),
            )
        )
        if reg < math.inf or recorded:
            field = self._field(rows, box, charges)
            with torch.no_grad():
                psi = self._psi(rows, box, charges, field, reg, rounds).to(rows.coeff.dtype)
            value = worth_of(field, psi) + psi * budget.to(rows.coeff.dtype)
        else:
            value, _ = row_maximum(self._problem(rows, box, charges), rounds, self.kernel)
        if self.box is None:
            return value
        lo, hi = self.box
        if box is not None:
            value = value + (hi * box.clamp(min=0) + lo * box.clamp(max=0)).flatten(1).sum(1)
        if charges is not None:
            return value
        return torch.minimum(value, self._box_alone(rows))

    def rough(self, rows: Rows) -> Tensor | None:
        r"""The budget spent on the steepest step: :math:`\langle a, x \rangle + \sqrt 2\, E \max |a_i - a_j|`.

        The maximum is over neighbours in rows and columns, by which every pixel is reached in at most ``sqrt(2)`` times
        its distance; and whole distances cost no more than their powers.
        """
        if self.power is None or self.power < 1 or rows.coeff.ndim != 4:
            return None
        coeff = rows.coeff if rows.corner is None else F.pad(rows.coeff, (1,) * 4)
        steps = [coeff.diff(dim=k).abs().flatten(1) for k in (2, 3)]
        steepest = torch.cat([*steps, coeff.new_zeros((coeff.shape[0], 1))], 1).amax(1)
        inside = (rows.coeff * rows.read(self.x.to(coeff.dtype))).flatten(1).sum(1)
        return inside + 1.4142135623731 * steepest * self.budget[rows.image].to(coeff.dtype)

    def _box_alone(self, rows: Rows) -> Tensor:
        """The bound with ``psi = 0`` and ``r = a``."""
        assert self.box is not None
        lo, hi = self.box
        return torch.maximum(hi * rows.coeff, lo * rows.coeff).flatten(1).sum(1)

    def _problem(
        self, rows: Rows, box: Tensor | None, charges: Charges | None, field: Field | None = None
    ) -> RowProblem:
        """Rows as the kernels take them; ``field`` if it is known already."""
        beyond = rows.corner is not None and self.far is not None
        return RowProblem(
            rows.coeff,
            rows.image,
            rows.corner,
            self.x,
            self.budget[rows.image],
            self.moves,
            self.tiers,
            self.step,
            lambda: self._elsewhere(rows)[0] if beyond else None,
            lambda: self._field(rows, box, charges) if field is None else field,
            box is None and charges is None,
        )

    def _psi(
        self,
        rows: Rows,
        box: Tensor | None,
        charges: Charges | None,
        field: Field,
        reg: float,
        rounds: int,
    ) -> Tensor:
        """The best price of the budget, or that of the entropic plan."""
        if reg < math.inf:
            soft = self._field(rows, box, charges, reg).single()
            return entropic_psi(soft, self.budget[rows.image].float(), reg)
        return row_maximum(self._problem(rows, box, charges, field), rounds, self.kernel)[1]

    def _align(self, rows: Rows, charged: Charged) -> tuple[Rows, Charged]:
        """Rows and weights that are all patches, or all dense."""
        rows = self._patched(rows, charged)
        if rows.corner is None:
            charged = [
                (anchor, w if w.corner is None else w.dense(anchor.layer)) for anchor, w in charged
            ]
        return rows, charged

    def gains(self, rows: Rows, charged: Charged) -> tuple[Tensor, Tensor, Tensor]:
        """``max(a_j - a_i + M_ij, 0)`` on the sources of dense rows: listed moves, out of a source, into a target.

        In float32, no number smaller than it is in the rows' precision.
        """
        given, (rows, charged) = charged, self._align(rows, charged)
        charges = self._charges(rows, charged, given)
        if self.matrix is not None:
            value = rows.coeff.flatten(2)
            moves = value[:, :, :, None] - value[:, :, None, :]
            if charges is not None:
                moves = moves + charges.moves
            moves = torch.where(torch.isfinite(self.matrix.T), moves, 0.0)
            moves = rounded_up(moves.clamp(min=0))
            return (
                moves,
                torch.zeros_like(value, dtype=moves.dtype),
                torch.zeros_like(rows.coeff, dtype=moves.dtype),
            )
        padded = self._targets(rows, None)
        stay = self._slice(padded, 0, 0)
        source = self._sources(rows, stay)
        moves = self._moved(rows, padded).sub_(source[:, :, None])
        out, into = -source, stay
        if charges is not None:
            moves, out, into = moves.add_(charges.moves), out + charges.out, into + charges.into
        moves, out, into = (
            rounded_up(part) for part in (moves.clamp_(min=0), out.clamp(min=0), into.clamp(min=0))
        )
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
                prices[n] = torch.as_tensor(
                    found, dtype=prices.dtype, device=prices.device
                ).reshape(prices[n].shape)
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
            value, moves = self._sources(rows, self._slice(padded, 0, 0)), self._moved(rows, padded)
            costs = torch.tensor(
                [d for *_, d in self.listed], dtype=torch.float64, device=padded.device
            )[:, None]
        if charges is not None:
            moves = moves + charges.moves
        return torch.cat([value[:, :, None], moves], 2), torch.cat(
            [costs.new_zeros(1, costs.shape[1]), costs]
        )

    def _program(self, image: int, price: Tensor) -> BoxProgram:
        channels, height, width = self.x.shape[1:]
        place = self._places()[image]  # (C, S)
        if self.matrix is not None:
            every = (
                torch.arange(height * width, device=place.device)
                .view(1, 1, -1)
                .expand(*place.shape, -1)
            )
            target = torch.where(torch.isfinite(self.matrix)[None], every, -1)
        else:
            shift = torch.tensor(
                [m[:2] for m in self.listed], dtype=torch.long, device=place.device
            ).reshape(-1, 2)
            row, column = (
                place[..., None] // width + shift[:, 0],
                place[..., None] % width + shift[:, 1],
            )
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
        everything = float(mass.sum()) * (1 + 1e-9)
        return BoxProgram(
            mass.flatten().cpu().numpy(),
            target.cpu().numpy(),
            cost.cpu().double().numpy(),
            channels * height * width,
            channel.flatten().cpu().numpy(),
            channels,
            self.far,
            float(self.budget[image]),
            self.box or (0.0, everything),
        )

    def take(self, index: Tensor) -> TransportSet:
        cost, box, plans = self._given
        part = TransportSet(self._x[index], cost, self.budget[index], box, plans, self._reach)
        # Anchors list gains pixel by pixel, in the order of the whole batch: a part must not pack its pixels anew.
        part._active = (
            None if self._active is None else (self._active[0][index], self._active[1][index])
        )
        return part

    def finer(self, reach: float) -> TransportSet:
        cost, box, plans = self._given
        if self.detours is not None:
            reach = min(reach, ENOUGH)
        if self.far is None or reach == self._reach:
            return self
        finer = TransportSet(self._x, cost, self.budget, box, plans, reach)
        finer._active = self._active  # equal masses may be listed in another order
        return finer

    def constraints(self, image: int) -> Constraints:
        if self.far is not None:
            raise ValueError("linear programs need every move listed")
        _, price = self._listed(
            Rows(torch.zeros_like(self.x[image : image + 1]), torch.tensor([image])), None
        )
        program = self._program(image, price)
        size = self.x[image].numel()
        to_image = np.zeros((size, program.ends.shape[0]))
        to_image[program.ends, np.arange(program.ends.shape[0])] = 1.0
        high = program.mass[program.listed[0]]
        equal, below = program.equal.toarray(), program.below.toarray()
        return Constraints(
            to_image, np.zeros_like(high), high, equal, program.equal_to, below, program.below_to
        )

    @property
    def small(self) -> bool:  # type: ignore[override]
        pixels = self.x[0].numel()
        return (
            pixels
            * (self.x.shape[2] * self.x.shape[3] if self.matrix is not None else len(self.moves))
            <= 2048
        )

    @property
    def step(self) -> float:
        """The cheapest move that costs anything."""
        if self.matrix is not None:
            costs = self.matrix[torch.isfinite(self.matrix) & (self.matrix > 0)]
            return float(costs.min()) if costs.numel() else 1.0
        return min([d for d in (*self.rings, self.far or 0.0) if d > 0], default=1.0)

    def box_prices(self, rows: Rows) -> Tensor | None:
        if self.box is None:
            return None
        rows = self._patched(rows)
        return torch.zeros_like(
            rows.coeff if rows.corner is None else F.pad(rows.coeff, (self.radius,) * 4)
        )

    def floats(self, rows: Rows, charged: bool = False) -> int:
        rows = self._patched(rows)
        around = 0 if rows.corner is None else 4 * self.radius
        sources = (
            rows.coeff.shape[1] * (rows.coeff.shape[2] + around) * (rows.coeff.shape[3] + around)
        )
        listed = sources
        if rows.corner is None and self.active is not None:
            listed = self.active.shape[1] * self.active.shape[2]
        if self.matrix is not None:
            return 4 * rows.coeff.shape[1] * self.matrix.numel()
        if charged:
            longer = len(self.detours or ())
            return 2 * sources + (2 * len(self.moves) + 2 * longer + 6) * max(listed, sources // 2)
        return 2 * sources + (len(self.moves) + len(self.tiers) + 4) * listed


@lru_cache(maxsize=256)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device; a copy to a GPU makes the host wait."""
    return torch.tensor(values, dtype=dtype, device=device)


def _merged(worth: Tensor, reg: float) -> Tensor:
    """The best of moves of equal cost, ``(N, C, k, S) -> (N, C, S)``: by their maximum, or softly for ``reg``."""
    return worth.amax(2) if reg == math.inf else (reg * worth).logsumexp(2) / reg


def _widen(maps: Tensor, reach: int) -> Tensor:
    """The largest value within ``reach`` pixels in rows and columns."""
    if reach <= 0:
        return maps
    maps = F.max_pool2d(maps, (1, 2 * reach + 1), stride=1, padding=(0, reach))
    return F.max_pool2d(maps, (2 * reach + 1, 1), stride=1, padding=(reach, 0))
