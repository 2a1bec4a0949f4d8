"""What an iteration of the paper's algorithms takes: time, and operations on matrices."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reproduction import published
from reproduction.recipe import Recipe
from reproduction.tables import Table
from reproduction.workshop import Clock, Data, Workshop
from wball.ball import WassersteinBall
from wball.cost import DenseCost
from wball.data import dataset_info, load_sample
from wball.paper import conjugate_sinkhorn, projected_sinkhorn
from wball.result import ProjectionResult, SinkhornResult, SupportResult

Solved = ProjectionResult | SinkhornResult | SupportResult
CASES = {"mnist": (1000.0, 0.3), "cifar10": (3000.0, 0.01)}
LONG, REPEATS = 30.0, 5
"""Seconds of a call that is not repeated, and repeats of the others."""
TOL = 1e-4
ALGORITHM, CONJUGATE = "Algorithm 2 (`projected_sinkhorn`)", "conjugate (`conjugate_sinkhorn`)"


class Operations(TorchDispatchMode):
    """Counts operations on ``size`` numbers: products of two matrices entry by entry, exponentials
    (of a matrix times a number), and products of matrix and vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.counts = size, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        whole = [a.numel() // self.size for a in args if isinstance(a, Tensor)]
        kind = func.overloadpacket.__name__
        if kind in ("mm", "mv", "bmm"):
            self.counts["matrix-vector products"] += max(whole)
        elif kind == "mul" and len(whole) == 2 and min(whole) > 0:
            self.counts["element-wise products"] += max(whole)
        elif kind == "exp" and max(whole) > 0:
            self.counts["exponentials"] += max(whole)
        return result


def operations(solve: Callable[..., SinkhornResult]) -> dict[str, int]:
    """The operations of one iteration with full plans: of three iterations, less those of two."""
    side = 6
    place = torch.cartesian_prod(*[torch.arange(float(side))] * 2)
    ball = WassersteinBall(0.1, DenseCost(torch.cdist(place, place)))
    x = torch.rand(1, 1, side, side, generator=torch.Generator().manual_seed(0))
    counts = []
    for iterations in (2, 3):
        with Operations(side**4) as counter:
            solve(x, x.flip(3), ball, 100.0, iterations, 0.0)
        counts.append(counter.counts)
    return dict(counts[1] - counts[0])


def measure(shop: Workshop) -> Data:
    rows = list[dict[str, Any]]()
    for dataset, (reg, eps) in CASES.items():
        x = load_sample(dataset, device=shop.device)[0][: 10 if shop.quick else 100]
        generator = torch.Generator(x.device).manual_seed(shop.settings.seed)
        step = torch.randn(x.shape, generator=generator, device=x.device).sign()
        title = dataset_info(dataset).title
        for name, way in _ways(WassersteinBall(eps), x, step, reg).items():
            result, first = _timed(way, x.device)  # may compile, and is not counted
            repeats = 1 if shop.quick or first > LONG else REPEATS
            seconds = statistics.median(_timed(way, x.device)[1] for _ in range(repeats))
            row = {
                "dataset": dataset,
                "way": name,
                "batch": len(x),
                "seconds": seconds,
                "iterations": int(result.n_iter.max()),
                "median_iterations": int(result.n_iter.median()),
                "converged": int(result.converged.sum()),
                "kernel": getattr(result, "kernel", "torch"),
            }
            rows.append(row)
            shop.say(f"{title} x {len(x)}, {name}: {_ms(seconds)}")
    counted = {
        ALGORITHM: operations(projected_sinkhorn),
        CONJUGATE: operations(conjugate_sinkhorn),
    }
    return {"rows": rows, "operations": counted, "tol": TOL}


def _ways(
    ball: WassersteinBall, x: Tensor, step: Tensor, reg: float
) -> dict[str, Callable[[], Solved]]:
    """What is timed, by name: a step of the attack, projected, and its direction maximised."""
    w = x + 0.1 * step
    return {
        ALGORITHM: lambda: projected_sinkhorn(x, w, ball, reg, 400, TOL),
        CONJUGATE: lambda: conjugate_sinkhorn(x, 0.01 * step, ball, reg, 400, TOL),
        "entropic projection, box inside (`project`)": lambda: ball.project(x, w, reg, tol=TOL),
        "exact projection, box inside (`project`)": lambda: ball.project(x, w, tol=TOL),
    }


def _timed(way: Callable[[], Solved], device: torch.device) -> tuple[Solved, float]:
    clock = Clock(device)
    result = way()
    return result, clock.seconds()


def tables(data: Data) -> list[Table]:
    rows = [
        [
            f"{dataset_info(r['dataset']).title} x {r['batch']}, {r['way']}",
            _ms(r["seconds"]),
            f"{r['median_iterations']}; {r['iterations']}",
            _ms(r["seconds"] / max(1, r["iterations"])) if r["way"] in data["operations"] else None,
            f"{r['converged']} of {r['batch']}",
        ]
        for r in data["rows"]
    ]
    head = ["one batch", "time", "iterations (median; most)", "per iteration", "converged"]
    counted = [
        [way, str(sum(counts.values())), told(counts)] for way, counts in data["operations"].items()
    ]
    said = ["algorithm", "O(n²) operations of an iteration", "of which"]
    return [Table(head, rows, f"tol {data['tol']:g}"), Table(said, counted)]


def told(counts: Mapping[str, int]) -> str:
    """
    >>> told({"exponentials": 1, "products": 3})
    '1 exponential, 3 products'
    """
    return ", ".join(
        f"{n} {kind.removesuffix('s') if n == 1 else kind}" for kind, n in counts.items()
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def remarks(data: Data) -> list[str]:
    low, high = published.ITERATIONS
    return [
        f"The paper: {1e3 * published.SECONDS_PER_ITERATION:g} ms per iteration for 100 CIFAR-10 "
        f"images on a Titan X, and {low} to {high} iterations.",
        "Operations are counted while the code runs with full plans. The exponential includes the "
        "product with psi; one element-wise product cuts the window out.",
    ]


RECIPE = Recipe(
    "timings", "An iteration: time and operations", "section 3", measure, tables, None, remarks
)
