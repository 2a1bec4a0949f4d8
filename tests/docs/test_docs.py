"""What the README and the documentation show must run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page, one after the other, as a reader would paste them."""
    if "report(" in page.read_text(encoding="utf-8"):
        pytest.importorskip("jinja2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WBALL_KERNEL", os.environ.get("WBALL_KERNEL", "auto"))  # restored after
    pasted = ModuleType("page")  # classes of a page must be found again, as those of a notebook are
    monkeypatch.setitem(sys.modules, "page", pasted)
    names = vars(pasted)
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        exec(compile("\n" * line + found[1], page.name, "exec", dont_inherit=True), names)


def test_commands_in_the_documentation_exist() -> None:
    """With every option that is shown: a renamed one must not live on in a page."""
    import typer

    from wball.cli.commands import app

    top: Any = typer.main.get_command(app)
    seen = 0
    for page in PAGES:
        for block in re.findall(
            r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            lines = block.replace("\\\n", " ")
            for words in re.findall(
                r"^(?:torchrun .*? -m wball|wball) ([a-z].*)", lines, re.MULTILINE
            ):
                seen += 1
                given = words.split("#")[0].split()
                shown = top.commands.get(given[0])
                assert shown is not None, f"{page.name} shows `wball {given[0]}`"
                known = {
                    name
                    for option in shown.params
                    for name in (*option.opts, *option.secondary_opts)
                }
                for word in given:
                    if word.startswith("--"):
                        assert word.split("=")[0] in known | {"--help"}, (
                            f"{page.name} shows `wball {words}`"
                        )
    assert seen > 20


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")))
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    setup = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(setup))
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))
    assert "audit" in printed.lower()


def test_what_the_site_is_built_with_is_in_the_repository() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = re.findall(r": ([\w/-]+\.md)$", settings, re.MULTILINE)
    assert len(list((ROOT / "docs").glob("*.md"))) <= 19
    named = re.findall(r"[\w/.-]+\.py\b", settings) + [f"docs/{page}" for page in pages]
    assert "tools/docs/hooks.py" in named and "docs/mathematics.md" in named
    for path in named:
        assert (ROOT / path).is_file(), f"mkdocs.yml names {path}"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None,
    reason="needs mkdocs (pip install wball[docs])",
)
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    # Without --quiet, which also silences the warnings that --strict counts.
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cli" / "index.html").read_text(encoding="utf-8").count("<h2") >= 7
    api = "".join(
        path.read_text(encoding="utf-8") for path in sorted((tmp_path / "api").rglob("*.html"))
    )
    assert ":class:" not in api and ".. math::" not in api and api.count("<math") >= 3
    assert 'from</span> <span class="nn">wball</span>' in api or "from wball import" in re.sub(
        r"<[^>]+>", "", api
    )
    pages = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert not [
        str(path)
        for path, text in pages.items()
        if re.search(r"https?://[^\"]*(mathjax|katex)", text)
    ]


def reference() -> str:
    """The pages of the Python reference."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return "".join(page.read_text(encoding="utf-8") for page in pages)


def documented() -> list[str]:
    """The names that the Python reference shows, and those that pages and the README mention with
    their module."""
    names = re.findall(r"^::: ([\w.]+)$", reference(), re.MULTILINE)
    for page in PAGES:
        names += re.findall(r"`(wball(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    return sorted(set(names))


def test_every_documented_name_resolves() -> None:
    """As written after ``import wball``: a public name, or a module that can be imported and what
    is in it."""
    names = documented()
    assert len(names) > 50 and {"wball.certify", "wball.PGD"} <= {*names}
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found: object = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            except ImportError:  # an optional package
                break
            for attribute in parts[cut:]:
                assert hasattr(found, attribute), f"the documentation names {name}"
                found = getattr(found, attribute)
            break
        else:
            pytest.fail(f"the documentation names {name}")


def test_every_public_name_is_in_the_reference() -> None:
    import wball

    text = reference()
    for name in wball.__all__:
        module = getattr(wball, name).__module__
        assert re.search(rf"\b{name}\b", text) or f"::: {module}\n" in text, (
            f"docs/api lacks {module}.{name}"
        )


def test_formulas_become_mathml() -> None:
    pytest.importorskip("latex2mathml")
    sys.path.insert(0, str(ROOT / "tools" / "docs"))
    from mathml import DISPLAY, formula

    source = "".join(
        path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))
    )
    found = re.findall(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*| *$))*)", source, re.MULTILINE)
    pages = [tex for page in PAGES for tex in DISPLAY.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 10 and pages
    for tex in [tex for _, tex in found] + pages:
        shown = re.sub(r"<[^>]+>", "", formula(tex))
        assert "\\" not in shown, f"{tex} is shown as {shown}"
