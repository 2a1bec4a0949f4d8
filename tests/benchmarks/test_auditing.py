"""The benchmark of audits, on small images."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import auditing


def test_both_ways_are_timed_for_every_size(tmp_path: Path) -> None:
    out = tmp_path / "auditing.json"
    auditing.main(["--sides", "12", "--out", str(out)])
    digits, colour = json.loads(out.read_text())["rows"]
    assert (digits["images"], colour["images"], colour["count"]) == ("28 x 28", "12 x 12 x 3", 13)
    assert all(row[key] > 0 for row in (digits, colour) for key in ("plan_s", "exact_s"))
    assert str(tmp_path) not in out.read_text()
