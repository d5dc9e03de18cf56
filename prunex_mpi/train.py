"""Train and prune a network over MPI: `mpirun -n 4 python -m prunex_mpi.train [flags]`.

The algorithm itself is in hsadmm.py; this program reads settings, makes communicators and files,
and prints. Nothing that starts MPI or loads torch is imported before the flags are parsed.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prunex_mpi import __version__
from prunex_mpi.cli import parse
from prunex_mpi.errors import PREEMPTED, UserError
from prunex_mpi.program import abort_on_exceptions, end_job, run_program
from prunex_mpi.settings import Settings, to_toml
from prunex_mpi.watchdog import Heartbeat, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

    from prunex_mpi.logs import RunDirectory
    from prunex_mpi.preemption import ReceivedSignal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code, the same on every rank."""
    return run_program("prunex_mpi.train", parse, start_mpi, train, argv)


def start_mpi() -> "MPI.Comm":
    """Start MPI by importing it; return the communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def train(world: "MPI.Comm", settings: Settings) -> int:
    """Train under the eyes of a watchdog. Collective on `world`."""
    from prunex_mpi.preemption import catching

    heartbeat = Heartbeat()
    watchdog = Watchdog(heartbeat, world.rank, settings.timeout, lambda: end_job(world))
    with closing(watchdog), catching(settings.preempt_signals) as received:
        abort_on_exceptions(world, heartbeat, watchdog.first_to_report)
        return run(world, settings, heartbeat, watchdog, received)


def run(
    world: "MPI.Comm",
    settings: Settings,
    heartbeat: Heartbeat,
    watchdog: Watchdog,
    received: "ReceivedSignal",
) -> int:
    """Set up the job, iterate and write the run directory. Collective on `world`."""
    import torch

    from prunex_mpi import checkpoint, summary
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
    from prunex_mpi.files import telling_disk_errors
    from prunex_mpi.layout import build_layout
    from prunex_mpi.logs import log, set_up_logging
    from prunex_mpi.preemption import StopAgreement, find_deadline
    from prunex_mpi.problem import (
        build_problem,
        load_dataset,
        make_groups,
        make_model,
    )
    from prunex_mpi.state import build_state
    from prunex_mpi.supervision import Checkpoints, run_to_end

    # Find the ranks and agree that they were started alike.
    heartbeat.enter("start")
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
    heartbeat.enter("data")
    dataset = load_dataset(topology, settings)
    heartbeat.enter("model")
    model = together(world, lambda: make_model(settings, dataset.num_classes, dataset.image_size))
    layout = together(world, lambda: build_layout(model))
    tensors = [(name, t.shape, t.dtype) for name, t in model.state_dict().items()]
    require_same(world, "the parameters of the model", repr((layout, tensors)))
    groups = together(world, lambda: make_groups(settings, model, layout))
    problem = build_problem(topology, settings, dataset, model, device, transport)
    for excluded in groups.excluded:
        log.info("not pruned: %s", excluded)
    heartbeat.beat(1)
    state = build_state(model, layout, groups, settings)
    heartbeat.beat(2)

    # Open the run directory on rank 0, and meet there.
    config = to_toml(settings, versions)
    with open_run(world, settings, config) as (path, files):
        together(world, lambda: watchdog.share(path / "heartbeats", world.size))

        # Go on where an earlier job left off.
        if settings.resume:
            complete = together(world, lambda: files.complete() if files else False)
            if broadcast_text(world, "complete" if complete else ""):
                log.info("%s is complete: there is nothing left to do", path)
                free_topology(topology)
                return 0
            restored = checkpoint.restore(topology, files, state, problem, settings, transport)
            for refused in restored.refused:
                log.info("refused checkpoint %s", refused)
            log.info("%s", restored.describe())
            if files is not None and files.versions() != versions:
                log.info("the versions of the software are not those in %s/config.toml", path)

        # Iterate.
        stop = StopAgreement(topology.world, received, find_deadline(settings.time_limit, started))
        checkpoints = Checkpoints(settings.checkpoint_every)
        status = run_to_end(
            topology, files, state, problem, settings, transport, heartbeat, stop, checkpoints
        )
        stop.close()
        heartbeat.enter("finish")

        # Deliver the masked z, or say how to go on.
        def finish() -> None:
            if files is None:
                return
            if status == "preempted":
                files.write_summary({"status": status, "reason": stop.reason})
                log.info("stopped by %s: go on with --resume --run-dir %s", stop.reason, path)
                return
            summary.save_model(files.path, state, model)
            records = files.read_lines("metrics.jsonl")
            totals = summary.summarise(settings, topology, state, records, status)
            totals["seconds_total"] = time.time() - started
            totals["checkpoints"] = {"count": checkpoints.count, "seconds": checkpoints.seconds}
            files.write_summary(totals)
            print(summary.closing_table(totals, files.path), flush=True)

        together(world, lambda: telling_disk_errors("the results", finish))
        # Nobody leaves while another may still need the job.
        world.Barrier()
        free_topology(topology)
        return PREEMPTED if status == "preempted" else 0


@contextmanager
def open_run(
    world: "MPI.Comm", settings: Settings, config: str
) -> "Iterator[tuple[Path, RunDirectory | None]]":
    """Hold the run directory on rank 0 while the block runs; the others get None.

    Collective on `world`.
    """
    from prunex_mpi.comm import broadcast_text, together
    from prunex_mpi.logs import RunDirectory

    chosen = settings.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{settings.model}"
    path = Path(broadcast_text(world, chosen))
    with ExitStack() as exits:

        def take() -> RunDirectory | None:
            if world.rank:
                return None
            files = exits.enter_context(closing(RunDirectory(path, config, settings.resume)))
            files.make_folder("heartbeats")
            return files

        yield path, together(world, take)


if __name__ == "__main__":
    sys.exit(main())
