"""What a report shows: a selection of images, and for a few of them the strongest image at every radius.

An evaluation stops at an image's first example. To see how mass moves as the radius grows, the images of the
explorer are attacked once more at each radius, to the end instead of to the first success (where that fails and the
evaluation succeeded, its example is shown). These images illustrate; no number of the evaluation depends on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wball.attacks import PGD, DualAveraging
from wball.attacks.base import GradientAttack
from wball.ball import Ball
from wball.evaluation.stream import Images
from wball.model import Model, as_found, ask, top_class

if TYPE_CHECKING:
    from wball.evaluation.result import Evaluation

GALLERY = 200
EXPLORER = 16
RADII = 8
STEPS = 20


def make_exhibit(
    result: Evaluation, model: Model, x: Images, y: Images, ball: Ball
) -> dict[str, Tensor]:
    """Images for a report.

    - ``index``, ``original``: up to 200 images, spread evenly over what happened to them;
    - ``explorer_index``: up to 16 of those that the model gets right; ``explorer_radii``: up to 8 radii;
      ``explorer``: ``(image, radius, C, H, W)``, the images of highest loss found; ``explorer_read_as``: their classes;
      ``explorer_broken``: where this attack alone succeeded.
    """
    order = torch.sort(result.images["radius"], stable=True).indices
    index = spread(order, GALLERY).sort().values
    right = order[result.images["label"][order] == result.images["predicted"][order]]
    shown = right[torch.isin(right, index)]
    shown = spread(shown, EXPLORER).sort().values
    radii = spread(torch.tensor(result.radii, dtype=torch.float64), RADII)
    here = shown.to(x.device)
    place = {int(i): k for k, i in enumerate(result.examples["index"].tolist())}
    images, classes, broken = [], [], []
    for eps in radii.tolist():
        if len(shown) == 0:
            break
        found = _strongest(ball.at(eps))(model, x[here], y[here]).images
        with torch.no_grad(), as_found(model, x.device):
            parts = found.split(int(result.settings["batch_size"]))
            read_as = torch.cat([top_class(ask(model, part)) for part in parts]).cpu()
        found = found.cpu()
        broken.append(read_as != result.images["label"][shown])
        for k, i in enumerate(shown.tolist()):  # the evaluation may have known better
            if (
                read_as[k] == result.images["label"][i]
                and float(result.images["radius"][i]) <= eps
                and i in place
            ):
                found[k] = result.examples["adversarial"][place[i]]
                read_as[k] = result.images["read_as"][i]
        images.append(found)
        classes.append(read_as)
    exhibit = {
        "index": index,
        "original": x[index.to(x.device)].cpu(),
        "explorer_index": shown,
        "explorer_radii": radii,
    }
    if images:
        exhibit |= {"explorer": torch.stack(images, 1), "explorer_read_as": torch.stack(classes, 1)}
        exhibit["explorer_broken"] = torch.stack(broken, 1)
    return exhibit


def _strongest(ball: Ball) -> GradientAttack:
    if "mass" in ball.describe():
        return DualAveraging(
            ball, objective="margin", steps=STEPS, until_success=False, progress=False
        )
    return PGD(ball, objective="margin", steps=STEPS, until_success=False, progress=False)


def spread(values: Tensor, count: int) -> Tensor:
    """At most ``count`` of ``values``, evenly spaced, the ends included."""
    if len(values) <= count:
        return values
    return values[torch.linspace(0, len(values) - 1, count, dtype=torch.float64).round().long()]
