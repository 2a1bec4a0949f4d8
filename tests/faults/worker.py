"""An evaluation that takes its time, for tests that disturb it from outside. Each function is a process of its own."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wball
from wball.evaluation import evaluate
from wball.kernels import dispatch
from wball.storage.atomic import FolderInUse

BALL = wball.WassersteinBall(0.4)
RADII = [0.1, 0.2, 0.4]
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h

dispatch.why_not("entropic_plan", "cpu")  # so that forked processes find it loaded


class Halves(nn.Module):
    """Weighs the left half of an image against the right one, slowly if asked to, and may die on the way."""

    def __init__(self, delay: float = 0.0, dies_after: int = 10**9) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6).repeat(6))
        self.delay, self.calls_left = delay, dies_after

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.delay)
        self.calls_left -= 1
        if self.calls_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        right = x.flatten(1) @ self.weight
        return torch.stack([-right, right], 1)


class Wide(nn.Module):
    """Many numbers a pixel, by plain products: no library underneath has memory of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(width, 1, generator=generator))
        self.out = nn.Parameter(torch.randn(width, 3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.weight * x.flatten(1).unsqueeze(1) - 0.3).mean(2) @ self.out


def problem(count: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(0)).square() * 0.8
    return x, Halves()(x).argmax(1).detach()


class Items(Dataset[tuple[Tensor, int]]):
    """The same images, one by one; what is read is written down."""

    def __init__(self, log: Path) -> None:
        self.x, self.y = problem()
        self.log = log

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        with self.log.open("a") as file:
            file.write(f"{k}\n")
        return self.x[k], int(self.y[k])


def run(
    folder: str, delay: float = 0.0, dies_after: int = 10**9, stream: Path | None = None
) -> None:
    """The evaluation all tests here disturb; ``stream``: its images come from a data set that writes there."""
    torch.set_num_threads(1)
    attack = wball.DualAveraging(BALL, steps=6, random_start=1.0)
    data = problem() if stream is None else (Items(stream), None)
    model = Halves(delay, dies_after)
    evaluate(
        model, *data, BALL, RADII, attack, out=folder, batch_size=4, seed=3, name="m", command="c"
    )


def in_a_group(folder: str, rank: int, streams: bool = False) -> None:
    """One of two processes that met without ``torchrun``."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}.meeting", rank=rank, world_size=2
    )
    run(folder, stream=_read_by(folder, rank) if streams else None)
    torch.distributed.barrier()  # the user's own group is as it was
    torch.distributed.destroy_process_group()


def with_little_disk(folder: str, limit: int) -> None:
    """No file may grow above ``limit`` bytes, as on a disk that is full. Exit code 28 if that was said."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        run(folder)
    except OSError:
        os._exit(28)


def with_little_memory(folder: str, megabytes: int) -> None:
    """An attack on a model that needs more memory for all images at once than there is.

    A single activation of all images takes four times the limit. Allocators may have reserved much more than is in use
    (mimalloc, in torch for ARM: a gigabyte), so what they have is taken from them first; and glibc, which keeps blocks
    of up to 32 MB once it has seen them, is told to give every block of a megabyte back.
    """
    torch.set_num_threads(1)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    x = torch.rand(64, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    model = Wide(4 * megabytes * 2**20 // (x.numel() * x.element_size()))
    attack = wball.DualAveraging(wball.WassersteinBall(0.05), steps=2, until_success=False)
    y = model(x[:1]).argmax(1).repeat(64)
    wanted = attack(model, x[:2], y[:2])  # and everything is loaded
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_AS, (used, before[1]))
        hoard = _take_all()
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, before[1]))
        result = attack(model, x, y)
        del hoard
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert any("out of memory" in str(w.message) for w in told), [str(w.message) for w in told]
    assert result.images.shape == x.shape
    torch.testing.assert_close(result.images[:2], wanted.images, rtol=0, atol=1e-5)


def _take_all() -> list[Tensor]:
    """Blocks of memory, until there are none of a megabyte left. They are never touched, so they cost nothing."""
    blocks, size = [], 2**30
    while size >= 2**20:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
    return blocks


def second(folder: str) -> None:
    """Exit code 4 if the folder is in use by another process, and says so."""
    try:
        run(folder)
    except FolderInUse as error:
        os._exit(4 if "in use" in str(error) else 1)


def with_a_wild_clock(folder: str) -> None:
    """Every look at a clock finds another day: yesterday, tomorrow, 1970."""
    days = 0

    def wild() -> float:
        nonlocal days
        days = (7 * days + 3) % 1000
        return 86_400.0 * (days - 500)

    for name in ("time", "perf_counter", "monotonic"):
        setattr(time, name, wild)
    run(folder)


def _read_by(folder: str, rank: int) -> Path:
    """Where a process writes down what it reads."""
    return Path(f"{folder}.read-{rank}")


if __name__ == "__main__":  # under torchrun; the process of rank 1 may be told to die
    rank = int(os.environ["RANK"])
    run(sys.argv[1], 0.0, int(sys.argv[2]) if rank == 1 else 10**9, _read_by(sys.argv[1], rank))
