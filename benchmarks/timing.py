"""How long, how much memory, and how little of either there could be."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Time:
    """Milliseconds: the median, and the range of the middle 80 %.

    ``processor`` is the median of what all threads together spent on a CPU: on a busy machine, the time to compare.
    """

    median: float
    low: float
    high: float
    repeats: int
    how: str
    processor: float | None = None


def measure(
    run: Callable[[], object], device: torch.device, *, budget_s: float = 2.0, graph: bool = True
) -> Time:
    """Time repeated calls of ``run`` for about ``budget_s``, after warming up; a call that takes far longer, once.

    On a GPU the call is captured once and replayed between device events, so that what is measured is the device and
    not Python; calls that wait for the device cannot be captured and are timed with events around them.
    """
    cuda = device.type == "cuda"
    for attempt in range(2 if cuda else 1):  # a GPU's first call may load libraries
        start, worked = time.perf_counter(), time.process_time()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        spent, worked = time.perf_counter() - start, time.process_time() - worked
        if spent <= 4 * budget_s:
            break
        if attempt or not cuda:
            return _spread([1e3 * spent], "clock, one call", None if cuda else [1e3 * worked])
    if not cuda:
        samples, processor = _clock(run, budget_s)
        return _spread(samples, "clock", processor)
    replay = _captured(run) if graph else None
    samples = _events(replay or run, budget_s)
    return _spread(samples, "graph replay, device events" if replay else "device events")


def processor_time(run: Callable[[], Answer]) -> tuple[float, Answer]:
    """Seconds that all threads together spend on one call, and its answer."""
    begin = time.process_time()
    answer = run()
    return time.process_time() - begin, answer


def _spread(samples: list[float], how: str, processor: list[float] | None = None) -> Time:
    ordered = sorted(samples)
    edge = len(ordered) // 10
    worked = None if processor is None else median(processor)
    return Time(median(ordered), ordered[edge], ordered[-1 - edge], len(ordered), how, worked)


def _clock(run: Callable[[], object], budget_s: float) -> tuple[list[float], list[float]]:
    """Milliseconds by the clock and by the processor."""
    samples: list[float] = []
    processor: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 200):
        start, worked = time.perf_counter(), time.process_time()
        run()
        samples.append(1e3 * (time.perf_counter() - start))
        processor.append(1e3 * (time.process_time() - worked))
        if len(samples) == 1 and samples[0] > 1e3 * budget_s:
            break
    return samples, processor


def _events(run: Callable[[], object], budget_s: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + budget_s
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 100):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return samples


def _captured(run: Callable[[], object]) -> Callable[[], object] | None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # it waits for the device
        torch.cuda.synchronize()
        return None
    return graph.replay


def peak_memory(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes asked for beyond what was there before, results included. Only a GPU counts them."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before)


@dataclass(frozen=True)
class Machine:
    """What the device can do, measured: bytes copied per second, float32 operations per second."""

    bandwidth: float
    flops: float

    def floor(self, bytes_moved: float, operations: float) -> float:
        """No version of such work takes less than this many milliseconds."""
        return 1e3 * max(bytes_moved / self.bandwidth, operations / self.flops)


def machine(device: torch.device) -> Machine:
    cuda = device.type == "cuda"
    source = torch.rand(2**28 if cuda else 2**24, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, budget_s=0.5)
    side = 8192 if cuda else 1024
    a = torch.rand(side, side, device=device)
    product = measure(lambda: a @ a, device, budget_s=0.5)
    return Machine(2e3 * 4 * source.numel() / copy.median, 2e3 * side**3 / product.median)
