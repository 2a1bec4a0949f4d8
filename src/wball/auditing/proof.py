r"""Upper bounds of distances by transport plans, checked in float64. Nothing is solved.

A plan ``P >= 0`` that uses only the moves of the cost, sends ``x`` and delivers ``z`` proves that
the distance between them is at most ``<P, C>``. It is either written out, one number per move, or
given in factors, a few images (:class:`wball.plan.FactoredPlan`), from which every move is computed
here:

.. math::
    P_{ij} = scale\; x_i\, \mathrm{softmax}_j(s_j - \psi C_{ij}) \, give_i\, keep_j \quad (i \ne j)

Opposite moves ``i -> j`` and ``j -> i`` cancel. Either way the result is a flow ``>= 0``, whatever
numbers came with the plan, and one check serves both: does a pixel send more than it has, what
arrives where, and what does it cost? Float32 points miss the sums by rounding. Missing or excess
mass is charged the largest cost, and a plan that misses more than 1e-5 of the image's mass proves
nothing.

This file shares no code with the solvers or their kernels.
"""

import math

import torch
from torch import Tensor

from wball.cost import DenseCost, GroundCost
from wball.plan import FactoredPlan, StoredPlan

MISSING_TOL = 1e-5
"""Mass that the sums of a plan may miss, as a fraction of the image's mass."""

AT_ONCE = {"cpu": 100_000, "cuda": 40_000_000}
"""Moves that are checked at a time: a processor's cache, a GPU's memory."""


def proved_distance(cost: GroundCost, x: Tensor, z: Tensor, plan: StoredPlan | Tensor) -> Tensor:
    """An upper bound of the distance from ``x`` to ``z`` in mass x pixels; inf without a proof.

    Args:
        cost: ground cost.
        x: centres, ``(B, C, H, W)``, float64.
        z: points, like ``x``.
        plan: a plan of each image: in factors, or its arcs, ``(B, C, K, H, W)`` in the order of
            ``cost.moves``.
    """
    moves = _MoveTable(cost, x)
    batch = x.shape[0]
    given = _factors(plan, x) if isinstance(plan, FactoredPlan) else [_arcs(plan, x, moves.listed)]
    flows = _factored_flow if isinstance(plan, FactoredPlan) else _listed_flow
    size = max(
        1, AT_ONCE.get(x.device.type, AT_ONCE["cpu"]) // max(1, moves.cost.shape[0] * x[:1].numel())
    )
    bounds = [torch.zeros(0, dtype=torch.float64, device=x.device)]
    for start in range(0, batch, size):
        part = slice(start, start + size)
        pieces = [values[part].detach().to(x.device, torch.float64) for values in given]
        flow = flows(moves, x[part], *pieces)
        bounds.append(_bound(moves, x[part], z[part], flow))
    return torch.cat(bounds)


def _arcs(plan: StoredPlan | Tensor, x: Tensor, count: int) -> Tensor:
    """The moves of a plan as an arc tensor, after checking its shape."""
    if not isinstance(plan, Tensor) and not hasattr(plan, "arcs"):
        raise TypeError(
            f"plan must be arcs (B, C, K, H, W) or a plan of wball.plan, got {type(plan).__name__}"
        )
    flow = plan if isinstance(plan, Tensor) else plan.arcs()
    expected = (*x.shape[:2], count, *x.shape[2:])
    if tuple(flow.shape) != expected:
        raise ValueError(
            f"plan must list its moves as (B, C, K, H, W) = {expected}, got {tuple(flow.shape)}"
        )
    return flow


def _factors(plan: FactoredPlan, x: Tensor) -> list[Tensor]:
    """The tensors of a factored plan, after checking their shapes."""
    values = {"psi": plan.psi, "scale": plan.scale}
    images = {"potentials": plan.potentials, "keep": plan.keep, "give": plan.give}
    for name, value in (values | images).items():
        shape = tuple(x.shape) if name in images else (x.shape[0],)
        if value.numel() != math.prod(shape) or len(value) != shape[0]:
            raise ValueError(f"plan.{name} must have shape {shape}, got {tuple(value.shape)}")
    return list((values | images).values())


class _MoveTable:
    """Every move out of a pixel, as tensors ``(K, n)``; if moves change the channel, the pixels are
    those of the whole image.

    Entry ``[k, i]`` is the ``k``-th move from pixel ``i``. First come the ``listed`` moves of the
    cost, then opposites that do not exist.

    Attributes:
        cost: of the move, 0 where it does not exist.
        exists: which moves the cost allows.
        target: the pixel where the move ends.
        opposite: position of the opposite move in the flattened table. Moves out of the image are
            their own.
    """

    def __init__(self, cost: GroundCost, x: Tensor) -> None:
        channels, height, width = (int(side) for side in x.shape[1:])
        self.channels = 1 if cost.channel_cost is None else channels  # that exchange mass
        sides = torch.tensor([height, width, self.channels])
        here = torch.arange(n := int(sides.prod()))
        if isinstance(cost, DenseCost):
            price = cost.matrix.cpu().T
            self.listed = n
            inside = torch.ones(n, n, dtype=torch.bool)
            target, opposite = here[:, None].expand(n, n), torch.arange(n * n).view(n, n).T
        else:
            moves = cost.moves(height, width, channels)
            prices = {(down, right, over): value for down, right, over, value in moves}
            self.listed = len(prices)
            for down, right, over in list(prices):
                prices.setdefault((-down, -right, -over), math.inf)
            number = {step: k for k, step in enumerate(prices)}
            price = torch.tensor(list(prices.values()), dtype=torch.float64)[:, None].expand(-1, n)
            places = torch.stack([here // width % height, here % width, here // (height * width)])
            ends = torch.tensor(list(prices))[:, :, None] + places  # (K, 3, n)
            inside = ((ends >= 0) & (ends < sides[:, None])).all(1)
            row, column, channel = ends.unbind(1)
            target = torch.where(inside, (channel * height + row) * width + column, here)
            back = torch.tensor([number[-r, -c, -s] for r, c, s in prices])
            own = torch.arange(len(prices))
            opposite = torch.where(inside, back[:, None], own[:, None]) * n + target
        exists = inside & price.isfinite()
        self.exists, self.cost = exists.to(x.device), price.where(exists, 0.0).to(x.device)
        self.target, self.opposite = target.to(x.device), opposite.to(x.device)
        self.stays = (target == here).to(x.device)

    def there(self, values: Tensor) -> Tensor:
        """``(N, n) -> (N, K, n)``: the value at the pixel where each move ends."""
        return values.index_select(1, self.target.flatten()).view(-1, *self.target.shape)

    def turned(self, flow: Tensor) -> Tensor:
        """``(N, K, n)``: the flow on the opposite of each move."""
        return flow.flatten(1).index_select(1, self.opposite.flatten()).view_as(flow)


def _factored_flow(
    moves: _MoveTable,
    x: Tensor,
    psi: Tensor,
    scale: Tensor,
    potentials: Tensor,
    keep: Tensor,
    give: Tensor,
) -> Tensor:
    """The flow of a plan in factors, opposite moves cancelled."""
    n = moves.target.shape[1]
    x, s, keep, give = (values.reshape(-1, n) for values in (x, potentials, keep, give))
    psi, scale = (
        values.reshape(-1).repeat_interleave(len(x) // len(psi)) for values in (psi, scale)
    )
    score = moves.there(s) - psi[:, None, None] * moves.cost
    share = score.masked_fill_(~moves.exists, -math.inf).softmax(1)
    flow = share.mul_((scale[:, None] * x * give)[:, None]).mul_(moves.there(keep))
    return (flow - moves.turned(flow)).clamp_(min=0)


def _listed_flow(moves: _MoveTable, x: Tensor, listed: Tensor) -> Tensor:
    """The flow of a plan that lists its moves; NaN on moves that do not exist."""
    n = moves.target.shape[1]
    given = listed.unflatten(1, (-1, moves.channels)).movedim(3, 2)
    given = given.reshape(-1, moves.listed, n).abs()
    flow = torch.zeros((len(given), *moves.cost.shape), dtype=torch.float64, device=x.device)
    flow[:, : moves.listed] = given
    return flow.masked_fill_(~moves.exists & (flow != 0), math.nan)


def _bound(moves: _MoveTable, x: Tensor, z: Tensor, flow: Tensor) -> Tensor:
    """The cost of a flow ``>= 0`` with missing mass; inf if it does not turn ``x`` into ``z``."""
    flow = flow.masked_fill(moves.stays & moves.exists, 0.0)
    before, after = (values.reshape(len(flow), -1) for values in (x, z))
    sent, arrived = flow.sum(1), moves.turned(flow).sum(1)
    missing = (before - sent + arrived - after).abs() + (sent - before).clamp(min=0)
    spent = (flow * moves.cost).sum((1, 2))
    mass, lost, paid = (v.reshape(len(x), -1).sum(1) for v in (before, missing, spent))
    bound = paid + lost * moves.cost.max()
    return torch.where((lost <= MISSING_TOL * mass) & ~bound.isnan(), bound, math.inf)
