"""What words on the command line stand for: data, devices, radii, threat models, attacks.

Modules that take long to import are imported inside the functions, so that ``wball --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from wball.cli.models import called, find, said
from wball.cli.options import ATTACKS, DataChoice, GroundCost
from wball.storage.names import printable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wball.attacks import Attack
    from wball.ball import WassersteinBall
    from wball.evaluation.stream import View
    from wball.model import Model

ROUND = (1, 1.5, 2, 3, 5, 7)
"""Radii found by search are rounded to these numbers times a power of ten."""

SAMPLES = {"sample": "mnist", "mnist-sample": "mnist", "cifar10-sample": "cifar10"}
"""Bundled images by name."""

IN_MEMORY = 10**9
"""Images of no more bytes than this are all held in memory."""

SEARCHED = 12
"""Images per model that a search for sensible radii attacks."""


def device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda``; under ``torchrun`` each process gets its own GPU."""
    import torch

    from wball.inputs import find_device

    try:
        chosen = find_device(name)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    if chosen.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        index = chosen.index if chosen.index is not None else local
        if index >= torch.cuda.device_count():
            raise typer.BadParameter(
                f"--device {name}: there are {torch.cuda.device_count()} CUDA devices"
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


@dataclass(frozen=True)
class Images:
    """Images with labels, a name for them, and the names of the classes if they have any.

    Many images are a view of a stream, which reads them when they are asked for; the labels are all there.
    """

    x: Any
    y: Tensor
    name: str
    classes: Sequence[str] | None


def load_images(
    request: DataChoice, where: torch.device, seed: int = 0, *, streamed: bool = False
) -> Images:
    """The images, or the sample of them that was asked for; ``streamed``: not in memory, if they are many."""
    from wball.data import (
        ImageFolder,
        dataset_info,
        datasets,
        load_dataset,
        load_sample,
        read_items,
        to_tensors,
        without_bad,
    )
    from wball.evaluation.stream import channels_last, read_npz

    spec, split = request.data, _split(request.split)
    if request.limit is not None and request.first is not None:
        raise typer.BadParameter("--limit and --first exclude each other")
    classes: Sequence[str] | None = None
    known = {name.replace("-", "") for name in datasets()}
    data: Any
    x: Any
    if spec in SAMPLES:
        info = dataset_info(SAMPLES[spec])
        data, name, classes = (
            load_sample(info.name),
            f"the bundled {info.title} sample",
            info.classes,
        )
    elif spec.lower().replace("-", "").replace("_", "") in known:
        info = dataset_info(spec)
        data, name, classes = (
            load_dataset(info.name, request.data_dir, split),
            f"{info.title} ({split})",
            info.classes,
        )
    elif Path(spec).is_dir():
        data = ImageFolder(
            spec, size=request.size, resize=request.resize, crop=request.crop, grey=request.grey
        )
        name, classes = Path(spec).name, data.classes
    elif spec.endswith(".npz"):
        images, labels = read_npz(Path(spec))
        if images.ndim == 4 and channels_last(images.shape):
            images = images.transpose(0, 3, 1, 2)
        data, name = to_tensors((images, labels)), Path(spec).stem
    elif ":" in spec:
        made = find(spec)
        data, name = called(spec, made) if callable(made) else made, spec.rsplit(":", 1)[1]
    else:
        raise typer.BadParameter(
            f"--data {spec}: neither a folder nor a data set; use {', '.join(SAMPLES)}, {', '.join(datasets())}, "
            "a folder of images, an .npz file, or mine.py:function"
        )
    try:
        if request.skip_bad and _is_map(data):
            data = without_bad(data)
        many = _many(data, where) if streamed and _is_map(data) else None
        x, y = many or (
            read_items(data, range(len(data)))
            if _is_map(data)
            else to_tensors(data, limit=request.first)
        )
    except (ValueError, TypeError, OSError):
        raise
    except Exception as error:
        raise typer.BadParameter(f"--data {spec}: reading it raised {said(error)}") from error
    name = printable(name)
    if request.first is not None:
        x, y = _chosen(x, y, range(min(request.first, len(y))))
        name = f"{name}, the first {len(y)}"
    elif request.limit is not None and request.limit < len(y):
        name = f"{name}, a stratified sample of {request.limit} of {len(y)} (seed {seed})"
        x, y = _chosen(x, y, stratified_sample(y, request.limit, seed).tolist())
    return Images(
        x.to(where), y.to(where), name, None if classes is None else [printable(c) for c in classes]
    )


def _is_map(data: Any) -> bool:
    """Whether items can be read one by one, by their numbers."""
    from torch.utils.data import Dataset, IterableDataset

    return (
        isinstance(data, Dataset)
        and hasattr(data, "__len__")
        and not isinstance(data, IterableDataset)
    )


def _many(data: Any, where: torch.device) -> tuple[View, Tensor] | None:
    """A stream of a data set that is too large to be held in memory, and all of its labels."""
    import torch

    from wball.data import labels_of
    from wball.evaluation.stream import AT_ONCE, dataset_stream

    stream = dataset_stream(data, (0.0, 1.0), where)
    if len(data) == 0 or stream.images[:1].nbytes * len(data) <= IN_MEMORY:
        return None
    known = labels_of(data)
    if known is None:
        known = torch.cat(
            [stream.labels[k : k + AT_ONCE].cpu() for k in range(0, len(data), AT_ONCE)]
        )
    return stream.images, known


def _chosen(x: Any, y: Tensor, index: Sequence[int]) -> tuple[Any, Tensor]:
    """Some of the images."""
    import torch

    index = list(index)
    return x[index] if isinstance(x, torch.Tensor) else x.only(index), y[index]


def stratified_sample(y: Tensor, count: int, seed: int) -> Tensor:
    """Numbers of ``count`` images, ascending, with classes in proportion; the same for the same seed.

    Each class gets its share rounded down; what is left goes to the largest remainders, ties in random order.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    y = y.cpu()
    classes, sizes = y.unique(return_counts=True)
    exact = sizes.double() * count / len(y)
    taken = exact.long()
    order = torch.randperm(len(classes), generator=generator)
    largest = order[torch.sort((taken - exact)[order], stable=True).indices]
    taken[largest[: count - int(taken.sum())]] += 1
    parts = []
    for label, number in zip(classes.tolist(), taken.tolist(), strict=True):
        members = (y == label).nonzero().squeeze(1)
        parts.append(members[torch.randperm(len(members), generator=generator)[:number]])
    return torch.cat(parts).sort().values


def _split(text: str) -> Literal["train", "test"]:
    if text == "train":
        return "train"
    if text == "test":
        return "test"
    raise typer.BadParameter(f"--split {text}: expected test or train")


def radii(text: str) -> list[float]:
    """``0.1,0.2,0.5`` as numbers."""
    try:
        values = sorted({float(part) for part in text.replace(" ", ",").split(",") if part})
    except ValueError:
        raise typer.BadParameter(
            f"--eps {text}: expected numbers separated by commas, such as 0.1,0.2,0.5"
        ) from None
    if not values or values[0] <= 0 or not values[-1] < float("inf"):
        raise typer.BadParameter(f"--eps {text}: radii must be above 0 and finite")
    return values


def sensible_radii(
    models: Sequence[Model], images: Images, ball: WassersteinBall, seed: int
) -> list[float]:
    """Five round radii in the range where the accuracy of the models falls, by a quick attack on a few images."""
    import torch

    from wball.attacks import DualAveraging, minimal_radius
    from wball.model import as_found, ask, top_class

    found = []
    for model in models:
        with torch.no_grad(), as_found(model, images.x.device):
            some = stratified_sample(images.y, min(len(images.y), 4 * SEARCHED), seed).to(
                images.x.device
            )
            right = some[top_class(ask(model, images.x[some])) == images.y[some]][:SEARCHED]
        if len(right):
            attack = DualAveraging(ball.at(8.0), objective="margin", steps=10, progress=False)
            radius = minimal_radius(
                model, images.x[right], images.y[right], attack, hi=8.0, rounds=3
            ).radius
            found.append(radius[radius.isfinite() & (radius > 0)].cpu())
    known = torch.cat(found) if found else torch.zeros(0)
    if len(known) == 0:
        return [0.05, 0.1, 0.2, 0.3, 0.5]
    low, high = (float(known.quantile(q)) for q in (0.1, 0.9))
    return round_numbers(0.5 * low, 1.2 * high)


def round_numbers(low: float, high: float, count: int = 5) -> list[float]:
    """At most ``count`` round numbers between ``low`` and ``high``, about evenly spaced by ratio.

    >>> round_numbers(0.04, 0.6)
    [0.05, 0.07, 0.15, 0.3, 0.5]
    """
    import math

    low = max(low, high / 100)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    grid = [float(f"{digit * 10.0**power:.2g}") for power in powers for digit in ROUND]
    inside = [r for r in grid if low <= r <= high] or [
        min(grid, key=lambda r: abs(math.log(r / high)))
    ]
    wanted = [low * (high / low) ** (k / max(1, count - 1)) for k in range(count)]
    return sorted({min(inside, key=lambda r: abs(math.log(r / w))) for w in wanted})


def ball(eps: float, cost: GroundCost) -> WassersteinBall:
    from wball.ball import WassersteinBall
    from wball.cost import GridCost

    if cost.mass not in ("relative", "absolute"):
        raise typer.BadParameter(
            f"--mass {cost.mass}: expected relative (eps x the image's mass) or absolute"
        )
    return WassersteinBall(
        eps, GridCost(cost.window, cost.p), "absolute" if cost.mass == "absolute" else "relative"
    )


def attack(name: str, threat: WassersteinBall, steps: int | None) -> Attack:
    """An attack by name. ``steps`` is for those that have a number of steps."""
    from wball.attacks import PGD, DualAveraging, FrankWolfe, StandardAttack

    if name not in ATTACKS:
        raise typer.BadParameter(f"--attack {name}: expected one of {', '.join(ATTACKS)}")
    if name in ("standard", "fast"):
        if steps is not None:
            raise typer.BadParameter(
                f"--steps does not apply to the fixed protocol {name!r}; use --attack dual-averaging"
            )
        return StandardAttack(threat, version="fast" if name == "fast" else "standard")
    settings: dict[str, Any] = {} if steps is None else {"steps": steps}
    makers: dict[str, Any] = {
        "dual-averaging": DualAveraging,
        "pgd": PGD,
        "frank-wolfe": FrankWolfe,
    }
    made: Attack = makers[name](threat, **settings)
    return made


def setting(assignment: str) -> tuple[str, Any]:
    """``path=value`` with a JSON value, one of Python's ``True``, ``False``, ``None``, or a plain string."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise typer.BadParameter(f"expected PATH=VALUE, got {assignment!r}")
    try:
        return path, json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return path, text


def clean_accuracy_hint(model: Model, images: Images, expected: float | None) -> str | None:
    """What to check if the model classifies far fewer images correctly than expected; ``None`` if all is well."""
    import torch

    from wball.model import as_found, ask, top_class

    with torch.no_grad(), as_found(model, images.x.device):
        some = stratified_sample(images.y, min(len(images.y), 100), 0).to(images.x.device)
        logits = ask(model, images.x[some])
    accuracy, classes = (
        float((top_class(logits) == images.y[some]).double().mean()),
        logits.shape[1],
    )
    chance = 1 / classes
    if len(some) < 10 or accuracy >= (
        expected - 0.2 if expected is not None else max(2 * chance, 0.3)
    ):
        return None
    usual = (
        f"{100 * expected:.0f} % is expected"
        if expected is not None
        else f"chance is {100 * chance:.0f} %"
    )
    return (
        f"clean accuracy is only {100 * accuracy:.0f} % ({usual}): does the model expect normalised images (--mean, "
        "--std), other image sizes, or other class numbers?"
    )


@contextlib.contextmanager
def prints_aside(aside: bool) -> Iterator[None]:
    """What the user's own code prints goes to stderr, where stdout is for JSON alone."""
    with contextlib.redirect_stdout(sys.stderr) if aside else contextlib.nullcontext():
        yield


def main_process() -> bool:
    """Whether this process speaks for all of those that ``torchrun`` started."""
    from wball.processes import rank_and_size

    return rank_and_size()[0] == 0
