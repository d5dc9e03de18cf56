"""Load each rank's part of a data set into memory, as uint8 images."""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.folder import IMG_EXTENSIONS

from prunex_mpi.base.errors import UNREADABLE, UserError, nearest, one_line
from prunex_mpi.base.units import GIB
from prunex_mpi.data.batches import CHUNK_IMAGES, Shard
from prunex_mpi.data.pictures import as_uint8, open_rgb

DATASETS = ("digits", "cifar10", "cifar100", "imagefolder", "synthetic")
DIGITS_TEST_SHARE = 0.2
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_TEST, SYNTHETIC_SIDE = 10, 2048, 512, 32
# What must not depend on --seed (test sets, generated images) is drawn from this one.
FIXED_SEED = 20_150_610


@dataclass(frozen=True)
class Dataset:
    """Hold this rank's part of a data set and what it knows about the whole."""

    train: Shard
    test: Shard
    num_classes: int
    image_size: int
    train_total: int  # training images in use, over all ranks
    test_total: int
    flip: bool  # whether mirrored images keep their meaning
    pad: int  # pixels a random crop may move an image by


@dataclass(frozen=True)
class _Source:
    counts: tuple[int, int]  # training and test images there are
    read: Callable[[str, Tensor], Shard]  # takes "train" or "test" and int64 indices [n]
    num_classes: int
    image_size: int
    flip: bool
    pad: int


def load(
    name: str,
    *,
    data_dir: str,
    download: bool,
    train_samples: int,
    test_samples: int,
    image_size: int,
    seed: int,
    part: tuple[int, int],
) -> Dataset:
    """Load one rank's part of the data set `name`, on the CPU; `part` is its (rank, size).

    Training images: a permutation by `seed` of all of them, cut to `train_samples` (0: all) and to
    a multiple of `size`; each rank takes one contiguous piece, so the shards are disjoint and of
    equal size. Test images: the first `test_samples` of a permutation that does not depend on
    `seed`; rank r takes every `size`-th from r on, which may be none. `image_size` 0 keeps the
    data's own size. No communication: every rank calls this with the same arguments but the rank.

    Raises UserError (USAGE) for unknown names and impossible counts, and UserError (UNREADABLE)
    for missing or corrupt files; the latter can happen on a single rank.
    """
    rank, size = part
    match name:
        case "digits":
            source = _digits(image_size)
        case "cifar10" | "cifar100":
            source = _cifar(name, Path(data_dir), download, image_size)
        case "imagefolder":
            source = _imagefolder(Path(data_dir), image_size)
        case "synthetic":
            source = _synthetic(train_samples, test_samples, image_size)
        case _:
            raise UserError(f"unknown data set {name!r}: did you mean {nearest(name, DATASETS)}?")
    _refuse_too_large(source, train_samples, test_samples, size)
    train_order = _order("train", source.counts[0], train_samples, seed)
    test_order = _order("test", source.counts[1], test_samples, FIXED_SEED)
    per_rank = len(train_order) // size
    if per_rank == 0:
        message = f"{size} ranks are more than the {len(train_order)} training images in use"
        raise UserError(f"{message}: start fewer ranks or raise --train-samples")
    return Dataset(
        train=source.read("train", train_order[rank * per_rank : (rank + 1) * per_rank]),
        test=source.read("test", test_order[rank::size]),
        num_classes=source.num_classes,
        image_size=source.image_size,
        train_total=per_rank * size,
        test_total=len(test_order),
        flip=source.flip,
        pad=source.pad,
    )


def _refuse_too_large(source: _Source, train_samples: int, test_samples: int, size: int) -> None:
    """Raise UserError when one rank's images, or the order of all, can't fit in memory."""
    images = (train_samples or source.counts[0]) + (test_samples or source.counts[1])
    needed = images // size * 3 * source.image_size**2 + 8 * sum(source.counts)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UserError(
            f"the images of one rank take {needed / GIB:.3g} GiB and this machine has "
            f"{memory / GIB:.3g}; lower --train-samples, --test-samples or --image-size"
        )


def _order(split: str, count: int, wanted: int, seed: int) -> Tensor:
    if wanted > count:
        raise UserError(f"--{split}-samples {wanted}: there are only {count}; 0 takes all")
    return torch.from_numpy(np.random.default_rng(seed).permutation(count)[: wanted or count])


def _digits(image_size: int) -> _Source:
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
    return _memory_source(train, test, 10, image_size or 8, flip=False)


def _cifar(name: str, data_dir: Path, download: bool, image_size: int) -> _Source:
    train, test = (_read_cifar(name, data_dir, download, train) for train in (True, False))
    classes = int(name.removeprefix("cifar"))
    return _memory_source(train, test, classes, image_size or 32, flip=True)


def _read_cifar(name: str, data_dir: Path, download: bool, train: bool) -> Shard:
    """Read one half of CIFAR; where it is incomplete, one process downloads and others wait."""
    cifar = CIFAR10 if name == "cifar10" else CIFAR100
    try:
        half = cifar(data_dir, train=train, download=False)
    except (RuntimeError, OSError) as missing:
        if not download:
            message = f"no complete {name} in {data_dir}: add --download or correct --data-dir"
            raise UserError(message, UNREADABLE) from missing
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            # Whoever comes second finds the files complete: torchvision checks before it downloads.
            with FileLock(data_dir / f".{name}.lock"):
                half = cifar(data_dir, train=train, download=True)
        except (RuntimeError, OSError, HTTPException) as error:
            message = f"cannot download {name} to {data_dir} ({one_line(error)}): "
            advice = "check the network, or copy the files there from another machine"
            raise UserError(message + advice, UNREADABLE) from error
    images = torch.from_numpy(half.data).permute(0, 3, 1, 2)
    return Shard(images, torch.tensor(half.targets, dtype=torch.int64))


def _memory_source(train: Shard, test: Shard, classes: int, side: int, *, flip: bool) -> _Source:
    """Serve copies of parts of what is in memory, resized if need be."""

    def read(split: str, indices: Tensor) -> Shard:
        whole = train if split == "train" else test
        images = whole.images[indices].contiguous()
        if images.shape[-1] != side:
            images = torch.cat([_resize(chunk, side) for chunk in images.split(CHUNK_IMAGES)])
        return Shard(images, whole.labels[indices])

    return _Source((len(train.labels), len(test.labels)), read, classes, side, flip, side // 8)


def _resize(images: Tensor, side: int) -> Tensor:
    """Scale uint8 [n, 3, H, W] to [n, 3, side, side], bilinear and antialiased."""
    scaled = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


def _imagefolder(data_dir: Path, image_size: int) -> _Source:
    """List train/<class>/* and test/<class>/*; files are decoded only by the rank they go to."""
    # os.path says no where Path.is_dir raises, as for names that are too long.
    val_only = os.path.isdir(data_dir / "val") and not os.path.isdir(data_dir / "test")
    folders = ("train", "val" if val_only else "test")
    train, test = (_list_images(data_dir / folder) for folder in folders)
    classes = sorted({Path(file).parent.name for file in train})
    odd = sorted(set(classes) ^ {Path(file).parent.name for file in test})
    if odd:
        message = f"class {odd[0]!r} of {data_dir} must have images for training and for testing"
        raise UserError(message, UNREADABLE)
    side = image_size or min(open_rgb(train[0]).size)

    def read(split: str, indices: Tensor) -> Shard:
        files = [(train if split == "train" else test)[index] for index in indices.tolist()]
        images = torch.empty(len(files), 3, side, side, dtype=torch.uint8)
        for position, file in enumerate(files):
            images[position] = as_uint8(file, side, fit=image_size > 0)
        labels = [classes.index(Path(file).parent.name) for file in files]
        return Shard(images, torch.tensor(labels, dtype=torch.int64))

    return _Source((len(train), len(test)), read, len(classes), side, flip=True, pad=side // 8)


def _list_images(folder: Path) -> list[str]:
    """Return the visible image files of all class folders, in the same order on every rank."""
    paths = sorted(glob.glob(f"{glob.escape(str(folder))}/*/*"))
    images = [path for path in paths if path.lower().endswith(IMG_EXTENSIONS)]
    if not images:
        message = f"no image in {folder}: --data-dir must hold train/<class>/* and test/<class>/*"
        raise UserError(f"{message} with names in {' '.join(IMG_EXTENSIONS)}", UNREADABLE)
    return images


def _synthetic(train_samples: int, test_samples: int, image_size: int) -> _Source:
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
    return _Source(counts, read, SYNTHETIC_CLASSES, side, flip=False, pad=0)
