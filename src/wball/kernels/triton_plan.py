r"""The entropic plan (:mod:`wball.kernels.reference`) in Triton: the attack step's oracle in one launch.

An image that fits on chip is one program: its rings live in registers from the first Newton step to the last, every
image stops searching for its own ``psi`` when it has it, stops sweeping when its box potentials stand still, and stops
repairing when its box holds. A larger image is cut into tiles, one program each, and every step that needs a sum over
the image is a launch: the last tile to arrive adds the partial sums in a fixed order (so that results do not depend on
the schedule), and images that are done leave at once. The host never waits for the device.

Arithmetic is float32, whatever the inputs; sums over an image that end up in a result are float64.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from wball.kernels.reference import COST_TOL, REPAIR_SHARES, EntropicPlan
from wball.kernels.triton_stencil import (
    MAX_ON_CHIP,
    TILE,
    Move,
    Stencil,
    arriving,
    exchange,
    is_halo,
    log_rings,
    newton_step,
    pair_costs,
    ring_moments,
    ring_prices,
    staged_position,
    stencil,
)

_REPAIRS = tl.constexpr(len(REPAIR_SHARES))


def entropic_plan(
    x: Tensor,
    b: Tensor,
    budget: Tensor,
    moves: Sequence[Move],
    box: tuple[float, float] | None,
    *,
    psi: Tensor,
    q: Tensor,
    sweeps: int = 3,
    newton: int = 12,
) -> EntropicPlan:
    """See :func:`wball.kernels.reference.entropic_plan`. ``keep`` and ``give`` come back as strided views."""
    if x.dtype == torch.float64:
        raise TypeError("the Triton kernels compute in float32; float64 images are served by the torch reference")
    batch = x.shape[0]
    table = stencil(moves, x)
    x, b, q = x.contiguous(), b.contiguous(), q.contiguous()
    z, q_out = torch.empty((2, *x.shape), dtype=torch.float32, device=x.device)
    cost, net = torch.empty((2, batch), dtype=torch.float64, device=x.device)
    psi_out = torch.empty(batch, dtype=torch.float32, device=x.device)
    s, t, keep, give = table.stage(4, batch, x.device)
    run = _on_chip if table.values <= MAX_ON_CHIP else _tiled
    if batch:
        run(table, (x, b, budget.to(torch.float64), psi, q), (z, q_out, psi_out, cost, net), (s, t, keep, give), box,
            sweeps if box is not None else 0, newton)  # fmt: skip
    return EntropicPlan(z, cost, net, psi_out, q_out, table.unstage(keep, batch), table.unstage(give, batch))


Tensors = tuple[Tensor, ...]


def _slack(box: tuple[float, float] | None) -> tuple[float, float, float]:
    lo, hi = box if box is not None else (0.0, float("inf"))
    return lo, hi, 4 * torch.finfo(torch.float32).eps * (max(1.0, hi) if box is not None else 1.0)


def _shape(table: Stencil) -> dict[str, object]:
    channels, height, width = table.shape
    return {
        "C": channels, "H": height, "W": width, "RR": table.reach[0], "RC": table.reach[1], "ENDS": table.ends,
        "PAIRS": table.pair_price.shape[0] // 2 if len(table.ends) > 2 else 0,
    }  # fmt: skip


def _on_chip(
    table: Stencil, given: Tensors, out: Tensors, staged: Tensors, box: tuple[float, float] | None, sweeps: int, newton: int
) -> None:
    block = max(128, triton.next_power_of_2(table.values))
    _plan_kernel[(given[0].shape[0],)](
        *given, *out, *staged, table.offset, table.price, table.pair_offset, table.pair_price, 1, *_slack(box),
        sweeps, newton, **_shape(table), BOX=box is not None, TOL=COST_TOL, BLOCK=block,
        num_warps=min(16, max(4, block // 128)), num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["one", "sweeps", "newton"])
def _plan_kernel(
    x_ptr, b_ptr, budget_ptr, psi_ptr, q_ptr,
    z_out, q_out, psi_out, cost_out, net_out,
    s_ptr, t_ptr, keep_ptr, give_ptr,
    offset_ptr, price_ptr, pair_offset_ptr, pair_price_ptr,
    one, lo, hi, slack, sweeps, newton,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RR: tl.constexpr, RC: tl.constexpr, ENDS: tl.constexpr,
    PAIRS: tl.constexpr, BOX: tl.constexpr, TOL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = C * H * W
    MOVES: tl.constexpr = ENDS[len(ENDS) - 1]
    STAGED: tl.constexpr = C * (H + RR) * (W + RC)
    GUARD: tl.constexpr = RR * (W + RC) + RC
    image = tl.program_id(0).to(tl.int64)
    # Times a one the compiler cannot see: shifted loads are never aligned, so neighbouring threads should hold
    # neighbouring pixels instead of four each.
    index = tl.arange(0, BLOCK) * one
    real = index < N
    place = staged_position(tl.where(real, index, 0), H, W, RR, RC)
    s_ptr += image * STAGED
    t_ptr += image * STAGED
    keep_ptr += image * STAGED
    give_ptr += image * STAGED
    for first in tl.range(0, STAGED + GUARD, BLOCK):
        spot = first + index - GUARD
        halo = is_halo(spot, H, W, RR, RC) & (spot < STAGED)
        tl.store(s_ptr + spot, float("-inf"), mask=halo)
        tl.store(t_ptr + spot, float("-inf"), mask=halo)
        tl.store(keep_ptr + spot, 0.0, mask=halo)
        tl.store(give_ptr + spot, 0.0, mask=halo)
    x = tl.load(x_ptr + image * N + index, mask=real, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + image * N + index, mask=real, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + image * N + index, mask=real, other=0.0).to(tl.float32)
    log_x = tl.log(x)  # -inf where the row is empty
    budget = tl.load(budget_ptr + image).to(tl.float32)
    psi = tl.load(psi_ptr + image).to(tl.float32)
    keep = tl.full([BLOCK], 1.0, tl.float32)
    give = tl.full([BLOCK], 1.0, tl.float32)
    tl.store(keep_ptr + place, keep, mask=real)
    tl.store(give_ptr + place, give, mask=real)
    prices = ring_prices(price_ptr, ENDS)

    s = b + q
    t = log_x
    sent = x
    received = x
    sweep = 0
    while sweep <= sweeps:
        s = b + q
        tl.debug_barrier()
        tl.store(s_ptr + place, s, mask=real)
        tl.debug_barrier()
        rings = log_rings(s_ptr, place, s, offset_ptr, ENDS)
        low = -1.0
        high = float("inf")
        done = False
        step = 0
        while (step < newton) & (done == False):  # noqa: E712
            mean, variance, norm, moved = ring_moments(rings, prices, psi)
            psi, low, high, done = newton_step(
                psi, low, high, tl.sum(x * mean, 0), tl.sum(x * variance, 0), budget, TOL
            )
            step += 1
        mean, variance, norm, moved = ring_moments(rings, prices, psi)
        t = log_x - norm
        sent = x * moved
        tl.store(t_ptr + place, t, mask=real)
        tl.debug_barrier()
        received = arriving(t_ptr, place, s, psi, offset_ptr, price_ptr, MOVES)
        sweep += 1
        if BOX:
            if sweep <= sweeps:
                z = tl.maximum(tl.exp(t + s) + received, 1e-12)
                shift = tl.minimum(tl.maximum(q + tl.log(lo / z), 0.0), 50.0)
                shift = tl.where(real, tl.minimum(shift, q + tl.log(hi / z)), q)
                still = tl.max((shift != q).to(tl.int32), 0) == 0
                q = shift
                if still:
                    sweep = sweeps + 1

    z = x - sent + received
    if BOX:
        over = (z > hi + slack) & real
        under = (z < lo - slack) & real
        broken = tl.max((over | under).to(tl.int32), 0)
        repair = 0
        while (repair < _REPAIRS) & (broken > 0):
            keep, give = _tighten(x, sent, received, keep, give, over, under, lo, hi, _share(repair))
            tl.debug_barrier()
            tl.store(keep_ptr + place, keep, mask=real)
            tl.store(give_ptr + place, give, mask=real)
            tl.debug_barrier()
            sent, received = exchange(
                s_ptr, t_ptr, keep_ptr, give_ptr, place, s, t, psi, offset_ptr, price_ptr, MOVES
            )
            z = x - give * sent + keep * received
            over = (z > hi + slack) & real
            under = (z < lo - slack) & real
            broken = tl.max((over | under).to(tl.int32), 0)
            repair += 1
    tl.debug_barrier()
    cost, net = pair_costs(
        s_ptr, t_ptr, keep_ptr, give_ptr, place, s, t, keep, give, psi, pair_offset_ptr, pair_price_ptr, PAIRS
    )
    tl.store(cost_out + image, tl.sum(tl.where(real, cost, 0.0).to(tl.float64), 0))
    tl.store(net_out + image, tl.sum(tl.where(real, net, 0.0).to(tl.float64), 0))
    tl.store(psi_out + image, psi)
    tl.store(z_out + image * N + index, tl.minimum(tl.maximum(z, lo), hi), mask=real)
    tl.store(q_out + image * N + index, q, mask=real)


@triton.jit
def _share(repair):
    """``REPAIR_SHARES[repair]``."""
    late = tl.where(repair == 6, 0.99, tl.where(repair == 7, 0.9, tl.where(repair == 8, 0.5, 0.0)))
    return tl.where(repair < 6, 1.0, late)


@triton.jit
def _tighten(x, sent, received, keep, give, over, under, lo, hi, share):
    """Factors after one repair sweep; with share 0 every column and row of the image is treated."""
    room = tl.maximum((hi - x + share * give * sent) / tl.maximum(received, 1.2e-38), 0.0)
    spare = tl.maximum((x - lo + share * keep * received) / tl.maximum(sent, 1.2e-38), 0.0)
    kept, given = tl.minimum(keep, room), tl.minimum(give, spare)
    everywhere = share == 0.0
    return (
        tl.where(everywhere, kept, tl.where(over, kept, keep)),
        tl.where(everywhere, given, tl.where(under, given, give)),
    )
