"""Recipes: what they measure, that they go on after being killed, and that figures and page need only their files."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import nn

import wball
from reproduction import measure as measuring
from reproduction import page, workshop
from reproduction.__main__ import main
from reproduction.page import ASSETS, section
from reproduction.presets import preset
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
from reproduction.workshop import Data, MissingModel, Settings, Subject, Workshop
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
    assert chosen(["all"]) == list(RECIPES) and chosen(["windows", "windows"]) == ["windows"]
    for wrong in (["nothing"], ["all", "nothing"]):
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


@pytest.mark.slow
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
    settings = Settings(quick=True, device="cpu", out=out)
    for name in ("six-pixels", "wasserstein-vs-linf"):
        reproduce(name, settings)
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
    assert [t.rows[0][-2:] for t in curves.tables(data)] == 3 * [[None, "20.0 %"]]  # not tried
    assert "9 of the 10 examples" in curves.remarks(data)[0] and "All 20" in curves.remarks(data)[1]
    seen = {"proved_and_attacked": 7, "proved_and_broken": 0}
    lines = [
        {"method": m, "kind": k, "images": 10, "curve": curve(1.0, a)["curve"], **seen}
        for m, k, a in (("anchored", "proof", 0.7), ("StandardAttack", "attack", 0.9))
    ]
    proved = {"unit": "px", "sets": [{"images": "ten", "name": "m", "rows": lines}]}
    assert [r[-1] for r in proofs.tables(proved)[0].rows] == ["70.0 %", "90.0 %"]
    assert "attacked 7 certified balls and found no examples" in proofs.remarks(proved)[-1]


def test_a_result_of_weights_that_were_replaced_says_so() -> None:
    about = provenance.describe_model(wball.load_model("mnist-standard"), "mnist-standard")
    assert list(page.replaced({"rows": [about, {"name": "elsewhere", "sha256": "1"}]})) == []
    assert list(page.replaced({"rows": [about | {"sha256": "1"}]})) == ["mnist-standard"]
