"""``wball evaluate``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wball.cli import choices, options
from wball.cli.app import command, open_console, print_json
from wball.cli.models import load_models
from wball.storage.names import file_name, printable

if TYPE_CHECKING:
    from wball.evaluation import Evaluation, Requirement


@command
def evaluate(
    *,
    models: options.Models,
    eps: options.Eps = None,
    attack: Annotated[
        str, typer.Option("--attack", "-a", metavar="NAME", help=", ".join(options.ATTACKS))
    ] = "standard",
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="EPS:ACCURACY",
            help="exit with code 7 unless robust accuracy is this high, such as 0.1:0.8 or "
            "certified:0.05:0.6; repeatable",
        ),
    ] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="also compute certified accuracy (slow on a CPU)")
    ] = False,
    target: Annotated[
        int | None,
        typer.Option(
            "--target",
            metavar="CLASS",
            help="targeted attack: images are broken if predicted as this class number",
        ),
    ] = None,
    window: options.Window = 5,
    pictures: options.DataChoice,
    files: options.ModelFiles,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="folder for results (default: out/MODEL)"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="discard earlier results in the folder")
    ] = False,
    as_json: options.AsJson = False,
) -> int:
    """Measure robust accuracy, audit every adversarial example, and write a report.

    MODEL is a bundled model (see `wball models`), a file (.pt, .pt2, .onnx, .safetensors, .pth),
    mine.py, mine.py:function or package.module:function. Several models are ranked in one report.

    \b
        wball evaluate mnist-standard --limit 50 --attack fast
        wball evaluate mine.py:net --data mnist --data-dir data --eps 0.1,0.2
        wball evaluate net.pth --architecture mine.py:net --data photos/ --resize 256 --crop 224

    Use --require to gate a release. Here the lower end of the 95 % confidence interval must reach
    80 % at radius 0.0001, which suits photos (0.1 suits digits). Exit codes: 0 passed, 3 an example
    failed the audit, 6 the evaluation is not reliable, 7 a requirement is not met.

    \b
        wball evaluate classifier.onnx --data photos/ --require 0.0001:0.8

    Without --eps, radii are chosen by a quick search. If interrupted, rerun the same command to
    resume. `torchrun -m wball evaluate ...` shares the work among processes.
    """
    from rich.markup import escape

    from wball.evaluation import Requirement, exit_code
    from wball.evaluation.run import evaluate as run
    from wball.evaluation.run import probe
    from wball.report import why_not, write_csv, write_report
    from wball.storage.files import rank_and_size

    start, console = time.perf_counter(), open_console(as_json)
    wanted = [Requirement.parse(text) for text in require or ()]
    given = choices.radii(eps) if eps is not None else None
    threat, where = choices.ball(given[-1] if given else 1.0, window), choices.device(device)
    searched = replace(choices.attack(attack, threat), target=target)
    with choices.prints_aside(as_json):
        made = load_models(models, files, where, seed)
        images = choices.load_images(pictures, where, seed, streamed=True)
        if target is not None:
            others = (images.y != target).nonzero().squeeze(1).tolist()
            images = images.take(others, f"{images.name}, without class {target}")
        for net, _ in made:
            probe(net, images.x, images.y)
    base = out or (Path("out") / file_name(made[0][1]) if len(made) == 1 else Path("out"))
    folders = [base if len(made) == 1 else base / file_name(name) for _, name in made]
    if (missing := why_not()) is not None:
        print(f"wball: there will be no report.html: {missing}", file=sys.stderr)
    points = given or (None if overwrite else _earlier_radii(folders))
    if points is None:
        with choices.prints_aside(as_json):
            points = choices.sensible_radii([net for net, _ in made], images, threat, seed)
        shown = ", ".join(f"{r:g}" for r in points)
        console.print(
            f"radii {shown} were chosen by a quick search (set them with --eps)", markup=False
        )
    points = sorted({*points, *(requirement.eps for requirement in wanted if requirement.eps > 0)})
    console.print(
        f"{', '.join(name for _, name in made)} on {len(images.x)} images of {images.name}; "
        f"{attack} attack at eps {', '.join(f'{r:g}' for r in points)} ({threat.unit}), on {where}",
        markup=False,
    )
    results: list[Evaluation] = []
    for (net, called), folder in zip(made, folders, strict=True):
        if not overwrite and (found := _found(folder)):
            console.print(printable(found), markup=False)
        with choices.prints_aside(as_json):
            result = run(
                net,
                images.x,
                images.y,
                threat.at(points[-1]),
                points,
                searched.at(points[-1]),
                certify=certify or any(requirement.certified for requirement in wanted),
                out=folder,
                seed=seed,
                name=called,
                data=images.name,
                classes=images.classes,
                names=images.sources,
                overwrite=overwrite,
                progress=True,
            )
        results.append(result)
        console.print(result.table())
        console.print(printable(result.verdict()), markup=False)
        for warning in result.warnings:
            console.print(f"[yellow]warning[/]: {escape(printable(str(warning)))}")
    for result in results if wanted else ():
        decision = result.check(wanted)
        colour = "green]PASSED" if decision else "red]FAILED"
        console.print(f"[bold {colour}[/] {escape(result.name)}")
        console.print(printable(str(decision)), markup=False)
    written = [str(folder) for folder in folders]
    if rank_and_size()[0] == 0:  # of the processes of ``torchrun``, one writes
        written.append(str(write_csv(results, base / "results.csv")))
        if missing is None:
            written.append(str(write_report(results, base / "report.html", requirements=wanted)))
        if as_json:
            print_json([_plain(r, wanted) for r in results])
    took = time.perf_counter() - start
    console.print(printable(f"written: {', '.join(written)}    ({took:.1f} s)"), markup=False)
    return exit_code(results, wanted)


def _earlier_radii(folders: list[Path]) -> list[float] | None:
    """The radii of an evaluation that one of the folders already contains."""
    from wball.storage.files import read_json

    for folder in folders:
        for path in (folder / "results.json", folder / "batches" / "settings.json"):
            if path.is_file():
                try:
                    return [float(r) for r in read_json(path)["settings"]["radii"]]
                except (ValueError, TypeError, KeyError):
                    return None  # the evaluation itself reports what is wrong with the file
    return None


def _found(folder: Path) -> str | None:
    """A message about the results that an earlier run left in a folder."""
    if (folder / "results.json").is_file():
        return f"{folder} contains a finished evaluation (--overwrite starts over)"
    begun = len(list((folder / "batches").glob("batch-*.safetensors")))
    return (
        f"resumed in {folder}: {begun} batches were started or finished before" if begun else None
    )


def _plain(result: Evaluation, wanted: list[Requirement]) -> dict[str, Any]:
    """The summary of an evaluation as plain data."""
    content = {
        "model": result.name,
        **result.summary(),
        "warnings": [w.to_dict() for w in result.warnings],
    }
    if wanted:
        decision = result.check(wanted)
        checks = [check.to_dict() for check in decision.checks]
        content |= {"passed": bool(decision), "requirements": checks}
    return content
