"""Weights in and out of files: every packing seen in public checkpoints, and clear refusals."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from wball.storage.weights import load_weights, save_weights
from wball.zoo.architectures import Binarized, Normalized, ResNet18, mnist_cnn


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(u, v) for u, v in pairs)


PACKINGS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "plain": lambda sd: sd,
    "net, module": lambda sd: {
        "net": {f"module.{k}": v for k, v in sd.items()},
        "acc": 98.9,
        "epoch": 3,
    },
    "list": lambda sd: {"state_dict": [sd], "err": 0.1, "epoch": 3},
    "list, second fits": lambda sd: {"state_dict": [{"0.weight": torch.zeros(2)}, sd]},
    "model_state_dict": lambda sd: {
        "model_state_dict": sd,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
    },
    "two prefixes": lambda sd: {f"module.model.{k}": v for k, v in sd.items()},
    "half": lambda sd: {k: v.half() for k, v in sd.items()},
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: Normalized(m, 0.1, 0.3), Binarized], ids=["bare", "norm", "bin"]
)
def test_packings(tmp_path: Path, packing: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    saved, loaded = mnist_cnn(), mnist_cnn()
    if packing == "half":
        saved = saved.half().float()
    torch.save(PACKINGS[packing](saved.state_dict()), tmp_path / "w.pth")
    model = wrap(loaded)
    assert load_weights(model, tmp_path / "w.pth") is model
    assert equal(saved, loaded)
    assert next(model.parameters()).dtype == torch.float32


def test_averaged_weights_as_torch_saves_them(tmp_path: Path) -> None:
    source, target = (ResNet18(width=2) for _ in range(2))
    torch.save(AveragedModel(source).state_dict(), tmp_path / "swa.pth")
    for model in (target, Normalized(target, 0.5, 0.5), AveragedModel(target)):
        with torch.no_grad():
            next(model.parameters()).zero_()
        load_weights(model, tmp_path / "swa.pth")
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True)
        )


def test_resnet_with_and_without_batch_counters(tmp_path: Path) -> None:
    saved, loaded = ResNet18(width=4), Normalized(ResNet18(width=4), 0.5, 0.2)
    saved(torch.rand(4, 3, 32, 32))  # moves the running statistics
    state = {f"module.{k}": v for k, v in saved.state_dict().items()}
    torch.save({"net": state}, tmp_path / "new.pth")
    torch.save(
        {"net": {k: v for k, v in state.items() if "num_batches" not in k}}, tmp_path / "old.pth"
    )
    load_weights(loaded, tmp_path / "old.pth")
    assert int(loaded.state_dict()["model.bn1.num_batches_tracked"]) == 0
    assert torch.equal(
        loaded.state_dict()["model.layer4.1.bn2.running_var"], saved.layer4[1].bn2.running_var
    )
    load_weights(loaded, tmp_path / "new.pth")
    assert equal(saved, loaded.model)


def test_round_trip_is_exact_atomic_and_carries_metadata(tmp_path: Path) -> None:
    saved, loaded = mnist_cnn(), mnist_cnn()
    path = tmp_path / "deep" / "w.safetensors"
    save_weights(saved, path, {"epochs": "3"})
    save_weights(saved, path, {"epochs": "4"})
    assert equal(load_weights(loaded, path), saved)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["epochs"] == "4"
    assert [p.name for p in path.parent.iterdir()] == ["w.safetensors"]


def test_a_misfit_names_what_is_wrong_and_changes_nothing(tmp_path: Path) -> None:
    state = mnist_cnn().state_dict()
    cases = {
        "missing 7.bias": {k: v for k, v in state.items() if k != "7.bias"},
        "unexpected extra": state | {"extra": torch.zeros(1)},
        r"7.weight is \(11, 100\) in the file and \(10, 100\) in the model": state
        | {"7.weight": torch.zeros(11, 100)},
        "missing 0.weight.*unexpected stem.weight": {
            k.replace("0.weight", "stem.weight"): v for k, v in state.items()
        },
        "wball.Normalized": state | {"mean": torch.zeros(1)},
        "wrong type: 7.bias is torch.int32": state | {"7.bias": state["7.bias"].int()},
        "wrong type: 7.bias is .*sparse": state | {"7.bias": state["7.bias"].to_sparse()},
    }
    for message, content in cases.items():
        torch.save(content, tmp_path / "w.pth")
        model = mnist_cnn()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            load_weights(model, tmp_path / "w.pth")
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Remembers(nn.Sequential):
    """Keeps something beside its tensors, as torch lets modules do."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def test_what_modules_keep_beside_tensors_is_left_alone(tmp_path: Path) -> None:
    saved, loaded = Remembers(*mnist_cnn()), Remembers(*mnist_cnn())
    save_weights(saved, tmp_path / "w.safetensors")
    torch.save(saved.state_dict(), tmp_path / "w.PTH")
    torch.save(mnist_cnn().state_dict(), tmp_path / "other.pth")
    for name in ("w.safetensors", "w.PTH"):
        load_weights(loaded, tmp_path / "other.pth")
        load_weights(loaded, tmp_path / name)
        assert all(
            torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True)
        )
    with pytest.raises(ValueError, match="call it on an image first"):
        load_weights(nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), tmp_path / "w.PTH")


def test_files_that_contain_themselves(tmp_path: Path) -> None:
    state: dict[str, Any] = mnist_cnn().state_dict()
    circle: dict[str, Any] = {"net": []}
    circle["net"] += [circle, state]
    many: Any = [state | {"extra": torch.zeros(1)}]
    for _ in range(40):  # 2 ** 40 ways to the same state dict
        many = [many, many]
    torch.save(circle, tmp_path / "circle.pth")
    torch.save({"net": many}, tmp_path / "many.pth")
    load_weights(mnist_cnn(), tmp_path / "circle.pth")
    with pytest.raises(ValueError, match="unexpected extra"):
        load_weights(mnist_cnn(), tmp_path / "many.pth")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["zip.pth", "legacy.pth", "w.safetensors"])
def test_truncated_files(tmp_path: Path, keep: float, kind: str) -> None:
    path = tmp_path / kind
    if kind.endswith("safetensors"):
        save_file(mnist_cnn().state_dict(), path)
    else:
        torch.save(
            mnist_cnn().state_dict(), path, _use_new_zipfile_serialization=kind.startswith("zip")
        )
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    with pytest.raises(ValueError, match="truncated or"):
        load_weights(mnist_cnn(), path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    model, random = nn.Sequential(nn.Linear(3, 2)), np.random.default_rng(0)
    for kind in ("zip.pth", "legacy.pth"):
        torch.save(
            model.state_dict(), tmp_path / kind, _use_new_zipfile_serialization=kind == "zip.pth"
        )
        good, refused = (tmp_path / kind).read_bytes(), 0
        for _ in range(150):
            bad = np.frombuffer(good, np.uint8).copy()
            bad[random.integers(0, len(bad), 4)] = random.integers(0, 256, 4)
            (tmp_path / kind).write_bytes(bad.tobytes())
            try:
                load_weights(model, tmp_path / kind)
            except ValueError:
                refused += 1
        assert refused > 50


@pytest.mark.parametrize("content", [b"hello world, no weights", bytes(range(256)) * 20])
def test_garbage(tmp_path: Path, content: bytes) -> None:
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="not that format"):
            load_weights(mnist_cnn(), tmp_path / name)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    torch.save(
        {"net": mnist_cnn().state_dict(), "evil": Malicious(tmp_path / "owned")}, tmp_path / "w.pth"
    )
    torch.save(mnist_cnn(), tmp_path / "module.pth")
    for name in ("w.pth", "module.pth"):
        with pytest.raises(ValueError, match="pickled Python objects"):
            load_weights(mnist_cnn(), tmp_path / name)
    assert not (tmp_path / "owned").exists()


def test_wrong_paths_and_contents(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.pth"):
        load_weights(mnist_cnn(), tmp_path / "nothing.pth")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(ValueError, match="unknown ending"):
        load_weights(mnist_cnn(), tmp_path / "w.onnx")
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="no state dict"):
        load_weights(mnist_cnn(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match="safetensors"):
        save_weights(mnist_cnn(), tmp_path / "w.pth")


def test_saved_file_is_readable_by_others(tmp_path: Path) -> None:
    save_weights(mnist_cnn(), tmp_path / "w.safetensors")
    (tmp_path / "plain").write_bytes(b"")
    assert stat.S_IMODE(os.stat(tmp_path / "w.safetensors").st_mode) == stat.S_IMODE(
        os.stat(tmp_path / "plain").st_mode
    )
