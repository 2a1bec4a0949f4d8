"""Reports: evaluations as one self-contained HTML file, which loads nothing from the network."""

from __future__ import annotations

import json
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from wball.evaluation.result import Evaluation, Evaluations
from wball.storage.files import PathLike

if TYPE_CHECKING:
    from wball.evaluation.requirements import Requirements


def write_report(
    evaluations: Evaluation | Evaluations,
    path: PathLike,
    *,
    requirements: Requirements = (),
) -> Path:
    """Write a report on one evaluation, or a comparison of several, and return its path.

    Args:
        evaluations: what to show; several are ranked, and must have radii in the same unit. After
            :func:`wball.explore` the page shows how mass moves as the radius grows.
        path: the file to write, ``.html``; ``.tex`` for a table of robust accuracy in LaTeX.
        requirements: a banner shows whether every evaluation meets them
            (:meth:`wball.Evaluation.check`).
    """
    if (missing := why_not()) is not None:
        raise ImportError(missing)
    import jinja2

    from wball.report.content import make_content
    from wball.report.ranking import latex_table
    from wball.storage.files import write_whole

    path = Path(path)
    evaluations = [evaluations] if isinstance(evaluations, Evaluation) else evaluations
    if path.suffix == ".tex":
        write_whole(path, latex_table(evaluations).encode("utf-8", "surrogateescape"))
        return path
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"path must end in .html or .tex, got {path}")
    content = make_content(evaluations, requirements)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    # File names that the locale cannot decode contain surrogates.
    environment.filters["urlencode"] = lambda text: quote(text, errors="surrogateescape")
    environment.filters["percent"] = lambda part: "–" if part is None else f"{100 * part:.1f} %"
    environment.filters["interval"] = lambda ends: f"{100 * ends[0]:.0f}–{100 * ends[1]:.0f} %"
    environment.filters["number"] = lambda value, digits=4: (
        "–" if value is None else f"{value:.{digits}g}"
    )
    page = environment.from_string(_asset("template.html")).render(
        **{**content, "data": _for_script(content["data"])},
        style=_asset("style.css"),
        script=_asset("app.js"),
    )
    write_whole(path, page.encode("utf-8", "surrogateescape"))
    return path


def write_csv(evaluations: Evaluations, path: PathLike) -> Path:
    """Write accuracies for spreadsheets, one line per model and radius, and return the path.

    ``images.csv`` beside it has one line per model and image, with the image's source.
    """
    from wball.report.ranking import images_csv, ranking_csv
    from wball.storage.files import write_whole

    path = Path(path)
    for file, text in ((path, ranking_csv), (path.with_name("images.csv"), images_csv)):
        write_whole(file, text(evaluations).encode("utf-8", "surrogateescape"))
    return path


def write_junit(
    evaluations: Evaluations,
    path: PathLike,
    requirements: Requirements = (),
) -> Path:
    """Write as JUnit XML whether evaluations are reliable and meet requirements, and return the
    path. Build servers show it beside the tests."""
    from xml.etree import ElementTree

    from wball.storage.files import write_whole

    suites = ElementTree.Element("testsuites")
    for e in evaluations:
        suite = ElementTree.SubElement(suites, "testsuite", name=e.name)
        cases = [("reliable", not e.doubts, "; ".join(map(str, e.doubts)))]
        cases += [(str(c.requirement), c.met, c.reason) for c in e.check(requirements).checks]
        for name, passed, reason in cases:
            case = ElementTree.SubElement(suite, "testcase", classname=e.name, name=name)
            if not passed:
                ElementTree.SubElement(case, "failure", message=reason)
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(sum(not passed for _, passed, _ in cases)))
    write_whole(Path(path), ElementTree.tostring(suites, "utf-8", xml_declaration=True))
    return Path(path)


def why_not() -> str | None:
    """The missing package that reports need, and how to install it; ``None`` if all are
    installed."""
    for name in ("jinja2", "PIL"):
        try:
            import_module(name)
        except ImportError:
            return (
                f"reports need jinja2 and Pillow, and {name} is missing: pip install wball[report]"
            )
    return None


def _asset(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _for_script(data: Any) -> str:
    """Serialise data as JSON that cannot close the script element around it."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
