"""Flipped bits in every kind of file: each is noticed, or changes nothing that is read.

``results/damage.json`` has the counts of 1,000 bits in each kind of file.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from wball.evaluation import evaluate, load_evaluation
from wball.storage.files import read_tensors, write_tensors
from wball.training.state import load_state

Reader = Callable[[Path], Any]


def _network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 4)).eval()


def _weights(path: Path) -> dict[str, Tensor]:
    return dict(wball.load_weights(_network(1), path).state_dict())


def _evaluation(path: Path) -> tuple[Any, ...]:
    found = load_evaluation(path.parent)
    return found.to_dict(), dict(found.examples), dict(found.exhibit)


def make_files(folder: Path) -> dict[str, tuple[Path, Reader]]:
    """One file of each kind, and how it is read."""
    model, ball = _network(), wball.WassersteinBall(0.4)
    x = torch.rand(9, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    evaluate(
        model,
        x,
        y,
        ball,
        [0.1, 0.4],
        wball.DualAveraging(ball, steps=3),
        out=folder / "e",
        name=wball.Names("m", command="c"),
    )
    batch = {name: torch.arange(9) for name in ("label", "predicted")} | {"adversarial": x}
    write_tensors(
        folder / "batch-00000.safetensors", batch, {"batch": 0, "done": 2, "rejected": []}
    )
    write_tensors(
        folder / "checkpoint.safetensors",
        dict(model.state_dict()),
        {"step": 3, "history": [{"loss": 0.25}]},
    )
    wball.save_weights(model, folder / "w.safetensors", {"epochs": "3"})
    return {
        "batch": (folder / "batch-00000.safetensors", read_tensors),
        "results": (folder / "e" / "results.json", _evaluation),
        "examples": (folder / "e" / "examples.safetensors", _evaluation),
        "exhibit": (folder / "e" / "exhibit.safetensors", _evaluation),
        "checkpoint": (folder / "checkpoint.safetensors", load_state),
        "weights": (folder / "w.safetensors", _weights),
    }


def flip_bits(path: Path, read: Reader, count: int, seed: int) -> dict[str, int]:
    """How many of ``count`` flipped bits, each alone, were noticed, changed nothing, or changed
    what was read."""
    whole, expected, rng = path.read_bytes(), read(path), random.Random(seed)
    counts = {"noticed": 0, "harmless": 0, "silent": 0}
    for _ in range(count):
        bit = rng.randrange(8 * len(whole))
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        try:
            found = read(path)
        except ValueError as error:
            counts[
                "noticed" if path.name in str(error) or path.parent.name in str(error) else "silent"
            ] += 1
        else:
            counts["harmless" if _same(found, expected) else "silent"] += 1
    path.write_bytes(whole)
    return counts


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
