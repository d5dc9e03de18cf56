"""Assemble what one rank trains: the model, and the problem that it makes with data."""

import hashlib
import socket
from functools import partial
from typing import Any

import torch

from prunex_mpi.base.errors import UserError, one_line
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import digests_agree, run_collectively
from prunex_mpi.comm.collectives import Transport, broadcast_weights_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.losses import find_losses
from prunex_mpi.core.schedule import steps_of
from prunex_mpi.core.state import Problem
from prunex_mpi.core.task import EVALUATION_BATCH, IMAGES, next_token
from prunex_mpi.data.batches import (
    Augmentation,
    BatchStream,
    Look,
    evaluation_batches,
    images_at_once,
)
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.text import TextSet, WindowStream, window_batches
from prunex_mpi.models import batchnorm
from prunex_mpi.models.build import build_model
from prunex_mpi.models.draws import seed_all
from prunex_mpi.models.inputs import Inputs, inputs_from
from prunex_mpi.models.layout import trained_parameters
from prunex_mpi.run.loading import measure_colours
from prunex_mpi.settings.fields import Settings


def make_model(settings: Settings, inputs: Inputs) -> torch.nn.Module:
    """Build the model on the CPU from the seed, the same on every rank."""
    seed_all(settings.seed)
    return build_model(settings.model, inputs, settings.stem)


def build_problem(
    topology: Topology,
    settings: Settings,
    dataset: Dataset | TextSet,
    model: torch.nn.Module,
    device: torch.device,
    transport: Transport,
    heartbeat: Heartbeat,
) -> Problem:
    """Place model and data on `device`; rank 0's parameters become everyone's.

    Collective on `node`, `leader` and `world`.
    """
    if isinstance(dataset, TextSet):
        feed = _feed_of_text(topology, settings, dataset, device)
    else:
        where = device, next(iter(trained_parameters(model).values())).dtype
        feed = _feed_of_images(topology, settings, dataset, where, heartbeat)
    task, train, inputs = feed["task"], feed["train"], inputs_from(dataset.sizes())
    run_collectively(topology.world, lambda: check_batch(train.batch_size, model, inputs))
    if settings.compile:
        run_collectively(topology.world, lambda: _try_compiler(device))
    loss, guess = run_collectively(
        topology.world, lambda: find_losses(settings, dataset.num_classes, device)
    )
    agreed = digests_agree(topology.world, _digest(model))
    model.to(device)
    # The seed gives all ranks the same weights; they travel where rank 0 has read others, or where
    # software or processors are so different that it does not.
    if not agreed:
        broadcast_weights_(topology.world, model, transport)
    # From here on the ranks' random numbers differ (dropout); the shards' order has its own.
    seed_all(settings.seed * topology.world_size + topology.world.rank)
    return Problem(
        model=model,
        forward=torch.compile(model) if settings.compile else model,
        loss=task.losses(loss),
        inputs=inputs,
        train_shard=dataset.train,
        test=dataset.test if dataset.val is None else dataset.val,
        steps=_enough_steps(settings, steps_of(settings, train.steps_per_epoch)),
        guess_loss=guess,
        lr_scale=lr_scale_of(settings, topology.world_size),
        kept_back=None if dataset.val is None else dataset.test,
        reader=dataset.reader,
        digest=dataset.digest,
        **feed,
    )


def _feed_of_text(
    topology: Topology, settings: Settings, dataset: TextSet, device: torch.device
) -> dict[str, Any]:
    """Return what of a problem depends on the kind of its data, by name."""
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
    task, none = next_token(settings.context, dataset.text.bytes_per_token), torch.empty(0)
    return {"task": task, "train": stream, "batches": batches, "mean": none, "std": none}


def _feed_of_images(
    topology: Topology,
    settings: Settings,
    dataset: Dataset,
    where: tuple[torch.device, torch.dtype],
    heartbeat: Heartbeat,
) -> dict[str, Any]:
    """Return the same of images. Collective on `world`."""
    if settings.image_mean:
        mean, std = torch.tensor(settings.image_mean), torch.tensor(settings.image_std)
    else:
        mean, std = measure_colours(topology, dataset, heartbeat)
    look = Look(mean, std, *where, settings.channels_last)
    train = BatchStream(
        dataset.train,
        look,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rank=topology.world.rank,
        flip=dataset.flip and settings.augment != "off",
        pad=dataset.pad if settings.augment == "auto" else 0,
        changes=Augmentation(settings.augment == "resized-crop", settings.transforms),
    )
    batches = partial(evaluation_batches, look=look)
    at_once = min(EVALUATION_BATCH, images_at_once(dataset.train))
    kind = {"task": IMAGES, "train": train, "batches": batches, "at_once": at_once}
    return {**kind, "mean": mean, "std": std}


def _try_compiler(device: torch.device) -> None:
    # What is missing shows here in one line, not in the first local step.
    try:
        torch.compile(torch.neg)(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise UserError(
            f"compile: torch.compile fails on {socket.gethostname()} ({one_line(error)}); install "
            "what it needs, such as a C++ compiler, or leave it away"
        ) from None


def check_batch(samples: int, model: torch.nn.Module, inputs: Inputs) -> None:
    """Raise UserError where BatchNorm in `model` can't take the `samples` of a step."""
    if samples == 1 and (name := batchnorm.find_single_valued(model, inputs)):
        raise UserError(
            f"batches are of one image, of which BatchNorm {name} sees one value per channel and "
            "no variance; give --batch-size 2 or more"
        )


def lr_scale_of(settings: Settings, ranks: int) -> float:
    """Return what so many ranks, and their larger batch, multiply the learning rate by."""
    return {"linear": float(ranks), "sqrt": ranks**0.5}.get(settings.lr_scaling, 1.0)


def _digest(model: torch.nn.Module) -> int:
    """Return 64 bits that differ when the weights differ in any bit."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (*model.parameters(), *model.buffers()):
        # Bytes, since numpy knows no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return int.from_bytes(digest.digest(), "little")


def _enough_steps(settings: Settings, steps: int) -> int:
    """Return the local steps of an outer iteration; raise UserError where these are too few."""
    if settings.fragments > 1 and steps // settings.fragments < max(1, settings.overlap_steps):
        raise UserError(
            f"fragments {settings.fragments}: an outer iteration has {steps} local steps, too few "
            "for one, or as many as overlap-steps says, between two of them; lower it"
        )
    # Where the interval is a number, this was looked at with the settings.
    if settings.overlap_steps > steps:
        raise UserError(
            f"overlap-steps {settings.overlap_steps} is more than the {steps} local steps of an "
            "outer iteration; lower it"
        )
    return steps
