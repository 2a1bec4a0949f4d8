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
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.frame import Result, Row, options
from benchmarks.networks import KINDS, Architecture, made
from wball.certificates import certified_radius, certify, verify
from wball.model import ask

EPS = 1e-4
ROUNDS = 3
"""Certificates of the search for the largest radius."""
SECONDS = 10.0
"""Time limit of a certificate, per image."""
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


def below(model: nn.Module, x: Tensor, y: Tensor, radius: float) -> int:
    """Bounds that a point of the ball contradicts, at three radii."""
    wrong = 0
    for eps, method in ((EPS, "anchored"), (radius, "anchored"), (max(3 * radius, 0.01), "crown")):
        ball = wball.WassersteinBall(eps)
        bound = certify(model, x, y, ball, method, time_limit=SECONDS, progress=False).margin
        wrong += int((bound > lowest(model, x, y, ball)).sum())
    return wrong


def refusal(error: Exception) -> tuple[str, bool]:
    """What an error says, in one line, and whether it was raised by the library itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(wball.__file__).parent in Path(last.filename).parents
    return " ".join(str(error).split()) or type(error).__name__, ours


def tried(architecture: Architecture, device: str, seed: int) -> Row:
    """One row."""
    row: Row = {"family": architecture.family, "name": architecture.name, "followed": False}
    model = made(architecture, seed).to(device)
    x = images(architecture.channels, device)
    y = ask(model, x).argmax(1)
    ball = wball.WassersteinBall(EPS)
    begun = time.perf_counter()
    try:
        first = certify(model, x, y, ball, time_limit=SECONDS, progress=False)
    except Exception as error:  # noqa: BLE001 (what it is decides the row)
        reason, ours = refusal(error)
        return row | {"reason": reason, "error": type(error).__name__, "raw": not ours}
    row |= {"followed": True, "seconds": round(time.perf_counter() - begun, 2)}
    found = certified_radius(
        model, x, y, ball.at(1e-3), rounds=ROUNDS, time_limit=SECONDS, progress=False
    )
    row |= {"certified": int(first.certified.sum()), "radius": float(f"{float(found.max()):.3g}")}
    if row["certified"]:
        best = int(first.certified.int().argmax())
        one = slice(best, best + 1)
        proof = certify(model, x[one], y[one], ball, time_limit=SECONDS, progress=False)
        checked = verify(model, x[one], y[one], ball, proof, time_limit=60, progress=False)
        row |= {"verified": checked.status[0].name.lower(), "why": checked.reason}
    return row | {"images": len(x), "below": below(model, x, y, row["radius"])}


def main(arguments: list[str] | None = None) -> None:
    parser = options("architectures", __doc__)
    parser.add_argument("--only", nargs="+", help="names of architectures, or parts of them")
    given = parser.parse_args(arguments)
    result = Result("architectures", given, eps=EPS, rounds=ROUNDS)
    warnings.simplefilter("ignore")
    for kind in KINDS:
        chosen = given.only is None or any(part in kind.name for part in given.only)
        if chosen and not result.has(family=kind.family, name=kind.name):
            begun = time.perf_counter()
            row = tried(kind, given.device, given.seed)
            result.add(row | {"all_seconds": round(time.perf_counter() - begun, 1)})
    followed = [row for row in result.rows if row["followed"]]
    wrong = [row["name"] for row in followed if row["below"]]
    raw = [row["name"] for row in result.rows if row.get("raw")]
    print(f"{len(followed)} of {len(result.rows)} followed")
    if wrong or raw:
        raise SystemExit(f"wrong bounds: {wrong}; errors that are not sentences: {raw}")


