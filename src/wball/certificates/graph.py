"""A network as a graph of operations that know how to carry a linear bound backwards.

:func:`trace` follows the model's ``forward`` symbolically (``torch.fx``), so sequential and residual networks, wrappers
that normalise, and functional code all end up as the same few operations. Every operation is either *affine* in the
values it reads (its rows go back exactly: ``<a, W h + b> = <W^T a, h> + <a, b>``) or a :class:`Activation` or
:class:`MaxPool`, which are relaxed elsewhere. Anything else is refused by name.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from wball.ball import Ball
from wball.certificates import trust
from wball.certificates.rows import Rows, add, transposed, trim
from wball.certificates.trust import UnsupportedModule, own_type
from wball.model import evaluating

Shape = tuple[int, ...]
Interval = tuple[Tensor, Tensor]
"""Centre and radius of every coordinate."""


@dataclass(frozen=True)
class Op(ABC):
    """One operation: ``inputs`` are positions of the operations it reads, ``shape`` its value without the batch."""

    name: str
    inputs: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Input(Op):
    """The image."""


class Affine(Op):
    """An operation that is affine in everything it reads."""

    @abstractmethod
    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        """``<rows, f(h_1, h_2, ...)> = constant + sum_k <rows_k, h_k>``: the constant (N,) and the rows."""

    @abstractmethod
    def forward(self, *values: Tensor) -> Tensor:
        """The operation itself, in the values' precision."""

    def interval(self, *values: Interval) -> Interval | None:
        """What intervals become, coordinate by coordinate; ``None`` if the operation does not know."""
        return None


def _total(products: Tensor) -> Tensor:
    return products.flatten(1).sum(1)


def _cast(bias: Tensor | None, like: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(like.dtype)


@dataclass(frozen=True)
class Linear(Affine):
    weight: Tensor
    bias: Tensor | None

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        a = rows.coeff
        constant = a.new_zeros(a.shape[0]) if self.bias is None else _total(a * self.bias.to(a.dtype))
        return constant, [rows.like(a @ self.weight.to(a.dtype))]

    def forward(self, *values: Tensor) -> Tensor:
        return F.linear(values[0], self.weight.to(values[0].dtype), _cast(self.bias, values[0]))

    def interval(self, *values: Interval) -> Interval | None:
        centre, radius = values[0]
        return self.forward(centre), F.linear(radius, self.weight.to(radius.dtype).abs())


@dataclass(frozen=True)
class Conv2d(Affine):
    """A convolution with zero padding. ``weight`` gives the kernel, so that average pooling is one, too."""

    before: Shape
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        a, weight = rows.coeff, self.weight.to(rows.coeff.dtype)
        constant = a.new_zeros(a.shape[0]) if self.bias is None else a.sum((2, 3)) @ self.bias.to(a.dtype)
        settings: dict[str, Any] = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        if rows.corner is None:
            spans = [self.dilation[k] * (weight.shape[2 + k] - 1) + 1 for k in (0, 1)]
            least = [(a.shape[2 + k] - 1) * self.stride[k] - 2 * self.padding[k] + spans[k] for k in (0, 1)]
            missing = [self.before[1 + k] - least[k] for k in (0, 1)]
            out = F.conv_transpose2d(a, weight, padding=self.padding, output_padding=missing, **settings)
            return constant, [rows.like(out)]
        out = transposed(a, weight, self.stride, self.dilation, self.groups)
        corner = (
            rows.corner[0] * self.stride[0] - self.padding[0],
            rows.corner[1] * self.stride[1] - self.padding[1],
        )
        return constant, [trim(Rows(out, rows.image, corner), self.before)]

    def forward(self, *values: Tensor) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return F.conv2d(values[0], self.weight.to(values[0].dtype), _cast(self.bias, values[0]), *settings)

    def interval(self, *values: Interval) -> Interval | None:
        centre, radius = values[0]
        settings = (self.stride, self.padding, self.dilation, self.groups)
        return self.forward(centre), F.conv2d(radius, self.weight.to(radius.dtype).abs(), None, *settings)


@dataclass(frozen=True)
class Diagonal(Affine):
    """``scale * h + shift`` in every coordinate: batch norm, normalisation, arithmetic with constants."""

    scale: Tensor  # (1, *shape), or (1, C, 1, 1) where the same all over the map
    shift: Tensor
    summed: Tensor | None = None  # magnitudes that cancelled in the shift, if any

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        a = rows.coeff
        constant = _total(a * self._read(self.shift.to(a.dtype), rows))
        return constant, [rows.like(a * self._read(self.scale.to(a.dtype), rows))]

    def forward(self, *values: Tensor) -> Tensor:
        dtype = values[0].dtype
        return values[0] * self.scale.to(dtype) + self.shift.to(dtype)

    def interval(self, *values: Interval) -> Interval | None:
        centre, radius = values[0]
        return self.forward(centre), radius * self.scale.to(radius.dtype).abs()

    @staticmethod
    def _read(values: Tensor, rows: Rows) -> Tensor:
        return values if values.shape[2:] == (1, 1) else rows.read(values)


@dataclass(frozen=True)
class Sum(Affine):
    """``h_1 + sign * h_2``: where a residual branch joins."""

    sign: float

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        second = rows if self.sign == 1 else rows.like(rows.coeff * self.sign)
        return rows.coeff.new_zeros(rows.coeff.shape[0]), [rows, second]

    def forward(self, *values: Tensor) -> Tensor:
        return values[0] + self.sign * values[1]

    def interval(self, *values: Interval) -> Interval | None:
        return self.forward(values[0][0], values[1][0]), values[0][1] + values[1][1]


@dataclass(frozen=True)
class Reshape(Affine):
    """The same numbers in another shape."""

    before: Shape

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        whole = rows.dense(self.shape)
        constant = whole.coeff.new_zeros(whole.coeff.shape[0])
        return constant, [whole.like(whole.coeff.reshape(-1, *self.before))]

    def forward(self, *values: Tensor) -> Tensor:
        return values[0].reshape(-1, *self.shape)

    def interval(self, *values: Interval) -> Interval | None:
        centre, radius = values[0]
        return self.forward(centre), self.forward(radius)


@dataclass(frozen=True)
class Generic(Affine):
    """Any other affine operation, transposed by automatic differentiation at 0."""

    before: tuple[Shape, ...]
    function: Callable[..., Tensor]
    magnitude: Callable[..., Tensor] | None = None  # the function with the absolute values of its coefficients

    def back(self, rows: Rows) -> tuple[Tensor, list[Rows]]:
        whole = rows.dense(self.shape)
        a = whole.coeff
        zeros = [a.new_zeros((a.shape[0], *shape)) for shape in self.before]
        value, pull, *_ = torch.func.vjp(self.function, *zeros)
        return _total(a * value), [whole.like(g) for g in pull(a)]

    def forward(self, *values: Tensor) -> Tensor:
        return self.function(*values)

    def interval(self, *values: Interval) -> Interval | None:
        if self.magnitude is None:
            return None
        radius = self.magnitude(*(r for _, r in values)) - self.magnitude(*(torch.zeros_like(r) for _, r in values))
        return self.forward(*(c for c, _ in values)), radius


@dataclass(frozen=True)
class Activation(Op):
    """``max(h, leak * h)`` in every coordinate: ReLU (``leak = 0``) and leaky ReLU."""

    leak: float

    def interval(self, low: Tensor, up: Tensor) -> Interval:
        """The interval of the output when the input is between ``low`` and ``up``."""
        low, up = self.value(low), self.value(up)
        return (low + up) / 2, (up - low) / 2

    def value(self, h: Tensor) -> Tensor:
        """The activation itself; 0 times infinity is 0 here."""
        return F.leaky_relu(h, self.leak) if self.leak else h.relu()


@dataclass(frozen=True)
class MaxPool(Op):
    before: Shape
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    def windows(self, layer: Tensor) -> Tensor:
        """``(B, *before) -> (B, *shape, k)``: what each maximum is taken over (``-inf`` in the padding)."""
        rows, columns = (self._reach(k) for k in (0, 1))
        padded = F.pad(layer, (self.padding[1], columns, self.padding[0], rows), value=-float("inf"))
        taps = [
            padded[
                :,
                :,
                u * self.dilation[0] : u * self.dilation[0] + (self.shape[1] - 1) * self.stride[0] + 1 : self.stride[0],
                v * self.dilation[1] : v * self.dilation[1] + (self.shape[2] - 1) * self.stride[1] + 1 : self.stride[1],
            ]
            for u in range(self.kernel[0])
            for v in range(self.kernel[1])
        ]
        return torch.stack(taps, -1)

    def places(self, device: torch.device) -> Tensor:
        """``(*shape[1:], k)``: the flat position in the map that each entry of :meth:`windows` came from."""
        height, width = self.before[1:]
        index = torch.arange(height * width, dtype=torch.float64, device=device).reshape(1, 1, height, width)
        alone = MaxPool(
            self.name,
            self.inputs,
            (1, *self.shape[1:]),
            (1, height, width),
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
        )
        return alone.windows(index)[0, 0].clamp(min=0).long()

    def _reach(self, k: int) -> int:
        """How far the last window sticks out beyond the map at the bottom or right."""
        end = (self.shape[1 + k] - 1) * self.stride[k] + self.dilation[k] * (self.kernel[k] - 1) + 1
        return max(0, end - self.padding[k] - self.before[1 + k])


@dataclass(frozen=True)
class Graph:
    """Operations in the order they run; the last one gives the logits."""

    ops: tuple[Op, ...]

    def relaxed(self) -> list[int]:
        """Positions of the operations that need bounds on what they read, in order."""
        return [k for k, op in enumerate(self.ops) if isinstance(op, (Activation, MaxPool))]

    @torch.no_grad()
    def values(self, x: Tensor) -> dict[int, Tensor]:
        """What each relaxed operation reads when the network is given ``x``, in the precision of ``x``."""
        wanted = {self.ops[k].inputs[0] for k in self.relaxed()}
        found = {position: value for position, value in self._run(x) if position in wanted}
        return {k: found[self.ops[k].inputs[0]] for k in self.relaxed()}

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """What the network answers."""
        return deque(self._run(x), maxlen=1)[0][1]

    @torch.no_grad()
    def rounded(self, x: Tensor, unit: float, generator: torch.Generator) -> Tensor:
        """What the network answers when every operation makes random errors of the size of its rounding.

        A sum of ``n`` products is off by about ``log2(n)`` units of the sum of their magnitudes.
        """

        def spoil(op: Op, sources: list[Tensor], value: Tensor) -> Tensor:
            if not isinstance(op, Affine) or isinstance(op, Reshape):
                return value
            summed = op.interval(*((torch.zeros_like(h), h.abs()) for h in sources))
            if summed is None:  # with absolute coefficients unknown
                size = op.forward(*(h.abs() for h in sources)).abs() + value.abs()
            else:
                size = summed[0].abs() + summed[1]
            if isinstance(op, Diagonal) and op.summed is not None:
                size = size + op.summed.to(size)
            terms = op.weight[0].numel() if isinstance(op, (Linear, Conv2d)) else sources[0][0].numel()
            noise = torch.randn(value.shape, dtype=value.dtype, generator=generator).to(value.device)
            return value + noise * unit * (2 + math.log2(terms + 1)) * size

        return deque(self._run(x, spoil), maxlen=1)[0][1]

    def _run(
        self, x: Tensor, spoil: Callable[[Op, list[Tensor], Tensor], Tensor] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The value of every operation, in order; each is forgotten once nothing reads it any more."""
        last = {source: position for position, op in enumerate(self.ops) for source in op.inputs}
        held: dict[int, Tensor] = {0: x}
        yield 0, x
        for position, op in enumerate(self.ops[1:], 1):
            sources = [held[k] for k in op.inputs]
            if isinstance(op, Affine):
                held[position] = op.forward(*sources)
            elif isinstance(op, Activation):
                held[position] = F.leaky_relu(sources[0], op.leak)
            else:
                assert isinstance(op, MaxPool)
                held[position] = op.windows(sources[0]).amax(-1)
            if spoil is not None:
                held[position] = spoil(op, sources, held[position])
            yield position, held[position]
            for source in op.inputs:
                if last[source] == position:
                    held.pop(source, None)


def back(
    graph: Graph, target: int, rows: Rows, relax: Callable[[int, Rows], tuple[Tensor, Rows]]
) -> tuple[Tensor, Rows]:
    """Carry rows over operation ``target`` back to the image: ``<rows, h> >= constant + <result, x>``.

    ``relax(position, rows)`` bounds an activation's rows from below by rows over what it reads.
    """
    pending: dict[int, Rows] = {target: rows}
    constant = rows.coeff.new_zeros(rows.coeff.shape[0])
    for position in range(target, 0, -1):
        here = pending.pop(position, None)
        if here is None:
            continue
        op = graph.ops[position]
        if isinstance(op, Affine):
            shift, parts = op.back(here)
        else:
            shift, part = relax(position, here)
            parts = [part]
        constant = constant + shift
        for source, part in zip(op.inputs, parts, strict=True):
            pending[source] = add(pending[source], part, graph.ops[source].shape) if source in pending else part
    return constant, pending[0]


def trace(model: nn.Module, x: Tensor, ball: Ball | None = None) -> Graph:
    """The graph of a model in evaluation mode, for inputs like ``x`` (``(B, C, H, W)`` or ``(B, n)``).

    A graph that does not answer as the model does at points of the ``ball`` around ``x`` is refused.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module to be bounded, got {type(model).__name__}")
    inner = trust.unwrap(model)
    trust.check_modules(inner)
    attributes = set(vars(inner))
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), x.dtype)
    if dtype in (torch.float16, torch.bfloat16):
        raise UnsupportedModule(
            f"the model computes in {dtype}, whose rounding may change its answers inside a certified ball; convert it "
            "with model.float() and certify (and run) that"
        )
    with torch.no_grad(), evaluating(model):
        try:
            graph = _Builder(inner, _symbols(inner), x.new_zeros((1, *x.shape[1:]), dtype=dtype)).build()
        finally:
            for name in set(vars(inner)) - attributes:  # constants that the tracer left there
                delattr(inner, name)
        trust.compare(model, graph, trust.probes(x, ball), dtype)
        return graph


def _symbols(model: nn.Module) -> fx.Graph:
    try:
        return fx.Tracer().trace(model)
    except Exception as error:
        raise UnsupportedModule(
            f"{type(model).__name__}.forward cannot be followed symbolically ({error}); "
            "write it without branches that depend on the values of tensors"
        ) from error


_IDENTITY = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_GENERIC_MODULES = (
    nn.AdaptiveAvgPool2d,
    nn.AvgPool2d,
    nn.ConvTranspose2d,
    nn.Conv1d,
    nn.Conv2d,
    nn.ZeroPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
    nn.CircularPad2d,
    nn.ConstantPad2d,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
    nn.Upsample,
    nn.UpsamplingNearest2d,
    nn.UpsamplingBilinear2d,
)
_RESHAPES = {
    torch.flatten,
    torch.reshape,
    "view",
    "reshape",
    "flatten",
    torch.squeeze,
    torch.unsqueeze,
    "squeeze",
    "unsqueeze",
}
_GENERIC_FUNCTIONS = {
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    F.pad,
    F.interpolate,
    F.linear,
    F.conv2d,
    F.conv_transpose2d,
    torch.cat,
    torch.mean,
    torch.sum,
    torch.matmul,
    operator.matmul,
    "mean",
    "sum",
    "permute",
    "transpose",
    torch.permute,
    torch.transpose,
}
_PLUS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_MINUS = {operator.sub, operator.isub, torch.sub, "sub", "sub_"}
_OVER = {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
_TIMES = {operator.mul, operator.imul, torch.mul, "mul", "mul_", operator.neg, torch.neg, "neg"} | _OVER
_RELU = {F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_"}
_DROPOUT = {F.dropout, F.dropout2d}
_NOTHING = {"contiguous", "clone", "detach", "float", "double", "to", torch.clone} | _DROPOUT


_DESCRIPTIONS = ("shape", "ndim", "dtype", "device")
"""Attributes of a tensor that say nothing about its values."""

_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: kind.forward
    for kind in (
        *_IDENTITY,
        *_GENERIC_MODULES,
        *(nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.ReLU, nn.LeakyReLU, nn.MaxPool2d, nn.Flatten, nn.Unflatten),
    )
}
"""The modules that are known, and what they run."""


class _Builder:
    """Runs the traced model on one image to learn shapes and constants, and turns each node into an operation."""

    def __init__(self, model: nn.Module, traced: fx.Graph, x: Tensor) -> None:
        self.modules = dict(model.named_modules())
        self.nodes = list(traced.nodes)
        self.values: dict[fx.Node, Any] = {}
        self.place: dict[fx.Node, int] = {}  # nodes whose value depends on the image
        self.ops: list[Op] = []
        self.model, self.x = model, x

    def build(self) -> Graph:
        for node in self.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                return self._output(node)
            elif node.op == "get_attr":
                self.values[node] = operator.attrgetter(node.target)(self.model)
            else:
                self._call(node)
        raise UnsupportedModule("the model returns nothing")

    def _placeholder(self, node: fx.Node) -> None:
        if self.ops:
            if not node.args:
                raise UnsupportedModule(f"the model takes a second argument {node.name!r}; it must take images alone")
            self.values[node] = node.args[0]
            return
        self.values[node], self.place[node] = self.x, 0
        self.ops.append(Input(node.name, (), tuple(self.x.shape[1:])))

    def _output(self, node: fx.Node) -> Graph:
        logits = node.args[0]
        if not isinstance(logits, fx.Node) or logits not in self.place or self.values[logits].ndim != 2:
            raise UnsupportedModule("the model must return one tensor of logits (B, classes)")
        position = self.place[logits]
        return Graph(tuple(self.ops[: position + 1]))

    def _concrete(self, argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda n: self.values[n])

    def _function(self, node: fx.Node, sources: Sequence[fx.Node], absolute: bool = False) -> Callable[..., Tensor]:
        """The node as a function of its image-dependent inputs, or that with its constants' absolute values."""

        def function(*values: Tensor) -> Tensor:
            given = (value.clone() for value in values) if self._in_place(node) else values
            known = dict(zip(sources, given, strict=True))

            def cast(value: Any) -> Any:
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return value
                return value.to(values[0].dtype).abs() if absolute else value.to(values[0].dtype)

            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: known.get(n, cast(self.values[n])))
            if node.op == "call_module":
                module = self.modules[str(node.target)]
                state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
                state = {k: cast(v) for k, v in state.items()}
                result: Tensor = torch.func.functional_call(module, state, args, kwargs)
            elif node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                result = node.target(*args, **kwargs)
            return result

        return function

    def _generic(
        self, node: fx.Node, sources: list[fx.Node], inputs: tuple[int, ...], before: tuple[Shape, ...], shape: Shape
    ) -> Op:
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        function = self._function(node, sources)
        # Differences have negative coefficients of their own, interpolation may, and so may weights that are computed.
        signed = node.target in _MINUS or "alpha" in node.kwargs or node.target is F.interpolate
        if module is not None:
            held = {name for name, _ in module.named_parameters()}
            signed = isinstance(module, nn.Upsample) or not held <= {"weight", "bias"}
        magnitude = None if signed else self._function(node, sources, absolute=True)
        self._check_generic(node, function, before)
        name = node.name if module is None else str(node.target)
        return Generic(name, inputs, shape, before, function, magnitude)

    def _check_generic(self, node: fx.Node, function: Callable[..., Tensor], before: tuple[Shape, ...]) -> None:
        """Refuse a function that mixes images or is not affine, as random inputs show."""
        generator = torch.Generator().manual_seed(0)

        def draw(part: Shape) -> Tensor:
            return torch.randn((2, *part), dtype=torch.float64, generator=generator).to(self.x.device)

        first, second = ([draw(part) for part in before] for _ in (0, 1))
        try:
            at, there = function(*first), function(*second)
            alone = torch.cat([function(*(h[k : k + 1] for h in first)) for k in (0, 1)])
            middle = function(*((a + b) / 2 for a, b in zip(first, second, strict=True)))
        except (RuntimeError, ValueError):
            raise UnsupportedModule(f"{self._title(node)} mixes images of a batch") from None
        size = 1e-9 * (at.abs().amax() + there.abs().amax()) if at.numel() and there.numel() else 0.0
        if at.shape != alone.shape or at.shape[0] != 2 or not bool(((at - alone).abs() <= size).all()):
            raise UnsupportedModule(f"{self._title(node)} mixes images of a batch")
        if not bool((((at + there) / 2 - middle).abs() <= size).all()):
            raise UnsupportedModule(f"{self._title(node)} is not affine in what it reads")

    def _call(self, node: fx.Node) -> None:
        sources = [n for n in dict.fromkeys(node.all_input_nodes) if n in self.place]
        args, kwargs = self._concrete(node.args), self._concrete(node.kwargs)
        target = node.target
        if node.op == "call_module":
            value = self.modules[str(target)](*args, **kwargs)
        elif node.op == "call_method":
            value = getattr(args[0], str(target))(*args[1:], **kwargs)
        else:
            assert callable(target)
            value = target(*args, **kwargs)
        self.values[node] = value
        if not sources:
            return  # a constant
        if not isinstance(value, Tensor):
            if not (target in ("size", "dim") or (target is getattr and node.args[1] in _DESCRIPTIONS)):
                raise UnsupportedModule(f"{self._title(node)} reads the values of a tensor, which symbols cannot show")
            return
        if not all(_keeps_precision(self.values[n].dtype, value.dtype) for n in sources):
            raise UnsupportedModule(
                f"{self._title(node)} computes in {value.dtype}, which is less precise than what it reads"
            )
        if value.shape[:1] != (1,):
            raise UnsupportedModule(
                f"{self._title(node)} mixes images of a batch: its output has shape {tuple(value.shape)}"
            )
        self._append(node, sources, self._operation(node, sources, args, kwargs, tuple(value.shape[1:])))
        if self._in_place(node) and node.args[:1] == (sources[0],):
            self.place[sources[0]] = self.place[node]  # whoever reads it from here on

    def _in_place(self, node: fx.Node) -> bool:
        """Whether a node writes its result over what it reads."""
        if node.op == "call_module":
            return bool(getattr(self.modules[str(node.target)], "inplace", False))
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return name.endswith("_") or node.kwargs.get("inplace") is True

    def _append(self, node: fx.Node, sources: Sequence[fx.Node], op: Op | None) -> None:
        if op is None:  # passes its input on
            self.place[node] = self.place[sources[0]]
            return
        self.place[node] = len(self.ops)
        self.ops.append(op)

    def _title(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"module {node.target!r} ({self.modules[str(node.target)]})"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return f"{'method' if node.op == 'call_method' else 'function'} {name!r} (node {node.name!r})"

    def _refuse(self, node: fx.Node) -> UnsupportedModule:
        return UnsupportedModule(
            f"no bound is known for {self._title(node)}. Supported: Linear, Conv2d, ReLU, LeakyReLU, average and max "
            "pooling, BatchNorm (evaluation mode), Flatten, sums, arithmetic with constants, Dropout, Identity"
        )

    def _operation(self, node: fx.Node, sources: list[fx.Node], args: Any, kwargs: Any, shape: Shape) -> Op | None:
        inputs = tuple(self.place[n] for n in sources)
        before = tuple(tuple(self.values[n].shape[1:]) for n in sources)
        if node.op == "call_module":
            return self._module(node, sources, inputs, before, shape)
        target: Any = node.target
        if kwargs.get("out") is not None:
            raise self._refuse(node)
        if target in _NOTHING:
            random = target in _DROPOUT and kwargs.get("training", args[2] if len(args) > 2 else True)
            if random or not self.values[node].is_floating_point():
                raise self._refuse(node)
            return None
        if target in _RELU:
            return Activation(node.name, inputs, shape, 0.0)
        if target is F.leaky_relu:
            slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
            return self._leaky(node, inputs, shape, float(slope))
        if target is F.max_pool2d:
            return self._max_pool(node, inputs, before[0], shape, *args[1:], **kwargs)
        if target in _RESHAPES:
            return Reshape(node.name, inputs, shape, before[0])
        function = self._function(node, sources)
        arithmetic = target in _PLUS or target in _MINUS or target in _TIMES
        if arithmetic and len(sources) == 1 and shape == before[0] and self._operands(node) == 1:
            over = target in _OVER and node.args[0] is not sources[0]
            if over or kwargs.get("rounding_mode") is not None:
                raise self._refuse(node)
            return _diagonal(node.name, inputs, shape, function, self.x)
        sum_like = target in _PLUS or target in _MINUS
        if sum_like and "alpha" not in kwargs and len(sources) == 2 and before[0] == before[1] == shape:
            return Sum(node.name, inputs, shape, 1.0 if target in _PLUS else -1.0)
        if target is F.avg_pool2d:
            self._check_divisor(node, args[6] if len(args) > 6 else kwargs.get("divisor_override"))
        if sum_like or (target in _GENERIC_FUNCTIONS and self._linear_use(node, sources)):
            return self._generic(node, sources, inputs, before, shape)
        raise self._refuse(node)

    def _operands(self, node: fx.Node) -> int:
        """How many of a node's operands depend on the image (``h * h`` reads one node twice)."""
        found: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) if n in self.place else None)
        return len(found)

    def _linear_use(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Whether the image enters only where the function is linear (a product of two variables is not)."""
        if node.target is torch.cat:
            return True
        return self._operands(node) == 1 and len(sources) == 1

    def _check_divisor(self, node: fx.Node, divisor: int | None) -> None:
        if divisor is not None and not divisor > 0:
            raise UnsupportedModule(f"{self._title(node)}: divisor_override must be above 0, got {divisor}")

    def _leaky(self, node: fx.Node, inputs: tuple[int, ...], shape: Shape, slope: float) -> Op:
        if not 0 <= slope <= 1:
            raise UnsupportedModule(f"{self._title(node)}: the negative slope must be in [0, 1], got {slope}")
        return Activation(node.name, inputs, shape, slope)

    def _max_pool(
        self,
        node: fx.Node,
        inputs: tuple[int, ...],
        before: Shape,
        shape: Shape,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Op:
        if return_indices or len(shape) != 3:
            raise self._refuse(node)
        stride = kernel_size if stride is None or stride == [] else stride
        pairs = [_pair(v) for v in (kernel_size, stride, padding, dilation)]
        return MaxPool(node.name, inputs, shape, before, pairs[0], pairs[1], pairs[2], pairs[3], ceil_mode)

    def _module(
        self, node: fx.Node, sources: list[fx.Node], inputs: tuple[int, ...], before: tuple[Shape, ...], shape: Shape
    ) -> Op | None:
        module, name = self.modules[str(node.target)], str(node.target)
        kind = own_type(module)
        if kind in _FORWARDS and kind.forward is not _FORWARDS[kind]:
            raise UnsupportedModule(f"{self._title(node)}: {kind.__name__}.forward is patched")
        if kind in _IDENTITY:
            return None
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            return Linear(name, inputs, shape, module.weight, module.bias)
        if isinstance(module, nn.Conv2d) and kind is nn.Conv2d and _is_plain(module):
            stride, padding, dilation = (_pair(v) for v in (module.stride, module.padding, module.dilation))
            weight, bias = module.weight, module.bias
            return Conv2d(name, inputs, shape, before[0], weight, bias, stride, padding, dilation, module.groups)
        if isinstance(module, nn.AvgPool2d) and kind is nn.AvgPool2d:
            self._check_divisor(node, module.divisor_override)
            if _is_convolution(module) and len(shape) == 3:
                kernel, stride, padding = (_pair(v) for v in (module.kernel_size, module.stride, module.padding))
                divisor = module.divisor_override or kernel[0] * kernel[1]
                mean = torch.full((shape[0], 1, *kernel), 1.0 / divisor, dtype=torch.float64, device=self.x.device)
                return Conv2d(name, inputs, shape, before[0], mean, None, stride, padding, (1, 1), shape[0])
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)) and kind in (nn.BatchNorm1d, nn.BatchNorm2d):
            return self._batch_norm(node, module, inputs, shape)
        if isinstance(module, (nn.ReLU, nn.LeakyReLU)) and kind in (nn.ReLU, nn.LeakyReLU):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else 0.0
            return self._leaky(node, inputs, shape, float(slope))
        if isinstance(module, nn.MaxPool2d) and kind is nn.MaxPool2d:
            settings_ = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
            return self._max_pool(node, inputs, before[0], shape, *settings_, module.return_indices)
        if kind in (nn.Flatten, nn.Unflatten):
            return Reshape(name, inputs, shape, before[0])
        if kind in _GENERIC_MODULES:
            return self._generic(node, sources, inputs, before, shape)
        raise self._refuse(node)

    def _batch_norm(
        self, node: fx.Node, module: nn.BatchNorm1d | nn.BatchNorm2d, inputs: tuple[int, ...], shape: Shape
    ) -> Op:
        if module.running_mean is None or module.running_var is None:
            raise UnsupportedModule(f"{self._title(node)} has no running statistics: its output depends on the batch")
        wide = torch.float64
        scale = 1.0 / torch.sqrt(module.running_var.to(wide) + module.eps)
        if module.weight is not None:
            scale = module.weight.to(wide) * scale
        shift = -module.running_mean.to(wide) * scale
        if module.bias is not None:
            shift = shift + module.bias.to(wide)
        view = (1, -1, *[1] * (len(shape) - 1))
        summed = (module.running_mean.to(wide) * scale).abs()
        return Diagonal(str(node.target), inputs, shape, scale.view(view), shift.view(view), summed.view(view))


def _diagonal(name: str, inputs: tuple[int, ...], shape: Shape, function: Callable[..., Tensor], x: Tensor) -> Op:
    zero = torch.zeros((1, *shape), dtype=torch.float64, device=x.device)
    shift, pull, *_ = torch.func.vjp(function, zero)  # differences would lose the digits of 1 beside a large shift
    (scale,) = pull(zero + 1)
    maps = [scale, shift]
    if len(shape) == 3 and all(bool((m == m[..., :1, :1]).all()) for m in maps):
        maps = [m[..., :1, :1] for m in maps]
    return Diagonal(name, inputs, shape, maps[0], maps[1])


def _keeps_precision(before: torch.dtype, after: torch.dtype) -> bool:
    return after.is_floating_point and torch.promote_types(before, after) == after


def _is_plain(module: nn.Conv2d) -> bool:
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _is_convolution(module: nn.AvgPool2d) -> bool:
    counted = module.count_include_pad or _pair(module.padding) == (0, 0)
    return counted and not module.ceil_mode


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        first, second = (value[0], value[-1])
        return int(first), int(second)
    return int(value), int(value)
