"""Find, load and measure a data set together: each rank its share of the images.

A text is read once per machine, and each rank gets its windows of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.comm.agreement import (
    broadcast_json,
    count_same,
    require_same,
    run_collectively,
    run_collectively_while,
    sum_alike_,
)
from prunex_mpi.comm.topology import Topology
from prunex_mpi.data.batches import channel_moments, normalisation
from prunex_mpi.data.datasets import Dataset, Part, load
from prunex_mpi.data.decoding import Access, decoding_threads
from prunex_mpi.data.image_files import BOTH, CONTENTS, TEST, TRAIN, Known, read_share
from prunex_mpi.data.text import TextSet, take_windows
from prunex_mpi.data.text_files import BYTES, Text, Tokenizer, forget, map_text, prepare
from prunex_mpi.diagnosis.facts import gpu_identity
from prunex_mpi.models.inputs import Images, Inputs, Tokens, inputs_from
from prunex_mpi.settings.fields import TEXT, Settings

CPU = torch.device("cpu")
# By which what has been read of a text goes by among what ranks know of a data set.
READ = "text"
# Of each rank, for mean and deviation of the colours, which they give to about 0.001.
MEASURED_IMAGES = 16384
# Classes and side of the images of data sets that are always the same.
SIZES = {"digits": (10, 8), "cifar10": (10, 32), "cifar100": (100, 32)}


def parts_read(settings: Settings) -> Sequence[str]:
    """Return the parts of a data set that a run opens."""
    return BOTH if settings.test_data else (TRAIN,)


def share_contents(
    world: MPI.Comm,
    name: str,
    data_dir: str,
    heartbeat: Heartbeat,
    tokenizer: str = BYTES,
    parts: Sequence[str] = BOTH,
) -> Known:
    """Return what lies in all class folders or tar files of a data set; each rank reads a share.

    `parts` says whether of what is to train on, to test on or both. Text is cut into tokens by
    `tokenizer`; {} for a data set of another kind. Raises UserError (UNREADABLE) everywhere for
    what one can't read. Collective on `world`.
    """
    if name == TEXT:
        return share_text(world, data_dir, tokenizer, heartbeat, with_test=TEST in parts)
    if name not in CONTENTS:
        return {}

    def read() -> Known:
        found = {}
        for path, contents in read_share(name, data_dir, world.rank, world.size, parts):
            found[path] = contents
            # A folder is listed without a byte that the system counts as read.
            heartbeat.go_on()
        return found

    mine = run_collectively_while(
        world,
        read,
        heartbeat,
    )
    found = {}
    for root in range(world.size):
        found |= broadcast_json(world, mine, root)
        heartbeat.go_on()
    return found


def share_text(
    world: MPI.Comm,
    data_dir: str,
    tokenizer: str,
    heartbeat: Heartbeat,
    known: Tokenizer | None = None,
    with_test: bool = True,
) -> Mapping[str, Any]:
    """Return {READ: the text}, read and cut into tokens by the first rank of each machine alone.

    With chars its vocabulary may be `known`. Files to test on are opened only `with_test`. Raises
    UserError (UNREADABLE) on every rank where one can't read it. Collective on `world`.
    """
    host = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    facts = None

    def read() -> dict[str, Any] | None:
        nonlocal facts
        if host.rank == 0:
            facts = asdict(prepare(data_dir, tokenizer, known, with_test))
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
    return {READ: text}


def load_text(world: MPI.Comm, settings: Settings, known: Mapping[str, Any]) -> TextSet:
    """Return this rank's windows of a `known` text; raise alike. Collective on `world`."""
    text: Text = known[READ]
    tested = settings.test_samples if settings.test_data else None
    windows = run_collectively(
        world,
        lambda: take_windows(
            text,
            settings.context,
            samples=(settings.train_samples, tested),
            val_split=settings.val_split,
            part=(world.rank, world.size),
        ),
    )
    log.info("%s", text.found)
    return windows


def find_inputs(settings: Settings, known: Known) -> Inputs:
    """Return what a network has to read and make, from one image of each half.

    `known` is what ranks have read of the data set already. Raises UserError (UNREADABLE).
    """
    if settings.dataset == TEXT:
        return Tokens(known[READ].tokenizer.size, settings.context)
    if settings.dataset in SIZES:
        classes, side = SIZES[settings.dataset]
        return Images(settings.image_size or side, classes)
    data = load(
        settings.dataset,
        data_dir=settings.data_dir,
        access=Access(skip_corrupt=settings.skip_corrupt),
        train_samples=1,
        test_samples=1 if settings.test_data else None,
        image_size=settings.image_size,
        seed=settings.seed,
        part=Part(0, 1, known=known),
    )
    try:
        return inputs_from(data.sizes())
    except ValueError as error:
        raise UserError(f"the images of {settings.dataset} can't be: {error}", UNREADABLE) from None


def load_dataset(
    topology: Topology,
    settings: Settings,
    heartbeat: Heartbeat | None = None,
    device: torch.device = CPU,
    known: Known | None = None,
) -> Dataset | TextSet:
    """Load this rank's shards, on the CPU; what any rank cannot read ends the job.

    Their training images will be on `device` as well; `known` is what `share_contents` has
    returned. Raises UserError (UNREADABLE) where all are of one class. Collective on `world`.
    """
    heartbeat = heartbeat or Heartbeat()
    world = topology.world
    if known is None:
        where = settings.dataset, settings.data_dir
        known = share_contents(world, *where, heartbeat, settings.tokenizer, parts_read(settings))
    if settings.dataset == TEXT:
        return load_text(world, settings, known)
    room = free_room(topology, device)
    dataset = run_collectively_while(
        world,
        lambda: load(
            settings.dataset,
            data_dir=settings.data_dir,
            access=Access(
                settings.download,
                settings.data_mode,
                decoding_threads(topology.core_sharers, settings.workers, topology.host_size),
                settings.skip_corrupt,
            ),
            train_samples=settings.train_samples,
            test_samples=settings.test_samples if settings.test_data else None,
            image_size=settings.image_size,
            seed=settings.seed,
            part=Part(
                rank=world.rank,
                size=world.size,
                here=topology.host_size,
                val_split=settings.val_split,
                room=room,
                known=known,
            ),
        ),
        heartbeat,
    )
    totals = dataset.train_total, dataset.test_total, dataset.num_classes, dataset.image_size
    # Ranks with other numbers of steps would wait for each other for ever.
    require_same(
        world,
        f"the numbers, order, names, labels or sizes of the images of {settings.dataset}",
        repr((totals, dataset.digest)),
    )
    if world.rank == 0 and dataset.left_out:
        left_out = f"left out: {dataset.left_out}"
        log.warning("%s", "; ".join(filter(None, [dataset.found, left_out])))
    elif dataset.found:
        log.info("%s", dataset.found)
    if dataset.num_classes == 1:
        message = f"all images of {settings.dataset} are of one class, so there is nothing to learn"
        raise UserError(f"{message}: correct --data-dir or the data set", UNREADABLE)
    return dataset


def free_room(topology: Topology, device: torch.device) -> int | None:
    """Return the bytes that each rank has free on its GPU, the least of all; None on a CPU.

    Ranks that share a GPU share what is free. Collective on `world`.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # What torch has taken and does not use is free as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sharers = count_same(topology.world, gpu_identity(device))
    least = np.array([free // sharers], dtype=np.int64)
    topology.world.Allreduce(MPI.IN_PLACE, least, op=MPI.MIN)
    return int(least[0])


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
