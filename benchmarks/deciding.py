"""``python -m benchmarks deciding``: what complete verification decides, model by model and radius by radius.

One row each: share of images that are classified correctly, broken (with a counterexample that passes the audit),
proved and undecided, and seconds an image: the median, the mean and the worst. Models are names of
:func:`wball.load_model`, or ``ARCHITECTURE=FILE`` for weights of your own, named after their file. On a GPU images are
searched together, and the time of every step is shared by the images it was spent on. All images first get anchored
bounds alone; what those leave open is searched. An image that is proved at a larger radius is not tried again, so give
the largest first. The file is written after every batch; if interrupted, rerun the same
command to resume. With a larger ``--time-limit`` a rerun tries again what is undecided, and nothing else.
Images that lack least come first, as far as that is known. With ``--processes`` so many cores of a CPU search, one
image each.
``--plot`` draws the share that is proved against the time spent on each image.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import earlier, environment, keep
from wball.certificates import CertificateStatus

Found = tuple[str, list[float], list[float]]
"""The first letter of each status, the seconds and the bound of each."""

PROVED = 1000
"""Images that get anchored bounds between two writes of the file."""


def decide(model: nn.Module, x: Tensor, y: Tensor, ball: wball.Ball, time_limit: float) -> Found:
    """Fails if a counterexample does not pass the audit. Without a time limit only anchored bounds are tried."""
    found = (
        wball.certify(model, x, y, ball, "complete", time_limit=time_limit)
        if time_limit
        else wball.certify(model, x, y, ball, "anchored")
    )
    broken = [k for k, status in enumerate(found.status) if status is CertificateStatus.FALSIFIED]
    if broken:
        assert found.counterexample is not None
        report = wball.audit(ball, x[broken], found.counterexample[broken])
        if not report.all_valid:
            raise RuntimeError(f"a counterexample is not in the ball: {report}")
    letters = "".join(status.name[0] for status in found.status)
    return (
        letters,
        [round(t, 4) for t in found.seconds.tolist()],
        [round(m, 4) for m in found.margin.tolist()],
    )


def row(part: dict[str, Any]) -> dict[str, Any]:
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
        "time_limit": max(part["limits"]),
    }


def pending(
    part: dict[str, Any], images: int, limit: float, remaining: float
) -> tuple[list[int], float]:
    """Images to try next, and their time limit: new ones have 0; if there are none, undecided ones that had less.

    These share the time that remains.
    """
    if len(part["status"]) < images:
        return list(range(len(part["status"]), images)), 0.0
    tried = zip(part["status"], part["limits"], strict=True)
    some = [k for k, (letter, before) in enumerate(tried) if letter == "U" and before < limit]
    limit = min(limit, remaining / max(1, len(some)))
    return [k for k in some if part["limits"][k] < limit], limit


def proved_further_out(images: list[dict[str, Any]], part: dict[str, Any]) -> set[int]:
    """Images that are proved at a larger radius: the smaller ball lies inside."""
    larger = [p["status"] for p in images if p["model"] == part["model"] and p["eps"] > part["eps"]]
    return {k for status in larger for k, letter in enumerate(status) if letter == "C"}


def _columns(answers: list[tuple[str, float, float]]) -> Found:
    return "".join(a for a, _, _ in answers), [t for _, t, _ in answers], [b for _, _, b in answers]


def put(
    part: dict[str, Any],
    some: list[int],
    letters: str,
    took: list[float],
    bounds: list[float],
    limit: float,
) -> None:
    """Write down what images ``some`` came to; new ones are appended. Anchored bounds before a search count as well."""
    status, open_bounds = list(part["status"]), part.setdefault("bounds", {})
    for k, letter, seconds, bound in zip(some, letters, took, bounds, strict=True):
        if k < len(status) and part["limits"][k] == 0:
            seconds = round(seconds + part["seconds"][k], 4)
        status[k : k + 1], part["seconds"][k : k + 1], part["limits"][k : k + 1] = (
            [letter],
            [seconds],
            [limit],
        )
        open_bounds.pop(str(k), None)
        if letter == "U":
            open_bounds[str(k)] = bound
    part["status"] = "".join(status)


def unranked(part: dict[str, Any], some: list[int]) -> list[int]:
    """Images whose bounds are not known."""
    return [k for k in some if str(k) not in part.get("bounds", {})]


def nearest(part: dict[str, Any], some: list[int]) -> list[int]:
    """Images by their bounds, those that lack least first."""
    return sorted(some, key=lambda k: -part.get("bounds", {}).get(str(k), -math.inf))


def network(name: str, root: Path | None) -> tuple[str, nn.Module]:
    """The model that an argument names, and what its rows call it."""
    architecture, _, file = name.rpartition("=")
    if not architecture:
        return name, wball.load_model(name, root=root)
    model = wball.build_model(architecture)
    wball.load_weights(model, file)
    return Path(file).stem, model


def plot(path: Path, images: list[dict[str, Any]]) -> None:
    """Share of all images that is proved within a time, one curve for each model and radius."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    for number, part in enumerate(images):
        total = len(part["status"])
        times = sorted(t for t, s in zip(part["seconds"], part["status"], strict=True) if s == "C")
        if times:
            share = [100 * (k + 1) / total for k in range(len(times))]
            line = "-" if number < 10 else "--"  # colours repeat after ten
            axes.step(
                times, share, line, where="post", label=f"{part['model']}, eps {part['eps']:g}"
            )
    axes.set(xlabel="seconds an image", ylabel="% of images proved", xscale="log")
    if axes.has_data():
        figure.legend(
            loc="outside lower center", ncols=2, fontsize="small"
        )  # within the axes it would cover curves
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Cores:
    """Processes of one thread each, every one with the model and the images, that decide one image at a time."""

    def __init__(self, count: int, *source: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.count = count
        self.pool = ProcessPoolExecutor(count, context, initializer=_prepare, initargs=source)

    def decide(
        self, eps: float, images: list[int], limit: float, until: float
    ) -> Iterator[tuple[int, float, Found]]:
        """Every image with the time limit it had and what it came to, as they are done.

        No search goes on after ``until``, of ``time.monotonic``; without a limit only anchored bounds are tried.
        """
        waiting, running = list(reversed(images)), dict[Future[Found], tuple[int, float]]()
        while running or (waiting and time.monotonic() < until):
            while waiting and len(running) < self.count and time.monotonic() < until:
                k, seconds = waiting.pop(), min(limit, until - time.monotonic())
                running[self.pool.submit(_decide, eps, k, seconds)] = k, seconds
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield *running.pop(future), future.result()


_own: dict[str, Any] = {}
"""The model and the images of a process of :class:`Cores`."""


def _prepare(wanted: str, weights: Path | None, dataset: Any, data: Path | None) -> None:
    torch.set_num_threads(1)
    _own["model"] = network(wanted, weights)[1].eval()
    _own["x"], _own["y"] = wball.load_dataset(dataset, data) if data else wball.load_sample(dataset)


def _decide(eps: float, k: int, time_limit: float) -> Found:
    return decide(
        _own["model"], _own["x"][[k]], _own["y"][[k]], wball.WassersteinBall(eps), time_limit
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks deciding", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=["mnist-certified"], help="names, or ARCHITECTURE=FILE"
    )
    parser.add_argument("--weights", type=Path, help="folder of public models' weights")
    parser.add_argument("--dataset", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument(
        "--data", type=Path, help="folder with the data set (default: the bundled images)"
    )
    parser.add_argument("--radii", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds an image")
    parser.add_argument(
        "--batch", type=int, default=64, help="images of a GPU between two writes of the file"
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="cores of a CPU that search, one image each"
    )
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, help="seconds after which it ends"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / "complete_mnist.json")
    parser.add_argument("--plot", type=Path, help="file of the figure")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    x, y = (
        wball.load_dataset(given.dataset, given.data)
        if given.data
        else wball.load_sample(given.dataset)
    )
    x, y = x[: given.images].to(given.device), y[: given.images].to(given.device)
    files = [Path(name.rpartition("=")[2]) for name in given.models if "=" in name]
    about = environment(given.device, given.data, given.out, *files)
    settings = {"data": f"{given.dataset} test" if given.data else f"bundled {given.dataset}"}
    images: list[dict[str, Any]] = earlier(given.out, settings=settings).get("images", [])
    step = 1 if given.device == "cpu" else given.batch
    until = begun + given.stop_after

    def write() -> None:
        rows = [row(p) for p in images if p["status"]]
        keep(
            given.out, {"environment": about, "settings": settings, "rows": rows, "images": images}
        )

    for wanted in given.models:
        name, model = network(wanted, given.weights)
        model = model.to(given.device).eval()
        source = wanted, given.weights, given.dataset, given.data
        cores = Cores(given.processes, *source) if given.processes else None
        for eps in given.radii:
            part = next((p for p in images if (p["model"], p["eps"]) == (name, eps)), None)
            if part is None:
                part = {"model": name, "eps": eps, "status": "", "seconds": [], "limits": []}
                images.append(part)
            ball = wball.WassersteinBall(eps)
            while (remaining := until - time.monotonic()) > 0:
                some, limit = pending(
                    part, len(x), given.time_limit, math.inf if cores else remaining
                )
                if not some:
                    break
                if cores and limit:
                    for k, _, (_, _, bounds) in cores.decide(eps, unranked(part, some), 0.0, until):
                        part.setdefault("bounds", {})[str(k)] = bounds[0]
                    for k, had, found in cores.decide(eps, nearest(part, some), limit, until):
                        put(part, [k], *found, max(had, part["limits"][k]))
                        write()
                else:
                    some = nearest(part, some)[:step] if limit else some[:PROVED]
                    rest = [k for k in some if k not in proved_further_out(images, part)]
                    found = decide(model, x[rest], y[rest], ball, limit) if rest else ("", [], [])
                    answers = dict(zip(rest, zip(*found, strict=True), strict=True))
                    put(
                        part,
                        some,
                        *_columns([answers.get(k, ("C", 0.0, 0.0)) for k in some]),
                        limit,
                    )
                    write()
            if part["status"]:
                print(row(part), flush=True)
    if given.plot is not None:
        plot(given.plot, images)


if __name__ == "__main__":
    main()
