"""Where the runs of a comparison take place, and what is refused before the first of them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.comm.agreement import broadcast_text, together
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.course import steps_of, total_steps
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.core.problem import make_groups, make_model
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.models.layout import build_layout
from prunex_mpi.research.compare import kept_runs as store
from prunex_mpi.research.compare.compare_options import Options, refuse_unequal
from prunex_mpi.research.compare.outcomes import Outcome
from prunex_mpi.research.compare.rows import Row, settings_of
from prunex_mpi.run.facts import recorded_versions
from prunex_mpi.settings.fields import Settings


@dataclass(frozen=True)
class Bench:
    """Where runs take place, and `train`, which does one of them."""

    world: MPI.Comm
    topology: Topology
    options: Options
    train: Callable[..., Outcome]
    device: torch.device
    heartbeat: Heartbeat
    known: Mapping[str, Outcome]

    def load(self, settings: Settings) -> Dataset:
        """Load this rank's data. Collective on `world`."""
        self.heartbeat.enter("data")
        return load_dataset(self.topology, settings, self.heartbeat, self.device)


def images_of(world: MPI.Comm, dataset: Dataset) -> str:
    """Return what tells other images apart: their names or labels, and the first of them to test.

    That is the same one for any seed and any number of ranks and of images to test. Collective on
    `world`.
    """
    first = hashlib.blake2b(dataset.test.images[:1].numpy().tobytes(), digest_size=8).hexdigest()
    return broadcast_text(world, f"{dataset.digest} {first}".strip())


def run_row(
    bench: Bench,
    row: Row,
    seed: int,
    rates: Mapping[str, float | None],
    dataset: Dataset,
    share: Fraction = Fraction(1),
    equal: str = "",
) -> Outcome:
    """Train a row with one seed at its learning rate, or a share of it as far as `equal` goes.

    Collective on `world`.
    """
    options = bench.options
    if row.name in rates and rates[row.name] is None:
        lr = settings_of(options.common, row, seed).lr
        return Outcome(row.name, seed, lr, None, "diverged at every learning rate of the search")
    length = options.length * share
    settings = settings_of(options.common, row, seed, rates.get(row.name), length)
    return train(bench, row, settings, dataset, store.run_name(row, seed, equal))


def train(
    bench: Bench, row: Row, settings: Settings, dataset: Dataset, name: str, keep: bool = True
) -> Outcome:
    """Train, unless it has been done and kept under `name`. Collective on `world`."""
    folder = bench.options.folder
    path = Path(folder) / name if folder and keep else None
    run = partial(bench.train, settings, dataset, row=row.name, path=path)
    place = {
        "ranks on nodes": " ".join(map(str, bench.topology.node_sizes)),
        "versions": ", ".join(f"{key} {value}" for key, value in recorded_versions().items()),
        "data": f"{dataset.train_total} and {dataset.test_total} images {dataset.digest}".strip(),
    }
    return store.kept(bench.world, folder, name, settings, place, run, bench.known.get(name))


def refuse_impossible(bench: Bench, rows: Sequence[Row], dataset: Dataset) -> None:
    """Raise UserError for a row whose network or groups can't be, before any has been trained.

    Collective on `world`.
    """
    options = bench.options

    def build() -> None:
        for row in rows:
            settings = settings_of(options.common, row, options.seeds[0], length=options.length)
            try:
                model = make_model(settings, dataset.num_classes, dataset.image_size)
                make_groups(settings, model, build_layout(model), dataset.image_size)
            except UserError as error:
                raise UserError(f"row {row.name}: {error}", error.exit_code) from None

    together(bench.world, build)


def refuse_unequal_work(bench: Bench) -> None:
    """Raise UserError where rows with steps by --local-epochs train less long than others.

    How many whole steps that makes is known with the data alone. Collective on `world`.
    """
    options = bench.options
    found = {
        row.name: settings_of(options.common, row, options.seeds[0], length=options.length)
        for row in options.rows
    }
    known = (s.local_steps > 0 and not s.frozen_local_steps for s in found.values())
    if len(found) == 1 or all(known):
        return
    images = len(bench.load(next(iter(found.values()))).train.labels)

    def check() -> None:
        trained = {}
        for name, settings in found.items():
            batch = min(settings.batch_size, images)
            steps = steps_of(settings, max(1, images // batch))
            trained[name] = total_steps(settings, steps) * batch
        refuse_unequal(trained)

    together(bench.world, check)
