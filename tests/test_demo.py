"""What a newcomer runs first must work."""

from __future__ import annotations

from pathlib import Path

import pytest

from wball import demo
from wball.evaluation import load_evaluation


@pytest.mark.slow
def test_demo_evaluates_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    assert demo.main(["--limit", "4", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("audit:") == 2 and "mass fraction x px" in said
    standard, certified = map(load_evaluation, sorted(tmp_path.glob("mnist-*"), reverse=True))
    assert len(standard) == 4 and not standard.rejected
    assert standard.accuracy_at(0.2) < standard.clean_accuracy
    assert 0 < certified.certified_at(0.05) <= certified.accuracy_at(0.05)
    assert 5e4 < (tmp_path / "report.html").stat().st_size < 2e6
