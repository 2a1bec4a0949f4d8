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
    packages, kinds = versions(), ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    probes, chosen = {kind: _probe(kind) for kind in kinds}, dict[str, str]()
    for kind, probe in probes.items():
        with suppress(dispatch.KernelError):
            chosen[kind] = dispatch.choose("entropic_plan", *probe)
    kernels = {  # why they cannot be used for float32 images; None if they can
        name: {
            kind: dispatch.why_not("entropic_plan", name, *probes[kind])
            if kind in probes
            else "torch finds no CUDA device"
            for kind in ("cpu", "cuda")
        }
        for name in dispatch.KERNELS
    }
    return {
        "wball": packages.pop("wball"),
        "python": packages.pop("python"),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "devices": _devices(),
        "requested": os.environ.get("WBALL_KERNEL", "auto"),
        "kernels": kernels,
        "automatic": chosen,
    }


def _devices() -> list[str]:
    names = ["cpu"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return names


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
