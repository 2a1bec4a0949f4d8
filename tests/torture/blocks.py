"""A block of cases, for the processes of the long run."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from wball import provenance

from .cases import make
from .operations import run


def work_off(
    seed: int, start: int, end: int, only: tuple[str, ...], folder: Path, images: int = 1
) -> None:
    """Cases ``start`` to ``end`` (of some operations, or all); what they found is one file, whole or not at all."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    worst: dict[str, float] = {}
    failed, began, points = [], time.process_time(), 0
    for index in range(start, end):
        case = make(seed, index, images)
        if only and case.operation not in only:
            continue
        found = run(case)
        counts[case.operation] += 1
        points += len(case.x)
        for name, value in found.worst.items():
            worst[name] = max(float(value), worst.get(name, 0.0))
        kinds.update({line.split(":")[0] for line in found.lines})
        if found.lines:
            failed.append({"case": case.label, "index": index, "findings": found.lines[:5]})
    seconds = time.process_time() - began
    content = {
        "commit": provenance.commit(), "operations": counts, "kinds": kinds, "worst": worst, "failed": failed,
        "seconds": seconds, "points": points,
    }  # fmt: skip
    write_json(folder / f"{start}.json", content)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
