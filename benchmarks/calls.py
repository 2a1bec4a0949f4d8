"""``python -m benchmarks calls --data DIR``: how long public calls take, as a user makes them.

Every row times a function of the public API by the clock, from the call to the moment its result
can be read. Projections and support functions are timed in directions of four kinds (signs,
Gaussian, smoothed, cubed Gaussian) at a small and a large radius; a row has the time of each kind,
and its ``seconds`` are those of the worst. On a GPU, launches, values read back and extra memory of
a call are counted, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.frame import Result, Row, options, peak_memory, timed
from benchmarks.inputs import DIRECTIONS, Images, cifar10, direction, mnist
from benchmarks.launches import counted
from benchmarks.released import released_projection

STEP = 0.1
"""Root mean square of what is added to an image before it is projected."""
RELEASED_ITERATIONS = 50
"""The default of the released projection."""


@dataclass(frozen=True)
class Call:
    """A public call: its name, the call for each kind of input, the batch, and how to judge it."""

    name: str
    runs: dict[str, Callable[[], Any]]
    images: Tensor
    judge: Callable[[Any], Row] = lambda answer: {}


def _solved(answer: Any) -> Row:
    converged = answer.converged
    return {"converged": int(converged.sum()), "of": len(converged), "kernel": answer.kernel}


def _robust(answer: Any) -> Row:
    return {"robust_accuracy": answer.robust_accuracy}


def balls(images: Images, count: int, seed: int) -> Iterator[Call]:
    """Projections, support functions and samples of one source of images."""
    x, reg = images.batch(count), images.reg
    directions = {kind: direction(x, kind, seed) for kind in DIRECTIONS}
    released = released_projection()
    for eps in images.radii:
        ball, where = wball.WassersteinBall(eps), f"{images.name} x {count}, eps {eps:g}"
        made: dict[str, Callable[[Tensor], Any]] = {
            f"project, reg {reg:g}, tol 1e-4": lambda d, ball=ball: ball.project(
                x, x + STEP * d, reg=reg, tol=1e-4
            ),
            f"project, reg {reg:g}": lambda d, ball=ball: ball.project(x, x + STEP * d, reg=reg),
            "project, exact": lambda d, ball=ball: ball.project(x, x + STEP * d),
            "support, exact": lambda d, ball=ball: ball.support(x, d),
            f"support, reg {reg:g}": lambda d, ball=ball: ball.support(x, d, reg=reg),
        }
        for name, run in made.items():
            runs = {
                kind: lambda run=run, towards=towards: run(towards)
                for kind, towards in directions.items()
            }
            yield Call(f"{name}, {where}", runs, x, _solved)
        yield Call(f"sample, {where}", {"": lambda ball=ball: ball.sample(x)}, x)
        if released is not None:
            w = x + STEP * directions["signs"]
            peer = {"signs": lambda eps=eps, w=w: released(x, w, eps, reg, RELEASED_ITERATIONS)}
            name = f"released projection (peer), reg {reg:g}, {where}"
            yield Call(name, peer, x, lambda answer: {"iterations": RELEASED_ITERATIONS})


def attacks(x: Tensor, y: Tensor, model: nn.Module, sizes: list[int], steps: int) -> Iterator[Call]:
    """Attacks on a small network."""
    ball = wball.WassersteinBall(0.1)
    for size in sizes:
        attack = wball.DualAveraging(ball, steps=steps, until_success=False)
        run = {"": lambda size=size, attack=attack: attack(model, x[:size], y[:size])}
        yield Call(f"DualAveraging, {size} digits, {steps} steps", run, x[:size], _robust)
    size = sizes[min(1, len(sizes) - 1)]
    for attack in (
        wball.StandardAttack(wball.WassersteinBall(0.5)),
        wball.FrankWolfe(ball, steps=steps),
        wball.PGD(ball, steps=steps),
    ):
        run = {"": lambda attack=attack: attack(model, x[:size], y[:size])}
        yield Call(f"{type(attack).__name__}, {size} digits", run, x[:size], _robust)


def certificates(x: Tensor, y: Tensor, model: nn.Module) -> Iterator[Call]:
    """Certificates of a network that was trained to be certified."""
    ball = wball.WassersteinBall(0.05)
    yield Call(
        f"certify, {len(x)} digits at 0.05",
        {"": lambda: wball.certify(model, x, y, ball)},
        x,
        lambda answer: {"certified": float(answer.certified.double().mean())},
    )
    yield Call(
        f"certified_radius, {len(x)} digits",
        {"": lambda: wball.certified_radius(model, x, y, ball)},
        x,
        lambda radius: {"median_radius": float(radius.median())},
    )


def row(call: Call, device: torch.device, budget: float) -> Row:
    """Time a call for each kind of input, and take the worst."""
    kinds = dict[str, Row]()
    for kind, run in call.runs.items():
        answer, times = timed(run, device, budget)
        kinds[kind] = {**times, **call.judge(answer)}
    worst = max(kinds, key=lambda kind: kinds[kind]["seconds"])
    found: Row = {"call": call.name, **kinds[worst]}
    if len(kinds) > 1:
        found |= {"worst": worst, "kinds": {kind: made["seconds"] for kind, made in kinds.items()}}
        found["converged"] = min(made["converged"] for made in kinds.values())
    if device.type == "cuda" and found["seconds"] < budget:
        found["launches"], found["host_reads"] = counted(call.runs[worst])
        extra = peak_memory(call.runs[worst], device) or 0
        found["extra_memory_in_batches"] = extra / call.images.nbytes
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options("calls", __doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each call")
    parser.add_argument("--images", type=int, default=100, help="images of a batch")
    parser.add_argument(
        "--digits", type=int, nargs="+", default=[128, 1000, 10000], help="digits of the attacks"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of an attack")
    parser.add_argument("--proofs", type=int, default=300, help="digits to certify")
    parser.add_argument("--model", default="levine2020-mnist-flow-0.01", help="network to certify")
    parser.add_argument(
        "--only", default="", help="calls whose name contains this, or balls, attacks, certificates"
    )
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    result = Result(f"calls_{device.type}", given)
    folder = given.data
    x, y = wball.load_dataset("mnist", folder, "test") if folder else wball.load_sample("mnist")
    x, y = x.to(device), y.to(device)
    attacked = wball.load_model("mnist-standard").to(device).eval()
    proved = wball.load_model(given.model, root=given.models).to(device).eval()
    sizes, few = [n for n in given.digits if n <= len(x)], given.proofs
    groups = {
        "balls": (
            balls(images(folder, device), given.images, given.seed) for images in (mnist, cifar10)
        ),
        "attacks": (attacks(x, y, attacked, sizes, given.steps),),
        "certificates": (certificates(x[:few], y[:few], proved),),
    }
    for group, parts in groups.items():
        for call in chain.from_iterable(parts):
            if given.only in f"{group}: {call.name}" and not result.has(call=call.name):
                result.add(row(call, device, given.seconds))
