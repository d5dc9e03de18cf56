"""Images that are decoded when they are needed, a few batches ahead.

Where a batch lies in a shard is known long before it is trained on: by the seed alone. So batches
are decoded in their order into as many buffers as are under way, which are used again and again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from prunex_mpi.data.decoding import Files, Reader

# Batches that are decoded before they are asked for.
AHEAD = 4


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


class Ahead:
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
        """Say whether the batch that was requested first is this one."""
        return bool(self.batches) and torch.equal(self.batches[0].chosen, chosen)

    def take(self) -> tuple[Tensor, float]:
        """Return the first batch, uint8 [b, 3, side, side], and the seconds waited for it.

        Its memory holds until another batch is requested.
        """
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
    ahead, everything = Ahead(images), torch.arange(len(images.places))
    try:
        for part in parts:
            # The buffer of the part yielded last is free again by now.
            ahead.request(everything[part])
            if len(ahead.batches) > AHEAD:
                yield ahead.take()[0]
        while ahead.batches:
            yield ahead.take()[0]
    finally:
        ahead.forget()


def load_all(images: Streamed, going: Callable[[], None]) -> Tensor:
    """Decode all images into memory; raise UserError for the first that can't be read.

    `going` is called as it goes on.
    """
    result = images.empty(len(images.places))
    reader, indices = images.reader, images.places.tolist()
    out, step = result.numpy(), 1024
    for start in range(0, len(indices), step):
        part = slice(start, start + step)
        reader.finish(reader.begin(images.files, indices[part], out[part]), going)
        reader.raise_error()
    return result
