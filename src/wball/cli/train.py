"""``wball train``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from wball.cli import choices, options
from wball.cli.app import command
from wball.cli.models import load_one, own_network
from wball.storage.names import printable


@dataclass(frozen=True)
class Own:
    """Options for networks and data of one's own.

    Attributes:
        model (MODEL): your own network: mine.py or mine.py:function
        data (NAME): your own training images: a folder of class folders, an .npz file, or
            mine.py:function
        test_data (NAME): your own test images, as in --data
        init (FILE): weights to fine-tune
        teacher (MODEL): model for soft labels (with --set loss.teacher=0.5), as in `wball evaluate`
    """

    model: str | None = None
    data: str | None = None
    test_data: str | None = None
    init: Path | None = None
    teacher: str | None = None


@dataclass(frozen=True)
class Run:
    """Options for the run.

    Attributes:
        epochs (N): number of epochs
        batch_size (N): images per step
        time_limit (SECONDS): limit the training time; schedules are shortened
        change (PATH=VALUE): change a setting, such as adversary.attack.steps=10; repeatable
        name (NAME): name of the trained model
        out (DIR): folder for weights, card and metrics
    """

    epochs: int | None = None
    batch_size: int | None = None
    time_limit: float | None = None
    change: list[str] | None = None
    name: str | None = None
    out: Path = Path("out/train")


@command
def train(
    preset: Annotated[str, Argument(metavar="PRESET", hidden=True)],
    own: Own,
    reading: options.Reading,
    how: Run,
    machine: options.Machine,
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

    if own.test_data is not None and own.data is None:
        raise typer.BadParameter(
            "--test-data goes with --data: a preset's data set brings its own test images"
        )
    config, seed, out = find(preset, seed=machine.seed), machine.seed, how.out
    config = config if own.data is None else replace(config, dataset=OWN)
    network = None if own.model is None else own_network("--model", own.model, seed)
    config = config if own.model is None else replace(config, architecture=OWN)
    guide = None if own.teacher is None else load_one(own.teacher, seed)[0]
    given = [choices.setting(c) for c in how.change or []]
    settings = {name: getattr(how, name) for name in ("epochs", "batch_size", "name")}
    given += [(path, value) for path, value in settings.items() if value is not None]
    for path, value in given:
        config = override(config, path, value)
    with launched(str(choices.device(machine.device).type)) as here:
        tests: Any = None
        if own.data is None:
            x, y = load_dataset(config.dataset, reading.data_dir, "train", device=here)
            tests = load_dataset(config.dataset, reading.data_dir, "test", device=here)
            if reading.limit is not None:
                some = choices.stratified_sample(y, min(reading.limit, len(y)), seed).to(y.device)
                x, y = x[some], y[some]
        else:
            request = options.DataChoice(**vars(reading), data=own.data)
            images = choices.load_images(request, here, seed, split="train", streamed=True)
            x, y = images.x, images.y
            if own.test_data is not None:
                request = replace(request, data=own.test_data, limit=None)
                measured = choices.load_images(request, here, seed)
                ours, theirs = images.classes, measured.classes  # numbered in the order of names
                if ours is not None and theirs is not None and ours != theirs:
                    raise typer.BadParameter(
                        f"--test-data has the classes {', '.join(theirs)}, but --data has "
                        f"{', '.join(ours)}"
                    )
                tests = measured.x, measured.y

        run(
            config, (x, y), tests, model=network, init=own.init, teacher=guide, out=out, device=here,
            time_limit=how.time_limit, on_epoch=_print_epoch,
        )  # fmt: skip
        if current().main:
            print(printable(f"written: {out / config.name}.safetensors"), flush=True)
    return 0


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
