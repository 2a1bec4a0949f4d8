"""``python -m benchmarks growth``: how the cost of public calls grows with batch, side of an image and window.

One thing grows at a time, from the same start (MNIST's 28 x 28 at a window of 5 for batches, 32 x 32 x 3 for sides and
windows). ``kernel`` is who projected, ``converged`` how many of the images were. Time is by the clock, from the call to
the moment its result can be read. Memory is what a call asks for beyond what was there before, in bytes of the batch;
only a GPU counts it. ``<out>.png`` shows the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import wball
from benchmarks.inputs import disturbed, mnist, scenes
from benchmarks.origin import begun, keep, rows_before, timed_options
from benchmarks.timing import peak_memory

BATCHES = (1, 10, 100, 1000, 10000)
SIDES = (32, 64, 128, 256, 512)
WINDOWS = (3, 5, 7, 9, 11, 15)
STEP = 0.1


def problems(
    most: int, largest: int, windows: Sequence[int], digits: Tensor
) -> Iterator[tuple[str, Tensor, int, float]]:
    """What grows, the images, the window, and ``reg``."""
    for batch in (batch for batch in BATCHES if batch <= most):
        yield "batch", digits[torch.arange(batch) % len(digits)], 5, 1000.0
    for side in (side for side in SIDES if side <= largest):
        yield "side", scenes(1, side), 5, 3000.0
    for window in windows:
        yield "window", scenes(8, 32), window, 3000.0


def row(
    grows: str, x: Tensor, window: int, reg: float, seconds: float, seed: int, made: set[str]
) -> Iterator[dict[str, Any]]:
    """The calls on one batch, but for those that are ``made``."""
    ball, w = (
        wball.WassersteinBall(0.05, wball.GridCost(window)),
        disturbed(x.cpu(), STEP, seed).to(x),
    )
    random = torch.Generator(x.device).manual_seed(seed)
    for name, call in (
        ("project", lambda: ball.project(x, w, reg=reg, tol=1e-4)),
        ("sample", lambda: ball.sample(x, random)),
    ):
        if name in made:
            continue
        samples: list[float] = []
        first = call()
        extra = peak_memory(call, x.device)
        end = time.perf_counter() + seconds
        while not samples or (time.perf_counter() < end and len(samples) < 20):
            begin = time.perf_counter()
            call()
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            samples.append(time.perf_counter() - begin)
        yield {
            "call": name,
            "grows": grows,
            "batch": len(x),
            "shape": list(x.shape[1:]),
            "window": window,
            **(
                {"kernel": first.kernel, "converged": int(first.converged.sum())}
                if name == "project"
                else {}
            ),
            "seconds": median(samples),
            "ns_per_pixel": 1e9 * median(samples) / x.numel(),
            "extra_memory_in_batches": None
            if extra is None
            else extra / (x.numel() * x.element_size()),
        }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Nanoseconds a pixel against what grows."""
    from matplotlib.figure import Figure

    sizes = {
        "batch": lambda r: r["batch"],
        "side": lambda r: r["shape"][-1],
        "window": lambda r: r["window"],
    }
    sizes = {grows: size for grows, size in sizes.items() if any(r["grows"] == grows for r in rows)}
    figure = Figure(figsize=(1 + 3 * len(sizes), 3.2), layout="constrained")
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, (grows, size) in zip(axes, sizes.items(), strict=True):
        for call in ("project", "sample"):
            found = [r for r in rows if r["grows"] == grows and r["call"] == call]
            axis.plot(
                [size(r) for r in found], [r["ns_per_pixel"] for r in found], marker="o", label=call
            )
        axis.set(xlabel=grows, xscale="log", yscale="log")
        measured = sorted({size(r) for r in rows if r["grows"] == grows})
        axis.set_xticks(measured, [f"{value:,}" for value in measured])
        axis.minorticks_off()  # else their labels run into each other
    axes[0].set_ylabel("ns a pixel")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = timed_options("growth", __doc__, seconds=1.0, resumes=True)
    parser.add_argument("--batch", type=int, default=BATCHES[-1], help="largest batch")
    parser.add_argument(
        "--windows", type=int, nargs="*", default=WINDOWS, help="sides of the windows"
    )
    parser.add_argument("--side", type=int, default=SIDES[-1], help="largest side of an image")
    parser.add_argument(
        "--longest",
        type=float,
        default=60.0,
        help="seconds of a call after which nothing grows more",
    )
    given = parser.parse_args(arguments)
    device, out, about = begun("growth", given)
    rows = rows_before(given, out, about)
    for grows, x, window, reg in problems(
        given.batch, given.side, given.windows, mnist(given.data, torch.device("cpu")).x
    ):
        alike = [r for r in rows if r["grows"] == grows]
        if any(r["seconds"] > given.longest for r in alike):
            continue
        size = [len(x), list(x.shape[1:]), window]
        made = {r["call"] for r in alike if [r["batch"], r["shape"], r["window"]] == size}
        for found in row(grows, x.to(device), window, reg, given.seconds, given.seed, made):
            rows.append(found)
            keep(out, {"environment": about, "seed": given.seed, "rows": rows})
            print(found, flush=True)
    draw(rows, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
