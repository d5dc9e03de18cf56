"""Random changes of images: as torchvision's, drawn anew for each image, the same when repeated."""

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import resized_crop

from prunex_mpi.data.batches import Augmentation, BatchStream, ImageFormat, Shard
from prunex_mpi.data.transforms import (
    GROUP,
    TRANSFORMS,
    draw_boxes,
    draw_seeds,
    resized_crops,
    transformed,
)
from prunex_mpi.settings import fields

LOOK = ImageFormat(torch.zeros(3), torch.ones(3), "cpu")


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
