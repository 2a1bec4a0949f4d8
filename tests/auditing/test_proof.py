"""Plans as proofs: they prove what they should, never too much, and nothing once something was
changed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import ot
import pytest
import torch
from torch import Tensor, nn

import wball
from problems import arc_list
from references import reference_distance
from wball import AuditReport, DenseCost, GridCost, StencilCost, WassersteinBall, audit
from wball.auditing.proof import proved_distance
from wball.cost import GroundCost
from wball.plan import FactoredPlan, Plan, StoredPlan

ONE_WAY = StencilCost(((math.inf, 0.7, 1.1), (0.1, 0.0, 1.0), (0.4, math.inf, 1.0)))
BALLS = {
    "grid": WassersteinBall(0.2),
    "squared": WassersteinBall(0.3, GridCost(3, 2.0)),
    "one way": WassersteinBall(0.1, ONE_WAY),
    "absolute, no box": WassersteinBall(2.0, GridCost(5), mass="absolute", box=None),
    "narrow box": WassersteinBall(0.2, box=(0.2, 0.8)),
    "matrix": WassersteinBall(
        0.4, DenseCost((torch.arange(30.0)[:, None] - torch.arange(30.0)).abs())
    ),
}


def images(ball: WassersteinBall, count: int = 5, channels: int = 2, seed: int = 0) -> Tensor:
    """Images with empty and full pixels."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(count, channels, 5, 6, generator=random)
    x = torch.where(torch.rand(x.shape, generator=random) < 0.3, torch.zeros(()), x)
    x = torch.where(torch.rand(x.shape, generator=random) < 0.2, torch.ones(()), x)
    lo, hi = ball.box or (0.0, 1.0)
    return lo + (hi - lo) * x


def linear(pixels: int = 60) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 3))


def proved(ball: wball.Ball, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None) -> AuditReport:
    """The audit of points that their plans prove to be valid."""
    report = audit(ball, x, z, plan=plan, exact="needed")
    assert report.all_valid and not report.exact.any()
    return report


def climbed(
    ball: WassersteinBall, steps: int = 12, **settings: object
) -> tuple[Tensor, wball.AttackResult]:
    """The result of an attack on a random linear model, with its proof."""
    x = images(ball)
    attack = wball.DualAveraging(ball, steps=steps, until_success=False, proofs=True, **settings)  # type: ignore[arg-type]
    return x, attack(linear(), x, torch.arange(5) % 3)


def formula(cost: GroundCost, x: Tensor, proof: FactoredPlan) -> tuple[np.ndarray, np.ndarray]:
    """Plan matrix (without what stays) and point of one channel, written down pixel by pixel."""
    height, width = x.shape
    n = height * width
    s, keep, give = (
        v.double().flatten().numpy() for v in (proof.potentials, proof.keep, proof.give)
    )
    psi, share, mass = float(proof.psi), float(proof.scale), x.double().flatten().numpy()
    prices = np.full((n, n), math.inf)
    for i, j, c in arc_list(cost, height, width):
        prices[i, j] = c
    plan = np.zeros((n, n))
    for i in range(n):
        score = np.array(
            [s[j] - psi * prices[i, j] if prices[i, j] < math.inf else -math.inf for j in range(n)]
        )
        weight = np.exp(score - score.max())
        plan[i] = share * mass[i] * give[i] * keep * weight / weight.sum()
        plan[i, i] = 0.0
    return plan, mass - plan.sum(1) + plan.sum(0)


@pytest.mark.parametrize("name", BALLS)
def test_an_attack_hands_over_proofs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ball = BALLS[name]
    x, found = climbed(ball)
    exact = audit(ball, x, found.images)
    monkeypatch.setattr(ot, "emd", lambda *a, **k: pytest.fail("a transport problem was solved"))
    report = proved(ball, x, found.images, found.proof)
    assert bool((report.distance >= exact.distance * (1 - 1e-7) - 1e-7).all())
    torch.testing.assert_close(report.distance, found.distance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "attack",
    [
        wball.FrankWolfe(BALLS["grid"], steps=6),
        wball.FrankWolfe(BALLS["one way"], steps=4),
        wball.FrankWolfe(BALLS["narrow box"], steps=4),
        wball.PGD(BALLS["grid"], steps=3),
        wball.PGD(BALLS["matrix"], steps=3, step="l2"),
    ],
    ids=lambda attack: f"{type(attack).__name__} {attack.ball.cost}",
)
@pytest.mark.parametrize("until_success", [True, False])
def test_other_attacks_list_their_plans(
    attack: wball.PGD | wball.FrankWolfe, until_success: bool
) -> None:
    assert isinstance(attack.ball, WassersteinBall)
    x = images(attack.ball)
    model = linear()
    y = model(x).argmax(1)
    y[1] = (y[1] + 1) % 3
    found = replace(attack, proofs=True, until_success=until_success)(model, x, y)
    assert isinstance(found.proof, Plan)
    report = proved(attack.ball, x, found.images, found.proof)
    assert bool(
        (report.distance >= audit(attack.ball, x, found.images).distance * (1 - 1e-6) - 1e-7).all()
    )
    torch.testing.assert_close(
        replace(attack, until_success=until_success)(model, x, y).images, found.images
    )


@pytest.mark.parametrize("shape", [(1, 1, 9), (3, 7, 1), (1, 1, 1), (9,)], ids=str)
@pytest.mark.parametrize("window", [3, 31])
def test_images_of_one_row_or_column(shape: tuple[int, ...], window: int) -> None:
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    ball = WassersteinBall(0.2, GridCost(window))
    attack = wball.DualAveraging(ball, steps=6, until_success=False, proofs=True)
    found = attack(linear(math.prod(shape)), x, torch.arange(4) % 3)
    report = proved(ball, x, found.images, found.proof)
    assert torch.allclose(report.distance, found.distance, atol=1e-6)


def test_attacks_that_have_no_plan_say_nothing() -> None:
    ball = BALLS["grid"]
    x = images(ball)
    model = linear()
    y = model(x).argmax(1)
    for attack in (
        wball.PGD(ball, steps=2, random_start=True, proofs=True),
        wball.PGD(ball, steps=2, reg=1000.0, mode="paper", proofs=True),
        wball.PGD(wball.LinfBall(0.1), steps=2, proofs=True),
        wball.FrankWolfe(wball.LinfBall(0.1), steps=2, proofs=True),
        wball.StandardAttack(wball.LinfBall(0.01), version="fast", check=False, proofs=True),
    ):
        assert attack(model, x, y).proof is None


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize(
    "settings", [{"random_start": 3.0}, {"steps": 60, "step_size": 10.0}, {"steps": 1}]
)
def test_from_every_kernel_and_at_any_sharpness(
    kernel: str, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_KERNEL", kernel)
    x, found = climbed(BALLS["grid"], **settings)  # type: ignore[arg-type]
    assert found.kernel == kernel
    proved(BALLS["grid"], x, found.images, found.proof)


def test_ensembles_batches_and_images_that_are_already_wrong() -> None:
    ball = BALLS["grid"]
    x = images(ball, 12)
    model = linear()
    y = model(x).argmax(1)
    y[3] = (y[3] + 1) % 3
    attack = wball.StandardAttack(
        ball.at(0.05), version="fast", check=False, batch_size=5, proofs=True
    )
    found = attack(model, x, y)
    assert 2 < int(found.success.sum()) < 12
    assert isinstance(found.proof, FactoredPlan)
    report = proved(ball.at(0.05), x, found.images, found.proof)
    assert float(report.distance[3]) == 0.0
    assert replace(attack, proofs=False)(model, x, y).proof is None
    torch.testing.assert_close(
        replace(attack, proofs=False)(model, x, y).images, found.images, rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["grid", "squared", "one way", "matrix"])
def test_the_bound_is_the_cost_of_the_plan(name: str) -> None:
    """Against the formula pixel by pixel, opposite moves cancelled, and never below the exact
    distance."""
    cost = BALLS[name].cost
    random = torch.Generator().manual_seed(2)
    for _ in range(6):
        x = torch.rand(1, 1, 5, 6, generator=random, dtype=torch.float64)
        proof = FactoredPlan(
            cost.arcs(x),
            x,
            3 * torch.randn(x.shape, generator=random),
            2 * torch.rand(1, generator=random),
            torch.rand(x.shape, generator=random).sqrt(),
            torch.rand(x.shape, generator=random).sqrt(),
            torch.rand(1, generator=random, dtype=torch.float64),
        )
        plan, z = formula(cost, x[0, 0], proof)
        prices = {(i, j): c for i, j, c in arc_list(cost, 5, 6)}
        net = np.maximum(plan - plan.T, 0)
        want = sum(net[i, j] * c for (i, j), c in prices.items())
        point = torch.from_numpy(z).reshape(x.shape)
        got = float(proved_distance(cost, x, point, proof))
        torch.testing.assert_close(proof.columns(), point)  # the plan's own sums agree
        torch.testing.assert_close(proof.rows(), x)
        assert float(proof.written().cancelled().cost()) == pytest.approx(want, rel=1e-9)
        assert got == pytest.approx(want, rel=1e-9)
        ball = WassersteinBall(1.0, cost, mass="absolute", box=None)
        assert got >= reference_distance(ball, x, point) - 1e-6


def test_proofs_of_another_point_or_centre_prove_nothing() -> None:
    ball = BALLS["grid"]
    x, found = climbed(ball)
    proof, z = found.proof, found.images
    assert isinstance(proof, FactoredPlan)

    def proves(x: Tensor, z: Tensor, proof: StoredPlan) -> Tensor:
        return proved_distance(ball.cost, x.double(), z.double(), proof).isfinite()

    assert proves(x, z, proof).all()
    moved = z.clone()
    moved[:, :, 2, 2], moved[:, :, 2, 3] = z[:, :, 2, 2] - 1e-4, z[:, :, 2, 3] + 1e-4
    assert not proves(x, moved, proof).any()
    assert not proves(x, z * 1.0001, proof).any()
    assert not proves(x.roll(1, 0), z, proof).any()
    assert not proves(x.flip(3), z.flip(3), proof).any()
    assert not proves(x, z.flip(1), proof).any()
    nan = torch.full_like(proof.keep, math.nan)
    for wrong in (
        replace(proof, potentials=proof.potentials.flip(2)),
        replace(proof, psi=proof.psi * 1.01),
        replace(proof, scale=proof.scale * 0.999),
        replace(proof, keep=0.999 * proof.keep),
        replace(proof, give=proof.give * 1.001),
        replace(proof, potentials=nan),
        replace(proof, keep=nan),
        replace(proof, psi=proof.psi * math.inf),
        replace(proof, potentials=proof.potentials * math.inf),
        proof.take(torch.tensor([1, 2, 3, 4, 0])),
    ):
        assert not proves(x, z, wrong).any()
    report = audit(ball, x, z, plan=proof.take(torch.tensor([1, 2, 3, 4, 0])), exact="needed")
    assert (
        report.exact.all() and report.all_valid
    )  # no proof is no verdict: the problems were solved


def test_no_pixel_may_send_more_than_it_has() -> None:
    """Flows whose sums are right, but a pixel in the middle forwards mass that is still on its
    way."""
    x = torch.zeros(1, 1, 1, 5, dtype=torch.float64)
    x[..., 0] = 1.0
    z = torch.zeros_like(x)
    z[..., 4] = 1.0
    cost = StencilCost(((1.0, 0.0, 1.0),))
    chain = torch.zeros(
        1, 1, 3, 1, 5, dtype=torch.float64
    )  # stay, left, right: one pixel at a time, four times
    chain[0, 0, 2, 0, :4] = 1.0
    assert proved_distance(cost, x, z, chain).isinf().all()
    dear = torch.tensor([[[[60.0, 40.0, 20.0, 0.0, -20.0]]]], dtype=torch.float64).flip(3)
    one = torch.ones_like(x)
    many = FactoredPlan(cost.arcs(x), x, dear, torch.zeros(1), one, 1e6 * one, torch.ones(1))
    assert proved_distance(cost, x, z, many).isinf().all()


def test_shapes_are_checked_and_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    ball = BALLS["grid"]
    x, found = climbed(ball)
    proof = found.proof
    assert isinstance(proof, FactoredPlan)
    whole = proved(ball, x, found.images, proof).distance
    monkeypatch.setitem(proved_distance.__globals__["AT_ONCE"], "cpu", 1)
    torch.testing.assert_close(proved(ball, x, found.images, proof).distance, whole)
    assert len(proved(ball, x[:0], found.images[:0], proof.take(torch.zeros(0).long()))) == 0
    with pytest.raises(ValueError, match=r"plan\.keep must have shape"):
        audit(ball, x, found.images, plan=replace(proof, keep=proof.keep[:, :1]), exact="needed")
    with pytest.raises(TypeError, match="plan must be arcs"):
        audit(ball, x, found.images, plan=object(), exact="needed")  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [GridCost(1), GridCost(3), ONE_WAY, BALLS["matrix"].cost], ids=str)
def test_nothing_that_is_given_changes(cost: GroundCost) -> None:
    x = torch.rand(2, 1, 5, 6, dtype=torch.float64)
    proof = replace(
        FactoredPlan.identity(cost.arcs(x), x),
        potentials=torch.randn_like(x),
        scale=torch.ones(2).double(),
    )
    given = [x, *(getattr(proof, name) for name in ("potentials", "psi", "keep", "give", "scale"))]
    before = [values.clone() for values in given]
    proved = proved_distance(cost, x, x, proof)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
    assert proved.tolist() == [0.0, 0.0] if cost == GridCost(1) else proved.isinf().all()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    ball = BALLS["grid"]
    x = images(ball).cuda()
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 3)).cuda()
    found = wball.DualAveraging(ball, steps=60, until_success=False, proofs=True)(
        model, x, model(x).argmax(1)
    )
    report = proved(ball, x, found.images, found.proof)
    exact = audit(ball, x.cpu(), found.images.cpu()).distance
    assert bool((report.distance.cpu() >= exact * (1 - 1e-6)).all())
