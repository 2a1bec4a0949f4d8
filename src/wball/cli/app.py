"""The ``wball`` application: how its commands are declared, and how they print."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Option

from wball.storage.names import printable

if TYPE_CHECKING:
    from rich.console import Console

ATTRIBUTE = r"^    (\w+)(?: \((.*?)\))?: (.*(?:\n        .*)*)"
"""A line of the docs of a dataclass: name, metavar and help of an option."""
FLAGS = {"as_json": "json", "change": "set", "kind": "format", "check": "verify"}
"""Options with another name than their field."""
SHORT = {"eps": "e", "attack": "a", "out": "o", "data": "d", "limit": "n", "model": "m"}
VARIABLES = {"data_dir": "WBALL_DATA"}
"""Environment variables."""

app = typer.Typer(
    name="wball",
    help="Wasserstein adversarial robustness of image classifiers.",
    epilog="Radii (eps) are in mass fraction x pixels: 0.1 moves 10 % of an image's mass by one "
    "pixel, or 5 % by two.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(show: bool) -> None:
    if show:
        from wball import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _all(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="log each step to stderr, for any command")
    ] = False,
) -> None:
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("wball").setLevel(logging.INFO)


def _options(kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, default and type of the options that the fields of a dataclass are."""
    told: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        found = re.findall(ATTRIBUTE, cleandoc(base.__doc__ or ""), re.MULTILINE)
        told |= {name: (metavar, " ".join(text.split())) for name, metavar, text in found}
    hints, own = get_type_hints(kind), kind.__annotations__
    for f in sorted(fields(kind), key=lambda f: f.name not in own):  # shared options come last
        flags = [f"--{FLAGS.get(f.name, f.name).replace('_', '-')}"]
        flags += [f"-{SHORT[f.name]}"] if f.name in SHORT else []
        metavar, text = told[f.name]
        variable = VARIABLES.get(f.name)
        option = Option(*flags, metavar=metavar or None, help=text, envvar=variable)
        yield f.name, f.default, Annotated[hints[f.name], option]


def command(function: Callable[..., int | tuple[int, Any]]) -> Callable[..., int]:
    """Register a command, which returns its exit code, and what ``--json`` prints. The fields of a
    dataclass parameter become options."""
    hints = get_type_hints(function, include_extras=True)
    parameters, groups = dict[str, Parameter](), dict[str, Any]()
    for given in signature(function).parameters.values():
        kind = hints[given.name]
        found = [(given.name, given.default, kind)]
        if is_dataclass(kind):
            groups[given.name] = kind
            found = list(_options(kind))
        for name, default, option in found:
            parameters[name] = Parameter(
                name, Parameter.KEYWORD_ONLY, default=default, annotation=option
            )

    @wraps(function)
    def run(**given: Any) -> int:
        as_json = given.get("as_json", False)
        made = {
            name: kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            for name, kind in groups.items()
        }
        # With --json, what the user's code prints goes to stderr.
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            done = function(**given, **made)
        code, content = done if isinstance(done, tuple) else (done, None)
        if as_json and content is not None:
            print_json(content)
        return code

    run.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return app.command()(run)


def open_console(as_json: bool = False) -> Console:
    """The console for results; it prints nothing if JSON is printed instead."""
    from rich.console import Console

    return Console(quiet=as_json, highlight=False, soft_wrap=True)


def say(console: Console, text: object) -> None:
    """Print a line as it is."""
    console.print(printable(str(text)), markup=False)


def print_json(content: Any) -> None:
    """Print plain data as JSON."""
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
