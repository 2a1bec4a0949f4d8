"""The functions of PyTorch that certificates follow, and one call of them as an operation of the
graph: what it is, and whether its arguments are understood."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map

from wball.certificates.graph import (
    Activation,
    Conv2d,
    Curved,
    Diagonal,
    Generic,
    Linear,
    Op,
    Reshape,
    Shape,
    Sum,
)
from wball.certificates.trust import UnsupportedModule, words


def known(names: str) -> dict[Any, str]:
    """The functions and methods of PyTorch that go by these names, separated by blanks."""
    homes = (torch, F, Tensor, torch._C._nn)
    return {
        found: name
        for name in names.split()
        for home in homes
        if callable(found := getattr(home, name, None))
    }


IDENTITIES = known("contiguous clone detach float double to cpu cuda requires_grad_ alias")
DROPOUTS = known("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout")
RESHAPES = known("flatten reshape view squeeze unsqueeze unflatten view_as reshape_as")
RELUS = known("relu relu_")
LEAKY_RELUS = known("leaky_relu leaky_relu_")
CURVES = known("sigmoid tanh silu gelu")
CLAMPS = known("clamp clip hardtanh relu6")
MAX_POOLS = known("max_pool2d")
PLUS = known("add add_ __add__ __radd__ __iadd__")
MINUS = known("sub sub_ subtract subtract_ __sub__ __isub__")
FROM = known("rsub __rsub__")
TIMES = known("mul mul_ multiply multiply_ __mul__ __rmul__ __imul__ neg neg_ __neg__")
OVER = known("div div_ divide true_divide __truediv__ __itruediv__")
ARITHMETIC = (PLUS, MINUS, FROM, TIMES, OVER)
POOLS = known("avg_pool2d")
LINEARS = known("linear")
CONVOLUTIONS = known("conv2d")
NORMS: dict[Any, str] = {F.batch_norm: "batch_norm"}
JOINS = known("cat concat stack")
SIGNED = known("interpolate upsample")
"""Linear functions whose coefficients may be negative on their own account."""

LINEAR_FUNCTIONS = known(
    "adaptive_avg_pool2d pad conv1d conv_transpose2d mean sum matmul mm __matmul__ __rmatmul__ "
    "permute transpose movedim swapaxes pixel_shuffle pixel_unshuffle channel_shuffle "
    "native_channel_shuffle flip roll narrow select __getitem__"
)
DESCRIPTIONS = known("size dim ndimension __len__ numel is_floating_point stride is_contiguous")
ATTRIBUTES = words("shape ndim dtype device is_cuda requires_grad layout is_sparse is_quantized")
"""What may be asked of a tensor without reading its values."""

FITTED = known("to type_as expand_as")
MADE_LIKE = known("zeros_like ones_like full_like new_zeros new_ones new_full new_tensor")
"""Functions that take the form of a tensor for a constant: of their second argument, of their
first."""


def attribute(func: Any) -> str | None:
    """The tensor attribute that a call reads, if it reads one."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") != "__get__":
        return None
    known = isinstance(owner, property) or inspect.isgetsetdescriptor(owner)
    return getattr(getattr(owner, "fget", owner), "__name__", None) if known else None


class Source(NamedTuple):
    """A tensor that depends on the image: its operation, and its shape before the call."""

    tensor: Tensor
    position: int
    shape: Shape


class Call:
    """One call of a function on tensors that depend on the image, and the operation it corresponds
    to.

    Args:
        func, args, kwargs: what is called.
        sources: the arguments that depend on the image.
        shape: the shape of the result, without the batch.
        name: the module that makes the call.
        title: the call in words.
        ops: the graph so far. Max pooling and clamps add ReLUs to it.

    Attributes:
        constants: tensors among the arguments that do not depend on the image.
        about: name, inputs and shape of the operation.
    """

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: list[Source],
        shape: Shape,
        name: str,
        title: str,
        ops: list[Op],
    ) -> None:
        self.func, self.shape, self.name, self.title, self.ops = func, shape, name, title, ops
        self.sources = [source.tensor for source in sources]
        self.inputs = tuple(source.position for source in sources)
        self.before = tuple(source.shape for source in sources)
        self.about = name, self.inputs, shape
        self.device, self.constants = self.sources[0].device, list[Tensor]()
        self.args, self.kwargs = tree_map(self._constant, (args, kwargs))
        self.reads = sum(1 for t in tree_flatten((args, kwargs))[0] if self._tracked(t))

    def _add(self, op: Op) -> int:
        """Append an operation to the graph before that of the call. Returns its position."""
        self.ops.append(op)
        return len(self.ops) - 1

    def _tracked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(value is t for t in self.sources)

    def _constant(self, value: Any) -> Any:
        """The current value of a constant, without a batch dimension that only repeats it."""
        if not isinstance(value, Tensor) or self._tracked(value):
            return value
        batch = self.sources[0].shape[0]
        joins = self.func in JOINS or any(self.func in table for table in ARITHMETIC)
        per_image = joins and value.ndim == len(self.shape) + 1 > 1 and value.shape[0] == batch > 1
        self.constants.append(value)
        return value[:1] if per_image and bool((value == value[:1]).all()) else value

    def refuse(self, why: str = "") -> UnsupportedModule:
        return UnsupportedModule(
            f"no bound is known for {self.title}{why and ': ' + why}. Supported: Linear, Conv2d, "
            "ReLU, LeakyReLU, Sigmoid, Tanh, GELU, SiLU, clamp, average and max pooling, BatchNorm "
            "(evaluation mode), Flatten, sums, arithmetic with constants, Dropout, Identity"
        )

    def bound(self, *names: str, **defaults: Any) -> dict[str, Any]:
        """The arguments by name. An unknown argument is refused."""
        every = [*names, *defaults]
        if len(self.args) > len(every) or any(name not in every for name in self.kwargs):
            raise self.refuse(f"unexpected arguments {sorted(self.kwargs)}")
        return {**defaults, **dict(zip(every, self.args, strict=False)), **self.kwargs}

    def op(self) -> Op | int:
        """The operation, or the position of an earlier one whose value is passed through."""
        func, single = self.func, len(self.sources) == 1 and self.reads == 1
        first = self.args[0] if self.args else self.kwargs.get("input")
        if self.kwargs.get("out") is not None:
            raise self.refuse("out=")
        if single and self._tracked(first):
            if func in IDENTITIES or attribute(func) == "data":
                return self.inputs[0]
            for table, read in _READERS:
                if func in table:
                    return read(self)
        if any(func in table for table in ARITHMETIC):
            return self._arithmetic()
        if func in JOINS or (single and (func in LINEAR_FUNCTIONS or func in SIGNED)):
            return self._generic(signed=func in SIGNED)
        raise self.refuse()

    # ---- single kinds

    def _reshape(self) -> Op | int:
        same = self.shape == self.before[0]
        return self.inputs[0] if same else Reshape(*self.about, self.before[0])

    def _relu(self) -> Op:
        return Activation(*self.about, 0.0)

    def _dropout(self) -> int:
        if self.bound("input", p=0.5, training=True, inplace=False)["training"]:
            raise self.refuse("random")
        return self.inputs[0]

    def _leaky_relu(self) -> Op:
        slope = float(self.bound("input", negative_slope=0.01, inplace=False)["negative_slope"])
        if not 0 <= slope <= 1:
            raise self.refuse(f"the negative slope must be in [0, 1], got {slope}")
        return Activation(*self.about, slope)

    def _curve(self) -> Op:
        if self.bound("input", inplace=False, approximate="none")["approximate"] != "none":
            raise self.refuse("an approximation has other bounds")
        return Curved(*self.about, CURVES[self.func])

    def _clamp(self) -> Op | int:
        """``lo + (v - lo)^+ - (v - hi)^+``, because branch and bound splits ReLUs."""
        kind = CLAMPS[self.func]
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
        low, high = (
            -math.inf if ends[0] is None else float(ends[0]),
            math.inf if ends[1] is None else float(ends[1]),
        )
        if not low <= high:
            raise self.refuse(f"the ends must be in order, got {low} and {high}")
        size = (1, self.shape[0], *[1] * (len(self.shape) - 1))
        ones = torch.ones(size, dtype=torch.float64, device=self.device)

        def shifted(source: int, by: float) -> Op:
            return Diagonal(self.name, (source,), self.shape, ones, by * ones)

        def above(end: float) -> Op:
            source = self._add(shifted(self.inputs[0], -end))
            return Activation(self.name, (source,), self.shape, 0.0)

        if math.isinf(high):
            return self.inputs[0] if math.isinf(low) else shifted(self._add(above(low)), low)
        clipped = self._add(above(high))
        if math.isinf(low):
            return Sum(self.name, (self.inputs[0], clipped), self.shape, -1.0)
        both = Sum(self.name, (self._add(above(low)), clipped), self.shape, -1.0)
        return shifted(self._add(both), low)

    def _max_pool(self) -> Op | int:
        """A tournament of pairs, ``max(a, b) = b + (a - b)^+``."""
        settings = self.bound(
            "input",
            "kernel_size",
            stride=None,
            padding=0,
            dilation=1,
            ceil_mode=False,
            return_indices=False,
        )
        if settings["return_indices"] or len(self.shape) != 3:
            raise self.refuse("only the maxima of images (B, C, H, W)")
        kernel = _pair(settings["kernel_size"])
        stride = _pair(settings["stride"] or kernel)
        padding, dilation = _pair(settings["padding"]), _pair(settings["dilation"])
        (channels, *size), taps, source = self.before[0], math.prod(kernel), self.inputs[0]
        reach = [
            padding[k]
            + size[k]
            - (self.shape[1 + k] - 1) * stride[k]
            - dilation[k] * (kernel[k] - 1)
            for k in (0, 1)
        ]  # rows and columns from the start of the last window's last tap to the end of the map
        beyond = [max(0, 1 - end) for end in reach]
        if any((*padding, *beyond)):
            if dilation != (1, 1):
                raise self.refuse("padding together with dilation")
            around = (padding[1], beyond[1], padding[0], beyond[0])

            def repeat_edges(values: Tensor) -> Tensor:
                """Pixels that a window contains already do not change its maximum."""
                return F.pad(values, around, mode="replicate")

            size = [padding[k] + size[k] + beyond[k] for k in (0, 1)]
            call = f"repeat_edges {around}"
            shape, before = (channels, *size), self.before[:1]
            pad = Generic(self.name, (source,), shape, before, repeat_edges, repeat_edges, call, ())
            source = self._add(pad)

        def read(values: dict[int, float]) -> Op:
            weight = torch.zeros((channels, 1, taps), dtype=torch.float64, device=self.device)
            for tap, value in values.items():
                weight[:, :, tap] = value
            weight = weight.reshape(channels, 1, *kernel)
            before = (channels, *size)
            settings = (before, weight, None, stride, (0, 0), dilation, channels)
            return Conv2d(self.name, (source,), self.shape, *settings)

        def winner(second: int, difference: Op) -> int:
            ahead = Activation(self.name, (self._add(difference),), self.shape, 0.0)
            return self._add(Sum(self.name, (second, self._add(ahead)), self.shape, 1.0))

        players = [
            winner(self._add(read({tap + 1: 1.0})), read({tap: 1.0, tap + 1: -1.0}))
            for tap in range(0, taps - 1, 2)
        ]
        if taps % 2:
            players.append(self._add(read({taps - 1: 1.0})))
        while len(players) > 1:
            first, second, *rest = players
            difference = Sum(self.name, (first, second), self.shape, -1.0)
            players = [*rest, winner(second, difference)]
        return players[0]

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
            raise self.refuse(f"divisor_override must be above 0, got {divisor}")
        kernel, padding = _pair(settings["kernel_size"]), _pair(settings["padding"])
        stride = _pair(settings["stride"] or kernel)
        counted = settings["count_include_pad"] or padding == (0, 0)
        if settings["ceil_mode"] or not counted or len(self.shape) != 3:
            return self._generic()
        channels, share = self.shape[0], 1.0 / (divisor or math.prod(kernel))
        mean = torch.full((channels, 1, *kernel), share, dtype=torch.float64, device=self.device)
        return Conv2d(
            *self.about,
            self.before[0],
            mean,
            None,
            stride,
            padding,
            (1, 1),
            channels,
        )

    def _linear(self) -> Op:
        settings = self.bound("input", "weight", bias=None)
        weight, bias = settings["weight"], settings["bias"]
        if weight.ndim != 2 or (bias is not None and bias.ndim != 1):
            return self._generic()
        return Linear(*self.about, weight, bias)

    def _convolution(self) -> Op:
        settings = self.bound(
            "input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1
        )
        if len(self.shape) != 3 or isinstance(settings["padding"], str):
            return self._generic()
        stride, padding, dilation = (
            _pair(settings[name]) for name in ("stride", "padding", "dilation")
        )
        weight, bias, groups = settings["weight"], settings["bias"], int(settings["groups"])
        return Conv2d(
            *self.about,
            self.before[0],
            weight,
            bias,
            stride,
            padding,
            dilation,
            groups,
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
            raise UnsupportedModule(
                f"{self.title} has no running statistics: its output depends on the batch"
            )
        wide = torch.float64
        scale = 1.0 / torch.sqrt(variance.to(wide) + settings["eps"])
        if settings["weight"] is not None:
            scale = settings["weight"].to(wide) * scale
        summed = mean.to(wide) * scale
        shift = -summed if settings["bias"] is None else settings["bias"].to(wide) - summed
        view = (1, -1, *[1] * (len(self.shape) - 1))
        maps = (part.detach().view(view) for part in (scale, shift, summed.abs()))
        return Diagonal(*self.about, *maps)

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
        zero = torch.zeros((1, *self.shape), dtype=torch.float64, device=self.device)
        with torch.enable_grad():  # differences would lose the digits of 1 beside a large shift
            shift = self.function()(zero.requires_grad_())
            (scale,) = torch.autograd.grad(shift, zero, torch.ones_like(shift))
        maps = [scale, shift.detach()]
        if len(self.shape) == 3 and all(bool((m == m[..., :1, :1]).all()) for m in maps):
            maps = [m[..., :1, :1] for m in maps]
        return Diagonal(*self.about, *maps)

    def _generic(self, signed: bool = False) -> Op:
        if LINEAR_FUNCTIONS.get(self.func) == "__getitem__" and not all(
            _basic(i) for i in _listed(self.args[1])
        ):
            raise self.refuse("only numbers and slices as an index")
        function = self.function()
        self._check_affine(function)
        magnitude = None if signed else self.function(absolute=True)
        leaves, shape = tree_flatten((self.args, self.kwargs))
        constants = tuple(
            leaf for leaf in leaves if isinstance(leaf, Tensor) and not self._tracked(leaf)
        )
        plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        call = f"{getattr(self.func, '__name__', '')} {shape} {plain}"
        return Generic(*self.about, self.before, function, magnitude, call, constants)

    def function(self, absolute: bool = False) -> Callable[..., Tensor]:
        """The call as a function of its sources, in their precision; with ``absolute``, the same
        with the absolute values of its constants."""
        func, args, kwargs = self.func, self.args, self.kwargs
        keys = [id(t) for t in self.sources]
        kept = tree_map(
            lambda v: _Slot(keys.index(id(v))) if self._tracked(v) else v, (args, kwargs)
        )

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
        """Refuse a function that mixes images or is not affine, tested on random inputs."""
        generator = torch.Generator().manual_seed(0)

        def draw(part: Shape) -> Tensor:
            return torch.randn(
                (2, *part), dtype=torch.float64, generator=generator, device="cpu"
            ).to(self.device)

        first, second = ([draw(part) for part in self.before] for _ in (0, 1))
        try:
            at, there = function(*first), function(*second)
            alone = torch.cat([function(*(h[k : k + 1] for h in first)) for k in (0, 1)])
            middle = function(*((a + b) / 2 for a, b in zip(first, second, strict=True)))
        except (RuntimeError, ValueError, IndexError):
            raise UnsupportedModule(f"{self.title} mixes images of a batch") from None
        size = 1e-9 * (at.abs().amax() + there.abs().amax()) if at.numel() else 0.0
        if (
            at.shape != alone.shape
            or at.shape[0] != 2
            or not bool(((at - alone).abs() <= size).all())
        ):
            raise UnsupportedModule(f"{self.title} mixes images of a batch")
        if not bool((((at + there) / 2 - middle).abs() <= size).all()):
            raise UnsupportedModule(f"{self.title} is not affine in what it reads")


_READERS: tuple[tuple[dict[Any, str], Callable[[Call], Op | int]], ...] = (
    (DROPOUTS, Call._dropout),
    (RESHAPES, Call._reshape),
    (RELUS, Call._relu),
    (LEAKY_RELUS, Call._leaky_relu),
    (CURVES, Call._curve),
    (CLAMPS, Call._clamp),
    (MAX_POOLS, Call._max_pool),
    (POOLS, Call._average_pool),
    (LINEARS, Call._linear),
    (CONVOLUTIONS, Call._convolution),
    (NORMS, Call._batch_norm),
)
"""Functions of one argument that depends on the image, and the method that reads the other
arguments."""


class _Slot:
    """The argument position of a source in a call."""

    def __init__(self, index: int) -> None:
        self.index = index


def _listed(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _basic(index: Any) -> bool:
    return index is None or index is Ellipsis or type(index) in (int, slice)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, (tuple, list)):
        return int(value[0]), int(value[-1])
    return int(value), int(value)
