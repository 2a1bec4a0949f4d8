"""The benchmark's own parts: that it times, compares and reports, on inputs too small to say anything about speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import oracle, peers, projection, report, targets, warm
from benchmarks.__main__ import main
from benchmarks.inputs import Images, cifar10, scenes
from benchmarks.timing import Machine, Time, measure

CPU = torch.device("cpu")
CHIP = Machine(bandwidth=1e10, flops=1e11)


def tiny() -> Images:
    return Images("tiny", scenes(2, 8)[:, :1], 100.0, 0.1, 0.1, "made up")


def test_measure_orders_its_spread() -> None:
    time = measure(lambda: torch.zeros(10).sum(), CPU, budget_s=0.01)
    assert 0 < time.low <= time.median <= time.high and time.repeats >= 3


def test_images_are_the_same_every_time() -> None:
    assert torch.equal(scenes(2, 8), scenes(2, 8))
    images = cifar10(None, CPU)
    assert (
        images.batch(300).shape == (300, 3, 32, 32)
        and float(images.x.min()) >= 0
        and float(images.x.max()) <= 1
    )


def test_rows_of_both_works_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.FOLDER, str(tmp_path))  # no released code there
    common = {"device": CPU, "chip": CHIP, "budget_s": 0.01, "seed": 0}
    rows = list(projection.projections(tiny(), [2], **common)) + list(
        oracle.oracles(tiny(), [1], [5], 1, **common)
    )
    ours = [
        row for row in rows if row["method"].startswith("wball") and row["work"] == "projection"
    ]
    assert ours and all(
        row["error"] < 0.1 and row["mass_error"] < 1e-6 and row["box_violation"] <= 1e-6
        for row in ours
    )
    assert any("absent" in row for row in rows if row["method"] == "released")
    assert all(row["floor_ms"] < row["time"].median for row in rows if "time" in row)
    about = report.environment(CPU, CHIP, 0, ["made up"], None)
    report.write(tmp_path / "out" / "bench", rows, about, ["a remark"])
    read = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert len(read["rows"]) == len(rows) and read["environment"]["seed"] == 0
    assert report.read(tmp_path / "out" / "bench.json")[0] == rows
    table = (tmp_path / "out" / "bench.md").read_text()
    assert "not measured" in table and "a remark" in table


def test_the_command_takes_its_words_from_a_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wball bench` calls it so."""
    monkeypatch.setattr(sys, "argv", ["wball", "bench", "--nonsense"])
    monkeypatch.setattr(
        "benchmarks.__main__.measurements", lambda *given: iter([{"work": "w", "method": "m"}])
    )
    monkeypatch.setattr("benchmarks.__main__.machine", lambda device: CHIP)
    main(["--device", "cpu", "--out", str(tmp_path / "bench"), "--quick"])
    assert [row["method"] for row in report.read(tmp_path / "bench.json")[0]] == ["m"]
    (tmp_path / "bench.md").unlink()
    main(["--render", str(tmp_path / "bench.json")])
    assert (tmp_path / "bench.md").is_file()


def test_ratios_compare_the_same_batch_only() -> None:
    def row(method: str, batch: int, ms: float) -> dict[str, object]:
        return {
            "work": "projection",
            "images": "i",
            "batch": batch,
            "method": method,
            "time": Time(ms, ms, ms, 3, "clock"),
        }

    lines = projection.ratios(
        [row("released", 1, 100.0), row("wball sweeps, x", 1, 1.0), row("wball sweeps, x", 2, 1.0)]
    )
    assert lines == ["i x 1, wball sweeps, x: 100.0 x faster than released"]


def test_targets_are_judged_from_the_rows() -> None:
    def row(
        work: str, images: str, batch: int, method: str, ms: float, **more: object
    ) -> dict[str, object]:
        time = Time(ms, ms, ms, 3, "clock")
        return {
            "work": work,
            "images": images,
            "batch": batch,
            "method": method,
            "time": time,
            **more,
        }

    rows = [
        row(
            "oracle",
            "mnist",
            128,
            "wball, triton",
            0.05,
            window=5,
            floor_ms=0.003,
            ns_per_pixel=1.0,
            extra_memory=6.0,
        ),
        row(
            "oracle",
            "cifar10",
            128,
            "wball, triton",
            0.4,
            window=5,
            floor_ms=0.01,
            ns_per_pixel=1.0,
        ),
        row(
            "oracle",
            "224 x 224 x 3",
            64,
            "wball, triton",
            9.0,
            window=5,
            floor_ms=0.1,
            ns_per_pixel=3.0,
        ),
        row("threads", "mnist", 100, "wball sweeps, cpu", 10.0, setting="2 threads, sleeping"),
        row("threads", "mnist", 100, "released", 3000.0, setting="1 thread, sleeping"),
        row("threads", "mnist", 100, "released", 900.0, setting="2 threads, spinning"),
    ]
    lines = targets.targets(rows)
    reached = [line for line in lines if line.startswith("reached")]
    missed = [line for line in lines if line.startswith("not reached")]
    assert ["mnist x 128" in reached[0], "memory" in reached[1], "90 times" in reached[2]] == [
        True
    ] * 3
    assert (
        "factor of 2.00" in missed[0]
        and "factor of 1.50" in missed[1]
        and "what bounds it" in missed[1]
    )


def test_tasks_of_the_warm_up_cover_every_size() -> None:
    parts = ["projection", "oracle", "windows", "large"]
    on_gpu = warm.tasks(torch.device("cuda"), parts)
    assert {("oracle", warm.MNIST, k) for k in (3, 5, 7, 9, 11)} < set(on_gpu) and len(
        set(on_gpu)
    ) == len(on_gpu)
    assert "compiled" in warm.compile_one(("oracle", (1, 6, 6), 3), "cpu")
    assert "compiled" in warm.compile_one(("exact", (1, 6, 6), 3), "cpu")
