r"""A network as affine maps between its activations, with the rounding error of every coefficient.

The model itself is run once, on a tensor that carries instead of numbers what its numbers are: affine functions of the
*sources*, the image (source 0) and the outputs of the activations before. Each coefficient is a float64 with a radius
that contains the exact one, for the weights as they are stored. What PyTorch dispatches is all that is interpreted
(``aten`` operations), so this shares nothing with :mod:`wball.certificates.tracing`, and sees what runs, whatever
called it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

UNIT = 2.0**-53
LARGEST = 8192
"""Numbers that a source may have: the maps between sources are dense matrices."""


class Unfollowed(TypeError):
    """The model does something the checker has no rule for. The message names it."""


def gamma(terms: int) -> float:
    """Relative error of a sum of so many products in any order, with room for the evaluation of the bound itself."""
    return 2 * (terms + 4) * UNIT


@dataclass
class Form:
    """An affine function of the sources: ``mid`` and ``rad`` are ``(numbers of the source, *shape)``."""

    shape: tuple[int, ...]
    mid: dict[int, Tensor]
    rad: dict[int, Tensor]
    const: Tensor
    slack: Tensor

    def apply(self, linear: Callable[[Tensor], Tensor], size: Callable[[Tensor], Tensor], terms: int) -> Form:
        """A linear map of it; ``size`` is the map with the absolute values of its coefficients."""
        error = gamma(terms)
        mid, rad = {}, {}
        for source, values in self.mid.items():
            mid[source] = torch.vmap(linear)(values)
            rad[source] = torch.vmap(size)(self.rad[source] * (1 + error) + error * values.abs())
        const = linear(self.const)
        slack = size(self.slack * (1 + error) + error * self.const.abs())
        return Form(tuple(const.shape), mid, rad, const, slack)

    def shifted(self, by: Tensor) -> Form:
        const = self.const + by
        slack = self.slack * (1 + 4 * UNIT) + 2 * UNIT * (const.abs() + by.abs())
        return Form(self.shape, self.mid, self.rad, const, slack)

    def plus(self, other: Form) -> Form:
        mid, rad = dict(self.mid), dict(self.rad)
        for source, values in other.mid.items():
            if source in mid:
                total = mid[source] + values
                rad[source] = (rad[source] + other.rad[source]) * (1 + 4 * UNIT) + 2 * UNIT * total.abs()
                mid[source] = total
            else:
                mid[source], rad[source] = values, other.rad[source]
        joined = Form(self.shape, mid, rad, self.const, self.slack + other.slack)
        return joined.shifted(other.const)


@dataclass
class Bend:
    """A source that is not affine in what it reads: ``max(v, leak v)``, or the largest number of each window."""

    before: Form
    leak: float = 0.0
    windows: Tensor | None = None  # (numbers, k): positions in what is read, -1 for the padding


@dataclass
class Network:
    """The activations in the order they run, as sources 1, 2, ..., and the logits."""

    bends: list[Bend] = field(default_factory=list)
    logits: Form | None = None


@dataclass(frozen=True)
class Held:
    """A value of the run that depends on the image."""

    step: int


@dataclass
class Tape:
    """What a run did: operations with their arguments, values that depend on the image by the step that made them."""

    steps: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class Abstract(Tensor):
    """A tensor of the model's run: a shape outside, zeros inside, and the step that made it."""

    zeros: Tensor
    tape: Tape
    step: int
    shared: list[int]  # how many tensors share its memory

    @staticmethod
    def __new__(cls, zeros: Tensor, tape: Tape, step: int, shared: list[int] | None = None) -> Abstract:
        made: Abstract = Tensor._make_wrapper_subclass(
            cls,
            zeros.shape,
            strides=zeros.stride(),
            storage_offset=zeros.storage_offset(),
            dtype=zeros.dtype,
            device=zeros.device,
        )
        made.zeros, made.tape, made.step, made.shared = zeros, tape, step, shared if shared is not None else [0]
        made.shared[0] += 1
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        first = next(a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Abstract))
        tape, pair = first.tape, (args, kwargs or {})
        plain, named = tree_map(lambda v: v.zeros if isinstance(v, Abstract) else v, pair)
        result = func(*plain, **named)
        held, options = tree_map(lambda v: Held(v.step) if isinstance(v, Abstract) else v, pair)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if writes and (name not in _IN_PLACE or args[0] is not first or first.shared[0] != 1):
            raise Unfollowed(f"{name} writes into memory that is shared")
        tape.steps.append((name.removesuffix("_") if writes else name, held, options))
        step = len(tape.steps)
        if writes:
            first.step = step
            return first
        if isinstance(result, tuple):  # only what comes first is followed
            return cls(result[0], tape, step), *result[1:]
        if not isinstance(result, Tensor):
            raise Unfollowed(f"{name} asks for the values of a tensor")
        return cls(result, tape, step, first.shared if func.is_view else None)


def read(model: nn.Module, x: Tensor) -> Network:
    """The network that ``model`` runs on one image ``(1, ...)``, in evaluation mode."""
    size, wide = x.numel(), torch.float64
    if size > LARGEST:
        raise Unfollowed(f"the image has {size} numbers, the checker handles up to {LARGEST}")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
    tape = Tape()
    with torch.no_grad():
        logits = model(Abstract(torch.zeros_like(x, dtype=dtype), tape, 0))
    if not isinstance(logits, Abstract) or logits.tape is not tape:
        raise Unfollowed("the model returns something else than a tensor that depends on the image")
    network = Network()
    eye = torch.eye(size, dtype=wide).reshape(size, *x.shape)
    none = torch.zeros(x.shape, dtype=wide)
    forms = [Form(tuple(x.shape), {0: eye}, {0: torch.zeros_like(eye)}, none, none)]
    for name, args, kwargs in tape.steps[: logits.step]:
        given, named = tree_map(lambda v: forms[v.step] if isinstance(v, Held) else v, (args, kwargs))
        forms.append(_call(name, given, named, network))
    network.logits = forms[logits.step]
    return network


# ---- operations

_SAME_SIGN = {
    *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand", "slice"),
    *("select", "clone", "detach", "alias", "contiguous", "reflection_pad2d", "replication_pad2d", "avg_pool2d"),
    *("_adaptive_avg_pool2d", "mean", "sum", "upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle"),
    *("pixel_unshuffle", "flip", "roll", "narrow", "channel_shuffle", "native_channel_shuffle", "movedim"),
}
"""Linear operations of one tensor whose coefficients are not negative."""

_IN_PLACE = ("relu_", "leaky_relu_", "add_", "sub_", "mul_", "div_", "neg_")
_NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update")


def _wide(value: Any) -> Any:
    if isinstance(value, Form):
        raise Unfollowed("a product of tensors that depend on the image")
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise Unfollowed(f"a constant in {value.dtype}")
        return value.detach().to("cpu", torch.float64)
    return float(value)


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], network: Network) -> Form:
    given = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Form)]
    form = given[0]
    numbers = math.prod(form.shape)
    if name == "max_pool2d_with_indices":
        return _pool(network, *args, **kwargs)
    if name in _NORMS:
        return _norm(name, args)
    if name in ("add", "sub", "rsub", "mul", "div"):
        return _arithmetic(name, args, kwargs)
    if name == "neg":
        return form.apply(lambda t: -t, lambda t: t, 1)
    if name in ("cat", "stack"):
        return _join(name, args, kwargs)
    if len(given) != 1 or not (args and args[0] is given[0]) and name != "addmm":
        raise Unfollowed(f"{name} of more than one tensor that depends on the image")
    rest = args[1:]
    if name == "_to_copy":
        if kwargs.get("dtype") not in (None, torch.float32, torch.float64):
            raise Unfollowed(f"a cast to {kwargs['dtype']}")
        return form
    if name == "relu":
        return _bend(network, Bend(form, 0.0))
    if name == "leaky_relu":
        leak = float(rest[0]) if rest else 0.01
        if not 0 <= leak <= 1:
            raise Unfollowed(f"a negative slope of {leak}")
        return _bend(network, Bend(form, leak))
    if name == "convolution":
        return _convolution(form, *rest)
    if name == "mm":
        return _product(form, rest[0])
    if name == "addmm":
        if kwargs or args[1] is not given[0]:
            raise Unfollowed("addmm with other factors")
        return _product(form, args[2]).shifted(_wide(args[0]))
    if name == "constant_pad_nd":
        function: Any = torch.ops.aten.constant_pad_nd
        value = float(rest[1]) if len(rest) > 1 else 0.0
        padded = form.apply(lambda t: function(t, rest[0]), lambda t: function(t, rest[0]), 1)
        return padded.shifted(function(torch.zeros_like(form.const), rest[0], value))
    if name in _SAME_SIGN:
        if name == "avg_pool2d" and len(rest) > 5 and rest[5] is not None and rest[5] <= 0:
            raise Unfollowed("average pooling with a divisor that is not positive")
        if any(isinstance(v, torch.dtype) and v not in (torch.float32, torch.float64) for v in kwargs.values()):
            raise Unfollowed(f"{name} in another dtype")
        options = {k: v for k, v in kwargs.items() if k not in ("dtype", "memory_format")}
        operation = getattr(torch.ops.aten, "reshape" if name in ("view", "_unsafe_view") else name)

        def run(t: Tensor) -> Tensor:
            result: Tensor = operation(t, *rest, **options)
            return result

        return form.apply(run, run, numbers)
    raise Unfollowed(f"{name} (no rule)")


def _bend(network: Network, bend: Bend) -> Form:
    shape, size = bend.before.shape, math.prod(bend.before.shape)
    return _source(network, bend, shape, size)


def _source(network: Network, bend: Bend, shape: tuple[int, ...], size: int) -> Form:
    if size > LARGEST:
        raise Unfollowed(f"a layer of {size} units, the checker handles up to {LARGEST}")
    network.bends.append(bend)
    eye = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    none = torch.zeros(shape, dtype=torch.float64)
    source = len(network.bends)
    return Form(shape, {source: eye}, {source: torch.zeros_like(eye)}, none, none)


def _pool(
    network: Network,
    form: Form,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Form:
    """Windows by pooling the positions themselves: each window is what unfolding the padded map gives."""
    k, s, p, d = (_pair(v) for v in (kernel, stride or kernel, padding, dilation))
    channels, height, width = form.shape[-3:]
    place = torch.arange(channels * height * width, dtype=torch.float64).reshape(1, channels, height, width)
    like = torch.nn.functional.max_pool2d(place, k, s, p, d, ceil_mode)
    rows, columns = like.shape[-2:]
    need = [(n - 1) * s[i] + d[i] * (k[i] - 1) + 1 for i, n in enumerate((rows, columns))]
    after = [max(0, need[i] - p[i] - side) for i, side in enumerate((height, width))]
    padded = torch.nn.functional.pad(place, (p[1], after[1], p[0], after[0]), value=-1.0)
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
    shape = (*form.shape[:-3], channels, rows, columns)
    return _source(network, Bend(form, windows=windows), shape, windows.shape[0])


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[-1])) if isinstance(value, (list, tuple)) else (int(value), int(value))


def _product(form: Form, matrix: Tensor) -> Form:
    if isinstance(matrix, Form):
        raise Unfollowed("a product of two tensors that depend on the image")
    weight = _wide(matrix)
    return form.apply(lambda t: t @ weight, lambda t: t @ weight.abs(), weight.shape[0])


def _convolution(
    form: Form,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Form:
    wide, operation = _wide(weight), torch.ops.aten.convolution
    settings = (None, stride, padding, dilation, transposed, output_padding, groups)
    terms = math.prod(weight.shape)
    out = form.apply(lambda t: operation(t, wide, *settings), lambda t: operation(t, wide.abs(), *settings), terms)
    return out if bias is None else out.shifted(_wide(bias).reshape(-1, *[1] * (weight.ndim - 2)))


def _norm(name: str, args: tuple[Any, ...]) -> Form:
    if name == "native_batch_norm":
        given, weight, bias, mean, variance, training, _, eps = args
    else:
        given, weight, bias, mean, variance, _, eps = args
        training = False
    if training or mean is None or variance is None or not isinstance(given, Form):
        raise Unfollowed("batch normalisation by the statistics of the batch")
    form = given
    view = (-1, *[1] * (len(form.shape) - 2))
    scale = (_wide(variance) + eps).rsqrt().view(view)
    if weight is not None:
        scale = scale * _wide(weight).view(view)
    centred = form.shifted(-_wide(mean).view(view).expand(form.shape[1:]))
    scaled = centred.apply(lambda t: t * scale, lambda t: t * scale.abs(), 8)
    return scaled if bias is None else scaled.shifted(_wide(bias).view(view).expand(form.shape[1:]))


def _arithmetic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    first, second = args[0], args[1]
    alpha = float(kwargs.get("alpha", args[2] if len(args) > 2 else 1.0))
    if name == "rsub":
        first, second, name = second, first, "sub"
    if set(kwargs) - {"alpha"}:
        raise Unfollowed(f"{name} with {sorted(kwargs)}")
    if name in ("mul", "div"):
        if isinstance(first, Form) == isinstance(second, Form):
            raise Unfollowed("a product of two tensors that depend on the image")
        form, factor = (first, second) if isinstance(first, Form) else (second, first)
        if name == "div" and not isinstance(first, Form):
            raise Unfollowed("division by the image")
        by = _wide(factor)
        if name == "div":
            by = 1.0 / by
        size = by.abs() if isinstance(by, Tensor) else abs(by)
        return form.apply(lambda t: t * by, lambda t: t * size, 3)
    sign = -alpha if name == "sub" else alpha
    if isinstance(first, Form) and isinstance(second, Form):
        left, right = first, second
        if sign != 1:
            right = right.apply(lambda t: t * sign, lambda t: t * abs(sign), 2)
        shape = torch.broadcast_shapes(left.shape, right.shape)
        return _expanded(left, shape).plus(_expanded(right, shape))
    if isinstance(first, Form):
        constant = torch.as_tensor(_wide(second), dtype=torch.float64) * sign
        form = first
    else:
        constant = torch.as_tensor(_wide(first), dtype=torch.float64)
        form = second.apply(lambda t: t * sign, lambda t: t * abs(sign), 2)
    return _expanded(form, torch.broadcast_shapes(form.shape, constant.shape)).shifted(constant)


def _expanded(form: Form, shape: Any) -> Form:
    if tuple(shape) == form.shape:
        return form
    return form.apply(lambda t: t.expand(shape), lambda t: t.expand(shape), 1)


def _join(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    parts, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0))
    operation = torch.cat if name == "cat" else torch.stack
    sources = sorted({s for part in parts if isinstance(part, Form) for s in part.mid})
    sizes = {s: part.mid[s].shape[0] for part in parts if isinstance(part, Form) for s in part.mid}

    def piece(part: Any, table: str, source: int) -> Tensor:
        held = getattr(part, table).get(source) if isinstance(part, Form) else None
        return held if held is not None else torch.zeros((sizes[source], *part.shape), dtype=torch.float64)

    joined = [{s: torch.vmap(lambda *t: operation(t, dim))(*(piece(p, table, s) for p in parts)) for s in sources}
              for table in ("mid", "rad")]  # fmt: skip
    const = operation([part.const if isinstance(part, Form) else _wide(part) for part in parts], dim)
    slack = [part.slack if isinstance(part, Form) else torch.zeros_like(_wide(part)) for part in parts]
    return Form(tuple(const.shape), joined[0], joined[1], const, operation(slack, dim))
