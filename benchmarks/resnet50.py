"""``python -m benchmarks resnet50``: ResNet-50 is evaluated at 224 x 224; how much of the time does the network take?

Images are smooth noise around the patterns of ten classes. The network's weights are random, up to the last layer: that
is fitted to other images of the classes, so that most images are classified right and some attacks succeed. Clocks
stand at both ends of the network, in both directions: a call takes from its input to its logits, and a gradient from
the logits' to the input's. On a GPU they are events of the stream, so that nobody waits for them. Before that a few
steps are made with a whole batch, which compiles kernels and lets the network choose its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from wball import provenance
from wball.inputs import find_device

CLASSES = 10
FITTED, RIDGE, BATCH = 320, 0.01, 64
"""Images that the last layer is fitted to, by how much it is held back, and how many are asked at a time."""
WARM = 256
"""Images in a batch that is not measured."""
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


class Bottleneck(nn.Module):
    """``relu(bn(1x1) . bn(3x3) . bn(1x1) + shortcut)``."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in sizes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            out = norm(conv(out)) if k == 2 else F.relu(norm(conv(out)))
        return F.relu(out + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50, 25.6 million parameters with 1,000 classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inputs = [], 64
        for size, count, stride in STAGES:
            for k in range(count):
                blocks.append(Bottleneck(inputs, size, stride if k == 0 else 1))
                inputs = 4 * size
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x)).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Clock:
    """Moments, on the device's stream where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._spans = device.type == "cuda", []

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, start: Any) -> None:
        """Note the time since ``start``."""
        self._spans.append((start, self.now()))

    def seconds(self) -> float:
        """All noted times together."""
        if self._cuda:
            torch.cuda.synchronize()
            return sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        return sum(end - start for start, end in self._spans)


class _Enter(torch.autograd.Function):
    """The input of a network; its gradient is the last thing that the network works out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call.clock.span(ctx.call.backward_from)
        return gradient, None


class _Leave(torch.autograd.Function):
    """The logits of a network, where its gradient begins."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call.backward_from = ctx.call.clock.now()
        return gradient, None


@dataclass
class _Call:
    clock: Clock
    backward_from: Any = None


class Timed(nn.Module):
    """A network that notes how often it is asked, about how many images, and how long it takes."""

    def __init__(self, net: nn.Module, clock: Clock) -> None:
        super().__init__()
        self.net, self.clock = net, clock
        self.calls = self.images = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("what clocks say is not replayed")
        self.calls, self.images = self.calls + 1, self.images + len(x)
        call, start = _Call(self.clock), self.clock.now()
        logits = self.net(_Enter.apply(x, call))
        self.clock.span(start)
        return _Leave.apply(logits, call)


def smooth(count: int, side: int, seed: int) -> Tensor:
    """Smooth noise in [0, 1]."""
    coarse = torch.rand(
        count, 3, side // 16, side // 16, generator=torch.Generator().manual_seed(seed)
    )
    return F.interpolate(coarse, size=(side, side), mode="bilinear")


def images(count: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images of all classes in turn, in [0, 1]: the pattern of the class, under noise that is as strong."""
    y = torch.arange(count) % CLASSES
    return (smooth(CLASSES, side, 0)[y] + smooth(count, side, seed)) / 2, y


@torch.no_grad()
def fitted(side: int, device: torch.device) -> ResNet50:
    """The network: statistics that suit the images, so that activations neither vanish nor grow, and a last layer by
    least squares, between the right class at 1 and the others at 0."""
    torch.manual_seed(0)
    net = ResNet50(CLASSES).to(device)
    x, y = images(FITTED, side, seed=1)
    net.train()(x[:BATCH].to(device))
    net.eval().requires_grad_(False)
    found = torch.cat([net.features(part.to(device)) for part in x.split(BATCH)]).double()
    centre = found.mean(0)
    gram = (found - centre) @ (found - centre).T
    gram += RIDGE * gram.diagonal().mean() * torch.eye(FITTED, dtype=gram.dtype, device=device)
    wanted = F.one_hot(y, CLASSES).to(gram)
    weight = (found - centre).T @ torch.linalg.solve(gram, wanted - wanted.mean(0))
    net.head.weight.copy_(weight.T)
    net.head.bias.copy_(wanted.mean(0) - centre @ weight)
    return net


def seconds(work: Any, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = find_device(given.device)
    net = fitted(given.side, device)
    x, y = (part.to(device) for part in images(given.images, given.side, seed=2))
    clock = Clock(device)
    timed, radii = Timed(net, clock), [float(r) for r in given.eps.split(",")]
    ball = wball.WassersteinBall(radii[-1])
    wball.StandardAttack(ball, "fast").prepared(
        net, x[:WARM], y[:WARM]
    )  # loads libraries and compiles
    wball.DualAveraging(ball, steps=2)(net, x[:WARM], y[:WARM])
    print("ready", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}

        def evaluate() -> None:
            found["result"] = wball.evaluate(
                timed,
                x,
                y,
                ball,
                radii,
                "fast",
                out=folder,
                batch_size=given.batch_size,
                name="ResNet-50",
            )

        whole = seconds(evaluate, device)
        written = (Path(folder) / "log.jsonl").read_text()
    if given.log is not None:
        given.log.write_text(written)
    log = [json.loads(line) for line in written.splitlines()]
    batches = [row["seconds"] for row in log if row["event"] == "batch"]
    exact = [row["seconds"] for row in log if row["event"] == "exact check"]
    network = clock.seconds()
    result = found["result"]
    return {
        "images": len(x),
        "shape": list(x.shape[1:]),
        "radii": radii,
        "accuracy": [result.accuracy_at(r) for r in radii],
        "batch_size": result.settings["batch_size"],
        "seconds": round(whole, 2),
        "attack_and_audit_seconds": round(sum(batches), 2),
        "audit_seconds": round(sum(row["seconds"] for row in log if row["event"] == "audit"), 2),
        "exact_check_seconds": round(sum(exact), 2),
        "network_seconds": round(network, 2),
        "network_share": round(network / whole, 3),
        "network_share_without_exact_check": round(network / (whole - sum(exact)), 3),
        "network_calls": timed.calls,
        "network_images": timed.images,
        "valid": int((result.images["read_as"] >= 0).sum()),
        "rejected": len(result.rejected),
        "peak_gigabytes": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if device.type == "cuda"
        else None,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks resnet50", description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--eps", default="5e-5")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results") / "resnet50.json")
    parser.add_argument("--log", type=Path, help="what the evaluation wrote down about its batches")
    given = parser.parse_args(arguments)
    found = measure(given)
    device = find_device(given.device)
    x = torch.zeros(1, 3, given.side, given.side, device=device)
    origin = {
        **provenance.collect(wball.WassersteinBall(1.0), x),
        "seed": 0,
        "commit": provenance.commit(),
    }
    given.out.write_text(
        json.dumps({**found, "provenance": origin}, indent=2) + "\n", encoding="utf-8"
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
