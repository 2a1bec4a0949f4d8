"""Where a result comes from, and how it is kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from wball import provenance
from wball.ball import WassersteinBall
from wball.storage.atomic import write_whole


def environment(device: str, data: Path | None, *files: Path) -> dict[str, Any]:
    """Command, machine and commit. Folders of one machine stay out: data is ``DATA``, other paths keep their names."""
    about = provenance.collect(WassersteinBall(1.0), torch.zeros(1, 1, 28, 28, device=device))
    absolute = [Path(word) for word in sys.argv[1:] if Path(word).is_absolute()]
    for path, name in ((data, "DATA"), *((path, path.name) for path in (*files, *absolute))):
        if path is not None:
            about["command"] = about["command"].replace(str(path), name)
    return about | {"commit": provenance.commit()}


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write a result that grows row by row: a run that is killed leaves the rows before, whole."""
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
