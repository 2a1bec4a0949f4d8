"""The folder of an evaluation: its lock, the run it contains, and how to start over."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from wball.evaluation.result import EXAMPLES, EXHIBIT, RESULTS
from wball.processes import grouped, rank_and_size
from wball.storage.files import json_checksum, read_sealed, write_sealed

BATCHES = "batches"
START_OVER = "use --overwrite (overwrite=True) to start over"


class OtherSettings(ValueError):
    """The folder contains an evaluation with other settings."""


@contextmanager
def team() -> Iterator[tuple[int, int, Callable[[], None]]]:
    """The rank of this process, the number of processes, and a barrier."""
    rank, world = rank_and_size()
    if world == 1:
        yield 0, 1, lambda: None
        return
    patience = timedelta(days=30)  # the slowest process decides
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
    """The folder ``out``, or a temporary one."""
    if out is not None:
        path = Path(out)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"out must be a folder, but {path} is a file")
        yield path
        return
    if rank_and_size()[1] > 1:
        raise ValueError("out must be given if several processes share the work")
    with tempfile.TemporaryDirectory(prefix="wball-") as folder:
        yield Path(folder)


def begin(folder: Path, run: dict[str, Any], any_batch_size: bool) -> None:
    """Record the run in the folder; if it contains a run already, it must be the same."""
    for path in (folder / RESULTS, folder / BATCHES / "settings.json"):
        if path.is_file():
            with or_overwrite():
                found = read_sealed(path)
            _check_run(found, run, folder, any_batch_size)
            return
    write_sealed(folder / BATCHES / "settings.json", run)


@contextmanager
def or_overwrite() -> Iterator[None]:
    """Add to errors about unreadable files how to start over."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; {START_OVER}") from error


def _check_run(
    found: dict[str, Any], run: dict[str, Any], folder: Path, any_batch_size: bool
) -> None:
    """Raise unless both runs are the same. The command may differ."""
    old, new = ({**r["settings"], **r["provenance"]} for r in (found, run))
    free = {"command", "answers", *(["batch_size"] if any_batch_size else [])}
    if (key := different_key(old, new, free)) is not None:
        raise OtherSettings(
            f"{folder} contains an evaluation with a different {key} "
            f"({difference(old.get(key), new.get(key))}); choose another folder, or {START_OVER}"
        )
    if not _alike(old["answers"], new["answers"]):
        raise OtherSettings(
            f"{folder} contains an evaluation of a different model: its weights are the same, but "
            "its logits for the first images differ; choose another folder, or " + START_OVER
        )


def different_key(one: Mapping[str, Any], other: Mapping[str, Any], free: set[str]) -> str | None:
    """The first key with different values, except for those that are ``free`` to differ."""
    for key in dict.fromkeys((*one, *other)):
        if key not in free and json_checksum(one.get(key)) != json_checksum(other.get(key)):
            return key
    return None


def difference(old: Any, new: Any) -> str:
    """Two settings as text; of two dictionaries, the first entry that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = different_key(old, new, set())
        return f"{key}: {old.get(key)!r} there, {new.get(key)!r} here"
    return f"{old!r} there, {new!r} here"


def _alike(old: Any, new: Any) -> bool:
    """Whether logits are equal up to what hardware and threads change; a random model has none."""
    if old is None or new is None:
        return True
    one, other = (
        torch.tensor([[math.nan if v is None else v for v in row] for row in a]) for a in (old, new)
    )
    slack = 0.01 * float(one.nan_to_num().abs().max())
    return one.shape == other.shape and torch.allclose(one, other, 0.0, slack, equal_nan=True)


def clear(folder: Path, results: bool = True) -> None:
    """Remove the batches; with ``results``, everything that an evaluation wrote."""
    batches = folder / BATCHES
    if batches.is_symlink():  # what it points to is not ours
        batches.unlink()
    elif batches.exists():
        shutil.rmtree(batches)
    if results:
        for name in (RESULTS, EXAMPLES, EXHIBIT, "report.html", "log.jsonl"):
            (folder / name).unlink(missing_ok=True)
