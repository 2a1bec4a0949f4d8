"""Run recipes, keep their results, draw them."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from reproduction import authors, certificates, curves, nominal, page, pictures, timings, trained
from reproduction.recipe import Recipe
from reproduction.workshop import Clock, Settings, Workshop
from wball import provenance
from wball.ball import WassersteinBall
from wball.report.figures import save_figure, style
from wball.storage.files import FolderInUse, locked, read_json, write_json, write_whole

FORMAT = "wball-reproduction/1"

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        nominal.RECIPE,
        timings.RECIPE,
        pictures.SIX_PIXELS,
        pictures.VERSUS,
        pictures.DIGITS,
        curves.MNIST_CURVES,
        curves.CIFAR10_CURVES,
        trained.CIFAR10_TRICKS,
        trained.CIFAR10_EPOCHS,
        trained.EPOCHS,
        pictures.GALLERY,
        authors.RECIPE,
        curves.WINDOW_SIZES,
        pictures.GRID,
        certificates.RECIPE,
    )
}
"""In the order of the paper."""
EXPECTED = (OSError, ValueError, ImportError, FolderInUse)
"""What a line explains: missing data and models, damaged files, a full disk, a folder in use."""


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


def overview() -> str:
    """The recipes, for `list`: name, place in the paper, title; at most 100 columns."""
    rows = [(r.name, re.split("[.,] ", r.place)[0], r.title) for r in RECIPES.values()]
    wide = [max(len(row[k]) for row in rows) + 2 for k in range(2)]
    return "\n".join(
        textwrap.fill(
            f"{name:{wide[0]}}{place:{wide[1]}}{title}", 100, subsequent_indent=" " * sum(wide)
        )
        for name, place, title in rows
    )


def chosen(names: Sequence[str]) -> list[str]:
    """Names of recipes; ``all`` means all of them."""
    named = [recipe(name).name for name in names if name != "all"]
    return list(RECIPES) if "all" in names else list(dict.fromkeys(named))


def reproduce(name: str, settings: Settings, shop: Workshop | None = None) -> dict[str, Any]:
    """Measure one recipe, write ``NAME.json`` into the settings' folder, and return what was
    written.

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
                "earlier_commits": sorted(shop.commits - {shop.commit}),
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
    """The command that makes this result, with placeholders for folders, which mean nothing on
    another machine."""
    words = ["python", "-m", "reproduction", name]
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
            found[name] = _read(path)
    return found


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    wanted = {"format": FORMAT, "recipe": path.stem}
    if not isinstance(content, dict) or not wanted.items() <= content.items():
        raise ValueError(f"{path} is not a result of this version: expected {wanted}; run it again")
    return content


def draw(
    names: Iterable[str], out: Path, kinds: Sequence[str] = ("pdf", "png"), into: Path | None = None
) -> list[Path]:
    """Draw stored results, beside them or ``into`` another folder."""
    paths = []
    for name in names:
        made, path = recipe(name), out / f"{name}.json"
        if made.draw is None:
            continue
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path}; run `python -m reproduction {name} --out {out}` first"
            )
        figure = made.draw(_read(path)["data"])
        for kind in kinds:
            paths.append(save_figure(figure, (into or out) / f"{name}.{kind}", dpi=160))
    return paths


def run(names: Sequence[str], settings: Settings) -> int:
    """Run recipes, print their tables, draw them; 0, or 2 if some could not be made.

    The failure of one recipe does not end the others.
    """
    style()  # if figures cannot be drawn, say so before hours of work
    shop, failed = Workshop(settings), 0
    for name in chosen(names):
        try:
            _make(name, settings, shop)
        except EXPECTED as error:
            print(f"{name} was not made: {error}", file=sys.stderr, flush=True)
            failed = 2
    return failed


def write_page(out: Path, where: Path) -> list[Path]:
    """Write the page of the results in a folder, and its pictures."""
    results = stored(out)
    if not results:
        raise FileNotFoundError(
            f"no results in {str(out)!r}; run `python -m reproduction NAME --out {out}` first"
        )
    paths = draw(results, out, ["png"], where.parent / page.ASSETS)
    write_whole(where, page.text(results, RECIPES).encode())
    return [where, *paths]


def _make(name: str, settings: Settings, shop: Workshop) -> None:
    start = time.perf_counter()
    print(f"{name}: {RECIPES[name].title} ({RECIPES[name].place})", flush=True)
    content = reproduce(name, settings, shop)
    for table in RECIPES[name].tables(content["data"]):
        print("\n" + table.text())
    written = ", ".join(map(str, (settings.out / f"{name}.json", *draw([name], settings.out))))
    print(f"\n  {time.perf_counter() - start:.1f} s; written: {written}\n", flush=True)
