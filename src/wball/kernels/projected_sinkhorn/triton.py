r"""Projected Sinkhorn (:mod:`wball.kernels.projected_sinkhorn.reference`) in Triton: every sweep
inside one launch.

One program per image: both blocks of the ascent, where the next sweep starts, the stopping test,
repair and the gap. Images leave one by one, and nothing is read by the host.

Sweeps are float32, and the gap is a sum of small terms, added in float64. A second launch of the
same program in float64 continues images whose potentials are too wide for float32 (large
``lambda``). Where the plan itself is wanted (``factors``), or images are float64, it continues all
images: a few more sweeps, then point, plan, cost and gap of the same numbers, to the last bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.cost import Moves, StencilMoves
from wball.kernels.projected_sinkhorn import (
    DEPENDENT,
    DOUBT,
    EXACT_SLACK,
    EXCESS,
    FAR,
    FIRST,
    LEAST,
    LESS,
    MARGIN,
    MEMORY,
    PARTS,
    PAUSE,
    PSI_TOL,
    SLACK,
    WIDEST_MARGIN,
    ProjectedSinkhorn,
    Projection,
)
from wball.kernels.triton_flows import FlowBox, RowPlan, flows, repair, stage
from wball.kernels.triton_launch import aligned, kernel
from wball.kernels.triton_stencil import (
    EXACT_RANGE,
    INTERPRETED,
    MAX_ON_CHIP,
    MAX_VALUES,
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
    sum_six,
    too_large,
    warps,
    why_not_here,
)

FEW = 1024
"""Values up to which moves are part of the code in float64, too; with more, registers are full."""

RESOLVED = 3e-5
"""Relative gap that float32 resolves for sure. Smaller ones are left to float64."""

REMEMBERED = MEMORY - 1
ROWS = 1 + 2 * REMEMBERED
"""Images that the memory of the sweeps takes, in two bytes a pixel: metric, and differences with
their steps. The change of the last sweep is kept in float32, and so is where it ended, in what will
be the potential's place."""

_FIRST, _LEAST, _PAUSE, _PSI_TOL, _PARTS, _REMEMBERED, _ROWS = map(
    tl.constexpr, (FIRST, LEAST, PAUSE, PSI_TOL, PARTS, REMEMBERED, ROWS)
)
_DOUBT, _DEPENDENT, _MARGIN, _WIDEST_MARGIN, _FAR, _EXCESS, _LESS = map(
    tl.constexpr, (DOUBT, DEPENDENT, MARGIN, WIDEST_MARGIN, FAR, EXCESS, LESS)
)
_RESOLUTION = tl.constexpr(16.0)  # roundings by which the cost may miss the budget at any price


def why_not(x: Tensor, moves: Moves) -> str | None:
    """Why this kernel must refuse such images, or ``None``."""
    return why_not_here(x, moves) or too_large(x, MAX_VALUES)


def projected_sinkhorn(problem: Projection) -> ProjectedSinkhorn:
    """See :func:`wball.kernels.projected_sinkhorn.projected_sinkhorn`."""
    x, tol = aligned(problem.x), problem.tol
    assert isinstance(problem.moves, StencilMoves)
    table = stencil(problem.moves, x)
    layout, batch, device = table.layout, x.shape[0], x.device
    lo, hi = problem.ends
    doubly = problem.factors or x.dtype == torch.float64
    gives = lo > 0  # rows keep what they have otherwise
    work, out = (torch.float64, x.dtype) if doubly else (torch.float32, torch.float32)
    keep = torch.empty_like(x, dtype=work)
    found = ProjectionFound(
        z=torch.empty_like(x, dtype=out),
        u=torch.empty_like(x, dtype=out),
        psi=torch.empty(batch, dtype=work, device=device),
        keep=keep,
        give=torch.empty_like(keep) if gives else keep,  # not touched
        numbers=torch.empty((6, batch), dtype=torch.float64, device=device),
        n_iter=torch.empty(batch, dtype=torch.int64, device=device),
        wide=torch.empty(batch, dtype=torch.int32, device=device),
    )
    rows = torch.empty((batch, ROWS, layout.numel), dtype=torch.bfloat16, device=device)
    change = torch.empty((batch, layout.numel), dtype=torch.float32, device=device)
    given = (x, problem.w, problem.budget.double(), problem.tau, *problem.start())
    given, bounds = ProjectionGiven(*map(aligned, given)), _bounds((lo, hi), device)
    for exact in (False, True) if batch else ():
        (staged,) = table.stage(1, batch, device, torch.float64 if exact else torch.float32)
        slack = (EXACT_SLACK if exact and doubly else SLACK) * problem.unit
        limits = ProjectionLimits(bounds, slack, tol if exact else max(tol, RESOLVED), MARGIN * tol)
        in_code = not exact or layout.block <= FEW
        _projection_kernel[(batch,)](
            given, (found, ProjectionScratch(staged, rows, change)), table.tables[exact], limits, 1,
            problem.max_iter, batch,
            CASE=ProjectionCase(
                layout if in_code else layout._replace(offsets=()),
                gives, exact, doubly, EXACT_RANGE if exact else RANGE,
            ),
            num_warps=8 if exact and 2048 < layout.block <= MAX_ON_CHIP else warps(layout.block), num_stages=1,
        )  # fmt: skip
        given = given._replace(u=found.u, psi=found.psi)  # only the first launch needs its own
        del staged  # before the second launch has its own
    objective, gap, allowed, cost, residual, scale = found.numbers.unbind()
    plan = (None, None)
    if problem.factors:
        plan = keep, found.give if gives else scale.view(-1, 1, 1, 1).expand(x.shape)
    return ProjectedSinkhorn(
        found.z, cost, found.u, found.psi, objective, gap, allowed, residual, found.n_iter, *plan
    )


@lru_cache(maxsize=16)
def _bounds(box: tuple[float, float], device: torch.device) -> Tensor:
    """The box in float64: a number that is handed to a kernel is rounded to float32."""
    return torch.tensor(box, dtype=torch.float64).to(device)


@triton.jit
def _total(values, real):
    return tl.sum(tl.where(real, values, 0.0).to(tl.float64), 0)


@triton.jit
def _x_log_y(x, y):
    return tl.where(x > 0.0, x * tl.log(tl.maximum(y, 1.2e-38)), 0.0)


@triton.jit
def wright_omega(y, EXACT: tl.constexpr):
    """The solution ``o`` of ``o + log(o) = y``, by Newton steps on ``log(o)``."""
    y = tl.maximum(y, -700.0 if EXACT else -80.0)  # where o = e^y and vanishes next to anything
    v = tl.where(
        y < 1.0, y - tl.minimum(tl.exp(tl.minimum(y, 1.0)), 0.5), tl.log(tl.maximum(y, 1.0))
    )
    for _ in tl.static_range(6 if EXACT else 4):
        o = tl.exp(v)
        v = v - (o + v - y) / (1.0 + o)
    return tl.exp(v)


@triton.jit
def _clip(values, lo, hi):
    return tl.minimum(tl.maximum(values, lo), hi)


@triton.jit
def _log_ratio(column, above, bound):
    """``log(column / bound)``, to the relative precision of ``above``, their difference, where that
    is small."""
    t = above / bound
    near = t * (1.0 - t * (0.5 - t * (0.33333333333333333 - t * (0.25 - t * 0.2))))
    return tl.where(tl.abs(t) < 1e-3, near, tl.log(column) - tl.log(bound))


@triton.jit
def _scaled(beta, new, whole, resists, bold):
    """Scaled steps (:mod:`wball.kernels.projected_sinkhorn`), or a part of them where that is more
    than ``new``."""
    scale = whole / tl.maximum(resists, 1e-6 * whole + 1e-30)
    step = new - beta
    far = tl.maximum(tl.abs(step), _FAR)
    step *= tl.maximum(bold * scale, 1.0)
    return beta + _clip(step, -far, far)


@triton.jit
def _misfit(w, u, z, lo, hi):
    """The first term of the gap, per pixel."""
    v = w - u
    c = _clip(v, lo, hi)
    return 0.5 * (z - c) * (z - c) - (z - c) * (v - c)


class ProjectionGiven(NamedTuple):
    """A problem: images, a number per image, and ``lo`` and ``hi`` in float64."""

    x: Tensor
    w: Tensor
    budget: Tensor
    tau: Tensor
    u: Tensor
    psi: Tensor


class ProjectionLimits(NamedTuple):
    """Mass that may remain outside the box, the tolerance, and the part of it that full columns may
    use."""

    box: Tensor
    slack: float
    tol: float
    margin_tol: float


class ProjectionFound(NamedTuple):
    """The answer: images, numbers per image (objective, gap, allowed gap, cost, residual, scale of
    what moves), and which images are left to float64: too wide, or their plans do not repair."""

    z: Tensor
    u: Tensor
    psi: Tensor
    keep: Tensor
    give: Tensor
    numbers: Tensor
    n_iter: Tensor
    wide: Tensor


class ProjectionScratch(NamedTuple):
    """Buffers of a launch: what neighbours see, :data:`ROWS` images of earlier sweeps, and the
    change of the last sweep."""

    staged: Tensor
    rows: Tensor
    change: Tensor


class Memory(NamedTuple):
    """What is remembered of earlier sweeps: :data:`ROWS` images, the change of the last sweep, and
    where it ended."""

    rows: tl.tensor
    change: tl.tensor
    end: tl.tensor


class ProjectionCase(NamedTuple):
    """What the program is compiled for: images and moves, whether rows may give less, whether
    arithmetic is float64, whether every image then continues, and the widest range of
    potentials."""

    layout: Layout
    gives: bool
    exact: bool
    every: bool
    widest: float


@kernel
def _projection_kernel(given, written, table, limits, one, max_iter, batch, CASE: tl.constexpr):
    LAYOUT: tl.constexpr = CASE.layout
    N: tl.constexpr = LAYOUT.numel
    EXACT: tl.constexpr = CASE.exact
    REAL: tl.constexpr = tl.float64 if EXACT else tl.float32
    RESOLUTION: tl.constexpr = _RESOLUTION * (2.0**-52 if EXACT else 2.0**-23)
    out, scratch = written
    tol, margin_tol = limits.tol, limits.margin_tol
    image = tl.program_id(0).to(tl.int64)
    if EXACT and not CASE.every:  # noqa: SIM102, decided when compiling
        if tl.load(out.wide + image) == 0:
            return
    at = pixels(one, LAYOUT)
    index, real, place = at
    here = image * N + index
    s_ptr = scratch.staged + image * LAYOUT.staged
    keep_ptr, give_ptr = out.keep + image * N, out.give + image * N
    rows_ptr, change_ptr = scratch.rows + image * (_ROWS * N), scratch.change + image * N
    stage_halos(s_ptr, one, LAYOUT)
    x = read(given.x + here, real).to(REAL)
    w = read(given.w + here, real).to(REAL)
    u = read(given.u + here, real).to(REAL)
    budget_exact = tl.load(given.budget + image)
    budget = budget_exact.to(REAL)
    psi = tl.load(given.psi + image).to(REAL)
    single = (budget <= 0.0) | (tl.sum(x, 0) <= 0.0)
    tau = tl.where(single, 1.0, tl.load(given.tau + image).to(REAL))
    lo = tl.load(limits.box).to(REAL)
    hi = tl.load(limits.box + 1).to(REAL)
    at_centre = _total(0.5 * (w - x) * (w - x), real)
    mass = _total(x, real).to(REAL)
    at_rest = tl.load(given.tau + image).to(tl.float64) * _total(
        _x_log_y(x, x / tl.maximum(mass, 1.2e-38)), real
    )
    window = StagedWindow(table.offset, table.fee, ring_fees(table.fee, LAYOUT))
    log_tau = tl.log(tau)

    beta = u / tau
    price = psi / tau
    begun = tl.load(out.n_iter + image) if EXACT else 0
    n_iter = 0
    offers, wait = 0, 0
    target = tl.maximum(tol * _FIRST - margin_tol, tol * _LEAST)
    scale = at_centre.to(REAL)
    done = single
    wide = False
    lowest = 0.0 * psi + float("inf")
    sizes = (0.0 * psi, 0.0 * psi, 0.0 * psi)
    margin = 0.0 * psi
    bold = 0.0 * psi + 1.0
    while (n_iter < max_iter) & (done == False):
        # Rows and price, for potentials as they are stored.
        beta = (tau * beta).to(out.u.dtype.element_ty).to(REAL) / tau if EXACT else beta
        top, bottom = extent(beta, real)
        wide = top - bottom > CASE.widest
        if EXACT:
            beta = tl.maximum(beta, top - CASE.widest)
        else:  # in float32, rounding errors may be what cannot be repaired
            wide |= offers > 2
        s = tl.where(real, tl.exp(beta - top), 1.0)
        stage(s_ptr, place, s, real)
        worth = tl.maximum(tau * price * budget, 1.2e-38)
        miss = tl.minimum(tl.maximum(_PSI_TOL * target * scale / worth, RESOLUTION), _PSI_TOL)
        given_up = False if EXACT else wide
        price, mean, norm, moved = solve_price(
            x, s, price, PriceSearch(budget, miss, tl.where(n_iter == 0, 12, 3), given_up),
            s_ptr, place, window, LAYOUT,
        )  # fmt: skip
        t = x / norm
        log_sum = tl.log(norm) + top
        stage(s_ptr, place, t, real)
        received = flows(s_ptr, place, s, -1, price, window, LAYOUT)

        # Columns. What a pixel gains is small: so far from the box it is known better than the
        # column itself.
        gained = received - x * moved
        columns = received + x * (1.0 - moved)
        over = (x - hi) + gained
        under = (lo - x) - gained
        log_s = tl.log(columns) - beta
        omega = wright_omega(w / tau + log_s - log_tau, EXACT)
        new = w / tau - omega
        new = tl.where(
            omega * tau > hi - margin, beta - _log_ratio(columns, over + margin, hi - margin), new
        )
        new = tl.where(omega * tau < lo, beta - _log_ratio(columns, -under, lo), new)
        heat_here = tl.where((omega * tau >= lo) & (omega * tau <= hi - margin), tau, 0.0)
        resists = received + x * moved * (1.0 - moved) + heat_here
        n_iter += 1

        # About the gap after a repair, but for the margin: columns above hi will send mass back,
        # unspent.
        kept = _clip(columns, lo, hi)
        misfit, outside, entropy, distance, cost, pressed = sum_six(
            tl.where(real, _misfit(w, tau * beta, kept, lo, hi), 0.0),
            tl.where(real, tl.maximum(over, 0.0) + tl.maximum(under, 0.0), 0.0),
            tl.where(real, beta * columns - x * log_sum, 0.0),
            tl.where(real, 0.5 * (w - columns) * (w - columns), 0.0),
            x * mean,
            tl.where(real, tl.maximum(w - tau * beta - hi, 0.0), 0.0),
        )
        scale = tl.maximum(distance, _PARTS * (distance - tau * (entropy - price * cost)))
        scale += tol * at_centre.to(REAL)
        unspent = tl.maximum(tl.abs(budget - cost) - RESOLUTION * budget, 0.0)
        margin = tl.minimum(
            margin_tol * scale / tl.maximum(pressed, 1e-30),
            tl.minimum(_WIDEST_MARGIN * (hi - lo), _MARGIN * budget / N),
        )
        margin = tl.where(pressed > 0.0, margin, 0.0)
        estimate = tl.maximum(misfit - margin * pressed, 0.0) + tau * price * (
            unspent + _EXCESS * outside
        )
        misled = (n_iter > 1) & (estimate > _DOUBT * tl.maximum(lowest, target * scale))
        lowest = tl.where(misled, estimate, tl.minimum(lowest, estimate))
        bold *= tl.where(misled, _LESS, 1.0)
        new = tl.where(real, _scaled(beta, new, columns + heat_here, resists, bold), 0.0)
        last = n_iter == max_iter
        if EXACT:
            last = last | wide
        if given_up:
            done = True
        elif ((estimate <= target * scale) & (n_iter >= wait)) | last:
            plan, box = RowPlan(x, s, t, price, x * moved, received), FlowBox(lo, hi, limits.slack)
            keep, give, sent, arrived = repair(plan, box, s_ptr, at, window, LAYOUT, CASE.gives)
            # Within the budget.
            stage(s_ptr, place, s * keep, real)
            paid = flows(s_ptr, place, t, 1, price, window, LAYOUT, True)
            spent = _total(give * paid, real)
            shrink = tl.minimum(budget_exact / tl.maximum(spent, 1e-300), 1.0)
            spent *= shrink
            sent *= shrink.to(REAL)
            arrived *= shrink.to(REAL)
            z = _clip(x + (arrived - sent), lo, hi)
            # The gap of this plan.
            stay = tl.maximum(x - sent, 0.0)
            divergence = _total(
                _x_log_y(arrived, keep)
                + _x_log_y(sent, give)
                + _x_log_y(stay, stay / tl.maximum(x * (1.0 - moved), 1.2e-38))
                + sent * tl.log(shrink.to(REAL)),
                real,
            )
            heat = tau.to(tl.float64)
            value = price.to(tl.float64)
            gap = _total(_misfit(w, tau * beta, z, lo, hi), real)
            gap += heat * (value * (budget_exact - spent) + divergence)
            entropy_exact = heat * (
                divergence - value * spent + _total(beta * z - x * log_sum, real)
            )
            distance_exact = _total(0.5 * (w - z) * (w - z), real)
            allowed = tol * tl.maximum(distance_exact, _PARTS * (distance_exact - entropy_exact))
            allowed += tol * tol * at_centre
            residual = tl.max(tl.where(real, tl.abs(z - _clip(w - tau * beta, lo, hi)), 0.0), 0)
            tl.store(out.z + here, z, mask=real)
            tl.store(keep_ptr + index, keep, mask=real)
            if CASE.gives:
                tl.store(give_ptr + index, shrink.to(REAL) * give, mask=real)
            objective = distance_exact + entropy_exact + at_rest
            _note(out.numbers + image, batch, objective, gap, allowed, spent, residual, shrink)
            offers += 1
            done = (gap <= allowed) | last
            target = tl.maximum(0.5 * target, tol * _LEAST)
            wait = n_iter + _PAUSE * offers
        trusted = (n_iter > 1) & (misled == False)
        memory = Memory(rows_ptr, change_ptr, out.u + image * N)
        following, sizes = _conjugate(memory, at, (beta, new, resists), n_iter, sizes, trusted, N)
        beta = tl.where(done, beta, following)
    if not EXACT:
        tl.store(out.wide + image, wide.to(tl.int32))
        n_iter -= wide.to(tl.int32)  # the sweep that found it out
    tl.store(out.n_iter + image, begun + n_iter)
    tl.store(out.u + here, tau * beta, mask=real)  # of a single point: tau is 1
    tl.store(out.psi + image, tau * price)
    if single:
        tl.store(out.z + here, x, mask=real)
        tl.store(keep_ptr + index, tl.full(x.shape, 1.0, REAL), mask=real)
        if CASE.gives:
            tl.store(give_ptr + index, tl.zeros_like(x), mask=real)
        _note(out.numbers + image, batch, at_centre + at_rest, 0.0, tol * at_centre, 0.0, 0.0, 0.0)


@triton.jit
def _add_eight(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _products(metric, f, d0, d1, d2, d3):
    """The square of a difference, its products with the others, and those of the change with
    all."""
    g, f = metric * d0, metric * f
    if INTERPRETED:
        return (
            tl.sum(g * d0, 0), tl.sum(g * d1, 0), tl.sum(g * d2, 0), tl.sum(g * d3, 0),
            tl.sum(f * d0, 0), tl.sum(f * d1, 0), tl.sum(f * d2, 0), tl.sum(f * d3, 0),
        )  # fmt: skip
    else:
        return tl.reduce(
            (g * d0, g * d1, g * d2, g * d3, f * d0, f * d1, f * d2, f * d3), 0, _add_eight
        )


@triton.jit
def _row(ptr, row, index, real, size, N: tl.constexpr):
    """A row of the memory; 0 where nothing is remembered, which has no size."""
    return tl.where(size > 0.0, read(ptr + row * N + index, real).to(tl.float32), 0.0)


@triton.jit
def _part(product, size):
    return tl.where(size > 0.0, product / tl.maximum(size, 1e-30), 0.0)


@triton.jit
def _conjugate(memory, at, sweep, step, sizes, remember, N: tl.constexpr):
    """Where the sweep after ``step`` starts, and the sizes of what is then remembered, the latest
    first.

    ``sweep`` is where this one started and ended, and the metric. Nothing is remembered unless told
    to ``remember``.
    """
    beta, new, resistance = sweep
    index, real, ptr = at.index, at.real, memory.rows
    change = tl.where(real, new - beta, 0.0)
    following = new
    size1, size2, size3 = sizes
    nothing = 0.0 * size1
    slot = step % _REMEMBERED  # of the oldest, which is replaced
    if remember:
        metric = read(ptr + index, real).to(tl.float32)
        d0 = change - read(memory.change + index, real)
        s0 = tl.where(real, new - read(memory.end + index, real).to(new.dtype), 0.0)
        one, two, three = (
            1 + (slot + _REMEMBERED - 1) % _REMEMBERED,
            1 + (slot + 1) % _REMEMBERED,
            1 + slot,
        )
        d1, s1 = (
            _row(ptr, one, index, real, size1, N),
            _row(ptr, one + _REMEMBERED, index, real, size1, N),
        )
        d2, s2 = (
            _row(ptr, two, index, real, size2, N),
            _row(ptr, two + _REMEMBERED, index, real, size2, N),
        )
        d3, s3 = (
            _row(ptr, three, index, real, size3, N),
            _row(ptr, three + _REMEMBERED, index, real, size3, N),
        )
        size, along1, along2, along3, f0, f1, f2, f3 = _products(metric, change, d0, d1, d2, d3)
        a1, a2, a3 = _part(along1, size1), _part(along2, size2), _part(along3, size3)
        rest = size - a1 * along1 - a2 * along2 - a3 * along3
        d0 -= a1 * d1 + a2 * d2 + a3 * d3
        s0 -= a1 * s1 + a2 * s2 + a3 * s3
        f0 -= a1 * f1 + a2 * f2 + a3 * f3
        if rest > _DEPENDENT * size:
            tl.store(ptr + three * N + index, d0.to(tl.bfloat16), mask=real)
            tl.store(ptr + (three + _REMEMBERED) * N + index, s0.to(tl.bfloat16), mask=real)
            following = (
                new
                - f0 / rest * s0
                - _part(f1, size1) * s1
                - _part(f2, size2) * s2
                - _part(f3, size3) * s3
            )
            size1, size2, size3 = rest, size1, size2
        else:
            size1, size2, size3 = nothing, nothing, nothing
    else:
        size1, size2, size3 = nothing, nothing, nothing
        tl.store(ptr + index, resistance.to(tl.bfloat16), mask=real)
    tl.store(memory.change + index, change, mask=real)
    tl.store(memory.end + index, new, mask=real)
    return following, (size1, size2, size3)


@triton.jit
def _note(ptr, batch, objective, gap, allowed, cost, residual, scale):
    """The numbers of an image."""
    tl.store(ptr, objective)
    tl.store(ptr + batch, tl.where(gap < 0.0, 0.0, gap))  # what is not a number stays so
    tl.store(ptr + 2 * batch, allowed)
    tl.store(ptr + 3 * batch, cost)
    tl.store(ptr + 4 * batch, residual)
    tl.store(ptr + 5 * batch, scale)
