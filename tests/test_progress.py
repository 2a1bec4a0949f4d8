"""One bar for all: what it shows, and how nested work reports to it."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import wball
from wball import progress


def test_attacks_report_to_the_bar_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    around = SimpleNamespace(get=lambda: SimpleNamespace(within=seen.append))
    monkeypatch.setattr(progress, "AROUND", around)
    x = torch.rand(4, 1, 5, 5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 2))
    attack = wball.DualAveraging(wball.WassersteinBall(1e-6), steps=3, batch_size=2, progress=False)
    attack(model, x, model(x).argmax(1))
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) == 2 * 3


def test_the_first_compilation_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, for loops of this library alone, and not in the logs of whoever did not ask for it."""
    import numba
    from numba.core import event

    from wball.kernels.compiled import FirstTime

    def compile_one(module: str) -> str:
        def loop(value: float) -> float:
            return value + 1

        loop.__module__ = module
        numba.njit(loop)(1.0)
        return capsys.readouterr().err

    terminal = True
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    compile_one("wball.kernels.some")  # the library's own listener may not have spoken yet
    with event.install_listener("numba:compile", FirstTime()):
        assert compile_one("somebody.else") == ""
        assert (
            compile_one("wball.kernels.some")
            == "wball: compiling kernels for the first time (about 15 s) ...\n"
        )
        assert compile_one("wball.kernels.some") == ""
    with event.install_listener("numba:compile", FirstTime()):
        terminal = False
        assert compile_one("wball.kernels.some") == ""


def test_a_bar_counts_stages_and_parts() -> None:
    with Progress(console=Console(file=io.StringIO())) as display:
        bar = progress.Bar(display, display.add_task("work", total=10))
        bar.stage(4, "[first]")
        bar.within(0.5)
        assert display.tasks[0].completed == 2 and display.tasks[0].description == r"\[first]"
        bar.advance(4)
        bar.stage(6, "second")
        bar.within(2.0)
        assert display.tasks[0].completed == 10
        bar.move_to(7)
        assert display.tasks[0].completed == 7


def test_a_bar_that_is_not_shown_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar("work", 3, show=False) as bar:
        assert progress.AROUND.get() is None
        bar.stage(1, "a")
        bar.advance(1)
    with progress.bar("work", 3, parts=True) as bar:
        assert progress.AROUND.get() is bar
    assert progress.AROUND.get() is None
    out, err = capsys.readouterr()
    assert out == "" and "work" in err
