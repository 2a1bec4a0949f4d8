"""What a newcomer runs first must work: the demonstration and the example in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from wball import demo


@pytest.mark.slow
def test_demo_makes_valid_images_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "demo.png"
    assert demo.main(["--eps", "0.2", "--steps", "2", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.count("10 of 10 valid") == 2
    assert "mass fraction x px" in re.sub(r"\s+", " ", said)
    fooled = [int(n) for n in re.findall(r"(\d+) of 10 fooled", said)]
    assert max(fooled) >= 1


@pytest.mark.slow
def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
