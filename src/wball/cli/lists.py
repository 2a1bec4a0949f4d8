"""``wball models``, ``data`` and ``info``: what there is."""

from typing import Annotated

from typer import Argument, Option

from wball.cli import options
from wball.cli.app import command, open_console, print_json, say
from wball.cli.choices import SAMPLES


@command
def models(
    name: Annotated[
        str | None, Argument(hidden=True, autocompletion=options.complete_models)
    ] = None,
) -> int:
    """List models and architectures, or show the card of one model."""
    from rich.table import Table

    from wball.zoo import list_models, model_card, public_models
    from wball.zoo.architectures import architectures

    if name is not None:
        print_json(model_card(name))
        return 0
    bundled = [
        (card["name"], card["dataset"], f"{100 * card['clean_accuracy']:.2f} %", card["summary"])
        for card in map(model_card, list_models())
    ]
    others = [
        (e.name, f"{e.authors} {e.year}", e.licence, e.summary) for e in public_models().values()
    ]
    known = [(a.name, " x ".join(map(str, a.shape)), a.summary) for a in architectures().values()]
    console = open_console()
    for title, head, rows in (
        ("bundled models", ("model", "data", "clean accuracy", ""), bundled),
        (
            "public models by other authors, downloaded on first use",
            ("model", "authors", "licence of the repository", ""),
            others,
        ),
        ("architectures, for --architecture", ("architecture", "images", ""), known),
    ):
        table = Table(*head, title=title, title_justify="left")
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*map(str, row))
        console.print(table)
    return 0


@command
def data(
    where: options.Downloads, name: Annotated[str | None, Argument(hidden=True)] = None
) -> int:
    """Download mnist, fashion-mnist or cifar10; without a name, list the data sets."""
    from rich.table import Table

    from wball.data import dataset_info, datasets
    from wball.fetch import download
    from wball.progress import bar

    console = open_console()
    if name is None:
        table = Table("data set", "images", "classes", "")
        for short, known in {**SAMPLES, **{name: name for name in datasets()}}.items():
            info = dataset_info(known)
            title = info.title if short == known else f"a sample of {info.title}, in the package"
            table.add_row(short, " x ".join(map(str, info.shape)), str(len(info.classes)), title)
        console.print(table)
        return 0
    info = dataset_info(name)
    with bar(info.title, show=console.is_terminal) as shown:

        def show(file: str, done: int, total: int | None) -> None:
            shown.stage(0, file)
            shown.move_to(done / 1e6)
            if total is not None:
                shown.total(total / 1e6)

        folder = download(info.name, where.data_dir, progress=show)
    say(console, f"{info.title} is in {folder}")
    return 0


@command
def info(
    compile_kernels: Annotated[
        bool, Option("--compile", help="compile the CPU kernels now (takes a minute)")
    ] = False,
) -> int:
    """Show versions, devices and kernels on this machine, as JSON for bug reports."""
    from wball import info as installation

    if compile_kernels:
        installation.compile_kernels()
    report = installation.info()
    print_json(report)
    return 0 if report["automatic"] else 1
