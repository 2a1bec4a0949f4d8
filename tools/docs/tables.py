"""Fill the tables of README.md and docs/*.md from results/, so that no figure in them is typed by
hand.

A page marks the place; what is between the two lines is replaced:

    <!-- table: calls -->
    <!-- /table -->

``python tools/docs/tables.py`` rewrites the pages, ``--check`` names those that are stale and exits
with 1.
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

from reproduction import leaderboard_page  # noqa: E402
from reproduction.tables import Table, percent  # noqa: E402
from wball.storage.files import write_whole  # noqa: E402

Row = dict[str, Any]
BLOCK = re.compile(r"^(<!-- table: (\S+) -->)\n.*?^(<!-- /table -->)$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!-- (?:table: .*|/table) -->$", re.MULTILINE)


class BlockError(ValueError):
    """A block that cannot be filled: unknown, not closed, or without its result."""


def calls(gpu: Path, cpu: Path) -> list[Table]:
    """Time of public calls on a GPU and on a CPU, and whether all images converged."""
    found, other = (
        {
            row["call"]: row
            for row in _content(path)["rows"]
            # StandardAttack has a table of its own: its time depends on how robust a network is.
            if "tol" not in row["call"] and not row["call"].startswith("StandardAttack")
        }
        for path in (gpu, cpu)
    )
    cells: list[list[str | None]] = []
    for call in found | other:
        both = found.get(call), other.get(call)
        left = sum(r["of"] - r["converged"] for r in both if r is not None and "converged" in r)
        times = (None if r is None else duration(1e3 * r["seconds"]) for r in both)
        cells.append(
            [call.replace(" x 100", "") + (f" ({left} not converged)" if left else ""), *times]
        )
    return [Table(["public call", "H200", "two CPU cores"], cells)]


def attack_times(board: Path) -> list[Table]:
    """Time of StandardAttack on public networks, with what it leaves."""
    rows = [row for row in _content(board)["rows"] if row["paper"] and row["dataset"] == "mnist"]
    radii = list(rows[0]["attack"]["accuracy"])
    cells = [
        [f"`{row['name']}`"]
        + [f"{100 * row['attack']['accuracy'][eps]:.1f}" for eps in radii]
        + [f"{row['attack']['seconds'] / len(radii) / row['images'] * 1000:.1f} s"]
        + [str(row["attack"]["version_number"])]
        for row in rows
    ]
    head = ["network", *(f"eps {eps}" for eps in radii), "1,000 digits, one radius", "version"]
    images = min(row["images"] for row in rows)
    return [
        Table(
            head,
            cells,
            f"Left of {images:,} or more digits in percent, and mean time on an H200 that several models shared",
        )
    ]


def public_checks(path: Path) -> list[Table]:
    """Robust accuracy of public networks under the standard attack."""
    found = _content(path)
    cells = [
        [
            f"`{row['model']}`",
            f"{row['eps']:g}",
            f"{row['robust']:.1f} %",
            "yes" if row["reliable"] else "no",
        ]
        for row in found["rows"]
    ]
    head = ["network", "eps", "robust accuracy", "reliable"]
    return [Table(head, cells, f"First {found['images']:,} test digits, version 7")]


def masked(path: Path) -> list[Table]:
    """How many masks the standard attack opens, and how many it calls unreliable."""
    found = _content(path)
    cells = []
    for model, eps in dict.fromkeys((row["model"], row["eps"]) for row in found["rows"]):
        bare, *rows = (row for row in found["rows"] if (row["model"], row["eps"]) == (model, eps))
        groups = (
            [row for row in rows if row["opened"]],
            [row for row in rows if row["opened"] and row["unreliable"]],
            [row for row in rows if not row["opened"] and row["unreliable"]],
            [row for row in rows if row["fooled"]],
        )
        counts = [str(len(group)) for group in groups]
        cells.append([f"`{model}`", f"{eps:g}", f"{bare['robust']:.0f} %", str(len(rows)), *counts])
    head = ["network", "eps", "bare", "masks", "opened", "opened, but called unreliable"]
    head += ["not opened, called unreliable", "fooled the attack"]
    return [Table(head, cells, f"First {found['images']:,} test digits")]


def colours(path: Path) -> list[Table]:
    """Robust accuracy by radius and by what a change of channel costs."""
    found = _content(path)
    rows = found["rows"]
    prices = list(dict.fromkeys(row["channel_cost"] for row in rows))
    cells: list[list[str | None]] = []
    for model, eps in dict.fromkeys((row["model"], row["eps"]) for row in rows):
        here = [row for row in rows if (row["model"], row["eps"]) == (model, eps)]
        robust = {row["channel_cost"]: f"{100 * row['robust']:.1f} %" for row in here}
        cells.append([f"`{model}`", f"{eps:g}", *map(robust.get, prices)])
    head = ["network", "eps", *("never" if p is None else f"at {p:g}" for p in prices)]
    images = f"{found['images']:,} CIFAR-10 images"
    return [Table(head, cells, f"Robust accuracy if mass may change its channel, {images}")]


def steps(path: Path) -> list[Table]:
    """What a step of adversarial training costs."""
    rows = [row for row in _content(path)["rows"] if row["threads"] == 1]
    cells = [
        [row["call"], f"{1e3 * row['seconds']:.0f}", f"{row['share']:.2g}"]
        for row in rows
        if row["call"] != "passes"
    ]
    return [Table(["step", "processor time, ms", "times its network passes"], cells)]


def architectures(path: Path) -> list[Table]:
    """Which ordinary networks certificates follow, by family, and why not the others."""
    rows: list[Row] = _content(path)["rows"]
    families = dict.fromkeys(row["family"] for row in rows)
    cells: list[list[str | None]] = []
    for family in families:
        same = [row for row in rows if row["family"] == family]
        followed = [row for row in same if row["followed"]]
        named = [row["name"] + ("" if row.get("certified", 1) else " °") for row in followed]
        refused = [
            f"{row['name']}: {shortened(row['reason'])}" for row in same if not row["followed"]
        ]
        count = f"{len(followed)} of {len(same)}"
        cells.append([family, count, " · ".join(named) or None, " · ".join(refused) or None])
    followed = [row for row in rows if row["followed"]]
    measured = [row for row in followed if not row["partial"]]
    proved = [row for row in measured if row["certified"]]
    again = sum(row["verified"] == "confirmed" for row in proved)
    said = (
        f"{len(followed)} of {len(rows)} followed. Of {len(measured)} that were also measured, {len(proved)} "
        f"are certified for at least one of two images at 1e-4 (the others are marked °), {again} of "
        f"these are proved again, and attacks contradict {sum(row['below'] for row in measured)}"
    )
    return [Table(["family", "followed", "which", "refused, and why"], cells, said)]


def shortened(reason: str) -> str:
    """The operator and the cause of a refusal.

    >>> shortened("no bound follows aten.median.dim in 2 (a.py, line 3: h.max(2)): it is not known")
    '`median`, it is not known'
    >>> shortened("torch.export cannot read Net (a.py, line 3: f(x)): No Python; write the model")
    '`torch.export`: No Python'
    >>> shortened("the model is TorchScript, which is not read: certify the module")
    'the model is TorchScript, which is not read'
    """
    if reason.startswith(("no bound follows", "torch.export")):
        cause = re.sub(r"^.*\): |^[^(:]*: |; [^;]*$| \(unhinted.*|! For more .*", "", reason)
        operator = re.match(r"no bound follows (?:aten\.)?(\S+?)(?:\.\w+)? ", reason)
        return f"`{operator[1]}`, {cause}" if operator else f"`torch.export`: {cause}"
    return re.split("[:;] ", reason)[0]


def _content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


PORTS = {
    "frank-wolfe": "Frank-Wolfe of Wu et al. 2020",
    "pgd": "PGD over plans of Wu et al. 2020",
    "sinkhorn": "attack of Hu et al. 2020",
}


def _attacked(board: Row, others: Path) -> list[str]:
    """The strongest ported attack on the 2019 paper's defence, and ours, on the same digits."""
    found = _content(others)
    tried = {
        row["method"]: row["robust"] / 100
        for row in found["rows"]
        if (row["model"], row["eps"], row["images"]) == (board["name"], 0.1, board["images"])
    }
    steps, best = found["steps"], min((m for m in PORTS if m in tried), key=tried.__getitem__)
    attack = board["attack"]
    gradients = sum(int(n) for m in attack["members"] for n in re.findall(r"\bsteps (\d+)", m))
    return [
        "robust accuracy of the 2019 paper's adversarially trained network at eps 0.1",
        f"{percent(attack['accuracy']['0.1'])} ({board['images']:,} digits; version {attack['version_number']}, "
        f"up to {gradients:,} gradients; {percent(tried['standard'])} with {steps} of version 6)",
        f"{percent(tried[best])} ({PORTS[best]}, ported, {steps} gradients, examples made valid; same digits)",
    ]


def _certified(rows: dict[str, Row], smoothing: Path, name: str, eps: str) -> list[str]:
    """Our certificate of a network, and the best smoothed classifier of Levine and Feizi: of all
    their networks and noise levels."""
    proofs = rows[name]["certificate"]
    measured = [row for row in _content(smoothing)["rows"] if row["stage"] == "full"]
    same = [row for row in measured if row["images"] == proofs["images"]]
    best, tight = (
        max((row for row in same if row["votes"] == 10_000), key=lambda row: row[rule][eps])
        for rule in ("authors", "tight")
    )
    more = [row for row in measured if row["votes"] > 10_000]
    screen = [row for row in _content(smoothing)["rows"] if row["stage"] == "screen"]
    networks, noises = (len({row[key] for row in screen}) for key in ("model", "noise"))
    said = [
        f"{percent(best['authors'][eps])} (best of {networks} networks of Levine & Feizi 2020 "
        f"and {noises} noise levels: `{best['model']}` smoothed by noise {best['noise']:g}, "
        "10,000 votes, 95 % confidence; same digits",
        f"{percent(tight['tight'][eps])} with our tight radius, `{tight['model']}`, noise {tight['noise']:g}",
    ]
    if more:
        top = max(more, key=lambda row: row["authors"][eps])
        said += [
            f"{percent(top['authors'][eps])} of {top['images']} digits with {top['votes']:,} votes"
        ]
    return [
        f"certified accuracy of `{name}` at eps {eps}, for any transport plan",
        f"{percent(proofs['accuracy'][eps])} (the plain network, deterministic proof; {proofs['images']:,} digits)",
        "; ".join(said) + ")",
    ]


def _projection(path: Path, released: Path, device: str, where: str) -> list[str | None]:
    """Time of our projection in its worst direction, and of the code released with the paper."""
    call = "project, reg 1000, tol 1e-4, mnist x 100"
    ours = [row["seconds"] for row in _content(path)["rows"] if row["call"].startswith(call)]
    theirs = next(row for row in _content(released)["rows"] if row["device"] == device)
    said = f"code released with the paper, {theirs['iterations']} iterations, median of {theirs['repeats']}"
    return [
        f"entropic projection of 100 digits on {where} (`ball.project`, tol 1e-4; worst of four directions)",
        duration(1e3 * max(ours)) if ours else None,
        f"{duration(1e3 * theirs['seconds'])} ({said})",
    ]


def summary(
    board: Path, gpu: Path, cpu: Path, others: Path, released: Path, smoothing: Path
) -> list[Table]:
    """What a reader should know first: the strongest public predecessor in each row, on the same
    ball."""
    rows = {row["name"]: row for row in _content(board)["rows"]}
    same = [row for row in rows.values() if row["architecture"] == "mnist-cnn"]
    best = [
        max(
            (row for row in same if (row["paper"] is None) == own),
            key=lambda row: row["attack"]["accuracy"]["0.3"],
        )
        for own in (True, False)
    ]
    said = [
        f"{percent(row['attack']['accuracy']['0.3'])} (`{row['name']}`, {row['images']:,} digits"
        + (")" if leaderboard_page.is_latest(row) else "; earlier version of the attack)")
        for row in best
    ]
    cells = [
        _attacked(rows["wong2019-mnist-adversarial"], others),
        _certified(rows, smoothing, "levine2020-mnist-flow-0.01", "0.02"),
        _certified(rows, smoothing, "mnist-certified", "0.01"),
        ["best robust accuracy at eps 0.3 of the architecture of the paper", *said],
        _projection(gpu, released, "NVIDIA H200", "one H200"),
        _projection(cpu, released, "cpu", "two CPU cores"),
    ]
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
    "public-checks": Source(public_checks, "public_checks.json"),
    "masks": Source(masked, "masks.json"),
    "colours": Source(colours, "colours.json"),
    "summary": Source(
        summary,
        "leaderboard.json",
        "calls_cuda.json",
        "calls_cpu.json",
        "predecessors.json",
        "released.json",
        "smoothing.json",
    ),
    "calls": Source(calls, "calls_cuda.json", "calls_cpu.json"),
    "steps": Source(steps, "steps_cpu.json"),
    "attack-times": Source(attack_times, "leaderboard.json"),
    "architectures": Source(architectures, "architectures.json"),
}


# Words


def origin(content: dict[str, Any], file: str) -> str:
    """File and device, and whether it was a quick run.

    >>> origin({"provenance": {"device": "NVIDIA H200"}}, "a.json")
    'results/a.json, NVIDIA H200'
    """
    about = content.get("environment") or content.get("provenance")
    if about is None:  # each row says where it was measured
        return f"results/{file}"
    device = f"CPU ({about['platform']})" if about["device"] == "cpu" else about["device"]
    quick = "; a quick run, whose numbers mean little" if content.get("quick") else ""
    return f"results/{file}, {device}{quick}"


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
