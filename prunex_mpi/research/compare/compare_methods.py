"""Train with one method after the other on the same ranks, samples and links; print one comparison.

First the settings that a plan leaves open are chosen: every row has the same number of trials, of
the same share of its length, and the best by the images held out is taken. Then all rows are
trained: seeds are the outer loop and rows the inner one, so that a machine which changes its pace
in the course of hours meets all rows alike. A run that diverges or fails is a row that says so. No
run opens test data; what does is the last pass of `--reveal`, when all runs are there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from mpi4py import MPI

from prunex_mpi.base.errors import FAILURE
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.base.signals import ReceivedSignal, catching
from prunex_mpi.comm.agreement import broadcast_text, require_same, run_on_first
from prunex_mpi.config.resolve import FIELDS, defaults
from prunex_mpi.diagnosis.devices import resolve_mpi_buffers
from prunex_mpi.diagnosis.facts import recorded_versions
from prunex_mpi.research.compare import rows
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.comparison_tables import show
from prunex_mpi.research.compare.data import Data, check_place, look_at_data
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
from prunex_mpi.run.directory import new_folder
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import Place, check_launched_together, take_places

# Trains a run of the plan to its end, unless that is done. Collective on `world`.
Do = Callable[[rows.Run], Outcome]


def compare(world: MPI.Comm, options: Options) -> int:
    """Compare; world rank 0 prints and writes. Collective on `world`."""
    if options.sources:
        run_on_first(world, lambda: show_again(options))
        return 0
    if not options.folder:
        name = f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = broadcast_text(world, "" if world.rank else new_folder(name))
        options = replace(options, folder=folder)
    with catching() as received:
        received.quiet = world.rank > 0
        found = run_all(world, options, received)
    run_on_first(world, lambda: show(options, found))
    # Nobody leaves while another may still need the job.
    world.Barrier()
    return FAILURE if any(run.failed for run in found.outcomes) else 0


def show_again(options: Options) -> None:
    """Show what files hold; raise UserError."""
    rows.prepare(options)
    show(options, join([read_comparison(path) for path in options.sources]))


def run_all(world: MPI.Comm, options: Options, received: ReceivedSignal) -> Comparison:
    """Tune and run all rows of this job's part. Collective on `world`."""
    set_up_logging(world.rank, world.size)
    check_launched_together(world)
    agreed = repr((options, recorded_versions()))
    require_same(world, "the flags or the versions of the software", agreed)
    run_on_first(world, lambda: rows.prepare(options))
    revealed = read_reveal(world, options)
    first = options.first_settings(options.rows[0])
    ranks_per_node = options.common.get("ranks_per_node", 0)
    with take_places(world, ranks_per_node, first.device) as place:
        if world.rank == 0:
            log.info("%s; runs in %s", place.layout, options.folder)
        buffers, _ = resolve_mpi_buffers(place.topology, first.mpi_buffers, place.device)
        with watched(world, first.timeout) as watchdog:
            data = look_at_data(place, options, watchdog.heartbeat)
            check_place(world, options, place, data, buffers)
        closed = options.reveal or bool(revealed)
        do = partial(rows.do, world, options, data=data, received=received, revealed=closed)
        tunings = [tune(options, do, row, data) for row in options.rows if options.tunes]
        outcomes = confirm_all(options, do, tunings)
        if options.reveal:
            with watched(world, first.timeout) as watchdog:
                revealed = reveal(place, options, outcomes, watchdog.heartbeat)
        if revealed:
            outcomes = tested(options, outcomes, revealed)
        protocol = options.protocol
        return Comparison(
            title=title_of(options, place, data),
            machine=machine_of(place, buffers),
            rows=tuple(row.name for row in options.rows),
            seeds=options.seeds,
            tunings=tuple(tunings),
            outcomes=tuple(outcomes),
            notes=tuple(notes_of(options, place)),
            data=" ".join(filter(None, (data.told, revealed.get("images", "")))),
            plan=options.plan,
            protocol={
                **asdict(protocol),
                "length": str(protocol.length),
                "validation": first.val_split,
            },
            revealed=revealed.get("at", ""),
            own_length=tuple(row.name for row in options.rows if row.own_length),
        )


def machine_of(place: Place, buffers: str) -> dict[str, str]:
    """Return what a comparison names its machine by; on a CPU there is one kind of buffers."""
    told = {"buffers": f"MPI buffers on the {buffers}"}
    return place.describe() | (told if place.device.type != "cpu" else {})


def title_of(options: Options, place: Place, data: Data) -> str:
    """Return what a comparison is of."""
    # Not those of the first row, which may have its own: parts with others are joined.
    first = options.first_settings(options.rows[0])
    preset = options.common.get("preset", FIELDS["preset"].default)
    usual = defaults(preset, first.method, dataset=options.common.get("dataset", ""))
    model = options.common.get("model", usual["model"])
    batch = options.common.get("batch_size", first.batch_size)
    topology = place.topology
    return (
        f"Comparison: {model}, {first.dataset}, {data.train_total:,} to train on and "
        f"{data.val_total:,} held out, {topology.world_size} ranks on "
        f"{topology.num_nodes} nodes, batch {batch} per rank"
    )


def notes_of(options: Options, place: Place) -> list[str]:
    """Return what tables say of how settings were chosen, and of lengths."""
    protocol = options.protocol
    notes = ["settings as the rows give them; nothing was tuned"]
    if options.tunes:
        notes = [
            f"each row: the best of {protocol.trials} trials of {protocol.length} of its length, "
            f"seed {protocol.tune_seed}, by the data held out"
        ]
    if options.length != 1:
        notes.append(f"{options.length} of each row's outer iterations")
    if place.topology.num_nodes == 1:
        notes.append("one node: nothing leaves the machine; see --ranks-per-node")
    return notes


def tune(options: Options, do: Do, row: Row, data: Data) -> Tuning:
    """Try every point of a row's grid. Collective on `world`."""
    runs = tuple(do(run) for run in rows.trials_of(options, row))
    best = max(runs, key=lambda run: run.score).measured
    chance = best is None or at_chance(best.quality, data.classes, data.val_total)
    return Tuning(row.name, runs, chance)


def confirm_all(options: Options, do: Do, tunings: Sequence[Tuning]) -> list[Outcome]:
    """Train all rows with all seeds, each at the best point of its grid. Collective on `world`."""
    chosen = {tuning.row: tuning for tuning in tunings}
    apart = [row.name for row in options.rows if row.own_length]
    outcomes: list[Outcome] = []
    for seed in options.seeds:
        for row in options.rows:
            outcomes.append(confirm(options, do, row, seed, chosen.get(row.name)))
            require_same_work(outcomes, apart)
    return outcomes


def confirm(options: Options, do: Do, row: Row, seed: int, tuning: Tuning | None) -> Outcome:
    """Train a row with one seed at the best point of its grid, if there is one.

    Collective on `world`.
    """
    if tuning is None:
        return do(rows.run_of(options, row, seed))
    failed = any(run.failed for run in tuning.runs)
    if not failed and tuning.best is not None:
        return do(rows.run_of(options, row, seed, tuning.best))
    problem = "a trial failed, so nothing is chosen" if failed else "diverged in every trial"
    lr = settings_of(options.common, row, seed, row.points[0]).lr
    return Outcome(row.name, seed, lr, None, problem, failed=failed)
