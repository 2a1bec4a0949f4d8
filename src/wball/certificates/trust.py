"""Checks that the certified network is the one that runs.

Hooks and patched methods are recorded with everything else that runs. The graph of a model is
compared with the model by :func:`compare`: at images and at points around them, logit by logit, up
to the rounding of the model's own precision.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import hashlib
import math
import pickle
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib import _bootstrap
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    ModuleType,
    UnionType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.backends import PropModule

from wball.certificates.graph import Graph
from wball.inputs import per_image
from wball.model import ask, evaluating

MANY = 5
"""Number of copies of all points in a large batch."""

IMAGES, STEPS = 8, (1e-3, 0.01, 0.1, 0.3)
"""Number of images that are probed, and of points on the way from the first one to noise."""

SAFETY = 16.0
"""Tolerance of a logit as a multiple of its simulated rounding error, whose size is estimated from
some ten random errors."""


class UnsupportedModule(TypeError):
    """The model contains an operation without a known bound. The message names it."""


# ---- modules


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers that compile or distribute it; hooks of a wrapper are refused."""
    inner: Any = model
    while (compiled := _compiles(inner)) or type(inner) in (
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
    ):
        backend = inner.dynamo_ctx.callback if compiled else inner
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        compiler = getattr(backend, "compiler_fn", type(backend).__call__)
        homes = [getattr(runs, "__globals__", {}) for runs in (inner.forward, compiler)]
        patched = any(_module(h.get("__name__"), WATCHED) is not h for h in homes)
        if patched or inner._forward_hooks or inner._forward_pre_hooks:
            raise UnsupportedModule(
                f"{type(inner).__name__} has a forward hook, another forward or another compiler, "
                "which the module inside does not run; remove it before certifying"
            )
        inner = inner._orig_mod if compiled else inner.module
    assert isinstance(inner, nn.Module)
    return inner


def _compiles(module: nn.Module) -> bool:
    """Whether a module was returned by ``torch.compile``. Reading its type would import the
    compiler."""
    return "torch._dynamo" in sys.modules and type(module) is torch._dynamo.OptimizedModule


# ---- what the model's own code reads and calls


def words(text: str) -> frozenset[str]:
    """The names in a text, separated by blanks."""
    return frozenset(text.split())


LIBRARIES = words(
    "torch.nn torch._tensor torch.functional torch.jit torch.fx torch.utils.checkpoint "
    "torch._jit_internal torch._library torch._ops torch._dynamo torchvision timm einops sympy "
    "typing_extensions wball"
)
"""Packages whose own code is not watched, with what PyTorch itself calls."""

WATCHED = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages whose code is watched if the model's own code called it."""

KNOWN = LIBRARIES | WATCHED

COMPUTING = words(
    "torch wball math itertools collections re _operator _functools _collections _abc _warnings"
)
"""Modules whose compiled functions compute from their arguments alone. A function of PyTorch must
also be one that the recorder is told of."""

PURE = words(
    "abs all any callable divmod getattr hasattr isinstance issubclass iter len max min next pow "
    "print round sorted sum __build_class__ __new__ fromkeys array asarray arange zeros"
)
"""Functions of Python and NumPy, and methods of classes, that compute from their arguments
alone."""

INTERNAL = words(
    "__globals__ __code__ __closure__ __defaults__ __kwdefaults__ __annotations__ __traceback__ "
    "__hash__ gi_frame tb_frame grad_fn data_ptr _version _backward_hooks next_id import_module "
    "requires_grad_ datetime64 object set frozenset BUILD_SET SET_ADD SET_UPDATE"
)
"""Names that lead to variables of other code or of libraries, to addresses, to counters or to the
clock, and what makes sets, whose order depends on addresses."""

FORMATS = words("FORMAT_VALUE FORMAT_SIMPLE % str format __str__ __repr__")
"""Names and instructions that may tell the address of an object."""

DYNAMIC = words("getattr __dict__ __setattr__ __delattr__ __getattribute__")
"""Names of code that may read any attribute of an object."""

MODULE = vars(nn.Module()).keys()
"""Attributes that every module has."""

CACHES = [part for part in gc.get_referents(functools.lru_cache(len)) if isinstance(part, type)]
CACHES += [UnionType, np.ufunc]
"""The classes of a cache and of what it holds. Asked for it, a cache tells only its name."""

CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)

Ran = dict[CodeType, tuple[dict[str, Any], set[int], list[Any]]]
"""Code that ran: its globals, its lines that ran, and what libraries called it with."""


def computes(called: Any) -> bool:
    """Whether a compiled function is known to compute from its arguments alone."""
    home, method = origin(called), called.__module__ is None
    known = called.__name__ in PURE or (method and not isinstance(called.__self__, type))
    return home in COMPUTING or (known and home in ("builtins", "numpy"))


def origin(called: Any) -> str:
    """The package of a compiled function, or of the object whose method it is."""
    owner = called.__self__
    home = called.__module__ or (owner if isinstance(owner, type) else type(owner)).__module__
    return home.split(".")[0]


def hidden(value: Any) -> UnsupportedModule:
    """The refusal of an object or a function that may keep or read state."""
    name = getattr(value, "__qualname__", value if isinstance(value, str) else type(value).__name__)
    return UnsupportedModule(
        f"the model's code uses {name!r}, which may keep or read state that cannot be checked: its "
        "next answer may differ from the one that is certified; remove it from the forward pass"
    )


def is_own(frame: FrameType | None) -> bool:
    """Whether a frame is of the model's own code, or of a package called by it."""
    own = False
    while frame is not None:
        home = frame.f_globals
        # Nothing here may run code of the model's: an error would end the watching.
        name, spec = dict.get(home, "__name__"), dict.get(home, "__spec__")
        at_home = spec.name if type(spec) is ModuleSpec else name  # _collections_abc is renamed
        if home is vars(_bootstrap):
            return False
        if _module(name, LIBRARIES) is home:
            if not own or str(name).startswith("wball."):  # which calls the model
                return own
        elif not own:
            own = _module(at_home, WATCHED) is not home and "_tuple_new" not in home  # named tuples
        frame = frame.f_back
    return own


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep garbage: callbacks of other libraries on its collection are not the model's code."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@functools.lru_cache(4096)
def _belongs(name: str, packages: Set[str]) -> bool:
    return not packages.isdisjoint(accumulate(name.split("."), "{}.{}".format))


def _module(name: Any, packages: Set[str]) -> dict[str, Any]:
    """What the module of this name holds, if it belongs to one of the packages."""
    if type(name) is not str or name not in sys.modules or not _belongs(name, packages):
        return {}
    found: Any = sys.modules[name]
    found = found.m if isinstance(found, PropModule) else found
    getter = vars(type(found)).get("__getattr__")  # of an object in the place of its module
    return getattr(getter, "__globals__", vars(found))


def _is_library(value: Any) -> bool:
    """Whether a class or module is the one that a library has under its name."""
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    held = _module(home, KNOWN)
    return held is vars(value) or held.get(value.__name__) is value


class _Digest(pickle.Pickler):
    """A hash of everything that the code which ran may read: attributes, globals, closures and
    defaults that its lines name. An object that hides its state is refused."""

    def __init__(self, roots: Any, ran: Ran) -> None:
        super().__init__(self, protocol=4)
        self.hash, self.seen, self.ran = hashlib.sha256(), set[int](), ran
        self.names, self.reads = set[str](), list[Any]()
        for code, (known, lines, _) in ran.items():
            self._read(code, known, lines)
        self.every = not self.names.isdisjoint(DYNAMIC)
        for name in self.names & INTERNAL:
            raise hidden(name)
        tracer = sys.gettrace()
        sys.settrace(self._alone)
        try:
            self.dump((roots, self.reads, torch.get_rng_state()))
        except UnsupportedModule:
            raise
        except Exception:  # noqa: BLE001 - of an object that cannot be looked into
            raise hidden(roots[0]) from None
        finally:
            sys.settrace(tracer)

    def _alone(self, frame: FrameType, event: str, _: Any) -> None:
        """Refuse objects that answer by code of their own: they may hide their state."""
        if is_own(frame) and frame.f_code.co_name != "__getattr__":
            raise hidden(frame.f_code.co_name)

    def _read(self, code: CodeType, known: dict[str, Any], lines: set[int]) -> None:
        """Collect the names on lines of code, and the globals and modules that they read."""
        spans = [(start, end) for start, end, line in code.co_lines() if line in lines]
        module: Any = None  # whose attribute the next instruction may read
        for found in dis.get_instructions(code):
            name, how = found.argval, found.opname
            here = any(start <= found.offset < end for start, end in spans)
            self.names.update({how, found.argrepr} if here else ())
            if not here or not isinstance(name, str) or "FAST" in how:
                module = None
                continue
            self.names.add(name)
            if how in ("STORE_ATTR", "DELETE_ATTR") and name.startswith(("__", "requires_grad")):
                raise hidden(name)
            read = None
            if "GLOBAL" in how:
                read = known.get(name, vars(builtins).get(name))
            elif how == "IMPORT_NAME":
                read = sys.modules.get(name)
            elif module is not None and how in ("LOAD_ATTR", "LOAD_METHOD"):
                self.reads.pop()
                read = getattr(module, name, None)
            self.reads.append(read)
            module = read if isinstance(read, ModuleType) else None

    def write(self, data: Any) -> None:
        self.hash.update(data)

    def persistent_id(self, value: Any) -> Any:
        """Hash tensors by their values, and functions and classes by their contents."""
        if isinstance(value, Tensor):
            grad = value.grad if "grad" in self.names and value.is_leaf else None
            form = str((value.dtype, value.shape, value.stride(), value.storage_offset()))
            return form, self._memory(value), grad, self._named(vars(value))
        if isinstance(value, (staticmethod, classmethod, property)):
            return [value.fget] if isinstance(value, property) else [value.__func__]
        if not isinstance(value, CODE):
            return None
        name = getattr(value, "__qualname__", value.__name__)
        if id(value) in self.seen:
            return name
        self.seen.add(id(value))
        if isinstance(value, BuiltinFunctionType):
            if not computes(value):
                raise hidden(value)
            return name, None if isinstance(value.__self__, ModuleType) else value.__self__
        if not isinstance(value, FunctionType):
            told = value.__repr__ is object.__repr__  # type: ignore[comparison-overlap]
            if told and self.names & FORMATS and not _is_library(value):
                raise hidden(value)
            return name, getattr(value, "__bases__", ()), self._members(value)
        if value.__code__ not in self.ran:
            return name, self._named(vars(value))
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return name, cells, value.__defaults__, value.__kwdefaults__, self._named(vars(value))

    def _members(self, value: Any) -> dict[str, Any]:
        """What a class or a module holds: by name, or if any name may be read all its data."""
        whole = self.every and not _is_library(value)
        return {
            name: part
            for name, part in vars(value).items()
            if name in self.names
            or (whole and not isinstance(part, CODE) and not name.startswith(("__", "_abc_")))
            if not isinstance(part, GetSetDescriptorType)
        }

    def _memory(self, tensor: Tensor) -> bytes | None:
        """The memory behind a tensor, also what only other views show, once."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.seen:
            return None
        self.seen.add(storage._cdata)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        return whole.cpu().numpy().tobytes()

    def _named(self, held: dict[str, Any], names_only: bool = False) -> dict[str, Any]:
        """The attributes of an object that the executed code may have read."""
        every = self.every and not names_only
        return {name: part for name, part in held.items() if every or name in self.names}

    def reducer_override(self, value: Any) -> Any:
        kind, held = type(value), getattr(value, "__dict__", {})
        if isinstance(value, nn.Module):
            own = {k: part for k, part in held.items() if k in MODULE or _is_library(kind)}
            return str, (kind,), own | self._named(held)
        if kind in CACHES:
            return str, (kind, gc.get_referents(value))
        try:
            found = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - locks and scripts refuse in their own ways
            raise hidden(value) from None
        if isinstance(found, str):  # a name
            if kind.__module__.split(".")[0] not in WATCHED:
                raise hidden(value)
            return str, (found,), self._named(held)
        named = self._named(held, _is_library(kind))
        state = found[2] if len(found) > 2 and isinstance(found[2], tuple) else found[2:3]
        rest = [p for p in state if not isinstance(p, dict) or p.keys() != held.keys()]
        base = (value.base, str(value.flags)) if isinstance(value, np.ndarray) else None
        return str, (kind, found[1], base, named), rest, *found[3:5]


def probes(x: Tensor) -> Tensor:
    """Some of the images, and points between the first one and noise beyond their range.

    A graph is the model everywhere, so points outside the ball and the box must agree as well.
    """
    every = max(1, -(-x.shape[0] // IMAGES))
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand((len(STEPS), *x.shape[1:]), generator=generator).to(x)
    if x.shape[0] == 0:
        return noise
    span = (x.amax() - x.amin()).clamp(min=1.0)
    noise = x.amin() - span + 3 * span * noise
    steps = per_image(x.new_tensor(STEPS), x)
    return torch.cat([x[::every], x[:1] + steps * (noise - x[:1])])


def unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """The unit roundoff of a precision; GPUs may round the inputs of float32 convolutions to ten
    bits."""
    unit = torch.finfo(dtype).eps / 2
    return max(unit, 2.0**-11) if device.type == "cuda" and dtype is torch.float32 else unit


@contextmanager
def undisturbed(model: nn.Module, ran: Ran) -> Iterator[None]:
    """Refuse a model if what its code reads changes between start and end."""
    functions = [f for f in gc.get_referrers(*ran) if isinstance(f, FunctionType)]
    roots = model, functions, [given for _, _, given in ran.values()]
    before = _Digest(roots, ran).hash.digest()
    yield
    if _Digest(roots, ran).hash.digest() != before:
        raise UnsupportedModule(
            f"{type(model).__name__}.forward changes the model's own buffers or attributes, or "
            "globals, or draws random numbers: its next answer may differ from the one that is certified"
        )


@torch.no_grad()
def compare(model: nn.Module, graph: Graph, points: Tensor) -> Tensor:
    """Refuse a graph whose logits differ from the model's by more than the rounding of the points'
    dtype.

    Each logit has its own tolerance: one that is huge does not hide the others. The result is what
    each logit may be off by in the points' dtype, ``(classes,)``: every operation is given random
    errors in proportion to the magnitudes that enter it, so terms that cancel later count as well.
    """
    unit, wide = unit_roundoff(points.dtype, points.device), points.to(torch.float64)
    found = graph.logits(wide)
    noise = graph.rounded(wide, unit, torch.Generator().manual_seed(0)) - found
    slack = SAFETY * noise.square().mean(0).sqrt() * (torch.finfo(points.dtype).eps / 2 / unit)
    known = noise.isfinite()
    found = torch.where(known, found, math.inf)  # where the slack is infinite
    allowed = SAFETY * torch.where(known, noise, 0.0).square().mean(0).sqrt()
    for way, expected in _answers(model, points):
        answer = found.repeat(MANY, 1)[: len(expected)]
        if not bool((((answer - expected).abs() <= allowed) | answer.isinf()).all()):
            raise UnsupportedModule(
                f"{type(model).__name__}.forward computes something else than the functions it "
                f"calls{way}: look for tensors that are changed in place (+=, inplace=True) and "
                "read again, and for code outside PyTorch"
            )
    return slack.nan_to_num(math.inf, math.inf)


@contextmanager
def steady(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[None]:
    """Refuse a model whose logits for the same batches change between start and end."""

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
    """The model's outputs in each way of calling it, with a description of the way."""

    def asked(given: Tensor) -> Tensor:
        with torch.autocast(points.device.type, enabled=False):
            return ask(model, given).detach().to(torch.float64)

    yield "", asked(points)
    with torch.enable_grad():
        yield " when gradients are recorded", asked(points.clone().requires_grad_(True))
    yield " for one image", asked(points[:1])
    yield " for many images", asked(points.repeat(MANY, *[1] * (points.ndim - 1)))
    try:
        with torch.inference_mode():
            inferred = asked(points)
    except RuntimeError:  # a model that needs the versions of its tensors gives no answer there
        return
    yield " in inference mode", inferred.clone()
