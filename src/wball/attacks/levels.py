r"""Examples that survive storage: images whose pixels are whole multiples of ``1 / (levels - 1)``.

An example is pulled back towards its image by a little, :math:`z_s = x + s (z - x)`, and rounded
along a space-filling curve: a pixel becomes the difference of the *rounded* sums of all pixels up
to it, so that what one pixel loses the next one on the curve gains. Every channel keeps its mass
exactly, every pixel is rounded up or down by less than a level, and so stays in the box, and mass
moves by about a pixel. :func:`wball.attacks.attack.to_levels` takes the largest ``s`` at which the
rounded image is still in the ball, by its exact distance, and still meets the goal. Saved as a PNG
and read back, it is the same image.
"""

import torch
from torch import Tensor


def check_on_levels(x: Tensor, levels: int) -> None:
    """Raise unless every pixel is a multiple of ``1 / (levels - 1)``, up to rounding."""
    units = x.double() * (levels - 1)
    if ((units - units.round()).abs() > 1e-3).any():
        raise ValueError(
            f"x must have pixels that are multiples of 1/{levels - 1} for levels={levels}, so that rounding keeps the "
            f"mass: use images as they were stored, or (x * {levels - 1}).round() / {levels - 1}"
        )


def _curve(height: int, width: int, device: torch.device) -> Tensor:
    """The pixels in Z-order: neighbours on the curve are mostly neighbours on the grid."""
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    code = torch.zeros_like(row)
    for bit in range(max(height, width).bit_length()):
        code |= (((row >> bit) & 1) << (2 * bit + 1)) | (((column >> bit) & 1) << (2 * bit))
    return code.flatten().argsort().to(device)


def rounded(z: Tensor, x: Tensor, levels: int) -> Tensor:
    """Round ``z`` to the levels while preserving the mass of each channel, if it equals that of
    ``x`` (which is on the levels) up to rounding.

    >>> x = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    >>> rounded(torch.tensor([[[[0.4, 0.6], [0.6, 0.4]]]]), x, 2).sum()
    tensor(2.)
    """
    grid = z if z.ndim == 4 else z[:, None, None, :]
    order = _curve(int(grid.shape[2]), int(grid.shape[3]), z.device)
    units = (grid.double() * (levels - 1)).flatten(2)[..., order]
    whole = (x.reshape(grid.shape).double() * (levels - 1)).round().flatten(2).sum(2, keepdim=True)
    sums = units.cumsum(2)
    kept = (sums[..., -1:] - whole).abs() <= (2e-5 * whole).clamp(min=0.5)
    whole = torch.where(kept, whole, sums[..., -1:].round())
    sums = (sums * (whole / sums[..., -1:].clamp(min=torch.finfo(torch.float64).tiny))).round()
    steps = torch.diff(sums, dim=2, prepend=torch.zeros_like(whole))
    out = torch.empty_like(steps)
    out[..., order] = steps
    return (out.to(z.dtype) / (levels - 1)).view(z.shape)
