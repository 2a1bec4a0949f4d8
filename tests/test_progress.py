"""One bar for all: what it shows, and how nested work reports to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
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
            == "wball: compiling kernels, once per machine (about 15 s, more on a busy one) ...\n"
        )
        assert compile_one("wball.kernels.some") == ""
    with event.install_listener("numba:compile", FirstTime()):
        terminal = False
        assert compile_one("wball.kernels.some") == ""


def test_a_bar_counts_stages_and_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wball.progress._overwrites", lambda: True)
    monkeypatch.setattr("wball.progress.REDRAWN", 0.0)
    with progress.bar("work", 10) as bar:
        bar.stage(4, "first\x1b[2J")
        bar.within(0.5)
        bar.advance(4)
        bar.stage(6, "second")
        bar.within(2.0)
        bar.move_to(7)
    shown = [line.split("\x1b")[0] for line in capsys.readouterr().err.split("\r")]
    assert [line[line.find("%") - 4 : line.find("%")].strip() for line in shown if "%" in line] == [
        "0", "20", "40", "40", "100", "70",
    ]  # fmt: skip
    assert shown[1].startswith("first[2J ") and shown[-2].startswith("second ")
    assert "about" in shown[2] and shown[-1] == ""  # the line is removed


def test_without_a_terminal_there_is_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("wball.progress.time.monotonic", lambda: now[0])
    with progress.bar("work", 1000) as bar:
        bar.move_to(200)  # read from files
        bar.stage(800, "net")
        for step in range(1, 8):
            now[0] += 10.0
            bar.within(step / 8)
    lines = capsys.readouterr().err.splitlines()
    assert [line[-22:] for line in lines] == [" 50 %, about 50 s left", " 80 %, about 20 s left"]


def test_a_bar_that_is_not_shown_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.bar("work", 3, show=False) as bar:
        assert progress.AROUND.get() is None
        bar.stage(1, "a")
        bar.advance(1)
    with progress.bar("work", 3, parts=True) as bar:
        assert progress.AROUND.get() is bar
    assert progress.AROUND.get() is None
    out, err = capsys.readouterr()
    assert out == "" and err == ""
