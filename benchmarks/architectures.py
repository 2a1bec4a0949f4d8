"""``python -m benchmarks architectures``: which ordinary networks certificates follow.

Every architecture of :mod:`benchmarks.networks` gets random weights and two images of 8 x 8 pixels
(bundled samples, averaged). A row says whether its program is followed, or why not in the words of
``certify``; how many images are certified at 1e-4 for the network's own answers, the largest
certified radius of a short search, and whether ``verify`` proves one certificate again. Then a
search over vertices of the ball, by gradients, looks for points whose margin is below the bound.
That would be a wrong certificate, and so the command fails; it also does if a network raises an
error that is not the library's own.
"""

from __future__ import annotations

import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.frame import Result, Row, attempts, options
from benchmarks.networks import KINDS, made
from wball.certificates import certified_radius, certify, verify
from wball.certificates.operators import read_graph
from wball.model import ask

EPS = 1e-4
ROUNDS = 3
"""Certificates of the search for the largest radius."""
ROUNDING = 1e-6
"""Relative to the largest logit: points of the ball and their margins are computed in float32."""


def images(channels: int, device: str) -> Tensor:
    """Two bundled images of 8 x 8 pixels."""
    x = wball.load_sample("mnist" if channels == 1 else "cifar10", device=device)[0][:2]
    return F.avg_pool2d(F.pad(x, [2] * 4), 4) if channels == 1 else F.avg_pool2d(x, 4)


def margins(model: nn.Module, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The margin of each image and its largest logit, in float64."""
    with torch.no_grad():
        logits = ask(model, z).double()
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return logits.gather(1, y[:, None])[:, 0] - others, logits.abs().amax(1)


def lowest(model: nn.Module, x: Tensor, y: Tensor, ball: wball.WassersteinBall) -> Tensor:
    """The smallest margins that a search over vertices finds: three times to the point that is best
    for the gradient of the three nearest classes, and in four random directions. Rounding is
    added."""
    found, size = margins(model, x, y)
    noise = torch.Generator().manual_seed(0)
    points = [torch.randn(x.shape, generator=noise).to(x) for _ in range(4)]
    points = [ball.support(x, direction).point for direction in points]
    with torch.no_grad():
        classes = ask(model, x).scatter(1, y[:, None], -torch.inf).topk(3).indices
    for k in classes.T:
        z = x
        for _ in range(3):
            at = z.detach().clone().requires_grad_(True)
            logits = ask(model, at)
            loss = logits.gather(1, k[:, None]) - logits.gather(1, y[:, None])
            (slope,) = torch.autograd.grad(loss.sum(), at, allow_unused=True)
            if slope is None or not bool(slope.isfinite().all()):
                break
            z = ball.support(x, slope).point
            points.append(z)
    for z in points:
        found = torch.minimum(found, margins(model, z, y)[0])
    return found + ROUNDING * (1 + size)


def refusal(error: Exception) -> tuple[str, bool]:
    """What an error says, in one line, and whether the library meant to say it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(wball.__file__).parent in Path(last.filename).parents
    said = " ".join(str(error).split()) or type(error).__name__
    return said, ours and isinstance(error, (TypeError, ValueError, RuntimeError))


@cache
def warmed(device: str) -> None:
    """Load the compiler and the kernels, whose time is not an architecture's."""
    x = images(1, device)
    net = (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3)).eval().to(device)
    )
    for eps in (EPS, 1.0):
        certify(net, x, net(x).argmax(1), wball.WassersteinBall(eps), progress=False)


def tried(name: str, device: str, seed: int, seconds: float, whole: bool) -> Row:
    """One row; only whether a program is followed unless ``whole``."""
    warmed(device)
    begun = time.perf_counter()
    architecture = next(known for known in KINDS if known.name == name)
    model = made(architecture, seed).to(device)
    x = images(architecture.channels, device)
    row: Row = {"family": architecture.family, "name": name, "followed": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            y = ask(model, x).argmax(1)
            read_graph(model, x)
            row["export_seconds"] = round(time.perf_counter() - begun, 2)
            if whole:
                row |= examined(model, x, y, seconds)
        except Exception as error:  # noqa: BLE001 (what it is decides the row)
            reason, ours = refusal(error)
            return row | {"reason": reason, "error": type(error).__name__, "raw": not ours}
    row |= {"followed": True, "partial": not whole}
    return row | {"all_seconds": round(time.perf_counter() - begun, 1)}


def examined(model: nn.Module, x: Tensor, y: Tensor, seconds: float) -> Row:
    """How far certificates of a network reach, and what contradicts them."""
    ball = wball.WassersteinBall(EPS)
    settings: dict[str, Any] = {"time_limit": seconds, "progress": False}
    begun = time.perf_counter()
    first = certify(model, x, y, ball, **settings)
    row: Row = {"images": len(x), "certified": int(first.certified.sum())}
    row["certify_seconds"] = round(time.perf_counter() - begun, 2)
    radius = certified_radius(model, x, y, ball.at(1e-3), rounds=ROUNDS, **settings)
    row["radius"] = float(f"{float(radius.max()):.3g}")
    if proved := first.certified.nonzero()[:, 0].tolist():
        one = slice(proved[0], proved[0] + 1)
        proof = certify(model, x[one], y[one], ball, **settings)
        found = verify(model, x[one], y[one], ball, proof, time_limit=6 * seconds, progress=False)
        row |= {"verified": found.status[0].name.lower(), "why": found.reason}
    wide = ball.at(max(3 * row["radius"], 0.01))
    loose = certify(model, x, y, wide, "crown", **settings)
    wrong = (first.margin > lowest(model, x, y, ball)) | (loose.margin > lowest(model, x, y, wide))
    wrong |= (radius > 0) & (lowest(model, x, y, ball.at(radius)) <= 0)
    return row | {"below": int(wrong.sum())}


def main(arguments: list[str] | None = None) -> None:
    parser = options("architectures", __doc__)
    parser.add_argument("--only", nargs="+", help="parts of names or families")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="limit per image, without export"
    )
    parser.add_argument(
        "--follow-only", action="store_true", help="a later run adds certificates and attacks"
    )
    parser.add_argument("--processes", type=int, default=1, help="architectures at once")
    given = parser.parse_args(arguments)
    result = Result("architectures", given, eps=EPS, rounds=ROUNDS, seconds=given.seconds)
    whole = not given.follow_only
    done = {row["name"] for row in result.rows if not (whole and row.get("partial"))}
    tasks = [
        (kind.name, given.device, given.seed, given.seconds, whole)
        for kind in KINDS
        if given.only is None or any(part in f"{kind.family}: {kind.name}" for part in given.only)
        if kind.name not in done
    ]
    failed = list[str]()
    for (name, *_), row in attempts(tried, tasks, given.processes):
        if isinstance(row, str):
            print(f"{name}: {row}", flush=True)
            failed.append(name)
        else:
            result.rows = [known for known in result.rows if known["name"] != name]
            result.add(row)
    followed = [row for row in result.rows if row["followed"]]
    print(f"{len(followed)} of {len(result.rows)} followed")
    wrong = [row["name"] for row in followed if row.get("below")]
    raw = failed + [row["name"] for row in result.rows if row.get("raw")]
    if wrong or raw:
        raise SystemExit(f"wrong bounds: {wrong}; errors that are not sentences: {raw}")
