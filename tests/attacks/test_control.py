"""Control experiments raise their codes where they apply, and stay silent on a sound model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from marks import slow
from problems import Case
from wball import (
    DualAveraging,
    StandardAttack,
    WassersteinBall,
    audit,
    evaluate,
    load_model,
    load_sample,
)
from wball.attacks import control, standard
from wball.attacks.attack import AttackStatus, Task
from wball.attacks.base import margin
from wball.attacks.stand_ins import DRAWS
from wball.attacks.standard import _Member
from wball.attacks.views import View
from wball.model import Model


def plain_view(model: Model) -> View:
    """The model as it is."""
    return View(model, 1.0, True, False, False)


BALL = WassersteinBall(0.02)


def _codes(attack: StandardAttack, model: object, x: Tensor, y: Tensor) -> list[str]:
    return [finding.code for finding in attack(model, x, y).findings if finding.serious]  # type: ignore[arg-type]


def test_answers_that_are_not_finite(net: nn.Module, images: Tensor, labels: Tensor) -> None:
    def overflows(z: Tensor) -> Tensor:
        return torch.where(z[:, 0, :1, 0] > 0.5, torch.nan, net(z))

    found = control.not_finite(overflows, images)
    assert found.images == int((images[:, 0, 0, 0] > 0.5).sum()) > 0
    attack = StandardAttack(BALL, version="fast", check=False)
    assert "non-finite" in _codes(attack, overflows, images, labels)
    assert control.not_finite(net, images).images == 0
    ruled_out = torch.tensor([0.0, 0.0, 0.0, 0.0, -torch.inf])
    assert control.not_finite(lambda z: net(z) + ruled_out, images).images == 0


def test_a_loss_that_still_rises(
    net: nn.Module, images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = torch.tensor(
        [k for k in range(10) if k not in (3, 7)]
    )  # black and white images have nothing to move
    x, y, ball = images[moving], labels[moving], WassersteinBall(0.1)
    short = DualAveraging(ball, steps=100, step_size=3e-3)(net, x, y)
    long = DualAveraging(ball, steps=100)(net, x, y)
    assert (
        short.rising is not None
        and int(short.rising.sum()) >= 2
        and not bool((short.rising & short.success).any())
    )
    assert long.rising is not None and int(long.rising.sum()) == 0
    for step_size, serious in ((3e-3, ["loss-still-rising"]), (3.0, [])):
        monkeypatch.setitem(
            standard.MEMBERS, "fast", (_Member("cross-entropy", step_size=step_size, decay=0.0),)
        )
        assert _codes(StandardAttack(ball, version="fast", check=False), net, x, y) == serious


def test_more_is_tried_on_images_that_are_almost_broken_only(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        standard.MEMBERS,
        "fast",
        (_Member("margin", 3.0, 5, decay=0.0), _Member("margin", steps=7, near=True)),
    )
    with torch.no_grad():
        clean = margin(case.net(case.images), case.labels)
    seen = 0
    for eps in (0.01, 0.02, 0.04, 0.06, 0.1):
        ball = WassersteinBall(eps)
        first = DualAveraging(ball, objective="margin", steps=5)(*case)
        near = ~first.success & (first.loss > standard.NEAR * clean)
        found = StandardAttack(ball, version="fast", check=False)(*case)
        assert found.n_steps[~near].tolist() == first.n_steps[~near].tolist()
        assert bool((found.n_steps[near] > first.n_steps[near]).all())
        seen += int(near.sum())
    assert seen > 0


@pytest.mark.parametrize(("random", "draws"), [(False, DRAWS), (True, 0)])
def test_a_smoothed_member_climbs_the_mean_over_noisy_copies(
    random: bool, draws: int, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A public network trained against small changes of every pixel hid a third of its examples
    from its gradients."""
    asked: list[Tensor] = []

    def model(z: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            asked.append(z.detach().clone())
        return case.net(z)

    members = (_Member("margin", steps=1), _Member("margin", 3.0, 2, smoothed=0.2))
    monkeypatch.setitem(standard.MEMBERS, "fast", members)
    view, x = replace(plain_view(model), random=random), case.images[:1]
    attack = StandardAttack(WassersteinBall(1e-4), version="fast", check=False, view=view)
    assert not bool(attack(model, x, case.labels[:1]).success.any())
    assert len(asked) >= 1 + 2 * draws
    far = [float((z - x).abs().max()) > 0.1 for z in asked]
    assert sum(far) == 2 * draws, "random models are averaged anyway"


def test_survivors_of_a_full_ball(case: Case) -> None:
    everyone, view = torch.ones(len(case.images), dtype=torch.bool), plain_view(case.net)
    weak = (DualAveraging(BALL, steps=1, step_size=1e-9),)
    strong = (DualAveraging(BALL, steps=60, step_size=6.0),)
    task = Task(*case)
    missed = control.missed_in_full_ball(weak, view, task, everyone)
    assert missed.images >= 2
    none = control.missed_in_full_ball(strong, view, task, everyone)
    assert none.images == 0 and none.of == missed.of
    assert control.missed_in_full_ball(strong, view, task, ~everyone).images == 0


def test_examples_by_a_hair_are_improved_and_count(case: Case) -> None:
    """A batch of another size rounds otherwise: what is wrong by 1e-7 of the logits may be right
    there."""
    attack = StandardAttack(WassersteinBall(0.3), version="fast", check=False)
    result = attack(*case)
    margin = case.net(result.images[result.success]).detach()
    own = case.labels[result.success][:, None]
    ahead = margin.scatter(1, own, -torch.inf).amax(1) - margin.gather(1, own)[:, 0]
    assert bool((ahead > standard.CLEARLY * margin.abs().amax(1)).all())
    close = attack(lambda z: 10 + 1e-4 * case.net(z), case.images, case.labels)
    assert int(close.success.sum()) >= 7, "none of them is clear"
    assert bool((close.n_steps > result.n_steps)[close.success & (close.distance > 0)].all())


def test_what_is_an_example_in_some_batches_only_is_not_claimed(
    net: nn.Module, images: Tensor, labels: Tensor
) -> None:
    """An evaluation on a GPU asked for the class of claimed examples in a batch of another size,
    and it was right."""
    with torch.no_grad():
        y = net(images).argmax(1)
    own = F.one_hot(y, 5).float()

    def rounding(z: Tensor) -> Tensor:
        """The first two images are wrong by a hair wherever they move, in whole batches."""
        logits = net(z)
        if len(z) != len(images):
            return logits.detach() * 0 + own[:1] if len(z) == 1 else logits
        moved = (z != images).flatten(1).any(1)
        hair = 100 * own + (100 + 1e-4) * own.roll(1, 1)
        return torch.where((moved & (torch.arange(len(z)) < 2))[:, None], hair, 20 * own + logits)

    ball = WassersteinBall(1e-4)
    found = DualAveraging(ball, steps=5)(rounding, images, y)
    assert bool((found.images[:2] != images[:2]).any())
    view = plain_view(rounding)
    attack = StandardAttack(ball, version="fast", check=False, view=view)
    result = attack(rounding, images, y)
    assert not bool(result.success[0]) and result.member is not None and int(result.member[0]) == -1
    assert result.status[0] is AttackStatus.SURVIVED


def test_members_begin_at_the_best_attempt_so_far(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step from there ends higher than one step from the clean image."""
    begin, ends = _Member("margin", steps=40), []
    for from_best in (False, True):
        members = (begin, _Member("margin", step_size=0.1, steps=1, from_best=from_best))
        monkeypatch.setitem(standard.MEMBERS, "fast", members)
        monkeypatch.setattr(
            standard, "_is_better", lambda best, index, found: torch.ones_like(found.success)
        )
        found = StandardAttack(BALL, version="fast", check=False)(*case)
        assert found.member is not None
        ends.append(found.loss[~found.success])
    assert len(ends[0]) >= 3 and float(ends[1].mean()) > float(ends[0].mean())


def _two_networks(kind: str) -> Model:
    """The labels of a weak network, and the gradient of a robust one."""
    net, robust = load_model("mnist-standard"), load_model("mnist-adversarial-cnn")

    def chosen(z: Tensor) -> Tensor:
        """One-hot rows, without a softmax, a maximum or its position."""
        scores = net(z)
        return (scores[:, :, None] >= scores[:, None, :]).all(2).to(z)

    def on_bytes(z: Tensor) -> Tensor:
        stored = (255 * z).round() / 255 == z
        return torch.where(stored.flatten(1).all(1)[:, None], net(z), robust(z))

    line = 0.02 * torch.randn(784, 10, generator=torch.Generator().manual_seed(0))
    return {
        "robust": robust,
        "weak on bytes": on_bytes,
        "chosen": lambda z: 30 * chosen(z) + robust(z),
        "linear decoy": lambda z: 20 * chosen(z) + z.flatten(1) @ line,
        "votes": lambda z: chosen(z) + chosen(0.99 * z) + 0.5 * robust(z).softmax(1),
    }[kind]


@pytest.mark.parametrize("kind", ["robust", "chosen", *slow("weak on bytes")])
def test_students_break_what_gradients_of_another_network_hide(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = (_Member("margin", steps=40), _Member("margin", steps=40, on_bytes=True))
    monkeypatch.setitem(standard.MEMBERS, "standard", members)
    monkeypatch.setattr(standard, "QUERIES", 60)
    if kind == "weak on bytes":  # no student may start from the weak network
        monkeypatch.setattr(control, "list_models", list)
    x, y = (part[100:108] for part in load_sample("mnist"))
    attack, model = StandardAttack(WassersteinBall(0.2), check=False), _two_networks(kind)
    found = attack(model, x, y)
    assert audit(attack.ball, x, found.images).all_valid
    broken, codes = int(found.success.sum()), [f.code for f in found.findings if f.serious]
    assert broken <= 3 if kind == "robust" else broken >= 7
    assert codes == ([] if kind == "robust" else ["black-box-stronger"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weak on bytes", "chosen", "linear decoy", "votes"])
def test_no_evaluation_believes_the_gradients_of_another_network(kind: str) -> None:
    x, y = (part[100:112] for part in load_sample("mnist"))
    found = evaluate(_two_networks(kind), x, y, WassersteinBall(0.2))
    assert found.accuracy_at(0.2) <= 0.1 or not found.reliable


@pytest.mark.parametrize(("shape", "classes"), [((3, 9, 14), 3), ((30,), 4)])
def test_students_learn_labels_of_images_of_any_shape(shape: tuple[int, ...], classes: int) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.rand(40, *shape, generator=draws)
    weight = torch.randn(x[0].numel(), classes, generator=draws)

    def model(z: Tensor) -> Tensor:
        return F.one_hot(((z.flatten(1) - 0.5) @ weight).argmax(1), classes).float()

    learnt = []
    for _ in range(2):
        draws.manual_seed(1)
        (network,) = control.untaught(x, classes, draws)
        student = control.Student(network, model, draws)
        for _ in range(3):
            student.learn(x)
        learnt.append(network(x).detach())
    assert torch.equal(*learnt)
    assert float((learnt[0].argmax(1) == model(x).argmax(1)).float().mean()) > 0.8
