"""Recipes: what they measure, that they go on after being killed, and that figures and page need
only their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import wball
from problems import halves
from reproduction import measure as measuring
from reproduction import page, workshop
from reproduction.__main__ import main
from reproduction.page import ASSETS
from reproduction.presets import preset
from reproduction.run import (
    RECIPES,
    chosen,
    command,
    draw,
    overview,
    reproduce,
    stored,
    write_page,
)
from reproduction.tables import Table, pack, percent, unpack
from reproduction.workshop import MissingModel, Settings, Subject, Workshop
from wball import provenance
from wball.attacks import PGD, GrowingRadius
from wball.storage.files import read_json, write_json
from wball.training import TrainConfig

ROOT = Path(__file__).parent.parent.parent


def text(out: Path) -> str:
    return page.text(stored(out), RECIPES)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(Settings(quick=True, device="cpu", out=tmp_path))


def linear() -> Subject:
    return Subject("halves", halves(), "linear", "here", "0")


def images(count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(count, 1, 6, 6).square() * 0.8
    return x, linear().model(x).argmax(1)


def test_tables() -> None:
    table = Table(["a", "b"], [["x", None], ["longer", "1 %"]], "title")
    assert table.text().splitlines() == ["title", "a         b", "x         –", "longer  1 %"]
    assert table.markdown().splitlines()[2:] == [
        "| a | b |",
        "|---|---:|",
        "| x | – |",
        "| longer | 1 % |",
    ]
    assert percent(None) is None and percent(0.12345, 2) == "12.35 %"


def test_pixels_survive_json() -> None:
    x = torch.rand(3, 4, 5)
    again = unpack(json.loads(json.dumps(pack(x))))
    np.testing.assert_allclose(again, x.numpy(), atol=3e-4)


def test_every_figure_and_table_of_the_paper_has_a_recipe() -> None:
    places = " ".join(r.place for r in RECIPES.values())
    assert "Table 1" in places and all(f"Figure {n}" in places for n in range(1, 9))
    assert all(name in overview() for name in RECIPES)
    assert max(map(len, overview().splitlines())) <= 100
    assert chosen(["all"]) == list(RECIPES) and chosen(["windows", "windows"]) == ["windows"]
    for wrong in (["nothing"], ["all", "nothing"]):
        with pytest.raises(ValueError, match="mnist-curves"):
            chosen(wrong)


def test_ours_is_an_evaluation(shop: Workshop) -> None:
    x, y = images()
    y[0] = 1 - y[0]  # wrong as it is
    result, seconds = measuring.evaluated(shop, linear(), x, y, [0.5, 0.05])
    made = measuring.curve(result, seconds)
    assert result.radii == [0.05, 0.5] and [p["eps"] for p in made["curve"]] == [0.0, 0.05, 0.5]
    # A linear model: the support function says exactly which images can be broken.
    margin = linear().model(x).detach()
    weight = linear().model[1].weight.detach()
    direction = (weight[1] - weight[0]).view(1, 1, 6, 6)
    for eps in result.radii:
        sign = torch.where(y == 0, 1.0, -1.0).view(-1, 1, 1, 1)
        gain = (
            wball.WassersteinBall(eps)
            .support(x, (sign * direction).expand_as(x).contiguous())
            .value
        )
        gain = gain - (sign * direction * x).flatten(1).sum(1)
        lead = margin.gather(1, y[:, None])[:, 0] - margin.gather(1, 1 - y[:, None])[:, 0]
        broken = result.broken_at(eps)
        assert bool(broken[(gain > lead * (1 + 1e-3)) | (lead <= 0)].all())
        assert not bool(broken[gain < lead * (1 - 1e-3)].any())
    checks = made["examples"]
    assert (
        checks["rejected"] == checks["disagreements"] == 0
        and 0 < checks["checked_exactly"] <= checks["found"]
    )
    assert made["curve"][0]["accuracy"] == pytest.approx(11 / 12) and made["images"] == 12
    assert measuring.accuracy_at(made, 0.3) == made["curve"][1]["accuracy"]
    assert (
        measuring.accuracy_at(made, 0.5) == made["curve"][2]["accuracy"] == result.accuracy_at(0.5)
    )


def test_papers_attack_gives_the_radius_of_each_image(shop: Workshop) -> None:
    x, y = images()
    y[0] = 1 - y[0]
    attack = PGD.paper(
        "mnist",
        ball=wball.WassersteinBall(0.01),
        steps=12,
        growth=GrowingRadius(3.0, 2),
        progress=False,
    )
    made = measuring.under_paper_attack(shop, linear(), x, y, attack)
    assert [p["eps"] for p in made["curve"]] == pytest.approx(
        [0.0, *(0.01 * 3**k for k in range(6))]
    )
    direct = attack(linear().model, x, y)
    assert measuring.accuracy_at(made, 0.1) == pytest.approx(direct.accuracy_at(0.1))
    mass, after = (v.double().flatten(1).sum(1) for v in (x, direct.images))
    off = ((after - mass).abs() / mass)[1:][direct.success[1:]]
    checks = made["examples"]
    assert checks["found"] == len(off) and checks["mass_off"] == int((off > 1e-5).sum()) > 0
    assert checks["mean_mass_error"] == pytest.approx(float(off.mean()))
    assert checks["largest_mass_error"] == pytest.approx(float(off.max()))


def test_models_come_from_the_zoo_a_folder_or_nowhere(tmp_path: Path) -> None:
    assert Workshop(Settings(device="cpu", out=tmp_path)).subject("mnist-standard").origin == "zoo"
    folder = tmp_path / "models" / "cifar10-linf-provable"
    small = wball.build_model("cifar10-resnet-small")
    wball.save_weights(small, folder / "cifar10-linf-provable.safetensors")
    shop = Workshop(
        Settings(device="cpu", models=tmp_path / "models", out=tmp_path, may_train=False)
    )
    assert shop.subject("cifar10-linf-provable").origin == "models folder"
    with pytest.raises(MissingModel, match=r"cifar10-standard\.safetensors"):
        shop.subject("cifar10-standard")
    for path in (
        "a/cifar10-linf-provable.pth",
        "b/cifar10-linf-provable-0/cifar10-linf-provable.safetensors",
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        save_it = torch.save if path.endswith("pth") else save_file
        save_it(small.state_dict(), tmp_path / path)
        other = Workshop(replace(shop.settings, models=tmp_path / path[0])).subject(
            "cifar10-linf-provable"
        )
        assert other.sha256 == shop.subject("cifar10-linf-provable").sha256
    card = folder / "cifar10-linf-provable.json"
    for wrong in ([], {"name": 1}, {"architecture": None}):
        write_json(card, wrong)
        with pytest.raises(ValueError, match="not a model card"):
            Workshop(shop.settings).subject("cifar10-linf-provable")
    card.unlink()
    found = shop.subjects("cifar10-linf-provable", "cifar10-standard")
    assert [s.name for s in found] == [
        "cifar10-linf-provable"
    ] and "cifar10-standard" in shop.missing


def test_missing_data_say_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mnist-curves", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "wball data mnist" in capsys.readouterr().err
    assert main(["cifar10-curves", "--quick", "--out", str(tmp_path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert "--models DIR" in err and err.count("\n") == 1 and "Traceback" not in out + err
    assert not list(tmp_path.glob("*.json"))
    assert main(["six-pixels", "--device", "tpu", "--out", str(tmp_path)]) == 2


def test_words_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["page"], "no results in"),
        (["everything"], "mnist-curves"),
        (["figures", "windows"], "run `python -m reproduction windows"),
        (["six-pixels", "--images", "0"], "at least 1"),
        (["six-pixels", "--seed", "-1"], "at least 0"),
        (["six-pixels", "--models", str(tmp_path / "nowhere")], "is not a folder"),
    ):
        assert main([*words, "--device", "cpu", "--out", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
    assert not [p for p in tmp_path.iterdir() if p.is_file()]


def test_the_command_writes_data_figures_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main([]) == 0 and "Figure 1" in capsys.readouterr().out
    out = ["--out", str(tmp_path)]
    assert main(["six-pixels", "--quick", "--device", "cpu", *out]) == 0
    assert "moved by one pixel" in capsys.readouterr().out
    files = {p.name for p in tmp_path.glob("*.*")}
    assert files == {"six-pixels.json", "six-pixels.pdf", "six-pixels.png"}
    (tmp_path / "six-pixels.png").unlink()
    assert main(["figures", *out]) == 0 and (tmp_path / "six-pixels.png").is_file()
    write_page(tmp_path, tmp_path / "page.md")
    said = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| moved by one pixel | 1.000 | 1.000 | 1.0 |" in said


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quick results of a few recipes, on next to no images."""
    out = tmp_path_factory.mktemp("results")
    settings = Settings(quick=True, device="cpu", out=out)
    for name in ("six-pixels", "wasserstein-vs-linf"):
        reproduce(name, settings)
    return out


def test_results_are_data_with_their_origin(results: Path) -> None:
    content = read_json(results / "six-pixels.json")
    assert content["format"] == "wball-reproduction/1" and content["quick"] is True
    origin = content["provenance"]
    assert origin["command"] == "python -m reproduction six-pixels --quick --device cpu --seed 0"
    asked = Settings(images=7, may_train=False, device="cpu")
    assert (
        command("windows", asked)
        == "python -m reproduction windows --images 7 --no-train --device cpu --seed 0"
    )
    assert {"commit", "device", "kernel", "versions", "seed", "seconds"} <= set(origin)
    moved, greyer, grey = content["data"]["rows"]
    assert grey["wasserstein"] == pytest.approx(1.5) and grey["linf"] == pytest.approx(0.5)
    assert moved["wasserstein"] == pytest.approx(1.0) and moved["linf"] == pytest.approx(1.0)
    assert greyer["wasserstein"] == pytest.approx(0.6) and greyer["linf"] == pytest.approx(0.2)
    rows = {r["name"]: r for r in read_json(results / "wasserstein-vs-linf.json")["data"]["rows"]}
    assert rows["Wasserstein"]["background"] < 0.01 < rows["l-inf"]["background"]


def test_figures_and_page_need_only_the_files(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["six-pixels", "wasserstein-vs-linf"]
    paths = draw(names, results, into=tmp_path)
    assert {p.name for p in paths} == {f"{n}.{k}" for n in names for k in ("pdf", "png")}
    assert (tmp_path / "six-pixels.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "six-pixels.pdf").read_bytes()
    assert (
        b"/Type3" not in drawn and b"/CIDFontType2" in drawn
    )  # text that can be searched, fonts that journals take
    written, *pictures = write_page(results, tmp_path / "docs" / "page.md")
    said = written.read_text(encoding="utf-8")
    assert said == text(results) and len(pictures) == 2
    assert "A quick run" in said
    assert (
        f"{ASSETS}/six-pixels.png" in said
        and (tmp_path / "docs" / ASSETS / "six-pixels.png").is_file()
    )
    with pytest.raises(FileNotFoundError, match="python -m reproduction lambda-p"):
        draw(["lambda-p"], results)


def curve(*accuracies: float) -> dict[str, object]:
    points = [{"eps": 0.1 * k, "accuracy": a} for k, a in enumerate(accuracies)]
    checks = {
        "found": 10,
        "mass_off": 9,
        "mean_mass_error": 0.01,
        "rejected": 0,
        "checked_exactly": 5,
    }
    return {"attack": "a", "images": 10, "curve": points, "examples": checks, "seconds": 1.0}


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    for wrong in (
        {"format": "other"},
        [1],
        {"format": "wball-reproduction/1", "recipe": "timings", "data": {}},
    ):
        write_json(tmp_path / "six-pixels.json", wrong)
        with pytest.raises(ValueError, match=r"run .* again"):
            text(tmp_path)
        with pytest.raises(ValueError, match=r"run .* again"):
            draw(["six-pixels"], tmp_path)


def test_the_committed_page_is_what_the_committed_results_say() -> None:
    written = ROOT / "docs" / "reproduction.md"
    said = written.read_text(encoding="utf-8")
    assert said == text(ROOT / "results" / "paper"), (
        "docs/reproduction.md is stale: run `python -m reproduction page --out results/paper`"
    )
    for line in said.splitlines():
        if line.startswith("!["):
            assert (written.parent / line.split("](")[1].rstrip(")")).is_file()


def test_a_missing_model_is_trained_once_by_its_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {split: images(4) for split in ("train", "test")}
    name, given = "cifar10-linf-provable", list[object]()

    def train(config: TrainConfig, data: object, test: object, *, out: Path, **_: object) -> None:
        given.append((config, data, test))
        model = wball.build_model(config.architecture)
        wball.save_weights(model, out / f"{config.name}.safetensors")

    monkeypatch.setattr(Workshop, "_load", lambda self, dataset, split: sets[split])
    monkeypatch.setattr(workshop, "train", train)
    settings = Settings(device="cpu", out=tmp_path, seed=3)
    subject = Workshop(settings).subject(name)
    assert given == [(preset(name, seed=3), sets["train"], sets["test"])]
    assert subject.origin == "trained here by its preset"
    only = replace(settings, may_train=False)
    assert Workshop(only).subject(name).sha256 == subject.sha256 and len(given) == 1
    for other in (replace(only, seed=1), replace(settings, quick=True, seed=1)):
        with pytest.raises(MissingModel, match="train nothing"):
            Workshop(other).subject(name)


def test_tables_and_remarks_from_their_data() -> None:
    curves, proofs = RECIPES["mnist-curves"], RECIPES["certificates"]
    kinds = ("paper_attack", "same_ball", "standard_attack")
    model = {
        "label": "some",
        **dict.fromkeys(kinds, curve(0.9, 0.2)),
        "at": [{"eps": eps, **dict.fromkeys(kinds, 0.2)} for eps in (0.05, 0.1)],
    }
    data = {"dataset": "mnist", "images": "ten", "unit": "px", "models": [model]}
    assert [t.rows[0][-2:] for t in curves.tables(data)] == 3 * [[None, "20.0"]]  # not tried
    assert "9 of the 10 examples" in curves.remarks(data)[0] and "All 20" in curves.remarks(data)[1]
    seen = {"proved_and_attacked": 7, "proved_and_broken": 0}
    lines = [
        {"method": m, "kind": k, "images": 10, "curve": curve(1.0, a)["curve"], **seen}
        for m, k, a in (("anchored", "proof", 0.7), ("StandardAttack", "attack", 0.9))
    ]
    proved = {"unit": "px", "sets": [{"images": "ten", "name": "m", "rows": lines}]}
    assert [r[-1] for r in proofs.tables(proved)[0].rows] == ["70.0", "90.0"]
    assert "attacked 7 certified balls and found no examples" in proofs.remarks(proved)[-1]


def test_a_result_of_weights_that_were_replaced_says_so() -> None:
    about = provenance.describe_model(wball.load_model("mnist-standard"), "mnist-standard")
    assert list(page.replaced({"rows": [about, {"name": "elsewhere", "sha256": "1"}]})) == []
    assert list(page.replaced({"rows": [about | {"sha256": "1"}]})) == ["mnist-standard"]
