"""One training job from its communicators to its last file, in the order in which things happen."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from mpi4py import MPI

from prunex_mpi.base.errors import PREEMPTED
from prunex_mpi.base.files import EXPORTED, SUMMARY, telling_disk_errors
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.agreement import (
    broadcast_json,
    broadcast_text,
    run_collectively,
    run_on_first,
)
from prunex_mpi.comm.preemption import find_deadline
from prunex_mpi.config.resolve import to_toml
from prunex_mpi.data.text import TextSet
from prunex_mpi.run import checkpoint, delivery, directory, start
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.dry_run import dry_run
from prunex_mpi.run.kept import Kept, begin, put_back, tell
from prunex_mpi.run.loading import load_dataset, parts_read, share_contents
from prunex_mpi.run.summary import closing_table
from prunex_mpi.run.supervision import Checkpoints, train, write_checkpoint, write_last_checkpoint
from prunex_mpi.run.watchdog import Watchdog
from prunex_mpi.settings.fields import Settings


def run(
    world: MPI.Comm,
    settings: Settings,
    watchdog: Watchdog,
    received: ReceivedSignal,
    kept: Kept | None = None,
) -> int:
    """Do all that the program does once it has its settings; return the exit code.

    With `kept` it goes on from there, where a node was lost, and keeps what that takes. Collective
    on `world`.
    """
    heartbeat = watchdog.heartbeat
    heartbeat.enter("start")
    started = kept.started if kept else time.time()
    set_up_logging(world.rank, world.size)
    again = kept is not None and kept.began
    if again:
        # Where a rank was lost when all was done, those who are left may not know it.
        code = code_of_ended(world, Path(settings.run_dir))
        if code is not None:
            return code
    else:
        # Of those who are left there may be one.
        start.check_launched_together(world)
    versions = start.check_alike(world, settings)
    with start.places_of(world, settings, kept.made if kept else None) as place:
        topology = place.topology
        if world.rank == 0:
            log.info("%s", place.layout)
        read_contents = partial(
            share_contents,
            *(world, settings.dataset, settings.data_dir),
            tokenizer=settings.tokenizer,
            parts=parts_read(settings),
        )
        if settings.dry_run:
            known = read_contents(heartbeat)
            text = run_collectively(world, lambda: dry_run(settings, topology, known))
            if world.rank == 0:
                print(text, flush=True)
            return 0

        deadline = run_collectively(world, lambda: find_deadline(settings.time_limit, started))
        transport = start.prepare(place, settings)
        if settings.run_dir:
            early = partial(directory.check_run_dir, Path(settings.run_dir), settings.resume)
            run_on_first(world, early)
        heartbeat.enter("data")
        known = read_contents(heartbeat)
        start.look_at_model(world, settings, known, heartbeat)
        dataset = load_dataset(topology, settings, heartbeat, place.device, known)
        wanted, restores = checkpoint.find_newest(world, settings)
        around = topology, wanted, dataset, place.device, transport, heartbeat
        context = start.assemble(*around, reads=not restores)
        log.info("%s", start.describe_training(context, dataset, world.size))
        start.log_warnings(world, context)
        heartbeat.beat(3)

        config = to_toml(context.settings, versions, wanted)
        held = open_run(world, context.settings, config, again)
        with closing(dataset), held as (path, files):
            run_collectively(world, lambda: watchdog.share(path / "heartbeats", world.size))
            if isinstance(dataset, TextSet):
                used = dataset.text.tokenizer
                run_on_first(world, lambda: files.keep_tokenizer(used.name, used.digest))
            if settings.resume:
                if is_complete(world, files):
                    log.info("%s is complete: there is nothing left to do", path)
                    return 0
                if (path / EXPORTED).is_dir() and not again:
                    text = "%s is of the network as it was before: export again in the end"
                    log.warning(text, path / EXPORTED)
                heartbeat.enter("checkpoint")
                if not (again and put_back(topology, files, context, kept)):
                    checkpoint.resume(topology, files, context, versions)
                if again:
                    tell(topology, files, context, kept)
            if kept:
                begin(topology, context, str(path), kept)
            checkpoints = Checkpoints(settings.checkpoint_every, received)
            if kept and kept.too_few:
                write_checkpoint(topology, files, context, checkpoints)
                status, reason = "preempted", f"{kept.loss.describe()} lost: --min-nodes"
            else:
                around = topology, files, context, checkpoints, received, deadline
                status, reason = train(*around, kept)

            heartbeat.enter("finish")
            if status == "preempted":
                totals = {"status": status, "reason": reason}
            else:
                totals = delivery.deliver(topology, files, context, status, dataset)
                write_last_checkpoint(topology, files, context, checkpoints)
                heartbeat.enter("finish")
                totals |= {"seconds_total": time.time() - started, "resumed": restores}
                totals |= {"changes": kept.changes} if kept else {}
                totals["checkpoints"] = {"count": checkpoints.count, "seconds": checkpoints.seconds}

            # Last of all: a run that has a summary needs nothing more.
            end = partial(telling_disk_errors, SUMMARY, lambda: files.write_summary(totals))
            run_on_first(world, end)
            code = PREEMPTED if status == "preempted" else 0
            if kept:
                kept.code = code
            if status == "preempted":
                log.info("stopped by %s: go on with --resume --run-dir %s", reason, path)
            elif world.rank == 0:
                delivery.print_result(closing_table(totals, path))

            # Nobody leaves while another may still need the job.
            run_on_first(world, lambda: files.finish_removals())
            return code


@contextmanager
def open_run(
    world: MPI.Comm, settings: Settings, config: str, takes_over: bool
) -> Iterator[tuple[Path, RunDirectory | None]]:
    """Hold the run directory on rank 0 for the time of the block; the others get None.

    One that `takes_over` has it from a rank that is lost. Collective on `world`.
    """
    # Jobs of an array begin in the same second.
    parts = time.strftime("%Y%m%d-%H%M%S"), settings.model, os.environ.get("SLURM_JOB_ID", "")
    name = f"runs/{'-'.join(filter(None, parts))}"
    new = "" if settings.run_dir or world.rank else directory.new_folder(name)
    path = Path(broadcast_text(world, settings.run_dir or new))
    with ExitStack() as exits:

        def take() -> RunDirectory:
            if takes_over:
                # A lost rank that is stopped on another machine holds its lock still.
                (path / "lock").unlink(missing_ok=True)
            held = RunDirectory(path, config, settings.resume, settings.outer_iterations)
            files = exits.enter_context(closing(held))
            files.make_folder("heartbeats")
            return files

        yield path, run_on_first(world, take)


def code_of_ended(world: MPI.Comm, run: Path) -> int | None:
    """Return the exit code of a job that has said how it ended, else None. Collective on `world`.

    One that goes on with a run removes what was said before.
    """
    found = run_on_first(world, lambda: directory.read_summary(run))
    status = broadcast_json(world, found and found.get("status"))
    if not status:
        return None
    return PREEMPTED if status == "preempted" else 0


def is_complete(world: MPI.Comm, files: RunDirectory | None) -> bool:
    """Return whether the run has come to its end. Collective on `world`."""
    return broadcast_json(world, run_on_first(world, lambda: files.complete()))
