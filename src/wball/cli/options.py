"""Options that several commands share, each defined once.

The fields of these dataclasses are options of the command line, and their docs its help:
``name (METAVAR): help``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument

ATTACKS = ("standard", "fast", "dual-averaging", "pgd", "frank-wolfe")


def complete_models(incomplete: str) -> list[str]:
    """Model names for shell completion."""
    from wball.zoo import list_models, public_models

    return [n for n in (*list_models(), *public_models()) if n.startswith(incomplete)]


Models = Annotated[
    list[str], Argument(metavar="MODEL", autocompletion=complete_models, hidden=True)
]


@dataclass(frozen=True)
class ModelFiles:
    """Options for loading models.

    Attributes:
        architecture (NAME): network of a weights file: a name from `wball models`, or
            mine.py:function; once for all weights files, or once for each in their order
        mean (X,...): normalisation: channel means, such as 0.485,0.456,0.406
        std (X,...): normalisation: channel standard deviations
    """

    architecture: list[str] | None = None
    mean: str | None = None
    std: str | None = None


@dataclass(frozen=True)
class Downloads:
    """Options for data sets.

    Attributes:
        data_dir (DIR): folder of downloaded data sets
    """

    data_dir: Path = Path("data")


@dataclass(frozen=True)
class Reading(Downloads):
    """Options for reading images.

    Attributes:
        limit (N): number of images, with classes in proportion
        resize (N): resize the shorter side of a folder's images
        crop (N): crop a square of this side from the centre
        grey: read a folder's images as greyscale
    """

    limit: int | None = None
    resize: int | None = None
    crop: int | None = None
    grey: bool = False


@dataclass(frozen=True)
class DataChoice(Reading):
    """Options for choosing images.

    Attributes:
        data (NAME): sample or cifar10-sample (bundled), mnist, fashion-mnist, cifar10, a folder of
            class folders, an .npz file, or mine.py:function
    """

    data: str = "sample"


@dataclass(frozen=True)
class Threat:
    """Options for the threat model.

    Attributes:
        window (N): mass moves within N x N pixels (N odd)
        channel_cost (X): mass may change the channel, at this price
    """

    window: int = 5
    channel_cost: float | None = None


@dataclass(frozen=True)
class Machine:
    """Options for the computation.

    Attributes:
        device (NAME): auto, cpu, cuda or cuda:N
        seed (N): random seed
    """

    device: str = "auto"
    seed: int = 0
