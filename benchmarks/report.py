"""From rows to files: JSON, a table, a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.origin import keep
from benchmarks.timing import Machine, Time
from wball.provenance import command, commit, device_name, versions

COLUMNS = (
    ("work", "work"), ("images", "images"), ("batch", "batch"), ("window", "window"), ("method", "method"),
    ("setting", "threads"),
    ("time", "ms (middle 80 %)"), ("processor", "processor ms"), ("ns_per_pixel", "ns/pixel"), ("floor_ms", "floor ms"),
    ("extra_memory", "extra memory / batch"),
    ("iterations", "sweeps"), ("gap_over_allowed", "gap / allowed"), ("error", "error"), ("mass_error", "mass error"),
    ("box_violation", "outside box"), ("distance_over_eps", "distance / eps"), ("budget_used", "budget used"),
)  # fmt: skip

EXPLANATION = """\
Times are medians of repeated calls; *processor* time is what all threads together spent, to be compared if the
machine was busy. In the part *threads* each setting is a process of its own, rounds alternate, and the range is
that of all calls. *error* is the distance to the optimum of the method's own problem (with the box
for this library unless it says *no box*, without it for the others), relative to the distance from that optimum to
the point that is projected. *distance / eps* is the exact transport distance, infinite if mass was lost. *floor* is
what moving the bytes or doing the arithmetic once would take on this machine."""


def environment(
    device: torch.device,
    chip: Machine,
    seed: int,
    origins: Sequence[str],
    data: Path | None,
    out: Path | None = None,
) -> dict[str, Any]:
    line = command()
    for folder, name in (
        (data, "DATA"),
        (out, "OUT"),
    ):  # a folder of one machine means nothing on another
        line = line if folder is None else line.replace(str(folder), name)
    found = {
        "command": line,
        "commit": commit(),
        "seed": seed,
        "device": device_name(device),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "copy_bandwidth_GB_per_s": round(chip.bandwidth / 1e9, 1),
        "float32_product_GFLOP_per_s": round(chip.flops / 1e9, 1),
        "images": list(origins),
    }
    try:
        import triton

        found["versions"]["triton"] = triton.__version__
    except ImportError:
        pass
    return found


def save(
    out: Path, rows: list[dict[str, Any]], about: dict[str, Any], remarks: Sequence[str]
) -> None:
    """The JSON alone. ``out`` names the files without their endings."""
    plain = [{k: asdict(v) if isinstance(v, Time) else v for k, v in row.items()} for row in rows]
    keep(out.with_suffix(".json"), {"environment": about, "rows": plain, "remarks": list(remarks)})


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Rows, environment and remarks of :func:`save`."""
    found = json.loads(path.read_text())
    rows = [{k: Time(**v) if k == "time" else v for k, v in row.items()} for row in found["rows"]]
    return rows, found["environment"], found["remarks"]


def write(
    out: Path, rows: list[dict[str, Any]], about: dict[str, Any], remarks: Sequence[str]
) -> None:
    """JSON, table and plot."""
    save(out, rows, about, remarks)
    out.with_suffix(".md").write_text(table(rows, about, remarks), encoding="utf-8")
    plot(out.with_suffix(".png"), rows, about)


def table(rows: list[dict[str, Any]], about: dict[str, Any], remarks: Sequence[str]) -> str:
    lines = [f"# Benchmark on {about['device']}", ""]
    lines += [f"- {key.replace('_', ' ')}: {_flat(value)}" for key, value in about.items()]
    lines += ["", EXPLANATION, ""]
    rows = [
        row | {"processor": row["time"].processor} if isinstance(row.get("time"), Time) else row
        for row in rows
    ]
    for work in dict.fromkeys(row["work"] for row in rows):
        part = [row for row in rows if row["work"] == work]
        used = [
            (key, title)
            for key, title in COLUMNS[1:]
            if any(row.get(key) is not None for row in part)
        ]
        lines += [
            f"## {work}",
            "",
            "| " + " | ".join(title for _, title in used) + " |",
            "|" + " --- |" * len(used),
        ]
        for row in part:
            cells = [_cell(row.get(key)) for key, _ in used]
            if "absent" in row:
                cells[-1] = f"not measured: {row['absent']}"
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [f"- {remark}" for remark in remarks]
    return "\n".join(lines).rstrip() + "\n"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Time):
        return f"{value.median:.4g} ({value.low:.4g} to {value.high:.4g})"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plot(path: Path, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Growth: time of the oracle against pixels in the batch (with slope 1 for comparison), and against the window."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    oracle = [row for row in rows if row["work"] == "oracle" and isinstance(row.get("time"), Time)]
    growth = [row for row in oracle if row["window"] == 5]
    for method, grey in dict.fromkeys((row["method"], row["images"] == "mnist") for row in growth):
        part = sorted(
            (1e6 * row["time"].median / row["ns_per_pixel"], row["time"].median)
            for row in growth
            if (row["method"], row["images"] == "mnist") == (method, grey)
        )
        axes[0].loglog(
            *zip(*part, strict=True),
            "o-",
            label=f"{method}, {'MNIST' if grey else 'colour images'}",
        )
    if growth:
        ends = sorted(1e6 * row["time"].median / row["ns_per_pixel"] for row in growth)
        top = max(row["time"].median for row in growth)
        axes[0].loglog([ends[0], ends[-1]], [top * ends[0] / ends[-1], top], "k:", label="linear")
        axes[0].legend()
    axes[0].set(xlabel="pixels in the batch", ylabel="ms", title="one oracle call, window 5")
    windows = [row for row in oracle if row["window"] != 5 or row["batch"] in (8, 128)]
    for method in dict.fromkeys(row["method"] for row in windows):
        for images in dict.fromkeys(row["images"] for row in windows):
            part = sorted(
                (row["window"] ** 2, row["time"].median)
                for row in windows
                if (row["method"], row["images"]) == (method, images)
            )
            if len(part) > 1:
                axes[1].plot(*zip(*part, strict=True), "o-", label=f"{method}, {images}")
    axes[1].set(xlabel="moves in the window", ylabel="ms", title="one oracle call, by window")
    if axes[1].has_data():
        axes[1].legend()
    figure.suptitle(about["device"])
    figure.savefig(path, dpi=120)
    plt.close(figure)
