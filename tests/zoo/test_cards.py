"""Cards say how a model was made: by a command of this package, or that it was not."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest
import torch

import wball
from wball.cli.choices import setting
from wball.training.presets import override, preset, presets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", wball.list_models())
def test_a_card_agrees_with_the_preset_of_its_command(name: str) -> None:
    card = wball.model_card(name)
    training = card["training"]
    if "command" not in training:
        assert name not in presets() or "not these weights" in training["note"]
        return
    words = shlex.split(training["command"])
    assert words[:3] == ["wball", "train", name]
    config = preset(name, seed=training["seed"])
    for option, value in itertools.pairwise(words[3:]):
        if option == "--set":
            config = override(config, *setting(value))
    assert (config.architecture, config.dataset) == (card["architecture"], card["dataset"])
    assert training["epochs"] == config.epochs or "--time-limit" in words
    assert training.get("batch", config.batch_size) == config.batch_size
    if "optimizer" in training:
        assert training["optimizer"].startswith(
            "SGD" if config.optimisation.method == "sgd" else "Adam"
        )
    assert card["summary"].split(",")[0].rstrip(".") in config.summary


def test_zoo_models_classify_the_sample() -> None:
    samples = {name: wball.load_sample(name) for name in ("mnist", "cifar10")}
    for name in wball.list_models():
        card, model = wball.model_card(name), wball.load_model(name)
        assert card["name"] == name and not model.training
        x, y = samples[card["dataset"]]
        with torch.no_grad():
            accuracy = float((model(x).argmax(1) == y).double().mean())
        # Some of the 10,000 images the card is about: four standard deviations of their sampling.
        share = card["clean_accuracy"]
        assert abs(accuracy - share) < 4 * (share * max(0.05, 1 - share) / len(x)) ** 0.5 + 0.005
    assert wball.model_card("cifar10-small")["clean_accuracy"] > 0.69
    assert wball.model_card("mnist-standard")["clean_accuracy"] >= 0.989
    with pytest.raises(ValueError, match="mnist-standard"):
        wball.load_model("mnist-standart")
