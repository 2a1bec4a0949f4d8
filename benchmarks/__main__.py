"""Run the benchmarks, write ``<out>.json`` (after every row), ``.md`` and ``.png``.

``calls`` times the public calls, ``growth`` how they grow, ``launches`` counts what they launch on a GPU.
``validity`` audits test sets,
``soundness`` attacks certificates, ``deciding`` runs complete verification, ``agreeing`` compares it with mixed-integer
programs, ``masks`` asks whether models that hide their gradients fool the standard attack, ``public`` compares its
versions on public networks. ``proving`` and ``auditing`` measure what proofs and checks cost, ``exact`` what compiled
exact solvers are worth, ``separation`` how far apart digits are, ``strength`` what an adversary of a few steps misses,
``epochs`` how long training takes, ``defended`` what attacks leave of trained networks, ``streaming`` the memory of
a large data set, ``memory`` that of many images in one call, ``resnet50`` the share of the network at 224 x 224. Each
has a ``--help`` of its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import oracle, projection, report, targets, threads, warm
from benchmarks.inputs import Images, cifar10, mnist
from benchmarks.origin import timed_options
from benchmarks.timing import Time, machine

OTHERS = (
    "calls", "growth", "launches", "validity", "soundness", "proving", "deciding", "agreeing", "auditing", "exact",
    "separation", "strength", "masks", "public", "streaming", "memory", "resnet50", "epochs",
    "defended",
)  # fmt: skip
"""Benchmarks of their own, each a module with a ``main``, which is imported when it is asked for."""

PARTS = ("projection", "threads", "oracle", "windows", "large", "quality")


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = timed_options("", __doc__, seconds=0.5, measured="measurement")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small batches only")
    parser.add_argument(
        "--warm", type=int, metavar="N", default=0, help="compile with N processes first"
    )
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--render", type=Path, metavar="JSON", help="only draw table and plot of an earlier run"
    )
    return parser.parse_args(words)


def measurements(
    given: argparse.Namespace, sources: list[Images], common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Every row, the targets' first."""
    cuda = common["device"].type == "cuda"
    batch = 128 if cuda else 8
    sizes = [1, 10] if given.quick else [1, 100, 1000]
    for images in sources:
        if "oracle" in given.only:
            yield from oracle.oracles(images, sorted({*sizes, batch}), [5], batch, **common)
        if "projection" in given.only:
            yield from projection.projections(images, sizes, **common)
    if "threads" in given.only and not cuda:
        yield from threads.rows(given.data)
    for images in sources:
        if "windows" in given.only:
            yield from oracle.oracles(images, [batch], [3, 7, 9, 11], None, **common)
    if "large" in given.only:
        yield from oracle.large(
            sources[1], [64] if given.quick else [64, 128, 224], 64 if cuda else 1, **common
        )
    if "quality" in given.only:
        yield from projection.quality(sources[0], given.seed)


def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else list(words)
    if words and words[0] in OTHERS:
        importlib.import_module(f"benchmarks.{words[0]}").main(words[1:])
        return
    given = arguments(words)
    if given.render is not None:
        found, about, remarks = report.read(given.render)
        remarks = remarks or targets.targets(found) + projection.ratios(
            found
        )  # none yet where a run was stopped
        report.write(given.render.with_suffix(""), found, about, remarks)
        return
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    if given.warm:
        warm.warm(device, given.warm, given.only)
    chip = machine(device)
    sources = [mnist(given.data, device), cifar10(given.data, device)]
    about = report.environment(
        device, chip, given.seed, [f"{s.name}: {s.origin}" for s in sources], given.data, given.out
    )
    common: dict[str, Any] = {
        "device": device,
        "chip": chip,
        "budget_s": given.seconds,
        "seed": given.seed,
    }
    out = given.out or Path("results") / f"bench_{device.type}"
    rows: list[dict[str, Any]] = []
    for row in measurements(given, sources, common):
        rows.append(row)
        report.save(out, rows, about, [])  # a run that is stopped leaves what it measured
        time = row.get("time")
        spent = f"{time.median:.4g} ms" if isinstance(time, Time) else row.get("absent", "")
        named = (
            row["work"],
            row.get("images", ""),
            row.get("batch", ""),
            row.get("window", ""),
            row["method"],
            row.get("setting", ""),
        )
        print(*named, spent, flush=True)
    remarks = targets.targets(rows) + projection.ratios(rows) + ([given.note] if given.note else [])
    report.write(out, rows, about, remarks)
    print("\n".join(remarks))
    print(
        "written: " + ", ".join(str(out.with_suffix(ending)) for ending in (".json", ".md", ".png"))
    )


if __name__ == "__main__":
    main()
