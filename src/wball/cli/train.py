"""``wball train``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from wball.cli import choices, options
from wball.cli.app import command
from wball.cli.models import load_one, own_network
from wball.storage.names import printable


@command
def train(
    preset: Annotated[str, Argument(metavar="PRESET", hidden=True)],
    model: Annotated[
        str | None,
        Option(
            "--model", "-m", metavar="MODEL", help="your own network: mine.py or mine.py:function"
        ),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            "--data",
            "-d",
            metavar="NAME",
            help="your own training images: a folder of class folders, an .npz file, or "
            "mine.py:function",
        ),
    ] = None,
    test_data: Annotated[
        str | None,
        Option(metavar="NAME", help="your own test images, as in --data"),
    ] = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    grey: options.Grey = False,
    data_dir: options.DataDir = Path("data"),
    limit: options.Limit = None,
    epochs: Annotated[int | None, Option(metavar="N", help="number of epochs")] = None,
    batch_size: Annotated[int | None, Option(metavar="N", help="images per step")] = None,
    time_limit: Annotated[
        float | None,
        Option(
            metavar="SECONDS",
            help="limit the training time; schedules are shortened",
        ),
    ] = None,
    init: Annotated[Path | None, Option(metavar="FILE", help="weights to fine-tune")] = None,
    teacher: Annotated[
        str | None,
        Option(
            metavar="MODEL",
            help="model for soft labels (with --set loss.teacher=0.5), as in `wball evaluate`",
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="PATH=VALUE",
            help="change a setting, such as adversary.attack.steps=10; repeatable",
        ),
    ] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="name of the trained model")] = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    out: Annotated[
        Path,
        Option("--out", "-o", metavar="DIR", help="folder for weights, card and metrics"),
    ] = Path("out/train"),
) -> int:
    """Train a model with a preset: standard, adversarial or certified training.

    \b
        wball train mnist-adversarial --data-dir data --out out/mnist-adversarial
        wball train mnist-adversarial --model mine.py:net --data photos/train

    PRESET is one of mnist-standard, mnist-binarized, mnist-adversarial-paper,
    mnist-adversarial, mnist-adversarial-cnn, mnist-certified, mnist-certified-far,
    cifar10-standard, cifar10-adversarial, cifar10-certified, cifar10-certified-deep and
    cifar10-small. The second command trains your own network on your own
    images. If interrupted, rerun the same command to resume.
    """
    from wball.data import load_dataset
    from wball.training import preset as find
    from wball.training import train as run
    from wball.training.config import OWN
    from wball.training.presets import override
    from wball.training.state import current, launched

    if test_data is not None and data is None:
        raise typer.BadParameter(
            "--test-data goes with --data: a preset's data set brings its own test images"
        )
    config = find(preset, seed=seed)
    config = config if data is None else replace(config, dataset=OWN)
    network = None if model is None else own_network("--model", model, seed)
    config = config if model is None else replace(config, architecture=OWN)
    guide = None if teacher is None else load_one(teacher, seed)[0]
    given = [choices.setting(c) for c in change or []]
    options_given = (("epochs", epochs), ("batch_size", batch_size), ("name", name))
    given += [(path, value) for path, value in options_given if value is not None]
    for path, value in given:
        config = override(config, path, value)
    with launched(str(choices.device(device).type)) as here:
        tests: Any = None
        if data is None:
            x, y = load_dataset(config.dataset, data_dir, "train", device=here)
            tests = load_dataset(config.dataset, data_dir, "test", device=here)
            if limit is not None:
                some = choices.stratified_sample(y, min(limit, len(y)), seed).to(y.device)
                x, y = x[some], y[some]
        else:
            read = partial(
                options.DataChoice, data_dir=data_dir, resize=resize, crop=crop, grey=grey
            )
            request = replace(read(data), limit=limit)
            images = choices.load_images(request, here, seed, split="train", streamed=True)
            x, y = images.x, images.y
            if test_data is not None:
                measured = choices.load_images(read(test_data), here, seed)
                _same_classes(images, measured)
                tests = measured.x, measured.y

        run(
            config, (x, y), tests, model=network, init=init, teacher=guide, out=out, device=here,
            time_limit=time_limit, on_epoch=_print_epoch,
        )  # fmt: skip
        if current().main:
            print(printable(f"written: {out / config.name}.safetensors"), flush=True)
    return 0


def _same_classes(train: choices.LoadedImages, test: choices.LoadedImages) -> None:
    """Check that both folders have the same classes, which are numbered in the order of names."""
    ours, theirs = train.classes, test.classes
    if ours is not None and theirs is not None and ours != theirs:
        raise typer.BadParameter(
            f"--test-data has the classes {', '.join(theirs)}, but --data has {', '.join(ours)}"
        )


def _print_epoch(record: dict[str, Any]) -> None:
    """Print one line about an epoch."""
    shown = [f"epoch {record['epoch']:3d}", f"{record['seconds']:7.1f} s"]
    shown.append(f"loss {record['loss']:.4f}")
    for name, value in record.items():
        kind, found, eps = name.partition("_accuracy")
        if found:
            shown.append(f"{kind}{eps.replace('_', ' at eps ')} {100 * value:.2f} %")
    if "mean_radius" in record:
        shown.append(f"mean radius {record['mean_radius']:.3f}")
    print("  ".join(shown), flush=True)
