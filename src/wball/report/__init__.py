"""Reports: one HTML file that shows evaluations and needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wball.evaluation.result import Evaluation


def write_report(
    evaluations: Sequence[Evaluation], path: str | os.PathLike[str], *, title: str | None = None, images: int = 200
) -> Path:
    """Write a report on one evaluation, or on several that are to be compared, and return its path.

    Args:
        evaluations: what to show; if several, they must share a unit of radii.
        path: the file to write, ``.html``.
        title: its heading.
        images: how many images the gallery shows at most, all evaluations together.
    """
    if (missing := why_not()) is not None:
        raise ImportError(missing)
    import jinja2
    from plotly.offline import get_plotlyjs

    from wball.report.content import make_content
    from wball.storage.atomic import write_whole

    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise ValueError(f"path must end in .html, got {path}")
    content = make_content(evaluations, title, images)
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["percent"] = lambda share: "–" if share is None else f"{100 * share:.1f} %"
    environment.filters["number"] = lambda value, digits=4: "–" if value is None else f"{value:.{digits}g}"
    page = environment.from_string(_asset("template.html")).render(
        **{**content, "data": _for_script(content["data"])},
        style=_asset("style.css"),
        script=_asset("app.js"),
        plotly=get_plotlyjs(),
    )
    # Names of files that the locale has no letters for come as stand-ins of their bytes.
    write_whole(path, page.encode("utf-8", "surrogateescape"))
    return path


def why_not() -> str | None:
    """What to install before reports can be written; ``None`` if nothing is missing."""
    for name in ("jinja2", "plotly", "PIL"):
        try:
            import_module(name)
        except ImportError:
            return f"reports need jinja2, plotly and Pillow, and {name} is missing: pip install wball[report]"
    return None


def _asset(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")


def _for_script(data: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
