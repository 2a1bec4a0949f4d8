"""Files that are written atomically and carry a checksum; folders that one process writes to.

A tensor file is a safetensors file. Its header holds plain data beside the tensors (``notes``) and
a SHA-256 checksum over names, types, shapes, values and notes. A sealed JSON file holds a checksum
of its own content. A file whose checksum is missing or wrong raises :class:`DamagedFile`.
"""

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch import distributed as dist

from wball.inputs import as_pixels
from wball.provenance import Plain, fingerprint

PathLike = str | os.PathLike[str]
Tensors = dict[str, Tensor]
LOGGER = logging.getLogger("wball")
CHECKSUM = "sha256"
_HEADER = "wball"
"""The only key in the header: safetensors writes several keys in any order, and the same data must
give the same bytes."""
_PART = ".part"
_LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
"""Errors of file systems without locks."""


class DamagedFile(ValueError):
    """The content of a file differs from what was written. The message names the file."""


def grouped() -> bool:
    """Whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def rank_and_size() -> tuple[int, int]:
    """Rank and number of the processes that share the work, from the process group or, before there
    is one, from ``torchrun``."""
    if grouped():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


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
    if os.name == "posix":  # the rename itself must reach the disk as well
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def check_file(path: Path | None) -> None:
    """Raise if a folder is where a file will be written, which hours of work would end with."""
    if path is not None and path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(f"{path} is a folder, where a file is written: remove or rename it")


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
    ``filelock`` is not used, because its fallback without locks is a file that outlives its
    process.
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
    """Take an exclusive lock on an open file, without waiting."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_json(path: Path, content: Any) -> None:
    """Write plain data as JSON. Equal data give equal bytes. Lists of numbers take one line."""
    write_whole(path, (_pretty(content, 0) + "\n").encode())


def _pretty(value: Any, level: int) -> str:
    inside, outside = "  " * (level + 1), "  " * level
    if isinstance(value, dict) and value:
        rows = (f"{inside}{json.dumps(str(k))}: {_pretty(v, level + 1)}" for k, v in value.items())
        return "{\n" + ",\n".join(rows) + f"\n{outside}}}"
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return "[\n" + ",\n".join(inside + _pretty(v, level + 1) for v in value) + f"\n{outside}]"
    return json.dumps(value, allow_nan=False)


def read_json(path: Path) -> Any:
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except ValueError as error:
        raise DamagedFile(f"{path} is not a complete JSON file ({error})") from error


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with a checksum of its content."""
    write_json(path, {**content, CHECKSUM: json_checksum(content)})


def read_sealed(path: Path) -> Plain:
    """Read what :func:`write_sealed` wrote, and verify the checksum."""
    content = read_json(path)
    found = content.pop(CHECKSUM, None) if isinstance(content, dict) else None
    if found is None or found != json_checksum(content):
        raise DamagedFile(
            f"{path} is not what was written: its checksum is missing or wrong; "
            "the file was damaged or edited"
        )
    return dict(content)


def json_checksum(content: Any) -> str:
    """SHA-256 of plain data, written as JSON."""
    plain = json.loads(json.dumps(content))  # keys become text, tuples become lists
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Any = None) -> str:
    """Write tensors and plain data as one safetensors file, and return its checksum."""
    # Copies: safetensors refuses tensors that share memory.
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    checksum = tensor_checksum(plain, notes)
    header = json.dumps({"notes": notes, CHECKSUM: checksum})
    write_whole(path, save(plain, metadata={_HEADER: header}))
    return checksum


def read_tensors(path: Path, checksum: str | None = None) -> tuple[Tensors, Any]:
    """Read what :func:`write_tensors` wrote. With ``checksum``, the file must have that
    checksum."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = _parsed((file.metadata() or {}).get(_HEADER, "null"))
        if not isinstance(header, dict) or header.keys() != {"notes", CHECKSUM}:
            raise ValueError("its header has no checksum")
        if header[CHECKSUM] != tensor_checksum(tensors, header["notes"]):
            raise ValueError("its checksum is wrong: it was damaged")
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedFile(f"{path} is not a complete safetensors file ({error})") from error
    if checksum not in (None, header[CHECKSUM]):
        raise DamagedFile(f"{path} belongs to another run: its checksum is not the recorded one")
    return tensors, header["notes"]


def tensor_checksum(tensors: Mapping[str, Tensor], notes: Any = None) -> str:
    """SHA-256 over names, types, shapes and values of tensors, and over plain data beside them."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{json.dumps(name)} {fingerprint(tensors[name])};".encode())
    digest.update(json.dumps(json.loads(json.dumps(notes)), sort_keys=True).encode())
    return digest.hexdigest()


def as_bytes(images: Tensor) -> Tensor:
    """Images as uint8 if every pixel is exactly a multiple of 1/255; otherwise the same tensor.

    >>> as_bytes(torch.tensor([0.0, 51 / 255, 1.0]))
    tensor([  0,  51, 255], dtype=torch.uint8)
    >>> as_bytes(torch.tensor([0.3]))
    tensor([0.3000])
    """
    if images.dtype != torch.float32:
        return images
    packed = (images * 255).round().nan_to_num(0).clamp(0, 255).to(torch.uint8)
    return packed if torch.equal(as_pixels(packed), images) else images


class Log:
    """A log file with one JSON object per line. It is never read back, and links are not
    followed."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        if path.is_symlink():
            path.unlink()

    def __call__(self, event: str, **fields: Any) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        LOGGER.info("%s %s", event, fields)
        row = json.dumps({"time": when, "rank": self.rank, "event": event, **fields})
        follow = getattr(os, "O_NOFOLLOW", 0)
        with open(
            self.path, "a", opener=lambda path, flags: os.open(path, flags | follow, 0o666)
        ) as file:
            file.write(row + "\n")
