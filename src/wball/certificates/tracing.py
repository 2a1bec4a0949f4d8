"""A model's graph, recorded from what it runs.

Every call of a PyTorch function goes through :class:`Recorder`, wherever it is made from: a module,
a hook, a patched method, a loop. The first run gets tensors without values (:class:`Valueless`), so
nothing it does can depend on the values of an image; the second one gets images and points around
them, in another batch size and with gradients. Both must record the same graph. A function that is
not on the list is refused by name, and so is what a list of functions cannot show: a tensor read
after it was changed under another name, values that leave the tensors, results in less precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from wball.certificates import trust
from wball.certificates.calls import (
    ATTRIBUTES,
    DESCRIPTIONS,
    FITTED,
    MADE_LIKE,
    Call,
    Source,
    attribute,
)
from wball.certificates.graph import (
    Graph,
    Input,
    Op,
)
from wball.certificates.trust import UnsupportedModule
from wball.model import evaluating

BATCH = 3
"""Images of the run without values; there are more points to probe."""


def trace(
    model: nn.Module, x: Tensor, check: Callable[[Graph], None] = lambda graph: None
) -> Graph:
    """The graph of a model in evaluation mode, for inputs like ``x`` (``(B, C, H, W)`` or ``(B,
    n)``).

    Refused: a model that runs or answers something else at points around the images ``x``.
    ``check`` is called with the graph before it is compared with the model, and may raise.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module to be bounded, got {type(model).__name__}"
        )
    inner = trust.unwrap(model)
    dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), x.dtype)
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedModule(
            f"the model computes in {dtype}, whose rounding may change its answers inside a "
            "certified ball; convert it with model.float(), then certify and run that model"
        )
    points = trust.probes(x).to(dtype)
    ran: trust.Ran = {}
    with trust.uncollected(), evaluating(model):  # another thread may change the mode outside
        with torch.no_grad():
            empty = Valueless(points.new_zeros((BATCH, *x.shape[1:])))
            graph = _record(inner, empty, ran)
            check(graph)
            # Hooks on gradients pass tensors through a function that cannot be seen; without
            # gradients they do nothing.
            hooked = any(
                module._backward_hooks or module._backward_pre_hooks for module in inner.modules()
            )
            with torch.set_grad_enabled(not hooked):
                seen = _record(inner, points.clone(), ran)
        if not _same(graph, seen):
            raise UnsupportedModule(
                f"{type(inner).__name__}.forward runs something else from call to call: what it "
                "does depends on the values of its input, the batch size, gradients, or its state"
            )
        with trust.undisturbed(inner, ran):
            slack = trust.compare(model, graph, points)
    return replace(graph, slack=slack)


def _record(model: nn.Module, x: Tensor, ran: trust.Ran) -> Graph:
    recorder = Recorder(model, x, ran)
    if isinstance(x, Valueless):
        x.watch = recorder.watch
    handles, tracer, profiler = RemovableHandle.next_id, sys.gettrace(), sys.getprofile()
    with torch.autocast(x.device.type, enabled=False), _Watcher(recorder), recorder:
        sys.settrace(recorder.follow)
        sys.setprofile(recorder.profile)
        try:
            logits = model(x)
        except Exception as error:
            if recorder.refusal is not None:
                raise recorder.refusal from None
            raise _unfollowed(f"{type(model).__name__}.forward", error) from error
        finally:
            sys.setprofile(profiler if callable(profiler) else None)
            sys.settrace(tracer)
    if recorder.refusal is not None:  # whatever the model caught
        raise recorder.refusal
    if RemovableHandle.next_id != handles:  # it counts the hooks so far
        raise trust.hidden(RemovableHandle)
    return recorder.graph(logits)


def _unfollowed(title: str, error: Exception) -> UnsupportedModule:
    said = str(error).partition("\n")[0]
    return UnsupportedModule(
        f"{title} cannot be followed without the values of the image ({type(error).__name__}: "
        f"{said}); write the model without branches that depend on the values of tensors"
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [part for part in tree_flatten(tree)[0] if isinstance(part, Tensor)]


def _same(first: Graph, second: Graph) -> bool:
    """Whether two graphs are the same operations on the same constants."""
    (ours, form), (theirs, other) = _parts(first), _parts(second)
    return bool(form == other) and all(map(_equal, ours, theirs))


def _parts(graph: Graph) -> Any:
    return tree_flatten(
        [[type(op), *(getattr(op, f.name) for f in fields(op) if f.compare)] for op in graph.ops]
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.allclose(first, second, 0, 0, equal_nan=True)
    return type(first) is type(second) and bool(first == second)


class Valueless(Tensor):
    """Shape, dtype and device of a tensor, and the tensors that share its memory. Reading its
    values is an error.

    PyTorch's own ``FakeTensor`` does the same, but loads its compiler for it, and all that this
    depends on. Here the shapes are followed by zeros, where no model can read them.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    behind: Tensor
    watch: Callable[..., None] | None = None  # told of every operation, in any thread

    @staticmethod
    def __new__(cls, behind: Tensor) -> Valueless:
        made: Valueless = Tensor._make_wrapper_subclass(
            cls,
            behind.shape,
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            device=behind.device,
        )
        made.behind = behind
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given: dict[int, Valueless] = {}
        watch = next((t.watch for t in _tensors((args, kwargs)) if isinstance(t, Valueless)), None)
        if watch is not None:
            watch(func, args, kwargs or {})

        def strip(value: Any) -> Any:
            if isinstance(value, Valueless):
                given[id(value.behind)] = value
                return value.behind
            return value

        def wrap(value: Any) -> Any:
            if id(value) in given:  # what works in place returns what it got
                return given[id(value)]
            made = cls(value)
            made.watch = watch
            return made

        args, kwargs = tree_map(strip, (args, dict(kwargs or {})))
        found = func(*args, **kwargs)
        if any(not isinstance(part, Tensor) for part in tree_flatten(found)[0]):
            raise RuntimeError(f"{func} asks for the values of a tensor, which depend on the image")
        return tree_map(wrap, found)


def memory(tensor: Tensor) -> int:
    """An identifier of a tensor's memory: tensors with the same one change together."""
    held = tensor.behind if isinstance(tensor, Valueless) else tensor
    return held.untyped_storage()._cdata


Name = tuple[int, int]


def label(tensor: Tensor) -> Name:
    """The key under which a tensor is recorded; swapping tensors changes their memory."""
    return id(tensor), memory(tensor)


class _Watcher(TorchDispatchMode):
    """Passes every operation that PyTorch runs to a recorder, including those that no function call
    shows."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # that would load PyTorch's compiler

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.recorder.watch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Recorder(TorchFunctionMode):
    """Turns the calls of one run into operations.

    A refusal is remembered, so that a model cannot catch it. Operations that run outside a recorded
    call (scripts, custom operators, other threads) must not touch what depends on the image.
    """

    def __init__(self, model: nn.Module, x: Tensor, ran: trust.Ran) -> None:
        super().__init__()
        self.ran = ran
        self.names = {id(module): name for name, module in model.named_modules()}
        self.batch, self.device = x.shape[0], x.device
        self.refusal: UnsupportedModule | None = None
        self.ops: list[Op] = []
        self.held: dict[Name, Tensor] = {}  # tensors that depend on the image
        self.place: dict[Name, int] = {}
        self.stale: set[Name] = set()  # changed under another name
        self.depends: set[int] = set()  # memory of tensors that depend on the image
        self.constants: list[tuple[Tensor, int]] = []  # with the version that was read
        self.untold = False  # whether a function of PyTorch runs that no recorded call shows
        self.inside: int | None = None  # the thread that is in a recorded call
        self._append(Input("image", (), tuple(x.shape[1:])), x)

    def graph(self, logits: Any) -> Graph:
        """The graph of the recorded operations, after the run."""
        if isinstance(logits, Tensor) and label(logits) in self.stale:
            raise self._changed("the result")
        if not isinstance(logits, Tensor) or label(logits) not in self.place or logits.ndim != 2:
            raise UnsupportedModule(
                "the model must return one tensor of logits (B, classes) that it computed itself"
            )
        if logits.shape[1] < 2:
            raise ValueError(
                f"certificates need logits of at least two classes, got {tuple(logits.shape)}; for "
                "one logit return stack([0, logit], 1)"
            )
        if any(_version(constant) != version for constant, version in self.constants):
            raise UnsupportedModule("a constant of the model is changed in place after it was used")
        return Graph(tuple(self.ops[: self.place[label(logits)] + 1]))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outer, self.inside, self.untold = self.inside, get_ident(), False
        sys.setprofile(None)
        sys.settrace(self.called_back)
        try:
            return self._call(func, args, kwargs or {})
        except UnsupportedModule as refusal:
            raise self.refuse(refusal) from None
        finally:
            self.inside = outer
            if outer is None:
                sys.settrace(self.follow)
                sys.setprofile(self.profile)

    def refuse(self, refusal: UnsupportedModule) -> UnsupportedModule:
        """Remember the first refusal, because the model may catch the exception."""
        self.refusal = self.refusal or refusal
        return self.refusal

    def follow(self, frame: FrameType, event: str, _: Any) -> Any:
        """Record which lines of the model's own code run."""
        if not trust.is_own(frame):
            return None
        _, lines, given = self.ran.setdefault(frame.f_code, (frame.f_globals, set(), []))
        lines.add(frame.f_lineno)
        if event == "call" and self.batch > BATCH and not trust.is_own(frame.f_back):
            given.append(dict(frame.f_locals))
        return self.follow

    def called_back(self, frame: FrameType, event: str, _: Any) -> None:
        """Refuse code of the model that runs inside a recorded call."""
        if trust.is_own(frame):
            raise self.refuse(trust.hidden(frame.f_code.co_name))

    def profile(self, frame: FrameType, event: str, called: Any) -> None:
        """Refuse compiled functions that read more than their arguments, and functions of PyTorch
        that end without a recorded call: they asked for values in a way that no operation shows, or
        for settings that may change."""
        if not event.startswith("c_") or not trust.is_own(frame):
            return
        of_torch, starts = trust.origin(called) == "torch", event == "c_call"
        # One computes from its argument, the other is compared both ways.
        told = called.__name__ not in ("from_numpy", "is_grad_enabled")
        self.untold |= starts and of_torch and told
        if not trust.computes(called) or (self.untold and of_torch and not starts):
            raise self.refuse(trust.hidden(called))

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check one operation before it runs."""
        tensors = _tensors((args, kwargs))
        if self.inside != get_ident() and (
            "empty" in str(func) or any(memory(t) in self.depends for t in tensors)
        ):
            raise self.refuse(
                UnsupportedModule(
                    f"{self.title(func)} runs where no function call of PyTorch shows it (a "
                    "script, a custom operator, another thread): no bound follows it"
                )
            )

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.refusal is not None:
            raise self.refusal
        tensors = _tensors((args, kwargs))
        sources = list({label(t): t for t in tensors if label(t) in self.place}.values())
        title = self.title(func)
        if "empty" in str(func):
            raise trust.hidden(title)  # memory that nothing was written to
        if any(isinstance(t, Valueless) and label(t) not in self.place for t in tensors):
            raise UnsupportedModule(
                f"{title} reads a tensor that was computed where no function call shows it"
            )
        if any(label(t) in self.stale for t in sources):
            raise self._changed(title)
        if sum(label(t) in self.place for t in tensors) == 1 and _reads_only_form(
            func, args, sources[0]
        ):
            plain, named = tree_map(
                lambda v: v.behind if isinstance(v, Valueless) else v, (args, kwargs)
            )
            return func(*plain, **named)  # a constant
        before = [_version(t) for t in tensors]
        shapes = [tuple(t.shape) for t in sources]
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if sources:  # it may have asked for values
                self.refuse(_unfollowed(title, error))
            raise
        if not sources:
            return result
        changed = [t for t, version in zip(tensors, before, strict=True) if _version(t) != version]
        if not isinstance(result, Tensor):
            if func not in DESCRIPTIONS and attribute(func) not in ATTRIBUTES:
                raise UnsupportedModule(
                    f"{title} reads the values of a tensor, or is not known: no bound follows it"
                )
            return result
        if any(not (t is result is args[0]) for t in changed):
            raise UnsupportedModule(f"{title} writes into another tensor: no bound follows it")
        if not changed and label(result) in self.place:
            return result  # one of its inputs, as it is
        if result.shape[:1] != (self.batch,) or any(shape[:1] != (self.batch,) for shape in shapes):
            raise UnsupportedModule(
                f"{title} mixes images of a batch: its output has shape {tuple(result.shape)}"
            )
        kept = all(torch.promote_types(t.dtype, result.dtype) == result.dtype for t in sources)
        if not kept or not result.dtype.is_floating_point:
            raise UnsupportedModule(
                f"{title} computes in {result.dtype}, which is less precise than what it reads"
            )
        places = [
            Source(t, self.place[label(t)], shape[1:])
            for t, shape in zip(sources, shapes, strict=True)
        ]
        shape, name = tuple(result.shape[1:]), self.module()[0]
        with _disable_current_modes():  # what follows is no part of the run
            call = Call(func, args, kwargs, places, shape, name, title, self.ops)
            op = call.op()
        self.constants += [(constant, _version(constant)) for constant in call.constants]
        if changed:
            mine = memory(result)
            self.stale.update(
                key for key, t in self.held.items() if t is not result and memory(t) == mine
            )
        self._append(op, result)
        return result

    def _append(self, op: Op | int, result: Tensor) -> None:
        """Record the origin of a tensor: a new operation, or the value of an old one."""
        if isinstance(op, Op):
            self.ops.append(op)
            op = len(self.ops) - 1
        self.held[label(result)], self.place[label(result)] = result, op
        self.depends.add(memory(result))

    def module(self) -> tuple[str, str]:
        """Name and type of the innermost module of the model that is running."""
        for frame, _ in walk_stack(sys._getframe(1)):
            owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
            if isinstance(owner, nn.Module) and id(owner) in self.names:
                return self.names[id(owner)], type(owner).__name__
        return "", "model"

    def title(self, func: Any) -> str:
        name, kind = self.module()
        called = attribute(func) or getattr(func, "__name__", str(func))
        return f"{called!r} in module {name!r} ({kind})"

    def _changed(self, title: str) -> UnsupportedModule:
        return UnsupportedModule(
            f"{title}: a tensor is read after it was changed in place (+=, inplace=True) under "
            "another name; work on a copy (.clone())"
        )


def _reads_only_form(func: Any, args: tuple[Any, ...], source: Tensor) -> bool:
    """Whether a call creates a constant with the shape, dtype or device of a tensor that depends on
    the image."""
    if args and args[0] is source:
        return func in MADE_LIKE
    return func in FITTED and len(args) > 1 and args[1] is source


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
