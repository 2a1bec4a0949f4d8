"""``python -m benchmarks public``: public networks under the standard attack.

Seven robust accuracies of others' networks on the first test digits. A new version of
:class:`wball.StandardAttack` may not leave more than is stated below, and must call each result
reliable. The leaderboard has every network at every radius.
"""

from __future__ import annotations

import copy
import time
import warnings

import torch
from torch import Tensor, nn

import wball
from benchmarks.frame import Result, Row, options

CHECKS: tuple[tuple[str, float, float, float], ...] = (
    ("wong2019-mnist-standard", 0.1, 31.6, 31.0),
    ("wong2019-mnist-standard", 0.25, 0.1, 0.0),
    ("wong2019-mnist-adversarial", 0.05, 1.8, 1.5),
    ("wong2019-mnist-adversarial", 0.1, 0.5, 0.3),
    ("wong2019-mnist-linf", 0.5, 0.2, 0.0),
    ("wu2020-mnist-adversarial", 0.3, 60.2, 59.5),
    ("hu2020-mnist-adversarial", 0.5, 33.6, 33.0),
)
"""Network, radius, what version 1 left of the first 1,000 test digits in percent, and the goal."""


def main(arguments: list[str] | None = None) -> None:
    parser = options("public", __doc__)
    parser.add_argument("--images", type=int, default=1000, help="number of test digits")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(CHECKS)), help="checks")
    given = parser.parse_args(arguments)
    result = Result("public_checks", given, images=given.images)
    warm = True
    for name, eps, stated, goal in (CHECKS[k] for k in given.only):
        if result.has(model=name, eps=eps, images=given.images):
            continue
        x, y = wball.load_dataset("mnist", given.data)
        x, y = (part[: given.images].to(given.device) for part in (x, y))
        net = wball.load_model(name, root=given.models).to(given.device)
        if warm:  # kernels are compiled before the first attack is timed
            measure(net, x, y, eps)
            warm = False
        row = {"model": name, "eps": eps, "images": len(x), "stated": stated, "goal": goal}
        result.add(row | measure(net, x, y, eps))


def measure(net: nn.Module, x: Tensor, y: Tensor, eps: float) -> Row:
    """Robust accuracy in percent, whether it is reliable, the time it took, and on how many images
    a CPU judges the point otherwise, in float32 and in float64."""
    attack = wball.StandardAttack(wball.WassersteinBall(eps), check=False, progress=False)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = attack(net, x, y)
    robust = 100 * found.robust_accuracy  # waits for the device
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        home, points, labels = copy.deepcopy(net).cpu(), found.images.cpu(), y.cpu()
        answers = home(points), home.double()(points.double())
    return {
        "robust": round(robust, 4),
        "reliable": found.reliable,
        "findings": {finding.code: finding.images for finding in found.findings},
        "seconds": round(seconds, 2),
        "judged_otherwise_on_cpu": [
            int(((logits.argmax(1) != labels) != found.success.cpu()).sum()) for logits in answers
        ],
    }
