"""``python -m benchmarks validity --data DIR``: attack test sets and audit every image that comes
back.

Each attack returns one image per test image: an adversarial example, or its best attempt. All of
them claim to be in the ball, so all of them are audited: mass, box, and the exact transport
distance by network simplex. The command fails if one image does. The attacks start from the model's
own predictions, so that no image is wrong from the start and returned unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import wball
from benchmarks.frame import Result, Row, options
from wball.auditing.violations import DISTANCE_TOL
from wball.data import load_dataset

RADII = (0.01, 0.05, 0.1, 0.3)
MODELS = {"mnist": ("mnist-standard", 10_000, 200), "cifar10": ("cifar10-small", 1_000, 50)}
"""Network, images, and images for attacks that solve a convex program at each step."""


def attacks() -> Iterator[tuple[str, wball.Attack]]:
    """Attacks by name. The last two solve a convex program at each step."""
    ball = wball.WassersteinBall(RADII[0])
    yield "DualAveraging", wball.DualAveraging(ball, until_success=False, progress=False)
    fast = wball.StandardAttack(ball, version="fast", check=False, progress=False)
    yield "StandardAttack, fast", fast
    yield "PGD, 20 steps, reg 1000", wball.PGD(ball, steps=20, reg=1000.0, progress=False)
    yield "FrankWolfe, 20 steps", wball.FrankWolfe(ball, steps=20, progress=False)


def check(attack: wball.Attack, eps: float, model: nn.Module, x: Tensor, y: Tensor) -> Row:
    """Attack at one radius, and audit what comes back."""
    ball, begun = wball.WassersteinBall(eps), time.perf_counter()
    found = attack.at(eps)(model, x, y)
    images = found.images.cpu()
    attacked = time.perf_counter()
    report = wball.audit(ball, x.cpu(), images)
    share = report.distance / eps
    reasons = [f"image {k}: {reason}" for k, reason in enumerate(report.reasons) if reason]
    return {
        "images": len(x),
        "robust_accuracy": found.robust_accuracy,
        "failures": len(reasons),
        "largest_mass_error": float(report.mass_error.max()),
        "largest_box_violation": float(report.box_violation.max()),
        "largest_distance_over_eps": float(share.max()),
        "mean_distance_over_eps": float(share.mean()),
        "claimed_too_little": int((found.distance.cpu() / eps < share - DISTANCE_TOL).sum()),
        "reasons": reasons[:5],
        "kernel": found.kernel,
        "attack_s": round(attacked - begun, 2),
        "audit_s": round(time.perf_counter() - attacked, 2),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = options("validity", __doc__)
    parser.add_argument("--limit", type=int, help="number of images of each set")
    parser.add_argument("--sets", nargs="+", choices=list(MODELS), default=list(MODELS))
    given = parser.parse_args(arguments)
    result = Result("validity", given, limit=given.limit)
    for data in given.sets:
        name, most, few = MODELS[data]
        x = load_dataset(data, given.data, "test", device=given.device)[0][: given.limit or most]
        model = wball.load_model(name).to(given.device).eval()
        with torch.no_grad():
            y = torch.cat([model(part).argmax(1) for part in x.split(1000)])
        for called, attack in attacks():
            count = few if hasattr(attack, "reg") or "FrankWolfe" in called else len(x)
            for eps in RADII:
                key = {"data": data, "attack": called, "eps": eps}
                if not result.has(**key):
                    result.add(key | check(attack, eps, model, x[:count], y[:count]))
    bad = sum(row["failures"] for row in result.rows)
    if bad:
        raise SystemExit(f"{bad} images are not in their ball")
