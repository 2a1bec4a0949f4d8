"""ONNX files as classifiers: images ``(B, C, H, W)`` in, logits out.

Exporters write graphs that differ at both ends: some take images as ``(B, H, W, C)``, some one
image at a time, some end in a softmax or have outputs beside the logits. In between the graph is
run by :class:`OnnxModel` (PyTorch, with gradients) or by :class:`ForwardOnly` (ONNX Runtime,
without).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import onnx
import onnx.inliner
import onnx.version_converter
import torch
from torch import Tensor, nn

from wball.attacks.adapters.onnx.graph import OnnxGraph
from wball.attacks.adapters.onnx.table import TYPES
from wball.inputs import check_choice
from wball.model import NAMES

Layout = Literal["NCHW", "NHWC"]
Engine = Literal["auto", "torch", "onnxruntime"]

OLDEST, NEWEST = 13, 28
"""Supported operator sets. Older files are converted to the oldest; newer ones have not been
tested."""
CHANNELS = (1, 3, 4)
"""Numbers of channels that images have: they tell which axis of a fixed shape is that of the
channels."""


def load(
    path: str | os.PathLike[str],
    *,
    engine: Engine = "auto",
    layout: Layout | None = None,
    output: str | None = None,
) -> OnnxModel | ForwardOnly:
    """The classifier in an ONNX file, in evaluation mode.

    Args:
        path: the file.
        engine: ``"torch"`` runs the graph with PyTorch, with gradients. ``"onnxruntime"`` runs it
            without (black-box attacks only), with every operator that ONNX Runtime has. ``"auto"``
            takes the first; if the graph has unsupported operators and ONNX Runtime is installed,
            it warns and takes the second.
        layout: axes of the graph's input; ``None`` infers them from its shape.
        output: name of the output with the logits, if there are several.

    A softmax at the end is left out, because logits say the same and do not round to 0 and 1.

    Raises ``ValueError`` that names what in the file is not supported.
    """
    check_choice("engine", engine, ("auto", "torch", "onnxruntime"))
    path = os.fspath(path)
    try:
        proto = onnx.load(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"no ONNX file {path}") from None
    except Exception as error:  # protobuf and weight files raise their own exceptions
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{path} is not a complete ONNX file ({first}): export or download it again"
        ) from error
    if engine != "onnxruntime":
        try:
            return OnnxModel(proto, layout=layout, output=output).eval()
        except NotKnown as error:
            if engine == "torch" or find_spec("onnxruntime") is None:
                raise
            warnings.warn(
                f"{error}: the model runs in ONNX Runtime, without gradients", stacklevel=2
            )
    return ForwardOnly(proto, layout=layout, output=output).eval()


class NotKnown(ValueError):
    """The graph uses an operator that is not supported in PyTorch."""


@dataclass(frozen=True)
class Ends:
    """The input and the output of a graph.

    Attributes:
        input: name of the input.
        output: name of the output.
        shape: shape of one image as the graph takes it; ``None`` for sizes that are free.
        batch: number of images that the graph takes at once; ``None`` if that is free.
        dtype: type of the input.
        layout: axes of the input.
    """

    input: str
    output: str
    shape: tuple[int | None, ...]
    batch: int | None
    dtype: torch.dtype
    layout: Layout

    @property
    def image(self) -> tuple[int | None, ...]:
        """The shape of one image, ``(C, H, W)``."""
        last = self.layout == "NHWC" and len(self.shape) == 3
        return (self.shape[2], *self.shape[:2]) if last else self.shape


def find_ends(graph: onnx.GraphProto, layout: Layout | None, output: str | None) -> Ends:
    """The input that takes images and the output that gives logits, or a ``ValueError`` that says
    what is unclear."""
    if layout is not None:
        check_choice("layout", layout, ("NCHW", "NHWC"))
    weights = {w.name for w in graph.initializer}
    inputs = [i for i in graph.input if i.name not in weights]
    if len(inputs) != 1:
        found = ", ".join(i.name for i in inputs)
        raise ValueError(
            f"the graph must have one input, images; it has {len(inputs)}: {found}; export it again"
        )
    kind = inputs[0].type.tensor_type
    sizes = [d.dim_value if d.dim_value > 0 else None for d in kind.shape.dim]
    shape = tuple(sizes[1:])
    if layout is None:
        last = len(shape) == 3 and shape[2] in CHANNELS and shape[0] not in CHANNELS
        layout = "NHWC" if last else "NCHW"
    dtype = TYPES.get(kind.elem_type, torch.float32)
    if not dtype.is_floating_point:
        raise ValueError(
            f"the graph takes images of {dtype}, which rounds pixels in [0, 1]; export the model with a "
            "floating-point input"
        )
    batch = sizes[0] if sizes else None
    return Ends(inputs[0].name, _find_output(graph, output), shape, batch, dtype, layout)


def _find_output(graph: onnx.GraphProto, output: str | None) -> str:
    """The output with the logits: a tensor of floating-point numbers, not of class indices."""
    names = [o.name for o in graph.output]
    if output is not None:
        check_choice("output", output, names)
    tensors = [
        o.name
        for o in graph.output
        if o.type.HasField("tensor_type")
        and TYPES.get(o.type.tensor_type.elem_type, torch.float32).is_floating_point
        and output in (None, o.name)
    ]
    if not tensors:
        raise ValueError(
            f"the graph has no output {output or ''} of floating-point numbers; scikit-learn's has one with "
            "options={'zipmap': False}"
        )
    chosen = tensors if len(tensors) == 1 else [name for name in tensors if name in NAMES]
    if not chosen:
        raise ValueError(
            f"the graph has the outputs {', '.join(names)}: say which one has the logits, output=NAME"
        )
    return str(chosen[0])


class _Classifier(nn.Module):
    """Base class of both engines: converts images to the layout and batch size that the graph
    expects."""

    ends: Ends

    def _run(self, x: Tensor) -> Tensor:
        """The output for images in the layout of the graph."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.ends.image
        if len(wanted) == 1 and x.ndim == 4:  # rows of a table, the input of scikit-learn models
            x = x.flatten(1)
        if len(wanted) == x.ndim - 1 and any(
            w not in (None, s) for w, s in zip(wanted, x.shape[1:], strict=True)
        ):
            sizes = ", ".join("any" if w is None else str(w) for w in wanted)
            raise ValueError(
                f"the ONNX model takes images of shape ({sizes}), got {tuple(x.shape[1:])}"
            )
        # The type that the graph computes in: the file's, unless the module was converted since.
        x = x.to(next((p.dtype for p in self.parameters()), self.ends.dtype))
        x = x.permute(0, 2, 3, 1) if self.ends.layout == "NHWC" and x.ndim == 4 else x
        batch = self.ends.batch
        if batch is None:
            found = self._run(x)
        else:
            filled = torch.cat([x, x[-1:].expand(-len(x) % batch, *x.shape[1:])])
            found = torch.cat([self._run(part) for part in filled.split(batch)])[: len(x)]
        # Convolutional heads return (B, K, 1, 1).
        return found.flatten(1) if found.ndim > 2 and found[0].numel() == found.shape[1] else found


class OnnxModel(_Classifier):
    """An ONNX graph as a differentiable module. Use :func:`load`."""

    def __init__(
        self, proto: onnx.ModelProto, *, layout: Layout | None = None, output: str | None = None
    ) -> None:
        super().__init__()
        self.ends = find_ends(proto.graph, layout, output)
        opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
        try:
            if opset > NEWEST:
                raise ValueError(
                    f"operator set {opset} is newer than the newest supported one, {NEWEST}"
                )
            if proto.functions:
                proto = onnx.inliner.inline_local_functions(proto)
            if opset < OLDEST:
                proto, opset = onnx.version_converter.convert_version(proto, OLDEST), OLDEST
            self.graph = OnnxGraph(proto.graph, opset, [self.ends.output])
        except (ValueError, RuntimeError, onnx.version_converter.ConvertError) as error:
            raise NotKnown(
                f"{error}; export with constant folding, or install onnxruntime (pip install wball[onnxruntime]) for "
                "attacks without gradients"
            ) from error
        self._leave_out_softmax()
        self._free_batch()

    def _run(self, x: Tensor) -> Tensor:
        return self.graph({self.ends.input: x})[0]

    def _leave_out_softmax(self) -> None:
        """Drop a final softmax over the classes, so that the output is logits."""
        makers = {name: node for node in self.graph.nodes for name in node.outputs}
        last = makers.get(self.ends.output)
        while last is not None and last.kind == "Identity":
            last = makers.get(last.inputs[0])
        if last is None or last.kind != "Softmax" or last.attributes["axis"] not in (1, -1):
            return
        warnings.warn(
            "the ONNX model ends in a softmax, which is left out: attacks see its logits",
            stacklevel=4,
        )
        same = replace(last, kind="Identity", attributes={})
        self.graph.nodes = [same if node is last else node for node in self.graph.nodes]

    @torch.no_grad()
    def _free_batch(self) -> None:
        """Let a graph that was exported for a fixed batch size take any batch size, if its outputs
        show that it can. The usual obstacle is a shape stored as a number: the shapes of
        ``Reshape`` are freed."""
        batch, shape = self.ends.batch, self.ends.shape
        if batch is None or None in shape:
            return
        generator = torch.Generator().manual_seed(0)
        x = torch.rand((2 * batch, *shape), generator=generator).to(self.ends.dtype)  # type: ignore[arg-type]
        expected, fixed = self(x), dict(self.graph.constants)
        for node in self.graph.nodes:
            sizes = fixed.get(node.inputs[-1])
            if node.kind == "Reshape" and sizes is not None and sizes[:1].tolist() == [batch]:
                free = torch.cat([torch.zeros_like(sizes[:1]), sizes[1:]])  # 0: as many as given
                self.graph.constants[node.inputs[1]] = free
        ends, self.ends = self.ends, replace(self.ends, batch=None)
        try:
            found = self(x)
            slack = 1e-3 * float(expected.abs().nan_to_num().max())
            same = found.shape == expected.shape and torch.allclose(
                found, expected, 1e-3, slack, equal_nan=True
            )
        except (RuntimeError, ValueError, IndexError):
            same = False
        if not same:
            self.ends, self.graph.constants = ends, fixed


class ForwardOnly(_Classifier):
    """An ONNX graph in ONNX Runtime. It supports every operator but has no gradients, so only
    black-box attacks can be used."""

    fingerprint: Tensor

    def __init__(
        self, proto: onnx.ModelProto, *, layout: Layout | None = None, output: str | None = None
    ) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                "this engine needs ONNX Runtime: pip install wball[onnxruntime]"
            ) from error
        self.ends = find_ends(proto.graph, layout, output)
        content = proto.SerializeToString()
        self.register_buffer(
            "fingerprint", torch.tensor(list(hashlib.sha256(content).digest()), dtype=torch.uint8)
        )
        try:
            self._session: Any = onnxruntime.InferenceSession(
                content, providers=onnxruntime.get_available_providers()
            )
        except Exception as error:  # it has a separate exception for each kind of failure
            raise ValueError(
                f"ONNX Runtime cannot run the model: {str(error).splitlines()[0]}"
            ) from error

    def _run(self, x: Tensor) -> Tensor:
        array = x.detach().cpu().contiguous().numpy()
        (found,) = self._session.run([self.ends.output], {self.ends.input: array})
        return torch.from_numpy(found).to(x.device)
