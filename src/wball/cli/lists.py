"""``wball models``, ``data`` and ``info``: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wball.cli import options
from wball.cli.app import app, command, open_console, print_json
from wball.storage.names import printable


@command
def models(
    name: Annotated[
        str | None,
        typer.Argument(help="show this model's card", autocompletion=options.complete_models),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """List the bundled models, public models of others, and the architectures for --weights and --architecture."""
    from rich.table import Table

    from wball.models import architectures
    from wball.zoo import list_models, model_card, public_models

    if name is not None:
        print_json(model_card(name))
        return 0
    cards = [model_card(n) for n in list_models()]
    if as_json:
        public = [entry.card() for entry in public_models().values()]
        print_json({"models": cards, "public": public, "architectures": list(architectures())})
        return 0
    console, table = (
        open_console(False, False),
        Table("model", "data", "clean accuracy", "", title="bundled models", title_justify="left"),
    )
    for card in cards:
        table.add_row(
            str(card["name"]),
            card["dataset"],
            f"{100 * card['clean_accuracy']:.2f} %",
            str(card.get("summary", "")),
        )
    console.print(table)
    title = "public models of others, downloaded from their repositories on first use (`wball models NAME` names them)"
    table = Table(
        "model", "authors", "licence of the repository", "", title=title, title_justify="left"
    )
    table.columns[0].no_wrap = True
    for entry in public_models().values():
        table.add_row(entry.name, f"{entry.authors} {entry.year}", entry.licence, entry.summary)
    console.print(table)
    table = Table(
        "architecture",
        "images",
        "",
        title="architectures, for --weights and --architecture",
        title_justify="left",
    )
    for a in architectures().values():
        table.add_row(a.name, " x ".join(map(str, a.shape)), a.summary)
    console.print(table)
    return 0


@command
def data(
    name: Annotated[
        str | None,
        typer.Argument(help="mnist, fashion-mnist or cifar10; without a name, list them"),
    ] = None,
    data_dir: options.DataDir = Path("data"),
    quiet: options.Quiet = False,
) -> int:
    """Download a data set into --data-dir, where the other commands look for it; verified and resumable."""
    from rich.table import Table

    from wball.data import dataset_info, datasets
    from wball.fetch import download
    from wball.progress import bar

    console = open_console(quiet, False)
    if name is None:
        table = Table("data set", "images", "classes", "")
        table.add_row("sample", "1 x 28 x 28", "10", "1,000 MNIST test digits, inside the package")
        for info in datasets().values():
            table.add_row(
                info.name, " x ".join(map(str, info.shape)), str(len(info.classes)), info.title
            )
        console.print(table)
        return 0
    info = dataset_info(name)
    with bar(info.title, unit="MB", show=console.is_terminal and not quiet) as shown:

        def show(file: str, done: int, total: int | None) -> None:
            shown.stage(0, file)
            shown.move_to(done / 1e6)
            if total is not None:
                shown.total(total / 1e6)

        folder = download(info.name, data_dir, progress=show)
    console.print(printable(f"{info.title} is in {folder}"), markup=False)
    return 0


@command
def info(
    compile_kernels: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="compile the CPU kernels first, so that no later call has to (a minute)",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> int:
    """Show versions, devices and kernels on this machine, for bug reports."""
    from wball.info import main as show

    return show([*(["--compile"] if compile_kernels else []), *(["--json"] if as_json else [])])


def _version(show: bool) -> None:
    if show:
        from wball import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    pass
