"""A run from Python: own model, own images, own loss, on a communicator of its own."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nodes import WORLD
from torch import nn

from mpi4py import MPI

from prunex_mpi import export, train
from prunex_mpi.base.errors import UserError
from prunex_mpi.config.resolve import make
from prunex_mpi.data.batches import Shard
from prunex_mpi.run.from_python import Data, find_classes

pytestmark = [pytest.mark.mpi, pytest.mark.any_mpi, pytest.mark.two_ranks]
SIDE, CLASSES, IMAGES = 8, 3, 16
SHORT = {"outer_iterations": 4, "local_steps": 2, "batch_size": 4, "warmup_iterations": 0}
SHORT |= {"keep_ramp_iterations": 0, "freeze_iteration": 3, "groups": ("coupled",), "lr": 0.05}


def own_model() -> nn.Module:
    torch.manual_seed(1)
    blocks = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def flat_model() -> nn.Module:
    blocks = (nn.Flatten(), nn.BatchNorm1d(3 * SIDE**2), nn.Linear(3 * SIDE**2, CLASSES))
    return nn.Sequential(nn.Conv2d(3, 3, 1), *blocks)


def shard(seed: int, count: int = IMAGES) -> Shard:
    """Return images whose brightness says the class."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(CLASSES, size=count))
    noise = torch.from_numpy(rng.integers(0, 60, (count, 3, SIDE, SIDE)))
    return Shard((80 * labels[:, None, None, None] + noise).to(torch.uint8), labels)


def focal(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logs = F.log_softmax(outputs, 1).gather(1, labels[:, None])
    return -((1 - logs.exp()) ** 2 * logs).mean()


@pytest.mark.parametrize(("loss", "ema"), [(None, 0.0), (focal, 0.0), (None, 0.75)])
def test_an_own_model_is_pruned_by_an_own_loop(loss, ema):
    data = Data(shard(WORLD.rank), test=shard(100))
    with train.training(WORLD, make(**SHORT, model_ema_decay=ema), own_model(), data, loss) as run:
        records = list(run.outer_iterations())
        assert [record["iteration"] for record in records] == [1, 2, 3, 4]
        assert records[-1]["frozen"] and records[-1]["density"] < 0.6
        model, images = run.delivered(), run.normalised(data.test.images)
    outputs = model(images).detach()
    right = int((outputs.argmax(1) == data.test.labels).sum())
    assert records[-1]["test_accuracy"] == pytest.approx(right / IMAGES)
    wanted = (loss or F.cross_entropy)(outputs, data.test.labels)
    assert records[-1]["test_loss"] == pytest.approx(float(wanted), rel=1e-4)
    digest = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    first = digest.copy()
    WORLD.Bcast(first, root=0)
    assert np.array_equal(first, digest)
    small = export.smaller(model, images)
    assert sum(p.numel() for p in small.parameters()) < 0.7 * len(digest)
    assert torch.allclose(small(images), outputs, atol=1e-4)


class Remembering(nn.Module):
    """Keep what came of the last batch, which has a gradient after training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = 2 * x
        return self.last


def test_a_model_of_float64_that_keeps_a_result_is_delivered():
    model = nn.Sequential(*own_model(), Remembering()).double()
    with train.training(WORLD, make(**SHORT), model, Data(shard(WORLD.rank))) as run:
        assert len(list(run.outer_iterations())) == 4
        delivered, images = run.delivered(), run.normalised(shard(100).images)
    assert images.dtype == torch.float64
    small = export.smaller(delivered, images)
    assert torch.allclose(small(images), delivered(images))


def test_a_part_of_the_ranks_can_train():
    half = WORLD.Split(WORLD.rank % 2)
    settings = make(method="dense", outer_iterations=1, local_steps=1, batch_size=4)
    with train.training(half, settings, own_model(), Data(shard(WORLD.rank))) as run:
        (record,) = run.outer_iterations()
        assert run.topology.world_size == half.size
    assert record["test_accuracy"] is None and record["status"] == "completed"
    half.Free()


@pytest.mark.parametrize(
    ("changes", "data", "why"),
    [
        ({"dataset": "cifar10"}, {}, "dataset means nothing to a run from Python"),
        ({"trace": True}, {}, "trace means nothing to a run from Python"),
        ({"local_steps": "auto"}, {}, "local-steps auto takes a trial"),
        ({"preset": "thin", "local_steps": 4}, {}, "overlap-steps auto takes a trial"),
        ({}, {"images": torch.zeros(4, 3, 8, 8)}, r"images must be uint8 .*, not float32"),
        ({}, {"images": torch.zeros(4, 1, 8, 8).byte()}, r"not uint8 \[4, 1, 8, 8\]"),
        ({}, {"labels": torch.zeros(3).long()}, r"labels must be int64 \[4\], not int64 \[3\]"),
        ({}, {"labels": torch.full((4,), 7)}, "labels must be from 0 to 2"),
        ({}, {"images": torch.zeros(4, 3, 2, 2).byte()}, "the model can't take images of 2x2"),
        (
            {},
            {"images": torch.zeros(0, 3, 8, 8).byte(), "labels": torch.zeros(0).long()},
            "there is no image to train on",
        ),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(changes, data, why):
    given = {"images": torch.zeros(4, 3, 8, 8).byte(), "labels": torch.zeros(4).long(), **data}
    with (
        pytest.raises(UserError, match=why),
        train.training(
            WORLD, make(**{**SHORT, **changes}), own_model(), Data(Shard(**given)), focal
        ),
    ):
        pass


def test_a_test_set_without_images_is_refused_and_a_share_without_is_not():
    settings = make(method="dense", outer_iterations=1, local_steps=1, batch_size=4)
    with (
        pytest.raises(UserError, match="the test set is empty on all ranks"),
        train.training(WORLD, settings, own_model(), Data(shard(WORLD.rank), shard(100, 0))),
    ):
        pass
    share = shard(100, IMAGES if WORLD.rank == 0 else 0)
    with train.training(WORLD, settings, own_model(), Data(shard(WORLD.rank), share)) as run:
        (record,) = run.outer_iterations()
    assert 0 <= record["test_accuracy"] <= 1


@pytest.mark.parametrize("output", [torch.zeros(1, 3, 4), torch.zeros(3), (torch.zeros(1, 3),)])
def test_a_model_that_returns_something_else_is_refused(output):
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return output

    settings = make(method="dense", outer_iterations=1, local_steps=1, batch_size=4)
    with (
        pytest.raises(UserError, match=r"for one image, not \[1, classes\]"),
        train.training(WORLD, settings, Odd(3, 3), Data(shard(WORLD.rank))),
    ):
        pass


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("settings", "test", "what"),
    [
        ({}, lambda rank: shard(100) if rank == 0 else None, "without a test set, differ"),
        (lambda rank: {"local_steps": 2 + rank}, lambda rank: None, "the settings differ between"),
    ],
)
def test_ranks_that_would_wait_for_others_for_ever_are_refused(settings, test, what):
    changes = settings(WORLD.rank) if callable(settings) else settings
    data = Data(shard(WORLD.rank), test=test(WORLD.rank))
    with (
        pytest.raises(UserError, match=what),
        train.training(WORLD, make(**{**SHORT, **changes}), own_model(), data),
    ):
        pass


ONE_IMAGE = {"batch_size": 1}


def test_a_batch_of_one_image_is_refused_where_batchnorm_sees_one_value():
    with (
        pytest.raises(UserError, match="batches are of one image, of which BatchNorm 2 sees one"),
        train.training(
            WORLD, make(**{**SHORT, **ONE_IMAGE}), flat_model(), Data(shard(WORLD.rank))
        ),
    ):
        pass


def test_maps_of_one_image_are_enough_for_batchnorm():
    settings = make(**{**SHORT, **ONE_IMAGE})
    with train.training(WORLD, settings, own_model(), Data(shard(WORLD.rank))) as run:
        assert len(list(run.outer_iterations())) == settings.outer_iterations


@pytest.mark.mpi(min_size=2)
def test_ranks_with_more_images_than_others_are_refused():
    data = Data(shard(WORLD.rank, IMAGES + 4 * WORLD.rank))
    with (
        pytest.raises(UserError, match="numbers or sizes of the images to train on"),
        train.training(WORLD, make(**SHORT), own_model(), data),
    ):
        pass
    assert MPI.COMM_WORLD.size == WORLD.size


def test_finding_the_classes_leaves_every_module_in_its_mode():
    model = own_model()
    model[1].eval()
    assert find_classes(model, SIDE) == CLASSES
    with pytest.raises(UserError, match="can't take images of 2x2"):
        find_classes(model, 2)
    assert [m.training for m in model] == [n != 1 for n in range(len(model))]
