"""Launches and reads of public calls on a GPU: numbers that do not depend on the machine's load.

Each launch costs the host some microseconds, each read stalls the device. A replayed graph is one
launch. ``tests/test_launches.py`` holds the library to :data:`MOST`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.inputs import direction, mnist
from wball import DualAveraging, WassersteinBall

MOST: dict[str, tuple[int, int]] = {
    "project(reg=1000, tol=1e-4), 100 digits": (60, 4),
    "project(reg=1000), 100 digits": (60, 4),
    "project(), 100 digits": (120, 8),
    "support(), 100 digits": (125, 9),
    "sample, 100 digits": (60, 2),
    "DualAveraging, 128 digits x 100 steps": (1500, 16),
}
"""Launches and reads of a call, at most."""

LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


def calls() -> dict[str, Callable[[], Any]]:
    """The calls of :data:`MOST`, ready to be made."""
    device = torch.device("cuda")
    images = mnist(None, device)
    x, ball = images.batch(100), WassersteinBall(0.1)
    w, random = x + 0.1 * direction(x, "signs", 0), torch.Generator(device).manual_seed(0)
    from wball.zoo.architectures import build_model  # not where another version is measured

    model, digits = build_model("mnist-cnn").to(device).eval(), images.batch(128)
    with torch.no_grad():
        labels = model(digits).argmax(1)
    attack = DualAveraging(ball, steps=100, until_success=False)
    made: tuple[Callable[[], Any], ...] = (
        lambda: ball.project(x, w, reg=1000.0, tol=1e-4),
        lambda: ball.project(x, w, reg=1000.0),
        lambda: ball.project(x, w),
        lambda: ball.support(x, w - x),
        lambda: ball.sample(x, random),
        lambda: attack(model, digits, labels),
    )
    return dict(zip(MOST, made, strict=True))


def counted(call: Callable[[], Any]) -> tuple[int, int]:
    """Launches and reads of a call that was made before."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = seen.key_averages()
    launches = sum(event.count for event in events if event.key.startswith(LAUNCHES))
    reads = sum(event.count for event in events if "Memcpy DtoH" in event.key)
    return launches, reads
