"""Gradients where a model hides them: smooth stand-ins on the way back, the model's own values on the way forward.

Rounding, thresholds, signs, casts to integers, comparisons and ``detach`` have no gradient, or one that is zero. A
:class:`StandIns` model runs the user's model untouched, with every such operation replaced by

.. math:: f(x) + (s(x) - \\mathrm{const}(s(x))),

whose value is that of ``f`` and whose gradient is that of a smooth ``s`` (backward pass differentiable approximation,
BPDA; Athalye, Carlini, Wagner 2018). Rounding and ``detach`` stand for the identity, comparisons ``a > b`` for a
sigmoid of ``a - b``, saturating functions for ones whose slope does not vanish. Results that cannot carry a gradient
(booleans, integers) carry their stand-in along as a shadow, and whatever is computed from them has one, too, until it
is a floating-point number again. Images that leave torch and come back changed (through NumPy or PIL) are treated as
if they had not changed, and so are results inside torch that rise with their argument and have lost its gradient (an
entry of a table, the number of a bucket), and whatever looks like the image after its gradient was lost (a one-hot code
and back, the nearest patches of a book).

Outputs that saturate (a softmax, a sigmoid), or that only name the class with the largest score, are replaced by what
the softmax or the argmax was taken of: float32 probabilities round to 0 and 1, their arguments do not. Where several
networks vote, that is the mean of theirs. The class stays the model's own, also where rounding or a vote makes it
another than that of the scores.

Operations are caught where Python calls torch, also under ``no_grad`` and in inference mode. What a model does
elsewhere (scripted or compiled modules, an ``autograd.Function`` of its own) stays as it is;
:mod:`wball.attacks.detours` goes around that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wball.model import Model, ask

SHARPNESS = 4.0
"""Of the sigmoid that stands for a comparison: its slope is at most that of the identity, and it spans pixel values."""
LEAST_SLOPE = 0.05
"""Saturating functions never have less."""
SHADOW = "_wball_shadow"

Function = Callable[..., Any]


def _named(*names: str) -> frozenset[Function]:
    """The functions and methods of torch with these names."""
    found = (getattr(place, name, None) for place in (torch, Tensor, F) for name in names)
    return frozenset(function for function in found if function is not None)


ROUNDINGS = ("round", "floor", "ceil", "trunc", "fix")
SATURATIONS = ("sigmoid", "tanh", "clamp", "clip", "clamp_min", "clamp_max")
SIGNS = ("sign", "sgn")
QUANTISED = ("quantize_per_tensor", "dequantize", "fake_quantize_per_tensor_affine")
IDENTITY = _named(*ROUNDINGS, *QUANTISED, "detach") | {Tensor.data.__get__}  # type: ignore[attr-defined]
CASTS = _named(
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "type",
    "type_as",
    "int",
    "long",
    "short",
    "byte",
    "char",
)
GREATER = _named("gt", "ge", "greater", "greater_equal", "__gt__", "__ge__")
LESS = _named("lt", "le", "less", "less_equal", "__lt__", "__le__")
SATURATING = _named(*SATURATIONS, "hardtanh", "relu6", "hardsigmoid")
HEAVISIDE = _named("heaviside")
SIGN = _named(*SIGNS)
FLOOR_DIVIDE = _named("floor_divide", "__floordiv__")
CHOOSE_CLASS = _named(
    *("softmax", "log_softmax", "argmax", "argsort", "sort", "topk", "exp"),
    *(
        "sigmoid",
        "logsigmoid",
        "hardsigmoid",
        "tanh",
        "hardtanh",
        "clamp",
        "clip",
        "softsign",
        "erf",
        "atan",
        "round",
    ),
    *(
        "pow",
        "__pow__",
        "square",
        "sinh",
        "expm1",
        "relu",
        "leaky_relu",
        "elu",
        "softplus",
        "log1p",
        "sqrt",
    ),
)
WHERE = _named("where")
NOT, AND, OR = (_named(*names) for names in (
    ("logical_not", "bitwise_not", "__invert__"),
    ("logical_and", "bitwise_and", "__and__"),
    ("logical_or", "bitwise_or", "__or__"),
))  # fmt: skip
UNDERIVED = _named("unique", "unique_consecutive", "histc")  # torch raises on the way back
OUTSIDE = _named("numpy", "__array__", "tolist", "__dlpack__")  # nothing follows a gradient there
ALIKE = 0.5
"""Correlation with an image that has lost its gradient, above which a tensor of its shape is that image, changed."""
TIED = 1e-5
"""Scores that differ by less, relative to the largest, may change places by rounding."""
IN_PLACE: dict[Function, Function] = {
    getattr(Tensor, name + "_"): getattr(Tensor, name)
    for name in (*ROUNDINGS, *SATURATIONS, *SIGNS, "floor_divide")
    if hasattr(Tensor, name + "_")
}


def _carry(value: Tensor, shadow: Tensor) -> Tensor:
    """``value`` with the gradient of ``shadow``: at once if it can have one, else as its shadow."""
    if shadow.shape != value.shape or not shadow.requires_grad:
        return value
    if value.is_floating_point():
        return value.detach() + (shadow - shadow.detach()).nan_to_num(0.0).to(value.dtype)
    setattr(value, SHADOW, shadow)
    return value


def _shadow(value: Any) -> Any:
    """What stands for an argument on the way back."""
    if type(value) in (tuple, list):
        return type(value)(map(_shadow, value))
    return getattr(value, SHADOW, value) if isinstance(value, Tensor) else value


def _in_shadow(values: Iterable[Any]) -> bool:
    return any(
        _in_shadow(v) if type(v) in (tuple, list) else isinstance(v, Tensor) and hasattr(v, SHADOW)
        for v in values
    )


def _layouts(left: Tensor, value: Tensor) -> Iterator[Tensor]:
    """``left`` in the shape of ``value``, channels first or last, if it has the same sides."""
    sides = [n for n in value.shape if n > 1]
    turned = (left.movedim(-3, -1), left.movedim(-1, -3)) if left.ndim >= 3 else ()
    for layout in (left, *turned):
        if [n for n in layout.shape if n > 1] == sides:
            yield layout.reshape(value.shape).to(value.device)


def _correlation(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Of two tensors, and the slope of the line that predicts the first from the second."""
    pair = torch.stack([part.detach().flatten().double() for part in (a, b)])
    pair = pair - pair.mean(1, keepdim=True)
    (one, product), (_, two) = (pair @ pair.T).tolist()
    return product / max((one * two) ** 0.5, 1e-300), product / max(two, 1e-300)


class _Mode(TorchFunctionMode):
    """Catches calls of torch. ``scores`` are what classes may have been chosen by, first to last."""

    def __init__(self, image: Tensor, gradients: bool) -> None:
        super().__init__()
        self._image, self._gradients = image, gradients
        self._left: list[Tensor] = []  # what has lost its gradient and may come back
        self.scores: list[Tensor] = []

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            (func in CHOOSE_CLASS or func in OUTSIDE)
            and isinstance(args[0], Tensor)
            and args[0].ndim == 2
        ):
            self.scores.append(args[0])
        if not self._gradients:
            return func(*args, **kwargs)
        if func in OUTSIDE:
            if _shadow(args[0]).requires_grad:
                self._left.append(_shadow(args[0]))
            return func(args[0].detach(), *args[1:], **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            if self._left:
                args = tuple(map(self._come_back, args))
            if func in IN_PLACE:
                args[0].copy_(self._call(IN_PLACE[func], args, kwargs))
                return args[0]
            return self._call(func, args, kwargs)

    def _come_back(self, value: Any) -> Any:
        """An argument, with the gradient of the image that left torch if it is that image, changed."""
        if type(value) in (tuple, list):
            return type(value)(map(self._come_back, value))
        if (
            type(value) is not Tensor
            or value.requires_grad
            or hasattr(value, SHADOW)
            or value.numel() < 2
        ):
            return value
        same = (layout for left in self._left for layout in _layouts(left, value))
        best = max(
            ((_correlation(value, layout)[0], k, layout) for k, layout in enumerate(same)),
            default=None,
        )
        return _carry(value, best[2]) if best is not None and best[0] > ALIKE else value

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = func(*(map(_detached, args) if func in UNDERIVED else args), **kwargs)
        if type(value) is tuple and not any(map(_followed, value)):
            return tuple(_alike(part, args) if isinstance(part, Tensor) else part for part in value)
        if not isinstance(value, Tensor) or not args:
            return value
        with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            value = _stand_in(
                func, args, kwargs, value
            )  # where a shadow does not fit, there is none
        value = value if _followed(value) else _alike(value, args)
        if not self._left and not _followed(value) and any(map(_followed, args)):
            self._left.append(self._image)
        return value


def _followed(value: Any) -> bool:
    """Whether a gradient follows it, its own or that of its shadow."""
    return isinstance(value, Tensor) and (value.requires_grad or hasattr(value, SHADOW))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _alike(value: Tensor, args: tuple[Any, ...]) -> Tensor:
    """A result that has lost its gradient, with that of the argument of its shape that it rises or falls with."""
    for source in args if len(args) < 2 or not isinstance(args[1], tuple) else (args[0], *args[1]):
        shadow = _shadow(source)
        if (
            isinstance(shadow, Tensor)
            and shadow.requires_grad
            and shadow.shape == value.shape
            and value.numel() > 1
        ):
            correlation, slope = _correlation(value, shadow)
            if abs(correlation) > ALIKE:
                return _carry(value, slope * shadow)
    return value


def _stand_in(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
) -> Tensor:
    first = _shadow(args[0])
    soft = isinstance(first, Tensor) and first.is_floating_point()
    if func in IDENTITY and soft:
        return _carry(value, first + 0.0)
    if func in SATURATING and soft:
        return _carry(value, value + LEAST_SLOPE * first)
    if func in SIGN and soft:
        return _carry(value, torch.tanh(SHARPNESS / 2 * first))
    if func in HEAVISIDE and soft:
        return _carry(value, torch.sigmoid(SHARPNESS * first))
    if func in GREATER or func in LESS:
        gap = first - _shadow(args[1])
        return _carry(value, torch.sigmoid(SHARPNESS * (gap if func in GREATER else -gap)))
    if func in WHERE:
        return _where(func, args, value)
    if func in FLOOR_DIVIDE:
        return _carry(value, first / _shadow(args[1]))
    if func in CASTS and soft:
        changed = not value.is_floating_point() or hasattr(args[0], SHADOW)
        return _carry(value, first + 0.0) if changed else value
    if not _in_shadow(args):
        return value
    if func in NOT:
        return _carry(value, 1 - first)
    if (func in AND or func in OR) and value.dtype != torch.bool:  # of the bits of numbers
        return value
    if func in AND or func in OR:
        a, b = (_shadow(v).to(first.dtype) for v in args)
        return _carry(value, a * b if func in AND else a + b - a * b)
    return _carry(value, func(*_shadow(args), **kwargs))


def _where(func: Function, args: tuple[Any, ...], value: Tensor) -> Tensor:
    """The branches keep their gradients, and the condition adds its own."""
    condition, a, b = (args[1], args[0], args[2]) if func is Tensor.where else args
    shadow = getattr(condition, SHADOW, None)
    if shadow is None or not value.is_floating_point():
        return value
    return value + (shadow - shadow.detach()) * (torch.as_tensor(a) - b).detach()


class StandIns:
    """``model`` with stand-ins for what has no gradient. Values are the model's own, but for scores of classes.

    >>> x = torch.rand(1, 4, requires_grad=True)
    >>> StandIns(lambda z: (z > 0.5).float())(x).sum().backward()
    >>> bool((x.grad > 0).all())
    True
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._sources: dict[int, float] | None = (
            None  # which scores the first answer came of, and factors of theirs
        )
        self._count = 0

    @property
    def replaces_scores(self) -> bool:
        """Whether the last answer was of other scores than the model's own."""
        return bool(self._sources)

    def __call__(self, x: Tensor) -> Tensor:
        mode = _Mode(x, torch.is_grad_enabled())
        with mode:
            logits = ask(self.model, x)
        if self._sources is None or self._count != len(mode.scores):
            self._count, self._sources = len(mode.scores), _sources(mode.scores, logits)
        if not self._sources:
            return logits
        scores = torch.stack(
            [mode.scores[k].to(logits) * factor for k, factor in self._sources.items()]
        )
        return _with_class_of(logits, scores.mean(0))


def _sources(scores: list[Tensor], logits: Tensor) -> dict[int, float]:
    """Which scores answers were chosen by: all of the earliest, if several do not follow from each other. They are
    weighed by factors that make them differ by as much."""
    alike = [k for k, one in enumerate(scores) if _chose(one, logits)]
    alike = [k for k in alike if _implies(scores[k], logits)] or alike
    first = [
        k for n, k in enumerate(alike) if not any(_implies(scores[j], scores[k]) for j in alike[:n])
    ]
    if len(first) < 2:
        return dict.fromkeys(first, 1.0)
    widths = {
        k: float((scores[k].detach().amax(1) - scores[k].detach().amin(1)).double().median())
        for k in first
    }
    return {k: max(widths.values()) / width for k, width in widths.items() if 0 < width < math.inf}


def _chose(scores: Tensor, logits: Tensor) -> bool:
    """Whether every image's class has the largest score, up to ties among the logits."""
    if scores.shape != logits.shape or not scores.is_floating_point():
        return False
    own = scores.argmax(1, keepdim=True).to(
        logits.device
    )  # what leaves torch is taken to the host first
    return bool((logits.gather(1, own) >= logits.amax(1, keepdim=True)).all())


def _implies(scores: Tensor, later: Tensor) -> bool:
    """Whether a class with a larger score is never later behind one with a smaller score, but for rounding."""
    values = later.detach().double()
    ordered = values.gather(1, scores.detach().argsort(1).to(later.device))
    return bool((ordered.diff(dim=1) >= -TIED * values.abs().amax(1, keepdim=True)).all())


def _with_class_of(logits: Tensor, scores: Tensor) -> Tensor:
    """The scores, raised by a constant at the class of the logits where that is not the largest score."""
    own = logits.argmax(1, keepdim=True)
    top = scores.detach().amax(1, keepdim=True)
    above = torch.nextafter(top, torch.full_like(top, torch.inf)) - scores.detach().gather(1, own)
    tied = scores.detach().argmax(1, keepdim=True) != own
    return scores + torch.zeros_like(scores).scatter(
        1, own, torch.where(tied, above, torch.zeros_like(above))
    )
