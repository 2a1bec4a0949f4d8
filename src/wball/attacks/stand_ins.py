"""Gradients where a model hides them: the values stay the model's own, the gradients come from
elsewhere.

:class:`StandIns` runs the model with a smooth stand-in for every operation without a useful
gradient,

.. math:: f(x) + (s(x) - \\mathrm{const}(s(x))),

whose value is that of ``f`` and whose gradient is that of ``s`` (backward pass differentiable
approximation, BPDA; Athalye, Carlini, Wagner 2018):

- rounding, signs and ``detach`` pass the gradient on unchanged, and saturating functions with a
  least slope;
- a comparison of ``a`` and ``b`` has the gradient of ``a - b`` or ``b - a``, whichever it rises
  with;
- any other result without a gradient (of a cast, a table, bits, buckets) has that of the argument
  of its shape that it rises or falls with;
- a tensor that looks like an image whose gradient was lost (in NumPy, in a code) has the gradient
  of that image.

Results that cannot carry a gradient (booleans, integers) carry their stand-in as a shadow.
``no_grad`` and inference mode are lifted. Outputs that saturate, or that only name a class, are
replaced by the scores before the softmax or argmax. The class stays the model's own.

Operations are intercepted where Python calls torch.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wball.model import Model, ask
from wball.provenance import Plain

Function = Callable[..., Any]

LEAST_SLOPE = 0.05
"""Least slope of the stand-in of a saturating function."""
ALIKE = 0.5
"""Correlation above which a tensor is taken for a changed copy of another."""
TIED = 1e-5
"""Scores that differ by less, relative to the largest, may change places by rounding."""
SHADOW = "_wball_shadow"


def _named(*names: str) -> frozenset[Function]:
    """The functions and methods of PyTorch with these names."""
    found = (getattr(place, name, None) for place in (torch, Tensor, F) for name in names)
    return frozenset(function for function in found if function is not None)


FLAT_NAMES = ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "floor_divide")
SATURATING_NAMES = ("sigmoid", "tanh", "clamp", "clip", "clamp_min", "clamp_max")
QUANTISED = ("quantize_per_tensor", "dequantize", "fake_quantize_per_tensor_affine")
FLAT = _named(*FLAT_NAMES, *QUANTISED, "__floordiv__", "heaviside", "detach") | {
    Tensor.data.__get__  # type: ignore[attr-defined]
}
SATURATING = _named(*SATURATING_NAMES, "hardtanh", "relu6", "hardsigmoid")
OUTSIDE = _named("numpy", "__array__", "tolist", "__dlpack__")
CHOOSE_CLASS = SATURATING | OUTSIDE | _named(
    "softmax", "log_softmax", "argmax", "max", "argsort", "sort", "topk", "exp", "round",
    "pow", "__pow__", "square", "relu", "softplus", "sqrt",
)  # fmt: skip
"""Functions of scores at the end of a model that saturate, choose a class, or change the scale of
scores."""
IN_PLACE: dict[Function, Function] = {
    getattr(Tensor, name + "_"): getattr(Tensor, name)
    for name in (*FLAT_NAMES, *SATURATING_NAMES)
    if hasattr(Tensor, name + "_")
}


def _carry(value: Tensor, shadow: Tensor) -> Tensor:
    """Give ``value`` the gradient of ``shadow``: directly if it is floating point, else by
    attaching the shadow to it."""
    if shadow.shape != value.shape or not shadow.requires_grad:
        return value
    if value.is_floating_point():
        return value.detach() + (shadow - shadow.detach()).nan_to_num(0.0).to(value.dtype)
    setattr(value, SHADOW, shadow)
    return value


def _shadow(value: Any) -> Any:
    """The stand-in of an argument in the backward pass."""
    if type(value) in (tuple, list):
        return type(value)(map(_shadow, value))
    return getattr(value, SHADOW, value) if isinstance(value, Tensor) else value


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among the arguments, including those inside tuples and lists."""
    if isinstance(values, Tensor):
        return [values]
    inside = values if type(values) in (tuple, list) else ()
    return [tensor for value in inside for tensor in _tensors(value)]


def _followed(value: Any) -> bool:
    """Whether a tensor or its shadow has a gradient."""
    return isinstance(value, Tensor) and (value.requires_grad or hasattr(value, SHADOW))


def _correlation(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The correlation of two tensors, and the slope of the line that predicts the first from the
    second."""
    pair = torch.stack([part.detach().flatten().double() for part in (a, b)])
    pair = pair - pair.mean(1, keepdim=True)
    (one, product), (_, two) = (pair @ pair.T).tolist()
    return product / max((one * two) ** 0.5, 1e-300), product / max(two, 1e-300)


class _Mode(TorchFunctionMode):
    """Intercepts PyTorch calls and replaces operations without a gradient. ``scores`` collects the
    values that classes may have been chosen by, in order."""

    def __init__(self, image: Tensor, gradients: bool) -> None:
        super().__init__()
        self._image, self._gradients = image, gradients
        self._lost: list[Tensor] = []  # tensors whose gradient was lost
        self.scores: list[Tensor] = []

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Plain | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in CHOOSE_CLASS and args and isinstance(args[0], Tensor):
            self.scores.append(args[0])
        if not self._gradients:
            return func(*args, **kwargs)
        if func in OUTSIDE:
            if _shadow(args[0]).requires_grad:
                self._lost.append(_shadow(args[0]))
            return func(args[0].detach(), *args[1:], **kwargs)
        with torch.inference_mode(False), torch.enable_grad():
            if self._lost:
                args = tuple(map(self._come_back, args))
            if func in IN_PLACE:
                args[0].copy_(self._call(IN_PLACE[func], args, kwargs))
                return args[0]
            return self._call(func, args, kwargs)

    def _come_back(self, value: Any) -> Any:
        """Restore the gradient of an argument that looks like an image whose gradient was lost."""
        if type(value) in (tuple, list):
            return type(value)(map(self._come_back, value))
        if type(value) is not Tensor or _followed(value) or value.numel() < 2:
            return value
        sides = [n for n in value.shape if n > 1]
        for lost in reversed(self._lost):
            if [n for n in lost.shape if n > 1] == sides:
                same = lost.reshape(value.shape).to(value.device)
                if _correlation(value, same)[0] > ALIKE:
                    return _carry(value, same)
        return value

    def _call(self, func: Function, args: tuple[Any, ...], kwargs: Plain) -> Any:
        """Call a function, and attach a gradient to its result if it has none."""
        value = func(*args, **kwargs)
        if not isinstance(value, Tensor) or not args:
            return value
        with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            value = _stand_in(func, args, kwargs, value)  # no stand-in where a shadow does not fit
        value = value if _followed(value) else _alike(value, args)
        if not self._lost and not _followed(value) and any(map(_followed, args)):
            self._lost.append(self._image)
        return value


def _stand_in(func: Function, args: tuple[Any, ...], kwargs: Plain, value: Tensor) -> Tensor:
    """Attach the gradient of a smooth stand-in to the result of a function, if there is one."""
    first = _shadow(args[0])
    if value.dtype == torch.bool and args[0].is_floating_point():
        gap = first - _shadow(args[1])
        return _carry(value, math.copysign(1.0, _correlation(value, gap)[0]) * gap)
    if func in FLAT:
        return _carry(value, first + 0.0)
    if func in SATURATING:
        return _carry(value, value + LEAST_SLOPE * first)
    if any(hasattr(tensor, SHADOW) for tensor in _tensors(args)):
        return _carry(value, func(*_shadow(args), **kwargs))
    return value


def _alike(value: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Give a result without a gradient that of the argument of the same shape it is correlated
    with."""
    for source in _tensors(args) if value.numel() > 1 else ():
        shadow = _shadow(source)
        if shadow.requires_grad and shadow.shape == value.shape:
            correlation, slope = _correlation(value, shadow)
            if abs(correlation) > ALIKE:
                return _carry(value, slope * shadow)
    return value


class StandIns:
    """``model`` with differentiable stand-ins for operations without a gradient.

    >>> x = torch.rand(1, 4, requires_grad=True)
    >>> StandIns(lambda z: (z > 0.5).float())(x).sum().backward()
    >>> bool((x.grad > 0).all())
    True
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._count = 0
        self._source: int | None = None  # of the scores of the first answer; -1: the logits

    @property
    def replaces_scores(self) -> bool:
        """Whether the last output was computed from scores other than the model's own."""
        return self._source is not None and self._source >= 0

    def __call__(self, x: Tensor) -> Tensor:
        mode = _Mode(x, torch.is_grad_enabled())
        with mode:
            logits = ask(self.model, x)
        every = [_as_rows(s, logits) for s in mode.scores if s.numel() == logits.numel()]
        if self._source is None or self._count != len(every):
            self._count, self._source = len(every), _source(every, logits)
        if self._source < 0:
            return logits
        return _with_class_of(logits, every[self._source].to(logits))


def _as_rows(scores: Tensor, logits: Tensor) -> Tensor:
    """Scores in the shape of the logits, one row per image."""
    turned = scores.shape == logits.shape[::-1] != logits.shape
    return scores.T if turned else scores.reshape(logits.shape)


def _source(scores: list[Tensor], logits: Tensor) -> int:
    """The earliest scores that determine the order of the logits, or at least the class."""
    alike = [k for k, one in enumerate(scores) if _chose(one, logits)]
    return next((k for k in alike if _implies(scores[k], logits)), alike[0] if alike else -1)


def _chose(scores: Tensor, logits: Tensor) -> bool:
    """Whether every image's predicted class has the largest score, up to ties among the logits."""
    if not scores.is_floating_point():
        return False
    own = scores.argmax(1, keepdim=True).to(logits.device)
    return bool((logits.gather(1, own) >= logits.amax(1, keepdim=True)).all())


def _implies(scores: Tensor, later: Tensor) -> bool:
    """Whether the later scores have the same order, up to rounding."""
    values = later.detach().double()
    ordered = values.gather(1, scores.detach().argsort(1).to(later.device))
    return bool((ordered.diff(dim=1) >= -TIED * values.abs().amax(1, keepdim=True)).all())


def _with_class_of(logits: Tensor, scores: Tensor) -> Tensor:
    """Raise the scores at the class predicted by the logits by a constant where it does not have
    the largest score."""
    own, fixed = logits.argmax(1, keepdim=True), scores.detach()
    top = fixed.amax(1, keepdim=True)
    above = torch.nextafter(top, torch.full_like(top, torch.inf)) - fixed.gather(1, own)
    above = above.where(fixed.argmax(1, keepdim=True) != own, torch.zeros_like(above))
    return scores + torch.zeros_like(scores).scatter(1, own, above)
