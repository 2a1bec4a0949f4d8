"""Objectives by their definitions, and by finite differences where gradients matter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import wball
from wball.attacks import base as objectives


@pytest.fixture
def logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 5, dtype=torch.float64) * 3


Y = torch.tensor([0, 1, 2, 3, 4, 0])
T = torch.tensor([1, 2, 3, 4, 0, 2])


def test_cross_entropy_is_an_increasing_function_of_the_usual_one(logits: torch.Tensor) -> None:
    usual = F.cross_entropy(logits, Y, reduction="none")
    score = objectives.cross_entropy(logits, Y)
    report = partial(objectives.reported_loss, objectives.cross_entropy)
    torch.testing.assert_close(report(score, targeted=False), usual)
    towards = objectives.cross_entropy(logits, Y, T)
    usual = -F.cross_entropy(logits, T, reduction="none")
    torch.testing.assert_close(report(towards, targeted=True), usual)
    free = logits.clone().requires_grad_(True)
    (ours,) = torch.autograd.grad(objectives.cross_entropy(free, Y).sum(), free)
    (usual,) = torch.autograd.grad(F.cross_entropy(free, Y, reduction="sum"), free)
    torch.testing.assert_close(F.normalize(ours, dim=1), F.normalize(usual, dim=1))


def test_margin_is_positive_exactly_on_success(logits: torch.Tensor) -> None:
    assert torch.equal(objectives.margin(logits, Y) > 0, logits.argmax(1) != Y)
    assert torch.equal(objectives.margin(logits, Y, T) > 0, logits.argmax(1) == T)
    assert torch.equal(objectives.dlr(logits, Y) > 0, logits.argmax(1) != Y)


def test_dlr_does_not_depend_on_scale_or_shift_and_is_the_margin_of_two_classes(
    logits: torch.Tensor,
) -> None:
    for target in (None, T):
        plain, moved = objectives.dlr(logits, Y, target), objectives.dlr(7 * logits + 3, Y, target)
        torch.testing.assert_close(plain, moved)
    two, y = logits[:, :2], Y.clamp(max=1)
    torch.testing.assert_close(objectives.dlr(two, y), objectives.margin(two, y))


def test_runner_up_aims_at_the_clean_ranking() -> None:
    clean = torch.tensor([[5.0, 1.0, 3.0, 2.0]])
    y = torch.tensor([0])
    assert [int(objectives.RunnerUp(k).rival(clean, y)) for k in (1, 2, 3, 9)] == [2, 3, 1, 1]
    assert float(objectives.RunnerUp(2)(clean, y, torch.tensor([3]))) == -3.0


def test_names() -> None:
    assert objectives.find_objective("margin") is objectives.margin
    assert objectives.find_objective("runner-up-12") == objectives.RunnerUp(12)
    own = lambda o, y, t: o[:, 0]
    assert objectives.find_objective(own) is own
    for bad in ("runner-up-0", "ce", 3):
        with pytest.raises(ValueError, match="objective"):
            objectives.find_objective(bad)


def test_without_confirmation_the_images_are_the_same_and_nothing_runs_in_float64() -> None:
    """Training needs the images only; a second opinion took an eighth of an attack's time."""
    x, seen = torch.rand(6, 1, 6, 6), list[torch.dtype]()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(36, 3)

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            seen.append(z.dtype)
            return self.last(z.flatten(1))

    net = Net()
    y = net(x).argmax(1)
    y[0] = (y[0] + 1) % 3  # wrong from the beginning
    attack = wball.DualAveraging(wball.WassersteinBall(0.5), steps=3, until_success=False)
    sure = attack(net, x, y)
    assert sure.success.any() and torch.float64 in seen
    seen.clear()
    quick = attack(net, x, y, confirm=False)
    assert torch.equal(quick.images, sure.images) and torch.equal(quick.success, sure.success)
    assert set(seen) == {torch.float32} and len(seen) == 1 + 3 + 1  # clean, gradients, the last
