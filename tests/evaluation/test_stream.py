"""Data that are read batch by batch give the results of data in memory, to the byte."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import wball
from evaluation.linear import BALL
from evaluation.linear import bytes_in_classes as problem
from wball.evaluation import Evaluation, evaluate

FILES = ("results.json", "examples.safetensors", "exhibit.safetensors")


class Items(Dataset[Any]):
    """Counts what is read, and how much of it at most is held."""

    def __init__(self, x: Tensor, y: Tensor, form: str = "pair") -> None:
        self.x, self.y, self.form, self.read = x, y, form, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> Any:
        self.read += 1
        if self.form == "dictionary":
            return {"image": self.x[k], "label": int(self.y[k])}
        if self.form == "PIL":
            image = pytest.importorskip("PIL.Image")
            return image.fromarray(self.x[k, 0].numpy()), int(self.y[k])
        return self.x[k].float() / 255, int(self.y[k])


class Named:
    """The interface of a Hugging Face data set: no class of torch's, dictionaries, names of classes
    in its features."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._items = Items(x, y, "PIL")
        self.features = {"image": object(), "label": SimpleNamespace(names=NAMES)}

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: int) -> dict[str, Any]:
        image, label = self._items[key]
        return {"image": image, "label": label}


NAMES = ["0", "1", "2", "3"]


def run(x: Any, y: Any = None, out: Path | None = None, **more: Any) -> Evaluation:
    model, _, _ = problem()
    attack = wball.DualAveraging(BALL, steps=4, random_start=1.0)
    return evaluate(
        model,
        x,
        y,
        ball=BALL,
        radii=[0.1, 0.4],
        attack=attack,
        out=out,
        batch_size=4,
        name=wball.Names("m", command="c"),
        **more,
    )


def same(one: Path, two: Path) -> bool:
    return all((one / name).read_bytes() == (two / name).read_bytes() for name in FILES)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    _, x, y = problem()
    run(x.float() / 255, y, folder)
    return folder


FORMS: dict[str, Any] = {
    "pairs": lambda x, y, _: (Items(x, y),),
    "dictionaries": lambda x, y, _: (Items(x, y, "dictionary"),),
    "PIL images": lambda x, y, _: (Items(x, y, "PIL"),),
    "loader": lambda x, y, _: (DataLoader(Items(x, y), batch_size=3, shuffle=True),),
    "a pair of tensors": lambda x, y, _: ((x.float() / 255, y),),
    "labels in a list": lambda x, y, _: (x.float() / 255, y.tolist()),
    "uint8 tensors": lambda x, y, _: (x, y),
    "a loader of PIL images": lambda x, y, _: (
        DataLoader(Items(x, y, "PIL"), batch_size=3, num_workers=2),
    ),
    "Hugging Face's style": lambda x, y, _: (Named(x, y),),
    "uint8 arrays": lambda x, y, _: (x.numpy(), y.numpy()),
    "float arrays": lambda x, y, _: ((x.float() / 255).numpy(), y.numpy()),
    "memory-mapped": lambda x, y, folder: (_mapped(x, folder), y.numpy()),
    "npz": lambda x, y, folder: (_npz(x, y, folder),),
    "compressed npz": lambda x, y, folder: (_npz(x, y, folder, np.savez_compressed),),
}


def _mapped(x: Tensor, folder: Path) -> Any:
    np.save(folder / "x.npy", x.numpy())
    return np.load(folder / "x.npy", mmap_mode="r")


def _npz(x: Tensor, y: Tensor, folder: Path, save: Any = np.savez) -> Path:
    save(folder / "data.npz", images=x.numpy(), labels=y.numpy())
    return folder / "data.npz"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_bytes(
    tmp_path: Path, in_memory: Path, form: str
) -> None:
    _, x, y = problem()
    run(*FORMS[form](x, y, tmp_path), out=tmp_path / "o")
    assert same(tmp_path / "o", in_memory)


def test_an_interrupted_stream_is_resumed_and_reads_only_what_is_left(
    tmp_path: Path, in_memory: Path
) -> None:
    _, x, y = problem()

    class Breaks(Items):
        def __getitem__(self, k: int) -> Any:
            if self.read > 14 + 9:  # all once for the fingerprint, then the first two batches
                raise OSError("the disk went away")
            return super().__getitem__(k)

    with pytest.raises(OSError, match="went away"):
        run(Breaks(x, y), out=tmp_path)
    assert list((tmp_path / "batches").glob("batch-*"))
    run(Items(x, y), out=tmp_path)
    assert same(tmp_path, in_memory)
    items = Items(x, y)
    run(items, out=tmp_path)  # finished: nothing but the fingerprint is read
    assert items.read <= 14 + 2


def test_too_many_examples_are_sampled_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wball.evaluation.batches.KEEP_BYTES", 1000)
    monkeypatch.setattr("wball.evaluation.batches.SAMPLE_BYTES", 1000)
    _, x, y = problem()
    with pytest.warns(UserWarning, match="a sample of 3 is stored"):
        result = run(x.float() / 255, y, tmp_path)
    kept = result.examples["index"]
    assert len(kept) == 3 and bool((result.images["read_as"][kept] >= 0).all())


def test_data_and_ball_are_enough() -> None:
    model, x, y = problem()
    attack = wball.DualAveraging(BALL, steps=2)
    loader = DataLoader(TensorDataset(x.float() / 255, y))
    one = evaluate(model, loader, ball=BALL, attack=attack)
    assert one.summary() == evaluate(model, x, y, BALL, attack=attack).summary()


def test_data_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    _, x, y = problem()

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    cases: list[tuple[tuple[Any, ...], str]] = [
        ((DataLoader(Endless()),), "map-style data set"),
        ((iter([]),), "to_tensors"),
        ((tmp_path / "none.npz",), "no file"),
        ((x.numpy(),), "y is missing"),
        ((x.float() / 255,), "y is missing"),
        ((x.numpy(), y[:3].numpy()), "14 images and y has 3 labels"),
        ((TensorDataset(x.float() / 255, y), y), "y must be left out"),
        ((TensorDataset(x.float(), y),), "[0-9]"),
        ((TensorDataset(x[:0], y[:0]),), "empty"),
        (({"train": 1, "test": 2},), "'train', 'test'; give one of its entries"),
        ((x.float() / 255, nn.functional.one_hot(y, 4)), r"one-hot rows use argmax\(1\)"),
        ((x.float() / 255, y[:, None]), r"a column of classes flatten\(\)"),
        ((np.zeros((14, 6, 6, 3), np.uint8), y.numpy()), r"x\.transpose\(0, 3, 1, 2\)"),
        (
            (DataLoader(Items(x, y), sampler=SubsetRandomSampler([1, 2])),),
            "custom SubsetRandomSampler",
        ),
        ((DataLoader(Items(x, y), batch_sampler=[[1, 2]]),), "custom list"),
    ]
    for given, message in cases:
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match=message):
            run(*given)
    with pytest.raises(TypeError, match="ball is missing"):
        evaluate(problem()[0], TensorDataset(x, y))


BROKEN: dict[str, tuple[Any, str]] = {
    "disk": (
        OSError("read error\nat sector 7"),
        "^item 5 of the data cannot be read: OSError: read error$",
    ),
    "index": (KeyError("image"), "^item 5 of the data cannot be read: KeyError"),
    "nothing": (None, r"^item 5: data must give \(image, label\) pairs, got NoneType"),
    "one-hot": (
        (torch.rand(3, 6, 6), torch.eye(3)[0]),
        r"^item 5: data has a label of shape \(3,\); for one-hot",
    ),
    "NaN": ((torch.full((1, 6, 6), torch.nan), 0), "^item 5: data has pixels from nan to nan"),
    "colour": ((torch.rand(3, 6, 6), 0), "^item 5 has 3 channels, but item 0 has 1; convert"),
    "size": ((torch.rand(1, 6, 7), 0), "^item 5 is 6 x 7, but item 0 is 6 x 6; pass resize"),
    "label": ((torch.rand(1, 6, 6), "cat"), "^item 5: data has a label 'cat'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_item_that_is_broken_is_named(what: str) -> None:
    _, x, y = problem()
    item, message = BROKEN[what]

    class Broken(Items):
        def __getitem__(self, k: int) -> Any:
            if k == 5 and isinstance(item, Exception):
                raise item
            return item if k == 5 else super().__getitem__(k)

    with pytest.raises((TypeError, ValueError, OSError), match=message):
        run(Broken(x, y))


def subset(x: Tensor, y: Tensor) -> DataLoader[Any]:
    """Of a data set with the classes of a folder of images."""
    items = Items(x, y)
    items.classes = NAMES  # type: ignore[attr-defined]
    return DataLoader(Subset(items, range(9)))


@pytest.mark.parametrize("data", [Named, subset])
def test_classes_are_called_what_the_data_set_calls_them(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["ape", "bee", "cat", "dog"]
    monkeypatch.setattr(sys.modules[__name__], "NAMES", names)
    _, x, y = problem()
    assert run(data(x, y)).settings["data"]["classes"] == names


def test_memory_is_bounded_by_the_batch() -> None:
    """Of 600 images the stream holds at no time more than a few batches, and nothing else holds
    them either."""
    model, x, y = problem(600)
    held: set[int] = set()
    most = 0

    class Counted(Items):
        def __getitem__(self, k: int) -> Any:
            nonlocal most
            image, label = super().__getitem__(k)
            held.add(id(image))
            weakref.finalize(image, held.discard, id(image))
            most = max(most, len(held))
            return image, label

    ball = wball.LinfBall(0.01)
    evaluate(model, Counted(x, y), ball=ball, attack=wball.PGD(ball, steps=1), batch_size=10)
    assert most <= 300  # the survey and the gallery read 64 and 200 at once
