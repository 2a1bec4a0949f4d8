"""JSON and tensors in files that appear whole or not at all, with checksums: what was damaged is named, never read.

A tensor file is safetensors. Its header carries plain data beside the tensors (``notes``) and a checksum of everything:
names, types, shapes, every bit of the tensors and the notes. A JSON file carries a checksum of its content
(:func:`sealed`). Files of earlier versions have none. They are read, and that is said once.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from wball.provenance import fingerprint
from wball.storage.atomic import write_whole

CHECKSUM = "sha256"
_HEADER, _EARLIER = "wball", ("notes", "json")
# One key for all: safetensors writes several in any order, and the same data shall give the same bytes.


class DamagedFile(ValueError):
    """A file's content is not what was written. The message names the file."""


def write_json(path: Path, content: Any) -> None:
    """Plain data as JSON; the same data give the same bytes. Columns of numbers take one line each."""
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


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """``content`` with a checksum of itself."""
    return {**content, CHECKSUM: _checksum(content)}


def unsealed(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`sealed` got, after a look at the checksum."""
    inside = {key: value for key, value in content.items() if key != CHECKSUM}
    if CHECKSUM not in content:
        _tell_once()
    elif content[CHECKSUM] != _checksum(inside):
        raise DamagedFile(
            f"{path} is no longer what was written: it was damaged or edited, for its checksum is another "
            f'(to accept an edit, remove "{CHECKSUM}" at its end)'
        )
    return inside


def _checksum(content: Mapping[str, Any]) -> str:
    # Through JSON and back first: keys become text, tuples lists, as they will be read.
    plain = json.loads(json.dumps(content, allow_nan=False))
    return hashlib.sha256(
        json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


@cache
def _tell_once() -> None:
    warnings.warn(
        "files of an earlier version have no checksums: damage in them goes unnoticed (this is said once)",
        stacklevel=4,
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Any = None) -> None:
    """Tensors, and plain data beside them, as one safetensors file with a checksum."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    seen: set[int] = set()
    for name, value in plain.items():  # safetensors refuses tensors that share memory
        memory = value.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != value.numel() * value.element_size():
            plain[name] = value.clone()
        seen.add(memory.data_ptr())
    header = json.dumps({"notes": notes, CHECKSUM: tensor_checksum(plain, notes)})
    write_whole(path, save(plain, metadata={_HEADER: header}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """What :func:`write_tensors` wrote; a ``ValueError`` names the file if that is not what is there."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
        if _HEADER not in metadata:
            if metadata.keys() - set(_EARLIER):
                raise ValueError(f"its header has {', '.join(sorted(metadata))[:80]!r}")
            _tell_once()
            text = next((metadata[key] for key in _EARLIER if key in metadata), None)
            return tensors, None if text is None else _parsed(text)
        header = _parsed(metadata[_HEADER])
        if not isinstance(header, dict) or header.keys() != {"notes", CHECKSUM}:
            raise ValueError("its header is not complete")
        if header[CHECKSUM] != tensor_checksum(tensors, header["notes"]):
            raise ValueError("it is damaged: its content does not have its checksum")
        return tensors, header["notes"]
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DamagedFile(f"{path} is not a complete safetensors file ({error})") from error


def tensor_checksum(tensors: Mapping[str, Tensor], notes: Any = None) -> str:
    """SHA-256 over names, types, shapes and contents of tensors, and the plain data beside them."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{json.dumps(name)} {fingerprint(tensors[name])};".encode())
    digest.update(json.dumps(json.loads(json.dumps(notes)), sort_keys=True).encode())
    return digest.hexdigest()


class Log:
    """What happened when, one JSON object a line: for people, and never read back."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank

    def __call__(self, event: str, **fields: Any) -> None:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "rank": self.rank,
            "event": event,
            **fields,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
