"""``python -m benchmarks ablation``: choose the members of the standard attack on held-out images.

Candidates attack the last images of the training sets of MNIST and CIFAR-10, on several networks.
Those that start at the clean image run once; of the others, each round runs them from the best
attempts of the members chosen so far. A round adds the candidate that breaks the largest share of
the images (the mean over all cases) per pass of the network. Test images are never used.
"""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import wball
from benchmarks.cases import Case, correct
from benchmarks.frame import Result, options
from wball.attacks.attack import Task
from wball.attacks.base import cross_entropy
from wball.attacks.standard import MEMBERS, Member
from wball.model import as_found, ask, full_precision

MOST_MEMBERS, MOST_PASSES = 12, 1500
AT_ONCE = 10
"""Candidates between two writes of the file."""
CLEAN_FIRST = 4
"""Members that start at the clean image, before the first that may start at the best attempt."""


@dataclass(frozen=True)
class Setting:
    """Where networks and data are, and how many images of a case are attacked at most."""

    data: Path
    models: Path | None
    images: int
    device: str


CASES = (
    Case("cifar10-small", 0.004, "cifar10", 128),
    Case("cifar10-certified", 0.02, "cifar10", 128),
    Case("wong2019-mnist-standard", 0.1),
    Case("wong2019-mnist-linf", 0.1),
    Case("mnist-standard", 0.1),
    Case("mnist-linf-provable", 0.1),
    Case("wong2019-mnist-binarized", 0.1, thresholded=True, architecture="mnist-cnn"),
    Case("wu2020-mnist-adversarial", 0.4),
    Case("hu2020-mnist-adversarial", 0.5),
    Case("levine2020-mnist-flow-0.01", 0.3),
    Case("levine2020-mnist-flow-0.005", 0.2),
    Case("mnist-adversarial-cnn", 0.5),
    Case("wong2019-mnist-adversarial", 0.02),
    Case("wong2019-mnist-standard", 0.2),
)


def _grid() -> tuple[Member, ...]:
    """Objectives with and without noise, with near and far starts, with long and short steps."""
    plain = {"step_size": 6.0, "memory": 1.0}
    short = {"step_size": 5.0, "decay": 0.0}
    long = {"step_size": 10.0, "memory": 0.9, "decay": 0.0}
    found = list[Member]()
    for name in ("cross-entropy", "margin", "runner-up-2", "runner-up-3", "runner-up-4"):
        found += [
            Member(name),
            Member(name, noise=0.3),
            Member(name, noise=0.5),
            Member(name, noise=0.3, random_start=10.0),
        ]
    for name in ("cross-entropy", "margin"):
        found += [
            Member(name, **plain),
            Member(name, **long, random_start=10.0),
            Member(name, memory=0.9, decay=0.0),
        ]
    found += [
        Member("cross-entropy", noise=0.2),
        Member("cross-entropy", noise=0.4),
        Member("cross-entropy", 10.0, memory=0.97, noise=0.3),
        Member("cross-entropy", 30.0, memory=0.9, noise=0.3),
        Member("cross-entropy", memory=0.97, noise=0.3, steps=200),
        Member("margin", **plain, noise=0.3),
    ]
    for name in ("margin", "cross-entropy", "runner-up-2"):
        found += [
            Member(name, **short, from_best=True),
            Member(name, **long, from_best=True),
            Member(name, from_best=True, noise=0.3),
        ]
    found += [
        Member("margin", from_best=True),
        Member("margin", from_best=True, noise=0.1),
        Member("margin", **long, from_best=True, random_start=3.0),
        Member("margin", **short, steps=200, from_best=True),
        Member("margin", 1.0, decay=0.0, memory=1.0, from_best=True),
        Member("runner-up-3", from_best=True, noise=0.3),
    ]
    return tuple(dict.fromkeys([*found, *MEMBERS["standard"]]))


CANDIDATES = _grid()


class Attempts:
    """A case under attack by one member after another."""

    def __init__(self, case: Case, setting: Setting) -> None:
        self.ball = wball.WassersteinBall(case.eps)
        self.net = case.network(setting.models, setting.device)
        count = min(setting.images, case.images)
        x, y = case.load(setting.data, "train", slice(-count, None), setting.device)
        self.x, self.y = correct(self.net, x, y)
        self.left = torch.ones_like(self.y, dtype=torch.bool)
        self.best, self.loss = self.x.clone(), torch.full(self.y.shape, -torch.inf).to(self.x)
        self.members = list[Member]()

    def run(self, member: Member, here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Attack some images. Returns the points, which are examples, and the steps made."""
        draws = torch.Generator(self.x.device).manual_seed(len(self.members))
        start = self.best[here] if member.from_best else None
        task = Task(self.net, self.x[here], self.y[here], start=start)
        with as_found(self.net, self.x.device), full_precision():
            found = member.on(self.ball).attack_batch(task, draws)
            broken = found.success & task.judge(found.images)
        return found.images, broken, found.n_steps

    def choose(self, member: Member) -> None:
        """Attack the survivors, and keep what is better."""
        here = self.left.nonzero().squeeze(1)
        images, broken, _ = self.run(member, here)
        with torch.no_grad(), full_precision():
            loss = cross_entropy(ask(self.net, images), self.y[here])
        better = broken | (loss > self.loss[here])
        self.best[here[better]], self.loss[here[better]] = images[better], loss[better]
        self.left[here[broken]] = False
        self.members.append(member)


_attempts = cache(Attempts)


def _measure(
    case: Case, setting: Setting, chosen: list[Member], asked: list[Member]
) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Which images each candidate breaks, in how many steps and seconds; from the best attempts of
    the members chosen so far, on their survivors, where a candidate starts there."""
    case_now = _attempts(case, setting)
    for member in chosen[len(case_now.members) :]:
        case_now.choose(member)
    found = []
    for member in asked:
        begin = time.perf_counter()
        all_images = torch.ones_like(case_now.left)
        here = (case_now.left if member.from_best else all_images).nonzero().squeeze(1)
        broken, steps = ~case_now.left if member.from_best else ~all_images, all_images.long()
        if here.numel():
            _, broken[here], steps[here] = case_now.run(member, here)
        seconds = time.perf_counter() - begin
        found.append((broken.cpu().numpy(), steps.cpu().numpy().astype(np.int16), seconds))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options("ablation", __doc__)
    parser.add_argument("--images", type=int, default=1000, help="images of a case, at most")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins after these")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)))
    parser.add_argument("--every", type=int, default=1, help="use one of so many candidates")
    given = parser.parse_args(arguments)
    setting = Setting(given.data, given.models, given.images, given.device)
    begin = time.perf_counter()
    cases = [CASES[k] for k in given.cases]
    candidates = CANDIDATES[:: given.every]
    result = Result("ablation", given, cases=[asdict(case) for case in cases])
    pools = [
        ProcessPoolExecutor(1, get_context("spawn"))
        for _ in range(min(given.processes, len(cases)))
    ]

    def everywhere(chosen: list[Member], asked: list[Member]) -> list[list[np.ndarray]]:
        """Per candidate, the images that it breaks in every case."""
        running = [
            pools[k % len(pools)].submit(_measure, case, setting, chosen, asked)
            for k, case in enumerate(cases)
        ]
        every = [run.result() for run in running]
        for k, member in enumerate(asked):
            parts = [part[k] for part in every]
            result.add(
                {
                    "after": len(chosen),
                    "member": str(member),
                    "broken": [round(100 * float(part[0].mean()), 2) for part in parts],
                    "seconds": [round(part[2], 2) for part in parts],
                }
            )
        kept[len(chosen), str(asked[0])] = (asked, every)
        if given.out is not None:
            Path(str(given.out) + ".pkl").write_bytes(pickle.dumps((cases, chosen, kept)))
        return [[part[k][0] for part in every] for k in range(len(asked))]

    kept: dict[tuple[int, str], object] = {}
    clean = [member for member in candidates if not member.from_best]
    others = [member for member in candidates if member.from_best]
    bits = dict[Member, list[np.ndarray]]()
    for first in range(0, len(clean), AT_ONCE):
        part = clean[first : first + AT_ONCE]
        bits |= dict(zip(part, everywhere([], part), strict=True))
    broken = [np.zeros_like(part) for part in bits[clean[0]]]
    chosen, passes = list[Member](), 0
    while len(chosen) < MOST_MEMBERS and time.perf_counter() - begin < 60 * given.minutes:
        if len(chosen) >= CLEAN_FIRST and others:
            bits |= dict(zip(others, everywhere(chosen, others), strict=True))
        open_ = [m for m in bits if passes + m.steps <= MOST_PASSES]
        if not open_:
            break
        gains = {
            m: float(
                np.mean([(new & ~old).mean() for new, old in zip(bits[m], broken, strict=True)])
            )
            for m in open_
        }
        best = max(open_, key=lambda m: gains[m] / m.steps)
        if gains[best] == 0:
            break
        if len(chosen) >= CLEAN_FIRST:  # those that gained little will gain less
            order = sorted((m for m in others if m in gains), key=lambda m: -gains[m] / m.steps)
            others = order[:10]
        chosen.append(best)
        passes += best.steps
        broken = [old | new for old, new in zip(broken, bits[best], strict=True)]
        left = [round(100 * float(1 - part.mean()), 2) for part in broken]
        result.add(
            {
                "chosen": str(best),
                "passes": passes,
                "left": left,
                "mean": round(float(np.mean(left)), 3),
            }
        )
    for pool in pools:
        pool.shutdown()
    if given.out is not None:
        Path(str(given.out) + ".pkl").write_bytes(pickle.dumps((cases, chosen, kept)))
