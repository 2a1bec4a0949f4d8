"""One step of an attack recorded as a CUDA graph, and replayed for the steps that follow.

A step of an attack on a small network is a few hundred launches of microseconds each, and a GPU
waits for the host most of the time. As long as the batch stays the same and nothing is read from
the device, every step launches the same kernels: recorded once, a step is one launch. What a step
changes lives in attributes of a few objects. The recording gives each of them a buffer, reads from
the buffers and ends by copying into them, so that between two replays the objects hold what they
would hold without a recording.

A recording must reproduce the last step that was made without one. Where it does not, or where the
model cannot be recorded (it reads from the device, or works on the host), the attack continues step
by step.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from wball.plan import StoredPlan

WORTH = 8
"""Steps left from which on a recording pays: making it takes as long as two or three steps."""

AGREEMENT, DISAGREEING = 1e-2, 0.1
"""A replay may differ by this share of an image's largest entry, on this share of the images: a GPU
adds in any order, and a step along signs magnifies that."""

Replay = Callable[[], None]

_streams = threading.local()


def cuda_graph(function: Replay, device: torch.device, generator: Generator) -> Replay:
    """Record the launches of ``function`` as one CUDA graph. Calls from other threads are not
    recorded."""
    # One stream for all recordings of a thread: matrix products keep memory for every stream.
    held: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("held", {})
    aside = held.setdefault(device, torch.cuda.Stream(device))
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    pool = torch.cuda.graph_pool_handle()
    if generator.device.type == "cuda":
        graph.register_generator_state(generator)
    free, total = torch.cuda.mem_get_info(device)
    if free < total // 2:  # a recording cannot reuse memory that the allocator still caches
        torch.cuda.empty_cache()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                # The function broke the recording. It must be ended, or the allocator never frees
                # memory again and random generators cannot be used.
                torch._C._cuda_endAllocateToPool(here.device.index, pool)
                torch._C._cuda_releasePool(here.device.index, pool)
                for one in (torch.cuda.default_generators[here.device.index], generator):
                    if one.device.type == "cuda":
                        one.graphsafe_set_state(one.clone_state())
                raise
    here.wait_stream(aside)
    return graph.replay


RECORDERS: dict[str, Callable[[Replay, torch.device, Generator], Replay]] = {"cuda": cuda_graph}
"""How the work of a function is recorded, by type of device."""


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in an attribute: a single tensor, a named tuple of them, or those of a plan."""
    if isinstance(value, StoredPlan):
        return value.tensors()
    held = value if isinstance(value, tuple) else (value,)
    return list(held) if all(isinstance(one, Tensor) for one in held) else []


def put(owner: object, name: str, tensors: Sequence[Tensor]) -> None:
    """Replace the tensors in an attribute."""
    value: Any = getattr(owner, name)
    if isinstance(value, StoredPlan):
        value = value.with_tensors(tensors)
    else:
        value = type(value)(*tensors) if isinstance(value, tuple) else tensors[0]
    setattr(owner, name, value)


class Recording:
    """Replays one recorded step of a loop. Create it, run the step once, then call :meth:`record`.

    Args:
        step: makes a step.
        owners: the objects whose attributes hold the tensors that a step changes.
        generator: the source of randomness.
    """

    def __init__(self, step: Replay, owners: Sequence[object], generator: Generator) -> None:
        self._step, self._generator = step, generator
        self._owned = [(owner, name) for owner in owners for name in vars(owner)]
        self._before = [tensors_in(getattr(*slot)) for slot in self._owned]
        self._seeds = generator.get_state()
        self._slots, self._buffers = list[tuple[Any, int]](), list[Tensor]()

    def record(self, device: torch.device) -> Replay:
        """Record the step that was run, and return its replay."""
        generator = self._generator
        # Tensors that a step replaces get a buffer; others are read in place.
        first = list[Tensor]()
        for slot, old in zip(self._owned, self._before, strict=True):
            new = tensors_in(getattr(*slot))
            if [(t.shape, t.dtype) for t in old] != [(t.shape, t.dtype) for t in new]:
                raise RuntimeError(f"a step changes the shape of {slot[1]}")
            if any(o is not n for o, n in zip(old, new, strict=True)):
                self._slots.append((slot, len(new)))
                self._buffers += [t.clone() for t in new]
                first += [t.clone() for t in old]
        last, now = [t.clone() for t in self._buffers], generator.get_state()
        self._hold()
        try:
            replay = RECORDERS[device.type](self._once, device, generator)
            self._load(first)
            generator.set_state(self._seeds)
            replay()
            wrong = self._disagreement(last)
        finally:
            generator.set_state(now)
            self._load(last)
            self._hold()
        if not wrong <= DISAGREEING:
            raise RuntimeError(
                f"a replay differs from the step itself on {100 * wrong:.1f} % of the images"
            )
        self._before.clear()
        return replay

    def _once(self) -> None:
        """One step that reads from the buffers and writes to them."""
        self._step()
        owned = {t.untyped_storage().data_ptr() for t in self._buffers}
        made = [t for (slot, _) in self._slots for t in tensors_in(getattr(*slot))]
        # A step may move the content of one buffer to another: copy it before overwriting any.
        self._load([t.clone() if t.untyped_storage().data_ptr() in owned else t for t in made])
        self._hold()

    def _load(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)

    def _hold(self) -> None:
        """Point the attributes at the buffers."""
        buffers = iter(self._buffers)
        for slot, count in self._slots:
            owner, name = slot
            put(owner, name, [next(buffers) for _ in range(count)])

    def _disagreement(self, expected: Sequence[Tensor]) -> float:
        """Share of the images whose candidates or gradients differ from the expected ones."""
        names = [name for (_, name), count in self._slots for _ in range(count)]
        pairs = [
            (a.flatten(1), b.flatten(1))
            for name, a, b in zip(names, self._buffers, expected, strict=True)
            if name in ("z", "gradient")
        ]
        wrong = [
            ~torch.isclose(a, b, 0.0, 0.0, equal_nan=True)
            & ~((a - b).abs() <= AGREEMENT * b.abs().nan_to_num(0.0, 0.0, 0.0).amax(1, True))
            for a, b in pairs
        ]
        return float(torch.cat(wrong, 1).any(1).double().mean()) if wrong else 0.0


def recorded(
    step: Replay, owners: Sequence[object], device: torch.device, generator: Generator
) -> Replay | None:
    """Run a step and return its replay, or ``None`` with a warning if it cannot be recorded."""
    recording = Recording(step, owners, generator)
    step()  # its errors are the attack's
    try:
        return recording.record(device)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        # PyTorch's out-of-memory messages differ each time, so each of them would be shown.
        full = isinstance(error, torch.OutOfMemoryError)
        why = "the GPU's memory is full" if full else str(error)
        said = f"the attack is not replayed as a CUDA graph, which is slower: {why}"
        warnings.warn(said, RuntimeWarning, stacklevel=2)
        return None
