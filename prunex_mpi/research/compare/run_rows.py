"""The runs of a comparison: each trains as one by itself does, is kept, and is measured."""

import copy
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpi4py import MPI

from prunex_mpi.base.errors import Diverged, UserError
from prunex_mpi.base.files import telling_disk_errors
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log
from prunex_mpi.base.record_keys import CONSENSUS_PHASES
from prunex_mpi.comm.agreement import (
    broadcast_text,
    run_collectively,
    run_collectively_while,
    run_on_first,
)
from prunex_mpi.comm.async_exchange import exchanging_behind
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.topology import Topology, nodes_of
from prunex_mpi.config.resolve import FIELDS, to_toml
from prunex_mpi.core.evaluation import Judged, delivered
from prunex_mpi.core.grouping import make_groups
from prunex_mpi.core.loading import load_dataset
from prunex_mpi.core.problem import make_model
from prunex_mpi.core.schedule import pruning_ends, steps_with, total_steps
from prunex_mpi.core.state import RunContext, State, every_rank_sends, weights
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.data.text import TextSet
from prunex_mpi.diagnosis.facts import recorded_versions
from prunex_mpi.diagnosis.machine import describe_machine
from prunex_mpi.methods.exchanges import metadata_bytes, operations_of
from prunex_mpi.models.inputs import inputs_from
from prunex_mpi.models.layout import Layout, build_layout
from prunex_mpi.pruning.masks import apply_factors_, build_factors
from prunex_mpi.research.compare import kept_runs
from prunex_mpi.research.compare.compare_options import (
    Options,
    check_equal_length,
    has_known_length,
)
from prunex_mpi.research.compare.outcomes import Measured, Outcome, Point, Quality
from prunex_mpi.research.compare.plan import Row, digest_of, name_seed, settings_of
from prunex_mpi.run import delivery
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.start import assemble, log_warnings
from prunex_mpi.run.summary import add_up
from prunex_mpi.run.supervision import check_exchange, goes_behind_steps, progress_of, recorded
from prunex_mpi.settings.fields import Settings, key_of
from prunex_mpi.settings.values import left_open
from prunex_mpi.tools.export_run import smaller
from prunex_mpi.tools.timing import Action, wall_times

FORWARD_BATCH = 32
FORWARD_TURNS = 15
# So many images held out tell data of the same names apart.
FIRST_IMAGES = 16


@dataclass(frozen=True)
class Bench:
    """Where the runs of a comparison take place."""

    topology: Topology
    options: Options
    device: torch.device
    transport: Transport
    heartbeat: Heartbeat
    # Where test images were looked at nothing is trained any more.
    revealed: bool = False

    @property
    def buffers(self) -> str:
        """What MPI is handed: buffers on the host or on the device."""
        staged = self.device.type == "cpu" or self.transport.staging is not None
        return "host" if staged else "device"

    def load(self, settings: Settings) -> Dataset:
        """Load this rank's data, and nothing of the test images. Collective on `world`."""
        self.heartbeat.enter("data")
        return load_dataset(self.topology, settings, self.heartbeat, self.device, with_test=False)


def run_row(
    bench: Bench, row: Row, seed: int, point: Mapping[str, Any], dataset: Dataset
) -> Outcome:
    """Train a row with one seed at a point of its grid. Collective on `world`."""
    options = bench.options
    settings = settings_of(options.common, row, seed, point, options.length)
    return train(bench, row, settings, point, dataset, kept_runs.run_name(row, seed))


def run_trial(bench: Bench, row: Row, number: int, dataset: Dataset) -> Outcome:
    """Train a row at point `number` of its grid as far as trials go. Collective on `world`."""
    options, point = bench.options, row.points[number]
    seed, length = options.protocol.tune_seed, options.tuning_length
    settings = settings_of(options.common, row, seed, point, length)
    name = kept_runs.trial_name(row, number)
    return train(bench, row, settings, point, dataset, name, keep=False)


def train(
    bench: Bench,
    row: Row,
    settings: Settings,
    point: Mapping[str, Any],
    dataset: Dataset,
    name: str,
    keep: bool = True,
) -> Outcome:
    """Train, unless it has been done and kept under `name`. Collective on `world`.

    A run that fails ends no other one, and is not kept: it is tried again where the comparison
    goes on.
    """
    if not isinstance(dataset, TextSet) and dataset.reader is not None:
        # What a run before could not read has failed that one.
        dataset.reader.error = None
    folder = bench.options.folder
    path = Path(folder) / name if folder and keep else None
    place = place_of(bench, settings, dataset) if folder else {}
    where = bench.topology.world, folder, name, settings, place
    outcome = kept_runs.find_kept(*where, bench.revealed) if folder else None
    if outcome is None:
        told = {key_of(key): told_of(key, value) for key, value in point.items()}
        try:
            outcome = run_one(bench, settings, dataset, row.name, path, keep)
            outcome = replace(outcome, point=told)
        except UserError as error:
            log.warning("%s: %s", name, error)
            nothing = Outcome(row.name, settings.seed, settings.lr, None, f"failed: {error}")
            return replace(nothing, point=told, failed=True)
        if folder:
            kept_runs.keep(*where, outcome)
    return outcome


def place_of(bench: Bench, settings: Settings, dataset: Dataset) -> dict[str, str]:
    """Return what a run has to be alike in to be taken over, beside its settings.

    Collective on `world`.
    """
    world = bench.topology.world

    def weights_of(going: Callable[[], None]) -> dict[str, str]:
        return {} if world.rank else kept_runs.digests_of(name_seed(settings), going)

    return {
        "machine": describe_machine(bench.device),
        "ranks on nodes": " ".join(map(str, bench.topology.node_sizes)),
        "MPI buffers": bench.buffers,
        "versions": ", ".join(f"{key} {value}" for key, value in recorded_versions().items()),
        "data": f"{dataset.train_total} and {dataset.val_total} images {dataset.digest}".strip(),
        "sizes of the data": " ".join(f"{k} {v}" for k, v in dataset.sizes().items()),
        "images held out": first_held_out(world, dataset),
        **run_collectively_while(world, weights_of, bench.heartbeat.go_on),
    }


def first_held_out(world: MPI.Comm, dataset: Dataset | TextSet) -> str:
    """Return a digest of the first images held out, "" for a text, which has one of its own.

    Collective on `world`.
    """

    def look() -> str:
        if world.rank or isinstance(dataset, TextSet):
            return ""
        found = digest_of_images(dataset.val, FIRST_IMAGES)
        if dataset.reader is not None:
            dataset.reader.raise_error()
        return found

    return broadcast_text(world, run_collectively(world, look))


def digest_of_images(shard: Shard, count: int) -> str:
    """Return what tells the first `count` images of a shard from others."""
    return hashlib.blake2b(shard.images[:count].numpy().tobytes(), digest_size=8).hexdigest()


def told_of(name: str, value: object) -> float | str:
    """Return a value of a grid, of the setting `name`, as JSON holds it."""
    if left_open(FIELDS[name], value):
        return "auto"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float) else str(value)


def run_one(
    bench: Bench, settings: Settings, dataset: Dataset, row: str, path: Path | None, timed: bool
) -> Outcome:
    """Train a row as the settings say and return what came of it, with rank 0's times.

    With `path` the run keeps its directory there; with `timed` the passes of the exported network
    are timed, which can take longer than a short trial trains. Collective on `world`.
    """
    topology = bench.topology
    world = topology.world
    # Without leaders every rank is a node of its own.
    flat = settings.method.flat
    nodes = nodes_of(world, 1) if flat else nullcontext(topology)
    name = f"{row}, seed {settings.seed}, learning rate {settings.lr:g}"
    log.info("%s", name)
    digest = digest_of(settings)
    settings = name_seed(settings)
    with nodes as mine, ExitStack() as exits:
        check_exchange(mine, settings)
        context = assemble(mine, settings, dataset, bench.device, bench.transport, bench.heartbeat)
        log_warnings(world, context)
        state, problem, settings = context.state, context.problem, context.settings
        files = None
        if path is not None:
            config = to_toml(replace(settings, run_dir=str(path)), recorded_versions())
            files = run_on_first(world, lambda: RunDirectory(path, config))
        if files is not None:
            exits.enter_context(closing(files))
        started = time.perf_counter()
        try:
            records = drive(mine, files, context)
        except Diverged as error:
            log.info("%s: diverged: %s", name, error)
            if files is not None:
                files.note_divergence(str(error))
            return Outcome(row, settings.seed, settings.lr, None, str(error), digest)
        bench.heartbeat.enter("finish")
        exits.enter_context(delivered(context))
        total_s = time.perf_counter() - started
        times = forward_seconds(mine, dataset, context) if timed else (0.0, 0.0, 0.0)
        sums, (sync_s, own_s, local_s) = add_up(records), split_seconds(records)
        seconds, counted = sums["seconds"], sums["bytes"]
        stream = problem.train
        batches = stream.epoch * stream.steps_per_epoch + stream.position
        of_batch = stream.batch_size * world.size
        steps = state.position.steps_done
        elements, zeros, line_zeros = zeros_of(state)
        best = best_of(context)
        found = Measured(
            accuracy=best.accuracy,
            loss=best.loss,
            samples=steps * of_batch,
            extra_samples=(batches - steps) * of_batch,
            epochs=steps * of_batch * problem.task.row / dataset.train_total,
            steps=steps,
            payload_bytes=counted["payload"] + counted["mask"],
            sent_bytes=counted["sent"],
            metadata_bytes=metadata_bytes(settings, state, counted, len(records)),
            sync_s=sync_s,
            own_s=own_s,
            local_s=local_s,
            train_s=seconds["total"] - seconds["evaluate"],
            parameters=state.whole.layout.numel,
            parameters_left=int(torch.count_nonzero(state.z)),
            weights=elements,
            zeros=zeros,
            line_zeros=line_zeros,
            forward_s=times[0],
            dense_forward_s=times[1],
            forward_spread=times[2],
            speakers=world.size if every_rank_sends(settings) else mine.num_nodes,
            ranks=world.size,
            operations=operations(settings),
            curve=curve_of(records),
            hidden=min(1.0, max(0, settings.overlap_steps) / problem.steps),
        )
        # Last of all: a run that has a summary is not begun anew.
        names = dataset.class_names
        done = partial(finish, files, mine, context, records, total_s, names)
        run_collectively_while(world, done, bench.heartbeat.go_on)
    log.info("%s: %.4g on data held out", name, found.quality.shown)
    return Outcome(row, settings.seed, settings.lr, found, settings=digest)


def drive(
    topology: Topology, files: RunDirectory | None, context: RunContext
) -> list[dict[str, Any]]:
    """Run the driver of the method to its end and return its records. Collective on `world`.

    Raises Diverged on every rank.
    """
    settings = context.settings
    with (
        closing(progress_of(topology, context)) as bar,
        exchanging_behind(topology, goes_behind_steps(settings), context.transport) as behind,
    ):
        context = replace(context, behind=behind)
        return [record for record, _ in recorded(topology, files, context, bar)]


def finish(
    files: RunDirectory | None,
    topology: Topology,
    context: RunContext,
    records: list[dict[str, Any]],
    total_s: float,
    class_names: Sequence[str],
    going: Callable[[], None],
) -> None:
    """Leave in the run's directory what a run by itself leaves there."""
    if files is None:
        return

    def write() -> None:
        delivered = delivery.save_model(files.path, context.state, context.problem, going)
        delivered["classes"] = list(class_names)
        totals = delivery.summarise(context.settings, topology, context.state, records, "completed")
        totals["validation"] = delivery.held_out_of(context)
        files.write_summary({**totals, "delivered": delivered, "seconds_total": total_s})

    telling_disk_errors("the results", write)


# --------------------------------------------------------------------------------------------------
# What can not be compared, before any run
# --------------------------------------------------------------------------------------------------


def check_possible(bench: Bench, rows: Sequence[Row], dataset: Dataset) -> None:
    """Raise UserError for a row whose network or groups can't be, before any has been trained.

    Collective on `world`.
    """
    inputs = inputs_from(dataset.sizes())

    def build() -> None:
        for row in rows:
            settings = bench.options.first_settings(row)
            try:
                model = make_model(settings, inputs)
                make_groups(settings, model, build_layout(model), inputs)
            except UserError as error:
                raise UserError(f"row {row.name}: {error}", error.exit_code) from None

    run_collectively(bench.topology.world, build)


def check_equal_work(bench: Bench) -> None:
    """Raise UserError where rows or trials with steps by epochs train less long than others.

    How many whole steps that makes is known with the data alone. Collective on `world`.
    """
    options = bench.options
    found = {
        row.name: [options.settings_at(row, point) for point in row.points] for row in options.rows
    }
    every = [settings for points in found.values() for settings in points]
    same = len(set(map(length_of, every))) == 1
    if same or all(map(has_known_length, every)):
        return
    with closing(bench.load(every[0])) as dataset:
        images = size_of(dataset)

    def samples_of(settings: Settings) -> int:
        steps = total_steps(settings, steps_with(settings, images))
        return steps * min(settings.batch_size, images)

    def check() -> None:
        samples = {name: list(map(samples_of, points)) for name, points in found.items()}
        check_equal_length(options.rows, samples)

    run_collectively(bench.topology.world, check)


def length_of(settings: Settings) -> tuple[object, ...]:
    """Return all that says on how many of given data a run is trained."""
    steps = settings.local_steps, settings.local_epochs, settings.batch_size
    frozen = settings.frozen_local_steps
    return settings.outer_iterations, *steps, frozen, frozen and pruning_ends(settings)


# --------------------------------------------------------------------------------------------------
# What is measured in the end
# --------------------------------------------------------------------------------------------------


def size_of(dataset: Dataset | TextSet) -> int:
    """Return how many samples this rank has to train on, windows of a text or images."""
    return len(dataset.train) if isinstance(dataset, TextSet) else len(dataset.train.labels)


def forward_seconds(
    topology: Topology, dataset: Dataset, context: RunContext
) -> tuple[float, float, float]:
    """Return the seconds of a forward pass of the exported network and of a dense one, in turns.

    Medians; and half the distance of the quartiles of their ratio, as a share of it. All ranks do
    the same at the same time, as in training. Collective on `world`.
    """
    state, problem, settings = context.state, context.problem, context.settings
    dense = make_model(settings, inputs_from(dataset.sizes())).to(state.theta.device)
    size = min(FORWARD_BATCH, size_of(dataset))
    images, _ = next(problem.batches(dataset.train, batch_size=size))
    dense.eval()
    problem.model.eval()
    with torch.no_grad(), weights(state, state.z):
        small = exported(problem.model, images)
    topology.world.Barrier()
    actions = {"exported": Action(lambda: small(images)), "dense": Action(lambda: dense(images))}
    with torch.no_grad():
        times = wall_times(
            actions, FORWARD_TURNS, state.theta.device, context.heartbeat, alternate=True
        )
    quartiles = np.percentile(times["dense"] / times["exported"], [25, 50, 75])
    spread = float((quartiles[2] - quartiles[0]) / (2 * quartiles[1]))
    return float(np.median(times["exported"])), float(np.median(times["dense"])), spread


def exported(model: nn.Module, images: Tensor) -> nn.Module:
    """Return a copy of `model` as `export` writes it: without the channels that masks removed.

    As it is where nothing can be taken out.
    """
    copied = copy.deepcopy(model).cpu()
    copied.eval()
    try:
        copied = smaller(copied, images.cpu())
    except UserError as error:
        log.info("inference is measured at full size: %s", error)
    return copied.to(images.device)


def split_seconds(records: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the seconds of training in messages, in the method's own work, and in steps.

    The same for all methods: every message of phases 1 to 5, votes and losses too, waiting for the
    slowest rank included; what phases 2 to 5 do besides, coding too; what phase 1 does besides.
    """
    phases = {
        phase: sum(r["seconds"][phase] for r in records) for phase in ("local", *CONSENSUS_PHASES)
    }
    messages = {phase: sum(r["exchange"].get(phase, 0.0) for r in records) for phase in phases}
    own = sum(phases[phase] - messages[phase] for phase in CONSENSUS_PHASES)
    return sum(messages.values()), own, phases["local"] - messages["local"]


def quality_of(record: Mapping[str, Any]) -> Quality | None:
    """Return how good the network of a record was on images held out, None if not evaluated."""
    if record["val_loss"] is None:
        return None
    return Quality(record.get("val_accuracy"), record["val_loss"])


def best_of(context: RunContext) -> Quality:
    """Return how good the network is that a run delivers, by the data held out."""
    judged = Judged(*context.state.position.best)
    has_accuracy = "accuracy" in context.problem.task.measures
    return Quality(judged.accuracy if has_accuracy else None, judged.loss)


def curve_of(records: list[dict[str, Any]]) -> tuple[Point, ...]:
    """Return where the run was whenever it was evaluated."""
    sent, seconds, compute, found = 0, 0.0, 0.0, []
    for record in records:
        spent = record["seconds"]
        sent += record["bytes"]["sent"]
        seconds += spent["total"] - spent["evaluate"]
        compute += sum(split_seconds([record])[1:])
        if quality := quality_of(record):
            where = record["iteration"], sent, seconds
            found.append(Point(*where, quality.accuracy, quality.loss, compute))
    return tuple(found)


def operations(settings: Settings) -> str:
    """Return what a run calls to send between nodes, in the order of its messages."""
    words = " ".join(operation for _, _, operation, _ in operations_of(settings))
    return ", ".join(dict.fromkeys(re.findall(r"All\w+|Reduce|Bcast", words)))


def zeros_of(state: State) -> tuple[int, int, int]:
    """Return what `count_zeros` does of the delivered network at full size.

    What has been taken out of it counts as zeros.
    """
    found = np.array(count_zeros(state.z, state.layout))
    if state.layout.numel < state.whole.layout.numel:
        layout, kept = state.whole.layout, torch.ones(state.whole.layout.numel)
        factors = build_factors(state.mask, state.groups, kept.device, kept.dtype)
        apply_factors_(kept, layout, state.groups, factors)
        weights, *gone = count_zeros(kept, layout)
        found = np.array([weights, *(found[1:] + gone)])
    return tuple(map(int, found))


def count_zeros(flat: Tensor, layout: Layout) -> tuple[int, int, int]:
    """Return how many weights matrices and kernels have, how many are 0, how many in whole lines.

    A line is a row or a column of a layer's C_out x (C_in kh kw).
    """
    elements = zeros = line_zeros = 0
    for view in layout.views(flat):
        if view.dim() < 2:
            continue
        zero = view.flatten(1) == 0
        lines = zero.all(dim=1, keepdim=True) | zero.all(dim=0, keepdim=True)
        elements += zero.numel()
        zeros += int(zero.sum())
        line_zeros += int(lines.sum())
    return elements, zeros, line_zeros
