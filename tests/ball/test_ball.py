"""Balls at the door: every bad input gets an error that names the argument, the value and the
remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wball

BALL = wball.WassersteinBall(0.1)
CALLS: list[Callable[[wball.WassersteinBall | wball.LinfBall, Tensor, Tensor], object]] = [
    lambda ball, x, w: ball.project(x, w),
    lambda ball, x, w: ball.support(x, w),
]


def image(value: float = 0.5) -> Tensor:
    return torch.full((2, 1, 4, 4), value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ball", [BALL, wball.LinfBall(0.1)])
def test_bad_images_are_refused(
    call: Callable[[object, Tensor, Tensor], object], ball: wball.WassersteinBall | wball.LinfBall
) -> None:
    nan = image()
    nan[0, 0, 1, 1] = float("nan")
    inf = image()
    inf[1] = float("inf")
    cases: list[tuple[Tensor, Tensor, type[Exception], str]] = [
        (nan, image(), ValueError, "x has NaN or infinite"),
        (inf, image(), ValueError, "x has NaN or infinite"),
        (image(), nan, ValueError, "NaN or infinite"),
        (image(1.5), image(), ValueError, r"x has pixels from 1.5 to 1.5, outside \[0, 1\]"),
        (image(-0.1), image(), ValueError, "normalise inside the model"),
        (image()[0], image()[0], ValueError, r"shape \(B, C, H, W\).*\[None\]"),
        (
            image(),
            image()[:1],
            ValueError,
            r"must have the shape of x, \(2, 1, 4, 4\), got \(1, 1, 4, 4\)",
        ),
        ((255 * image()).to(torch.int32), image(), TypeError, r"float\(\) / 255"),
        (image().tolist(), image(), TypeError, "must be a torch.Tensor"),  # type: ignore[list-item]
        (torch.zeros(2, 1, 0, 4), torch.zeros(2, 1, 0, 4), ValueError, "empty image"),
        (image(), image().to("meta"), ValueError, "is on meta but x is on cpu"),
    ]
    for x, w, kind, text in cases:
        with pytest.raises(kind, match=text):
            call(ball, x, w)


@pytest.mark.parametrize("make", [wball.WassersteinBall, wball.LinfBall])
@pytest.mark.parametrize(
    ("eps", "box", "text"),
    [
        (-0.1, None, r"eps must be finite and >= 0, got -0\.1"),
        (float("nan"), None, "eps must be finite"),
        (torch.tensor([0.1, -0.2]), None, "eps must be finite"),
        (torch.zeros(2, 2), None, "1-D"),
        ("large", None, "eps must be a number"),
        (torch.tensor([0.1, 0.2, 0.3]), None, "3 values for 2 images"),
        (0.1, (1.0, 0.0), "0 <= lo < hi"),
        (0.1, 3, "pair"),
    ],
)
def test_bad_radii_and_boxes_are_refused(
    make: Callable[..., wball.WassersteinBall | wball.LinfBall], eps: object, box: object, text: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make(eps, box=box).project(image(), image())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(({"reg": reg}, "reg must be > 0") for reg in (0.0, -1.0, float("nan"))),
        ({"tol": 0.0}, "tol must be > 0"),
        ({"max_iter": 0}, "max_iter must be at least 1"),
        ({"mode": "fast"}, "mode"),
        ({"mode": "paper"}, "reg must be > 0 and finite"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], text: str) -> None:
    calls = [BALL.project] if "mode" in options else [BALL.project, BALL.support]
    for call in calls:
        with pytest.raises(ValueError, match=text):
            call(image(), image(), **options)


def test_bad_masses_and_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="relative"):
        wball.WassersteinBall(0.1, mass="both")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cost must be"):
        wball.WassersteinBall(0.1, cost=5)  # type: ignore[arg-type]


def test_a_ball_describes_itself_and_samples_points_of_itself() -> None:
    for ball in (BALL, wball.LinfBall(0.1)):
        assert ball.unit in ball._repr_html_() and "eps" in ball._repr_html_()
        assert ball.describe()["unit"] == ball.unit
        assert ball.contains(image(), ball.sample(image())).all()
        assert ball.contains(image(), ball.oracle(image())(torch.randn(2, 1, 4, 4)).z).all()
    with pytest.raises(TypeError, match="ball must be a threat model"):
        wball.PGD("ball")  # type: ignore[arg-type]


def test_units() -> None:
    x = torch.rand(3, 3, 5, 5)
    relative, absolute = wball.WassersteinBall(0.2), wball.WassersteinBall(7.0, mass="absolute")
    torch.testing.assert_close(relative.budget(x), 0.2 * x.double().flatten(1).sum(1))
    torch.testing.assert_close(absolute.budget(x), torch.full((3,), 7.0, dtype=torch.float64))
    assert (relative.unit, absolute.unit) == ("mass fraction x px", "mass x px")
    assert wball.WassersteinBall(0.2, wball.GridCost(5, p=2)).unit == "mass fraction x px^2"
    assert relative.at(0.3).eps == 0.3
    per_image = relative.at(torch.tensor([0.1, 0.2, 0.3]))
    assert per_image.take(torch.tensor([2])).eps.tolist() == pytest.approx([0.3])  # type: ignore[union-attr]
    assert relative.take(torch.tensor([2])).eps == 0.2


def test_eight_bit_images_are_divided_by_255() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    x, z = torch.randint(0, 256, (2, 2, 1, 4, 4), dtype=torch.uint8)
    y = torch.tensor([0, 1])

    def answers(ball: Any, x: Tensor, z: Tensor) -> list[Tensor]:
        attack, proof = wball.PGD(ball, steps=2), wball.certify(model, x, y, ball)
        found = [ball.project(x, z).point, ball.distance(x, z), attack(model, x, y).images]
        return [*found, wball.audit(ball, x, z).distance, proof.margin]

    for ball in (BALL, wball.LinfBall(0.1)):
        floats = answers(ball, x / 255, z / 255)
        assert all(map(torch.equal, answers(ball, x, z), floats))


def test_warm_starts_and_generators_of_the_wrong_type() -> None:
    with pytest.raises(TypeError, match="init must be the duals"):
        BALL.project(image(), image(), init=3)  # type: ignore[arg-type]
    for ball in (BALL, wball.LinfBall(0.1)):
        with pytest.raises(TypeError, match=r"torch\.Generator, got 3"):
            ball.sample(image(), 3)  # type: ignore[arg-type]


def test_half_precision_in_the_linf_ball() -> None:
    """Half precision cannot say where the ball ends, so the answers are in float32."""
    torch.manual_seed(0)
    x, w = torch.rand(4, 1, 5, 5).half(), torch.randn(4, 1, 5, 5).half()
    ball = wball.LinfBall(torch.tensor([0.0, 0.01, 0.1, 0.3]))
    for point in (ball.support(x, w).point, ball.project(x, w).point, ball.sample(x)):
        assert point.dtype == torch.float32 and not point.requires_grad
        assert (
            ball.contains(x, point.to(torch.float32)).all()
            and wball.audit(ball, x, point).all_valid
        )


def test_the_linf_ball_counts_its_radii() -> None:
    x = torch.rand(4, 1, 5, 5)
    with pytest.raises(ValueError, match="3 values for 4 images"):
        wball.LinfBall([0.1, 0.2, 0.3]).contains(x, x)
