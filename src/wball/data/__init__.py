"""Images: MNIST, Fashion-MNIST, CIFAR-10, folders of images, and anything torch can index or
iterate.

Every loader returns ``x``, ``(N, C, H, W)`` in [0, 1], and ``y``, ``(N,)`` class numbers. The named
sets are small enough to be kept on a GPU whole, which is faster than any loader process;
augmentation then happens there, too. Folders are data sets that are read item by item
(:class:`ImageFolder`).
"""

from wball.data.augment import RandomAffine, RandomCropFlip, RandomCutout
from wball.data.folder import (
    ImageFolder,
    is_map,
    labels_of,
    load_folder,
    read_items,
    source_name,
)
from wball.data.named import (
    CIFAR10_RECORDS,
    DatasetInfo,
    Split,
    dataset_info,
    datasets,
    load_dataset,
    load_sample,
    read_cifar10,
    read_idx,
)
from wball.data.npz import NpzFile, channels_last
from wball.data.tensors import PathLike, class_names, to_tensors

__all__ = [
    "CIFAR10_RECORDS",
    "DatasetInfo",
    "ImageFolder",
    "NpzFile",
    "PathLike",
    "RandomAffine",
    "RandomCropFlip",
    "RandomCutout",
    "Split",
    "channels_last",
    "is_map",
    "class_names",
    "dataset_info",
    "datasets",
    "labels_of",
    "load_dataset",
    "load_folder",
    "load_sample",
    "read_cifar10",
    "read_idx",
    "read_items",
    "source_name",
    "to_tensors",
]
