"""The long run: ``python -m tests.torture --cases 100000 --seed 0 --jobs 2``.

Progress is kept in a folder (``--out``), so that an interrupted run goes on where it was; after a fix, delete the
blocks that it may change. The summary counts the cases by the commit they ran on. It is written to
``results/torture.json`` at the end, and every minute before that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from wball import provenance

from .blocks import work_off, write_json
from .operations import OPERATIONS

ROOT = Path(__file__).parent.parent.parent
BLOCK = 100  # cases between two notes of progress
KEPT = 50  # findings written out in full


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "torture", help="where progress is kept"
    )
    parser.add_argument("--summary", type=Path, default=ROOT / "results" / "torture.json")
    parser.add_argument(
        "--only", default="", help="operations to run, with commas: what a fix may change"
    )
    parser.add_argument(
        "--images", type=int, default=1, help="so many times as many images in each case"
    )
    options = parser.parse_args()
    only = tuple(filter(None, options.only.split(",")))
    if unknown := set(only) - set(OPERATIONS):
        parser.error(f"--only {', '.join(unknown)}: expected {', '.join(OPERATIONS)}")
    larger = [f"images-{options.images}"] if options.images > 1 else []
    folder = options.out / "-".join([f"seed-{options.seed}", *only, *larger]).replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    todo = [b for b in range(0, options.cases, BLOCK) if not (folder / f"{b}.json").is_file()]
    began, noted = time.time(), 0.0
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        work = [
            pool.submit(
                work_off,
                options.seed,
                b,
                min(b + BLOCK, options.cases),
                only,
                folder,
                options.images,
            )
            for b in todo
        ]
        for done, block in enumerate(as_completed(work), 1):
            block.result()
            if time.time() - noted > 60 or done == len(work):
                noted = time.time()
                summary = _summary(folder, options)
                write_json(options.summary, summary)
                left = (noted - began) / done * (len(work) - done)
                print(
                    f"{summary['cases']} cases, {summary['failed']} failed, {left / 60:.0f} min left",
                    flush=True,
                )
    summary = _summary(folder, options)
    write_json(options.summary, summary)
    print(
        json.dumps(
            {k: summary[k] for k in ("cases", "failed", "nan", "infeasible", "false converged")}
        )
    )
    sys.exit(1 if summary["failed"] else 0)


def _summary(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    operations: Counter[str] = Counter()
    commits: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    worst: dict[str, float] = {}
    failed, seconds, points = [], 0.0, 0
    for path in folder.glob("*.json"):
        part = json.loads(path.read_text(encoding="utf-8"))
        operations.update(part["operations"])
        kinds.update(part["kinds"])
        commits[str(part["commit"])] += sum(part["operations"].values())
        failed += part["failed"]
        seconds += part["seconds"]
        points += part.get("points", 0)  # earlier blocks did not count them
        for name, value in part["worst"].items():
            worst[name] = max(value, worst.get(name, 0.0))
    failed.sort(key=lambda f: f["index"])
    return {
        "command": f"python -m tests.torture --cases {options.cases} --seed {options.seed}"
        + (f" --only '{options.only}'" if options.only else "")
        + (f" --images {options.images}" if options.images > 1 else ""),
        "commits": dict(commits),
        "versions": provenance.versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cases": sum(operations.values()),
        "points": points,
        "asked_for": options.cases,
        "failed": len(failed),
        "nan": kinds["nan"],
        "infeasible": kinds["infeasible"],
        "false converged": kinds["false converged"],
        "kinds": dict(kinds),
        "operations": dict(sorted(operations.items())),
        "worst": worst,
        "processor_seconds": round(seconds, 1),
        "findings": failed[:KEPT],
    }


if __name__ == "__main__":
    main()
