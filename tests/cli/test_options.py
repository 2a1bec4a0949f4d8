"""Options of the command line: defined once, grouped, and the same wherever they appear."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from wball.cli import commands, options
from wball.cli.attack import attack
from wball.cli.certify import certify
from wball.cli.evaluate import evaluate
from wball.cli.options import DataChoice, GroundCost, ModelFiles


@pytest.mark.parametrize(
    "command", [attack, certify, evaluate], ids=lambda command: command.__name__
)
@pytest.mark.parametrize("group", [ModelFiles, DataChoice, GroundCost])
def test_a_group_stands_for_all_of_its_options(command: object, group: type) -> None:
    assert commands.app is not None
    parameters = signature(command).parameters  # type: ignore[arg-type]
    for field in fields(group):
        assert parameters[field.name].default == field.default
    assert not {"files", "pictures", "cost"} & set(parameters)


def test_every_option_is_written_once() -> None:
    """A command that spells out an option of the common ones would drift from the others."""
    common = {
        "--data",
        "--data-dir",
        "--limit",
        "--first",
        "--resize",
        "--crop",
        "--grey",
        "--skip-bad",
        "--overwrite",
    }
    for path in Path(options.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        again = {name for name in common if f'"{name}",' in text}
        assert path.name in ("options.py", "train.py") or not again, (
            path.name,
            again,
        )


def test_a_few_images_unless_more_are_asked_for() -> None:
    assert DataChoice().or_first(10).limit == 10
    assert (
        DataChoice(limit=3).or_first(10).limit == 3
        and DataChoice(first=3).or_first(10).limit is None
    )
