"""Train with one method after the other on the same ranks, samples and links; print one comparison.

Seeds are the outer loop and rows the inner one, so that a machine which changes its pace in the
course of hours meets all rows alike. A run that diverges is a row that says so.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.files import write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.base.tables import as_json, format_table
from prunex_mpi.comm.agreement import require_same, together
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.research.compare import kept_runs as store
from prunex_mpi.research.compare.compare_options import Options
from prunex_mpi.research.compare.comparison_tables import tables_of
from prunex_mpi.research.compare.equal import run_equal
from prunex_mpi.research.compare.figure import draw
from prunex_mpi.research.compare.outcomes import (
    OF_RATES,
    Comparison,
    Outcome,
    join,
    read_comparison,
    require_same_work,
    to_dict,
)
from prunex_mpi.research.compare.rows import settings_of
from prunex_mpi.research.compare.run_rows import run_one
from prunex_mpi.research.compare.runs import (
    Bench,
    images_of,
    refuse_impossible,
    refuse_unequal_work,
    run_row,
)
from prunex_mpi.research.compare.tuning import tune_all
from prunex_mpi.run.facts import recorded_versions
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import find_transport, heed_findings, refuse_lone_singleton, take_places
from prunex_mpi.settings.fields import FIELDS


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
            dataset = bench.load(first)
            title, data = title_of(bench, dataset), images_of(world, dataset)
            known = store.take_over(world, options, title, place.describe(), data)
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
        equal, equal_tunings = {}, {}
        for what, reference in references.items():
            if reference in here:
                found = run_equal(bench, rows, what, reference, rates, outcomes)
                equal[what], equal_tunings[what] = found
        elsewhere = [name for name in references.values() if name and name not in here]
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
            notes=tuple(notes_of(bench, elsewhere)),
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
