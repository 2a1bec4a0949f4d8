"""Files that appear whole or not at all: what every result, checkpoint and weights file is written with."""

from __future__ import annotations

import os
from pathlib import Path

_PART = ".part"


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path``, flush it to the disk and rename it over ``path``.

    A process killed at any moment leaves the old file or the new one, and so does a power cut once this has returned.
    The file gets the permissions that the umask gives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself must reach the disk, too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def clear_parts(folder: Path) -> None:
    """Remove what processes that were killed while they wrote have left in a folder that nobody else writes to."""
    for part in folder.glob(f".*{_PART}"):
        part.unlink()
