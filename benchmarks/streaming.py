"""``python -m benchmarks streaming``: peak memory of an evaluation that reads its images from a data set.

Synthetic colour images are made on demand, attacked in one step and audited. What is reported is how far the peak of
the process's resident memory rises above what it was after a first evaluation of one batch, when model and framework
are loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wball
from wball import provenance

SIDE, CLASSES = 128, 10


class Synthetic(Dataset[Any]):
    """Smooth random images whose label is the brightest tenth of their rows."""

    def __init__(self, count: int, side: int = SIDE) -> None:
        self.count, self.side = count, side

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(k)
        x = torch.rand(3, self.side, self.side, generator=generator) * 0.5
        label = k % CLASSES
        rows = self.side // CLASSES
        x[:, label * rows : (label + 1) * rows] += 0.02
        return x, label


class Rows(nn.Module):
    """The mean brightness of each tenth of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[2] // CLASSES
        return 50 * x[:, :, : rows * CLASSES].mean((1, 3)).unflatten(1, (CLASSES, rows)).mean(2)


def peak() -> float:
    """Largest resident memory so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(count: int, side: int, folder: Path) -> dict[str, Any]:
    """Peak memory of ``count`` images above that of one batch."""
    ball = wball.LinfBall(0.02)
    attack = wball.PGD(ball, steps=1)

    def run(images: int, out: Path) -> wball.Evaluation:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wball.evaluate(
                Rows(), Synthetic(images, side), ball=ball, attack=attack, batch_size=50, out=out
            )

    run(50, folder / "first")
    before, begun = peak(), time.perf_counter()
    result = run(count, folder / "all")
    return {
        "images": len(result),
        "shape": [3, side, side],
        "megabytes_of_images": round(count * 3 * side * side * 4 / 2**20),
        "peak_above_megabytes": round(peak() - before, 1),
        "seconds": round(time.perf_counter() - begun, 1),
        "examples": int((result.images["read_as"] >= 0).sum()),
        "kept": len(result.examples["index"]),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks streaming", description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--out", type=Path, default=Path("results") / "streaming.json")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.images, given.side, Path(folder))
    origin = {
        **provenance.collect(wball.LinfBall(0.02), torch.zeros(1, 3, given.side, given.side)),
        "seed": 0,
        "commit": provenance.commit(),
    }
    given.out.write_text(
        json.dumps({**found, "provenance": origin}, indent=2) + "\n", encoding="utf-8"
    )
    print(found)


if __name__ == "__main__":
    main()
