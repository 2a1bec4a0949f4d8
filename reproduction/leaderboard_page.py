"""The leaderboard as people see it: tables for a terminal, and ``docs/leaderboard.md``, from stored rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reproduction import published
from reproduction.leaderboard import BOARD, PROTOCOLS, Protocol, filled
from reproduction.measure import accuracy_at
from reproduction.page import template
from reproduction.tables import Table, percent
from reproduction.workshop import Data
from wball.data import dataset_info
from wball.storage.files import read_json, write_whole

PAGE = Path("docs/leaderboard.md")


def tables(content: Data) -> list[Table]:
    """One ranked table per data set."""
    made = []
    for dataset, protocol in PROTOCOLS.items():
        rows = [row for row in content["rows"] if row["dataset"] == dataset]
        if rows:
            made.append(_ranking(dataset, protocol, rows))
    return made


def _ranking(dataset: str, protocol: Protocol, rows: Sequence[Data]) -> Table:
    radii, proofs = [f"{r:g}" for r in protocol.radii], [f"{r:g}" for r in protocol.certified]
    columns: list[list[float | None]] = [[row["clean"] for row in rows]]
    columns += [[row["attack"]["accuracy"][r] for row in rows] for r in radii]
    columns += [[row["certificate"].get("accuracy", {}).get(r) for row in rows] for r in proofs]
    cells = [*map(_marked, columns)]
    head = ["#", "model", "network (weights)", "images: attack; certificate", "clean"]
    head += [f"robust {r}" for r in radii] + [f"certified {r}" for r in proofs]
    body = [
        [
            str(place + 1),
            f"{row['name']} ({row['authors']})",
            f"{row['architecture']} ({row['weights']:,})",
            f"{row['images']:,}; {row['certificate'].get('images') or 'none'}",
            *(column[place] for column in cells),
            "no" if row["flags"] else "yes",
        ]
        for place, row in enumerate(rows)
    ]
    return Table([*head, "reliable"], body, f"{dataset_info(dataset).title}, accuracies in percent")


def _marked(values: Sequence[float | None]) -> list[str | None]:
    """A column in percent, the best in bold."""
    shown = [None if v is None else f"{100 * v:.1f}" for v in values]
    best = max((v for v in values if v is not None), default=None)
    top = None if not best else f"{100 * best:.1f}"
    return [f"**{s}**" if s is not None and s == top else s for s in shown]


def claims(content: Data, own: Data | None = None) -> Table | None:
    """What was published about a model, what the attack behind it leaves here (``own``), and what ours leaves."""
    board, body = {row["name"]: row for row in content["rows"]}, []
    here = {row["name"]: row for row in own["rows"]} if own else {}
    for claim in (*published.AUTHORS, *published.OTHERS):
        row = board.get(claim.model)
        if row is None:
            continue
        left = row["attack"]["accuracy"]
        eps = max(float(r) for r in left if float(r) <= claim.eps)
        # As their authors did it: one model has its threshold in front of the attack, not inside the network.
        again, sources = (
            here.get(f"{claim.model}-before", here.get(claim.model)),
            ("text", "scripts"),
        )
        recomputed = None
        if again is not None and claim in published.AUTHORS:
            recomputed = "; ".join(
                f"{percent(accuracy_at(again[s], claim.eps))} ({s})" for s in sources
            )
        said = f"{percent(claim.accuracy)} at eps {claim.eps:g}"
        ours = f"{percent(left[f'{eps:g}'])}" + (
            "" if eps == claim.eps else f" (already at {eps:g})"
        )
        body.append([claim.model, said, claim.place, recomputed, ours])
    head = [
        "model",
        "published",
        "where",
        "that attack, run here",
        "`StandardAttack`, same eps",
    ]
    return Table(head, body, "Published and measured: accuracy under attack") if body else None


def decided(content: Data) -> Table:
    """What complete verification says about the images of each model at each radius, and what it takes."""
    head = ["complete verification", "eps", "images", "clean", "broken", "proved", "undecided"]
    body = [
        [
            f"`{row['model']}`",
            f"{row['eps']:g}",
            f"{row['images']:,}",
            *(percent(row[key]) for key in ("clean", "broken", "proved")),
            f"{percent(row['undecided'])} ({round(row['undecided'] * row['images'])})",
            f"{row['seconds_mean']:.2f}",
            f"{row['seconds_worst']:.1f}",
        ]
        for row in content["rows"]
    ]
    return Table([*head, "mean time (s)", "worst time (s)"], body)


def page(content: Data, own: Data | None = None) -> str:
    """The page of a board; ``own`` is the stored recipe ``authors-weights``."""
    shown = [*tables(content), claims(content, own)]
    flags = [f"- {row['name']}: **{flag}**" for row in content["rows"] for flag in row["flags"]]
    parts = (
        template("leaderboard.md"),
        *(table.markdown() for table in shown if table),
        "\n".join(flags),
        template("submission.md"),
    )
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def beside(results: Path) -> Data | None:
    """The stored recipe ``authors-weights`` of a folder of results."""
    claimed = results / "paper" / "authors-weights.json"
    return read_json(claimed)["data"] if claimed.is_file() else None


def write_page(board: Path = BOARD, to: Path = PAGE) -> Path:
    """Write the page beside the documentation."""
    write_whole(to, page(filled(board), beside(board.parent)).encode())
    return to
