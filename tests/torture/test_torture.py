"""A few hundred cases of the long run, and by name the inputs that other codes were reported to fail on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wball
from torture.cases import make
from torture.networks import Counts
from torture.operations import run
from torture.threads import a_round
from wball.plan import Plan
from wball.solvers.oracle import ROUNDINGS, TransportOracle

CASES, PARTS = 240, 6


@pytest.mark.parametrize("part", range(PARTS))
def test_cases(part: int) -> None:
    failed = []
    for index in range(part, CASES, PARTS):
        case = make(20261115, index)
        found = run(case)
        failed += [f"{case.label}\n    {line}" for line in found.lines]
    assert not failed, "\n".join(failed)


def test_certificates_of_random_networks_hold_and_are_proved_again() -> None:
    counts = Counts()
    for seed in range(4):
        counts.run(seed)
    assert counts.numbers["certificates"] >= 8
    wrong = ("broken", "below", "unconfirmed", "tricks accepted")
    assert all(counts.numbers[kind] == 0 for kind in wrong), counts.findings


@pytest.mark.filterwarnings("ignore")
def test_threads_on_one_model_are_right_and_leave_it_as_it_was() -> None:
    counts = a_round(0)
    assert counts["calls"] == 32 and counts["flags"] == 112
    assert counts["wrong flags"] == counts["wrong certificates"] == counts["changed models"] == 0


def test_a_case_is_the_same_each_time() -> None:
    one, two = make(3, 14), make(3, 14)
    assert one.label == two.label and torch.equal(one.x, two.x) and torch.equal(one.w, two.w)
    assert make(4, 14).label != one.label


# What the long run found ----------------------------------------------------------------------------------------


def test_the_gap_is_a_number_wherever_the_solver_is_stopped() -> None:
    x = torch.rand(2, 1, 4, 7)
    result = wball.WassersteinBall(1e30).project(
        x, x + 0.1 * torch.randn_like(x), 600.0, max_iter=1
    )
    assert bool(result.gap.isfinite().all())


def test_plans_of_tiny_budgets_keep_to_them() -> None:
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64)
    ball = wball.WassersteinBall(1e-14)
    moves = ball.cost.arcs(4, 4, x)
    raw = Plan(
        moves, x.unsqueeze(2) * torch.where(moves.allowed, -moves.cost, -math.inf).softmax(0)
    )
    spent = raw.repair(ball.budget(x), ball.box).cost()
    assert float(spent) == pytest.approx(float(ball.budget(x)), rel=1e-9)


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 2.0**-149), (torch.float64, 5e-324)])
def test_the_smallest_numbers_cannot_be_split_and_stay(dtype: torch.dtype, least: float) -> None:
    x = torch.full((1, 1, 4, 4), least, dtype=dtype)
    ball = wball.WassersteinBall(0.5)
    model, y = Spots(), torch.zeros(1, dtype=torch.long)
    for z in (
        ball.project(x, torch.rand_like(x)).point,
        ball.support(x, torch.randn_like(x)).point,
        ball.sample(x),
        wball.DualAveraging(ball, steps=2)(model, x, y).images,
    ):
        assert torch.equal(z, x)


def test_an_empty_batch_under_a_matrix_cost() -> None:
    x = torch.rand(0, 1, 1, 4)
    moves = wball.DenseCost(torch.ones(4, 4) - torch.eye(4)).arcs(1, 4, x)
    assert moves.gather(x).shape == (0, 1, 4, 1, 4)
    assert Plan(moves, moves.gather(x)).cancelled().columns().shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_standard_attack_takes_half_precision(dtype: torch.dtype) -> None:
    x = torch.rand(2, 1, 4, 4).to(dtype)
    ball = wball.WassersteinBall(0.2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    result = wball.StandardAttack(ball)(model, x, model(x.float()).argmax(1))
    assert result.images.dtype is torch.float32
    checked(ball, x, result.images)


def test_tensors_that_carry_gradients_are_taken_as_they_are() -> None:
    x, w = torch.rand(1, 1, 4, 4, requires_grad=True), torch.rand(1, 1, 4, 4, requires_grad=True)
    ball = wball.WassersteinBall(0.2)
    for z in (
        ball.project(x, w).point,
        ball.project(x, w, 100.0).point,
        ball.support(x, w).point,
        ball.sample(x),
    ):
        assert not z.requires_grad
        checked(ball, x, z)
    assert bool(ball.contains(x, x)) and not ball.distance(x, x).requires_grad


def test_radii_as_an_array_of_numpy() -> None:
    ball, same = (
        wball.WassersteinBall(np.array([0.1, 0.2])),
        wball.WassersteinBall(torch.tensor([0.1, 0.2], dtype=torch.float64)),
    )
    assert torch.equal(torch.as_tensor(ball.eps), torch.as_tensor(same.eps))


def test_labels_that_the_model_does_not_have() -> None:
    """On a GPU such an index ends the process; here it says what is wrong."""
    x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    ball = wball.WassersteinBall(0.2)
    for attack in (
        wball.DualAveraging(ball, steps=1),
        wball.PGD(ball, steps=1),
        wball.StandardAttack(ball),
    ):
        with pytest.raises(ValueError, match="labels from 0 to 2, but the model has 2 classes"):
            attack(Spots(), x, y)
        with pytest.raises(ValueError, match="target has labels from -1 to 0"):
            attack(Spots(), x, torch.zeros_like(y), target=torch.tensor([-1, 0]))


def test_a_matrix_of_costs_for_another_size() -> None:
    x = torch.rand(1, 1, 2, 3)
    y = Spots()(x).argmax(1)
    ball = wball.WassersteinBall(0.2, wball.DenseCost(torch.ones(4, 4) - torch.eye(4)))
    for call in (
        lambda: ball.project(x, x),
        lambda: ball.support(x, x),
        lambda: ball.distance(x, x),
        lambda: wball.DualAveraging(ball, steps=1)(Spots(), x, y),
        lambda: wball.FrankWolfe(ball, steps=1)(Spots(), x, y),
    ):
        with pytest.raises(ValueError, match="for 4 pixels, but the images have 2 x 3 = 6"):
            call()


def test_an_image_that_is_all_rounding_contains_itself() -> None:
    x = torch.full((1, 1, 1, 2), -3e-8)
    ball = wball.WassersteinBall(0.1)
    assert bool(ball.contains(x, ball.sample(x)))


def test_a_window_of_one_pixel_is_certified() -> None:
    """Within it nothing moves, and one channel of one pixel has nowhere to go to even with full plans."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    x = torch.rand(1, 3, 1, 1)
    y = model(x).argmax(1)
    for plans in ("window", "full"):
        result = wball.certify(
            model, x, y, wball.WassersteinBall(0.5, wball.GridCost(1)), plans=plans
        )
        assert bool(result.certified.all())


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(18147, id="pgd under a matrix of costs"),
        pytest.param(33407, id="mixtures of corners in bfloat16"),
        pytest.param(39545, id="entropic projection in float16"),
        pytest.param(25346, id="potentials of 1e4 on an image of mass 1e-6"),
        pytest.param(12049, id="directions of 1e30 on an image of 1e-311"),
        pytest.param(11339, id="an image of two of the smallest numbers"),
        pytest.param(46838, id="projection in float64 at a radius of 1e-12"),
        pytest.param(77488, id="certificate with moves that cost nothing"),
    ],
)
def test_cases_that_failed_once(index: int) -> None:
    """Radii of 1e-6 and rounding of 12 % on top; rows that sent more than they had; bounds without free moves."""
    found = run(make(0, index))
    assert not found.lines, found.lines


def test_a_search_in_float64_at_a_radius_of_1e_12_with_free_moves() -> None:
    found = run(make(0, 726, images=64))
    assert not found.lines, found.lines


@pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # log(0) in numpy, which is meant
@pytest.mark.parametrize("kernel", ["torch", "triton", "cpu"])
def test_large_potentials_lose_no_mass(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 exponents of size 3000 are off by 2e-4, and so was the mass of what moved."""
    if kernel != "torch":
        pytest.importorskip({"triton": "triton", "cpu": "numba"}[kernel])
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    generator = torch.Generator().manual_seed(8)
    x = torch.zeros(4, 2, 6, 6)
    x[..., 2:4, 2:4] = torch.rand(4, 2, 2, 2, generator=generator)
    oracle = TransportOracle(wball.WassersteinBall(1.0).problem(x))
    for _ in range(3):
        point = oracle(3000 * torch.randn(x.shape, generator=generator))
        assert point.kernel == kernel
        off = (point.z.double().sum((2, 3)) - x.double().sum((2, 3))).abs()
        assert float((off / x.sum((1, 2, 3), dtype=torch.float64)[:, None]).max()) <= 2e-7


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("shape", [(1, 40), (9, 9)])
def test_rounding_is_paid_from_the_budget(eps: float, shape: tuple[int, int]) -> None:
    """The exact distance itself, nothing forgiven. In a strip errors add up over many moves of a narrow window."""
    torch.manual_seed(5)
    x, g = torch.rand(2, 1, *shape), torch.linspace(-1, 1, shape[1]).expand(2, 1, *shape)
    model, y = Spots(), torch.zeros(2, dtype=torch.long)
    for cost in (wball.GridCost(3), wball.GridCost(5, 2.0), wball.GridCost(11, 2.0)):
        ball = wball.WassersteinBall(eps, cost)
        for z in (
            ball.support(x, g + 0.1 * torch.randn_like(x)).point,
            ball.project(x, x + 0.1 * torch.randn_like(x), tol=1e-3).point,
            wball.DualAveraging(ball, steps=3, until_success=False)(model, x, y).images,
            wball.FrankWolfe(ball, steps=4, until_success=False)(model, x, y).images,
        ):
            assert float((wball.audit(ball, x, z).distance / eps).max()) <= 1.0001


def test_a_radius_below_rounding_leaves_the_image() -> None:
    x = torch.rand(2, 1, 5, 5)
    ball = wball.WassersteinBall(1e-9)
    for z in (
        ball.support(x, torch.randn_like(x)).point,
        ball.project(x, torch.rand_like(x)).point,
        ball.project(x, torch.rand_like(x), 100.0).point,
        ball.sample(x),
        wball.DualAveraging(ball, steps=2)(Spots(), x, torch.zeros(2, dtype=torch.long)).images,
    ):
        assert torch.equal(z, x)
    assert not torch.equal(ball.support(x.double(), torch.randn_like(x).double()).point, x.double())


@pytest.mark.parametrize("reg", [1.0, 1e4, math.inf])
def test_what_is_held_back_shows_in_the_gap(reg: float) -> None:
    """float64 holds nothing back at this radius, and what it finds to be better is within the gap stated in float32."""
    torch.manual_seed(6)
    x = torch.rand(2, 1, 5, 5)
    w = 30 * torch.randn_like(x)
    ball = wball.WassersteinBall(1e-9)
    coarse, fine = ball.project(x, w, reg), ball.project(x.double(), w.double(), reg)
    better = coarse.objective - fine.objective
    assert bool((better > 0).all() and (coarse.gap >= better * (1 - 1e-3)).all())


def test_rounding_holds_back_next_to_nothing_at_radii_in_use() -> None:
    for x in (torch.rand(3, 3, 32, 32), digits(10)):
        for eps in (1e-3, 1e-2, 0.1):
            ball = wball.WassersteinBall(eps)
            budget = ball.budget(x)
            assert torch.equal(ball.problem(x).spendable(), budget)
            assert bool((ball.problem(x).spendable(ROUNDINGS) >= (1 - 1e-4) * budget).all())


# What users of other codes reported -----------------------------------------------------------------------------


def digits(count: int = 4) -> Tensor:
    return wball.load_sample("mnist")[0][:count]


def checked(ball: wball.WassersteinBall, x: Tensor, z: Tensor) -> None:
    report = wball.audit(ball, x, z)
    assert report.all_valid, report.summary()


def test_black_pixels_do_not_divide_by_zero() -> None:
    """Reported: log 0 and 0 / 0 on black pixels. A digit is mostly black, and here is one that is nothing else."""
    x = torch.cat([digits(2), torch.zeros(1, 1, 28, 28)])
    ball = wball.WassersteinBall(0.2)
    result = ball.project(x, x + 0.1, 1000.0)
    checked(ball, x, result.point)
    assert torch.equal(result.point[2], x[2]) and bool(result.converged[2])
    assert float(ball.distance(x, x).abs().max()) == 0
    assert torch.equal(ball.support(x, torch.randn_like(x)).point[2], x[2])


def test_tiny_negative_pixels_are_rounding() -> None:
    """Reported: -3e-8, left behind by a resize, gives NaN. Such pixels are clipped; real negatives are refused."""
    x = digits(2).clone()
    x[x == 0] = -3e-8
    ball = wball.WassersteinBall(0.1)
    for z in (
        ball.project(x, x + 0.1).point,
        ball.support(x, torch.randn_like(x)).point,
        ball.sample(x),
    ):
        assert bool(z.isfinite().all()) and float(z.min()) >= 0
        checked(ball, x, z)
    with pytest.raises(ValueError, match="outside"):
        ball.project(x - 0.01, x)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (1, 30), (30, 1), (1, 1)])
def test_images_need_not_be_square(shape: tuple[int, int]) -> None:
    """Reported: non-square images give wrong costs or raise. A move to the right costs what a move down costs."""
    x = torch.zeros(1, 1, *shape)
    x[0, 0, 0, 0] = 1.0
    ball = wball.WassersteinBall(0.5)
    z = ball.project(x, torch.rand_like(x)).point
    checked(ball, x, z)
    turned = ball.project(x.mT.contiguous(), x.mT.contiguous()).point
    assert torch.equal(turned, x.mT)
    g = torch.randn(1, 1, *shape)
    straight, across = ball.support(x, g).value, ball.support(x.mT, g.mT).value
    torch.testing.assert_close(straight, across)


def test_p_is_the_power_of_the_distance() -> None:
    """Reported: nobody could tell what ``p`` is. Half the mass by two pixels costs 2^p / 2."""
    x = torch.zeros(1, 1, 1, 5)
    x[..., 0] = 1.0
    z = 0.5 * x + 0.5 * x.roll(2, 3)
    for p in (1.0, 2.0, 3.0):
        far = wball.WassersteinBall(1.0, wball.GridCost(5, p)).distance(x, z)
        assert float(far) == pytest.approx(0.5 * 2**p)


class Spots(nn.Module):
    """Class 1 if there is more mass on the right."""

    def forward(self, x: Tensor) -> Tensor:
        right = (
            (x * torch.linspace(-1, 1, x.shape[3], device=x.device, dtype=x.dtype))
            .flatten(1)
            .sum(1)
        )
        return torch.stack([-right, right], 1)


def test_huge_regularisation_is_the_exact_projection() -> None:
    """lambda to infinity: the entropic answers approach the exact one, and none of them overflows on the way."""
    x = digits(1)
    w = x + 0.1 * torch.randn_like(x).sign()
    ball = wball.WassersteinBall(0.1)
    exact = ball.project(x.double(), w.double(), tol=1e-7)
    for reg, off in ((1e3, 0.3), (1e6, 1e-2), (1e9, 1e-4)):
        near = ball.project(x.double(), w.double(), reg, tol=1e-7).point
        half = 0.5 * (w.double() - near).square().sum()
        assert float(half) <= float(exact.objective) * (1 + off) + 1e-9, reg
    assert math.isfinite(float(exact.gap))
