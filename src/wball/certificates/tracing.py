"""A model's graph, recorded from what it runs.

Every call of a PyTorch function goes through :class:`_Recorder`, wherever it is made from: a module, a hook, a patched
method, a loop. The first run gets tensors without values (:mod:`wball.certificates.valueless`), so nothing it does can
depend on the values of an image; the second one gets points of the ball, in another batch size and with gradients. Both
must record the same graph. A function that is not on the list is refused by name, and so is what a list of functions
cannot show: a tensor read after it was changed under another name, values that leave the tensors, results in less
precision.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from wball.ball import Ball
from wball.certificates import trust
from wball.certificates.graph import (
    Activation,
    Conv2d,
    Curved,
    Diagonal,
    Generic,
    Graph,
    Input,
    Linear,
    MaxPool,
    Op,
    Reshape,
    Shape,
    Sum,
)
from wball.certificates.trust import UnsupportedModule
from wball.certificates.valueless import Valueless, memory
from wball.model import evaluating

BATCH = 3
"""Images of the run without values."""


def trace(model: nn.Module, x: Tensor, ball: Ball | None = None) -> Graph:
    """The graph of a model in evaluation mode, for inputs like ``x`` (``(B, C, H, W)`` or ``(B, n)``).

    Refused: a model that runs something else at points of the ``ball`` around ``x``, or answers something else there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module to be bounded, got {type(model).__name__}")
    inner = trust.unwrap(model)
    trust.check_modules(inner)
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), x.dtype)
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedModule(
            f"the model computes in {dtype}, whose rounding may change its answers inside a certified ball; convert it "
            "with model.float() and certify (and run) that"
        )
    points = trust.probes(x, ball).to(dtype)
    with evaluating(model), trust.undisturbed(inner):  # another thread may change the mode outside
        with torch.no_grad():
            empty = Valueless(points.new_zeros((BATCH, *x.shape[1:])))
            graph = _record(inner, empty, torch.no_grad())
            # Hooks on gradients pass tensors through a function that cannot be seen; without gradients they do nothing.
            hooked = any(module._backward_hooks or module._backward_pre_hooks for module in inner.modules())
            seen = _record(inner, points.clone(), torch.no_grad() if hooked else torch.enable_grad())
        if not _same(graph, seen):
            raise UnsupportedModule(
                f"{type(inner).__name__}.forward runs something else from call to call: what it does depends on the "
                "values of its input, the batch size, gradients, or state of its own"
            )
        trust.compare(model, graph, points)
    return graph


def _record(model: nn.Module, x: Tensor, gradients: AbstractContextManager[None]) -> Graph:
    recorder = _Recorder(model, x)
    try:
        with gradients, torch.autocast(x.device.type, enabled=False), recorder:
            logits = model(x)
    except UnsupportedModule:
        raise
    except Exception as error:
        if recorder.refusal is not None:
            raise recorder.refusal from None
        raise UnsupportedModule(
            f"{type(model).__name__}.forward cannot be followed without the values of the image "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); write it without branches "
            "that depend on the values of tensors"
        ) from error
    return recorder.graph(logits)


def _same(first: Graph, second: Graph) -> bool:
    """Whether two graphs are the same operations on the same constants."""
    return len(first.ops) == len(second.ops) and all(
        type(a) is type(b) and all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.compare)
        for a, b in zip(first.ops, second.ops, strict=True)
    )


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and bool(((first == second) | (first.isnan() & second.isnan())).all())
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(_equal(a, b) for a, b in zip(first, second, strict=True))
    return type(first) is type(second) and bool(first == second)


# ---- functions by name


def _known(*names: str) -> dict[Any, str]:
    """The functions and methods of PyTorch that go by these names."""
    homes = (torch, F, Tensor, torch._C._nn)
    return {found: name for name in names for home in homes if callable(found := getattr(home, name, None))}


IDENTITIES = _known("contiguous", "clone", "detach", "float", "double", "to", "cpu", "cuda", "requires_grad_", "alias")
DROPOUTS = _known("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
RESHAPES = _known("flatten", "reshape", "view", "squeeze", "unsqueeze", "unflatten", "view_as", "reshape_as")
RELUS = _known("relu", "relu_")
LEAKY_RELUS = _known("leaky_relu", "leaky_relu_")
CURVES = _known("sigmoid", "tanh", "silu", "gelu")
CLAMPS = _known("clamp", "clip", "hardtanh", "relu6")
MAX_POOLS = _known("max_pool2d")
PLUS = _known("add", "add_", "__add__", "__radd__", "__iadd__")
MINUS = _known("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__")
FROM = _known("rsub", "__rsub__")
TIMES = _known("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__", "neg", "neg_", "__neg__")
OVER = _known("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__")
POOLS = _known("avg_pool2d")
LINEARS = _known("linear")
CONVOLUTIONS = _known("conv2d")
NORMS: dict[Any, str] = {F.batch_norm: "batch_norm"}
JOINS = _known("cat", "concat", "stack")
SIGNED = _known("interpolate", "upsample")
"""Linear functions whose coefficients may be negative on their own account."""

LINEAR_FUNCTIONS = _known(
    *("adaptive_avg_pool2d", "pad", "conv1d", "conv_transpose2d", "mean", "sum", "matmul", "mm", "__matmul__"),
    *("__rmatmul__", "permute", "transpose", "movedim", "swapaxes", "pixel_shuffle", "pixel_unshuffle"),
    *("channel_shuffle", "native_channel_shuffle", "flip", "roll", "narrow", "select", "__getitem__"),
)
DESCRIPTIONS = _known("size", "dim", "ndimension", "__len__", "numel", "is_floating_point", "stride", "is_contiguous")
ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout", "is_sparse", "is_quantized")
"""What may be asked of a tensor without reading its values."""

FITTED = _known("to", "type_as", "expand_as")
MADE_LIKE = _known("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor")
"""Functions that take the form of a tensor for a constant: of their second argument, of their first."""

SUPPORTED = {
    "linear layers": (*LINEARS.values(), *CONVOLUTIONS.values(), "conv1d", "conv_transpose2d", "matmul", "mm"),
    "activations": (*RELUS.values(), *LEAKY_RELUS.values(), *CURVES.values(), *CLAMPS.values()),
    "pooling": (*POOLS.values(), "adaptive_avg_pool2d", *MAX_POOLS.values(), "mean", "sum"),
    "normalisation in evaluation mode": tuple(NORMS.values()),
    "arithmetic": (*PLUS.values(), *MINUS.values(), *FROM.values(), *TIMES.values(), *OVER.values()),
    "shapes": tuple(
        name
        for name in (*RESHAPES.values(), *JOINS.values(), *LINEAR_FUNCTIONS.values(), *SIGNED.values())
        if name not in ("conv1d", "conv_transpose2d", "matmul", "mm", "adaptive_avg_pool2d", "mean", "sum")
    ),
    "nothing in evaluation mode": (*DROPOUTS.values(), *IDENTITIES.values()),
}
"""The functions that are followed, by subject."""


class _Recorder(TorchFunctionMode):
    """Turns the calls that one run makes into operations."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.batch, self.device = x.shape[0], x.device
        self.refusal: UnsupportedModule | None = None
        self.ops: list[Op] = []
        self.held: dict[int, Tensor] = {}  # tensors that depend on the image, by their identity
        self.place: dict[int, int] = {}
        self.stale: set[int] = set()  # changed under another name
        self.constants: list[tuple[Tensor, int]] = []  # with the version that was read
        self._append(Input("image", (), tuple(x.shape[1:])), x)

    def graph(self, logits: Any) -> Graph:
        """The graph of what was recorded, once the run is over."""
        if isinstance(logits, Tensor) and id(logits) in self.stale:
            raise self._changed("the result")
        if not isinstance(logits, Tensor) or id(logits) not in self.place or logits.ndim != 2:
            raise UnsupportedModule("the model must return one tensor of logits (B, classes) that it computed itself")
        if logits.shape[1] < 2:
            raise ValueError(
                f"certificates need logits of at least two classes, got {tuple(logits.shape)}; for one logit return "
                "stack([0, logit], 1)"
            )
        if any(_version(constant) != version for constant, version in self.constants):
            raise UnsupportedModule("a constant of the model is changed in place after it was used")
        return Graph(tuple(self.ops[: self.place[id(logits)] + 1]))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except UnsupportedModule as refusal:
            self.refusal = self.refusal or refusal  # a model that catches exceptions does not get away with it
            raise

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.refusal is not None:
            raise self.refusal
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        sources = list({id(t): t for t in tensors if id(t) in self.place}.values())
        title = self._title(func)
        if any(isinstance(t, Valueless) and id(t) not in self.place for t in tensors):
            raise UnsupportedModule(f"{title} reads a tensor that was computed where no function call shows it")
        if any(id(t) in self.stale for t in sources):
            raise self._changed(title)
        if len(sources) == 1 and self._reads_only_form(func, args, tensors):
            plain, named = tree_map(lambda v: v.behind if isinstance(v, Valueless) else v, (args, kwargs))
            return func(*plain, **named)  # a constant
        before = [_version(t) for t in tensors]
        shapes = [tuple(t.shape) for t in sources]
        result = func(*args, **kwargs)
        if not sources:
            return result
        changed = [t for t, version in zip(tensors, before, strict=True) if _version(t) != version]
        if not isinstance(result, Tensor):
            if func not in DESCRIPTIONS and _attribute(func) not in ATTRIBUTES:
                raise UnsupportedModule(f"{title} reads the values of a tensor, or is not known: no bound follows it")
            return result
        if changed and not (changed[0] is result is args[0] and all(t is result for t in changed)):
            raise UnsupportedModule(f"{title} writes into another tensor: no bound follows it")
        if not changed and id(result) in self.place:
            return result  # one of its inputs, as it is
        if result.shape[:1] != (self.batch,) or any(shape[:1] != (self.batch,) for shape in shapes):
            raise UnsupportedModule(f"{title} mixes images of a batch: its output has shape {tuple(result.shape)}")
        if not all(_keeps_precision(t.dtype, result.dtype) for t in sources):
            raise UnsupportedModule(f"{title} computes in {result.dtype}, which is less precise than what it reads")
        op = _Call(self, func, args, kwargs, sources, [shape[1:] for shape in shapes], tuple(result.shape[1:])).op()
        if changed:
            mine = memory(result)
            self.stale.update(key for key, t in self.held.items() if t is not result and memory(t) == mine)
        self._append(op, result)
        return result

    def _reads_only_form(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
        """Whether a call makes a constant in the shape, dtype or device of the one tensor that depends on the image."""
        if sum(1 for t in tensors if id(t) in self.place) != 1 or not args:
            return False
        first = id(args[0]) in self.place
        return func in MADE_LIKE if first else func in FITTED and len(args) > 1 and id(args[1]) in self.place

    def _append(self, op: Op | int, result: Tensor) -> None:
        """Remember what a tensor is: a new operation, or the value of an old one."""
        if isinstance(op, Op):
            self.ops.append(op)
            op = len(self.ops) - 1
        self.held[id(result)], self.place[id(result)] = result, op

    def constant(self, tensor: Tensor) -> None:
        """Remember a tensor that does not depend on the image: it must keep its values."""
        self.constants.append((tensor, _version(tensor)))

    def _module(self) -> tuple[str, str]:
        """Name and type of the innermost module of the model that is running."""
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(owner, nn.Module) and id(owner) in self.names:
                return self.names[id(owner)], type(owner).__name__
            frame = frame.f_back  # type: ignore[assignment]
        return "", "model"

    def _title(self, func: Any) -> str:
        name, kind = self._module()
        called = _attribute(func) or getattr(func, "__name__", str(func))
        return f"{called!r} in module {name!r} ({kind})"

    def _changed(self, title: str) -> UnsupportedModule:
        return UnsupportedModule(
            f"{title}: a tensor is read after it was changed in place (+=, inplace=True) under another name; "
            "work on a copy (.clone())"
        )


class _Call:
    """One call of a function on tensors that depend on the image, and the operation it is."""

    def __init__(
        self,
        recorder: _Recorder,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: list[Tensor],
        before: list[Shape],
        shape: Shape,
    ) -> None:
        self.recorder, self.func, self.sources, self.before, self.shape = recorder, func, sources, tuple(before), shape
        self.title, self.name = recorder._title(func), recorder._module()[0]
        self.inputs = tuple(recorder.place[id(t)] for t in sources)
        self.args, self.kwargs = tree_map(self._constant, (args, kwargs))
        self.reads = sum(1 for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and self._tracked(t))

    def _tracked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(value is t for t in self.sources)

    def _constant(self, value: Any) -> Any:
        """Constants as they are now, without a batch dimension that only repeats them."""
        if not isinstance(value, Tensor) or self._tracked(value):
            return value
        batch = self.recorder.batch
        per_image = value.ndim == len(self.shape) + 1 > 1 and value.shape[0] == batch > 1
        self.recorder.constant(value)
        return value[:1] if per_image and bool((value == value[:1]).all()) else value

    def refuse(self, why: str = "") -> UnsupportedModule:
        return UnsupportedModule(
            f"no bound is known for {self.title}{why and ': ' + why}. Supported: Linear, Conv2d, ReLU, LeakyReLU, "
            "Sigmoid, Tanh, GELU, SiLU, clamp, average and max pooling, BatchNorm (evaluation mode), Flatten, sums, "
            "arithmetic with constants, Dropout, "
            "Identity"
        )

    def bound(self, *names: str, **defaults: Any) -> dict[str, Any]:
        """The arguments by name; an unknown one is refused."""
        every = [*names, *defaults]
        if len(self.args) > len(every) or any(name not in every for name in self.kwargs):
            raise self.refuse(f"unexpected arguments {sorted(self.kwargs)}")
        return {**defaults, **dict(zip(every, self.args, strict=False)), **self.kwargs}

    def op(self) -> Op | int:
        """The operation, or the position of the one whose value is passed on."""
        func, single = self.func, len(self.sources) == 1 and self.reads == 1
        first = self.args[0] if self.args else self.kwargs.get("input")
        if self.kwargs.get("out") is not None:
            raise self.refuse("out=")
        if single and self._tracked(first):
            if func in IDENTITIES or _attribute(func) == "data":
                return self.inputs[0]
            if func in DROPOUTS:
                return self._dropout()
            if func in RESHAPES:
                same = self.shape == self.before[0]
                return self.inputs[0] if same else Reshape(self.name, self.inputs, self.shape, self.before[0])
            if func in RELUS:
                return Activation(self.name, self.inputs, self.shape, 0.0)
            if func in LEAKY_RELUS:
                return self._leaky_relu()
            if func in CURVES:
                return self._curve(CURVES[func])
            if func in CLAMPS:
                return self._clamp(CLAMPS[func])
            if func in MAX_POOLS:
                return self._max_pool()
            if func in POOLS:
                return self._average_pool()
            if func in LINEARS:
                return self._linear()
            if func in CONVOLUTIONS:
                return self._convolution()
            if func in NORMS:
                return self._batch_norm()
        if any(func in table for table in (PLUS, MINUS, FROM, TIMES, OVER)):
            return self._arithmetic()
        if func in JOINS or (single and (func in LINEAR_FUNCTIONS or func in SIGNED)):
            return self._generic(signed=func in SIGNED)
        raise self.refuse()

    # ---- single kinds

    def _dropout(self) -> int:
        settings = self.bound("input", p=0.5, training=True, inplace=False)
        if settings["training"]:
            raise self.refuse("random")
        return self.inputs[0]

    def _leaky_relu(self) -> Op:
        slope = float(self.bound("input", negative_slope=0.01, inplace=False)["negative_slope"])
        if not 0 <= slope <= 1:
            raise self.refuse(f"the negative slope must be in [0, 1], got {slope}")
        return Activation(self.name, self.inputs, self.shape, slope)

    def _curve(self, kind: str) -> Op:
        settings = self.bound("input", inplace=False, approximate="none")
        if settings["approximate"] != "none":
            raise self.refuse("an approximation has other bounds")
        return Curved(self.name, self.inputs, self.shape, kind)

    def _clamp(self, kind: str) -> Op:
        if kind == "relu6":
            self.bound("input", inplace=False)
            ends: tuple[Any, Any] = (0.0, 6.0)
        elif kind == "hardtanh":
            settings = self.bound("input", min_val=-1.0, max_val=1.0, inplace=False)
            ends = settings["min_val"], settings["max_val"]
        else:
            settings = self.bound("input", min=None, max=None)
            ends = settings["min"], settings["max"]
        if any(isinstance(end, Tensor) for end in ends):
            raise self.refuse("the ends must be numbers")
        low, high = -math.inf if ends[0] is None else float(ends[0]), math.inf if ends[1] is None else float(ends[1])
        if not low <= high:
            raise self.refuse(f"the ends must be in order, got {low} and {high}")
        return Curved(self.name, self.inputs, self.shape, "clamp", (low, high))

    def _max_pool(self) -> Op:
        settings = self.bound(
            "input", "kernel_size", stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
        )
        if settings["return_indices"] or len(self.shape) != 3:
            raise self.refuse("only the maxima of images (B, C, H, W)")
        kernel = _pair(settings["kernel_size"])
        stride = kernel if settings["stride"] in (None, [], ()) else _pair(settings["stride"])
        padding, dilation = _pair(settings["padding"]), _pair(settings["dilation"])
        ceil_mode = bool(settings["ceil_mode"])
        return MaxPool(self.name, self.inputs, self.shape, self.before[0], kernel, stride, padding, dilation, ceil_mode)

    def _average_pool(self) -> Op:
        settings = self.bound(
            *("input", "kernel_size"),
            stride=None,
            padding=0,
            ceil_mode=False,
            count_include_pad=True,
            divisor_override=None,
        )
        divisor = settings["divisor_override"]
        if divisor is not None and not divisor > 0:
            raise UnsupportedModule(f"{self.title}: divisor_override must be above 0, got {divisor}")
        kernel, padding = _pair(settings["kernel_size"]), _pair(settings["padding"])
        stride = kernel if settings["stride"] in (None, [], ()) else _pair(settings["stride"])
        counted = settings["count_include_pad"] or padding == (0, 0)
        if settings["ceil_mode"] or not counted or len(self.shape) != 3:
            return self._generic()
        channels, share = self.shape[0], 1.0 / (divisor or kernel[0] * kernel[1])
        mean = torch.full((channels, 1, *kernel), share, dtype=torch.float64, device=self.recorder.device)
        return Conv2d(self.name, self.inputs, self.shape, self.before[0], mean, None, stride, padding, (1, 1), channels)

    def _linear(self) -> Op:
        settings = self.bound("input", "weight", bias=None)
        weight, bias = settings["weight"], settings["bias"]
        if weight.ndim != 2 or (bias is not None and bias.ndim != 1):
            return self._generic()
        return Linear(self.name, self.inputs, self.shape, weight, bias)

    def _convolution(self) -> Op:
        settings = self.bound("input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1)
        if len(self.shape) != 3 or isinstance(settings["padding"], str):
            return self._generic()
        stride, padding, dilation = (_pair(settings[name]) for name in ("stride", "padding", "dilation"))
        weight, bias, groups = settings["weight"], settings["bias"], int(settings["groups"])
        return Conv2d(
            self.name, self.inputs, self.shape, self.before[0], weight, bias, stride, padding, dilation, groups
        )

    def _batch_norm(self) -> Op:
        settings = self.bound(
            *("input", "running_mean", "running_var"),
            weight=None,
            bias=None,
            training=False,
            momentum=0.1,
            eps=1e-5,
        )
        mean, variance = settings["running_mean"], settings["running_var"]
        if settings["training"] or mean is None or variance is None:
            raise UnsupportedModule(f"{self.title} has no running statistics: its output depends on the batch")
        wide = torch.float64
        scale = 1.0 / torch.sqrt(variance.to(wide) + settings["eps"])
        if settings["weight"] is not None:
            scale = settings["weight"].to(wide) * scale
        summed = mean.to(wide) * scale
        shift = -summed if settings["bias"] is None else settings["bias"].to(wide) - summed
        view = (1, -1, *[1] * (len(self.shape) - 1))
        maps = (part.detach().view(view) for part in (scale, shift, summed.abs()))
        return Diagonal(self.name, self.inputs, self.shape, *maps)

    # ---- whole families

    def _arithmetic(self) -> Op:
        func, single = self.func, len(self.sources) == 1 and self.reads == 1
        if self.kwargs.get("rounding_mode") is not None:
            raise self.refuse("rounding")
        if func in OVER and not (single and self._tracked(self.args[0])):
            raise self.refuse("only division by a constant")
        if func in TIMES and not single:
            raise self.refuse("only products with a constant")
        if single and self.shape == self.before[0]:
            return self._diagonal()
        plain = self.kwargs.get("alpha", 1) == 1 and len(self.args) == 2 and self.reads == 2
        if plain and len(self.sources) == 2 and self.before[0] == self.before[1] == self.shape:
            inputs = self.inputs[::-1] if func in FROM else self.inputs
            return Sum(self.name, inputs, self.shape, 1.0 if func in PLUS else -1.0)
        return self._generic(signed=True)

    def _diagonal(self) -> Op:
        zero = torch.zeros((1, *self.shape), dtype=torch.float64, device=self.recorder.device)
        with torch.enable_grad():  # differences would lose the digits of 1 beside a large shift
            shift = self.function()(zero.requires_grad_())
            (scale,) = torch.autograd.grad(shift, zero, torch.ones_like(shift))
        maps = [scale, shift.detach()]
        if len(self.shape) == 3 and all(bool((m == m[..., :1, :1]).all()) for m in maps):
            maps = [m[..., :1, :1] for m in maps]
        return Diagonal(self.name, self.inputs, self.shape, maps[0], maps[1])

    def _generic(self, signed: bool = False) -> Op:
        if self.func in _INDEXED and not all(_basic(i) for i in _listed(self.args[1])):
            raise self.refuse("only numbers and slices as an index")
        function = self.function()
        self._check_affine(function)
        magnitude = None if signed else self.function(absolute=True)
        leaves, shape = tree_flatten((self.args, self.kwargs))
        constants = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor) and not self._tracked(leaf))
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        call = f"{getattr(self.func, '__name__', '')} {shape} {plain}"
        return Generic(self.name, self.inputs, self.shape, self.before, function, magnitude, call, constants)

    def function(self, absolute: bool = False) -> Callable[..., Tensor]:
        """The call as a function of its sources, in their precision, or that with its constants' absolute values."""
        func, args, kwargs = self.func, self.args, self.kwargs
        keys = [id(t) for t in self.sources]
        kept = tree_map(lambda v: _Slot(keys.index(id(v))) if self._tracked(v) else v, (args, kwargs))

        def function(*values: Tensor) -> Tensor:
            def fill(value: Any) -> Any:
                if isinstance(value, _Slot):
                    return values[value.index].clone()  # the function may work in place
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    return value
                return value.to(values[0].dtype).abs() if absolute else value.to(values[0].dtype)

            filled, named = tree_map(fill, kept, is_leaf=lambda v: isinstance(v, _Slot))
            result: Tensor = func(*filled, **named)
            return result

        return function

    @torch.no_grad()
    def _check_affine(self, function: Callable[..., Tensor]) -> None:
        """Refuse a function that mixes images or is not affine, as random inputs show."""
        generator = torch.Generator().manual_seed(0)

        def draw(part: Shape) -> Tensor:
            return torch.randn((2, *part), dtype=torch.float64, generator=generator, device="cpu").to(
                self.recorder.device
            )

        first, second = ([draw(part) for part in self.before] for _ in (0, 1))
        try:
            at, there = function(*first), function(*second)
            alone = torch.cat([function(*(h[k : k + 1] for h in first)) for k in (0, 1)])
            middle = function(*((a + b) / 2 for a, b in zip(first, second, strict=True)))
        except (RuntimeError, ValueError, IndexError):
            raise UnsupportedModule(f"{self.title} mixes images of a batch") from None
        size = 1e-9 * (at.abs().amax() + there.abs().amax()) if at.numel() and there.numel() else 0.0
        if at.shape != alone.shape or at.shape[0] != 2 or not bool(((at - alone).abs() <= size).all()):
            raise UnsupportedModule(f"{self.title} mixes images of a batch")
        if not bool((((at + there) / 2 - middle).abs() <= size).all()):
            raise UnsupportedModule(f"{self.title} is not affine in what it reads")


class _Slot:
    """Where a source enters a call."""

    def __init__(self, index: int) -> None:
        self.index = index


_INDEXED = _known("__getitem__")


def _listed(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _basic(index: Any) -> bool:
    return index is None or index is Ellipsis or (isinstance(index, (int, slice)) and not isinstance(index, bool))


def _attribute(func: Any) -> str | None:
    """The attribute of a tensor that a call reads, if it reads one."""
    owner = getattr(func, "__self__", None)
    read = getattr(func, "__name__", "") == "__get__" and (
        inspect.isgetsetdescriptor(owner) or isinstance(owner, property)
    )
    return getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", None) if read else None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _keeps_precision(before: torch.dtype, after: torch.dtype) -> bool:
    return after.is_floating_point and torch.promote_types(before, after) == after


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        return int(value[0]), int(value[-1])
    return int(value), int(value)


def supported_table() -> str:
    """The rows of the table of supported functions in ``docs/certificates.md``."""
    rows = []
    for subject, names in SUPPORTED.items():
        plain = sorted({name for name in names if not name.startswith("_") and not name.endswith("_")})
        rows.append(f"| {subject} | {', '.join(f'`{name}`' for name in plain)} |")
    return "\n".join(rows)
