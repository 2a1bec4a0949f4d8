"""Fill the tables of README.md and docs/*.md from results/, so that no figure in them is typed by hand.

A page marks the place; what is between the two lines is replaced:

    <!-- table: cuda-oracle-batch -->
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
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "src"),
]  # `benchmarks` is not installed; a checkout need not be, either

from benchmarks import report  # noqa: E402
from benchmarks.timing import Time  # noqa: E402
from reproduction import certificates, curves, leaderboard_page, published  # noqa: E402
from reproduction.tables import Table, percent  # noqa: E402
from wball.storage.atomic import write_whole  # noqa: E402

Row = dict[str, Any]
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
BLOCK = re.compile(r"^(<!-- table: (\S+) -->)\n.*?^(<!-- /table -->)$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!-- (?:table: .*|/table) -->$", re.MULTILINE)


class BlockError(ValueError):
    """A block that cannot be filled: unknown, not closed, or without its result."""


# Benchmarks: tables that serve both devices


def oracle_by_batch(path: Path) -> list[Table]:
    """Window 5; the time of a call, whatever the batch."""
    rows = [row for row in _timed(path, "oracle") if row["window"] == 5 and row["images"] in TITLES]
    return [
        _grid("oracle, window 5, batch of", rows, "batch", lambda row: duration(row["time"].median))
    ]


def oracle_by_window(path: Path) -> list[Table]:
    """At the one batch size that was measured with every window: of the call on a GPU, of an image on a CPU.

    Small batches are split over threads or not: on a CPU the processor's time is the one to compare.
    """
    rows = [
        row
        for row in _timed(path, "oracle")
        if row["images"] in TITLES and "torch" not in row["method"]
    ]
    (batch,) = {row["batch"] for row in rows if row["window"] != 5}
    rows = [row for row in rows if row["batch"] == batch]
    if rows[0]["time"].processor is None:
        return [
            _grid(
                f"oracle, batch of {batch}, window",
                rows,
                "window",
                lambda row: duration(row["time"].median),
            )
        ]
    head = f"processor time an image (batch of {batch}), window"
    return [_grid(head, rows, "window", lambda row: duration(row["time"].processor / batch))]


def large_images(path: Path) -> list[Table]:
    """Growth with the side of an image, after the largest batch of CIFAR-10 that has no more pixels than the first."""

    def pixels(row: Row) -> float:
        return float(1e6 * row["time"].median / row["ns_per_pixel"])

    rows = _oracles(path)
    large = [row for row in rows if row["images"] not in TITLES]
    small = max(
        (r for r in rows if r["images"] == "cifar10" and pixels(r) <= pixels(large[0])), key=pixels
    )
    memory = any(row.get("extra_memory") for row in large)
    head = ["oracle, window 5", "batch", "time", "a pixel", *["extra memory / batch"] * memory]
    cells = [
        [
            TITLES.get(row["images"], row["images"]),
            f"{row['batch']:,}",
            duration(row["time"].median),
            f"{number(row['ns_per_pixel'])} ns",
            *[number(row["extra_memory"] or 0.0)] * memory,
        ]
        for row in [small, *large]
    ]
    return [Table(head, cells)]


def projections(path: Path) -> list[Table]:
    """Every method that was timed on the batches on which the released code was, single images left out."""
    rows = _timed(path, "projection")
    tables = []
    for released in (row for row in rows if row["method"] == "released" and row["batch"] > 1):
        same = [
            row for row in rows if all(row[key] == released[key] for key in ("images", "batch"))
        ]
        processor = released["time"].processor is not None
        head = [
            "method",
            "time",
            *["processor"] * processor,
            "sweeps",
            "error",
            "mass error",
            "outside the box",
        ]
        cells = [
            [
                row["method"],
                duration(row["time"].median),
                *[duration(row["time"].processor or 0.0)] * processor,
                str(row["iterations"]) if "iterations" in row else None,
                f"{row['error']:.1e}",
                f"{row['mass_error']:.1e}",
                f"{abs(row['box_violation']):.2g}",
                factor(released["time"].median / row["time"].median)
                if row is not released
                else None,
            ]
            for row in same
        ]
        title = f"{released['batch']:,} {TITLES[released['images']]} images"
        title += f", `reg={released['reg']:g}`, `eps={released['eps']:g}`"
        tables.append(Table([*head, "times faster than released"], cells, title))
    return tables


def threads(path: Path) -> list[Table]:
    """Settings of torch's threads, each a process of its own: by the clock, and by the processor in brackets."""
    rows = _timed(path, "threads")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        said = f"{duration(row['time'].median)} ({duration(row['time'].processor)})"
        cells.setdefault(row["setting"], {})[row["method"]] = said
    titles = {f"{row['batch']} {TITLES[row['images']]} images" for row in rows}
    body = [
        [setting, *(found.get(method) for method in methods)] for setting, found in cells.items()
    ]
    return [Table([", ".join(titles), *methods], body)]


def targets(path: Path) -> list[Table]:
    """What was to be reached and whether it was, as the benchmark itself said."""
    cells = []
    for remark in report.read(path)[2]:
        verdict, _, rest = remark.partition(": ")
        what, _, target = rest.partition(" (target ")
        if target and verdict.removeprefix("not ").startswith("reached"):
            cells.append(
                [
                    what,
                    target.partition(")")[0],
                    verdict if verdict == "reached" else f"**{verdict}**",
                ]
            )
    return [Table(["measured", "target", "verdict"], cells)]


def _timed(path: Path, work: str) -> list[Row]:
    return [
        row
        for row in report.read(path)[0]
        if row["work"] == work and isinstance(row.get("time"), Time)
    ]


def _oracles(path: Path) -> list[Row]:
    """Of the kernel itself, at the usual window."""
    return [
        row for row in _timed(path, "oracle") if row["window"] == 5 and "torch" not in row["method"]
    ]


def _grid(head: str, rows: Sequence[Row], key: str, cell: Callable[[Row], str]) -> Table:
    """Images and methods downwards, ``key`` across."""
    across = sorted({row[key] for row in rows})
    kernels = list(dict.fromkeys(row["method"] for row in rows))
    found: dict[str, dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: kernels.index(row["method"])):
        method = row["method"].removeprefix("wball, ")
        name = TITLES[row["images"]] + (f", {method}" if len(kernels) > 1 else "")
        found.setdefault(name, {})[row[key]] = cell(row)
    return Table(
        [head, *(f"{k:,}" for k in across)],
        [[n, *(c.get(k) for k in across)] for n, c in found.items()],
    )


# Other results


def certified(path: Path) -> list[Table]:
    """The recipe's own table."""
    return certificates.tables(_content(path)["data"])


def defended(path: Path) -> list[Table]:
    """The recipe's own tables."""
    return curves.DEFENCES.tables(_content(path)["data"])


def evaluation(path: Path) -> list[Table]:
    """What one evaluation found, how it was audited, how long it took."""
    found = _content(path)
    summary, audit = found["summary"], found["summary"]["audit"]
    curve = [point for point in summary["curve"] if point["eps"] > 0]
    head = [
        found["settings"]["model"]["name"],
        "clean",
        *(f"eps {point['eps']:g}" for point in curve),
    ]
    accuracy = [
        "accuracy",
        percent(summary["clean_accuracy"]),
        *(percent(point["accuracy"]) for point in curve),
    ]
    counts = {
        "images": summary["images"], "examples audited": audit["checked"], "solved exactly, too": audit["both"],
        "rejected": audit["rejected"],
    }  # fmt: skip
    seconds = sum(found["provenance"]["seconds"].values())
    row = [
        found["settings"]["attack"]["name"],
        *(f"{count:,}" for count in counts.values()),
        f"{seconds:.0f} s",
    ]
    return [Table(head, [accuracy]), Table(["attack", *counts, "attack, audit, report"], [row])]


def calls(path: Path) -> list[Table]:
    """What public calls take, how many of the images converged, and on a GPU what was to be reached and is launched."""
    found = _content(path)["rows"]
    cuda = any("launches" in row for row in found)
    head = ["public call", "takes", "converged", *(["target", "launches", "reads"] if cuda else [])]
    cells = []
    for row in found:
        target, launched, read = (
            row.get(key) for key in ("target_seconds", "launches", "host_reads")
        )
        solved = f"{row['converged']} of {row['of']}" if "converged" in row else None
        counts = [None if target is None else f"≤ {duration(1e3 * target)}", launched, read]
        more = [None if value is None else str(value) for value in counts] if cuda else []
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


def epochs(path: Path) -> list[Table]:
    """Seconds for all training images once, and what was to be reached."""
    rows = [
        [
            row["case"],
            f"{row['images']:,}",
            f"{row['seconds']:.1f} s",
            None if row["target_seconds"] is None else f"{row['target_seconds']:g} s",
        ]
        for row in _content(path)["rows"]
    ]
    return [Table(["one epoch", "images", "takes", "target"], rows)]


def exact(path: Path) -> list[Table]:
    """Processor time of one thread by the reference and compiled."""
    found = _content(path)
    rows: dict[tuple[str, str, float], dict[str, float]] = {}
    for row in found["rows"]:
        key = row["work"], row["images"], row["eps"]
        rows.setdefault(key, {})[row["kernel"]] = row["processor_ms_per_image"]
    cells = [
        [
            f"{work}, {TITLES[images]}, eps {eps:g}",
            duration(t["torch"]),
            duration(t["cpu"]),
            factor(t["torch"] / t["cpu"]),
        ]
        for (work, images, eps), t in rows.items()
    ]
    return [
        Table(
            [f"processor time an image, gap {found['gap']:g}", "torch", "compiled", "factor"], cells
        )
    ]


def proving(path: Path) -> list[Table]:
    """For each network and way the radii across: what is proved, and how long an image takes."""
    rows: dict[tuple[float, ...], list[list[str | None]]] = {}
    cases: dict[str, list[Row]] = {}
    for row in _content(path)["rows"]:
        cases.setdefault(
            f"{row['case']}, {row['images']} image{'s' * (row['images'] > 1)}", []
        ).append(row)
    for case, found in cases.items():
        body = rows.setdefault(tuple(row["eps"] for row in found), [])
        body.append([case, *(percent(row["certified"]) for row in found)])
        body.append(
            [
                "processor time an image",
                *(duration(1e3 * row["seconds_per_image"]) for row in found),
            ]
        )
    return [
        Table(["certified", *(f"eps {eps:g}" for eps in radii)], body)
        for radii, body in rows.items()
    ]


def decided(path: Path) -> list[Table]:
    """What complete verification says about the images of each model at each radius, and what it takes."""
    return [leaderboard_page.decided(_content(path))]


def proved_colours(path: Path) -> list[Table]:
    """What anchored bounds prove of colour images, by network."""
    rows = _content(path)["rows"]
    radii = sorted({row["eps"] for row in rows})
    cells: list[list[str | None]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {row["eps"]: row for row in rows if row["model"] == model}
        found = [
            f"{percent(mine[r]['proved'])} of {mine[r]['images']:,}" if r in mine else None
            for r in radii
        ]
        took = max(row["seconds_mean"] for row in mine.values())
        largest = max(mine.values(), key=lambda row: row["images"])
        cells.append([f"`{model}`", percent(largest["clean"]), *found, f"{took:.2f} s"])
    head = [
        "network",
        "clean",
        *(f"proved at {r:g}" for r in radii),
        "an image takes at most, on average",
    ]
    return [Table(head, cells)]


def residual(path: Path) -> list[Table]:
    """Single images of a deep residual network, decided by complete verification."""
    cells: list[list[str | None]] = [
        [
            f"`{r['model']}`",
            str(r["image"]),
            f"{r['eps']:g}",
            r["status"].lower(),
            f"{r['margin']:.2f}",
            f"{r['seconds']:.0f} s",
        ]
        for r in _content(path)["rows"]
    ]
    return [Table(["ResNet-18", "test image", "eps", "answer", "margin at least", "took"], cells)]


def anchored_training(path: Path) -> list[Table]:
    """Networks trained against the bounds of their certificate: what an attack leaves, and what is proved."""
    radii = ("0.05", "0.1", "0.2", "0.3")
    cells: list[list[str | None]] = []
    for row in _content(path)["rows"]:
        if "proved_first_300" not in row:
            continue
        proved = {**row.get("proved_first_150", {}), **row["proved_first_300"]}
        few = dict.fromkeys(row.get("proved_first_150", {}), " (150 digits)")
        left = row.get("attack_leaves_10000", {}).get("0.05")
        cells.append(
            [
                f"`{row['network']}`"
                if row["network"].startswith("mnist-")
                else f"{row['network']}, {row['settings']}",
                str(row["epochs"]),
                percent(row["clean"]),
                percent(left),
                *(f"{percent(proved[r])}{few.get(r, '')}" for r in radii),
            ]
        )
    head = ["network", "epochs", "clean, 10,000 digits", "an attack leaves at 0.05"]
    return [Table([*head, *(f"eps {r}" for r in radii)], cells)]


def certified_variants(path: Path) -> list[Table]:
    """CIFAR-10 networks made to be certified: what an attack leaves, and what is proved."""
    radii = ("0.001", "0.002", "0.005")
    head = [
        "layers",
        "weights",
        "radii",
        "clean, 10,000 images",
        *(f"an attack leaves at {r}" for r in radii),
    ]
    cells: list[list[str | None]] = []
    for row in _content(path)["certified"]:
        proved, left = row["proved"], row["attack_leaves_first_1000"]
        found = [
            f"{percent(proved[r])} of {proved['images']}" if r in proved else None for r in radii
        ]
        cells.append(
            [
                row["layers"],
                f"{row['weights']:,}",
                row["smooth"],
                percent(row["clean"]),
                *(percent(left[r]) for r in radii),
                *found,
            ]
        )
    return [Table([*head, *(f"proved at {r}" for r in radii)], cells)]


def adversarial_variants(path: Path) -> list[Table]:
    """Defences trained on with perturbed weights: clean, and what an attack leaves."""
    cells: list[list[str | None]] = []
    for row in _content(path)["adversarial"]:
        left = ", ".join(f"{percent(v)} at {r}" for r, v in row["attack_leaves_first_1000"].items())
        cells.append([row["network"], str(row["epochs"]), percent(row["clean_first_1000"]), left])
    return [Table(["network", "epochs", "clean", "an attack leaves"], cells)]


def agreed(path: Path) -> list[Table]:
    """Answers of complete verification beside those of mixed-integer programs, and the times of both."""
    content = _content(path)
    found, boxes = content["transport"], content["linf"]
    answers = found["answers"]
    wrong = sum(row["contradicts"] for row in boxes)
    halves = [
        sorted(row[key] for row in boxes)[len(boxes) // 2] for key in ("seconds", "seconds_milp")
    ]
    cells = [
        [
            "Wasserstein balls",
            f"{found['networks']:,}",
            *(f"{answers.get(name, 0):,}" for name in ("CERTIFIED", "FALSIFIED", "UNKNOWN")),
            str(found["contradictions"]),
            None,
            None,
        ],
        [
            "l-inf balls",
            f"{len(boxes):,}",
            *(
                str(sum(row["answer"] == name for row in boxes))
                for name in ("CERTIFIED", "FALSIFIED", "UNKNOWN")
            ),
            str(wrong),
            *(f"{value:.2f} s" for value in halves),
        ],
    ]
    head = [
        "random networks over",
        "networks",
        "certified",
        "falsified",
        "unknown",
        "contradictions",
    ]
    return [Table([*head, "median time", "of the programs"], cells)]


def scale(gpu: Path, audits: Path, runs: Path) -> list[Table]:
    """What one image costs at each size, and what whole curves took."""
    oracles: dict[str, Row] = {}
    for row in _oracles(gpu):
        name = {"mnist": "28 x 28", "cifar10": "32 x 32 x 3"}.get(row["images"], row["images"])
        oracles[name] = max(oracles.get(name, row), row, key=lambda row: row["batch"])
    checks: dict[str, dict[str, Row]] = {}
    for row in _content(audits)["rows"]:
        checks.setdefault(row["images"], {})[row["network"]] = row
    cells = []
    for name in sorted(
        {*oracles, *checks}, key=lambda name: [int(side) for side in name.split(" x ")]
    ):
        oracle, check = oracles.get(name), checks.get(name, {})
        step = (
            None
            if oracle is None
            else f"{duration(oracle['time'].median / oracle['batch'])} ({oracle['batch']:,})"
        )
        asked = (("linear", "plan_s"), ("convolutional", "exact_s"), ("linear", "exact_s"))
        times = [duration(1e3 * check[kind][key]) if kind in check else None for kind, key in asked]
        cells.append([name, step, *times])
    head = ["one image", "a step of the oracle, H200 (batch)", "audit by its plan"]
    head += ["exact audit, mass goes to neighbours", "exact audit, mass goes far"]
    measured = [
        [
            f"`{model['name']}`",
            found["attack"],
            f"{found['images']:,}",
            str(len(found["curve"]) - 1),
            f"{found['seconds']:,.0f} s",
        ]
        for part in _content(runs)["data"]["sets"]
        for model in part["models"]
        for found in (model["same_ball"], model["standard_attack"])
    ]
    return [
        Table(head, cells),
        Table(["one curve, H200", "attack", "images", "radii", "took"], measured),
    ]


def strength(path: Path) -> list[Table]:
    """Robust accuracy under each adversary, and what it costs."""
    found = _content(path)
    rows = [
        [row["adversary"], percent(row["withstand"]), f"{row['seconds']:,.0f} s"]
        for row in found["rows"]
    ]
    title = f"{found['images']} test digits, `{found['model']}`, eps {found['eps']:g}"
    return [Table(["adversary", "robust accuracy", "time"], rows, title)]


def masks(path: Path) -> list[Table]:
    """Robust accuracy behind each mask at each radius; in brackets where the result is not reliable."""
    found = _content(path)
    radii = sorted({row["eps"] for row in found["rows"]})
    rows = {(row["mask"], row["eps"]): row for row in found["rows"]}
    cells = []
    for name in dict.fromkeys(row["mask"] for row in found["rows"]):
        here = [rows[name, eps] for eps in radii]
        said = [
            f"{row['robust']:.0f} %" if row["reliable"] else f"({row['robust']:.0f} %)"
            for row in here
        ]
        cells.append([name, *said])
    title = f"{found['images']} test digits, `{found['model']}`; in brackets: not reliable"
    return [Table(["mask", *(f"eps {eps:g}" for eps in radii)], cells, title)]


def public_checks(path: Path) -> list[Table]:
    """What both versions of the standard attack leave of public networks, and their times."""
    found = _content(path)
    cells = []
    for first, second in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        shares = [f"{row['robust']:.1f} %" for row in (first, second)]
        times = f"{first['seconds']:.1f} s, {second['seconds']:.1f} s"
        cells.append(
            [
                f"`{first['model']}`",
                f"{first['eps']:g}",
                *shares,
                times,
                "yes" if second["reliable"] else "no",
            ]
        )
    title = f"the first {found['images']:,} test digits"
    every = [
        [
            f"`{row['model']}`",
            f"{row['eps']:g}",
            f"{row['robust']:.1f} %",
            "yes" if row["reliable"] else "no",
        ]
        for row in sorted(found["zoo"], key=lambda row: (row["model"], row["eps"]))
    ]
    of_zoo = f"{found['zoo_images']} bundled images"
    return [
        Table(["network", "eps", "version 1", "version 2", "time", "reliable"], cells, title),
        Table(["network", "eps", "robust accuracy", "reliable"], every, of_zoo),
    ]


def _content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def summary(board: Path, proofs: Path, gpu: Path, cpu: Path) -> list[Table]:
    """What a reader should know first: the strongest public predecessor in each row, on the same network and ball.

    Rows whose models are not on the board are left out.
    """
    rows = {row["name"]: row for row in _content(board)["rows"]}
    cells = []
    if (broken := rows.get("wong2019-mnist-adversarial")) is not None:
        claim = published.OTHERS[0]
        left = broken["attack"]["accuracy"][f"{claim.eps:g}"]
        what = f"robust accuracy of the 2019 paper's adversarially trained network at eps {claim.eps:g}"
        told = f"{percent(claim.accuracy)} (attack of Hu et al. 2020, 10,000 digits)"
        cells.append([what, f"{percent(left)} ({broken['images']:,} digits)", told])
    if (smoothed := rows.get("levine2020-mnist-flow-0.01")) is not None:
        for eps in ("0.02", "0.05"):
            proved, theirs = (
                smoothed["certificate"]["accuracy"][eps],
                smoothed["smoothing"]["authors"][eps],
            )
            what = f"certified accuracy of the network of Levine & Feizi 2020 at eps {eps}, for any transport plan"
            digits = f"{smoothed['certificate']['images']:,} digits"
            cells.append(
                [
                    what,
                    f"{percent(proved)} ({digits})",
                    f"{percent(theirs)} (their smoothing, same digits)",
                ]
            )
    digits = _content(proofs)["data"]["sets"][0]
    found = {row["method"].partition(",")[0]: row for row in digits["rows"]}
    said = []
    for method, how in (("anchored", ""), ("flow smoothing", "smoothing of the same weights, ")):
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
        cells.append(
            ["best robust accuracy at eps 0.3 of the paper's network, whoever trained it", *said]
        )
    for path, where in ((gpu, "one H200"), (cpu, "two CPU cores")):
        timed = {row["call"]: row for row in _content(path)["rows"]}
        fast, released = (
            timed[f"{name}, mnist x 100"]
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
    "cuda-oracle-batch": Source(oracle_by_batch, "bench_cuda.json"),
    "cuda-oracle-window": Source(oracle_by_window, "bench_cuda.json"),
    "cuda-large-images": Source(large_images, "bench_cuda.json"),
    "cuda-projection": Source(projections, "bench_cuda.json"),
    "cuda-targets": Source(targets, "bench_cuda.json"),
    "cpu-oracle-batch": Source(oracle_by_batch, "bench_cpu.json"),
    "cpu-oracle-window": Source(oracle_by_window, "bench_cpu.json"),
    "cpu-large-images": Source(large_images, "bench_cpu.json"),
    "cpu-projection": Source(projections, "bench_cpu.json"),
    "cpu-threads": Source(threads, "bench_cpu.json"),
    "cpu-targets": Source(targets, "bench_cpu.json"),
    "certified": Source(certified, "paper/certificates.json"),
    "decided": Source(decided, "complete_mnist.json"),
    "residual": Source(residual, "complete_resnet18.json"),
    "proved-colours": Source(proved_colours, "complete_cifar10.json"),
    "certified-variants": Source(certified_variants, "training_variants.json"),
    "adversarial-variants": Source(adversarial_variants, "training_variants.json"),
    "anchored-training": Source(anchored_training, "anchored_training.json"),
    "agreed": Source(agreed, "complete_agreement.json"),
    "defences": Source(defended, "paper/defences.json"),
    "evaluation": Source(evaluation, "evaluation_mnist-standard.json"),
    "epochs": Source(epochs, "epochs.json"),
    "exact": Source(exact, "exact.json"),
    "masks": Source(masks, "masks.json"),
    "proving": Source(proving, "proving.json"),
    "public-checks": Source(public_checks, "public_checks.json"),
    "strength": Source(strength, "strength.json"),
    "scale": Source(scale, "bench_cuda.json", "auditing.json", "paper/defences.json"),
    "summary": Source(
        summary, "leaderboard.json", "paper/certificates.json", "calls_cuda.json", "calls_cpu.json"
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


def factor(ratio: float) -> str:
    """
    >>> factor(1258.2), factor(5.42), factor(0.18)
    ('1,258', '5.4', '0.2')
    """
    return f"{ratio:,.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


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
