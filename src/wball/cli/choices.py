"""What words on the command line mean: data, devices, radii, threat models, attacks.

Slow modules are imported inside the functions, so that ``wball --help`` answers at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wball.cli.models import called, find, said, seed_all
from wball.cli.options import ATTACKS, DataChoice, Threat
from wball.storage.names import printable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wball.attacks import Attack
    from wball.ball import WassersteinBall
    from wball.evaluation.stream import Stream
    from wball.model import Model

SAMPLES = {"sample": "mnist", "cifar10-sample": "cifar10"}
"""Bundled images by name."""

IN_MEMORY = 10**9
"""Data sets of more bytes than this are streamed."""

SEARCHED = 12
"""Images per model that the search for radii attacks."""

LARGEST, SMALL = 8.0, 784
"""The search starts at this radius for images of up to this many values, and at less for larger
ones: the larger an image, the smaller the radius that breaks a network."""


def device(name: str) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda``; under ``torchrun`` each process gets its own
    GPU."""
    import torch

    from wball.inputs import find_device

    try:
        chosen = find_device(name)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None
    if chosen.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        index = chosen.index if chosen.index is not None else local
        count = torch.cuda.device_count()
        if index >= count:
            raise typer.BadParameter(f"--device {name}: there are {count} CUDA devices")
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


@dataclass(frozen=True)
class LoadedImages:
    """Images with labels, their name, the names of the classes if known, and their sources.

    A large data set is a view of a stream, which reads images on demand; all labels are read.
    """

    x: Any
    y: Tensor
    name: str
    classes: Sequence[str] | None
    sources: Sequence[str]

    def take(self, index: Sequence[int], name: str) -> LoadedImages:
        """A subset of the images."""
        chosen = list(index)
        x = self.x.only(chosen) if hasattr(self.x, "only") else self.x[chosen]
        sources = [self.sources[k] for k in chosen]
        return LoadedImages(x, self.y[chosen], name, self.classes, sources)


def load_images(
    request: DataChoice,
    where: torch.device,
    seed: int = 0,
    *,
    split: str = "test",
    default_limit: int | None = None,
    streamed: bool = False,
) -> LoadedImages:
    """Load the images, or a sample of ``--limit`` of them.

    With ``streamed``, a data set that is too large for memory is read on demand.
    """
    from wball.data import is_map, read_items, source_name, to_tensors

    limit = default_limit if request.limit is None else request.limit
    if limit is not None and limit < 1:
        raise typer.BadParameter(f"--limit {limit}: expected at least 1")
    seed_all(seed)
    data, name, classes = _find_data(request, split)
    items = is_map(data)
    try:
        large = _stream(data, where) if streamed and items else None
        x, y = large or (read_items(data, range(len(data))) if items else to_tensors(data))
    except (ValueError, TypeError, OSError):
        raise
    except Exception as error:
        spec = request.data
        raise typer.BadParameter(f"--data {spec}: reading it raised {said(error)}") from error
    names = None if classes is None else [printable(c) for c in classes]
    sources = [printable(source_name(data, k)) for k in range(len(y))]
    images = LoadedImages(x, y, printable(name), names, sources)
    if limit is not None and limit < len(y):
        name = f"{images.name}, a stratified sample of {limit} of {len(y)} (seed {seed})"
        images = images.take(stratified_sample(y, limit, seed).tolist(), name)
    return replace(images, x=images.x.to(where), y=images.y.to(where))


def _find_data(request: DataChoice, split: str) -> tuple[Any, str, Sequence[str] | None]:
    """The data for ``--data``, their name in results, and the names of the classes."""
    from wball.data import ImageFolder, NpzFile, dataset_info, datasets, load_dataset, load_sample

    spec = request.data
    if spec in SAMPLES:
        info = dataset_info(SAMPLES[spec])
        return load_sample(info.name), f"the bundled {info.title} sample", info.classes
    if spec.lower().replace("_", "-") in datasets():
        info = dataset_info(spec)
        data = load_dataset(info.name, request.data_dir, split)  # type: ignore[arg-type]
        return data, f"{info.title} ({split})", info.classes
    path = Path(spec)
    if path.is_dir():
        folder = ImageFolder(path, resize=request.resize, crop=request.crop, grey=request.grey)
        return folder, path.name, folder.classes
    if path.suffix == ".npz":
        return NpzFile(path), path.stem, None
    if ":" in spec:
        made = find(spec)
        return called(spec, made) if callable(made) else made, spec.rsplit(":", 1)[1], None
    raise typer.BadParameter(
        f"--data {spec}: neither a folder nor a data set; use {', '.join(SAMPLES)}, "
        f"{', '.join(datasets())}, a folder of images, an .npz file, or mine.py:function"
    )


def _stream(data: Any, where: torch.device) -> tuple[Stream, Tensor] | None:
    """A stream of a data set that is too large for memory, and all of its labels."""
    from wball.data import labels_of
    from wball.evaluation.stream import dataset_stream

    stream = dataset_stream(data, (0.0, 1.0), where)
    if len(data) == 0 or stream[:1].nbytes * len(data) <= IN_MEMORY:
        return None
    return stream, labels_of(data)


def stratified_sample(y: Tensor, count: int, seed: int) -> Tensor:
    """Indices of ``count`` images, ascending, with classes in proportion.

    Each class gets its share rounded down; the rest goes to the largest remainders, ties in random
    order.
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


def radii(text: str) -> list[float]:
    """Parse radii such as ``0.1,0.2,0.5``."""
    try:
        values = sorted({float(part) for part in text.replace(" ", ",").split(",") if part})
    except ValueError:
        values = []
    if not values or values[0] <= 0 or not values[-1] < math.inf:
        raise typer.BadParameter(
            f"--eps {text}: expected numbers above 0, separated by commas, such as 0.1,0.2,0.5"
        )
    return values


def sensible_radii(
    models: Sequence[Model], images: LoadedImages, ball: WassersteinBall, seed: int
) -> list[float]:
    """Up to five round radii over the range in which accuracy falls, found by a quick attack on a
    few images."""
    import torch

    from wball.attacks import DualAveraging, minimal_radius
    from wball.model import as_found, ask, top_class

    found = []
    top = LARGEST * min(1.0, SMALL / images.x[:1].numel())
    several = stratified_sample(images.y, min(len(images.y), 4 * SEARCHED), seed).to(
        images.y.device
    )
    for model in models:
        with torch.no_grad(), as_found(model, images.x.device):
            right = top_class(ask(model, images.x[several])) == images.y[several]
        if len(some := several[right][:SEARCHED]):
            x, y = images.x[some], images.y[some]
            attack = DualAveraging(ball, objective="margin", steps=10, progress=False)
            radius = minimal_radius(model, x, y, attack, hi=top).radius
            found.append(radius[radius.isfinite() & (radius > 0)].cpu())
    known = torch.cat([*found, torch.zeros(0)])
    low, high = (
        (float(known.quantile(q)) for q in (0.1, 0.9)) if len(known) else (0.01 * top, top / 24)
    )
    return round_numbers(0.5 * low, 1.2 * high)


def round_numbers(low: float, high: float, count: int = 5) -> list[float]:
    """At most ``count`` one-digit numbers between ``low`` and ``high``, evenly spaced on a
    logarithmic scale.

    >>> round_numbers(0.04, 0.6)
    [0.04, 0.08, 0.2, 0.3, 0.6]
    """
    low = max(low, high / 100)
    spaced = (low * (high / low) ** (k / (count - 1)) for k in range(count))
    return sorted({float(f"{value:.1g}") for value in spaced})


def ball(eps: float, how: Threat) -> WassersteinBall:
    """The threat model: moves within a window cost their length."""
    from wball.ball import WassersteinBall
    from wball.cost import GridCost

    return WassersteinBall(eps, GridCost(how.window, channel_cost=how.channel_cost))


def attack(name: str, threat: WassersteinBall) -> Attack:
    """An attack by name."""
    from wball.attacks import PGD, DualAveraging, FrankWolfe, StandardAttack

    makers: dict[str, Any] = {
        "standard": StandardAttack,
        "fast": lambda threat: StandardAttack(threat, version="fast"),
        "dual-averaging": DualAveraging,
        "pgd": PGD,
        "frank-wolfe": FrankWolfe,
    }
    if name not in makers:
        raise typer.BadParameter(f"--attack {name}: expected one of {', '.join(ATTACKS)}")
    return makers[name](threat)


def setting(assignment: str) -> tuple[str, Any]:
    """Read ``PATH=VALUE``, with a JSON value, ``True``, ``False``, ``None``, or a plain string."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise typer.BadParameter(f"expected PATH=VALUE, got {assignment!r}")
    try:
        return path, json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return path, text
