"""How long a projection takes: the paper's iteration, and the ways this library has to the same and to exact points."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reproduction import published
from reproduction.nominal import TITLES
from reproduction.recipe import Recipe
from reproduction.tables import Table
from reproduction.workshop import Clock, Data, Workshop
from wball.ball import WassersteinBall
from wball.result import ProjectionResult
from wball.solvers.sinkhorn import paper_projection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONG = 30.0
"""Seconds of a call that is not repeated more than once."""
CASES = {"mnist": (1000.0, 0.3), "cifar10": (3000.0, 0.01)}


def measure(shop: Workshop) -> Data:
    rows, left_out = [], {}
    batch = 10 if shop.quick else 100
    for dataset, (reg, eps) in CASES.items():
        try:
            x, _ = shop.pool(dataset, batch, batch)
        except FileNotFoundError as error:
            left_out[dataset] = str(error)
            shop.say(f"{TITLES[dataset]} is left out: {error}")
            continue
        generator = torch.Generator(x.device).manual_seed(shop.settings.seed)
        w = x + 0.1 * torch.randn(x.shape, generator=generator, device=x.device).sign()
        for name, way in _ways(WassersteinBall(eps), x, w, reg).items():
            result, first = _timed(way, x.device)  # may compile, and is not counted
            repeats = 1 if shop.quick or first > LONG else 5
            times = [_timed(way, x.device)[1] for _ in range(repeats)]
            iterations = int(result.n_iter.max())
            row: dict[str, Any] = {
                "dataset": dataset,
                "way": name,
                "batch": len(x),
                "reg": None if "exact" in name else reg,
                "eps": eps,
                "seconds": statistics.median(times),
                "iterations": iterations,
                "median_iterations": int(result.n_iter.median()),
                "kernel": result.kernel,
            }
            rows.append(row)
            shop.say(
                f"{TITLES[dataset]} x {len(x)}, {name}: {1e3 * row['seconds']:.2f} ms, {iterations} iterations"
            )
    if not rows:
        raise FileNotFoundError("; ".join(left_out.values()))
    return {"rows": rows, "left_out": left_out}


def _ways(
    ball: WassersteinBall, x: Tensor, w: Tensor, reg: float
) -> dict[str, Callable[[], ProjectionResult]]:
    """Projections of ``w``, by name."""
    return {
        "Algorithm 2 in torch": lambda: paper_projection(
            ball.problem(x), w, reg=reg, tol=1e-4, max_iter=400
        ),
        "its limit by our kernel, then its clamp": lambda: ball.project(
            x, w, reg, tol=1e-4, mode="paper"
        ),
        "entropic, box inside": lambda: ball.project(x, w, reg, tol=1e-4),
        "exact (no entropy), box inside": lambda: ball.project(x, w, tol=1e-4),
    }


def _timed(
    way: Callable[[], ProjectionResult], device: torch.device
) -> tuple[ProjectionResult, float]:
    clock = Clock(device)
    result = way()
    return result, clock.seconds()


def tables(data: Data) -> list[Table]:
    rows = []
    for r in data["rows"]:
        own = r["way"].startswith("Algorithm")
        rows.append(
            [
                f"{TITLES[r['dataset']]} x {r['batch']}, {r['way']}",
                _ms(r["seconds"]),
                f"{r['median_iterations']}; {r['iterations']}",
                _ms(r["seconds"] / max(1, r["iterations"])) if own else None,
                r["kernel"],
            ]
        )
    head = [
        "one projection of a batch",
        "time",
        "iterations of an image (median; most)",
        "per iteration",
        "kernel",
    ]
    return [Table(head, rows)]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def remarks(data: Data) -> list[str]:
    low, high = published.ITERATIONS
    return [
        f"The paper: {1e3 * published.SECONDS_PER_ITERATION:g} ms per iteration for 100 CIFAR-10 images on a Titan X, "
        f"{low} to {high} iterations, so about "
        f"{500 * published.SECONDS_PER_ITERATION * (low + high):.0f} ms a projection."
    ]


def draw(data: Data) -> Figure:
    from reproduction.draw import bars

    labels = [f"{TITLES[row['dataset']]} x {row['batch']}, {row['way']}" for row in data["rows"]]
    seconds = [row["seconds"] for row in data["rows"]]
    return bars(labels, [("", seconds)], "time of a batch (s)", said=_ms, log=True)


RECIPE = Recipe(
    "timings",
    "Time of a projection",
    "section 4.3 (0.02 s per iteration)",
    measure,
    tables,
    draw,
    remarks,
)
