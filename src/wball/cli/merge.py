"""``wball merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wball.cli import options
from wball.cli.app import command, open_console, print_json
from wball.storage.names import printable


@command
def merge(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PART...", help="folders written by `wball evaluate`")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the joined results")] = Path(
        "out/merged"
    ),
    overwrite: options.Overwrite = False,
    report: options.Report = True,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> int:
    """Join evaluations of parts of a data set, made apart with the same settings, into one.

        wball evaluate model.onnx --data part-1/ --eps 0.1 --out out/1

        wball evaluate model.onnx --data part-2/ --eps 0.1 --out out/2

        wball merge out/1 out/2 --out out/all

    Parts that differ in model, threat model, radii, attack, certificate, seed or versions are refused, and so are
    parts with the same images.
    """
    from wball.evaluation import exit_code, merge_evaluations
    from wball.evaluation.result import RESULTS
    from wball.report import why_not, write_csv, write_report

    if (out / RESULTS).exists() and not overwrite:
        raise typer.BadParameter(
            f"{out} contains results: choose another folder, or use --overwrite"
        )
    result = merge_evaluations(parts)
    result.save(out)
    console = open_console(quiet, as_json)
    console.print(result.table())
    console.print(printable(result.verdict()), markup=False)
    written = [str(out), str(write_csv([result], out / "results.csv"))]
    if report and why_not() is None:
        written.append(str(write_report([result], out / "report.html")))
    console.print(printable(f"written: {', '.join(written)}"), markup=False)
    if as_json:
        print_json({"model": result.name, **result.summary()})
    return exit_code([result], [])
