"""The page that sets the paper's figures beside the reproduced ones, made from stored results alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wball.paper.recipe import Recipe

ASSETS = "assets/reproduction"
HEAD = """\
# The paper, reproduced

<!-- Made by `wball reproduce page` from the JSON files in results/paper: change those, not this page. -->

Every table and figure of *Wasserstein Adversarial Examples via Projected Sinkhorn Iterations* (Wong, Schmidt, Kolter;
ICML 2019), measured again, twice: under **the paper's attack** (`PGD.paper`: projected gradient ascent with lambda 1000
or 3000 and a growing radius, its clamp after the projection included) and under **ours** (`StandardAttack`: only
examples that keep mass, box and distance count). An accuracy under attack is an upper bound: the lower number is the
better attack and the more honest figure for the model.

Ours charges a move its length, as the paper's text does (radii are in mass fraction x pixels). The paper's attack
charges the squared length, as its scripts do ([Attacks](attacks.md)): moves are at least one pixel long, so its ball is
the smaller one at the same radius. Both say so in the tables.

On a GPU the attacks on ResNet-18 in the stored CIFAR-10 results took their gradients in bfloat16. Whether an image is
broken was decided in float32, and images that only bfloat16 took for broken were attacked again in float32; survivors
were not, so those accuracies are upper bounds in this respect, too. Since then `wball reproduce` attacks in float32.

The models are trained here, except in `authors-weights`, which attacks the weights that the authors published. All
public models under one protocol are on the [leaderboard](leaderboard.md).

How the models were trained is in their cards and in [Training](training.md#how-far-it-goes): those called *adv.
training* follow the paper's recipe, but for fewer epochs.

One command makes each of them: `wball reproduce NAME --data-dir DATA`; `--quick` runs in minutes on two cores,
`wball reproduce list` lists them.
"""


def text(results: Mapping[str, dict[str, Any]], recipes: Mapping[str, Recipe]) -> str:
    """The page of stored results."""
    parts = [HEAD]
    if not results:
        parts.append("No results are stored yet.")
    for name, content in results.items():
        parts.append(section(recipes[name], content))
    absent = [name for name in recipes if name not in results]
    if results and absent:
        parts.append("## Not measured yet\n\n" + "\n".join(f"- `{name}`: {recipes[name].title}" for name in absent))
    return "\n".join(part.rstrip() + "\n" for part in parts)


def section(made: Recipe, content: dict[str, Any]) -> str:
    """One recipe's part of the page."""
    data, origin = content["data"], content["provenance"]
    lines = [f"## {made.title}", "", f"In the paper: {made.place}. Recipe: `{made.name}`.", ""]
    if content["quick"]:
        lines += ["!!! warning", "    A quick run: few images and tiny models. The numbers mean little.", ""]
    for table in made.tables(data):
        lines += [table.markdown(), ""]
    lines += [f"- {remark}" for remark in made.remarks(data)]
    for model, why in content["missing"].items():
        lines.append(f"- Left out: `{model}` ({why}).")
    for what, why in data.get("left_out", {}).items():
        lines.append(f"- Left out: {what} ({why}).")
    if made.draw is not None:
        lines += ["", f"![{made.title}]({ASSETS}/{made.name}.png)"]
    where = f"{origin['device']}, kernel {origin['kernel']}, torch {origin['versions']['torch']}, seed {origin['seed']}"
    took = f"{origin['seconds']:g} s" + (f" ({origin['note']})" if "note" in origin else "")
    commits = ", parts at ".join(map(_commit, (origin["commit"], *origin.get("earlier_commits", ()))))
    lines += [
        "",
        f"<small>`{origin['command']}` on {where}; commit {commits}, {took}.</small>",
        "",
    ]
    return "\n".join(lines)


def _commit(said: str) -> str:
    """
    >>> _commit(40 * "a"), _commit(40 * "a" + " with local changes")
    ('aaaaaaaaaaaa', 'aaaaaaaaaaaa with local changes')
    """
    number, _, more = said.partition(" ")
    return f"{number[:12]} {more}".rstrip()
