"""The benchmark of audits, on small images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import wball
from benchmarks import auditing


def test_both_ways_are_timed_for_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts solved transport problems: none by plan, one an image by exact transport."""
    solved = []

    def audited(*given: Any, **options: Any) -> wball.AuditReport:
        found = wball.audit(*given, **options)
        solved.append((int(found.exact.sum()), len(found.exact), found.all_valid))
        return found

    def clock(call: Callable[[], Any]) -> tuple[float, Any]:
        found = call()
        return float(solved[-1][0]), found

    monkeypatch.setattr(auditing, "processor_time", clock)
    monkeypatch.setattr(auditing, "wball", SimpleNamespace(**{**vars(wball), "audit": audited}))
    out = tmp_path / "auditing.json"
    auditing.main(["--sides", "12", "--out", str(out)])
    digits, colour = json.loads(out.read_text())["rows"]
    assert (digits["images"], colour["images"], colour["count"]) == ("28 x 28", "12 x 12 x 3", 13)
    assert [(row["plan_s"], row["exact_s"]) for row in (digits, colour)] == [(0.0, 1.0)] * 2
    assert all(valid for *_, valid in solved) and {count for _, count, _ in solved} == {1, 10, 13}
    assert str(tmp_path) not in out.read_text()


def test_an_example_that_fails_its_audit_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    name, x, eps = next(auditing.images(()))
    monkeypatch.setattr(
        wball.DualAveraging,
        "__call__",
        lambda self, model, x, y: SimpleNamespace(images=x / 2, proof=None),
    )
    with pytest.raises(AssertionError):
        auditing.row(name, x[:2], eps, "linear")
