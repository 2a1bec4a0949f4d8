"""``python -m benchmarks deciding``: what complete verification decides, model by model and radius by radius.

One row each: share of images that are classified correctly, broken (with a counterexample that passes the audit),
proved and undecided, and seconds an image: the median, the mean and the worst. Models are names of
:func:`wball.load_model`. Every image is timed on its own on a CPU; on a GPU, where images are searched together, so
many at a time. The file is written after every batch.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import environment, keep
from wball.certificates import CertificateStatus


def decide(model: nn.Module, x: Tensor, y: Tensor, ball: wball.Ball, time_limit: float) -> tuple[Counter[str], float]:
    """How often each status was found, and the seconds it took; fails if a counterexample does not pass the audit."""
    start = time.perf_counter()
    found = wball.certify(model, x, y, ball, "complete", time_limit=time_limit)
    if x.is_cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    broken = [k for k, status in enumerate(found.status) if status is CertificateStatus.FALSIFIED]
    if broken:
        assert found.counterexample is not None
        report = wball.audit(ball, x[broken], found.counterexample[broken])
        if not report.all_valid:
            raise RuntimeError(f"a counterexample is not in the ball: {report}")
    return Counter(status.name for status in found.status), took


def row(name: str, eps: float, counts: Counter[str], times: list[float], limit: float) -> dict[str, Any]:
    total = sum(counts.values())
    return {
        "model": name,
        "eps": eps,
        "images": total,
        "clean": 1 - counts["MISCLASSIFIED"] / total,
        "broken": counts["FALSIFIED"] / total,
        "proved": counts["CERTIFIED"] / total,
        "undecided": counts["UNKNOWN"] / total,
        "seconds_median": sorted(times)[len(times) // 2],
        "seconds_mean": sum(times) / len(times),
        "seconds_worst": max(times),
        "time_limit": limit,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks deciding", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mnist-certified"])
    parser.add_argument("--weights", type=Path, help="folder of public models' weights")
    parser.add_argument("--data", type=Path, help="folder with MNIST (default: the bundled digits)")
    parser.add_argument("--radii", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds an image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / "deciding.json")
    given = parser.parse_args(arguments)
    x, y = wball.load_dataset("mnist", given.data) if given.data else wball.load_sample("mnist")
    x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
    about = environment(given.device, given.data, given.out) | {"time_limit": given.time_limit}
    rows: list[dict[str, Any]] = []
    step = 1 if given.device == "cpu" else 64
    for name in given.models:
        model = wball.load_model(name, root=given.weights) if given.weights else wball.load_model(name)
        model = model.to(given.device).eval()
        for eps in given.radii:
            counts: Counter[str] = Counter()
            times: list[float] = []
            ball = wball.WassersteinBall(eps)
            for first in range(0, len(x), step):
                some = slice(first, first + step)
                found, took = decide(model, x[some], y[some], ball, given.time_limit)
                counts += found
                times += [took / len(x[some])] * len(x[some])
                keep(
                    given.out, {"environment": about, "rows": [*rows, row(name, eps, counts, times, given.time_limit)]}
                )
            rows.append(row(name, eps, counts, times, given.time_limit))
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
