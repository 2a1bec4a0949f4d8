"""The networks kept in the repository are those that the results were measured on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction.workshop import Settings, Workshop

ROOT = Path(__file__).parent.parent
KEPT = sorted(path.name for path in (ROOT / "models").glob("*/"))
pytestmark = pytest.mark.skipif(not KEPT, reason="a source archive has no models")


def measured(results: Path) -> dict[str, str]:
    """Fingerprints of kept weights by name. Other models are trained anew by recipes that need
    them."""
    found: dict[str, str] = {}
    board = results / "leaderboard.json"
    for path in (*(results / "paper").glob("*.json"), board):
        content = json.loads(path.read_text(encoding="utf-8"))
        data = content.get("data", {"models": content.get("rows", content.get("certified"))})
        for part in data.get("sets", [data]):
            for row in part.get("models", [part]):
                if (
                    isinstance(row, dict)
                    and {"name", "sha256"} <= row.keys()
                    and row["name"] in KEPT
                ):
                    assert found.setdefault(row["name"], row["sha256"]) == row["sha256"], (
                        f"{row['name']} in {path.name}"
                    )
    return found


@pytest.mark.parametrize("name", KEPT)
def test_results_are_of_these_weights(name: str, tmp_path: Path) -> None:
    folder = ROOT / "models" / name
    assert (folder / f"{name}.safetensors").stat().st_size < 25e6
    card = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    subject = Workshop(
        Settings(models=ROOT / "models", out=tmp_path, device="cpu", may_train=False)
    ).subject(name)
    assert (subject.name, subject.architecture) == (card["name"], card["architecture"])
    assert subject.sha256 == measured(ROOT / "results")[name]
    assert not subject.model.training and 0 < card["clean_accuracy"] < 1
