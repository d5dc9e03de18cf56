"""What feeds a problem: the stream of batches to train on, and those to test on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.loading import measure_colours
from prunex_mpi.core.task import IMAGES, Task, next_token
from prunex_mpi.data.batches import Augmentation, BatchStream, Look, evaluation_batches
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.text import TextSet, WindowStream, window_batches
from prunex_mpi.data.transforms import Mixing
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Feed:
    """What makes up a `Problem` of one rank's data; `mean` and `std` are empty for text."""

    task: Task
    train: BatchStream | WindowStream
    batches: Callable[..., Iterator[tuple[Tensor, Tensor]]]
    mean: Tensor
    std: Tensor
    mixing: Mixing | None = None


def feed_of(
    topology: Topology,
    settings: Settings,
    dataset: Dataset | TextSet,
    where: tuple[torch.device, torch.dtype],
    heartbeat: Heartbeat,
) -> Feed:
    """Return the batches of a data set on a device, images in a dtype. Collective on `world`."""
    if isinstance(dataset, TextSet):
        return _feed_of_text(topology, settings, dataset, where[0])
    return _feed_of_images(topology, settings, dataset, where, heartbeat)


def _feed_of_text(
    topology: Topology, settings: Settings, dataset: TextSet, device: torch.device
) -> Feed:
    stream = WindowStream(
        dataset.text.tokens,
        settings.context,
        device,
        stop=dataset.stop,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rank=topology.world.rank,
        ranks=topology.world_size,
    )
    batches = partial(window_batches, device=device, vocabulary=dataset.num_classes)
    task = next_token(settings.context, dataset.text.bytes_per_token)
    return Feed(task, stream, batches, torch.empty(0), torch.empty(0))


def _feed_of_images(
    topology: Topology,
    settings: Settings,
    dataset: Dataset,
    where: tuple[torch.device, torch.dtype],
    heartbeat: Heartbeat,
) -> Feed:
    if settings.image_mean:
        mean, std = torch.tensor(settings.image_mean), torch.tensor(settings.image_std)
    else:
        mean, std = measure_colours(topology, dataset, heartbeat)
    device, dtype = where
    look = Look(mean, std, device, dtype, settings.channels_last)
    resized_crop = settings.augment == "resized-crop"
    stream = BatchStream(
        dataset.train,
        look,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rank=topology.world.rank,
        flip=dataset.flip and settings.augment != "off",
        pad=dataset.pad if settings.augment == "auto" else 0,
        changes=Augmentation(resized_crop, settings.transforms),
    )
    draws = settings.seed, topology.world.rank
    mixing = None
    if settings.mixup or settings.cutmix:
        mixing = Mixing(settings.mixup, settings.cutmix, dataset.num_classes, draws)
    return Feed(IMAGES, stream, partial(evaluation_batches, look=look), mean, std, mixing)
