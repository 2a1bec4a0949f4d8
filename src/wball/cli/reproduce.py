"""``wball reproduce`` and ``wball bench``: the figures of the paper and of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from wball.cli import choices, options
from wball.cli.app import command


def _complete_recipes(incomplete: str) -> list[str]:
    from wball.paper.run import RECIPES

    return [
        name
        for name in (*RECIPES, "all", "list", "page", "leaderboard")
        if name.startswith(incomplete)
    ]


@command
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="recipes, all, list, page or leaderboard",
            autocompletion=_complete_recipes,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a trial of a few minutes; not for publication")
    ] = False,
    data_dir: options.AnyDataDir = None,
    models: Annotated[
        Path | None,
        typer.Option(help="folder of trained models that are not bundled: NAME/NAME.safetensors"),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            "--images", "--limit", "-n", min=1, help="number of test images to measure on"
        ),
    ] = None,
    training: Annotated[
        bool, typer.Option("--train/--no-train", help="train models that are missing")
    ] = True,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="number of processes")] = 1,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for results and figures")] = Path(
        "out/reproduce"
    ),
    figures: Annotated[bool, typer.Option(help="draw figures of the results")] = True,
    figures_only: Annotated[
        bool, typer.Option("--figures-only", help="draw figures of stored results, measure nothing")
    ] = False,
    page: Annotated[Path, typer.Option(help="the page written by `page`")] = Path(
        "docs/reproduction.md"
    ),
) -> int:
    """Reproduce the tables and figures of the paper.

    List the recipes, try one, run all of them, write the page:

        wball reproduce list
        wball reproduce mnist-curves --quick
        wball reproduce all --data-dir data --models out/models --out results/paper
        wball reproduce page --out results/paper

    Each recipe writes NAME.json, NAME.pdf and NAME.png; `page` compares them with the paper's numbers; `leaderboard`
    writes leaderboard.json. If interrupted, rerun the same command to resume. Several commands may share one folder.
    """
    from wball.paper.run import perform
    from wball.paper.workshop import Settings

    settings = Settings(quick, data_dir, models, device, seed, out, images, training)
    return perform(names or ["list"], settings, figures, figures_only, page, jobs)


@command
def bench(
    device: options.Device = "auto",
    data_dir: options.AnyDataDir = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="files to write, without suffix")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="seconds per measurement")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="small batches only")] = False,
    seed: options.Seed = 0,
) -> int:
    """Time projections and attack steps on this machine, and other packages if installed.

    The benchmarks belong to the repository and are not installed with the package: run this in a clone. The table,
    plot and JSON go to results/.
    """
    import importlib

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: packages beside the user
    try:
        run = importlib.import_module("benchmarks.__main__").main
        importlib.import_module(
            "benchmarks.oracle"
        )  # somebody else's package of that name has none
    except ImportError:
        raise typer.BadParameter(
            "there is no benchmarks package here: it is not installed with wball; run `wball bench` in a clone"
        ) from None
    words = [
        "--device",
        choices.device(device).type,
        "--seconds",
        str(seconds),
        "--seed",
        str(seed),
    ]
    words += ["--data", str(data_dir)] if data_dir is not None else []
    words += ["--out", str(out)] if out is not None else []
    run([*words, *(["--quick"] if quick else [])])
    return 0
