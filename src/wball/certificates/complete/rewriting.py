r"""Maxima and clamps written with ReLUs, whose signs a tree can split.

.. math::
    \max(a, b) = b + (a - b)^+, \qquad
    \mathrm{clamp}(v, lo, hi) = lo + (v - lo)^+ - (v - hi)^+

A window of pooling is a tournament of such pairs. Every comparison is a ReLU with bounds, slopes
and anchors of its own, where pooling as a whole is bounded by a constant.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wball.certificates.graph import Activation, Conv2d, Curved, Diagonal, Graph, MaxPool, Op, Sum


def splittable(graph: Graph, like: Tensor) -> Graph:
    """The same function of the image, with ReLUs in place of pooling and clamps; the graph itself
    if it has none."""
    ops: list[Op] = []
    place: dict[int, int] = {}
    for position, op in enumerate(graph.ops):
        op = replace(op, inputs=tuple(place[k] for k in op.inputs))
        if isinstance(op, MaxPool) and _pads_nothing(op, ops[op.inputs[0]]):
            place[position] = _tournament(ops, op, like.device)
        elif isinstance(op, Curved) and op.kind == "clamp":
            place[position] = _clamp(ops, op, like.device)
        else:
            place[position] = _added(ops, op)
    return graph if len(ops) == len(graph.ops) else Graph(tuple(ops), graph.slack)


def _added(ops: list[Op], op: Op) -> int:
    ops.append(op)
    return len(ops) - 1


def _pads_nothing(op: MaxPool, before: Op) -> bool:
    """Whether zeros may stand for what lies outside the map: nothing is read there, or nothing is
    below 0."""
    ends = [
        (op.shape[1 + k] - 1) * op.stride[k] + op.dilation[k] * (op.kernel[k] - 1) + 1
        for k in (0, 1)
    ]
    inside = all(op.padding[k] == 0 and ends[k] <= op.before[1 + k] for k in (0, 1))
    overhang = any(
        ends[k] - op.padding[k] > op.before[1 + k] + op.padding[k] for k in (0, 1)
    )  # ceil_mode
    return inside or (not overhang and isinstance(before, Activation) and before.leak == 0)


def _tournament(ops: list[Op], op: MaxPool, device: torch.device) -> int:
    """Winners of pairs, round after round; a player is a tap of the window, or the sum that beat
    others."""
    channels, taps = op.shape[0], math.prod(op.kernel)

    def read(values: dict[int, float]) -> int:
        kernel = torch.zeros((channels, 1, taps), dtype=torch.float64, device=device)
        for tap, value in values.items():
            kernel[:, :, tap] = value
        weight = kernel.reshape(channels, 1, *op.kernel)
        settings = (op.before, weight, None, op.stride, op.padding, op.dilation, channels)
        return _added(ops, Conv2d(op.name, op.inputs, op.shape, *settings))

    def winner(second: int, difference: int) -> int:
        ahead = _added(ops, Activation(op.name, (difference,), op.shape, 0.0))
        return _added(ops, Sum(op.name, (second, ahead), op.shape, 1.0))

    players = []
    for tap in range(0, taps - 1, 2):
        players.append(winner(read({tap + 1: 1.0}), read({tap: 1.0, tap + 1: -1.0})))
    if taps % 2:
        players.append(read({taps - 1: 1.0}))
    while len(players) > 1:
        pairs = [players[k : k + 2] for k in range(0, len(players), 2)]
        players = [
            pair[0]
            if len(pair) == 1
            else winner(pair[1], _added(ops, Sum(op.name, tuple(pair), op.shape, -1.0)))
            for pair in pairs
        ]
    return players[0]


def _clamp(ops: list[Op], op: Curved, device: torch.device) -> int:
    low, high = op.ends
    ones = torch.ones((1, *[1] * len(op.shape)), dtype=torch.float64, device=device).expand(
        1, *op.shape
    )

    def shifted(source: int, by: float) -> int:
        return (
            source
            if by == 0
            else _added(ops, Diagonal(op.name, (source,), op.shape, ones, by * ones))
        )

    def above(end: float) -> int:
        return _added(ops, Activation(op.name, (shifted(op.inputs[0], -end),), op.shape, 0.0))

    (source,) = op.inputs
    if math.isinf(low) and math.isinf(high):
        return source
    if math.isinf(high):  # lo + (v - lo)^+
        return shifted(above(low), low)
    if math.isinf(low):  # v - (v - hi)^+
        return _added(ops, Sum(op.name, (source, above(high)), op.shape, -1.0))
    return shifted(_added(ops, Sum(op.name, (above(low), above(high)), op.shape, -1.0)), low)
