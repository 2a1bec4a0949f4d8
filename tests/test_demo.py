"""What a newcomer runs first must work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wball import demo
from wball.evaluation import Evaluation, evaluate, load_evaluation


def test_demo_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(["--images", "0"])
    assert ended.value.code == 2 and "at least 1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_demo_evaluates_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(demo, "MODELS", ("mnist-standard", "mnist-binarized"))
    assert demo.main(["--images", "4", "--out", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert (
        said.count("examples valid") == 2 and "report.html" in said and "mass fraction x px" in said
    )
    for name in demo.MODELS:
        result = load_evaluation(tmp_path / "new" / name)
        assert len(result) == 4 and not result.rejected
        assert result.accuracy_at(0.3) < result.clean_accuracy
    assert 1e5 < (tmp_path / "new" / "report.html").stat().st_size < 2e6


def test_a_failed_audit_ends_the_demo_as_it_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_false_claim(*given: Any, **named: Any) -> Evaluation:
        return replace(
            evaluate(*given, **named), rejected=({"index": 0, "eps": 0.1, "reason": "far"},)
        )

    monkeypatch.setattr(demo, "MODELS", ("mnist-standard",))
    monkeypatch.setattr(demo, "evaluate", with_a_false_claim)
    assert demo.main(["--images", "1", "--out", str(tmp_path / "new")]) == 3
