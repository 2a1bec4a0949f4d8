"""Benchmarks of complete verification: rows that add up, and runs that resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import agreeing, deciding


def test_an_interrupted_run_resumes_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "complete.json"
    common = ["--radii", "0.01", "--time-limit", "5", "--device", "cpu", "--out", str(out)]
    deciding.main(["--images", "2", *common])
    first = json.loads(out.read_text())
    deciding.main(["--images", "3", *common])
    second = json.loads(out.read_text())
    assert second["images"][0]["status"][:2] == first["images"][0]["status"]
    assert second["images"][0]["seconds"][:2] == first["images"][0]["seconds"]  # not searched again
    (row,) = second["rows"]
    assert row["images"] == 3 and row["clean"] == pytest.approx(
        row["broken"] + row["proved"] + row["undecided"]
    )
    second["settings"]["data"] = "other digits"
    out.write_text(json.dumps(second))
    with pytest.raises(SystemExit, match="made with settings"):
        deciding.main(["--images", "3", *common])


@pytest.mark.slow
def test_another_process_decides_what_is_open(tmp_path: Path) -> None:
    """Of what a run left undecided; nothing is begun after the end."""
    out = tmp_path / "complete.json"
    common = ["--radii", "0.01", "--images", "1", "--device", "cpu", "--out", str(out)]
    deciding.main([*common, "--time-limit", "1"])
    found = json.loads(out.read_text())
    found["images"][0] |= {"status": "U", "limits": [1.0]}  # as if it had not been proved
    out.write_text(json.dumps(found))
    deciding.main([*common, "--time-limit", "60", "--processes", "1"])
    part = json.loads(out.read_text())["images"][0]
    assert part["status"] == "C" and part["bounds"] == {} and part["limits"] == [60.0]
    assert not list(
        deciding.Cores(1, "mnist-certified", None, "mnist", None).decide(0.01, [0], 60.0, until=0.0)
    )


def test_what_is_proved_further_out_is_proved() -> None:
    far, other = (
        {"model": "a", "eps": 0.2, "status": "CUC"},
        {"model": "b", "eps": 0.3, "status": "CCC"},
    )
    near = {"model": "a", "eps": 0.1, "status": ""}
    assert deciding.proved_further_out([far, other, near], near) == {0, 2}
    assert deciding.proved_further_out([far, other, near], far) == set()


def test_more_time_is_given_to_what_is_undecided() -> None:
    part = {"status": "CUUM", "seconds": [0.1, 5.0, 9.0, 0.0], "limits": [5.0, 5.0, 9.0, 5.0]}
    assert deciding.pending(part, 6, 5.0, math.inf) == (
        [4, 5],
        0.0,
    )  # new images first, by anchored bounds
    assert deciding.pending(part, 4, 5.0, math.inf) == ([], 5.0)
    assert deciding.pending(part, 4, 9.0, math.inf) == ([1], 9.0)
    assert deciding.pending(part, 4, 9.0, 6.0) == ([1], 6.0)
    assert deciding.pending(part, 4, 9.0, 4.0) == ([], 4.0)  # it had more before
    assert deciding.pending(part, 4, 20.0, 30.0) == ([1, 2], 15.0)
    deciding.put(part, [1], "F", [6.0], [-1.0], 9.0)
    deciding.put(part, [4, 5], "CU", [0.25, 0.5], [0.1, -0.3], 0.0)
    assert part["bounds"] == {"5": -0.3}
    assert deciding.unranked(part, [2, 5]) == [2] and deciding.nearest(part, [2, 5]) == [5, 2]
    deciding.put(part, [5], "C", [0.5], [0.2], 9.0)
    assert part["status"] == "CFUMCC"
    assert part["seconds"] == [0.1, 6.0, 9.0, 0.0, 0.25, 1.0] and part["limits"] == [
        5.0,
        9.0,
        9.0,
        5.0,
        0.0,
        9.0,
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_answers_are_counted_against_the_referee(tmp_path: Path) -> None:
    out = tmp_path / "agreement.json"
    agreeing.main(["--networks", "3", "--boxes", "0", "--out", str(out)])
    agreeing.main(["--networks", "4", "--boxes", "0", "--out", str(out)])
    found = json.loads(out.read_text())["transport"]
    assert (
        found["networks"] == 4
        and sum(found["answers"].values()) == 4
        and found["contradictions"] == 0
    )
