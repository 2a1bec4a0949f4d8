"""``python -m benchmarks steps``: what a step of adversarial training costs.

A batch of digits and the paper's network. The calls take turns, and each row has the shortest time
of all rounds, because load by others only adds; on a CPU that is processor time, of all threads.
``passes`` are those of the network in a step with an inner attack: its gradients, one more forward
pass, and the clean step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wball
from benchmarks.frame import Result, options


def calls(
    model: nn.Module, x: Tensor, y: Tensor, gradients: int
) -> dict[str, Callable[[], object]]:
    """A clean step, the passes of a robust one, and robust steps."""
    ball = wball.WassersteinBall(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings = {"steps": gradients, "until_success": False}
    attacks: dict[str, wball.Attack] = {
        "DualAveraging": wball.DualAveraging(ball, step_size=20.0, **settings),
        "PGD(reg=1000)": wball.PGD(ball, reg=1000.0, **settings),
        "PGD": wball.PGD(ball, **settings),
    }

    def step(images: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), y).backward()
        optimizer.step()

    def passes() -> None:
        model.requires_grad_(False)
        for _ in range(gradients):
            z = x.clone().requires_grad_(True)
            torch.autograd.grad(F.cross_entropy(model(z), y), z)
        with torch.no_grad():
            model(x)
        model.requires_grad_(True)
        step(x)

    def robust(attack: wball.Attack) -> Callable[[], object]:
        return lambda: step(attack(model, x, y, confirm=False).images)

    return {
        "clean step": lambda: step(x),
        "passes": passes,
        **{name: robust(attack) for name, attack in attacks.items()},
    }


def shortest(
    made: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Seconds of each call, the shortest of all rounds."""
    found = dict.fromkeys(made, float("inf"))
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for round_ in range(rounds + 1):
        for name, call in made.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_ > 0:  # the first one compiles
                found[name] = min(found[name], clock() - begin)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = options("steps", __doc__)
    parser.add_argument("--batch", type=int, default=64, help="digits of a batch")
    parser.add_argument("--gradients", type=int, default=8, help="steps of the inner attack")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of all calls")
    given = parser.parse_args(arguments)
    device, before = torch.device(given.device), torch.get_num_threads()
    shared = {"batch": given.batch, "gradients": given.gradients}
    result = Result(f"steps_{device.type}", given, **shared)
    x, y = (v[: given.batch].to(device) for v in wball.load_sample("mnist"))
    for threads in given.threads if device.type == "cpu" else [before]:
        torch.set_num_threads(threads)
        torch.manual_seed(given.seed)
        model = wball.load_model("mnist-adversarial-cnn").to(device).train()
        found = shortest(calls(model, x, y, given.gradients), given.rounds, device)
        for name, seconds in found.items():
            if not result.has(call=name, threads=threads):
                share = seconds / found["passes"]
                result.add({"call": name, "threads": threads, "seconds": seconds, "share": share})
    torch.set_num_threads(before)


if __name__ == "__main__":
    main()
