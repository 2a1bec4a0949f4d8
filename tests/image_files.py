"""Small files in the formats of MNIST and CIFAR-10."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def digits(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n, np.uint8)


def write_mnist(
    folder: Path, prefix: str, n: int = 7, ending: str = "", dot: str = "-"
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = digits(n)
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if ending else bytes
    (folder / f"{prefix}-images{dot}idx3-ubyte{ending}").write_bytes(pack(idx(images)))
    (folder / f"{prefix}-labels{dot}idx1-ubyte{ending}").write_bytes(pack(idx(labels)))
    return images, labels


def write_cifar10(folder: Path, n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        pixels, labels = (
            rng.integers(0, 256, (n, 3, 32, 32), np.uint8),
            rng.integers(0, 10, n, np.uint8),
        )
        (folder / name).write_bytes(
            np.concatenate([labels[:, None], pixels.reshape(n, -1)], 1).tobytes()
        )
        out[name] = pixels, labels
    return out
