"""Growing and minimal radii, and the ensemble."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marks import slow
from problems import Case
from wball import (
    PGD,
    DualAveraging,
    GridCost,
    LinfBall,
    ScoreSearch,
    StandardAttack,
    WassersteinBall,
    audit,
    minimal_radius,
)
from wball.attacks import GrowingRadius
from wball.attacks.standard import MEMBERS, QUERIES

BALL = WassersteinBall(0.3)


def test_growing_radius_schedule() -> None:
    growth = GrowingRadius(factor=2.0, every=3)
    assert [growth.at(0.1, step) for step in (0, 2, 3, 6)] == pytest.approx([0.1, 0.1, 0.2, 0.4])
    for name, value in (("factor", 0.9), ("every", 0)):
        with pytest.raises(ValueError, match=f"{name} must be"):
            GrowingRadius(**{name: value})


def test_pgd_with_growing_radius_gives_a_curve(case: Case) -> None:
    attack = PGD(LinfBall(0.01), steps=30, step_size=0.02, growth=GrowingRadius(1.5, 3))
    result = attack(*case)
    assert result.success.sum() > 3
    change = (result.images - case.images).flatten(1).abs().amax(1)
    assert (change <= result.radius + 1e-6).all()
    curve = [result.accuracy_at(eps) for eps in (0.0, 0.01, 0.05, 0.1, 1.0)]
    assert (
        curve == sorted(curve, reverse=True) and curve[0] == pytest.approx(0.9) and curve[-1] < 0.7
    )


def test_paper_presets() -> None:
    mnist, cifar = PGD.paper("mnist"), PGD.paper("cifar10", steps=50)
    assert (mnist.ball.eps, mnist.growth.factor, mnist.steps, mnist.reg) == (0.3, 1.1, 200, 1000)
    assert (cifar.ball.eps, cifar.growth.factor, cifar.steps, cifar.reg) == (0.001, 1.17, 50, 3000)
    assert mnist.ball.cost == cifar.ball.cost == GridCost(5, 2.0)
    assert PGD.paper("mnist", p=1.0).ball.cost == GridCost(5, 1.0)
    text, scripts = PGD.paper("mnist", "text"), PGD.paper("mnist", "scripts")
    assert (text.ball.eps, text.ball.cost) == (0.3, GridCost(5, 1.0))
    assert (scripts.ball.eps, scripts.ball.cost) == (0.7, GridCost(7, 2.0))
    assert PGD.paper("cifar10", "scripts").ball.cost == GridCost(5, 2.0) and cifar.ball.eps == 0.001
    with pytest.raises(ValueError, match="source must be one of curves, text, scripts"):
        PGD.paper("mnist", "code")  # type: ignore[arg-type]
    assert mnist.mode == "paper" and mnist.step == "linf" and mnist.step_size == 0.1


def test_paper_attack_has_no_ball(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    keep = torch.tensor([0, 1, 2, 4])
    result = PGD.paper("mnist", steps=4)(net, images[keep], labels[keep])
    found = result.success & (result.n_steps > 0)
    assert found.any() and result.distance[found].isnan().all()  # its points lie in no ball
    assert (result.images >= 0).all() and (result.images <= 1).all()


def test_minimal_radius_is_proved_and_consistent(case: Case) -> None:
    net, images, labels = case
    attack = DualAveraging(BALL, steps=15)
    found = minimal_radius(*case, attack, hi=0.5, rounds=4)
    with torch.no_grad():
        wrong = net(found.images).argmax(1) != labels
    assert torch.equal(wrong, found.success) and torch.equal(found.success, found.radius.isfinite())
    assert found.radius[5] == 0 and torch.equal(found.images[5], images[5])
    assert (found.failed <= found.radius).all() and found.success.sum() > 3
    assert audit(BALL.at(found.radius.clamp(max=0.5)), images, found.images).all_valid
    # at the radius found the attack's ball holds an example; the curve cannot be above one run at a
    # fixed radius
    for eps in (0.1, 0.5):
        assert found.accuracy_at(eps) <= attack.at(eps)(*case).robust_accuracy + 0.11
    curve = [found.accuracy_at(eps) for eps in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert curve == sorted(curve, reverse=True)
    few = [minimal_radius(*case, attack, hi=0.5, rounds=r).radius for r in (0, 2)]
    assert (few[1] <= few[0]).all() and (found.radius <= few[1]).all(), "more rounds only improve"
    finite = few[0].isfinite() & (few[0] > 0)
    assert found.radius[finite].mean() < few[0][finite].mean()


def test_minimal_radius_of_a_linear_model_on_linf() -> None:
    """Closed form: the margin over the l1 norm of the difference of weights."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2, bias=False), 0.3 + 0.4 * torch.rand(8, 6)
    x = x[:, None, None, :]
    flat = nn.Sequential(nn.Flatten(), model)
    with torch.no_grad():
        logits = flat(x)
        y = logits.argmax(1)
        exact = (logits[:, 0] - logits[:, 1]).abs() / (
            model.weight[0] - model.weight[1]
        ).abs().sum()
    found = minimal_radius(flat, x, y, PGD(LinfBall(0.1), steps=10), hi=0.3, rounds=10)
    near = exact < 0.25
    assert near.any()
    torch.testing.assert_close(found.radius[near], exact[near].double(), rtol=5e-3, atol=1e-4)


def test_pulling_back_stops_short_of_what_is_not_a_number(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    """A model that overflows near the image is not fooled there."""

    def fragile(z: Tensor) -> Tensor:
        moved = (z - x).abs().sum((1, 2, 3))
        return torch.where(((moved > 0) & (moved < 10))[:, None], torch.nan, net(z))

    x, y = images[labels > 0][:1], labels[labels > 0][:1]  # argmax takes NaN for class 0
    found = minimal_radius(fragile, x, y, PGD(BALL, steps=3, step_size=2.0), hi=0.5, rounds=1)
    assert found.success.all() and torch.isfinite(fragile(found.images)).all()


def test_minimal_radius_of_an_attack_that_leaves_its_radius() -> None:
    """With a growing radius, an example found beyond the radius asked for is none at that
    radius."""
    x, y = torch.tensor([[[[0.3, 0.5, 0.4]]]]), torch.tensor([1])
    attack = PGD(LinfBall(0.1), steps=12, step_size=0.2, growth=GrowingRadius(2.0, 1))
    found = minimal_radius(lambda z: z.flatten(1), x, y, attack, hi=0.01)
    assert not found.success.any() and found.radius.isinf().all()
    found = minimal_radius(lambda z: z.flatten(1), x, y, attack, hi=0.4)
    assert (
        found.success.all()
        and float(attack.ball.distance(x, found.images)) <= float(found.radius) + 1e-6
    )


def test_minimal_radius_errors(case: Case) -> None:
    with pytest.raises(ValueError, match="hi must be"):
        minimal_radius(*case, DualAveraging(BALL, steps=1), hi=math.inf)
    with pytest.raises(TypeError, match=r"attack must be .* got 'fast'"):
        minimal_radius(*case, "fast")  # type: ignore[arg-type]
    attack = PGD.paper("mnist", steps=5, max_iter=50)
    with pytest.raises(ValueError, match="mode 'paper'"):
        minimal_radius(case.net, case.images[:2], case.labels[:2], attack, hi=2.0)


@pytest.mark.parametrize("version", ["fast", *slow("standard")])
def test_standard_breaks_what_its_members_break(version: Any, case: Case) -> None:
    net, images, labels = case
    ball = BALL.at(0.06)
    attack = StandardAttack(ball, version=version, batch_size=4)
    result = attack(*case)
    assert audit(ball, images, result.images).all_valid
    members = attack.members(classes=5)
    assert result.member is not None
    alone = members[0].on(ball)(*case)
    assert torch.equal(alone.success, result.member == 0)
    assert torch.equal(result.member >= 0, result.success)
    survivors = ~result.success
    every = sum(member.steps for member in members)
    steps = result.n_steps[survivors & (images.flatten(1).sum(1) > 0)]
    search = ScoreSearch(ball, queries=QUERIES).n_gradients if version == "standard" else 0
    assert survivors.any() and set(steps.tolist()) <= {every, every + search}
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(result.images), labels, reduction="none")
    torch.testing.assert_close(result.loss, loss, atol=1e-4, rtol=1e-4)


def test_version_7_is_fixed() -> None:
    """Changing a member makes a new version. Evaluations store the number and the list."""
    told = replace(StandardAttack(BALL), batch_size=7).describe()
    assert (told["version"], told["version_number"]) == ("standard", 7)
    digest = hashlib.sha256("\n".join(told["members"]).encode()).hexdigest()
    assert digest.startswith("6d17ed5ba6bee7b8"), "a change needs a new number"
    assert len(MEMBERS["standard"]) == 12
    assert sum(member.steps for member in MEMBERS["standard"]) <= 1500
    assert len(StandardAttack(BALL).members(classes=3)) == 9
    targeted = StandardAttack(BALL).members(targeted=True)
    assert not any(member.objective.startswith("runner-up") for member in targeted)
