"""Measure what comes from disks and goes to them: images while training, and checkpoints.

Decoding is timed beside torch's DataLoader, and by how much training waits for it; a checkpoint
beside dd with the same bytes on the same disk.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.tables import Table
from prunex_mpi.base.units import MIB
from prunex_mpi.comm.agreement import broadcast_text, run_collectively
from prunex_mpi.config.resolve import with_overrides
from prunex_mpi.core.state import momentum_of
from prunex_mpi.data import user_datasets
from prunex_mpi.data.datasets import Dataset, load
from prunex_mpi.data.decoding import MOST_DECODING, PREFETCHED, Access, Reader, Streamed, in_turn
from prunex_mpi.data.images import as_uint8
from prunex_mpi.research.bench.workbench import Bench
from prunex_mpi.run import checkpoint, checkpoint_files
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.start import set_up
from prunex_mpi.settings.fields import Settings
from prunex_mpi.tools.timing import Action, wall_times

AIM_PERCENT = 2.0
# Of a turn of decoding, and of an outer iteration of training.
BATCHES = 32
# Of training, after a first one that is not counted.
MEASURED = 3
AIM_TIMES_DD = 1.5
CHECKPOINT_IMAGE_SIZE = 8


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
            self.data = user_datasets.make(self.name, self.data_dir, train=True)
        index, title = self.places[number], user_datasets.split_name(self.name, train=True)
        return user_datasets.decode(self.data, index, self.side, fit=self.fit, name=title)[0]


def data(bench: Bench) -> list[Table]:
    """Return images per second of both, and the share of the time that training waits.

    The settings name an image folder or a data set of the user's. In a job of one rank.
    """
    settings = bench.settings
    cores = len(os.sched_getaffinity(0))
    workers = sorted({1, 2, min(cores, MOST_DECODING)})
    rates = decoding(bench, workers)
    first = Table(
        f"Decoding {place_of(settings)}: images per second, batches of {settings.batch_size}",
        ("workers", "threads of a stream", "torch's DataLoader", "times"),
        tuple((count, *rates[count], rates[count][0] / rates[count][1]) for count in workers),
        (
            f"{cores} cores; {BATCHES} batches in a turn, best of {bench.repeat}, in turns; the "
            "same files, the same decoding to uint8, nothing else",
            f"DataLoader: processes, {PREFETCHED} batches ahead of each",
        ),
    )
    rows = [training(bench, name) for name in bench.models]
    second = Table(
        f"Training while images are decoded: batches of {settings.batch_size} on {bench.device}",
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


def decoding(bench: Bench, workers: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return images per second of a stream and of torch's DataLoader by number of workers.

    Raises UserError where images are too few or can't be read.
    """
    settings = bench.settings
    dataset = find_images(settings)
    files, size = dataset.train.images.files, settings.batch_size
    places = dataset.train.images.places[: BATCHES * size]
    if ":" in settings.dataset:
        pictures = Items(settings, places.tolist(), files.side)
    else:
        paths = [files.name(index) for index in places.tolist()]
        pictures = Pictures(paths, files.side, settings.image_size > 0)
    found = {}
    for count in workers:
        reader = Reader(Access(workers=count))
        # Forked processes would hold MPI's memory.
        loader = DataLoader(
            pictures,
            size,
            num_workers=count,
            prefetch_factor=PREFETCHED,
            persistent_workers=True,
            multiprocessing_context="spawn",
        )
        ways = {
            "stream": Action(_passing(Streamed(files, places, reader), size)),
            "loader": Action(lambda loader=loader: sum(len(batch) for batch in loader)),
        }
        with closing(reader):
            times = wall_times(ways, bench.repeat, torch.device("cpu"), bench.heartbeat)
        rates = (len(places) / float(min(times[way])) for way in ("stream", "loader"))
        found[count] = tuple(rates)
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


def training(bench: Bench, name: str) -> tuple[str, float, float, float, float]:
    """Return a row: images per second from memory and from a stream, and how much it waits."""
    rates, waits = [], 0.0
    size = bench.settings.batch_size
    for mode in ("memory", "stream"):
        records = bench.run_training(
            model=name,
            data_mode=mode,
            train_samples=BATCHES * size,
            test_samples=size,
            outer_iterations=1 + MEASURED,
            local_steps=BATCHES,
            evaluate_every=1 + MEASURED,
            warmup_iterations=0,
            keep_ramp_iterations=0,
            freeze_iteration=0,
            freeze_drift=-1.0,
        )[1:]
        seconds = [record["seconds"]["local"] for record in records]
        rates.append(BATCHES * size / min(seconds))
        waits = 100 * sum(record["data_wait_seconds"] for record in records) / sum(seconds)
    return name, rates[0], rates[1], waits, AIM_PERCENT


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


def checkpoints(bench: Bench) -> list[Table]:
    """Write and read checkpoints of a fresh run in `bench.folder`. Collective on `world`."""
    topology, world = bench.topology, bench.topology.world
    made = run_collectively(world, lambda: "" if world.rank else make_folder(bench.folder))
    path = Path(broadcast_text(world, made))
    files = RunDirectory(path, "bench") if world.rank == 0 else None
    settings = with_overrides(
        bench.settings,
        dataset="synthetic",
        image_size=CHECKPOINT_IMAGE_SIZE,
        train_samples=bench.settings.batch_size * world.size,
        test_samples=world.size,
    )
    context = set_up(topology, settings, bench.device, bench.transport, bench.heartbeat)
    state = context.state
    # No disk shall gain from zeros; ranks of a node hold the same, as they do with node-sync step.
    torch.manual_seed(topology.node_index)
    for flat in (state.u, state.v, momentum_of(state.optimizer, state.theta)):
        flat.normal_()

    def save() -> None:
        checkpoint.save(topology, files, context)

    def read() -> None:
        checkpoint.restore(topology, files, context)

    def settle() -> None:
        if files is not None:
            files.finish_removals()
        world.Barrier()

    def copy_with_dd() -> None:
        # Each rank its own file, as in a checkpoint, from memory through to the disk.
        command = ["dd", f"if={source}", f"of={copy}", "bs=1M", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        world.Barrier()

    def forget_copy() -> None:
        copy.unlink(missing_ok=True)
        settle()

    save()
    size = np.zeros(1, dtype=np.int64)
    newest = broadcast_text(world, checkpoint_files.valid_names(path)[0] if files else "")
    written = checkpoint_files.rank_file(path / "checkpoints" / newest, world.rank)
    # Checkpoints come and go; what dd reads stays, in the page cache.
    source, copy = (path / f"{word}-{world.rank}" for word in ("source", "copy"))
    shutil.copyfile(written, source)
    world.Allreduce(np.array([source.stat().st_size]), size, op=MPI.SUM)
    # Reading apart: in turns of three, dd alone would follow an action that has just freed as many
    # pages as it takes, which a virtual machine takes again at a third of the cost of others.
    writing = {"write": Action(save, settle), "dd": Action(copy_with_dd, forget_copy)}
    seconds = bench.best(writing) | bench.best({"read": Action(read, settle)})
    world.Barrier()
    if files is not None:
        files.close()
        shutil.rmtree(path)
    row = (
        settings.model,
        size[0] / MIB,
        1e3 * seconds["write"],
        1e3 * seconds["dd"],
        seconds["write"] / seconds["dd"],
        AIM_TIMES_DD,
        1e3 * seconds["read"],
    )
    return [
        Table(
            f"Checkpoints of {world.size} ranks on {topology.num_nodes} nodes, before the freeze",
            ("model", "MiB in all", "write ms", "dd ms", "times dd", "aim", "read ms"),
            (row,),
            (
                f"minimum of {bench.repeat}; dd copies the same bytes with conv=fsync on each rank",
                "a thread removes old checkpoints while training goes on: not in these times",
            ),
        )
    ]


def make_folder(folder: str) -> str:
    """Return a new folder in `folder`; raise UserError where there can't be one."""
    try:
        return tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder)
    except OSError as error:
        raise UserError(f"--dir {folder}: {error.strerror}; choose another") from None
