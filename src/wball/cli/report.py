"""``wball report``: evaluations as a page, as figures, or joined into one."""

import itertools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from wball.cli.app import command, open_console, say


@dataclass(frozen=True)
class Output:
    """Options for what is written.

    Attributes:
        out (PATH): file to write (.html or .tex), or folder for the joined evaluation
        merge: join evaluations of parts of a data set into one
        figures (DIR): draw figures for papers (a report only with --out)
        kind (NAME): file format of the figures: pdf, png or svg
    """

    out: Path | None = None
    merge: bool = False
    figures: Path | None = None
    kind: str = "pdf"


@command
def report(
    folders: Annotated[list[Path], Argument(metavar="FOLDER", hidden=True)], how: Output
) -> int:
    """Write a report that ranks evaluations: the folders written by `wball evaluate`.

    \b
        wball report out/a out/b --out both.html
        wball report out/a --figures figures --format png

    Join evaluations of parts of a data set, made with the same settings, into one:

    \b
        wball report out/part-1 out/part-2 --merge --out out/all
    """
    from wball.evaluation import exit_code, load_evaluation, merge_evaluations
    from wball.report import write_csv, write_report

    console, code, written, out = open_console(), 0, list[Path](), how.out
    if how.merge:
        folder = out or Path("out/merged")
        if (folder / "results.json").exists():
            raise typer.BadParameter(f"{folder} contains results: choose another folder (--out)")
        results = [merge_evaluations(folders)]
        results[0].save(folder)
        console.print(results[0].table())
        say(console, results[0].verdict())
        written = [folder, write_csv(results, folder / "results.csv")]
        out, code = folder / "report.html", exit_code(results, [])
    else:
        results = [load_evaluation(folder) for folder in folders]
    if out is not None or how.figures is None:
        written.append(write_report(results, out or Path("report.html")))
    for one, other in itertools.pairwise(results):
        with suppress(ValueError):  # other images or radii
            say(console, one.compare(other, one.radii[len(one.radii) // 2]))
    if how.figures is not None:
        from wball.report.figures import save_figures

        written += save_figures(results, how.figures, how.kind)
    say(console, f"written: {', '.join(map(str, written))}")
    return code
