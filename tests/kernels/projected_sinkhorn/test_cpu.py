"""Projected Sinkhorn compiled for a CPU against the torch version: the same optimum, a gap that proves it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from wball import WassersteinBall
from wball.cost import GridCost, StencilCost
from wball.kernels import dispatch
from wball.kernels.projected_sinkhorn import ProjectedSinkhorn, Projection, reference
from wball.plan import FactoredPlan

cpu = pytest.importorskip("wball.kernels.projected_sinkhorn.cpu")

ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))
FREE = StencilCost(((1.0, 2.0, 1.0), (1.0, 0.0, 0.0), (1.0, 2.0, 1.0)))


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    cost: GridCost | StencilCost = field(default_factory=GridCost)
    box: tuple[float, float] | None = (0.0, 1.0)
    reg: float = 100.0
    eps: float = 0.1
    step: float = 0.3
    black_frame: bool = False

    @property
    def ball(self) -> WassersteinBall:
        return WassersteinBall(self.eps, self.cost, box=self.box)

    def images(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(0)
        x = torch.rand(self.shape, generator=random)
        x = torch.where(torch.rand(self.shape, generator=random) < 0.3, torch.zeros(()), x)
        x = torch.where(torch.rand(self.shape, generator=random) < 0.3, torch.ones(()), x)
        if self.black_frame:
            x[..., :4, :] = x[..., :, :3] = x[..., -2:] = 0.0
        if self.shape[0] > 1:
            x[-1] = 0.0
        lo, hi = self.box or (0.0, 1.0)
        x = lo + (hi - lo) * x
        return x, x + self.step * torch.randn(self.shape, generator=random)

    def solve(
        self,
        kernel: str,
        dtype: torch.dtype,
        tol: float,
        max_iter: int = 400,
        factors: bool = False,
    ) -> ProjectedSinkhorn:
        x, w = (image.to(dtype) for image in self.images())
        mass = x.double().sum((1, 2, 3))
        moves = self.cost.arcs(*self.shape[2:], x)
        answer: ProjectedSinkhorn = (cpu if kernel == "cpu" else reference).projected_sinkhorn(Projection(
            x, w, self.ball.budget(x), moves, self.box, mass / self.reg,
            u=w - x, psi=torch.full_like(mass, 0.1), tol=tol, max_iter=max_iter, factors=factors,
        ))  # fmt: skip
        return answer


CASES = [
    Case((2, 1, 6, 7), GridCost(3)),
    Case((1, 2, 5, 4), reg=300.0, eps=0.3),
    Case((2, 3, 12, 11), reg=1000.0, black_frame=True),
    Case((1, 1, 12, 13), GridCost(7), reg=300.0),  # more rings than one pass takes
    Case((1, 1, 1, 9), reg=30.0),
    Case((1, 1, 1, 1)),
    Case((0, 1, 4, 4)),
    Case((1, 1, 5, 6), GridCost(3), box=None),
    Case((1, 1, 5, 5), ONE_WAY, reg=200.0),
    Case((2, 2, 6, 5), FREE, reg=200.0),
    Case((1, 1, 8, 7), box=(0.2, 0.9), eps=0.3),
    Case((1, 1, 8, 7), eps=1e-3),
    Case((1, 1, 8, 7), eps=100.0),
    Case((1, 1, 8, 7), eps=0.0),
    Case((1, 1, 8, 7), step=3.0),
]
WIDE = Case((2, 1, 6, 6), GridCost(3), reg=1e6, step=0.3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_optimum_of_the_torch_version(case: Case) -> None:
    exact = case.solve("torch", torch.float64, 1e-6, 700)
    ours = case.solve("cpu", torch.float64, 1e-6, 700)
    assert bool((ours.gap <= torch.maximum(ours.allowed, 1.05 * exact.gap)).all()), (
        "as near as torch gets"
    )
    assert bool(
        ((ours.objective - exact.objective).abs() <= ours.gap.abs() + exact.gap.abs() + 1e-12).all()
    )
    apart = (ours.z - exact.z).square().sum((1, 2, 3)).sqrt()
    assert bool((apart <= (2 * ours.gap.abs()).sqrt() + (2 * exact.gap.abs()).sqrt() + 1e-12).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_least_as_good_as_torch_in_float32(case: Case) -> None:
    exact = case.solve("cpu", torch.float64, 1e-6, 700)
    single = case.solve("torch", torch.float32, 1e-4)
    ours = case.solve("cpu", torch.float32, 1e-4)
    assert ours.z.dtype == ours.u.dtype == ours.psi.dtype == ours.residual.dtype == torch.float32
    assert bool((ours.gap <= ours.allowed).all())
    assert bool((ours.objective - exact.objective <= ours.gap + exact.gap + 1e-9).all()), (
        "the gap is a proof"
    )
    if len(ours.z):
        error, yardstick = ((answer.z.double() - exact.z).abs().max() for answer in (ours, single))
        # Both stop within the tolerance, wherever that is: a distance of at most the root of twice the gap.
        assert float(error) <= 2 * float(yardstick) + float((2 * ours.allowed).max().sqrt())


@pytest.mark.parametrize("case", [*CASES, WIDE], ids=str)
def test_point_is_in_the_ball_wherever_it_is_stopped(case: Case) -> None:
    x, _ = case.images()
    for max_iter in (1, 2, 7, 100):
        ours = case.solve("cpu", torch.float32, 1e-3, max_iter)
        assert bool((ours.n_iter <= max_iter).all())
        assert bool((ours.cost <= case.ball.budget(x) * (1 + 1e-6)).all())
        assert bool(case.ball.contains(x, ours.z).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_is_the_points_proof(case: Case) -> None:
    x, w = case.images()
    arcs = case.cost.arcs(*case.shape[2:], x.double())
    ours = case.solve("cpu", torch.float64, 1e-4, factors=True)
    assert ours.keep is not None and ours.give is not None
    mass = x.double().sum((1, 2, 3))
    heat = mass / case.reg
    flow = FactoredPlan.tempered(
        arcs, x.double(), ours.u, ours.psi, heat, ours.keep, ours.give
    ).arcs()
    assert bool((flow >= -1e-15).all())
    torch.testing.assert_close(flow.sum(2), x.double(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(arcs.scatter(flow), ours.z, atol=1e-11, rtol=0)
    torch.testing.assert_close(
        (flow * arcs.cost).flatten(1).sum(1), ours.cost, atol=1e-12, rtol=1e-10
    )
    entropy = torch.special.xlogy(flow, flow).sum((1, 2, 3, 4)) - torch.special.xlogy(mass, mass)
    expected = 0.5 * (w.double() - ours.z).square().sum((1, 2, 3)) + heat * entropy
    torch.testing.assert_close(ours.objective, expected, atol=1e-10, rtol=1e-8)


def test_potentials_too_wide_are_continued_in_logs() -> None:
    exact = WIDE.ball.project(*(image.double() for image in WIDE.images()), reg=WIDE.reg, tol=1e-7)
    ours = WIDE.solve("cpu", torch.float64, 1e-3, 200)
    assert bool(torch.isfinite(ours.gap).all())
    apart = (ours.z - exact.point).square().sum((1, 2, 3))
    assert bool((apart <= 2 * (2 * ours.gap + 2 * exact.gap) + 1e-9).all())
    left = WIDE.solve("cpu", torch.float64, 1e-3, factors=True)
    assert math.isinf(float(left.gap[0])) and float(left.gap[1]) == 0.0


HARD = (Case((1, 1, 1, 9), reg=200.0), Case((1, 1, 8, 7), step=3.0, reg=1000.0))
EASY = (Case((1, 1, 12, 12), reg=1000.0, step=0.1),)


@pytest.mark.parametrize("case", HARD + EASY, ids=str)
def test_takes_about_as_many_sweeps_as_the_torch_version(case: Case) -> None:
    """Torch goes back to what a repair sent back earlier; else both make the same decisions."""
    answers = [case.solve(kernel, torch.float64, 1e-4, 600) for kernel in ("cpu", "torch")]
    assert all(bool((answer.gap <= answer.allowed).all()) for answer in answers)
    ours, theirs = (int(answer.n_iter[0]) for answer in answers)
    assert max(ours, theirs) <= 1.5 * min(ours, theirs) + 2


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_scaled_steps_take_few_sweeps_where_little_may_move(kernel: str) -> None:
    """Most mass stays, and rows undo almost all of what columns do: 82 sweeps with plain steps."""
    case = Case((1, 1, 12, 12), reg=1000.0, eps=0.01, step=0.1)
    ours = case.solve(kernel, torch.float64, 1e-4, 600)
    assert bool((ours.gap <= ours.allowed).all())
    assert int(ours.n_iter[0]) <= 20


def test_a_saturated_image_ends_within_the_tolerance() -> None:
    """Mass that circulates among full pixels is hard to repair: where sweeps give up, the path goes on."""
    random = torch.Generator().manual_seed(0)
    x = torch.ones((1, 1, 32, 32))
    x[..., 8:20, 8:20] = torch.rand((12, 12), generator=random)
    w = x + 0.1 * torch.randn(x.shape, generator=random)
    ball, mass, moves = WassersteinBall(0.05), x.sum((1, 2, 3)), GridCost().arcs(32, 32, x)
    ours = cpu.projected_sinkhorn(
        Projection(
            x,
            w,
            ball.budget(x),
            moves,
            (0.0, 1.0),
            mass / 1000,
            u=w - x,
            psi=torch.full_like(mass, 0.1),
            tol=1e-4,
        )
    )
    assert bool((ours.gap <= ours.allowed).all())
    x[..., 8:20, 8:20] = 1.0
    x[..., 10, 10:13] = 0.3
    assert bool(ball.project(x, w, reg=1000.0, tol=1e-4).converged.all())


def test_warm_start_takes_fewer_sweeps() -> None:
    case = Case((1, 1, 8, 8), reg=1000.0)
    x, w = case.images()
    first = case.solve("cpu", torch.float32, 1e-5)
    again = cpu.projected_sinkhorn(Projection(
        x, w, case.ball.budget(x), case.cost.arcs(8, 8, x), case.box, x.sum((1, 2, 3)) / case.reg,
        u=first.u, psi=first.psi, tol=1e-5,
    ))  # fmt: skip
    assert int(again.n_iter[0]) < int(first.n_iter[0]) // 2
    assert bool((again.gap <= again.allowed).all())


def test_batch_threads_and_strides_change_nothing() -> None:
    case, before = Case((40, 1, 14, 14), reg=1000.0), torch.get_num_threads()
    answers = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            answers.append(case.solve("cpu", torch.float32, 1e-4))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(answer.z, answers[0].z) for answer in answers)
    x, w = case.images()
    mass, moves = x.double().sum((1, 2, 3)), case.cost.arcs(14, 14, x)
    strided = (
        t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[7:8].requires_grad_()
        for t in (x, w, w - x)
    )
    image, target, u = strided
    one = cpu.projected_sinkhorn(
        Projection(
            image,
            target,
            case.ball.budget(x)[7:8],
            moves,
            case.box,
            mass[7:8] / case.reg,
            u=u,
            psi=torch.full((1,), 0.1, dtype=torch.float64),
        )
    )
    assert torch.equal(one.z, answers[0].z[7:8])
    assert len(cpu._project_images.signatures) == 1, "nothing is compiled twice"


def test_ball_projects_by_sweeps_and_keeps_its_promises() -> None:
    case = Case((3, 2, 6, 6), reg=500.0)
    x, w = (image.double() for image in case.images())
    assert dispatch.choose("projected_sinkhorn", x, case.cost.arcs(6, 6, x)) == "cpu"
    ours = case.ball.project(x, w, reg=case.reg, tol=1e-6)
    path = case.ball.project(x, w, reg=case.reg, tol=1e-8, init=ours.duals)
    assert ours.kernel == "cpu" and bool(ours.converged.all())
    assert float((ours.objective - path.objective).abs().max()) <= float(
        (ours.gap + path.gap).max()
    )
    assert ours.plan is not None
    torch.testing.assert_close(ours.plan.rows(), x)
    torch.testing.assert_close(ours.plan.columns(), ours.point, atol=1e-11, rtol=0)
    assert bool((ours.plan.cost() <= case.ball.budget(x) * (1 + 1e-12)).all())


def test_point_is_as_near_as_the_tolerance_says_where_entropy_outweighs_distance() -> None:
    """A bright image at a small lambda: relative to the whole objective, any point of the ball would do."""
    random = torch.Generator().manual_seed(0)
    x = 0.3 + 0.4 * torch.rand((2, 3, 16, 16), generator=random, dtype=torch.float64)
    w = x + 0.1 * torch.randint(0, 2, x.shape, generator=random).mul(2).sub(1)
    ball = WassersteinBall(0.05)
    best = ball.project(x, w, reg=1000.0, tol=1e-9).point
    for tol in (1e-2, 1e-4):
        point = ball.project(x, w, reg=1000.0, tol=tol).point
        away = (point - best).flatten(1).norm(dim=1) / (w - point).flatten(1).norm(dim=1)
        assert float(away.max()) <= math.sqrt(tol)


def test_large_areas_of_full_pixels_are_repaired() -> None:
    """Their excess had nowhere to go: 128 x 128 images were left to the path solver, which takes minutes."""
    draw = torch.Generator().manual_seed(0)
    x = torch.ones(1, 1, 32, 32)
    x[..., :3, :] = x[..., :, :3] = 0.5
    w, ball = (
        x + 0.1 * torch.randint(0, 2, x.shape, generator=draw).mul(2).sub(1),
        WassersteinBall(0.05),
    )
    mass = x.double().sum((1, 2, 3))
    moves = ball.cost.arcs(32, 32, x)
    found = cpu.projected_sinkhorn(
        Projection(
            x, w, ball.budget(x), moves, ball.box, mass / 100, tol=1e-4, max_iter=400, factors=True
        )
    )
    assert bool((found.gap <= found.allowed).all()), (found.gap / found.allowed).tolist()


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
def test_large_full_areas_take_few_sweeps(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mass above the box has a long way out of a large full area: 40 sweeps here, and 301 at 512 x 512."""
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    random = torch.Generator().manual_seed(0)
    coarse = torch.randn(1, 1, 6, 6, generator=random)
    x = (
        torch.nn.functional.interpolate(coarse, size=(96, 96), mode="bilinear")
        .mul(2)
        .add(0.5)
        .clamp(0, 1)
    )
    w = x + 0.1 * (torch.rand(x.shape, generator=random) < 0.5).float().mul(2).sub(1)
    assert (x == 1).float().mean() > 0.3
    answer = WassersteinBall(0.05).project(x, w, reg=float(x.sum()) / 20, tol=1e-4)
    assert answer.converged and answer.kernel == kernel
    assert int(answer.n_iter) <= 30
    torch.testing.assert_close(answer.point.double().sum(), x.double().sum(), rtol=1e-8, atol=0.0)
    assert answer.point.max() <= 1.0
    assert float(answer.gap) <= 1e-4 * float(answer.objective.abs())
