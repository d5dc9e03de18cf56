"""Decode image files by a pool of threads: all of a shard at the start, or batches ahead of use.

Threads, not processes: Pillow gives up the interpreter's lock while it reads and decodes, nothing
has to be copied between them, and nothing has to be started before MPI.

Which images make up a batch is known long before it is trained on: by the seed alone. So batches
are decoded in their order into as many buffers as are under way, which are used again and again.

Images become 8-bit RGB, or are refused where that has no right conversion. What happens to each
mode of Pillow:

| mode | what it is | becomes |
|---|---|---|
| 1, L, P, RGB, RGBX | black and white, grey, palette, colours | RGB, exactly |
| CMYK, YCbCr, LAB, HSV | other colours | RGB by Pillow's formulas, without colour profiles |
| LA, La, PA, RGBA, RGBa | with transparency | laid on white, as browsers show them |
| 1, L, P, RGB with a transparent colour | | laid on white |
| I, I;16, F | grey of more than 8 bits | refused: files differ in what is white |

Of several frames the first is taken; the orientation in EXIF is left alone, as torchvision does.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from prunex_mpi.base.errors import UNREADABLE, UserError, one_line
from prunex_mpi.base.files import open_regular
from prunex_mpi.base.limits import cpu_limit

# Batches that are decoded before they are asked for.
PREFETCHED = 4
# What a thread takes at a time: small, so that all end a batch together.
CHUNK = 8
# Above it a label is no number of a class.
MOST_LABEL = 2**31 - 1
# More threads wait for the interpreter's lock.
MOST_DECODING = 16


@dataclass(frozen=True)
class Files:
    """The images of one split in their order, which is the same on every rank.

    `decode(i)` returns image i as uint8 [3, side, side]; it is called by several threads at a time
    and raises UserError (UNREADABLE). `name(i)` is what messages call the image.
    """

    labels: Tensor  # int64 [n]
    side: int
    decode: Callable[[int], Tensor]
    name: Callable[[int], str]


class Reader:
    """The threads of one rank, and what they could not read.

    Nothing is raised in the middle of training, where the other ranks would wait for this one:
    the first error is kept in `error` until all ranks agree to end, and the image is black.
    """

    def __init__(self, threads: int) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self.error: UserError | None = None

    def begin(self, files: Files, indices: Sequence[int], out: np.ndarray) -> list[Future]:
        """Begin to decode images `indices` into uint8 `out` [n, 3, side, side]."""
        starts = range(0, len(indices), CHUNK)
        parts = [(indices[start : start + CHUNK], out[start : start + CHUNK]) for start in starts]
        return [self.pool.submit(_decode, files, *part) for part in parts]

    def finish(self, futures: Sequence[Future]) -> None:
        """Wait until what was begun is done; keep the first error."""
        for future in futures:
            error = future.result()
            self.error = self.error or error

    def close(self) -> None:
        """End the threads; what they have not begun is not decoded."""
        self.pool.shutdown(cancel_futures=True)

    def raise_error(self) -> None:
        """Raise what could not be read, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


def _decode(files: Files, indices: Sequence[int], out: np.ndarray) -> UserError | None:
    """Decode images `indices` into `out`, black where one can't be read; return the first error."""
    first = None
    for index, target in zip(indices, out, strict=True):
        try:
            target[:] = files.decode(index).numpy()
        except UserError as error:
            target.fill(0)
            first = first or error
    return first


def decoding_threads(sharers: int, wanted: int = 0, here: int = 1) -> int:
    """Return how many threads decode: as `wanted`, or a share of the cores beside `sharers`.

    All ranks `here`, on this machine, share what it may keep busy.
    """
    share = min(len(os.sched_getaffinity(0)) // sharers, cpu_limit() // here)
    return wanted or max(1, min(share, MOST_DECODING))


@dataclass(frozen=True)
class Streamed:
    """The images of a shard, in files: a stand-in for a tensor, uint8 [n, 3, side, side].

    `shape`, `dtype` and indexing by a slice or by int64 [k] are a tensor's; what is returned is
    decoded then and there. What can't be read is in the reader's `error`.
    """

    files: Files
    places: Tensor  # int64 [n]: which of the files
    reader: Reader

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.places), 3, self.files.side, self.files.side))

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        return next(in_turn(self, [index]))

    def empty(self, count: int) -> Tensor:
        """Return memory for so many images."""
        return torch.empty((count, *self.shape[1:]), dtype=self.dtype)

    def part(self, index: slice) -> "Streamed":
        """Return some of the images, not decoded."""
        return Streamed(self.files, self.places[index], self.reader)


@dataclass(frozen=True)
class _Batch:
    """A batch under way."""

    chosen: Tensor  # int64 [b]: places in the shard
    images: Tensor
    futures: list[Future]


class Prefetcher:
    """Batches of one shard under way, in the order in which they were requested."""

    def __init__(self, images: Streamed) -> None:
        self.images = images
        self.batches: deque[_Batch] = deque()
        self.free: list[Tensor] = []

    def request(self, chosen: Tensor) -> None:
        """Begin to decode the images at places `chosen`, int64 [b], of the shard."""
        images = self.images
        # All but the last batch of a pass are as large as each other.
        room = self.free.pop() if self.free else images.empty(len(chosen))
        if len(room) < len(chosen):
            room = images.empty(len(chosen))
        indices = images.places[chosen].tolist()
        futures = images.reader.begin(images.files, indices, room[: len(chosen)].numpy())
        self.batches.append(_Batch(chosen, room, futures))

    def comes_next(self, chosen: Tensor) -> bool:
        """Return whether the batch that was requested first is this one."""
        return bool(self.batches) and torch.equal(self.batches[0].chosen, chosen)

    def take(self) -> tuple[Tensor, float]:
        """Return the first batch, good until another is requested, and the seconds waited."""
        started = perf_counter()
        batch = self.batches.popleft()
        self.images.reader.finish(batch.futures)
        self.free.append(batch.images)
        return batch.images[: len(batch.chosen)], perf_counter() - started

    def forget(self) -> None:
        """Drop all that is under way."""
        for batch in self.batches:
            for future in batch.futures:
                future.cancel()
        # What threads are writing to still must not be used again.
        self.batches.clear()


def in_turn(images: Tensor | Streamed, parts: Iterable[slice | Tensor]) -> Iterator[Tensor]:
    """Yield parts of a shard's images one after the other.

    What is yielded of a stream holds until the next part is asked for.
    """
    if isinstance(images, Tensor):
        for part in parts:
            yield images[part]
        return
    ahead, everything = Prefetcher(images), torch.arange(len(images.places))
    try:
        for part in parts:
            # The buffer of the part yielded last is free again by now.
            ahead.request(everything[part])
            if len(ahead.batches) > PREFETCHED:
                yield ahead.take()[0]
        while ahead.batches:
            yield ahead.take()[0]
    finally:
        ahead.forget()


def decode_all(images: Streamed) -> Tensor:
    """Decode all images into memory; raise UserError for the first that can't be read."""
    result = images.empty(len(images.places))
    reader, indices = images.reader, images.places.tolist()
    out, step = result.numpy(), 1024
    for start in range(0, len(indices), step):
        part = slice(start, start + step)
        reader.finish(reader.begin(images.files, indices[part], out[part]))
        reader.raise_error()
    return result


# --------------------------------------------------------------------------------------------------
# Files of images
# --------------------------------------------------------------------------------------------------

# No others are tried, whatever the name of a file says: Pillow would hand EPS to Ghostscript.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# Decoding takes 4 to 12 bytes for each. A small file can claim to have many.
MOST_PIXELS = 2**26
# Photographs of several sizes are trained on at this one by most networks and recipes.
PHOTO_SIDE, LARGEST_ICON = 224, 128
WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def as_uint8(source: str | BinaryIO, side: int, *, fit: bool, name: str = "") -> Tensor:
    """Return the image as uint8 [3, side, side]; `fit` scales the short side and crops the centre.

    `name` stands for the file in messages. Raises UserError (UNREADABLE) for broken files, other
    sizes without `fit`, and modes that are refused.
    """
    name = name or str(source)
    return to_side(open_rgb(source, name=name), side, fit=fit, name=name)


def to_side(image: Image.Image, side: int, *, fit: bool, name: str) -> Tensor:
    """Return an RGB image as uint8 [3, side, side], as `as_uint8` does."""
    if fit:
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
    if image.size != (side, side):
        message = f"image {name} is {image.width}x{image.height}, not {side}x{side}"
        # The first image of photographs says nothing about the size to train on.
        advised = PHOTO_SIDE if side > LARGEST_ICON else side
        advice = f"give --image-size {advised} to resize and crop all"
        raise UserError(f"{message}: {advice}", UNREADABLE)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def open_rgb(source: str | BinaryIO, *, name: str = "") -> Image.Image:
    """Decode one file as RGB; raise UserError (UNREADABLE) for broken or refused ones."""
    name = name or str(source)
    try:
        with (
            open_regular(source) if isinstance(source, str) else nullcontext(source) as file,
            Image.open(file, formats=FORMATS) as image,
        ):
            return load_rgb(image, name)
    except UserError:
        raise
    except Exception as error:  # broken ones raise all kinds of errors in Pillow
        none = f"damaged, or none of {', '.join(FORMATS)}"
        reason = none if isinstance(error, UnidentifiedImageError) else one_line(error)
        message = f"cannot read image {name} ({reason}): repair or remove it"
        raise UserError(message, UNREADABLE) from error


def load_rgb(image: Image.Image, name: str) -> Image.Image:
    """Decode an image that was opened as RGB, unless it has too many pixels (ValueError)."""
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels, more than {MOST_PIXELS:,}")
    image.load()
    return to_rgb(image, name)


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Convert any mode to RGB as the table of this module says."""
    if image.mode.startswith(("I", "F")):
        message = f"image {name} has grey of more than 8 bits (mode {image.mode})"
        raise UserError(f"{message}: convert it to 8 bits per value", UNREADABLE)
    if image.mode not in WITH_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")  # the only way that Pillow has
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")
