"""What all benchmarks share: options, where a result comes from, how it is kept, and timing."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import wball
from reproduction.workshop import commit
from wball import provenance
from wball.storage.files import write_whole

Row = dict[str, Any]


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=about)
    parser.add_argument("--data", type=Path, help="folder with MNIST and CIFAR-10")
    parser.add_argument("--models", type=Path, help="folder with the weights of public models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", type=Path, help=f"file to write (default: results/{name}.json)")
    parser.add_argument("--again", action="store_true", help="measure rows that the file has, too")
    return parser


class Result:
    """Rows in a file, which is written after every row; a run that was interrupted resumes.

    Rows that the file has are kept, unless ``--again`` is given. Each says at which commit it was
    measured. A file with other ``settings`` is refused.
    """

    def __init__(self, name: str, given: argparse.Namespace, **settings: Any) -> None:
        self.path: Path = given.out or Path("results") / f"{name}.json"
        self.environment = environment(given)
        self.settings, self.rows = settings, list[Row]()
        if self.path.exists() and not given.again:
            before = json.loads(self.path.read_text(encoding="utf-8"))
            for key, wanted in settings.items():
                if before.get(key) != wanted:
                    raise SystemExit(
                        f"{self.path} was made with {key} {before.get(key)!r}, not {wanted!r}: "
                        "choose another --out"
                    )
            self.rows = before["rows"]

    def has(self, **key: Any) -> bool:
        """Whether a row with these values is there."""
        return any(all(row.get(k) == v for k, v in key.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        """Add a row, write the file and print the row."""
        self.rows.append({**row, "commit": self.environment["commit"]})
        self.write()
        print(json.dumps(row), flush=True)

    def write(self) -> None:
        content = {"environment": self.environment, **self.settings, "rows": self.rows}
        write_whole(self.path, (json.dumps(content, indent=1) + "\n").encode())


def environment(given: argparse.Namespace) -> Row:
    """Command, machine, commit and seed. Folders of this machine are replaced by names."""
    images = torch.zeros(1, 1, 28, 28, device=given.device)
    about = provenance.collect(wball.WassersteinBall(1.0), images)
    for path, name in ((given.data, "DATA"), (given.models, "MODELS")):
        if path is not None:
            about["command"] = about["command"].replace(str(path), name)
    for word in sys.argv[1:]:
        if Path(word).is_absolute():
            about["command"] = about["command"].replace(word, Path(word).name)
    return about | {"commit": commit(), "seed": given.seed}


def attempts(
    measure: Callable[..., Row], tasks: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[tuple[tuple[Any, ...], Row | str]]:
    """``measure(*task)`` of each task, or the error that it raised, as they are done."""
    attempt = partial(_attempt, measure)
    if processes == 1:
        yield from ((task, attempt(*task)) for task in tasks)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(attempt, *task): task for task in tasks}
        yield from ((running[done], done.result()) for done in as_completed(running))


def _attempt(measure: Callable[..., Row], *task: Any) -> Row | str:
    try:
        return measure(*task)
    except Exception as error:  # noqa: BLE001 (an error of one model must not end the run)
        return f"{type(error).__name__}: {error}"


def timed(run: Callable[[], Any], device: torch.device, budget: float) -> tuple[Any, Row]:
    """The answer of the last call, and the median of repeated calls, by the clock.

    A call is made once to compile and load what it needs, then for about ``budget`` seconds.
    """
    samples = list[float]()
    answer, first = _clocked(run, device)
    end = time.perf_counter() + budget
    while not samples or (time.perf_counter() < end and len(samples) < 30):
        answer, seconds = _clocked(run, device)
        samples.append(seconds)
    return answer, {
        "seconds": median(samples),
        "repeats": len(samples),
        "first_seconds": first,
    }


def _clocked(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    answer = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return answer, time.perf_counter() - begin


def peak_memory(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that a call requests beyond what was allocated, results included. Only on a GPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)
