"""``python -m benchmarks epochs --data DIR``: how long an epoch of adversarial training takes.

Each case trains two epochs on all training images; the second is timed, when everything is compiled and recorded. The
result is written after every case.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.origin import environment, keep
from wball.data import load_dataset
from wball.training import preset, train
from wball.training.presets import override

CASES: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "MNIST, paper's network, dual averaging, 50 steps": (
        "mnist-adversarial",
        {
            "architecture": "mnist-cnn",
            "adversary.attack.steps": 50,
            "adversary.attack.step_size": 3.0,
        },
        10.0,
    ),
    "MNIST, paper's network, the paper's attack, 50 steps": (
        "mnist-adversarial-paper",
        {"batch_size": 512},
        None,
    ),
    "MNIST, mnist-adversarial as it is, 8 steps": ("mnist-adversarial", {}, None),
    "CIFAR-10, ResNet-18, dual averaging, 10 steps": ("cifar10-adversarial", {}, 60.0),
    "CIFAR-10, ResNet-18, standard": ("cifar10-standard", {}, None),
}
"""Preset, what is changed in it, and the seconds that were to be reached on an H200."""


def seconds(name: str, changes: dict[str, Any], given: argparse.Namespace) -> tuple[float, int]:
    """Of the second epoch, and how many images it had."""
    config = preset(name, epochs=2)
    for path, value in (changes | {"evaluation.every": 2, "evaluation.images": 1}).items():
        config = override(config, path, value)
    x, y = load_dataset(config.dataset, given.data, "train", device=torch.device(given.device))
    x, y = x[: given.images], y[: given.images]
    ends: list[float] = []
    train(
        config,
        (x, y),
        device=given.device,
        progress=False,
        on_epoch=lambda record: ends.append(record["seconds"]),
    )
    return ends[1] - ends[0], len(x)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks epochs", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST and CIFAR-10")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, help="of the training set (default: all)")
    parser.add_argument("--only", help="cases whose title contains this")
    parser.add_argument("--out", type=Path, default=Path("results") / "epochs.json")
    given = parser.parse_args(arguments)
    if given.only is not None and not any(given.only in title for title in CASES):
        parser.error(f"--only {given.only!r} is in no title; there are: {'; '.join(CASES)}")
    about = environment(given.device, given.data, given.out)
    rows = []
    for title, (name, changes, target) in CASES.items():
        if given.only is None or given.only in title:
            took, images = seconds(name, changes, given)
            row = {
                "case": title,
                "preset": name,
                "changes": changes,
                "images": images,
                "seconds": round(took, 2),
            }
            rows.append(row | {"target_seconds": target})
            keep(given.out, {"environment": about, "rows": rows})
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
