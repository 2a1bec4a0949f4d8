r"""The entropic plan (:mod:`wball.kernels.entropic_plan`) in Triton for images of any size: a team
of programs shares an image, tile by tile.

The plan is kept in memory: its row and column terms (staged, see
:mod:`wball.kernels.triton_stencil`), what each pixel sends and receives, and the images of the
answer. Each pass over the tiles reads and writes some of these. After a pass the programs of a team
*meet*: each waits for the others, and all learn the sums over the image. There are no more programs
than multiprocessors, so that all programs of a team run at the same time; a team that has finished
an image continues with another one. Small images of large batches have one program each.

Arithmetic is float32; images whose potentials are too wide for it are solved by a second launch in
float64. Sums over an image are float64.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves
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
    RANGE,
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
from wball.kernels.triton_stencil import why_not_here as _why_not
from wball.plan import SPREAD

BLOCK, ALONE = 1024, 256
"""Pixels of a tile, one for each thread: of programs that have a multiprocessor each, and of those
of large batches."""
REGISTERS = 64
"""Registers of a thread: the most that leaves room for 1024 threads on a multiprocessor."""
CROWD = 16
"""Independent programs per multiprocessor; each has its own memory."""
_COLD_PRICE, _COST_TOL, _RANGE, _SPREAD, _KAPPA, _PACE, _PACING, _SWEEPS, _PLAIN = map(
    tl.constexpr,
    (COLD_PRICE, COST_TOL, RANGE, SPREAD, KAPPA, PACE, PACING, REPAIR_SWEEPS, PLAIN_SWEEPS),
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
    box: Tensor  # bounds, and the excess that a repair may leave, float64: arguments are float32
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
        torch.ones(batch, dtype=torch.int32, device=device),
    )
    warm = request.psi is not None or request.q is not None
    # Programs that start cold ignore what is given instead.
    psi, q = request.start() if warm else (out.psi, out.images[1])
    kappa = out.numbers if request.kappa is None else aligned(request.kappa)
    lo, hi = request.box or (0.0, float("inf"))
    slack = 4 * eps * (max(1.0, hi) if request.box is not None else 1.0)
    return PlanGiven(
        aligned(x), aligned(request.b.to(x.dtype)), aligned(request.budget.double()), kappa,
        aligned(psi), aligned(q), request.kappa is not None, warm, _box(lo, hi, slack, device),
        request.moves.dearest, float(request.momentum), DOUBT * eps,
    ), out  # fmt: skip


@lru_cache(maxsize=64)
def _box(lo: float, hi: float, slack: float, device: torch.device) -> Tensor:
    return torch.tensor((lo, hi, slack), dtype=torch.float64).to(device)


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return _why_not(x, moves)


def entropic_plan(request: PlanRequest) -> EntropicPlan:
    """See :func:`wball.kernels.entropic_plan.entropic_plan`."""
    x, box, batch, device = request.x, request.box, len(request.x), request.x.device
    table, double = stencil(request.moves, x), x.dtype == torch.float64
    layout = table.layout
    team, teams = shared_out(batch, -(-layout.numel // BLOCK), processors(device))
    block = BLOCK if team > 1 or batch <= processors(device) else ALONE
    tiles = -(-layout.numel // block)
    given, out = opened(request)
    met = torch.zeros((2, teams), dtype=torch.int32, device=device)
    # Float64 solves what float32 has marked in `wide`, or all.
    for exact in ((True,) if double else (False, True)) if batch else ():
        real = torch.float64 if exact else torch.float32
        s, t, kept, returned = table.stage(4, teams, device, real)
        work = PlanWork(
            s, t, kept, returned,
            torch.empty((teams, _PLANES.value, layout.numel), dtype=real, device=device),
            torch.empty((teams, 6, _LANES.value), dtype=torch.float64, device=device),
            met[int(exact)], torch.empty((teams, tiles), dtype=torch.int32, device=device),
        )  # fmt: skip
        case = PlanCase(
            layout._replace(block=block, offsets=table.in_code, rough=exact and not double),
            table.pairs, box is not None, box is not None and box[0] > 0, request.momentum > 0,
            team > 1, exact,
        )  # fmt: skip
        _plan_kernel[(team * teams,)](
            given, out, work, table.tables[exact], 1, batch, team,
            request.sweeps if box is not None else 0, request.newton, CASE=case,
            num_warps=max(1, block // 32), num_stages=1, maxnreg=REGISTERS,
        )  # fmt: skip
        del s, t, kept, returned, work  # before the second launch has its own
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


class PlanWork(NamedTuple):
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


class PlanCase(NamedTuple):
    """What the program is compiled for: images and moves, the number of pairs of opposite moves,
    whether there is a box with or without a lower bound above 0, and momentum, whether programs
    share images, and whether arithmetic is float64."""

    layout: Layout
    pairs: int
    box: bool
    gives: bool
    momentum: bool
    shared: bool
    exact: bool


class Team(NamedTuple):
    """Where a program meets the others of its team."""

    told: tl.tensor
    met: tl.tensor
    rank: tl.tensor
    size: tl.tensor


@triton.jit
def _meet(team, meeting, a, b, c, MAXIMA: tl.constexpr, SHARED: tl.constexpr):
    """Wait for the team, and see all that it has written. Returns the sums or maxima of three
    numbers, and the number of the next meeting."""
    tl.debug_barrier()
    if SHARED:
        told = team.told + meeting % 2 * (3 * _LANES)  # the others may still read the last ones
        tl.store(told + team.rank, a)
        tl.store(told + _LANES + team.rank, b)
        tl.store(told + 2 * _LANES + team.rank, c)
        tl.debug_barrier()
        tl.atomic_add(team.met, 1, sem="acq_rel")
        while tl.atomic_add(team.met, 0, sem="acquire") < (meeting + 1) * team.size:
            pass
        tl.debug_barrier()
        lane = tl.arange(0, _LANES)
        here = lane < team.size
        nothing = float("-inf") if MAXIMA else 0.0
        first = tl.load(told + lane, mask=here, other=nothing)
        second = tl.load(told + _LANES + lane, mask=here, other=nothing)
        third = tl.load(told + 2 * _LANES + lane, mask=here, other=nothing)
        if MAXIMA:
            a, b, c = tl.max(first, 0), tl.max(second, 0), tl.max(third, 0)
        else:
            a, b, c = tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)
    return a, b, c, meeting + 1


@triton.jit
def _tile(first, one, LAYOUT: tl.constexpr):
    """The pixels of a tile. ``one`` is a one that the compiler cannot see, as in
    :func:`wball.kernels.triton_stencil.pixels`."""
    index = first + tl.arange(0, LAYOUT.block) * one
    real = index < LAYOUT.numel
    return Pixels(index, real, staged_position(tl.where(real, index, 0), LAYOUT))


@triton.jit
def _most(values):
    return tl.max(values, 0).to(tl.float64)


@triton.jit
def _total(values):
    return tl.sum(values, 0).to(tl.float64)


@kernel
def _plan_kernel(
    given, out, work, table, one, batch, team_size, sweeps, newton, CASE: tl.constexpr
):
    LAYOUT: tl.constexpr = CASE.layout
    SHARED: tl.constexpr = CASE.shared
    rank = tl.program_id(0) % team_size
    ours = (tl.program_id(0) // team_size).to(tl.int64)
    team = Team(work.told + ours * (6 * _LANES), work.met + ours, rank, team_size)
    begin, stride = rank * LAYOUT.block, team_size * LAYOUT.block
    staged = ours * LAYOUT.staged
    if rank == 0:
        stage_halos(work.s + staged, one, LAYOUT)
        stage_halos(work.t + staged, one, LAYOUT)
        stage_halos(work.kept + staged, one, LAYOUT)
        stage_halos(work.returned + staged, one, LAYOUT)
    meeting = 0
    image = ours
    while image < batch:
        here = image * LAYOUT.numel
        top = tl.full([LAYOUT.block], float("-inf"), tl.float32)
        above, below = top, top
        for first in tl.range(begin, LAYOUT.numel, stride):
            at = _tile(first, one, LAYOUT)
            b = read(given.b + here + at.index, at.real)
            q = tl.where(given.warm, read(given.q + here + at.index, at.real), 0.0)
            top = tl.maximum(top, tl.where(at.real, b, float("-inf")).to(tl.float32))
            above = tl.maximum(above, tl.where(at.real, b + q, float("-inf")).to(tl.float32))
            below = tl.maximum(below, tl.where(at.real, -b - q, float("-inf")).to(tl.float32))
        highest, high, low, meeting = _meet(
            team, meeting, _most(top), _most(above), _most(below), True, SHARED
        )
        if CASE.exact:
            solve = tl.load(out.wide + image) > 0
            middle = highest - 0.5 * _SPREAD
        else:
            solve = high + low <= _RANGE
            middle = high - 0.5 * _RANGE
        if solve:
            meeting = _solve(
                given, out, work, table, one, team, ours, image, batch, sweeps, newton, highest, middle, meeting, CASE
            )  # fmt: skip
        image += tl.num_programs(0) // team_size


@triton.jit
def _solve(
    given, out, work, table, one, team, ours, image, batch, sweeps, newton, highest, middle, meeting, CASE: tl.constexpr
):  # fmt: skip
    """The plan of an image with largest potential ``highest``. Column terms are relative to
    ``middle``. Returns the number of the next meeting."""
    LAYOUT: tl.constexpr = CASE.layout
    N: tl.constexpr = LAYOUT.numel
    BLOCK: tl.constexpr = LAYOUT.block
    SHARED: tl.constexpr = CASE.shared
    REAL: tl.constexpr = tl.float64 if CASE.exact else tl.float32
    kind: tl.constexpr = out.images.dtype.element_ty
    begin, stride = team.rank * BLOCK, team.size * BLOCK
    s_ptr, t_ptr = work.s + ours * LAYOUT.staged, work.t + ours * LAYOUT.staged
    kept_ptr, returned_ptr = work.kept + ours * LAYOUT.staged, work.returned + ours * LAYOUT.staged
    received_ptr = work.planes + ours * (_PLANES * N)
    sent_ptr, next_received_ptr = received_ptr + N, received_ptr + 2 * N
    next_sent_ptr, next_keep_ptr = received_ptr + 3 * N, received_ptr + 4 * N
    next_give_ptr = received_ptr + 5 * N
    changed_ptr = work.changed + ours * ((N + BLOCK - 1) // BLOCK)
    window = StagedWindow(table.offset, table.fee, ring_fees(table.fee, LAYOUT))
    lo, hi = tl.load(given.box).to(REAL), tl.load(given.box + 1).to(REAL)
    slack = tl.load(given.box + 2).to(REAL)
    box = FlowBox(lo, hi, slack)
    here, plane = image * N, batch * N
    x_ptr, b_ptr = given.x + here, given.b + here
    z_ptr = out.images + here
    q_ptr, keep_ptr = z_ptr + plane, z_ptr + 2 * plane
    give_ptr, chosen_ptr = z_ptr + 3 * plane, z_ptr + 4 * plane
    before_ptr = z_ptr  # potentials before the last step, where the point will be
    budget = tl.load(given.budget + image)
    kappa = tl.where(given.paced, tl.load(given.kappa + image), 1.0)
    spend = (budget * kappa).to(REAL)
    psi = tl.where(given.warm, tl.load(given.psi + image), _COLD_PRICE).to(REAL)

    for first in tl.range(begin, N, stride):
        at = _tile(first, one, LAYOUT)
        b = tl.maximum(read(b_ptr + at.index, at.real).to(REAL), highest - _SPREAD)
        q = tl.where(given.warm, read(given.q + here + at.index, at.real), 0.0).to(REAL)
        _choose(q_ptr, chosen_ptr, s_ptr, at, b, q, middle, kind, REAL)
        if CASE.momentum:
            tl.store(before_ptr + at.index, q.to(kind), mask=at.real)
        tl.store(keep_ptr + at.index, tl.full([BLOCK], 1.0, kind), mask=at.real)
        tl.store(give_ptr + at.index, tl.full([BLOCK], 1.0, kind), mask=at.real)
    nothing = 0.0 * budget
    _, _, _, meeting = _meet(team, meeting, nothing, nothing, nothing, True, SHARED)

    broken = nothing
    sweep = 0
    while sweep <= sweeps:
        low = 0.0 * psi - 1.0
        high = 0.0 * psi + float("inf")
        step = 0
        while step <= newton:
            costs = tl.zeros([BLOCK], REAL)
            slopes = tl.zeros([BLOCK], REAL)
            for first in tl.range(begin, N, stride):
                at = _tile(first, one, LAYOUT)
                x = read(x_ptr + at.index, at.real).to(REAL)
                own = tl.load(s_ptr + at.place, mask=at.real, other=1.0)
                if len(LAYOUT.offsets) > 0:
                    rings = ring_sums(s_ptr, at.place, own, LAYOUT)
                    mean, variance, norm, share = ring_moments(
                        rings, window.fees, psi, LAYOUT.rough
                    )
                else:
                    mean, variance, norm, share = table_moments(
                        s_ptr, at.place, own, psi, window, LAYOUT
                    )
                tl.store(t_ptr + at.place, x / norm, mask=at.real)
                tl.store(sent_ptr + at.index, x * share, mask=at.real)
                costs += x * mean
                slopes += x * variance
            cost, slope, _, meeting = _meet(
                team, meeting, _total(costs), _total(slopes), nothing, False, SHARED
            )
            if step < newton:
                psi, low, high, done = newton_step(
                    psi, low, high, cost.to(REAL), slope.to(REAL), spend, _COST_TOL
                )
                step = tl.where(done, newton, step)
            step += 1
        over = tl.zeros([BLOCK], tl.int1)
        moved = tl.zeros([BLOCK], tl.int1)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            x = read(x_ptr + at.index, at.real).to(REAL)
            s, t = read(s_ptr + at.place, at.real), read(t_ptr + at.place, at.real)
            sent = read(sent_ptr + at.index, at.real)
            received = flows(t_ptr, at.place, s, -1, psi, window, LAYOUT)
            tl.store(received_ptr + at.index, received, mask=at.real)
            above, below = outside(received - sent, x, box, at.real)
            over = over | above | below
            if CASE.box:  # noqa: SIM102, decided when compiling
                if sweep < sweeps:
                    b = tl.maximum(read(b_ptr + at.index, at.real).to(REAL), highest - _SPREAD)
                    q = read(q_ptr + at.index, at.real).to(REAL)
                    z = tl.maximum(t * s + received, 1e-12)
                    least = tl.minimum(tl.maximum(q + tl.log(lo / z), 0.0), 50.0)
                    new = tl.minimum(least, q + tl.log(hi / z))
                    if CASE.momentum:
                        before = read(before_ptr + at.index, at.real).to(REAL)
                        tl.store(before_ptr + at.index, new.to(kind), mask=at.real)
                        if sweep + 1 < sweeps:
                            new = _ahead(q, new, before, given.momentum)
                    new = new.to(kind).to(REAL)
                    moved = moved | (at.real & (new != q))
                    _choose(q_ptr, chosen_ptr, s_ptr, at, b, new, middle, kind, REAL)
        broken, goes_on, _, meeting = _meet(
            team, meeting, _most(over.to(REAL)), _most(moved.to(REAL)), nothing, True, SHARED
        )
        sweep = tl.where(goes_on > 0.0, sweep + 1, sweeps + 1)

    sweep = 0
    repaired = broken > 0.0
    while (sweep <= _SWEEPS) & (broken > 0.0):
        final = sweep == _SWEEPS
        more = tl.where(final | (sweep < _PLAIN), 0.0, 1.0).to(REAL)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            x = read(x_ptr + at.index, at.real).to(REAL)
            keep, give = _factors(keep_ptr, give_ptr, at, CASE.gives, REAL)
            received, sent = (
                read(received_ptr + at.index, at.real),
                read(sent_ptr + at.index, at.real),
            )
            beyond = outside(keep * received - give * sent, x, box, at.real)
            new_keep, new_give = tighten(
                x, (sent, received), (keep, give), beyond, box, final, more
            )
            s, t = read(s_ptr + at.place, at.real), read(t_ptr + at.place, at.real)
            tl.store(next_keep_ptr + at.index, new_keep, mask=at.real)
            tl.store(kept_ptr + at.place, s * new_keep, mask=at.real)
            differs = at.real & ((new_keep != keep) | (sweep == 0))
            if CASE.gives:
                tl.store(next_give_ptr + at.index, new_give, mask=at.real)
                tl.store(returned_ptr + at.place, t * new_give, mask=at.real)
                differs = differs | (at.real & (new_give != give))
            tl.store(changed_ptr + first // BLOCK, tl.max(differs.to(tl.int32), 0))
        _, _, _, meeting = _meet(team, meeting, nothing, nothing, nothing, True, SHARED)
        ways = tl.zeros([BLOCK], REAL)
        over = tl.zeros([BLOCK], tl.int1)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            near = 0  # whether anything has changed within reach of the tile
            earliest = tl.maximum(first - LAYOUT.halo, 0) // BLOCK
            latest = tl.minimum(first + BLOCK - 1 + LAYOUT.halo, N - 1) // BLOCK
            for tile in tl.range(earliest, latest + 1):
                near = tl.maximum(near, tl.load(changed_ptr + tile))
            x = read(x_ptr + at.index, at.real).to(REAL)
            keep, give = _factors(keep_ptr, give_ptr, at, CASE.gives, REAL)
            new_keep, new_give = _factors(next_keep_ptr, next_give_ptr, at, CASE.gives, REAL)
            received, sent = (
                read(received_ptr + at.index, at.real),
                read(sent_ptr + at.index, at.real),
            )
            new_received, new_sent = received, sent
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
        way, broken, _, meeting = _meet(
            team, meeting, _most(ways), _most(over.to(REAL)), nothing, True, SHARED
        )
        way = tl.where(final & (lo <= 0.0), way, 1.0).to(REAL)
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            _mix(keep_ptr, next_keep_ptr, way, at, kind)
            _mix(sent_ptr, next_sent_ptr, way, at, REAL)
            if CASE.gives:
                _mix(give_ptr, next_give_ptr, way, at, kind)
                _mix(received_ptr, next_received_ptr, way, at, REAL)
        sweep += 1

    # The plan's cost is that of the factors as they are stored.
    if repaired:
        for first in tl.range(begin, N, stride):
            at = _tile(first, one, LAYOUT)
            s, t = read(s_ptr + at.place, at.real), read(t_ptr + at.place, at.real)
            keep, give = _factors(keep_ptr, give_ptr, at, True, REAL)
            tl.store(kept_ptr + at.place, s * keep, mask=at.real)
            tl.store(returned_ptr + at.place, t * give, mask=at.real)
        _, _, _, meeting = _meet(team, meeting, nothing, nothing, nothing, True, SHARED)
    ends_ptr = tl.where(repaired, kept_ptr, s_ptr)
    starts_ptr = tl.where(repaired, returned_ptr, t_ptr)
    gross = tl.zeros([BLOCK], tl.float64)
    left = tl.zeros([BLOCK], tl.float64)
    highs = tl.full([BLOCK], float("-inf"), kind)
    lows = highs
    for first in tl.range(begin, N, stride):
        at = _tile(first, one, LAYOUT)
        terms = read(ends_ptr + at.place, at.real), read(starts_ptr + at.place, at.real), psi
        cost, net = pair_costs(
            ends_ptr, starts_ptr, at.place, terms, table, CASE.pairs, LAYOUT.rough
        )
        gross += cost.to(tl.float64)
        left += net.to(tl.float64)
        chosen = read(chosen_ptr + at.index, at.real)
        highs = tl.maximum(highs, tl.where(at.real, chosen, float("-inf")))
        lows = tl.maximum(lows, tl.where(at.real, -chosen, float("-inf")))
    paid, owed, _, meeting = _meet(
        team, meeting, _total(gross), _total(left), nothing, False, SHARED
    )
    highest, lowest, _, meeting = _meet(
        team, meeting, _most(highs), _most(lows), nothing, True, SHARED
    )
    size = tl.maximum(tl.abs(highest), tl.abs(lowest)) + psi.to(tl.float64) * given.dearest
    finite = owed < float("inf")
    affords = tl.maximum(budget, 0.0) * (1.0 - tl.minimum(size * given.doubt, 0.5))
    affords = tl.where(finite, affords / tl.maximum(owed, 1e-300), 0.0)
    scale = tl.minimum(affords, 1.0)
    for first in tl.range(begin, N, stride):
        at = _tile(first, one, LAYOUT)
        x = read(x_ptr + at.index, at.real).to(REAL)
        keep, give = _factors(keep_ptr, give_ptr, at, True, REAL)
        received, sent = read(received_ptr + at.index, at.real), read(sent_ptr + at.index, at.real)
        z = tl.minimum(tl.maximum(x + (keep * received - give * sent), lo), hi)
        z = x + tl.where(finite, scale.to(REAL) * (z - x), 0.0)
        tl.store(z_ptr + at.index, tl.minimum(tl.maximum(z, lo), hi).to(kind), mask=at.real)
    if team.rank == 0:
        pace = tl.minimum(tl.maximum(affords, _PACE[0]), _PACE[1])
        kappa *= tl.exp(tl.log(pace) * _PACING)
        if not CASE.exact:  # the box may have asked for more
            tl.store(out.wide + image, tl.where(highest + lowest <= _RANGE, 0, 1))
        tl.store(out.psi + image, psi.to(kind))
        tl.store(out.numbers + image, paid)
        tl.store(out.numbers + batch + image, tl.where(finite, owed, 0.0))
        tl.store(out.numbers + 2 * batch + image, scale)
        kappa = tl.minimum(tl.maximum(kappa, _KAPPA[0]), _KAPPA[1])
        tl.store(out.numbers + 3 * batch + image, kappa)
    return meeting


@triton.jit
def _choose(q_ptr, chosen_ptr, s_ptr, at, b, q, middle, kind: tl.constexpr, REAL: tl.constexpr):
    """Store box potentials ``q``, the potentials of the plan as they are returned, and its column
    terms."""
    chosen = (b + q).to(kind)
    tl.store(q_ptr + at.index, q.to(kind), mask=at.real)
    tl.store(chosen_ptr + at.index, chosen, mask=at.real)
    tl.store(s_ptr + at.place, tl.exp((chosen - middle).to(REAL)), mask=at.real)


@triton.jit
def _factors(keep_ptr, give_ptr, at, GIVES: tl.constexpr, REAL: tl.constexpr):
    keep = read(keep_ptr + at.index, at.real).to(REAL)
    if GIVES:
        return keep, read(give_ptr + at.index, at.real).to(REAL)
    else:
        return keep, tl.full(keep.shape, 1.0, REAL)


@triton.jit
def _mix(ptr, next_ptr, way, at, kind: tl.constexpr):
    """Go ``way`` of the way to the next values."""
    now = read(ptr + at.index, at.real).to(way.dtype)
    now += way * (read(next_ptr + at.index, at.real) - now)
    tl.store(ptr + at.index, now.to(kind), mask=at.real)


@triton.jit
def _ahead(q, new, before, momentum):
    """Beyond ``new``, in the direction from the step ``before`` it, unless the step from ``q``
    turned back."""
    far = new + momentum * (new - before)
    far = tl.where(new < 0.0, tl.minimum(far, 0.0), tl.minimum(tl.maximum(far, 0.0), 50.0))
    return tl.where((new != 0.0) & ((new - q) * (new - before) >= 0.0), far, new)
