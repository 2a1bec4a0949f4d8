"""The benchmark of masks, on a few digits and two of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import masks
from wball import load_model, load_sample


@pytest.mark.parametrize("name", masks.MASKS)
def test_masks_leave_the_network_a_network(name: str) -> None:
    net = load_model("mnist-standard").eval()
    x, y = (part[:20] for part in load_sample("mnist"))
    with torch.no_grad():
        assert float((masks.MASKS[name].wrap(net)(x).argmax(1) == y).float().mean()) >= 0.6


def test_rows_say_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "masks.json"
    few = ["--images", "6", "--eps", "0.3", "--only", "rounding to 1/255", "reversed gradients", "--device", "cpu"]
    masks.main([*few, "--out", str(out)])
    found = json.loads(out.read_text())
    assert [row["mask"] for row in found["rows"]] == ["none", "rounding to 1/255", "reversed gradients"]
    assert all(row["opened"] and not row["fooled"] and row["robust"] <= row["clean"] for row in found["rows"])
    assert "stand-in-gradients" in found["rows"][1]["findings"] and str(tmp_path) not in out.read_text()
