"""Where the images of data sets come from: who they are, and how they are read."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError, meant
from prunex_mpi.data import folders, image_files, user_datasets
from prunex_mpi.data.batches import CHUNK_IMAGES, Shard
from prunex_mpi.data.cifar import read_cifar
from prunex_mpi.data.decoding import Access, Files, side_of_first
from prunex_mpi.data.images import as_uint8, open_rgb

DATASETS = ("digits", "cifar10", "cifar100", "imagefolder", "webdataset", "synthetic")
# What ranks may read for each other: of each class folder, or of each tar file.
CONTENTS = {"imagefolder": folders.Names, "webdataset": image_files.Headers}
Known = Mapping[str, folders.Names | image_files.Headers]  # by path
DIGITS_TEST_SHARE = 0.2
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_TEST, SYNTHETIC_SIDE = 10, 2048, 512, 32
# What must not depend on --seed (test sets, generated images) is drawn from this one.
FIXED_SEED = 20_150_610


@dataclass(frozen=True)
class Source:
    """Images of a data set that a rank takes its part of: in memory, generated, or in files."""

    counts: tuple[int, int]  # training and test images there are
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


def find_source(
    name: str,
    data_dir: str,
    access: Access,
    samples: tuple[int | None, int],
    image_size: int,
    known: Known,
    going: Callable[[], None],
) -> Source:
    """Return where the images of the data set `name` come from.

    `known` is what other ranks have read. `samples` are the training and test images asked for, as
    many as there are of generated ones. `going` is called as it goes on. Raises UserError as
    `datasets.load` does.
    """
    match name:
        case "digits":
            return _digits(image_size, going)
        case "cifar10" | "cifar100":
            return _cifar(name, Path(data_dir), access.download, image_size, going)
        case "imagefolder":
            return _imagefolder(Path(data_dir), image_size, access.skip_corrupt, known, going)
        case "webdataset":
            return _webdataset(Path(data_dir), image_size, access.skip_corrupt, known, going)
        case "synthetic":
            return _synthetic(*samples, image_size, going)
        case _ if ":" in name:
            return _own(name, data_dir, image_size, access.skip_corrupt, going)
        case _:
            raise UserError(f"unknown data set {name!r}{meant(name, DATASETS)}")


def _digits(image_size: int, going: Callable[[], None]) -> Source:
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
    return _memory_source(train, test, names, image_size or 8, going, flip=False)


def _cifar(
    name: str, data_dir: Path, download: bool, image_size: int, going: Callable[[], None]
) -> Source:
    train, test, names = read_cifar(name, data_dir, download, going)
    return _memory_source(train, test, names, image_size or 32, going, flip=True)


def _memory_source(
    train: Shard,
    test: Shard,
    names: tuple[str, ...],
    side: int,
    going: Callable[[], None],
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
                going()
                after.copy_(_resize(before, side))
        return Shard(images, whole.labels[indices])

    counts = len(train.labels), len(test.labels)
    classes, pad = len(names), side // 8
    return Source(counts, read, lambda: train.labels, classes, side, flip, pad, class_names=names)


def _resize(images: Tensor, side: int) -> Tensor:
    """Scale uint8 [n, 3, H, W] to [n, 3, side, side], bilinear and antialiased."""
    scaled = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


def _imagefolder(
    data_dir: Path,
    image_size: int,
    skip_corrupt: bool,
    known: Mapping[str, folders.Names],
    going: Callable[[], None],
) -> Source:
    """List train/<class>/* and test/<class>/*; files are decoded only by the rank they go to."""
    listings = [folders.list_images(folder, known, going) for folder in _halves(data_dir)]
    train, test = (listing.images for listing in listings)
    classes = listings[0].classes()
    odd = sorted(set(classes) ^ set(listings[1].classes()))
    if odd:
        message = f"class {odd[0]!r} of {data_dir} must have images for training and for testing"
        raise UserError(message, UNREADABLE)
    side = image_size or side_of_first(
        len(train), lambda index: min(open_rgb(train[index]).size), skip_corrupt
    )
    halves = {"train": train, "test": test}
    files = {split: _files(paths, classes, image_size, side) for split, paths in halves.items()}
    counts, found = (len(train), len(test)), folders.describe(*listings)
    # Below the folder alone, which may be elsewhere on another host, or later.
    root = len(str(data_dir))
    digest = digest_of_names(*([path[root:] for path in half] for half in (train, test)))
    named = {"found": found, "class_names": tuple(classes), "files": files, "digest": digest}
    return Source(
        counts, None, lambda: files["train"].labels, len(classes), side, True, side // 8, **named
    )


def read_share(name: str, data_dir: str, rank: int, size: int, going: Callable[[], None]) -> Known:
    """Return the contents of every `size`-th class folder or tar file, from number `rank` on.

    `name` is one of CONTENTS. `going` is called as it goes on. Raises UserError (UNREADABLE).
    """
    if name == "imagefolder":
        listed, read = folders.class_folders, folders.read_names
    else:
        listed, read = image_files.tar_files, image_files.read_headers
    paths = [path for half in _halves(Path(data_dir)) for path in listed(half)]
    return {path: read(path, going) for path in paths[rank::size]}


def _webdataset(
    data_dir: Path,
    image_size: int,
    skip_corrupt: bool,
    known: Mapping[str, image_files.Headers],
    going: Callable[[], None],
) -> Source:
    """List the pictures in train/*.tar and test/*.tar."""
    halves = [image_files.list_members(folder, known, going) for folder in _halves(data_dir)]
    first, classes = halves[0], image_files.class_count(*halves)
    side = image_size or side_of_first(
        len(first.names), partial(image_files.side_of, first), skip_corrupt
    )
    train, test = (image_files.files_of(half, image_size, side) for half in halves)
    counts, files = (len(train.labels), len(test.labels)), {"train": train, "test": test}
    digest = digest_of_names(*(half.identities() for half in halves))
    named = {"found": image_files.describe(*halves), "files": files, "digest": digest}
    pad = side // 8
    return Source(counts, None, lambda: train.labels, classes, side, True, pad, **named)


def _own(
    name: str, data_dir: str, image_size: int, skip_corrupt: bool, going: Callable[[], None]
) -> Source:
    """Have a function of the user's make both halves."""
    halves = user_datasets.make_halves(name, data_dir, going)
    classes, class_names = user_datasets.classes_of(*halves)
    first = halves[0]
    side = image_size or side_of_first(
        len(first.labels), partial(user_datasets.side_of, first), skip_corrupt
    )
    train, test = (user_datasets.files_of(half, image_size, side) for half in halves)
    counts, flip = (len(train.labels), len(test.labels)), user_datasets.may_be_mirrored(halves[0])
    named = {
        "found": (user_datasets.describe(name, *halves, classes), ""),
        "class_names": class_names,
        "files": {"train": train, "test": test},
        "digest": user_datasets.digest_of(*halves, class_names),
    }
    return Source(counts, None, lambda: train.labels, classes, side, flip, side // 8, **named)


def digest_of_names(train: Iterable[str], test: Iterable[str]) -> str:
    """Return what tells data sets of other images, or in another order, apart."""
    digest = hashlib.blake2b(digest_size=8)
    for half in (train, test):
        digest.update(os.fsencode("\0".join(half)) + b"\n")
    return digest.hexdigest()


def _halves(data_dir: Path) -> tuple[Path, Path]:
    """Return the folders of training and test images; the latter may be called val."""
    # os.path says no where Path.is_dir raises, as for names that are too long.
    val_only = os.path.isdir(data_dir / "val") and not os.path.isdir(data_dir / "test")
    return data_dir / "train", data_dir / ("val" if val_only else "test")


def _files(paths: Sequence[str], classes: Sequence[str], image_size: int, side: int) -> Files:
    """Return the images of class folders, cropped and scaled where `image_size` asks for it."""
    numbers = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers[path.rsplit(os.sep, 2)[1]] for path in paths])
    decode = lambda index: as_uint8(paths[index], side, fit=image_size > 0)  # noqa: E731
    return Files(labels, side, decode, paths.__getitem__)


def _synthetic(
    train_samples: int | None, test_samples: int, image_size: int, going: Callable[[], None]
) -> Source:
    """Generate a smooth pattern per class under noise, each image from its own seed."""
    side = image_size or SYNTHETIC_SIDE
    rng = np.random.default_rng(FIXED_SEED)
    coarse = torch.from_numpy(rng.uniform(64, 192, (SYNTHETIC_CLASSES, 3, 4, 4)))
    smooth = F.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=False)
    patterns = smooth.to(torch.int16).numpy()

    def read(split: str, indices: Tensor) -> Shard:
        images = torch.empty(len(indices), 3, side, side, dtype=torch.uint8)
        for position, index in enumerate(indices.tolist()):
            going()
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
