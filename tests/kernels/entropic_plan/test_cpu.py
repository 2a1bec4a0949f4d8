"""The compiled CPU kernel against the torch reference: equal in float64, at least as good as torch in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from wball.cost import GridCost, StencilCost
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest, entropic_plan, reference
from wball.moves import StencilMoves

cpu = pytest.importorskip("wball.kernels.entropic_plan.cpu")

LAME = StencilCost(  # not symmetric: some moves have no way back, others a dearer one
    (
        (1.5, math.inf, 2.0, 0.5, math.inf),
        (0.25, 0.3, 0.0, 1.0, math.inf),
        (math.inf, 1.0, 1.0, 0.7, 2.0),
    )
)
FREE = StencilCost(
    ((1.0, 2.0, 1.0), (1.0, 0.0, 0.0), (1.0, 2.0, 1.0))
)  # one step to the right costs nothing


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    cost: GridCost | StencilCost = field(default_factory=GridCost)
    eps: float = 0.1
    box: tuple[float, float] | None = (0.0, 1.0)
    pixels: str = "sparse"
    scale: float = 2.0
    ramp: float = 0.0  # nats from the left edge to the right
    sweeps: int = 3
    momentum: float = 0.0

    def images(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        x = torch.rand(self.shape, dtype=torch.float64)
        if self.pixels == "sparse":
            x = torch.where(torch.rand(self.shape) < 0.3, x, torch.zeros_like(x))
        elif self.pixels == "saturated":
            x = (x > 0.5).double()
        elif self.pixels == "black":
            x = torch.zeros_like(x)
        lo, hi = self.box if self.box is not None else (0.0, 1.0)
        # float32 and float64 runs must see the same numbers
        return (lo + (hi - lo) * x).float().double()

    def solve(self, kernel: str, dtype: torch.dtype, seed: int, warm: bool = False) -> EntropicPlan:
        x = self.images(seed)
        b, q = (
            self.scale * torch.randn(self.shape, dtype=torch.float64).float().double()
            for _ in range(2)
        )
        b += (self.ramp * torch.arange(self.shape[-1]) / self.shape[-1]).float()
        q = 0.1 * q if warm else torch.zeros_like(x)
        budget = self.eps * x.flatten(1).sum(1)
        moves = self.cost.arcs(*self.shape[-2:], x)
        psi = torch.full_like(budget, 3.0, dtype=dtype)
        solve = cpu.entropic_plan if kernel == "cpu" else reference.in_own_precision
        plan: EntropicPlan = solve(
            PlanRequest(
                x.to(dtype),
                b.to(dtype),
                budget,
                moves,
                self.box,
                psi=psi,
                q=q.to(dtype),
                sweeps=self.sweeps,
                momentum=self.momentum,
            )
        )
        return plan


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


CASES = [
    Case((2, 1, 28, 28)),
    Case((2, 3, 9, 13)),
    Case((1, 1, 1, 7)),
    Case((3, 2, 6, 1)),
    Case((1, 1, 1, 1)),
    Case((0, 1, 8, 8)),
    Case((2, 1, 11, 5), GridCost(3)),
    Case((2, 1, 11, 17), GridCost(7, p=2.0)),
    Case((2, 1, 14, 9), GridCost(9)),
    Case((2, 1, 12, 13), GridCost(11)),
    Case((2, 2, 9, 10), LAME),
    Case((2, 1, 7, 10), FREE),
    Case((2, 1, 7, 10), FREE, pixels="saturated"),
    Case((2, 1, 12, 12), pixels="black"),
    Case((2, 1, 12, 12), pixels="saturated", eps=0.5),
    Case((2, 3, 12, 12), pixels="full"),
    Case((2, 1, 12, 12), eps=1e-6),
    Case((2, 1, 12, 12), eps=100.0),
    Case((2, 1, 12, 12), eps=0.0),
    Case((2, 1, 12, 12), box=None),
    Case((2, 1, 12, 12), box=(0.2, 0.9), pixels="full", eps=0.3),
    Case((2, 1, 10, 12), pixels="saturated", scale=30.0),
    Case((2, 1, 10, 12), ramp=590.0),
    Case((2, 3, 10, 12), ramp=1500.0),
    Case((2, 2, 9, 10), LAME, ramp=900.0),
    Case((2, 1, 10, 12), box=None, ramp=1500.0),
    Case((2, 1, 10, 12), box=(0.2, 0.9), pixels="full", ramp=-1500.0),
    Case((2, 1, 12, 12), pixels="saturated", eps=0.5, scale=10.0, sweeps=8, momentum=0.9),
    Case((2, 1, 12, 12), box=(0.2, 0.9), pixels="full", eps=0.3, sweeps=5, momentum=0.9),
    Case((2, 1, 10, 12), pixels="saturated", scale=4.0, ramp=1500.0, sweeps=5, momentum=0.9),
]
# So steep that Newton's steps, and with them the price, are at the mercy of rounding.
STEEP = [
    Case((2, 1, 10, 12), scale=400.0),
    Case((2, 2, 9, 10), LAME, scale=1500.0),
    Case((1, 1, 9, 9), scale=1e6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_reference_in_float64(case: Case) -> None:
    for seed in range(3):
        got = case.solve("cpu", torch.float64, seed, warm=seed > 0)
        expected = case.solve("torch", torch.float64, seed, warm=seed > 0)
        if case.eps == 0.0:  # the plan is not used, whatever it is; it must not hurt
            assert torch.isfinite(got.z).all() and (got.cost == 0).all()
            continue
        for name in ("z", "cost", "net_cost", "keep", "give"):
            assert error(getattr(got, name), getattr(expected, name)) <= 1e-9, name
        # Prices and potentials of images without mass are not defined.
        lit = case.images(seed).flatten(1).any(1)
        assert (
            error(
                got.psi[lit] / (1 + expected.psi[lit]), expected.psi[lit] / (1 + expected.psi[lit])
            )
            <= 1e-6
        )
        assert error(got.q[lit], expected.q[lit]) <= 1e-6


@pytest.mark.parametrize("case", [c for c in CASES if c.eps > 0], ids=str)
def test_at_least_as_good_as_torch_in_float32(case: Case) -> None:
    exact = case.solve("torch", torch.float64, 5)
    torch32 = case.solve("torch", torch.float32, 5)
    got = case.solve("cpu", torch.float32, 5)
    for name, atol in (("z", 1e-6), ("cost", 1e-5), ("net_cost", 1e-5)):
        mine, theirs = (error(getattr(p, name), getattr(exact, name)) for p in (got, torch32))
        assert mine <= 2 * theirs + atol, name


@pytest.mark.parametrize("case", [c for c in CASES + STEEP if c.eps > 0], ids=str)
def test_plan_keeps_mass_and_box(case: Case) -> None:
    got, x = case.solve("cpu", torch.float32, 9), case.images(9)
    lost = (got.z.double().sum((-2, -1)) - x.sum((-2, -1))).abs()
    assert (lost <= 1e-5 * (1e-9 + x.sum((-2, -1)))).all()
    if case.box is not None:
        assert (got.z >= case.box[0]).all() and (got.z <= case.box[1]).all()
    assert (got.net_cost <= got.cost + 1e-9).all()
    assert got.z.dtype == got.q.dtype == got.psi.dtype == torch.float32
    assert got.cost.dtype == got.net_cost.dtype == torch.float64


def test_any_number_of_threads_gives_the_same_plan() -> None:
    case, before = Case((70, 1, 28, 28)), torch.get_num_threads()
    plans = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            plans.append(case.solve("cpu", torch.float32, 0))
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(plan.z, plans[0].z) and torch.equal(plan.psi, plans[0].psi) for plan in plans
    )


def test_an_image_does_not_depend_on_its_batch() -> None:
    x, b = torch.rand(5, 1, 9, 9), torch.randn(5, 1, 9, 9)
    budget, moves = 0.1 * x.double().flatten(1).sum(1), GridCost(5).arcs(9, 9, x)

    def solve(part: slice) -> EntropicPlan:
        state = {"psi": torch.ones(len(x[part])), "q": torch.zeros_like(x[part])}
        return entropic_plan(
            PlanRequest(x[part], b[part], budget[part], moves, (0.0, 1.0), **state)
        )

    assert torch.equal(solve(slice(None)).z[3:4], solve(slice(3, 4)).z)


def test_strided_and_tracked_inputs() -> None:
    x = torch.rand(2, 9, 9, 1).permute(0, 3, 1, 2)
    b = torch.randn(2, 1, 9, 9, requires_grad=True)
    budget, moves = 0.1 * x.double().flatten(1).sum(1), GridCost(3).arcs(9, 9, x)
    state = {"psi": torch.ones(2), "q": torch.zeros(2, 1, 9, 9)}
    got = cpu.entropic_plan(PlanRequest(x, b, budget, moves, (0.0, 1.0), **state))
    expected = reference.in_own_precision(
        PlanRequest(x, b.detach(), budget, moves, (0.0, 1.0), **state)
    )
    assert error(got.z, expected.z) <= 1e-5
    assert (state["q"] == 0).all() and (state["psi"] == 1).all()


def test_nothing_is_compiled_twice() -> None:
    x = torch.rand(3, 1, 6, 6)
    moves, few = GridCost(3).arcs(6, 6, x), StencilMoves([(0, 0, 0), (0, 1, 1)], (6, 6), x)
    budget = torch.tensor(0.3)
    for dtype in (torch.float32, torch.float64):
        state = {"psi": torch.ones(()).expand(3), "q": torch.zeros(()).expand(x.shape)}
        cpu.entropic_plan(PlanRequest(x.to(dtype), x, budget.expand(3), moves, (0, 1), **state))
        cpu.entropic_plan(PlanRequest(x.to(dtype), x, budget.repeat(3), few, None, **state))
    assert len(cpu._plan_images.signatures) == 1
