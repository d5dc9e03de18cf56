"""Train with one method after the other on the same ranks, samples and links; print one comparison.

First the learning rates that are not given are searched, by runs that are judged on held-out
images: a grid in steps of 2 that grows until its best lies inside. Then all rows are trained: seeds
are the outer loop and rows the inner one, so that a machine which changes its pace in the course of
hours meets all rows alike. A run that diverges is a row that says so. Last, rows are trained once
more, only as far as the bytes or the seconds of another one go.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import mean

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.comm.agreement import broadcast_text, require_same, run_collectively
from prunex_mpi.config.resolve import FIELDS
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.diagnosis.facts import recorded_versions
from prunex_mpi.research.compare import kept_runs
from prunex_mpi.research.compare.compare_options import Options, Row, settings_of
from prunex_mpi.research.compare.comparison_tables import show
from prunex_mpi.research.compare.outcomes import (
    OF_RATES,
    Comparison,
    Outcome,
    Score,
    Tuning,
    best_rate,
    by_row,
    ended,
    join,
    read_comparison,
    require_same_work,
)
from prunex_mpi.research.compare.run_rows import (
    Bench,
    check_equal_work,
    check_possible,
    images_of,
    run_row,
    train,
)
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import (
    apply_findings,
    check_launched_together,
    find_transport,
    take_places,
)
from prunex_mpi.settings.fields import Settings

STEP = 2.0
# After so many rates the search ends, wherever the best is.
MOST_RATES = 10
# How many standard errors above guessing an accuracy has to be to count.
ERRORS = 3.0
# One of so many training images of each class is what a run that tunes is tested on.
HELD_OUT = 5
# By row, then by seed: the share of its whole run that spends what is allowed.
Shares = dict[str, dict[int, Fraction]]


def compare(world: MPI.Comm, options: Options) -> int:
    """Compare under the eyes of a watchdog; world rank 0 prints and writes. Collective."""
    if options.sources:
        run_collectively(world, lambda: show_again(options) if world.rank == 0 else None)
        return 0
    timeout_s = settings_of(options.common, options.rows[0], options.seeds[0]).timeout
    with watched(world, timeout_s) as watchdog:
        found = run_all(world, options, watchdog.heartbeat)
        run_collectively(world, lambda: show(options, found, {}) if world.rank == 0 else None)
        # Nobody leaves while another may still need the job.
        world.Barrier()
    return 0


def show_again(options: Options) -> None:
    """Show what files hold; raise UserError."""
    kept_runs.prepare(options)
    times = {name: read_comparison("--times", path) for name, path in options.times.items()}
    show(options, join([read_comparison("--from", path) for path in options.sources]), times)


def run_all(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> Comparison:
    """Tune and run all rows of this job's part. Collective."""
    set_up_logging(world.rank, world.size)
    check_launched_together(world)
    agreed = repr((options, recorded_versions()))
    require_same(world, "the flags or the versions of the software", agreed)
    run_collectively(world, lambda: kept_runs.prepare(options) if world.rank == 0 else None)
    rows = options.rows
    run_collectively(world, lambda: kept_runs.check_networks(options) if world.rank == 0 else None)
    first = settings_of(options.common, rows[0], options.seeds[0])
    ranks_per_node = options.common.get("ranks_per_node", 0)
    with take_places(world, ranks_per_node, first.device) as place:
        topology = place.topology
        if world.rank == 0:
            log.info("%s", place.layout)
        apply_findings(place, first)
        transport = find_transport(place, first)
        bench = Bench(world, topology, options, place.device, transport, heartbeat)
        check_equal_work(bench)
        tunings = tune_all(bench, rows)
        rates = {t.row: t.lr for t in tunings}
        outcomes: list[Outcome] = []
        for seed in options.seeds:
            dataset = bench.load(settings_of(options.common, rows[0], seed))
            if not outcomes and not tunings:
                check_possible(bench, rows, dataset)
            for row in rows:
                outcomes.append(run_row(bench, row, seed, rates, dataset))
                require_same_work(outcomes)
        references = {"bytes": options.equal_bytes, "time": options.equal_time}
        equal, equal_tunings = {}, {}
        for what, reference in references.items():
            if reference:
                found = run_equal(bench, rows, what, reference, rates, outcomes)
                equal[what], equal_tunings[what] = found
        return Comparison(
            title=title_of(bench, dataset),
            machine=place.describe(),
            rows=tuple(row.name for row in rows),
            seeds=options.seeds,
            tunings=tuple(tunings),
            outcomes=tuple(outcomes),
            equal=equal,
            equal_tunings=equal_tunings,
            reference=references,
            notes=tuple(notes_of(bench)),
            data=images_of(world, dataset),
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


def notes_of(bench: Bench) -> list[str]:
    """Return what tables say of learning rates and lengths."""
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
    if bench.topology.num_nodes == 1:
        notes.append("one node: nothing leaves the machine; see --ranks-per-node")
    return notes


# --------------------------------------------------------------------------------------------------
# The search of learning rates
# --------------------------------------------------------------------------------------------------


def tune_all(bench: Bench, rows: Sequence[Row]) -> list[Tuning]:
    """Search the learning rate of each row that is given none. Collective on `world`."""
    options = bench.options
    wanted = [row for row in rows if row in options.tuned]
    if not wanted:
        return []
    settings = settings_of(options.common, rows[0], options.tune_seed)
    held_out = hold_out(bench.load, settings)
    check_possible(bench, rows, held_out)
    return [tune(bench, row, held_out) for row in wanted]


def tune(
    bench: Bench, row: Row, held_out: Dataset, share: Fraction = Fraction(1), equal: str = ""
) -> Tuning:
    """Train a row with one learning rate after the other.

    `share` is that of its outer iterations that spends as much as another row of what `equal` says.
    Collective on `world`.
    """
    options = bench.options
    runs: dict[float, Outcome] = {}
    start = row.grid or options.grid
    length = options.tuning_length * share
    while (lr := next_rate({x: run.score for x, run in runs.items()}, start)) is not None:
        settings = settings_of(options.common, row, options.tune_seed, lr, length)
        settings = replace(settings, evaluate_every=settings.outer_iterations)
        name = kept_runs.tuning_name(row, lr, equal)
        runs[lr] = train(bench, row, settings, held_out, name, keep=False)
    tuning = Tuning(row.name, tuple(runs.values()), chance=False)
    reached = max(tuning.scores.values())[0]
    chance = at_chance(reached, held_out.num_classes, held_out.test_total)
    return replace(tuning, chance=chance)


def hold_out(load: Callable[[Settings], Dataset], settings: Settings) -> Dataset:
    """Return a data set whose test images are a part of the training images.

    Raises UserError where these are too few. Collective on `world`, as `load`.
    """
    dataset = load(replace(settings, val_split=1 / HELD_OUT))
    return replace(dataset, test=dataset.val, test_total=dataset.val_total, val=None, val_total=0)


def next_rate(scores: Mapping[float, Score], start: Sequence[float]) -> float | None:
    """Return the rate to try next, None where the best of those tried lies inside, or too many did.

    First all of `start`; then beyond the end where the best is. Where nothing trained, lower ones.
    """
    for rate in start:
        if rate not in scores:
            return rate
    if len(scores) >= MOST_RATES:
        return None
    best = best_rate(scores)
    if best is None or best == min(scores):
        return min(scores) / STEP
    return max(scores) * STEP if best == max(scores) else None


def at_chance(accuracy: float, classes: int, images: int) -> bool:
    """Return whether guessing among `classes` may reach `accuracy` on so many images."""
    guess = 1 / classes
    return accuracy <= guess + ERRORS * math.sqrt(guess * (1 - guess) / images)


# --------------------------------------------------------------------------------------------------
# Rows at equal bytes or time
# --------------------------------------------------------------------------------------------------


def run_equal(
    bench: Bench,
    rows: Sequence[Row],
    what: str,
    reference: str,
    rates: Mapping[str, float | None],
    outcomes: Sequence[Outcome],
) -> tuple[tuple[Outcome, ...], tuple[Tuning, ...]]:
    """Train what has spent more than `reference` once more, only as far as that goes.

    A learning rate that whole runs were given by a search is searched for the shorter ones too,
    and its course fits them. Returns the runs, and those that chose the rates. Collective on
    `world`.
    """
    options = bench.options
    shares = affordable_shares(bench, rows, what, reference, outcomes)
    tunings = _tune_shorter(bench, rows, shares, what)
    chosen = {tuning.row: tuning.lr for tuning in tunings}
    found: list[Outcome] = []
    for seed in options.seeds:
        wanted = [row for row in rows if seed in shares.get(row.name, {})]
        if not wanted:
            continue
        dataset = bench.load(settings_of(options.common, rows[0], seed))
        for row in wanted:
            share = shares[row.name][seed]
            if share == 1 and row.name not in chosen:
                found += [run for run in outcomes if (run.row, run.seed) == (row.name, seed)]
            else:
                found.append(run_row(bench, row, seed, {**rates, **chosen}, dataset, share, what))
    return tuple(found), tuple(tunings)


def affordable_shares(
    bench: Bench, rows: Sequence[Row], what: str, reference: str, outcomes: Sequence[Outcome]
) -> Shares:
    """Return how far the rows get that have spent more than `reference` in the mean.

    What a run may spend is decided by that of `reference` with the same seed, so that more seeds
    change nothing about these. Collective on `world`.
    """
    spent = spending(bench, what, outcomes)
    means = {
        name: mean(spent[name, run.seed] for run in runs if run.measured is not None)
        for name, runs in by_row(outcomes).items()
        if ended(runs)
    }
    options, shares = bench.options, {}
    limit = means.get(reference)
    for row in rows:
        if limit is None or means.get(row.name, 0) <= limit:
            continue
        mine: dict[int, Fraction] = {}
        for seed in options.seeds:
            if (row.name, seed) not in spent or (reference, seed) not in spent:
                log.warning("%s, seed %d: none of equal %s, as one diverged", row.name, seed, what)
                continue
            whole = settings_of(options.common, row, seed, length=options.length)
            took, allowed = spent[row.name, seed], spent[reference, seed]
            mine[seed] = affordable(whole.outer_iterations, took, allowed)
        try:
            for seed, share in mine.items():
                settings_of(options.common, row, seed, length=share * options.length)
            if mine and row in options.tuned:
                length = options.tuning_length * _first(mine)
                settings_of(options.common, row, options.tune_seed, options.grid[0], length)
        except UserError as error:
            # What all others have reached must not be lost for it.
            log.warning("%s can't be trained so much shorter: %s", row.name, error)
            continue
        shares[row.name] = mine
    return shares


def _tune_shorter(bench: Bench, rows: Sequence[Row], shares: Shares, what: str) -> list[Tuning]:
    """Search a learning rate for runs of the share that the first seed affords.

    A row whose whole run that seed affords keeps its rate. Collective on `world`.
    """
    options = bench.options
    first = {name: _first(by_seed) for name, by_seed in shares.items() if by_seed}
    wanted = [row for row in rows if row in options.tuned and first.get(row.name, 1) < 1]
    if not wanted:
        return []
    held_out = hold_out(bench.load, settings_of(options.common, rows[0], options.tune_seed))
    return [tune(bench, row, held_out, first[row.name], what) for row in wanted]


def _first(shares: Mapping[int, Fraction]) -> Fraction:
    return next(iter(shares.values()))


def affordable(iterations: int, spent: int, allowed: int) -> Fraction:
    """Return the largest share of whole iterations that spends no more than `allowed`, or of one.

    All of them have spent `spent`, in the same unit; there are no more than all.
    """
    return Fraction(min(iterations, max(1, iterations * allowed // spent)), iterations)


def spending(bench: Bench, what: str, runs: Sequence[Outcome]) -> dict[tuple[str, int], int]:
    """Return the bytes or microseconds that runs took, by row and seed, of those that ended.

    As world rank 0 saw it. Collective on `world`.
    """
    done = [run for run in runs if run.measured is not None]
    value = (lambda m: m.sent_bytes) if what == "bytes" else (lambda m: 1e6 * m.train_s)
    took = [max(1, round(value(m))) for m in ended(done)]
    agreed = json.loads(broadcast_text(bench.world, json.dumps(took)))
    return {(run.row, run.seed): spent for run, spent in zip(done, agreed, strict=True)}
