"""Draw augmented batches from one rank's part of a data set.

Images stay in memory as uint8 and are augmented a batch at a time on the device: worker processes
cannot be forked once MPI is initialised.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Device = torch.device | str
CHUNK_IMAGES = 1024  # bounds the temporary copies of passes over a whole shard


@dataclass(frozen=True)
class Shard:
    """Hold the images of one rank."""

    images: Tensor  # uint8 [n, 3, H, W], CPU
    labels: Tensor  # int64 [n], CPU


def channel_moments(shard: Shard) -> Tensor:
    """Return what adds up over ranks to the channels' mean and variance, values in 0..1.

    float64 [7], CPU: the pixel count, the sum and the sum of squares of each channel.
    """
    counts = torch.zeros(3, 256, dtype=torch.int64)
    for chunk in shard.images.split(CHUNK_IMAGES):
        for channel in range(3):
            counts[channel] += torch.bincount(chunk[:, channel].flatten(), minlength=256)
    values = torch.arange(256, dtype=torch.float64) / 255
    weights = counts.to(torch.float64)
    return torch.cat([weights[:1].sum(1), weights @ values, weights @ values.square()])


def normalisation(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Return each channel's mean and standard deviation, float32 [3], from summed moments."""
    mean, square = moments[1:4] / moments[0], moments[4:7] / moments[0]
    # A constant channel is only centred: below one grey level there is nothing to scale up.
    std = (square - mean.square()).clamp_min(0).sqrt().clamp_min(1 / 255)
    return mean.float(), std.float()


@dataclass(frozen=True)
class Look:
    """What a model is to see of images: how they are normalised, and where and how they lie."""

    mean: Tensor  # float32 [3], values in 0..1
    std: Tensor  # float32 [3]
    device: Device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False


def _normaliser(look: Look) -> Callable[[Tensor], Tensor]:
    """Return what turns uint8 images into normalised ones, computed in float32 or 64."""
    work = torch.promote_types(look.dtype, torch.float32)
    scale = (1 / (255 * look.std.to(work))).to(look.device)[:, None, None]
    shift = (-look.mean.to(work) / look.std.to(work)).to(look.device)[:, None, None]
    layout = torch.channels_last if look.channels_last else torch.contiguous_format

    def normalise(images: Tensor) -> Tensor:
        floats = images.to(work).mul_(scale).add_(shift)
        return floats.to(look.dtype).contiguous(memory_format=layout)

    return normalise


class BatchStream:
    """Draw endless reshuffled, augmented batches from one rank's shard.

    The images move to the device once. Order and augmentation are drawn on the CPU from a generator
    seeded by (seed, rank), so every device sees the same batches. An epoch's last partial batch is
    dropped: equal shards make equal steps. The position is all in `epoch`, `position`, `order`
    (int64 [n]) and `generator`.
    """

    def __init__(
        self,
        shard: Shard,
        look: Look,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        flip: bool,
        pad: int,
    ) -> None:
        self.batch_size = min(batch_size, len(shard.labels))
        self.steps_per_epoch = max(1, len(shard.labels) // self.batch_size)
        self.flip, self.pad = flip, pad
        self.device = torch.device(look.device)
        self.images, self.labels = shard.images.to(self.device), shard.labels.to(self.device)
        self.normalise = _normaliser(look)
        self.stride = shard.images.shape[-1] + 2 * pad
        columns = torch.arange(shard.images.shape[-1])
        rows = columns[:, None] * self.stride
        # Where a plain and a mirrored crop's pixels lie in a padded image, int64 [2, H * W].
        windows = torch.stack([rows + columns, rows + columns.flip(0)]).flatten(1)
        self.windows = windows.to(self.device)
        self.generator = torch.Generator()
        self.reshuffle([seed, rank])

    def reshuffle(self, entropy: Sequence[int]) -> None:
        """Begin a first epoch in an order drawn from `entropy`."""
        mixed_seed = np.random.SeedSequence(entropy).generate_state(1)[0]
        self.generator.manual_seed(int(mixed_seed))
        self.epoch, self.position = 0, 0
        self.order = torch.randperm(len(self.labels), generator=self.generator)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return images [b, 3, H, W] as `look` says and int64 labels [b], on its device."""
        if self.position == self.steps_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
            self.order = torch.randperm(len(self.order), generator=self.generator)
        start = self.position * self.batch_size
        self.position += 1
        draws = torch.zeros(4, self.batch_size, dtype=torch.int64)
        draws[0] = self.order[start : start + self.batch_size]
        if self.pad:
            draws[1:3].random_(2 * self.pad + 1, generator=self.generator)
        if self.flip:
            draws[3].random_(2, generator=self.generator)
        chosen, down, right, mirrored = _upload(draws, self.device)
        images = self.images.index_select(0, chosen)
        if self.pad or self.flip:
            images = self._augment(images, down, right, mirrored)
        return self.normalise(images), self.labels.index_select(0, chosen)

    def _augment(self, images: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
        """Crop each zero-padded image at its own offset [b] and mirror some, in one gather."""
        padded = F.pad(images, (self.pad,) * 4).flatten(2)
        source = self.windows.index_select(0, mirrored) + (down * self.stride + right)[:, None]
        return padded.gather(2, source[:, None].expand(-1, 3, -1)).view_as(images)


def evaluation_batches(
    shard: Shard, *, batch_size: int, look: Look
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the whole shard in order without augmentation, the last batch possibly smaller."""
    normalise = _normaliser(look)
    for start in range(0, len(shard.labels), batch_size):
        part = slice(start, start + batch_size)
        images, labels = shard.images[part], shard.labels[part]
        yield normalise(_upload(images, look.device)), _upload(labels, look.device)


def _upload(tensor: Tensor, device: Device) -> Tensor:
    """Copy to the device; to CUDA from pinned memory, so that the CPU does not wait."""
    pinned = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
