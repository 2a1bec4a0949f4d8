"""Transport plans: who sends how much where, and the proof that a point lies in the ball.

A plan is an arc tensor ``flow >= 0`` (see :class:`wball.moves.Moves`) with ``flow[i -> j]`` the mass that pixel ``i``
sends to pixel ``j``. Its rows sum to the centre ``x``, its columns to the point ``z``, and ``<flow, C>`` bounds the
distance between them. Anyone can check these three sums without solving anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wball.moves import Moves

REPAIR_SWEEPS = 200
"""Box sweeps before :meth:`Plan.repair` gives up on finesse and shrinks towards the centre."""


@dataclass(frozen=True)
class Plan:
    """A local or dense transport plan of a batch of images.

    Attributes:
        moves: the geometry: which moves exist and what they cost.
        flow: ``(B, C, K, H, W)``, the mass on each move.
    """

    moves: Moves
    flow: Tensor

    def arcs(self) -> Tensor:
        """The mass on each move, ``(B, C, K, H, W)``."""
        return self.flow

    def rows(self) -> Tensor:
        """What each pixel sends, itself included: the centre ``x``."""
        return self.flow.sum(2)

    def columns(self) -> Tensor:
        """What each pixel receives, itself included: the point ``z``."""
        return self.moves.scatter(self.flow)

    def cost(self) -> Tensor:
        """``<P, C>`` per image, in mass x pixels."""
        return (self.flow * self.moves.cost).flatten(1).sum(1)

    def cancelled(self) -> Plan:
        """The plan without opposite flows: of ``i -> j`` and ``j -> i`` only the difference moves.

        Rows and columns stay, because both ends keep what they no longer exchange. The cost never rises where the
        cost is symmetric or not: both moves shrink by the same mass, and staying is free.
        """
        stay = self.moves.stay()
        common = torch.minimum(self.flow, self.moves.opposite(self.flow))
        common = torch.where(stay, torch.zeros_like(common), common)
        return self._sending_back(common)

    def toward_centre(self, share: Tensor) -> Plan:
        """Every move scaled by ``share`` (per image, in [0, 1]), the rest staying: ``z = x + share (z - x)``."""
        keep = share.view(-1, 1, 1, 1, 1).to(self.flow.dtype)
        stay = self.moves.stay()
        home = torch.where(stay, torch.zeros_like(self.flow), self.flow * (1 - keep)).sum(2, keepdim=True)
        # Scaled, not reduced: at a share of 1e-12 a difference would keep four digits of the budget.
        return replace(self, flow=torch.where(stay, self.flow + home, self.flow * keep))

    def repair(self, budget: Tensor, box: tuple[float, float] | None) -> Plan:
        """The nearest cheap plan that is feasible to the last bit: columns in the box, cost within the budget.

        Mass that overfills a pixel goes back along the moves it came by; a pixel drained below ``lo`` recalls what it
        sent. Both only ever shrink moves, so the sweeps end at the identity at worst, and the identity is feasible.
        What a finite number of sweeps leaves is removed by shrinking that image's moves towards the centre.
        """
        plan = self if box is None else self._into_box(*box)
        plan, stay = plan.within(budget), plan.moves.stay()
        return replace(plan, flow=torch.where(stay, plan.flow, plan.flow.clamp(min=0)))

    def within(self, budget: Tensor) -> Plan:
        """The plan, scaled towards the centre where it costs more than ``budget`` (per image)."""
        cost = self.cost()
        share = torch.where(cost > budget, budget / cost.clamp(min=torch.finfo(cost.dtype).tiny), torch.ones_like(cost))
        return self.toward_centre(share) if bool((share < 1).any()) else self

    def _into_box(self, lo: float, hi: float) -> Plan:
        plan, rounding = self, 8 * torch.finfo(self.flow.dtype).eps * max(1.0, hi)
        stay = self.moves.stay()
        zero = torch.zeros_like(self.flow)
        for sweep in range(REPAIR_SWEEPS):
            z = plan.columns()
            over, under = z > hi + rounding, z < lo - rounding
            if not bool((over | under).any()):
                return plan
            moved = torch.where(stay, zero, plan.flow)
            # The last sweeps return ever more than the excess, so that what circulates among full pixels dies out.
            more = 2.0 ** max(0, sweep - REPAIR_SWEEPS + 40)
            excess, lack = more * torch.where(over, z - hi, 0), more * torch.where(under, lo - z, 0)
            # Send back first to where there is room, recall first from where there is plenty.
            room = torch.minimum(moved, (hi - z).clamp(min=0).unsqueeze(2))
            rate, rest = _rates(excess, plan.moves.scatter(room), plan.moves.scatter(moved))
            back = room * plan.moves.gather(rate) + moved * plan.moves.gather(rest)
            plenty = torch.minimum(moved, plan.moves.gather((z - lo).clamp(min=0)))
            rate, rest = _rates(lack, plenty.sum(2), moved.sum(2))
            recall = plenty * rate.unsqueeze(2) + moved * rest.unsqueeze(2)
            plan = plan._sending_back(torch.minimum(torch.maximum(back, recall), moved))
        z = plan.columns()
        bad = ((z > hi + rounding) | (z < lo - rounding)).flatten(1).any(1)
        return plan.toward_centre((~bad).to(z.dtype)) if bool(bad.any()) else plan

    def _sending_back(self, returned: Tensor) -> Plan:
        """The plan after ``returned`` (an arc tensor, zero where mass stays) was taken off its moves to stay."""
        stay = self.moves.stay()
        home = returned.sum(2, keepdim=True)
        return replace(self, flow=torch.where(stay, self.flow + home, self.flow - returned))


def _rates(amount: Tensor, first: Tensor, everything: Tensor) -> tuple[Tensor, Tensor]:
    """The shares of ``first`` and of ``everything`` that make up ``amount``: of the former alone where it suffices."""
    tiny, none = torch.finfo(amount.dtype).tiny, torch.zeros_like(amount)
    enough = first >= amount
    rate = torch.where(enough, amount / first.clamp(min=tiny), none)
    return rate, torch.where(enough, none, amount / everything.clamp(min=tiny))


def identity(moves: Moves, x: Tensor) -> Plan:
    """The plan that moves nothing."""
    flow = torch.where(moves.stay(), x.unsqueeze(2), torch.zeros((), dtype=x.dtype, device=x.device))
    return Plan(moves, flow)
