"""The same command in a new process: the same network, the same checksums, the same weights.

The mistakes this finds: an order of sets or dictionaries that depends on Python's hash seed and
reaches a checksum or a file, and a network that is built before anything is seeded.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from attacks.onnx.test_models import export
from training.worker import small_config, small_data
from wball.storage.files import read_tensors
from wball.training import train

ROOT = Path(__file__).parents[2]

MINE = """
import os, random
import numpy as np
import torch
from torch import nn

at_import = nn.Linear(36, 8)

class Random(nn.Module):
    '''Weights from three sources of random numbers, and from modules made on import.'''
    def __init__(self):
        super().__init__()
        self.first, self.second = at_import, nn.Linear(8, 2)
        noise = np.random.default_rng(np.random.randint(2**31)).normal(size=2) + random.random()
        self.second.bias.data = torch.tensor(noise, dtype=torch.float32)
        self.register_buffer("turn", torch.randn(8), persistent=False)
    def forward(self, x):
        return self.second(torch.relu(self.first(x.flatten(1)) * self.turn))

def net():
    return Random()

def data():
    if os.environ.get("KILLED"):  # after the network is built, before the first step
        os.kill(os.getpid(), 9)
    return torch.rand(40, 1, 6, 6), torch.arange(40) % 2

def model():
    return Random().eval()
"""

# One process runs all commands, because starting takes longer than they do.
RUN = """
import sys
from wball.cli import main
for line in sys.argv[1].split(";"):
    code = main(line.split())
    assert code in (0, 6), (line, code)
"""

TRAIN = "train mnist-standard --model mine.py:net --data mine.py:data --epochs 2 --batch-size 20"
EVALUATE = "--data mine.py:data --attack dual-averaging --eps 0.1 --limit 6 --out"


def run(folder: Path, seed: int, *lines: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip
    line = [sys.executable, "-c", RUN, ";".join(lines)]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model in each format. The last two have many weights, so that no two
    orders are equal by chance."""
    pytest.importorskip("onnx")
    folder = tmp_path_factory.mktemp("again")
    (folder / "mine.py").write_text(MINE)
    torch.manual_seed(0)
    widths = (36, 8, 7, 6, 5, 4, 2)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    net, x = nn.Sequential(nn.Flatten(), *layers).eval(), torch.rand(2, 1, 6, 6)
    torch.jit.save(torch.jit.script(net), folder / "script.pt")
    batch = torch.export.Dim("batch", min=1)
    torch.export.save(
        torch.export.export(net, (x,), dynamic_shapes=({0: batch},)), folder / "program.pt2"
    )
    export(net, x, folder / "graph.onnx")
    return folder


@pytest.mark.slow
def test_the_same_evaluation_is_read_again(folder: Path) -> None:
    files = ("graph.onnx", "script.pt", "program.pt2", "mine.py:model", "mine.py:Random")
    lines = [f"evaluate {file} {EVALUATE} out/{k}" for k, file in enumerate(files)]
    done = [run(folder, seed, *lines) for seed in (1, 2)]
    for one in done:
        assert one.returncode == 0, one.stderr
    assert done[1].stdout.count("contains a finished evaluation") == len(files)
    # A class is all there is of the last model: nobody has trained it.
    assert done[0].stderr.count("mine.py:Random is a class whose weights are random") == 1
    # PyTorch's warnings about its own files say nothing to somebody who evaluates one.
    assert "deprecated" not in done[0].stderr and "FutureWarning" not in done[0].stderr


@pytest.mark.slow
def test_the_same_training_gives_the_same_weights(folder: Path) -> None:
    killed = run(folder, 3, f"{TRAIN} --seed 0 --out b", KILLED="yes")
    assert killed.returncode == -9 and not (folder / "b" / "checkpoint.safetensors").exists()
    first = run(folder, 1, f"{TRAIN} --seed 0 --out a")
    second = run(folder, 2, f"{TRAIN} --seed 0 --out b", f"{TRAIN} --seed 1 --out c")
    for one in (first, second):
        assert one.returncode == 0, one.stderr
    same, again, other = ((folder / out / "mnist-standard.safetensors") for out in "abc")
    assert same.read_bytes() == again.read_bytes()
    assert same.read_bytes() != other.read_bytes()
    assert json.loads((folder / "c" / "mnist-standard.json").read_text())["training"]["seed"] == 1
    begun = [read_tensors(folder / out / "checkpoint.safetensors")[1]["config"] for out in "ab"]
    assert begun[0] == begun[1]


def test_a_seed_decides_a_network_of_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wball.cli.models import load_one, own_network

    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    before = random.getstate(), np.random.get_state()  # noqa: NPY002

    def built(seed: int) -> list[torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nets = [load_one(f"mine.py:{name}", seed)[0] for name in ("net", "model")]
        with pytest.warns(UserWarning, match="mine.py:Random is a class whose weights are random"):
            nets.append(load_one("mine.py:Random", seed)[0])
        nets.append(own_network("--model", "mine.py:net", seed))
        return [torch.cat([*(p.flatten() for p in net.parameters()), net.turn]) for net in nets]

    first, again, other = built(0), built(0), built(1)
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert len({tuple(weights.tolist()) for weights in first}) == 1
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002


def test_training_builds_a_network_with_its_seed() -> None:
    config = small_config(epochs=1, adversary=None)

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(196, 10))

    def trained(seed: int) -> torch.Tensor:
        torch.rand(int(torch.randint(9, ())))  # the caller's random state plays no role
        made = train(dataclasses.replace(config, seed=seed), small_data(32), model=build)
        return torch.cat([p.detach().flatten() for p in made.model.parameters()])

    assert torch.equal(trained(0), trained(0)) and not torch.equal(trained(0), trained(1))
