"""Calls from several threads on one model.

Each round makes a model in training mode, with batch normalisation, dropout and a frozen parameter,
and lets four threads attack and certify with it at once. Wrong would be a success flag that the
model itself contradicts (*wrong flags*), a certificate that differs from the one made alone (*wrong
certificates*), or a model that is left in another mode, with other weights or other gradient flags
(*changed models*). ``results/torture_threads.json`` has the counts of 1,000 calls.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor, nn

import wball
from wball.model import evaluating

THREADS, CALLS = 4, 8
"""Threads of a round, and calls of each."""


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(48, 4),
    )
    nn.init.uniform_(net[1].running_mean, -1, 1)  # type: ignore[arg-type]
    net[0].bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    return net.train()


def _held(net: nn.Module) -> list[Any]:
    """Everything about a model that a call could change."""
    values = [value.clone() for value in net.state_dict().values()]
    return [
        values,
        [m.training for m in net.modules()],
        [p.requires_grad for p in net.parameters()],
    ]


def _same(one: list[Any], other: list[Any]) -> bool:
    return one[1:] == other[1:] and all(
        torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True)
    )


def a_round(seed: int) -> Counter[str]:
    """One model, four threads."""
    net, ball = network(seed), wball.WassersteinBall(0.1)
    x = torch.rand(THREADS, 4, 1, 6, 6)
    with evaluating(net), torch.no_grad():
        y = net(x.flatten(0, 1)).argmax(1).view(THREADS, 4)
    before, start = _held(net), Barrier(THREADS)
    alone = [wball.certify(net, x[k], y[k], ball.at(0.005)).certified for k in range(THREADS)]
    kinds: tuple[Any, ...] = (wball.DualAveraging, wball.PGD, wball.FrankWolfe)

    def work(worker: int) -> list[tuple[Tensor | None, Tensor]]:
        start.wait()
        found: list[tuple[Tensor | None, Tensor]] = []
        for k in range(CALLS):
            if k == CALLS - 1:
                found.append(
                    (None, wball.certify(net, x[worker], y[worker], ball.at(0.005)).certified)
                )
                continue
            result = kinds[(k + worker) % len(kinds)](ball, steps=2 + k % 3)(
                net, x[worker], y[worker]
            )
            found.append((result.images, result.success))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    counts: Counter[str] = Counter(
        {"models": 1, "changed models": int(not _same(before, _held(net)))}
    )
    with evaluating(net), torch.no_grad():
        for worker, calls in enumerate(results):
            for images, said in calls:
                counts["calls"] += 1
                if images is None:
                    counts["wrong certificates"] += int((said != alone[worker]).sum())
                else:
                    counts["flags"] += len(said)
                    counts["wrong flags"] += int(
                        ((net(images).argmax(1) != y[worker]) != said).sum()
                    )
    return counts
