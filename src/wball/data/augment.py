"""Random changes of whole batches, on the device where they are."""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class RandomCropFlip:
    """CIFAR-10's usual augmentation on a whole batch: pad with black, crop at random, mirror half
    of the images.

    >>> RandomCropFlip()(torch.rand(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Augment ``x`` (``generator``: on ``x``'s device)."""
        batch, channels, height, width = x.shape

        def draw(high: int) -> Tensor:
            return torch.randint(high, (batch, 1), device=x.device, generator=generator)

        rows = torch.arange(height, device=x.device) + draw(2 * self.padding + 1)
        columns = torch.arange(width, device=x.device).expand(batch, -1)
        if self.flip:
            columns = torch.where(draw(2).bool(), columns.flip(1), columns)
        columns = columns + draw(2 * self.padding + 1)
        padded = F.pad(x, (self.padding,) * 4)
        image = torch.arange(batch, device=x.device).view(-1, 1, 1, 1)
        channel = torch.arange(channels, device=x.device).view(1, -1, 1, 1)
        return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True)
class RandomAffine:
    """Each image turned, scaled and sheared at random about its centre; what comes in from outside
    is black.

    With ``amount`` 1 angles are up to 10 degrees, scales in [0.9, 1.1] and shears up to 0.1; other
    amounts multiply these ranges. Pixels stay in [0, 1].

    >>> RandomAffine()(torch.rand(8, 1, 28, 28)).shape
    torch.Size([8, 1, 28, 28])
    """

    amount: float = 1.0

    def __call__(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Augment ``x`` (``generator``: on ``x``'s device)."""
        draws = torch.rand(4, len(x), device=x.device, generator=generator)
        angle, wide, high, shear = (2 * draws - 1) * self.amount
        angle, shear = angle * math.radians(10), 0.1 * shear
        # A rotation times a shear, divided by the scales: it maps each pixel of the result to its
        # source in the image.
        cosine, sine = angle.cos(), angle.sin()
        width, height = 1 + 0.1 * wide, 1 + 0.1 * high
        nothing = torch.zeros_like(angle)
        across = torch.stack([cosine / width, (shear * cosine - sine) / height, nothing], 1)
        down = torch.stack([sine / width, (shear * sine + cosine) / height, nothing], 1)
        grid = F.affine_grid(torch.stack([across, down], 1), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid.to(x.dtype), mode="bilinear", align_corners=False).clamp(0, 1)


@dataclass(frozen=True)
class RandomCutout:
    """Blacken a square of ``size`` pixels in each image, centred anywhere in it.

    >>> int((RandomCutout(2)(torch.ones(1, 1, 8, 8)) == 0).sum()) in (1, 2, 4)
    True
    """

    size: int

    def __call__(self, x: Tensor, generator: Generator | None = None) -> Tensor:
        """Augment ``x`` (``generator``: on ``x``'s device)."""

        def covered(length: int) -> Tensor:
            centre = torch.randint(length, (len(x), 1), device=x.device, generator=generator)
            behind = torch.arange(length, device=x.device) - centre + self.size // 2
            return (behind >= 0) & (behind < self.size)

        square = covered(x.shape[2])[:, None, :, None] & covered(x.shape[3])[:, None, None, :]
        return x.masked_fill(square, 0.0)
