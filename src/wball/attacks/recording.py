"""One step of an attack recorded as a CUDA graph, and replayed for the steps that follow.

A step of an attack on a small network is a few hundred launches of microseconds each; a GPU waits for the host most of
the time. As long as the batch stays the same and nothing is read from the device, every step launches the same kernels:
recorded once, a step is one launch. What a step changes lives in attributes of a few objects (the state of the attack,
its oracle, the books of the batch). The recording gives each of them a buffer of its own, reads from the buffers and
ends by copying into them, so that between two replays the objects hold what they would hold without a recording.

A recording must reproduce the last step that was made without one. Where it does not, or where the model cannot be
recorded (it reads from the device, or works on the host), the attack goes on step by step.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wball.attacks.batch import AttackBatch, State
from wball.kernels import dispatch
from wball.plan import StoredPlan

WORTH = 8
"""Steps left from which on a recording pays: making it takes as long as two or three steps."""

HEAVY = 4 * 2**30
"""Bytes that a step allocates from which on it is not recorded. Writing and reading as much takes a GPU longer than the
launches take the host, and a recording keeps its memory to itself for as long as it lives."""

AGREEMENT, DISAGREEING = 1e-2, 0.1
"""A replay may differ by this share of an image's largest entry, on this share of the images (sums may be added up in
any order on a GPU, and a step along signs magnifies that)."""


def cuda_graph(
    function: Callable[[], None], device: torch.device, generator: torch.Generator
) -> Callable[[], None]:
    """What ``function`` launches, as one launch. Calls made by other threads meanwhile are not recorded.

    A recording's memory is its own and goes back with it.
    """
    graph, here, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), _aside(device)
    pool = torch.cuda.graph_pool_handle()
    if generator.device.type == "cuda":
        graph.register_generator_state(generator)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            function()
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                _end_without_graph(here.device, pool, generator)
                raise
    here.wait_stream(aside)
    return graph.replay


_streams = threading.local()


def _aside(device: torch.device) -> torch.cuda.Stream:
    """Where this thread records. One stream for all recordings: matrix products keep memory for every stream."""
    held: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("held", {})
    if device not in held:
        held[device] = torch.cuda.Stream(device)
    return held[device]


def _end_without_graph(device: torch.device, pool: Any, generator: torch.Generator) -> None:
    """Undo what a recording begins, where the function has spoilt it and it cannot end by itself.

    Otherwise the allocator believes that one is under way for ever, and never again gives memory back; and the random
    generators refuse to be used outside of it.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)
    for one in (torch.cuda.default_generators[device.index], generator):
        if one.device.type == "cuda":
            one.graphsafe_set_state(one.clone_state())


RECORDERS: dict[
    str, Callable[[Callable[[], None], torch.device, torch.Generator], Callable[[], None]]
] = {"cuda": cuda_graph}
"""How the work of a function is recorded, by type of device."""


@dataclass(frozen=True)
class _Slot:
    """An attribute that holds tensors."""

    owner: object
    name: str

    def get(self) -> list[Tensor]:
        return _tensors(getattr(self.owner, self.name))

    def put(self, tensors: Sequence[Tensor]) -> None:
        value: Any = getattr(self.owner, self.name)
        if isinstance(value, StoredPlan):
            setattr(self.owner, self.name, value.with_tensors(tensors))
        else:
            setattr(
                self.owner,
                self.name,
                type(value)(*tensors) if isinstance(value, tuple) else tensors[0],
            )


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, StoredPlan):
        return value.tensors()
    return (
        list(value)
        if isinstance(value, tuple) and value and all(isinstance(v, Tensor) for v in value)
        else []
    )


class Moment:
    """What objects hold before a step."""

    def __init__(self, owners: Sequence[object], generator: torch.Generator) -> None:
        self.slots = [_Slot(owner, name) for owner in owners for name in vars(owner)]
        self.held = [slot.get() for slot in self.slots]
        self.seeds = generator.get_state()


class Recording:
    """``step`` as one launch.

    Args:
        step: makes a step; whatever it changes are tensors in attributes of the objects of ``before``.
        before: the moment before the last step that was made.
        judged: names of the attributes that a replay of that step must reproduce.
        device: where the work is done.
        generator: the source of randomness.

    Raises:
        RuntimeError: a replay is not the step (other errors are those of the step, when it is recorded).
    """

    def __init__(
        self,
        step: Callable[[], None],
        before: Moment,
        judged: Sequence[str],
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self._step = step
        # What is replaced by a step gets a buffer; what is not is read where it lies.
        self._slots: list[_Slot] = []
        self._buffers: list[list[Tensor]] = []
        first: list[list[Tensor]] = []
        for slot, old in zip(before.slots, before.held, strict=True):
            new = slot.get()
            if [(t.shape, t.dtype) for t in old] != [(t.shape, t.dtype) for t in new]:
                raise RuntimeError(f"a step changes the shape of {slot.name}")
            if any(o is not n for o, n in zip(old, new, strict=True)):
                self._slots.append(slot)
                self._buffers.append(
                    [n if o is n else n.clone() for o, n in zip(old, new, strict=True)]
                )
                first.append(old)
        self._owned = {t.untyped_storage().data_ptr() for held in self._buffers for t in held}
        last = [[t.clone() for t in held] for held in self._buffers]
        now = generator.get_state()
        self._hold()
        try:
            self._replay = RECORDERS[device.type](self._once, device, generator)
            self._load(first)
            generator.set_state(before.seeds)
            self._replay()
            wrong = self._disagreement(last, judged)
        finally:
            generator.set_state(now)
            self._load(last)
            self._hold()
        if not wrong <= DISAGREEING:
            raise RuntimeError(
                f"a replay differs from the step itself on {100 * wrong:.1f} % of the images"
            )

    def __call__(self) -> None:
        self._replay()

    def _once(self) -> None:
        """A step from the buffers to the buffers."""
        self._step()
        # What was in one buffer may have gone to another: it is saved before the first is overwritten.
        fresh = [
            [
                n if n is own or n.untyped_storage().data_ptr() not in self._owned else n.clone()
                for n, own in pairs
            ]
            for pairs in (
                list(zip(slot.get(), held, strict=True))
                for slot, held in zip(self._slots, self._buffers, strict=True)
            )
        ]
        self._load(fresh)
        self._hold()

    def _load(self, values: list[list[Tensor]]) -> None:
        for held, given in zip(self._buffers, values, strict=True):
            for buffer, value in zip(held, given, strict=True):
                if buffer is not value:
                    buffer.copy_(value)

    def _hold(self) -> None:
        for slot, held in zip(self._slots, self._buffers, strict=True):
            slot.put(held)

    def _disagreement(self, expected: list[list[Tensor]], judged: Sequence[str]) -> float:
        """The share of images on which the buffers differ from what is expected."""
        off: Tensor | None = None
        for slot, held, given in zip(self._slots, self._buffers, expected, strict=True):
            if slot.name in judged:
                (a,), (b,) = held, given
                a, b = (
                    a.flatten(1) if a.ndim > 1 else a[:, None],
                    b.flatten(1) if b.ndim > 1 else b[:, None],
                )
                size = b.abs().nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True)
                same = ((a - b).abs() <= AGREEMENT * size) | (a == b) | (a.isnan() & b.isnan())
                bad = ~same.all(1)
                off = bad if off is None else off | bad
        return 0.0 if off is None else float(off.double().mean())


def _allocated(device: torch.device) -> int:
    """Bytes that were allocated on a GPU so far, whether or not they are free again."""
    return (
        int(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0))
        if device.type == "cuda"
        else 0
    )


class Loop(Protocol):
    """The loop of an attack between two gradients."""

    state: State
    gradient: Tensor
    batch: AttackBatch
    generator: torch.Generator

    def step(self) -> None: ...


class Steps:
    """The steps of an attack's loop, replayed from a recording where that pays.

    Args:
        loop: makes them.
        wanted: whether to record at all.
    """

    def __init__(self, loop: Loop, wanted: bool) -> None:
        self._loop, self._wanted = loop, wanted
        self._recording: Recording | None = None
        self._first = True

    def changed(self) -> None:
        """What steps read has been replaced: they are recorded anew."""
        self._recording = None

    def make(self, number: int, left: int) -> None:
        """Make step ``number``, the first of ``left``."""
        loop, state = self._loop, self._loop.state
        if self._recording is not None:
            assert isinstance(state.n_steps, Tensor)
            state.n_steps.fill_(number)
            self._recording()
        elif self._wanted and not self._first and left >= WORTH:
            self._record(number)
        else:
            state.n_steps = number
            loop.step()
            # A kernel that reads from the GPU cannot be recorded, and the first step tells which one serves.
            self._wanted &= not state.x.is_cuda or loop.state.kernel in dispatch.NEVER_READS
        self._first = False

    def _record(self, number: int) -> None:
        """Make a step as it is, and a recording of it."""
        loop, state = self._loop, self._loop.state
        device = state.x.device
        state.n_steps = torch.full((), float(number), dtype=torch.float64, device=device)
        before, allocated = (
            Moment((loop, *state.parts(), loop.batch), loop.generator),
            _allocated(device),
        )
        loop.step()
        if _allocated(device) - allocated > HEAVY:
            self._wanted = False
            return
        try:
            self._recording = Recording(
                loop.step, before, ("z", "gradient"), device, loop.generator
            )
        except (
            RuntimeError,
            AttributeError,
            TypeError,
            ValueError,
        ) as error:  # the step itself has been made
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._wanted = False
            # Torch's own words on full memory differ each time, so that every one of them would be shown.
            why = (
                "the GPU's memory is full"
                if isinstance(error, torch.OutOfMemoryError)
                else str(error)
            )
            said = f"the attack is not replayed as a CUDA graph, which is slower: {why}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
