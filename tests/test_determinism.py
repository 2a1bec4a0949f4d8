"""Evaluations and certificates give the same numbers on a CPU, whatever the batch.

Attacks, projections and support functions: ``contracts``.

``docs/evaluation.md`` says what holds and why. Runs that are killed and started again are in
``faults`` and ``training/test_restart.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

import wball
from problems import ExactNet

BALL = wball.WassersteinBall(0.2)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return nn.functional.avg_pool2d(wball.load_sample("mnist")[0][:7], 2)


@pytest.fixture
def labels(digits: Tensor) -> Tensor:
    return ExactNet()(digits).argmax(1)


def test_evaluations_repeat_to_the_byte(digits: Tensor, labels: Tensor, tmp_path: Path) -> None:
    for name in ("one", "two"):
        attack = wball.DualAveraging(BALL, steps=8, until_success=False)
        wball.evaluate(
            ExactNet(), digits, labels, BALL, [0.05, 0.2], attack, out=tmp_path / name, seed=4, batch_size=3,
            name=wball.Names(command="c"),
        )  # fmt: skip
    for file in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
