"""What an evaluation calls things, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict, TypeVar

from wball import inputs
from wball.evaluation.stream import Layout


@dataclass(frozen=True)
class Description:
    """What results say about the model and the data.

    Attributes:
        name: name of the model (default: that of its class).
        data: name of the data.
        classes: names of the classes, for the report (default: those of the data set, or their numbers).
        command: command line to record (default: that of this process).
        layout: the axes of arrays, ``"NCHW"`` or ``"NHWC"``.
    """

    name: str | None = None
    data: str = "data"
    classes: Sequence[str] | None = None
    command: str | None = None
    layout: Layout = "NCHW"


@dataclass(frozen=True)
class Running:
    """How an evaluation is computed and what it keeps.

    Attributes:
        batch_size: images per batch (default: chosen for the device).
        levels: examples have pixels that are multiples of ``1 / (levels - 1)``, with exactly the same mass (256: stored
            as 8-bit images and read back, they are still in the ball and still adversarial). The images must have, too.
        keep: which examples to store: all, a sample, or none (default: all while they take less than a gigabyte, then
            a sample, which is said).
        overwrite: discard earlier results in the folder.
        progress: show a bar with the time left.
    """

    batch_size: int | None = None
    levels: int | None = None
    keep: Literal["all", "sample", "none"] | None = None
    overwrite: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        if self.keep not in (None, "all", "sample", "none"):
            raise ValueError(f'keep must be "all", "sample" or "none", got {self.keep!r}')
        if self.batch_size is not None:
            inputs.check_count("batch_size", self.batch_size)


class Named(TypedDict, total=False):
    """The fields of both, as keywords of their own."""

    name: str | None
    data: str
    classes: Sequence[str] | None
    command: str | None
    layout: Layout
    batch_size: int | None
    levels: int | None
    keep: Literal["all", "sample", "none"] | None
    overwrite: bool
    progress: bool


Group = TypeVar("Group", Description, Running)


def grouped(
    about: Description | None, run: Running | None, named: Mapping[str, Any]
) -> tuple[Description, Running]:
    """Both groups, with the fields that were given as keywords of their own."""
    unknown = sorted(set(named) - set(Named.__annotations__))
    if unknown:
        raise TypeError(f"evaluate() got an unexpected keyword argument {unknown[0]!r}")
    return _with("about", about, Description(), named), _with("run", run, Running(), named)


def _with(argument: str, given: Group | None, default: Group, named: Mapping[str, Any]) -> Group:
    if given is not None and not isinstance(given, type(default)):
        raise TypeError(
            f"{argument} must be a {type(default).__name__}, got {type(given).__name__}"
        )
    mine = {f.name: named[f.name] for f in fields(default) if f.name in named}
    if given is not None and mine:
        raise TypeError(
            f"{', '.join(mine)} and {argument} are both given: put them into {argument}"
        )
    return replace(given or default, **mine)
