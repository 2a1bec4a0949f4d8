"""Options of the command line: each is defined once, and those that belong together are one group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

MODEL_AND_DATA, THREAT, ATTACK, OUTPUT = "Model and data", "Threat model", "Attack", "Output"
ATTACKS = ("standard", "fast", "dual-averaging", "pgd", "frank-wolfe")

MODEL_HELP = (
    "a bundled model (see `wball models`), a file (.pt, .pt2, .onnx, .safetensors, .pth), `mine.py`, "
    "`mine.py:function` or `package.module:function`"
)


def complete_models(incomplete: str) -> list[str]:
    """Names of models and architectures for the shell's completion."""
    from wball.models import architectures
    from wball.zoo import list_models, public_models

    return [name for name in (*list_models(), *public_models(), *architectures()) if name.startswith(incomplete)]


Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP, autocompletion=complete_models, show_default=False)
]
OneModel = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_models, show_default=False)
]
Weights = Annotated[
    list[Path] | None,
    typer.Option(
        "--weights",
        "-w",
        metavar="FILE",
        help="weights (.safetensors, .pth) to load into the model; repeat it to compare checkpoints",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="what a file of weights is loaded into: a name from `wball models`, or mine.py:function",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option("--name", help="name of the model in results; repeat it for several", rich_help_panel=MODEL_AND_DATA),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="X,...",
        help="the model expects (image - mean) / std: means by channel, such as 0.485,0.456,0.406",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
Std = Annotated[
    str | None,
    typer.Option(metavar="X,...", help="standard deviations by channel, with --mean", rich_help_panel=MODEL_AND_DATA),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        help="sample or cifar10-sample (bundled), mnist, fashion-mnist, cifar10, a folder, .npz file, mine.py:function",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir", envvar="WBALL_DATA", help="folder with downloaded data sets", rich_help_panel=MODEL_AND_DATA
    ),
]
Split = Annotated[str, typer.Option(help="test or train", rich_help_panel=MODEL_AND_DATA)]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        "-n",
        min=1,
        help="number of images to use: a random sample with all classes in proportion",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
First = Annotated[
    int | None, typer.Option("--first", min=1, help="use only the first N images", rich_help_panel=MODEL_AND_DATA)
]
Size = Annotated[
    int | None,
    typer.Option(min=1, help="resize the images of a folder to this height and width", rich_help_panel=MODEL_AND_DATA),
]
Resize = Annotated[
    int | None,
    typer.Option(
        "--resize",
        min=1,
        help="resize the shorter side of a folder's images to this, keeping proportions",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
Crop = Annotated[
    int | None,
    typer.Option(
        "--crop",
        min=1,
        help="cut a square of this side out of the middle of each image",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="leave out images that cannot be read or have another size, and say how many",
        rich_help_panel=MODEL_AND_DATA,
    ),
]
Grey = Annotated[
    bool, typer.Option("--grey", help="read the images of a folder as greyscale", rich_help_panel=MODEL_AND_DATA)
]
Eps = Annotated[
    str | None,
    typer.Option(
        "--eps",
        "-e",
        metavar="X,...",
        help="radii, separated by commas (default: round numbers where accuracy falls)",
        rich_help_panel=THREAT,
    ),
]
OneEps = Annotated[float, typer.Option("--eps", "-e", min=0.0, help="radius", rich_help_panel=THREAT)]
Window = Annotated[
    int,
    typer.Option(min=1, help="mass moves within a window of this many pixels (odd)", rich_help_panel=THREAT),
]
Power = Annotated[
    float, typer.Option("--p", min=0.0, help="a move costs its distance to the power p", rich_help_panel=THREAT)
]
Mass = Annotated[
    str, typer.Option(help="unit of eps: relative (times the image's mass) or absolute", rich_help_panel=THREAT)
]
AttackName = Annotated[
    str, typer.Option("--attack", "-a", metavar="NAME", help=", ".join(ATTACKS), rich_help_panel=ATTACK)
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="gradient steps, for attacks with such a setting", rich_help_panel=ATTACK)
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="random seed")]
Batch = Annotated[int | None, typer.Option("--batch-size", min=1, help="images per batch (default: set by device)")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print only errors", rich_help_panel=OUTPUT)]
AsJson = Annotated[
    bool, typer.Option("--json", help="print the result as JSON and nothing else", rich_help_panel=OUTPUT)
]
Certificate = Annotated[
    str, typer.Option(metavar="NAME", help="certificate: interval, dual, crown, anchored, alpha-crown, complete")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="discard earlier results in the folder", rich_help_panel=OUTPUT)
]
Report = Annotated[bool, typer.Option(help="write report.html", rich_help_panel=OUTPUT)]


@dataclass(frozen=True)
class ModelFiles:
    """How models are loaded and called."""

    weights: Weights = None
    architecture: Architecture = None
    mean: Mean = None
    std: Std = None


@dataclass(frozen=True)
class DataChoice:
    """Images as a command line names them."""

    data: Data = "sample"
    data_dir: DataDir = Path("data")
    split: Split = "test"
    limit: Limit = None
    first: First = None
    size: Size = None
    resize: Resize = None
    crop: Crop = None
    grey: Grey = False
    skip_bad: SkipBad = False

    def or_first(self, count: int) -> DataChoice:
        """As many images as were asked for, or a sample of ``count``."""
        return self if self.limit is not None or self.first is not None else replace(self, limit=count)


@dataclass(frozen=True)
class GroundCost:
    """What moving mass costs, and the unit of the radius."""

    window: Window = 5
    p: Power = 1.0
    mass: Mass = "relative"
