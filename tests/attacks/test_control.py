"""Control experiments raise their codes where they apply, and stay silent on a sound model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from problems import Case
from wball import (
    DualAveraging,
    StandardAttack,
    WassersteinBall,
)
from wball.attacks import control, standard
from wball.attacks.attack import AttackStatus, Task, updated
from wball.attacks.standard import Member
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
    begin, ends = Member("margin", steps=40), []
    for from_best in (False, True):
        members = (begin, Member("margin", step_size=0.1, steps=1, from_best=from_best))
        monkeypatch.setitem(standard.MEMBERS, "fast", members)
        monkeypatch.setattr(
            standard, "updated", lambda *given: updated(*given[:3], torch.ones_like(given[3]))
        )
        found = StandardAttack(BALL, version="fast", check=False)(*case)
        assert found.member is not None
        ends.append(found.loss[~found.success])
    assert len(ends[0]) >= 3 and float(ends[1].mean()) > float(ends[0].mean())


@pytest.mark.parametrize("broken", [False, True])
def test_the_search_goes_on_if_it_breaks_one_of_the_first_survivors(
    broken: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sound gradients leave it nothing, and it costs as much as all members."""
    monkeypatch.setitem(standard.MEMBERS, "standard", (Member("margin", 1e-9, steps=1),))
    monkeypatch.setattr(standard, "SEARCHED", 2)
    monkeypatch.setattr(standard, "QUERIES", 200)
    view = plain_view(case.net)
    attack = StandardAttack(WassersteinBall(0.3 if broken else 1e-6), check=False, view=view)
    found = attack(*case)
    assert found.queries is not None
    searched = (found.queries > 100) | (found.member == 1)
    left = int((found.distance > 0).sum()) if broken else 2
    assert int(searched.sum()) == left and left >= 2
    told = [finding.code for finding in found.findings]
    assert ("black-box-stronger" in told) is broken


def test_examples_of_one_precision_only_are_counted(case: Case) -> None:
    """A GPU rounds convolutions to ten bits unless it is told otherwise."""
    found = StandardAttack(WassersteinBall(0.3), version="fast", check=False)(*case)
    assert int(found.success.sum()) > 3 and not found.findings
    rounded = Task(lambda z: case.net(z) * 0, case.images, case.labels)
    told = control.precision_dependent(rounded, found)
    lost = found.success & (case.labels == 0)
    assert told.code == "precision-dependent" and told.images >= int(lost.sum())
    assert control.precision_dependent(Task(*case), found).images == 0
