"""The tables in the documentation are those of results/."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "results").is_dir(), reason="a source archive has no results"
)


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = ROOT / "tools" / "docs" / "tables.py"
    spec = importlib.util.spec_from_file_location("documentation_tables", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with one page, and a result that can be changed."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("# A project\n")
    shutil.copy(ROOT / "results" / "public_checks.json", tmp_path / "results")
    return tmp_path


def page(root: Path, text: str) -> Path:
    path = root / "docs" / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_page_is_stale(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, (
        f"{capsys.readouterr().out}: run python tools/docs/tables.py"
    )


def test_every_table_is_shown_somewhere(tables: ModuleType) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in tables.pages(ROOT))
    assert all(f"<!-- table: {name} -->" in text for name in tables.TABLES)


def test_a_changed_result_makes_the_page_stale(
    tables: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = page(root, "before\n\n<!-- table: public-checks -->\n<!-- /table -->\n\nafter\n")
    assert tables.main(["--check"], root) == 1 and "docs/page.md" in capsys.readouterr().out
    assert path.read_text().endswith("<!-- /table -->\n\nafter\n"), "a check changes nothing"
    assert tables.main([], root) == 0 and tables.main(["--check"], root) == 0
    first = path.read_text(encoding="utf-8")
    assert first.startswith("before\n\n<!--") and first.endswith("-->\n\nafter\n")
    result = root / "results" / "public_checks.json"
    found = json.loads(result.read_text())
    row = found["rows"][0]
    assert f"| `{row['model']}` | {row['eps']:g} | {row['robust']:.1f} % |" in first
    assert "results/public_checks.json, NVIDIA H200" in first
    row["robust"] = 12.3
    result.write_text(json.dumps(found))
    assert tables.main(["--check"], root) == 1 and tables.main([], root) == 0
    assert f"| `{row['model']}` | {row['eps']:g} | 12.3 % |" in path.read_text(encoding="utf-8")


def test_results_that_are_damaged_or_lack_rows(
    tables: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = root / "results" / "public_checks.json"
    whole = result.read_text()
    page(root, "<!-- table: public-checks -->\n<!-- /table -->\n")
    for damaged in (whole[: len(whole) // 2], json.dumps({"rows": [{}]}), "[]"):
        result.write_text(damaged)
        assert tables.main([], root) == 1
        said = capsys.readouterr().err
        assert "results/public_checks.json does not hold what the table shows" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "<!-- table: nonsense -->\n<!-- /table -->\n",
            "no table 'nonsense'; known are public-checks",
        ),
        ("<!-- table: calls -->\n<!-- /table -->\n", "no results/calls_cuda.json"),
        ("<!-- table: public-checks -->\n| a |\n", "without <!-- /table -->"),
        ("| a |\n<!-- /table -->\n", "without <!-- /table -->"),
        (
            "<!-- table: public-checks -->\n<!-- table: public-checks -->\n<!-- /table -->\n",
            "not closed",
        ),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--check"]], ids=["write", "check"])
def test_blocks_that_cannot_be_filled(
    tables: ModuleType,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    complaint: str,
    arguments: list[str],
) -> None:
    path = page(root, text)
    assert tables.main(arguments, root) == 1
    said = capsys.readouterr().err
    assert said.startswith("docs/page.md: ") and complaint in said
    assert path.read_text() == text


def test_origin_names_file_device_and_quick_runs(tables: ModuleType) -> None:
    about = {"device": "cpu", "platform": "Linux"}
    assert tables.origin({"provenance": about}, "a.json") == "results/a.json, CPU (Linux)"
    assert "quick" in tables.origin({"provenance": about, "quick": True}, "a.json")


def test_numbers_have_three_digits(tables: ModuleType) -> None:
    assert [tables.number(v) for v in (0.0, 0.36672, 3.409, 47.52, 1705.2)] == [
        "0",
        "0.367",
        "3.41",
        "47.5",
        "1,705",
    ]
    assert [tables.duration(v) for v in (0.0372, 0.158, 0.9994, 0.99999, 3.409)] == [
        "37.2 µs", "158 µs", "999 µs", "1.00 ms", "3.41 ms",
    ]  # fmt: skip
