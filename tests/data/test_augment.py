"""Random crops, flips, turns and cutouts."""

from __future__ import annotations

import torch

from wball.data import (
    RandomAffine,
    RandomCropFlip,
    RandomCutout,
)


def test_augmentation_is_a_crop_of_the_padded_image() -> None:
    x = torch.rand(40, 2, 6, 7)
    out = RandomCropFlip(padding=2)(x)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for image, source in zip(out, padded, strict=True):
        options = {
            (r, c, flip): source[:, r : r + 6, c : c + 7].flip(2)
            if flip
            else source[:, r : r + 6, c : c + 7]
            for r in range(5)
            for c in range(5)
            for flip in (False, True)
        }
        found = [key for key, crop in options.items() if torch.equal(crop, image)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 15 and {flip for *_, flip in seen} == {False, True}
    assert torch.equal(RandomCropFlip(padding=0, flip=False)(x), x)
    same = [RandomCropFlip()(x, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*same)


def test_affine_turns_about_the_centre_and_keeps_pixels_in_range() -> None:
    x = torch.rand(64, 3, 32, 32)
    draws = torch.Generator().manual_seed(0)
    out = RandomAffine()(x, draws)
    assert out.shape == x.shape and float(out.min()) >= 0 and float(out.max()) <= 1
    assert torch.equal(out, RandomAffine()(x, torch.Generator().manual_seed(0)))
    assert torch.allclose(RandomAffine(0.0)(x), x, atol=1e-5)
    # A dot at the centre stays there; dots 10 pixels away move by at most 10 * (angle + scale +
    # shear).
    dots = torch.zeros(64, 1, 33, 33)
    dots[:, :, 16, 16] = 1
    dots[:, :, 15:18, 25:28] = 1
    moved = RandomAffine()(dots, draws)
    assert (moved[:, 0, 16, 16] > 0.5).all()
    columns = torch.arange(33.0)
    far = moved[:, 0] * (columns >= 20)
    right, height = (far.sum(axis) @ columns / far.sum((1, 2)) for axis in (1, 2))
    assert 1.0 < (right.max() - right.min()) < 3.0 and ((right - 26).abs() < 2).all()
    assert 2.0 < (height.max() - height.min()) < 6.5 and ((height - 16).abs() < 3.2).all()
    # Turned one way and the other, and each image in its own way.
    assert height.min() < 15 and height.max() > 17 and len(height.unique()) > 60


def test_cutout_blackens_one_square() -> None:
    out = RandomCutout(4)(torch.ones(500, 2, 12, 10), torch.Generator().manual_seed(1))
    assert torch.equal(out[:, 0], out[:, 1])
    black = out[:, 0] == 0
    rows, columns = black.any(2).sum(1), black.any(1).sum(1)
    assert torch.equal(black.sum((1, 2)), rows * columns)
    assert rows.max() == columns.max() == 4 and rows.min() == columns.min() == 2
    # Every pixel is covered now and then.
    assert black.any(0).all()
