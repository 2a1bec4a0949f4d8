"""Randomized smoothing in the flow domain: the noise, the binomial bound, the radius, the
abstention."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom
from torch import Tensor, nn

from wball.certificates.smoothing import (
    FlowSmoothing,
    flow_noise,
    laplace_radius,
    lower_confidence,
)


def test_noise_keeps_every_channels_mass_and_scales_with_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((2, 3, 5, 7), generator=generator, dtype=torch.float64)
    noisy = flow_noise(x, 0.01, generator)
    torch.testing.assert_close(noisy.sum((2, 3)), x.sum((2, 3)))
    assert not torch.equal(noisy, x)
    many = x[:1].expand(4000, -1, -1, -1)
    inner = (flow_noise(many, 0.01, generator) - many)[:, 0, 2, 3]
    # Four edges meet in an inner pixel, each with variance 2 (m s)^2.
    assert float(inner.std()) == pytest.approx(math.sqrt(8) * 0.01 * float(x[0].sum()), rel=0.06)


@pytest.mark.parametrize(
    ("successes", "trials", "alpha"), [(90, 100, 0.01), (7, 10, 0.05), (999, 1000, 0.001)]
)
def test_lower_confidence_is_where_the_binomial_tail_is_alpha(
    successes: int, trials: int, alpha: float
) -> None:
    p = lower_confidence(successes, trials, alpha)
    assert binom.sf(successes - 1, trials, p) == pytest.approx(alpha, rel=1e-6)
    assert lower_confidence(0, trials, alpha) == 0.0


class Threshold(nn.Module):
    """Class 1 if more than a given mass sits in the right pixel of a 1 x 2 image."""

    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(x[:, 0, 0, 1]), x[:, 0, 0, 1] - self.level], 1)


def test_the_radius_is_tight_where_the_smoothed_classifier_is_known() -> None:
    # One edge, one threshold: the smoothed classifier switches exactly when the flow reaches it, at
    # distance 0.03.
    scale, distance = 0.02, 0.03
    probability = 1 - 0.5 * math.exp(-distance / scale)
    assert laplace_radius(probability, scale) == pytest.approx(distance / math.sqrt(2), rel=1e-12)
    x = torch.tensor([[[[0.5, 0.5]]]])
    smoothed = FlowSmoothing(Threshold(0.5 - distance), scale)
    result = smoothed.certify(
        x, samples=20_000, alpha=0.01, generator=torch.Generator().manual_seed(1)
    )
    assert result.prediction.tolist() == [1]
    assert not bool(result.abstained)
    assert 0.9 * distance < math.sqrt(2) * float(result.radius) < distance
    assert bool(result.certified(torch.tensor([1]), 0.014)) and not bool(
        result.certified(torch.tensor([0]))
    )


def test_an_even_vote_is_an_abstention() -> None:
    x = torch.tensor([[[[0.5, 0.5]]]])
    smoothed = FlowSmoothing(Threshold(0.5), 0.02)
    generator = torch.Generator().manual_seed(0)
    result = smoothed.certify(x, samples=2000, generator=generator)
    assert bool(result.abstained) and float(result.radius) == 0.0
    assert bool(smoothed.predict(x, generator=generator).abstained)
    assert not bool(FlowSmoothing(Threshold(0.3), 0.02).predict(x, generator=generator).abstained)


def test_every_sample_is_one_vote_whatever_the_batches() -> None:
    x = torch.rand(3, 1, 4, 4)
    for batch_size in (1, 7, 20, 50):
        votes = FlowSmoothing(nn.Flatten(), 0.05, batch_size=batch_size).votes(x, 20)
        assert votes.shape == (3, 16) and votes.sum(1).tolist() == [20, 20, 20]
    late = FlowSmoothing(nn.Flatten(), 0.05, batch_size=7).votes(x, 20, time_limit=1e-9)
    assert late.sum(1).tolist() == [7, 7, 7]  # what is not drawn in time is a vote for none


def test_a_broken_model_has_no_class() -> None:
    x = torch.rand(2, 1, 4, 4)
    smooth = FlowSmoothing(lambda z: torch.where(z[:, 0, 0, :3] > -9, math.nan, 0.0), 0.01)
    assert smooth.votes(x, 20).sum() == 0
    for result in (smooth.predict(x, samples=20), smooth.certify(x, samples=20, select=5)):
        assert result.abstained.all() and (result.radius == 0).all()


def test_settings_are_checked_and_the_mode_is_restored() -> None:
    with pytest.raises(ValueError, match="scale"):
        FlowSmoothing(nn.Identity(), 0.0)
    with pytest.raises(ValueError, match="images"):
        flow_noise(torch.rand(2, 9), 0.1)
    with pytest.raises(TypeError, match="callable"):
        FlowSmoothing("net", 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.Generator, got 3"):
        FlowSmoothing(Threshold(0.1), 0.1).votes(torch.rand(1, 1, 1, 2), 10, 3)  # type: ignore[arg-type]
    model = Threshold(0.1).train()
    FlowSmoothing(model, 0.1).votes(torch.rand(1, 1, 1, 2), 10)
    assert model.training


def test_no_images_half_precision_and_what_are_no_images() -> None:
    smooth = FlowSmoothing(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 0.01)
    x = torch.rand(2, 1, 4, 4)
    for part in (x[:0], x.half(), x.bfloat16()):
        for result in (smooth.predict(part, samples=8), smooth.certify(part, samples=8, select=4)):
            assert result.prediction.shape == result.radius.shape == (part.shape[0],)
    assert smooth.certify(x.double(), samples=8, select=4).radius.dtype is torch.float64
    for wrong, match in ((x[0], "x must"), (x.flatten(1), "x must"), (x - 0.5, "pixels from")):
        with pytest.raises(ValueError, match=match):
            smooth.certify(wrong, samples=8, select=4)
