"""Recurrent networks and causal convolutions over the rows of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.networks.kinds import CLASSES, kind


def rows(x: Tensor) -> Tensor:
    return x.squeeze(1)


class OverRows(nn.Module):
    """The last state of a recurrent layer that reads the rows, and a head."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        width = layer.hidden_size * (2 if layer.bidirectional else 1)
        self.layer, self.head = layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(rows(x))
        return self.head(out[:, -1, :])


LAYERS = {
    "RNN over rows": lambda: nn.RNN(8, 6, batch_first=True),
    "RNN over rows, ReLU": lambda: nn.RNN(8, 6, nonlinearity="relu", batch_first=True),
    "LSTM over rows": lambda: nn.LSTM(8, 4, batch_first=True),
    "LSTM over rows, both directions": lambda: nn.LSTM(8, 3, batch_first=True, bidirectional=True),
    "GRU over rows": lambda: nn.GRU(8, 4, batch_first=True),
}

for _name, _make in LAYERS.items():
    kind("recurrent", _name, channels=1)(lambda make=_make: OverRows(make()))


@kind("recurrent", "LSTM cell in a loop", channels=1)
class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        for row in rows(x).unbind(1):
            h, c = self.cell(row, (h, c))
        return self.head(h)


@kind("recurrent", "minimal gated unit", channels=1)
class MinimalGated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.change, self.head = (
            nn.Linear(12, 4),
            nn.Linear(12, 4),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4)
        for k in range(x.shape[2]):
            row = x[:, 0, k]
            f = torch.sigmoid(self.gate(torch.cat([row, h], 1)))
            h = (1 - f) * h + f * torch.tanh(self.change(torch.cat([row, f * h], 1)))
        return self.head(h)


@kind("recurrent", "linear state space (diagonal)", channels=1)
class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(8))
        self.into, self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        u = self.into(rows(x))
        h, states = torch.zeros_like(u[:, 0]), []
        for k in range(u.shape[1]):
            h = torch.sigmoid(self.decay) * h + u[:, k]
            states.append(h)
        return self.head(F.gelu(self.out(torch.stack(states, 1))).mean(1))


@kind("recurrent", "selective state space (Mamba-like)", channels=1)
class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.rate = nn.Linear(8, 4), nn.Parameter(torch.rand(4))
        self.into, self.head = nn.Linear(8, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        u = rows(x)
        delta, value = F.softplus(self.step(u)), self.into(u)
        h = torch.zeros_like(value[:, 0])
        for k in range(u.shape[1]):
            h = torch.exp(-delta[:, k] * self.rate) * h + delta[:, k] * value[:, k]
        return self.head(h)


class CausalBlock(nn.Module):
    def __init__(self, inside: int, out: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(inside, out, 3, padding=self.pad, dilation=dilation)
        )
        self.skip = nn.Conv1d(inside, out, 1) if inside != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.relu(self.conv(x)[:, :, : -self.pad]) + self.skip(x))


@kind("recurrent", "temporal convolutions (TCN)", channels=1)
class Temporal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(CausalBlock(8, 6, 1), CausalBlock(6, 6, 2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(rows(x).transpose(1, 2))[:, :, -1])


@kind("recurrent", "WaveNet gates", channels=1)
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(8, 6, 1)
        self.filters, self.gates, self.outs = (
            nn.ModuleList(nn.Conv1d(6, 6, k, dilation=d if k > 1 else 1) for d in (1, 2)) for k in (2, 2, 1)
        )  # fmt: skip
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.start(rows(x).transpose(1, 2)), 0.0
        for k, (f, g, o) in enumerate(zip(self.filters, self.gates, self.outs, strict=True)):
            past = F.pad(h, (2**k, 0))
            z = o(torch.tanh(f(past)) * torch.sigmoid(g(past)))
            h, skips = h + z, skips + z
        return self.head(F.relu(skips).mean(2))


@kind("recurrent", "quasi-recurrent network", channels=1)
class QuasiRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(8, 12, 2, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z, f, o = self.conv(rows(x).transpose(1, 2))[..., :-1].chunk(3, 1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c = torch.zeros_like(z[..., 0])
        for k in range(z.shape[-1]):
            c = f[..., k] * c + (1 - f[..., k]) * z[..., k]
        return self.head(o[..., -1] * c)


@kind("recurrent", "convolutional LSTM, two steps")
class ConvolutionalLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gates = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        u = self.stem(x)
        h, c = torch.zeros_like(u), torch.zeros_like(u)
        for _ in range(2):
            i, f, o, g = self.gates(torch.cat([u, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.head(h.mean((2, 3)))


@kind("recurrent", "echo state (fixed random recurrence)", channels=1)
class EchoState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("again", torch.randn(16, 16) / 5)
        self.register_buffer("into", torch.randn(8, 16) / 3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 16)
        for k in range(8):
            h = 0.5 * h + 0.5 * torch.tanh(x[:, 0, k] @ self.into + h @ self.again)
        return self.head(h)
