"""The data of a comparison, loaded once before any run: what they are, and what can't be."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpi4py import MPI

from prunex_mpi.base.errors import UNREADABLE, UserError, quote
from prunex_mpi.base.files import telling_disk_errors, write_json_durably
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text, run_collectively, run_on_first
from prunex_mpi.core.grouping import make_groups
from prunex_mpi.core.schedule import steps_with, total_steps
from prunex_mpi.data.batches import Look, Shard, evaluation_batches
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.text import TextSet, pairs
from prunex_mpi.diagnosis.facts import recorded_versions
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.compare.compare_options import Options, check_equal_length
from prunex_mpi.run.loading import CPU, load_dataset
from prunex_mpi.run.problem import make_model
from prunex_mpi.run.start import Place
from prunex_mpi.settings.fields import Settings

FORWARD_BATCH = 32
# So many images held out tell data of the same names apart.
FIRST_IMAGES = 16
# In the folder of the runs: what they have in common.
COMPARISON = "comparison.json"


@dataclass(frozen=True)
class Data:
    """What a comparison knows of its data, and a batch of them to time networks on.

    `first` is a digest of the first images held out, "" for a text. `sample` are uint8 images or
    rows of tokens of this rank's part to train on. The networks are timed on `device`.
    """

    train_total: int
    val_total: int
    classes: int
    sizes: Mapping[str, int]
    digest: str
    first: str
    sample: Tensor
    device: torch.device

    @property
    def told(self) -> str:
        """What tells other data apart."""
        return " ".join(filter(None, (self.digest, self.first)))

    def batch(self, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sample as a network reads it, on the CPU."""
        if "context" in self.sizes:
            return pairs(self.sample.numpy(), CPU)[0]
        shard = Shard(self.sample, torch.zeros(len(self.sample), dtype=torch.int64))
        look = Look(mean, std, CPU, dtype)
        return next(evaluation_batches(shard, batch_size=len(self.sample), look=look))[0]


def look_at_data(place: Place, options: Options, heartbeat: Heartbeat) -> Data:
    """Load the data, without those to test on, and refuse rows that can't be trained on them.

    Raises UserError on every rank. Collective on `world`.
    """
    topology, world = place.topology, place.topology.world
    heartbeat.enter("data")
    first = options.first_settings(options.rows[0])
    with closing(load_dataset(topology, first, heartbeat)) as dataset:
        run_collectively(world, lambda: check_rows(options, dataset))
        held_out, sample = run_collectively(world, lambda: look(dataset))
        return Data(
            train_total=dataset.train_total,
            val_total=dataset.val_total,
            classes=dataset.num_classes,
            sizes=dataset.sizes(),
            digest=dataset.digest,
            first=broadcast_text(world, held_out),
            sample=sample,
            device=place.device,
        )


def look(dataset: Dataset | TextSet) -> tuple[str, Tensor]:
    """Return a digest of the first data held out, "" of text, and some that are trained on."""
    if isinstance(dataset, TextSet):
        train = dataset.train.part(slice(FORWARD_BATCH))
        return "", torch.from_numpy(train.tokens.rows(train.starts, train.context + 1))
    held_out = digest_of_images(dataset.val, FIRST_IMAGES)
    sample = dataset.train.images[:FORWARD_BATCH].clone()
    if dataset.reader is not None:
        dataset.reader.raise_error()
    return held_out, sample


def digest_of_images(shard: Shard, count: int) -> str:
    """Return what tells the first `count` images of a shard from others."""
    return hashlib.blake2b(shard.images[:count].numpy().tobytes(), digest_size=8).hexdigest()


def check_rows(options: Options, dataset: Dataset | TextSet) -> None:
    """Raise UserError for rows whose network can't be, or that are trained less long than others.

    How many whole steps epochs make is known with the data alone.
    """
    inputs = inputs_from(dataset.sizes())
    samples: dict[str, list[int]] = {}
    size = len(dataset.train) if isinstance(dataset, TextSet) else len(dataset.train.labels)

    def samples_of(settings: Settings) -> int:
        return total_steps(settings, steps_with(settings, size)) * min(settings.batch_size, size)

    for row in options.rows:
        settings = options.first_settings(row)
        points = [options.settings_at(row, point) for point in row.points]
        samples[row.name] = list(map(samples_of, points))
        try:
            model = make_model(settings, inputs)
            make_groups(settings, model, build_layout(model), inputs)
        except UserError as error:
            raise UserError(f"row {row.name}: {error}", error.exit_code) from None
    check_equal_length(options.rows, samples)


def check_place(world: MPI.Comm, options: Options, place: Place, data: Data, buffers: str) -> None:
    """Raise UserError where runs in the folder were trained elsewhere, or on other data.

    Collective on `world`.
    """
    machine = place.describe()["machine"] if world.rank == 0 else ""
    here = {
        "machine": machine,
        "ranks on nodes": " ".join(map(str, place.topology.node_sizes)),
        "MPI buffers": buffers,
        "versions": ", ".join(f"{key} {value}" for key, value in recorded_versions().items()),
        "data": f"{data.train_total} and {data.val_total} images {data.digest}".strip(),
        "sizes of the data": " ".join(f"{key} {value}" for key, value in data.sizes.items()),
        "images held out": data.first,
    }
    file = Path(options.folder) / COMPARISON

    def check() -> None:
        try:
            before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            differing = [key for key, value in before.items() if value != here.get(key)]
        except (OSError, ValueError, AttributeError):
            raise UserError(f"{file} can't be read; choose another --dir", UNREADABLE) from None
        for key in differing:
            raise UserError(
                f"--dir {quote(options.folder, 250)} is of runs with other {key} "
                f"({quote(str(before[key]), 250)}; here {quote(str(here.get(key)), 250)}); choose "
                "another"
            )
        telling_disk_errors(COMPARISON, lambda: write_json_durably(file, here))

    run_on_first(world, check)
