"""Images for a report: a selection, and for a few of them the strongest image at every radius.

An evaluation stops at an image's first example. To show how mass moves as the radius grows, the
images of the explorer are attacked once more at each radius, without stopping at the first success.
If that fails where the evaluation succeeded, its example is shown. No number depends on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wball.attacks import PGD, DualAveraging
from wball.attacks.base import GradientAttack
from wball.ball import Ball
from wball.evaluation.batches import answers
from wball.evaluation.result import Evaluation
from wball.evaluation.stream import Stream
from wball.model import Model, top_class

GALLERY = 200
EXPLORER = 16
RADII = 8
STEPS = 20


def make_exhibit(result: Evaluation, model: Model, data: Stream, ball: Ball) -> dict[str, Tensor]:
    """Images for a report.

    - ``index``, ``original``: up to 200 images, spread evenly over their radii;
    - ``explorer_index``: up to 16 of those that are classified correctly; ``explorer_radii``: up to
      8 radii; ``explorer``: ``(image, radius, C, H, W)``, the images of highest loss;
      ``explorer_read_as``: their classes.
    """
    order = torch.sort(result.images["radius"], stable=True).indices
    index = spread(order, GALLERY).sort().values
    right = order[result.images["label"][order] == result.images["predicted"][order]]
    shown = spread(right[torch.isin(right, index)], EXPLORER).sort().values
    radii = spread(torch.tensor(result.radii, dtype=torch.float64), RADII)
    exhibit = {
        "index": index,
        "original": data[index].cpu(),
        "explorer_index": shown,
        "explorer_radii": radii,
    }
    if len(shown) == 0:
        return exhibit
    (x, y), place = data.take(shown), {int(i): k for k, i in enumerate(result.examples["index"])}
    images, classes = [], []
    size = int(result.settings["batch_size"])
    for eps in radii.tolist():
        found = _attack(ball.at(eps))(model, x, y).images
        read_as, found = top_class(answers(model, found, size)).cpu(), found.cpu()
        for k, i in enumerate(shown.tolist()):
            known = float(result.images["radius"][i]) <= eps and i in place
            if known and read_as[k] == result.images["label"][i]:
                found[k] = result.examples["adversarial"][place[i]]
                read_as[k] = result.images["read_as"][i]
        images.append(found)
        classes.append(read_as)
    explored = {"explorer": torch.stack(images, 1), "explorer_read_as": torch.stack(classes, 1)}
    return {**exhibit, **explored}


def _attack(ball: Ball) -> GradientAttack:
    kind = DualAveraging if "mass" in ball.describe() else PGD
    return kind(ball, objective="margin", steps=STEPS, until_success=False, progress=False)


def spread(values: Tensor, count: int) -> Tensor:
    """At most ``count`` of ``values``, evenly spaced, the ends included."""
    if len(values) <= count:
        return values
    return values[torch.linspace(0, len(values) - 1, count, dtype=torch.float64).round().long()]
