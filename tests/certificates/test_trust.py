"""What is certified is what runs: hostile, careless and unusual models are followed or refused."""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import itertools
import math
import operator
import os
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import wball
from certificates.exact import gap
from wball.certificates import (
    UnsupportedModule,
    VerificationStatus,
    calls,
    certificate,
    certify,
    verify,
)
from wball.certificates.graph import Diagonal
from wball.certificates.tracing import trace

BALL = wball.LinfBall(0.3, box=(0.0, 2.0))


def dense(seed: int = 0, side: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(side * side, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def images(count: int = 4) -> Tensor:
    return torch.rand((count, 1, 4, 4), generator=torch.Generator().manual_seed(0))


def refused(model: nn.Module, match: str | None = None, ball: Any = BALL) -> None:
    with pytest.raises(UnsupportedModule, match=match):
        certify(model, images(), torch.zeros(4, dtype=torch.long), ball)


def followed(net: nn.Module) -> None:
    """The margin of a ball of one point is that of the model as it runs."""
    x = images()
    logits = net(x).detach().double()
    y = logits.argmax(1)
    found = certify(net, x, y, wball.WassersteinBall(0.0)).margin
    torch.testing.assert_close(found, gap(logits, y), atol=1e-4, rtol=0)


class Around(nn.Module):
    """A small network, and what is computed around it."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.rest, self.function = dense(), function
        self.train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.rest, x)


def before(function: Callable[[Tensor], Tensor]) -> Around:
    """A network that reads what a function makes of the image."""
    return Around(lambda net, x: net(function(x)))


def flip(module: nn.Module, given: Any, out: Tensor) -> Tensor:
    """Another answer where a pixel exceeds 1, which no image shows."""
    return torch.where(given[0].flatten(1).amax(1, keepdim=True) > 1, -out, out)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "divisor": lambda: nn.Sequential(nn.AvgPool2d(2, 1, divisor_override=-4), dense(side=3)),
    "mul": lambda: before(lambda h: h * h),
    "'mul'": lambda: before(lambda h: torch.mul(h, other=h)),
    "matmul": lambda: before(lambda h: torch.matmul(h, other=h)),
    "getitem.*mixes": lambda: before(lambda h: F.linear(h, weight=h[0, 0])),
    "dropout": lambda: before(lambda h: F.dropout(torch.relu(h), 0.5)),
    "div": lambda: before(lambda h: torch.div(h, 0.1, rounding_mode="floor")),
    "mean.*mixes images": lambda: before(lambda h: torch.relu(h - h.mean(0, keepdim=True))),
    "mean.*mixes": lambda: before(lambda h: torch.relu(h - h.mean())),
    "random numbers": lambda: Around(lambda net, x: (net(x), torch.rand(1))[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_bound_is_refused(message: str) -> None:
    """Products in keywords, values that leave the tensors, chance, and other images of the
    batch."""
    refused(REFUSED[message](), message)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_precision_that_loses_digits_is_refused(dtype: torch.dtype) -> None:
    refused(before(lambda x: x.to(dtype).to(torch.float32)), "to")
    refused(Around(lambda net, x: net(x).to(torch.float32)).double(), "less precise")
    if dtype.is_floating_point:
        refused(dense().to(dtype), r"model\.float\(\)")


def test_a_large_shift_keeps_the_digits_of_the_scale() -> None:
    mask = torch.tensor([0.0, 0.0, -1e17], dtype=torch.float64)
    net = Around(lambda net, x: net(x) + mask - mask).double()
    for op in trace(net, images().double()).ops:
        if isinstance(op, Diagonal):
            assert torch.equal(op.scale, torch.ones_like(op.scale))


# ---- hooks and patches


@pytest.mark.parametrize("place", ["root", "relu", "linear", "container"])
def test_hooks_and_patches_are_followed_or_refused(place: str) -> None:
    """What they compute is recorded like the rest; a branch on values has no bound."""

    def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
        net = nn.Sequential(dense())
        change({"root": net, "relu": net[0][2], "linear": net[0][1], "container": net[0]}[place])
        return net

    def patch(module: nn.Module) -> None:
        plain = module.forward
        module.forward = lambda h: 1.01 * plain(h)

    refused(changed(lambda module: module.register_forward_hook(flip)))
    followed(changed(lambda m: m.register_forward_hook(lambda _, __, out: -out)))
    followed(changed(lambda m: m.register_forward_pre_hook(lambda _, given: (1.01 * given[0],))))
    followed(changed(patch))


def test_hooks_on_every_module_are_followed_and_on_wrappers_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda _, __, out: 1.01 * out)
    try:
        followed(dense())
    finally:
        handle.remove()
    for wrapped in (nn.DataParallel(dense()), torch.compile(dense(), backend="eager")):
        wrapped.register_forward_hook(flip)
        refused(wrapped, "forward hook")
    refused(torch.compile(dense(), backend=lambda graph, _: graph), "another compiler")


def test_hooks_on_gradients_do_not_matter() -> None:
    net, x = dense(), images()
    y = net(x).argmax(1)
    plain = certify(net, x, y, BALL).margin
    net[2].register_full_backward_hook(lambda *_: None)
    assert torch.equal(certify(net, x, y, BALL).margin, plain)


def test_a_class_whose_forward_is_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, h: torch.sin(h))
    refused(dense(), "no bound is known for 'sin'")


def test_subclasses_are_followed_or_refused() -> None:
    class Bent(nn.ReLU):
        def forward(self, h: Tensor) -> Tensor:
            return torch.relu(h) + torch.relu(h - 1)

    class Posing(nn.ReLU):
        def __call__(self, h: Tensor) -> Tensor:
            return -h

    Posing.__module__ = "torch.nn.modules.activation"
    for kind in (Bent, Posing):
        net = dense()
        net[2] = kind()
        followed(net)


def test_a_wrapper_that_only_looks_like_one_is_not_looked_through() -> None:
    class Posing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = dense()

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self._orig_mod(x))

    class Parallel(nn.DataParallel):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.module(x))

    refused(Posing(), "'sin'")
    refused(Parallel(dense()), "'sin'")


HARMLESS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight norm": lambda layer: nn.utils.weight_norm(layer),  # type: ignore[no-any-return]
    "old spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned twice": lambda layer: prune.random_unstructured(
        prune.l1_unstructured(layer, "weight", 2), "weight", 2
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_changes_of_weights_are_in_the_weights(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.ConvTranspose2d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3),
    )  # fmt: skip
    for index in (0, 2, 5):
        net[index] = HARMLESS[name](net[index])
    net(images())  # a step of spectral norm's power iteration
    net.eval()
    followed(net)
    with torch.no_grad():  # weights that change after the last call are those of the next one
        for parameter in net.parameters():
            parameter.mul_(2.0)
    followed(net)


def masked(net: nn.Module, x: Tensor) -> Tensor:
    """Changes a tensor in place through a view, behind a logit that is huge."""
    h: Tensor = net(x)
    view = h.view(-1, 3, 1)
    view += torch.relu(view)
    return h + torch.tensor([0.0, 0.0, -1e9])


def only_above(x: Tensor) -> Tensor:
    """Changes its input in place under another name, which shows only where pixels exceed 1."""
    view = x.flatten(1)
    view += 50 * torch.relu(view - 1.0)
    return x


def test_a_huge_logit_does_not_hide_a_wrong_graph() -> None:
    refused(Around(masked), "under another name")
    refused(before(only_above), "under another name", wball.LinfBall(0.01))


def constants(x: Tensor) -> Tensor:
    """Constants in the form of a tensor."""
    mean = torch.full((1, 1, 1), 0.3, dtype=torch.float64)
    h = (x - mean.to(x)) / mean.type_as(x).expand_as(x)
    return h + torch.ones_like(x) - x.new_full((x.shape[0], 1, 4, 4), 0.5)


def helpers(x: Tensor) -> Tensor:
    """Containers and functions of the standard library and NumPy, as ordinary models use them."""
    parts = OrderedDict(flat=x.reshape(len(x), int(np.prod(x.shape[1:]))))
    return functools.reduce(operator.add, parts.values()).view(x.shape) * math.sqrt(2.0)


FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "helpers": helpers,
    "relu_": lambda h: h.relu_(),
    "module": lambda h: nn.ReLU(inplace=True)(h) + h,
    "add_": lambda h: h.add_(torch.relu(h)),
    "scaled": lambda h: h.mul_(2.0).sub_(0.5),
    "cached": lambda h: h * (2 + cached(0)[0]),
    "by name": lambda h: getattr(F, "".join(["re", "lu"]))(h),
    "constants": constants,
}


@pytest.mark.parametrize("kind", FOLLOWED)
def test_work_in_place_and_constants_are_followed(kind: str) -> None:
    followed(before(lambda x: FOLLOWED[kind](2 * x - 1)))


CALLS = {
    "one image": lambda x: len(x) == 1,
    "many images": lambda x: len(x) > 32,
    "recorded": lambda x: x.requires_grad,
    "gradients": lambda x: torch.is_grad_enabled(),
    "inference": lambda x: torch.is_inference_mode_enabled(),
    "thread": lambda x: threading.current_thread() is not threading.main_thread(),
}
"""Ways to call a model in which its graph was once not compared with it."""


@pytest.mark.parametrize("way", CALLS)
def test_a_model_that_answers_otherwise_in_some_calls_is_refused(way: str) -> None:
    refused(
        Around(lambda net, x: -net(x) if CALLS[way](x) else net(x)),
        "something else|get_ident|inference",
    )


@torch.jit.script
def scripted(h: Tensor) -> int:
    h.add_(50 * torch.relu(h - 1.0))
    return 0


def in_a_thread(h: Tensor) -> None:
    work = threading.Thread(target=lambda: Tensor.add_(h, torch.relu(h)))
    work.start()
    work.join()


UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "script": scripted,
    "foreach": lambda h: torch._foreach_add_([h], 1.0),
    "operator": lambda h: torch.ops.aten.mul_(h, 2.0),
    "data": lambda h: h.data.add_(1.0),
    "thread": in_a_thread,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", UNSEEN)
def test_work_in_place_that_no_call_shows_is_refused(name: str) -> None:
    """A scripted function that changed its argument was invisible."""

    def changed(x: Tensor) -> Tensor:
        h = x * 1.0
        UNSEEN[name](h)
        return h

    refused(before(changed), None, wball.LinfBall(0.01))


def _undisclosed(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return bool(x.numpy().max() > 1)


PEEKS: dict[str, Callable[[Tensor], bool]] = {
    "branch": lambda x: bool(x.sum() > 9),
    "per image": lambda x: bool(x.flatten(1).sum(1)[0] > 9),
    "item": lambda x: x.flatten(1)[0, 0].item() > 1,
    "list": lambda x: max(x.flatten(1).tolist()[0]) > 1,
    "numpy": lambda x: bool(x.detach().numpy().max() > 1),
    "array": lambda x: bool(np.asarray(x.detach()).max() > 1),
    "memory": lambda x: max(bytes(x.untyped_storage())) > 1,
    "allclose": lambda x: torch.allclose(torch.relu(x - 1.0), torch.zeros(1)),
    "undisclosed": _undisclosed,
    "mask": lambda x: x[x > 1].numel() > 0,
}


@pytest.mark.parametrize("name", PEEKS)
@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_a_model_cannot_catch_a_refusal(name: str, kind: type[BaseException]) -> None:
    """A branch on pixel values inside ``try`` was certified, and confirmed by the checker."""

    def catching(net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = net(x)
        try:
            return -out if PEEKS[name](x) else out
        except kind:
            return out

    net, x, ball = Around(catching), images(), wball.LinfBall(0.01)
    refused(net, None, ball)
    y = dense()(x).argmax(1)
    found = verify(net, x, y, ball, certify(dense(), x, y, ball))
    assert set(found.status) == {VerificationStatus.UNFOLLOWED} and found.reason


class Holder:
    calls = 0


class Lying(list[int]):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return Lying, ()


def bump(holder: Any) -> int:
    holder.calls += 1
    return holder.calls  # type: ignore[no-any-return]


@functools.lru_cache
def cached(key: int) -> list[int]:
    return [key]


def defaulted(held: list[int] = [0]) -> int:  # noqa: B006 - the trap
    held[0] += 1
    return held[0]


def in_closure() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


HELD, SEEN, HOLDER, CLOSURE = itertools.count(), np.zeros(1), Holder(), in_closure()
CONTEXT, LOCAL = contextvars.ContextVar("calls", default=0), threading.local()
LOCAL.calls, GENERATOR, LYING = 0, (k for k in itertools.count()), Lying([0])
for place in (math, nn.ReLU6, defaulted):
    place.calls = 0  # type: ignore[union-attr]
NUMBERS = np.random.default_rng(0)

STATE: dict[str, Callable[[Any], float]] = {
    "attribute": bump,
    "class": lambda net: bump(type(net)),
    "class by any name": lambda net: getattr(type(net), "".join(["sto", "re"])).__iadd__(1)[0],
    "list": lambda net: net.held.append(0) or 0.0,
    "buffer": lambda net: float(net.seen.add_(1)),
    "array of the model": lambda net: net.array.__iadd__(1)[0],
    "array behind that": lambda net: net.array.base[1:].__iadd__(1)[0],
    "object of the model": lambda net: bump(net.holder),
    "counter of the model": lambda net: next(net.count),
    "mode": lambda net: len([net.rest.train(not net.rest.training)]),
    "data of a buffer": lambda net: float(net.seen.data.add_(1)),
    "memory of a buffer": lambda net: net.seen.numpy().__iadd__(1)[0],
    "memory behind a buffer": lambda net: float(net.seen.as_strided((1,), (1,), 1).add_(1)),
    "attribute of a buffer": lambda net: bump(net.seen),
    "global counter": lambda net: next(HELD),
    "global array": lambda net: SEEN.__iadd__(1)[0],
    "global object": lambda net: bump(HOLDER),
    "object that hides it": lambda net: len(LYING.__iadd__([0])),
    "closure": lambda net: CLOSURE(),
    "default": lambda net: defaulted(),
    "function": lambda net: bump(defaulted),
    "function called by PyTorch": lambda net: float(torch.zeros(1).apply_(lambda _: bump(HOLDER))),
    "module": lambda net: bump(math),
    "class of PyTorch": lambda net: bump(nn.ReLU6),
    "cache": lambda net: (cached(net.calls), cached.cache_info().hits)[1],
    "value in a cache": lambda net: len(cached(0).__iadd__([0])),
    "generator": lambda net: next(GENERATOR),
    "context": lambda net: (CONTEXT.set(CONTEXT.get() + 1), CONTEXT.get())[1],
    "thread": lambda net: bump(LOCAL),
    "environment": lambda net: os.environ.update(CALLS=os.environ.get("CALLS", "") + "1") or 0.0,
    "file": lambda net: Path(os.devnull).write_bytes(b"1"),
    "clock": lambda net: time.time(),
    "garbage": lambda net: gc.isenabled(),
    "interpreter": lambda net: sys.getrefcount(net),
    "address": lambda net: id(net),
    "address as a hash": lambda net: hash(net),
    "frame": lambda net: len(inspect.stack()),
    "chance": lambda net: random.random(),
    "chance of NumPy": lambda net: NUMBERS.random(),
    "loaded": lambda net: len(np.fromfile(os.devnull)),
    "hooks so far": lambda net: nn.ReLU().register_forward_hook(print).id,
    "setting": lambda net: torch.backends.mkldnn.enabled,
    "setting of an array": lambda net: net.array.setflags(not net.array.flags.writeable) or 0.0,
    "memory of others": lambda net: torch.empty(1),
    "address as a text": lambda net: len(f"{HOLDER}"),
    "order of a set": lambda net: len({net}),
}


class Counting(nn.Module):
    """A model that keeps or reads state where its name says, and changes after 1000 calls."""

    calls, store = 0, np.zeros(1)

    def __init__(self, name: str, rest: nn.Module) -> None:
        super().__init__()
        self.rest, self.array, self.holder, self.state = (
            rest,
            np.zeros(2)[:1],
            Holder(),
            STATE[name],
        )
        self.count, self.calls, self.held = itertools.count(), 0, [0]
        self.register_buffer("seen", torch.zeros(2)[:1])
        self.seen.calls = 0  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        calls, out = self.state(self), self.rest(x)
        return -out if calls > 1000 else out


@pytest.mark.parametrize("name", STATE)
def test_state_that_a_call_changes_is_refused(name: str) -> None:
    refused(Counting(name, dense()).eval(), "next answer")


class Hook:
    calls = 0

    def __call__(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return -out if bump(self) > 1000 else out


def test_state_of_what_pytorch_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that no attribute of the model leads to."""
    handle = nn.modules.module.register_module_forward_hook(Hook())
    try:
        refused(dense(), "next answer")
    finally:
        handle.remove()
    hook, wrapped = Hook(), nn.DataParallel(dense())
    wrapped.forward = lambda x: hook(wrapped, x, wrapped.module(x))
    refused(wrapped, "another forward")
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, h, hook=hook: hook(self, h, h.relu()))
    refused(dense(), "next answer")


def test_a_model_that_changes_between_start_and_end_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = dense()

    def changed(*args: Any) -> Any:
        with torch.no_grad():
            net[1].weight.mul_(0.5)
        return certified(*args)

    certified = certificate._certify
    monkeypatch.setattr(certificate, "_certify", changed)
    refused(net, "same images at the start and at the end")


@pytest.mark.parametrize("large", [1e6, 1e9, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_magnitudes_that_cancel_are_counted(large: float, dtype: torch.dtype) -> None:
    """Bounds exceeded the exact margin by up to 0.05, from 1e9 on."""

    def cancelling(x: Tensor) -> Tensor:
        return (x * large + x) - x * large

    x = images(8).to(dtype)
    net, plain = before(cancelling).to(dtype), dense().to(dtype)
    y = plain(x).argmax(1)
    for ball in (wball.LinfBall(1e-6), wball.WassersteinBall(1e-6)):
        try:
            found = certify(net, x, y, ball).margin
        except UnsupportedModule:  # beyond what the comparison with the model can tell
            continue
        exact = certify(plain.double(), x.double(), y, wball.LinfBall(0.0)).margin
        assert bool((found <= exact).all())
        if large == 1e6 and dtype is torch.float64:
            assert bool((found > 0.9 * exact).all())


def with_other_weights(net: nn.Module, x: Tensor) -> Tensor:
    changed = {"1.weight": 2 * net[1].weight}  # type: ignore[index]
    out: Tensor = torch.func.functional_call(net, changed, (x,))
    return out


@pytest.mark.parametrize(
    "function", [with_other_weights, lambda net, x: checkpoint(net, x, use_reentrant=False)]
)
def test_models_that_call_themselves_in_unusual_ways_are_followed(function: Any) -> None:
    followed(Around(function))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deep_networks_pass_the_comparison(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential()
    for _ in range(12):
        norm = nn.BatchNorm2d(1)
        nn.init.constant_(norm.running_mean, 30.0)  # type: ignore[arg-type]
        nn.init.constant_(norm.bias, 30.0)
        net.extend([nn.Conv2d(1, 1, 3, padding=1), norm, nn.ReLU()])
    net.extend([nn.Flatten(), nn.Linear(16, 3)])
    trace(net.to(dtype), images().to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["interval", "dual", "crown", "alpha-crown"])
def test_models_with_broken_weights_certify_nothing(bad: float, method: Any) -> None:
    net, x, y = dense(), images(), torch.zeros(4, dtype=torch.long)
    with torch.no_grad():
        net[1].weight[0, 0] = bad
    for ball in (wball.WassersteinBall(0.1), BALL):
        assert not bool(certify(net, x, y, ball, method).certified.any())


def test_the_documentation_lists_what_is_supported() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "certificates.md"
    text = page.read_text(encoding="utf-8")
    kinds = vars(calls).keys() - {"DESCRIPTIONS", "FITTED", "MADE_LIKE"}
    tables = [getattr(calls, kind) for kind in kinds if kind.isupper()]
    names = {name for table in tables if isinstance(table, dict) for name in table.values()}
    assert [n for n in names if n.strip("_") == n and f"`{n}`" not in text] == []


def test_callbacks_on_garbage_are_not_the_models_code() -> None:
    def collected(*_: Any) -> None: ...

    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        followed(dense())
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)
