"""The leaderboard as people see it: tables for a terminal, and ``docs/leaderboard.md``, from stored
rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reproduction.leaderboard import BOARD, PROTOCOLS, Protocol, filled
from reproduction.page import template
from reproduction.tables import Table, points
from reproduction.workshop import Data
from wball.attacks.standard import VERSION
from wball.data import dataset_info
from wball.storage.files import read_json, write_whole

PAGE = Path("docs/leaderboard.md")
SHORT = {"frank-wolfe": "Wu, FW", "pgd": "Wu, PGD", "sinkhorn": "Hu"}
"""The predecessors' attacks."""
OURS = "standard"
"""The first members of StandardAttack."""


def tables(content: Data, complete: Sequence[Data] = ()) -> list[Table]:
    """Per data set: models ranked under attack, and their certificates.

    ``complete`` has the rows of complete verification.
    """
    made = []
    for dataset, protocol in PROTOCOLS.items():
        rows = [row for row in content["rows"] if row["dataset"] == dataset]
        if rows:
            made += [
                _attacked(dataset, protocol, rows),
                _certified(dataset, protocol, rows, complete),
            ]
    return [table for table in made if table.rows]


def _attacked(dataset: str, protocol: Protocol, rows: Sequence[Data]) -> Table:
    radii = [f"{r:g}" for r in protocol.radii]
    columns: list[list[float | None]] = [[row["clean"] for row in rows]]
    columns += [[row["attack"]["accuracy"][r] for row in rows] for r in radii]
    cells = [*map(_marked, columns)]
    head = ["#", "model", "network (weights)", "images", "clean", *radii, "reliable"]
    body = [
        [
            str(place + 1),
            f"`{row['name']}` ({row['authors']})" + ("" if is_latest(row) else " †"),
            f"{row['architecture']} ({row['weights']:,})",
            f"{row['images']:,}",
            *(column[place] for column in cells),
            "no" if row["flags"] else "yes",
        ]
        for place, row in enumerate(rows)
    ]
    return Table(head, body, f"{dataset_info(dataset).title}: robust accuracy in percent, by eps")


def is_latest(row: Data) -> bool:
    """Whether a row was measured by the present version of the attack."""
    return bool(row["attack"].get("version_number") == VERSION)


def _certified(
    dataset: str, protocol: Protocol, rows: Sequence[Data], complete: Sequence[Data]
) -> Table:
    radii = [f"{r:g}" for r in protocol.certified]
    shown = [row for row in rows if "accuracy" in row.get("certificate", {})]
    cells = [_marked([row["certificate"]["accuracy"].get(r) for row in shown]) for r in radii]
    body = [
        [
            f"`{row['name']}`",
            f"{row['certificate']['images']:,}",
            f"{100 * row['certificate']['clean']:.1f}",
            *(column[place] for column in cells),
            "; ".join(
                f"{100 * found['proved']:.1f} of {100 * found['clean']:.1f} at {found['eps']:g} ({found['images']:,})"
                for found in complete
                if found["model"] == row["name"]
            )
            or None,
        ]
        for place, row in enumerate(shown)
    ]
    head = ["model", "images", "clean", *radii, "complete verification (images)"]
    return Table(
        head, body, f"{dataset_info(dataset).title}: certified accuracy in percent, by eps"
    )


def predecessors(content: Data, others: Data) -> Table:
    """The best of the predecessors' attacks on public networks, and ours on the same digits."""
    radii, body, steps = PROTOCOLS["mnist"].radii, [], others["steps"]
    for row in (row for row in content["rows"] if row["dataset"] == "mnist"):
        cells: list[str | None] = []
        for eps in radii:
            tried = {
                r["method"]: r["robust"]
                for r in others["rows"]
                if (r["model"], r["eps"], r["images"]) == (row["name"], eps, row["images"])
            }
            best = min((m for m in SHORT if m in tried), key=tried.__getitem__, default=None)
            said = [f"{tried[best]:.1f} ({SHORT[best]})"] if best else []
            said += [f"{tried[OURS]:.1f}"] if OURS in tried else []
            said += [f"{100 * row['attack']['accuracy'][f'{eps:g}']:.1f}"]
            cells.append(" / ".join(said) if best else None)
        if any(cells):
            body.append([f"`{row['name']}`", *cells])
    title = (
        f"Best of three predecessors' attacks with {steps} gradients / first members of "
        f"StandardAttack with {steps} / StandardAttack, by eps"
    )
    return Table(["network", *map("{:g}".format, radii)], body, title)


def _marked(values: Sequence[float | None]) -> list[str | None]:
    """A column in percent, the best in bold."""
    top = points(max((v for v in values if v is not None), default=None) or None)
    return [f"**{s}**" if s is not None and s == top else s for s in map(points, values)]


def photos(found: Data) -> Table:
    """Robust accuracy of a photo classifier (``benchmarks/photos.py``), by attack."""
    radii = [f"{r:g}" for r in found["radii"]]
    body = [
        [f"`{row['attack']}`", *(points(row["accuracy"].get(r)) for r in radii)]
        for row in found["rows"]
        if "attack" in row
    ]
    title = f"{found['images']} crops: robust accuracy of EfficientNet-lite0 in percent, by eps"
    return Table(["attack", *radii], body, title)


def page(content: Data, results: Path) -> str:
    """The page of a board, with what else is known in a folder of results."""
    complete = _known(results / "complete_mnist.json").get("rows", ())
    shown, others = tables(content, complete), _known(results / "predecessors.json")
    shown += [predecessors(content, others)] if others else []
    crops = _known(results / "photos.json")
    notes = [f"- {row['name']}: **{flag}**" for row in content["rows"] for flag in row["flags"]]
    if not all(map(is_latest, content["rows"])):
        notes.append("- † measured with an earlier version of the attack.")
    parts = (
        template("leaderboard.md"),
        *(table.markdown() for table in shown if table.rows),
        "\n".join(notes),
        template("submission.md"),
        *([template("photos.md"), photos(crops).markdown()] if crops else []),
    )
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _known(path: Path) -> Data:
    return read_json(path) if path.is_file() else {}


def write_page(board: Path = BOARD, to: Path = PAGE) -> Path:
    """Write the page beside the documentation."""
    write_whole(to, page(filled(board), board.parent).encode())
    return to
