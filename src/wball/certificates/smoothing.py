r"""Randomized smoothing in the flow domain: certificates that hold with a stated probability
(Levine & Feizi, 2020).

Moving mass between neighbouring pixels is a flow ``f`` on the grid's edges: ``z = x + m div(f)``,
and the cheapest flow that takes ``x`` to ``z`` has ``|f|_1 = W(x, z)`` in (mass fraction) x
(Manhattan pixels). So noise on the flow turns the Wasserstein ball into an l1 ball. With
independent Laplace noise of scale ``s`` on every edge, a class that the noisy model gives with
probability at least ``p > 1/2`` stays the most likely one for every ``z`` with

.. math:: W_{\text{Manhattan}}(x, z) < -s \log(2 (1 - p))

which is tight for l1. Manhattan distance is at most ``sqrt(2)`` times the Euclidean one, so
dividing by ``sqrt(2)`` gives a radius in the unit of :class:`wball.WassersteinBall` with relative
mass and ``p = 1``. (For ``p > 1`` moves cost at least as much, and the radius holds as well.) Full
plans, all channels together.

**What is certified.** The *smoothed* classifier, ``argmax_k P(model(x + m div(noise)) = k)``, not
the model itself. Its probabilities are estimated from samples: for each image, the statement "the
smoothed classifier answers ``prediction`` all over the open ball of this ``radius``" is wrong with
probability at most ``alpha`` over the noise drawn (an exact binomial bound, Clopper & Pearson).
Over many images about a share ``alpha`` may be wrong.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wball import inputs
from wball.display import Summarised
from wball.inputs import per_image, result_dtype
from wball.model import Model, ask, evaluating, top_class


@dataclass(frozen=True, repr=False)
class SmoothingResult(Summarised):
    """The outcome of smoothing for each image.

    Attributes:
        prediction: the class with the most votes.
        abstained: bool: the votes do not support a prediction; ``radius`` is 0.
        radius: certified radius (0 for :meth:`FlowSmoothing.predict`), float64.
        probability: lower bound of the predicted class's probability, float64.
        alpha: probability, per image, that the statement is wrong.
        samples: number of noisy copies that were counted.
    """

    prediction: Tensor
    abstained: Tensor
    radius: Tensor
    probability: Tensor
    alpha: float
    samples: int

    def headline(self) -> dict[str, str]:
        shown = {"images": str(len(self.radius)), "abstained": str(int(self.abstained.sum()))}
        return {**shown, "median radius": f"{float(self.radius.median()):.4g}"}

    def certified(self, y: Tensor, eps: float = 0.0) -> Tensor:
        """Which images are classified correctly and certified beyond ``eps``."""
        return (
            ~self.abstained
            & (self.prediction == y.to(self.prediction.device))
            & (self.radius > eps)
        )


def divergence(horizontal: Tensor, vertical: Tensor) -> Tensor:
    """The change of each pixel by flows along the edges: ``(B, C, H, W - 1)`` rightwards and ``(B,
    C, H - 1, W)`` downwards."""
    across = F.pad(horizontal, (1, 0)) - F.pad(horizontal, (0, 1))
    return across + F.pad(vertical, (0, 0, 1, 0)) - F.pad(vertical, (0, 0, 0, 1))


def flow_noise(x: Tensor, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """``x + m div(f)`` with Laplace noise ``f`` of this scale on every edge; ``m`` is the image's
    mass.

    Mass is preserved, but pixels may leave the box: the model must be trained on such images. The
    standard deviation of the noise is ``sqrt(2) * scale``.
    """
    scale = inputs.check_positive("scale", scale)
    inputs.check_generator(generator)
    x = _images(x)
    batch, channels, height, width = x.shape
    right = _laplace((batch, channels, height, width - 1), x, generator)
    down = _laplace((batch, channels, height - 1, width), x, generator)
    mass = per_image(x.flatten(1).sum(1), x)
    return x + mass * scale * divergence(right, down)


def _images(x: Tensor) -> Tensor:
    x = inputs.check_tensor("x", inputs.as_pixels(x))
    if x.ndim != 4:
        raise ValueError(
            f"x must be images (B, C, H, W) to have flows between neighbours, got {tuple(x.shape)}"
        )
    return x


def _laplace(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    def exponential() -> Tensor:
        return torch.empty(shape, dtype=like.dtype, device=like.device).exponential_(
            generator=generator
        )

    return exponential() - exponential()


def lower_confidence(successes: int, trials: int, alpha: float) -> float:
    """The Clopper-Pearson lower bound of the probability of success, wrong with probability at most
    ``alpha``.

    >>> round(lower_confidence(100, 100, 0.001), 4)
    0.9333
    """
    from scipy.stats import beta  # slow to import

    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
    return 0.0 if successes == 0 else float(beta.ppf(alpha, successes, trials - successes + 1))


def laplace_radius(probability: float, scale: float) -> float:
    """The tight radius for a class of at least this probability under Laplace flow noise of this
    scale.

    >>> round(laplace_radius(0.99, 0.01), 4)
    0.0277
    """
    if probability <= 0.5:
        return 0.0
    return -scale * math.log(2 * max(1 - probability, 1e-300)) / math.sqrt(2)


def _lower(counts: Tensor, samples: int, alpha: float) -> Tensor:
    """:func:`lower_confidence` of each count."""
    bounds = [lower_confidence(int(k), samples, alpha) for k in counts.tolist()]
    return torch.tensor(bounds, dtype=torch.float64, device=counts.device)


class FlowSmoothing:
    """The smoothed classifier of a model.

    Args:
        model: the base model, best trained with :func:`flow_noise` of the same scale.
        scale: Laplace scale of the noise on the flow of a mass-1 image.
        batch_size: noisy images per forward pass.
    """

    def __init__(self, model: Model, scale: float, batch_size: int = 1000) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, images to logits, got {type(model).__name__}")
        program: Any = model if hasattr(model, "graph_signature") else None  # of torch.export
        model = model if program is None else program.module()
        self.model, self.scale = model, inputs.check_positive("scale", scale)
        self.batch_size = inputs.check_count("batch_size", batch_size)

    @torch.no_grad()
    def votes(
        self,
        x: Tensor,
        samples: int,
        generator: torch.Generator | None = None,
        time_limit: float = math.inf,
    ) -> Tensor:
        """Number of noisy copies of each image that are classified as each class, ``(B, classes)``.
        NaN counts for no class, and neither do copies that are not drawn within ``time_limit``
        seconds per image."""
        inputs.check_count("samples", samples)
        x = inputs.check_images(_images(x), None)
        x = x.to(result_dtype(x))
        with evaluating(self.model):
            if x.shape[0] == 0:
                return torch.zeros(
                    (0, ask(self.model, x).shape[1]), dtype=torch.long, device=x.device
                )
            parts = (self._votes(image[None], samples, generator, time_limit) for image in x)
            return torch.stack(list(parts))

    def _votes(
        self, image: Tensor, samples: int, generator: torch.Generator | None, time_limit: float
    ) -> Tensor:
        total: Tensor | None = None
        end = time.monotonic() + time_limit
        for start in range(0, samples, self.batch_size):
            if start > 0 and time.monotonic() > end:
                break
            copies = image.expand(min(self.batch_size, samples - start), -1, -1, -1)
            logits = ask(self.model, flow_noise(copies, self.scale, generator))
            winner = top_class(logits)
            counts = torch.bincount(winner[winner >= 0], minlength=logits.shape[1])
            total = counts if total is None else total + counts
        assert total is not None
        return total

    def predict(
        self,
        x: Tensor,
        samples: int = 1000,
        alpha: float = 0.001,
        generator: torch.Generator | None = None,
    ) -> SmoothingResult:
        """The prediction of the smoothed classifier, or an abstention if two classes are too close.

        If it does not abstain, the class differs from that of the smoothed classifier with
        probability at most ``alpha``.
        """
        from scipy.stats import binomtest

        top = self.votes(x, samples, generator).topk(2, 1)
        sure = [
            binomtest(int(a), int(a + b), 0.5).pvalue <= alpha if a + b > 0 else False
            for a, b in top.values.tolist()
        ]
        low = _lower(top.values[:, 0], samples, alpha)
        unsure = ~torch.tensor(sure, dtype=torch.bool, device=x.device)
        guess = top.indices[:, 0]
        return SmoothingResult(guess, unsure, torch.zeros_like(low), low, alpha, samples)

    def certify(
        self,
        x: Tensor,
        samples: int = 10_000,
        select: int = 100,
        alpha: float = 0.001,
        generator: torch.Generator | None = None,
        time_limit: float = 60.0,
    ) -> SmoothingResult:
        """Radii within which the prediction of the smoothed classifier is certified, each with
        confidence ``1 - alpha``.

        ``select`` samples choose the class; ``samples`` fresh ones bound its probability. Samples
        that are not drawn within ``time_limit`` seconds per image count against the class, so that
        radii are smaller, never wrong.
        """
        inputs.check_positive("time_limit", time_limit)
        guess = self.votes(x, select, generator).argmax(1)
        counts = self.votes(x, samples, generator, time_limit).gather(1, guess[:, None])[:, 0]
        low = _lower(counts, samples, alpha)
        radius = low.new_tensor([laplace_radius(p, self.scale) for p in low.tolist()])
        return SmoothingResult(guess, low <= 0.5, radius, low, alpha, samples)
