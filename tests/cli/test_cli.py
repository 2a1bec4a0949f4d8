"""The command line: what it writes, what it says, and how it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import typer

import problems
import wball
from wball.cli import choices, main
from wball.cli.commands import app
from wball.evaluation import load_evaluation
from wball.storage.files import locked, read_tensors

SOURCES = Path(__file__).parents[2] / "src"

MINE = """
import torch
from torch import nn

def halves():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    weight = torch.linspace(-1, 1, 6).repeat(6)
    with torch.no_grad():
        model[1].weight.copy_(torch.stack([-weight, weight]))
        model[1].bias.zero_()
    return model

def other():
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))

def data():
    x = torch.rand(9, 1, 6, 6, generator=torch.Generator().manual_seed(0)).square() * 0.8
    return x, halves()(x).argmax(1)

def labels_out_of_range():
    x, y = data()
    return x, y + 5

def slow():
    import time
    net = halves()
    def model(x):
        time.sleep(0.2)
        return net(x)
    return model

broken = 3

class Stumbles(nn.Module):
    def forward(self, x):
        return {}["weights"]

class Talks(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = halves()
    def forward(self, x):
        print("hello")
        return self.net(x)

class Leaves(nn.Module):
    def forward(self, x):
        raise SystemExit(1)

def leaves():
    raise SystemExit(3)

def unreadable():
    return ({}[i] for i in range(3))

def raises():
    raise RuntimeError("no weights")
"""

QUICK = ["--attack", "dual-averaging", "--eps", "0.1,0.3"]
HALVES = ["evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "--out", "o"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's, as the working directory."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "raising.py").write_text("def net(:")
    (tmp_path / "leaving.py").write_text("raise SystemExit(4)")
    (tmp_path / "nothing_in.py").write_text("size = 3")
    for name in ("raising.onnx", "raising.pt2"):
        (tmp_path / name).write_bytes(b"no model \x1b[2J")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WBALL_DATA", raising=False)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    return tmp_path


def said(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def process(*arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of ``python -m wball`` in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "wball", *arguments], {**variables, **environment}


def grey_images(folder: Path, *labels: str) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in labels:
        (folder / label).mkdir(parents=True)
        image.new("L", (6, 6), 99).save(folder / label / "1.png")


def test_few_commands_with_few_options_that_explain_themselves(capsys: Capture) -> None:
    top: Any = typer.main.get_command(app)
    assert len(top.commands) <= 8
    code, out, _ = said(capsys)
    assert code == 0 and all(f"  {name} " in out for name in top.commands)
    for name, command in top.commands.items():
        assert len([p for p in command.params if p.param_type_name == "option"]) <= 22, name
        code, out, _ = said(capsys, name, "--help")
        assert code == 0 and f"Usage: wball {name}" in out
        assert not any(word in out for word in ("<bool>", "<list", "x>=", "<=x", "<str>", "<int"))
    shown = [p.opts[0] for p in top.commands["evaluate"].params][1:5]
    assert shown == ["--eps", "--attack", "--require", "--certify"]
    assert said(capsys, "--version")[1].strip() == wball.__version__


def test_evaluate_writes_results_examples_and_a_report(
    here: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("jinja2")
    code, out, _ = said(capsys, *HALVES, "--verbose")
    assert code == 0 and "batch" in caplog.text
    assert "halves on 9 images" in out and "audit:" in out and "mass fraction x px" in out
    result = load_evaluation(here / "o")
    assert result.clean_accuracy == 1.0 and result.radii == [0.1, 0.3]
    assert (here / "o" / "report.html").stat().st_size > 2e4
    tensors, _ = read_tensors(here / "o" / "examples.safetensors")
    assert tensors["adversarial"].shape == tensors["original"].shape
    # the same command again reads the result back
    before = (here / "o" / "results.json").stat().st_mtime_ns
    code, out, err = said(capsys, *HALVES, "--json")
    assert code == 0 and (here / "o" / "results.json").stat().st_mtime_ns == before
    assert "images x radii" not in err  # nothing was left to do
    (content,) = json.loads(out)
    assert content["model"] == "halves" and content["curve"][0]["accuracy"] == 1.0


def test_json_leaves_progress_on_stderr(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wball.progress.WRITTEN", 0.0)
    code, out, err = said(capsys, *HALVES, "--json")
    assert code == 0 and json.loads(out)[0]["model"] == "halves"
    assert "halves" in err and "eps 0.3" in err and "100 %" in err


def test_a_target_is_the_only_success(here: Path, capsys: Capture) -> None:
    assert said(capsys, *HALVES, "--target", "1")[0] == 0
    result = load_evaluation(here / "o")
    assert result.settings["attack"]["target"] == 1
    model = choices.called("mine.py:halves", choices.find("mine.py:halves"))
    assert set(model(result.examples["adversarial"]).argmax(1).tolist()) == {1}
    assert said(capsys, *HALVES, "--target", "7")[0] == 2


def test_several_models_and_a_report_of_their_results(here: Path, capsys: Capture) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    models = ["mine.py:halves", "mine.py:other"]
    assert said(capsys, "evaluate", *models, *HALVES[2:-1], "two")[0] == 0
    lines = (here / "two" / "results.csv").read_text().splitlines()
    assert lines[0].startswith("model,data,images") and len(lines) == 1 + 2 * 3
    line = ["report", "two/halves", "two/other", "--out", "r.html"]
    code, out, _ = said(capsys, *line, "--figures", "f", "--format", "png")
    assert code == 0 and "r.html" in out and "(paired test, p =" in out
    assert (here / "f" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (here / "f" / "examples-halves.png").exists()
    assert said(capsys, "report", "two/halves", "--figures", "g")[0] == 0
    assert (here / "g" / "accuracy.pdf").exists() and not (here / "report.html").exists()


def test_models_are_files(here: Path, capsys: Capture) -> None:
    sys.path.insert(0, str(here))
    net = problems.halves()
    torch.jit.save(torch.jit.script(net), here / "script.pt")
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(net, (torch.rand(2, 1, 6, 6),), dynamic_shapes=({0: batch},))
    torch.export.save(program, here / "program.pt2")
    torch.save({"state_dict": net.state_dict()}, here / "state.pth")
    wball.save_weights(net, here / "weights.safetensors")
    source = "from mine import halves as made\n\ndef model():\n    return made()\n"
    (here / "one.py").write_text(source)
    results = {}
    for file, more in (
        ("script.pt", []),
        ("program.pt2", []),
        ("state.pth", ["--architecture", "mine.py:other"]),
        ("weights.safetensors", ["--architecture", "mine.py:other"]),
        ("one.py", []),
    ):
        name = Path(file).stem
        code, out, err = said(capsys, "evaluate", file, *HALVES[2:-1], name, *more, "--json")
        assert code in (0, 6) and json.loads(out)[0]["model"] == name, err
        results[file] = [point.accuracy for point in load_evaluation(here / name).curve()]
    assert len({tuple(curve) for curve in results.values()}) == 1 and results["one.py"][0] == 1.0


def test_normalisation_in_front_of_a_model(here: Path, capsys: Capture) -> None:
    line = ["certify", "mine.py:halves", "-d", "mine.py:data", "--eps", "0.001", "--json"]
    plain = json.loads(said(capsys, *line)[1])["radii"][0]["margin"]
    shifted = json.loads(said(capsys, *line, "--mean", "0.5", "--std", "0.5")[1])
    # a linear model of zero-sum weights: margins double
    assert shifted["radii"][0]["margin"] == pytest.approx([2 * m for m in plain], rel=1e-3)


def test_a_limit_draws_from_every_class(here: Path, capsys: Capture) -> None:
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    chosen = choices.stratified_sample(y, 10, 0)
    assert y[chosen].bincount().tolist() == [6, 3, 1]
    assert torch.equal(chosen, choices.stratified_sample(y, 10, 0))
    assert not torch.equal(chosen, choices.stratified_sample(y, 10, 1))
    assert len(choices.stratified_sample(y, 7, 3).unique()) == 7
    line = ["certify", "mine.py:halves", "-d", "mine.py:data", "--limit", "4", "--seed", "5"]
    code, out, _ = said(capsys, *line)
    assert code == 0 and "a stratified sample of 4 of 9 (seed 5)" in " ".join(out.split())


def test_radii_suit_the_data(here: Path, capsys: Capture) -> None:
    line = ["evaluate", "mine.py:halves", "-d", "mine.py:data", "-a", "dual-averaging", "-o", "o"]
    code, out, _ = said(capsys, *line)
    assert code == 0 and "were chosen by a quick search (set them with --eps)" in out
    result = load_evaluation(here / "o")
    assert result.accuracy_at(result.radii[0]) > result.accuracy_at(result.radii[-1])
    assert all(f"{r:.2g}" == f"{r:g}" for r in result.radii)
    # the same command reads the result back with the same radii
    code, out, _ = said(capsys, *line)
    assert code == 0 and "o contains a finished evaluation" in out
    assert "quick search" not in out


def test_terminal_escapes_are_written_out(here: Path, capsys: Capture) -> None:
    evil = "a\x1b[2J\x07b"
    code, out, err = said(capsys, "evaluate", evil, "--data", evil)
    assert code == 2 and "\x1b" not in err + out and "a\\x1b[2J\\x07b" in err
    for line in (["evaluate", "mine.py:halves", "--data", evil], ["evaluate", "raising.onnx"]):
        code, out, err = said(capsys, *line)
        assert code == 2 and "\x1b" not in err + out
    code, out, err = said(capsys, *HALVES[:-1], f"o{evil}")
    assert code == 0 and "\x1b" not in out + err


def test_a_requirement_decides(here: Path, capsys: Capture) -> None:
    code, out, _ = said(capsys, *HALVES, "--require", "0:0.5", "--json")
    (content,) = json.loads(out)
    assert content["passed"] is True and not content["warnings"] and code == 0
    code, out, _ = said(capsys, *HALVES, "--require", "0.3:1.0", "--require", "0:0.1")
    assert code == 7 and "FAILED halves" in out
    assert "robust accuracy of at least 100 %" in out
    page = (here / "o" / "report.html").read_text(encoding="utf-8")
    assert 'class="decision bad"' in page
    assert "robust accuracy of at least 100 % at radius 0.3" in page
    code, _, err = said(capsys, *HALVES, "--require", "much")
    assert code == 2 and "requirement 'much' must be RADIUS" in err


def test_a_release_is_compared_with_a_baseline(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same images, a paired test, one verdict on the screen, in JUnit and in the workflow."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    line = ["evaluate", "mine.py:halves", "--data", "mine.py:data", *QUICK]
    assert said(capsys, *line, "--out", "base")[0] == 0
    for name, passes in (("halves", True), ("other", False)):
        line[1] = f"mine.py:{name}"
        code, out, err = said(capsys, *line, "--require", "0.1:base", "--out", name)
        assert code == (0 if passes else 7)
        assert "robust accuracy not worse than base at radius 0.1" in out and "paired test" in out
        suite = ElementTree.parse(here / name / "junit.xml").getroot()[0]
        assert suite.get("name") == name and len(suite) == 2
        assert int(suite.get("failures")) == (0 if passes else 1)
        assert err.count("::error title=wball::") == (0 if passes else 1)
    line[1] = "mine.py:halves"
    for baseline, expected in (("0.2:base", "was not evaluated"), ("0.1:nowhere", "results.json")):
        code, _, err = said(capsys, *line, "--require", baseline, "--out", "c")
        assert code == 2 and expected in err and not (here / "c").exists()
    code, _, err = said(capsys, *line, "--require", "0.1:base", "--limit", "3", "--out", "c")
    assert code == 2 and "base is an evaluation of different images" in err


def test_each_weights_file_has_its_architecture(here: Path, capsys: Capture) -> None:
    scope: dict[str, Any] = {}
    exec(MINE, scope)
    for name in ("halves", "other"):
        wball.save_weights(scope[name](), here / f"{name}.safetensors")
    files = ["evaluate", "halves.safetensors", "other.safetensors", "-d", "mine.py:data", *QUICK]
    known = ["--architecture", "mine.py:halves", "--architecture", "mine.py:other"]
    code, _, _ = said(capsys, *files, *known, "--batch-size", "2", "--out", "o")
    assert code in (0, 6)
    settings = json.loads((here / "o/other/results.json").read_text())["settings"]
    assert settings["batch_size"] == 2
    code, _, err = said(capsys, *files, *known, "--architecture", "mine.py:other")
    assert code == 2 and "3 times for 2 weights files" in err


def test_certify(here: Path, capsys: Capture) -> None:
    line = ["certify", "mine.py:halves", "-d", "mine.py:data", "--eps", "0.001,5"]
    line += ["--method", "crown", "--json"]
    code, out, _ = said(capsys, *line, "--out", "c.json")
    small, large = json.loads(out)["radii"]
    assert code == 0 and small["certified"] > large["certified"] == 0.0
    assert json.loads((here / "c.json").read_text()) == json.loads(out)
    assert set(small["status"]) <= {"certified", "unknown", "misclassified"}
    line = [*line[:4], "--eps", "0.001", "--method", "crown,dual", "--verify", "--json"]
    both = json.loads(said(capsys, *line)[1])
    assert [found["method"] for found in both] == ["crown", "dual"]
    for found in both:
        row = found["radii"][0]
        assert row["confirmed"] == row["certified"] == small["certified"]
        assert row["verification"].count("confirmed") == row["status"].count("certified")


def test_the_program_of_certificates_is_saved_and_certified_again(
    here: Path, capsys: Capture
) -> None:
    rest = ["-d", "mine.py:data", "--eps", "0.001", "--method", "crown", "--verify", "--json"]
    first = ["certify", "mine.py:halves", *rest, "--save-program", "p/halves.pt2"]
    code, out, err = said(capsys, *first)
    assert code == 0, err
    again = json.loads(said(capsys, "certify", "p/halves.pt2", *rest)[1])
    found = json.loads(out)
    assert again["program"] == found["program"] and again["radii"] == found["radii"]
    for wrong in (["--save-program", "halves.pt"], ["--save-program", "p.pt2", "mine.py:other"]):
        code, _, err = said(capsys, "certify", "mine.py:halves", *rest, *wrong)
        assert code == 2 and "must end in .pt2 and is for one model" in " ".join(err.split())


def test_lists(here: Path, capsys: Capture) -> None:
    code, out, _ = said(capsys, "models")
    assert code == 0 and all(name in out for name in (*wball.list_models(), *wball.architectures()))
    code, out, _ = said(capsys, "models", "mnist-standard")
    assert json.loads(out)["architecture"] == "mnist-cnn"
    code, out, _ = said(capsys, "data")
    assert code == 0 and "fashion-mnist" in out
    content = json.loads(said(capsys, "info")[1])
    assert content["wball"] == wball.__version__ and content["kernels"]["torch"]["cpu"] is None


def test_train_takes_your_own_model_and_data(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = 0.2 * torch.rand(60, 1, 6, 6, generator=generator)
    x[y == 1, :, 3:] += 0.6
    np.savez(here / "train.npz", x=(x * 255).byte().numpy(), y=y.numpy())
    np.savez(here / "test.npz", images=x[:20].numpy(), labels=y[:20].numpy())
    command = ["train", "mnist-standard", "--model", "mine.py:other", "--data", "train.npz"]
    command += ["--test-data", "test.npz", "--epochs", "6", "--device", "cpu"]
    command += ["--batch-size", "10", "--set", "optimisation.lr=0.1"]
    code, out, _ = said(capsys, *command, "--out", "out", "--name", "halves")
    card = json.loads((here / "out/halves.json").read_text())
    assert code == 0 and out.splitlines()[-1] == "written: out/halves.safetensors"
    assert card["dataset"] == card["architecture"] == "own" and card["clean_accuracy"] == 1.0
    whole = (here / "out/halves.safetensors").read_bytes()
    with monkeypatch.context() as patch:  # as a data set that does not fit into memory
        patch.setattr(choices, "IN_MEMORY", 0)
        assert said(capsys, *command, "--out", "streamed", "--name", "halves")[0] == 0
    assert (here / "streamed/halves.safetensors").read_bytes() == whole
    line = ["evaluate", "out/halves.safetensors", "--architecture", "mine.py:other"]
    code, _, err = said(capsys, *line, "-d", "test.npz", *QUICK)
    assert code == 0, err
    for wrong, words in (
        (["--model", "mnist-cnn"], "expected mine.py or mine.py:function"),
        (["--test-data", "test.npz"], "goes with --data"),
        (["--data", "nothing.npz"], "no file nothing.npz"),
    ):
        code, _, err = said(capsys, "train", "mnist-standard", *wrong, "--out", "other")
        assert code == 2 and words in " ".join(err.split()), err


def test_train_prints_each_epoch_and_writes_the_model(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = wball.load_sample("mnist")
    monkeypatch.setattr(
        "wball.data.load_dataset", lambda name, root, split, device: (x[:50], y[:50])
    )
    command = ["train", "mnist-adversarial", "--epochs", "2", "--limit", "40", "--device", "cpu"]
    command += ["--name", "mine", "--batch-size", "20"]
    for change in (
        "architecture=mnist-cnn",
        "adversary.attack.steps=2",
        "evaluation.attack.steps=2",
        "evaluation.every=2",
        "optimisation.bf16=False",
    ):
        command += ["--set", change]
    code, out, _ = said(capsys, *command, "--out", "out")
    metrics = (here / "out/metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(row) for row in metrics)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3 and lines[2] == "written: out/mine.safetensors"
    assert lines[0].startswith("epoch   1") and "clean_accuracy" not in first
    assert f"clean {100 * second['clean_accuracy']:.2f} %" in lines[1]
    assert f"robust at eps 0.1 {100 * second['robust_accuracy_0.1']:.2f} %" in lines[1]
    assert f"mean radius {second['mean_radius']:.3f}" in lines[1] and second["step"] == 4
    card = json.loads((here / "out/mine.json").read_text())
    assert card["training"]["batch_size"] == 20
    assert card["training"]["optimisation"]["bf16"] is False


BAD = {
    "evalute": "evalute",
    "evaluate mnist-standard --epsilon 1": "--epsilon",
    "evaluate": "MODEL",
    "evaluate mnist-standart": "did you mean mnist-standard?",
    "evaluate mnist-cnn --architecture mnist-cnn": "mnist-cnn is not one",
    "evaluate none.pth --architecture mnist-cnn": "no model file none.pth",
    "evaluate cut.safetensors --architecture mnist-cnn": "cut.safetensors",
    "evaluate mnist.safetensors --architecture cifar10-resnet18": "do not fit",
    "evaluate mnist.safetensors": "--architecture",
    "evaluate mnist.safetensors --architecture resnet": "expected mine.py",
    "evaluate none.onnx": "no model file none.onnx",
    "evaluate raising.onnx": "raising.onnx cannot be read as a model",
    "evaluate raising.pt2": "raising.pt2 cannot be read as a model",
    "evaluate mine.py": "several models: say which one (mine.py:",
    "evaluate nothing_in.py": "defines no model",
    "evaluate nothing.py:net": "nothing.py",
    "evaluate no.such.module:net": "cannot import",
    "evaluate mine.py:halvs": "did you mean halves?",
    "evaluate mine.py:broken": "not callable",
    "evaluate mine.py:raises": "mine.py:raises: the call raised RuntimeError: no",
    "evaluate raising.py:net": "cannot import raising.py (SyntaxError",
    "evaluate mine.py:leaves": "the call raised SystemExit: 3",
    "evaluate leaving.py:net": "cannot import leaving.py (SystemExit: 4)",
    "evaluate mine.py:Stumbles -d mine.py:data": "KeyError: 'weights'",
    "evaluate mine.py:halves mine.py:halves -d mine.py:data": "two models are called",
    "evaluate mine.py:halves --mean 0.5": "--std",
    "evaluate mine.py:halves --mean a --std 1": "--mean a",
    "evaluate mine.py:halves -d mine.py:raises": "the call raised RuntimeError",
    "evaluate mine.py:halves -d mine.py:unreadable": "reading it raised KeyE",
    "evaluate mine.py:halves -d mine.py:labels_out_of_range": "2 classes",
    "evaluate mine.py:halves -d mine.py:data --out mine.py": "is a file",
    "evaluate mine.py:halves -d mine.py:data --seed -1": "seed",
    "evaluate mnist-standard -d nowhere": "--data nowhere",
    "evaluate mnist-standard -d mnist": "wball data mnist --data-dir",
    "evaluate mnist-standard -d mine.py:data": "does not take images of shape",
    "evaluate mnist-standard --eps 0.1,b": "--eps",
    "evaluate mnist-standard --eps -0.1": "above 0",
    "evaluate mnist-standard --window 4": "odd",
    "evaluate mnist-standard --attack magic": "--attack magic",
    "evaluate mnist-standard --device tpu": "--device tpu",
    "evaluate mnist-standard --limit 0": "--limit",
    "report .": "results.json",
    "report done --out r.html --figures mine.py": "mine.py: is a file, but a folder is needed",
    "certify mine.py:halves -d mine.py:data --method guess": "method",
    "certify mine.py:halves --out c.txt": ".json",
    "data imagenet": "imagenet",
    "data mnist --data-dir mine.py": "mine.py/mnist: is a file, but a folder is needed",
    "train nothing": "mnist-standard",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_arguments_get_one_line(line: str, here: Path, capsys: Capture) -> None:
    if "safetensors" in line:
        whole = here / "mnist.safetensors"
        wball.save_weights(wball.build_model("mnist-cnn"), whole)
        (here / "cut.safetensors").write_bytes(whole.read_bytes()[:1000])
    if "done" in line:
        assert said(capsys, *HALVES[:-1], "done")[0] == 0
    code, out, err = said(capsys, *line.split())
    assert code == 2
    assert "Traceback" not in out and err.count("\n") == 1 and err.startswith("wball: ")
    assert BAD[line] in err
    assert not (here / "out").exists()


def test_a_models_file_may_import_what_lies_beside_it(here: Path, capsys: Capture) -> None:
    (here / "far").mkdir()
    (here / "far" / "beside.py").write_text(MINE)
    (here / "far" / "uses.py").write_text("from beside import halves as net, data")
    code, _, err = said(capsys, "certify", "far/uses.py:net", "--data", "far/uses.py:data")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("command", ["evaluate", "certify"])
def test_json_is_alone_on_stdout(command: str, here: Path, capsys: Capture) -> None:
    more = [*QUICK, "--out", "o"] if command == "evaluate" else ["--eps", "0.1"]
    code, out, err = said(capsys, command, "mine.py:Talks", "-d", "mine.py:data", "--json", *more)
    assert code == 0 and json.loads(out) and "hello" in err
    if command == "evaluate":  # stderr says how long it takes, and how far it is
        assert "Talks: about " in err and " for the attack, at most " in err


def test_names_are_not_markup(here: Path, capsys: Capture) -> None:
    grey_images(here / "set [bold]", "a", "b")
    for command, more in (("evaluate", [*QUICK, "-o", "o"]), ("certify", [])):
        code, out, _ = said(capsys, command, "mine.py:halves", "-d", "set [bold]", "--grey", *more)
        assert code == 0 and "images of set [bold]" in out


def test_without_the_packages_of_the_report(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jinja2", "PIL"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            code, _, err = said(capsys, *HALVES)
            assert code == 0 and (here / "o" / "results.json").is_file()
            assert err.startswith("wball: there will be no report.html: reports need jinja2")
            assert f"{name} is missing: pip install wball[report]" in err
            code, _, err = said(capsys, "report", "o")
            assert code == 2 and err.count("\n") == 1 and "pip install wball[report]" in err
    assert not list(here.rglob("report.html"))


def test_a_model_that_ends_the_process(here: Path, capsys: Capture) -> None:
    code = said(capsys, "certify", "mine.py:Leaves", "--limit", "2")[0]
    assert code != 0, "no success: nothing was certified"


@pytest.mark.slow
def test_a_reader_that_had_enough() -> None:
    line, environment = process("models")
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 0


@pytest.mark.slow
def test_a_locale_without_letters(here: Path) -> None:
    grey_images(here / "bilder ü", "漢字", "é")
    words = ["evaluate", "mine.py:halves", "-d", "bilder ü", "--grey", *QUICK, "-o", "o"]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    line, environment = process(*words, **locale)
    done = subprocess.run(line, cwd=here, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    page = (here / "o" / "report.html").read_text(encoding="utf-8")
    assert "bilder ü" in page and "original: 漢字" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_when_asked_for(here: Path, capsys: Capture) -> None:
    code, _, err = said(capsys, "evaluate", "mnist-standard", "--device", "cuda")
    assert code == 2 and "--device cpu" in err


def test_full_disk_and_folder_in_use(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(here / "o"):
        code, _, err = said(capsys, *HALVES)
        assert code == 4 and "in use" in err

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = said(capsys, *HALVES)
    assert code == 5 and "No space left" in err and err.count("\n") == 1
    assert not list((here / "o").rglob("*.part"))
    assert said(capsys, *HALVES)[0] == 0


def test_claims_that_fail_the_audit_have_an_exit_code(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wball.evaluation import batches

    def strict(
        ball: wball.WassersteinBall, x: torch.Tensor, z: torch.Tensor, **_: object
    ) -> wball.AuditReport:
        return wball.audit(ball.at(torch.as_tensor(ball.eps) / 100), x, z)

    monkeypatch.setattr(batches, "audit", strict)
    code, out, _ = said(capsys, *HALVES)
    assert code == 3 and "rejected and not counted" in out


def test_unexpected_errors_are_one_line_too(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("wball.zoo.list_models", fail)
    code, _, err = said(capsys, "models")
    message = "wball: unexpected ZeroDivisionError: surprise (WBALL_DEBUG=1 shows where)\n"
    assert (code, err) == (70, message)


@pytest.mark.slow
def test_interrupted_by_the_keyboard(here: Path) -> None:
    line, environment = process("evaluate", "mine.py:slow", *HALVES[2:])

    def listen() -> None:  # a background job of a shell inherits an ignored signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        line, cwd=here, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    ) as child:
        while not (here / "o" / "log.jsonl").exists() and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate()
    assert child.returncode == 130
    assert err.strip().splitlines()[-1].startswith("wball: interrupted") and "Traceback" not in err
    assert not (here / "o" / "results.json").exists() and not list(here.rglob("*.part"))


@pytest.mark.slow
def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from wball.cli import main; main([]); sys.exit('torch' in sys.modules)"
    _, environment = process()
    line = [sys.executable, "-c", code]
    subprocess.run(line, env=environment, check=True, stdout=subprocess.DEVNULL)
