"""Compiled loops are cached on disk, and compiled anew when a file that they may call into
changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from wball.kernels import compiled

SOURCE = """
from typing import Any, NamedTuple
from wball.kernels.compiled import compiled

class Line(NamedTuple):
    values: Any

@compiled()
def twice(line):
    for i in range(line.values.size):
        line.values[i] *= 2.0

def call(values):
    twice(Line(values))
"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("loops_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["loops_of_a_test"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_in_another_file_of_the_kernels_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "loops_of_a_test.py"
    path.write_text(SOURCE)

    def hits() -> int:
        module, values = load(path), np.ones(2)
        module.call(values)
        assert values.tolist() == [2.0, 2.0]
        return sum(module.twice.stats.cache_hits.values())

    assert hits() == 0 and hits() == 1
    stamp = compiled._stamp()
    assert {"factors.py", "cpu.py"} <= {name for name, *_ in stamp}
    monkeypatch.setattr(compiled, "_stamp", lambda: (*stamp, ("factors.py", 0, 0)))
    assert hits() == 0 and hits() == 1
    path.write_text(SOURCE.replace("Line", "Row"))  # what is cached takes a type that is gone
    assert hits() == 0 and hits() == 1
