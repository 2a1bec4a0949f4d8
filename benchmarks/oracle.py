"""The attack step's oracle: one entropic plan with its price, box and repair, as in the middle of an attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.inputs import Images, smooth_gradients
from benchmarks.timing import Machine, measure, peak_memory
from wball import WassersteinBall
from wball.cost import GridCost
from wball.kernels.dispatch import KernelError, load, why_not
from wball.kernels.entropic_plan import PlanRequest
from wball.moves import Moves

WARM_UP = 15
"""Steps of the attack before the one that is measured."""


def kernels_for(x: Tensor, moves: Moves) -> Iterator[tuple[str, Any]]:
    wanted = ("triton", "torch") if x.device.type == "cuda" else ("cpu", "torch")
    for name in wanted:
        try:
            if why_not("entropic_plan", name, x, moves) is None:
                yield name, load("entropic_plan", name)
        except KernelError:
            continue


def step_of(
    kernel: Any, x: Tensor, eps: float, window: int, seed: int, steps: int | None = None
) -> Callable[[], Any]:
    """An attack's next call of the oracle after ``steps`` others, warm-started as there."""
    moves = GridCost(window).arcs(int(x.shape[2]), int(x.shape[3]), x)
    budget = WassersteinBall(eps).budget(x)
    b, q, psi = (
        torch.zeros_like(x),
        torch.zeros_like(x),
        torch.full_like(budget, 10.0, dtype=x.dtype),
    )
    if steps is None:
        steps = WARM_UP if x.numel() <= 2**20 else 4
    for k in range(steps):
        b = b + 3 * smooth_gradients(x, seed + k)
        plan = kernel.entropic_plan(PlanRequest(x, b, budget, moves, (0.0, 1.0), psi=psi, q=q))
        psi, q = plan.psi, plan.q
    b = b + 3 * smooth_gradients(x, seed + steps)
    return lambda: kernel.entropic_plan(PlanRequest(x, b, budget, moves, (0.0, 1.0), psi=psi, q=q))


def oracles(
    images: Images,
    sizes: list[int],
    windows: list[int],
    torch_at: int | None,
    device: torch.device,
    chip: Machine,
    budget_s: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Rows by batch size and by window; the torch reference, which is slow, at one size."""
    for size in sizes:
        for window in windows:
            x, with_torch = images.batch(size), size == torch_at
            yield from _rows(
                images.name, x, images.eps_attack, window, with_torch, device, chip, budget_s, seed
            )


def large(
    images: Images,
    sides: list[int],
    batch: int,
    device: torch.device,
    chip: Machine,
    budget_s: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Rows by size of the image."""
    for side in sides:
        x = (
            F.interpolate(images.batch(batch), size=(side, side), mode="bilinear")
            .clamp(0, 1)
            .contiguous()
        )
        name = f"{side} x {side} x {x.shape[1]}"
        yield from _rows(name, x, images.eps_attack, 5, False, device, chip, budget_s, seed)


def _rows(
    name: str,
    x: Tensor,
    eps: float,
    window: int,
    with_torch: bool,
    device: torch.device,
    chip: Machine,
    budget_s: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    moves = GridCost(window).arcs(int(x.shape[2]), int(x.shape[3]), x)
    mass = x.double().sum((1, 2, 3))
    # x, b, q in; z, q, keep, give out. Four sweeps over the moves both ways, one multiply and add each.
    floor = chip.floor(7 * 4 * x.numel(), 4 * 2 * 2 * len(moves) * x.numel())
    found = dict(kernels_for(x, moves))
    if not with_torch and len(found) > 1:
        del found["torch"]
    for kernel, module in found.items():
        run = step_of(module, x, eps, window, seed)
        plan = run()
        slack = (WassersteinBall(eps).budget(x) / plan.net_cost.clamp(min=1e-300)).clamp(max=1.0)
        z = x + slack.to(x.dtype).view(-1, 1, 1, 1) * (plan.z - x)
        extra = peak_memory(run, device)
        time = measure(run, device, budget_s=budget_s, graph=kernel == "triton")
        yield {
            "work": "oracle", "images": name, "batch": len(x), "window": window, "method": f"wball, {kernel}",
            "time": time, "ns_per_pixel": 1e6 * time.median / x.numel(),
            "extra_memory": None if extra is None else extra / (4 * x.numel()),
            "mass_error": float(((z.double().sum((1, 2, 3)) - mass).abs() / mass.clamp(min=1e-30)).max()),
            "box_violation": float(torch.maximum(-z, z - 1).clamp(min=0).max()),
            "budget_used": float((plan.net_cost * slack / WassersteinBall(eps).budget(x)).median()),
            "floor_ms": floor,
        }  # fmt: skip
