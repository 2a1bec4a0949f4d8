"""64 processes share an evaluation, some of them die, and the job is started again: the result is that of one process.

The processes are played one after the other: what a process knows of the others is its rank, their number and the
folder they share, and that is what each of them gets here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wball
from wball.evaluation import run as module

WORLD = 64
IMAGES, BATCH = 140, 1  # batches do not divide by 64: some ranks have three, most have two
BALL = wball.WassersteinBall(0.3)
RADII = [0.1, 0.3]


class Killed(Exception):
    """The process is gone."""


class Finished(Exception):
    """The process has done its share and waits for the others."""


class Model(nn.Module):
    def __init__(self, calls: float = math.inf) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise Killed
        right = x.flatten(1) @ self.weight
        return torch.stack([-right, right], 1)


def data() -> tuple[Tensor, Tensor]:
    x = torch.rand(IMAGES, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, Model()(x).argmax(1).detach()


def evaluate(folder: Path, model: nn.Module) -> wball.Evaluation:
    x, y = data()
    attack = wball.DualAveraging(BALL, steps=3, random_start=1.0)
    return wball.evaluate(
        model,
        x,
        y,
        BALL,
        RADII,
        attack,
        out=folder,
        batch_size=BATCH,
        seed=9,
        name="m",
        command="c",
    )


def play(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    rank: int,
    world: int,
    calls: float,
    meet: Callable[[], None],
) -> None:
    @contextlib.contextmanager
    def team() -> Iterator[tuple[int, int, Callable[[], None]]]:
        yield rank, world, meet

    monkeypatch.setattr(module, "team", team)
    evaluate(folder, Model(calls))


def job(monkeypatch: pytest.MonkeyPatch, folder: Path, world: int, killed: dict[int, int]) -> int:
    """All ranks of one job; how many of them died. Rank 0 begins, and joins the parts if nobody is missing."""
    died = 0

    def others() -> None:
        nonlocal died
        for rank in range(1, world):
            meetings = iter([lambda: None])

            def meet(left: Iterator[Callable[[], None]] = meetings) -> None:
                if next(left, None) is None:
                    raise Finished

            try:
                play(monkeypatch, folder, rank, world, killed.get(rank, math.inf), meet)
            except Killed:
                died += 1
            except Finished:
                pass

    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1
        if meetings == 2:  # after its own share: the others have done theirs by then, or died
            others()
            if died:
                raise Killed

    with contextlib.suppress(Killed):
        play(monkeypatch, folder, 0, world, killed.get(0, math.inf), meet)
    return died


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves behind."""
    folder = tmp_path_factory.mktemp("alone")
    evaluate(folder, Model())
    return folder


@pytest.mark.slow
def test_64_ranks_some_of_which_die(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        assert job(patch, tmp_path / "many", WORLD, {5: 2, 17: 9, 40: 12, 63: 3}) == 4
        assert not (tmp_path / "many" / "results.json").exists()
        first = [
            (row["batch"], row["stage"])
            for row in rows(tmp_path / "many")
            if row["event"] == "batch"
        ]
        assert job(patch, tmp_path / "many", WORLD, {}) == 0
    for name in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        assert (tmp_path / "many" / name).read_bytes() == (alone / name).read_bytes()
    work = [
        (row["rank"], row["batch"], row["stage"])
        for row in rows(tmp_path / "many")
        if row["event"] == "batch"
    ]
    assert all(rank == batch % WORLD for rank, batch, _ in work)
    assert sorted((batch, stage) for _, batch, stage in work) == sorted(
        (b, s) for b in range(IMAGES) for s in range(2)
    )
    assert len(first) > 0.9 * len(work)  # what was done before the deaths was not done again
    shares = [sum(rank == r for rank, _, _ in work) for r in range(WORLD)]
    assert max(shares) - min(shares) <= 2  # one batch, two radii


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_what_is_there(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 died, 3 are left: nothing in the folder depends on how many there were."""
    with monkeypatch.context() as patch:
        assert job(patch, tmp_path / "many", WORLD, {2: 1}) == 1
        assert job(patch, tmp_path / "many", 3, {}) == 0
    for name in ("results.json", "examples.safetensors", "exhibit.safetensors"):
        assert (tmp_path / "many" / name).read_bytes() == (alone / name).read_bytes()
