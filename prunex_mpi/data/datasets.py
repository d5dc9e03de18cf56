"""Load each rank's part of a data set into memory, as uint8 images, or say where they lie."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError, log
from prunex_mpi.base.units import GIB
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.decoding import Files, Reader, Streamed, decode_all
from prunex_mpi.data.image_files import find_image_files
from prunex_mpi.data.request import Part, Request
from prunex_mpi.data.sources import FIXED_SEED, Source, cifar, digits, synthetic
from prunex_mpi.data.user_datasets import find_user_images

# Numbers of classes without an image; each takes memory in the last layer of a network.
MOST_UNUSED = 2**16
# Bytes of images that all ranks of a machine keep in memory unasked.
MOST_IN_MEMORY = 4 * GIB


@dataclass(frozen=True)
class Dataset:
    """Hold this rank's part of a data set and what it knows about the whole."""

    train: Shard
    test: Shard | None  # None where none are to be read
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
    reader: Reader | None = None  # what decodes the images
    digest: str = ""  # of names or labels, where ranks and later jobs could find others

    def sizes(self) -> dict[str, int]:
        """Return what a network has to fit, by the names of a factory's parameters."""
        return {"num_classes": self.num_classes, "image_size": self.image_size}

    def describe(self) -> str:
        """Return what there is, in a part of a line."""
        held_out = f"{self.val_total:,} held out, " if self.val_total else ""
        return (
            f"{self.train_total:,} images to train on, {held_out}{self.test_total:,} to test on, "
            f"{self.num_classes:,} classes"
        )

    def close(self) -> None:
        """End the threads that decode."""
        if self.reader is not None:
            self.reader.close()


def load(request: Request, part: Part) -> Dataset:
    """Load one rank's part of a data set of images, on the CPU; `part` says which.

    data/user_datasets.py says what package.module:factory is. Streamed files are decoded by who
    asks for images. Training images: a permutation by the seed of all of them, cut to as many as
    are asked for and to a multiple of `size`; each rank takes one contiguous piece. Test images:
    the first of a permutation that does not depend on the seed; rank r takes every `size`-th from r
    on, which may be none. With images held out the cut does not depend on the seed either, so that
    these are the same for all runs. Does not communicate. Raises UserError (USAGE) for impossible
    counts, and UserError (UNREADABLE), on a single rank perhaps, for missing or corrupt files.
    """
    rank, size = part.rank, part.size
    source = _find_source(request, part)
    train, test = source.train, source.test
    if part.classes is None and source.num_classes > MOST_UNUSED + len(train.labels):
        raise UserError(
            f"the images of {request.dataset} have classes up to {source.num_classes - 1:,}, and "
            f"there are {len(train.labels):,} to train on: number the classes from 0 on",
            UNREADABLE,
        )
    streams = _streams(source, request, part)
    chosen_by = FIXED_SEED if request.val_split else request.seed
    train_order = _order("train", len(train.labels), request.train_samples, chosen_by)
    tests = len(test.labels) if test else 0
    test_order = _order("test", tests, request.test_samples, FIXED_SEED)
    held_out = train_order[:0]
    if request.val_split:
        train_order, held_out = hold_out(train_order, train.labels, request.val_split)
        shuffled = np.random.default_rng(request.seed).permutation(len(train_order))
        train_order = train_order[torch.from_numpy(shuffled)]
    per_rank, rest = divmod(len(train_order), size)
    if per_rank == 0 and request.train_samples is not None:
        message = f"{size} ranks are more than the {len(train_order)} training images in use"
        raise UserError(f"{message}: start fewer ranks or raise --train-samples")
    left_out = source.left_out
    if rest:
        of_all = f"{rest} of {len(train_order):,} training images, as {size} ranks get equally many"
        left_out = "; ".join(filter(None, [left_out, of_all]))
    reader = Reader(part.threads)

    def shard(files: Files, indices: Tensor) -> Shard:
        images = Streamed(files, indices, reader)
        return Shard(images if streams else decode_all(images), files.labels[indices])

    try:
        return Dataset(
            train=shard(train, train_order[rank * per_rank : (rank + 1) * per_rank]),
            test=None if request.test_samples is None else shard(test, test_order[rank::size]),
            num_classes=source.num_classes,
            image_size=train.side,
            train_total=per_rank * size,
            test_total=len(test_order),
            flip=source.flip,
            pad=source.pad,
            found=source.found,
            left_out=left_out,
            val=shard(train, held_out[rank::size]) if request.val_split else None,
            val_total=len(held_out),
            class_names=source.class_names,
            reader=reader,
            digest=source.digest,
        )
    finally:
        if not streams:
            reader.close()


def _find_source(request: Request, part: Part) -> Source:
    """Return where the images of a data set come from. Raises UserError as `load` does."""
    match request.dataset:
        case "digits":
            return digits(request)
        case "cifar10" | "cifar100":
            return cifar(request)
        case "imagefolder" | "webdataset":
            return find_image_files(request, part.known, part.classes)
        case "synthetic":
            return synthetic(request)
        case _:
            return find_user_images(request)


def _streams(source: Source, request: Request, part: Part) -> bool:
    """Return whether images are decoded while training."""
    if request.data_mode != "auto":
        return request.data_mode != "memory"
    train, test = len(source.train.labels), len(source.test.labels) if source.test else 0
    trained = 0 if request.train_samples is None else request.train_samples or train
    tested = 0 if request.test_samples is None else request.test_samples or test
    taken = part.here * ((trained + tested) // part.size) * 3 * source.train.side**2
    if taken <= MOST_IN_MEMORY:
        return False
    log.info(
        "images are decoded while training: those of this machine's ranks take %.3g GiB",
        taken / GIB,
    )
    return True


def _order(split: str, count: int, wanted: int | None, seed: int) -> Tensor:
    if wanted is None:
        return torch.zeros(0, dtype=torch.int64)
    if wanted > count:
        raise UserError(f"--{split}-samples {wanted}: there are only {count}; 0 takes all")
    return torch.from_numpy(np.random.default_rng(seed).permutation(count)[: wanted or count])


def hold_out(order: Tensor, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return which images of `order` are kept and which are held out: `share` of each class.

    `order` is int64 [n], indices into `labels`; the first of a class are held out, and at least one
    stays. What rounding leaves over of a class counts for the next one. Both parts are in the order
    they were in. Raises UserError where nothing would be held out.
    """
    of_class = labels[order]
    held = torch.zeros(len(order), dtype=torch.bool)
    by_class = torch.argsort(of_class, stable=True)
    due, first = 0.0, 0
    for size in torch.bincount(of_class).tolist():
        if size == 0:
            continue
        due += size * share
        count = min(round(due), size - 1)
        held[by_class[first : first + count]] = True
        first += size
        # What a small class may not give is not taken from a large one.
        due = max(-0.5, min(0.5, due - count))
    if not held.any():
        raise UserError(
            f"val-split {share}: no class has enough of the {len(order)} training images; raise it"
        )
    return order[~held], order[held]
