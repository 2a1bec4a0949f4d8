"""``python -m benchmarks exact``: what compiling the exact solvers is worth on a CPU.

Exact projection and support function of a few images, by the torch reference and by the compiled kernel, both to the
same certified gap: the processor's time of one thread for each image. Batches are small, because torch takes as many
steps for all images of a batch as the slowest needs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.inputs import Images, cifar10, disturbed, mnist, smooth_gradients
from benchmarks.origin import environment, keep
from benchmarks.timing import measure
from wball import WassersteinBall

GAP = 1e-5
BATCH = {"mnist": 5, "cifar10": 1}


def works(images: Images, seed: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is done, and the call that does it."""
    x = images.batch(BATCH[images.name])
    ball, free = WassersteinBall(images.eps_attack), WassersteinBall(images.eps_attack, box=None)
    point, direction = disturbed(x, 0.1, seed), smooth_gradients(x, seed)
    yield "projection", lambda: ball.project(x, point, tol=GAP)
    yield "support function", lambda: ball.support(x, direction, tol=GAP)
    yield "support function without box", lambda: free.support(x, direction, tol=GAP)


def rows(images: Images, seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    for work, run in works(images, seed):
        for name in ("torch", "cpu"):
            with patch.dict(os.environ, WBALL_KERNEL=name):
                answer = run()
                took = measure(run, images.x.device, budget_s=seconds)
            assert took.processor is not None
            yield {
                "work": work,
                "images": images.name,
                "eps": images.eps_attack,
                "kernel": name,
                "batch": BATCH[images.name],
                "processor_ms_per_image": round(took.processor / BATCH[images.name], 3),
                "converged": bool(answer.converged.all()),
            }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks exact", description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with MNIST and CIFAR-10 (default: bundled and made-up images)",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="time spent on each measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results") / "exact.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    found: list[dict[str, Any]] = []
    about = environment("cpu", given.data, given.out) | {"seed": given.seed}
    for images in (mnist(given.data, cpu), cifar10(given.data, cpu)):
        for row in rows(images, given.seconds, given.seed):
            found.append(row)
            keep(given.out, {"environment": about, "gap": GAP, "rows": found})
            print(row, flush=True)


if __name__ == "__main__":
    main()
