"""The report on what is installed."""

from __future__ import annotations

import json

import pytest
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

from wball.cli import main
from wball.info import info
from wball.kernels import dispatch


def test_json_names_every_kernel_with_its_reasons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WBALL_KERNEL", raising=False)
    assert main(["info"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["kernels"]) == set(dispatch.KERNELS)
    assert report["kernels"]["torch"]["cpu"] is None
    assert report["kernels"][report["automatic"]["cpu"]]["cpu"] is None
    assert report["packages"]["torch"]
    assert report["kernels"]["cpu"]["cuda"]  # it runs on the CPU alone, or there is no GPU


def test_table_says_why_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setitem(dispatch.OPERATIONS["entropic_plan"], "cpu", "wball.kernels.missing")
    monkeypatch.setattr(dispatch, "_loaded", {})
    monkeypatch.setenv("WBALL_KERNEL", "auto")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "wball" in out and "No module named 'wball.kernels.missing'" in out
    assert info()["automatic"]["cpu"] == "torch"
    monkeypatch.setenv("WBALL_KERNEL", "cpu")
    assert main(["info"]) == 1


def test_no_loop_is_left_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--compile"]) == 0
    assert json.loads(capsys.readouterr().out)["wball"]
    for operation in dispatch.OPERATIONS:
        for name, loop in vars(dispatch.load(operation, "cpu")).items():
            if isinstance(loop, Dispatcher) and isinstance(loop._cache, FunctionCache):
                assert loop.signatures, f"{operation}: {name}"
