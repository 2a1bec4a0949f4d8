"""Options of the command line: each is defined once, and those that belong together are one group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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

    return [
        name
        for name in (*list_models(), *public_models(), *architectures())
        if name.startswith(incomplete)
    ]


def _in(panel: str) -> Callable[..., Any]:
    """An option that ``--help`` lists under this heading."""
    return partial(typer.Option, rich_help_panel=panel)


data_option, threat_option, attack_option, output_option = map(
    _in, (MODEL_AND_DATA, THREAT, ATTACK, OUTPUT)
)
_model = partial(
    typer.Argument, help=MODEL_HELP, autocompletion=complete_models, show_default=False
)

Models = Annotated[list[str], _model(metavar="MODEL...")]
OneModel = Annotated[str, _model(metavar="MODEL")]
_weights = "weights (.safetensors, .pth) to load into the model; repeat it to compare checkpoints"
Weights = Annotated[
    list[Path] | None, data_option("--weights", "-w", metavar="FILE", help=_weights)
]
_architecture = (
    "what a file of weights is loaded into: a name from `wball models`, or mine.py:function"
)
Architecture = Annotated[str | None, data_option(metavar="NAME", help=_architecture)]
Names = Annotated[
    list[str] | None,
    data_option("--name", help="name of the model in results; repeat it for several"),
]
_mean = "the model expects (image - mean) / std: means by channel, such as 0.485,0.456,0.406"
Mean = Annotated[str | None, data_option(metavar="X,...", help=_mean)]
Std = Annotated[
    str | None, data_option(metavar="X,...", help="standard deviations by channel, with --mean")
]
_data = "sample or cifar10-sample (bundled), mnist, fashion-mnist, cifar10, a folder, .npz file, mine.py:function"
Data = Annotated[str, data_option("--data", "-d", help=_data)]
DataDir = Annotated[
    Path, data_option("--data-dir", envvar="WBALL_DATA", help="folder with downloaded data sets")
]
AnyDataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="WBALL_DATA", help="folder with downloaded data sets"),
]
Split = Annotated[str, data_option(help="test or train")]
_limit = "number of images to use: a random sample with all classes in proportion"
Limit = Annotated[int | None, data_option("--limit", "-n", min=1, help=_limit)]
First = Annotated[int | None, data_option("--first", min=1, help="use only the first N images")]
Size = Annotated[
    int | None, data_option(min=1, help="resize the images of a folder to this height and width")
]
_resize = "resize the shorter side of a folder's images to this, keeping proportions"
Resize = Annotated[int | None, data_option("--resize", min=1, help=_resize)]
Crop = Annotated[
    int | None,
    data_option("--crop", min=1, help="cut a square of this side out of the middle of each image"),
]
_skip = "leave out images that cannot be read or have another size, and say how many"
SkipBad = Annotated[bool, data_option("--skip-bad", help=_skip)]
Grey = Annotated[bool, data_option("--grey", help="read the images of a folder as greyscale")]
_eps = "radii, separated by commas (default: round numbers where accuracy falls)"
Eps = Annotated[str | None, threat_option("--eps", "-e", metavar="X,...", help=_eps)]
OneEps = Annotated[float, threat_option("--eps", "-e", min=0.0, help="radius")]
Window = Annotated[
    int, threat_option(min=1, help="mass moves within a window of this many pixels (odd)")
]
Power = Annotated[
    float, threat_option("--p", min=0.0, help="a move costs its distance to the power p")
]
Mass = Annotated[
    str, threat_option(help="unit of eps: relative (times the image's mass) or absolute")
]
AttackName = Annotated[
    str, attack_option("--attack", "-a", metavar="NAME", help=", ".join(ATTACKS))
]
Steps = Annotated[
    int | None, attack_option(min=1, help="gradient steps, for attacks with such a setting")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="random seed")]
Batch = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="images per batch (default: set by device)"),
]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="print only errors")]
AsJson = Annotated[bool, output_option("--json", help="print the result as JSON and nothing else")]
_certificate = "certificate: interval, dual, crown, anchored, alpha-crown, complete"
Certificate = Annotated[str, typer.Option(metavar="NAME", help=_certificate)]
Overwrite = Annotated[
    bool, output_option("--overwrite", help="discard earlier results in the folder")
]
Report = Annotated[bool, output_option(help="write report.html")]


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
        return (
            self if self.limit is not None or self.first is not None else replace(self, limit=count)
        )


@dataclass(frozen=True)
class GroundCost:
    """What moving mass costs, and the unit of the radius."""

    window: Window = 5
    p: Power = 1.0
    mass: Mass = "relative"
