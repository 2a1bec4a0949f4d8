"""Scalar functions: lines that hold everywhere on an interval, and the range and slopes that jets
give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wball
from wball.certificates import UnsupportedModule, certify, register
from wball.certificates.curves import FUNCTIONS, Curve, CurveStep, Lines, Value, curve_lines

aten = torch.ops.aten

CURVES = {
    **{f"{target}": Curve.of(target) for target in FUNCTIONS},
    "square": Curve((CurveStep(aten.mul.Tensor, (Value(0), Value(0)), {}),)),
    "cube": Curve((CurveStep(aten.pow.Tensor_Scalar, (Value(0), 3), {}),)),
    "swish": Curve(
        (
            CurveStep(aten.sigmoid.default, (Value(0),), {}),
            CurveStep(aten.mul.Tensor, (Value(0), Value(1)), {}),
        )
    ),
    "step": Curve(
        (
            CurveStep(aten.gt.Scalar, (Value(0), 0.3), {}),
            CurveStep(aten.sin.default, (Value(0),), {}),
            CurveStep(aten.where.self, (Value(1), Value(0), Value(2)), {}),
        )
    ),
    "leaky relu": Curve(
        (
            CurveStep(aten.mul.Tensor, (Value(0), 0.2), {}),
            CurveStep(aten.relu.default, (Value(0),), {}),
            CurveStep(aten.add.Tensor, (Value(1), Value(2)), {"alpha": 0.8}),
        )
    ),
}


def intervals() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    centre = 6 * torch.randn(400, dtype=torch.float64, generator=draw)
    radius = 10 ** (4 * torch.rand(400, dtype=torch.float64, generator=draw) - 2)  # 0.01 to 100
    return centre - radius, centre + radius


def holds(lines: Lines, value: Tensor, v: Tensor) -> None:
    """Wherever the function is defined: outside of that the error must be infinite."""
    below, above = lines.low_slope * v + lines.low_shift, lines.up_slope * v + lines.up_shift
    known = torch.isfinite(value)
    assert not bool(torch.isfinite(lines.error)[~known].any())
    room = 4e-16 * (1 + value.abs())  # the value is rounded, too
    for least, most in ((below, above), (lines.least, lines.most)):
        assert bool(((least <= value + room) & (value - room <= most))[known].all())


@pytest.mark.parametrize("name", CURVES)
def test_lines_of_curves_hold_on_the_interval(name: str) -> None:
    curve, (low, up) = CURVES[name], intervals()
    lines = curve_lines(curve, low, up)
    for k in range(257):
        v = torch.minimum(low + (up - low) * (k / 256), up)
        holds(lines, curve(v), v)
    narrow = (up - low < 0.1) & torch.isfinite(lines.error) & (low.abs() < 3)
    narrow &= torch.tensor(name != "step") | ~((low < 0.3) & (up > 0.3))
    gap = (lines.up_slope - lines.low_slope) * (low + up) / 2 + lines.up_shift - lines.low_shift
    size = curve(up).abs() + curve(low).abs() + 1
    assert int(narrow.sum()) > 5, name
    assert bool((gap / size < 0.05)[narrow].all()), "on short intervals the lines meet"


@pytest.mark.parametrize("name", CURVES)
def test_lines_of_curves_hold_without_bounds(name: str) -> None:
    far, curve = torch.tensor([100.0], dtype=torch.float64), CURVES[name]
    for low, up in ((-far, far), (-far * torch.inf, far * torch.inf)):
        lines = curve_lines(curve, low, up)
        for v in (-far, -far / 3, 0 * far, far / 7, far):
            holds(lines, curve(v), v)


class Asinh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.asinh(x)


def test_a_registered_function_is_followed() -> None:
    """What docs/certificates.md teaches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), Asinh(), nn.Linear(6, 3)).eval()
    x = torch.rand((2, 1, 3, 3), generator=torch.Generator().manual_seed(2))
    y, ball = net(x).argmax(1), wball.WassersteinBall(1e-3)
    with pytest.raises(UnsupportedModule, match=r"aten\.asinh\.default.*register"):
        certify(net, x, y, ball)

    def bounds(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steepest = 1 / (1 + torch.minimum(torch.maximum(low, 0 * low), high) ** 2).sqrt()
        flattest = 1 / (1 + torch.maximum(low.abs(), high.abs()) ** 2).sqrt()
        return low.asinh(), high.asinh(), flattest, steepest

    register(aten.asinh.default, bounds)
    try:
        proof = certify(net, x, y, ball)
        assert bool(proof.certified.all())
        assert bool(wball.verify(net, x, y, ball, proof).confirmed.all())
        with pytest.raises(TypeError, match=r"torch\.ops"):
            register("asinh", bounds)
    finally:
        FUNCTIONS.pop(aten.asinh.default)
