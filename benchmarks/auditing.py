"""``python -m benchmarks auditing``: how long the check of one example takes, by its plan and by exact transport.

Examples of several sizes are made by a few steps of ``DualAveraging`` against random networks: linear ones of 14 x 14
means, where mass goes far because neighbours have the same gradients, and convolutional ones, where it goes to the next
pixels. The time is the processor's, all threads together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.inputs import scenes
from benchmarks.origin import environment, keep
from benchmarks.timing import processor_time

SIDES, LARGE = (32, 64, 112, 224), 3 * 48 * 48
"""Pixels of square colour images, and how many make a large one, whose time depends on the network."""


def images(sides: tuple[int, ...]) -> Iterator[tuple[str, Tensor, float]]:
    """Name, a few images, and a radius at which examples are sought."""
    yield "28 x 28", wball.load_sample("mnist")[0][:10], 0.3
    for side in sides:
        yield f"{side} x {side} x 3", scenes(max(1, 160 // side), side), 0.02


def linear(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(14), nn.Flatten(), nn.Linear(196 * channels, 10))


def convolutional(channels: int) -> nn.Module:
    layers = [nn.Conv2d(channels, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


NETWORKS = {"linear": linear, "convolutional": convolutional}


def row(name: str, x: Tensor, eps: float, network: str) -> dict[str, Any]:
    """Seconds for each image by both ways."""
    ball = wball.WassersteinBall(eps)
    model = NETWORKS[network](x.shape[1])
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    attack = wball.DualAveraging(ball, steps=10, until_success=False, proofs=True)
    found = attack(model, x, model(x).argmax(1))
    wball.audit(ball, x[:1], found.images[:1])  # imports what it needs
    by_plan, first = processor_time(
        lambda: wball.audit(ball, x, found.images, plan=found.proof, exact="needed")
    )
    by_transport, second = processor_time(lambda: wball.audit(ball, x, found.images))
    assert first.all_valid and second.all_valid and not first.exact.any() and second.exact.all()
    changed = float((found.images != x).double().mean())
    about = {
        "images": name,
        "network": network,
        "count": len(x),
        "eps": eps,
        "changed": round(changed, 3),
    }
    return {**about, "plan_s": by_plan / len(x), "exact_s": by_transport / len(x)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks auditing", description=__doc__)
    parser.add_argument(
        "--sides", type=int, nargs="*", default=SIDES, help="of colour images, in pixels"
    )
    parser.add_argument("--out", type=Path, default=Path("results") / "auditing.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about = environment("cpu", None, given.out) | {"seed": 0}
    rows: list[dict[str, Any]] = []
    for name, x, eps in images(tuple(given.sides)):
        for network in NETWORKS if x[0].numel() > LARGE else ["linear"]:
            rows.append(row(name, x, eps, network))
            keep(given.out, {"environment": about, "rows": rows})
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
