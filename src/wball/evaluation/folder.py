"""The folder of an evaluation: who may write to it, what stands in it already, and how to start over."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from wball.evaluation.result import (
    EXAMPLES,
    EXHIBIT,
    RESULTS,
    same_json,
)
from wball.processes import grouped, rank_and_size
from wball.storage.files import read_json, sealed, unsealed, write_json

BATCHES = "batches"


class OtherSettings(ValueError):
    """The folder contains an evaluation with other settings."""


@contextmanager
def team() -> Iterator[tuple[int, int, Callable[[], None]]]:
    """Which process of how many this is, and how to wait for the others."""
    rank, world = rank_and_size()
    if world == 1:
        yield 0, 1, lambda: None
        return
    patience = timedelta(days=30)  # the slowest decides
    joined = grouped()
    if not joined:
        torch.distributed.init_process_group("gloo", timeout=patience)
    group: Any = torch.distributed.new_group(backend="gloo", timeout=patience) if joined else None
    try:
        yield rank, world, lambda: torch.distributed.barrier(group)
    finally:
        torch.distributed.destroy_process_group(group)


@contextmanager
def result_folder(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    if out is not None:
        path = Path(out)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"out must be a folder, but {path} is a file")
        yield path
        return
    if rank_and_size()[1] > 1:
        raise ValueError(
            "out must be given where several processes share the work: they meet in that folder"
        )
    with tempfile.TemporaryDirectory(prefix="wball-") as folder:
        yield Path(folder)


def begin(folder: Path, run: dict[str, Any], any_batch_size: bool) -> None:
    """Enter the run into the folder, unless it is there already: finished or begun."""
    for path in (folder / RESULTS, folder / BATCHES / "settings.json"):
        if path.is_file():
            with or_overwrite():
                found = read_json(path)
                parts = (
                    [found.get(name) for name in ("settings", "provenance")]
                    if isinstance(found, dict)
                    else [None]
                )
                if not all(isinstance(part, dict) for part in parts):
                    raise ValueError(f"{path} is not an evaluation")
                unsealed(path, found)
            return _same_run(found, run, folder, any_batch_size)
    write_json(folder / BATCHES / "settings.json", sealed(run))


@contextmanager
def or_overwrite() -> Iterator[None]:
    """Files that cannot be read get the way out into their message."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; use --overwrite (overwrite=True) to start over") from error


def _same_run(
    theirs: dict[str, Any], ours: dict[str, Any], folder: Path, any_batch_size: bool
) -> None:
    """Raise unless the folder's evaluation is the one asked for. The command may be written differently."""
    old, new = (
        {**run["settings"], **run["provenance"], "command": None, "keep": None}
        for run in (theirs, ours)
    )
    if any_batch_size and isinstance(old.get("batch_size"), int) and old["batch_size"] > 0:
        new["batch_size"] = old["batch_size"]
    answers = old.pop("answers", None), new.pop("answers")
    for key, value in new.items():
        if not same_json(old.get(key), value):
            raise OtherSettings(
                f"{folder} contains an evaluation with a different {key} ({_short(old.get(key), value)}); "
                "choose another folder, or use --overwrite (overwrite=True) to start over"
            )
    if not _alike(*answers):
        raise OtherSettings(
            f"{folder} contains an evaluation of a different model: with the same weights, its logits for the first "
            "images differ; choose another folder, or use --overwrite (overwrite=True) to start over"
        )


def _alike(old: Any, new: Any) -> bool:
    """Whether one model can have given both answers: they are equal up to what hardware and threads change."""
    if not (isinstance(old, list) and isinstance(new, list)) or old == new:
        return True  # a random model, or a run of an earlier version, gave none
    try:
        one, other = (
            torch.tensor([[math.nan if v is None else v for v in row] for row in a])
            for a in (old, new)
        )
    except (TypeError, ValueError):  # edited by hand
        return False
    slack = 0.01 * float(one.nan_to_num().abs().max())
    return one.shape == other.shape and bool(
        torch.allclose(one, other, rtol=0.0, atol=slack, equal_nan=True)
    )


def _short(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        key = next((k for k in new if old.get(k) != new[k]), None)
        return (
            f"{key}: {old.get(key)!r} there, {new.get(key)!r} here"
            if key is not None
            else "fields differ"
        )
    return f"{old!r} there, {new!r} here"


def clear(folder: Path, results: bool = True) -> None:
    """Remove the batches; with ``results``, everything an evaluation wrote."""
    batches = folder / BATCHES
    if batches.is_symlink():  # rmtree refuses it, and what is behind it is not ours
        batches.unlink()
    elif batches.exists():
        shutil.rmtree(batches)
    if results:
        for name in (RESULTS, EXAMPLES, EXHIBIT, "report.html", "log.jsonl"):
            (folder / name).unlink(missing_ok=True)
