"""Data sets, loaders and arrays become tensors, or are refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from wball.data import (
    to_tensors,
)


class Arrays(Dataset):
    """A map-style data set that never raises IndexError."""

    def __init__(self, x: torch.Tensor, kind: str) -> None:
        self.x, self.kind = x, kind

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[object, int]:
        array = (self.x[i] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        if self.kind == "pil":
            return pytest.importorskip("PIL.Image").fromarray(array), i
        return array, i


class Stream(IterableDataset):
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((image, i) for i, image in enumerate(self.x))


class CountedStream(Stream):
    def __len__(self) -> int:
        return len(self.x)


class Endless(Dataset):
    """A map-style data set without a length, as the sequence protocol allows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.x[i], i  # a tensor raises IndexError at its end


def test_any_source_becomes_tensors() -> None:
    x, y = torch.randint(0, 256, (7, 3, 4, 5)) / 255, torch.arange(7)
    tensors = TensorDataset(x, y)
    sources = [
        (x, y),
        tensors,
        DataLoader(tensors, batch_size=3),
        Arrays(x, "array"),
        Arrays(x, "pil"),
        Stream(x),
    ]
    sources += [
        [(image, int(label)) for image, label in tensors],
        DataLoader(Stream(x), batch_size=2),
    ]
    sources += [CountedStream(x), DataLoader(CountedStream(x), batch_size=2), Endless(x)]
    sources += [
        (x.numpy(), y.numpy().astype(kind)) for kind in ("uint8", "uint16", "int32", "float64")
    ]
    sources += [
        (x.clone().requires_grad_(), y),
        [(image, np.array([label])) for image, label in tensors],
    ]
    named = [{"image": image, "label": int(label), "id": "a"} for image, label in tensors]
    sources += [named, DataLoader(named, batch_size=3), {"x": x, "y": y}]  # type: ignore[list-item, arg-type]
    for source in sources:
        got_x, got_y = to_tensors(source)
        torch.testing.assert_close(got_x, x, rtol=0, atol=1e-7)
        assert torch.equal(got_y, y) and got_y.dtype == torch.long and not got_x.requires_grad
        assert [len(v) for v in to_tensors(source, limit=5)] == [5, 5]
    assert to_tensors([(x[0], 1), (x[1], 2)])[1].tolist() == [1, 2]
    bytes_ = (x * 255).round().to(torch.uint8).numpy()
    for source in (
        (x, y.tolist()),
        (x, y[:, None]),
        [(image, i) for i, image in enumerate(bytes_)],
    ):
        assert torch.equal(to_tensors(source)[0], x) and torch.equal(to_tensors(source)[1], y)
    square = bytes_[:5, 0]  # as many images as columns: each axis could be the batch
    assert torch.equal(to_tensors([(square, y[:5].numpy())])[0], x[:5, :1])
    flat = TensorDataset(x[:, 0], y)
    for source in (
        flat,
        *(DataLoader(flat, batch_size=size) for size in (1, 3, 7)),
    ):  # 3: the last batch is one image
        assert torch.equal(to_tensors(source)[0], x[:, :1])


def test_pil_images_of_few_colours() -> None:
    image = pytest.importorskip("PIL.Image")
    colours = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    palette = image.fromarray(colours).quantize(20)
    x, _ = to_tensors([(palette, 1)])
    np.testing.assert_array_equal(
        (x[0] * 255).round().numpy(), np.asarray(palette.convert("RGB")).transpose(2, 0, 1)
    )
    bits = image.fromarray(colours[..., 0]).convert("1")
    x, _ = to_tensors([(bits, 1)])
    np.testing.assert_array_equal(x[0, 0].numpy(), np.asarray(bits).astype(np.float32))


def test_to_tensors_refuses_with_a_reason() -> None:
    x, y = torch.rand(4, 1, 5, 5), torch.arange(4)
    for bad, kind, message in [
        ((x * 3 - 1, y), ValueError, "wball.Normalized"),
        ((x[:, 0], y), ValueError, r"images \(4, 5, 5\).*x\[:, None\]"),
        ((x * 255, y), ValueError, "divide bytes by 255"),
        ((x, y + 0.5), ValueError, "labels from 0.5 to 3.5"),
        ((x, y - 1), ValueError, "labels from -1 to 2"),
        ([(x[0], "cat")], TypeError, "label 'cat'"),
        ([(x[0], None)], TypeError, "label None"),
        ((x, y[:3]), ValueError, r"labels \(3,\)"),
        ((x.long(), y), TypeError, "int64"),
        ((x, torch.eye(4)), ValueError, r"one-hot labels give their argmax\(1\)"),
        ([], ValueError, "empty"),
        ([x[0], x[1], x[2]], TypeError, "pairs"),
        ([(x[0], 0), (x[0, :, 1:], 1)], ValueError, "different shapes"),
        ([("a.png", 1)], TypeError, "str"),
        ([{"image": x[0], "x": x[0], "label": 1}], TypeError, "'image', 'x', 'label'.*not clear"),
        ([{"picture": x[0], "label": 1}], TypeError, "'picture', 'label'.*not clear"),
        (3, TypeError, "got int"),
    ]:
        with pytest.raises(kind, match=message):
            to_tensors(bad)
    for limit, kind in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(kind, match="limit"):
            to_tensors((x, y), limit=limit)  # type: ignore[arg-type]
