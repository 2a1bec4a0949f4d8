"""``python -m benchmarks agreeing``: complete verification against mixed-integer programming (HiGHS), answer by answer.

Two parts, both with the referee of the tests (``tests/certificates/exact.py``), which shares nothing with the library:

- ``transport``: random networks of one or two hidden layers over Wasserstein balls around tiny images. How often each
  answer was given, how often it contradicts the true margin, the largest margin left undecided, and how often the
  solver gave up.
- ``linf``: random networks of two hidden layers over l-inf balls, the same images and radii for both in one run: the
  time of :func:`wball.certify` and of one program a class, to the same decision.

The file is written after every hundred networks; if interrupted, rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wball
from benchmarks.origin import environment, keep

TOLERANCE = 1e-6
"""Of the programs: margins that are closer to 0 may be decided either way."""


def referee() -> Any:
    """The tests' exact margins; they are not part of an installed package."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    return importlib.import_module("certificates.exact")


def contradicts(found: wball.CertificateResult, truth: float) -> bool:
    """Whether an answer is wrong: certified or falsified against the sign of the margin, or a bound above it."""
    name = found.status[0].name
    if name == "CERTIFIED":
        return truth < -TOLERANCE
    return (name == "FALSIFIED" and truth > TOLERANCE) or float(found.margin) > truth + TOLERANCE


def transport(seed: int, time_limit: float) -> tuple[str, bool, float]:
    exact = referee()
    net, x, y, eps = exact.tiny(seed)
    ball = wball.WassersteinBall(eps, cost=wball.GridCost(window=5))  # covers the image: full plans
    pixels, budget = x[0].double().reshape(1, -1).numpy(), float(ball.budget(x))
    found = wball.certify(net, x, y, ball, "complete", time_limit=time_limit)
    try:
        truth = exact.exact_margin(
            exact.affine_maps(net), pixels, int(y), exact.euclidean(*x.shape[2:]), budget
        )
    except exact.Unsolved:
        return found.status[0].name, False, math.nan
    return found.status[0].name, contradicts(found, truth), truth


def answers(seeds: range, time_limit: float, processes: int) -> Iterator[tuple[str, bool, float]]:
    """:func:`transport` of each seed, in their order."""
    if processes == 1:
        yield from (transport(seed, time_limit) for seed in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _quiet) as pool:
        yield from pool.imap(partial(transport, time_limit=time_limit), seeds)


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)


def network(seed: int, width: int) -> tuple[nn.Sequential, Tensor, Tensor, float]:
    """A random network of two hidden layers on 5 x 5 images, and a radius."""
    draw = torch.Generator().manual_seed(seed)
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(25, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 5),
    )
    with torch.no_grad():
        for parameter in net.parameters():
            size = (2 / parameter.shape[1]) ** 0.5 if parameter.ndim == 2 else 0.1
            parameter.copy_(size * torch.randn(parameter.shape, generator=draw))
    x = torch.rand(1, 1, 5, 5, generator=draw)
    return net.eval(), x, net(x).argmax(1), float(0.01 + 0.05 * torch.rand(1, generator=draw))


def linf(exact: Any, seed: int, time_limit: float) -> tuple[str, bool, float, float, float]:
    net, x, y, eps = network(seed, 24)
    start = time.perf_counter()
    found = wball.certify(net, x, y, wball.LinfBall(eps), "complete", time_limit=time_limit)
    ours = time.perf_counter() - start
    start = time.perf_counter()
    truth = exact.box_margin(exact.affine_maps(net), x.flatten().double().numpy(), int(y), eps)
    return found.status[0].name, contradicts(found, truth), truth, ours, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks agreeing", description=__doc__)
    parser.add_argument("--networks", type=int, default=2000)
    parser.add_argument("--boxes", type=int, default=50, help="networks over l-inf balls")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument(
        "--processes", type=int, default=1, help="for the networks over Wasserstein balls"
    )
    parser.add_argument("--out", type=Path, default=Path("results") / "complete_agreement.json")
    given = parser.parse_args(arguments)
    exact = referee()
    _quiet()
    about = environment("cpu", None, given.out) | {"time_limit": given.time_limit}
    state: dict[str, Any] = {"transport": {}, "linf": []}
    if given.out.exists():
        state = json.loads(given.out.read_text(encoding="utf-8"))
    done = state["transport"]
    counts = Counter(done.get("answers", {}))
    seeds = range(done.get("networks", 0), given.networks)
    found = answers(seeds, given.time_limit, given.processes)
    for seed, (name, wrong, truth) in zip(seeds, found, strict=True):
        counts[name] += 1
        if math.isnan(truth):
            done["without_referee"] = done.get("without_referee", 0) + 1
        elif name == "UNKNOWN":
            done.setdefault("undecided", []).append({"seed": seed, "margin": truth})
        open_margin = abs(truth) if name == "UNKNOWN" and not math.isnan(truth) else 0.0
        done.update(
            networks=seed + 1,
            answers=dict(counts),
            contradictions=done.get("contradictions", 0) + wrong,
            largest_margin_undecided=max(done.get("largest_margin_undecided", 0.0), open_margin),
        )
        if (seed + 1) % 100 == 0 or seed + 1 == given.networks:
            keep(given.out, {"environment": about, **{k: state[k] for k in ("transport", "linf")}})
    print(done, flush=True)
    for seed in range(len(state["linf"]), given.boxes):
        name, wrong, truth, ours, theirs = linf(exact, seed, given.time_limit)
        state["linf"].append(
            {
                "answer": name,
                "contradicts": wrong,
                "margin": truth,
                "seconds": round(ours, 4),
                "seconds_milp": round(theirs, 4),
            }
        )
        keep(given.out, {"environment": about, **{k: state[k] for k in ("transport", "linf")}})
    ours, theirs = (sorted(r[k] for r in state["linf"]) for k in ("seconds", "seconds_milp"))
    if ours:
        print(
            f"l-inf: median {ours[len(ours) // 2]:.3f} s, MILP {theirs[len(theirs) // 2]:.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
