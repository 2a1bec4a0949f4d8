"""Trained models that come with the package: small, so that everything can be tried without a download.

Each model is a pair of files in this folder: ``NAME.safetensors`` with the weights and ``NAME.json``, its card, with
the architecture, the clean accuracy and how it was trained.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import torch
from torch import nn

from wball.models import build_model
from wball.storage.weights import load_weights


def list_models() -> list[str]:
    """The names :func:`load_model` knows.

    >>> "mnist-standard" in list_models()
    True
    """
    return sorted(f.name.removesuffix(".json") for f in resources.files(__name__).iterdir() if f.name.endswith(".json"))


def model_card(name: str) -> dict[str, Any]:
    """What is known about a model: architecture, data set, clean accuracy, training.

    >>> model_card("mnist-standard")["architecture"]
    'mnist-cnn'
    """
    if name not in list_models():
        raise ValueError(f"unknown model {name!r}; the zoo has {', '.join(list_models())}")
    card: dict[str, Any] = json.loads((resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8"))
    return card


def load_model(name: str, *, device: torch.device | str = "cpu") -> nn.Module:
    """A trained model, in evaluation mode: images in [0, 1] in, logits out.

    >>> load_model("mnist-standard")(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 10])
    """
    model = build_model(model_card(name)["architecture"])
    with resources.as_file(resources.files(__name__) / f"{name}.safetensors") as path:
        load_weights(model, path)
    return model.eval().to(device)
