"""``python -m wball.paper NAME ...``: as ``wball reproduce``, for machines that have only torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from wball.paper import Settings, chosen, draw, overview, run
from wball.paper.page import write
from wball.paper.run import stored
from wball.storage.atomic import FolderInUse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run recipes; 0, or 2 if some could not be made, or 130 if it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m wball.paper", description="Tables and figures of the paper.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="recipes, all, list or page")
    parser.add_argument("--quick", action="store_true", help="minutes on two cores; the numbers mean little")
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--models", type=Path, help="folder with trained models, NAME/NAME.safetensors")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"), help="folder for results")
    parser.add_argument("--images", type=int, help="measure on so many test images")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the recipes")
    parser.add_argument("--no-train", action="store_true", help="leave out models that would have to be trained")
    parser.add_argument("--no-figures", action="store_true", help="write the JSON files only")
    parser.add_argument("--figures-only", action="store_true", help="draw what is stored in --out")
    parser.add_argument("--page", type=Path, default=Path("docs/reproduction.md"), help="the page to write")
    given = parser.parse_args(arguments)
    try:
        settings = Settings(
            given.quick, given.data, given.models, given.device, given.seed, given.out, given.images, not given.no_train
        )
        return perform(given.names, settings, not given.no_figures, given.figures_only, given.page, given.jobs)
    except (ValueError, OSError, ImportError, FolderInUse) as error:
        print(f"wball: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("wball: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130


def perform(
    names: Sequence[str], settings: Settings, figures: bool, figures_only: bool, page: Path, jobs: int = 1
) -> int:
    """What the words on the command line ask for."""
    if "list" in [name.lower() for name in names]:
        print(overview().text())
        return 0
    if "page" in [name.lower() for name in names]:
        if len(names) > 1:
            raise ValueError("page stands alone: it shows every result in --out; give the recipes in another command")
        print("written: " + ", ".join(map(str, write(settings.out, page))))
        return 0
    if figures_only:
        everything = "all" in [name.lower() for name in names]
        drawn = draw(stored(settings.out) if everything else chosen(names), settings.out)
        if not drawn:
            raise FileNotFoundError(f"nothing to draw for {', '.join(names)} in {str(settings.out)!r}")
        print("written: " + ", ".join(map(str, drawn)))
        return 0
    return run(names, settings, figures=figures, jobs=jobs)


if __name__ == "__main__":
    raise SystemExit(main())
