"""Where the images of a data set come from; those of data sets that need no files of images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prunex_mpi.base.errors import UserError
from prunex_mpi.data.batches import CHUNK_IMAGES, Shard
from prunex_mpi.data.cifar import read_cifar
from prunex_mpi.data.decoding import Files

DIGITS_TEST_SHARE = 0.2
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_TEST, SYNTHETIC_SIDE = 10, 2048, 512, 32
# What must not depend on --seed (test sets, generated images) is drawn from this one.
FIXED_SEED = 20_150_610


@dataclass(frozen=True)
class Source:
    """Images of a data set that a rank takes its part of: in memory, generated, or in files."""

    counts: tuple[int, int]  # training and test images there are; 0 to test where none are read
    # Takes "train" or "test" and int64 indices [n], or there are files.
    read: Callable[[str, Tensor], Shard] | None
    labels: Callable[[], Tensor]  # returns those of all training images, int64 [n]
    num_classes: int
    image_size: int
    flip: bool
    pad: int
    found: tuple[str, str] = ("", "")
    class_names: tuple[str, ...] = ()
    files: dict[str, Files] | None = None
    digest: str = ""


def source_of_files(splits: Sequence[Files], **others: Any) -> Source:
    """Return the source of files to train on and, where there are such, to test on."""
    train = splits[0]
    return Source(
        counts=(len(train.labels), sum(len(test.labels) for test in splits[1:])),
        read=None,
        labels=lambda: train.labels,
        image_size=train.side,
        pad=train.side // 8,
        files=dict(zip(("train", "test"), splits, strict=False)),
        **others,
    )


def digits(image_size: int) -> Source:
    """Read scikit-learn's 1,797 digits; a fifth of each class is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        message = 'data set digits needs scikit-learn: pip install "prunex_mpi[digits]"'
        raise UserError(message) from error
    digits = load_digits()
    # The values run from 0 to 16.
    pixels = torch.from_numpy(np.rint(digits.images * (255 / 16)).astype(np.uint8))
    images = pixels[:, None].expand(-1, 3, -1, -1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    rng = np.random.default_rng(FIXED_SEED)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(digits.target == label))
        is_test[torch.from_numpy(members[: round(len(members) * DIGITS_TEST_SHARE)])] = True
    train, test = (Shard(images[half], labels[half]) for half in (~is_test, is_test))
    names = tuple(map(str, range(10)))
    return _memory_source(train, test, names, image_size or 8, flip=False)


def cifar(
    name: str,
    data_dir: Path,
    download: bool,
    image_size: int,
    with_test: bool,
) -> Source:
    train, test, names = read_cifar(name, data_dir, download, with_test)
    return _memory_source(train, test, names, image_size or 32, flip=True)


def _memory_source(
    train: Shard,
    test: Shard | None,
    names: tuple[str, ...],
    side: int,
    *,
    flip: bool,
) -> Source:
    """Serve copies of parts of what is in memory, resized if need be."""

    def read(split: str, indices: Tensor) -> Shard:
        whole = train if split == "train" else test
        images = whole.images[indices].contiguous()
        if images.shape[-1] != side:
            small, images = images, images.new_empty(len(images), 3, side, side)
            for before, after in zip(
                small.split(CHUNK_IMAGES), images.split(CHUNK_IMAGES), strict=True
            ):
                after.copy_(_resize(before, side))
        return Shard(images, whole.labels[indices])

    counts = len(train.labels), 0 if test is None else len(test.labels)
    classes, pad = len(names), side // 8
    return Source(counts, read, lambda: train.labels, classes, side, flip, pad, class_names=names)


def _resize(images: Tensor, side: int) -> Tensor:
    """Scale uint8 [n, 3, H, W] to [n, 3, side, side], bilinear and antialiased."""
    scaled = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


def synthetic(train_samples: int | None, test_samples: int | None, image_size: int) -> Source:
    """Generate a smooth pattern per class under noise, each image from its own seed."""
    side = image_size or SYNTHETIC_SIDE
    rng = np.random.default_rng(FIXED_SEED)
    coarse = torch.from_numpy(rng.uniform(64, 192, (SYNTHETIC_CLASSES, 3, 4, 4)))
    smooth = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
    patterns = smooth.to(torch.int16).numpy()

    def read(split: str, indices: Tensor) -> Shard:
        images = torch.empty(len(indices), 3, side, side, dtype=torch.uint8)
        for position, index in enumerate(indices.tolist()):
            # A seed per image: the data do not depend on how many ranks share them.
            noise = np.random.default_rng([FIXED_SEED, int(split == "test"), index])
            levels = noise.integers(-64, 64, (3, side, side), dtype=np.int16)
            levels += patterns[index % SYNTHETIC_CLASSES]
            images[position] = torch.from_numpy(levels.astype(np.uint8))
        return Shard(images, indices % SYNTHETIC_CLASSES)

    counts = (train_samples or SYNTHETIC_TRAIN, test_samples or SYNTHETIC_TEST)

    def labels() -> Tensor:
        return torch.arange(counts[0]) % SYNTHETIC_CLASSES

    return Source(counts, read, labels, SYNTHETIC_CLASSES, side, flip=False, pad=0)
