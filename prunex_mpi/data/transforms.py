"""Change images at random, a batch at a time on their device, each by itself.

All that is random is drawn on the CPU, from the generator that is handed in, so that every
device sees the same, and a run that goes on draws what it would have drawn.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.transforms import v2

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
