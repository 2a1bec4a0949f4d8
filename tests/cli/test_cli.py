"""The command line: what it writes, what it says, and how it refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import wball
from wball.cli import choices, main
from wball.cli.commands import app
from wball.evaluation import load_evaluation
from wball.storage.atomic import locked
from wball.storage.files import read_tensors

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

QUICK = ["--attack", "dual-averaging", "--steps", "5", "--eps", "0.1,0.3"]


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
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_evaluate_writes_results_examples_and_a_report(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    code, out, _ = said(
        capsys, "evaluate", "mine.py:halves", "--data", "mine.py:data", *QUICK, "--out", "o"
    )
    assert code == 0
    assert "halves on 9 images" in out and "audit:" in out and "mass fraction x px" in out
    result = load_evaluation(here / "o")
    assert result.clean_accuracy == 1.0 and result.radii == [0.1, 0.3]
    assert (here / "o" / "report.html").stat().st_size > 2e4
    tensors, _ = read_tensors(here / "o" / "examples.safetensors")
    assert tensors["adversarial"].shape == tensors["original"].shape
    # the same command again reads the result back
    before = (here / "o" / "results.json").stat().st_mtime_ns
    code, out, _ = said(
        capsys, "evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "-o", "o", "--json"
    )
    assert code == 0 and (here / "o" / "results.json").stat().st_mtime_ns == before
    (content,) = json.loads(out)
    assert content["model"] == "halves" and content["curve"][0]["accuracy"] == 1.0
    code, out, _ = said(
        capsys, "evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "-o", "o", "-q"
    )
    assert (code, out) == (0, "")


def test_several_models_and_commands_on_their_results(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    models = ["mine.py:halves", "mine.py:other"]
    line = [
        "evaluate",
        *models,
        "-d",
        "mine.py:data",
        *QUICK,
        "--minimal",
        "--no-report",
        "--out",
        "two",
    ]
    assert said(capsys, *line)[0] == 0
    assert not (here / "two" / "report.html").exists()
    code, out, _ = said(
        capsys, "report", "two/halves", "two/other", "--out", "r.html", "--title", "A & <b>"
    )
    assert code == 0 and "r.html" in out
    assert "A &amp; &lt;b&gt;" in (here / "r.html").read_text()
    code, out, _ = said(
        capsys, "figures", "two/halves", "two/other", "--out", "f", "--format", "png"
    )
    assert code == 0
    assert (here / "f" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (here / "f" / "examples-halves.png").exists()


@pytest.mark.parametrize("content", [b"", b"not a model", bytes(range(256)) * 9])
def test_a_damaged_onnx_file_is_one_line_with_the_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    pytest.importorskip("onnx")
    (here / "bad.onnx").write_bytes(content)
    code, _, err = said(capsys, "attack", "bad.onnx", "-d", "mine.py:data", "--eps", "0.3")
    told = " ".join(err.replace("│", " ").split())
    assert code == 2 and "bad.onnx" in told and "export" in told and "Traceback" not in told


def test_models_are_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(here))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    weight = torch.linspace(-1, 1, 6).repeat(6)
    net[1].weight.data.copy_(torch.stack([-weight, weight]))
    net[1].bias.data.zero_()
    net.eval()
    torch.jit.save(torch.jit.script(net), here / "script.pt")
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(net, (torch.rand(2, 1, 6, 6),), dynamic_shapes=({0: batch},))
    torch.export.save(program, here / "program.pt2")
    torch.save({"state_dict": net.state_dict()}, here / "state.pth")
    wball.save_weights(net, here / "state.safetensors")
    (here / "one.py").write_text(
        "from mine import halves as made\n\ndef model():\n    return made()\n"
    )
    models = ["script.pt", "program.pt2", "state.pth", "state.safetensors", "one.py"]
    for model in models:
        more = ["--architecture", "mine.py:other"] if model.startswith("state") else []
        code, out, err = said(
            capsys, "attack", model, "-d", "mine.py:data", "--eps", "0.3", "--json", *more
        )
        assert code == 0, err
        content = json.loads(out)
        assert content["model"] == Path(model).stem and sum(content["success"]) > 0, model
    # two checkpoints of one architecture in one command, with names
    line = [
        "evaluate",
        "state.pth",
        "state.safetensors",
        "--architecture",
        "mine.py:other",
        "-d",
        "mine.py:data",
    ]
    code, out, _ = said(
        capsys, *line, *QUICK, "--no-report", "-o", "two", "--name", "a", "--name", "b", "--json"
    )
    assert code == 0 and [r["model"] for r in json.loads(out)] == ["a", "b"]
    first, second = (load_evaluation(here / "two" / name) for name in "ab")
    assert first.summary() == second.summary() and first.clean_accuracy == 1.0
    lines = (here / "two" / "results.csv").read_text().splitlines()
    assert lines[0].startswith("model,data,images") and len(lines) == 1 + 2 * 3


def test_normalisation_in_front_of_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "attack",
        "mine.py:halves",
        "-d",
        "mine.py:data",
        "--eps",
        "0.001",
        "--first",
        "4",
        "--json",
    ]
    plain = json.loads(said(capsys, *line)[1])
    shifted = json.loads(said(capsys, *line, "--mean", "0.5", "--std", "0.5")[1])
    assert plain["read_as"] == shifted["read_as"]  # a linear model without bias of zero-sum weights


def test_a_limit_draws_from_every_class(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    y = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    chosen = choices.stratified_sample(y, 10, 0)
    assert y[chosen].bincount().tolist() == [6, 3, 1]
    assert torch.equal(chosen, choices.stratified_sample(y, 10, 0))
    assert not torch.equal(chosen, choices.stratified_sample(y, 10, 1))
    assert len(choices.stratified_sample(y, 7, 3).unique()) == 7
    code, out, _ = said(
        capsys, "attack", "mine.py:halves", "-d", "mine.py:data", "--limit", "4", "--seed", "5"
    )
    assert code == 0 and "a stratified sample of 4 of 9 (seed 5)" in " ".join(out.split())
    code, out, _ = said(capsys, "attack", "mine.py:halves", "-d", "mine.py:data", "--first", "4")
    assert code == 0 and "the first 4" in " ".join(out.split())


def test_radii_suit_the_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "evaluate",
        "mine.py:halves",
        "-d",
        "mine.py:data",
        "--attack",
        "dual-averaging",
        "--steps",
        "5",
        "-o",
        "o",
    ]
    code, out, _ = said(capsys, *line, "--no-report")
    assert code == 0 and "chosen by a quick search; --eps sets them" in out
    result = load_evaluation(here / "o")
    assert result.accuracy_at(result.radii[0]) > result.accuracy_at(result.radii[-1])
    assert all(f"{r:.2g}" == f"{r:g}" for r in result.radii)
    # the same command reads the result back with the radii that are there
    code, out, _ = said(capsys, *line, "--no-report")
    assert (
        code == 0
        and "read from o: this evaluation was finished before" in out
        and "quick search" not in out
    )


def test_a_model_at_chance_gets_a_hint(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "far.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    _, _, err = said(
        capsys, "evaluate", "far.py", *QUICK, "--limit", "20", "--no-report", "-o", "o"
    )
    assert "clean accuracy is only" in err and "--mean" in err


def test_terminal_escapes_are_written_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x07b"
    code, out, err = said(capsys, "evaluate", evil, "--data", evil)
    assert code == 2 and "\x1b" not in err + out and "a\\x1b[2J\\x07b" in err
    code, out, err = said(capsys, "attack", "mine.py:halves", "--data", evil)
    assert code == 2 and "\x1b" not in err + out
    line = [
        "evaluate",
        "mine.py:halves",
        "-d",
        "mine.py:data",
        *QUICK,
        "--no-report",
        "-o",
        f"o{evil}",
    ]
    code, out, err = said(capsys, *line, "--name", evil)
    assert code == 0 and "\x1b" not in out + err
    code, out, err = said(capsys, "attack", "raising.onnx")
    assert code == 2 and "\x1b" not in err


def test_a_requirement_decides(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "-o", "o"]
    code, out, _ = said(capsys, *line, "--require", "0:0.5", "--json")
    (content,) = json.loads(out)
    reliable = not content["warnings"]
    assert content["passed"] is reliable and code == (0 if reliable else 6)
    code, out, _ = said(capsys, *line, "--require", "0.3:1.0", "--require", "0:0.1")
    assert (
        code == (7 if reliable else 6)
        and "FAILED halves" in out
        and "robust accuracy of at least 100 %" in out
    )
    page = (here / "o" / "report.html").read_text(encoding="utf-8")
    assert (
        'class="decision bad"' in page and "robust accuracy of at least 100 % at radius 0.3" in page
    )
    code, _, err = said(capsys, *line, "--require", "much")
    assert code == 2 and "requirement 'much' must be RADIUS" in err


def test_attack_shows_each_image(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["attack", "mine.py:halves", "-d", "mine.py:data", "--eps", "0.3", "--limit", "4"]
    code, out, _ = said(capsys, *line, "--out", "z.safetensors", "--json")
    content = json.loads(out)
    assert code == 0 and len(content["success"]) == 4 and content["audit"]["valid_count"] == 4
    tensors, _ = read_tensors(here / "z.safetensors")
    assert torch.equal(tensors["success"], torch.tensor(content["success"]))
    code, out, _ = said(capsys, *line, "--target", "1", "--attack", "pgd", "--steps", "2")
    assert code == 0 and "pgd on halves" in out


def test_certify(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "certify",
        "mine.py:halves",
        "-d",
        "mine.py:data",
        "--eps",
        "0.001,5",
        "--method",
        "crown",
        "--json",
    ]
    code, out, _ = said(capsys, *line)
    small, large = json.loads(out)["radii"]
    assert code == 0 and small["certified"] > large["certified"] == 0.0
    assert said(capsys, *line, "--out", "c.json")[1] == out and json.loads(
        (here / "c.json").read_text()
    ) == json.loads(out)


def test_lists(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "models")
    assert code == 0 and all(name in out for name in (*wball.list_models(), *wball.architectures()))
    code, out, _ = said(capsys, "models", "mnist-standard")
    assert json.loads(out)["architecture"] == "mnist-cnn"
    code, out, _ = said(capsys, "data")
    assert code == 0 and "fashion-mnist" in out
    code, out, _ = said(capsys, "info", "--json")
    content = json.loads(out)
    assert content["wball"] == wball.__version__ and content["kernels"]["torch"]["cpu"] is None
    code, out, _ = said(capsys, "--version")
    assert (code, out.strip()) == (0, wball.__version__)


@pytest.mark.parametrize(
    "command", [c.name or c.callback.__name__ for c in app.registered_commands]
)  # type: ignore[union-attr]
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, command, "--help")
    assert code == 0 and "Usage: wball " + command in out
    for word in ("<bool>", "<list", "x>=", "<=x", "<str>", "<int"):
        assert word not in out


def test_train_takes_your_own_model_and_data(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 2
    x = 0.2 * torch.rand(60, 1, 6, 6, generator=generator)
    x[y == 1, :, 3:] += 0.6
    np.savez(here / "train.npz", x=(x * 255).byte().numpy(), y=y.numpy())
    np.savez(here / "test.npz", images=x[:20].numpy(), labels=y[:20].numpy())
    (here / "own.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(36, 2))\n"
    )
    command = [
        "train",
        "mnist-standard",
        "--model",
        "own.py:net",
        "--data",
        "train.npz",
        "--test-data",
        "test.npz",
    ]
    few = [
        "--epochs",
        "6",
        "--device",
        "cpu",
        "--set",
        "batch_size=10",
        "--set",
        "optimisation.lr=0.1",
    ]
    code, out, _ = said(capsys, *command, *few, "--out", "out", "--name", "halves")
    card = json.loads((here / "out/halves.json").read_text())
    assert code == 0 and out.splitlines()[-1] == "written: out/halves.safetensors"
    assert card["dataset"] == card["architecture"] == "own" and card["clean_accuracy"] == 1.0
    code, _, err = said(
        capsys,
        "evaluate",
        "own.py:net",
        "--weights",
        "out/halves.safetensors",
        "-d",
        "test.npz",
        *QUICK,
    )
    assert code == 0, err
    for wrong, words in (
        (["--model", "mnist-cnn"], "expected mine.py or mine.py:function"),
        (["--test-data", "test.npz"], "goes with --data"),
        (["--data", "nothing.npz"], "no file nothing.npz"),
    ):
        code, _, err = said(capsys, "train", "mnist-standard", *wrong, "--out", "other")
        assert code == 2 and words in " ".join(err.split()), err


def test_train_says_each_epoch_and_writes_the_model(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = wball.load_sample("mnist")
    monkeypatch.setattr(
        "wball.data.load_dataset", lambda name, root, split, device: (x[:50], y[:50])
    )
    command = [
        "train",
        "mnist-adversarial",
        "--epochs",
        "2",
        "--limit",
        "40",
        "--device",
        "cpu",
        "--name",
        "mine",
    ]
    for change in (
        "architecture=mnist-cnn",
        "batch_size=20",
        "adversary.attack.steps=2",
        "evaluation.attack.steps=2",
        "evaluation.every=2",
        "optimisation.bf16=False",
    ):
        command += ["--set", change]
    code, out, _ = said(capsys, *command, "--out", "out")
    first, second = (
        json.loads(row) for row in (here / "out/metrics.jsonl").read_text().splitlines()
    )
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3 and lines[2] == "written: out/mine.safetensors"
    assert (
        lines[0].startswith("epoch   1")
        and "clean" not in lines[0]
        and "clean_accuracy" not in first
    )
    assert (
        f"clean {100 * second['clean_accuracy']:.2f} %  eps 0.1: {100 * second['robust_accuracy_0.1']:.1f} %"
        in out
    )
    assert f"mean radius {second['mean_radius']:.3f}" in lines[1] and second["step"] == 4
    card = json.loads((here / "out/mine.json").read_text())
    assert (
        card["training"]["batch_size"] == 20 and card["training"]["optimisation"]["bf16"] is False
    )
    model = wball.load_weights(
        wball.build_model(card["architecture"]), here / "out/mine.safetensors"
    ).eval()
    assert float((model(x[:50]).argmax(1) == y[:50]).double().mean()) == pytest.approx(
        card["clean_accuracy"]
    )
    taught = [
        "--teacher",
        "mnist-cnn=out/mine.safetensors",
        "--set",
        "loss.teacher=0.5",
        "--out",
        "quiet",
        "--quiet",
    ]
    assert said(capsys, *command, *taught) == (0, "", "")
    assert json.loads((here / "quiet/mine.json").read_text())["training"]["loss"]["teacher"] == 0.5


BAD = {
    "unknown command": (["evalute"], "evalute"),
    "unknown option": (["evaluate", "mnist-standard", "--epsilon", "1"], "--epsilon"),
    "no model": (["evaluate"], "MODEL"),
    "unknown model": (["evaluate", "mnist-standart"], "did you mean mnist-standard?"),
    "architecture without weights": (["evaluate", "mnist-cnn"], "--weights"),
    "missing weights": (["evaluate", "mnist-cnn", "--weights", "none.pth"], "no weights file"),
    "truncated weights": (
        ["evaluate", "mnist-cnn", "--weights", "cut.safetensors"],
        "cut.safetensors",
    ),
    "wrong architecture": (
        ["evaluate", "cifar10-resnet18", "--weights", "mnist.safetensors"],
        "do not fit",
    ),
    "weights for a zoo model": (
        ["evaluate", "mnist-standard", "--weights", "mnist.safetensors"],
        "comes with weights",
    ),
    "no such file": (["evaluate", "nothing.py:net"], "nothing.py"),
    "no such module": (["evaluate", "no.such.module:net"], "cannot import"),
    "no such function": (["evaluate", "mine.py:halvs"], "did you mean halves?"),
    "not a model": (["evaluate", "mine.py:broken"], "not callable"),
    "a function that raises": (
        ["evaluate", "mine.py:raises"],
        "mine.py:raises: the call raised RuntimeError: no",
    ),
    "data that raise": (
        ["evaluate", "mine.py:halves", "--data", "mine.py:raises"],
        "the call raised RuntimeError",
    ),
    "a module that raises": (
        ["evaluate", "raising.py:net"],
        "cannot import raising.py (SyntaxError",
    ),
    "a function that ends the process": (
        ["evaluate", "mine.py:leaves"],
        "the call raised SystemExit: 3",
    ),
    "a module that ends the process": (
        ["evaluate", "leaving.py:net"],
        "cannot import leaving.py (SystemExit: 4)",
    ),
    "a model that raises": (
        ["evaluate", "mine.py:Stumbles", "--data", "mine.py:data"],
        "KeyError: 'weights'",
    ),
    "an attack on it": (
        ["attack", "mine.py:Stumbles", "--data", "mine.py:data"],
        "KeyError: 'weights'",
    ),
    "data that raise later": (
        ["attack", "mine.py:halves", "--data", "mine.py:unreadable"],
        "reading it raised KeyE",
    ),
    "huge seed": (
        ["attack", "mine.py:halves", "--data", "mine.py:data", "--seed", str(2**63)],
        "--seed",
    ),
    "no such data": (["evaluate", "mnist-standard", "--data", "nowhere"], "--data nowhere"),
    "data not downloaded": (["evaluate", "mnist-standard", "--data", "mnist"], "wball data mnist"),
    "labels out of range": (
        ["evaluate", "mine.py:halves", "--data", "mine.py:labels_out_of_range"],
        "2 classes",
    ),
    "wrong shape": (
        ["evaluate", "mnist-standard", "--data", "mine.py:data"],
        "does not take images of shape",
    ),
    "bad radius": (["evaluate", "mnist-standard", "--eps", "0.1,b"], "--eps"),
    "negative radius": (["evaluate", "mnist-standard", "--eps", "-0.1"], "above 0"),
    "even window": (["evaluate", "mnist-standard", "--window", "4"], "odd"),
    "bad mass": (["evaluate", "mnist-standard", "--mass", "most"], "--mass"),
    "bad attack": (["evaluate", "mnist-standard", "--attack", "magic"], "--attack magic"),
    "steps of a fixed attack": (["evaluate", "mnist-standard", "--steps", "3"], "--steps"),
    "bad split": (["evaluate", "mnist-standard", "--split", "all"], "--split"),
    "bad device": (["evaluate", "mnist-standard", "--device", "tpu"], "--device tpu"),
    "zero images": (["evaluate", "mnist-standard", "--limit", "0"], "--limit"),
    "out is a file": (
        ["evaluate", "mine.py:halves", "--data", "mine.py:data", "--out", "mine.py"],
        "is a file",
    ),
    "no results": (["report", "."], "results.json"),
    "bad method": (
        ["certify", "mine.py:halves", "-d", "mine.py:data", "--method", "guess"],
        "method",
    ),
    "bad data set": (["data", "imagenet"], "imagenet"),
    "bad preset": (["train", "nothing"], "mnist-standard"),
    "data below a file": (
        ["data", "mnist", "--data-dir", "mine.py"],
        "mine.py/mnist: is a file, but a folder is needed",
    ),
    "figures below a file": (
        ["figures", "done", "--out", "mine.py"],
        "mine.py: is a file, but a folder is needed",
    ),
    "weights without a network": (["evaluate", "mnist.safetensors"], "--architecture"),
    "a network of another kind": (
        ["evaluate", "mnist.safetensors", "--architecture", "resnet"],
        "mnist-cnn",
    ),
    "no model file": (["evaluate", "none.onnx"], "no model file none.onnx"),
    "no ONNX": (["attack", "raising.onnx"], "raising.onnx cannot be read as a model"),
    "no exported program": (["attack", "raising.pt2"], "raising.pt2 cannot be read as a model"),
    "several models in a file": (["evaluate", "mine.py"], "mine.py:Stumbles"),
    "no model in a file": (["evaluate", "nothing_in.py"], "defines no model"),
    "half a normalisation": (["evaluate", "mine.py:halves", "--mean", "0.5"], "--std"),
    "bad normalisation": (["evaluate", "mine.py:halves", "--mean", "a", "--std", "1"], "--mean a"),
    "too few names": (
        ["evaluate", "mine.py:halves", "mine.py:other", "--name", "a"],
        "--name is given 1 times",
    ),
    "one name for two": (
        ["evaluate", "mine.py:halves", "mine.py:other", "--name", "a", "--name", "a"],
        "called a",
    ),
    "both kinds of limit": (
        ["attack", "mnist-standard", "--limit", "3", "--first", "3"],
        "--first",
    ),
    "bad file for certificates": (["certify", "mine.py:halves", "--out", "c.txt"], ".json"),
    "bad file for images": (
        ["attack", "mine.py:halves", "-d", "mine.py:data", "--out", "z.png"],
        ".safetensors",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_get_one_line(
    case: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = here / "mnist.safetensors"
    if "safetensors" in " ".join(BAD[case][0]):
        wball.save_weights(wball.build_model("mnist-cnn"), whole)
        (here / "cut.safetensors").write_bytes(whole.read_bytes()[:1000])
    arguments, expected = BAD[case]
    if "done" in arguments:
        assert (
            main(
                [
                    "evaluate",
                    "mine.py:halves",
                    "-d",
                    "mine.py:data",
                    *QUICK,
                    "--no-report",
                    "-qo",
                    "done",
                ]
            )
            == 0
        )
    code, out, err = said(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in out and err.count("\n") == 1 and err.startswith("wball: ")
    assert expected in err
    assert not (here / "out").exists()


def test_a_models_file_may_import_what_lies_beside_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "far").mkdir()
    (here / "far" / "beside.py").write_text(MINE)
    (here / "far" / "uses.py").write_text("from beside import halves as net, data")
    line = ["attack", "far/uses.py:net", "--data", "far/uses.py:data", "--quiet"]
    assert said(capsys, *line) == (0, "", "")


@pytest.mark.parametrize("command", ["evaluate", "attack", "certify"])
def test_json_is_alone_on_stdout(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*QUICK, "--no-report", "--out", "o"] if command == "evaluate" else ["--eps", "0.1"]
    code, out, err = said(
        capsys, command, "mine.py:Talks", "--data", "mine.py:data", "--json", *more
    )
    assert code == 0 and json.loads(out) and "hello" in err


def test_names_are_no_markup(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in ("a", "b"):
        (here / "set [bold]" / label).mkdir(parents=True)
        image.new("L", (6, 6), 99).save(here / "set [bold]" / label / "1.png")
    for command, more in (
        ("evaluate", [*QUICK, "--no-report", "-o", "o"]),
        ("attack", []),
        ("certify", []),
    ):
        code, out, _ = said(capsys, command, "mine.py:halves", "-d", "set [bold]", "--grey", *more)
        assert code == 0 and out.count("images of set [bold]") == (
            2 if command == "evaluate" else 1
        )
    x, y = torch.rand(2, 1, 6, 6), torch.zeros(2, dtype=torch.long)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))
    result = wball.evaluate(
        model, x, y, wball.WassersteinBall(0.1), attack="fast", name="a[/b]", progress=True
    )
    stream = io.StringIO()
    Console(file=stream).print(result.table())
    assert "a[/b]" in stream.getvalue() and "a[/b]" in capsys.readouterr().err


def test_without_the_packages_of_the_report(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "--out", "o"]
    for name in ("jinja2", "PIL"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            code, _, err = said(capsys, *line)
            assert code == 0 and (here / "o" / "results.json").is_file()
            assert err.startswith(
                "wball: there will be no report.html: reports need jinja2 and Pillow"
            )
            assert f"{name} is missing: pip install wball[report]" in err
            code, _, err = said(capsys, "report", "o")
            assert code == 2 and err.count("\n") == 1 and "pip install wball[report]" in err
    assert not list(here.rglob("report.html"))


def test_warnings_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(
        capsys, "attack", "mine.py:halves", "-d", "mine.py:data", "--attack", "fast", "-n", "1"
    )
    assert (
        code == 0
        and err.count("\n") == 1
        and err.startswith("wball: warning: the model has 2 classes")
    )


def test_a_model_that_ends_the_process(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "attack", "mine.py:Leaves", "--limit", "2")[0] == 1, (
        "no success: nothing was attacked"
    )


@pytest.mark.slow
def test_a_reader_that_had_enough() -> None:
    line = [sys.executable, "-m", "wball.cli", "models"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.slow
def test_a_locale_without_letters(here: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in ("漢字", "é"):
        (here / "bilder ü" / label).mkdir(parents=True)
        image.new("L", (6, 6), 99).save(here / "bilder ü" / label / "1.png")
    line = [
        sys.executable,
        "-m",
        "wball.cli",
        "evaluate",
        "mine.py:halves",
        "-d",
        "bilder ü",
        "--grey",
        *QUICK,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCES),
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
    }
    done = subprocess.run(
        [*line, "-o", "o"],
        cwd=here,
        env=environment | {"PYTHONUTF8": "0", "PYTHONIOENCODING": ""},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    page = (here / "o" / "report.html").read_text(encoding="utf-8")
    assert "bilder ü" in page and "original: 漢字" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_when_asked_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "evaluate", "mnist-standard", "--device", "cuda")
    assert code == 2 and "--device cpu" in err


def test_full_disk_and_folder_in_use(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "--no-report", "--out", "o"]
    with locked(here / "o"):
        code, _, err = said(capsys, *line)
        assert code == 4 and "in use" in err

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = said(capsys, *line)
    assert code == 5 and "No space left" in err and err.count("\n") == 1
    assert not list((here / "o").rglob("*.part"))
    assert said(capsys, *line)[0] == 0


def test_claims_that_fail_the_audit_have_an_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from wball.evaluation import check

    def strict(
        ball: wball.WassersteinBall, x: torch.Tensor, z: torch.Tensor, **_: object
    ) -> wball.AuditReport:
        return wball.audit(ball.at(torch.as_tensor(ball.eps) / 100), x, z)

    monkeypatch.setattr(check, "audit", strict)
    line = ["evaluate", "mine.py:halves", "-d", "mine.py:data", *QUICK, "--no-report", "--out", "o"]
    code, out, _ = said(capsys, *line)
    assert code == 3 and "rejected and not counted" in out


def test_unexpected_errors_are_one_line_too(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("wball.zoo.list_models", fail)
    code, _, err = said(capsys, "models")
    assert (
        code == 70
        and err == "wball: unexpected ZeroDivisionError: surprise (WBALL_DEBUG=1 shows where)\n"
    )


@pytest.mark.slow
def test_interrupted_by_the_keyboard(here: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "wball.cli",
        "evaluate",
        "mine.py:slow",
        "-d",
        "mine.py:data",
        *QUICK,
        "--out",
        "o",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}

    def listen() -> None:  # a test run in the background of a shell has inherited a deaf ear
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        line, cwd=here, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    ) as process:
        while not (here / "o" / "log.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("wball: interrupted") and "Traceback" not in err
    assert not (here / "o" / "results.json").exists() and not list(here.rglob("*.part"))


@pytest.mark.slow
def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from wball.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL
    )
