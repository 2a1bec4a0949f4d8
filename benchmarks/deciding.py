"""``python -m benchmarks deciding``: what complete verification decides, model by model and radius by radius.

One row each: share of images that are classified correctly, broken (with a counterexample that passes the audit),
proved and undecided, and seconds an image: the median, the mean and the worst. Models are names of
:func:`wball.load_model`. Every image is timed on its own on a CPU; on a GPU images are searched together, and a batch's
time is shared by its images. The file is written after every batch; if interrupted, rerun the same command to resume.
Next to it ``.png`` shows the share that is proved against the time spent on each image.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import environment, keep
from wball.certificates import CertificateStatus


def decide(model: nn.Module, x: Tensor, y: Tensor, ball: wball.Ball, time_limit: float) -> tuple[str, float]:
    """The first letter of each status, and the seconds it took; fails if a counterexample does not pass the audit."""
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
    return "".join(status.name[0] for status in found.status), took


def row(part: dict[str, Any], limit: float) -> dict[str, Any]:
    """The row of the table: shares of images by status, and seconds."""
    letters, times = part["status"], part["seconds"]
    total = len(letters)
    return {
        "model": part["model"],
        "eps": part["eps"],
        "images": total,
        "clean": 1 - letters.count("M") / total,
        "broken": letters.count("F") / total,
        "proved": letters.count("C") / total,
        "undecided": letters.count("U") / total,
        "seconds_median": sorted(times)[total // 2],
        "seconds_mean": sum(times) / total,
        "seconds_worst": max(times),
        "time_limit": limit,
    }


def resumed(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run with the same settings left behind, image by image."""
    if not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    if before["settings"] != settings:
        raise SystemExit(f"{path} was made with other settings, {before['settings']}: choose another --out")
    images: list[dict[str, Any]] = before["images"]
    return images


def plot(path: Path, images: list[dict[str, Any]]) -> None:
    """Share of all images that is proved within a time, one curve for each model and radius."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for part in images:
        total = len(part["status"])
        times = sorted(t for t, s in zip(part["seconds"], part["status"], strict=True) if s == "C")
        if times:
            share = [100 * (k + 1) / total for k in range(len(times))]
            axes.step(times, share, where="post", label=f"{part['model']}, eps {part['eps']:g}")
    axes.set(xlabel="seconds an image", ylabel="% of images proved", xscale="log")
    if axes.has_data():
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks deciding", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mnist-certified"])
    parser.add_argument("--weights", type=Path, help="folder of public models' weights")
    parser.add_argument("--data", type=Path, help="folder with MNIST (default: the bundled digits)")
    parser.add_argument("--radii", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds an image")
    parser.add_argument("--batch", type=int, default=64, help="images searched together on a GPU")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds after which no batch is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / "complete_mnist.json")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    x, y = wball.load_dataset("mnist", given.data) if given.data else wball.load_sample("mnist")
    x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
    about = environment(given.device, given.data, given.out)
    settings = {"time_limit": given.time_limit, "data": "mnist test" if given.data else "bundled digits"}
    images = resumed(given.out, settings)
    step = 1 if given.device == "cpu" else given.batch
    for name in given.models:
        model = wball.load_model(name, root=given.weights) if given.weights else wball.load_model(name)
        model = model.to(given.device).eval()
        for eps in given.radii:
            part = next((p for p in images if (p["model"], p["eps"]) == (name, eps)), None)
            if part is None:
                part = {"model": name, "eps": eps, "status": "", "seconds": []}
                images.append(part)
            ball = wball.WassersteinBall(eps)
            while len(part["status"]) < len(x) and time.monotonic() - begun < given.stop_after:
                first = len(part["status"])
                some = slice(first, first + step)
                letters, took = decide(model, x[some], y[some], ball, given.time_limit)
                part["status"] += letters
                part["seconds"] += [round(took / len(letters), 4)] * len(letters)
                rows = [row(p, given.time_limit) for p in images if p["status"]]
                keep(given.out, {"environment": about, "settings": settings, "rows": rows, "images": images})
            if part["status"]:
                print(row(part, given.time_limit), flush=True)
    plot(given.out.with_suffix(".png"), images)


if __name__ == "__main__":
    main()
