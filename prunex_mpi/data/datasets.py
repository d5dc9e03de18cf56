"""Load each rank's part of a data set into memory, as uint8 images, or say where they lie."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.limits import memory_limit
from prunex_mpi.base.logs import log
from prunex_mpi.base.units import GIB
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.decoding import Access, Files, Reader, Streamed, decode_all
from prunex_mpi.data.image_files import Classes, Known, find_image_files
from prunex_mpi.data.sources import FIXED_SEED, Source, cifar, digits, synthetic
from prunex_mpi.data.user_datasets import find_user_images

# Numbers of classes without an image; each takes memory in the last layer of a network.
MOST_UNUSED = 2**16
NOTHING_KNOWN: Known = MappingProxyType({})
# Of a machine's memory and a GPU's, where images stay there unasked: a job needs more than them.
AUTO_SHARES, WHOLE = (0.8, 0.4), (1.0, 1.0)


class Part(NamedTuple):
    """Which part of the data a rank takes: number `rank` of `size`.

    `here` ranks share the memory of this machine, and `room` bytes are free on the rank's GPU where
    training images go there. `known` is what other ranks have read of class folders or tar files.
    With the `classes` of a network, which is only tested, files to train on are not looked for.
    """

    rank: int
    size: int
    here: int = 1
    val_split: float = 0.0
    room: int | None = None
    known: Known = NOTHING_KNOWN
    classes: Classes | None = None


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


def load(
    name: str,
    *,
    data_dir: str,
    access: Access,
    train_samples: int | None,
    test_samples: int | None,
    image_size: int,
    seed: int,
    part: Part | tuple[int, int],
) -> Dataset:
    """Load one rank's part of the data set `name`, on the CPU; `part` says which.

    `name` is what `--dataset` takes, but for text; data/user_datasets.py says what
    package.module:factory is. With `access` to stream files, they are decoded by who asks for
    images. Training images: a permutation by `seed` of all of them, cut to `train_samples` (0: all,
    None: none) and to a multiple of `size`; each rank takes one contiguous piece. Test images: the
    first `test_samples` (None: none, and nothing of them is read) of a permutation that does not
    depend on `seed`; rank r takes every `size`-th from r on, which may be none. With images held
    out the cut does not depend on `seed` either, so that these are the same for all runs.
    `image_size` 0 keeps the data's own. Does not communicate. Raises UserError (USAGE) for
    impossible counts, and UserError (UNREADABLE), on a single rank perhaps, for missing or corrupt
    files.
    """
    part = Part(*part)
    rank, size = part.rank, part.size
    samples = train_samples, test_samples
    source = _find_source(name, data_dir, access, samples, image_size, part)
    train, test = source.train, source.test
    if part.classes is None and source.num_classes > MOST_UNUSED + len(train.labels):
        raise UserError(
            f"the images of {name} have classes up to {source.num_classes - 1:,}, and there are "
            f"{len(train.labels):,} to train on: number the classes from 0 on",
            UNREADABLE,
        )
    streams = _streams(source, access.mode, samples, part)
    chosen_by = FIXED_SEED if part.val_split else seed
    train_order = _order("train", len(train.labels), train_samples, chosen_by)
    test_order = _order("test", len(test.labels) if test else 0, test_samples, FIXED_SEED)
    held_out = train_order[:0]
    if part.val_split:
        train_order, held_out = hold_out(train_order, train.labels, part.val_split)
        shuffled = np.random.default_rng(seed).permutation(len(train_order))
        train_order = train_order[torch.from_numpy(shuffled)]
        apart = torch.zeros(len(train.labels), dtype=torch.bool)
        apart[held_out] = True
        train = replace(train, held_out=apart)
    per_rank, rest = divmod(len(train_order), size)
    if per_rank == 0 and train_samples is not None:
        message = f"{size} ranks are more than the {len(train_order)} training images in use"
        raise UserError(f"{message}: start fewer ranks or raise --train-samples")
    left_out = source.left_out
    if rest:
        of_all = f"{rest} of {len(train_order):,} training images, as {size} ranks get equally many"
        left_out = "; ".join(filter(None, [left_out, of_all]))
    reader = Reader(access)

    def shard(files: Files, indices: Tensor) -> Shard:
        images = Streamed(files, indices, reader)
        return Shard(images if streams else decode_all(images), files.labels[indices])

    try:
        return Dataset(
            train=shard(train, train_order[rank * per_rank : (rank + 1) * per_rank]),
            test=None if test_samples is None else shard(test, test_order[rank::size]),
            num_classes=source.num_classes,
            image_size=train.side,
            train_total=per_rank * size,
            test_total=len(test_order),
            flip=source.flip,
            pad=source.pad,
            found=source.found,
            left_out=left_out,
            val=shard(train, held_out[rank::size]) if part.val_split else None,
            val_total=len(held_out),
            class_names=source.class_names,
            reader=reader,
            digest=source.digest,
        )
    finally:
        if not streams:
            reader.close()


def _find_source(
    name: str,
    data_dir: str,
    access: Access,
    samples: tuple[int | None, int | None],
    image_size: int,
    part: Part,
) -> Source:
    """Return where the images of the data set `name` come from. Raises UserError as `load` does.

    `samples` are the training and test images asked for, as many as there are of generated ones.
    """
    with_test = samples[1] is not None
    match name:
        case "digits":
            return digits(image_size)
        case "cifar10" | "cifar100":
            return cifar(name, Path(data_dir), access.download, image_size, with_test)
        case "imagefolder" | "webdataset":
            ways = image_size, access.skip_corrupt, with_test
            return find_image_files(name, Path(data_dir), *ways, part.known, part.classes)
        case "synthetic":
            return synthetic(*samples, image_size)
        case _:
            return find_user_images(name, data_dir, image_size, access.skip_corrupt, with_test)


def _streams(source: Source, mode: str, samples: tuple[int | None, int | None], part: Part) -> bool:
    """Return whether images are decoded while training; raise UserError where memory is short."""
    if mode in ("stream", "once"):
        return True
    try:
        _refuse_too_large(source, *samples, part, AUTO_SHARES if mode == "auto" else WHOLE)
    except UserError as error:
        if mode != "auto":
            raise
        reason, _, _ = str(error).partition(";")
        log.info("images are decoded while training: %s", reason)
        return True
    return False


def _refuse_too_large(
    source: Source,
    train_samples: int | None,
    test_samples: int | None,
    part: Part,
    shares: tuple[float, float],
) -> None:
    """Raise UserError when images can't fit into `shares` of the memory: here, and on a GPU."""
    image = 3 * source.train.side**2
    train, test = len(source.train.labels), len(source.test.labels) if source.test else 0
    trained = 0 if train_samples is None else train_samples or train
    tested = 0 if test_samples is None else test_samples or test
    needed = part.here * ((trained + tested) // part.size * image + 8 * (train + test))
    on_gpu = trained // part.size * image
    limit, whose = memory_limit()
    here, there = (
        "" if share == 1 else f", of which they may take {share:.0%}" for share in shares
    )
    if needed > shares[0] * limit:
        ranks = "one rank" if part.here == 1 else f"{part.here} ranks"
        fewer = "lower --train-samples, --test-samples or --image-size" if trained else "test fewer"
        raise UserError(
            f"the images of {ranks} take {needed / GIB:.3g} GiB and {whose} {limit / GIB:.3g}"
            f"{here}; {fewer}, or take more machines"
        )
    if part.room is not None and on_gpu > shares[1] * part.room:
        raise UserError(
            f"the training images of one rank take {on_gpu / GIB:.3g} GiB and its GPU has "
            f"{part.room / GIB:.3g} free{there}; lower --train-samples or --image-size, or take "
            "more GPUs"
        )


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
