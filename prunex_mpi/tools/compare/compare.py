"""Train with one method after the other on the same ranks, samples and links; print one comparison.

Seeds are the outer loop and rows the inner one, so that a machine which changes its pace in the
course of hours meets all rows alike. A run that diverges is a row that says so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.base.tables import as_json, format_table
from prunex_mpi.comm.agreement import broadcast_text, require_same, together
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.problem import load_dataset, make_groups, make_model, steps_of
from prunex_mpi.core.steps import total_steps
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.models.layout import build_layout
from prunex_mpi.run.facts import recorded_versions
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import find_transport, heed_findings, refuse_lone_singleton, take_places
from prunex_mpi.settings.fields import FIELDS, Settings
from prunex_mpi.tools.compare import store
from prunex_mpi.tools.compare.figure import draw
from prunex_mpi.tools.compare.options import Options, refuse_unequal
from prunex_mpi.tools.compare.outcomes import (
    OF_RATES,
    Comparison,
    Outcome,
    Tuning,
    by_row,
    ended,
    join,
    read_comparison,
    require_same_work,
    to_dict,
)
from prunex_mpi.tools.compare.rows import Row, settings_of
from prunex_mpi.tools.compare.run import run_one
from prunex_mpi.tools.compare.search import at_chance, next_rate
from prunex_mpi.tools.compare.tables import tables_of

# One of so many training images of each class is what a run that tunes is tested on.
HELD_OUT = 5


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


def compare(world: MPI.Comm, options: Options) -> int:
    """Compare under the eyes of a watchdog; world rank 0 prints and writes. Collective."""
    if options.sources:
        together(world, lambda: show_again(options) if world.rank == 0 else None)
        return 0
    timeout_s = settings_of(options.common, options.rows[0], options.seeds[0]).timeout
    with watched(world, timeout_s) as watchdog:
        found = run_all(world, options, watchdog.heartbeat)
        together(world, lambda: show(options, found, {}) if world.rank == 0 else None)
        # Nobody leaves while another may still need the job.
        world.Barrier()
    return 0


def show_again(options: Options) -> None:
    """Show what files hold; raise UserError."""
    store.prepare(options)
    times = {name: read_comparison("--times", path) for name, path in options.times.items()}
    show(options, join([read_comparison("--from", path) for path in options.sources]), times)


def show(options: Options, found: Comparison, times: dict[str, Comparison]) -> None:
    """Print, write and draw; raise UserError."""
    tables = tables_of(found)
    # First of all: who reads the text through a pipe may close it.
    if options.json_file:
        whole = as_json(dict(found.machine), tables) | {"comparison": to_dict(found)}
        write_json(options.json_file, whole)
    text = "\n\n".join(["\n".join(found.machine.values()), *map(format_table, tables)])
    print(text, flush=True)
    if options.text_file:
        Path(options.text_file).write_text(text + "\n", encoding="utf-8")
    if options.figure:
        draw(found, times, options.figure)


def run_all(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> Comparison:
    """Tune and run all rows of this job's part. Collective."""
    set_up_logging(world.rank, world.size)
    refuse_lone_singleton(world)
    agreed = repr((options, recorded_versions()))
    require_same(world, "the flags or the versions of the software", agreed)
    together(world, lambda: store.prepare(options) if world.rank == 0 else None)
    rows = options.rows[options.part[0] :: options.part[1]]
    if not rows:
        raise UserError(f"--part: there are only {len(options.rows)} rows")
    together(world, lambda: store.refuse_missing(options, rows) if world.rank == 0 else None)
    first = settings_of(options.common, rows[0], options.seeds[0])
    ranks_per_node = options.common.get("ranks_per_node", 0)
    lanes = options.common.get("leaders_per_node", 1)
    with take_places(world, ranks_per_node, first.device, lanes=lanes) as place:
        topology = place.topology
        if world.rank == 0:
            log.info("%s", place.layout)
        heed_findings(place, first)
        train = partial(
            run_one,
            topology,
            device=place.device,
            transport=find_transport(place, first),
            heartbeat=heartbeat,
        )
        bench = Bench(world, topology, options, train, place.device, heartbeat, {})
        if options.known:
            title = title_of(bench, bench.load(first))
            known = store.take_over(world, options, title, place.describe())
            bench = replace(bench, known=known)
        refuse_unequal_work(bench)
        tunings = tune_all(bench, rows)
        rates = {t.row: t.lr for t in tunings}
        outcomes: list[Outcome] = []
        for seed in options.seeds:
            dataset = bench.load(settings_of(options.common, rows[0], seed))
            if not outcomes and not tunings:
                refuse_impossible(bench, rows, dataset)
            for row in rows:
                outcomes.append(run_row(bench, row, seed, rates, dataset))
                require_same_work(outcomes)
        here = {row.name for row in rows}
        references = {"bytes": options.equal_bytes, "time": options.equal_time}
        equal = {
            what: run_equal(bench, rows, what, reference, rates, outcomes)
            for what, reference in references.items()
            if reference in here
        }
        elsewhere = [name for name in references.values() if name and name not in here]
        return Comparison(
            title=title_of(bench, dataset),
            machine=place.describe(),
            rows=tuple(row.name for row in rows),
            seeds=options.seeds,
            tunings=tuple(tunings),
            outcomes=tuple(outcomes),
            equal=equal,
            reference=references,
            notes=tuple(notes_of(bench, elsewhere)),
        )


def title_of(bench: Bench, dataset: Dataset) -> str:
    """Return what a comparison is of."""
    options, topology = bench.options, bench.topology
    # Not those of the first row, which may have its own: parts with others are joined.
    first = settings_of(options.common, options.rows[0], options.seeds[0])
    model = options.common.get("model", FIELDS["model"].default)
    batch = options.common.get("batch_size", first.batch_size)
    return (
        f"Comparison: {model}, {first.dataset}, {dataset.train_total:,} training and "
        f"{dataset.test_total:,} test images, {topology.world_size} ranks on "
        f"{topology.num_nodes} nodes, batch {batch} per rank"
    )


def notes_of(bench: Bench, elsewhere: Sequence[str]) -> list[str]:
    """Return what tables say of learning rates and of the part that was done.

    `elsewhere` are rows of other parts that this one was to be compared with.
    """
    options, notes = bench.options, [f"{OF_RATES}as given, else the preset's; not tuned"]
    if options.grid:
        given = [f"{row.name} {row.lr:g}" for row in options.rows if row.lr is not None]
        given += [f"{row.name} from {row.grid[0]:g} on" for row in options.tuned if row.grid]
        notes = [
            f"{OF_RATES}from {', '.join(f'{lr:g}' for lr in options.grid)} on by factors of "
            "2 until the best lies inside, the one of highest accuracy (then lowest loss) on a "
            f"held-out fifth of the training images, seed {options.tune_seed}, "
            f"{options.tune_length} of the length"
            + (f"; given: {', '.join(given)}" if given else "")
        ]
    if options.length != 1:
        notes.append(f"{options.length} of each row's outer iterations")
    notes += [f"{row} is of another part: the job without --part looks at it" for row in elsewhere]
    if bench.topology.num_nodes == 1:
        notes.append("one node: nothing leaves the machine; see --ranks-per-node")
    return notes


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------


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


def run_row(
    bench: Bench, row: Row, seed: int, rates: dict[str, float | None], dataset: Dataset
) -> Outcome:
    """Train a row with one seed at its learning rate. Collective on `world`."""
    options = bench.options
    if row.name in rates and rates[row.name] is None:
        lr = settings_of(options.common, row, seed).lr
        return Outcome(row.name, seed, lr, None, "diverged at every learning rate of the search")
    settings = settings_of(options.common, row, seed, rates.get(row.name), options.length)
    return train(bench, row, settings, dataset, store.run_name(row, seed))


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


def run_equal(
    bench: Bench,
    rows: Sequence[Row],
    what: str,
    reference: str,
    rates: dict[str, float | None],
    outcomes: Sequence[Outcome],
) -> tuple[Outcome, ...]:
    """Train what has spent more than `reference` once more, only as far as that goes.

    What a run may spend is decided by that of `reference` with the same seed, so that more seeds
    change nothing about these. The learning rate's course fits the shorter run. Collective on
    `world`.
    """
    spent = spending(bench, what, outcomes)
    means = {
        name: mean(spent[name, run.seed] for run in runs if run.measured is not None)
        for name, runs in by_row(outcomes).items()
        if ended(runs)
    }
    if reference not in means:
        return ()
    options, found = bench.options, []
    for seed in options.seeds:
        dataset = bench.load(settings_of(options.common, rows[0], seed))
        for row in rows:
            if means.get(row.name, 0) <= means[reference]:
                continue
            mine, allowed = spent.get((row.name, seed)), spent.get((reference, seed))
            if mine is None or allowed is None:
                log.warning("%s, seed %d: none of equal %s, as one diverged", row.name, seed, what)
                continue
            if mine <= allowed:
                found += [run for run in outcomes if (run.row, run.seed) == (row.name, seed)]
                continue
            whole = settings_of(options.common, row, seed, rates.get(row.name), options.length)
            share = affordable(whole.outer_iterations, mine, allowed) * options.length
            try:
                settings = settings_of(options.common, row, seed, rates.get(row.name), share)
            except UserError as error:
                # What all others have reached must not be lost for it.
                log.warning("%s can't be trained so much shorter: %s", row.name, error)
                continue
            found.append(train(bench, row, settings, dataset, store.run_name(row, seed, what)))
    return tuple(found)


def affordable(iterations: int, spent: int, allowed: int) -> Fraction:
    """Return the largest share of whole iterations that spends no more than `allowed`, or of one.

    All of them have spent `spent`, in the same unit.
    """
    return Fraction(max(1, iterations * allowed // spent), iterations)


def spending(bench: Bench, what: str, runs: Sequence[Outcome]) -> dict[tuple[str, int], int]:
    """Return the bytes or microseconds that runs took, by row and seed, of those that ended.

    As world rank 0 saw it. Collective on `world`.
    """
    done = [run for run in runs if run.measured is not None]
    value = (lambda m: m.sent_bytes) if what == "bytes" else (lambda m: 1e6 * m.train_s)
    took = [max(1, round(value(m))) for m in ended(done)]
    agreed = json.loads(broadcast_text(bench.world, json.dumps(took)))
    return {(run.row, run.seed): spent for run, spent in zip(done, agreed, strict=True)}


# --------------------------------------------------------------------------------------------------
# Learning rates
# --------------------------------------------------------------------------------------------------


def tune_all(bench: Bench, rows: Sequence[Row]) -> list[Tuning]:
    """Search the learning rate of each row that is given none. Collective on `world`."""
    options = bench.options
    wanted = [row for row in rows if row in options.tuned]
    if not wanted:
        return []
    settings = settings_of(options.common, rows[0], options.tune_seed)
    held_out = hold_out(bench.load, settings)
    refuse_impossible(bench, rows, held_out)
    return [tune(bench, row, held_out) for row in wanted]


def tune(bench: Bench, row: Row, held_out: Dataset) -> Tuning:
    """Train a row with one learning rate after the other. Collective on `world`."""
    options = bench.options
    runs: dict[float, Outcome] = {}
    start = row.grid or options.grid
    while (lr := next_rate({x: run.score for x, run in runs.items()}, start)) is not None:
        length = options.length * options.tune_length
        settings = settings_of(options.common, row, options.tune_seed, lr, length)
        settings = replace(settings, evaluate_every=settings.outer_iterations)
        name = store.tuning_name(row, lr)
        runs[lr] = train(bench, row, settings, held_out, name, keep=False)
    tuning = Tuning(row.name, tuple(runs.values()), chance=False)
    reached = max(tuning.scores.values())[0]
    chance = at_chance(reached, held_out.num_classes, held_out.test_total)
    return replace(tuning, chance=chance)


def hold_out(load: Callable[[Settings], Dataset], settings: Settings) -> Dataset:
    """Return a data set whose test images are a part of the training images.

    Raises UserError where these are too few. Collective on `world`, as `load`.
    """
    dataset = load(replace(settings, val_share=1 / HELD_OUT))
    return replace(dataset, test=dataset.val, test_total=dataset.val_total, val=None, val_total=0)
