"""Load the data, build the model, and make the problem of one rank of both.

Of images each rank loads its share. A text is read once per machine; each rank gets its windows.
"""

import socket
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, log, one_line
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import (
    broadcast_json,
    require_same,
    run_collectively,
    run_collectively_while,
    sum_alike_,
)
from prunex_mpi.comm.collectives import Transport, broadcast_weights_
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.schedule import steps_of
from prunex_mpi.core.state import Problem
from prunex_mpi.core.task import EVALUATION_BATCH, IMAGES, find_losses, next_token
from prunex_mpi.data.batches import (
    Augmentation,
    BatchStream,
    ImageFormat,
    channel_moments,
    evaluation_batches,
    images_at_once,
    normalisation,
)
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.decoding import decoding_threads
from prunex_mpi.data.image_files import CONTENTS, read_share
from prunex_mpi.data.request import TEST, Known, Part, Request
from prunex_mpi.data.text import TextSet, WindowStream, take_windows, window_batches
from prunex_mpi.data.text_files import Text, Tokenizer, forget, map_text, prepare
from prunex_mpi.models.build import build_model
from prunex_mpi.models.dummy_input import seed_all
from prunex_mpi.models.inputs import Images, Inputs, Tokens, inputs_from
from prunex_mpi.models.layout import trained_parameters
from prunex_mpi.run.finished_run import load_alike
from prunex_mpi.settings.fields import TEXT, Settings

CPU = torch.device("cpu")
# By which what has been read of a text goes by among what ranks know of a data set.
READ = "text"
# Of each rank, for mean and deviation of the colours, which they give to about 0.001.
MEASURED_IMAGES = 16384
# Classes and side of the images of data sets that are always the same.
SIZES = {"digits": (10, 8), "cifar10": (10, 32), "cifar100": (100, 32)}


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def share_contents(world: MPI.Comm, request: Request, heartbeat: Heartbeat) -> Known:
    """Return what lies in all class folders or tar files of a data set; each rank reads a share.

    Text is read and cut into tokens; {} for a data set of another kind. Raises UserError
    (UNREADABLE) everywhere for what one can't read. Collective on `world`.
    """
    if request.dataset == TEXT:
        return {READ: share_text(world, request, heartbeat)}
    if request.dataset not in CONTENTS:
        return {}

    def read() -> Known:
        found = {}
        for path, contents in read_share(request, world.rank, world.size):
            found[path] = contents
            # A folder is listed without a byte that the system counts as read.
            heartbeat.go_on()
        return found

    mine = run_collectively_while(world, read, heartbeat)
    found = {}
    for root in range(world.size):
        found |= broadcast_json(world, mine, root)
        heartbeat.go_on()
    return found


def share_text(
    world: MPI.Comm, request: Request, heartbeat: Heartbeat, known: Tokenizer | None = None
) -> Text:
    """Return a text, read and cut into tokens by the first rank of each machine alone.

    With chars its vocabulary may be `known`. Raises UserError (UNREADABLE) on every rank where one
    can't read it. Collective on `world`.
    """
    host = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    facts = None

    def read() -> dict[str, Any] | None:
        nonlocal facts
        if host.rank == 0:
            facts = asdict(prepare(request, known))
        return facts

    try:
        told = broadcast_json(host, run_collectively_while(world, read, heartbeat))
        text = run_collectively(world, lambda: map_text(told))
    finally:
        if facts:
            forget(facts["file"])
        host.Free()
    require_same(world, "the text or the tokenizer", text.digest)
    if world.rank == 0 and text.lacking:
        log.warning("text: %s", text.lacking)
    return text


def find_inputs(request: Request, known: Known) -> Inputs:
    """Return what a network has to read and make, from one image of each half.

    `known` is what ranks have read of the data set already. Raises UserError (UNREADABLE).
    """
    if request.dataset == TEXT:
        return Tokens(known[READ].tokenizer.size, request.context)
    if request.dataset in SIZES:
        classes, side = SIZES[request.dataset]
        return Images(request.image_size or side, classes)
    one = {"train_samples": 1, "test_samples": 1 if TEST in request.parts else None}
    first = replace(request, **one, val_split=0.0, data_mode="memory")
    try:
        return inputs_from(load_alike(first, Part(0, 1, known=known)).sizes())
    except ValueError as error:
        raise UserError(f"the images of {request.dataset} can't be: {error}", UNREADABLE) from None


def load_dataset(
    topology: Topology,
    request: Request,
    heartbeat: Heartbeat | None = None,
    known: Known | None = None,
) -> Dataset | TextSet:
    """Load this rank's shards, on the CPU; what any rank cannot read ends the job.

    `known` is what `share_contents` has returned. Raises UserError (UNREADABLE) where all are of
    one class. Collective on `world`.
    """
    heartbeat = heartbeat or Heartbeat()
    world = topology.world
    if known is None:
        known = share_contents(world, request, heartbeat)
    if request.dataset == TEXT:
        ranks = world.rank, world.size
        windows = run_collectively(world, lambda: take_windows(known[READ], request, ranks))
        log.info("%s", windows.text.found)
        return windows
    part = Part(
        rank=world.rank,
        size=world.size,
        here=topology.host_size,
        threads=decoding_threads(topology.core_sharers, request.workers, topology.host_size),
        known=known,
    )
    dataset = run_collectively_while(world, lambda: load_alike(request, part), heartbeat)
    totals = dataset.train_total, dataset.test_total, dataset.num_classes, dataset.image_size
    # Ranks with other numbers of steps would wait for each other for ever.
    require_same(
        world,
        f"the numbers, order, names, labels or sizes of the images of {request.dataset}",
        repr((totals, dataset.digest)),
    )
    if world.rank == 0 and dataset.left_out:
        left_out = f"left out: {dataset.left_out}"
        log.warning("%s", "; ".join(filter(None, [dataset.found, left_out])))
    elif dataset.found:
        log.info("%s", dataset.found)
    if dataset.num_classes == 1:
        message = f"all images of {request.dataset} are of one class, so there is nothing to learn"
        raise UserError(f"{message}: correct --data-dir or the data set", UNREADABLE)
    return dataset


def measure_colours(
    topology: Topology, dataset: Dataset, heartbeat: Heartbeat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and the deviation of the colours of all ranks' images, float32 [3].

    Raises UserError on every rank where one can't be read. Collective on `world`.
    """

    def measure() -> torch.Tensor:
        moments = channel_moments(dataset.train, MEASURED_IMAGES)
        if dataset.reader is not None:
            dataset.reader.raise_error()
        return moments

    moments = run_collectively_while(topology.world, measure, heartbeat).numpy()
    sum_alike_(topology.world, moments)
    return normalisation(torch.from_numpy(moments))


# --------------------------------------------------------------------------------------------------
# Model and problem
# --------------------------------------------------------------------------------------------------


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
    if settings.compile:
        run_collectively(topology.world, lambda: _try_compiler(device))
    loss, guess = run_collectively(
        topology.world, lambda: find_losses(settings, dataset.num_classes, device)
    )
    model.to(device)
    # The seed gives all ranks the same weights, but not where rank 0 has read others, nor where
    # software or processors are too different.
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
        dataset.context,
        device,
        stop=dataset.stop,
        batch_size=settings.batch_size,
        seed=settings.seed,
        rank=topology.world.rank,
        ranks=topology.world_size,
    )
    batches = partial(window_batches, device=device, vocabulary=dataset.num_classes)
    task, none = next_token(dataset.context, dataset.text.bytes_per_token), torch.empty(0)
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
    look = ImageFormat(mean, std, *where, settings.channels_last)
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
