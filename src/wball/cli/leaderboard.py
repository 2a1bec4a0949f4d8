"""``wball leaderboard``: show the board, add a model to it, write its page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wball.cli import options
from wball.cli.app import Command, Group, app

board = typer.Typer(
    cls=Group,
    help="Public models and ours under one protocol: show the board, add a model, write the page.",
    invoke_without_command=True,
    rich_markup_mode="markdown",
)

File = Annotated[Path, typer.Option("--board", help="the leaderboard's file")]
BOARD = Path("results/leaderboard.json")


@board.callback()
def show(context: typer.Context, file: File = BOARD) -> int:
    """Print the leaderboard: public models and ours, robust and certified accuracies under one protocol."""
    if context.invoked_subcommand is not None:
        return 0
    from wball.paper.leaderboard import read
    from wball.paper.leaderboard_page import tables

    content = read(file)
    if not content["rows"]:
        raise FileNotFoundError(
            f"no rows in {file}; run `wball leaderboard add NAME --data-dir DATA` first"
        )
    print("\n\n".join(table.text() for table in tables(content)))
    return 0


@board.command(cls=Command)
def add(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="models (see `wball models`), or cards")
    ],
    data_dir: options.AnyDataDir = None,
    models: Annotated[
        Path | None, typer.Option(envvar="WBALL_MODELS", help="folder of public weights")
    ] = None,
    images: Annotated[
        int | None, typer.Option("--images", "--limit", "-n", min=1, help="number of images")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="20 images, fast attack; the numbers mean little")
    ] = False,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for unfinished parts")] = Path(
        "out/leaderboard"
    ),
    file: File = BOARD,
) -> int:
    """Evaluate and certify models under the protocol, and write their rows.

    A model of the zoo, a public one, or a card (a JSON file that says where the weights are):

        wball leaderboard add wong2019-mnist-adversarial --data-dir data
        wball leaderboard add card.json --data-dir data

    If interrupted, rerun the same command to resume.
    """
    from wball.paper.leaderboard import run, submitted
    from wball.paper.workshop import Settings, Workshop

    settings = Settings(quick, data_dir, models, device, seed, out, images)
    shop = Workshop(settings)
    chosen = [submitted(shop, Path(name)) if name.endswith(".json") else name for name in names]
    failed = run(chosen, settings, file, shop=shop)
    print(f"written: {file}" if len(failed) < len(chosen) else "nothing was measured")
    return 2 if failed else 0


@board.command(cls=Command)
def page(
    file: File = BOARD,
    to: Annotated[Path, typer.Option("--page", help="the page to write")] = Path(
        "docs/leaderboard.md"
    ),
) -> int:
    """Write the page of the board."""
    from wball.paper.leaderboard_page import write_page

    print(f"written: {write_page(file, to)}")
    return 0


app.add_typer(board, name="leaderboard")
