"""``python -m wball.training --preset NAME --data DIR --out DIR``: one run, one line per epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from wball.data import load_dataset
from wball.training import distributed
from wball.training.loop import Record, train
from wball.training.presets import override, preset, presets


def line(record: Record) -> str:
    """An epoch's record for people."""
    shown = [f"epoch {record['epoch']:3d}", f"{record['seconds']:7.1f} s"]
    shown += [f"loss {record['loss']:.4f}", f"train {100 * record['train_accuracy']:.2f} %"]
    if "clean_accuracy" in record:
        shown.append(f"clean {100 * record['clean_accuracy']:.2f} %")
    if "verified_accuracy" in record:
        shown.append(f"verified {100 * record['verified_accuracy']:.2f} %")
    shown += [
        f"eps {k.rsplit('_', 1)[1]}: {100 * v:.1f} %" for k, v in record.items() if k.startswith("robust_accuracy")
    ]
    if "mean_radius" in record:
        shown.append(f"mean radius {record['mean_radius']:.3f}")
    return "  ".join(shown)


def parsed(assignment: str) -> tuple[str, Any]:
    """``path=value`` with a JSON value, one of Python's ``True``, ``False``, ``None``, or a plain string."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise typer.BadParameter(f"expected PATH=VALUE, got {assignment!r}")
    try:
        return path, json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return path, text


def main(
    preset_name: Annotated[str, typer.Option("--preset", help=", ".join(presets()))],
    data: Annotated[Path, typer.Option(help="folder with the data set")],
    out: Annotated[Path, typer.Option(help="folder for weights, card, metrics and checkpoint")],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    time_limit: Annotated[float | None, typer.Option(help="seconds; schedules then follow the clock")] = None,
    epochs: Annotated[int | None, typer.Option(help="instead of the preset's")] = None,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    name: Annotated[str | None, typer.Option(help="of the model, instead of the preset's")] = None,
    limit: Annotated[int | None, typer.Option(help="use only the first so many training images")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="steps; default: 2 % of the time")] = None,
    init: Annotated[Path | None, typer.Option(help="weights to start from: fine-tuning")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="PATH=VALUE, such as adversary.attack.steps=10; repeatable")
    ] = None,
) -> None:
    """Train one model. A run that was killed goes on when the same command is given again."""
    config = preset(preset_name, seed=seed)
    changes = [parsed(c) for c in change or []]
    changes += [(k, v) for k, v in (("epochs", epochs), ("name", name)) if v is not None]
    for path, value in changes:
        config = override(config, path, value)
    with distributed.launched(device) as here:
        x, y = load_dataset(config.dataset, data, "train", device=here)
        tests = load_dataset(config.dataset, data, "test", device=here)
        result = train(
            config,
            (x[:limit], y[:limit]),
            tests,
            init=init,
            out=out,
            device=here,
            checkpoint_every=checkpoint_every,
            time_limit=time_limit,
            on_epoch=lambda record: print(line(record), flush=True),
        )
        if distributed.current().main:
            measured = {k: v for k, v in result.card.items() if "accuracy" in k}
            print(f"{out / config.name}.safetensors  {json.dumps(measured)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
