"""The leaderboard: rows that add up, a file that is never half a board, a page that says what the
file says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import wball
from problems import halves
from reproduction import leaderboard
from reproduction.__main__ import main
from reproduction.leaderboard import (
    PROTOCOLS,
    Protocol,
    available,
    enter,
    ranked,
    read,
    run,
    submitted,
)
from reproduction.leaderboard_page import (
    fixed_radius,
    intervals,
    page,
    predecessors,
    smoothing,
    tables,
    write_page,
)
from reproduction.workshop import Data, MissingModel, Settings, Workshop
from wball.storage.files import write_json

ROOT = Path(__file__).parent.parent.parent
SIDE = 6


class Small(Workshop):
    """Six by six images and linear models for every name."""

    def _load(self, dataset: str, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        x = torch.rand(12, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(5)).square() * 0.8
        return x, halves()(x).argmax(1)

    def _find(self, name: str) -> tuple[nn.Module, str, str]:
        if name == "absent":
            raise MissingModel("no such weights")
        return halves(), "linear", "here"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(quick=True, device="cpu", out=tmp_path / "parts")


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> Protocol:
    models = ("levine2020-mnist-flow-0.01", "mnist-certified", "absent")
    few = Protocol(12, (0.05, 0.2), (0.01, 0.05), 8, models)
    monkeypatch.setattr(leaderboard, "PROTOCOLS", {"mnist": few})
    monkeypatch.setattr("reproduction.leaderboard_page.PROTOCOLS", {"mnist": few})
    return few


def test_a_row_is_an_evaluation_and_a_certificate_of_the_same_images(
    settings: Settings,
    protocol: Protocol,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shop, board = Small(settings), tmp_path / "board.json"
    assert run(protocol.models, settings, board, shop=shop, minutes=0.0) == ["absent"]
    assert "absent is left out: no such weights" in capsys.readouterr().out
    assert not read(board)["rows"]  # the time was over before the first part
    run(protocol.models, settings, board, shop=shop)
    rows = {row["name"]: row for row in read(board)["rows"]}
    assert set(rows) == {"levine2020-mnist-flow-0.01", "mnist-certified"}
    x, y = shop.test_images("mnist", 12, 12)
    model = shop.subject("mnist-certified").model
    row = rows["mnist-certified"]
    ball = wball.WassersteinBall(0.2)
    result = wball.evaluate(model, x, y, ball, list(protocol.radii), "fast")
    assert row["images"] == 12 and row["clean"] == 1.0 and row["weights"] == 2 * 36 + 2
    assert row["attack"]["accuracy"] == {f"{r:g}": result.accuracy_at(r) for r in protocol.radii}
    assert row["attack"]["audit"]["valid"] == int(result.broken_at(0.2).sum()) > 0
    for place, r in enumerate(protocol.radii):
        kept = [outcome != "-" and int(outcome) > place for outcome in row["outcomes"]]
        assert kept == (~result.broken_at(r)).tolist()
    proofs, few = row["certificate"], leaderboard.QUICK_PROOFS
    for eps in protocol.certified:
        proof = wball.certify(
            model, x[:few], y[:few], wball.WassersteinBall(eps), leaderboard.METHOD
        )
        assert proofs["accuracy"][f"{eps:g}"] == pytest.approx(
            float(proof.certified.double().mean())
        )
    assert proofs["clean"] == 1.0 and proofs["contradictions"] == 0
    assert row["authors"] == "this library"
    run(["mnist-certified"], settings, board, shop=shop)  # it is there, and nothing is measured
    assert capsys.readouterr().out.count("mnist-certified: ") >= 2
    assert read(board)["rows"] == [*rows.values()]
    monkeypatch.setattr("wball.attacks.standard.VERSION", 99)
    run(["mnist-certified"], settings, board, shop=shop, parts=["attack"])
    (again,) = (row for row in read(board)["rows"] if row["name"] == "mnist-certified")
    assert again["attack"]["version_number"] == 99 and again["certificate"] == proofs


def test_a_proof_that_an_example_contradicts_is_told(
    settings: Settings, protocol: Protocol, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shop = Small(settings)
    x, y = shop.test_images("mnist", 12, 12)
    monkeypatch.setattr(
        leaderboard,
        "certified",
        lambda shop, subject, x, y, method, radii: (torch.full((len(x),), 0.3), 1.0),
    )
    monkeypatch.setattr(
        leaderboard, "PROTOCOLS", {"mnist": replace(protocol, certified=(0.01, 0.3))}
    )
    row = leaderboard.measured(shop, shop.subject("mnist-certified"), x, y, "certificate")
    count = row["certificate"]["contradictions"]
    assert count > 0 and row["flags"][-1] == f"{count} examples in certified balls"
    monkeypatch.setattr("reproduction.leaderboard_page.PROTOCOLS", leaderboard.PROTOCOLS)
    table, _ = tables({"rows": [row]})
    assert table.rows[0][-1] == "no" and f"**{count} examples in certified balls**" in page(
        {"rows": [row]}, tmp_path
    )


def row(name: str, *accuracies: float, **changes: object) -> Data:
    radii, proofs = PROTOCOLS["mnist"].radii, PROTOCOLS["mnist"].certified
    audit = {"valid": 7, "rejected": 0, "disagreements": []}
    made = {
        "name": name,
        "dataset": "mnist",
        "authors": "A 2020",
        "paper": "https://p",
        "source": "https://w/net.pth",
    }
    made |= {
        "architecture": "mnist-cnn",
        "weights": 166_406,
        "sha256": name,
        "images": 10_000,
        "clean": 0.98,
    }
    made["attack"] = {
        "accuracy": dict(zip(map("{:g}".format, radii), accuracies, strict=True)),
        "audit": audit,
    }
    left = [sum(k < 100 * share for share in accuracies) for k in range(100)]
    made["outcomes"] = 100 * "".join(map(str, left))
    shares = {f"{r:g}": 0.5 for r in proofs}
    made["certificate"] = {
        "accuracy": shares,
        "images": 1000,
        "clean": 0.97,
        "contradictions": 0,
    }
    origin = {
        "command": f"python -m reproduction leaderboard {name}",
        "device": "cpu",
        "commit": 40 * "a",
        "seconds": 3.0,
    }
    return {**made, "flags": [], "quick": False, "provenance": origin, **changes}


def test_ranks_marks_and_links(tmp_path: Path) -> None:
    board = tmp_path / "leaderboard.json"
    enter(board, row("weak", 0.9, 0.1, 0.0, 0.0, 0.0))
    enter(board, row("strong", 0.8, 0.7, 0.6, 0.5, 0.4))
    enter(
        board,
        row(
            "large",
            0.1,
            0.1,
            0.1,
            0.1,
            0.1,
            certificate={"skipped": "not tried: 11,173,962 weights"},
        ),
    )
    content = read(board)
    assert [r["name"] for r in content["rows"]] == ["strong", "weak", "large"]
    table, proofs = tables(content)
    assert [r[0] for r in table.rows] == ["1", "2", "3"]
    assert table.rows[0][1] == "`strong` (A 2020) †"  # by a version that the row does not name
    first = dict(zip(table.head, table.rows[0], strict=True))
    assert first["0.05"] == "80.0" and first["0.1"] == "**70.0**"
    assert first["beats the next at"] == "0.1, 0.2, 0.3, 0.5"
    (spans,) = [table for table in intervals(content) if table.rows]
    assert spans.rows[0][:4] == ["`strong`", "10,000", "80.0 (79.2 to 80.8)", "70.0 (69.1 to 70.9)"]
    second = dict(zip(table.head, table.rows[1], strict=True))
    assert second["0.05"] == "**90.0**" and second["0.3"] == "0.0" and second["reliable"] == "yes"
    assert [r[0] for r in proofs.rows] == ["`strong`", "`weak`"]
    said = write_page(board, tmp_path / "page.md").read_text()
    assert "| `weak` (" in said and "To add a model" in said
    enter(board, row("weak", 0.9, 0.9, 0.9, 0.9, 0.9))  # measured again
    assert [r["name"] for r in read(board)["rows"]] == ["weak", "strong", "large"]
    assert ranked([row("b", *[0.0] * 5), row("a", *[0.0] * 5)])[0]["name"] == "a"


def test_predecessors_are_compared_on_the_same_digits() -> None:
    content = {"rows": [row("wong2019-mnist-adversarial", 0.02, 0.005, 0.0, 0.0, 0.0)]}
    tried = {"model": "wong2019-mnist-adversarial", "eps": 0.1, "images": 10_000}
    others = [
        {**tried, "method": "pgd", "robust": 1.2},
        {**tried, "method": "sinkhorn", "robust": 49.1},
        {**tried, "method": "pgd", "robust": 0.1, "images": 10},
        {**tried, "method": "standard", "robust": 0.7},
    ]
    (cells,) = predecessors(content, {"steps": 300, "rows": others}).rows
    assert cells[1:] == [None, "1.2 (Wu, PGD) / 0.7 / 0.5", None, None, None]
    content["rows"][0]["outcomes"] = "5310-1" + 9_994 * "0"
    few = {**tried, "method": "sinkhorn", "robust": 49.1, "images": 5}
    (cells,) = fixed_radius(content, {"steps": 300, "rows": [few]}).rows
    assert cells == ["`wong2019-mnist-adversarial`", "0.1", "5", "49.1", "40.0"]


def test_the_best_smoothed_classifier_is_named() -> None:
    """A reader must see which network and noise an accuracy belongs to, and how many votes."""
    radii = [f"{eps:g}" for eps in PROTOCOLS["mnist"].certified]
    rows = [
        {
            "stage": "full",
            "model": f"levine2020-mnist-flow-{name}",
            "noise": noise,
            "votes": votes,
            "images": 10,
            "authors": dict.fromkeys(radii, share),
            "tight": dict.fromkeys(radii, 1 - share),
        }
        for name, noise, votes, share in (
            ("a", 0.1, 100, 0.3),
            ("b", 0.2, 100, 0.4),
            ("c", 0.3, 500, 0.2),
        )
    ]
    made = smoothing({"rows": [*rows, {"stage": "screen"}]}).rows
    assert made[0] == [radii[0], "100", "10", "40.0 (`flow-b`, 0.2)", "70.0 (`flow-a`, 0.1)"]
    assert made[-1][1:] == ["500", "10", "20.0 (`flow-c`, 0.3)", "80.0 (`flow-c`, 0.3)"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    board = ["--board", str(file), "--out", str(tmp_path)]
    assert main(["leaderboard", *board]) == 2
    assert "python -m reproduction leaderboard NAME" in capsys.readouterr().err
    enter(file, row("some", 0.9, 0.1, 0.0, 0.0, 0.0))
    assert main(["leaderboard", *board]) == 0
    assert "`some` (A 2020)" in capsys.readouterr().out
    assert write_page(file, tmp_path / "p.md").read_text() == page(read(file), tmp_path)
    write_json(file, {"format": "other"})
    assert main(["leaderboard", *board]) == 2
    assert "not a leaderboard of this version" in capsys.readouterr().err
    card = tmp_path / "card.json"
    card.write_text(json.dumps({"name": "mine", "sha256": "0"}))
    assert main(["leaderboard", str(card), "--quick", *board]) == 2
    err = capsys.readouterr().err
    assert "card.json is not a card of a model" in err and "authors" in err and err.count("\n") == 1


def test_a_card_makes_a_model_known(settings: Settings, tmp_path: Path) -> None:
    entry = wball.public_models()["wong2019-mnist-standard"].card()
    del entry["url"]
    card = tmp_path / "card.json"
    write_json(card, {**entry, "name": "mine"})
    shop = Workshop(settings)
    assert submitted(shop, card) == "mine" and shop.public["mine"].sha256 == entry["sha256"]


def test_quick_runs_take_what_needs_no_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WBALL_MODELS", str(tmp_path))
    names = available(Workshop(Settings(quick=True, device="cpu", out=tmp_path)), ["all"])
    assert "mnist-standard" in names and not set(names) & set(wball.public_models())
    (tmp_path / "wong2019-mnist-linf.pth").touch()
    assert "wong2019-mnist-linf" in available(
        Workshop(Settings(quick=True, device="cpu", out=tmp_path)), ["all"]
    )
    every = available(Workshop(Settings(device="cpu", out=tmp_path)), ["all"])
    noisy = {  # they answer at chance where no noise is added
        f"levine2020-mnist-{noise}"
        for noise in ("flow-0.1", "flow-0.2", "flow-0.5", "laplace-0.05", "laplace-0.1")
    }
    assert (set(wball.public_models()) | set(wball.list_models())) - noisy <= set(every)


def test_the_committed_page_is_what_the_committed_board_says() -> None:
    board, written = ROOT / "results" / "leaderboard.json", ROOT / "docs" / "leaderboard.md"
    content = read(board)
    wanted = page(content, ROOT / "results")
    assert written.read_text(encoding="utf-8") == wanted, (
        "docs/leaderboard.md is stale: run `python -m reproduction leaderboard page`"
    )
    for entry in content["rows"]:
        assert (
            entry["certificate"].get("contradictions", 0) == 0
            and entry["attack"]["audit"]["disagreements"] == []
        )
        assert not entry["quick"] and entry["images"] >= 20
        proved = entry["certificate"].get("accuracy", {"": 0.0}).values()
        assert max(proved) <= entry["certificate"].get("clean", 1.0)
