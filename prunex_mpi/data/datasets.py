"""Load each rank's part of a data set into memory, as uint8 images, or say where they lie."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError, meant
from prunex_mpi.base.logs import log
from prunex_mpi.base.units import GIB
from prunex_mpi.checks.memory import memory_limit
from prunex_mpi.data import own, tars
from prunex_mpi.data.balanced import hold_out
from prunex_mpi.data.batches import CHUNK_IMAGES, Shard
from prunex_mpi.data.cache import cached
from prunex_mpi.data.cifar import read_cifar
from prunex_mpi.data.folders import describe, list_images
from prunex_mpi.data.pictures import as_uint8, open_rgb
from prunex_mpi.data.reading import Access, Files, Reader
from prunex_mpi.data.streamed import Streamed, load_all

DATASETS = ("digits", "cifar10", "cifar100", "imagefolder", "webdataset", "synthetic")
DIGITS_TEST_SHARE = 0.2
SYNTHETIC_CLASSES, SYNTHETIC_TRAIN, SYNTHETIC_TEST, SYNTHETIC_SIDE = 10, 2048, 512, 32
# What must not depend on --seed (test sets, generated images) is drawn from this one.
FIXED_SEED = 20_150_610
IN_MEMORY = Access()
# Of a limit, where images stay in memory unasked: a job needs more than them.
AUTO_SHARE = 0.8


class Part(NamedTuple):
    """Which part of the data a rank takes: number `rank` of `size`.

    `here` ranks share the memory of this machine. `going` is called as loading goes on. So much as
    `val_share` of the training images is held out. Where the training images go to the rank's GPU
    as well, `room` bytes are free on it.
    """

    rank: int
    size: int
    here: int = 1
    going: Callable[[], None] = lambda: None
    val_share: float = 0.0
    room: int | None = None


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
    found: str = ""  # what lay in the folders of the data, in a line
    left_out: str = ""  # what of it is not read
    val: Shard | None = None  # images held out of those to train on
    val_total: int = 0
    class_names: tuple[str, ...] = ()  # in the order of the labels, where they have any
    reader: Reader | None = None  # what decodes the images, where they are files
    digest: str = ""  # of the labels, where the user's code gives them and ranks could differ

    def close(self) -> None:
        """End the threads that decode."""
        if self.reader is not None:
            self.reader.close()


@dataclass(frozen=True)
class _Source:
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


def load(
    name: str,
    *,
    data_dir: str,
    access: Access = IN_MEMORY,
    train_samples: int | None,
    test_samples: int,
    image_size: int,
    seed: int,
    part: Part | tuple[int, int],
) -> Dataset:
    """Load one rank's part of the data set `name`, on the CPU; `part` says which.

    `name` is one of DATASETS, or package.module:factory for what data/own.py says.

    With `access` to stream files, they are decoded by who asks for images.

    Training images: a permutation by `seed` of all of them, cut to `train_samples` (0: all, None:
    none, to test alone) and to a multiple of `size`; each rank takes one contiguous piece, so the
    shards are disjoint and of equal size. Test images: the first `test_samples` of a permutation
    that does not depend on `seed`; rank r takes every `size`-th from r on, which may be none. So it
    is with the images held out: that share of each class, after the cut to `train_samples`, the
    same for any number of ranks. `image_size` 0 keeps the data's own size. No communication: every
    rank calls this with the same arguments but the rank.

    Raises UserError (USAGE) for unknown names and impossible counts, and UserError (UNREADABLE)
    for missing or corrupt files; the latter can happen on a single rank.
    """
    part = Part(*part)
    rank, size = part.rank, part.size
    match name:
        case "digits":
            source = _digits(image_size, part.going)
        case "cifar10" | "cifar100":
            source = _cifar(name, Path(data_dir), access.download, image_size, part.going)
        case "imagefolder":
            source = _imagefolder(Path(data_dir), image_size, part.going)
        case "webdataset":
            source = _webdataset(Path(data_dir), image_size, part.going)
        case "synthetic":
            source = _synthetic(train_samples, test_samples, image_size, part.going)
        case _ if ":" in name:
            source = _own(name, data_dir, image_size, part.going)
        case _:
            raise UserError(f"unknown data set {name!r}{meant(name, DATASETS)}")
    streams = _streams(name, source, access.mode, (train_samples, test_samples), part)
    train_order = _order("train", source.counts[0], train_samples, seed)
    test_order = _order("test", source.counts[1], test_samples, FIXED_SEED)
    held_out = train_order[:0]
    if part.val_share:
        train_order, held_out = hold_out(train_order, source.labels(), part.val_share)
    per_rank = len(train_order) // size
    if per_rank == 0 and train_samples is not None:
        message = f"{size} ranks are more than the {len(train_order)} training images in use"
        raise UserError(f"{message}: start fewer ranks or raise --train-samples")
    shares = [
        ("train", train_order[rank * per_rank : (rank + 1) * per_rank]),
        ("test", test_order[rank::size]),
        ("train", held_out[rank::size]),
    ]
    if source.files and access.cache:
        kept = {split: cached(files, access.cache, split) for split, files in source.files.items()}
        source = replace(source, files=kept)
    reader = Reader(access) if source.files else None
    going = None if streams else part.going
    try:
        train, test, val = (_shard(source, *taken, reader, going) for taken in shares)
    finally:
        if reader is not None and not streams:
            reader.close()
    return Dataset(
        train=train,
        test=test,
        num_classes=source.num_classes,
        image_size=source.image_size,
        train_total=per_rank * size,
        test_total=len(test_order),
        flip=source.flip,
        pad=source.pad,
        found=source.found[0],
        left_out=source.found[1],
        val=val if part.val_share else None,
        val_total=len(held_out),
        class_names=source.class_names,
        reader=reader,
        digest=source.digest,
    )


def _shard(
    source: _Source,
    split: str,
    indices: Tensor,
    reader: Reader | None,
    going: Callable[[], None] | None,
) -> Shard:
    """Return the images `indices` of a split; without `going` files are not decoded yet."""
    if reader is None:
        return source.read(split, indices)
    files = source.files[split]
    images = Streamed(files, indices, reader)
    return Shard(load_all(images, going) if going else images, files.labels[indices])


def _streams(
    name: str, source: _Source, mode: str, samples: tuple[int | None, int], part: Part
) -> bool:
    """Say whether images are decoded while training; raise UserError where that can't be."""
    if source.files is None and mode == "stream":
        message = f"data-mode stream: the images of {name} are in memory anyway"
        raise UserError(f"{message}; leave it at auto, or give --dataset imagefolder")
    if mode == "stream" or (mode == "once" and source.files is not None):
        return True
    chooses = mode == "auto" and source.files is not None
    try:
        _refuse_too_large(source, *samples, part, AUTO_SHARE if chooses else 1.0)
    except UserError as error:
        if not chooses:
            raise
        reason, _, _ = str(error).partition(";")
        log.info("images are decoded while training: %s", reason)
        return True
    return False


def _refuse_too_large(
    source: _Source, train_samples: int | None, test_samples: int, part: Part, share: float
) -> None:
    """Raise UserError when images can't fit into `share` of the memory: here, or on a GPU.

    Here are all images of this machine's ranks, and the order of all.
    """
    image = 3 * source.image_size**2
    trained = 0 if train_samples is None else train_samples or source.counts[0]
    train, images = trained // part.size * image, trained + (test_samples or source.counts[1])
    needed = part.here * (images // part.size * image + 8 * sum(source.counts))
    limit, whose = memory_limit()
    most = "" if share == 1 else f", of which they may take {share:.0%}"
    if needed > share * limit:
        ranks = "one rank" if part.here == 1 else f"{part.here} ranks"
        fewer = "lower --train-samples, --test-samples or --image-size" if trained else "test fewer"
        raise UserError(
            f"the images of {ranks} take {needed / GIB:.3g} GiB and {whose} {limit / GIB:.3g}"
            f"{most}; {fewer}, or take more machines"
        )
    if part.room is not None and train > share * part.room:
        raise UserError(
            f"the training images of one rank take {train / GIB:.3g} GiB and its GPU has "
            f"{part.room / GIB:.3g} free{most}; lower --train-samples or --image-size, or take "
            "more GPUs"
        )


def _order(split: str, count: int, wanted: int | None, seed: int) -> Tensor:
    if wanted is None:
        return torch.zeros(0, dtype=torch.int64)
    if wanted > count:
        raise UserError(f"--{split}-samples {wanted}: there are only {count}; 0 takes all")
    return torch.from_numpy(np.random.default_rng(seed).permutation(count)[: wanted or count])


def _digits(image_size: int, going: Callable[[], None]) -> _Source:
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
) -> _Source:
    halves = [read_cifar(name, data_dir, download, train, going) for train in (True, False)]
    (train, names), (test, _) = halves
    return _memory_source(train, test, names, image_size or 32, going, flip=True)


def _memory_source(
    train: Shard,
    test: Shard,
    names: tuple[str, ...],
    side: int,
    going: Callable[[], None],
    *,
    flip: bool,
) -> _Source:
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
    return _Source(counts, read, lambda: train.labels, classes, side, flip, pad, class_names=names)


def _resize(images: Tensor, side: int) -> Tensor:
    """Scale uint8 [n, 3, H, W] to [n, 3, side, side], bilinear and antialiased."""
    scaled = F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
    return scaled.round_().clamp_(0, 255).to(torch.uint8)


def _imagefolder(data_dir: Path, image_size: int, going: Callable[[], None]) -> _Source:
    """List train/<class>/* and test/<class>/*; files are decoded only by the rank they go to."""
    listings = [list_images(folder, going) for folder in _halves(data_dir)]
    train, test = (listing.images for listing in listings)
    classes = listings[0].classes()
    odd = sorted(set(classes) ^ set(listings[1].classes()))
    if odd:
        message = f"class {odd[0]!r} of {data_dir} must have images for training and for testing"
        raise UserError(message, UNREADABLE)
    side = image_size or min(open_rgb(train[0]).size)
    halves = {"train": train, "test": test}
    files = {split: _files(paths, classes, image_size, side) for split, paths in halves.items()}
    counts, found = (len(train), len(test)), describe(*listings)
    named = {"found": found, "class_names": tuple(classes), "files": files}
    return _Source(
        counts, None, lambda: files["train"].labels, len(classes), side, True, side // 8, **named
    )


def _webdataset(data_dir: Path, image_size: int, going: Callable[[], None]) -> _Source:
    """List the pictures in train/*.tar and test/*.tar."""
    halves = [tars.list_members(folder, going) for folder in _halves(data_dir)]
    side, classes = image_size or tars.side_of_first(halves[0]), tars.class_count(*halves)
    train, test = (tars.files_of(half, image_size, side) for half in halves)
    counts, files = (len(train.labels), len(test.labels)), {"train": train, "test": test}
    named = {"found": (tars.describe(*halves), ""), "files": files}
    pad = side // 8
    return _Source(counts, None, lambda: train.labels, classes, side, True, pad, **named)


def _own(name: str, data_dir: str, image_size: int, going: Callable[[], None]) -> _Source:
    """Have a function of the user's make both halves."""
    halves = own.make_halves(name, data_dir, going)
    classes, class_names = own.classes_of(*halves)
    side = image_size or own.side_of_first(halves[0])
    train, test = (own.files_of(half, image_size, side) for half in halves)
    counts, flip = (len(train.labels), len(test.labels)), own.may_be_mirrored(halves[0])
    named = {
        "found": (own.describe(name, *halves, classes), ""),
        "class_names": class_names,
        "files": {"train": train, "test": test},
        "digest": own.digest_of(*halves),
    }
    return _Source(counts, None, lambda: train.labels, classes, side, flip, side // 8, **named)


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
    way = "fit" if image_size else "as it is"
    return Files(labels, side, decode, paths.__getitem__, paths.__getitem__, way)


def _synthetic(
    train_samples: int | None, test_samples: int, image_size: int, going: Callable[[], None]
) -> _Source:
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

    return _Source(counts, read, labels, SYNTHETIC_CLASSES, side, flip=False, pad=0)
