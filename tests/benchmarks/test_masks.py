"""The benchmark of masks, on a few digits and two of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import masks
from benchmarks.masked import MASKS
from wball import load_model, load_sample


@pytest.mark.parametrize("name", MASKS)
def test_masks_leave_the_network_a_network(name: str) -> None:
    net = load_model("mnist-standard").eval()
    x, y = (part[:20] for part in load_sample("mnist"))
    with torch.no_grad():
        assert float((MASKS[name].wrap(net)(x).argmax(1) == y).float().mean()) >= 0.6


def test_rows_say_what_was_found_and_are_measured_once(tmp_path: Path) -> None:
    out = tmp_path / "masks.json"
    few = ["--images", "6", "--eps", "0.3", "--device", "cpu", "--out", str(out), "--only"]
    masks.main([*few, "reversed gradients"])
    before = json.loads(out.read_text())["rows"]
    masks.main([*few, "rounding to 1/255", "reversed gradients"])
    found = json.loads(out.read_text())
    assert [row["mask"] for row in found["rows"]] == [
        "none",
        "rounding to 1/255",
        "reversed gradients",
    ]
    assert [found["rows"][0], found["rows"][2]] == before, (
        "rows of an earlier run stay, with their times and commits"
    )
    assert all(
        row["opened"] and not row["fooled"] and row["robust"] <= row["clean"]
        for row in found["rows"]
    )
    assert (
        "stand-in-gradients" in found["rows"][1]["findings"]
        and str(tmp_path) not in out.read_text()
    )
    with pytest.raises(SystemExit, match="made with images 6, not 7"):
        masks.main(["--images", "7", "--device", "cpu", "--out", str(out)])
