"""``python -m reproduction``: the tables and figures of the paper, their page, and the
leaderboard."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from reproduction import leaderboard, leaderboard_page, run
from reproduction.workshop import Settings, Workshop

DESCRIPTION = """\
Reproduce the tables and figures of the paper.

    python -m reproduction list                            list the recipes
    python -m reproduction mnist-curves --quick            try one of them
    python -m reproduction all --data-dir data --models models --out results/paper
    python -m reproduction figures --out results/paper     draw stored results
    python -m reproduction page --out results/paper        write docs/reproduction.md

    python -m reproduction leaderboard                     print the leaderboard
    python -m reproduction leaderboard NAME --data-dir data    measure models (or all)
    python -m reproduction leaderboard page                write docs/leaderboard.md

A recipe writes NAME.json, NAME.pdf and NAME.png. If interrupted, rerun the same command to resume.
Several commands may share one folder.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0, or 2 if something could not be made."""
    parser = argparse.ArgumentParser(
        prog="python -m reproduction",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "names", nargs="*", default=["list"], metavar="NAME", help="recipes, or a word of the above"
    )
    add("--quick", action="store_true", help="few images, small models; the numbers mean little")
    add("--data-dir", type=Path, help="folder with the data sets (see `wball data`)")
    add("--models", type=Path, help="folder of trained models: NAME/NAME.safetensors")
    add("--images", type=int, help="number of test images (default: the recipe's own)")
    add("--no-train", action="store_true", help="leave out models that would have to be trained")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--seed", type=int, default=0, help="random seed")
    add("--out", type=Path, default=Path("out/reproduction"), help="folder for results and figures")
    add("--board", type=Path, default=leaderboard.BOARD, help="the leaderboard's file")
    add(
        "--minutes", type=float, default=math.inf, help="leaderboard: start nothing after this time"
    )
    add("--parts", nargs="+", default=leaderboard.PARTS, choices=leaderboard.PARTS, help="of rows")
    given = parser.parse_args(arguments)
    try:
        settings = Settings(
            given.quick,
            given.data_dir,
            given.models,
            given.device,
            given.seed,
            given.out,
            given.images,
            not given.no_train,
        )
        if given.names[0] == "leaderboard":
            return show_board(given.names[1:], settings, given)
        return perform(given.names, settings)
    except run.EXPECTED as error:
        print(f"reproduction: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reproduction: interrupted; rerun the same command to resume", file=sys.stderr)
        return 130


def perform(names: Sequence[str], settings: Settings) -> int:
    """Do what the words on the command line ask for."""
    first, *others = names
    if first == "list":
        print(run.overview())
        return 0
    if first == "figures":
        paths = run.draw(others or run.stored(settings.out), settings.out)
    elif first == "page":
        paths = run.write_page(settings.out, Path("docs/reproduction.md"))
    else:
        return run.run(names, settings)
    print(f"written: {', '.join(map(str, paths))}")
    return 0


def show_board(names: Sequence[str], settings: Settings, given: argparse.Namespace) -> int:
    """Print the leaderboard, write its page, or measure models and enter their rows."""
    board: Path = given.board
    if not names:
        tables = leaderboard_page.tables(leaderboard.filled(board))
        print("\n\n".join(table.text() for table in tables))
        return 0
    if list(names) == ["page"]:
        print(f"written: {leaderboard_page.write_page(board)}")
        return 0
    shop = Workshop(settings)
    failed = leaderboard.run(
        leaderboard.available(shop, names),
        settings,
        board,
        shop=shop,
        parts=given.parts,
        minutes=given.minutes,
    )
    print(f"written: {board}" if leaderboard.read(board)["rows"] else "nothing was measured")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
