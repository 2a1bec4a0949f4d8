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
    shutil.copy(ROOT / "results" / "bench_cuda.json", tmp_path / "results")
    return tmp_path


def page(root: Path, text: str) -> Path:
    path = root / "docs" / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_page_is_stale(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, (
        f"{capsys.readouterr().out}: run python tools/docs/tables.py"
    )


def test_every_benchmark_table_is_shown_somewhere(tables: ModuleType) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in tables.pages(ROOT))
    for name, source in tables.TABLES.items():
        assert not source.files[0].startswith("bench_") or f"<!-- table: {name} -->" in text, name


def test_a_changed_result_makes_the_page_stale(
    tables: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = page(root, "before\n\n<!-- table: cuda-projection -->\n<!-- /table -->\n\nafter\n")
    assert tables.main(["--check"], root) == 1 and "docs/page.md" in capsys.readouterr().out
    assert path.read_text().endswith("<!-- /table -->\n\nafter\n"), "a check changes nothing"
    assert tables.main([], root) == 0 and tables.main(["--check"], root) == 0
    first = path.read_text(encoding="utf-8")
    assert first.startswith("before\n\n<!--") and first.endswith("-->\n\nafter\n")

    result = root / "results" / "bench_cuda.json"
    found = json.loads(result.read_text())
    for row in found["rows"]:
        if (row["work"], row["method"], row.get("batch")) == ("projection", "released", 100):
            row["time"]["median"] *= 2
    result.write_text(json.dumps(found))
    assert tables.main(["--check"], root) == 1
    assert tables.main([], root) == 0
    one, two = (_factor(text) for text in (first, path.read_text(encoding="utf-8")))
    assert two == pytest.approx(2 * one, abs=1)


def _factor(text: str) -> int:
    """The last cell of our first row without the box."""
    row = next(
        line for line in text.splitlines() if line.startswith("| wball sweeps, triton, no box")
    )
    return int(row.split("|")[-2].replace(",", ""))


def test_figures_are_those_of_the_file(tables: ModuleType) -> None:
    """Against the JSON read anew, without the benchmark's own code."""
    found = json.loads((ROOT / "results" / "bench_cuda.json").read_text())
    times = {
        (r["images"], r["batch"], r["method"]): r["time"]["median"]
        for r in found["rows"]
        if r["work"] == "projection" and "time" in r
    }
    ratio = (
        times["cifar10", 100, "released"] / times["cifar10", 100, "wball sweeps, triton, no box"]
    )
    shown = tables.TABLES["cuda-projection"].markdown(ROOT / "results")
    part = shown[shown.index("**100 CIFAR-10") : shown.index("**1,000 CIFAR-10")]
    assert _factor(part) == round(ratio)
    about = found["environment"]
    assert shown.endswith(
        f"<small>results/bench_cuda.json, {about['device']}, commit {about['commit'][:7]}</small>"
    )
    verdicts = tables.TABLES["cuda-targets"].markdown(ROOT / "results").splitlines()
    said = [line for line in found["remarks"] if line.startswith(("reached", "not reached"))]
    assert len(verdicts) == len(said) + 4  # two lines of head, a blank one, the origin
    assert sum("**not reached" in line for line in verdicts) == sum(
        line.startswith("not") for line in said
    )


def test_results_that_are_damaged_or_lack_rows(
    tables: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, whole = (
        root / "results" / "bench_cuda.json",
        (ROOT / "results" / "bench_cuda.json").read_text(),
    )
    page(root, "<!-- table: cuda-oracle-window -->\n<!-- /table -->\n")
    for damaged in (whole[: len(whole) // 2], json.dumps({**json.loads(whole), "rows": []}), "[]"):
        result.write_text(damaged)
        assert tables.main([], root) == 1
        said = capsys.readouterr().err
        assert (
            "results/bench_cuda.json does not hold what the table shows" in said
            and said.count("\n") == 1
        )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "<!-- table: nonsense -->\n<!-- /table -->\n",
            "no table 'nonsense'; known are cuda-oracle-batch",
        ),
        ("<!-- table: cpu-targets -->\n<!-- /table -->\n", "no results/bench_cpu.json"),
        ("<!-- table: cuda-targets -->\n| a |\n", "without <!-- /table -->"),
        ("| a |\n<!-- /table -->\n", "without <!-- /table -->"),
        (
            "<!-- table: cuda-targets -->\n<!-- table: cuda-targets -->\n<!-- /table -->\n",
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


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (
            {"device": "cpu", "platform": "Linux", "commit": "0123456789"},
            "CPU (Linux), commit 0123456",
        ),
        (
            {"device": "A card", "commit": "0123456789 with local changes"},
            "A card, commit 0123456 with local changes",
        ),
        (
            {"device": "A card", "commit": "0123456789", "note": "in parts"},
            "A card, commit 0123456; in parts",
        ),
    ],
)
def test_origin_says_device_commit_and_what_else_is_known(
    tables: ModuleType, about: dict[str, str], words: str
) -> None:
    assert tables.origin({"provenance": about}, "a.json") == f"results/a.json, {words}"
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
    assert [tables.factor(v) for v in (0.18, 5.42, 9.96, 1258.2)] == ["0.2", "5.4", "10", "1,258"]
