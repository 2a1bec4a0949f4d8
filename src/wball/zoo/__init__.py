"""Trained models by name: those that come with the package, and public ones of others
(:mod:`~wball.zoo.public`).

Each model of the package is a pair of files in this folder: ``NAME.safetensors`` with the weights
and ``NAME.json``, its card, with the architecture, the clean accuracy and how it was trained. They
are small, so that everything can be tried without a download.
"""

import json
import os
from importlib import resources
from pathlib import Path

import torch
from torch import nn

from wball.provenance import Plain
from wball.storage.weights import load_weights
from wball.zoo.architectures import build_model
from wball.zoo.public import PublicModel, public_models

__all__ = ["PublicModel", "list_models", "load_model", "model_card", "public_models"]


def list_models() -> list[str]:
    """The names of the bundled models; :func:`public_models` are downloaded instead.

    >>> "mnist-standard" in list_models()
    True
    """
    names = (file.name for file in resources.files(__name__).iterdir())
    return sorted(
        name.removesuffix(".safetensors") for name in names if name.endswith(".safetensors")
    )


def model_card(name: str) -> Plain:
    """The card of a model: architecture, data set and training; for public models also authors,
    source and licence.

    >>> model_card("mnist-standard")["architecture"]
    'mnist-cnn'
    """
    if name in public_models():
        return public_models()[name].card()
    if name not in list_models():
        if Path(name).suffix in (".onnx", ".pt", ".pt2", ".pth", ".safetensors"):
            raise ValueError(
                f"{name!r} is a file, but load_model takes the name of a model; load weights with "
                "wball.load_weights(model, path), ONNX with wball.attacks.adapters.onnx.load and TorchScript with "
                "torch.jit.load"
            )
        raise ValueError(
            f"unknown model {name!r}; the zoo has {', '.join(list_models())}; public models are "
            f"{', '.join(public_models())}"
        )
    return json.loads((resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8"))


def load_model(
    name: str, *, root: str | os.PathLike[str] | None = None, device: torch.device | str = "cpu"
) -> nn.Module:
    """Load a trained model in evaluation mode. It maps images in [0, 1] to logits.

    A public model is downloaded from its authors' repository on first use, checked, and kept in
    ``root`` (default: the folder that ``WBALL_MODELS`` names, or the user's cache). Nothing in its
    file is executed.

    >>> load_model("mnist-standard")(torch.zeros(1, 1, 28, 28)).shape
    torch.Size([1, 10])
    """
    with torch.device("cpu"):  # regardless of the default device: weights are read on the CPU
        model = build_model(model_card(name)["architecture"])
    if name in public_models():
        load_weights(model, public_models()[name].weights(root))
    else:
        with resources.as_file(resources.files(__name__) / f"{name}.safetensors") as path:
            load_weights(model, path)
    return model.eval().to(device)
