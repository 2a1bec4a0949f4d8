"""The page that sets the paper's figures beside the reproduced ones, made from stored results
alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from reproduction.recipe import Recipe
from wball.provenance import describe_model
from wball.zoo import list_models, load_model

ASSETS = "assets/reproduction"


def template(name: str) -> str:
    """The introduction of a page: a file beside this one."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def folded(title: str, parts: Iterable[str]) -> str:
    """A part of a page that opens on a click, here and where the repository is shown."""
    inner = "\n\n".join(part.strip() for part in parts)
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{inner}\n\n</details>'


def text(results: Mapping[str, dict[str, Any]], recipes: Mapping[str, Recipe]) -> str:
    """The page of stored results."""
    parts = [template("reproduction.md")]
    for name, content in results.items():
        parts.append(section(recipes[name], content))
    return "\n".join(part.rstrip() + "\n" for part in parts)


def section(made: Recipe, content: dict[str, Any]) -> str:
    """One recipe's part of the page."""
    data, origin = content["data"], content["provenance"]
    lines = [f"## {made.title}", "", f"In the paper: {made.place}. Recipe: `{made.name}`.", ""]
    if content["quick"]:
        lines += [
            "!!! warning",
            "    A quick run: few images and tiny models. The numbers mean little.",
            "",
        ]
    for table in made.tables(data):
        lines += [table.markdown(), ""]
    lines += [f"- {remark}" for remark in made.remarks(data)]
    for model, why in content["missing"].items():
        lines.append(f"- Left out: `{model}` ({why}).")
    for model in sorted(set(replaced(data))):
        lines.append(
            f"- `{model}`: measured with earlier weights. Those of the zoo were trained anew since."
        )
    if made.draw is not None:
        lines += ["", f"![{made.title}]({ASSETS}/{made.name}.png)"]
    lines += ["", f"<small>results/paper/{made.name}.json, {origin['device']}</small>", ""]
    return "\n".join(lines)


def replaced(data: Any) -> Iterator[str]:
    """Models of the zoo that a result was measured on, and that have other weights now."""
    if isinstance(data, Mapping):
        name, checksum = data.get("name"), data.get("sha256")
        if checksum is not None and name in list_models() and checksum != _checksum(name):
            yield name
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
    for part in parts:
        yield from replaced(part)


@cache
def _checksum(name: str) -> str:
    """Of the weights that the zoo has now."""
    return str(describe_model(load_model(name))["sha256"])
