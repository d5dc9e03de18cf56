"""Train and prune a network over MPI: `mpirun -n 4 python -m prunex_mpi.train [flags]`.

The algorithm itself is in hsadmm.py; this program reads settings, makes communicators and files,
and prints. Nothing that starts MPI or loads torch is imported before the flags are parsed.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prunex_mpi import __version__
from prunex_mpi.cli import parse
from prunex_mpi.errors import UserError
from prunex_mpi.program import run_program
from prunex_mpi.settings import Settings, to_toml

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.train", parse, start_mpi, train, argv)


def start_mpi() -> "MPI.Comm":
    """Start MPI by importing it; return the communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def train(world: "MPI.Comm", settings: Settings) -> int:
    """Set up the job, iterate and write the run directory. Collective on `world`."""
    import torch

    from prunex_mpi import hsadmm, summary
    from prunex_mpi.collectives import build_transport
    from prunex_mpi.comm import (
        broadcast_text,
        build_topology,
        describe,
        free_topology,
        library_name,
        raise_together,
        require_same,
        together,
    )
    from prunex_mpi.devices import (
        choose_device,
        lone_singleton,
        resolve_mpi_buffers,
        set_threads,
    )
    from prunex_mpi.layout import build_layout
    from prunex_mpi.logs import Progress, RunDirectory, log, set_up_logging
    from prunex_mpi.problem import (
        build_problem,
        load_dataset,
        make_groups,
        make_model,
    )
    from prunex_mpi.state import build_state

    # Find the ranks and agree that they were started alike.
    started = time.time()
    set_up_logging(world.rank, world.size)
    singleton = lone_singleton(world)
    raise_together(world, UserError(singleton) if singleton else None)
    versions = {"prunex_mpi": __version__, "torch": torch.__version__, "mpi": library_name()}
    versions["python"] = sys.version.split()[0]
    require_same(world, "the settings or the versions of the software", to_toml(settings, versions))
    topology = build_topology(world, settings.ranks_per_node)
    device = together(world, lambda: choose_device(settings.device, topology.host_rank))
    require_same(world, "the kinds of device (some ranks found no GPU)", device.type)
    threads = set_threads(topology.core_sharers)
    line = describe(topology, f"{device}, {threads} threads")
    if world.rank == 0:
        log.info("%s", line)

    if settings.dry_run:
        text = together(world, lambda: summary.dry_run(settings, topology))
        if world.rank == 0:
            print(text, flush=True)
        free_topology(topology)
        return 0

    # Load the data, build the model, find what can be pruned.
    mpi_buffers, reason = resolve_mpi_buffers(topology, settings.mpi_buffers, device)
    transport = build_transport(device, settings.bucket_mib, mpi_buffers)
    if device.type == "cuda":
        log.info("MPI buffers: %s (%s)", mpi_buffers, reason)
    dataset = load_dataset(topology, settings)
    model = together(world, lambda: make_model(settings, dataset.num_classes, dataset.image_size))
    layout = together(world, lambda: build_layout(model))
    tensors = [(name, t.shape, t.dtype) for name, t in model.state_dict().items()]
    require_same(world, "the parameters of the model", repr((layout, tensors)))
    groups = together(world, lambda: make_groups(settings, model, layout))
    problem = build_problem(topology, settings, dataset, model, device, transport)
    for excluded in groups.excluded:
        log.info("not pruned: %s", excluded)
    state = build_state(model, layout, groups, settings)

    # Open the run directory on rank 0.
    chosen = settings.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{settings.model}"
    path = Path(broadcast_text(world, chosen))
    config = to_toml(settings, versions)
    run = together(world, lambda: RunDirectory(path, config) if world.rank == 0 else None)

    # Iterate.
    progress = Progress(settings.outer_iterations, settings.progress, world.rank)
    records = []
    for record in hsadmm.outer_iterations(topology, state, problem, settings, transport):
        layers = record.pop("layers")
        status = record.pop("status")
        records.append(record)
        if run is not None:
            run.append("metrics.jsonl", [record])
            run.append("layers.jsonl", layers)
        progress.update(record)
    progress.close()

    # Deliver the masked z.
    if run is not None:
        summary.save_model(run.path, state, model)
        totals = summary.summarise(settings, topology, state, records, status)
        totals["seconds_total"] = time.time() - started
        run.write_summary(totals)
        print(summary.closing_table(totals, run.path), flush=True)
    free_topology(topology)
    return 0


if __name__ == "__main__":
    sys.exit(main())
