"""How far apart digits are: the distance, and who counts as a rival."""

from __future__ import annotations

import pytest
import torch

from benchmarks.separation import nearest_rivals, transport
from wball import WassersteinBall, load_sample


def test_distance_is_that_of_the_library() -> None:
    x = load_sample("mnist")[0][:2]
    x = x / x.sum((1, 2, 3), keepdim=True)
    expected = float(WassersteinBall(1.0).distance(x[:1].double(), x[1:].double(), plans="full"))
    assert transport(x[0, 0], x[1, 0]) == pytest.approx(expected, rel=1e-6)


def test_brightness_does_not_count_and_shifts_do() -> None:
    a = torch.zeros(12, 12)
    a[4:6, 4:6] = 1.0
    assert transport(a, 0.25 * a.roll((2, 0), (0, 1))) == pytest.approx(2.0)


def test_the_nearest_of_another_class_is_found() -> None:
    x, y = load_sample("mnist")
    image, moved = x[:1], x[:1].roll(1, -1)
    others = torch.cat([moved, x[1:50]])
    labels = torch.cat([(y[:1] + 1) % 10, y[1:50]])
    assert float(nearest_rivals(image, y[:1], others, labels, 3)) == pytest.approx(1.0, abs=1e-6)
    labels[0] = y[0]  # the same class is no rival
    assert float(nearest_rivals(image, y[:1], others, labels, 3)) > 1.0
