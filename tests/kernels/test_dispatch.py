"""Which kernel serves a call, and what happens when the one asked for cannot."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from wball.ball import LinfBall, WassersteinBall
from wball.certificates import certify
from wball.cost import DenseCost, GridCost
from wball.kernels import dispatch
from wball.kernels.entropic_plan import EntropicPlan, PlanRequest, entropic_plan
from wball.solvers.oracle import TransportOracle

MOVES = GridCost(3).arcs(torch.zeros(1, 1, 4, 4))


@pytest.fixture(autouse=True)
def _automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WBALL_KERNEL", raising=False)


def solve(x: torch.Tensor) -> EntropicPlan:
    budget = 0.1 * x.double().flatten(1).sum(1)
    return entropic_plan(
        PlanRequest(x, x, budget, MOVES, (0.0, 1.0), psi=torch.ones(len(x)), q=torch.zeros_like(x))
    )


@pytest.mark.parametrize(
    ("asked", "served"),
    [("torch", "torch"), ("CPU", "cpu"), ("auto", "cpu"), ("", "cpu")],
)
def test_request_is_honoured_and_recorded(
    asked: str, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", asked)
    assert solve(torch.rand(1, 1, 4, 4)).kernel == served


def test_unknown_kernel_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WBALL_KERNEL", "cuda")
    with pytest.raises(
        dispatch.KernelError, match=r"'cuda' is not a kernel; use one of auto, triton, cpu, torch"
    ):
        solve(torch.rand(1, 1, 4, 4))


def test_explicit_request_that_cannot_be_served_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ball, x = WassersteinBall(0.1, DenseCost(1 - torch.eye(4))), torch.rand(1, 4)
    TransportOracle(ball.problem(x))(x)
    monkeypatch.setenv("WBALL_KERNEL", "cpu")
    with pytest.raises(
        dispatch.KernelError, match="WBALL_KERNEL=cpu does not support this call: only the torch"
    ):
        TransportOracle(ball.problem(x))(x)


def test_a_request_for_another_device_fails_whatever_the_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = ModuleType("elsewhere")  # has no operation at all
    elsewhere.why_not = lambda x, moves: f"not on {x.device}"  # type: ignore[attr-defined]
    for kernels in dispatch.OPERATIONS.values():
        if "triton" in kernels:
            monkeypatch.setitem(dispatch._loaded, kernels["triton"], elsewhere)
    monkeypatch.setenv("WBALL_KERNEL", "triton")
    ball, x = WassersteinBall(0.1), torch.rand(1, 1, 4, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    calls = (
        lambda: ball.support(x, x),
        lambda: ball.project(x, x),
        lambda: certify(net, x, torch.zeros(1, dtype=torch.long), ball),
    )
    for call in calls:
        with pytest.raises(
            dispatch.KernelError, match="WBALL_KERNEL=triton does not support this call: not on cpu"
        ):
            call()


@pytest.mark.parametrize(("asked", "served"), [("auto", "cpu"), ("torch", "torch")])
def test_certificates_record_their_kernel(
    asked: str, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", asked)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    x, y = torch.rand(1, 1, 4, 4), torch.zeros(1, dtype=torch.long)
    assert certify(net, x, y, WassersteinBall(0.1)).kernel == served
    assert certify(net, x, y, LinfBall(0.1)).kernel == "torch"


def test_automatic_choice_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.OPERATIONS["entropic_plan"], "cpu", "wball.kernels.missing")
    monkeypatch.setattr(dispatch, "_loaded", {})
    x = torch.rand(1, 1, 4, 4)
    with pytest.warns(RuntimeWarning, match="cpu kernel cannot be loaded.*missing"):
        assert dispatch.choose("entropic_plan", x, MOVES) == "torch"
    assert "missing" in (dispatch.why_not("entropic_plan", "cpu", x, MOVES) or "")
    assert solve(x).kernel == "torch"
    monkeypatch.setenv("WBALL_KERNEL", "cpu")
    with pytest.raises(dispatch.KernelError, match="No module named"):
        solve(x)


def test_the_exact_path_of_images_elsewhere_is_followed_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = torch.empty(1, 1, 4, 4, device="meta", dtype=torch.float64)
    matrix = DenseCost(1 - torch.eye(16)).arcs(torch.zeros(1, 1, 4, 4))
    assert dispatch.choose("proximal_newton", elsewhere, MOVES) == "cpu"
    assert (
        dispatch.choose("proximal_newton", elsewhere, matrix) == "torch"
    )  # matrix costs have no compiled path
    monkeypatch.setenv("WBALL_KERNEL", "torch")
    assert dispatch.choose("proximal_newton", elsewhere, MOVES) == "torch"


def test_results_name_the_kernels_that_served(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    g, ball = (
        torch.randn(x.shape, generator=torch.Generator().manual_seed(1)),
        WassersteinBall(0.2, GridCost(3)),
    )
    assert ball.support(x, g).kernel == "cpu" and ball.project(x, x + g, reg=100.0).kernel == "cpu"
    unboxed = WassersteinBall(0.2, GridCost(3), box=None)
    # The price of a problem without a box is found in torch.
    assert unboxed.support(x, g).kernel == "torch"
    # Nothing to compute for black images.
    assert ball.project(torch.zeros_like(x), g).kernel == "none"
    pytest.importorskip("triton")
    monkeypatch.setenv("WBALL_KERNEL", "triton")
    assert ball.project(x[:1], x[:1] + 0.1 * g[:1], reg=100.0, tol=1e-3).kernel == "triton"
    # In double precision.
    assert ball.project(x[:1], x[:1] + 0.1 * g[:1], reg=100.0, tol=1e-8).kernel == "triton"


@pytest.mark.gpu
def test_exact_results_of_a_gpu_are_those_of_the_host() -> None:
    ball, x = WassersteinBall(0.3), torch.rand(3, 1, 9, 9)
    w, g = x + 0.2 * torch.randn(x.shape), torch.randn(x.shape)
    there, here = ball.project(x.cuda(), w.cuda()), ball.project(x, w)
    assert (
        there.point.is_cuda
        and there.plan is not None
        and there.plan.flow.is_cuda
        and there.n_iter.is_cuda
    )
    torch.testing.assert_close(there.point.cpu(), here.point, atol=1e-4, rtol=0)
    torch.testing.assert_close(there.objective.cpu(), here.objective, rtol=1e-4, atol=0)
    maximum, expected = ball.support(x.cuda(), g.cuda()), ball.support(x, g)
    torch.testing.assert_close(maximum.value.cpu(), expected.value, rtol=1e-4, atol=0)
    wide = ball.project(x.cuda(), w.cuda(), reg=1e8, tol=1e-3)
    assert wide.kernel == "triton"  # Newton's method goes on where sweeps end


def test_importing_the_library_imports_no_compiler() -> None:
    code = "import sys, wball, wball.kernels; print([m for m in ('numba', 'triton') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
