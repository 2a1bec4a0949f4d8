"""Networks at radii where some images survive."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import wball
from wball.data.named import Split


@dataclass(frozen=True)
class Case:
    """A network at a radius.

    Attributes:
        model: a bundled or public network, one in the folder ``models``, or a file NAME.pth.
        eps: the radius.
        dataset: its images.
        images: number of images, at most.
        thresholded: images are made black and white first.
        architecture: of a file that no name describes.
    """

    model: str
    eps: float
    dataset: str = "mnist"
    images: int = 1000
    thresholded: bool = False
    architecture: str = ""

    def network(self, models: Path | None, device: str) -> nn.Module:
        beside, name = Path("models") / self.model, self.architecture
        weights = (models or Path()) / f"{self.model}.pth"
        if beside.is_dir():
            weights = beside / f"{self.model}.safetensors"
            name = json.loads(weights.with_suffix(".json").read_text())["architecture"]
        if name:
            net = wball.load_weights(wball.build_model(name), weights)
        else:
            net = wball.load_model(self.model, root=models)
        return net.to(device).eval().requires_grad_(False)

    def load(self, data: Path, split: Split, part: slice, device: str) -> tuple[Tensor, Tensor]:
        """A part of the images of a split."""
        x, y = wball.load_dataset(self.dataset, data, split)
        x, y = x[part].to(device), y[part].to(device)
        return ((x > 0.5).to(x) if self.thresholded else x), y


def correct(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The images that a network classifies correctly."""
    with torch.no_grad():
        right = (net(x).argmax(1) == y).nonzero().squeeze(1)
    return x[right], y[right]
