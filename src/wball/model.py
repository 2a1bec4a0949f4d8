"""The model under attack: what is expected of it, and leaving it as it was found.

The output of a model is read as logits: one row of at least two numbers per image. Models of other
libraries return tuples (auxiliary outputs, hidden states), dictionaries or objects with a field
``logits``. Convolutional heads return ``(B, K, 1, 1)``. If it is not clear which numbers are the
logits, an error describes the output; a model of two classes with one number per image is wrapped
in :class:`wball.Binary`.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Model = Callable[[Tensor], Tensor]

NAMES = ("logits", "output", "outputs", "out", "scores", "predictions", "probs", "probabilities")
"""Output field names tried for logits, in this order."""


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
        raise ValueError(
            "the model returns one number per image: wrap it in wball.Binary(model), or in "
            "wball.Binary(model, probability=True) if it is the probability of class 1"
        )
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
    if scores and len({v.shape[1] for v in scores}) == 1:
        return scores[0]
    held = [repr(name) for name in fields] or [_kind(v) for v in inside]
    seen = f" of {', '.join(held[:6])}, and which of them are logits is not clear" if held else ""
    raise TypeError(
        f"the model must return a tensor of logits, got {type(output).__name__}{seen}; "
        "wrap it to return them: lambda x: model(x)[...]"
    )


def _kind(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


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


class _Setting(NamedTuple):
    """Something that a call changes and gives back: how it is told apart, read and written."""

    key: object
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attribute(owner: Any, name: str) -> _Setting:
    """An attribute of an object, such as the mode of a module or the flag of a parameter."""
    return _Setting((id(owner), name), partial(getattr, owner, name), partial(setattr, owner, name))


def _random_state(device: torch.device) -> _Setting:
    """The state of PyTorch's random generator on a device."""
    if device.type != "cuda":
        return _Setting(device, torch.get_rng_state, torch.set_rng_state)
    read, write = (
        partial(f, device=device) for f in (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
    )
    return _Setting(device, read, write)


def _tf32(backend: Any, *newer: Any) -> _Setting:
    """Whether a backend rounds to TF32. PyTorch has newer settings beside ``allow_tf32``, and
    refuses to mix them."""

    def read() -> bool | tuple[str, ...]:
        try:
            return bool(backend.allow_tf32)
        except RuntimeError:  # the caller uses the newer settings
            return tuple(part.fp32_precision for part in newer)

    def write(value: bool | tuple[str, ...]) -> None:
        if isinstance(value, bool) and isinstance(read(), bool):
            backend.allow_tf32 = value
            return
        precisions = ("ieee",) * len(newer) if isinstance(value, bool) else value
        for part, precision in zip(newer, precisions, strict=True):
            part.fp32_precision = precision

    return _Setting(backend, read, write)


def _copied(model: Model) -> _Setting:
    """The copy of a model in float64, in a list. It is made when it is first needed, and dropped
    when nobody attacks the model any more."""

    def drop(held: object, alive: Model = model) -> None:
        """Nothing is restored."""

    return _Setting(("double", id(model)), list, drop)


@dataclass
class _Loan:
    """A setting (kept alive, so that its id is not reused), its value before, and its users."""

    setting: _Setting
    before: Any
    users: int = 0


class _Loans:
    """Settings that calls from several threads change at the same time: the first call saves them,
    the last one restores them.

    A lock held during each call would be as safe, but concurrent attacks on one model would wait
    for each other.
    """

    def __init__(self) -> None:
        self._lock, self._held = threading.Lock(), dict[object, _Loan]()

    def before(self, setting: _Setting) -> Any:
        """The value of a setting before any call that is still running."""
        with self._lock:
            loan = self._held.get(setting.key)
            return setting.read() if loan is None else loan.before

    @contextmanager
    def __call__(self, settings: Sequence[_Setting], value: Any = None) -> Iterator[None]:
        """Set the settings to ``value`` (``None``: leave them) inside the context."""
        with self._lock:
            for setting in settings:
                if setting.key not in self._held:
                    self._held[setting.key] = _Loan(setting, setting.read())
                self._held[setting.key].users += 1
            try:
                for setting in settings if value is not None else ():
                    setting.write(value)
            except BaseException:
                self._return(settings)
                raise
        try:
            yield
        finally:
            with self._lock:
                self._return(settings)

    def _return(self, settings: Sequence[_Setting]) -> None:
        for setting in settings:
            loan = self._held[setting.key]
            loan.users -= 1
            if loan.users == 0:
                del self._held[setting.key]
                setting.write(loan.before)


_lent = _Loans()


def _modes(model: Model) -> list[_Setting]:
    """The training modes of a model's modules: those of a frozen script have none."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [_attribute(m, "training") for m in modules if hasattr(m, "training")]


def in_training(model: Model) -> bool:
    """Whether the caller left a module in training mode, even while another thread evaluates the
    model."""
    return any(_lent.before(mode) for mode in _modes(model))


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Context in which the model is in evaluation mode; afterwards every module has its own mode
    again. Thread-safe."""
    with _lent(_modes(model), False):
        yield


@contextmanager
def as_found(model: Model, device: torch.device) -> Iterator[None]:
    """Context in which the model is in evaluation mode with frozen parameters; afterwards
    everything is restored."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    flags = [_attribute(parameter, "requires_grad") for parameter in parameters]
    random = map(_random_state, {torch.device("cpu"), device})
    with _lent([*random, _copied(model)]), evaluating(model), _lent(flags, False):
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Run float32 matrix products and convolutions on GPUs without TF32, which rounds to 10 bits.

    The previous setting is restored after the last thread has left.
    """
    cudnn: Any = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    newer = (getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    with _lent([_tf32(matmul, matmul), _tf32(cudnn, *newer)], False):
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
        _lent.before(_copied(model))[:] = [None]
        return success
    if holds.all():
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
    held: list[nn.Module | None] = _lent.before(_copied(model))
    if not held:
        double = None
        if isinstance(model, nn.Module):
            floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
            if floating == {torch.float32}:
                with suppress(Exception):  # not every module can be copied
                    double = copy.deepcopy(model).double()
        held.append(double)
    return held[0]
