"""Run recipes, keep their results, draw them."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shlex
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from wball import provenance
from wball.ball import WassersteinBall
from wball.inputs import check_count
from wball.paper import (
    authors,
    certificates,
    curves,
    epochs,
    leaderboard,
    leaderboard_page,
    nominal,
    page,
    pictures,
    timings,
    tricks,
)
from wball.paper.recipe import Recipe
from wball.paper.tables import Table
from wball.paper.workshop import Clock, Settings, Workshop
from wball.report.figures import save_figure, style
from wball.storage.atomic import FolderInUse, locked, write_whole
from wball.storage.files import read_json, write_json

FORMAT = "wball-reproduction/1"

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        nominal.RECIPE,
        pictures.SIX_PIXELS,
        pictures.VERSUS,
        pictures.DIGITS,
        curves.MNIST_CURVES,
        curves.CIFAR10_CURVES,
        tricks.RECIPE,
        pictures.GALLERY,
        curves.HEADLINES,
        authors.RECIPE,
        epochs.MNIST_EPOCHS,
        epochs.CIFAR10_EPOCHS,
        curves.WINDOW_SIZES,
        pictures.GRID,
        timings.RECIPE,
        certificates.RECIPE,
        curves.DEFENCES,
    )
}
"""In the order of the paper."""
LONG = ("cifar10-curves", "mnist-curves", "defences", "windows", "certificates")
"""Recipes that processes should begin with."""
ALONE = ("timings",)
"""Recipes that mean nothing while others are at work."""
EXPECTED = (OSError, ValueError, ImportError, FolderInUse)
"""What a line explains: missing data and models, damaged files, a full disk, a folder in use."""


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


def overview() -> Table:
    """The recipes, for `list`."""
    return Table(
        ["recipe", "in the paper", "what"], [[r.name, r.place, r.title] for r in RECIPES.values()]
    )


def chosen(names: Sequence[str]) -> list[str]:
    """Names of recipes; ``all`` stands for all of them."""
    words = [names] if isinstance(names, str) else list(names)
    named = [recipe(name).name for name in words if name.lower() != "all"]
    if not words:
        raise ValueError(f"names is empty: give some of {', '.join(RECIPES)}, or all")
    return list(RECIPES) if len(named) < len(words) else list(dict.fromkeys(named))


def reproduce(name: str, settings: Settings, shop: Workshop | None = None) -> dict[str, Any]:
    """Measure one recipe, write ``NAME.json`` into the settings' folder, and return what was written.

    An interrupted recipe resumes. Several processes may run recipes into the same folder.
    """
    shop = shop or Workshop(settings)
    made = recipe(name)
    shop.begin()
    with locked(settings.out / "parts" / f".{name}"):
        clock = Clock(shop.device)
        data = made.measure(shop)
        x = torch.zeros(1, 1, 28, 28, device=shop.device)
        content = {
            "format": FORMAT,
            "recipe": name,
            "title": made.title,
            "place": made.place,
            "quick": settings.quick,
            "provenance": {
                "command": command(name, settings),
                "commit": shop.commit,
                **(
                    {"earlier_commits": earlier}
                    if (earlier := sorted(shop.commits - {shop.commit}))
                    else {}
                ),
                "device": provenance.device_name(shop.device),
                "kernel": WassersteinBall(0.1).kernel(x),
                "platform": f"{platform.system()} {platform.machine()}",
                "versions": provenance.versions(),
                "seed": settings.seed,
                "date": time.strftime("%Y-%m-%d"),
                "seconds": round(
                    max(clock.seconds(), shop.spent), 1
                ),  # parts may be of an earlier run
            },
            "missing": dict(shop.missing),
            "data": data,
        }
        write_json(settings.out / f"{name}.json", content)
    return content


def command(name: str, settings: Settings) -> str:
    """The command that makes this result, with placeholders for folders, which mean nothing on another machine."""
    words = ["wball", "reproduce", name]
    words += ["--quick"] if settings.quick else []
    words += ["--data-dir", "DATA"] if settings.data is not None else []
    words += ["--models", "MODELS"] if settings.models is not None else []
    words += ["--images", str(settings.images)] if settings.images is not None else []
    words += [] if settings.may_train else ["--no-train"]
    words += ["--device", settings.device, "--seed", str(settings.seed)]
    return shlex.join(words)


def stored(out: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder, in the order of the paper."""
    found = {}
    for name in RECIPES:
        path = out / f"{name}.json"
        if path.is_file():
            found[name] = _read(path, name)
    return found


def _read(path: Path, name: str) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a result of this version: expected the format {FORMAT!r}; run it again"
        )
    if content.get("recipe") != name:
        raise ValueError(
            f"{path} is a result of the recipe {content.get('recipe')!r}; run {name!r} again"
        )
    return content


def draw(
    names: Iterable[str],
    out: str | os.PathLike[str],
    kinds: Sequence[str] = ("pdf", "png"),
    into: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Figures of stored results, beside them or ``into`` another folder. Needs matplotlib, and nothing else."""
    out, paths = Path(out), []
    for name in [names] if isinstance(names, str) else names:
        made, path = recipe(name), out / f"{name}.json"
        if made.draw is None:
            continue
        if not path.is_file():
            raise FileNotFoundError(f"no {path}; run `wball reproduce {name} --out {out}` first")
        figure = made.draw(_read(path, name)["data"])
        for kind in kinds:
            paths.append(save_figure(figure, Path(into or out) / f"{name}.{kind}", dpi=160))
    return paths


def run(names: Sequence[str], settings: Settings, *, figures: bool = True, jobs: int = 1) -> int:
    """Run recipes, print their tables, draw them; 0, or 2 if some could not be made.

    ``jobs`` processes share the recipes (and wait for parts that another one is at); times are measured afterwards.
    """
    check_count("jobs", jobs)
    wanted = chosen(names)
    if figures and any(RECIPES[name].draw is not None for name in wanted):
        style()  # if figures cannot be drawn, say so before hours of work
    if jobs > 1 and len(wanted) > 1:
        return _in_parallel(wanted, settings, figures, jobs)
    shop = Workshop(settings)
    if len(wanted) == 1:
        _make(wanted[0], settings, figures, shop)
        return 0
    failed = [name for name in wanted if not _made(name, settings, figures, shop)]
    if failed:
        print(f"not made: {', '.join(failed)}", flush=True)
    return 2 if failed else 0


def perform(
    names: Sequence[str],
    settings: Settings,
    figures: bool,
    figures_only: bool,
    where: Path,
    jobs: int = 1,
) -> int:
    """What the words on the command line ask for: recipes, ``all``, ``list``, ``page`` or ``leaderboard``."""
    words = [name.lower() for name in names]
    for alone in ("page", "leaderboard"):
        if alone in words and len(words) > 1:
            raise ValueError(f"{alone} stands alone; give the recipes in another command")
    if "list" in words:
        print(overview().text())
        return 0
    if words == ["page"]:
        print("written: " + ", ".join(map(str, write_page(settings.out, where))))
        return 0
    if words == ["leaderboard"]:
        return _make_board(settings)
    if figures_only:
        drawn = draw(stored(settings.out) if "all" in words else chosen(names), settings.out)
        if not drawn:
            raise FileNotFoundError(
                f"nothing to draw for {', '.join(names)} in {str(settings.out)!r}"
            )
        print("written: " + ", ".join(map(str, drawn)))
        return 0
    return run(names, settings, figures=figures, jobs=jobs)


def write_page(out: Path, where: Path) -> list[Path]:
    """Write the page of the results in a folder, and its pictures."""
    results = stored(out)
    if not results:
        raise FileNotFoundError(
            f"no results in {str(out)!r}; run `wball reproduce NAME --out {out}` first"
        )
    paths = draw(results, out, ["png"], where.parent / page.ASSETS)
    write_whole(where, page.text(results, RECIPES).encode())
    return [where, *paths]


def _make_board(settings: Settings) -> int:
    """Every model of the leaderboard into ``leaderboard.json`` in the settings' folder."""
    shop, board = Workshop(settings), settings.out / leaderboard.BOARD.name
    failed = leaderboard.run(leaderboard.available(shop), settings, board, shop=shop)
    content = leaderboard.read(board)
    for table in leaderboard_page.tables(content):
        print("\n" + table.text())
    print(f"\nwritten: {board}" if content["rows"] else "no model was at hand")
    return 2 if failed or not content["rows"] else 0


def _make(name: str, settings: Settings, figures: bool, shop: Workshop) -> None:
    start = time.perf_counter()
    print(f"{name}: {RECIPES[name].title} ({RECIPES[name].place})", flush=True)
    content = reproduce(name, settings, shop)
    for table in RECIPES[name].tables(content["data"]):
        print("\n" + table.text())
    drawn = draw([name], settings.out) if figures else []
    written = ", ".join(str(p) for p in (settings.out / f"{name}.json", *drawn))
    print(f"\n  {time.perf_counter() - start:.1f} s; written: {written}\n", flush=True)


def _made(name: str, settings: Settings, figures: bool, shop: Workshop | None = None) -> bool:
    """Whether a recipe of several could be made: its trouble is not the others'."""
    try:
        _make(name, settings, figures, shop or Workshop(settings))
    except EXPECTED as error:
        print(f"{name} is not made: {error}\n", flush=True)
    except Exception:  # noqa: BLE001 (reported; the others go on)
        traceback.print_exc()
    else:
        return True
    return False


def _in_parallel(wanted: Sequence[str], settings: Settings, figures: bool, jobs: int) -> int:
    alone = [name for name in wanted if name in ALONE]
    shared = sorted(
        (name for name in wanted if name not in ALONE), key=lambda name: name not in LONG
    )
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        try:
            made = list(pool.map(partial(_made, settings=settings, figures=figures), shared))
        except BrokenProcessPool:
            print(
                "a process was killed, perhaps for its memory: fewer --jobs need less, and the same command resumes"
            )
            return 2
        except BaseException:  # an interruption, which may have reached this process alone
            _end([child for child in multiprocessing.active_children() if child not in others])
            raise
    made += [_made(name, settings, figures) for name in alone]
    return 0 if all(made) else 2


def _end_with_parent() -> None:
    """If the command is killed, let go of the folders: it will be given again."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end(processes: Sequence[BaseProcess]) -> None:
    """End processes that may be at hours of work. They lose their current step or batch."""
    for process in processes:
        process.terminate()  # a training saves its state first
    end = time.monotonic() + 10
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
