"""What an evaluation is called and how it is run: in groups, or keyword by keyword."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import wball
from wball.evaluation import Description, Running
from wball.evaluation.options import Named, grouped


def test_groups_and_keywords_say_the_same() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 0])
    model, ball = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), wball.WassersteinBall(0.05)
    one = wball.evaluate(
        model,
        x,
        y,
        ball,
        attack="fast",
        about=Description("mine", "three", ["a", "b"]),
        run=Running(2, keep="none"),
    )
    two = wball.evaluate(
        model,
        x,
        y,
        ball,
        attack="fast",
        name="mine",
        data="three",
        classes=["a", "b"],
        batch_size=2,
        keep="none",
    )
    assert one.settings == two.settings and one.name == "mine"
    assert one.settings["batch_size"] == 2 and one.settings["data"]["classes"] == ["a", "b"]


def test_every_field_is_a_keyword() -> None:
    assert list(Named.__annotations__) == [
        f.name for group in (Description, Running) for f in fields(group)
    ]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"nmae": "mine"}, TypeError, "nmae"),
        ({"about": Description("mine"), "name": "other"}, TypeError, "name and about"),
        ({"about": "mine"}, TypeError, "about must be a Description"),
        ({"run": Running(), "progress": True}, TypeError, "put them into run"),
        ({"keep": "some"}, ValueError, "keep"),
        ({"batch_size": 0}, ValueError, "batch_size"),
    ],
)
def test_what_is_said_twice_or_not_known_is_refused(
    given: dict[str, Any], error: type[Exception], says: str
) -> None:
    groups = {name: given.pop(name, None) for name in ("about", "run")}
    with pytest.raises(error, match=says):
        grouped(groups["about"], groups["run"], given)
