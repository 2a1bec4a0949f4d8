"""Images for a report: a selection of the originals and, on request, an explorer.

An evaluation stops at an image's first example. To show how mass moves as the radius grows, the
images of the explorer are attacked once more at each radius, without stopping at the first success.
If that fails where the evaluation succeeded, its example is shown. No number depends on them.

The baseline measures accuracy under changes that are not attacks: a shift by one pixel, and
random points of the ball.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wball.attacks import DualAveraging
from wball.ball import Ball
from wball.evaluation.batches import answers
from wball.evaluation.doubts import misclassified
from wball.evaluation.result import Evaluation
from wball.evaluation.stream import Stream, open_stream
from wball.model import Model, top_class

GALLERY = 200
EXPLORER, EXPLORER_PIXELS = 16, 500_000
"""Largest number of images that are attacked again, and of their pixels."""
RADII = 8
STEPS = 20
BASELINE, BASELINE_PIXELS = 100, 2_000_000
"""Largest number of images of the baseline, and of their pixels."""


def make_exhibit(result: Evaluation, model: Model, data: Stream, ball: Ball) -> dict[str, Tensor]:
    """Images for a report.

    - ``index``, ``original``: up to 200 images, evenly spaced in the order of their radii;
    - ``baseline``: accuracy on images shifted by one pixel, then at random points of each ball.
    """
    order = torch.sort(result.images["radius"], stable=True).indices
    index = evenly(order, GALLERY).sort().values
    baseline = _baseline(result, model, data, ball)
    return {"index": index, "original": data[index].cpu(), "baseline": baseline}


def explore(result: Evaluation, model: Model, x: Any, y: Any = None, *, ball: Ball) -> Evaluation:
    """The evaluation with images for the transport explorer of its report, which shows how mass
    moves as the radius grows.

    Args:
        result: the result of :func:`wball.evaluate` on these arguments.
        model: the model.
        x: images, or data.
        y: labels.
        ball: the threat model.

    Up to 16 images (fewer large ones) that are classified correctly are attacked at up to 8 radii.
    The result's ``explorer`` has their positions ``index``; the ``radii``; ``images``, those of
    highest loss, ``(image, radius, C, H, W)``; and ``read_as``, their classes.
    """
    data = open_stream(x, y, model, ball.box)
    order = torch.sort(result.images["radius"], stable=True).indices
    right = order[result.images["label"][order] == result.images["predicted"][order]]
    most = max(1, min(EXPLORER, EXPLORER_PIXELS // data.first[0].numel()))
    gallery = result.exhibit["index"]
    shown = evenly(right[torch.isin(right, gallery)], most).sort().values
    if len(shown) == 0:
        return result
    radii = evenly(torch.tensor(result.radii, dtype=torch.float64), RADII)
    (x, y), place = data.take(shown), {int(i): k for k, i in enumerate(result.examples["index"])}
    size, count = int(result.settings["batch_size"]), len(radii)
    attack = DualAveraging(
        ball.at(radii.to(x.device).repeat(len(x))),
        objective="margin",
        steps=STEPS,
        until_success=False,
        batch_size=size,
        progress=False,
    )
    found = attack(model, x.repeat_interleave(count, 0), y.repeat_interleave(count)).images
    read_as = top_class(answers(model, found, size)).cpu().view(-1, count)
    found = found.cpu().unflatten(0, (-1, count))
    for k, i in enumerate(shown.tolist()):
        known = (result.images["radius"][i] <= radii) & (read_as[k] == result.images["label"][i])
        if i in place:
            found[k, known] = result.examples["adversarial"][place[i]]
            read_as[k, known] = result.images["read_as"][i]
    explorer = {"index": shown, "radii": radii, "images": found, "read_as": read_as}
    return replace(result, explorer=explorer)


def _baseline(result: Evaluation, model: Model, data: Stream, ball: Ball) -> Tensor:
    most = max(1, min(BASELINE, BASELINE_PIXELS // data.first[0].numel()))
    x, y = data.take(evenly(torch.arange(len(data)), most))
    generator = torch.Generator(data.device).manual_seed(int(result.settings["seed"]))
    points = [x.roll(1, -1), *(ball.at(eps).sample(x, generator) for eps in result.radii)]
    size = int(result.settings["batch_size"])
    return torch.stack([~misclassified(model, z, y, size) for z in points]).double().mean(1).cpu()


def evenly(values: Tensor, count: int) -> Tensor:
    """At most ``count`` of ``values``, evenly spaced, including both ends."""
    if len(values) <= count:
        return values
    return values[torch.linspace(0, len(values) - 1, count, dtype=torch.float64).round().long()]
