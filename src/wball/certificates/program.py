"""Exported programs: what a certificate is a statement about.

``torch.export`` turns a model into a list of operations on tensors, which is data: no Python of the
model runs afterwards, so nothing in it can depend on values, on the batch or on state.
:func:`exported` reads a module, an ``ExportedProgram`` or what a ``.pt2`` file holds, decomposed to
the core operators of ATen. :func:`check_agreement` compares the program with the module that it
came from.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from wball.certificates.normal import decompositions
from wball.inputs import per_image
from wball.model import ask, evaluating, find_logits, full_precision
from wball.provenance import fingerprint

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ToExport: TypeAlias = "nn.Module | ExportedProgram | str | os.PathLike[str]"
"""What certificates take for a model."""

OLDEST = (2, 11)
"""The oldest PyTorch whose programs have been read."""

BATCHES = (2, 512)
"""Batch sizes in which a program is compared with its module: the first for two images only."""

aten = torch.ops.aten
VIEWS: dict[Any, Any] = dict.fromkeys(
    (aten.view.default, aten._unsafe_view.default), aten.reshape.default
)
"""What runs instead of operations that need memory laid out as the exporter foresaw it, which
depends on device and layout."""

STEPS = (1e-3, 0.01, 0.1, 0.3)
"""Distances of the points at which they are compared, on the way from an image to noise."""

SAFETY = 16.0
"""How much more than the observed rounding two answers may differ by."""


class UnsupportedModule(TypeError):
    """A model or an operator that no bound follows. The message names it, where it is and why."""


@dataclass(frozen=True, eq=False)
class Program:
    """An exported program that maps images to logits.

    Attributes:
        exported: the program as PyTorch keeps it.
        nodes: its operations in normal form (:mod:`.normal`) and in order.
        image: the placeholder of the image.
        logits: the node whose value is returned.
        constants: tensors by the node that stands for them. Those of a module are its own, so
            training changes them here as well.
        names: of these nodes in the module.
        shape: the shape of one image.
        dtype: the precision of the images, that of the model.
    """

    exported: ExportedProgram
    nodes: tuple[Node, ...]
    image: Node
    logits: Node
    constants: Mapping[Node, Tensor]
    names: Mapping[str, Node]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of images, in the precision of the program."""
        return self.run(x.to(self.dtype))

    def run(self, x: Tensor) -> Tensor:
        """The logits of images, every operation in the precision of ``x``."""
        values: dict[Node, Any] = {self.image: x}
        for node, value in self.constants.items():
            values[node] = value.to(x.dtype) if value.dtype == self.dtype else value
        for node in self.nodes:
            values[node] = self.apply(node, values, x.dtype)
        logits: Tensor = values[self.logits]
        return logits

    def apply(self, node: Node, values: Mapping[Node, Any], dtype: torch.dtype) -> Any:
        """The value of one node, where ``dtype`` takes the place of the program's precision."""

        def translated(arg: Any) -> Any:
            return dtype if arg is self.dtype else arg

        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
        target: Any = VIEWS.get(node.target, node.target)
        found = target(*map(translated, args), **{k: translated(v) for k, v in kwargs.items()})
        made = not node.all_input_nodes and getattr(found, "dtype", None) == self.dtype
        return found.to(dtype) if made else found  # torch.arange(4.0) has a precision of its own

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the operations and of every bit of the constants."""
        names: dict[Node, str] = {}
        held = {node.name: value for node, value in self.constants.items()}
        digest = hashlib.sha256()
        for node in self.exported.graph.nodes:
            names[node] = f"%{len(names)}"
            settings = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory")}
            args = map_arg((node.args, settings), lambda n: _Name(names[n]))
            digest.update(
                f"{node.op} {node.target if node.op == 'call_function' else ''} ".encode()
            )
            digest.update(f"{args};".encode())
            if node.name in held:
                digest.update(fingerprint(held[node.name]).encode())
        return digest.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a ``.pt2`` file, which ``torch.export.load`` reads."""
        from torch.export import save

        save(self.exported, os.fspath(path))


class _Name(str):
    """A text that prints without quotes."""

    __repr__ = str.__str__


_programs: WeakKeyDictionary[nn.Module, Program] = WeakKeyDictionary()
"""The last program of each module, because exporting takes a second."""


def exported(model: ToExport, x: Tensor, held: Program | None = None) -> Program:
    """The program of a model in evaluation mode, for images like ``x`` (``(B, C, H, W)`` or ``(B,
    n)``).

    Raises :class:`UnsupportedModule` if PyTorch cannot export it, or if the program answers
    something else than the model (:func:`check_agreement`). With ``held`` only that is checked: the
    program must still be that of the model.
    """
    if _version() < OLDEST:
        raise RuntimeError(
            f"certificates read programs of torch.export and need PyTorch {OLDEST[0]}.{OLDEST[1]} "
            f"or later, got {torch.__version__}"
        )
    if isinstance(model, (str, os.PathLike)):
        from torch.export import load

        model = load(os.fspath(model))
    if not isinstance(model, nn.Module):
        if not hasattr(model, "graph_signature"):
            raise TypeError(
                "model must be a torch.nn.Module, a torch.export.ExportedProgram or the path of a "
                f".pt2 file to be bounded, got {type(model).__name__}"
            )
        with _quiet():
            program = held or _read(model, model.run_decompositions(decompositions()), x)
        check_agreement(model.module(), program, x)
        return program
    if held is not None:
        check_agreement(model, held, x)
        return held
    inner = unwrapped(model)
    known = _programs.get(inner)
    if known is not None and _still_of(known, inner, x):
        with suppress(UnsupportedModule):  # the module was changed since
            check_agreement(model, known, x)
            return known
    program = _exported_anew(inner, x)
    check_agreement(model, program, x)
    _programs[inner] = program
    return program


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that compile or distribute it."""
    inner: Any = model
    while True:
        if isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # compiled
            inner = inner._orig_mod
        else:
            assert isinstance(inner, nn.Module)
            return inner


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def _still_of(program: Program, inner: nn.Module, x: Tensor) -> bool:
    """Whether a program reads the tensors that the module has now, for images like ``x``."""
    now = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    known = program.dtype == _precision(inner, x) and all(
        name in now and program.constants[node].data_ptr() == now[name].data_ptr()
        for name, node in program.names.items()
    )
    on = {value.device.type for value in program.constants.values()} or {x.device.type}
    return known and program.shape == tuple(x.shape[1:]) and on == {x.device.type}


def _precision(model: nn.Module, x: Tensor) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)


def _exported_anew(model: nn.Module, x: Tensor) -> Program:
    from torch.export import Dim, export

    dtype = _precision(model, x)
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedModule(
            f"the model computes in {dtype}, whose rounding may change its answers inside a "
            "certified ball; convert it with model.float(), then certify and run that model"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModule(
            "the model is TorchScript, which torch.export does not read: certify the module that "
            "it was made from, or a program of torch.export (.pt2)"
        )
    images = torch.zeros((3, *x.shape[1:]), dtype=dtype, device=x.device)
    batch = ({0: Dim("batch", min=2)},)
    try:
        with _quiet(), evaluating(model), torch.no_grad():
            found = export(_Logits(model), (images,), dynamic_shapes=batch, strict=True)
            normal = found.run_decompositions(decompositions())
    except Exception as error:  # noqa: BLE001 - the exporter raises errors of many kinds
        raise UnsupportedModule(_reason(model, error)) from None
    return _read(found, normal, images)


class _Logits(nn.Module):
    """A model that returns nothing but its logits. Names inside it cannot be those that PyTorch's
    programs use themselves."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = find_logits(self.model(x), x.shape[0])
        alone = logits.ndim > 2 and logits.shape[2:].numel() == 1
        return logits.flatten(1) if alone else logits


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out PyTorch's own messages and the fused kernels that have no decomposition."""
    fused, silent = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            logging.disable(silent)


def _reason(model: nn.Module, error: Exception) -> str:
    """What the exporter says, in one sentence with the line of the model."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"torch.export cannot read {type(model).__name__}{line_of(str(error))}: "
        f"{said[0] if said else type(error).__name__}; write the model without branches on values, "
        "changes of its own state and a fixed number of images"
    )


def line_of(trace: str) -> str:
    """The line of the model in a trace: the last one that is neither PyTorch's nor of this file."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in .*(?:\n(?! *File ")(.*))?', trace)
    own = [x for x in lines if f"{os.sep}torch{os.sep}" not in x[0] and x[0] != __file__]
    if not own:
        return ""
    path, number, code = own[-1]
    return f" ({os.path.basename(path)}, line {number}{': ' * bool(code)}{code.strip()})"


def _read(source: ExportedProgram, found: ExportedProgram, x: Tensor) -> Program:
    """The program in normal form ``found``."""
    signature, graph = found.graph_signature, found.graph
    if changed := list(signature.buffers_to_mutate.values()):
        raise UnsupportedModule(
            f"the model changes {', '.join(changed)} when it runs: its next answer may differ from "
            "the one that is certified"
        )
    if len(signature.user_inputs) != 1 or len(signature.user_outputs) != 1:
        raise UnsupportedModule(
            "the model must take one tensor of images and return one tensor of logits (B, "
            f"classes), got {len(signature.user_inputs)} inputs and "
            f"{len(signature.user_outputs)} outputs"
        )
    held = {**found.state_dict, **found.constants}
    own = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    named = {**own, **signature.inputs_to_lifted_tensor_constants}
    by_name = {node.name: node for node in graph.nodes}
    image, logits = by_name[signature.user_inputs[0]], by_name[signature.user_outputs[0]]
    value, answer = image.meta["val"], logits.meta["val"]
    if isinstance(value.shape[0], int):
        raise UnsupportedModule(
            f"the program takes batches of {value.shape[0]} only: export it with a dynamic batch, "
            'dynamic_shapes=({0: torch.export.Dim("batch")},)'
        )
    if tuple(value.shape[1:]) != tuple(x.shape[1:]):
        raise ValueError(
            f"the program takes images of shape {tuple(value.shape[1:])}, got {tuple(x.shape[1:])}"
        )
    if logits is image or answer.ndim != 2 or not answer.is_floating_point():
        raise UnsupportedModule(
            "the model must return one tensor of logits (B, classes) that it computed itself, got "
            f"shape {tuple(answer.shape)[1:]} per image"
        )
    if answer.shape[1] < 2:
        raise ValueError(
            f"certificates need logits of at least two classes, got {answer.shape[1]}; for one "
            "logit return stack([0, logit], 1)"
        )
    needed = {logits}  # not errors that the program might raise on its way
    for node in reversed(graph.nodes):
        needed.update(node.all_input_nodes if node in needed else ())
    if any(node.op == "get_attr" for node in needed):
        raise UnsupportedModule(
            "the program calls graphs of its own (torch.cond, torch.while_loop and the like), which "
            "no bound follows"
        )
    return Program(
        source,
        tuple(node for node in graph.nodes if node.op == "call_function" and node in needed),
        image,
        logits,
        {by_name[name]: held[target] for name, target in named.items()},
        {target.removeprefix("model."): by_name[name] for name, target in own.items()},
        tuple(int(size) for size in value.shape[1:]),
        value.dtype,
    )


def place_of(node: Node) -> str:
    """Where an operation comes from: its name, the module and the line of the model."""
    modules = [name for name, _ in (node.meta.get("nn_module_stack") or {}).values() if name]
    inside = f" in {modules[-1].removeprefix('model.')}" if modules else ""
    return f"{node.target}{inside}{line_of(node.meta.get('stack_trace') or '')}"


# ---- the program and the module


def probes(x: Tensor) -> Tensor:
    """Images, and points between the first one and noise beyond their range."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand((len(STEPS), *x.shape[1:]), generator=generator).to(x)
    if x.shape[0] == 0:
        return noise
    span = (x.amax() - x.amin()).clamp(min=1.0)
    noise = x.amin() - span + 3 * span * noise
    steps = per_image(x.new_tensor(STEPS), x)
    return torch.cat([x, x[:1] + steps * (noise - x[:1])])


@full_precision()
@torch.no_grad()
def check_agreement(model: nn.Module, program: Program, x: Tensor) -> None:
    """Refuse a program whose logits differ from the module's by more than rounding: at images and
    at points around them, in two batch sizes.

    How much rounding there is, is seen by running the program in float32 and in float64.
    """
    points = probes(x).to(program.dtype)
    with evaluating(model):
        for part in (points[-BATCHES[0] :], *points.split(BATCHES[1])):
            try:
                ours = _finite(program.run(part))
                exact = _finite(program.run(part.double()))
                theirs = _finite(ask(model, part))
                coarse = _finite(program.run(part.float())).double()
            except (AssertionError, IndexError) as error:
                raise UnsupportedModule(
                    f"{type(model).__name__} raises an error at points around the images: "
                    f"{type(error).__name__}: {error}; let it answer for every image"
                ) from None
            finer = torch.finfo(ours.dtype).eps / torch.finfo(torch.float32).eps
            noise = SAFETY * finer * (coarse - exact).abs().amax(0)
            noise = noise + 64 * torch.finfo(ours.dtype).eps * exact.abs().amax(0)
            if ours.shape != theirs.shape or bool(((ours - theirs).abs() > noise).any()):
                raise UnsupportedModule(
                    f"{type(model).__name__} answers something else than its exported program "
                    f"(for a batch of {len(part)}): what it does depends on values, on the batch "
                    "or on its state; certify the program (torch.export) and deploy that"
                )


def _finite(logits: Tensor) -> Tensor:
    """Logits with 0 for those that overflow."""
    return logits.nan_to_num(0.0, 0.0, 0.0)
