r"""The entropic plan (:mod:`wball.kernels.entropic_plan`) in Triton for images of any size: a team
of programs shares an image, tile by tile, in one launch.

The plan is kept in memory: its row and column terms (staged, see
:mod:`wball.kernels.triton_stencil`), what each pixel sends and receives, and the images of the
answer. Each pass over the tiles reads and writes some of these. After a pass the programs of a team
*meet*: each waits for the others, and all learn the sums over the image. There are no more programs
than multiprocessors, so that all programs of a team run at the same time; a team that has finished
an image continues with another one.

Arithmetic is float64: it serves any potentials, and the passes wait for loads.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.entropic_plan import (
    COLD_PRICE,
    COST_TOL,
    DOUBT,
    KAPPA,
    PACE,
    PACING,
    EntropicPlan,
    PlanRequest,
)
from wball.kernels.plan_rows import PLAIN_SWEEPS, REPAIR_SWEEPS
from wball.kernels.triton_flows import FlowBox, flows, outside, pair_costs, tighten, way_back
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import (
    Layout,
    Pixels,
    StagedWindow,
    newton_step,
    read,
    ring_fees,
    ring_moments,
    ring_sums,
    stage_halos,
    staged_position,
    stencil,
    table_moments,
)
from wball.plan import SPREAD

BLOCK, ALONE = 1024, 256
"""Pixels of a tile, one for each thread: of programs that share an image, and that work alone (then
several run on a multiprocessor)."""
REGISTERS = 64
"""Registers of a thread: the most that leaves room for 1024 threads on a multiprocessor."""
CROWD = 16
"""Programs that work alone, for each multiprocessor: so many have memory of their own."""
_COLD_PRICE, _COST_TOL, _SPREAD, _KAPPA, _PACE, _PACING, _SWEEPS, _PLAIN = map(
    tl.constexpr,
    (COLD_PRICE, COST_TOL, SPREAD, KAPPA, PACE, PACING, REPAIR_SWEEPS, PLAIN_SWEEPS),
)
_LANES = tl.constexpr(256)  # programs of a team at most
_PLANES = tl.constexpr(6)


class PlanGiven(NamedTuple):
    """A request: images, and numbers per image. ``kappa`` counts if ``paced``, ``psi`` and ``q`` if
    ``warm``."""

    x: Tensor
    b: Tensor
    budget: Tensor
    kappa: Tensor
    psi: Tensor
    q: Tensor
    paced: bool
    warm: bool
    box: FlowBox
    dearest: float
    momentum: float
    doubt: float


class PlanWritten(NamedTuple):
    """The answer: five images (point, ``q``, ``keep``, ``give``, chosen potentials), four numbers
    per image (two costs, scale, ``kappa``), the price, and which images are too wide for
    float32."""

    images: Tensor
    numbers: Tensor
    psi: Tensor
    wide: Tensor

    def plan(self) -> EntropicPlan:
        (z, q, keep, give, chosen), numbers = self.images.unbind(), self.numbers.unbind()
        cost, net_cost, scale, kappa = numbers
        return EntropicPlan(z, cost, net_cost, scale, kappa, self.psi, q, keep, give, chosen)


def opened(request: PlanRequest) -> tuple[PlanGiven, PlanWritten]:
    """A request for programs, and memory for their answer."""
    x, batch, device, eps = (
        request.x,
        len(request.x),
        request.x.device,
        torch.finfo(request.x.dtype).eps,
    )
    out = PlanWritten(
        torch.empty((5, *x.shape), dtype=x.dtype, device=device),
        torch.empty((4, batch), dtype=torch.float64, device=device),
        torch.empty(batch, dtype=x.dtype, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
    )
    warm = request.psi is not None or request.q is not None
    # Programs that start cold ignore what is given instead.
    psi, q = request.start() if warm else (out.psi, out.images[1])
    kappa = out.numbers if request.kappa is None else aligned(request.kappa)
    lo, hi = request.box or (0.0, float("inf"))
    slack = 4 * eps * (max(1.0, hi) if request.box is not None else 1.0)
    return PlanGiven(
        aligned(x), aligned(request.b.to(x.dtype)), aligned(request.budget.double()), kappa,
        aligned(psi), aligned(q), request.kappa is not None, warm, FlowBox(lo, hi, slack),
        request.moves.dearest, float(request.momentum), DOUBT * eps,
    ), out  # fmt: skip


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`."""
    x, box, batch, device = request.x, request.box, len(request.x), request.x.device
    table = stencil(request.moves, x)
    team, teams = shared_out(batch, -(-table.layout.numel // BLOCK), processors(device))
    block, rough = BLOCK if team > 1 else ALONE, x.dtype == torch.float32
    layout = table.layout._replace(block=block, offsets=table.in_code, rough=rough)
    tiles = -(-layout.numel // block)
    s, t, kept, returned = table.stage(4, teams, device, torch.float64)
    planes = torch.empty((teams, _PLANES.value, layout.numel), dtype=torch.float64, device=device)
    told = torch.empty((teams, 4, _LANES.value), dtype=torch.float64, device=device)
    met = torch.zeros(teams, dtype=torch.int32, device=device)
    changed = torch.empty((teams, tiles), dtype=torch.int32, device=device)
    given, out = opened(request)
    case = TilesCase(
        layout, table.pairs, box is not None, box is not None and box[0] > 0, request.momentum > 0, team > 1
    )  # fmt: skip
    if batch:
        _tiles_kernel[(team * teams,)](
            given, out, TilesWork(s, t, kept, returned, planes, told, met, changed), table.tables[1],
            1, batch, team, request.sweeps if box is not None else 0, request.newton, CASE=case,
            num_warps=block // 32, num_stages=1, maxnreg=REGISTERS,
        )  # fmt: skip
    return out.plan()


@lru_cache
def processors(device: torch.device) -> int:
    """Programs that surely run at the same time; the interpreter runs one after the other."""
    if device.type != "cuda":
        return 1
    return min(int(torch.cuda.get_device_properties(device).multi_processor_count), _LANES.value)


@lru_cache(maxsize=1024)
def shared_out(batch: int, tiles: int, most: int) -> tuple[int, int]:
    """Programs per image, and images at a time, such that the last program is done soonest. To meet
    takes about as long as a tile."""

    def passes(team: int) -> int:
        return -(-batch // (most // team)) * (-(-tiles // team) + (team > 1))

    team = min(range(1, min(tiles, most) + 1), key=passes)
    return team, min(batch, most // team if team > 1 else CROWD * most)


class TilesWork(NamedTuple):
    """Memory of the teams: the column and row terms of the plan, staged, and both times the factors
    of the repair; what pixels receive and send, what they will after a sweep of the repair, and its
    factors; what is told at meetings, their number, and which tiles a sweep has changed."""

    s: Tensor
    t: Tensor
    kept: Tensor
    returned: Tensor
    planes: Tensor
    told: Tensor
    met: Tensor
    changed: Tensor


class TilesCase(NamedTuple):
    """What the program is compiled for: images and moves, the number of pairs of opposite moves,
    whether there is a box with or without a lower bound above 0, and momentum, and whether programs
    share images."""

    layout: Layout
    pairs: int
    box: bool
    gives: bool
    momentum: bool
    shared: bool


class Team(NamedTuple):
    """Where a program meets the others of its team."""

    told: tl.tensor
    met: tl.tensor
    rank: tl.tensor
    size: tl.tensor


@triton.jit
def _meet(team, meeting, a, b, MAXIMA: tl.constexpr, SHARED: tl.constexpr):
    """Wait for the team, and see all that it has written. Returns the sums or maxima of two
    numbers, and the number of the next meeting."""
    tl.debug_barrier()
    if SHARED:
        told = team.told + meeting % 2 * (
            2 * _LANES
        )  # the others may still read what was told last
        tl.store(told + team.rank, a)
        tl.store(told + _LANES + team.rank, b)
        tl.debug_barrier()
        tl.atomic_add(team.met, 1, sem="acq_rel")
        while tl.atomic_add(team.met, 0, sem="acquire") < (meeting + 1) * team.size:
            pass
        tl.debug_barrier()
        lane = tl.arange(0, _LANES)
        here = lane < team.size
        if MAXIMA:
            a = tl.max(tl.load(told + lane, mask=here, other=float("-inf")), 0)
            b = tl.max(tl.load(told + _LANES + lane, mask=here, other=float("-inf")), 0)
        else:
            a = tl.sum(read(told + lane, here), 0)
            b = tl.sum(read(told + _LANES + lane, here), 0)
    return a, b, meeting + 1


@triton.jit
def _tile(first, one, LAYOUT: tl.constexpr):
    """The pixels of a tile; for ``one`` see :func:`wball.kernels.triton_stencil.pixels`."""
    index = first + tl.arange(0, LAYOUT.block) * one
    real = index < LAYOUT.numel
    return Pixels(index, real, staged_position(tl.where(real, index, 0), LAYOUT))


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), 0).to(tl.float64)


@kernel
def _tiles_kernel(
    given, out, work, table, one, batch, team_size, sweeps, newton, CASE: tl.constexpr
):
    LAYOUT: tl.constexpr = CASE.layout
    N: tl.constexpr = LAYOUT.numel
    BLOCK: tl.constexpr = LAYOUT.block
    TILES: tl.constexpr = (LAYOUT.numel + LAYOUT.block - 1) // LAYOUT.block
    SHARED: tl.constexpr = CASE.shared
    rank = tl.program_id(0) % team_size
    ours = (tl.program_id(0) // team_size).to(tl.int64)
    team = Team(work.told + ours * (4 * _LANES), work.met + ours, rank, team_size)
    begin, stride = rank * BLOCK, team_size * BLOCK
    s_ptr, t_ptr = work.s + ours * LAYOUT.staged, work.t + ours * LAYOUT.staged
    kept_ptr, returned_ptr = work.kept + ours * LAYOUT.staged, work.returned + ours * LAYOUT.staged
    received_ptr = work.planes + ours * (_PLANES * N)
    sent_ptr, next_received_ptr, next_sent_ptr = (
        received_ptr + N, received_ptr + 2 * N, received_ptr + 3 * N,
    )  # fmt: skip
    next_keep_ptr, next_give_ptr = received_ptr + 4 * N, received_ptr + 5 * N
    changed_ptr = work.changed + ours * TILES
    if rank == 0:
        stage_halos(s_ptr, one, LAYOUT)
        stage_halos(t_ptr, one, LAYOUT)
        stage_halos(kept_ptr, one, LAYOUT)
        stage_halos(returned_ptr, one, LAYOUT)
    window = StagedWindow(table.offset, table.fee, ring_fees(table.fee, LAYOUT))
    lo, hi, slack = given.box
    box = FlowBox(lo, hi, slack)
    plane = batch.to(tl.int64) * N
    kind = out.images.dtype.element_ty
    meeting = 0
    image = ours
    while image < batch:
        here = image * N
        q_ptr = out.images + plane + here
        keep_ptr, give_ptr, chosen_ptr = q_ptr + plane, q_ptr + 2 * plane, q_ptr + 3 * plane
        before_ptr = out.images + here  # potentials before the last step, where the point will be
        budget = tl.load(given.budget + image)
        kappa = tl.where(given.paced, tl.load(given.kappa + image), 1.0)
        spend = budget * kappa
        psi = tl.where(given.warm, tl.load(given.psi + image).to(tl.float64), _COLD_PRICE)

        most = tl.full([BLOCK], float("-inf"), tl.float64)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            b = tl.load(given.b + here + at.index, mask=at.real, other=float("-inf"))
            most = tl.maximum(most, b.to(tl.float64))
        highest, _, meeting = _meet(team, meeting, tl.max(most, 0), 0.0, True, SHARED)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            b = tl.maximum(
                read(given.b + here + at.index, at.real).to(tl.float64), highest - _SPREAD
            )
            q = tl.where(given.warm, read(given.q + here + at.index, at.real).to(tl.float64), 0.0)
            _choose(q_ptr, chosen_ptr, s_ptr, at, b, q, highest, kind)
            if CASE.momentum:
                tl.store(before_ptr + at.index, q.to(kind), mask=at.real)
            tl.store(keep_ptr + at.index, tl.full([BLOCK], 1.0, kind), mask=at.real)
            tl.store(give_ptr + at.index, tl.full([BLOCK], 1.0, kind), mask=at.real)
        _, _, meeting = _meet(team, meeting, 0.0, 0.0, True, SHARED)

        broken = 0.0 * psi
        sweep = 0
        while sweep <= sweeps:
            low = 0.0 * psi - 1.0
            high = 0.0 * psi + float("inf")
            step = 0
            while step <= newton:
                cost = tl.zeros([BLOCK], tl.float64)
                slope = tl.zeros([BLOCK], tl.float64)
                for first in tl.range(begin, N, stride):
                    at = _tile(first, one, LAYOUT)
                    x = read(given.x + here + at.index, at.real).to(tl.float64)
                    own = tl.load(s_ptr + at.place, mask=at.real, other=1.0)
                    if len(LAYOUT.offsets) > 0:
                        rings = ring_sums(s_ptr, at.place, own, LAYOUT)
                        mean, variance, norm, _share = ring_moments(
                            rings, window.fees, psi, LAYOUT.rough
                        )
                    else:
                        mean, variance, norm, _share = table_moments(
                            s_ptr, at.place, own, psi, window, LAYOUT
                        )
                    tl.store(t_ptr + at.place, x / norm, mask=at.real)
                    cost += x * mean
                    slope += x * variance
                paid, falls, meeting = _meet(
                    team, meeting, tl.sum(cost, 0), tl.sum(slope, 0), False, SHARED
                )
                if step < newton:
                    psi, low, high, done = newton_step(
                        psi, low, high, paid, falls, spend, _COST_TOL
                    )
                    step = tl.where(done, newton, step)
                step += 1
            over = tl.zeros([BLOCK], tl.int1)
            moved = tl.zeros([BLOCK], tl.int1)
            for first in tl.range(begin, N, stride):
                at = _tile(first, one, LAYOUT)
                x = read(given.x + here + at.index, at.real).to(tl.float64)
                s, t = read(s_ptr + at.place, at.real), read(t_ptr + at.place, at.real)
                sent = tl.maximum(x - t * s, 0.0)
                received = flows(t_ptr, at.place, s, -1, psi, window, LAYOUT)
                tl.store(received_ptr + at.index, received, mask=at.real)
                tl.store(sent_ptr + at.index, sent, mask=at.real)
                above, below = outside(received - sent, x, box, at.real)
                over = over | above | below
                if CASE.box:  # noqa: SIM102, decided when compiling
                    if sweep < sweeps:
                        b = read(given.b + here + at.index, at.real).to(tl.float64)
                        b = tl.maximum(b, highest - _SPREAD)
                        q = read(q_ptr + at.index, at.real).to(tl.float64)
                        z = tl.maximum(t * s + received, 1e-12)
                        least = tl.minimum(tl.maximum(q + tl.log(lo / z), 0.0), 50.0)
                        new = tl.minimum(least, q + tl.log(hi / z))
                        if CASE.momentum:
                            before = read(before_ptr + at.index, at.real).to(tl.float64)
                            tl.store(before_ptr + at.index, new.to(kind), mask=at.real)
                            if sweep + 1 < sweeps:
                                new = ahead(q, new, before, given.momentum)
                        new = new.to(kind).to(tl.float64)
                        moved = moved | (at.real & (new != q))
                        _choose(q_ptr, chosen_ptr, s_ptr, at, b, new, highest, kind)
            broken, goes_on, meeting = _meet(team, meeting, _any(over), _any(moved), True, SHARED)
            sweep = tl.where(goes_on > 0.0, sweep + 1, sweeps + 1)

        sweep = 0
        repaired = broken > 0.0
        while (sweep <= _SWEEPS) & (broken > 0.0):
            final = sweep == _SWEEPS
            more = tl.where(final | (sweep < _PLAIN), 0.0, 1.0)
            for first in tl.range(begin, N, stride):
                at = _tile(first, one, LAYOUT)
                x = read(given.x + here + at.index, at.real).to(tl.float64)
                keep = read(keep_ptr + at.index, at.real).to(tl.float64)
                give = tl.full([BLOCK], 1.0, tl.float64)
                received = read(received_ptr + at.index, at.real)
                sent = read(sent_ptr + at.index, at.real)
                if CASE.gives:
                    give = read(give_ptr + at.index, at.real).to(tl.float64)
                beyond = outside(keep * received - give * sent, x, box, at.real)
                new_keep, new_give = tighten(
                    x, (sent, received), (keep, give), beyond, box, final, more
                )
                s, t = read(s_ptr + at.place, at.real), read(t_ptr + at.place, at.real)
                tl.store(next_keep_ptr + at.index, new_keep, mask=at.real)
                tl.store(kept_ptr + at.place, s * new_keep, mask=at.real)
                differs = at.real & (new_keep != keep)
                if CASE.gives:
                    tl.store(next_give_ptr + at.index, new_give, mask=at.real)
                    tl.store(returned_ptr + at.place, t * new_give, mask=at.real)
                    differs = differs | (at.real & (new_give != give))
                differs = tl.max((differs | (at.real & (sweep == 0))).to(tl.int32), 0)
                tl.store(changed_ptr + first // BLOCK, differs)
            _, _, meeting = _meet(team, meeting, 0.0, 0.0, True, SHARED)
            ways = tl.zeros([BLOCK], tl.float64)
            over = tl.zeros([BLOCK], tl.int1)
            for first in tl.range(begin, N, stride):
                at = _tile(first, one, LAYOUT)
                near = 0
                earliest = tl.maximum(first - LAYOUT.halo, 0) // BLOCK
                latest = tl.minimum(first + BLOCK - 1 + LAYOUT.halo, N - 1) // BLOCK
                for tile in tl.range(earliest, latest + 1):
                    near = tl.maximum(near, tl.load(changed_ptr + tile))
                x = read(given.x + here + at.index, at.real).to(tl.float64)
                keep = read(keep_ptr + at.index, at.real).to(tl.float64)
                new_keep = read(next_keep_ptr + at.index, at.real)
                give = tl.full([BLOCK], 1.0, tl.float64)
                new_give = give
                received = read(received_ptr + at.index, at.real)
                sent = read(sent_ptr + at.index, at.real)
                new_received, new_sent = received, sent
                if CASE.gives:
                    give = read(give_ptr + at.index, at.real).to(tl.float64)
                    new_give = read(next_give_ptr + at.index, at.real)
                if near > 0:
                    t = read(t_ptr + at.place, at.real)
                    new_sent = flows(kept_ptr, at.place, t, 1, psi, window, LAYOUT)
                    if CASE.gives:
                        s = read(s_ptr + at.place, at.real)
                        new_received = flows(returned_ptr, at.place, s, -1, psi, window, LAYOUT)
                tl.store(next_sent_ptr + at.index, new_sent, mask=at.real)
                tl.store(next_received_ptr + at.index, new_received, mask=at.real)
                net = new_keep * new_received - new_give * new_sent
                excess = (x - hi) + keep * received - give * sent
                ways = tl.maximum(ways, way_back(excess, (x - hi) + net, slack, at.real))
                above, below = outside(net, x, box, at.real)
                over = over | above | below
            way, broken, meeting = _meet(team, meeting, tl.max(ways, 0), _any(over), True, SHARED)
            way = tl.where(final & (lo <= 0.0), way, 1.0)
            for first in tl.range(begin, N, stride):
                at = _tile(first, one, LAYOUT)
                _mix(keep_ptr, next_keep_ptr, way, at, kind)
                _mix(sent_ptr, next_sent_ptr, way, at, tl.float64)
                if CASE.gives:
                    _mix(give_ptr, next_give_ptr, way, at, kind)
                    _mix(received_ptr, next_received_ptr, way, at, tl.float64)
            sweep += 1

        # The plan's cost is that of the factors as they are stored.
        if repaired:
            for first in tl.range(begin, N, stride):
                at = _tile(first, one, LAYOUT)
                s, t = read(s_ptr + at.place, at.real), read(t_ptr + at.place, at.real)
                keep = read(keep_ptr + at.index, at.real).to(tl.float64)
                give = read(give_ptr + at.index, at.real).to(tl.float64)
                tl.store(kept_ptr + at.place, s * keep, mask=at.real)
                tl.store(returned_ptr + at.place, t * give, mask=at.real)
            _, _, meeting = _meet(team, meeting, 0.0, 0.0, True, SHARED)
        ends_ptr = tl.where(repaired, kept_ptr, s_ptr)
        starts_ptr = tl.where(repaired, returned_ptr, t_ptr)
        gross = tl.zeros([BLOCK], tl.float64)
        left = tl.zeros([BLOCK], tl.float64)
        sizes = tl.zeros([BLOCK], tl.float64)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            terms = read(ends_ptr + at.place, at.real), read(starts_ptr + at.place, at.real), psi
            cost, net = pair_costs(
                ends_ptr, starts_ptr, at.place, terms, table, CASE.pairs, LAYOUT.rough
            )
            gross += cost
            left += net
            sizes = tl.maximum(sizes, tl.abs(read(chosen_ptr + at.index, at.real)).to(tl.float64))
        paid, owed, meeting = _meet(team, meeting, tl.sum(gross, 0), tl.sum(left, 0), False, SHARED)
        size, _, meeting = _meet(team, meeting, tl.max(sizes, 0), 0.0, True, SHARED)
        doubt = tl.minimum((size + psi * given.dearest) * given.doubt, 0.5)
        finite = owed < float("inf")
        affords = tl.maximum(budget, 0.0) * (1.0 - doubt) / tl.maximum(owed, 1e-300)
        affords = tl.where(finite, affords, 0.0)
        scale = tl.minimum(affords, 1.0)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            x = read(given.x + here + at.index, at.real).to(tl.float64)
            keep = read(keep_ptr + at.index, at.real).to(tl.float64)
            give = read(give_ptr + at.index, at.real).to(tl.float64)
            received = read(received_ptr + at.index, at.real)
            sent = read(sent_ptr + at.index, at.real)
            z = tl.minimum(tl.maximum(x + (keep * received - give * sent), lo), hi)
            z = x + tl.where(finite, scale * (z - x), 0.0)
            z = tl.minimum(tl.maximum(z, lo), hi)
            tl.store(out.images + here + at.index, z.to(kind), mask=at.real)
        if rank == 0:
            pace = tl.minimum(tl.maximum(affords, _PACE[0]), _PACE[1])
            kappa *= tl.exp(tl.log(pace) * _PACING)
            kappa = tl.minimum(tl.maximum(kappa, _KAPPA[0]), _KAPPA[1])
            tl.store(out.psi + image, psi.to(kind))
            tl.store(out.numbers + image, paid)
            tl.store(out.numbers + batch + image, tl.where(finite, owed, 0.0))
            tl.store(out.numbers + 2 * batch + image, scale)
            tl.store(out.numbers + 3 * batch + image, kappa)
        image += tl.num_programs(0) // team_size


@triton.jit
def _choose(q_ptr, chosen_ptr, s_ptr, at, b, q, highest, kind: tl.constexpr):
    """Store box potentials ``q``, the potentials of the plan as they are returned, and its column
    terms."""
    chosen = (b + q).to(kind)
    tl.store(q_ptr + at.index, q.to(kind), mask=at.real)
    tl.store(chosen_ptr + at.index, chosen, mask=at.real)
    nats = chosen.to(tl.float64) - (highest - 0.5 * _SPREAD)
    tl.store(s_ptr + at.place, tl.exp(nats), mask=at.real)


@triton.jit
def _mix(ptr, next_ptr, way, at, kind: tl.constexpr):
    """Go ``way`` of the way to the next values."""
    now = read(ptr + at.index, at.real).to(tl.float64)
    now += way * (read(next_ptr + at.index, at.real) - now)
    tl.store(ptr + at.index, now.to(kind), mask=at.real)


@triton.jit
def ahead(q, new, before, momentum):
    """Beyond ``new``, in the direction from the step ``before`` it, unless the step from ``q``
    turned back."""
    far = new + momentum * (new - before)
    far = tl.where(new < 0.0, tl.minimum(far, 0.0), tl.minimum(tl.maximum(far, 0.0), 50.0))
    return tl.where((new != 0.0) & ((new - q) * (new - before) >= 0.0), far, new)
