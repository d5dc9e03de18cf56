"""Train with one method after the other on the same ranks, samples and links; print one comparison.

First the settings that a plan leaves open are chosen: every row has the same number of trials, of
the same share of its length, and the best by the images held out is taken. Then all rows are
trained: seeds are the outer loop and rows the inner one, so that a machine which changes its pace
in the course of hours meets all rows alike. A run that diverges or fails is a row that says so. No
run reads a test image; what does is the last pass of `--reveal`, when all runs are there.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.comm.agreement import broadcast_text, require_same, run_on_first
from prunex_mpi.config.resolve import FIELDS, defaults
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.diagnosis.facts import recorded_versions
from prunex_mpi.research.compare import kept_runs
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.comparison_tables import show
from prunex_mpi.research.compare.outcomes import (
    Comparison,
    Outcome,
    Tuning,
    at_chance,
    join,
    read_comparison,
    require_same_work,
)
from prunex_mpi.research.compare.plan import Row, settings_of
from prunex_mpi.research.compare.reveal import read_reveal, reveal, tested
from prunex_mpi.research.compare.run_rows import (
    Bench,
    check_equal_work,
    check_possible,
    first_held_out,
    run_row,
    run_trial,
)
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import (
    Place,
    apply_findings,
    check_launched_together,
    find_transport,
    take_places,
)


def compare(world: MPI.Comm, options: Options) -> int:
    """Compare under the eyes of a watchdog; world rank 0 prints and writes. Collective."""
    if options.sources:
        run_on_first(world, lambda: show_again(options))
        return 0
    timeout_s = settings_of(options.common, options.rows[0], options.seeds[0]).timeout
    with watched(world, timeout_s) as watchdog:
        found = run_all(world, options, watchdog.heartbeat)
        run_on_first(world, lambda: show(options, found))
        # Nobody leaves while another may still need the job.
        world.Barrier()
    return FAILURE if any(run.failed for run in found.outcomes) else 0


def show_again(options: Options) -> None:
    """Show what files hold; raise UserError."""
    kept_runs.prepare(options)
    show(options, join([read_comparison(path) for path in options.sources]))


def run_all(world: MPI.Comm, options: Options, heartbeat: Heartbeat) -> Comparison:
    """Tune and run all rows of this job's part. Collective."""
    set_up_logging(world.rank, world.size)
    check_launched_together(world)
    agreed = repr((options, recorded_versions()))
    require_same(world, "the flags or the versions of the software", agreed)
    rows, protocol = options.rows, options.protocol

    def prepare() -> None:
        kept_runs.prepare(options)
        if options.reveal:
            kept_runs.require_all(options)
        kept_runs.check_networks(options)

    run_on_first(world, prepare)
    revealed = read_reveal(world, options)
    first = settings_of(options.common, rows[0], options.seeds[0])
    ranks_per_node = options.common.get("ranks_per_node", 0)
    with take_places(world, ranks_per_node, first.device) as place:
        topology = place.topology
        if world.rank == 0:
            log.info("%s", place.layout)
        apply_findings(place, first)
        transport = find_transport(place, first)
        around = topology, options, place.device, transport, heartbeat
        bench = Bench(*around, revealed=options.reveal or bool(revealed))
        check_equal_work(bench)
        tunings = tune_all(bench, rows) if options.tunes else []
        chosen = {tuning.row: tuning for tuning in tunings}
        outcomes: list[Outcome] = []
        for seed in options.seeds:
            # Those of one seed at a time: they may fill the memory.
            title, data = confirm_all(bench, seed, chosen, outcomes)
        if options.reveal or revealed:
            if options.reveal:
                revealed = reveal(place, options, outcomes, heartbeat)
            outcomes = tested(options, outcomes, revealed)
        return Comparison(
            title=title,
            machine=machine_of(place, bench),
            rows=tuple(row.name for row in rows),
            seeds=options.seeds,
            tunings=tuple(tunings),
            outcomes=tuple(outcomes),
            notes=tuple(notes_of(bench)),
            data=" ".join(filter(None, (data, revealed.get("images", "")))),
            plan=options.plan,
            protocol={
                **asdict(protocol),
                "length": str(protocol.length),
                "validation": settings_of(options.common, rows[0], 0).val_split,
            },
            revealed=revealed.get("at", ""),
            own_length=tuple(row.name for row in rows if row.own_length),
        )


def machine_of(place: Place, bench: Bench) -> dict[str, str]:
    """Return what a comparison names its machine by; on a CPU there is one kind of buffers."""
    buffers = {"buffers": f"MPI buffers on the {bench.buffers}"}
    return place.describe() | (buffers if bench.device.type != "cpu" else {})


def title_of(bench: Bench, dataset: Dataset) -> str:
    """Return what a comparison is of."""
    options, topology = bench.options, bench.topology
    # Not those of the first row, which may have its own: parts with others are joined.
    first = settings_of(options.common, options.rows[0], options.seeds[0])
    preset = options.common.get("preset", FIELDS["preset"].default)
    usual = defaults(preset, first.method, dataset=options.common.get("dataset", ""))
    model = options.common.get("model", usual["model"])
    batch = options.common.get("batch_size", first.batch_size)
    return (
        f"Comparison: {model}, {first.dataset}, {dataset.train_total:,} to train on and "
        f"{dataset.val_total:,} held out, {topology.world_size} ranks on "
        f"{topology.num_nodes} nodes, batch {batch} per rank"
    )


def notes_of(bench: Bench) -> list[str]:
    """Return what tables say of how settings were chosen, and of lengths."""
    options, protocol = bench.options, bench.options.protocol
    notes = ["settings as the rows give them; nothing was tuned"]
    if options.tunes:
        notes = [
            f"each row: the best of {protocol.trials} trials of {protocol.length} of its length, "
            f"seed {protocol.tune_seed}, by the data held out"
        ]
    if options.length != 1:
        notes.append(f"{options.length} of each row's outer iterations")
    if bench.topology.num_nodes == 1:
        notes.append("one node: nothing leaves the machine; see --ranks-per-node")
    return notes


# --------------------------------------------------------------------------------------------------
# What a plan leaves open
# --------------------------------------------------------------------------------------------------


def tune_all(bench: Bench, rows: Sequence[Row]) -> list[Tuning]:
    """Try every point of each row's grid. Collective on `world`."""
    options, found = bench.options, []
    first = settings_of(options.common, rows[0], options.protocol.tune_seed)
    with closing(bench.load(first)) as dataset:
        check_possible(bench, rows, dataset)
        for row in rows:
            runs = [run_trial(bench, row, number, dataset) for number in range(len(row.points))]
            best = max(runs, key=lambda run: run.score)
            quality = best.measured and best.measured.quality
            chance = quality is None or at_chance(quality, dataset.num_classes, dataset.val_total)
            found.append(Tuning(row.name, tuple(runs), chance))
    return found


def confirm_all(
    bench: Bench, seed: int, chosen: Mapping[str, Tuning], outcomes: list[Outcome]
) -> tuple[str, str]:
    """Train all rows with one seed, and add what came of it to `outcomes`.

    Returns what the comparison is of, and what tells its images apart. Collective on `world`.
    """
    options, rows = bench.options, bench.options.rows
    apart = [row.name for row in rows if row.own_length]
    with closing(bench.load(settings_of(options.common, rows[0], seed))) as dataset:
        if not outcomes and not chosen:
            check_possible(bench, rows, dataset)
        for row in rows:
            outcomes.append(confirm(bench, row, seed, chosen.get(row.name), dataset))
            require_same_work(outcomes, apart)
        told = dataset.digest, first_held_out(bench.topology.world, dataset)
        return title_of(bench, dataset), " ".join(filter(None, told))


def confirm(bench: Bench, row: Row, seed: int, tuning: Tuning | None, dataset: Dataset) -> Outcome:
    """Train a row with one seed at the best point of its grid, if there is one.

    Collective on `world`.
    """
    number, problem, failed = 0, "", False
    if tuning is not None:
        best = agreed_best(bench.topology.world, tuning)
        failed = any(run.failed for run in tuning.runs)
        problem = "a trial failed, so nothing is chosen" if failed else ""
        problem = problem or ("diverged in every trial" if best is None else "")
        number = best or 0
    point: Mapping[str, Any] = row.points[number]
    if problem:
        lr = settings_of(bench.options.common, row, seed, point).lr
        return Outcome(row.name, seed, lr, None, problem, failed=failed)
    return run_row(bench, row, seed, point, dataset)


def agreed_best(world: MPI.Comm, tuning: Tuning) -> int | None:
    """Return what is the best trial as world rank 0 saw it. Collective on `world`."""
    text = broadcast_text(world, "" if tuning.best is None else str(tuning.best))
    return int(text) if text else None
