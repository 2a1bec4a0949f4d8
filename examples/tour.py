"""A tour through models and data as other libraries make them: timm and Hugging Face transformers.

    pip install timm transformers
    python examples/tour.py                # random weights, small images, a minute; no download
    python examples/tour.py --images 4

Nothing is wrapped: what each model returns is read as logits (`docs/adapters.md`), and the items of the data set are
dictionaries with a PIL image, as those of Hugging Face. Weights are random, so the labels are each model's predictions.
Packages that are not installed are left out, and named. For your own model, replace the constructor by
`timm.create_model(name, pretrained=True)` or `AutoModelForImageClassification.from_pretrained(name)`, and put its
normalisation inside with `wball.Normalized`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import wball

SIDE, CLASSES = 32, 10


def timm_models() -> dict[str, Callable[[], nn.Module]]:
    import timm

    return {
        "timm resnet18": lambda: timm.create_model("resnet18", num_classes=CLASSES),
        "timm mobilenetv3": lambda: timm.create_model("mobilenetv3_small_050", num_classes=CLASSES),
        "timm vit": lambda: timm.create_model(
            "vit_tiny_patch16_224", img_size=SIDE, patch_size=8, depth=2, num_classes=CLASSES
        ),
    }


def transformers_models() -> dict[str, Callable[[], nn.Module]]:
    from transformers import (
        ConvNextConfig,
        ConvNextForImageClassification,
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
    )

    return {
        "transformers ResNet": lambda: ResNetForImageClassification(
            ResNetConfig(hidden_sizes=[16, 32], depths=[1, 1], embedding_size=16, num_labels=CLASSES)
        ),
        "transformers ViT": lambda: ViTForImageClassification(
            ViTConfig(
                image_size=SIDE,
                patch_size=8,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                num_labels=CLASSES,
            )
        ),
        "transformers ConvNeXt": lambda: ConvNextForImageClassification(
            ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=CLASSES)
        ),
    }


class Pictures(Dataset[Any]):
    """The bundled colour images, with items as a Hugging Face data set has them."""

    def __init__(self, count: int) -> None:
        self.x = wball.load_sample("cifar10")[0][:count]
        self.pixels = (255 * self.x).round().byte().permute(0, 2, 3, 1).numpy()
        self.labels = torch.zeros(count, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"image": Image.fromarray(self.pixels[k]), "label": int(self.labels[k])}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8)
    given = parser.parse_args(arguments)
    made: dict[str, Callable[[], nn.Module]] = {}
    for package, models in (("timm", timm_models), ("transformers", transformers_models)):
        try:
            made |= models()
        except ImportError:
            print(f"{package} is not installed: its models are left out")
    data, ball = Pictures(given.images), wball.WassersteinBall(0.02)
    for name, construct in made.items():
        torch.manual_seed(0)
        model = construct().eval()
        with torch.no_grad():
            answer: Any = model(data.x)
        data.labels = getattr(answer, "logits", answer).argmax(1)
        result = wball.evaluate(
            model, data, ball=ball, radii=[0.005, 0.02], attack=wball.DualAveraging(ball, steps=5), name=name
        )
        curve = ", ".join(f"{100 * result.accuracy_at(r):.0f} % at {r:g}" for r in result.radii)
        print(f"{name}: accuracy {100 * result.clean_accuracy:.0f} %, robust accuracy {curve}")
    return 0 if made else 1


if __name__ == "__main__":
    raise SystemExit(main())
