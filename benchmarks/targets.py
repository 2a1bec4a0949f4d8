"""What was to be reached, what was, and what stands in the way."""

from __future__ import annotations

from typing import Any

from benchmarks import threads
from benchmarks.timing import Time

Row = dict[str, Any]

BOUND_BY_PASSES = (
    "what bounds it: dependent passes over data on chip (loads and barriers), not the floor"
)


def targets(rows: list[Row]) -> list[str]:
    """One line per target that these rows can speak about."""
    lines: list[str] = []
    for images, factor, most_ms, of in (
        ("mnist", 300, None, ""),
        ("cifar10", 200, 1.0, ", no box"),  # the problem that the released code solves
        ("cifar10", 200, 1.0, ""),
    ):
        ours = _one(rows, "projection", images, 100, f"wball sweeps, triton{of}")
        released = _one(rows, "projection", images, 100, "released")
        if ours and released:
            ratio = released["time"].median / ours["time"].median
            accuracy = f"errors {ours['error']:.2g} and {released['error']:.2g}, gap / allowed {ours['gap_over_allowed']:.2g}"
            name = f"projection{of}, {images} x 100, {ratio:,.0f} times faster than released ({accuracy})"
            lines.append(_verdict(name, f"{factor} times", ratio / factor, BOUND_BY_PASSES))
        if ours and most_ms:
            time = ours["time"].median
            name = f"projection{of}, {images} x 100, {time:.3g} ms, floor {ours['floor_ms']:.2g} ms"
            lines.append(_verdict(name, f"{most_ms:g} ms", most_ms / time, BOUND_BY_PASSES))
    ours, released = (
        _one(rows, "projection", "mnist", 100, name) for name in ("wball sweeps, cpu", "released")
    )
    if ours and released:
        ratio = released["time"].median / ours["time"].median
        name = f"projection on a CPU, mnist x 100, both in one process with torch's threads, {ratio:,.0f} times faster"
        lines.append(
            _verdict(
                name,
                "60 times",
                ratio / 60,
                "what bounds it: sweeps in float64, one image at a time",
            )
        )
    for images, most_us in (("mnist", 60), ("cifar10", 200)):
        row = _one(rows, "oracle", images, 128, "wball, triton", 5)
        if row:
            time = 1e3 * row["time"].median
            name = f"oracle, {images} x 128, {time:.4g} µs, floor {1e3 * row['floor_ms']:.2g} µs"
            lines.append(_verdict(name, f"{most_us} µs", most_us / time, BOUND_BY_PASSES))
    memory = [
        (
            row["extra_memory"],
            f"{row['work']}, {row['images']} x {row['batch']}, window {row.get('window', 5)}",
        )
        for row in rows
        if row.get("extra_memory") and row["method"].endswith("triton")
    ]
    if memory:
        most, where = max(memory)
        name = f"extra memory, results included, at most {most:.2f} times the batch ({where})"
        lines.append(
            _verdict(
                name, "8 times", 8 / most, "what bounds it: two padded buffers, and the results"
            )
        )
    small, big = (
        _one(rows, "oracle", images, batch, "wball, triton", 5)
        for images, batch in (("cifar10", 128), ("224 x 224 x 3", 64))
    )
    if small and big:
        ratio = big["ns_per_pixel"] / small["ns_per_pixel"]
        name = f"oracle, 224 x 224 x 3, batch 64, {ratio:.2f} times CIFAR-10's time a pixel"
        lines.append(
            _verdict(
                name, "2 times", 2 / ratio, "what bounds it: every sum over an image is a launch"
            )
        )
    return lines + threads.verdict(rows) + growth(rows)


def growth(rows: list[Row]) -> list[str]:
    """Time a pixel, once there is enough work: constant if growth is linear."""
    lines = []
    for method in dict.fromkeys(
        row["method"] for row in rows if row["work"] == "oracle" and "torch" not in row["method"]
    ):
        for images in ("mnist", "cifar10"):
            few, many = (_one(rows, "oracle", images, batch, method, 5) for batch in (100, 1000))
            if few and many:
                ratio = many["time"].median / few["time"].median
                lines.append(
                    f"growth, {images}, {method}: a batch of 1,000 takes {ratio:.1f} times as long as 100"
                )
        sides = [row for row in rows if row["method"] == method and " x " in str(row.get("images"))]
        if sides:
            each = ", ".join(f"{row['ns_per_pixel']:.3g} at {row['images']}" for row in sides)
            lines.append(f"growth, {method}: ns a pixel {each}")
    return lines


def _one(
    rows: list[Row], work: str, images: str, batch: int, method: str, window: int | None = None
) -> Row | None:
    for row in rows:
        same = (row["work"], row.get("images"), row.get("batch"), row["method"]) == (
            work,
            images,
            batch,
            method,
        )
        if same and isinstance(row.get("time"), Time) and window in (None, row.get("window")):
            return row
    return None


def _verdict(name: str, target: str, share: float, bound: str) -> str:
    """``share`` of at least 1 reaches the target."""
    if share >= 1:
        return f"reached: {name} (target {target})"
    return f"not reached, short by a factor of {1 / share:.2f}: {name} (target {target}); {bound}"
