"""Fill the tables of README.md and docs/*.md from results/, so that no figure in them is typed by hand.

A page marks the place; what is between the two lines is replaced:

    <!-- table: cuda-calls -->
    <!-- /table -->

``python tools/docs/tables.py`` rewrites the pages, ``--check`` names those that are stale and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # a checkout need not be installed

from reproduction import certificates, leaderboard_page  # noqa: E402
from reproduction.tables import Table, percent  # noqa: E402
from wball.storage.atomic import write_whole  # noqa: E402

Row = dict[str, Any]
BLOCK = re.compile(r"^(<!-- table: (\S+) -->)\n.*?^(<!-- /table -->)$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!-- (?:table: .*|/table) -->$", re.MULTILINE)


class BlockError(ValueError):
    """A block that cannot be filled: unknown, not closed, or without its result."""


def certified(path: Path) -> list[Table]:
    """The recipe's own table."""
    return certificates.tables(_content(path)["data"])


def calls(path: Path) -> list[Table]:
    """What public calls take, how many images converged, and launches and reads on a GPU."""
    found = _content(path)["rows"]
    cuda = any("launches" in row for row in found)
    head = ["public call", "takes", "converged", *(["launches", "reads"] if cuda else [])]
    cells = []
    for row in found:
        solved = f"{row['converged']} of {row['of']}" if "converged" in row else None
        counts = [row.get(key) for key in ("launches", "host_reads")] if cuda else []
        more = [None if value is None else str(value) for value in counts]
        cells.append([row["call"], duration(1e3 * row["seconds"]), solved, *more])
    return [Table(head, cells)]


def growth(path: Path) -> list[Table]:
    """Time a pixel, and on a GPU memory beside the batch, against what grows."""
    sizes: dict[str, Callable[[Row], int]] = {
        "batch of 28 × 28": lambda row: row["batch"],
        "side of one image × 3": lambda row: row["shape"][-1],
        "window, 8 images of 32 × 32 × 3": lambda row: row["window"],
    }
    found, tables = _content(path)["rows"], []
    for grows, (title, size) in zip(("batch", "side", "window"), sizes.items(), strict=True):
        rows = [row for row in found if row["grows"] == grows]
        across = sorted({size(row) for row in rows})
        cells = []
        for call in dict.fromkeys(row["call"] for row in rows):
            own = {size(row): row for row in rows if row["call"] == call}
            cells.append([f"{call}, ns a pixel", *(number(own[k]["ns_per_pixel"]) for k in across)])
            if all(row["extra_memory_in_batches"] is not None for row in own.values()):
                memory = (f"{own[k]['extra_memory_in_batches']:.1f}" for k in across)
                cells.append([f"{call}, extra memory / batch", *memory])
        if across:
            tables.append(Table([title, *(f"{k:,}" for k in across)], cells))
    return tables


def decided(path: Path) -> list[Table]:
    """What complete verification says about the images of each model at each radius, and what it takes."""
    return [leaderboard_page.decided(_content(path))]


def public_checks(path: Path) -> list[Table]:
    """What the standard attack leaves of public networks and of the zoo."""
    found = _content(path)
    checks = [r for r in found["rows"] if "stated" in r and r.get("version") != "standard-1"]
    zoo = [*found.get("zoo", ()), *(r for r in found["rows"] if "stated" not in r)]

    def cells(row: Row) -> list[str]:
        reliable = "yes" if row["reliable"] else "no"
        return [f"`{row['model']}`", f"{row['eps']:g}", f"{row['robust']:.1f} %", reliable]

    head = ["network", "eps", "robust accuracy", "reliable"]
    timed = [[*cells(r), f"{r['stated']:.1f} %", f"{r['seconds']:.1f} s"] for r in checks]
    every = [cells(r) for r in sorted(zoo, key=lambda row: (row["model"], row["eps"]))]
    return [
        Table([*head, "version 1", "time"], timed, f"the first {found['images']:,} test digits"),
        Table(head, every, f"{found['zoo_images']} bundled images"),
    ]


def _content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


PORTS = {
    "frank-wolfe": "Frank-Wolfe of Wu et al. 2020",
    "pgd": "PGD over plans of Wu et al. 2020",
    "sinkhorn": "attack of Hu et al. 2020",
}


def _predecessor(others: Path, checks: Path) -> list[str]:
    """The strongest ported attack on the 2019 paper's defence, and ours, on the same digits."""
    found, images = _content(others), 1000
    same = {"model": "wong2019-mnist-adversarial", "eps": 0.1, "images": images}
    theirs, ours = (
        min(
            (row for row in rows if all(row.get(k) == v for k, v in same.items())),
            key=lambda row: row["robust"],
        )
        for rows in (found["rows"], _content(checks)["rows"])
    )
    port = f"{PORTS[theirs['method']]}, ported, {found['steps']} steps, examples made valid"
    return [
        "robust accuracy of the 2019 paper's adversarially trained network at eps 0.1",
        f"{percent(ours['robust'] / 100)} ({images:,} digits)",
        f"{percent(theirs['robust'] / 100)} ({port}; same digits)",
    ]


def summary(
    board: Path, proofs: Path, gpu: Path, cpu: Path, others: Path, checks: Path
) -> list[Table]:
    """What a reader should know first: the strongest public predecessor in each row, on the same network and ball.

    Rows whose models are not on the board are left out.
    """
    rows = {row["name"]: row for row in _content(board)["rows"]}
    cells = [_predecessor(others, checks)]
    if (smoothed := rows.get("levine2020-mnist-flow-0.01")) is not None:
        proved = smoothed["certificate"]["accuracy"]["0.02"]
        theirs = smoothed["smoothing"]["authors"]["0.02"]
        images = f"{smoothed['certificate']['images']:,} digits"
        cells.append(
            [
                "certified accuracy of the network of Levine & Feizi 2020 at eps 0.02, for any transport plan",
                f"{percent(proved)} (the network itself, deterministic; {images})",
                f"{percent(theirs)} (its smoothed classifier, with 95 % confidence; same digits)",
            ]
        )
    digits = _content(proofs)["data"]["sets"][0]
    found = {row["method"].partition(",")[0]: row for row in digits["rows"]}
    said = []
    for method, how in (
        ("anchored", ""),
        ("flow smoothing", "smoothing of the same weights, probabilistic; "),
    ):
        row = found[method]
        share = next(point["accuracy"] for point in row["curve"] if point["eps"] == 0.01)
        said.append(f"{percent(share)} ({how}{row['images']:,} digits)")
    cells.append(
        [f"certified accuracy of `{digits['name']}` at eps 0.01, for any transport plan", *said]
    )
    same = [row for row in rows.values() if row["architecture"] == "mnist-cnn"]
    ours, others = ([row for row in same if (row["paper"] is None) == own] for own in (True, False))
    if ours and others:
        best = [
            max(group, key=lambda row: row["attack"]["accuracy"]["0.3"]) for group in (ours, others)
        ]
        said = [
            f"{percent(row['attack']['accuracy']['0.3'])} (`{row['name']}`, {row['images']:,} digits)"
            for row in best
        ]
        cells.append(["best robust accuracy at eps 0.3 of the architecture of the paper", *said])
    for path, where in ((gpu, "one H200"), (cpu, "two CPU cores")):
        timed = _content(path)["rows"]
        fast, released = (
            next(row for row in timed if row["call"].startswith(f"{name}, mnist x 100"))
            for name in ("project, reg 1000, tol 1e-4", "released projection (peer), reg 1000")
        )
        theirs = f"{duration(1e3 * released['seconds'])} (code released with the paper, {released['iterations']} iterations)"
        told = f"entropic projection of 100 digits on {where} (`ball.project`)"
        cells.append([told, duration(1e3 * fast["seconds"]), theirs])
    head = [
        "MNIST; moves cost their length (p = 1), 5 × 5 window",
        "here",
        "strongest public predecessor",
    ]
    return [Table(head, cells)]


class Source:
    """Where a table comes from (files in results/), and what makes it."""

    def __init__(self, make: Callable[..., list[Table]], *files: str) -> None:
        self.make, self.files = make, files

    def markdown(self, results: Path) -> str:
        paths = [results / file for file in self.files]
        for path, file in zip(paths, self.files, strict=True):
            if not path.is_file():
                raise BlockError(
                    f"there is no results/{file}; take the block out, or make the result"
                )
        said = ", ".join(f"results/{file}" for file in self.files)  # each says where it comes from
        try:
            parts = [table.markdown() for table in self.make(*paths)]
        except (LookupError, TypeError, ValueError, StopIteration) as error:
            raise BlockError(
                f"{said} does not hold what the table shows ({error!r}); make the result again"
            ) from error
        if len(paths) == 1:
            said = origin(_content(paths[0]), self.files[0])
        return "\n\n".join([*parts, f"<small>{said}</small>"])


TABLES = {
    "certified": Source(certified, "paper/certificates.json"),
    "decided": Source(decided, "complete_mnist.json"),
    "public-checks": Source(public_checks, "public_checks.json"),
    "summary": Source(
        summary,
        "leaderboard.json",
        "paper/certificates.json",
        "calls_cuda.json",
        "calls_cpu.json",
        "predecessors.json",
        "public_checks.json",
    ),
    "cuda-calls": Source(calls, "calls_cuda.json"),
    "cpu-calls": Source(calls, "calls_cpu.json"),
    "cuda-growth": Source(growth, "growth_cuda.json"),
    "cpu-growth": Source(growth, "growth_cpu.json"),
}


# Words


def origin(content: dict[str, Any], file: str) -> str:
    """File, device and commit; that it was a quick run, and a note, where the result has them.

    >>> origin({"provenance": {"device": "NVIDIA H200", "commit": 40 * "a"}}, "a.json")
    'results/a.json, NVIDIA H200, commit aaaaaaa'
    """
    about = content.get("environment") or content["provenance"]
    device = f"CPU ({about['platform']})" if about["device"] == "cpu" else about["device"]
    commit, _, local = about["commit"].partition(" ")
    said = f"results/{file}, {device}, commit {commit[:7]} {local}".rstrip()
    if content.get("quick"):
        said += "; a quick run, whose numbers mean little"
    return said + (f"; {about['note']}" if "note" in about else "")


def number(value: float) -> str:
    """Three digits, and no exponent.

    >>> number(0.36672), number(3.409), number(1705.2)
    ('0.367', '3.41', '1,705')
    """
    rounded = float(f"{value:.3g}")
    digits = 2 - math.floor(math.log10(rounded)) if rounded else 0
    return f"{value:,.{max(0, digits)}f}"


def duration(ms: float) -> str:
    """
    >>> duration(0.158), duration(3.409), duration(1705.2)
    ('158 µs', '3.41 ms', '1,705 ms')
    """
    return f"{number(1e3 * ms)} µs" if ms < 0.9995 else f"{number(ms)} ms"


# Pages


def filled(text: str, results: Path) -> str:
    """A page with its blocks as ``results`` has them."""

    def block(found: re.Match[str]) -> str:
        opening, name, closing = found.groups()
        if MARK.search(found[0][len(opening) : -len(closing)]):
            raise BlockError(
                f"the block {name!r} is not closed: it ends with a line <!-- /table -->"
            )
        if name not in TABLES:
            raise BlockError(f"there is no table {name!r}; known are {', '.join(TABLES)}")
        return f"{opening}\n\n{TABLES[name].markdown(results)}\n\n{closing}"

    new, blocks = BLOCK.subn(block, text)
    if len(MARK.findall(text)) != 2 * blocks:
        raise BlockError(
            "a line <!-- table: NAME --> without <!-- /table -->, or the other way round"
        )
    return new


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def stale(root: Path) -> Iterable[tuple[Path, str]]:
    """Pages that differ from what results say, with what they should be."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        try:
            new = filled(text, root / "results")
        except BlockError as error:
            raise BlockError(f"{page.relative_to(root)}: {error}") from error
        if new != text:
            yield page, new


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a page is stale"
    )
    check: bool = parser.parse_args(arguments).check
    try:
        found = list(stale(root))
    except BlockError as error:
        print(error, file=sys.stderr)
        return 1
    for page, new in found:
        print(f"{'stale' if check else 'written'}: {page.relative_to(root)}")
        if not check:
            write_whole(page, new.encode())
    if check and found:
        print("run `python tools/docs/tables.py`", file=sys.stderr)
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
