"""Where a result comes from, and how it is kept."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from wball import provenance
from wball.ball import WassersteinBall
from wball.storage.atomic import write_whole


def timed_options(
    name: str, about: str | None, seconds: float, measured: str = "call", *, resumes: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that times something, and of those that go on where they stopped."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}".strip(), description=about)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with MNIST and CIFAR-10 (default: bundled and made-up images)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"time spent on each {measured}"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--note", help="a remark to record, such as what else the machine was doing"
    )
    parser.add_argument(
        "--out", type=Path, help=f"default: results/{name or 'bench'}_<device>.json"
    )
    if resumes:
        parser.add_argument(
            "--resume", action="store_true", help="keep the rows that this commit left in the file"
        )
    return parser


def begun(name: str, given: argparse.Namespace) -> tuple[torch.device, Path, dict[str, Any]]:
    """Where a benchmark with these options runs, the file it writes, and what is recorded about it."""
    device = torch.device(given.device)
    out = given.out or Path("results") / f"{name}_{device.type}.json"
    about = environment(given.device, given.data, out)
    return device, out, about | ({"note": given.note} if given.note else {})


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


def rows_before(
    given: argparse.Namespace, out: Path, about: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows that a run of this commit left when it was stopped; none unless ``--resume`` asks for them."""
    if not given.resume or not out.exists():
        return []
    before = json.loads(out.read_text(encoding="utf-8"))
    same = before["environment"]["commit"] == about["commit"]
    rows: list[dict[str, Any]] = before["rows"] if same else []
    return rows


def earlier(path: Path, **settings: Any) -> dict[str, Any]:
    """What an earlier run with the same settings left in the file, to go on from; empty if there is none."""
    if not path.exists():
        return {}
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, wanted in settings.items():
        if before.get(name) != wanted:
            raise SystemExit(
                f"{path} was made with {name} {before.get(name)!r}, not {wanted!r}: choose another --out"
            )
    return before
