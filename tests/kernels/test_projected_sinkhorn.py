"""Projected Sinkhorn: every kernel finds the optimum of the reference, with a gap and a plan that
prove it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from kernels.cases import DEVICE, FREE, ONE_WAY, UNIT, WINDOW, need, solver, some_empty_some_full
from wball import WassersteinBall
from wball.cost import GridCost, GroundCost
from wball.kernels import dispatch
from wball.kernels.projected_sinkhorn import ProjectedSinkhorn, Projection
from wball.plan import FactoredPlan

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # log(0) in numpy
KERNELS = list(dispatch.OPERATIONS["projected_sinkhorn"])


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    cost: GroundCost = WINDOW
    box: tuple[float, float] | None = UNIT
    reg: float = 100.0
    eps: float = 0.1
    step: float = 0.3
    black_frame: bool = False

    @property
    def ball(self) -> WassersteinBall:
        return WassersteinBall(self.eps, self.cost, box=self.box)

    def images(self) -> tuple[Tensor, Tensor]:
        x = some_empty_some_full(0, self.shape, 0.3)
        if self.black_frame:
            x[..., :4, :] = x[..., :, :3] = x[..., -2:] = 0.0
        lo, hi = self.box or UNIT
        x = lo + (hi - lo) * x
        w = x + self.step * torch.randn(self.shape, generator=torch.Generator().manual_seed(1))
        return x, w

    def problem(self, dtype: torch.dtype, tol: float, **options: Any) -> Projection:
        return problem(self.ball, *(i.to(dtype) for i in self.images()), self.reg, tol, **options)

    def solve(
        self, kernel: str, dtype: torch.dtype, tol: float, **options: Any
    ) -> ProjectedSinkhorn:
        return solved(kernel, self.problem(dtype, tol, **options))


def problem(
    ball: WassersteinBall, x: Tensor, w: Tensor, reg: float, tol: float, **options: Any
) -> Projection:
    x, w = x.to(DEVICE), w.to(DEVICE)
    tau = x.double().sum((1, 2, 3)) / reg
    moves, budget = ball.cost.arcs(x), ball.budget(x)
    return Projection(x, w, budget, moves, ball.box, tau, tol=tol, **{"max_iter": 400} | options)


def solved(kernel: str, given: Projection) -> ProjectedSinkhorn:
    found: ProjectedSinkhorn = solver("projected_sinkhorn", kernel)(given)
    return found


SMALL = [
    Case((2, 1, 6, 7)),
    Case((1, 2, 5, 4), GridCost(5), reg=300.0, eps=0.3),
    Case((1, 1, 5, 6), box=None),
    Case((1, 1, 5, 5), ONE_WAY, reg=200.0),
]
CASES = [
    *SMALL,
    Case((2, 3, 12, 11), GridCost(5), reg=1000.0, black_frame=True),
    Case((1, 1, 12, 13), GridCost(7), reg=300.0),  # more rings than one pass takes
    Case((1, 1, 1, 1)),
    Case((0, 1, 4, 4)),
    Case((2, 2, 6, 5), FREE, reg=200.0),
    Case((1, 1, 8, 7), GridCost(5), box=(0.2, 0.9), eps=0.3),
    Case((1, 1, 8, 7), GridCost(5), eps=100.0),
    Case((1, 1, 8, 7), GridCost(5), eps=0.0),
    Case((1, 1, 8, 7), GridCost(5), step=3.0),
]
WIDE = Case((2, 1, 6, 6), reg=1e6)
TABLES = Case((1, 1, 65, 65), reg=30.0)
"""More than a program keeps on chip: there it passes over tables of moves."""


@pytest.mark.parametrize(
    ("kernel", "case", "tol"),
    [("cpu", case, tol) for case in CASES for tol in (1e-6, 1e-4)]
    + [("triton", case, 1e-3) for case in SMALL[::2]]
    + [
        pytest.param("triton", case, 1e-3, marks=pytest.mark.slow)
        for case in (SMALL[1], SMALL[3], TABLES)
    ],
    ids=str,
)
def test_kernels_find_the_optimum_of_the_reference(kernel: str, case: Case, tol: float) -> None:
    """At the smallest tolerance in float64, otherwise in float32."""
    double = tol == 1e-6
    dtype = torch.float64 if double else torch.float32
    exact = case.solve("torch", torch.float64, 1e-6, max_iter=700 if double else 5000)
    ours = case.solve(kernel, dtype, tol, max_iter=700 if double else 400)
    assert ours.z.dtype == ours.u.dtype == ours.psi.dtype == dtype
    near = 1.05 * exact.gap if double else torch.zeros_like(exact.gap)
    assert bool((ours.gap <= torch.maximum(ours.allowed, near)).all()), "as the reference gets"
    # The gap is a proof: it bounds the distance to the optimum, up to the rounding of the
    # objective.
    lead = ours.objective - exact.objective
    rounding = (1e-9 if kernel == "cpu" else 1e-6) * (1 + exact.objective.abs())
    assert bool((lead <= ours.gap + exact.gap + rounding).all())
    assert bool((lead >= -exact.gap - rounding).all())
    apart = (ours.z.double() - exact.z).square().sum((1, 2, 3)).sqrt()
    floor = {"cpu": 1e-12 if double else 1e-6, "triton": 1e-4}[kernel]
    assert bool((apart <= (2 * ours.gap).sqrt() + (2 * exact.gap).sqrt() + floor).all())


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("case", [*CASES, WIDE], ids=str)
def test_point_is_in_the_ball_wherever_it_is_stopped(case: Case, kernel: str) -> None:
    x, _ = case.images()
    for max_iter in (1, 2, 7, 100) if kernel == "cpu" else (1, 5):
        ours = case.solve(kernel, torch.float32, 1e-3, max_iter=max_iter)
        assert bool((ours.n_iter <= max_iter).all())
        assert bool((ours.cost.cpu() <= case.ball.budget(x) * (1 + 1e-6)).all())
        assert bool(case.ball.contains(x, ours.z.cpu()).all())


@pytest.mark.parametrize(
    ("kernel", "case", "dtype"),
    [("cpu", case, torch.float64) for case in CASES]
    + [
        (kernel, case, dtype)
        for kernel in KERNELS
        for case, dtype in (
            (Case((2, 1, 4, 5)), torch.float32),
            (Case((1, 1, 4, 5), box=(0.1, 0.9), reg=300.0), torch.float64),
        )
    ],
    ids=str,
)
def test_factors_are_the_plan_of_the_point(kernel: str, case: Case, dtype: torch.dtype) -> None:
    """To the last bit, and for gaps that float32 does not resolve."""
    given = case.problem(dtype, 1e-6, factors=True)
    ours, x, w = solved(kernel, given), given.x.double(), given.w.double()
    assert ours.keep is not None and ours.give is not None
    tau = given.tau
    plan = FactoredPlan.tempered(
        given.moves, given.x, ours.u, ours.psi, tau, ours.keep, ours.give
    ).written()
    assert bool((plan.flow >= -1e-15).all())
    torch.testing.assert_close(plan.rows(), x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        plan.columns(), ours.z.double(), rtol=0, atol=1e-11 if dtype == torch.float64 else 1e-7
    )
    torch.testing.assert_close(plan.cost(), ours.cost, rtol=1e-10, atol=1e-12)
    assert bool((ours.cost <= given.budget * (1 + 1e-12)).all())
    share = plan.flow / x.sum((1, 2, 3)).clamp(min=1e-300).view(-1, 1, 1, 1, 1)
    entropy = tau * torch.special.xlogy(plan.flow, share).sum((1, 2, 3, 4))
    objective = 0.5 * (w - plan.columns()).square().sum((1, 2, 3)) + entropy
    torch.testing.assert_close(objective, ours.objective, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_starts(kernel: str) -> None:
    """A warm start takes less than half of the sweeps."""
    cold = Case((1, 1, 5, 6), reg=200.0).problem(torch.float32, 1e-4)
    first = solved(kernel, cold)
    warm = solved(kernel, replace(cold, u=first.u, psi=first.psi))
    assert int(warm.n_iter) < int(first.n_iter) // 2 and bool((warm.gap <= warm.allowed).all())


# Few sweeps
# --------------------------------------------------------------------------------------------------


def signs(x: Tensor) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return x + 0.1 * torch.randint(0, 2, x.shape, generator=random).mul(2).sub(1)


def full(side: int, rows: slice, columns: slice, value: float | Tensor) -> Tensor:
    x = torch.ones(1, 1, side, side)
    x[..., rows, columns] = value
    return x


EVERY, HOLE = slice(None), torch.rand((12, 12), generator=torch.Generator().manual_seed(0))
FULL = {
    "with a hole": full(48, slice(8, 20), slice(8, 20), HOLE),
    "on the left": full(48, EVERY, slice(24, None), 0.3),
    # Their excess has nowhere to go: it circulates among full pixels, which is hard to repair.
    "below a bar": full(32, slice(3), EVERY, 0.5),
    "but for three pixels": full(32, slice(10, 11), slice(10, 13), 0.3),
}


LITTLE = Case((1, 1, 12, 12), GridCost(5), reg=1000.0, eps=0.01, step=0.1)
"""Most mass stays, and rows undo almost all of what columns do: 82 sweeps with plain steps."""


@pytest.mark.parametrize(
    ("kernel", "given", "sweeps"),
    [(kernel, LITTLE, 20) for kernel in KERNELS]
    + [("triton", Case((1, 1, 10, 12), reg=1000.0, step=0.1), 30)]  # 50 with momentum alone
    + [("torch", "with a hole", 80), ("torch", "on the left", 45)]  # 400 were not enough
    + [("cpu", "below a bar", 100), ("cpu", "but for three pixels", 400)],
    ids=str,
)
def test_few_sweeps(kernel: str, given: object, sweeps: int) -> None:
    if isinstance(given, Case):
        found = given.solve(kernel, torch.float32, 1e-4, max_iter=600, factors=True)
    else:
        x = FULL[str(given)]
        found = solved(kernel, problem(WassersteinBall(0.05), x, signs(x), 1000.0, 1e-4))
    assert bool((found.gap <= found.allowed).all()) and int(found.n_iter) <= sweeps


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_balls_project_large_full_areas_by_few_sweeps(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mass above the box has a long way out of a large full area: 40 sweeps here, and 301 at 512 x
    512."""
    need(kernel)
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    coarse = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    x = interpolate(coarse, size=(96, 96), mode="bilinear").mul(2).add(0.5).clamp(0, 1)
    assert (x == 1).float().mean() > 0.3
    answer = WassersteinBall(0.05).project(x, signs(x), reg=float(x.sum()) / 20, tol=1e-4)
    assert answer.converged and answer.kernel == kernel and int(answer.n_iter) <= 37
    assert float(answer.gap) <= 1e-4 * float(answer.objective.abs())
    torch.testing.assert_close(answer.point.double().sum(), x.double().sum(), rtol=1e-8, atol=0.0)
    assert answer.point.max() <= 1.0


# Precision, batches and public calls
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_potentials_too_wide_for_factors_are_left_to_the_path(kernel: str) -> None:
    found, x = WIDE.solve(kernel, torch.float32, 1e-3), WIDE.images()[0]
    assert math.isfinite(float(found.gap[0])) and int(found.n_iter[0]) < 10
    assert bool(WIDE.ball.contains(x, found.z).all())
    assert bool(WIDE.ball.project(*WIDE.images(), reg=WIDE.reg).converged.all())


def test_the_point_is_as_near_as_the_tolerance_says_where_entropy_outweighs_distance() -> None:
    """A bright image at a small lambda: relative to the whole objective, any point of the ball
    would do."""
    random = torch.Generator().manual_seed(0)
    x = 0.3 + 0.4 * torch.rand((2, 3, 16, 16), generator=random, dtype=torch.float64)
    ball, w = WassersteinBall(0.05), signs(x)
    best = ball.project(x, w, reg=1000.0, tol=1e-9).point
    for tol in (1e-2, 1e-4):
        point = ball.project(x, w, reg=1000.0, tol=tol).point
        away = (point - best).flatten(1).norm(dim=1) / (w - point).flatten(1).norm(dim=1)
        assert float(away.max()) <= math.sqrt(tol)


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_batches_threads_and_strides_change_nothing(kernel: str) -> None:
    """Images leave one by one, and only those that are ready are repaired."""
    given = Case((6, 2, 9, 8), GridCost(5), reg=300.0).problem(torch.float32, 1e-4)
    before, answers = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            answers.append(solved(kernel, given))
    finally:
        torch.set_num_threads(before)
    together = answers[0]
    assert torch.equal(together.z, answers[1].z)
    assert len(set(together.n_iter.tolist())) > 2 and int(together.n_iter[-1]) == 0
    for k in range(6):
        x, w = (
            part[k : k + 1].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).requires_grad_()
            for part in (given.x, given.w)
        )
        mine = replace(given, x=x, w=w, budget=given.budget[k : k + 1], tau=given.tau[k : k + 1])
        alone = solved(kernel, mine)
        assert int(alone.n_iter) == int(together.n_iter[k])
        torch.testing.assert_close(alone.z[0], together.z[k], rtol=0, atol=1e-6)
    if kernel == "cpu":
        from wball.kernels.projected_sinkhorn import cpu

        assert len(cpu._project_images.signatures) == 1, "nothing is compiled twice"


def test_programs_refuse_images_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    need("triton")
    monkeypatch.setenv("WBALL_KERNEL", "triton")
    x = torch.zeros(1, 3, 128, 128, device=DEVICE)
    with pytest.raises(dispatch.KernelError, match="do not fit in one program"):
        dispatch.choose("projected_sinkhorn", x, GridCost(3).arcs(x))


@pytest.mark.gpu
@pytest.mark.parametrize("side", [64, 80])
def test_large_images_on_a_gpu(side: int) -> None:
    """One program for the smaller, torch for the larger: both agree with the compiled loops."""
    random = torch.Generator().manual_seed(side)
    x = torch.rand((2, 3, side, side), generator=random).mul(1.5).clamp(max=1)
    w, ball = x + 0.1 * torch.randn(x.shape, generator=random), WassersteinBall(0.05)
    ours, served = (
        ball.project(x.to(at), w.to(at), reg=3000.0, tol=1e-4) for at in ("cpu", "cuda")
    )
    assert bool(ours.converged.all()) and bool(served.converged.all())
    apart = (ours.objective - served.objective.cpu()).abs()
    assert float(apart.sub(ours.gap + served.gap.cpu()).max()) <= 1e-6
