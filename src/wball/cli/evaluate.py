"""``wball evaluate``."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wball.cli import choices, options
from wball.cli.app import command, open_console, say
from wball.cli.models import load_models
from wball.storage.names import file_name, printable

if TYPE_CHECKING:
    from rich.console import Console

    from wball.ball import WassersteinBall
    from wball.evaluation import Evaluation, Requirement
    from wball.model import Model


@dataclass(frozen=True)
class Results:
    """Options for the results.

    Attributes:
        out (DIR): folder for results (default: out/MODEL)
        overwrite: discard earlier results in the folder
        as_json: print the result as JSON and nothing else
    """

    out: Path | None = None
    overwrite: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Question(options.Threat):
    """Options for what is asked: radii, attack, requirements, certificate.

    Attributes:
        eps (X,...): radii, such as 0.05,0.1,0.2
        attack (NAME): standard, fast, dual-averaging, pgd, frank-wolfe
        require (EPS:...): exit with code 7 unless robust accuracy at EPS is high enough: 0.1:0.8
            for 80 %, certified:0.05:0.6, or 0.1:out/baseline for not worse than that evaluation;
            repeatable
        certify: also compute certified accuracy (slow on a CPU)
        target (CLASS): targeted attack: images are broken if predicted as this class number
    """

    eps: str | None = None
    attack: str = "standard"
    require: list[str] | None = None
    certify: bool = False
    target: int | None = None


@dataclass(frozen=True)
class Computation(options.Machine):
    """Options for the computation, which hardly change results.

    Attributes:
        batch_size (N): images at a time (default: by the model)
    """

    batch_size: int | None = None


@command
def evaluate(
    *,
    models: options.Models,
    how: Question,
    pictures: options.DataChoice,
    files: options.ModelFiles,
    machine: Computation,
    results: Results,
) -> tuple[int, Any]:
    """Measure robust accuracy, audit every adversarial example, and write a report.

    MODEL is a bundled model (see `wball models`), a file (.pt, .pt2, .onnx, .safetensors, .pth),
    mine.py, mine.py:function or package.module:function. Several models are ranked in one report.

    \b
        wball evaluate mnist-standard --limit 50 --attack fast
        wball evaluate mine.py:net --data mnist --data-dir data --eps 0.1,0.2
        wball evaluate net.pth --architecture mine.py:net --data photos/ --resize 256 --crop 224

    Use --require to gate a release: here the lower end of the 95 % confidence interval must reach
    80 % at radius 0.0001, which suits photos (0.1 suits digits), and the model must not be less
    robust there than an evaluation of the same images in the folder baseline/. The decisions are
    also written to junit.xml, and in GitHub workflows as annotations.

    \b
        wball evaluate new.onnx --data photos/ --require 0.0001:0.8 --require 0.0001:baseline/

    Exit codes: 0 done and requirements met; 2 wrong arguments or inputs; 3 an example failed the
    audit; 4 the folder is in use; 5 disk, file or memory error; 6 the evaluation is not reliable;
    7 a requirement is not met; 70 an error in wball; 130 interrupted.

    Without --eps, radii are chosen by a quick search. If interrupted, rerun the same command to
    resume. `torchrun -m wball evaluate ...` shares the work among processes.
    """
    from wball.evaluation import exit_code
    from wball.report import why_not

    start, console = time.perf_counter(), open_console(results.as_json)
    wanted = _requirements(how)
    given = choices.radii(how.eps) if how.eps is not None else None
    threat = choices.ball(given[-1] if given else 1.0, how)
    searched, where = choices.attack(how.attack, threat), choices.device(machine.device)
    made = load_models(models, files, where, machine.seed)
    images = choices.load_images(pictures, where, machine.seed, streamed=True)
    if how.target is not None:
        others = (images.y != how.target).nonzero().squeeze(1).tolist()
        images = images.take(others, f"{images.name}, without class {how.target}")
    _check_inputs(made, images, wanted, threat)
    base = results.out or (Path("out") / file_name(made[0][1]) if len(made) == 1 else Path("out"))
    folders = [base if len(made) == 1 else base / file_name(name) for _, name in made]
    if (missing := why_not()) is not None:
        print(f"wball: there will be no report.html: {missing}", file=sys.stderr)
    points = given or (None if results.overwrite else _earlier_radii(folders))
    if points is None:
        points = choices.sensible_radii([net for net, _ in made], images, threat, machine.seed)
        say(console, f"radii {_listed(points)} were chosen by a quick search (set them with --eps)")
    points = sorted({*points, *(requirement.eps for requirement in wanted if requirement.eps > 0)})
    say(
        console,
        f"{', '.join(name for _, name in made)} on {len(images.x)} images of {images.name}; "
        f"{how.attack} attack at eps {_listed(points)} ({threat.unit}), on {where}",
    )
    settings = {
        "radii": points,
        "attack": replace(searched, target=how.target).at(points[-1]),
        "certify": how.certify or any(requirement.certified for requirement in wanted),
        "seed": machine.seed,
        "batch_size": machine.batch_size,
    }
    found = [
        _evaluate(model, name, folder, images, results, settings)
        for (model, name), folder in zip(made, folders, strict=True)
    ]
    written = [*folders, *_write(found, base, wanted)]
    _print_decisions(found, wanted, console)
    took = time.perf_counter() - start
    say(console, f"written: {', '.join(map(str, written))}    ({took:.1f} s)")
    content = [_plain(result, wanted) for result in found] if _is_first() else None
    return exit_code(found, wanted), content


def _listed(radii: list[float]) -> str:
    return ", ".join(f"{r:g}" for r in radii)


def _is_first() -> bool:
    """Whether this is the process of ``torchrun`` that writes and prints."""
    from wball.storage.files import rank_and_size

    return rank_and_size()[0] == 0


def _requirements(how: Question) -> list[Requirement]:
    """The requirements. A baseline is read now, because hours later is too late."""
    from wball.evaluation import Requirement, load_evaluation

    wanted = [Requirement.parse(text) for text in how.require or ()]
    for requirement in wanted:
        if requirement.baseline is not None:
            load_evaluation(requirement.baseline).accuracy_at(requirement.eps)
    return wanted


def _check_inputs(
    made: list[tuple[Model, str]],
    images: choices.LoadedImages,
    wanted: list[Requirement],
    threat: WassersteinBall,
) -> None:
    """Check that models take the images, and that baselines were evaluated on them."""
    from wball.evaluation import load_evaluation
    from wball.evaluation.run import probe
    from wball.evaluation.stream import open_stream

    for net, _ in made:
        probe(net, images.x, images.y)
    baselines = {r.baseline for r in wanted if r.baseline is not None}
    if not baselines:
        return
    stream = open_stream(
        images.x, None if hasattr(images.x, "survey") else images.y, None, threat.box
    )
    digest = stream.survey()[0]
    for folder in sorted(baselines):
        if load_evaluation(folder).settings["data"]["sha256"] != digest:
            raise typer.BadParameter(f"--require: {folder} is an evaluation of different images")


def _evaluate(
    model: Model,
    name: str,
    folder: Path,
    images: choices.LoadedImages,
    results: Results,
    settings: dict[str, Any],
) -> Evaluation:
    """Evaluate one model, and print the outcome."""
    from rich.markup import escape

    from wball import evaluation
    from wball.report import why_not

    console, ball = open_console(results.as_json), settings["attack"].ball
    if not results.overwrite and (found := _found(folder)):
        say(console, found)
    result = evaluation.evaluate(
        model,
        images.x,
        images.y,
        ball,
        out=evaluation.Storage(folder, results.overwrite),
        name=evaluation.Names(name, images.name, images.classes, images.sources),
        progress=True,
        **settings,
    )
    if why_not() is None and not result.explorer and _is_first():
        result = evaluation.explore(result, model, images.x, images.y, ball=ball)
        result.save_explorer(folder)
    console.print(result.table())
    say(console, result.verdict())
    for warning in result.warnings:
        console.print(f"[yellow]warning[/]: {escape(printable(str(warning)))}")
    return result


def _write(found: list[Evaluation], base: Path, wanted: list[Requirement]) -> list[Path]:
    """Write the tables, the report and the decisions, in one process of ``torchrun``."""
    from wball.report import why_not, write_csv, write_junit, write_report

    if not _is_first():
        return []
    written = [write_csv(found, base / "results.csv")]
    if why_not() is None:
        written.append(write_report(found, base / "report.html", requirements=wanted))
    if wanted:
        written.append(write_junit(found, base / "junit.xml", wanted))
    return written


def _print_decisions(found: list[Evaluation], wanted: list[Requirement], console: Console) -> None:
    """Print whether the requirements are met; in a GitHub workflow, failures as annotations."""
    from rich.markup import escape

    for result in found if wanted else ():
        decision = result.check(wanted)
        colour = "green]PASSED" if decision else "red]FAILED"
        console.print(f"[bold {colour}[/] {escape(result.name)}")
        say(console, decision)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for check in decision.checks:
                if not check.met:
                    said = printable(f"{result.name}: {check.reason}").replace("%", "%25")
                    print(f"::error title=wball::{said}", file=sys.stderr)


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
        "warnings": [*map(asdict, result.warnings)],
    }
    if wanted:
        decision = result.check(wanted)
        checks = [*map(asdict, decision.checks)]
        content |= {"passed": bool(decision), "requirements": checks}
    return content
