"""The ``wball`` application: how its commands are declared, and how they print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_AS = {"int": "N", "float": "X", "path": "PATH", "str": "TEXT"}


def _plain_types(ctx: Any, parameters: list[Any]) -> None:
    """Show ``N`` or ``PATH`` where typer shows names of Python types and ranges of numbers."""
    for parameter in parameters:
        if not hasattr(parameter, "display_type_rich"):  # versions of typer that show none of it
            continue
        kind = str(parameter.display_type_rich(ctx)).lower()
        named = parameter.metavar if parameter.param_type_name == "option" else ""
        shown = (
            next((word for name, word in SHOWN_AS.items() if name in kind), "")
            if named is None
            else named
        )
        parameter.display_type_rich = lambda ctx, shown=shown: shown
        parameter._get_number_range_help_str = lambda: None


class Command(TyperCommand):
    """A command whose help is for people who do not read Python types."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _plain_types(ctx, self.get_params(ctx))
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """All commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _plain_types(ctx, self.get_params(ctx))
        super().format_help(ctx, formatter)


app = typer.Typer(
    name="wball",
    cls=Group,
    help="Wasserstein adversarial robustness of image classifiers: attacks, certificates, training, reports.",
    epilog="Radii (eps) are in mass fraction x pixels: 0.1 moves 10 % of an image's mass by one pixel, or 5 % by two.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Register a command. A parameter whose type is a group of options stands for all of them."""
    hints = get_type_hints(function, include_extras=True)
    parameters, groups = dict[str, Parameter](), dict[str, Any]()
    for given in signature(function).parameters.values():
        kind = hints[given.name]
        if is_dataclass(kind):
            groups[given.name] = kind
            options = get_type_hints(kind, include_extras=True)
            found = [(f.name, f.default, options[f.name]) for f in fields(kind)]
        else:
            found = [(given.name, given.default, kind)]
        for name, default, option in found:
            parameters[name] = Parameter(
                name, Parameter.KEYWORD_ONLY, default=default, annotation=option
            )

    @wraps(function)
    def run(**given: Any) -> int:
        made = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            for name, kind in groups.items()
        }
        return function(**given, **made)

    run.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return app.command(cls=Command)(run)


def open_console(quiet: bool = False, as_json: bool = False) -> Console:
    """Where results are printed."""
    from rich.console import Console

    return Console(quiet=quiet or as_json, highlight=False, soft_wrap=True)


def print_json(content: Any) -> None:
    """Plain data on stdout, for programs."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
