"""Checks that the certified network is the one that runs.

Hooks and patched methods are recorded with everything else that runs. The graph of a model is
compared with the model by :func:`compare`: at images and at points around them, logit by logit, up to
the rounding of the model's own precision.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wball.certificates.graph import Graph
from wball.model import ask, evaluating

MANY = 5
"""Number of copies of all points in a large batch."""

IMAGES, STEPS = 8, (1e-3, 0.01, 0.1, 0.3)
"""Number of images that are probed, and of points on the way from the first one to noise."""

SAFETY = 16.0
"""Tolerance of a logit as a multiple of its simulated rounding error, whose size is estimated from some
ten random errors."""


class UnsupportedModule(TypeError):
    """The model contains an operation for which no bound is known. The message names it."""


# ---- modules


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers that compile or distribute it; hooks of a wrapper are refused."""
    inner: Any = model
    while _compiles(inner) or type(inner) in (
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
    ):
        if inner._forward_hooks or inner._forward_pre_hooks:
            raise UnsupportedModule(
                f"{type(inner).__name__} has a forward hook, which the module inside does not run; "
                "remove it before certifying"
            )
        inner = inner._orig_mod if _compiles(inner) else inner.module
    assert isinstance(inner, nn.Module)
    return inner


def _compiles(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` returns. Asking for its type would load the
    compiler."""
    return "torch._dynamo" in sys.modules and type(module) is torch._dynamo.OptimizedModule


# ---- values


class _Digest(pickle.Pickler):
    """A hash of everything that can be reached from a model and from the globals that its code
    names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self, protocol=4)
        self.hash, self.seen = hashlib.sha256(), set[int]()
        homes = {type(module).__module__ for module in model.modules()}
        self.code = {name for name in homes if not name.startswith(("torch.", "wball."))}
        try:
            self.dump(model)
        except Exception as error:  # noqa: BLE001 - then only asking again can tell
            self.write(type(error).__name__.encode())

    def write(self, data: Any) -> None:
        self.hash.update(data)

    def persistent_id(self, value: Any) -> Any:
        """Tensors enter by their numbers, the model's own classes and functions by what they
        hold."""
        if isinstance(value, Tensor):
            return str(value.dtype), _bytes(value)
        if not isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            own = type(value).__module__.startswith("wball.") and not isinstance(value, nn.Module)
            return type(value).__name__ if own else None
        name = getattr(value, "__qualname__", value.__name__)
        if isinstance(value, ModuleType):  # counters and switches of other modules
            plain = {k: v for k, v in vars(value).items() if isinstance(v, (int, float, str))}
            return name, sorted(plain.items())
        if id(value) in self.seen or getattr(value, "__module__", None) not in self.code:
            return name
        self.seen.add(id(value))
        if not isinstance(value, FunctionType):
            return name, dict(vars(value))
        known = {**sys.modules, **value.__globals__}
        named = [known.get(part) for part in value.__code__.co_names]
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return name, named, cells, value.__defaults__, vars(value)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):  # another thread may change the mode
            held = {name: part for name, part in vars(value).items() if name != "training"}
            return str, (type(value),), held
        try:
            found = value.__reduce_ex__(4)
            return (str, (found,)) if isinstance(found, str) else found
        except Exception:  # noqa: BLE001 - locks and scripts refuse in their own ways
            frame = getattr(value, "gi_frame", None)  # of a generator
            inside = getattr(value, "__dict__", None) if frame is None else frame.f_locals
            return str, (type(value).__name__,), inside


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def probes(x: Tensor) -> Tensor:
    """Some of the images, and points on the way from the first one to noise beyond their range.

    A graph is the model everywhere, so points outside the ball and the box must agree as well.
    """
    every = max(1, -(-x.shape[0] // IMAGES))
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand((len(STEPS), *x.shape[1:]), generator=generator).to(x)
    if x.shape[0] == 0:
        return noise
    span = (x.amax() - x.amin()).clamp(min=1.0)
    noise = x.amin() - span + 3 * span * noise
    steps = x.new_tensor(STEPS).view(-1, *[1] * (x.ndim - 1))
    return torch.cat([x[::every], x[:1] + steps * (noise - x[:1])])


def unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Of a precision; GPUs may round what float32 convolutions read to ten bits."""
    unit = torch.finfo(dtype).eps / 2
    return max(unit, 2.0**-11) if device.type == "cuda" and dtype is torch.float32 else unit


def _drawn() -> tuple[Any, ...]:
    """The state of the random number generators that everybody shares."""
    # Every draw changes the position or the first of NumPy's keys, which its text has.
    numbers = str(np.random.get_state(legacy=False))  # noqa: NPY002 - only read
    return _bytes(torch.get_rng_state()), numbers, random.getstate()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Refuse a model that changes its buffers or attributes, or draws random numbers, between start
    and end."""
    before, drawn = _Digest(model).hash.digest(), _drawn()
    yield
    if drawn != _drawn():
        raise UnsupportedModule(
            f"{type(model).__name__}.forward draws random numbers: its answers are not certain"
        )
    if _Digest(model).hash.digest() != before:
        raise UnsupportedModule(
            f"{type(model).__name__}.forward changes the model's own buffers or attributes, or "
            "globals: its next answer may differ from the one that is certified"
        )


@torch.no_grad()
def compare(model: nn.Module, graph: Graph, points: Tensor) -> Tensor:
    """Refuse a graph that does not answer as the model does, logit by logit, up to the rounding of
    the points' dtype.

    Each logit has its own tolerance: one that is huge does not hide the others. The result is what
    each logit may be off by in the points' dtype, ``(classes,)``: every operation is given random
    errors in proportion to the magnitudes that enter it, so terms that cancel later count as well.
    """
    unit, wide = unit_roundoff(points.dtype, points.device), points.to(torch.float64)
    found = graph.logits(wide)
    noise = graph.rounded(wide, unit, torch.Generator().manual_seed(0)) - found
    slack = SAFETY * noise.square().mean(0).sqrt() * (torch.finfo(points.dtype).eps / 2 / unit)
    allowed = SAFETY * torch.where(torch.isfinite(noise), noise, 0.0).square().mean(0).sqrt()
    for way, expected in _answers(model, points):
        answer = found.repeat(MANY, 1)[: len(expected)]
        same = (answer - expected).abs() <= allowed
        overflows = ~torch.isfinite(noise).repeat(MANY, 1)[: len(expected)]  # the slack is infinite
        if not bool((same | overflows).all()):
            raise UnsupportedModule(
                f"{type(model).__name__}.forward computes something else than the functions it "
                f"calls{way}: look for tensors that are changed in place (+=, inplace=True) and "
                "read again, and for code outside PyTorch"
            )
    return slack.nan_to_num(math.inf, math.inf)


@contextmanager
def steady(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[None]:
    """Refuse a model that gives other logits for the same batches at the end than at the start."""

    @torch.no_grad()
    def answers() -> list[Tensor]:
        with evaluating(model):
            return [ask(model, batch).to(torch.float64) for batch in batches]

    first = answers()
    yield
    for before, after, batch in zip(first, answers(), batches, strict=True):
        unit = unit_roundoff(batch.dtype, batch.device)
        same = (after - before).abs() <= SAFETY * unit * (1 + before.abs())
        if not bool((same | ~torch.isfinite(before)).all()):
            raise UnsupportedModule(
                f"{type(model).__name__}.forward gave different logits for the same images at the "
                "start and at the end: its answers depend on state that calls change"
            )


def _answers(model: nn.Module, points: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What the model answers in the ways in which it may be asked, and how."""

    def asked(given: Tensor) -> Tensor:
        with torch.autocast(points.device.type, enabled=False):
            return ask(model, given).detach().to(torch.float64)

    def elsewhere() -> Tensor:
        with torch.no_grad():
            return asked(points)

    yield "", asked(points)
    with torch.enable_grad():
        yield " when gradients are recorded", asked(points.clone().requires_grad_(True))
    yield " for one image", asked(points[:1])
    yield " for many images", asked(points.repeat(MANY, *[1] * (points.ndim - 1)))
    with ThreadPoolExecutor(1) as other:
        yield " in another thread", other.submit(elsewhere).result()
    try:
        with torch.inference_mode():
            inferred = asked(points)
    except RuntimeError:  # a model that needs the versions of its tensors gives no answer there
        return
    yield " in inference mode", inferred.clone()
