"""Projections: time to a stated accuracy, for this library and for what exists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.inputs import Images, disturbed
from benchmarks.peers import Absent, PeerProjection, art_projection, released_projection
from benchmarks.timing import Machine, Time, measure, peak_memory
from wball import WassersteinBall
from wball.kernels.dispatch import choose, load
from wball.kernels.projected_sinkhorn import Projection
from wball.kernels.projected_sinkhorn import reference as reference_projection

TOL = 1e-4
OTHER_PROBLEMS: dict[str, tuple[dict[str, Any], ...]] = {
    "cpu": ({"tol": 1e-8},),
    "triton": ({"boxed": False}, {"boxed": False, "tol": 1e-6}),
}
"""Beside ours to the gap of the targets: gaps at which our points are about as near to their optimum as the released
code's are to theirs (as far as float32 goes), and its own problem, which has no box."""
STEP = 0.1
FEW = 4
"""Images that are compared with the optimum and measured exactly."""


class Judge:
    """What is known about a batch of projections: the optimum of a few of them, with the box and without.

    The optima are computed on the CPU in float64, whatever the device.
    """

    def __init__(self, images: Images, x: Tensor, w: Tensor) -> None:
        self.x, self.w, self.eps, self.reg = x.cpu(), w.cpu(), images.eps, images.reg
        self.ball = WassersteinBall(images.eps)
        few = self.x[:FEW].double(), self.w[:FEW].double()
        self.best = {
            boxed: WassersteinBall(images.eps, box=(0.0, 1.0) if boxed else None)
            .project(*few, reg=images.reg, tol=1e-8)
            .point
            for boxed in (True, False)
        }

    def __call__(self, z: Tensor, boxed: bool) -> dict[str, float | None]:
        """How far from its own optimum, and in which ball. ``z`` as returned: nothing is clamped first."""
        z, few = z.cpu().double(), min(len(z), FEW)
        mass = self.x[: len(z)].double().sum((1, 2, 3))
        best = self.best[boxed][:few]
        away = (z[:few] - best).flatten(1).norm(dim=1) / (self.w[:few].double() - best).flatten(
            1
        ).norm(dim=1)
        return {
            "error": float(away.max()),
            "mass_error": float(((z.sum((1, 2, 3)) - mass).abs() / mass).max()),
            "box_violation": float(torch.maximum(-z, z - 1).clamp(min=0).max()),
            "distance_over_eps": self._distance(z[:few]),
        }

    def _distance(self, z: Tensor) -> float | None:
        try:
            return float((self.ball.distance(self.x[: len(z)], z.to(self.x)) / self.eps).max())
        except (ImportError, AttributeError):  # no POT here
            return None


def projections(
    images: Images,
    sizes: list[int],
    device: torch.device,
    chip: Machine,
    budget_s: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Rows for one source of images: batch sizes by methods."""
    everything = images.batch(max(sizes))
    points = disturbed(everything, STEP, seed)
    judge = Judge(images, everything, points)
    cuda = device.type == "cuda"
    for size in sizes:
        x, w = everything[:size], points[:size]
        common = {
            "work": "projection",
            "images": images.name,
            "batch": size,
            "reg": images.reg,
            "eps": images.eps,
        }
        floor = chip.floor(
            4 * 4 * x.numel(), 50 * x.numel()
        )  # x, w in; z, u out; one sweep over 25 moves, both ways
        for name, kernel in _sweeps(x):
            if name != "torch" or size == (
                100 if cuda else 1
            ):  # the reference, which is slow, at one size
                yield (
                    common
                    | _sweep_row(name, kernel, images, x, w, judge, device, budget_s)
                    | {"floor_ms": floor}
                )
            for own in OTHER_PROBLEMS.get(name, ()):
                row = _sweep_row(name, kernel, images, x, w, judge, device, budget_s, **own)
                yield common | row | {"floor_ms": floor}
        if not cuda or size == 1:
            yield common | _project_row(images, x, w, judge, device, budget_s) | {"floor_ms": floor}
        for name, make, most in (
            ("released", released_projection, 1000 if cuda else 100),
            ("ART", art_projection, 100),
        ):
            if size <= most:
                yield (
                    common
                    | _peer_row(name, make, images, x, w, judge, device, budget_s)
                    | {"floor_ms": floor}
                )
            else:
                yield common | {
                    "method": name,
                    "absent": f"minutes: {size // most} times the batch above",
                }


def _sweeps(x: Tensor) -> Iterator[tuple[str, Any]]:
    yield "torch", reference_projection
    name = choose(
        "projected_sinkhorn", x, WassersteinBall(0.1).cost.arcs(int(x.shape[2]), int(x.shape[3]), x)
    )
    if name != "torch":
        yield name, load("projected_sinkhorn", name)


def _sweep_row(
    name: str,
    kernel: Any,
    images: Images,
    x: Tensor,
    w: Tensor,
    judge: Judge,
    device: torch.device,
    budget_s: float,
    *,
    tol: float = TOL,
    boxed: bool = True,
) -> dict[str, Any]:
    """Our sweeps. Without the box they solve the very problem of the released code, and as little of ours."""
    ball = judge.ball
    mass = x.sum((1, 2, 3))
    budget, moves = ball.budget(x), ball.cost.arcs(int(x.shape[2]), int(x.shape[3]), x)
    u, psi, tau = w - x, torch.full_like(mass, 0.1), mass / images.reg
    box = (0.0, 1.0) if boxed else None

    def run() -> Any:
        return kernel.projected_sinkhorn(
            Projection(x, w, budget, moves, box, tau, u=u, psi=psi, tol=tol)
        )

    answer = run()
    return {
        "method": f"wball sweeps, {name}"
        + ("" if tol == TOL else f", gap {tol:g}")
        + ("" if boxed else ", no box"),
        "time": measure(run, device, budget_s=budget_s, graph=name == "triton"),
        "extra_memory": _share(peak_memory(run, device), x),
        "iterations": int(answer.n_iter.max()),
        "gap_over_allowed": float((answer.gap / answer.allowed).max()),
        **judge(answer.z, boxed),
    }


def _project_row(
    images: Images, x: Tensor, w: Tensor, judge: Judge, device: torch.device, budget_s: float
) -> dict[str, Any]:
    def run() -> Any:
        return judge.ball.project(x, w, reg=images.reg, tol=TOL)

    answer = run()
    return {
        "method": f"wball project, {answer.kernel}",
        "time": measure(run, device, budget_s=budget_s, graph=False),
        "extra_memory": _share(peak_memory(run, device), x),
        "iterations": int(answer.n_iter.max()),
        **judge(answer.point, True),
    }


def _peer_row(
    name: str,
    make: Any,
    images: Images,
    x: Tensor,
    w: Tensor,
    judge: Judge,
    device: torch.device,
    budget_s: float,
) -> dict[str, Any]:
    try:
        project: PeerProjection = make()
    except Absent as reason:
        return {"method": name, "absent": str(reason)}
    iterations = 50 if name == "released" else 400  # their defaults
    answers: list[Tensor] = []

    def run() -> None:
        answers[:] = [project(x, w, images.eps, images.reg, iterations)]

    try:
        time = measure(run, device, budget_s=budget_s, graph=False)
    except (RuntimeError, ValueError, AssertionError) as error:
        return {"method": name, "absent": f"failed: {type(error).__name__}: {error}"}
    return {
        "method": name,
        "time": time,
        "extra_memory": _share(peak_memory(run, device), x),
        **judge(answers[0], False),
    }


def _share(extra: int | None, x: Tensor) -> float | None:
    """Bytes as a multiple of the batch of images in float32."""
    return None if extra is None else extra / (4 * x.numel())


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """Each of ours against the released code on the same batch."""
    lines = []
    for row in rows:
        if row["work"] != "projection" or row["method"] != "released" or "time" not in row:
            continue
        for ours in rows:
            same = all(ours.get(key) == row[key] for key in ("work", "images", "batch"))
            if (
                same
                and str(ours["method"]).startswith("wball")
                and isinstance(ours.get("time"), Time)
            ):
                factor = row["time"].median / ours["time"].median
                lines.append(
                    f"{row['images']} x {row['batch']}, {ours['method']}: {factor:,.1f} x faster than released"
                )
    return lines


def quality(images: Images, seed: int) -> Iterator[dict[str, Any]]:
    """Exact projection of a few small images against a convex solver."""
    try:
        import cvxpy as cp
    except ImportError as error:
        yield {"work": "exact projection", "method": "cvxpy", "absent": str(error)}
        return
    from scipy import sparse

    side = 12
    x = images.x[:2, :1, 8 : 8 + side, 8 : 8 + side].double().cpu()
    w = disturbed(x, STEP, seed)
    ball = WassersteinBall(0.1)
    arcs = ball.cost.arcs(side, side, x)
    start, end, price = [], [], []
    for k, (r, c) in enumerate(arcs.offsets):
        for i in range(side):
            for j in range(side):
                if arcs.allowed[k, i, j]:
                    start.append(i * side + j)
                    end.append((i + r) * side + j + c)
                    price.append(float(arcs.cost[k]))
    ones = [1.0] * len(start)
    n, arc = side * side, list(range(len(start)))
    rows = sparse.csr_matrix((ones, (start, arc)), shape=(n, len(arc)))
    columns = sparse.csr_matrix((ones, (end, arc)), shape=(n, len(arc)))
    ours = ball.project(x, w, tol=1e-7)
    for k in range(len(x)):
        flow = cp.Variable(len(arc), nonneg=True)
        z = columns @ flow
        problem = cp.Problem(
            cp.Minimize(0.5 * cp.sum_squares(w[k].flatten().numpy() - z)),
            [
                rows @ flow == x[k].flatten().numpy(),
                price @ flow <= float(ball.budget(x)[k]),
                z <= 1,
            ],
        )
        time = measure(
            lambda problem=problem: problem.solve(solver="CLARABEL"),
            torch.device("cpu"),
            budget_s=0.5,
        )
        best = float(problem.value)
        common = {"work": "exact projection", "images": f"{images.name} {side}x{side}", "batch": 1}
        yield common | {"method": "cvxpy, Clarabel", "time": time, "objective": best}
        own = measure(
            lambda k=k: ball.project(x[k : k + 1], w[k : k + 1], tol=1e-6),
            torch.device("cpu"),
            budget_s=0.5,
        )
        yield common | {
            "method": f"wball path, {ours.kernel}",
            "time": own,
            "objective": float(ours.objective[k]),
            "error": abs(float(ours.objective[k]) - best) / max(best, math.ulp(1.0)),
        }
