"""The leaderboard as people see it: tables for a terminal, and ``docs/leaderboard.md``, from stored
rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from reproduction.leaderboard import BOARD, PROTOCOLS, WRONG, Protocol, filled, shared
from reproduction.page import folded, template
from reproduction.tables import Table, points
from reproduction.workshop import Data
from wball.attacks.standard import VERSION
from wball.data import dataset_info
from wball.evaluation.requirements import Comparison, confidence_interval
from wball.storage.files import read_json, write_whole

PAGE = Path("docs/leaderboard.md")
SHORT = {"frank-wolfe": "Wu, FW", "pgd": "Wu, PGD", "sinkhorn": "Hu"}
"""The predecessors' attacks."""
OURS = "standard"
"""The first members of StandardAttack."""


def tables(content: Data) -> list[Table]:
    """Per data set: models ranked under attack, and their certificates."""
    made = []
    for dataset, protocol in PROTOCOLS.items():
        rows = [row for row in content["rows"] if row["dataset"] == dataset]
        if rows:
            made += [_attacked(dataset, protocol, rows), _certified(dataset, protocol, rows)]
    return [table for table in made if table.rows]


def _attacked(dataset: str, protocol: Protocol, rows: Sequence[Data]) -> Table:
    radii = [f"{r:g}" for r in protocol.radii]
    columns = zip(*map(shared, rows), strict=True)
    cells = [*map(_marked, columns)]
    head = ["#", "model", "network (weights)", "clean", *radii, "beats the next at"]
    head += ["reliable"]
    better = [*map(_beaten, rows, rows[1:], [protocol.radii] * len(rows)), None]
    body = [
        [
            str(place + 1),
            f"`{row['name']}` ({row['authors']})" + ("" if is_latest(row) else " †"),
            f"{row['architecture']} ({row['weights']:,})",
            *(column[place] for column in cells),
            better[place],
            "no" if row["flags"] else "yes",
        ]
        for place, row in enumerate(rows)
    ]
    title = f"{dataset_info(dataset).title}: robust accuracy in percent, by eps"
    return Table(head, body, f"{title}; first {protocol.images:,} test images")


def _beaten(row: Data, following: Data, radii: Sequence[float]) -> str | None:
    """Where a model is more robust than the next one, by a paired test on the images of both."""
    won = list[str]()
    for place, eps in enumerate(radii):
        both = [
            [outcome != WRONG and int(outcome) > place for outcome in one["outcomes"]]
            for one in (row, following)
        ]
        pairs = Counter(zip(*both, strict=False))  # the shorter row has the first images
        alone = pairs[True, False], pairs[False, True]
        found = Comparison(eps, (row["name"], following["name"]), alone)
        if found.distinguishable and alone[0] > alone[1]:
            won.append(f"{eps:g}")
    return ", ".join(won) or None


def intervals(content: Data) -> list[Table]:
    """Robust accuracies on all images of a row, as exact 95 % intervals (Clopper and Pearson)."""
    made = []
    for dataset, protocol in PROTOCOLS.items():
        radii = [f"{r:g}" for r in protocol.radii]
        body = [
            [f"`{row['name']}`", f"{row['images']:,}"]
            + [
                f"{points(row['attack']['accuracy'][r])} ("
                + _interval(row["attack"]["accuracy"][r], row["images"])
                + ")"
                for r in radii
            ]
            for row in content["rows"]
            if row["dataset"] == dataset
        ]
        title = f"{dataset_info(dataset).title}: 95 % intervals of robust accuracy, by eps"
        made.append(Table(["model", "images", *radii], body, title))
    return made


def _interval(share: float, images: int) -> str:
    low, high = confidence_interval(round(share * images), images)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def is_latest(row: Data) -> bool:
    """Whether a row was measured by the present version of the attack."""
    return bool(row["attack"].get("version_number") == VERSION)


def _certified(dataset: str, protocol: Protocol, rows: Sequence[Data]) -> Table:
    radii = [f"{r:g}" for r in protocol.certified]
    shown = [row for row in rows if "accuracy" in row.get("certificate", {})]
    cells = [_marked([row["certificate"]["accuracy"].get(r) for row in shown]) for r in radii]
    body = [
        [
            f"`{row['name']}`",
            f"{row['certificate']['images']:,}",
            f"{100 * row['certificate']['clean']:.1f}",
            *(column[place] for column in cells),
        ]
        for place, row in enumerate(shown)
    ]
    head = ["model", "images", "clean", *radii]
    title = f"{dataset_info(dataset).title}: certified accuracy in percent, by eps"
    return Table(head, body, title)


def complete(rows: Sequence[Data]) -> Table:
    """What complete verification proved, disproved and left open: each row has a radius, a limit
    and digits of its own."""
    shares = ("clean", "proved", "broken", "undecided")
    body = [
        [f"`{row['model']}`", f"{row['eps']:g}", f"{row['images']:,}"]
        + [points(row[key]) for key in shares]
        + [f"{row['time_limit']:.3g} s"]
        for row in rows
    ]
    head = ["model", "eps", "digits", *shares, "longest limit of a digit"]
    return Table(head, body, "MNIST: complete verification in percent; rows are not comparable")


def smoothing(found: Data) -> Table:
    """The best smoothed classifiers of Levine and Feizi at each radius, by number of votes."""
    rows = [row for row in found["rows"] if row["stage"] == "full"]
    body = list[list[str | None]]()
    for votes in sorted({row["votes"] for row in rows}):
        for eps in map("{:g}".format, PROTOCOLS["mnist"].certified):
            here = [row for row in rows if row["votes"] == votes]
            best, tight = (max(here, key=lambda r: r[rule][eps]) for rule in ("authors", "tight"))
            said = [
                f"{points(r[rule][eps])} (`{r['model'].removeprefix('levine2020-mnist-')}`, {r['noise']:g})"
                for r, rule in ((best, "authors"), (tight, "tight"))
            ]
            body.append([eps, f"{votes:,}", f"{best['images']:,}", *said])
    head = ["eps", "votes", "digits", "their radius (network, noise)", "our tight radius"]
    title = (
        "MNIST: smoothed classifiers of Levine and Feizi 2020, best certified accuracy in percent"
    )
    return Table(head, body, title)


def predecessors(content: Data, others: Data) -> Table:
    """The best of the predecessors' attacks on public networks, and ours on the same digits."""
    radii, body, steps = PROTOCOLS["mnist"].radii, [], others["steps"]
    most = max(row["images"] for row in others["rows"])
    for row in (row for row in content["rows"] if row["dataset"] == "mnist"):
        cells: list[str | None] = []
        for eps in radii:
            tried = {
                r["method"]: r["robust"]
                for r in others["rows"]
                if (r["model"], r["eps"], r["images"]) == (row["name"], eps, most)
            }
            best = min((m for m in SHORT if m in tried), key=tried.__getitem__, default=None)
            said = [f"{tried[best]:.1f} ({SHORT[best]})"] if best else []
            said += [f"{tried[OURS]:.1f}"] if OURS in tried else []
            if row["images"] == most:
                said += [f"{100 * row['attack']['accuracy'][f'{eps:g}']:.1f}"]
            cells.append(" / ".join(said) if best else None)
        if any(cells):
            body.append([f"`{row['name']}`", *cells])
    title = (
        f"Best of the predecessors' attacks with {steps} gradients / first members of "
        f"StandardAttack with {steps} / StandardAttack where it attacked as many, {most:,} digits"
    )
    return Table(["network", *map("{:g}".format, radii)], body, title)


def fixed_radius(content: Data, others: Data) -> Table:
    """The attack of Hu et al. where it was run, and ours on the same digits."""
    rows, radii = {row["name"]: row for row in content["rows"]}, PROTOCOLS["mnist"].radii
    body = list[list[str | None]]()
    for tried in (r for r in others["rows"] if r["method"] == "sinkhorn"):
        row = rows[tried["model"]]
        place, few = radii.index(tried["eps"]), row["outcomes"][: tried["images"]]
        ours = sum(o != "-" and int(o) > place for o in few) / len(few)
        body.append([f"`{tried['model']}`", f"{tried['eps']:g}", f"{len(few):,}"])
        body[-1] += [f"{tried['robust']:.1f}", points(ours)]
    head = ["network", "eps", "digits", "attack of Hu et al.", "StandardAttack, same digits"]
    return Table(head, body, f"Attack of Hu et al. at a fixed radius, {others['steps']} gradients")


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
    """The page of a board, with what else is known in a folder of results: what a reader decides
    with first, the rest folded."""
    shown = tables(content)
    notes = [f"- {row['name']}: **{flag}**" for row in content["rows"] for flag in row["flags"]]
    early = [row for row in content["rows"] if not is_latest(row)]
    if early:
        versions = {str(row["attack"].get("version_number", "unknown")) for row in early}
        notes.append(f"- † measured with version {', '.join(sorted(versions))} of the attack.")
    parts = [
        template("leaderboard.md"),
        *(table.markdown() for table in shown if table.rows),
        "\n".join(notes),
    ]
    spans = (table.markdown() for table in intervals(content) if table.rows)
    parts.append(folded("Intervals of robust accuracy", spans))
    for title, text, sources in FOLDED:
        made = [
            made(content, _known(results / file))
            for file, made in sources
            if _known(results / file)
        ]
        if made or not sources:
            parts.append(folded(title, [template(text), *(table.markdown() for table in made)]))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


FOLDED: Sequence[tuple[str, str, Sequence[tuple[str, Callable[[Data, Data], Table]]]]] = (
    (
        "Predecessors' attacks on the same digits",
        "predecessors.md",
        (("predecessors.json", predecessors), ("predecessors.json", fixed_radius)),
    ),
    (
        "Predecessors' certificates",
        "smoothing.md",
        (("smoothing.json", lambda _, found: smoothing(found)),),
    ),
    (
        "Complete verification",
        "complete.md",
        (("complete_mnist.json", lambda _, found: complete(found["rows"])),),
    ),
    ("Photos", "photos.md", (("photos.json", lambda _, found: photos(found)),)),
    ("Missing models, and how to add one", "submission.md", ()),
)
"""Title, introduction, and the tables with the results they come from."""


def _known(path: Path) -> Data:
    return read_json(path) if path.is_file() else {}


def write_page(board: Path = BOARD, to: Path = PAGE) -> Path:
    """Write the page beside the documentation."""
    write_whole(to, page(filled(board), board.parent).encode())
    return to
