"""Train with one method after the other on the same ranks, samples and links; print one comparison.

Seeds are the outer loop and methods the inner one, so that a machine which changes its pace in the
course of hours meets all methods alike. A run that diverges is a row that says so.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from mpi4py import MPI

from prunex_mpi.base.errors import UserError, quote
from prunex_mpi.base.files import prepare_file, write_json
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.base.tables import Table, as_json, format_table
from prunex_mpi.comm.agreement import raise_together, require_same, together
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.problem import load_dataset
from prunex_mpi.data.batches import Shard
from prunex_mpi.data.datasets import Dataset
from prunex_mpi.run.facts import recorded_versions
from prunex_mpi.run.program import watched
from prunex_mpi.run.start import find_transport, heed_findings, refuse_lone_singleton, take_places
from prunex_mpi.tools.compare.options import Options, settings_of, tuning_settings
from prunex_mpi.tools.compare.run import run_one, run_path
from prunex_mpi.tools.compare.tables import (
    Outcome,
    Tuning,
    choose_rate,
    measured_table,
    require_same_work,
    results_table,
    tuning_table,
)

# Of each rank's training images, what a run that tunes keeps for its own test.
HELD_OUT = 5


def compare(world: MPI.Comm, options: Options) -> int:
    """Compare under the eyes of a watchdog; world rank 0 prints and writes. Collective."""
    timeout_s = settings_of(options, options.methods[0], options.seeds[0], None).timeout
    with watched(world, timeout_s) as watchdog:
        machine, tables = run_all(world, options, watchdog.heartbeat)
        if world.rank == 0:
            text = "\n\n".join(["\n".join(machine.values()), *map(format_table, tables)])
            print(text, flush=True)
            if options.text_file:
                Path(options.text_file).write_text(text + "\n", encoding="utf-8")
            if options.json_file:
                write_json(options.json_file, as_json(machine, tables))
        # Nobody leaves while another may still need the job.
        world.Barrier()
    return 0


def run_all(
    world: MPI.Comm, options: Options, heartbeat: Heartbeat
) -> tuple[dict[str, str], list[Table]]:
    """Tune and run every method; return what the tables name and the tables. Collective."""
    set_up_logging(world.rank, world.size)
    refuse_lone_singleton(world)
    agreed = repr((options, recorded_versions()))
    require_same(world, "the flags or the versions of the software", agreed)
    together(world, lambda: prepare_files(options) if world.rank == 0 else None)
    first = settings_of(options, options.methods[0], options.seeds[0], None)
    ranks_per_node = options.common.get("ranks_per_node", 0)
    lanes = options.common.get("leaders_per_node", 1)
    with take_places(world, ranks_per_node, first.device, lanes=lanes) as place:
        topology, device = place.topology, place.device
        if world.rank == 0:
            log.info("%s", place.layout)
        heed_findings(place, first)
        transport = find_transport(place, first)
        machine = place.describe()
        run = partial(
            run_one, world, topology, device=device, transport=transport, heartbeat=heartbeat
        )

        # Learning rates
        tunings: list[Tuning] = []
        rates = {
            method: settings_of(options, method, options.seeds[0], options.lr.get(method)).lr
            for method in options.methods
        }
        if options.tuned:
            held_out = hold_out(
                topology, load_dataset(topology, tuning_settings(options, options.tuned[0], 1.0))
            )
            tunings = [tune(run, options, method, held_out) for method in options.tuned]
            rates |= {tuning.method: tuning.lr for tuning in tunings if tuning.lr is not None}
        hopeless = {tuning.method for tuning in tunings if tuning.lr is None}

        # The runs
        outcomes: list[Outcome] = []
        for seed in options.seeds:
            dataset = load_dataset(topology, settings_of(options, options.methods[0], seed, None))
            for method in options.methods:
                if method in hopeless:
                    problem = "diverged at every learning rate of the grid"
                    outcomes.append(Outcome(method, seed, rates[method], None, problem))
                    continue
                settings = settings_of(options, method, seed, rates[method])
                outcomes.append(run(settings, dataset, folder=options.folder))
                require_same_work(outcomes)
    title = (
        f"Comparison: {first.model}, {first.dataset}, {dataset.train_total:,} training and "
        f"{dataset.test_total:,} test images, {world.size} ranks on {topology.num_nodes} nodes, "
        f"batch {first.batch_size} per rank"
    )
    how = how_rates_were_chosen(options)
    if topology.num_nodes == 1:
        how.append("one node: nothing leaves the machine; see --ranks-per-node")
    tables = [results_table(title, options.seeds, outcomes, how), measured_table(outcomes)]
    if tunings:
        tables.append(tuning_table(options.grid, tunings, how[0]))
    return machine, tables


def prepare_files(options: Options) -> None:
    """Raise UserError unless everything can be written that --json, --text and --dir name."""
    prepare_file("json", options.json_file)
    prepare_file("text", options.text_file)
    for method, seed in product(options.methods, options.seeds) if options.folder else ():
        path = run_path(options.folder, method, seed)
        # Hours later would be late.
        if path.exists():
            raise UserError(f"--dir {quote(options.folder, 250)}: {path.name} is there already")


def how_rates_were_chosen(options: Options) -> list[str]:
    """Return the notes that say where learning rates come from."""
    if not options.grid:
        return ["learning rates: as given, else the preset's; not tuned"]
    given = [f"{method} {lr:g}" for method, lr in options.lr.items()]
    return [
        f"learning rates: of {', '.join(f'{lr:g}' for lr in options.grid)} the one of highest "
        f"accuracy (then lowest loss) on a held-out fifth of the training images, in runs of "
        f"{options.tune_iterations} outer iterations with seed {options.tune_seed}"
        + (f"; given: {', '.join(given)}" if given else "")
    ]


# --------------------------------------------------------------------------------------------------
# Learning rates
# --------------------------------------------------------------------------------------------------


def hold_out(topology: Topology, dataset: Dataset) -> Dataset:
    """Return a data set whose test images are a part of each rank's training images.

    Raises UserError where a rank has too few. Collective on `world`.
    """
    images, labels = dataset.train.images, dataset.train.labels
    kept = len(labels) - max(1, len(labels) // HELD_OUT)
    problem = None
    if kept < 1:
        problem = UserError(f"{len(labels)} training images per rank are too few for --tune-lr")
    raise_together(topology.world, problem)
    return replace(
        dataset,
        train=Shard(images[:kept], labels[:kept]),
        test=Shard(images[kept:], labels[kept:]),
        train_total=kept * topology.world_size,
        test_total=(len(labels) - kept) * topology.world_size,
    )


def tune(run: partial[Outcome], options: Options, method: str, held_out: Dataset) -> Tuning:
    """Run a method briefly with each learning rate of the grid. Collective on `world`."""
    runs = [run(tuning_settings(options, method, lr), held_out) for lr in options.grid]
    accuracies = tuple(r.measured.accuracy if r.measured else None for r in runs)
    return Tuning(method, accuracies, choose_rate(options.grid, runs))
