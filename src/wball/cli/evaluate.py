"""``wball evaluate``."""

from __future__ import annotations

import sys
import time
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
    files: options.ModelFiles,
    name: options.Names = None,
    pictures: options.DataChoice,
    eps: options.Eps = None,
    minimal: Annotated[
        bool,
        options.threat_option(
            "--minimal", help="find each image's minimal radius, up to the largest --eps"
        ),
    ] = False,
    cost: options.GroundCost,
    attack: options.AttackName = "standard",
    steps: options.Steps = None,
    certify: Annotated[
        bool,
        options.attack_option("--certify", help="also compute certified accuracy (slow on a CPU)"),
    ] = False,
    method: options.Certificate = "anchored",
    require: Annotated[
        list[str] | None,
        options.output_option(
            "--require",
            metavar="EPS:ACCURACY",
            help="end with exit code 7 unless robust accuracy is this high: 0.1:0.8, or certified:0.05:0.6; repeatable",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact", help="verify every distance by exact transport, not only a sample of them"
        ),
    ] = False,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    batch_size: options.Batch = None,
    out: Annotated[
        Path | None,
        options.output_option("--out", "-o", help="folder for results (default: out/MODEL)"),
    ] = None,
    overwrite: options.Overwrite = False,
    report: options.Report = True,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> int:
    """Measure how robust a model is: attack it, audit every example, write results and a report.

    The bundled digits on a bundled model, with a quick attack:

        wball evaluate mnist-standard --limit 50 --attack fast

    Your own model, from a file or from Python code:

        wball evaluate classifier.onnx --data photos/ --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

        wball evaluate mine.py:net --data mnist --data-dir data --eps 0.1,0.2

    A decision for a release: the lower end of the 95 % confidence interval must reach 80 % at radius 0.1:

        wball evaluate classifier.onnx --data photos/ --require 0.1:0.8

    Several models are ranked in one report. If interrupted, rerun the same command to resume.
    `torchrun -m wball.cli evaluate ...` shares the work among processes. The folder gets results.json, results.csv,
    examples.safetensors, report.html and log.jsonl.
    """
    from rich.markup import escape

    from wball.evaluation import Description, Requirement, Running, exit_code
    from wball.evaluation.run import evaluate as run
    from wball.evaluation.run import probe
    from wball.report import why_not, write_csv, write_report

    start, console = time.perf_counter(), open_console(quiet, as_json)
    given = choices.radii(eps) if eps is not None else None
    wanted = [Requirement.parse(text) for text in require or ()]
    certify = certify or any(requirement.certified for requirement in wanted)
    threat = choices.ball(given[-1] if given else 1.0, cost)
    where = choices.device(device)
    with choices.prints_aside(as_json):
        made = load_models(models, files, where, name or ())
        images = choices.load_images(pictures, where, seed, streamed=True)
    base = out or (Path("out") / file_name(made[0][1]) if len(made) == 1 else Path("out"))
    folders = [base if len(made) == 1 else base / file_name(name) for _, name in made]
    searched = choices.attack(attack, threat, steps)
    if report and (missing := why_not()) is not None:  # now, and not after hours
        report = False
        print(f"wball: there will be no report.html: {missing}", file=sys.stderr)
    with choices.prints_aside(as_json):
        for net, _ in made:
            probe(net, images.x, images.y)
        points = given or _radii(made, images, threat, seed, [] if overwrite else folders, console)
        points = sorted(
            {*points, *(requirement.eps for requirement in wanted if requirement.eps > 0)}
        )
        threat, searched = threat.at(points[-1]), searched.at(points[-1])
        _check_clean_accuracy(made, models, images)
    console.print(
        f"{', '.join(name for _, name in made)} on {len(images.x)} images of {images.name}; {attack} attack"
        f"{' for the minimal radius up to' if minimal else ' at'} eps "
        f"{', '.join(f'{r:g}' for r in (points[-1:] if minimal else points))} ({threat.unit}), on {where}",
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
                threat,
                "minimal" if minimal else points,
                searched,
                certify=method if certify else False,
                exact="all" if exact else "sample",
                out=folder,
                seed=seed,
                about=Description(called, images.name, images.classes),
                run=Running(batch_size, overwrite=overwrite, progress=not (quiet or as_json)),
            )
        results.append(result)
        console.print(result.table())
        console.print(printable(result.verdict()), markup=False)
        for warning in result.warnings:
            console.print(f"[yellow]warning[/]: {escape(printable(str(warning)))}")
    for result in results if wanted else ():
        decision = result.check(wanted)
        console.print(
            f"[bold {'green]PASSED' if decision else 'red]FAILED'}[/] {escape(result.name)}"
        )
        console.print(printable(str(decision)), markup=False)
    written = [str(folder) for folder in folders]
    if choices.main_process():
        written.append(str(write_csv(results, base / "results.csv")))
        if report:
            written.append(str(write_report(results, base / "report.html", requirements=wanted)))
    console.print(
        printable(f"written: {', '.join(written)}    ({time.perf_counter() - start:.1f} s)"),
        markup=False,
    )
    if as_json and choices.main_process():
        print_json([_plain(r, wanted) for r in results])
    return exit_code(results, wanted)


def _radii(
    made: list[tuple[Any, str]],
    images: choices.Images,
    threat: Any,
    seed: int,
    folders: list[Path],
    console: Any,
) -> list[float]:
    """Radii for these models and images: those of the evaluation that is there already, or found by a quick search."""
    for folder in folders:
        if (earlier := _earlier_radii(folder)) is not None:
            return earlier
    points = choices.sensible_radii([model for model, _ in made], images, threat, seed)
    console.print(
        f"radii {', '.join(f'{r:g}' for r in points)} chosen by a quick search; --eps sets them",
        markup=False,
    )
    return points


def _earlier_radii(folder: Path) -> list[float] | None:
    from wball.storage.files import read_json

    for path in (folder / "results.json", folder / "batches" / "settings.json"):
        if path.is_file():
            try:
                return [float(r) for r in read_json(path)["settings"]["radii"]]
            except (ValueError, TypeError, KeyError):
                return None  # the evaluation itself says what is wrong with the file
    return None


def _found(folder: Path) -> str | None:
    """What an earlier run left in a folder."""
    if (folder / "results.json").is_file():
        return f"read from {folder}: this evaluation was finished before (--overwrite repeats it)"
    begun = len(list((folder / "batches").glob("batch-*.safetensors")))
    return f"resumed in {folder}: {begun} batches were begun or finished before" if begun else None


def _check_clean_accuracy(
    made: list[tuple[Any, str]], specs: list[str], images: choices.Images
) -> None:
    from wball.zoo import list_models, model_card

    for k, (model, name) in enumerate(made):
        spec = specs[min(k, len(specs) - 1)]
        bundled = spec in list_models() and images.name.startswith(
            ("the bundled", "MNIST", "CIFAR")
        )
        expected = float(model_card(spec)["clean_accuracy"]) if bundled else None
        hint = choices.clean_accuracy_hint(model, images, expected)
        if hint is not None:
            print(f"wball: warning: {name}: {hint}", file=sys.stderr)


def _plain(result: Evaluation, wanted: list[Requirement]) -> dict[str, Any]:
    """The summary of an evaluation for programs."""
    content = {
        "model": result.name,
        **result.summary(),
        "warnings": [w.to_dict() for w in result.warnings],
    }
    if wanted:
        decision = result.check(wanted)
        content |= {
            "passed": bool(decision),
            "requirements": [check.to_dict() for check in decision.checks],
        }
    return content
