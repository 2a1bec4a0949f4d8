"""ONNX files as classifiers: images ``(B, C, H, W)`` in, logits out.

Exporters write graphs that differ at both ends: some take images as ``(B, H, W, C)``, some one image at a time, some
end in a softmax or have outputs beside the logits. In between the graph is run by :class:`OnnxModel` (PyTorch, with
gradients) or by :class:`ForwardOnly` (ONNX Runtime, without).
"""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx
import torch
from torch import Tensor, nn

from wball.attacks.adapters.onnx.graph import NEWEST, OLDEST, Graph
from wball.attacks.adapters.onnx.table import TYPES, Node

Layout = Literal["NCHW", "NHWC"]
Engine = Literal["auto", "torch", "onnxruntime"]

CHANNELS = (1, 3, 4)
"""How many channels images have: tells which axis of a fixed shape they are."""
LOGITS = ("logits", "output", "scores", "probabilities", "probs")
"""Names of the output to take where there are several."""
LARGEST = 2**31 - 1
"""Bytes of a message that protocol buffers can hold; weights beyond that stand in files of their own."""


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
        engine: ``"torch"`` runs the graph with PyTorch, with gradients; ``"onnxruntime"`` without (black-box attacks
            only), with every operator that ONNX Runtime has. ``"auto"``: the first, or, with a warning, the second if
            the graph has operators that are not known here and ONNX Runtime is installed.
        layout: axes of the graph's input; read off its shape, where that tells.
        output: name of the output with the logits, if there are several.

    A softmax at the end is left out, because logits say the same and do not round to 0 and 1.

    Raises ``ValueError`` that names what in the file is not understood.
    """
    if engine not in ("auto", "torch", "onnxruntime"):
        raise ValueError(f'engine must be "auto", "torch" or "onnxruntime", got {engine!r}')
    path = os.fspath(path)
    try:
        proto = onnx.load(path)
        _check(path, proto)
    except FileNotFoundError:
        raise FileNotFoundError(f"no ONNX file {path}") from None
    except Exception as error:  # protobuf, the checker and files of weights each have their own
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{path} is not a complete ONNX file ({first}): export or download it again"
        ) from error
    if engine != "onnxruntime":
        try:
            return OnnxModel(proto, layout=layout, output=output).eval()
        except NotKnown as error:
            if engine == "torch" or not _has_runtime():
                raise
            warnings.warn(
                f"{error}: the model runs in ONNX Runtime, without gradients", stacklevel=2
            )
    return ForwardOnly(proto, layout=layout, output=output).eval()


def _check(path: str, proto: onnx.ModelProto) -> None:
    """Ask onnx whether the file is whole. It wants every output to have a shape, which some exporters leave open."""
    if proto.ByteSize() > LARGEST:
        return onnx.checker.check_model(path)
    kinds = [
        output.type.tensor_type
        for output in proto.graph.output
        if output.type.HasField("tensor_type")
    ]
    kinds = [kind for kind in kinds if not kind.HasField("shape")]
    for kind in kinds:
        kind.shape.SetInParent()
    try:
        return onnx.checker.check_model(proto)
    finally:
        for kind in kinds:
            kind.ClearField("shape")


class NotKnown(ValueError):
    """The graph has something that PyTorch is not told here how to run."""


@dataclass(frozen=True)
class Ends:
    """The input and the output of a graph.

    Attributes:
        input: name of the input.
        output: name of the output.
        shape: of one image as the graph takes it; ``None`` for sizes that are free.
        batch: how many images the graph takes at once; ``None`` if that is free.
        dtype: of the input.
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
        return (
            self.shape
            if self.layout == "NCHW" or len(self.shape) != 3
            else (self.shape[2], *self.shape[:2])
        )


def find_ends(graph: onnx.GraphProto, layout: Layout | None, output: str | None) -> Ends:
    """The input that takes images and the output that gives logits, or a ``ValueError`` that says what is unclear."""
    if layout not in (None, "NCHW", "NHWC"):
        raise ValueError(f'layout must be "NCHW" or "NHWC", got {layout!r}')
    weights = {w.name for w in graph.initializer}
    inputs = [i for i in graph.input if i.name not in weights]
    if len(inputs) != 1:
        found = ", ".join(i.name for i in inputs)
        raise ValueError(f"the graph must have one input, images; it has {len(inputs)}: {found}")
    names = [o.name for o in graph.output]
    if output is not None and output not in names:
        raise ValueError(f"output must be one of {', '.join(names)}, got {output!r}")
    tensors = [o.name for o in graph.output if _may_be_scores(o.type)]
    if not tensors or (output is not None and output not in tensors):
        what = "the graph has no output" if output is None else f"output {output} is no output"
        raise ValueError(
            f"{what} of floating-point numbers; scikit-learn's has one with options={{'zipmap': False}}"
        )
    chosen = [output] if output is not None else tensors
    if len(chosen) > 1:
        chosen = [name for name in tensors if name in LOGITS][:1]
    if len(chosen) != 1:
        raise ValueError(
            f"the graph has the outputs {', '.join(names)}: say which one has the logits, output=NAME"
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
            f"the graph takes images of {dtype}, and pixels in [0, 1] are rounded to nothing there; export the model "
            "with a floating-point input"
        )
    return Ends(inputs[0].name, str(chosen[0]), shape, sizes[0] if sizes else None, dtype, layout)


def _may_be_scores(kind: onnx.TypeProto) -> bool:
    """Whether an output can be scores: a tensor of floating-point numbers, not of class indices."""
    known = TYPES.get(kind.tensor_type.elem_type, torch.float32)
    return kind.HasField("tensor_type") and known.is_floating_point


class _Classifier(nn.Module):
    """What both engines share: images as the graph takes them, and as many at a time."""

    ends: Ends

    def _run(self, x: Tensor) -> Tensor:
        """The output for images as the graph takes them."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.ends.image
        if len(wanted) == x.ndim - 1 and any(
            w not in (None, s) for w, s in zip(wanted, x.shape[1:], strict=True)
        ):
            sizes = ", ".join("any" if w is None else str(w) for w in wanted)
            raise ValueError(
                f"the ONNX model takes images of shape ({sizes}), got {tuple(x.shape[1:])}"
            )
        x = x.to(self.ends.dtype) if x.dtype != self._dtype() else x
        x = x.permute(0, 2, 3, 1) if self.ends.layout == "NHWC" and x.ndim == 4 else x
        if len(wanted) == 1 and x.ndim == 4:
            x = self._as_vectors(x, wanted[0])
        batch = self.ends.batch
        if batch is None or len(x) == batch:
            return self._flat(self._run(x), len(x))
        missing = -len(x) % batch
        filled = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x
        return torch.cat([self._flat(self._run(part), batch) for part in filled.split(batch)])[
            : len(x)
        ]

    @staticmethod
    def _as_vectors(x: Tensor, length: int | None) -> Tensor:
        """Images for a graph that takes rows of a table, as those of scikit-learn do."""
        if length not in (None, x[:1].numel()):
            shape = tuple(x.shape[1:])
            raise ValueError(
                f"the ONNX model takes {length} numbers, and images of shape {shape} have {x[:1].numel()}"
            )
        return x.flatten(1)

    def _dtype(self) -> torch.dtype:
        """The type that the graph computes in: the file's, unless the module was converted since."""
        return next((p.dtype for p in self.parameters()), self.ends.dtype)

    @staticmethod
    def _flat(found: Tensor, batch: int) -> Tensor:
        """Convolutional heads answer ``(B, K, 1, 1)``."""
        return found.flatten(1) if found.ndim > 2 and found[0].numel() == found.shape[1] else found

    def extra_repr(self) -> str:
        return f"input={self.ends.image}, output={self.ends.output!r}"


class OnnxModel(_Classifier):
    """An ONNX graph as a differentiable module. Use :func:`load`."""

    def __init__(
        self, proto: onnx.ModelProto, *, layout: Layout | None = None, output: str | None = None
    ) -> None:
        super().__init__()
        opset = next((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), 0)
        if not OLDEST <= opset <= NEWEST:
            raise NotKnown(
                f"operator set {opset} is not known here, those from {OLDEST} to {NEWEST} are; convert the file with "
                "onnx.version_converter"
            )
        if proto.functions:
            proto = onnx.inliner.inline_local_functions(proto)
        self.ends = find_ends(proto.graph, layout, output)
        try:
            self.graph = Graph(proto.graph, opset, [self.ends.output])
        except ValueError as error:
            raise NotKnown(
                f"{error}; export with constant folding, or install onnxruntime (pip install wball[onnxruntime]) for "
                "attacks without gradients"
            ) from error
        self._leave_out_softmax()
        self._free_batch()

    def _run(self, x: Tensor) -> Tensor:
        return self.graph({self.ends.input: x})[0]

    def _leave_out_softmax(self) -> None:
        """Take the logits of a graph that ends in a softmax over the classes."""
        last = self._made(self.ends.output)
        while last is not None and last.kind == "Identity":
            last = self._made(last.inputs[0])
        if last is None or last.kind != "Softmax" or last["axis"] not in (1, -1):
            return
        warnings.warn(
            "the ONNX model ends in a softmax, which is left out: attacks see its logits",
            stacklevel=4,
        )
        same = replace(last, kind="Identity", attributes={})
        self.graph.use(
            [same if node is last else node for node in self.graph.nodes], self.graph.outputs
        )

    def _made(self, name: str) -> Node | None:
        """The node that makes a value."""
        return next((node for node in self.graph.nodes if name in node.outputs), None)

    @torch.no_grad()
    def _free_batch(self) -> None:
        """Let a graph exported for a fixed batch size take any batch size, if its outputs show that it can.

        What stands in the way is often a shape that was written down as a number: those of ``Reshape`` are tried.
        """
        batch, shape = self.ends.batch, [size for size in self.ends.shape if size is not None]
        if batch is None or len(shape) < len(self.ends.shape):
            return
        generator = torch.Generator().manual_seed(0)
        x = torch.rand((2 * batch, *shape), generator=generator).to(self.ends.dtype)
        expected = torch.cat([self._flat(self._run(part), batch) for part in x.split(batch)])
        fixed = list(self.graph.nodes)
        for free in (lambda node: node, lambda node: self._reshape_freely(node, batch)):
            self.graph.use([free(node) for node in fixed], self.graph.outputs)
            try:
                found = self._flat(self._run(x), 2 * batch)
            except (RuntimeError, ValueError, IndexError):
                continue
            slack = 1e-3 * float(expected.abs().nan_to_num().max())
            if found.shape == expected.shape and torch.allclose(
                found, expected, 1e-3, slack, equal_nan=True
            ):
                self.ends = replace(self.ends, batch=None)
                return
        self.graph.use(fixed, self.graph.outputs)

    def _reshape_freely(self, node: Node, batch: int) -> Node:
        shape = self.graph.constant(node.inputs[1]) if node.kind == "Reshape" else None
        if shape is None or node["allowzero"] or shape.numel() == 0 or int(shape[0]) != batch:
            return node
        name = f"{node.inputs[1]}:any batch"
        self.graph.keep(
            name, torch.cat([torch.zeros_like(shape[:1]), shape[1:]])
        )  # 0: as many as there are
        return replace(node, inputs=(node.inputs[0], name))


def _has_runtime() -> bool:
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


class ForwardOnly(_Classifier):
    """An ONNX graph in ONNX Runtime: every operator, but no gradients, so that black-box attacks serve alone."""

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
        except Exception as error:  # it has a class of its own for each kind of failure
            raise ValueError(
                f"ONNX Runtime cannot run the model: {str(error).splitlines()[0]}"
            ) from error

    def _run(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise ValueError(
                "ONNX Runtime is given numpy arrays, which have no bfloat16: export the model as float32"
            )
        array = x.detach().cpu().contiguous().numpy()
        (found,) = self._session.run([self.ends.output], {self.ends.input: array})
        return torch.from_numpy(found).to(x.device)
