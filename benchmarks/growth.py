"""``python -m benchmarks growth``: how the cost grows with batch, side of an image and window.

One thing grows at a time, from the same start (28 x 28 digits at a window of 5 for batches, 32 x 32
x 3 for sides and windows). Projections have the time of the worst of four kinds of directions at a
small and a large radius. Memory is what a call requests beyond the batch, in batches; only a GPU
counts it. ``<out>.png`` shows the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import wball
from benchmarks.frame import Result, Row, options, peak_memory, timed
from benchmarks.inputs import DIRECTIONS, direction, mnist, scenes

BATCHES = (1, 10, 100, 1000, 10000)
SIDES = (32, 64, 128, 256, 512)
WINDOWS = (3, 5, 7, 9, 11, 15)
STEP = 0.1
SIZES = {
    "batch": lambda row: row["batch"],
    "side": lambda row: row["shape"][-1],
    "window": lambda row: row["window"],
}


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


def draw(rows: list[Row], path: Path) -> None:
    """Draw nanoseconds per pixel against what grows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    grown = [grows for grows in SIZES if any(row["grows"] == grows for row in rows)]
    axes = figure.subplots(1, len(grown), sharey=True, squeeze=False)[0]
    for axis, grows in zip(axes, grown, strict=True):
        size = SIZES[grows]
        for call in ("project", "sample"):
            found = [r for r in rows if r["grows"] == grows and r["call"] == call]
            times = [r["ns_per_pixel"] for r in found]
            axis.plot([size(r) for r in found], times, marker="o", label=call)
        axis.set(xlabel=grows, xscale="log", yscale="log")
        measured = sorted({size(r) for r in rows if r["grows"] == grows})
        axis.set_xticks(measured, [f"{value:,}" for value in measured])
        axis.minorticks_off()  # their labels would overlap
    axes[0].set_ylabel("ns per pixel")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = options("growth", __doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each call")
    parser.add_argument("--batch", type=int, default=BATCHES[-1], help="largest batch")
    parser.add_argument("--windows", type=int, nargs="*", default=WINDOWS, help="windows")
    parser.add_argument("--side", type=int, default=SIDES[-1], help="largest side of an image")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    result = Result(f"growth_{device.type}", given)
    digits = mnist(given.data, torch.device("cpu")).x
    for grows, images, window, reg in problems(given.batch, given.side, given.windows, digits):
        x = images.to(device)
        random = torch.Generator(device).manual_seed(given.seed)
        about = {"grows": grows, "batch": len(x), "shape": list(x.shape[1:]), "window": window}
        balls = [wball.WassersteinBall(eps, wball.GridCost(window)) for eps in (0.02, 0.5)]
        points = {kind: x + STEP * direction(x, kind, given.seed) for kind in DIRECTIONS}
        projections = {
            f"{kind}, eps {ball.eps:g}": partial(ball.project, x, w, reg=reg, tol=1e-4)
            for kind, w in points.items()
            for ball in balls
        }
        for name, runs in (
            ("project", projections),
            ("sample", {"": partial(balls[0].sample, x, random)}),
        ):
            if result.has(call=name, **about):
                continue
            tried = [(timed(run, device, given.seconds), kind) for kind, run in runs.items()]
            (answer, times), worst = max(tried, key=lambda found: found[0][1]["seconds"])
            row = {"call": name, **about, "seconds": times["seconds"]}
            if name == "project":
                row |= {
                    "worst": worst,
                    "kernel": answer.kernel,
                    "converged": min(int(found[0].converged.sum()) for found, _ in tried),
                }
            row["ns_per_pixel"] = 1e9 * row["seconds"] / x.numel()
            extra = peak_memory(runs[worst], device)
            row["extra_memory_in_batches"] = None if extra is None else extra / x.nbytes
            result.add(row)
    draw(result.rows, result.path.with_suffix(".png"))
