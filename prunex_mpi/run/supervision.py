"""Iterate to the end: records, checkpoints when due, back after a divergence, out when asked."""

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import Diverged, UserError
from prunex_mpi.base.files import METRICS, telling_disk_errors
from prunex_mpi.base.logs import log
from prunex_mpi.base.progress import Length, Progress
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.agreement import run_collectively
from prunex_mpi.comm.async_exchange import check_thread_support, exchanging_behind
from prunex_mpi.comm.preemption import stop_agreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import check_errors, check_finite
from prunex_mpi.core.schedule import local_steps, rounds_left, total_steps
from prunex_mpi.core.state import RunContext
from prunex_mpi.core.sums import MOST_SUMMED, SUMMED
from prunex_mpi.methods.exchanges import check_workers
from prunex_mpi.run import checkpoint, checkpoint_files
from prunex_mpi.run.directory import RunDirectory, Tensorboard
from prunex_mpi.run.kept import Kept, keep
from prunex_mpi.run.learn import outer_iterations
from prunex_mpi.run.pretrained import evaluate_initial
from prunex_mpi.run.records import RankRecords, tracing
from prunex_mpi.settings.fields import Settings

# --checkpoint-every auto: the share of the time that writing may take, and the shortest interval.
WRITING_SHARE = 0.02
SHORTEST_INTERVAL_S = 30.0
# Of the time a checkpoint took, kept free before a time limit.
RESERVE = 3


class Checkpoints:
    """Decide when checkpoints are due; count them in `count` and their time in `seconds`.

    `received` is told what is kept.
    """

    def __init__(self, every: str, received: ReceivedSignal) -> None:
        self.every, self.received = every, received
        self.count, self.seconds, self.last_s = 0, 0.0, 0.0
        # The first one soon: it shows that there is room, and little is lost without it.
        self.ended = time.monotonic() - SHORTEST_INTERVAL_S

    def due(self, iteration: int) -> bool:
        """Return whether to write one after `iteration`, by the clock of this rank."""
        if self.every == "off":
            return False
        if self.every != "auto":
            return iteration % int(self.every) == 0
        return time.monotonic() - self.ended > max(SHORTEST_INTERVAL_S, self.last_s / WRITING_SHARE)

    def save(self, topology: Topology, files: RunDirectory | None, context: RunContext) -> None:
        """Write one, and count it. Collective on `world`."""
        started = time.monotonic()
        checkpoint.save(topology, files, context)
        self.ended = time.monotonic()
        self.last_s = self.ended - started
        self.count, self.seconds = self.count + 1, self.seconds + self.last_s
        self.received.kept = context.state.position.iteration - 1


def train(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    checkpoints: Checkpoints,
    received: ReceivedSignal,
    deadline: float | None,
    kept: Kept | None = None,
) -> tuple[str, str]:
    """Train with all that goes on meanwhile; return the status, and what stopped the run, or "".

    With `kept` each outer iteration is kept in memory.

    Collective on `world`.
    """
    world, settings = topology.world, context.settings

    def open_tensorboard() -> None:
        if settings.tensorboard and files is not None:
            files.tensorboard = Tensorboard(files.path, context.state.position.iteration)

    run_collectively(world, lambda: telling_disk_errors("the folder tensorboard", open_tensorboard))
    with (
        stop_agreement(world, received, deadline, topology.made) as stop,
        exchanging_behind(topology, goes_behind_steps(settings), context.transport) as behind,
    ):
        context = replace(context, stop=stop, behind=behind)
        if kept is not None:
            kept.context = context
            # What was trained before a loss is in memory: however late, it becomes a checkpoint.
            stop.went_on = kept.loss is not None and bool(kept.snapshots)
        if kept is None:
            # Whatever goes on does so from a checkpoint.
            received.kept = context.state.position.iteration - 1
        received.training = True
        evaluate_initial(topology, files, context)
        with tracing(topology, files, context):
            status = run_to_end(topology, files, context, checkpoints, kept)
    return status, stop.reason


def goes_behind_steps(settings: Settings) -> bool:
    """Return whether exchanges of this run overlap with local steps."""
    return settings.method.averages and settings.overlap_steps > 0


def check_exchange(topology: Topology, settings: Settings) -> None:
    """Raise UserError on every rank where nodes, MPI or torch do not allow what is asked for.

    Collective on `world`.
    """
    check_workers(settings, topology)
    if not settings.method.averages:
        return
    if settings.payload == SUMMED and topology.num_peers > MOST_SUMMED:
        raise UserError(
            f"payload int8sum is for up to {MOST_SUMMED} nodes, not {topology.num_peers}: their "
            "sum must fit into 8 bits; use int8 or int4"
        )
    if settings.overlap_steps:
        run_collectively(topology.world, check_thread_support)


def run_to_end(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    checkpoints: Checkpoints,
    kept: Kept | None,
) -> str:
    """Iterate from where the state stands; return "completed", "converged" or "preempted".

    `files` is None on all ranks but world rank 0. Raises Diverged on every rank. Collective on
    `world`.
    """
    with closing(progress_of(topology, context)) as bar:
        try:
            return iterate(topology, files, context, checkpoints, bar, kept)
        except Diverged as error:
            if files is not None:
                files.note_divergence(str(error))
            raise


def progress_of(topology: Topology, context: RunContext) -> Progress:
    """Show a run from where it stands."""
    settings, problem = context.settings, context.problem
    length = Length(
        context.state.position.iteration - 1 + rounds_left(context),
        total_steps(settings, problem.steps),
        problem.train.batch_size * problem.task.row * topology.world_size,
        problem.task.unit,
    )
    progress = Progress(length, settings.progress, topology.world.rank, context.heartbeat)
    position = context.state.position
    progress.start(position.iteration - 1, position.steps_done, local_steps(context))
    return progress


def iterate(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    checkpoints: Checkpoints,
    progress: Progress,
    kept: Kept | None,
) -> str:
    """Run the driver until it ends, stops or diverges; return the status. Collective."""
    # Nothing is left where a job ended between its last checkpoint and its summary.
    if context.state.position.converged_of == context.settings.outer_iterations:
        return "converged"
    status = "running" if rounds_left(context, most=1) > 0 else "completed"
    with closing(recorded(topology, files, context, progress)) as rounds:
        for record, status in rounds:
            if status != "running":
                continue
            if kept:
                keep(topology, files, context, kept)
            if is_due(topology.world, checkpoints, record["iteration"]):
                write_checkpoint(topology, files, context, checkpoints)
    if context.stop is not None and context.stop.reason:
        # The run could not go on from there.
        check_errors(topology, context)
        write_checkpoint(topology, files, context, checkpoints)
        return "preempted"
    return status


def is_due(world: MPI.Comm, checkpoints: Checkpoints, iteration: int) -> bool:
    """Return whether rank 0 finds a checkpoint due. Collective on `world`."""
    due = np.array([checkpoints.due(iteration)], dtype=np.uint8)
    world.Bcast(due, root=0)
    return bool(due[0])


def recorded(
    topology: Topology, files: RunDirectory | None, context: RunContext, progress: Progress
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the record and the status of each outer iteration, once it is in the run's files.

    What is yielded has `exchange` as well: the seconds of each phase that this rank spent in
    messages. Collective on `world`.
    """
    ranks = RankRecords(topology)
    for record in outer_iterations(topology, context):
        context.heartbeat.enter("record")
        layers = record.pop("layers")
        status = record.pop("status")
        rank = record.pop("rank")
        row = ranks.gather(record["iteration"], rank)
        if files is not None:
            files.append(METRICS, [record])
            files.append("layers.jsonl", layers)
            files.append("ranks.jsonl", [row] if row else [])
            if files.tensorboard is not None:
                files.tensorboard.add(record)
        if context.state.position.clock.profiler is not None:
            context.state.position.clock.profiler.step()
        progress.update(record, context.state.position.steps_done, local_steps(context))
        yield {**record, "exchange": rank["exchange"]}, status


def write_last_checkpoint(
    topology: Topology, files: RunDirectory | None, context: RunContext, checkpoints: Checkpoints
) -> None:
    """Write the one from which a complete run can become longer, unless there are to be none.

    It comes before summary.json, so that a job that ends between them goes on from it to its
    results. The run is complete without it: where it can't be written that is said, and no more.
    Collective on `world`.
    """
    if checkpoints.every == "off":
        return
    context.heartbeat.enter("checkpoint")
    try:
        checkpoints.save(topology, files, context)
    except UserError as error:
        log.warning("the run is complete, but its last checkpoint is missing: %s", error)
        if files is not None:
            # On a full disk what was written of it takes the room of summary.json.
            with suppress(OSError):
                checkpoint_files.remove_partial(files.path)


def write_checkpoint(
    topology: Topology, files: RunDirectory | None, context: RunContext, checkpoints: Checkpoints
) -> None:
    """Write a checkpoint and note what it took; raise Diverged where it would be of no use.

    Collective on `world`.
    """
    context.heartbeat.enter("checkpoint")
    if context.behind is not None:
        # What has arrived is written with the rest, and waits for its step in both runs.
        context.behind.finish()
    check_finite(topology, context)
    checkpoints.save(topology, files, context)
    if context.stop is not None:
        context.stop.reserve_s = RESERVE * checkpoints.last_s
