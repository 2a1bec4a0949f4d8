"""Projected Sinkhorn: torch reference against the path-following solver, Triton kernel against the reference."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from wball.ball import WassersteinBall
from wball.cost import GridCost, StencilCost
from wball.kernels import dispatch, projected_sinkhorn
from wball.kernels.projected_sinkhorn import ProjectedSinkhorn, Projection, reference
from wball.plan import FactoredPlan

DEVICE = os.environ.get(
    "WBALL_TEST_DEVICE", "cpu"
)  # tests/conftest.py asks for the interpreter on a CPU
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # log(0) in numpy, which is meant

ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    window: int = 3
    box: tuple[float, float] | None = (0.0, 1.0)
    reg: float = 100.0
    eps: float = 0.1
    step: float = 0.3
    one_way: bool = False

    @property
    def ball(self) -> WassersteinBall:
        return WassersteinBall(
            self.eps, ONE_WAY if self.one_way else GridCost(self.window), box=self.box
        )

    def images(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(0)
        x = torch.rand(self.shape, generator=random)
        x = torch.where(torch.rand(self.shape, generator=random) < 0.3, torch.zeros(()), x)
        x = torch.where(torch.rand(self.shape, generator=random) < 0.3, torch.ones(()), x)
        if self.shape[0] > 1:
            x[-1] = 0.0
        lo, hi = self.box or (0.0, 1.0)
        x = lo + (hi - lo) * x
        return x.to(DEVICE), (x + self.step * torch.randn(self.shape, generator=random)).to(DEVICE)

    def solve(
        self,
        kernel: Any,
        dtype: torch.dtype,
        tol: float,
        max_iter: int = 400,
        factors: bool = False,
    ) -> ProjectedSinkhorn:
        x, w = (image.to(dtype) for image in self.images())
        mass = x.double().sum((1, 2, 3))
        moves = self.ball.cost.arcs(*self.shape[2:], x)
        return kernel.projected_sinkhorn(Projection(
            x, w, self.ball.budget(x), moves, self.box, mass / self.reg,
            u=w - x, psi=torch.full_like(mass, 0.1), tol=tol, max_iter=max_iter, factors=factors,
        ))  # fmt: skip


CASES = [
    Case((2, 1, 6, 7)),
    Case((1, 2, 5, 4), window=5, reg=300.0, eps=0.3),
    Case((1, 1, 5, 6), box=None),
    Case((1, 1, 5, 5), one_way=True, reg=200.0),
]


@pytest.mark.parametrize(
    "case", [*CASES, Case((2, 1, 8, 7), window=5, reg=500.0, step=0.5)], ids=str
)
def test_reference_meets_its_gap_and_the_other_solver(case: Case) -> None:
    ours = case.solve(reference, torch.float64, 1e-4, 2000)
    assert bool((ours.gap <= ours.allowed).all())
    x, w = (image.double() for image in case.images())
    path = case.ball.project(x, w, reg=case.reg, tol=1e-8)
    excess = ours.objective - path.objective
    # Between the optimum and the optimum plus the gap; path.objective is itself only good to its own gap.
    assert bool((excess >= -path.gap - 1e-12).all()) and bool((excess <= ours.gap + 1e-12).all())
    assert (
        float((ours.z - path.point).square().sum((1, 2, 3)).sub(2 * ours.gap + 2 * path.gap).max())
        <= 1e-9
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_point_is_in_the_ball(case: Case) -> None:
    pytest.importorskip("ot").emd
    x, _ = case.images()
    for max_iter in (1, 5, 400):
        assert bool(
            case.ball.contains(x, case.solve(reference, torch.float32, 1e-3, max_iter).z).all()
        )


def test_conjugate_steps_take_fewer_sweeps_than_momentum() -> None:
    pytest.importorskip("triton")
    from wball.kernels.projected_sinkhorn import triton as triton_projection

    case = Case((1, 1, 10, 12), reg=1000.0, step=0.1)
    conjugate = case.solve(triton_projection, torch.float32, 1e-4, factors=True)
    assert bool((conjugate.gap <= conjugate.allowed).all())
    assert int(conjugate.n_iter) <= 30  # 50 with momentum


def test_scaled_steps_take_few_sweeps_where_little_may_move() -> None:
    pytest.importorskip("triton")
    from wball.kernels.projected_sinkhorn import triton as triton_projection

    case = Case((1, 1, 10, 12), window=5, reg=1000.0, eps=0.01, step=0.1)
    answer = case.solve(triton_projection, torch.float32, 1e-4, factors=True)
    assert bool((answer.gap <= answer.allowed).all())
    assert int(answer.n_iter[0]) <= 20  # 112 with plain steps


@pytest.mark.parametrize("kernel", list(dispatch.OPERATIONS["projected_sinkhorn"]))
def test_without_a_start_it_starts_at_what_is_to_be_projected(kernel: str) -> None:
    if kernel == "triton":
        pytest.importorskip("triton")
    case, device = Case((1, 1, 4, 5)), "cpu" if kernel == "cpu" else DEVICE
    x, w = (image.to(device) for image in case.images())
    tau, moves = x.double().sum((1, 2, 3)) / case.reg, case.ball.cost.arcs(4, 5, x)
    cold = Projection(x, w, case.ball.budget(x), moves, case.box, tau, tol=1e-3, max_iter=4)
    given = replace(cold, u=w - x, psi=torch.full_like(tau, 0.1))
    module = dispatch.load("projected_sinkhorn", kernel)
    a, b = (module.projected_sinkhorn(problem) for problem in (cold, given))
    assert torch.allclose(a.z, b.z, atol=1e-6) and torch.allclose(a.u, b.u, atol=1e-6)


LARGE = Case((1, 1, 65, 65), reg=30.0)
"""More than a program keeps on chip: there it passes over tables of moves."""


@pytest.mark.parametrize("case", [*CASES, LARGE], ids=str)
def test_kernel_equals_reference(case: Case) -> None:
    pytest.importorskip("triton")
    from wball.kernels.projected_sinkhorn import triton as triton_projection

    tol = 1e-3
    exact = case.solve(reference, torch.float64, 1e-6, 5000)
    single = case.solve(reference, torch.float32, tol)
    ours = case.solve(triton_projection, torch.float32, tol)
    assert bool((ours.gap <= ours.allowed).all())
    # The gap is a proof: it bounds the distance to the optimum, up to float32's rounding of the objective.
    rounding = 1e-6 * (1 + exact.objective.abs())
    assert bool(((ours.objective - exact.objective) <= ours.gap + rounding).all())
    assert bool(((ours.objective - exact.objective) >= -exact.gap - rounding).all())
    error, yardstick = ((answer.z.double() - exact.z).abs().max() for answer in (ours, single))
    assert float(error) <= 2 * float(yardstick) + 1e-4
    x, _ = case.images()
    mass = x.double().sum((1, 2, 3))
    assert float((ours.z.double().sum((2, 3)) - x.double().sum((2, 3))).abs().max()) <= 1e-6 * (
        1 + float(mass.max())
    )
    assert bool((ours.cost <= case.ball.budget(x) * (1 + 1e-6)).all())
    if case.box is not None:
        assert float(ours.z.min()) >= case.box[0] and float(ours.z.max()) <= case.box[1]


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case((2, 1, 4, 5)), torch.float32),
        (Case((1, 1, 4, 5), box=(0.1, 0.9), reg=300.0), torch.float64),
    ],
    ids=str,
)
def test_factors_are_the_plan_of_the_point(case: Case, dtype: torch.dtype, name: str) -> None:
    """To the last bit, and for gaps that float32 does not resolve."""
    kernel = pytest.importorskip(f"wball.kernels.projected_sinkhorn.{name}")
    if name == "cpu" and DEVICE != "cpu":
        pytest.skip("the compiled loops run on a CPU")
    tol = 1e-6
    ours = case.solve(kernel, dtype, tol, factors=True)
    x, w = (image.to(dtype) for image in case.images())
    assert (
        bool((ours.gap <= ours.allowed).all()) and ours.keep is not None and ours.give is not None
    )
    tau, moves = x.double().sum((1, 2, 3)) / case.reg, case.ball.cost.arcs(*case.shape[2:], x)
    plan = FactoredPlan.tempered(moves, x, ours.u, ours.psi, tau, ours.keep, ours.give).written()
    torch.testing.assert_close(plan.rows(), x.double(), rtol=0, atol=1e-14)
    torch.testing.assert_close(
        plan.columns(),
        ours.z.double(),
        rtol=0,
        atol=1e-12 if ours.z.dtype == torch.float64 else 1e-7,
    )
    torch.testing.assert_close(plan.cost(), ours.cost, rtol=1e-10, atol=1e-14)
    assert bool((ours.cost <= case.ball.budget(x) * (1 + 1e-12)).all())
    lo, hi = case.box or (0.0, math.inf)
    assert float(plan.columns().min()) >= lo - 1e-11 and float(plan.columns().max()) <= hi + 1e-11
    share = plan.flow / x.double().sum((1, 2, 3)).clamp(min=1e-300).view(-1, 1, 1, 1, 1)
    entropy = tau * torch.special.xlogy(plan.flow, share).sum((1, 2, 3, 4))
    objective = 0.5 * (w.double() - plan.columns()).square().sum((1, 2, 3)) + entropy
    torch.testing.assert_close(objective, ours.objective, rtol=1e-9, atol=1e-12)
    exact = case.solve(reference, torch.float64, 1e-9, 5000)
    assert bool((exact.objective - exact.gap <= objective + 1e-12).all())
    assert bool((objective <= exact.objective + ours.gap + 1e-12).all())


def test_kernel_stops_early_with_a_valid_point() -> None:
    pytest.importorskip("triton")
    from wball.kernels.projected_sinkhorn import triton as triton_projection

    case = Case((1, 1, 5, 6), reg=1000.0, step=1.0)
    x, w = case.images()
    first = case.solve(triton_projection, torch.float32, 1e-6, max_iter=2)
    assert int(first.n_iter[0]) == 2 and float(first.gap[0]) > float(first.allowed[0])
    assert bool((first.cost <= case.ball.budget(x) * (1 + 1e-6)).all())
    again = triton_projection.projected_sinkhorn(Projection(
        x, w, case.ball.budget(x), case.ball.cost.arcs(5, 6, x), case.box, x.sum((1, 2, 3)) / case.reg,
        u=first.u, psi=first.psi, tol=1e-6, max_iter=2,
    ))  # fmt: skip
    assert float(again.gap[0]) < float(first.gap[0])


def test_dispatch_serves_small_images_with_the_kernel_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from wball.kernels import dispatch

    case = Case((1, 1, 4, 4))
    monkeypatch.setenv("WBALL_KERNEL", "triton")
    assert case.solve(projected_sinkhorn, torch.float32, 1e-2).kernel == "triton"
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    assert case.solve(projected_sinkhorn, torch.float32, 1e-2).kernel == "torch"
    monkeypatch.setenv("WBALL_KERNEL", "triton")
    x = torch.zeros(1, 3, 128, 128, device=DEVICE)
    with pytest.raises(dispatch.KernelError, match="do not fit in one program"):
        dispatch.choose("projected_sinkhorn", x, GridCost(3).arcs(128, 128, x))


def test_ball_projects_with_the_kernel_and_keeps_its_promises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    case = Case((2, 1, 5, 6))
    x, w = case.images()
    monkeypatch.setenv("WBALL_KERNEL", "triton")
    ours = case.ball.project(x, w, reg=case.reg, tol=1e-4)
    assert bool(ours.converged.all())
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    path = case.ball.project(
        x, w, reg=case.reg, tol=1e-4, init=ours.duals
    )  # who has duals follows the path
    assert (path.kernel, ours.kernel) == ("torch", "triton")
    assert float((ours.objective - path.objective).abs().max()) <= float(
        (ours.gap + path.gap).max()
    )
    assert ours.plan is not None
    torch.testing.assert_close(ours.plan.rows(), x.double())
    assert bool((ours.plan.cost() <= case.ball.budget(x) * (1 + 1e-9)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("side", [64, 80])
def test_large_images_on_a_gpu(side: int) -> None:
    """One program for the smaller, torch for the larger: both agree with the compiled loops."""
    random = torch.Generator().manual_seed(side)
    x = torch.rand((2, 3, side, side), generator=random).mul(1.5).clamp(max=1)
    w = x + 0.1 * torch.randn(x.shape, generator=random)
    ball = WassersteinBall(0.05)
    ours, served = (
        ball.project(x.to(at), w.to(at), reg=3000.0, tol=1e-4) for at in ("cpu", "cuda")
    )
    assert bool(ours.converged.all()) and bool(served.converged.all())
    assert (
        float(
            (ours.objective - served.objective.cpu()).abs().sub(ours.gap + served.gap.cpu()).max()
        )
        <= 1e-6
    )
