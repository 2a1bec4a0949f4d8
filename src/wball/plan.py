r"""Transport plans, which prove that a point is in the ball.

A plan is an arc tensor ``flow >= 0`` (see :class:`wball.cost.Moves`) with ``flow[i -> j]`` the mass
that pixel ``i`` sends to pixel ``j``. Its rows sum to the centre ``x``, its columns to the point
``z``, and ``<flow, C>`` bounds the distance between them. These three sums can be checked without
solving anything, and ``wball.audit(plan=...)`` does.

A plan has one of two forms with the same methods: written out, one number per move (:class:`Plan`),
or in factors, a few images (:class:`FactoredPlan`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from wball.cost import ALL, Moves
from wball.display import Summarised
from wball.inputs import dot, per_image

REPAIR_SWEEPS = 200
"""Box sweeps of :meth:`Plan.repair` before it scales the plan towards the centre."""

SPREAD = 600.0
"""Largest range of the potentials of an image, in nats, whose plan is a product of factors that
float64 represents: ``exp(-psi C)`` vanishes beyond 745 nats, and must not where a potential could
still make up for it."""

AnyPlan = TypeVar("AnyPlan", bound="StoredPlan")


class StoredPlan(ABC, Summarised):
    """Plans of a batch of images: moves, and tensors with one entry per image."""

    moves: Moves

    def headline(self) -> dict[str, str]:
        return {"images": str(len(self.tensors()[0]))}

    @abstractmethod
    def arcs(self) -> Tensor:
        """The mass on each move, ``(B, C, K, H, W)``."""

    def written(self) -> Plan:
        """The plan written out with one number per move, as a :class:`Plan`."""
        arcs = self.arcs()
        return Plan(self.moves.like(arcs), arcs)

    def rows(self) -> Tensor:
        """The mass that each pixel sends or keeps: the centre ``x``."""
        return self.arcs().sum(2)

    def columns(self) -> Tensor:
        """The mass that each pixel receives or keeps: the point ``z``."""
        arcs = self.arcs()
        return self.moves.like(arcs).scatter(arcs)

    def cost(self) -> Tensor:
        """``<P, C>`` per image, in mass x pixels."""
        arcs = self.arcs()
        return dot(arcs, self.moves.like(arcs).cost)

    def net_cost(self) -> Tensor:
        """Cost after opposite moves cancel (:meth:`Plan.cancelled`), per image."""
        return self.written().cancelled().cost()

    def take(self: AnyPlan, index: Tensor) -> AnyPlan:
        """The plans of a subset of the images (``index``: positions or a mask)."""
        return self.with_tensors([tensor[index] for tensor in self.tensors()])

    def put(self: AnyPlan, index: Tensor, part: AnyPlan) -> AnyPlan:
        """A copy with the plans of the images at ``index`` replaced."""
        pairs = zip(self.tensors(), part.tensors(), strict=True)
        return self.with_tensors(
            [mine.index_copy(0, index, theirs.to(mine)) for mine, theirs in pairs]
        )

    def where(self: AnyPlan, mask: Tensor, other: AnyPlan) -> AnyPlan:
        """These plans where the mask is set, and those of ``other`` elsewhere."""
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return self.with_tensors(
            [torch.where(per_image(mask, mine), mine, theirs.to(mine)) for mine, theirs in pairs]
        )

    @staticmethod
    def joined(parts: Sequence[AnyPlan]) -> AnyPlan:
        """Concatenate the plans of several batches."""
        pieces = zip(*(part.tensors() for part in parts), strict=True)
        return parts[0].with_tensors([torch.cat(piece) for piece in pieces])

    def tensors(self) -> list[Tensor]:
        """The tensors with an entry per image."""
        return [getattr(self, field.name) for field in fields(self) if field.name != "moves"]  # type: ignore[arg-type]

    def with_tensors(self: AnyPlan, tensors: Sequence[Tensor]) -> AnyPlan:
        """Plans with the same moves and other tensors."""
        return type(self)(self.moves, *tensors)  # type: ignore[call-arg]


@dataclass(frozen=True, repr=False)
class FactoredPlan(StoredPlan):
    r"""Plans stored as a few images each instead of one number per move.

    .. math::
        P_{ij} = scale \; x_i\, \mathrm{softmax}_j(s_j - \psi C_{ij}) \, give_i\, keep_j
        \quad (i \ne j), \qquad
        P_{ii} = x_i - \sum_{j \ne i} P_{ij}

    Attributes:
        moves: which moves exist and what they cost.
        x: the centres, ``(B, C, H, W)``.
        potentials: ``s``, images like ``x``.
        psi: the price of cost, per image.
        keep: column factors, images like ``x``.
        give: row factors, images like ``x``.
        scale: factor on everything that moves, per image.
    """

    moves: Moves
    x: Tensor
    potentials: Tensor
    psi: Tensor
    keep: Tensor
    give: Tensor
    scale: Tensor

    @classmethod
    def identity(cls, moves: Moves, x: Tensor) -> FactoredPlan:
        """The plan that moves nothing."""
        zero, one = torch.zeros_like(x), torch.ones_like(x)
        none = x.new_zeros(len(x), dtype=torch.float64)
        return cls(moves, x, zero, none.to(x.dtype), one, one, none)

    @classmethod
    def tempered(
        cls,
        moves: Moves,
        x: Tensor,
        u: Tensor,
        psi: Tensor,
        tau: Tensor,
        keep: Tensor,
        give: Tensor,
    ) -> FactoredPlan:
        """The plan of a potential and a price in image units at temperature ``tau``; nothing moves
        where that is 0."""
        warm = tau.double() > 0
        heat = torch.where(warm, tau.double(), 1.0)
        potentials = u.double() / per_image(heat, u)
        return cls(moves, x, potentials, psi.double() / heat, keep, give, warm.double())

    def arcs(self) -> Tensor:
        """The mass on each move, ``(B, C, K, H, W)``, in float64."""
        x, s, psi, keep, give, scale = (part.double() for part in self.tensors())
        moves = self.moves.like(x)
        score = moves.gather(s) - per_image(psi, x)[..., None] * moves.cost
        sent = torch.softmax(torch.where(moves.allowed, score, -torch.inf), 2)
        out = (per_image(scale, x) * x * give).unsqueeze(2)
        # Potentials of rows that send nothing may be NaN.
        sent = torch.where(moves.stay() | (out == 0), 0.0, out * sent * moves.gather(keep))
        home = (x.unsqueeze(2) - sent.sum(2, keepdim=True)).clamp(min=0)  # negative by rounding
        return torch.where(moves.stay(), home, sent)

    def net_cost(self) -> Tensor:
        """The net cost without writing out the plan, for attacks that need it at every step."""
        x, s, psi, keep, give, scale = (part.double() for part in self.tensors())
        low, high = torch.aminmax(s.flatten(1), dim=1)
        if bool((high - low > SPREAD).any()):
            return super().net_cost()
        moves, price = self.moves.like(x), per_image(psi, x)
        column = torch.exp(s - per_image(0.5 * (high + low), s))
        weights = moves.weights(price)[ALL]
        row = x * give / moves.sums(column, weights)[:, :, 0]
        net = moves.net_cost(row, column * keep, price)
        idle = (scale == 0) | ~give.flatten(1).any(1)  # potentials may be NaN
        return torch.where(idle, 0.0, scale * net)


@dataclass(frozen=True, repr=False)
class Plan(StoredPlan):
    """Plans with one number per move.

    Attributes:
        moves: which moves exist and what they cost.
        flow: ``(B, C, K, H, W)``, the mass on each move.
    """

    moves: Moves
    flow: Tensor

    @classmethod
    def identity(cls, moves: Moves, x: Tensor) -> Plan:
        """The plan that moves nothing."""
        return cls(moves, torch.where(moves.stay(), x.unsqueeze(2), 0.0))

    def arcs(self) -> Tensor:
        return self.flow

    def mixed(self, gamma: Tensor, other: Plan) -> Plan:
        """``(1 - gamma)`` of this plan and ``gamma`` of the other, per image: plans of the mixed
        points."""
        weight = per_image(gamma.to(self.flow.dtype), self.flow)
        return replace(self, flow=self.flow + weight * (other.flow.to(self.flow.dtype) - self.flow))

    def cancelled(self) -> Plan:
        """The plan without opposite flows: of ``i -> j`` and ``j -> i`` only the difference moves.

        Rows and columns stay the same, because both pixels keep the mass they no longer exchange.
        The cost never rises: both moves shrink by the same mass, and staying is free.
        """
        stay = self.moves.stay()
        common = torch.minimum(self.flow, self.moves.opposite(self.flow))
        common = torch.where(stay, 0.0, common)
        return self._sending_back(common)

    def toward_centre(self, scale: Tensor) -> Plan:
        """Scale every move by a factor in [0, 1] per image: ``z = x + scale (z - x)``."""
        keep = per_image(scale, self.flow).to(self.flow.dtype)
        stay = self.moves.stay()
        home = torch.where(stay, 0.0, self.flow * (1 - keep)).sum(2, keepdim=True)
        # Multiply instead of subtracting, which would lose digits at small scales.
        return replace(self, flow=torch.where(stay, self.flow + home, self.flow * keep))

    def repair(self, budget: Tensor, box: tuple[float, float] | None) -> Plan:
        """A nearby plan that is feasible to the last bit: columns in the box, cost in the budget.

        Mass above ``hi`` returns along the moves it came by; a pixel below ``lo`` recalls mass that
        it sent. Both only shrink moves, so that the sweeps end at the identity at worst, which is
        feasible. If the sweeps do not finish, the image's moves are scaled towards the centre.
        """
        plan = self if box is None else self._into_box(*box)
        plan, stay = plan.within(budget), plan.moves.stay()
        return replace(plan, flow=torch.where(stay, plan.flow, plan.flow.clamp(min=0)))

    def within(self, budget: Tensor) -> Plan:
        """The plan, scaled towards the centre where it costs more than ``budget`` (per image)."""
        cost = self.cost()
        scale = torch.where(
            cost > budget,
            budget / cost.clamp(min=torch.finfo(cost.dtype).tiny),
            1.0,
        )
        return self.toward_centre(scale) if bool((scale < 1).any()) else self

    def _into_box(self, lo: float, hi: float) -> Plan:
        """The plan with all columns inside the box, as far as the sweeps succeed."""
        plan, rounding = self, 8 * torch.finfo(self.flow.dtype).eps * max(1.0, hi)
        stay, full = self.moves.stay(), torch.ones_like(self.flow[:, :, 0])
        for sweep in range(REPAIR_SWEEPS):
            z = plan.columns()
            over, under = z > hi + rounding, z < lo - rounding
            if not bool((over | under).any()):
                return plan
            moved = torch.where(stay, 0.0, plan.flow)
            # The last sweeps return more than the excess, so that mass does not circulate forever.
            more = 2.0 ** max(0, sweep - REPAIR_SWEEPS + 40)
            excess, lack = more * torch.where(over, z - hi, 0), more * torch.where(under, lo - z, 0)
            # Return mass first to pixels with room, or to where much came from such pixels, at any
            # distance, and recall it first from pixels with a surplus.
            room = torch.minimum(moved, (hi - z).clamp(min=0).unsqueeze(2))
            near = moved * torch.where(z < hi, 1.0, full).unsqueeze(2)
            full = plan.moves.scatter(near).clamp(min=1e-30)
            rate, rest = _rates(excess, plan.moves.scatter(room), full)
            back = room * plan.moves.gather(rate) + near * plan.moves.gather(rest)
            plenty = torch.minimum(moved, plan.moves.gather((z - lo).clamp(min=0)))
            rate, rest = _rates(lack, plenty.sum(2), moved.sum(2))
            recall = plenty * rate.unsqueeze(2) + moved * rest.unsqueeze(2)
            plan = plan._sending_back(torch.minimum(torch.maximum(back, recall), moved))
        z = plan.columns()
        bad = ((z > hi + rounding) | (z < lo - rounding)).flatten(1).any(1)
        return plan.toward_centre((~bad).to(z.dtype)) if bool(bad.any()) else plan

    def _sending_back(self, returned: Tensor) -> Plan:
        """The plan in which the mass ``returned`` (an arc tensor, zero for staying) stays where it
        was."""
        stay = self.moves.stay()
        home = returned.sum(2, keepdim=True)
        return replace(self, flow=torch.where(stay, self.flow + home, self.flow - returned))


def _rates(amount: Tensor, first: Tensor, everything: Tensor) -> tuple[Tensor, Tensor]:
    """Fractions of ``first``, or of ``everything`` if that is not enough, that add up to
    ``amount``."""
    tiny = torch.finfo(amount.dtype).tiny
    enough = first >= amount
    rate = torch.where(enough, amount / first.clamp(min=tiny), 0.0)
    return rate, torch.where(enough, 0.0, amount / everything.clamp(min=tiny))
