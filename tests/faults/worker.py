"""An evaluation that takes its time, for tests that disturb it from outside. Each function is a
process of its own."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import wball
from wball.evaluation import Names, evaluate
from wball.kernels import dispatch
from wball.storage.files import FolderInUse

BALL = wball.WassersteinBall(0.4)
RADII = [0.1, 0.2, 0.4]

dispatch.why_not("entropic_plan", "cpu")  # so that forked processes find it loaded


class Halves(nn.Module):
    """Weighs the left half of an image against the right one, slowly if asked to, and may die on
    the way."""

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
    """The evaluation all tests here disturb; ``stream``: its images come from a data set that
    writes there."""
    torch.set_num_threads(1)
    attack = wball.DualAveraging(BALL, steps=6, random_start=1.0)
    data = problem() if stream is None else (Items(stream), None)
    model = Halves(delay, dies_after)
    evaluate(
        model,
        *data,
        BALL,
        RADII,
        attack,
        out=folder,
        batch_size=4,
        seed=3,
        name=Names("m", command="c"),
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
    """No file may grow above ``limit`` bytes, as on a disk that is full. Exit code 28 if that was
    said."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        run(folder)
    except OSError:
        os._exit(28)


def second(folder: str) -> None:
    """Exit code 4 if the folder is in use by another process, and says so."""
    try:
        run(folder)
    except FolderInUse as error:
        os._exit(4 if "in use" in str(error) else 1)


def _read_by(folder: str, rank: int) -> Path:
    """Where a process writes down what it reads."""
    return Path(f"{folder}.read-{rank}")


if __name__ == "__main__":  # under torchrun; the process of rank 1 may be told to die
    rank = int(os.environ["RANK"])
    run(sys.argv[1], 0.0, int(sys.argv[2]) if rank == 1 else 10**9, _read_by(sys.argv[1], rank))
