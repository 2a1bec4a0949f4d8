"""ONNX models: against PyTorch's own answer for what it exported, and against files of other
frameworks."""

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
from wball import WassersteinBall

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from wball.attacks.adapters.onnx import ForwardOnly, OnnxModel, load  # noqa: E402


class Assorted(nn.Module):
    """Layers that exporters write in their own ways, and a shape that depends on the batch."""

    def __init__(self, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.excite = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), gate())
        self.act, self.drop, self.head = act(), nn.Dropout(0.2), nn.Linear(80, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.first((x - 0.3) / 0.4)))
        h = F.max_pool2d(h + self.second(h), 3, 2, 1)
        h = h + F.avg_pool2d(h, 3, 1, 1, count_include_pad=False) * self.excite(h)
        h = torch.cat([h[:, 1:3], h[:, 3:]], 1)
        return self.head(self.drop(h.view(x.size(0), -1).clamp(-3, 3)))


def export(model: nn.Module, x: Tensor, path: Path, opset: int = 17, fixed: bool = False) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs nothing but onnx is the old one
        names: dict[str, Any] = {
            "input_names": ["x"],
            "output_names": ["y"],
            "opset_version": opset,
        }
        names |= {} if fixed else {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
        torch.onnx.export(model, (x,), str(path), dynamo=False, **names)
    return path


class VisionTransformer(nn.Module):
    """Patches, a class token, attention written out, GELU: the way timm and Hugging Face write
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 4, 4)
        self.token, self.position = (
            nn.Parameter(torch.randn(1, 1, 12)),
            nn.Parameter(torch.randn(1, 5, 12)),
        )
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(h.shape[0], -1, -1), h], 1) + self.position
        b, n, d = h.shape
        q, k, v = (
            self.qkv(self.norm(h)).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        )
        weights = (q @ k.transpose(-2, -1) * (d // 2) ** -0.5).softmax(-1)
        h = h + self.out((weights @ v).transpose(1, 2).reshape(b, n, d))
        return self.head((h + self.mlp(h))[:, 0])


NETWORKS = {
    "leaky": lambda: Assorted(nn.LeakyReLU, nn.Sigmoid),
    "MobileNetV3": lambda: Assorted(nn.Hardswish, nn.Hardsigmoid),
    "EfficientNet": lambda: Assorted(nn.SiLU, nn.Sigmoid),
    "vision transformer": VisionTransformer,
}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", NETWORKS)
def test_usual_architectures(
    images: Tensor, tmp_path: Path, name: str, opset: int, fixed: bool
) -> None:
    """Also exported for one image at a time: the file then takes any number of them, all at once or
    one by one."""
    torch.manual_seed(0)
    net = NETWORKS[name]()
    net(images.repeat(5, 1, 1, 1))
    net.eval()
    path = export(net, images[:1], tmp_path / "net.onnx", opset, fixed)
    model = load(path)
    # A class token is expanded to a number of images that is written down.
    assert not model.training and (model.ends.batch is None or name == "vision transformer")
    x, z = (images.clone().requires_grad_() for _ in range(2))
    expected, found = net(x), model(z)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(z.grad, x.grad, atol=1e-3, rtol=1e-3)


def classifier(nodes: list[Any], shape: list[Any], weights: dict[str, Any], opset: int = 13) -> Any:
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    first = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    last = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["n", "k"])
    graph = helper.make_graph(nodes, "classifier", [first], [last], stored)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])


def test_weights_keep_the_order_of_the_file() -> None:
    """They are numbered in it. With the order of a set, the checksum of the model changed with
    every process, and no evaluation of it could be resumed."""
    count = 30
    weights = {f"w{k}": np.full(1, 1.0 + k, np.float32) for k in range(count)}
    nodes = [helper.make_node("Flatten", ["x"], ["h0"], axis=1)]
    for k in range(count):  # the last weight is used first
        nodes.append(helper.make_node("Add", [f"h{k}", f"w{count - 1 - k}"], [f"h{k + 1}"]))
    model = OnnxModel(classifier(nodes, ["n", 1, 2, 2], weights))
    assert [p.item() for p in model.parameters()] == [1.0 + k for k in range(count)]


@pytest.mark.parametrize("trailing", [False, True])
def test_a_softmax_at_the_end_is_left_out(images: Tensor, tmp_path: Path, trailing: bool) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Softmax(1))
    proto = onnx.load(export(net, images[:2], tmp_path / "net.onnx"))
    if trailing:  # as Paddle's exporter writes it
        proto.graph.node.append(helper.make_node("Identity", ["y"], ["named"]))
        proto.graph.output[0].name = "named"
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.warns(UserWarning, match="softmax, which is left out"):
        model = load(tmp_path / "net.onnx")
    found = model(images)
    assert float(found.min()) < 0
    torch.testing.assert_close(found.softmax(1), net(images), atol=1e-5, rtol=1e-4)
    attack = wball.StandardAttack(WassersteinBall(0.5), version="fast", check=False)
    result = attack(model, images, found.argmax(1))
    assert bool(result.success.any()) and wball.audit(attack.ball, images, result.images).all_valid


@pytest.mark.parametrize("size", [(8, 10), (3, 3)])
def test_images_with_channels_last(tmp_path: Path, size: tuple[int, int]) -> None:
    """As TensorFlow's exporter writes them: a Transpose in front, which the shape of the input
    tells."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w"], ["c"], auto_pad="SAME_UPPER", strides=[2, 2]),
        helper.make_node("ReduceMean", ["c"], ["y"], axes=[2, 3], keepdims=0),
    ]
    proto = classifier(nodes, ["n", *size, 3], {"w": weight})
    x = torch.rand(5, 3, *size)
    model = OnnxModel(proto, layout=None if size != (3, 3) else "NHWC")
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x.permute(0, 2, 3, 1).numpy()})
    torch.testing.assert_close(model(x), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
    if size != (3, 3):
        with pytest.raises(ValueError, match=r"images of shape \(3, 8, 10\), got \(1, 8, 10\)"):
            model(x[:, :1])


def test_rows_of_a_table() -> None:
    """As scikit-learn's exporter writes a network of digits: images are its rows, and labels come
    beside the scores."""
    weight = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    proto = classifier(nodes, ["n", 48], {"w": weight})
    x = torch.rand(3, 3, 4, 4)
    rows = x.flatten(1)
    torch.testing.assert_close(OnnxModel(proto)(x), rows @ torch.from_numpy(weight))
    proto.graph.node.append(
        helper.make_node("ArrayFeatureExtractor", ["names", "y"], ["label"], domain="ai.onnx.ml")
    )
    proto.graph.output.append(helper.make_tensor_value_info("label", TensorProto.INT64, ["n"]))
    torch.testing.assert_close(
        OnnxModel(proto)(rows), rows @ torch.from_numpy(weight)
    )  # labels are not requested
    with pytest.raises(ValueError, match=r"takes images of shape \(48\), got \(60,\)"):
        OnnxModel(proto)(torch.rand(2, 3, 4, 5))
    proto.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    for output in (None, "y"):
        with pytest.raises(ValueError, match="'zipmap': False"):
            OnnxModel(proto, output=output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v2", "resnet50"])
def test_classifiers_that_come_with_onnx(name: str) -> None:
    """Caffe2's exports in operator set 9; images of 224 x 224, one at a time."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the softmax
        model = load(folder / f"light_{name}.onnx")
    stored = TensorProto.FromString((folder / f"light_{name}_output_0.pb").read_bytes())
    expected = torch.from_numpy(numpy_helper.to_array(stored).copy()).flatten(1)
    with torch.no_grad():
        found = model(torch.ones(2, *(s or 224 for s in model.ends.shape)))
    assert found.shape == (2, 1000)
    torch.testing.assert_close(found[:1].softmax(1), expected, atol=1e-4, rtol=1e-3)


def test_certificates_follow_an_exported_network(images: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    ).eval()
    model, y = load(export(net, images[:2], tmp_path / "zoo.onnx")), net(images).argmax(1)
    ball = WassersteinBall(0.01)
    found, expected = (wball.certify(m, images, y, ball, method="crown") for m in (model, net))
    torch.testing.assert_close(found.margin, expected.margin, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.certified, expected.certified)


def test_half_precision(images: Tensor, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5)).half()
    model = load(export(net, images[:1].half(), tmp_path / "half.onnx"))
    torch.testing.assert_close(
        wball.model.ask(model, images), net(images.half()).float(), atol=1e-2, rtol=1e-2
    )
    assert model(images).dtype == torch.float16
    assert model.float()(images).dtype == torch.float32


def test_one_output_of_several(tmp_path: Path) -> None:
    nodes = [helper.make_node("Flatten", ["x"], ["f"]), helper.make_node("Neg", ["f"], ["logits"])]
    proto = classifier(nodes, ["n", 1, 2, 2], {})
    proto.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, None))
    x = torch.rand(2, 1, 2, 2)
    torch.testing.assert_close(OnnxModel(proto)(x), -x.flatten(1))
    torch.testing.assert_close(OnnxModel(proto, output="f")(x), x.flatten(1))
    proto.graph.output[0].name = proto.graph.node[1].output[0] = "a"
    with pytest.raises(ValueError, match="outputs a, f: say which one"):
        OnnxModel(proto)
    with pytest.raises(ValueError, match="one of a, f, got 'b'"):
        OnnxModel(proto, output="b")


def resize() -> Any:
    """A classifier with an operator that is not in the table."""
    nodes = [
        helper.make_node("Resize", ["x", "", "scales"], ["r"], mode="linear"),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    weights = {
        "scales": np.array([1, 1, 0.5, 0.5], np.float32),
        "w": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32),
    }
    return classifier(nodes, ["n", 1, 8, 8], weights)


def test_onnx_runtime_serves_the_rest_without_gradients(images: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    proto = resize()
    onnx.save(proto, tmp_path / "r.onnx")
    with pytest.warns(UserWarning, match="Resize is not supported.*without gradients"):
        model = load(tmp_path / "r.onnx")
    assert isinstance(model, ForwardOnly)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": images.numpy()})
    found = model(images)
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-4, rtol=1e-4)
    assert not model(images.clone().requires_grad_()).requires_grad
    attack = wball.ScoreSearch(WassersteinBall(0.5), queries=300)
    result = attack(model, images, found.argmax(1))
    assert bool(result.success.any()) and wball.audit(attack.ball, images, result.images).all_valid
    with pytest.raises(ValueError, match="Resize is not supported"):
        load(tmp_path / "r.onnx", engine="torch")


def test_errors_name_what_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Resize.*onnxruntime"):
        OnnxModel(resize())
    proto = classifier([helper.make_node("Add", ["x", "z"], ["y"])], [2, 2], {})
    proto.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 2]))
    with pytest.raises(ValueError, match="one input, images; it has 2: x, z"):
        OnnxModel(proto)
    with pytest.raises(ValueError, match="operator set 99 is newer"):
        OnnxModel(classifier([helper.make_node("Relu", ["x"], ["y"])], ["n", 2], {}, 99))
    (tmp_path / "half.onnx").write_bytes(resize().SerializeToString()[:150])
    with pytest.raises(ValueError, match="is not a complete ONNX file"):
        load(tmp_path / "half.onnx")
    with pytest.raises(FileNotFoundError, match="no ONNX file"):
        load(tmp_path / "none.onnx")
    with pytest.raises(ValueError, match="engine must be one of auto"):
        load(tmp_path / "none.onnx", engine="tensorrt")  # type: ignore[arg-type]


def test_an_output_without_a_shape_is_no_fault(images: Tensor, tmp_path: Path) -> None:
    """Some exporters leave it open, and only onnx's checker minds."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).eval()
    proto = onnx.load(export(net, images[:3], tmp_path / "net.onnx"))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "open.onnx")
    torch.testing.assert_close(load(tmp_path / "open.onnx")(images), net(images))
    pytest.importorskip("onnxruntime")
    torch.testing.assert_close(
        load(tmp_path / "open.onnx", engine="onnxruntime")(images), net(images)
    )
