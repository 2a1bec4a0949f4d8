"""Ways to write a model in Python, to wrap it and to store it."""

from __future__ import annotations

import operator
import tempfile
from collections import OrderedDict
from functools import reduce
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wball
from benchmarks.networks.kinds import CLASSES, Lambda, headed, kind

PIXELS = 192


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def convolutional() -> nn.Sequential:
    return headed(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2))


@kind("ways to write", "wball.Normalized around a network")
def normalized() -> nn.Module:
    return wball.Normalized(convolutional(), (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


@kind("ways to write", "named layers (OrderedDict)")
def named() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(), fc=nn.Linear(PIXELS, 16), act=nn.ReLU(), out=nn.Linear(16, CLASSES)
        )
    )


@kind("ways to write", "lambdas in nn.Sequential")
def lambdas() -> nn.Module:
    return headed(
        Lambda(lambda x: x * 2 - 1),
        nn.Conv2d(3, 6, 3, 2),
        Lambda(F.relu),
        Lambda(lambda h: h[:, :, ::2, ::2]),
    )


@kind("ways to write", "parameters in a list and a loop")
class ParameterLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (PIXELS, 16, 12, CLASSES)
        self.weights = nn.ParameterList(torch.randn(a, b) / a**0.5 for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(len(x), -1)
        for k, weight in enumerate(self.weights):
            h = h.matmul(weight) if k == 0 else torch.relu(h) @ weight
        return h


@kind("ways to write", "functional weights in a dictionary")
class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ParameterDict(
            {"w": torch.randn(16, PIXELS) / 14, "b": torch.zeros(16), "v": torch.randn(CLASSES, 16)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x.flatten(1), self.held["w"], self.held["b"])
        return F.linear(F.relu(h), self.held["v"])


@kind("ways to write", "branches on shapes")
class ShapeBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            x = x.unsqueeze(0)
        if x.shape[-1] < 8:
            x = F.interpolate(x, size=(8, 8))
        assert x.shape[1] == 3, "colour images"
        return self.net(x)


@kind("ways to write", "branch on values")
class ValueBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(1 - x if x.mean() > 0.5 else x)


@kind("ways to write", "torch.cond on values")
class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.cond(x.mean() > 0.5, lambda v: 1 - v, lambda v: v.clone(), (x,)))


@kind("ways to write", "values checked by an assertion")
class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        assert x.min() >= 0, "images in [0, 1]"
        return self.net(x)


@kind("ways to write", "in-place operations and writes to slices")
class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(384, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h[:, :2].mul_(0.5)
        h[:, :, 0] = 0
        out = torch.empty_like(h)
        out[:] = h
        return self.head(out.relu_().flatten(1))


@kind("ways to write", "several outputs (logits in a dictionary)")
class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(PIXELS, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.body(x.flatten(1)))
        return {"logits": self.head(h), "features": h}


@kind("ways to write", "logits and features in a tuple")
class Tuple(Dictionary):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = F.relu(self.body(x.flatten(1)))
        return self.head(h), h


@kind("ways to write", "hooks that change a value")
def hooked() -> nn.Module:
    net = plain()
    net[1].register_forward_hook(lambda module, given, out: out * 0.5 + 0.1)
    return net


@kind("ways to write", "features kept by a hook")
def kept() -> nn.Module:
    net, held = plain(), []  # type: ignore[var-annotated]
    net[1].register_forward_hook(lambda module, given, out: held.append(out.detach()))
    return net


@kind("ways to write", "custom autograd function (backward only)")
class Custom(nn.Module):
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, v: Tensor) -> Tensor:
            return v.clamp(min=0)

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            return -g

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.Reversed.apply(self.first(x.flatten(1))))


@kind("ways to write", "torch.utils.checkpoint")
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(PIXELS, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda v: F.relu(self.body(v)), x.flatten(1), use_reentrant=False)
        return self.head(h)


@kind("ways to write", "NumPy inside the model")
class NumPy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(torch.from_numpy(x.detach().numpy()[:, ::-1].copy()))


@kind("ways to write", "vmap over members")
class Vmapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, CLASSES, PIXELS) / 14)

    def forward(self, x: Tensor) -> Tensor:
        v = x.flatten(1)
        return torch.vmap(lambda w: F.relu(v @ w.T))(self.weight).mean(0)


@kind("ways to write", "gradients inside the model")
class Energy(nn.Module):
    """Logits as the negative gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(PIXELS, CLASSES), nn.Linear(CLASSES, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1))
        return -torch.func.grad(lambda v: F.softplus(self.second(v)).sum())(h)


@kind("ways to write", "einsum throughout")
class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = (
            nn.Parameter(torch.randn(3, 8, 8, 12) / 14),
            nn.Parameter(torch.randn(12, CLASSES)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bk,kn->bn", torch.einsum("bchw,chwk->bk", x, self.u).relu(), self.v)


@kind("ways to write", "tensor train weights")
class TensorTrain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cores = nn.ParameterList(
            [torch.randn(3, 4), torch.randn(4, 8, 4) / 3, torch.randn(4, 8, 12) / 3]
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.cores
        return self.head(torch.tanh(torch.einsum("bchw,cr,rhs,swk->bk", x, a, b, c)))


@kind("ways to write", "embedding of rounded pixels (jumps)")
class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x * 15).long()).flatten(1, 3).mean(1))


@kind("ways to write", "soft histogram of intensities")
class Histogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bins", torch.linspace(0, 1, 6))
        self.head = nn.Linear(18, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gaps = x.flatten(2).unsqueeze(-1) - self.bins
        return self.head(F.relu(1 - 5 * gaps.abs()).mean(2).flatten(1))


@kind("ways to write", "cumulative sums (integral image)")
class Integral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(75, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        total = F.pad(x.cumsum(2).cumsum(3), (1, 0, 1, 0))
        boxes = (
            total[..., 4:, 4:] - total[..., :-4, 4:] - total[..., 4:, :-4] + total[..., :-4, :-4]
        )
        return self.head(F.relu(boxes / 16 - 0.5).flatten(1))


@kind("ways to write", "ranks of pixels (argsort)")
class Ranks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1).argsort(1).argsort(1).float() / PIXELS)


@kind("ways to write", "product of a sequence (reduce)")
class Reduced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(PIXELS, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return reduce(operator.mul, (torch.sigmoid(m(x.flatten(1))) for m in self.maps))


@kind("wrappers and files", "torch.compile")
def compiled() -> nn.Module:
    return torch.compile(convolutional())  # type: ignore[return-value]


@kind("wrappers and files", "nn.DataParallel")
def parallel() -> nn.Module:
    return nn.DataParallel(convolutional())


@kind("wrappers and files", "weights averaged (swa_utils.AveragedModel)")
def averaged() -> nn.Module:
    from torch.optim.swa_utils import AveragedModel

    return AveragedModel(convolutional())


@kind("wrappers and files", "TorchScript by script")
def scripted() -> nn.Module:
    return torch.jit.script(convolutional().eval())


@kind("wrappers and files", "TorchScript by trace")
def traced() -> nn.Module:
    return torch.jit.trace(convolutional().eval(), torch.rand(2, 3, 8, 8))


@kind("wrappers and files", "torch.fx graph module")
def symbolic() -> nn.Module:
    return torch.fx.symbolic_trace(convolutional())


@kind("wrappers and files", "module of an exported program")
def program() -> nn.Module:
    batch = ({0: torch.export.Dim("batch", min=2)},)
    return torch.export.export(
        convolutional().eval(), (torch.rand(2, 3, 8, 8),), dynamic_shapes=batch
    ).module()


@kind("wrappers and files", "folded for deployment (conv and batch norm fused)")
def folded() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, CLASSES)
    ).eval()
    from torch.fx.experimental import optimization  # slow to import

    return optimization.fuse(net)


@kind("wrappers and files", "ONNX file")
def onnx_file() -> nn.Module:
    from wball.attacks.adapters import onnx

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        path.write_bytes(onnx_model())
        return onnx.load(path)


def onnx_model() -> bytes:
    """A convolution, batch normalisation, a pool, a residual sum and a head, as ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    shapes = {"w": (6, 3, 3, 3), "b": (6,), "v": (6, 6, 3, 3), "h": (96, CLASSES), "c": (CLASSES,)}
    held = [numpy_helper.from_array((torch.randn(s) / 5).numpy(), n) for n, s in shapes.items()]
    ends = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["1"], **ends),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("MaxPool", ["2"], ["3"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["3", "v"], ["4"], **ends),
        helper.make_node("Add", ["3", "4"], ["5"]),
        helper.make_node("Sigmoid", ["5"], ["6"]),
        helper.make_node("Flatten", ["6"], ["7"]),
        helper.make_node("Gemm", ["7", "h", "c"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", ["b", 3, 8, 8]), ("y", ["b", CLASSES]))
    )
    graph = helper.make_graph(nodes, "net", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]).SerializeToString()
