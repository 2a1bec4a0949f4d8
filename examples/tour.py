"""A tour through models and data as other libraries make them: timm, and transformers and datasets
of Hugging Face.

    pip install timm transformers datasets
    python examples/tour.py                # random weights, small images, a minute; no download
    python examples/tour.py --images 4

Nothing is wrapped: what each model returns is read as logits (`docs/adapters.md`), and the items of
the data set are dictionaries with a PIL image, as those of Hugging Face. Weights are random, so the
labels are each model's predictions. Packages that are not installed are left out, and named; two
small models in their style always run. For your own model, replace the constructor by
`timm.create_model(name, pretrained=True)` or
`AutoModelForImageClassification.from_pretrained(name)`, and put its normalisation inside with
`wball.Normalized`.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

import wball

SIDE, CLASSES = 32, 10


class InTimmStyle(nn.Module):
    """Features and head are methods of their own, and the head can be exchanged by the number of
    classes."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, 16
        self.default_cfg = {
            "input_size": (3, SIDE, SIDE),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        }
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU()
        )
        self.head = nn.Linear(16, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean((2, 3))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class Output(OrderedDict[str, Any]):
    """A dictionary whose entries are attributes and, by number, items, as a ``ModelOutput``'s are.
    No ``None``."""

    def __init__(self, **entries: Any) -> None:
        super().__init__((name, value) for name, value in entries.items() if value is not None)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@dataclass
class Config:
    hidden_size: int = 16
    num_labels: int = CLASSES
    use_return_dict: bool = True


class InTransformersStyle(nn.Module):
    """Built from a configuration, called with ``pixel_values``; loss and hidden states come with
    the logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.Conv2d(3, config.hidden_size, 8, 8)
        self.encoder = nn.Sequential(
            nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, config.hidden_size)
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        patches = self.embeddings(pixel_values).flatten(2).transpose(1, 2)
        hidden = patches + self.encoder(patches)
        logits = self.classifier(hidden.mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        if not (self.config.use_return_dict if return_dict is None else return_dict):
            return (logits, hidden) if loss is None else (loss, logits, hidden)
        return Output(loss=loss, logits=logits, hidden_states=hidden)


def models_in_their_style() -> dict[str, Callable[[], nn.Module]]:
    return {
        "timm's style": InTimmStyle,
        "transformers' style": lambda: InTransformersStyle(Config()),
        "transformers' style, as a tuple": lambda: InTransformersStyle(
            Config(use_return_dict=False)
        ),
    }


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
            ResNetConfig(
                hidden_sizes=[16, 32], depths=[1, 1], embedding_size=16, num_labels=CLASSES
            )
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
    """Colour images, with items as a Hugging Face data set has them."""

    def __init__(self, images: list[Image.Image], labels: list[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"image": self.images[k], "label": self.labels[k]}


def pictures(images: list[Image.Image], labels: list[int]) -> Any:
    """A data set of Hugging Face's where that is installed, or one in its style."""
    try:
        import datasets
    except ImportError:
        return Pictures(images, labels)
    return datasets.Dataset.from_dict({"image": images, "label": labels})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=8)
    given = parser.parse_args(arguments)
    made = models_in_their_style()
    for package, models in (("timm", timm_models), ("transformers", transformers_models)):
        try:
            made |= models()
        except ImportError:
            print(f"{package} is not installed: its models are left out")
    x, ball = wball.load_sample("cifar10")[0][: given.images], wball.WassersteinBall(0.02)
    images = [
        Image.fromarray(pixels) for pixels in (255 * x).round().byte().permute(0, 2, 3, 1).numpy()
    ]
    for name, construct in made.items():
        torch.manual_seed(0)
        model = construct().eval()
        with torch.no_grad():
            answer: Any = model(x)
        answer = answer[0] if isinstance(answer, tuple) else getattr(answer, "logits", answer)
        data = pictures(images, answer.argmax(1).tolist())
        result = wball.evaluate(
            model,
            data,
            ball=ball,
            radii=[0.005, 0.02],
            attack=wball.DualAveraging(ball, steps=5),
            name=name,
        )
        curve = ", ".join(f"{100 * result.accuracy_at(r):.0f} % at {r:g}" for r in result.radii)
        print(f"{name}: accuracy {100 * result.clean_accuracy:.0f} %, robust accuracy {curve}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
