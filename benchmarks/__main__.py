"""Run the benchmarks and write ``<out>.json``, ``<out>.md`` and ``<out>.png``; ``validity`` audits whole test sets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import oracle, projection, report, validity
from benchmarks.inputs import cifar10, mnist
from benchmarks.timing import machine

PARTS = ("projection", "oracle", "windows", "large", "quality")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["validity"]:
        validity.main(arguments[1:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--data", type=Path, help="folder with MNIST and CIFAR-10 (default: bundled and made-up images)"
    )
    parser.add_argument("--out", type=Path, help="files to write, without ending (default: results/bench_<device>)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each measurement")
    parser.add_argument("--quick", action="store_true", help="small batches only")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", help="a remark to record, such as what else the machine was doing")
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    chip = machine(device)
    sources = [mnist(given.data, device), cifar10(given.data, device)]
    about = report.environment(device, chip, given.seed, [f"{s.name}: {s.origin}" for s in sources], given.data)
    common: dict[str, Any] = {"device": device, "chip": chip, "budget_s": given.seconds, "seed": given.seed}
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        time = row.get("time")
        spent = f"{time.median:.4g} ms" if time is not None else row.get("absent", "")
        print(
            row["work"],
            row.get("images", ""),
            row.get("batch", ""),
            row.get("window", ""),
            row["method"],
            spent,
            flush=True,
        )

    for images in sources:
        if "projection" in given.only:
            sizes = (
                [1, 100, 1000]
                if cuda and not given.quick
                else [1, 100]
                if images.name == "mnist" and not given.quick
                else [1, 10]
            )
            for row in projection.projections(images, sizes, **common):
                show(row)
        windows = [3, 7, 9, 11] if "windows" in given.only else []
        sizes = [] if "oracle" not in given.only else [1, 100, 128, 1000] if cuda else [1, 8, 100]
        for row in oracle.oracles(images, sizes[:2] if given.quick else sizes, windows, **common):
            show(row)
    if "large" in given.only:
        sides = [64, 128, 224] if not given.quick else [64]
        for row in oracle.large(sources[1], sides, 64 if cuda else 1, **common):
            show(row)
    if "quality" in given.only:
        for row in projection.quality(sources[0], device, given.seed):
            show(row)
    remarks = projection.ratios(rows) + ([given.note] if given.note else [])
    out = given.out or Path("results") / f"bench_{device.type}"
    report.write(out, rows, about, remarks)
    print("\n".join(remarks))
    print(f"written: {out}.json, {out}.md, {out}.png")


if __name__ == "__main__":
    main()
