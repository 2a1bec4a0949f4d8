"""``python -m benchmarks strength``: how much does an adversary of a few steps miss?

What survives the adversary of training is attacked again under longer and other ones, on the same digits: the first
must be cheap, and what it misses is missing in the defence.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import wball
from benchmarks.origin import environment, keep
from wball.attacks import Attack
from wball.training import preset

STEPS = ((12, 5.0), (8, 20.0), (12, 20.0), (100, 5.0))
"""Steps and nats a step."""


def adversaries(eps: float) -> dict[str, Attack]:
    """The adversary of ``mnist-adversarial`` with other steps, and what measures defences."""
    adversary = preset("mnist-adversarial").adversary
    assert adversary is not None
    ball, attack = wball.WassersteinBall(eps), adversary.attack
    said = {
        f"{n} steps of {nats:g} nats": replace(attack, ball=ball, steps=n, step_size=nats)
        for n, nats in STEPS
    }
    fast, standard = (
        wball.StandardAttack(ball, version=version) for version in ("fast", "standard")
    )
    return {**said, "`StandardAttack`, fast": fast, "`StandardAttack`": standard}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks strength", description=__doc__)
    parser.add_argument(
        "--model", default="mnist-adversarial", help="a network of the zoo for digits"
    )
    parser.add_argument("--eps", type=float, default=0.5, help="mass fraction x px")
    parser.add_argument("--images", type=int, default=300, help="of the bundled digits")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / "strength.json")
    given = parser.parse_args(arguments)
    model = wball.load_model(given.model).to(given.device)
    x, y = (part[: given.images].to(given.device) for part in wball.load_sample("mnist"))
    rows: list[dict[str, Any]] = []
    result = {
        "environment": environment(given.device, None, given.out) | {"seed": 0},
        "model": given.model,
        "images": len(x),
        "eps": given.eps,
        "unit": wball.WassersteinBall(given.eps).unit,
        "rows": rows,
    }
    for name, attack in adversaries(given.eps).items():
        begin = time.perf_counter()
        found = attack(model, x, y, generator=torch.Generator(x.device).manual_seed(0))
        took = time.perf_counter() - begin
        withstand = 1 - float(found.success.double().mean())
        rows.append({"adversary": name, "withstand": withstand, "seconds": round(took, 1)})
        keep(given.out, result)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
