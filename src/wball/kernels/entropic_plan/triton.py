r"""The entropic plan (:mod:`wball.kernels.entropic_plan`) in Triton: the attack step's oracle in
one launch.

Each image is one program. Its rings stay in registers from the first Newton step to the last. It
stops searching for ``psi`` when the price is found, stops sweeping when the box potentials no
longer change, and stops repairing when the box holds.

Arithmetic is float32; images whose potentials are too wide for it are solved by a second launch
in float64. Sums over an image that are returned are float64.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves
from wball.kernels.entropic_plan import (
    COLD_PRICE,
    COST_TOL,
    KAPPA,
    PACE,
    PACING,
    EntropicPlan,
    PlanRequest,
    triton_tiles,
)
from wball.kernels.entropic_plan.triton_tiles import ahead, opened
from wball.kernels.triton_flows import FlowBox, RowPlan, flows, pair_costs, repair, stage
from wball.kernels.triton_launch import kernel
from wball.kernels.triton_stencil import (
    RANGE,
    Layout,
    PriceSearch,
    StagedWindow,
    extent,
    pixels,
    read,
    ring_fees,
    solve_price,
    stage_halos,
    stencil,
    sum_two,
    warps,
)
from wball.kernels.triton_stencil import why_not_here as _why_not
from wball.plan import SPREAD

WHOLE = 1024
"""Programs of up to this many values hold a whole image; others share it."""
_COLD_PRICE, _COST_TOL, _RANGE, _SPREAD, _KAPPA, _PACE, _PACING = map(
    tl.constexpr, (COLD_PRICE, COST_TOL, RANGE, SPREAD, KAPPA, PACE, PACING)
)


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x, moves)


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`."""
    x, box, batch, device = request.x, request.box, len(request.x), request.x.device
    table = stencil(request.moves, x)
    if x.dtype == torch.float64 or table.layout.block > WHOLE:
        return triton_tiles.entropic_plan(request)
    given, out = opened(request)
    for exact in (False, True) if batch else ():  # the second solves what the first marks in `wide`
        staged = table.stage(2, batch, device, torch.float64 if exact else torch.float32)
        _plan_kernel[(batch,)](
            given, out, staged, table.tables[exact],
            1, request.sweeps if box is not None else 0, request.newton,
            CASE=PlanCase(
                table.layout._replace(rough=exact), table.pairs, box is not None,
                box is not None and box[0] > 0, request.momentum > 0, exact,
            ),
            num_warps=warps(table.layout.block), num_stages=1,
        )  # fmt: skip
        del staged  # before the second launch has its own
    return out.plan()


class PlanCase(NamedTuple):
    """What the program is compiled for: images and moves, the number of pairs of opposite moves,
    whether there is a box with or without a lower bound above 0, and momentum, and whether
    arithmetic is float64."""

    layout: Layout
    pairs: int
    box: bool
    gives: bool
    momentum: bool
    exact: bool


@kernel
def _plan_kernel(given, out, staged, table, one, sweeps, newton, CASE: tl.constexpr):
    LAYOUT: tl.constexpr = CASE.layout
    EXACT: tl.constexpr = CASE.exact
    REAL: tl.constexpr = tl.float64 if EXACT else tl.float32
    image = tl.program_id(0).to(tl.int64)
    if EXACT:  # noqa: SIM102, decided when compiling
        if tl.load(out.wide + image) == 0:
            return
    at = pixels(one, LAYOUT)
    index, real, place = at
    here = image * LAYOUT.numel + index
    b = read(given.b + here, real)
    highest = tl.max(tl.where(real, b, float("-inf")), 0)
    b = tl.maximum(b, highest - _SPREAD).to(REAL)
    q = tl.where(given.warm, read(given.q + here, real).to(REAL), 0.0)
    if not EXACT:
        top, bottom = extent(b + q, real)
        if top - bottom > _RANGE:
            tl.store(out.wide + image, 1)
            return
    s_ptr = staged[0] + image * LAYOUT.staged
    t_ptr = staged[1] + image * LAYOUT.staged
    stage_halos(s_ptr, one, LAYOUT)
    stage_halos(t_ptr, one, LAYOUT)
    x = read(given.x + here, real).to(REAL)
    budget = tl.load(given.budget + image)
    kappa = tl.where(given.paced, tl.load(given.kappa + image), 1.0)
    spend = (budget * kappa).to(REAL)
    before = q
    psi = tl.where(given.warm, tl.load(given.psi + image).to(REAL), _COLD_PRICE)
    window = StagedWindow(table.offset, table.fee, ring_fees(table.fee, LAYOUT))
    lo, hi, slack = given.box

    # s and t are the column and row terms of a move.
    s = b + q
    t = x
    sent = x
    received = x
    wide = False
    sweep = 0
    while sweep <= sweeps:
        top, bottom = extent(b + q, real)
        if not EXACT:
            wide = wide | (top - bottom > _RANGE)
        s = tl.where(real, tl.exp(b + q - top), 1.0)
        stage(s_ptr, place, s, real)
        psi, _, norm, moved = solve_price(
            x, s, psi, PriceSearch(spend, _COST_TOL, newton, wide), s_ptr, place, window, LAYOUT
        )
        t = x / norm
        sent = x * moved
        stage(t_ptr, place, t, real)
        received = flows(t_ptr, place, s, -1, psi, window, LAYOUT)
        sweep += 1
        if CASE.box:  # noqa: SIM102, decided when compiling
            if sweep <= sweeps:
                z = tl.maximum(t * s + received, 1e-12)
                shift = tl.minimum(tl.maximum(q + tl.log(lo / z), 0.0), 50.0)
                shift = tl.where(real, tl.minimum(shift, q + tl.log(hi / z)), q)
                still = (tl.max((shift != q).to(tl.int32), 0) == 0) | wide
                if CASE.momentum:
                    beyond = ahead(q, shift, before, given.momentum)
                    beyond = tl.where(sweep < sweeps, beyond, shift)
                    before = shift
                    q = beyond
                else:
                    q = shift
                if still:
                    sweep = sweeps + 1
    if not EXACT:
        tl.store(out.wide + image, wide.to(tl.int32))  # type: ignore[attr-defined]
    plan, box = (
        RowPlan(x, s, t, psi, sent, received),
        FlowBox(lo, hi, tl.where(wide, float("inf"), slack)),
    )
    keep, give, sent, arrived = repair(plan, box, s_ptr, at, window, LAYOUT, CASE.gives)
    stage(s_ptr, place, s * keep, real)
    stage(t_ptr, place, t * give, real)
    terms = s * keep, t * give, psi
    cost, net = pair_costs(s_ptr, t_ptr, place, terms, table, CASE.pairs, EXACT)
    cost = tl.sum(tl.where(real, cost, 0.0).to(tl.float64), 0)
    net = tl.sum(tl.where(real, net, 0.0).to(tl.float64), 0)

    chosen = b + q
    size = tl.max(tl.where(real, tl.abs(chosen), 0.0), 0) + psi * given.dearest
    room = tl.maximum(budget, 0.0) * (1.0 - tl.minimum(size.to(tl.float64) * given.doubt, 0.5))
    change = tl.where(real, tl.minimum(tl.maximum(x + (arrived - sent), lo), hi) - x, 0.0)
    finite = (net < float("inf")) & (tl.sum(change, 0) == tl.sum(change, 0))
    affords = tl.where(finite, room / tl.maximum(net, 1e-300), 0.0)
    pace = tl.minimum(tl.maximum(affords, _PACE[0]), _PACE[1])
    kappa = kappa * tl.exp(tl.log(pace) * _PACING)
    scale = tl.minimum(affords, 1.0)
    change *= _balance(change, index // (LAYOUT.height * LAYOUT.width), LAYOUT.channels)
    change = tl.where(finite, scale.to(REAL) * change, 0.0)
    batch = tl.num_programs(0)
    plane = batch.to(tl.int64) * LAYOUT.numel
    tl.store(out.images + here, tl.minimum(tl.maximum(x + change, lo), hi), mask=real)
    tl.store(out.images + plane + here, q, mask=real)
    tl.store(out.images + 2 * plane + here, keep, mask=real)
    tl.store(out.images + 3 * plane + here, give, mask=real)
    tl.store(out.images + 4 * plane + here, chosen, mask=real)
    tl.store(out.psi + image, psi)
    tl.store(out.numbers + image, cost)
    tl.store(out.numbers + batch + image, tl.where(finite, net, 0.0))
    tl.store(out.numbers + 2 * batch + image, scale)
    tl.store(out.numbers + 3 * batch + image, tl.minimum(tl.maximum(kappa, _KAPPA[0]), _KAPPA[1]))


@triton.jit
def _balance(change, channel, C: tl.constexpr):
    """Factors per pixel that make the gain and the loss of each channel equal: the larger one is
    scaled down to the other."""
    factor = tl.zeros_like(change)
    for c in tl.range(0, C):
        inside = tl.where(channel == c, change, 0.0).to(tl.float64)
        gained, lost = sum_two(tl.maximum(inside, 0.0), tl.maximum(-inside, 0.0))
        least = tl.minimum(gained, lost)
        up = (least / tl.maximum(gained, 1e-300)).to(change.dtype)
        down = (least / tl.maximum(lost, 1e-300)).to(change.dtype)
        factor = tl.where(channel == c, tl.where(change > 0.0, up, down), factor)
    return factor
