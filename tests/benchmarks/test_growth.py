"""``python -m benchmarks growth``: one thing grows at a time, and every row says what it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import growth


@pytest.mark.slow
def test_every_size_has_a_row(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    sizes = ["--batch", "10", "--side", "32", "--windows", "3"]
    growth.main(["--device", "cpu", *sizes, "--seconds", "0.01", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(r["grows"], r["batch"], r["window"]) for r in rows if r["call"] == "project"] == [
        ("batch", 1, 5), ("batch", 10, 5), ("side", 1, 5), ("window", 8, 3)
    ]  # fmt: skip
    assert all(r["seconds"] > 0 and r["extra_memory_in_batches"] is None for r in rows)
    assert out.with_suffix(".png").stat().st_size > 1000
