"""Batches, augmentation and normalisation."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import resized_crop

from prunex_mpi.data import batches
from prunex_mpi.data.batches import (
    GROUP,
    TRANSFORMS,
    Augmentation,
    BatchStream,
    ImageFormat,
    Shard,
    channel_moments,
    draw_boxes,
    draw_seeds,
    evaluation_batches,
    images_at_once,
    normalisation,
    resized_crops,
    transformed,
)
from prunex_mpi.settings import fields

ZERO, ONE, LABELS = torch.zeros(3), torch.ones(3), torch.zeros(4, dtype=torch.int64)

LOOK = ImageFormat(ZERO, ONE, "cpu")
STREAM = dict(batch_size=4, seed=0, rank=0, flip=False, pad=0)


def stream(shard: Shard, look: ImageFormat = LOOK, **changes: object) -> BatchStream:
    return BatchStream(shard, look, **(STREAM | changes))


def random_shard(count: int) -> Shard:
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(1, 256, (count, 3, 6, 6), generator=generator)
    return Shard(images.to(torch.uint8), torch.arange(count))


def to_bytes(images: Tensor) -> Tensor:
    return (images.double() * 255).round().to(torch.uint8)


def test_moments_of_shards_add_up_to_those_of_all(monkeypatch):
    monkeypatch.setattr(batches, "CHUNK_IMAGES", 3)
    shard = random_shard(11)
    parts = [Shard(shard.images[part], shard.labels[part]) for part in (slice(4), slice(4, None))]
    empty = Shard(shard.images[:0], shard.labels[:0])
    moments = sum(channel_moments(part, 11) for part in [*parts, empty])
    mean, std = normalisation(moments)
    values = shard.images.double() / 255
    assert moments.dtype == torch.float64
    assert (mean.dtype, std.dtype) == (torch.float32, torch.float32)
    assert int(moments[0]) == 11 * 36
    assert torch.allclose(mean.double(), values.mean((0, 2, 3)))
    assert torch.allclose(std.double(), values.std((0, 2, 3), unbiased=False))
    # Constant images must become zeros, not NaN.
    constant = Shard(torch.full_like(shard.images, 200), shard.labels)
    mean, std = normalisation(channel_moments(constant, 11))
    assert stream(constant, ImageFormat(mean, std, "cpu")).next()[0].abs().max() < 1e-4


def test_an_epoch_shows_each_image_once_and_the_next_reorders():
    batches = stream(shard := random_shard(11))
    assert batches.steps_per_epoch == 2
    epochs = []
    for _ in range(3):
        images, labels = map(torch.cat, zip(batches.next(), batches.next(), strict=True))
        assert len(set(labels.tolist())) == 8
        assert torch.equal(to_bytes(images), shard.images[labels])
        epochs.append(labels.tolist())
    assert batches.epoch == 2
    assert epochs[0] != epochs[1] != epochs[2]
    small = stream(random_shard(3), batch_size=32)
    assert (small.batch_size, small.steps_per_epoch) == (3, 1)
    assert [sorted(small.next()[1].tolist()) for _ in range(2)] == [[0, 1, 2], [0, 1, 2]]


def test_batches_follow_seed_and_rank():
    shard, global_state = random_shard(40), torch.get_rng_state()
    first, again, seed, rank = (
        stream(shard, flip=True, pad=2, seed=s, rank=r).next()
        for s, r in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert torch.equal(first[0], again[0])
    assert first[1].tolist() != seed[1].tolist()
    assert first[1].tolist() != rank[1].tolist()
    assert torch.equal(global_state, torch.get_rng_state())


def crops(image: Tensor, pad: int) -> dict[bytes, tuple[int, int]]:
    """Return every crop of a zero-padded uint8 image [3, s, s] with its offset."""
    side = image.shape[-1]
    padded = np.pad(image.numpy(), ((0, 0), (pad, pad), (pad, pad)))
    offsets = itertools.product(range(2 * pad + 1), repeat=2)
    return {padded[:, y : y + side, x : x + side].tobytes(): (y, x) for y, x in offsets}


@pytest.mark.parametrize(("flip", "pad"), [(False, 2), (True, 0), (True, 2)])
def test_augmented_images_are_crops_of_the_padded_or_mirrored_image(flip, pad):
    shard = random_shard(8)
    batches = stream(shard, batch_size=8, flip=flip, pad=pad)
    plain = [crops(image, pad) for image in shard.images]
    mirrored = [crops(image.flip(-1), pad) for image in shard.images]
    offsets, flips = set(), 0
    for _ in range(40):
        images, labels = batches.next()
        for image, label in zip(to_bytes(images), labels.tolist(), strict=True):
            key = image.numpy().tobytes()
            is_mirrored = key not in plain[label]
            offsets.add((mirrored if is_mirrored else plain)[label][key])
            flips += is_mirrored
    assert len(offsets) == (2 * pad + 1) ** 2
    assert 120 < flips < 200 if flip else flips == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_values_type_and_layout(dtype, channels_last):
    shard = random_shard(8)
    mean, std = torch.rand(3), 0.1 + torch.rand(3)
    look = ImageFormat(mean, std, "cpu", dtype, channels_last)
    evaluation = evaluation_batches(shard, batch_size=4, look=look)
    for images, labels in (stream(shard, look).next(), next(evaluation)):
        expected = shard.images[labels].double() / 255
        expected = (expected - mean.double()[:, None, None]) / std.double()[:, None, None]
        assert images.dtype == dtype
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert images.is_contiguous(memory_format=layout)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-2
        assert torch.allclose(images.double(), expected, rtol=tolerance, atol=tolerance)


def test_evaluation_goes_through_the_shard_in_order():
    shard = random_shard(10)
    evaluation = evaluation_batches(shard, batch_size=4, look=LOOK)
    images, labels = zip(*evaluation, strict=True)
    assert [len(part) for part in labels] == [4, 4, 2]
    assert torch.equal(torch.cat(labels), shard.labels)
    assert torch.equal(to_bytes(torch.cat(images)), shard.images)
    empty = Shard(shard.images[:0], shard.labels[:0])
    assert list(evaluation_batches(empty, batch_size=4, look=LOOK)) == []


def test_fewer_large_images_are_evaluated_at_once():
    for side, most in ((32, 4096), (512, 16), (8192, 1)):
        assert (
            images_at_once(Shard(torch.empty(1, 3, 1, 1).expand(4, 3, side, side), LABELS)) == most
        )
    assert images_at_once(Shard(torch.empty(0, 3, 32, 32), LABELS[:0])) == 4096


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_sees_the_same_batches_without_waiting_for_the_device():
    shard = random_shard(64)
    cpu, cuda = (
        stream(shard, ImageFormat(ZERO, ONE, device), flip=True, pad=2)
        for device in ("cpu", "cuda")
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [cuda.next() for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for images, labels in batches:
        expected, expected_labels = cpu.next()
        assert torch.equal(labels.cpu(), expected_labels)
        assert torch.allclose(images.cpu(), expected, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Random changes
# --------------------------------------------------------------------------------------------------


def images(count: int, side: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def test_crops_are_scaled_as_torchvision_does():
    before = images(64)
    boxes = draw_boxes(64, 24, torch.Generator().manual_seed(1))
    # Also pixels that are one, and the whole image.
    boxes[:, :2] = torch.tensor([[3, 4, 1, 1], [0, 0, 24, 24]]).T
    after = resized_crops(before, boxes)
    for image, box, found in zip(before, boxes.T.tolist(), after, strict=True):
        bilinear = InterpolationMode.BILINEAR
        expected = resized_crop(image, *box, [24, 24], bilinear, antialias=True)
        assert (found.int() - expected.int()).abs().max() <= 1
    assert torch.equal(after[1], before[1])


def test_boxes_are_distributed_as_torchvision_draws_them():
    boxes = draw_boxes(4000, 32, torch.Generator().manual_seed(2))
    assert (boxes[:2] >= 0).all() and (boxes[2:] >= 1).all()
    assert (boxes[:2] + boxes[2:] <= 32).all()
    torch.manual_seed(3)
    crop, image = v2.RandomResizedCrop(32), images(1, 32)
    drawn = [crop.make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[d["top"], d["left"], d["height"], d["width"]] for d in drawn]).T
    for mine, other in zip(boxes.double(), theirs.double(), strict=True):
        assert abs(float(mine.mean() - other.mean())) < 0.5
        assert abs(float(mine.std() - other.std())) < 0.4


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_follow_their_seeds_and_leave_torch_alone(name):
    before = images(25 * GROUP + 1, 12)
    seeds = draw_seeds(len(before), torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    chosen = [TRANSFORMS[name]()]
    after = transformed(before, chosen, seeds)
    assert torch.equal(state, torch.get_rng_state())
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    assert not torch.equal(after, before)
    torch.rand(1)
    assert torch.equal(transformed(before, chosen, seeds), after)
    assert not torch.equal(transformed(before, chosen, seeds.flip(0)), after)


def test_generators_of_devices_are_left_alone(monkeypatch):
    seeded: list[int] = []
    # What torch.manual_seed asks CUDA for, which has not begun here.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    transformed(images(3), [TRANSFORMS["color-jitter"]()], torch.tensor([1]))
    assert seeded == []


def test_settings_name_what_there_is():
    assert tuple(TRANSFORMS) == fields.TRANSFORMS


def test_batches_of_changed_images_go_on_exactly():
    shard = Shard(images(20), torch.arange(20))
    changes = Augmentation(True, ("rand-augment", "random-erasing"))

    def stream(changes: Augmentation) -> BatchStream:
        ways = {"batch_size": 6, "seed": 1, "rank": 0, "flip": True, "pad": 0}
        return BatchStream(shard, LOOK, **ways, changes=changes)

    whole, part, other = stream(changes), stream(changes), stream(Augmentation())
    batches = [whole.next() for _ in range(7)]
    for _ in range(4):
        part.next()
    place = part.epoch, part.position, part.order, part.generator.get_state()
    new = stream(changes)
    new.epoch, new.position, new.order = place[:3]
    new.generator.set_state(place[3])
    for found, labels in batches[4:]:
        again, others = new.next()
        assert torch.equal(found, again) and torch.equal(labels, others)
    assert not torch.equal(batches[0][0], other.next()[0])
