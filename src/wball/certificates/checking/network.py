r"""A network as affine maps and bends, read from what PyTorch dispatches when the model runs once.

The model is run on a tensor that carries no numbers; every ``aten`` operation it causes becomes a node. Affine nodes
hold a linear map of each node they read, for the weights as they are stored, and a constant; bends are activations and
max pooling. A map is the operation itself in float64: applied to values, to magnitudes (with the magnitudes of its
constants), and transposed by differentiation. This shares nothing with :mod:`wball.certificates.tracing`, and sees what
runs, whatever called it. Work in place is written without it by ``torch.func.functionalize`` before it is read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from wball.certificates.checking.lines import values_between

UNIT = 2.0**-53
LARGEST = 2**20
"""Numbers that a node may have: rows over them are held in memory."""

MATRIX = 2**18
"""Numbers of a map that is held as a matrix."""

Shape = tuple[int, ...]
Linear = Callable[[Tensor], Tensor]


class Unfollowed(TypeError):
    """The model does something the checker has no rule for. The message names it."""


def gamma(terms: int) -> float:
    """Relative error of a sum of so many products in any order, with room for the evaluation of the bound itself."""
    return 2 * (terms + 4) * UNIT


@dataclass
class Map:
    """A linear map of what node ``source`` holds; ``size`` is the map with the magnitudes of its coefficients."""

    source: int
    shape: Shape  # of the source
    run: Linear
    size: Linear
    _graph: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _matrix: Tensor | None = field(default=None, repr=False)

    def transposed(self, rows: Tensor) -> Tensor:
        """Rows ``(R, numbers of the result)`` over the result as rows ``(R, numbers)`` over the source."""
        if rows.shape[1] * math.prod(self.shape) > MATRIX:
            return self._differentiated(rows)
        return rows @ self.matrix(rows.shape[1])

    def matrix(self, numbers: int) -> Tensor:
        """The map as a matrix ``(numbers of the result, numbers of the source)``."""
        if self._matrix is None:
            with torch.no_grad():
                self._matrix = self._differentiated(torch.eye(numbers, dtype=torch.float64))
        return self._matrix

    def _differentiated(self, rows: Tensor) -> Tensor:
        if self._graph is None:
            with torch.enable_grad():
                zero = torch.zeros(self.shape, dtype=torch.float64, requires_grad=True)
                self._graph = zero, self.run(zero)
        zero, result = self._graph
        (found,) = torch.autograd.grad(
            result,
            zero,
            rows.reshape(-1, *result.shape),
            retain_graph=True,
            is_grads_batched=True,
            create_graph=torch.is_grad_enabled() and rows.requires_grad,
        )
        return found.flatten(1)


@dataclass
class Affine:
    """A sum of linear maps of earlier nodes and a constant. ``terms``: products summed up in a number at most."""

    shape: Shape
    maps: list[Map]
    const: Tensor  # flat
    terms: int


@dataclass
class Bend:
    """A node that is not affine in what it reads.

    ``max(v, leak v)``; the largest number of each of some ``windows``, ``(numbers, k)`` positions in what is read, -1
    for the padding; or a ``curve`` by name, with the ends of a clamp.
    """

    shape: Shape
    before: int
    leak: float = 0.0
    windows: Tensor | None = None
    curve: str = ""
    ends: tuple[float, float] = (-math.inf, math.inf)

    @property
    def straight(self) -> bool:
        """Whether it is ``max(v, leak v)``."""
        return self.windows is None and not self.curve

    def value(self, read: Tensor) -> Tensor:
        """What it puts out, flat, up to rounding."""
        if self.windows is not None:
            return torch.where(self.windows >= 0, read[self.windows.clamp(min=0)], -math.inf).amax(
                1
            )
        if self.curve:
            return values_between(self.curve, self.ends, read, read)[0]
        return F.leaky_relu(read, self.leak)


@dataclass
class Network:
    """Nodes in the order they run; node 0 is the image (``None`` here), the last one holds the logits."""

    shape: Shape
    nodes: list[Affine | Bend | None] = field(default_factory=lambda: [None])

    def shape_of(self, node: int) -> Shape:
        found = self.nodes[node]
        return self.shape if found is None else found.shape

    @property
    def bends(self) -> list[int]:
        return [k for k, node in enumerate(self.nodes) if isinstance(node, Bend)]

    def logits(self, image: Tensor) -> Tensor:
        """What the network answers for one image, flat, in float64."""
        values: list[Tensor] = []
        for node in self.nodes:
            if node is None:
                values.append(image)
            elif isinstance(node, Bend):
                values.append(node.value(values[node.before]))
            else:
                parts = [
                    part.run(values[part.source].reshape(part.shape)).flatten()
                    for part in node.maps
                ]
                values.append(torch.stack([node.const, *parts]).sum(0))
        return values[-1]

    def add(self, node: Affine | Bend) -> Held:
        if math.prod(node.shape) > LARGEST:
            raise Unfollowed(
                f"a layer of {math.prod(node.shape)} numbers, the checker handles up to {LARGEST}"
            )
        self.nodes.append(node)
        return Held(len(self.nodes) - 1, node.shape)

    def affine(
        self, maps: list[Map], terms: int, const: Tensor | None = None, shape: Shape | None = None
    ) -> Held:
        if shape is None:
            shape = tuple(maps[0].run(torch.zeros(maps[0].shape, dtype=torch.float64)).shape)
        flat = (
            torch.zeros(math.prod(shape), dtype=torch.float64)
            if const is None
            else const.expand(shape).flatten()
        )
        return self.add(Affine(shape, maps, flat, terms))


@dataclass(frozen=True)
class Held:
    """A value of the run that depends on the image: the node that holds it."""

    node: int
    shape: Shape

    def map(self, run: Linear, size: Linear | None = None) -> Map:
        return Map(self.node, self.shape, run, size or run)


class Abstract(Tensor):
    """A tensor of the model's run: a shape outside, zeros inside, and the node that holds what it stands for."""

    zeros: Tensor
    network: Network
    held: Held

    @staticmethod
    def __new__(cls, zeros: Tensor, network: Network, held: Held) -> Abstract:
        made: Abstract = Tensor._make_wrapper_subclass(
            cls,
            zeros.shape,
            strides=zeros.stride(),
            storage_offset=zeros.storage_offset(),
            dtype=zeros.dtype,
            device=zeros.device,
        )
        made.zeros, made.network, made.held = zeros, network, held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        first = next(a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Abstract))
        pair = (args, kwargs or {})
        plain, named = tree_map(lambda v: v.zeros if isinstance(v, Abstract) else v, pair)
        result = func(*plain, **named)
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            raise Unfollowed(f"{name} writes into memory")
        given, options = tree_map(lambda v: v.held if isinstance(v, Abstract) else v, pair)
        held = _call(first.network, name, given, options)
        if isinstance(result, tuple):  # only what comes first is followed
            return cls(result[0], first.network, held), *result[1:]
        if not isinstance(result, Tensor):
            raise Unfollowed(f"{name} asks for the values of a tensor")
        if tuple(result.shape) != held.shape:
            raise Unfollowed(
                f"{name} gives shape {tuple(result.shape)}, the checker's rule {held.shape}"
            )
        return cls(result, first.network, held)


class _Circular(TorchFunctionMode):
    """Writes circular padding, which works in place below what can be seen, as slices side by side."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.pad and isinstance(args[0], Tensor):
            pad = args[1] if len(args) > 1 else options["pad"]
            if (args[2] if len(args) > 2 else options.get("mode")) == "circular":
                return _wrap_around(args[0], list(pad))
        return func(*args, **options)


def _wrap_around(x: Tensor, pad: list[int]) -> Tensor:
    for k in range(len(pad) // 2):
        dim, (before, after) = x.ndim - 1 - k, pad[2 * k : 2 * k + 2]
        size = x.shape[dim]
        parts = [x.narrow(dim, size - before, before)] if before > 0 else []
        start, end = max(0, -before), size - max(0, -after)
        parts.append(x.narrow(dim, start, end - start))
        if after > 0:
            parts.append(x.narrow(dim, 0, after))
        x = torch.cat(parts, dim)
    return x


def read(model: nn.Module, x: Tensor) -> Network:
    """The network that ``model`` runs on one image ``(1, ...)``, in evaluation mode."""
    if "torch._dynamo" in sys.modules and isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
    network = Network(tuple(x.shape))
    image = Abstract(torch.zeros_like(x, dtype=dtype), network, Held(0, tuple(x.shape)))
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), _Circular():
            logits = torch.func.functionalize(lambda given: model(given.clone()))(
                image
            )  # it may work in place
    except Unfollowed:
        raise
    except Exception as error:  # a model may fail in any way on a tensor without numbers
        said = (str(error).strip().splitlines() or [""])[0]
        raise Unfollowed(
            f"the model cannot be run without numbers ({type(error).__name__}: {said})"
        ) from error
    if not isinstance(logits, Abstract) or logits.network is not network or logits.ndim != 2:
        raise Unfollowed("the model returns something else than logits that depend on the image")
    network.nodes = network.nodes[: logits.held.node + 1]
    return network


# ---- operations

_PLAIN = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "t",
        "expand",
        "slice",
    ),
    *(
        "select",
        "clone",
        "detach",
        "alias",
        "contiguous",
        "flip",
        "roll",
        "narrow",
        "movedim",
        "lift_fresh",
    ),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle"),
    *("avg_pool2d", "_adaptive_avg_pool2d", "mean", "sum"),
    *(
        "upsample_nearest1d",
        "upsample_nearest2d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
    ),
    *("upsample_linear1d", "upsample_bilinear2d"),
}
"""Linear operations of one tensor whose coefficients are not negative."""

_SIGNED = {"upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"}
"""Linear operations whose coefficients are at most 2 each way in all, whatever they are."""

_PRODUCTS = {"mm", "bmm"}
_CURVES = {"sigmoid", "tanh", "gelu", "silu"}
_NORMS = (
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
)
_RENAMED = {"view": "reshape", "_unsafe_view": "reshape", "lift_fresh": "alias"}


def _wide(value: Any) -> Any:
    if isinstance(value, Held):
        raise Unfollowed("a product of tensors that depend on the image")
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise Unfollowed(f"a constant in {value.dtype}")
        return value.detach().to("cpu", torch.float64)
    return float(value)


def _call(network: Network, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
    given = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Held)]
    form = given[0]
    if name in ("add", "sub", "rsub", "mul", "div"):
        return _arithmetic(network, name, args, kwargs)
    if name in ("cat", "stack"):
        return _join(network, name, args, kwargs)
    if name in ("slice_scatter", "select_scatter", "copy"):
        return _overwritten(network, name, args, kwargs)
    if len(given) != 1:
        raise Unfollowed(f"{name} of more than one tensor that depends on the image")
    if name in _PRODUCTS:
        return _product(network, name, args)
    if name == "addmm":
        if kwargs or isinstance(args[0], Held):
            raise Unfollowed("addmm with other factors")
        return _shifted(network, _product(network, "mm", args[1:]), _wide(args[0]))
    if args[0] is not form:
        raise Unfollowed(f"{name} with the image in another place")
    rest = args[1:]
    if name == "max_pool2d_with_indices":
        return _pool(network, form, *rest, **kwargs)
    if name in _NORMS:
        return _norm(network, name, args)
    if name == "neg":
        return network.affine([form.map(torch.neg, lambda t: t)], 1)
    if name in ("_to_copy", "to"):
        if kwargs.get("dtype") not in (None, torch.float32, torch.float64):
            raise Unfollowed(f"a cast to {kwargs['dtype']}")
        return form
    if (
        name in ("relu", "leaky_relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "relu6")
        or name in _CURVES
    ):
        return _activation(network, name, form, rest, kwargs)
    if name == "convolution":
        return _convolution(network, form, *rest)
    if name == "constant_pad_nd":
        function: Any = torch.ops.aten.constant_pad_nd
        value = float(rest[1]) if len(rest) > 1 else 0.0
        fill = function(torch.zeros(form.shape, dtype=torch.float64), rest[0], value)
        return network.affine([form.map(lambda t: function(t, rest[0]))], 1, fill)
    if name in ("new_empty", "empty_like"):
        raise Unfollowed("memory that nobody wrote to")
    if name in _PLAIN or name in _SIGNED:
        return _plain(network, name, form, rest, kwargs)
    raise Unfollowed(f"{name} (no rule)")


def _plain(
    network: Network, name: str, form: Held, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Held:
    if name == "avg_pool2d" and len(rest) > 5 and rest[5] is not None and rest[5] <= 0:
        raise Unfollowed("average pooling with a divisor that is not positive")
    if any(
        isinstance(v, torch.dtype) and v not in (torch.float32, torch.float64)
        for v in kwargs.values()
    ):
        raise Unfollowed(f"{name} in another dtype")
    options = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
    operation = getattr(torch.ops.aten, _RENAMED.get(name, name))

    def run(t: Tensor) -> Tensor:
        result: Tensor = operation(t, *rest, **options)
        return result

    numbers = max(math.prod(form.shape), run(torch.zeros(form.shape, dtype=torch.float64)).numel())
    if name not in _SIGNED:
        return network.affine([form.map(run)], numbers)

    def size(t: Tensor) -> Tensor:
        """Coefficients of a bicubic kernel add up to 1, and to less than 2 in magnitude, in each of two directions."""
        return 4 * t.amax((-2, -1), keepdim=True).expand(run(t).shape)

    return network.affine([form.map(run, size)], numbers)


def _activation(
    network: Network, name: str, form: Held, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Held:
    if name == "relu":
        return network.add(Bend(form.shape, form.node))
    if name == "leaky_relu":
        leak = float(rest[0]) if rest else 0.01
        if not 0 <= leak <= 1:
            raise Unfollowed(f"a negative slope of {leak}")
        return network.add(Bend(form.shape, form.node, leak))
    if name in _CURVES:
        if kwargs.get("approximate", "none") != "none":
            raise Unfollowed(f"{name} with an approximation")
        return network.add(Bend(form.shape, form.node, curve=name))
    low, high = {"hardtanh": (-1.0, 1.0), "relu6": (0.0, 6.0)}.get(name, (None, None))
    if name == "clamp_max":
        high = rest[0] if rest else kwargs["max"]
    else:
        low = rest[0] if rest else kwargs.get("min", low)
        high = rest[1] if len(rest) > 1 else kwargs.get("max", high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        raise Unfollowed("a clamp whose ends are tensors")
    ends = -math.inf if low is None else float(low), math.inf if high is None else float(high)
    if not ends[0] <= ends[1]:
        raise Unfollowed(f"a clamp with its ends the wrong way round: {ends}")
    return network.add(Bend(form.shape, form.node, curve="clamp", ends=ends))


def _pool(
    network: Network,
    form: Held,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Held:
    """Windows by pooling the positions themselves: each window is what unfolding the padded map gives."""
    k, s, p, d = (_pair(v) for v in (kernel, stride or kernel, padding, dilation))
    channels, height, width = form.shape[-3:]
    place = torch.arange(channels * height * width, dtype=torch.float64).reshape(
        1, channels, height, width
    )
    like = F.max_pool2d(place, k, s, p, d, ceil_mode)
    rows, columns = like.shape[-2:]
    need = [(n - 1) * s[i] + d[i] * (k[i] - 1) + 1 for i, n in enumerate((rows, columns))]
    after = [max(0, need[i] - p[i] - side) for i, side in enumerate((height, width))]
    padded = F.pad(place, (p[1], after[1], p[0], after[0]), value=-1.0)
    windows = torch.stack(
        [
            padded[
                ...,
                u * d[0] : u * d[0] + (rows - 1) * s[0] + 1 : s[0],
                v * d[1] : v * d[1] + (columns - 1) * s[1] + 1 : s[1],
            ]
            for u in range(k[0])
            for v in range(k[1])
        ],
        -1,
    )
    windows = windows.reshape(-1, k[0] * k[1]).long()
    return network.add(
        Bend((*form.shape[:-3], channels, rows, columns), form.node, windows=windows)
    )


def _pair(value: Any) -> tuple[int, int]:
    return (
        (int(value[0]), int(value[-1]))
        if isinstance(value, (list, tuple))
        else (int(value), int(value))
    )


def _product(network: Network, name: str, args: tuple[Any, ...]) -> Held:
    operation, first = getattr(torch.ops.aten, name), isinstance(args[0], Held)
    form, matrix = (args[0], _wide(args[1])) if first else (args[1], _wide(args[0]))

    def run(t: Tensor) -> Tensor:
        result: Tensor = operation(t, matrix) if first else operation(matrix, t)
        return result

    def size(t: Tensor) -> Tensor:
        result: Tensor = operation(t, matrix.abs()) if first else operation(matrix.abs(), t)
        return result

    return network.affine([form.map(run, size)], max(matrix.shape))


def _convolution(
    network: Network,
    form: Held,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Held:
    wide, operation = _wide(weight), torch.ops.aten.convolution
    settings = (None, stride, padding, dilation, transposed, output_padding, groups)
    maps = [
        form.map(
            lambda t: operation(t, wide, *settings), lambda t: operation(t, wide.abs(), *settings)
        )
    ]
    const = None if bias is None else _wide(bias).reshape(-1, *[1] * (weight.ndim - 2))
    return network.affine(maps, math.prod(weight.shape), const)


def _norm(network: Network, name: str, args: tuple[Any, ...]) -> Held:
    if name in ("native_batch_norm", "cudnn_batch_norm"):
        form, weight, bias, mean, variance, training, _, eps = args
    else:
        form, weight, bias, mean, variance, _, eps = args
        training = False
    if training or mean is None or variance is None:
        raise Unfollowed("batch normalisation by the statistics of the batch")
    view = (-1, *[1] * (len(form.shape) - 2))
    scale = (_wide(variance) + eps).rsqrt().view(view)
    if weight is not None:
        scale = scale * _wide(weight).view(view)
    centred = _shifted(network, form, -_wide(mean).view(view))
    scaled = network.affine([centred.map(lambda t: t * scale, lambda t: t * scale.abs())], 8)
    return scaled if bias is None else _shifted(network, scaled, _wide(bias).view(view))


def _shifted(network: Network, form: Held, by: Tensor) -> Held:
    shape = tuple(torch.broadcast_shapes(form.shape, by.shape))
    return network.affine(
        [_scaled(form, 1.0, shape)], 2 + math.prod(shape) // math.prod(form.shape), by, shape
    )


def _arithmetic(network: Network, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
    first, second = args[0], args[1]
    alpha = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1.0))
    if name == "rsub":
        first, second, name = second, first, "sub"
        if alpha != 1:
            raise Unfollowed("rsub with a factor")
    if set(kwargs) - {"alpha"}:
        raise Unfollowed(f"{name} with {sorted(kwargs)}")
    if name in ("mul", "div"):
        if isinstance(first, Held) == isinstance(second, Held):
            raise Unfollowed("a product of two tensors that depend on the image")
        form, factor = (first, second) if isinstance(first, Held) else (second, first)
        if name == "div" and not isinstance(first, Held):
            raise Unfollowed("division by the image")
        by = torch.as_tensor(_wide(factor), dtype=torch.float64)
        if name == "div":
            by = 1.0 / by
        return network.affine(
            [form.map(lambda t: t * by, lambda t: t * by.abs())], math.prod(by.shape) + 3
        )
    sign = -alpha if name == "sub" else alpha
    maps, const = [], None
    held = [part for part in (first, second) if isinstance(part, Held)]
    shapes = [part.shape for part in (first, second) if isinstance(part, (Held, Tensor))]
    shape = tuple(torch.broadcast_shapes(*shapes))
    for part, factor in ((first, 1.0), (second, sign)):
        if isinstance(part, Held):
            maps.append(_scaled(part, factor, shape))
        else:
            const = torch.as_tensor(_wide(part), dtype=torch.float64) * factor
    return network.affine(
        maps, 2 + max(math.prod(shape) // max(1, math.prod(p.shape)) for p in held), const, shape
    )


def _scaled(form: Held, factor: float, shape: Shape) -> Map:
    return form.map(lambda t: (t * factor).expand(shape), lambda t: (t * abs(factor)).expand(shape))


def _join(network: Network, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
    parts, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    operation = torch.cat if name == "cat" else torch.stack
    nothing = [torch.zeros(tuple(part.shape), dtype=torch.float64) for part in parts]

    def place(k: int) -> Linear:
        return lambda t: operation([t if i == k else zero for i, zero in enumerate(nothing)], dim)

    maps = [part.map(place(k)) for k, part in enumerate(parts) if isinstance(part, Held)]
    const = operation(
        [n if isinstance(p, Held) else _wide(p) for p, n in zip(parts, nothing, strict=True)], dim
    )
    return network.affine(maps, 2, const)


def _overwritten(
    network: Network, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Held:
    """A part of a tensor replaced by another one, or the whole of it."""
    base, source = args[0], args[1]
    shape = tuple(base.shape)
    if name == "copy":
        if not isinstance(source, Held):
            raise Unfollowed("a constant written over what depends on the image")
        return network.affine(
            [source.map(lambda t: t.expand(shape))], math.prod(shape), shape=shape
        )
    operation, zero = getattr(torch.ops.aten, name), torch.zeros(shape, dtype=torch.float64)
    none = torch.zeros(tuple(source.shape), dtype=torch.float64)
    maps, const = [], zero
    if isinstance(base, Held):
        maps.append(base.map(lambda t: operation(t, none, *args[2:], **kwargs)))
    else:
        const = operation(_wide(base), none, *args[2:], **kwargs)
    if isinstance(source, Held):
        maps.append(source.map(lambda t: operation(zero, t, *args[2:], **kwargs)))
    else:
        const = const + operation(zero, _wide(source), *args[2:], **kwargs)
    return network.affine(maps, 2, const, shape)
