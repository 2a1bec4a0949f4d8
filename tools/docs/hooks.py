"""Draw formulas, and fill the command-line page from the commands themselves, so that it cannot go
stale."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from mathml import with_formulas


def on_page_markdown(markdown: str, **_: Any) -> str:
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", _commands())
    return with_formulas(markdown)


def _commands() -> str:
    import typer

    from wball.cli.commands import app

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    lines = [
        f"## wball {name}",
        "",
        inspect.cleandoc((command.help or "").replace("\b\n", "")),
        "",
        "| | default | |",
        "|---|---|---|",
    ]
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        flags = [*parameter.opts, *parameter.secondary_opts]
        named = flags[0].startswith("-")
        title = (
            ", ".join(f"`{flag}`" for flag in flags)
            if named
            else f"`{parameter.metavar or parameter.name.upper()}`"
        )
        lines.append(
            f"| {title} | {_default(parameter)} | {(parameter.help or '').replace('|', '/')} |"
        )
    return "\n".join(lines)


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or callable(value) or isinstance(value, bool) or value == ():
        return ""
    return f"`{value}`"
