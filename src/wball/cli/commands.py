"""The commands. Each says what it does in its docstring, which is its ``--help``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wball.cli import choices
from wball.cli.choices import ATTACKS

if TYPE_CHECKING:
    from rich.console import Console

    from wball.evaluation import Evaluation

app = typer.Typer(
    name="wball",
    help="Robustness of image classifiers to moved mass: attacks, certificates, training, reports.",
    epilog="Radii (eps) are in mass fraction x pixels: 0.1 moves 10 % of an image's mass by one pixel, or 5 % by two.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = (
    "a zoo name (see `wball models`), an architecture with --weights, package.module:function or file.py:function"
)


def _complete_models(incomplete: str) -> list[str]:
    from wball.models import architectures
    from wball.zoo import list_models, public_models

    return [name for name in (*list_models(), *public_models(), *architectures()) if name.startswith(incomplete)]


Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP, autocompletion=_complete_models, show_default=False)
]
OneModel = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=_complete_models, show_default=False)
]
Weights = Annotated[
    Path | None, typer.Option("--weights", "-w", help="weights, .safetensors or .pth", rich_help_panel="Model and data")
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        help="sample (bundled digits), mnist, fashion-mnist, cifar10, a folder, or module:function",
        rich_help_panel="Model and data",
    ),
]
Root = Annotated[
    Path, typer.Option("--root", envvar="WBALL_DATA", help="where data sets are", rich_help_panel="Model and data")
]
Split = Annotated[str, typer.Option(help="test or train", rich_help_panel="Model and data")]
Limit = Annotated[
    int | None,
    typer.Option("--limit", "-n", min=1, help="use the first so many images", rich_help_panel="Model and data"),
]
Size = Annotated[
    int | None,
    typer.Option(
        min=1, help="resize the images of a folder to this height and width", rich_help_panel="Model and data"
    ),
]
Grey = Annotated[
    bool, typer.Option("--grey", help="one channel for the images of a folder", rich_help_panel="Model and data")
]
Eps = Annotated[str, typer.Option("--eps", "-e", help="radii, separated by commas", rich_help_panel="Threat model")]
OneEps = Annotated[float, typer.Option("--eps", "-e", min=0.0, help="radius", rich_help_panel="Threat model")]
Window = Annotated[
    int,
    typer.Option(min=1, help="mass moves inside a window of this many pixels (odd)", rich_help_panel="Threat model"),
]
Power = Annotated[
    float, typer.Option("--p", min=0.0, help="cost of a move: distance to the power p", rich_help_panel="Threat model")
]
Mass = Annotated[
    str, typer.Option(help="unit of eps: relative (x the image's mass) or absolute", rich_help_panel="Threat model")
]
AttackName = Annotated[str, typer.Option("--attack", "-a", help=", ".join(ATTACKS), rich_help_panel="Attack")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="gradient steps, where the attack has such a number", rich_help_panel="Attack")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of everything random")]
Batch = Annotated[int | None, typer.Option("--batch-size", min=1, help="images at a time (default: by device)")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON, and nothing else")]


def _console(quiet: bool, as_json: bool) -> Console:
    from rich.console import Console

    return Console(quiet=quiet or as_json, highlight=False, soft_wrap=True)


def _split(text: str) -> Literal["train", "test"]:
    if text == "train":
        return "train"
    if text == "test":
        return "test"
    raise typer.BadParameter(f"--split {text}: expected test or train")


def _print_json(content: Any) -> None:
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


@app.command()
def evaluate(
    models: Models,
    weights: Weights = None,
    data: Data = "sample",
    root: Root = Path("data"),
    split: Split = "test",
    limit: Limit = None,
    size: Size = None,
    grey: Grey = False,
    eps: Eps = "0.05,0.1,0.2,0.3,0.5",
    minimal: Annotated[
        bool, typer.Option("--minimal", help="search each image's smallest radius, up to the largest --eps")
    ] = False,
    window: Window = 5,
    p: Power = 1.0,
    mass: Mass = "relative",
    attack: AttackName = "standard",
    steps: Steps = None,
    certify: Annotated[bool, typer.Option("--certify", help="also prove what can be proved (slow on a CPU)")] = False,
    method: Annotated[
        str, typer.Option(help="of the certificate: interval, dual, crown, anchored, alpha-crown")
    ] = "anchored",
    exact: Annotated[
        bool,
        typer.Option("--exact", help="audit every example by exact transport, not only a sample of those with a plan"),
    ] = False,
    device: Device = "auto",
    seed: Seed = 0,
    batch_size: Batch = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder for results (default: out/MODEL)")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="start afresh, whatever the folder has")] = False,
    report: Annotated[bool, typer.Option(help="write report.html")] = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """How robust is a model to moved mass? Attack, audit every example, write results and a report.

    The bundled digits on a bundled model, with a quick attack:

        wball evaluate mnist-standard --limit 50 --attack fast

    Your own model, the function `net` in `mine.py` returns it:

        wball evaluate mine.py:net --data mnist --root data --eps 0.1,0.2

    Several models are compared in one report. Killed at any moment, the same command goes on where it was, and
    `torchrun -m wball.cli evaluate ...` shares the work. The folder gets results.json, examples.safetensors,
    report.html and log.jsonl.
    """
    from rich.markup import escape

    from wball.evaluation import exit_code
    from wball.evaluation.run import evaluate as run
    from wball.report import why_not

    start, console = time.perf_counter(), _console(quiet, as_json)
    points = choices.radii(eps)
    threat = choices.ball(points[-1], window, p, mass)
    where = choices.device(device)
    with choices.prints_aside(as_json):
        made = [choices.model(spec, weights, where) for spec in models]
        if len({name for _, name in made}) < len(made):
            raise typer.BadParameter("two of the models have the same name; evaluate them into folders of their own")
        x, y, title, classes = choices.data(data, root, _split(split), limit, size, grey, where)
    searched = choices.attack(attack, threat, steps)
    base = out or (Path("out") / choices.folder_name(made[0][1]) if len(made) == 1 else Path("out"))
    if report and (missing := why_not()) is not None:  # now, and not after hours
        report = False
        print(f"wball: there will be no report.html: {missing}", file=sys.stderr)
    console.print(
        f"{', '.join(name for _, name in made)} on {len(x)} images of {title}; {attack} attack"
        f"{' for the smallest radius up to' if minimal else ' at'} eps "
        f"{', '.join(f'{r:g}' for r in (points[-1:] if minimal else points))} ({threat.unit}), on {where}",
        markup=False,
    )
    results: list[Evaluation] = []
    for net, name in made:
        folder = base if len(made) == 1 else base / choices.folder_name(name)
        with choices.prints_aside(as_json):
            result = run(
                net,
                x,
                y,
                threat,
                "minimal" if minimal else points,
                searched,
                certify=method if certify else False,
                exact="all" if exact else "sample",
                out=folder,
                seed=seed,
                batch_size=batch_size,
                name=name,
                data=title,
                classes=classes,
                overwrite=overwrite,
                progress=not (quiet or as_json),
            )
        results.append(result)
        console.print(result.table())
        console.print(result.verdict(), markup=False)
        for warning in result.warnings:
            console.print(f"[yellow]warning[/]: {escape(str(warning))}")
    written = [str(base if len(made) == 1 else base / choices.folder_name(name)) for _, name in made]
    if report and choices.main_process():
        written.append(str(results[0].report(base / "report.html", *results[1:])))
    console.print(f"written: {', '.join(written)}    ({time.perf_counter() - start:.1f} s)", markup=False)
    if as_json and choices.main_process():
        _print_json([{"model": r.name, **r.summary(), "warnings": [w.to_dict() for w in r.warnings]} for r in results])
    return exit_code(results)


@app.command()
def attack(
    model: OneModel,
    weights: Weights = None,
    data: Data = "sample",
    root: Root = Path("data"),
    split: Split = "test",
    limit: Limit = 10,
    size: Size = None,
    grey: Grey = False,
    eps: OneEps = 0.1,
    target: Annotated[int | None, typer.Option(min=0, help="the class that images should be taken for")] = None,
    window: Window = 5,
    p: Power = 1.0,
    mass: Mass = "relative",
    attack: AttackName = "dual-averaging",
    steps: Steps = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="file for the images, .safetensors")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Attack a few images at one radius, with any attack, and audit what comes out.

    For numbers to publish use `wball evaluate`. Here every image is shown:

        wball attack mnist-standard --eps 0.2 --limit 5
    """
    import torch
    from rich.markup import escape
    from rich.table import Table

    from wball.attacks import AttackStatus
    from wball.auditing.audit import audit
    from wball.evaluation.files import write_tensors
    from wball.evaluation.run import probe
    from wball.model import ask, top_class

    if out is not None and out.suffix != ".safetensors":
        raise typer.BadParameter(f"--out {out}: the file must end in .safetensors")
    console = _console(quiet, as_json)
    threat, where = choices.ball(eps, window, p, mass), choices.device(device)
    with choices.prints_aside(as_json):
        net, name = choices.model(model, weights, where)
        x, y, title, _ = choices.data(data, root, _split(split), limit, size, grey, where)
        probe(net, x, y)
        goal = None if target is None else torch.full_like(y, target)
        generator = torch.Generator(where).manual_seed(seed)
        found = choices.attack(attack, threat, steps)(net, x, y, target=goal, generator=generator)
        checked = audit(threat, x, found.images)
        with torch.no_grad():
            read_as = top_class(ask(net, found.images))
    heading = f"{attack} on {name}, {len(x)} images of {title}, eps {eps:g} {threat.unit}"
    table = Table(title=escape(heading), title_justify="left")
    for column in ("image", "label", "read as", f"distance ({threat.unit})", "steps", "audit", "status"):
        table.add_column(column, justify="left" if column == "status" else "right")
    for i in range(len(x)):
        table.add_row(
            str(i),
            str(int(y[i])),
            str(int(read_as[i])),
            f"{float(checked.distance[i]):.4f}",
            str(int(found.n_steps[i])),
            "valid" if bool(checked.valid[i]) else "[red]invalid[/]",
            found.status[i].name.lower().replace("_", " "),
        )
    console.print(table)
    counted = found.success & checked.valid.to(found.success.device)
    clean = torch.tensor([s is not AttackStatus.ALREADY_WRONG for s in found.status])
    console.print(f"{int((counted.cpu() & clean).sum())} of {len(x)} broken; {checked.summary()}", markup=False)
    if out is not None:
        write_tensors(out, {"original": x, "adversarial": found.images, "label": y, "success": counted})
        console.print(f"written: {out}", markup=False)
    if as_json:
        _print_json(
            {
                "model": name,
                "eps": eps,
                "unit": threat.unit,
                "label": y.tolist(),
                "read_as": read_as.tolist(),
                "success": counted.tolist(),
                "status": [s.name.lower() for s in found.status],
                "audit": checked.to_dict(),
            }
        )
    return 0 if checked.all_valid else 3


@app.command()
def certify(
    model: OneModel,
    weights: Weights = None,
    data: Data = "sample",
    root: Root = Path("data"),
    split: Split = "test",
    limit: Limit = 10,
    size: Size = None,
    grey: Grey = False,
    eps: Eps = "0.005,0.01,0.02",
    window: Window = 5,
    p: Power = 1.0,
    mass: Mass = "relative",
    method: Annotated[str, typer.Option(help="interval, dual, crown, anchored, alpha-crown")] = "anchored",
    plans: Annotated[str, typer.Option(help="full (every plan) or window (only moves inside the window)")] = "full",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> int:
    """Prove, without exception, that no image of the ball changes the model's answer.

    Certified accuracy at each radius, for all transport plans unless --plans window is given:

        wball certify mnist-standard --limit 4 --eps 0.005,0.01
    """
    from rich.markup import escape
    from rich.table import Table

    from wball.certificates import certify as prove

    console = _console(quiet, as_json)
    points, where = choices.radii(eps), choices.device(device)
    threat = choices.ball(points[-1], window, p, mass)
    with choices.prints_aside(as_json):
        net, name = choices.model(model, weights, where)
        x, y, title, _ = choices.data(data, root, _split(split), limit, size, grey, where)
    table = Table(title=escape(f"{method} on {name}, {len(x)} images of {title}, {plans} plans"), title_justify="left")
    table.add_column(f"eps ({threat.unit})", justify="right")
    table.add_column("certified", justify="right")
    rows = []
    for r in points:
        with choices.prints_aside(as_json):
            proof = prove(net, x, y, threat.at(r), method, plans)  # type: ignore[arg-type]
        share = float(proof.certified.double().mean())
        rows.append({"eps": r, "certified": share, "margin": proof.margin.tolist()})
        table.add_row(f"{r:g}", f"{100 * share:.1f} %")
    console.print(table)
    if as_json:
        _print_json({"model": name, "unit": threat.unit, "method": method, "plans": plans, "radii": rows})
    return 0


@app.command()
def train(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="a recipe; a wrong name lists them")],
    root: Root = Path("data"),
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for weights, card, metrics and checkpoint")] = Path(
        "out/train"
    ),
    device: Device = "auto",
    seed: Seed = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="instead of the preset's")] = None,
    time_limit: Annotated[float | None, typer.Option(min=0.0, help="seconds; schedules then follow the clock")] = None,
    name: Annotated[str | None, typer.Option(help="of the model, instead of the preset's")] = None,
    limit: Limit = None,
    init: Annotated[Path | None, typer.Option(help="weights to start from: fine-tuning")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="PATH=VALUE, such as adversary.attack.steps=10; repeatable")
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Train a model: standard, adversarial in a Wasserstein ball, or provable.

    A run that was killed goes on when the same command is given again.

        wball train mnist-adversarial --root data --out out/mnist-adversarial
    """
    from wball.data import load_dataset
    from wball.training import distributed, presets
    from wball.training import preset as find
    from wball.training import train as run
    from wball.training.presets import override

    if preset not in presets():
        raise typer.BadParameter(f"unknown preset {preset!r}; there are {', '.join(presets())}")
    config = find(preset, seed=seed)
    given = [choices.setting(c) for c in change or []]
    given += [(k, v) for k, v in (("epochs", epochs), ("name", name)) if v is not None]
    for path, value in given:
        config = override(config, path, value)
    with distributed.launched(str(choices.device(device).type)) as here:
        x, y = load_dataset(config.dataset, root, "train", device=here)
        tests = load_dataset(config.dataset, root, "test", device=here)

        def say(record: dict[str, Any]) -> None:
            if not quiet:
                print(_epoch(record), flush=True)

        data = x[:limit], y[:limit]
        run(config, data, tests, init=init, out=out, device=here, time_limit=time_limit, on_epoch=say)
        if distributed.current().main and not quiet:
            print(f"written: {out / config.name}.safetensors", flush=True)
    return 0


def _epoch(record: dict[str, Any]) -> str:
    """An epoch's record for people."""
    shown = [f"epoch {record['epoch']:3d}", f"{record['seconds']:7.1f} s"]
    shown += [f"loss {record['loss']:.4f}", f"train {100 * record['train_accuracy']:.2f} %"]
    if "clean_accuracy" in record:
        shown.append(f"clean {100 * record['clean_accuracy']:.2f} %")
    if "verified_accuracy" in record:
        shown.append(f"verified {100 * record['verified_accuracy']:.2f} %")
    shown += [
        f"eps {k.rsplit('_', 1)[1]}: {100 * v:.1f} %" for k, v in record.items() if k.startswith("robust_accuracy")
    ]
    if "mean_radius" in record:
        shown.append(f"mean radius {record['mean_radius']:.3f}")
    return "  ".join(shown)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="folders that `wball evaluate` wrote")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the HTML file")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="heading of the report")] = None,
    quiet: Quiet = False,
) -> int:
    """One self-contained HTML file that shows and compares evaluations."""
    from wball.evaluation import load_evaluation
    from wball.report import write_report

    path = write_report([load_evaluation(folder) for folder in folders], out, title=title)
    _console(quiet, False).print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB)", markup=False)
    return 0


@app.command()
def figures(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="folders that `wball evaluate` wrote")],
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the figures")] = Path("figures"),
    kind: Annotated[str, typer.Option("--format", help="pdf, png or svg")] = "pdf",
    quiet: Quiet = False,
) -> int:
    """Figures for papers: accuracy against eps, examples with their perturbations, histogram of radii."""
    from wball.evaluation import load_evaluation
    from wball.report.figures import save_figures

    paths = save_figures([load_evaluation(folder) for folder in folders], out, kind)
    _console(quiet, False).print(f"written: {', '.join(map(str, paths))}", markup=False)
    return 0


def _complete_recipes(incomplete: str) -> list[str]:
    from wball.paper import RECIPES

    return [name for name in (*RECIPES, "all", "list", "page") if name.startswith(incomplete)]


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="recipes, all, list or page", autocompletion=_complete_recipes),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="minutes on two cores; the numbers mean little")] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", "--root", envvar="WBALL_DATA", help="where data sets are (quick: bundled digits)"),
    ] = None,
    models: Annotated[
        Path | None, typer.Option(help="trained models that the zoo lacks: NAME/NAME.safetensors")
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", "--limit", "-n", min=1, help="measure on so many test images")
    ] = None,
    training: Annotated[bool, typer.Option("--train/--no-train", help="train models that are missing")] = True,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="processes that share the recipes")] = 1,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for results and figures")] = Path("out/reproduce"),
    figures: Annotated[bool, typer.Option(help="draw what was measured")] = True,
    figures_only: Annotated[bool, typer.Option("--figures-only", help="draw what is stored, measure nothing")] = False,
    page: Annotated[Path, typer.Option(help="the page that `page` writes")] = Path("docs/reproduction.md"),
) -> int:
    """The tables and figures of the paper: data, figure and command for each.

    See what there is, try one of them small, run them all, make the page:

        wball reproduce list
        wball reproduce mnist-curves --quick
        wball reproduce all --data data --models out/models --out results/paper
        wball reproduce page --out results/paper

    Each recipe writes NAME.json, NAME.pdf and NAME.png; `page` sets them beside the paper's numbers. Killed at any
    moment, the same command goes on where it was, and several commands may share one folder.
    `python -m wball.paper` takes the same words where only torch is installed.
    """
    from wball.paper.__main__ import perform
    from wball.paper.workshop import Settings

    settings = Settings(quick, data, models, device, seed, out, images, training)
    return perform(names or ["list"], settings, figures, figures_only, page, jobs)


@app.command()
def bench(
    device: Device = "auto",
    root: Annotated[Path | None, typer.Option("--root", envvar="WBALL_DATA", help="where data sets are")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="files to write, without ending")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="time spent on each measurement")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="small batches only")] = False,
    seed: Seed = 0,
) -> int:
    """Time projections and attack steps on this machine, beside other codes that are installed.

    The benchmarks belong to the repository and are not installed with the package: run this in a checkout. The table,
    plot and JSON go to results/.
    """
    import importlib

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: packages beside the user
    try:
        run = importlib.import_module("benchmarks.__main__").main
        importlib.import_module("benchmarks.oracle")  # somebody else's package of that name has none
    except ImportError:
        raise typer.BadParameter(
            "there is no benchmarks package here: it is not installed with wball; run `wball bench` in a checkout"
        ) from None
    words = ["--device", choices.device(device).type, "--seconds", str(seconds), "--seed", str(seed)]
    words += ["--data", str(root)] if root is not None else []
    words += ["--out", str(out)] if out is not None else []
    run([*words, *(["--quick"] if quick else [])])
    return 0


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="show this model's card", autocompletion=_complete_models)] = None,
    as_json: AsJson = False,
) -> int:
    """The models that come with the package, public ones of others, and the architectures for --weights."""
    from rich.table import Table

    from wball.models import architectures
    from wball.zoo import list_models, model_card, public_models

    if name is not None:
        _print_json(model_card(name))
        return 0
    cards = [model_card(n) for n in list_models()]
    if as_json:
        public = [entry.card() for entry in public_models().values()]
        _print_json({"models": cards, "public": public, "architectures": list(architectures())})
        return 0
    console, table = (
        _console(False, False),
        Table("model", "data", "clean accuracy", "", title="zoo", title_justify="left"),
    )
    for card in cards:
        table.add_row(
            str(card["name"]), card["dataset"], f"{100 * card['clean_accuracy']:.2f} %", str(card.get("summary", ""))
        )
    console.print(table)
    title = "public models of others, downloaded from their repositories on first use (`wball models NAME` names them)"
    table = Table("model", "authors", "licence of the repository", "", title=title, title_justify="left")
    table.columns[0].no_wrap = True
    for entry in public_models().values():
        table.add_row(entry.name, f"{entry.authors} {entry.year}", entry.licence, entry.summary)
    console.print(table)
    table = Table("architecture", "images", "", title="architectures, for --weights FILE", title_justify="left")
    for a in architectures().values():
        table.add_row(a.name, " x ".join(map(str, a.shape)), a.summary)
    console.print(table)
    return 0


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="mnist, fashion-mnist or cifar10; without it: list them")] = None,
    root: Root = Path("data"),
    quiet: Quiet = False,
) -> int:
    """Download a data set, checked and resumable, to where the other commands look for it."""
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn
    from rich.table import Table

    from wball.data import dataset_info, datasets
    from wball.fetch import download

    console = _console(quiet, False)
    if name is None:
        table = Table("data set", "images", "classes", "")
        table.add_row("sample", "1 x 28 x 28", "10", "1,000 MNIST test digits, inside the package")
        for info in datasets().values():
            table.add_row(info.name, " x ".join(map(str, info.shape)), str(len(info.classes)), info.title)
        console.print(table)
        return 0
    info = dataset_info(name)
    with Progress(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), disable=quiet) as bar:
        tasks: dict[str, TaskID] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=done, total=total)

        folder = download(info.name, root, progress=show)
    console.print(f"{info.title} is in {folder}", markup=False)
    return 0


@app.command()
def info(as_json: AsJson = False) -> int:
    """Versions, devices and kernels on this machine: what to put into a bug report."""
    from wball.info import main as show

    return show(["--json"] if as_json else [])


def _version(show: bool) -> None:
    if show:
        from wball import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass
