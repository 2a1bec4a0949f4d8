"""Distillation: labels that a trained network has a share in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from training.worker import small_config, small_data, small_model
from wball import WassersteinBall
from wball.training import Loss, Optimisation, Smooth, train
from wball.training.losses import Objective, Teacher

STEP = Optimisation(lr=0.1, weight_decay=0.0, schedule="constant")


def other_model() -> nn.Module:
    model = small_model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-2.0)
    return model


def test_the_step_is_taken_towards_the_label_and_the_teachers_answer() -> None:
    x, y = small_data(8)
    config = small_config(
        epochs=1,
        batch_size=8,
        adversary=None,
        augment=0,
        optimisation=STEP,
        loss=Loss(teacher=0.25),
    )
    model, teacher = small_model(), other_model()
    expected, untouched = copy.deepcopy(model), copy.deepcopy(teacher)
    targets = 0.75 * F.one_hot(y, 10) + 0.25 * teacher(x).softmax(1).detach()
    F.cross_entropy(expected(x), targets).backward()
    found = train(config, (x, y), model=model, teacher=teacher).model
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a, b - 0.1 * b.grad, rtol=1e-4, atol=1e-6)
    for a, b in zip(teacher.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad and a.grad is None


def test_every_loss_sees_the_teacher() -> None:
    x, y = small_data(8)
    model = small_model()
    targets = Teacher(other_model(), small_config(loss=Loss(teacher=0.5)), x, y).targets(x, y)
    for config in (
        small_config(loss=Loss(teacher=0.5)),
        small_config(adversary=None, smooth=Smooth(WassersteinBall(0.1)), loss=Loss(teacher=0.5)),
    ):
        hard = Objective(model, config)(x, x.flip(3), y, 1.0, 0.1)
        soft = Objective(model, config)(x, x.flip(3), y, 1.0, 0.1, targets)
        assert float((hard[0] - soft[0]).detach().abs()) > 1e-3
        assert torch.equal(hard[1], soft[1]) and torch.equal(
            hard[2], soft[2]
        )  # correctness does not depend on it


@pytest.mark.parametrize(
    ("share", "teacher", "message"),
    [
        (0.0, small_model(), r"loss.teacher is 0, and teacher is given"),
        (0.5, None, "teacher is missing"),
        (0.5, nn.Sequential(nn.Flatten(), nn.Linear(5, 10)), "teacher cannot take images"),
        (0.5, "mine", "teacher"),
    ],
)
def test_a_teacher_is_checked(share: float, teacher: Any, message: str) -> None:
    config = small_config(epochs=1, loss=Loss(teacher=share))
    with pytest.raises((ValueError, TypeError), match=message):
        train(config, small_data(16), model=small_model(), teacher=teacher)
    with pytest.raises(ValueError, match="teacher must be in"):
        Loss(teacher=1.5)
