"""The Triton kernels against the float64 reference, in Triton's interpreter or (WBALL_TEST_DEVICE=cuda) on a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from wball.cost import GridCost, GroundCost, StencilCost
from wball.kernels import triton_flows, triton_stencil
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest, reference
from wball.kernels.entropic_plan import triton as triton_plan
from wball.moves import Moves

DEVICE = os.environ.get(
    "WBALL_TEST_DEVICE", "cpu"
)  # tests/conftest.py asks for the interpreter on a CPU
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # log(0) in numpy, which is meant

ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))
"""Asymmetric, with moves that have no way back."""
UNIT = (0.0, 1.0)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    cost: GroundCost = field(default_factory=lambda: GridCost(3))
    box: tuple[float, float] | None = UNIT
    scale: float = 1.0
    eps: float = 0.3
    shift: float = 0.0
    seed: int = 0

    def problem(self) -> tuple[Tensor, Tensor, Tensor, Moves]:
        """Images with empty and full pixels, potentials, budgets and moves; the last image is black if it may be."""
        random = torch.Generator().manual_seed(self.seed)
        x = torch.rand(self.shape, generator=random)
        x = torch.where(torch.rand(self.shape, generator=random) < 0.25, torch.zeros(()), x)
        x = torch.where(torch.rand(self.shape, generator=random) < 0.25, torch.ones(()), x)
        if self.shape[0] > 1:
            x[-1] = 0.0
        lo, hi = self.box if self.box is not None else UNIT
        x = lo + (hi - lo) * x
        b = self.shift + self.scale * torch.randn(self.shape, generator=random)
        budget = self.eps * x.double().sum((1, 2, 3))
        return (
            x.to(DEVICE),
            b.to(DEVICE),
            budget.to(DEVICE),
            self.cost.arcs(*self.shape[2:], x.to(DEVICE)),
        )


ON_CHIP = [
    Case((2, 1, 5, 7)),
    Case((2, 3, 4, 9), GridCost(5), scale=5.0),
    Case((1, 1, 11, 3), GridCost(7, p=2.0), scale=3.0, eps=0.1),
    Case((1, 2, 6, 5), GridCost(5), box=None, scale=20.0),
    Case((1, 1, 7, 6), ONE_WAY, scale=2.0),
    Case((1, 1, 1, 13), GridCost(5), scale=1.0, eps=0.05),
    Case((1, 1, 6, 6), GridCost(3), box=(0.1, 0.9), scale=4.0),
    Case((1, 1, 4, 5), GridCost(3), scale=30.0),
    Case((1, 1, 3, 3), GridCost(3), eps=5.0),  # a budget no plan can spend
    Case((1, 1, 2, 4), GridCost(1)),  # nothing can move
    Case((1, 1, 9, 8), GridCost(9), scale=3.0),  # rings are not kept
    Case((1, 1, 6, 9), GridCost(9), scale=30.0),  # nor in logs
    Case((1, 1, 4, 5), GridCost(3), scale=500.0),  # late in an attack
    Case((1, 1, 4, 28), GridCost(5), scale=3.0),  # a row in each line of the cache
    Case((1, 1, 4, 28), GridCost(5), scale=40.0),  # in logs
    Case((1, 1, 4, 5), GridCost(5), shift=-200.0),  # far below zero, as are gradients of one sign
]


def solve(
    case: Case,
    kernel: Callable[[PlanRequest], EntropicPlan],
    dtype: torch.dtype,
    **options: float,
) -> EntropicPlan:
    x, b, budget, moves = case.problem()
    psi = torch.full_like(budget, 10.0, dtype=dtype)
    x, b = x.to(dtype), b.to(dtype)
    start: dict[str, Any] = {"psi": psi, "q": torch.zeros_like(x), **options}
    return kernel(PlanRequest(x, b, budget, moves, case.box, **start))


def error(plan: EntropicPlan, exact: EntropicPlan, name: str) -> float:
    return float((getattr(plan, name).double() - getattr(exact, name)).abs().max())


def check_equal(case: Case, **options: float) -> None:
    exact = solve(case, reference.in_own_precision, torch.float64, **options)
    single = solve(case, reference.in_own_precision, torch.float32, **options)
    ours = solve(case, triton_plan.entropic_plan, torch.float32, **options)
    # a GPU's exponential rounds its argument, which grows with the potentials
    for name, atol in {
        "z": 2e-6 + 1e-7 * case.scale,
        "cost": 2e-5,
        "net_cost": 2e-5,
        "keep": 1e-5 + 1e-7 * case.scale,
        "give": 1e-5 + 1e-7 * case.scale,
    }.items():
        assert error(ours, exact, name) <= 2 * error(single, exact, name) + atol, name
    for name in () if case.cost == GridCost(1) else ("psi", "q"):  # psi is arbitrary there
        # the larger the potentials, the coarser float32
        allowed = 2 * error(single, exact, name) + 2e-5 * (1 + case.scale + abs(case.shift))
        assert error(ours, exact, name) <= allowed, name


def check_consistent(case: Case, plan: EntropicPlan) -> None:
    """``psi``, ``q``, ``keep`` and ``give`` describe a plan (here in float64) with the columns and costs returned."""
    x, b, _, moves = case.problem()
    arcs = moves.like(x.double())
    x, s = x.double(), b.double() + plan.q.double()
    psi, keep, give = plan.psi.double().view(-1, 1, 1, 1), plan.keep.double(), plan.give.double()
    score = torch.where(arcs.allowed, arcs.gather(s) - psi.unsqueeze(2) * arcs.cost, -torch.inf)
    flow = x.unsqueeze(2) * torch.softmax(score, 2) * give.unsqueeze(2) * arcs.gather(keep)
    flow = torch.where(arcs.stay(), torch.zeros_like(flow), flow)
    net = flow - torch.minimum(flow, arcs.opposite(flow))
    z = x - flow.sum(2) + arcs.scatter(flow)
    tolerance = 2e-6 * (1 + case.scale)
    assert float((plan.z.double() - z).abs().max()) <= tolerance
    mass = 1 + float(x.sum())
    for value, amount in ((plan.cost, flow), (plan.net_cost, net)):
        assert (
            float((value - (amount * arcs.cost).flatten(1).sum(1)).abs().max()) <= tolerance * mass
        )
    assert float((plan.z.double().sum((2, 3)) - x.sum((2, 3))).abs().max()) <= 1e-6 * mass
    if case.box is not None:
        assert (
            float(plan.z.min()) >= case.box[0] - 1e-6 and float(plan.z.max()) <= case.box[1] + 1e-6
        )


FAST = (0, 4, 6, 11, 14)
"""Cases for every run: the interpreter is slow. The others run with the slow tests."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if i in FAST else [pytest.mark.slow])
        for i, case in enumerate(ON_CHIP)
    ],
)
def test_one_program_per_image_equals_reference(case: Case) -> None:
    check_equal(case)


@pytest.mark.parametrize("scale", [3.0, 40.0])  # 40: in logs
def test_momentum_equals_reference(scale: float) -> None:
    case = Case((1, 1, 6, 5), GridCost(3), scale=scale, eps=0.6, seed=3)
    check_equal(case, sweeps=3, newton=6, momentum=0.9)


def test_programs_of_large_images_equal_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass over a table of moves instead of keeping rings in registers."""
    import triton.language as tl

    monkeypatch.setattr(triton_plan, "MAX_ON_CHIP", 0)
    for module in (triton_stencil, triton_flows):
        monkeypatch.setattr(module, "ON_CHIP", tl.constexpr(0))
    for scale in (3.0, 40.0):
        check_equal(Case((1, 2, 5, 6), GridCost(5), scale=scale), sweeps=1, newton=6)


def test_the_last_sweep_of_a_repair_equals_reference() -> None:
    """No potentials help, so only the last sweep of the repair restores the box."""
    case = Case((1, 1, 8, 9), GridCost(5), eps=0.1, seed=3)
    plan = solve(case, reference.in_own_precision, torch.float64, sweeps=0)
    assert float(plan.z.max()) == pytest.approx(1.0, abs=1e-9), "no further than the box asks"
    check_equal(case, sweeps=0)
    check_consistent(case, solve(case, triton_plan.entropic_plan, torch.float32, sweeps=0))


@pytest.mark.parametrize("case", [*ON_CHIP[:3], ON_CHIP[6]], ids=str)
def test_plan_is_what_its_description_says(case: Case) -> None:
    check_consistent(case, solve(case, triton_plan.entropic_plan, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype: torch.dtype) -> None:
    case = Case((1, 1, 4, 5))
    x, b, budget, moves = case.problem()
    x, b = x.to(dtype), b.to(dtype)
    psi, q = torch.full((1,), 10.0, device=DEVICE), torch.zeros_like(b, dtype=torch.float32)
    half = triton_plan.entropic_plan(PlanRequest(x, b, budget, moves, UNIT, psi=psi, q=q))
    single = triton_plan.entropic_plan(
        PlanRequest(x.float(), b.float(), budget, moves, UNIT, psi=psi, q=q)
    )
    assert half.z.dtype == torch.float32
    assert torch.equal(half.z, single.z) and torch.equal(half.cost, single.cost)


def test_warm_start_is_used() -> None:
    case = Case((1, 1, 5, 5), scale=3.0)
    x, b, budget, moves = case.problem()
    first = solve(case, triton_plan.entropic_plan, torch.float32)
    again = triton_plan.entropic_plan(
        PlanRequest(x, b, budget, moves, UNIT, psi=first.psi, q=first.q, sweeps=0, newton=0)
    )
    assert torch.equal(again.psi, first.psi) and torch.equal(again.q, first.q)
    assert float((again.z - first.z).abs().max()) <= 1e-6


@pytest.mark.parametrize("scale", [3.0, 40.0])  # 40: in logs
def test_without_a_start_it_starts_cold(scale: float) -> None:
    case = Case((2, 1, 5, 5), scale=scale)
    x, b, budget, moves = case.problem()
    cold = triton_plan.entropic_plan(PlanRequest(x, b, budget, moves, UNIT, sweeps=2, newton=6))
    given = solve(case, triton_plan.entropic_plan, torch.float32, sweeps=2, newton=6)
    for name in ("z", "cost", "net_cost", "psi", "q", "keep", "give"):
        assert torch.equal(getattr(cold, name), getattr(given, name)), name


def test_empty_batch_and_double_precision() -> None:
    x = torch.zeros((0, 1, 4, 4), device=DEVICE)
    none = x.new_zeros(0)
    moves = GridCost(3).arcs(4, 4, x)
    plan = triton_plan.entropic_plan(PlanRequest(x, x, none, moves, UNIT, psi=none, q=x))
    assert plan.z.shape == x.shape and plan.cost.shape == (0,)
    assert "float64" in (triton_plan.why_not(x.double(), moves) or "")


@pytest.mark.parametrize("window", [3, 7, 11])
@pytest.mark.parametrize("shape", [(4, 1, 28, 28), (2, 3, 64, 64)], ids=str)
def test_memory_is_a_few_batches_at_any_window(
    shape: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._overloadpacket in (
                torch.ops.aten.empty,
                torch.ops.aten.empty_like,
                torch.ops.aten.zeros,
            ):
                Count.total += out.numel() * out.element_size()
            return out

    monkeypatch.setattr(triton_plan, "_plan_kernel", Idle())
    x = torch.rand(shape, device=DEVICE)
    mass, moves = x.sum((1, 2, 3)), GridCost(window).arcs(*shape[2:], x)
    triton_plan.entropic_plan(
        PlanRequest(x, x, mass, moves, UNIT, psi=mass, q=x)
    )  # what is made once
    with Count():
        triton_plan.entropic_plan(PlanRequest(x, x, mass, moves, UNIT, psi=mass, q=x))
    assert 4 * x.numel() < Count.total / 4 <= 8 * x.numel()
