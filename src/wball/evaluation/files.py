"""Files of an evaluation that is still running: JSON, tensors and a log.

A batch of images is one safetensors file, rewritten after each radius. It appears under its name by a rename, so that a
process killed at any moment leaves either the old or the new version behind.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from wball.storage.atomic import write_whole


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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no complete JSON file ({error})") from error


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: Any = None) -> None:
    """Tensors, and plain data beside them, as one safetensors file."""
    metadata = None if notes is None else {"notes": json.dumps(notes)}
    write_whole(path, save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata=metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """What :func:`write_tensors` wrote."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            notes = (file.metadata() or {}).get("notes")
        return tensors, None if notes is None else json.loads(notes)
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no complete safetensors file ({error})") from error


class Log:
    """What happened when, one JSON object a line: for people, and never read back."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.path, self.rank = path, rank

    def __call__(self, event: str, **fields: Any) -> None:
        if self.path is None:
            return
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "rank": self.rank, "event": event, **fields}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
