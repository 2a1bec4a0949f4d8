"""``wball train``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from wball.cli import choices, options
from wball.cli.app import command
from wball.cli.models import named_model, own_network
from wball.storage.names import printable


@command
def train(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help="a training recipe; an unknown name lists them")
    ],
    model: Annotated[
        str | None,
        options.data_option(
            "--model",
            "-m",
            metavar="MODEL",
            help="your own network, mine.py or mine.py:function, instead of the preset's",
        ),
    ] = None,
    data: Annotated[
        str | None,
        options.data_option(
            "--data",
            "-d",
            help="your own training images instead of the preset's: a folder with one folder per class, an .npz file, "
            "or mine.py:function",
        ),
    ] = None,
    test_data: Annotated[
        str | None,
        options.data_option(
            "--test-data",
            help="images to measure accuracy on, named as in --data (default: nothing is measured on your own data)",
        ),
    ] = None,
    size: options.Size = None,
    grey: options.Grey = False,
    data_dir: options.DataDir = Path("data"),
    out: Annotated[
        Path, typer.Option("--out", "-o", help="folder for weights, card, metrics and checkpoint")
    ] = Path("out/train"),
    device: options.Device = "auto",
    seed: options.Seed = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="number of epochs, instead of the preset's")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="stop after this many seconds; schedules follow the clock"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name of the model, instead of the preset's")
    ] = None,
    limit: options.Limit = None,
    init: Annotated[Path | None, typer.Option(help="weights to fine-tune")] = None,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="network whose answers are a share of the labels (--set loss.teacher=0.5): a bundled one, or "
            "ARCHITECTURE=FILE; may be repeated",
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="change a setting, such as adversary.attack.steps=10; may be repeated",
        ),
    ] = None,
    quiet: options.Quiet = False,
) -> int:
    """Train a model: standard, adversarial in a Wasserstein ball, or certified.

    If interrupted, rerun the same command to resume.

        wball train mnist-adversarial --data-dir data --out out/mnist-adversarial

    Your own network and images, trained as a preset does it:

        wball train mnist-adversarial --model mine.py:net --data photos/train --test-data photos/test --name mine
    """
    from wball.data import load_dataset
    from wball.training import distributed, presets
    from wball.training import preset as find
    from wball.training import train as run
    from wball.training.config import OWN
    from wball.training.presets import override

    if preset not in presets():
        raise typer.BadParameter(f"unknown preset {preset!r}; there are {', '.join(presets())}")
    if test_data is not None and data is None:
        raise typer.BadParameter(
            "--test-data goes with --data: a preset's data set brings its own test images"
        )
    config = find(preset, seed=seed)
    config = config if data is None else replace(config, dataset=OWN)
    network = None if model is None else own_network(model)
    config = config if model is None else replace(config, architecture=OWN)
    guides = [named_model(name) for name in teacher or []]
    given = [choices.setting(c) for c in change or []]
    given += [(k, v) for k, v in (("epochs", epochs), ("name", name)) if v is not None]
    for path, value in given:
        config = override(config, path, value)
    with distributed.launched(str(choices.device(device).type)) as here:
        tests: Any = None
        if data is None:
            x, y = load_dataset(config.dataset, data_dir, "train", device=here)
            tests = load_dataset(config.dataset, data_dir, "test", device=here)
        else:
            read = partial(options.DataChoice, data_dir=data_dir, size=size, grey=grey)
            images = choices.load_images(read(data, split="train"), here)
            x, y = images.x, images.y
            if test_data is not None:
                measured = choices.load_images(read(test_data), here)
                _same_classes(images, measured)
                tests = measured.x, measured.y

        def say(record: dict[str, Any]) -> None:
            if not quiet:
                print(_epoch(record), flush=True)

        chosen = (
            slice(None)
            if limit is None
            else choices.stratified_sample(y, min(limit, len(y)), seed).to(y.device)
        )
        bars = False if quiet else None
        run(
            config, (x[chosen], y[chosen]), tests, model=network, init=init, teacher=guides, out=out, device=here,
            time_limit=time_limit, progress=bars, on_epoch=say,
        )  # fmt: skip
        if distributed.current().main and not quiet:
            print(printable(f"written: {out / config.name}.safetensors"), flush=True)
    return 0


def _same_classes(train: choices.Images, test: choices.Images) -> None:
    """Folders number their classes in the order of their names: both must have the same ones."""
    if (
        train.classes is not None
        and test.classes is not None
        and list(train.classes) != list(test.classes)
    ):
        raise typer.BadParameter(
            f"--test-data has the classes {', '.join(test.classes)}, but --data has {', '.join(train.classes)}"
        )


def _epoch(record: dict[str, Any]) -> str:
    """One line about an epoch."""
    shown = [f"epoch {record['epoch']:3d}", f"{record['seconds']:7.1f} s"]
    shown += [f"loss {record['loss']:.4f}", f"train {100 * record['train_accuracy']:.2f} %"]
    if "clean_accuracy" in record:
        shown.append(f"clean {100 * record['clean_accuracy']:.2f} %")
    if "verified_accuracy" in record:
        shown.append(f"verified {100 * record['verified_accuracy']:.2f} %")
    shown += [
        f"eps {k.rsplit('_', 1)[1]}: {100 * v:.1f} %"
        for k, v in record.items()
        if k.startswith("robust_accuracy")
    ]
    if "mean_radius" in record:
        shown.append(f"mean radius {record['mean_radius']:.3f}")
    return "  ".join(shown)
