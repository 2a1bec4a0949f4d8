"""ONNX models: against PyTorch's own answer for what it exported, and against ONNX's reference for single operators."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from wball import DualAveraging, WassersteinBall

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from wball.attacks.adapters.onnx import OnnxModel, load  # noqa: E402


class Assorted(nn.Module):
    """Layers that exporters write in their own ways, and a shape that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1, dilation=1), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
        self.head = nn.Linear(6 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.first((x - 0.3) / 0.4)), 0.1)
        h = F.max_pool2d(h + self.second(h), 3, 2, 1)
        h = h + F.avg_pool2d(h, 3, 1, 1, count_include_pad=False) * F.adaptive_avg_pool2d(h, 1).sigmoid()
        return self.head(h.view(x.size(0), -1).clamp(-3, 3))


def export(model: nn.Module, x: Tensor, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs nothing but onnx is the old one
        names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
        torch.onnx.export(model, (x,), str(path), dynamo=False, dynamic_axes={"x": {0: "n"}, "y": {0: "n"}}, **names)
    return path


def test_exported_network(images: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Assorted()
    net(torch.rand(50, 1, 8, 8))  # running statistics that matter
    net.eval()
    model = load(export(net, images[:3], tmp_path / "net.onnx"))
    x, z = (images.clone().requires_grad_() for _ in range(2))
    expected, found = net(x), model(z)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(z.grad, x.grad, atol=1e-4, rtol=1e-4)
    assert not model.training and sum(p.numel() for p in model.parameters()) >= 700


def test_attack_on_an_exported_model_of_the_zoo(tmp_path: Path) -> None:
    net, (x, y) = wball.load_model("mnist-standard"), wball.load_sample("mnist")
    model = load(export(net, x[:2], tmp_path / "zoo.onnx"))
    attack = DualAveraging(WassersteinBall(0.1), steps=5)
    expected, found = attack(net, x[:6], y[:6]), attack(model, x[:6], y[:6])
    assert torch.equal(found.success, expected.success) and found.success.any()
    torch.testing.assert_close(found.images, expected.images, atol=1e-3, rtol=0)
    assert wball.audit(attack.ball, x[:6], found.images).all_valid


CONSTANTS = {
    "axes": np.array([2, 3]),
    "axis": np.array([1]),
    "shape": np.array([0, -1]),
    "pads": np.array([0, 0, 1, 0, 0, 0, 2, 1]),
    "fill": np.array(0.5, dtype=np.float32),
    "index": np.array([1, -1]),
    "low": np.array(0.2, dtype=np.float32),
    "high": np.array(0.7, dtype=np.float32),
    "weight": np.random.default_rng(0).normal(size=(4, 2, 3, 3)).astype(np.float32),
    "matrix": np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32),
    "bias": np.random.default_rng(2).normal(size=(3,)).astype(np.float32),
}


@pytest.mark.parametrize(
    ("kind", "extra", "settings"),
    [
        ("Conv", ["weight"], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ("Conv", ["weight"], {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
        ("Conv", ["weight"], {"pads": [1, 0, 0, 2], "dilations": [2, 1]}),
        ("MaxPool", [], {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
        ("AveragePool", [], {"kernel_shape": [2, 3], "pads": [1, 1, 0, 1], "count_include_pad": 1}),
        ("AveragePool", [], {"kernel_shape": [2, 3], "pads": [1, 1, 0, 1]}),
        ("GlobalAveragePool", [], {}),
        ("GlobalMaxPool", [], {}),
        ("ReduceMean", ["axes"], {"keepdims": 0}),
        ("ReduceSum", ["axis"], {}),
        ("ReduceMean", [], {}),
        ("Reshape", ["shape"], {}),
        ("Flatten", [], {"axis": 2}),
        ("Unsqueeze", ["axis"], {}),
        ("Pad", ["pads", "fill"], {}),
        ("Gather", ["index"], {"axis": 2}),
        ("Clip", ["low", "high"], {}),
        ("Transpose", [], {"perm": [0, 2, 3, 1]}),
        ("Transpose", [], {}),
        ("Gemm", ["matrix", "bias"], {"alpha": 0.5, "beta": 2.0}),
        ("MatMul", ["matrix"], {}),
        ("Softmax", [], {"axis": 1}),
        ("LogSoftmax", [], {}),
        ("Elu", [], {"alpha": 0.3}),
        ("Sub", ["fill"], {}),
        ("Pow", ["fill"], {}),
        ("Gelu", [], {"approximate": "tanh"}),
    ],
)
def test_operators(kind: str, extra: list[str], settings: dict[str, Any]) -> None:
    shape = [4, 5] if kind == "Gemm" else [2, 2, 6, 5]
    proto = graph(helper.make_node(kind, ["x", *extra], ["y"], **settings), shape, extra)
    x = np.random.default_rng(3).uniform(size=shape).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(OnnxModel(proto)(torch.from_numpy(x)).numpy(force=True), expected, atol=1e-5)


def graph(node: Any, shape: list[int], constants: list[str]) -> Any:
    weights = [numpy_helper.from_array(CONSTANTS[name], name) for name in constants]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in (("x", shape), ("y", None))]
    return helper.make_model(
        helper.make_graph([node], "one", ends[:1], ends[1:], weights), opset_imports=[helper.make_opsetid("", 20)]
    )


def test_errors_name_what_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"LSTM.*onnx2torch"):
        OnnxModel(graph(helper.make_node("LSTM", ["x", "x", "x"], ["y"], hidden_size=2), [1, 1, 1], []))
    node = helper.make_node("Add", ["x", "z"], ["y"])
    proto = graph(node, [2, 2], [])
    proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 2]))
    with pytest.raises(ValueError, match="one input"):
        OnnxModel(proto)
