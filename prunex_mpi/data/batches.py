"""Draw augmented batches from one rank's part of a data set.

Images stay in memory as uint8, or are decoded as uint8 some batches ahead, and are augmented a
batch at a time on the device, each by itself. All that is random is drawn on the CPU, so that every
device sees the same, and a run that goes on draws what it would have drawn.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from prunex_mpi.data.decoding import PREFETCHED, Prefetcher, Streamed, in_turn

Device = torch.device | str
CHUNK_IMAGES = 256  # bounds the temporary copies of passes over a whole shard
# Of the images that a network gets at once where their number is not the user's choice.
MOST_PIXELS = 2**22


@dataclass(frozen=True)
class Shard:
    """Hold the images of one rank, or where to decode them from."""

    images: Tensor | Streamed  # uint8 [n, 3, H, W], CPU
    labels: Tensor  # int64 [n], CPU

    def __len__(self) -> int:
        return len(self.labels)


def part_of(shard: Shard, part: slice) -> Shard:
    """Return a part of a shard, which shares its memory or is decoded later as well."""
    images = shard.images
    images = images.part(part) if isinstance(images, Streamed) else images[part]
    return Shard(images, shard.labels[part])


def channel_moments(shard: Shard, most: int) -> Tensor:
    """Return what adds up over ranks to the channels' mean and variance, values in 0..1.

    float64 [7], CPU: the pixel count, the sum and the sum of squares of each channel. Of the first
    `most` images of the shard.
    """
    counts = torch.zeros(3, 256, dtype=torch.int64)
    count = min(most, len(shard))
    starts = range(0, count, CHUNK_IMAGES)
    parts = (slice(start, min(start + CHUNK_IMAGES, count)) for start in starts)
    for chunk in in_turn(shard.images, parts):
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
class ImageFormat:
    """What a model is to see of images: how they are normalised, and where and how they lie."""

    mean: Tensor  # float32 [3], values in 0..1
    std: Tensor  # float32 [3]
    device: Device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False


def _normaliser(look: ImageFormat) -> Callable[[Tensor], Tensor]:
    """Return what turns uint8 images into normalised ones, computed in float32 or 64."""
    dtype = torch.promote_types(look.dtype, torch.float32)
    scale = (1 / (255 * look.std.to(dtype))).to(look.device)[:, None, None]
    shift = (-look.mean.to(dtype) / look.std.to(dtype)).to(look.device)[:, None, None]
    layout = torch.channels_last if look.channels_last else torch.contiguous_format

    def normalise(images: Tensor) -> Tensor:
        floats = images.to(dtype).mul_(scale).add_(shift)
        return floats.to(look.dtype).contiguous(memory_format=layout)

    return normalise


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images at random, beside crops of padded ones and flips."""

    resized_crop: bool = False
    transforms: tuple[str, ...] = ()


NO_AUGMENTATION = Augmentation()


@dataclass
class _Place:
    """Where a stream stands in its shard."""

    epoch: int
    position: int
    order: Tensor
    generator: torch.Generator


class BatchStream:
    """Draw endless reshuffled, augmented batches from one rank's shard.

    Order and augmentation are drawn on the CPU from a generator seeded by (seed, rank), so every
    device sees the same batches. An epoch's last partial batch is dropped: equal shards make equal
    steps. The position is all in `epoch`, `position`, `order` (int64 [n]) and `generator`. `waited`
    is how many seconds the last batch was waited for.
    """

    def __init__(
        self,
        shard: Shard,
        look: ImageFormat,
        *,
        batch_size: int,
        seed: int,
        rank: int,
        flip: bool,
        pad: int,
        changes: Augmentation = NO_AUGMENTATION,
    ) -> None:
        self.batch_size = min(batch_size, len(shard.labels))
        self.steps_per_epoch = max(1, len(shard.labels) // self.batch_size)
        self.flip, self.pad, self.resized_crop = flip, pad, changes.resized_crop
        self.transforms = [TRANSFORMS[name]() for name in changes.transforms]
        self.device = torch.device(look.device)
        self.labels = shard.labels.to(self.device)
        streamed = isinstance(shard.images, Streamed)
        self.images = shard.images if streamed else shard.images.to(self.device)
        # Batches under way, and where the one after the last of them begins.
        self.ahead = Prefetcher(shard.images) if streamed else None
        self.future: _Place | None = None
        self.waited = 0.0
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
        seed_(self.generator, entropy)
        self.epoch, self.position = 0, 0
        self.order = torch.randperm(len(self.labels), generator=self.generator)

    def samples_among(self, ranks: int, order: int) -> int:
        """Return the images of an epoch of a rank among `ranks`, whose `order` has so many."""
        return order

    def next(self) -> tuple[Tensor, Tensor]:
        """Return images [b, 3, H, W] as `look` says and int64 labels [b], on its device."""
        draws, boxes, seeds = self._draw(self)
        chosen, down, right, mirrored = upload(draws, self.device)
        if self.ahead is None:
            images = self.images.index_select(0, chosen)
        else:
            images = upload(self._decoded(draws[0]), self.device)
        if self.pad or self.flip:
            images = self._augment(images, down, right, mirrored)
        if self.resized_crop:
            images = resized_crops(images, upload(boxes, self.device))
        if self.transforms:
            images = transformed(images, self.transforms, seeds)
        return self.normalise(images), self.labels.index_select(0, chosen)

    def _draw(self, place: "BatchStream | _Place") -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Move `place` on by a batch; return its images, offsets and flips, boxes and seeds."""
        if place.position == self.steps_per_epoch:
            place.epoch, place.position = place.epoch + 1, 0
            place.order = torch.randperm(len(place.order), generator=place.generator)
        start = place.position * self.batch_size
        place.position += 1
        draws = torch.zeros(4, self.batch_size, dtype=torch.int64)
        draws[0] = place.order[start : start + self.batch_size]
        if self.pad:
            draws[1:3].random_(2 * self.pad + 1, generator=place.generator)
        if self.flip:
            draws[3].random_(2, generator=place.generator)
        boxes = seeds = None
        if self.resized_crop:
            boxes = draw_boxes(self.batch_size, self.images.shape[-1], place.generator)
        if self.transforms:
            seeds = draw_seeds(self.batch_size, place.generator)
        return draws, boxes, seeds

    def _decoded(self, chosen: Tensor) -> Tensor:
        """Return the images of the batch just drawn, and have those that follow it decoded."""
        if not self.ahead.comes_next(chosen):
            # The position was changed in between: what is under way is another batch.
            self.ahead.forget()
            self.ahead.request(chosen)
            generator = torch.Generator()
            generator.set_state(self.generator.get_state())
            self.future = _Place(self.epoch, self.position, self.order, generator)
        while len(self.ahead.batches) <= PREFETCHED:
            self.ahead.request(self._draw(self.future)[0][0])
        images, self.waited = self.ahead.take()
        return images

    def _augment(self, images: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
        """Crop each zero-padded image at its own offset [b] and mirror some, in one gather."""
        padded = F.pad(images, (self.pad,) * 4).flatten(2)
        source = self.windows.index_select(0, mirrored) + (down * self.stride + right)[:, None]
        return padded.gather(2, source[:, None].expand(-1, 3, -1)).view_as(images)


def seed_(generator: torch.Generator, entropy: Sequence[int]) -> None:
    """Seed a generator by numbers that are mixed first: neighbouring ones give unlike draws."""
    generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def images_at_once(shard: Shard) -> int:
    """Return how many images of a shard a network may be given, whatever it trains with."""
    height, width = shard.images.shape[-2:]
    return max(1, MOST_PIXELS // max(1, height * width))


def evaluation_batches(
    shard: Shard, *, batch_size: int, look: ImageFormat
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the whole shard in order without augmentation, the last batch possibly smaller."""
    normalise = _normaliser(look)
    starts = range(0, len(shard.labels), batch_size)
    parts = [slice(start, start + batch_size) for start in starts]
    for part, images in zip(parts, in_turn(shard.images, parts), strict=True):
        yield normalise(upload(images, look.device)), upload(shard.labels[part], look.device)


def upload(tensor: Tensor, device: Device) -> Tensor:
    """Copy to the device; to CUDA from pinned memory, so that the CPU does not wait."""
    pinned = tensor.pin_memory() if torch.device(device).type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


# --------------------------------------------------------------------------------------------------
# Random changes
# --------------------------------------------------------------------------------------------------

# As torchvision's RandomResizedCrop: share of the area, ratio of the sides, tries.
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
# Images that get the same draw of a transform of torchvision, which draws once for what it gets.
GROUP = 8

Transform = Callable[[Tensor], Tensor]


TRANSFORMS: dict[str, Callable[[], Transform]] = {
    "trivial-augment": v2.TrivialAugmentWide,
    "rand-augment": v2.RandAugment,
    "auto-augment": v2.AutoAugment,
    "color-jitter": lambda: v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
    "grayscale": lambda: v2.RandomGrayscale(p=0.2),
    "gaussian-blur": lambda: v2.GaussianBlur(kernel_size=3),
    "random-erasing": lambda: v2.RandomErasing(p=0.25),
}


def draw_boxes(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Return top, left, height and width of `count` random crops of squares, int64 [4, count].

    As torchvision's RandomResizedCrop; where none of its tries fits, all of the image is taken.
    """
    drawn = torch.rand(2, TRIES, count, generator=generator, dtype=torch.float64)
    area = (AREA[0] + drawn[0] * (AREA[1] - AREA[0])) * side**2
    low, high = (math.log(ratio) for ratio in RATIO)
    ratio = torch.exp(low + drawn[1] * (high - low))
    sizes = torch.stack([area / ratio, area * ratio]).sqrt().round().long()
    fits = ((sizes > 0) & (sizes <= side)).all(0)
    # The first of the tries that fits; the image itself behind them.
    sizes = torch.cat([sizes, torch.full((2, 1, count), side)], 1)
    first = torch.cat([fits, torch.ones(1, count, dtype=torch.bool)]).long().argmax(0)
    size = sizes.gather(1, first.expand(2, 1, count)).squeeze(1)
    place = torch.rand(2, count, generator=generator, dtype=torch.float64)
    return torch.cat([(place * (side - size + 1)).long(), size])


def resized_crops(images: Tensor, boxes: Tensor) -> Tensor:
    """Crop uint8 images [b, 3, side, side] at `boxes` and scale to their old size again.

    Bilinear and antialiased, as torchvision does it: two products with matrices of weights.
    """
    side = images.shape[-1]
    down, across = (_weights(boxes[i], boxes[i + 2], side) for i in (0, 1))
    rows = torch.matmul(images.float(), across.transpose(1, 2)[:, None])
    return torch.matmul(down[:, None], rows).round_().clamp_(0, 255).to(torch.uint8)


def _weights(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Return what each of `side` pixels takes of those from `start` on, float32 [b, side, side]."""
    pixels = torch.arange(side, device=start.device, dtype=torch.float32) + 0.5
    scale = (length / side).float()[:, None]
    centre = start[:, None] + scale * pixels
    reach = scale.clamp_min(1.0)[:, :, None]
    weights = (1 - (pixels - centre[:, :, None]).abs() / reach).clamp_min_(0)
    last = (start + length)[:, None, None]
    weights *= (pixels > start[:, None, None]) & (pixels < last)
    return weights / weights.sum(2, keepdim=True)


def draw_seeds(count: int, generator: torch.Generator) -> Tensor:
    """Return a seed for each group of `count` images, int64."""
    return torch.empty(-(-count // GROUP), dtype=torch.int64).random_(2**62, generator=generator)


def transformed(images: Tensor, transforms: Sequence[Transform], seeds: Tensor) -> Tensor:
    """Apply `transforms` to uint8 images [b, 3, side, side], each group with a draw of its own.

    Torch's own generators are as before afterwards.
    """
    groups = []
    # That of the CPU alone: torch.manual_seed would seed those of all devices.
    generator = torch.default_generator
    before = generator.get_state()
    try:
        for group, seed in zip(images.split(GROUP), seeds.tolist(), strict=True):
            generator.manual_seed(seed)
            for transform in transforms:
                group = transform(group)
            groups.append(group)
    finally:
        generator.set_state(before)
    return torch.cat(groups)
