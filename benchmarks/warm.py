"""Compile what a run will need in several processes at once: compilers use one core each and keep what they made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing import get_context

import torch

from wball.kernels.projected_sinkhorn import Projection

Task = tuple[str, tuple[int, int, int], int]
"""Kind of work, shape of an image, window."""

MNIST, CIFAR10 = (1, 28, 28), (3, 32, 32)


def tasks(device: torch.device, parts: Sequence[str]) -> list[Task]:
    """Longest first. On a CPU one compiled version serves every shape, so there is one task of each kind."""
    found: list[Task] = (
        [("projection", CIFAR10, 5), ("projection", MNIST, 5)] if "projection" in parts else []
    )
    if device.type != "cuda":
        return [*found[:1], ("oracle", MNIST, 5)]
    found.insert(0, ("exact", MNIST, 5))
    windows = [5] * ("oracle" in parts) + [7, 3, 9, 11] * ("windows" in parts)
    found += [("oracle", shape, window) for window in windows for shape in (CIFAR10, MNIST)]
    return found + [("oracle", (3, side, side), 5) for side in (64, 128, 224) if "large" in parts]


def compile_one(task: Task, device: str) -> str:
    """Call what the benchmark will call, on two images."""
    from benchmarks.oracle import kernels_for, step_of
    from wball import WassersteinBall
    from wball.cost import GridCost
    from wball.kernels.projected_sinkhorn import projected_sinkhorn

    torch.set_num_threads(1)
    kind, shape, window = task
    started = time.perf_counter()
    x = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0)).to(
        "cpu" if kind == "exact" else device
    )
    if kind == "oracle":
        for name, kernel in kernels_for(x, GridCost(window).arcs(*shape[1:], x)):
            if name != "torch":
                step_of(kernel, x, 0.1, window, 0, steps=1)()
    elif kind == "exact" or x.device.type == "cpu":
        for images in (x, x.double()):
            WassersteinBall(0.1).project(images, images.flip(-1), reg=1000.0, tol=1e-3)
    else:
        ball = WassersteinBall(0.1)
        mass, moves = x.sum((1, 2, 3)), GridCost(window).arcs(*shape[1:], x)
        for box in ((0.0, 1.0), None):
            projected_sinkhorn(Projection(
                x, x.flip(-1), ball.budget(x), moves, box, mass / 1000,
                u=x.flip(-1) - x, psi=torch.full_like(mass, 0.1), max_iter=3,
            ))  # fmt: skip
    if x.is_cuda:
        torch.cuda.synchronize()
    return f"compiled: {kind} {shape} window {window}, {time.perf_counter() - started:.0f} s"


def warm(device: torch.device, processes: int, parts: Sequence[str]) -> None:
    todo = tasks(device, parts)
    with get_context("spawn").Pool(min(processes, len(todo)), maxtasksperchild=None) as pool:
        waiting = [pool.apply_async(compile_one, (task, device.type)) for task in todo]
        for task, answer in zip(todo, waiting, strict=True):
            try:
                print(answer.get(timeout=300), flush=True)
            except Exception as error:  # noqa: BLE001, whatever it is: the run itself will say so
                print(f"not compiled: {task}: {type(error).__name__}: {error}", flush=True)
