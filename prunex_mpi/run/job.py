"""One training job from its communicators to its last file, in the order in which things happen."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from prunex_mpi.base.alone import require_packages
from prunex_mpi.base.errors import PREEMPTED
from prunex_mpi.base.files import SUMMARY, telling_disk_errors
from prunex_mpi.base.logs import log, set_up_logging
from prunex_mpi.comm.agreement import broadcast_text, require_same, together, together_while
from prunex_mpi.comm.async_exchange import exchanging_behind
from prunex_mpi.comm.preemption import ReceivedSignal, find_deadline, stop_agreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import Judged, best_of, delivered, judge
from prunex_mpi.core.loading import load_dataset, share_contents
from prunex_mpi.core.schedule import rate_now
from prunex_mpi.core.state import Work
from prunex_mpi.run import checkpoint, summary
from prunex_mpi.run.assembly import assemble
from prunex_mpi.run.beginning import (
    judge_beginning,
    look_at_checkpoints,
    read_initial,
)
from prunex_mpi.run.board import Board
from prunex_mpi.run.closing import closing_table
from prunex_mpi.run.directory import RunDirectory, new_folder, refuse_early
from prunex_mpi.run.dry_run import dry_run
from prunex_mpi.run.facts import recorded_versions
from prunex_mpi.run.start import (
    describe_training,
    find_transport,
    heed_findings,
    refuse_lone_singleton,
    take_places,
    tell_beforehand,
)
from prunex_mpi.run.supervision import Checkpoints, run_to_end, write_last_checkpoint
from prunex_mpi.run.tracing import tracing
from prunex_mpi.run.tuning import (
    goes_behind_steps,
    refuse_impossible_exchange,
)
from prunex_mpi.run.watchdog import Watchdog
from prunex_mpi.settings.fields import Settings
from prunex_mpi.settings.methods import EVERY_RANK_ALONE
from prunex_mpi.settings.resolve import to_toml


def run(world: MPI.Comm, settings: Settings, watchdog: Watchdog, received: ReceivedSignal) -> int:
    """Do all that the program does once it has its settings; return the exit code.

    Collective on `world`.
    """
    heartbeat = watchdog.heartbeat
    heartbeat.enter("start")
    started = time.time()
    set_up_logging(world.rank, world.size)
    refuse_lone_singleton(world)
    versions = recorded_versions()
    asked = to_toml(settings, versions)
    require_same(world, "the settings or the versions of the software", asked)
    # Without leaders every rank is a node of its own.
    ranks_per_node = 1 if settings.method in EVERY_RANK_ALONE else settings.ranks_per_node
    lanes = settings.leaders_per_node
    with take_places(world, ranks_per_node, settings.device, lanes=lanes) as place:
        topology, device = place.topology, place.device
        if world.rank == 0:
            log.info("%s", place.layout)
        if settings.dry_run:
            known = share_contents(world, settings.dataset, settings.data_dir, heartbeat)
            text = together(world, lambda: dry_run(settings, topology, known))
            if world.rank == 0:
                print(text, flush=True)
            return 0
        if settings.tensorboard:
            together(world, lambda: require_packages("--tensorboard", "report", "tensorboard"))
        heed_findings(place, settings)
        transport = find_transport(place, settings)
        refuse_impossible_exchange(topology, settings)
        if settings.run_dir:
            early = partial(refuse_early, Path(settings.run_dir), settings.resume)
            together(world, lambda: None if world.rank else early())
        heartbeat.enter("data")
        dataset = load_dataset(topology, settings, heartbeat, device)
        settings, restores = look_at_checkpoints(world, settings)
        wanted = settings
        work = assemble(topology, settings, dataset, device, transport, heartbeat, not restores)
        log.info("%s", describe_training(work, dataset, world.size))
        tell_beforehand(world, work)
        # As asked, and what was left to be measured.
        settings = work.settings
        heartbeat.beat(3)
        config = to_toml(settings, versions, wanted)
        with closing(dataset), open_run(world, settings, config) as opened:
            path, files = opened
            together(world, lambda: watchdog.share(path / "heartbeats", world.size))
            if settings.resume:
                if broadcast_text(world, _complete(world, files)):
                    log.info("%s is complete: there is nothing left to do", path)
                    return 0
                heartbeat.enter("checkpoint")
                restored = checkpoint.restore(topology, files, work)
                for line in restored.describe():
                    log.info("%s", line)
                if files is not None and files.versions() != versions:
                    log.info("the versions of the software are not those in %s/config.toml", path)
                together(world, lambda: make_longer(files, work))

            def open_board() -> None:
                if settings.tensorboard and files is not None:
                    files.board = Board(files.path, work.state.position.iteration)

            together(world, lambda: telling_disk_errors("the folder tensorboard", open_board))
            checkpoints = Checkpoints(settings.checkpoint_every)
            deadline = find_deadline(settings.time_limit, started)
            with (
                stop_agreement(topology.world, received, deadline) as stop,
                exchanging_behind(topology, goes_behind_steps(settings), transport) as behind,
            ):
                work = replace(work, stop=stop, behind=behind)
                received.training = True
                judge_beginning(topology, files, work)
                with tracing(topology, files, work):
                    status = run_to_end(topology, files, work, checkpoints)
            heartbeat.enter("finish")

            if status == "preempted":
                totals = {"status": status, "reason": stop.reason}
            else:
                totals = deliver(topology, files, work, status, dataset.class_names)
                write_last_checkpoint(topology, files, work, checkpoints)
                heartbeat.enter("finish")
                totals |= {"seconds_total": time.time() - started, "resumed": restores}
                totals["checkpoints"] = {"count": checkpoints.count, "seconds": checkpoints.seconds}

            def end() -> None:
                if files is not None:
                    files.write_summary(totals)

            # Last of all: a run that has a summary needs nothing more.
            together(world, lambda: telling_disk_errors(SUMMARY, end))
            if status == "preempted":
                log.info("stopped by %s: go on with --resume --run-dir %s", stop.reason, path)
            elif world.rank == 0:
                say(closing_table(totals, path))

            def wait(going: Callable[[], None]) -> None:
                if files is not None:
                    files.finish_removals(going)

            # Nobody leaves while another may still need the job.
            together_while(world, wait, heartbeat.go_on)
            return PREEMPTED if status == "preempted" else 0


def say(text: str) -> None:
    """Print what a complete run ends with; that it can't be printed makes no failure of it."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("the results can't be printed: %s", error.strerror)
        # Python would try once more, and fail, when it ends.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def open_run(
    world: MPI.Comm, settings: Settings, config: str
) -> Iterator[tuple[Path, RunDirectory | None]]:
    """Hold the run directory on rank 0 for the time of the block; the others get None.

    Collective on `world`.
    """
    # Jobs of an array begin in the same second.
    parts = time.strftime("%Y%m%d-%H%M%S"), settings.model, os.environ.get("SLURM_JOB_ID", "")
    name = f"runs/{'-'.join(filter(None, parts))}"
    new = "" if settings.run_dir or world.rank else new_folder(name)
    path = Path(broadcast_text(world, settings.run_dir or new))
    with ExitStack() as exits:

        def take() -> RunDirectory | None:
            if world.rank:
                return None
            held = RunDirectory(path, config, settings.resume, settings.outer_iterations)
            files = exits.enter_context(closing(held))
            files.make_folder("heartbeats")
            return files

        yield path, together(world, take)


def deliver(
    topology: Topology,
    files: RunDirectory | None,
    work: Work,
    status: str,
    class_names: Sequence[str],
) -> dict[str, Any]:
    """Write the delivered network; return on rank 0, which has `files`, what came of the run.

    That is {} elsewhere. Collective on `world`.
    """
    results = judge_end(topology, work)

    def write(going: Callable[[], None]) -> dict[str, Any]:
        if files is None:
            return {}
        with delivered(work):
            records = files.read_lines("metrics.jsonl")
            totals = summary.summarise(work.settings, topology, work.state, records, status)
            model = summary.save_model(files.path, work.state, work.problem, going)
        model["classes"] = list(class_names)
        return {**totals, **results, "delivered": model, "initial": read_initial(files.path)}

    action = lambda going: telling_disk_errors("the results", partial(write, going))  # noqa: E731
    return together_while(topology.world, action, work.heartbeat.go_on)


def judge_end(topology: Topology, work: Work) -> dict[str, Any]:
    """Test the best network where the test images were kept back for it; {} elsewhere.

    Collective on `world`.
    """
    best = work.state.position.best
    if work.problem.kept_back is None or not best:
        return {}
    with best_of(work):
        loss, accuracy = judge(topology, work, work.problem.kept_back)
    found = Judged(*best)
    held_out = {"iteration": found.iteration, "accuracy": found.accuracy, "loss": found.loss}
    return {"test_loss": loss, "test_accuracy": accuracy, "validation": held_out}


def make_longer(files: RunDirectory | None, work: Work) -> None:
    """Keep the length of a run that has become longer, and say what its learning rate does."""
    if files is None or not files.former_length:
        return
    telling_disk_errors("config.toml", files.keep_length)
    settings, rate = work.settings, rate_now(work)
    records = files.read_lines("metrics.jsonl")
    after = f" (last: {records[-1]['lr']:.3g})" if records else ""
    log.info(
        "the run becomes longer: %d outer iterations in place of %d; from here on the learning "
        "rate is that of a run of this length, now %.3g%s",
        settings.outer_iterations,
        files.former_length,
        rate,
        after,
    )


def _complete(world: MPI.Comm, files: RunDirectory | None) -> str:
    complete = together(world, lambda: files.complete() if files else False)
    return "complete" if complete else ""
