"""The installation (``wball info``): versions, devices, kernels, and why one is not available."""

import math
import os
import platform
from contextlib import suppress

import torch

import wball
from wball.cost import GridCost, Moves
from wball.kernels import dispatch
from wball.provenance import Plain, versions


def info() -> Plain:
    """Versions, devices and kernels as plain data."""
    packages = versions()
    return {
        "wball": packages.pop("wball"),
        "python": packages.pop("python"),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "devices": _devices(),
        "requested": os.environ.get("WBALL_KERNEL", "auto"),
        "kernels": {name: _kernel(name) for name in dispatch.KERNELS},
        "automatic": _automatic(),
    }


def _devices() -> list[str]:
    names = ["cpu"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return names


def _kernel(name: str) -> dict[str, str | None]:
    """The reason why the kernel cannot be used for float32 images on each kind of device; ``None``
    if it can."""
    reasons: dict[str, str | None] = {"cuda": "torch finds no CUDA device"}
    for device in _available():
        reasons[device] = dispatch.why_not("entropic_plan", name, *_probe(device))
    return reasons


def _automatic() -> dict[str, str]:
    """The kernel used on each device, given ``WBALL_KERNEL``."""
    chosen = {}
    for device in _available():
        with suppress(dispatch.KernelError):
            chosen[device] = dispatch.choose("entropic_plan", *_probe(device))
    return chosen


def _available() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _probe(device: str) -> tuple[torch.Tensor, Moves]:
    x = torch.zeros(1, 1, 4, 4, device=device)
    return x, GridCost(3).arcs(x)


def compile_kernels() -> None:
    """Compile the CPU kernels now, which takes about a minute, once per installation.

    For container images, and for jobs that start many processes. Compiled kernels are cached.
    """
    x = torch.eye(4)[None, None]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a network with unstable units
        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
        ).eval()
    ball = wball.WassersteinBall(0.1, wball.GridCost(3))
    for reg in (math.inf, 1e8):  # 1e8 is too large for sweeps: the entropic path follows them
        ball.support(torch.full_like(x, 0.9), x, reg=reg)
        ball.project(x, x.flip(3), reg=reg)
    ball.sample(x)
    wball.certify(net, x, net(x).argmax(1), ball.at(0.5))
