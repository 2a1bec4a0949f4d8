"""Options that several commands share, each defined once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ATTACKS = ("standard", "fast", "dual-averaging", "pgd", "frank-wolfe")


def complete_models(incomplete: str) -> list[str]:
    """Model names for shell completion."""
    from wball.zoo import list_models, public_models

    return [n for n in (*list_models(), *public_models()) if n.startswith(incomplete)]


Models = Annotated[
    list[str], Argument(metavar="MODEL", autocompletion=complete_models, hidden=True)
]
Eps = Annotated[
    str | None, Option("--eps", "-e", metavar="X,...", help="radii, such as 0.05,0.1,0.2")
]
Window = Annotated[int, Option(metavar="N", help="mass moves within N x N pixels (N odd)")]
ChannelCost = Annotated[
    float | None, Option(metavar="X", help="mass may change the channel, at this price")
]
Device = Annotated[str, Option(metavar="NAME", help="auto, cpu, cuda or cuda:N")]
Seed = Annotated[int, Option(metavar="N", help="random seed")]
AsJson = Annotated[bool, Option("--json", help="print the result as JSON and nothing else")]
DataDir = Annotated[
    Path,
    Option("--data-dir", envvar="WBALL_DATA", metavar="DIR", help="folder of downloaded data sets"),
]
Limit = Annotated[
    int | None,
    Option("--limit", "-n", metavar="N", help="number of images, with classes in proportion"),
]
Resize = Annotated[
    int | None,
    Option(metavar="N", help="resize the shorter side of a folder's images"),
]
Crop = Annotated[
    int | None,
    Option(metavar="N", help="crop a square of this side from the centre"),
]
Grey = Annotated[bool, Option("--grey", help="read a folder's images as greyscale")]


@dataclass(frozen=True)
class ModelFiles:
    """Options for loading models."""

    architecture: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="network of a weights file: a name from `wball models`, or mine.py:function; once "
            "for all weights files, or once for each in their order",
        ),
    ] = None
    mean: Annotated[
        str | None,
        Option(
            metavar="X,...",
            help="normalisation: channel means, such as 0.485,0.456,0.406",
        ),
    ] = None
    std: Annotated[
        str | None,
        Option(metavar="X,...", help="normalisation: channel standard deviations"),
    ] = None


@dataclass(frozen=True)
class DataChoice:
    """Options for choosing images."""

    data: Annotated[
        str,
        Option(
            "--data",
            "-d",
            metavar="NAME",
            help="sample or cifar10-sample (bundled), mnist, fashion-mnist, cifar10, a folder of "
            "class folders, an .npz file, or mine.py:function",
        ),
    ] = "sample"
    data_dir: DataDir = Path("data")
    limit: Limit = None
    resize: Resize = None
    crop: Crop = None
    grey: Grey = False
