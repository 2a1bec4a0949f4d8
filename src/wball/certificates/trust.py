"""What is certified is what runs: modules that may run something else than their own ``forward`` are refused.

A traced graph speaks of the ``forward`` of each module's type. Hooks, a patched ``forward``, another ``__call__`` and
parametrizations change what runs without changing the type, so all but a few known to be harmless are refused by
:func:`check_modules`. What remains is compared with the graph by :func:`compare`: on points of the ball itself, logit
by logit, with a tolerance that is the rounding of the model's own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from wball.model import ask

if TYPE_CHECKING:
    from wball.ball import Ball

HARMLESS_HOOKS: tuple[type, ...] = (
    WeightNorm,
    SpectralNorm,
    *(
        kind
        for kind in vars(prune).values()
        if isinstance(kind, type) and issubclass(kind, prune.BasePruningMethod) and kind.__module__ == prune.__name__
    ),
)
"""Hooks before ``forward`` that only compute a weight, the same one every time in evaluation mode."""

HARMLESS_PARAMETRIZATIONS: tuple[type, ...] = tuple(
    getattr(parametrizations, name)
    for name in ("_WeightNorm", "_SpectralNorm", "_Orthogonal")
    if hasattr(parametrizations, name)
)
"""Parametrizations that compute the same weight every time in evaluation mode."""

IMAGES, DRAWS = 8, 8
"""Images whose balls are probed, and runs with simulated rounding."""

SAFETY = 16.0
"""How many times the simulated rounding is forgiven: random errors estimate it to within a factor of two or three."""


class UnsupportedModule(TypeError):
    """The model contains an operation for which no bound is known. The message names it."""


class Graph(Protocol):
    """A traced network: what it answers, and what it answers when every operation rounds."""

    def logits(self, x: Tensor) -> Tensor: ...

    def rounded(self, x: Tensor, unit: float, generator: torch.Generator) -> Tensor: ...


# ---- modules


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside wrappers that compile or distribute it; a look-alike is left as it is."""
    inner: Any = model
    while True:
        check_module("", inner)
        if type(inner) in (nn.DataParallel, nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif type(inner) is torch._dynamo.OptimizedModule:
            inner = inner._orig_mod
        else:
            assert isinstance(inner, nn.Module)
            return inner


def check_modules(model: nn.Module) -> None:
    """Refuse a model any module of which may run something else than the ``forward`` of its type."""
    if nn.Module.__call__ is not nn.Module._wrapped_call_impl:
        raise UnsupportedModule("torch.nn.Module.__call__ is patched: what runs is not what the modules say")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        if getattr(torch_module, name):
            raise UnsupportedModule(
                f"a hook on every module is registered (torch.nn.modules.module.{name}), and would not be certified; "
                "remove it"
            )
    for name, module in model.named_modules():
        check_module(name, module)


def check_module(name: str, module: nn.Module) -> None:
    """Refuse hooks, patched methods and unknown parametrizations of one module."""
    title = f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModule(
            f"{title} is a script, which cannot be followed symbolically; certify the module itself"
        )
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    for hook in hooks:
        if type(hook) not in HARMLESS_HOOKS:
            raise UnsupportedModule(
                f"{title} has a forward hook ({getattr(hook, '__name__', type(hook).__name__)}), which may change what "
                "it computes; remove it before certifying. Only weight norm, spectral norm and pruning are known"
            )
    compiler = type(module) is torch._dynamo.OptimizedModule  # calls the module inside in a way of its own
    for attribute in ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward"):
        if attribute in vars(module) and not compiler:
            raise UnsupportedModule(
                f"{title} has a patched {attribute!r}, which hides what its class computes; "
                "write a class of its own for it"
            )
    for attribute in ("__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward"):
        if getattr(type(module), attribute) is not getattr(nn.Module, attribute) and not compiler:
            raise UnsupportedModule(f"{title} overrides {attribute!r}; only its 'forward' is followed")
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is not None and getattr(compiled, "_torchdynamo_orig_callable", None) != module._call_impl:
        raise UnsupportedModule(f"{title} has a compiled call that is not its own; certify the module before compiling")
    if parametrize.is_parametrized(module):
        for tensor, steps in module.parametrizations.items():  # type: ignore[operator, union-attr]
            for step in steps:
                if type(step) not in HARMLESS_PARAMETRIZATIONS:
                    raise UnsupportedModule(
                        f"{title}: the parametrization {type(step).__name__} of {tensor!r} is unknown; make it "
                        f"permanent with torch.nn.utils.parametrize.remove_parametrizations(module, {tensor!r})"
                    )


def own_type(module: nn.Module) -> type[nn.Module]:
    """The type that a module was created with: a parametrized one gets a class made for it alone."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) and len(kind.__bases__) == 1 else kind


# ---- values


def state(model: nn.Module) -> list[Any]:
    """What a model holds besides its modules: tensors with their versions, and plain attributes."""
    held: list[Any] = []
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None:
                held.append((id(module), name, id(value), value._version))
        held += [(id(module), name, _plain(value)) for name, value in vars(module).items() if not name.startswith("_")]
    return held


def _plain(value: Any, depth: int = 3) -> Any:
    """Numbers and texts themselves, also in small containers; of anything else only its type."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if depth and isinstance(value, dict) and len(value) <= 1000:
        return tuple((_plain(k, depth - 1), _plain(v, depth - 1)) for k, v in value.items())
    if depth and isinstance(value, (list, tuple, set)) and len(value) <= 1000:
        return tuple(_plain(v, depth - 1) for v in value)
    return type(value).__name__


@torch.no_grad()
def probes(x: Tensor, ball: Ball | None) -> Tensor:
    """Points of the balls around some images: centres, support points in random directions, samples, mixtures."""
    some = torch.linspace(0, max(0, x.shape[0] - 1), min(IMAGES, x.shape[0])).long().unique().to(x.device)
    centre = x[some]
    if ball is None or centre.shape[0] == 0:
        low, high = (float(x.min()), float(x.max())) if x.numel() else (0.0, 1.0)
        noise = torch.rand((4, *x.shape[1:]), generator=torch.Generator().manual_seed(0)).to(x)
        return torch.cat([centre, low + (max(high, low + 1.0) - low) * noise])
    ball, generator = ball.take(some), torch.Generator().manual_seed(0)
    directions = [torch.randn(centre.shape, generator=generator).to(centre) for _ in range(2)]
    ends = [ball.support(centre, g).point.to(centre) for g in directions]
    drawn = ball.sample(centre, generator).to(centre)
    share = torch.rand((centre.shape[0], *[1] * (centre.ndim - 1)), generator=generator).to(centre)
    return torch.cat([centre, *ends, drawn, ends[0] + share * (ends[1] - ends[0])])


def unit_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Of a precision; GPUs may round what float32 convolutions read to ten bits."""
    unit = torch.finfo(dtype).eps / 2
    return max(unit, 2.0**-11) if device.type == "cuda" and dtype is torch.float32 else unit


def compare(model: nn.Module, graph: Graph, points: Tensor, dtype: torch.dtype) -> None:
    """Refuse a graph that does not answer as the model does, logit by logit, up to rounding in the model's precision.

    Symbols do not show everything: a tensor that is changed in place under another name, a random layer, state that a
    call changes. Each logit has its own tolerance: one that is huge does not hide the others.
    """
    points = points.to(dtype)
    before = state(model)
    generator = torch.Generator().manual_seed(0)
    found = graph.logits(points.to(torch.float64))
    noise = torch.stack(
        [
            graph.rounded(points.to(torch.float64), unit_roundoff(dtype, points.device), generator) - found
            for _ in range(DRAWS)
        ]
    )
    allowed = SAFETY * noise.square().mean(0).sqrt()
    allowed = torch.maximum(allowed, allowed.nan_to_num(0.0).amax(0) / 4)
    for run in _runs(model, points):
        expected = run().to(found)
        same = (found - expected).abs() <= allowed
        broken = ~torch.isfinite(expected) & ~torch.isfinite(found)  # a model that overflows is not certified anyway
        if found.shape != expected.shape or not bool((same | broken).all()):
            raise UnsupportedModule(
                f"{type(model).__name__}.forward computes something else than its symbols say: look for tensors that "
                "are changed in place (+=, inplace=True) and read again, for hooks, and for random layers"
            )
    if state(model) != before:
        raise UnsupportedModule(
            f"{type(model).__name__}.forward changes the model's own buffers or attributes: its next answer may differ "
            "from the one that is certified"
        )


def _runs(model: nn.Module, points: Tensor) -> Iterator[Callable[[], Tensor]]:
    """The model with and without gradients."""

    def run(recording: bool) -> Tensor:
        random = torch.get_rng_state()
        with torch.autocast(points.device.type, enabled=False), torch.set_grad_enabled(recording):
            logits = ask(model, points).detach()
        if not torch.equal(random, torch.get_rng_state()):
            raise UnsupportedModule(f"{type(model).__name__}.forward draws random numbers: its answers are not certain")
        return logits

    yield lambda: run(False)
    yield lambda: run(True)
