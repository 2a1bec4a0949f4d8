"""Images and numbers per image: argument validation for every public call, precision and layout.

Solvers need not check their inputs. Each error names the argument, the value seen and what to do.
Nothing is modified in place.
"""

import math
from collections.abc import Collection

import torch
from torch import Generator, Tensor

BOX_SLACK = 1e-6
"""Pixels this far outside the box are rounding errors (for example of a resize) and are clipped."""


def check_box(box: tuple[float, float] | None) -> tuple[float, float] | None:
    if box is None:
        return None
    try:
        lo, hi = (float(v) for v in box)
    except (TypeError, ValueError) as error:
        raise TypeError(f"box must be a pair (lo, hi) or None, got {box!r}") from error
    if not (0 <= lo < hi < math.inf):
        raise ValueError(
            f"box must satisfy 0 <= lo < hi < inf because mass is never negative, got ({lo}, {hi})"
        )
    return lo, hi


def check_eps(eps: float | Tensor) -> float | Tensor:
    """A number, or a 1-D tensor with one radius per image."""
    if isinstance(eps, Tensor):
        if eps.ndim == 0:
            return check_eps(float(eps))
        if eps.ndim != 1:
            raise ValueError(
                f"eps must be a number or one value per image (1-D), got shape {tuple(eps.shape)}"
            )
        eps = eps.detach().double()
        if (~(eps >= 0) | eps.isinf()).any():
            raise ValueError(
                f"eps must be finite and >= 0, got values from {eps.min():g} to {eps.max():g}"
            )
        return eps
    if isinstance(eps, (list, tuple)) or getattr(eps, "ndim", 0) > 0:  # such as a NumPy array
        return check_eps(torch.as_tensor(eps, dtype=torch.float64))
    try:
        value = float(eps)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"eps must be a number or one value per image, got {type(eps).__name__}"
        ) from error
    if not 0 <= value < math.inf:
        raise ValueError(f"eps must be finite and >= 0, got {value}")
    return value


def as_pixels(images: Tensor) -> Tensor:
    """8-bit images as float32 pixels in [0, 1]; anything else unchanged.

    >>> as_pixels(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        return images.float().div_(255)
    return images


def row_major(values: Tensor) -> Tensor:
    """The same values in row-major memory, which views and compiled loops need.

    ``contiguous()`` is not enough: along axes of length 1 torch accepts any stride, and gives it to
    every tensor made like this one.
    """
    return values.resolve_neg().reshape(-1).view(values.shape)


def check_tensor(name: str, value: Tensor) -> Tensor:
    """A floating, finite ``(B, C, H, W)`` or ``(B, n)`` tensor, in row-major memory."""
    check_layout(name, value)
    _extent({name: value})
    return row_major(value)


def _extent(tensors: dict[str, Tensor]) -> tuple[float, float]:
    """Smallest and largest value of the first tensor, if all tensors are finite; reads the device
    only once."""
    if next(iter(tensors.values())).numel() == 0:
        return 0.0, 0.0
    ends = [end for tensor in tensors.values() for end in torch.aminmax(tensor.detach())]
    seen = torch.stack(ends).tolist()  # NaN if one is
    for place, title in enumerate(tensors):
        if not (math.isfinite(seen[2 * place]) and math.isfinite(seen[2 * place + 1])):
            raise ValueError(
                f"{title} has NaN or infinite values; clean it (torch.nan_to_num) before you call"
            )
    return seen[0], seen[1]


def check_layout(name: str, value: Tensor) -> None:
    """Check type and shape, but not the values."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; use torch.as_tensor({name})"
        )
    if not value.is_floating_point():
        raise TypeError(
            f"{name} must hold floating-point pixels, got {value.dtype}; "
            f"if they are 0 to 255, use {name}.float() / 255"
        )
    _check_memory(name, value)
    if value.ndim not in (2, 4):
        raise ValueError(
            f"{name} must have shape (B, C, H, W), or (B, n) for histograms, got {tuple(value.shape)}; "
            f"for one image use {name}[None]"
        )
    if 0 in value.shape[1:]:
        raise ValueError(f"{name} has an empty image: shape {tuple(value.shape)}")


def _check_memory(name: str, value: Tensor) -> None:
    """Refuse tensors without memory of their own, such as those inside ``torch.func.grad``."""
    try:
        value.data_ptr()
    except RuntimeError as error:
        raise TypeError(
            f"{name} is a tensor without memory, as inside torch.vmap, torch.func and torch.compile: call wball "
            "outside of them, on a batch of images"
        ) from error


def check_images(x: Tensor, box: tuple[float, float] | None, **beside: Tensor) -> Tensor:
    """Check that the pixels of ``x`` are inside the box, and not negative; clip rounding errors,
    and bring the images into row-major memory.

    8-bit images are divided by 255, unless the box reaches beyond 1. Tensors given ``beside`` them
    must be finite, of their shape and on their device.
    """
    if box is None or box[1] <= 1:
        x = as_pixels(x)
    check_layout("x", x)
    for title, other in beside.items():
        _check_alike(title, other, x)
    low, high = _extent({"x": x, **beside})
    check_default_device(x.device)
    if x.numel() == 0:
        return x
    lo, hi = box or (0.0, math.inf)
    # Half precision rounds by more than BOX_SLACK, but 0 and 1 are exact in it.
    if low < lo - BOX_SLACK or high > hi + BOX_SLACK * max(1.0, hi if math.isfinite(hi) else 1.0):
        where = f"[{lo:g}, {hi:g}]" if box else "[0, inf)"
        raise ValueError(
            f"x has pixels from {low:g} to {high:g}, outside {where}; "
            "scale images to the ball's box (normalise inside the model), or give the ball another box"
        )
    return row_major(x.clamp(lo, hi) if low < lo or high > hi else x)


def check_default_device(device: torch.device) -> None:
    """Refuse a default device that is neither the CPU nor the images' device."""
    default = torch.empty(0).device  # torch.get_default_device() takes four times as long
    if default.type not in ("cpu", device.type):
        raise ValueError(
            f"x is on {device}, but tensors are made on {default} by default (torch.set_default_device); move it "
            f"there, or make the call inside `with torch.device({device.type!r}):`"
        )


def check_like(name: str, value: Tensor, x: Tensor) -> Tensor:
    """A finite tensor of ``x``'s shape on ``x``'s device."""
    _check_alike(name, value, x)
    return check_tensor(name, value)


def _check_alike(name: str, value: Tensor, x: Tensor) -> None:
    """The same without reading the values."""
    check_layout(name, value)
    if value.shape != x.shape:
        raise ValueError(
            f"{name} must have the shape of x, {tuple(x.shape)}, got {tuple(value.shape)}"
        )
    if value.device != x.device:
        raise ValueError(
            f"{name} is on {value.device} but x is on {x.device}; move one with .to(...)"
        )


def check_labels(name: str, labels: Tensor, x: Tensor) -> Tensor:
    """Check for integer classes, one per image, and move them to the device of the images."""
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor of class indices, got {type(labels).__name__}"
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(
            f"{name} must hold integer class indices, got {labels.dtype}; for one-hot rows use argmax(1)"
        )
    if labels.shape != x.shape[:1]:
        raise ValueError(
            f"{name} must have one class per image, shape ({len(x)},), got {tuple(labels.shape)}; for one-hot "
            "rows use argmax(1), for a column of classes flatten()"
        )
    return labels.detach().to(device=x.device, dtype=torch.long)


def check_eps_count(eps: float | Tensor, batch: int) -> None:
    if isinstance(eps, Tensor) and len(eps) != batch:
        raise ValueError(
            f"eps has {len(eps)} values for {batch} images; give one per image, or a single number"
        )


def check_positive(name: str, value: float, *, inf: bool = False) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not (number > 0 and (inf or number < math.inf)):
        raise ValueError(f"{name} must be > 0{'' if inf else ' and finite'}, got {value!r}")
    return number


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_count(name: str, value: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def check_seed(value: int) -> int:
    """A seed that every torch.Generator accepts."""
    if check_count("seed", value, least=0) >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {value}")
    return value


def check_generator(generator: Generator | None) -> None:
    if generator is not None and not isinstance(generator, Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {generator!r}; see torch.Generator.manual_seed"
        )


def find_device(name: str) -> torch.device:
    """The torch device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: torch sees no CUDA device; use --device cpu")
    return device


def want_gradient(*tensors: Tensor) -> bool:
    """Whether the gradient in one of the inputs of a call is recorded."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def result_dtype(x: Tensor) -> torch.dtype:
    """The images' dtype, but at least float32: half precision cannot keep the mass to 1e-5."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """``(B,)`` reshaped to broadcast against a tensor with a leading batch dimension."""
    return values.view(-1, *[1] * (like.ndim - 1))


def zeros(x: Tensor) -> Tensor:
    """A zero for each image, in float64."""
    return torch.zeros(len(x), dtype=torch.float64, device=x.device)


def positions(mask: Tensor) -> Tensor:
    """Where a mask is set."""
    return mask.nonzero().squeeze(1)


def largest(values: Tensor) -> Tensor:
    """The largest magnitude per image."""
    return torch.linalg.vector_norm(values.flatten(1), math.inf, 1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product per image."""
    return (a * b).flatten(1).sum(1)


def dot_and_size(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Inner product per image, and the sum of its terms' magnitudes, to which it is rounded."""
    terms = (a * b).flatten(1)
    return terms.sum(1), torch.linalg.vector_norm(terms, 1, 1)
