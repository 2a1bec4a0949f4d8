"""``python -m benchmarks memory``: peak memory of many images in one call of the exact solvers.

Each call runs in a process of its own. What is reported is how far the peak of its resident memory rises above what it
was after a call with one image, when everything is loaded and compiled; the results themselves are given beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import wball
from wball import provenance

CALLS = ("support", "project")
TOL = 1e-2
"""Of the solvers: what they hold does not depend on it, and the time does."""


def peak() -> float:
    """Largest resident memory so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(call: str, images: int) -> dict[str, Any]:
    """Peak memory of one call in this process."""
    digits, _ = wball.load_sample("mnist")
    x = digits.repeat(-(-images // len(digits)), 1, 1, 1)[:images]
    given = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    ball = wball.WassersteinBall(0.1)

    def run(count: int) -> wball.SupportResult | wball.ProjectionResult:
        some = x[:count], given[:count]
        if call == "support":
            return ball.support(*some, tol=TOL)
        return ball.project(some[0], some[0] + 0.1 * some[1], tol=TOL)

    run(1)
    before, begun = peak(), time.perf_counter()
    result = run(images)
    tensors = [value for value in vars(result).values() if isinstance(value, torch.Tensor)]
    return {
        "call": call,
        "images": images,
        "tol": TOL,
        "converged": int(result.converged.sum()),
        "megabytes_of_results": round(sum(t.numel() * t.element_size() for t in tensors) / 2**20),
        "peak_above_megabytes": round(peak() - before),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument(
        "--call", choices=CALLS, help="one call, in this process; prints what was measured"
    )
    parser.add_argument("--out", type=Path, default=Path("results") / "memory.json")
    given = parser.parse_args(arguments)
    if given.call is not None:
        print(json.dumps(measure(given.call, given.images)))
        return
    rows = []
    for call in CALLS:
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "memory",
            "--call",
            call,
            "--images",
            str(given.images),
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(said.splitlines()[-1]))
        print(rows[-1], flush=True)
    origin = provenance.collect(wball.WassersteinBall(0.1), torch.zeros(1, 1, 28, 28))
    found = {"calls": rows, "provenance": {**origin, "seed": 0, "commit": provenance.commit()}}
    given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
