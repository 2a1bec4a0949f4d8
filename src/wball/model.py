"""The model under attack: what is expected of it, and leaving it as it was found.

The output of a model is read as logits: one row of at least two numbers per image. Models of other
libraries return tuples (auxiliary outputs, hidden states), dictionaries or objects with a field
``logits``. Convolutional heads return ``(B, K, 1, 1)``, models of two classes often one number per
image. If it is not clear which numbers are the logits, an error describes the output.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Model = Callable[[Tensor], Tensor]
Thing = TypeVar("Thing")

NAMES = ("logits", "output", "outputs", "out", "scores", "predictions", "probs", "probabilities")
"""Output field names tried for logits, in this order."""
FAR = 100.0
"""Size of random images that tell a probability from a logit: a logit leaves [0, 1] for some of
them."""

_probabilities: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def ask(model: Model, x: Tensor) -> Tensor:
    """The logits of images, in at least their precision.

    The model gets a copy, because its first layer may work in place, in the precision of its
    parameters. What it returns is read by :func:`read_logits`.
    """
    parameters = model.parameters() if isinstance(model, nn.Module) else iter(())
    own = next((p.dtype for p in parameters if p.is_floating_point()), x.dtype)
    logits = read_logits(model, x.to(own, copy=True))
    if logits.is_inference() and not torch.is_inference_mode_enabled():
        logits = logits.clone()  # inference tensors cannot carry gradients
    return logits.to(torch.promote_types(logits.dtype, x.dtype))


def read_logits(model: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The model's logits for images, ``(B, K)`` with at least two classes, in its own precision."""
    batch = x.shape[0]
    logits = find_logits(model(x), batch)
    if not logits.is_floating_point():
        raise TypeError(
            f"the model must return floating-point logits, got {logits.dtype}; scores, not classes"
        )
    if logits.shape in ((batch,), (batch, 1)):
        return _two_classes(model, logits.reshape(batch), x)
    if logits.ndim > 2 and logits.shape[2:].numel() == 1:
        logits = logits.flatten(1)
    if logits.ndim != 2 or logits.shape[0] != batch:
        raise ValueError(
            f"the model must return logits of shape ({batch}, classes), got {tuple(logits.shape)}"
        )
    return logits


def find_logits(output: Any, batch: int) -> Tensor:
    """Find the tensor of logits in the output of a model."""
    if isinstance(output, Tensor):
        return output
    fields = dict(output) if isinstance(output, Mapping) else {}
    for name in NAMES:
        value = fields.get(name, getattr(output, name, None))
        if isinstance(value, Tensor):
            return value
    inside = list(output) if isinstance(output, (tuple, list)) else list(fields.values())
    tensors = [v for v in inside if isinstance(v, Tensor) and v.is_floating_point()]
    scores = [v for v in tensors if v.ndim == 2 and v.shape[0] == batch]
    # Of several outputs of equal width (auxiliary classifiers), the first is the model's.
    if scores and len({v.shape for v in scores}) == 1:
        return scores[0]
    held = [repr(name) for name in fields] or [_kind(v) for v in inside]
    seen = f" of {', '.join(held[:6])}, and which of them are logits is not clear" if held else ""
    raise TypeError(
        f"the model must return a tensor of logits, got {type(output).__name__}{seen}; "
        "wrap it to return them: lambda x: model(x)[...]"
    )


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _two_classes(model: Callable[[Tensor], Any], score: Tensor, x: Tensor) -> Tensor:
    """Two logits from one number per image: the score of class 1, or the log-odds of a
    probability."""
    if _is_probability(model, x):
        tiny = torch.finfo(score.dtype).tiny
        score = score.clamp(min=tiny).log() - (1 - score).clamp(min=tiny).log()
    return torch.stack([torch.zeros_like(score), score], 1)


def _is_probability(model: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether a model with one output per image keeps it in [0, 1] for any image; evaluated once
    per model."""
    with suppress(TypeError):  # not every callable can be hashed
        if model in _probabilities:
            return _probabilities[model]
    far = FAR * torch.randn((8, *x.shape[1:]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = find_logits(model(far.to(x)), 8)
    is_probability = bool(((found >= 0) & (found <= 1)).all())
    if is_probability:
        warnings.warn(
            "the model returns one probability per image: it is taken as that of class 1, "
            "and attacked by its log-odds",
            stacklevel=2,
        )
    with suppress(TypeError):
        _probabilities[model] = is_probability
    return is_probability


def reached(logits: Tensor, y: Tensor, target: Tensor | None) -> Tensor:
    """Whether logits meet the goal. Logits that are not finite never do: such a model is broken,
    not fooled."""
    top = top_class(logits)
    return (top >= 0) & (top == target if target is not None else top != y)


def top_class(logits: Tensor) -> Tensor:
    """The class of the largest logit, or -1 if a logit is NaN."""
    return torch.where(logits.isnan().any(1), -1, logits.argmax(1))


def check_classes(name: str, labels: Tensor, logits: Tensor) -> None:
    """Check that the model has a logit for every label. On a GPU a wrong label would end the
    process, not only the call."""
    if labels.numel() == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise ValueError(
            f"{name} has labels from {low} to {high}, but the model has {logits.shape[1]} classes: "
            "the data belong to another model, or the labels need renumbering"
        )


def other_images(model: Model, x: Tensor) -> str:
    """The images that a model accepts instead of ``x``, which it does not take, and what to do."""
    if x.ndim != 4:
        return ""
    tried = {
        "one image at a time: export it with a dynamic batch axis": x[:1],
        "with channels first: x.permute(0, 3, 1, 2)": x.movedim(-1, 1),
        "with channels last: wrap it, lambda x: model(x.permute(0, 2, 3, 1))": x.movedim(1, -1),
        "grey ones: convert them, x.mean(1, keepdim=True) or --grey": x.mean(1, keepdim=True),
        "colour ones: repeat the channel, x.expand(-1, 3, -1, -1), or load the images in colour": x[
            :, [0, 0, 0]
        ],
    }
    for remedy, images in tried.items():
        with suppress(Exception):  # whatever the model raises
            ask(model, images)
            return f", but {remedy}"
    return ""


def with_modes(model: Model) -> list[nn.Module]:
    """The model's modules that have a training mode: those of a frozen script have none."""
    return (
        [m for m in model.modules() if hasattr(m, "training")]
        if isinstance(model, nn.Module)
        else []
    )


class _Lent(Generic[Thing]):
    """Settings that calls from several threads change at the same time: the first call saves them,
    the last one restores them.

    A lock held during each call would be as safe, but concurrent attacks on one model would wait
    for each other.
    """

    def __init__(
        self,
        key: Callable[[Thing], object],
        read: Callable[[Thing], Any],
        write: Callable[[Thing, Any], None],
    ) -> None:
        self._key, self._read, self._write = key, read, write
        self._lock = threading.Lock()
        self._found: dict[
            object, tuple[Thing, Any]
        ] = {}  # keeps the object alive, so that its id is not reused
        self._users: Counter[object] = Counter()

    def found(self, thing: Thing) -> Any:
        """The setting as it was before any call that is still running."""
        with self._lock:
            held = self._found.get(self._key(thing))
            return self._read(thing) if held is None else held[1]

    @contextmanager
    def __call__(self, things: Sequence[Thing], value: Any = None) -> Iterator[None]:
        """Set the settings to ``value`` (``None``: leave them) inside the context. The last call to
        leave restores them."""
        with self._lock:
            for thing in things:
                self._found.setdefault(self._key(thing), (thing, self._read(thing)))
            self._users.update(map(self._key, things))
            try:
                for thing in things if value is not None else ():
                    self._write(thing, value)
            except BaseException:
                self._return(things)
                raise
        try:
            yield
        finally:
            with self._lock:
                self._return(things)

    def _return(self, things: Sequence[Thing]) -> None:
        self._users.subtract(map(self._key, things))
        for thing in things:
            key = self._key(thing)
            if self._users[key] == 0 and key in self._found:
                self._write(thing, self._found.pop(key)[1])
                del self._users[key]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _tf32_parts(backend: str) -> tuple[Any, ...]:
    """PyTorch's newer TF32 settings, which replace ``allow_tf32``."""
    cudnn: Any = torch.backends.cudnn
    return (torch.backends.cuda.matmul,) if backend == "matmul" else (cudnn.conv, cudnn.rnn)


def _tf32_owner(backend: str) -> Any:
    return torch.backends.cuda.matmul if backend == "matmul" else torch.backends.cudnn


def _tf32(backend: str) -> bool | tuple[str, ...]:
    try:
        return bool(_tf32_owner(backend).allow_tf32)
    except RuntimeError:  # the caller uses the newer settings, and torch refuses to mix them
        return tuple(part.fp32_precision for part in _tf32_parts(backend))


def _set_tf32(backend: str, value: bool | tuple[str, ...]) -> None:
    if isinstance(value, bool) and isinstance(_tf32(backend), bool):
        _tf32_owner(backend).allow_tf32 = value
        return
    parts = _tf32_parts(backend)
    precisions = ("ieee",) * len(parts) if isinstance(value, bool) else value
    for part, precision in zip(parts, precisions, strict=True):
        part.fp32_precision = precision


_modes = _Lent[nn.Module](
    id, lambda module: module.training, lambda module, mode: setattr(module, "training", mode)
)
_flags = _Lent[Tensor](
    id, lambda p: p.requires_grad, lambda p, flag: setattr(p, "requires_grad", flag)
)
_random = _Lent[torch.device](str, _random_state, _set_random_state)
_precision = _Lent[str](str, _tf32, _set_tf32)

_doubles: dict[int, tuple[nn.Module, nn.Module | None]] = {}
"""Copies in float64 of models that are being attacked; ``None`` if a model has none."""


def in_training(model: Model) -> bool:
    """Whether the caller left a module in training mode, even while another thread evaluates the
    model."""
    return any(_modes.found(module) for module in with_modes(model))


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Context in which the model is in evaluation mode; afterwards every module has its own mode
    again. Thread-safe."""
    with _modes(with_modes(model), False):
        yield


@contextmanager
def as_found(model: Model, device: torch.device) -> Iterator[None]:
    """Context in which the model is in evaluation mode with frozen parameters; afterwards
    everything is restored."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
    with _random(devices), evaluating(model), _flags(parameters, False):
        try:
            yield
        finally:
            _doubles.pop(id(model), None)


@contextmanager
def full_precision() -> Iterator[None]:
    """Run float32 matrix products and convolutions on GPUs without TF32, which rounds to 10 bits.

    The previous setting is restored after the last thread has left.
    """
    with _precision(("matmul", "cudnn"), False):
        yield


@torch.no_grad()
def judge(model: Model, z: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
    """Return which images meet the goal: ``argmax != y``, or ``argmax == target``.

    The model runs in its own precision without TF32. If it is a module of float32 parameters that
    also runs in float64, an image must meet the goal in both. Call it inside :func:`as_found`.
    """
    with full_precision():
        logits = ask(model, z)
    success = reached(logits, y, target)
    claimed = success.nonzero().squeeze(1)
    double = _double(model) if claimed.numel() else None
    if double is None:
        return success
    goal = None if target is None else target[claimed]
    try:
        holds = reached(ask(double, z[claimed].double()), y[claimed], goal)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - float32 constants, or a function without float64
        _doubles[id(model)] = cast("nn.Module", model), None
        return success
    if bool(holds.all()):
        return success
    with full_precision():
        again = ask(model, z)
    # The float64 copy of a random model draws different numbers.
    holds |= answers_differ(logits, again)[claimed]
    success[claimed] = holds
    return success


def answers_differ(first: Tensor, again: Tensor) -> Tensor:
    """Images whose logits differ by more than the order of summation can explain."""
    drift = (first - again).abs().nan_to_num().amax(1)
    return drift > 1e-4 * (1 + first.abs().nan_to_num().max())


def _double(model: Model) -> nn.Module | None:
    """A copy of a float32 module in float64, kept until :func:`as_found` ends."""
    if not isinstance(model, nn.Module):
        return None
    held = _doubles.get(id(model))
    if held is None:
        floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
        double = None
        if floating == {torch.float32}:
            with suppress(Exception):  # not every module can be copied
                double = copy.deepcopy(model).double()
        held = _doubles[id(model)] = model, double  # another thread may delete it at any time
    return held[1]
