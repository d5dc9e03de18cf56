"""Measure how fast images are decoded while training, beside torch's DataLoader, and who waits."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.tables import Table
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology
from prunex_mpi.data import own
from prunex_mpi.data.datasets import Dataset, load
from prunex_mpi.data.pictures import as_uint8
from prunex_mpi.data.reading import MOST_DECODING, Access, Reader
from prunex_mpi.data.streamed import AHEAD, Streamed, in_turn
from prunex_mpi.methods import hsadmm
from prunex_mpi.run.assembly import set_up
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.resolve import with_overrides
from prunex_mpi.tools.timing import Action, wall_times

AIM_PERCENT = 2.0
# Of a turn of decoding, and of an outer iteration of training.
BATCHES = 32
# Of training, after a first one that is not counted.
MEASURED = 3


class Pictures:
    """The same files with the same decoding, as torch's DataLoader takes them."""

    def __init__(self, paths: Sequence[str], side: int, fit: bool) -> None:
        self.paths, self.side, self.fit = list(paths), side, fit

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return as_uint8(self.paths[index], self.side, fit=self.fit)


class Items:
    """The training images of a data set of the user's, made anew in each process."""

    def __init__(self, settings: Settings, places: Sequence[int], side: int) -> None:
        self.name, self.data_dir = settings.dataset, settings.data_dir
        self.side, self.fit = side, settings.image_size > 0
        self.places, self.data = list(places), None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> Tensor:
        if self.data is None:
            self.data = own.make(self.name, self.data_dir, train=True)
        index, title = self.places[number], own.name_of(self.name, train=True)
        return own.decode(self.data, index, self.side, fit=self.fit, name=title)[0]


def data(
    alone: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    models: tuple[str, ...],
    repeat: int,
    heartbeat: Heartbeat,
) -> list[Table]:
    """Return images per second of both, and the share of the time that training waits.

    `settings` name an image folder or a data set of the user's. `alone` is the topology of a job
    of one rank.
    """
    cores = len(os.sched_getaffinity(0))
    workers = sorted({1, 2, min(cores, MOST_DECODING)})
    rates = decoding(settings, workers, repeat, heartbeat)
    first = Table(
        f"Decoding {place_of(settings)}: images per second, batches of {settings.batch_size}",
        ("workers", "threads of a stream", "torch's DataLoader", "times"),
        tuple((count, *rates[count], rates[count][0] / rates[count][1]) for count in workers),
        (
            f"{cores} cores; {BATCHES} batches in a turn, best of {repeat}, in turns; the same "
            "files, the same decoding to uint8, nothing else",
            f"DataLoader: processes, {AHEAD} batches ahead of each",
        ),
    )
    rows = [training(alone, settings, transport, device, name, heartbeat) for name in models]
    second = Table(
        f"Training while images are decoded: batches of {settings.batch_size} on {device}",
        ("model", "images/s from memory", "images/s from a stream", "waits %", "aim %"),
        tuple(rows),
        (
            f"phase 1 of one rank, {torch.get_num_threads()} threads compute and "
            f"{min(cores, MOST_DECODING)} decode; the fastest of {MEASURED} x {BATCHES} steps, and "
            "the waiting of all of them",
            "where all cores compute, decoding takes time from them and is not waited for",
        ),
    )
    return [first, second]


def place_of(settings: Settings) -> str:
    """Return what messages call the place that images come from."""
    return settings.dataset if ":" in settings.dataset else settings.data_dir


def find_images(settings: Settings) -> Dataset:
    """Return the folder's images, not decoded; raise UserError where they are too few."""
    dataset = load(
        settings.dataset,
        data_dir=settings.data_dir,
        access=Access(mode="stream"),
        train_samples=0,
        test_samples=0,
        image_size=settings.image_size,
        seed=0,
        part=(0, 1),
    )
    size = settings.batch_size
    halves = (("train", dataset.train_total, BATCHES), ("test", dataset.test_total, 1))
    for half, count, batches in halves:
        if count < batches * size:
            raise UserError(
                f"data takes {batches * size} {half} images, {batches} x --batch-size, of "
                f"{place_of(settings)}, which has {count}; lower --batch-size or give more images"
            )
    return dataset


def decoding(
    settings: Settings, workers: Sequence[int], repeat: int, heartbeat: Heartbeat
) -> dict[int, tuple[float, float]]:
    """Return images per second of a stream and of torch's DataLoader by number of workers.

    Raises UserError where images are too few or can't be read.
    """
    dataset = find_images(settings)
    files, size = dataset.train.images.files, settings.batch_size
    places = dataset.train.images.places[: BATCHES * size]
    if ":" in settings.dataset:
        pictures = Items(settings, places.tolist(), files.side)
    else:
        paths = [files.path(index) for index in places.tolist()]
        pictures = Pictures(paths, files.side, settings.image_size > 0)
    found = {}
    for count in workers:
        reader = Reader(Access(workers=count))
        # Forked processes would hold MPI's memory.
        loader = DataLoader(
            pictures,
            size,
            num_workers=count,
            prefetch_factor=AHEAD,
            persistent_workers=True,
            multiprocessing_context="spawn",
        )
        ways = {
            "stream": Action(_passing(Streamed(files, places, reader), size)),
            "loader": Action(lambda loader=loader: sum(len(batch) for batch in loader)),
        }
        with closing(reader):
            times = wall_times(ways, repeat, torch.device("cpu"), heartbeat)
        found[count] = (len(places) / min(times["stream"]), len(places) / min(times["loader"]))
    return found


def _passing(images: Streamed, size: int) -> Callable[[], int]:
    """Return what decodes all images once, and raises what can't be read."""
    parts = [slice(start, start + size) for start in range(0, len(images.places), size)]

    def decode() -> int:
        count = sum(len(batch) for batch in in_turn(images, parts))
        # A black image takes no time.
        images.reader.raise_error()
        return count

    return decode


def training(
    alone: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    name: str,
    heartbeat: Heartbeat,
) -> tuple[str, float, float, float, float]:
    """Return a row: images per second from memory and from a stream, and how much it waits."""
    rates, waits = [], 0.0
    for mode in ("memory", "stream"):
        records = _train(alone, settings, transport, device, name, mode, heartbeat)
        seconds = [record["seconds"]["local"] for record in records]
        rates.append(BATCHES * settings.batch_size / min(seconds))
        waits = 100 * sum(record["data_wait_seconds"] for record in records) / sum(seconds)
    return name, rates[0], rates[1], waits, AIM_PERCENT


def _train(
    alone: Topology,
    settings: Settings,
    transport: Transport,
    device: torch.device,
    name: str,
    mode: str,
    heartbeat: Heartbeat,
) -> list[dict[str, Any]]:
    """Return the metrics of a few outer iterations, without the first."""
    settings = with_overrides(
        settings,
        model=name,
        data_mode=mode,
        train_samples=BATCHES * settings.batch_size,
        test_samples=settings.batch_size,
        outer_iterations=1 + MEASURED,
        local_steps=BATCHES,
        evaluate_every=1 + MEASURED,
        # No test of accuracy here: a small rate keeps any model finite.
        lr=1e-3,
        warmup_iterations=0,
        keep_ramp_iterations=0,
        freeze_iteration=0,
        freeze_drift=-1.0,
    )
    work = set_up(alone, settings, device, transport, heartbeat)
    return list(hsadmm.outer_iterations(alone, work))[1:]
