"""Atomic writes of files, and folders that one process writes to at a time."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PART = ".part"
_LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
"""Errors of file systems without locks."""


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` beside ``path``, flush it to the disk and rename it over ``path``.

    A killed process leaves either the old file or the new one. The permissions follow the umask.
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
    """Remove the partial files of killed processes. The folder must be locked."""
    for part in folder.glob(f".*{_PART}"):
        part.unlink()


class FolderInUse(RuntimeError):
    """Another process is writing to the folder."""


@contextmanager
def locked(folder: Path, rank: int = 0, *, wait: bool = False) -> Iterator[None]:
    """Lock the folder for this process. The system releases the lock when the process ends.

    If another process holds the lock, raise :class:`FolderInUse`, or ``wait`` until it is free.
    ``filelock`` is not used, because its fallback without locks is a file that outlives its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (".lock" if rank == 0 else f".lock-{rank}")
    with path.open("a") as file:
        while True:
            try:
                _lock(file.fileno())
                break
            except OSError as error:
                if error.errno in _LOCKLESS:
                    raise OSError(
                        error.errno,
                        "the file system cannot lock files; choose a folder on another one",
                        str(folder),
                    ) from error
                if not wait:
                    raise FolderInUse(
                        f"{folder} is in use by another process; wait for it or choose another folder"
                    ) from None
            time.sleep(0.2)
        yield


def _lock(descriptor: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
