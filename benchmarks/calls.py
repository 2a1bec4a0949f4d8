"""``python -m benchmarks calls --data DIR``: how long the public calls take, as a user makes them.

Every row times a function of the public API at its defaults or at the accuracy it states, by the clock, from the call
to the moment its result can be read; no CUDA graph is made around it. On a GPU the kernel launches, the values read
back and the extra memory of a call are counted, too. The projection released with the paper does the same work in the
same run. The result is written after every row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.inputs import Images, cifar10, disturbed, mnist
from benchmarks.launches import counted
from benchmarks.origin import begun, keep, rows_before, timed_options
from benchmarks.peers import Absent, released_projection
from benchmarks.timing import peak_memory

STEP = 0.1
"""Standard deviation of what is added to an image before it is projected, about what a step of an attack adds."""

RELEASED_ITERATIONS = 50
"""The most that the projection released with the paper makes: its default."""


@dataclass(frozen=True)
class Call:
    """One public call.

    Attributes:
        name: what a reader sees.
        run: makes the call.
        images: the batch, for the extra memory per image.
        target: seconds that were to be reached on a GPU, if any.
        judge: numbers that say how good the answer is.
    """

    name: str
    run: Callable[[], Any]
    images: Tensor
    target: float | None = None
    judge: Callable[[Any], dict[str, Any]] = lambda answer: {}


def _solved(answer: Any) -> dict[str, Any]:
    return {
        "converged": int(answer.converged.sum()),
        "of": len(answer.converged),
        "kernel": answer.kernel,
    }


def _robust(answer: Any) -> dict[str, Any]:
    return {"robust_accuracy": answer.robust_accuracy}


def _proved(answer: Any) -> dict[str, Any]:
    return {"certified": float(answer.certified.double().mean())}


def balls(images: Images, count: int, targets: dict[str, float], seed: int) -> Iterator[Call]:
    """Projections, support functions and samples of one source of images."""
    x = images.batch(count)
    w, direction = disturbed(x, STEP, seed), disturbed(torch.zeros_like(x), 1.0, seed + 1)
    ball, title = wball.WassersteinBall(images.eps), f"{images.name} x {count}"
    entropic = {"reg": images.reg}
    for name, run, judge in (
        (
            f"project, reg {images.reg:g}, tol 1e-4",
            lambda: ball.project(x, w, tol=1e-4, **entropic),
            _solved,
        ),
        (f"project, reg {images.reg:g}", lambda: ball.project(x, w, **entropic), _solved),
        ("project, exact, tol 1e-4", lambda: ball.project(x, w, tol=1e-4), _solved),
        ("project, exact", lambda: ball.project(x, w), _solved),
        ("support, exact", lambda: ball.support(x, direction), _solved),
        ("sample", lambda: ball.sample(x), lambda answer: {}),
    ):
        yield Call(f"{name}, {title}", run, x, targets.get(name), judge)
    try:
        released = released_projection()
    except Absent:
        return
    yield Call(
        f"released projection (peer), reg {images.reg:g}, {title}",
        lambda: released(x, w, images.eps, images.reg, RELEASED_ITERATIONS),
        x,
        judge=lambda answer: {"iterations": RELEASED_ITERATIONS},
    )


def attacks(x: Tensor, y: Tensor, model: nn.Module, sizes: list[int], steps: int) -> Iterator[Call]:
    """Attacks on a small network."""
    ball = wball.WassersteinBall(0.1)
    wanted = {128: 0.08, 1000: 0.16, 10000: 0.45}
    for size in sizes:
        part, labels = x[:size], y[:size]
        attack = wball.DualAveraging(ball, steps=steps, until_success=False)
        yield Call(
            f"DualAveraging, {size} digits, {steps} steps",
            lambda attack=attack, part=part, labels=labels: attack(model, part, labels),
            part,
            wanted.get(size),
            _robust,
        )
    size = sizes[min(1, len(sizes) - 1)]
    part, labels = x[:size], y[:size]
    for attack, target in (
        (wball.StandardAttack(wball.WassersteinBall(0.5)), 1.5),
        (wball.FrankWolfe(ball, steps=steps), 1.5),
        (wball.PGD(ball, steps=steps), 3.0),
    ):
        name = f"{type(attack).__name__}, {size} digits"
        yield Call(name, lambda attack=attack: attack(model, part, labels), part, target, _robust)


def certificates(x: Tensor, y: Tensor, model: nn.Module, count: int) -> Iterator[Call]:
    """Certificates of a network that they can follow."""
    ball = wball.WassersteinBall(0.05)
    part, labels = x[:count], y[:count]
    yield Call(
        f"certify, {count} digits at 0.05",
        lambda: wball.certify(model, part, labels, ball),
        part,
        0.5,
        _proved,
    )
    few = max(1, count * 190 // 300)
    with torch.no_grad():
        right = (model(x[: 2 * few]).argmax(1) == y[: 2 * few]).nonzero()[:few, 0]
    yield Call(
        f"certified_radius, {few} digits",
        lambda: wball.certified_radius(model, x[right], y[right], ball),
        x[right],
        6.0,
        lambda radius: {"median_radius": float(radius.median())},
    )


def row(call: Call, device: torch.device, budget: float, once: float) -> dict[str, Any]:
    """Time a call, count what it launches and reads. What takes longer than ``once`` is not made again."""
    samples: list[float] = []
    begin = time.perf_counter()
    answer = _timed(call, device, samples)
    first = samples[0]
    if first <= once:
        samples.clear()
    while not samples or (
        first <= once and time.perf_counter() - begin < budget + first and len(samples) < 30
    ):
        answer = _timed(call, device, samples)
    found = {
        "call": call.name,
        "seconds": median(samples),
        "repeats": len(samples),
        "first_seconds": first,
        "target_seconds": call.target if device.type == "cuda" else None,
        **call.judge(answer),
    }
    if device.type == "cuda" and median(samples) < budget:
        found["launches"], found["host_reads"] = counted(call.run)
        extra = peak_memory(call.run, device)
        assert extra is not None
        found["extra_memory_in_batches"] = extra / (
            call.images.numel() * call.images.element_size()
        )
    return found


def _timed(call: Call, device: torch.device, samples: list[float]) -> Any:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    answer = call.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    samples.append(time.perf_counter() - begin)
    return answer


def main(arguments: list[str] | None = None) -> None:
    parser = timed_options("calls", __doc__, seconds=2.0, resumes=True)
    parser.add_argument("--images", type=int, default=100, help="images of a batch")
    parser.add_argument(
        "--digits",
        type=int,
        nargs="+",
        default=[128, 1000, 10000],
        help="batch sizes of the attacks",
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of an attack")
    parser.add_argument("--proofs", type=int, default=300, help="digits to certify")
    parser.add_argument("--model", default="levine2020-mnist-flow-0.01", help="network to certify")
    parser.add_argument("--models", type=Path, help="folder with the weights of public models")
    parser.add_argument(
        "--once",
        type=float,
        default=math.inf,
        help="calls that take longer are not made again (compile kernels before)",
    )
    parser.add_argument("--only", help="calls whose name contains this")
    given = parser.parse_args(arguments)
    device, out, about = begun("calls", given)
    x, y = (
        wball.load_dataset("mnist", given.data, "test")
        if given.data
        else wball.load_sample("mnist")
    )
    x, y = x.to(device), y.to(device)
    attacked = wball.load_model("mnist-standard").to(device).eval()
    proved = wball.load_model(given.model, root=given.models).to(device).eval()
    exact = {"project, exact": 0.010, "support, exact": 0.003, "sample": 0.001}
    colour = {"project, exact": 0.150, "support, exact": 0.025, "sample": 0.001}
    digits, images = mnist(given.data, device), cifar10(given.data, device)
    exact |= {
        f"project, reg {digits.reg:g}, tol 1e-4": 0.0008,
        f"project, reg {digits.reg:g}": 0.002,
    }
    colour |= {
        f"project, reg {images.reg:g}, tol 1e-4": 0.002,
        f"project, reg {images.reg:g}": 0.005,
    }
    longer = (
        *attacks(x, y, attacked, [n for n in given.digits if n <= len(x)], given.steps),
        *certificates(x, y, proved, min(given.proofs, len(x))),
    )
    rows = rows_before(given, out, about)
    made = {row["call"] for row in rows}
    for call in (
        *balls(digits, given.images, exact, given.seed),
        *balls(images, given.images, colour, given.seed),
        *sorted(
            longer, key=lambda call: call.target or 0.0
        ),  # a run that is stopped has the shorter ones
    ):
        if call.name not in made and (given.only is None or given.only in call.name):
            rows.append(row(call, device, given.seconds, given.once))
            keep(out, {"environment": about, "rows": rows})
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
