"""``wball report`` and ``wball figures``: results for people to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wball.cli import options
from wball.cli.app import command, open_console
from wball.storage.names import printable


@command
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="folders written by `wball evaluate`")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="the HTML file")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="heading of the report")] = None,
    quiet: options.Quiet = False,
) -> int:
    """Write one self-contained HTML file that shows and ranks evaluations."""
    from wball.evaluation import load_evaluation
    from wball.report import write_report

    path = write_report([load_evaluation(folder) for folder in folders], out, title=title)
    open_console(quiet, False).print(
        printable(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)"), markup=False
    )
    return 0


@command
def figures(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="folders written by `wball evaluate`")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the figures")] = Path(
        "figures"
    ),
    kind: Annotated[str, typer.Option("--format", help="pdf, png or svg")] = "pdf",
    quiet: options.Quiet = False,
) -> int:
    """Draw figures for papers: accuracy against eps, examples with their perturbations, distances of examples."""
    from wball.evaluation import load_evaluation
    from wball.report.figures import save_figures

    paths = save_figures([load_evaluation(folder) for folder in folders], out, kind)
    open_console(quiet, False).print(
        printable(f"written: {', '.join(map(str, paths))}"), markup=False
    )
    return 0
