"""The CPU target with each side in its best setting: how torch's threads wait, and how many there are.

The released code consists of thousands of small parallel operations. Threads that spin while they wait (torch's
default) serve it best on a quiet machine and worst on a busy one, and the choice is made when a process starts: each
setting is a process of its own. Rounds alternate between settings and sides, so that whatever else the machine does
meets all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.inputs import disturbed, mnist
from benchmarks.timing import Time
from wball.kernels.projected_sinkhorn import Projection

BATCH, STEP, TOL = 100, 0.1, 1e-4
ROUNDS = 3
PATIENCE_S = 120
"""A process that takes longer is not waited for."""
OURS, PUBLIC, RELEASED = "wball sweeps, cpu", "wball project, cpu", "released"

Sample = tuple[float, float]
"""Milliseconds by the clock and by the processor."""


def rows(data: Path | None) -> Iterator[dict[str, Any]]:
    """One row per side and setting."""
    settings = [
        (wait, count)
        for wait in ("PASSIVE", "ACTIVE")
        for count in sorted({1, os.cpu_count() or 1})
    ]
    found: dict[tuple[str, str, int], list[Sample]] = {}
    late: set[tuple[str, int]] = set()
    for _ in range(ROUNDS):
        for wait, count in settings:
            try:
                answer = _child(data, wait, count)
            except subprocess.TimeoutExpired:
                late.add((wait, count))
                continue
            for side, samples in answer.items():
                found.setdefault((side, wait, count), []).extend((s[0], s[1]) for s in samples)
    for (side, wait, count), samples in sorted(found.items()):
        clock = sorted(s[0] for s in samples)
        time_ = Time(
            median(clock),
            clock[0],
            clock[-1],
            len(clock),
            "clock, alternating",
            median(s[1] for s in samples),
        )
        yield {
            "work": "threads",
            "images": "mnist",
            "batch": BATCH,
            "method": side,
            "setting": _name(wait, count),
            "time": time_,
        }
    for wait, count in sorted(late):
        reason = f"a process took over {PATIENCE_S} s"
        yield {
            "work": "threads",
            "images": "mnist",
            "batch": BATCH,
            "method": RELEASED,
            "setting": _name(wait, count),
            "absent": reason,
        }


def _name(wait: str, count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}, {'spinning' if wait == 'ACTIVE' else 'sleeping'}"


def _child(data: Path | None, wait: str, count: int) -> dict[str, list[list[float]]]:
    environment = os.environ | {"OMP_WAIT_POLICY": wait, "OMP_NUM_THREADS": str(count)}
    line = [sys.executable, "-m", "benchmarks.threads", *([] if data is None else [str(data)])]
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    answer: dict[str, list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main(data: Path | None) -> None:
    """In the child: every side in turn, on the same images."""
    from benchmarks.peers import Absent, released_projection
    from wball import WassersteinBall
    from wball.kernels.projected_sinkhorn import cpu

    images = mnist(data, torch.device("cpu"))
    x = images.batch(BATCH)
    w, ball, mass = disturbed(x, STEP, 0), WassersteinBall(images.eps), x.sum((1, 2, 3))
    budget, moves, psi = ball.budget(x), ball.cost.arcs(28, 28, x), torch.full_like(mass, 0.1)

    def sweeps() -> None:
        cpu.projected_sinkhorn(
            Projection(
                x, w, budget, moves, (0.0, 1.0), mass / images.reg, u=w - x, psi=psi, tol=TOL
            )
        )

    sides: dict[str, Any] = {
        OURS: sweeps,
        PUBLIC: lambda: ball.project(x, w, reg=images.reg, tol=TOL),
    }
    try:
        released = released_projection()
        sides[RELEASED] = lambda: released(x, w, images.eps, images.reg, 50)
        released(x[:2], w[:2], images.eps, images.reg, 2)
    except Absent:
        pass
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    sides[OURS](), sides[PUBLIC]()  # compiled, or read from the cache
    for _ in range(2):
        for side, run in sides.items():
            for _ in range(1 if side == RELEASED else 5):
                start, worked = time.perf_counter(), time.process_time()
                run()
                samples[side].append(
                    (1e3 * (time.perf_counter() - start), 1e3 * (time.process_time() - worked))
                )
    print(json.dumps(samples))


def verdict(found: list[dict[str, Any]]) -> list[str]:
    """Each side in its best setting, by the clock and by the processor."""
    times: dict[str, list[tuple[Time, str]]] = {}
    for row in found:
        if row["work"] == "threads" and isinstance(row.get("time"), Time):
            times.setdefault(row["method"], []).append((row["time"], row["setting"]))
    if RELEASED not in times or OURS not in times:
        return []
    theirs, their_setting = min(times[RELEASED], key=lambda pair: pair[0].median)
    lines = []
    for side in (side for side in (OURS, PUBLIC) if side in times):
        ours, setting = min(times[side], key=lambda pair: pair[0].median)
        ratio = theirs.median / ours.median
        text = (
            f"projection on a CPU, mnist x {BATCH}, {side} ({setting}): {ours.median:.1f} ms, released "
            f"({their_setting}): {theirs.median:,.0f} ms, {ratio:,.0f} times faster"
        )
        work = [min((t.processor or 0.0) for t, _ in times[which]) for which in (RELEASED, side)]
        if all(work):
            text += f" by the clock, {work[0] / work[1]:,.0f} times by the processor"
        reached = (
            "reached" if ratio >= 60 else f"not reached, short by a factor of {60 / ratio:.2f}"
        )
        lines.append(f"{reached}: {text} (target 60 times)" if side == OURS else text)
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
