"""Every recipe from models to tables, on images so small that its numbers can be worked out
again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import wball
from reproduction import authors, certificates, curves, measure, pictures, published, timings
from reproduction.run import RECIPES
from reproduction.tables import unpack
from reproduction.workshop import Data, MissingModel, Settings, Workshop
from wball.evaluation import Evaluation
from wball.zoo.architectures import Binarized

SIDE = 6


def shapes(channels: int) -> Tensor:
    """One pattern for each of ten classes."""
    generator = torch.Generator().manual_seed(channels)
    return (torch.rand(10, channels, SIDE, SIDE, generator=generator) > 0.6).float()


class Small(Workshop):
    """Thirty small images of each data set, the ones of which are labelled twos, and a linear model
    for each name."""

    absent: tuple[str, ...] = ()

    def _load(self, dataset: str, split: Literal["train", "test"]) -> tuple[Tensor, Tensor]:
        channels = 1 if dataset == "mnist" else 3
        y = torch.arange(10).repeat(3)
        generator = torch.Generator().manual_seed(7)
        noise = torch.rand(30, channels, SIDE, SIDE, generator=generator)
        x = 0.35 * shapes(channels)[y] + 0.4 * noise
        return x, torch.where(y == 1, 2, y)

    def _find(self, name: str) -> tuple[nn.Module, str, str]:
        if name in self.absent:
            raise MissingModel(f"no {name}")
        channels = 3 if name.startswith("cifar10") else 1
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        model = nn.Sequential(nn.Flatten(), nn.Linear(channels * SIDE * SIDE, 10))
        centred = (shapes(channels) - shapes(channels).mean(0)).flatten(1)
        with torch.no_grad():
            model[1].weight.copy_(centred + 0.05 * torch.randn(centred.shape, generator=generator))
            model[1].bias.zero_()
        return model, "linear", "here"

    def has(self, name: str) -> bool:
        return name not in self.absent


@pytest.fixture
def shop(tmp_path: Path) -> Small:
    return Small(Settings(quick=True, device="cpu", out=tmp_path))


def measured(name: str, shop: Small) -> Data:
    """The recipe's data, told in tables and remarks and drawn."""
    recipe = RECIPES[name]
    data = recipe.measure(shop)
    for table in recipe.tables(data):
        assert table.rows and all(len(row) == len(table.head) for row in table.rows)
    assert all(isinstance(remark, str) for remark in recipe.remarks(data))
    if recipe.draw is not None:
        pytest.importorskip("matplotlib")
        assert recipe.draw(data).axes
    return data


def right(shop: Small, name: str, count: int | None = None) -> Tensor:
    x, y = shop.test_images("mnist" if name.startswith("mnist") else "cifar10", 30, 30)
    return (shop.subject(name).model(x).argmax(1) == y)[:count]


def test_nominal(shop: Small) -> None:
    shop.absent = ("mnist-binarized",)
    data = measured("nominal-accuracies", shop)
    names = [m.name for m in (*published.MNIST, *published.CIFAR10)]
    assert [r["name"] for r in data["rows"]] == [n for n in names if n not in shop.absent]
    for row in data["rows"]:
        assert (
            row["accuracy"] == pytest.approx(float(right(shop, row["name"]).double().mean()))
            and row["images"] == 30
        )
    assert list(shop.missing) == ["mnist-binarized"]


@pytest.mark.slow  # test_windows measures the same curves on one data set
def test_curves(shop: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(curves.QUICK, "cifar10", 5)
    shop.absent = ("cifar10-linf-provable",)
    data = measured("cifar10-curves", shop)
    assert [m["label"] for m in data["models"]] == ["standard", "adv. training"] and len(
        shop.missing
    ) == 1
    for model in data["models"]:
        clean = float(right(shop, model["name"], 5).double().mean())
        for key in ("paper_attack", "same_ball", "standard_attack"):
            shares = [p["accuracy"] for p in model[key]["curve"]]
            assert (
                shares[0] == clean
                and shares == sorted(shares, reverse=True)
                and model[key]["images"] == 5
            )
        assert [p["eps"] for p in model["at"]] == list(curves.SHOWN["cifar10"])
        ours = {p["eps"]: p["accuracy"] for p in model["standard_attack"]["curve"]}
        assert all(p["standard_attack"] == ours[p["eps"]] for p in model["at"])
        # Where moves cost their square, as they do for the paper's attack, the ball is smaller.
        assert all(p["standard_attack"] <= p["same_ball"] for p in model["at"])
        assert model["standard_attack"]["examples"]["rejected"] == 0


def test_trained_networks_meet_both_versions_of_the_attack(shop: Small) -> None:
    for name, networks in (("epochs", 1), ("cifar10-tricks", 2)):
        made = RECIPES[name]
        data = made.measure(shop)
        assert len(data["rows"]) == networks
        for row in data["rows"]:
            assert row["text"]["attack"].endswith("p = 1")
            assert row["scripts"]["attack"].endswith("p = 2")
            assert ("standard_attack" in row) == (name == "epochs")
        first = made.tables(data)[0]
        assert len(first.rows) == 1 + 2 * networks and made.draw is not None
        assert first.rows[0][0] == "paper" and None not in first.rows[1]


def test_operations_of_an_iteration_are_counted_in_the_code() -> None:
    """Eight matrix operations, as the paper says of Algorithm 2; the conjugate has no columns to
    solve."""
    projected = timings.operations(wball.projected_sinkhorn)
    assert sum(projected.values()) == 8 and projected["matrix-vector products"] == 4
    assert sum(timings.operations(wball.conjugate_sinkhorn).values()) == 7


def test_windows(shop: Small) -> None:
    data = measured("windows", shop)
    names = ("mnist-standard", "mnist-linf-provable")
    found = [(r["name"], r["window"]) for r in data["rows"]]
    assert found == [(name, window) for name in names for window in curves.QUICK_WINDOWS]
    for row in data["rows"]:
        clean = float(right(shop, row["name"], 20).double().mean())
        for key in ("paper_attack", "standard_attack"):
            assert row[key]["curve"][0]["accuracy"] == clean
        assert row["p"] == 1.0 and row["standard_attack"]["attack"] == "StandardAttack, fast, p = 1"


def test_other_images_get_proofs_of_their_own(shop: Small) -> None:
    """A quick run on the bundled digits and one on a data folder may share a folder of results."""
    subject = shop.subject("mnist-standard")
    x, y = shop.test_images("mnist", 30, 30)
    first, _ = measure.certified(shop, subject, x, y, "crown", (1e-4, 0.3))
    seen, _ = measure.certified(shop, subject, x.flip(0), y.flip(0), "crown", (1e-4, 0.3))
    assert torch.equal(seen, first.flip(0)) and not torch.equal(seen, first)


@pytest.mark.slow
def test_certificates(shop: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.absent = ("cifar10-certified",)
    monkeypatch.setattr(measure, "PROOFS_AT_ONCE", 2)
    (part,) = measured("certificates", shop)["sets"]
    subject = shop.subject("mnist-certified")
    x, y = shop.test_images("mnist", 6, 6)
    rows = {r["method"]: r for r in part["rows"]}
    for method in certificates.METHODS:
        shares = [float(right(shop, "mnist-certified", 6).double().mean())]
        for eps in certificates.CASES[0].quick_radii:
            ball = wball.WassersteinBall(eps)
            proof = wball.certify(subject.model, x, y, ball, method)
            shares.append(float(proof.certified.double().mean()))
        assert [p["accuracy"] for p in rows[method]["curve"]] == shares
        assert rows[method]["images"] == 6
    attack = part["rows"][-1]
    assert attack["kind"] == "attack" and attack["proved_and_broken"] == 0
    assert attack["proved_and_attacked"] == round(
        6 * sum(p["accuracy"] for p in rows["anchored"]["curve"][1:])
    )


def test_proofs_and_attacks_that_contradict_are_counted() -> None:
    broken = torch.tensor([0.0, 0.1, 0.3, math.inf], dtype=torch.float64)
    result = Evaluation({}, {}, {"radius": broken})
    proved = torch.tensor([0.0, 0.1, 0.1, 0.3])  # the second ball has both a proof and an example
    assert certificates._compared(proved, result, (0.1, 0.3)) == {
        "proved_and_attacked": 4,
        "proved_and_broken": 1,
    }


def test_digits(shop: Small) -> None:
    data = measured("mnist-digits", shop)
    assert data["label"] == 5 and [r["name"] for r in data["rows"]] == [
        m.name for m in published.MNIST
    ]
    x = torch.from_numpy(unpack(data["original"]))[None]
    for row in data["rows"]:
        model = shop.subject(row["name"]).model
        assert int(model(x).argmax(1)) == 5 and row["paper"] == published.DIGIT_RADII[row["name"]]
        for entry in (row["paper_attack"], row["ours"]):
            z = torch.from_numpy(unpack(entry["image"]))[None]
            logits = model(z)[0]
            assert (
                logits[entry["read_as"]] >= logits.max() - 0.01
            )  # pixels are kept in half precision
            assert (entry["radius"] is None) == (entry["read_as"] == 5)
        assert row["ours"]["radius"] is not None
        ball = wball.WassersteinBall(row["ours"]["radius"])
        assert (
            float(ball.distance(x.double(), z.double()).squeeze()) <= row["ours"]["radius"] + 0.01
        )


def test_gallery(shop: Small) -> None:
    data = measured("cifar10-gallery", shop)
    x, y = shop.test_images("cifar10", 30, 30)
    ok = right(shop, "cifar10-standard")
    names = wball.data.dataset_info("cifar10").classes
    first = [
        next(i for i in range(30) if ok[i] and y[i] == c)
        for c in range(10)
        if bool((ok & (y == c)).any())
    ]
    assert [r["index"] for r in data["rows"]] == first and [r["label"] for r in data["rows"]] == [
        names[y[i]] for i in first
    ]
    for row, i in zip(data["rows"], first, strict=True):
        original, image = (torch.from_numpy(unpack(row[key])) for key in ("original", "image"))
        assert torch.allclose(original, x[i], atol=1e-3)
        assert row["change"] == pytest.approx(
            float((image - original).sum(0).abs().max()), abs=5e-3
        )
        assert (row["radius"] is None) == (row["read_as"] == row["label"])


def test_lambda_and_p(shop: Small) -> None:
    data = measured("lambda-p", shop)
    assert [(c["lambda"], c["p"]) for c in data["cells"]] == [
        (reg, p) for reg in (10.0, 100.0, 1000.0) for p in (1.0, 2.0, 5.0)
    ]
    x, y = shop.pool("mnist", 30, 30)
    fives = ((y == 5) & right(shop, "mnist-standard")).nonzero()[:2, 0]
    assert torch.allclose(
        torch.from_numpy(unpack(data["original"])), x[fives[data["shown"]]], atol=1e-3
    )
    # The digit that survives longest at the largest lambda is shown.
    last = next(c for c in reversed(data["cells"]) if c["p"] == 1.0)["radius"]
    assert (last[data["shown"]] or 0.0) == max(r or 0.0 for r in last)
    for cell in data["cells"]:
        logits = shop.subject("mnist-standard").model(
            torch.from_numpy(unpack(cell["image"]))[None]
        )[0]
        others = torch.cat([logits[:5], logits[6:]]).max()
        assert (
            others >= logits[5] - 0.01
            if cell["radius"][data["shown"]] is not None
            else others < logits[5] + 0.01
        )
    spent = shop.spent
    assert (
        pictures.GRID.measure(shop)["cells"] == data["cells"] and shop.spent == 2 * spent
    )  # read from its parts


def test_authors_weights(shop: Small) -> None:
    data = measured("authors-weights", shop)
    assert [r["label"] for r in data["rows"]] == [c.text for c in published.AUTHORS]
    assert [r["published"] for r in data["rows"]] == [0.04, 0.14, 0.48, 0.86]
    (table,) = authors.tables(data)
    assert len(table.rows) == 4 and None not in table.rows[0]
    for row in data["rows"]:
        text, scripts = row["text"], row["scripts"]
        assert (text["curve"][1]["eps"], scripts["curve"][1]["eps"]) == (0.3, 0.7)
        assert text["attack"].endswith("p = 1") and scripts["attack"].endswith("p = 2")
        assert text["curve"][0]["accuracy"] == scripts["curve"][0]["accuracy"]


def test_the_authors_threshold_before_the_attack(
    shop: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Small._find(shop, "mnist-binarized")[0]
    monkeypatch.setattr(Small, "_find", lambda self, name: (Binarized(plain), "linear", "here"))
    monkeypatch.setattr(published, "AUTHORS", published.AUTHORS[1:2])
    before, inside = measured("authors-weights", shop)["rows"]
    assert before["label"] == authors.BEFORE and inside["label"] == authors.INSIDE
    x, y = shop.test_images("mnist", 10, authors.QUICK)
    clean = float((plain((x >= 0.5).float()).argmax(1) == y).double().mean())
    assert before["text"]["curve"][0]["accuracy"] == inside["text"]["curve"][0]["accuracy"] == clean
