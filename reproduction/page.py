"""The page that sets the paper's figures beside the reproduced ones, made from stored results
alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from reproduction import claims
from reproduction.recipe import Recipe
from reproduction.tables import Table
from reproduction.workshop import TRAINED
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
    """The page of stored results: claims first, tables and figures folded."""
    parts = [template("reproduction.md")]
    if results.keys() >= claims.NEEDED:
        made = (table.markdown() for table in claims.tables(results))
        parts.append("\n\n".join(["## Claims", claims.RULE, *made]))
    parts += [template("reproduction_notes.md"), "## Tables and figures"]
    parts += [section(recipes[name], content) for name, content in results.items()]
    parts.append(folded("Networks", [template("weights.md"), networks(results).markdown()]))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def section(made: Recipe, content: dict[str, Any]) -> str:
    """One recipe's part of the page."""
    data, origin = content["data"], content["provenance"]
    lines = [f"In the paper: {made.place}. Recipe: `{made.name}`."]
    if content["quick"]:
        lines.append("**A quick run: few images and tiny models. The numbers mean little.**")
    lines += [table.markdown() for table in made.tables(data)]
    remarks = [*made.remarks(data)]
    remarks += [f"Left out: `{model}` ({why})." for model, why in content["missing"].items()]
    remarks += [
        f"`{model}`: measured with earlier weights. Those of the zoo were trained anew since."
        for model in sorted(set(replaced(data)))
    ]
    remarks += [origin["note"]] if "note" in origin else []
    lines.append("\n".join(f"- {remark}" for remark in remarks))
    if made.draw is not None:
        lines.append(f"![{made.title}]({ASSETS}/{made.name}.png)")
    lines.append(f"<small>results/paper/{made.name}.json, {origin['device']}</small>")
    return folded(made.title, [line for line in lines if line])


def networks(results: Mapping[str, dict[str, Any]]) -> Table:
    """Networks that recipes trained, by name and checksum, with the recipes that measured them."""
    used = dict[tuple[str, str], list[str]]()
    for recipe, content in results.items():
        for entry in _entries(content["data"]):
            if entry.get("origin") in ("models folder", TRAINED):
                uses = used.setdefault((entry["name"], entry["sha256"][:8]), [])
                uses += [recipe] if recipe not in uses else []
    rows = [
        [f"`{name}`", f"`{sha}`", ", ".join(uses)] for (name, sha), uses in sorted(used.items())
    ]
    return Table(["network", "weights (SHA-256)", "recipes"], rows)


def _entries(data: Any) -> Iterator[Mapping[str, Any]]:
    """Parts of a result that name a network and its weights."""
    if isinstance(data, Mapping) and {"name", "sha256"} <= data.keys():
        yield data
    parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
    for part in parts:
        yield from _entries(part)


def replaced(data: Any) -> Iterator[str]:
    """Models of the zoo that a result was measured on, and that have other weights now."""
    for entry in _entries(data):
        if entry["name"] in list_models() and entry["sha256"] != _checksum(entry["name"]):
            yield entry["name"]


@cache
def _checksum(name: str) -> str:
    """Of the weights that the zoo has now."""
    return str(describe_model(load_model(name))["sha256"])
