"""Claims of an attack put to the audit, and plans put to exact transport.

What a plan proves needs no second opinion, if the code that adds it up is right. So some of the examples that plans
prove are drawn at random, at each radius, and their transport problems are solved. One plan that promised a smaller
distance than there is, and no plan is believed any more: all of them are checked this way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wball.auditing.audit import AuditReport, audit
from wball.auditing.violations import DISTANCE_TOL
from wball.ball import Ball
from wball.evaluation.result import EXACT, PLAN
from wball.plan import StoredPlan

SAMPLE_LEAST, SAMPLE_SHARE = 32, 0.01
"""Of the examples at a radius that a plan proves, so many are checked by exact transport, too."""
SAMPLE_PIXELS = 400_000
"""They have no more pixels than this together (2 images of 224 x 224 x 3), unless one alone has more: exact transport
takes seconds for such an image, or, where mass goes far, a quarter of a minute."""
ROUNDING = 1e-7
"""Of the mass, by a pixel: what float32 images do not say. At radii of 1e-5 that is more than 1e-4 of the radius."""


def audit_in_threads(
    ball: Ball, x: Tensor, z: Tensor, plan: StoredPlan | Tensor | None = None
) -> AuditReport:
    """:func:`wball.audit` with a thread per core; with ``plan``, exact transport only where that is no proof."""
    return audit(ball, x, z, plan=plan, exact="needed", workers=os.cpu_count() or 1)


def draw_sample(
    images: dict[str, Tensor], settings: dict[str, Any], pixels: int
) -> NDArray[np.int64]:
    """Which of the examples that a plan proves to check again: it depends on the seed and on what was found alone.

    ``pixels`` is the number of pixels of an image.
    """
    drawn, most = [np.zeros(0, dtype=np.int64)], max(1, SAMPLE_PIXELS // pixels)
    for stage, eps in enumerate(settings["radii"]):
        proved = proved_by_plan(images)
        proved = proved[(images["found_at"][proved] == eps).numpy()]
        count = min(most, max(SAMPLE_LEAST, math.ceil(SAMPLE_SHARE * len(proved))))
        random = np.random.default_rng([int(settings["seed"]), stage, len(images["label"])])
        drawn.append(random.permutation(proved)[:count])
    return np.sort(np.concatenate(drawn))


def proved_by_plan(images: dict[str, Tensor]) -> NDArray[np.int64]:
    """The examples that only a plan vouches for."""
    found: NDArray[np.int64] = (images["proof"] == PLAN).nonzero().squeeze(1).numpy()
    return found


def check_exactly(
    ball: Ball,
    pairs: Callable[[Tensor], tuple[Tensor, Tensor]],
    images: dict[str, Tensor],
    chosen: NDArray[np.int64],
    rejected: list[dict[str, Any]],
    advance: Callable[[int], None],
) -> list[int]:
    """Solve the transport problems of the chosen examples, and enter what comes out into ``images``.

    Returns those whose plan promised too much. An example outside its ball goes to ``rejected``.
    """
    disagreements: list[int] = []
    for part in (
        np.array_split(chosen, math.ceil(len(chosen) / (16 * (os.cpu_count() or 1))))
        if len(chosen)
        else ()
    ):
        index = torch.from_numpy(part)
        radius, promised = images["found_at"][index], images["distance"][index]
        originals, adversarial = pairs(index)
        report = audit_in_threads(ball.at(radius), originals, adversarial)
        images["distance"][index], images["proof"][index] = report.distance, PLAN + EXACT
        for k in (~report.valid).nonzero().squeeze(1).tolist():
            where = int(index[k])
            rejected.append({"index": where, "eps": float(radius[k]), "reason": report.reasons[k]})
            for name in ("distance", "found_at", "mass_error", "box_violation"):
                images[name][where] = math.inf
            images["read_as"][where] = images["member"][where] = -1
            images["proof"][where] = 0
        allowed = promised * (1 + DISTANCE_TOL) + ROUNDING * _unit_mass(ball, originals)
        disagreements += index[~report.valid | ~(report.distance <= allowed)].tolist()
        advance(len(part))
    return disagreements


def _unit_mass(ball: Ball, x: Tensor) -> Tensor:
    """The mass of an image in the unit of ``eps``."""
    mass = x.double().flatten(1).sum(1)
    return mass if ball.describe().get("mass") == "absolute" else torch.ones_like(mass)
