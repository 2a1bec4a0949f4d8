"""Recipes: what they measure, that they go on after being killed, and that figures and page need only their files."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

import wball
from reproduction import measure as measuring
from reproduction import page, timings, workshop
from reproduction.__main__ import main
from reproduction.curves import MNIST_CURVES
from reproduction.draw import bars, curves
from reproduction.page import ASSETS, section
from reproduction.presets import preset, presets
from reproduction.run import (
    RECIPES,
    chosen,
    command,
    draw,
    overview,
    reproduce,
    run,
    stored,
    write_page,
)
from reproduction.tables import Table, pack, percent, unpack
from reproduction.workshop import Data, MissingModel, Settings, Subject, Workshop, quick_config
from wball import provenance
from wball.attacks import PGD, Attack, AttackResult, GrowingRadius, StandardAttack
from wball.storage.files import read_json, write_json
from wball.training import TrainConfig

ROOT = Path(__file__).parent.parent.parent


def text(out: Path) -> str:
    return page.text(stored(out), RECIPES)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(Settings(quick=True, device="cpu", out=tmp_path))


def halves() -> Subject:
    """A linear model on 6 x 6 images: is there more mass on the left or on the right?"""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    weight = torch.linspace(-1, 1, 6).repeat(6)
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-weight, weight]))
        model[1].bias.zero_()
    return Subject("halves", model.eval(), "linear", "here", "0")


def images(count: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(count, 1, 6, 6).square() * 0.8
    return x, halves().model(x).argmax(1)


def test_tables() -> None:
    table = Table(["a", "b"], [["x", None], ["longer", "1 %"]], "title")
    assert table.text().splitlines() == ["title", "a         b", "x         –", "longer  1 %"]
    assert table.markdown().splitlines()[2:] == [
        "| a | b |",
        "| --- | ---: |",
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
    assert all(name in overview().text() for name in RECIPES)
    assert chosen(["all"]) == list(RECIPES) and chosen(["timings", "timings"]) == ["timings"]
    assert chosen(["ALL"]) == chosen("all") == list(RECIPES) and chosen("timings") == ["timings"]
    for wrong in (["nothing"], ["all", "nothing"], []):
        with pytest.raises(ValueError, match="mnist-curves"):
            chosen(wrong)


def test_ours_is_an_evaluation(shop: Workshop) -> None:
    x, y = images()
    y[0] = 1 - y[0]  # wrong as it is
    result, seconds = measuring.evaluated(shop, halves(), x, y, [0.5, 0.05])
    made = measuring.curve(result, seconds)
    assert result.radii == [0.05, 0.5] and [p["eps"] for p in made["curve"]] == [0.0, 0.05, 0.5]
    # A linear model: the support function says exactly who can be broken.
    margin = halves().model(x).detach()
    weight = halves().model[1].weight.detach()
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


def test_every_counted_example_passes_the_audit(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that leaves the ball on some images, far behind the first of a batch, and states a small distance."""
    x, y = images(80)
    far = slice(70, 80)

    def leaves(
        self: Attack, model: nn.Module, x: torch.Tensor, y: torch.Tensor, **options: object
    ) -> AttackResult:
        result = honest(self, model, x, y, **options)
        images = result.images.clone()
        images[far] = x[far].flip(3)  # wrong on these, with their mass, and pixels away from them
        success = result.success.clone()
        success[far] = model(images[far]).argmax(1) != y[far]
        return replace(result, images=images, success=success, proof=None)

    honest = StandardAttack.__call__
    monkeypatch.setattr(StandardAttack, "__call__", leaves)
    monkeypatch.setattr("wball.evaluation.batches.CPU_BATCH", 80)
    result, _ = measuring.evaluated(shop, halves(), x, y, [0.01])
    assert len(result.rejected) >= 5 and all(r["index"] >= 70 for r in result.rejected)
    assert not bool(result.broken_at(0.01)[far].any())
    assert measuring.curve(result)["examples"]["rejected"] == len(result.rejected)


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
    made = measuring.under_paper_attack(shop, halves(), x, y, attack)
    assert [p["eps"] for p in made["curve"]] == pytest.approx(
        [0.0, *(0.01 * 3**k for k in range(6))]
    )
    direct = attack(halves().model, x, y)
    assert measuring.accuracy_at(made, 0.1) == pytest.approx(direct.accuracy_at(0.1))
    mass, after = (v.double().flatten(1).sum(1) for v in (x, direct.images))
    off = ((after - mass).abs() / mass)[1:][direct.success[1:]]
    checks = made["examples"]
    assert checks["found"] == len(off) and checks["mass_off"] == int((off > 1e-5).sum()) > 0
    assert checks["mean_mass_error"] == pytest.approx(float(off.mean()))
    assert checks["largest_mass_error"] == pytest.approx(float(off.max()))


def test_an_interrupted_measurement_resumes(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = images(20)
    monkeypatch.setattr("wball.evaluation.batches.CPU_BATCH", 5)
    whole, _ = measuring.evaluated(shop, halves(), x, y, [0.05, 0.2])
    other, calls, work = (
        Workshop(replace(shop.settings, out=shop.settings.out / "b")),
        0,
        StandardAttack.__call__,
    )

    def dies(self: Attack, *arguments: torch.Tensor, **options: object) -> AttackResult:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return work(self, *arguments, **options)

    monkeypatch.setattr(StandardAttack, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        measuring.evaluated(other, halves(), x, y, [0.05, 0.2])
    resumed, _ = measuring.evaluated(other, halves(), x, y, [0.05, 0.2])
    assert all(torch.equal(resumed.images[name], whole.images[name]) for name in whole.images)
    before = calls
    measuring.evaluated(other, halves(), x, y, [0.05, 0.2])
    assert calls == before  # finished parts are read back


def test_a_part_is_measured_once_by_processes_that_share_a_folder(tmp_path: Path) -> None:
    shop, order = Workshop(Settings(quick=True, device="cpu", out=tmp_path)), []

    def hold() -> None:
        with shop.part("p", ["the same"]):
            order.append("first")
            started.set()
            time.sleep(0.5)
            order.append("first is done")

    started, other = threading.Event(), threading.Thread(target=hold)
    other.start()
    started.wait(10)
    with shop.part("q", ["another"]), shop.part("p", ["the same"]):
        order.append("second")
    other.join()
    assert order == ["first", "first is done", "second"]


def test_quick_settings_are_small_for_every_preset() -> None:
    for name in presets():
        config = quick_config(preset(name))
        assert (
            config.epochs <= 4
            and config.batch_size <= 50
            and config.architecture != "cifar10-resnet18"
        )


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
        "b/cifar10-linf-provable-full-0/cifar10-linf-provable.safetensors",
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


def test_a_model_that_is_broken_is_right_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = halves().model
    x, y = images(4)
    assert torch.equal(measuring.predicted(model, x), y)
    assert measuring.predicted(model, x[:0]).tolist() == []
    assert set(measuring.predicted(lambda z: model(z) * math.nan, x).tolist()) == {-1}  # type: ignore[arg-type]
    monkeypatch.setattr(
        "reproduction.pictures.predicted", lambda model, x: torch.full((len(x),), -1)
    )
    for name in ("wasserstein-vs-linf", "mnist-digits", "lambda-p"):
        with pytest.raises(ValueError, match="none of the images right"):
            reproduce(name, Settings(quick=True, device="cpu", out=tmp_path))


def test_missing_data_say_how_to_get_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mnist-curves", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "wball data mnist" in capsys.readouterr().err
    assert main(["cifar10-curves", "--quick", "--out", str(tmp_path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert "wball data cifar10" in err and err.count("\n") == 1 and "Traceback" not in out + err
    assert not list(tmp_path.glob("*.json"))
    assert main(["six-pixels", "--device", "tpu", "--out", str(tmp_path)]) == 2


def test_words_that_make_no_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["page"], "no results in"),
        (["everything"], "mnist-curves"),
        (["figures", "timings"], "run `python -m reproduction timings"),
        (["timings"], "wball data cifar10"),  # nothing to time
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


def test_an_interruption_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("reproduction.run.run", interrupted)
    assert main(["six-pixels"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_recipe_that_cannot_be_drawn_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    settings = Settings(quick=True, device="cpu", out=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("wball.report.figures.write_whole", full)
        assert run(["six-pixels", "wasserstein-vs-linf"], settings) == 2
    assert {p.name for p in tmp_path.glob("*.*")} == {"six-pixels.json", "wasserstein-vs-linf.json"}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"wball\[report\]"):  # before anything is measured
        run(["six-pixels"], Settings(quick=True, device="cpu", out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_damaged_parts_are_measured_again(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = images(10)
    monkeypatch.setitem(measuring.BATCH, "cpu", 5)
    attack = PGD.paper(
        "mnist",
        ball=wball.WassersteinBall(0.05),
        steps=2,
        growth=GrowingRadius(3.0, 1),
        progress=False,
    )

    def measured() -> list[Data]:
        theirs = measuring.under_paper_attack(shop, halves(), x, y, attack)
        return [theirs, measuring.curve(measuring.evaluated(shop, halves(), x, y, [0.05, 0.2])[0])]

    first = measured()
    folder = shop.settings.out / "parts"
    files = [
        *sorted(folder.rglob("batch-*.safetensors")),
        *folder.rglob("results.json"),
        *folder.rglob("notes.json"),
    ]
    assert len(files) == 4
    for damage in (
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: save({"other": torch.zeros(1)}),
    ):
        capsys.readouterr()
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        again = measured()
        assert capsys.readouterr().out.count("measured again") == 4
        assert [a["curve"] for a in again] == [a["curve"] for a in first]
        assert [a["examples"] for a in again] == [a["examples"] for a in first]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quick results of a few recipes, on next to no images."""
    out = tmp_path_factory.mktemp("results")
    settings = Settings(quick=True, device="cpu", out=out, images=6)
    assert (
        run(["six-pixels", "wasserstein-vs-linf"], replace(settings, images=None), figures=False)
        == 0
    )
    assert run(["timings"], settings, figures=False) == 0
    return out


def test_parts_of_another_commit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(quick=True, device="cpu", out=tmp_path, images=2)
    x, y = images(2)
    made = replace(RECIPES["six-pixels"], measure=lambda shop: {"rows": _broken(shop, x, y)})
    monkeypatch.setitem(RECIPES, "six-pixels", made)
    origins = []
    for commit in ("a", "a", "b"):
        monkeypatch.setattr("wball.provenance.commit", lambda commit=commit: commit)
        origins.append(reproduce("six-pixels", settings)["provenance"])
    assert [(o["commit"], o.get("earlier_commits")) for o in origins] == [
        ("a", None),
        ("a", None),
        ("b", ["a"]),
    ]
    content = {"quick": False, "missing": {}, "data": {"rows": [], "unit": "px", "original": None}}
    content["provenance"] = origins[-1]
    monkeypatch.setitem(
        RECIPES, "six-pixels", replace(made, tables=lambda data: [], remarks=lambda data: [])
    )
    assert "commit b, parts at a, " in section(RECIPES["six-pixels"], content)


def _broken(shop: Workshop, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    return [measuring.evaluated(shop, halves(), x, y, [0.1])[0].accuracy_at(0.1)]


def test_results_are_data_with_their_origin(results: Path) -> None:
    content = read_json(results / "six-pixels.json")
    assert content["format"] == "wball-reproduction/1" and content["quick"] is True
    origin = content["provenance"]
    assert origin["command"] == "python -m reproduction six-pixels --quick --device cpu --seed 0"
    asked = Settings(images=7, may_train=False, device="cpu")
    assert (
        command("timings", asked)
        == "python -m reproduction timings --images 7 --no-train --device cpu --seed 0"
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
    names = ["six-pixels", "wasserstein-vs-linf", "timings"]
    paths = draw(names, results, into=tmp_path)
    assert {p.name for p in paths} == {f"{n}.{k}" for n in names for k in ("pdf", "png")}
    assert (tmp_path / "six-pixels.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "six-pixels.pdf").read_bytes()
    assert (
        b"/Type3" not in drawn and b"/CIDFontType2" in drawn
    )  # text that can be searched, fonts that journals take
    assert draw("six-pixels", str(results), into=str(tmp_path)) == paths[:2]
    written, *pictures = write_page(results, tmp_path / "docs" / "page.md")
    said = written.read_text(encoding="utf-8")
    assert said == text(results) and len(pictures) == 3
    assert "A quick run" in said and "Not measured yet" in said and "`mnist-curves`" in said
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


def test_a_fall_under_our_attack_is_said_plainly(tmp_path: Path) -> None:
    model = {
        "label": "adv. training",
        "name": "m",
        "paper_attack": curve(0.9, 0.8),
        "same_ball": curve(0.9, 0.2),
        "standard_attack": curve(0.9, 0.1),
        "at": [{"eps": 0.1, "paper_attack": 0.8, "same_ball": 0.2, "standard_attack": 0.1}],
    }
    data = {"dataset": "mnist", "images": "ten", "unit": "px", "models": [model]}
    said = " ".join(MNIST_CURVES.remarks(data))
    assert (
        "**falls**" in said
        and "from 80.0 % to 10.0 %" in said
        and "90.0 % of the paper's attack's" in said
    )
    assert "every counted example is audited" in said  # stored by an earlier version, and so said
    for key in ("same_ball", "standard_attack"):
        model[key]["examples"] = {**model[key]["examples"], "proved_by_plan": 10}
    assert (
        "20 examples all passed the audit of mass, box and distance, 20 by a transport"
        in " ".join(MNIST_CURVES.remarks(data))
    )
    assert [t.rows[0][-1] for t in MNIST_CURVES.tables(data)] == ["80.0 %", "20.0 %", "10.0 %"]
    assert "first" not in said and "begins" not in said
    early = {
        "eps": 0.05,
        "paper_attack": 0.9,
        "same_ball": 0.3,
        "standard_attack": 0.0,
    }  # the curves begin at 0.1
    fewer = {**curve(0.9, 0.1), "images": 5}
    other = {**data, "models": [{**model, "standard_attack": fewer, "at": [early, *model["at"]]}]}
    said = " ".join(MNIST_CURVES.remarks(other))
    assert (
        "from 80.0 % to 10.0 %" in said
        and "begins at eps 0.1" in said
        and "the first 5 of the 10 images" in said
    )
    assert [t.rows[0][-2] for t in MNIST_CURVES.tables(other)] == [None, None, None]
    pytest.importorskip("matplotlib")
    assert MNIST_CURVES.draw is not None
    titles = [axis.get_title() for axis in MNIST_CURVES.draw(data).axes]
    assert titles == ["the paper's attack (a)", "ours, valid examples (a)"]


def test_remarks_say_no_more_than_their_data() -> None:
    row = {"dataset": "mnist", "label": "standard", "paper": 0.9890, "accuracy": 0.9887}
    nominal, digits = RECIPES["nominal-accuracies"], RECIPES["lambda-p"]
    assert nominal.remarks({"rows": [row]}) == [
        "Less accurate than the paper's: MNIST standard (by 0.03 points)."
    ]
    assert nominal.remarks({"rows": [{**row, "accuracy": 0.9890}]})[0].startswith(
        "Every model is at least as accurate"
    )
    shown = {**row, "images": 10_000, "architecture": "a", "linf": 0.1, "verified": 0.939}
    assert (
        nominal.tables({"rows": [{**shown, "verified_images": 200}]})[0].rows[0][-1]
        == "93.9 % of 200 at 0.1"
    )
    cells = [{"lambda": 1.0, "p": 1.0, "radius": [0.3, None, 0.6, 0.4, 0.5]}]
    (table,) = digits.tables({"cells": cells})
    assert table.rows == [["1", "0.45 (4/5)"]]  # the median, not the upper one
    pixels = [{"wasserstein": 1.0, "linf": 0.5}, {"wasserstein": 0.6, "linf": 0.2}]
    assert "costs 1.5 times" in RECIPES["six-pixels"].remarks({"rows": pixels})[0]
    fell = {
        "claim": "a",
        "eps": 0.1,
        "paper": 0.5,
        "paper_attack": 0.4,
        "same_ball": 0.3,
        "standard_attack": 0.2,
    }
    (table,) = RECIPES["headlines"].tables({"rows": [{**fell, "images": [10_000, 1_000]}]})
    assert table.rows[0][-4:] == ["40.0 %", "30.0 %", "20.0 %", "10,000; 1,000"]


def test_windows_and_certificates_from_their_data() -> None:
    row = {"label": "l-inf robust", "name": "mnist-linf-provable", "paper_attack": curve(1.0, 0.4)}
    rows = [
        {**row, "window": window, "p": p, "standard_attack": curve(1.0, 0.1) if p == 1 else None}
        for p in (1.0, 2.0)
        for window in (3, 5)
    ]
    data = {"images": "ten", "unit": "px", "rows": rows}
    windows, proofs = RECIPES["windows"], RECIPES["certificates"]
    (table,) = windows.tables(data)
    assert table.rows[0] == ["l-inf robust", "1", "3 x 3", "0.10", "40.0 %", "41.0 %", "10.0 %"]
    assert table.title == "Ten; ours is a"
    assert table.rows[2][-1] is None and len(windows.remarks(data)) == 2
    assert "it leaves here, at eps 0.10, 40.0 % with 3 x 3" in windows.remarks(data)[0]
    methods = [
        ("interval", "proof", 0.0),
        ("anchored", "proof", 0.7),
        ("StandardAttack", "attack", 0.9),
    ]
    seen = {"proved_and_attacked": 7, "proved_and_broken": 0}
    lines = [
        {"method": m, "kind": k, "images": 10, "curve": curve(1.0, a)["curve"], "seconds": 1.0}
        | seen
        for m, k, a in methods
    ]
    proved = {"unit": "px", "sets": [{"images": "ten", "name": "m", "rows": lines}]}
    said = " ".join(proofs.remarks(proved))
    assert "prove nothing at any radius" in said and "prove 70.0 % of the images at eps 0.1" in said
    assert [r[-1] for r in proofs.tables(proved)[0].rows] == ["0.0 %", "70.0 %", "90.0 %"]
    pytest.importorskip("matplotlib")
    assert windows.draw is not None and proofs.draw is not None
    assert len(windows.draw(data).axes) == 2 and len(proofs.draw(proved).axes[0].lines) == 3


def test_the_time_of_compiling_is_not_counted(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def slow_at_first(way: object, device: torch.device) -> tuple[object, float]:
        calls.append(way)
        return SimpleNamespace(n_iter=torch.ones(1), kernel="k"), 0.25 if way in calls[
            :-1
        ] else 100.0

    monkeypatch.setattr(timings, "_timed", slow_at_first)
    data = timings.measure(shop)
    assert {row["seconds"] for row in data["rows"]} == {0.25}
    row = {**data["rows"][0], "iterations": 10, "median_iterations": 4}
    assert timings.tables({"rows": [row]})[0].rows[0][1:4] == ["250 ms", "4; 10", "25 ms"]


def test_every_recipe_has_a_figure_and_bars_say_their_values() -> None:
    assert all(r.draw is not None for r in RECIPES.values())
    pytest.importorskip("matplotlib")
    figure = bars(["a", "b"], [("paper", [98.9, None]), ("here", [99.04, 7.0])], "accuracy (%)")
    (axis,) = figure.axes
    assert [t.get_text() for t in axis.get_yticklabels()] == ["a", "b"]
    assert (
        sorted(t.get_text() for t in axis.texts) == ["7.0", "98.9", "99.0"]
        and len(axis.patches) == 3
    )


def test_curves_share_their_axis_and_one_legend() -> None:
    pytest.importorskip("matplotlib")
    small = [{"eps": e, "accuracy": a} for e, a in ((0.0, 1.0), (0.001, 0.9), (0.1, 0.1))]
    large = [{"eps": e, "accuracy": a} for e, a in ((0.0, 1.0), (0.01, 0.5), (0.05, 0.2))]
    figure = curves(
        [("one", [("a", small)]), ("two", [("a", large), ("b", large)])], "px", log=True
    )
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim()  # the same radius at the same place
    assert [t.get_text() for t in left.get_xticklabels()] == ["0", "0.001", "0.01", "0.1"]
    assert (
        left.lines[0].get_xdata()[0]
        == right.lines[0].get_xdata()[0]
        == left.get_xticks()[0]
        < 0.001
    )
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == [
        "a",
        "b",
    ]  # b is in the second panel alone


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


def test_reproduce_is_repeatable(tmp_path: Path) -> None:
    settings = Settings(quick=True, device="cpu", out=tmp_path)
    first, second = (reproduce("six-pixels", settings) for _ in range(2))
    assert first["data"] == second["data"]


def test_a_missing_model_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(quick=True, device="cpu", out=tmp_path)
    monkeypatch.setattr(
        workshop, "quick_config", lambda config: replace(quick_config(config), epochs=1)
    )
    trained = Workshop(settings).subject("mnist-flow-noise")
    assert trained.origin == "trained here, quick"
    monkeypatch.setattr(
        workshop, "train", lambda *arguments, **options: pytest.fail("trained again")
    )
    assert Workshop(settings).subject("mnist-flow-noise").sha256 == trained.sha256
    only = replace(settings, may_train=False)
    assert Workshop(only).subject("mnist-flow-noise").sha256 == trained.sha256  # it is there
    with pytest.raises(MissingModel, match="--no-train"):
        Workshop(replace(only, seed=1)).subject("mnist-flow-noise")


def test_models_of_full_recipes_are_trained_as_their_presets_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {split: images(4) for split in ("train", "test")}
    given: list[object] = []

    def train(
        config: TrainConfig,
        data: object,
        test: object,
        *,
        out: Path,
        model: object,
        **options: object,
    ) -> None:
        given.extend([config, data, test, model])
        wball.save_weights(
            wball.build_model(config.architecture), out / f"{config.name}.safetensors"
        )

    monkeypatch.setattr(Workshop, "_load", lambda self, dataset, split: sets[split])
    monkeypatch.setattr(workshop, "train", train)
    subject = Workshop(Settings(device="cpu", out=tmp_path, seed=3)).subject("mnist-flow-noise")
    assert given == [preset("mnist-flow-noise", seed=3), sets["train"], sets["test"], None]
    assert subject.origin == "trained here by its preset" and subject.architecture == "mnist-cnn"
    given.clear()
    quick = Workshop(Settings(quick=True, device="cpu", out=tmp_path))
    assert quick.subject("mnist-flow-noise").origin == "trained here, quick"
    config, _, test, start = given
    assert (
        config == quick_config(preset("mnist-flow-noise"))
        and test is None
        and isinstance(start, nn.Module)
    )
    standard = quick.subject("mnist-standard").model
    assert start is not standard and all(
        map(torch.equal, start.parameters(), standard.parameters())
    )


def test_a_result_of_weights_that_were_replaced_says_so() -> None:
    about = provenance.describe_model(wball.load_model("mnist-standard"), "mnist-standard")
    assert list(page.replaced({"rows": [about, {"name": "elsewhere", "sha256": "1"}]})) == []
    assert list(page.replaced({"rows": [about | {"sha256": "1"}]})) == ["mnist-standard"]
