"""The loop of a run: batches and losses, records, checkpoints when due, the end when asked."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from mpi4py import MPI

from prunex_mpi.base.errors import Diverged, UserError, log
from prunex_mpi.base.files import LAYERS, METRICS, RANKS
from prunex_mpi.base.record_keys import RANK_PHASES, RESIDUALS
from prunex_mpi.base.signals import ReceivedSignal
from prunex_mpi.comm.agreement import (
    VERDICT_BYTES,
    broadcast_text,
    gather_counts,
    gather_text,
    raise_together,
    run_collectively,
)
from prunex_mpi.comm.async_exchange import check_thread_support, exchanging_asynchronously
from prunex_mpi.comm.gradients import GradientAverager
from prunex_mpi.comm.preemption import stop_agreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.evaluation import check_errors, check_finite
from prunex_mpi.core.loop import ask_to_stop_
from prunex_mpi.core.schedule import local_steps, rate_now, rounds_left, steps_taken, total_steps
from prunex_mpi.core.state import RunContext, agreeing
from prunex_mpi.core.task import distilled
from prunex_mpi.methods.stepper import Stepper
from prunex_mpi.models import batchnorm
from prunex_mpi.run import checkpoint, checkpoint_files
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.kept import InMemoryCheckpoint
from prunex_mpi.run.pretrained import evaluate_initial
from prunex_mpi.run.summary import Progress
from prunex_mpi.settings.fields import Settings

# --checkpoint-every auto: the share of the time that writing may take, and the shortest interval.
WRITING_SHARE = 0.02
SHORTEST_INTERVAL_S = 30.0
# Of the time a checkpoint took, kept free before a time limit.
RESERVE = 3
PARTS = ("work", "exchange")
# Up to this number of ranks each outer iteration has a row; with N times as many every Nth.
RANKS_EACH = 64
# Of seconds behind the point, of residuals all that count.
DIGITS = 6
# Outer iterations in a trace, which would else grow without end.
TRACED = 3


class Checkpoints:
    """Decide when checkpoints are due, and write them; `count` them, and their `seconds`.

    `files` is None on all ranks but world rank 0; `received` notes the signals of the run.
    """

    def __init__(
        self, topology: Topology, files: RunDirectory | None, every: str, received: ReceivedSignal
    ) -> None:
        self.topology, self.files = topology, files
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

    def due_on_rank_0(self, iteration: int) -> bool:
        """Return whether rank 0 finds one due. Collective on `world`."""
        due = np.array([self.due(iteration)], dtype=np.uint8)
        self.topology.world.Bcast(due, root=0)
        return bool(due[0])

    def write(self, context: RunContext) -> None:
        """Write one and note what it took; raise Diverged where it would be of no use.

        Collective on `world`.
        """
        context.heartbeat.enter("checkpoint")
        if context.helper is not None:
            # What has arrived is written with the rest, and waits for its step in both runs.
            context.helper.finish()
        check_finite(self.topology, context)
        self.save(context)
        if context.stop is not None:
            context.stop.reserve_s = RESERVE * self.last_s

    def write_last(self, context: RunContext) -> None:
        """Write the last one of a complete run, unless there are to be none.

        It comes before summary.json, so that a job that ends between them goes on from it to its
        results. The run is complete without it: where it can't be written that is said, and no
        more. Collective on `world`.
        """
        if self.every == "off":
            return
        context.heartbeat.enter("checkpoint")
        try:
            self.save(context)
        except UserError as error:
            log.warning("the run is complete, but its last checkpoint is missing: %s", error)
            if self.files is not None:
                # On a full disk what was written of it takes the room of summary.json.
                with suppress(OSError):
                    checkpoint_files.remove_partial(self.files.path)

    def save(self, context: RunContext) -> None:
        """Write one, and count it. Collective on `world`."""
        started = time.monotonic()
        checkpoint.save(self.topology, self.files, context)
        self.ended = time.monotonic()
        self.last_s = self.ended - started
        self.count, self.seconds = self.count + 1, self.seconds + self.last_s


def train(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    checkpoints: Checkpoints,
    deadline: float | None,
    kept: InMemoryCheckpoint | None = None,
) -> tuple[str, str]:
    """Train with all that goes on meanwhile; return the status, and what stopped the run, or "".

    `files` is None on all ranks but world rank 0. With `kept` each outer iteration is kept in
    memory. Raises Diverged on every rank. Collective on `world`.
    """
    settings, received = context.settings, checkpoints.received
    with (
        stop_agreement(topology.world, received, deadline, topology.made) as stop,
        exchanging_asynchronously(topology, overlaps_steps(settings), context.transport) as helper,
    ):
        context = replace(context, stop=stop, helper=helper)
        if kept is not None:
            # What was trained before a loss is in memory: however late, it becomes a checkpoint.
            stop.went_on = kept.loss is not None and bool(kept.snapshots)
        received.training = True
        evaluate_initial(topology, files, context)
        try:
            with (
                tracing(topology, files, context),
                closing(progress_of(topology, context)) as progress,
            ):
                status = iterate(topology, files, context, checkpoints, progress, kept)
        except Diverged as error:
            if files is not None:
                files.note_divergence(str(error))
            raise
    return status, stop.reason


def overlaps_steps(settings: Settings) -> bool:
    """Return whether exchanges of this run overlap with local steps."""
    return settings.method.averages and settings.overlap_steps > 0


def check_exchange(topology: Topology, settings: Settings) -> None:
    """Raise UserError on every rank where nodes, MPI or torch do not allow what is asked for.

    Collective on `world`.
    """
    if not settings.method.averages:
        return
    if settings.overlap_steps:
        run_collectively(topology.world, check_thread_support)


def progress_of(topology: Topology, context: RunContext) -> Progress:
    """Show a run from where it stands."""
    settings, problem = context.settings, context.problem
    progress = Progress(
        iterations=context.state.position.iteration - 1 + rounds_left(context),
        steps=total_steps(settings, problem.steps),
        count=problem.train.batch_size * problem.task.row * topology.world_size,
        unit=problem.task.unit,
        enabled=topology.world.rank == 0 and settings.progress == "auto",
        heartbeat=context.heartbeat,
    )
    progress.start(context.state.position.steps_done, local_steps(context))
    return progress


def iterate(
    topology: Topology,
    files: RunDirectory | None,
    context: RunContext,
    checkpoints: Checkpoints,
    progress: Progress,
    kept: InMemoryCheckpoint | None,
) -> str:
    """Iterate from where the state stands; return "completed", "converged" or "preempted".

    Collective on `world`.
    """
    # Nothing is left where a job ended between its last checkpoint and its summary.
    if context.state.position.converged_of == context.settings.outer_iterations:
        return "converged"
    status = "running" if rounds_left(context, most=1) > 0 else "completed"
    with closing(recorded(topology, files, context, progress)) as rounds:
        for record, status in rounds:
            if status != "running":
                continue
            if kept:
                kept.keep(topology, files, context)
            if checkpoints.due_on_rank_0(record["iteration"]):
                checkpoints.write(context)
    if context.stop is not None and context.stop.reason:
        # The run could not go on from there.
        check_errors(topology, context)
        checkpoints.write(context)
        return "preempted"
    return status


def recorded(
    topology: Topology, files: RunDirectory | None, context: RunContext, progress: Progress
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the record and the status of each outer iteration, once it is in the run's files.

    Collective on `world`.
    """
    ranks = RankRecords(topology)
    for record in outer_iterations(topology, context):
        context.heartbeat.enter("record")
        layers = record.pop("layers")
        status = record.pop("status")
        row = ranks.gather(record["iteration"], record.pop("rank"))
        if files is not None:
            files.append(METRICS, [record])
            files.append(LAYERS, layers)
            files.append(RANKS, [row] if row else [])
        if context.state.position.clock.profiler is not None:
            context.state.position.clock.profiler.step()
        progress.update(record, context.state.position.steps_done, local_steps(context))
        yield record, status


# --------------------------------------------------------------------------------------------------
# Batches, losses and backward passes between the steps of a method
# --------------------------------------------------------------------------------------------------


def outer_iterations(topology: Topology, context: RunContext) -> Iterator[dict[str, Any]]:
    """Train from where `context` stands; yield the record of each outer iteration.

    Collective on `topology.world`: every rank must exhaust the iterator, which ends early where the
    ranks agree to stop. Between two records the state is all there is to know. Raises Diverged on
    every rank.
    """
    with closing(Stepper(topology, context)) as stepper:
        first, record = topology.world, stepper.resume(None)
        while not stepper.ended:
            if record is not None:
                yield record
                record = stepper.resume(None)
            else:
                record = stepper.resume(learn(context, stepper.averager, first))
                first = None


def learn(
    context: RunContext, averager: GradientAverager | None, world: MPI.Comm | None = None
) -> Tensor:
    """Add the (scaled) gradient of the next batch to that of the model; return its loss, detached.

    The averager, if there is one, has begun then to send the gradient. With `world`, in the first
    step of a job, what model or loss refuse is everyone's UserError: collective on it. Later a rank
    that raises is alone, and no UserError, which all ranks raise, may leave it.
    """
    context.state.optimizer.set_rate_(rate_now(context))
    batch = next_batch(context)
    loss, refused = None, None
    try:
        loss = forward(context, *batch)
    except UserError as error:
        refused = error
    if world is not None:
        with agreeing(context.state, "Allreduce of what went wrong", VERDICT_BYTES):
            raise_together(world, refused)
    elif refused is not None:
        raise RuntimeError(str(refused)) from refused
    if averager is not None:
        averager.begin()
    context.state.scaler.scale(loss).backward()
    return loss.detach()


def next_batch(context: RunContext) -> tuple[Tensor, Tensor]:
    """Return images and labels of the next batch."""
    problem = context.problem
    images, labels = problem.train.next()
    context.state.position.clock.data += problem.train.waited
    if problem.reader is not None and problem.reader.error is not None:
        ask_to_stop_(context)
    return images, labels


def forward(context: RunContext, images: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a batch, which is one update of BatchNorm's averages."""
    problem, state, amp = context.problem, context.state, context.settings.amp
    fresh = state.bn_modules if state.position.fresh_statistics else []
    update = steps_taken(context) + 1
    device_type = state.theta.device.type
    amp_dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    with (
        batchnorm.warmed_up(fresh, update) as warming,
        torch.autocast(device_type, amp_dtype, enabled=amp != "off"),
    ):
        # A compiled network is compiled anew for each momentum.
        outputs = (problem.model if warming else problem.forward)(images)
        loss = problem.loss(outputs, labels)
        return distilled(problem.teacher, images, outputs, loss) if problem.teacher else loss


# --------------------------------------------------------------------------------------------------
# What all ranks did, brought together on rank 0; and a trace of each rank
# --------------------------------------------------------------------------------------------------


class RankRecords:
    """Gather one row of numbers per rank and outer iteration.

    Making one is collective on `world`.
    """

    def __init__(self, topology: Topology) -> None:
        self.world = topology.world
        self.begins, self.every = True, -(-self.world.size // RANKS_EACH)
        self.nodes = gather_counts(self.world, topology.node_index)
        names = gather_text(self.world, socket.gethostname())
        # Of a node of virtual ones too: all its ranks share a machine, or its first rank's counts.
        hosts = dict(reversed(list(zip(self.nodes, names, strict=False))))
        self.hosts = [hosts[node] for node in sorted(hosts)]

    def gather(self, iteration: int, rank: dict[str, Any]) -> dict[str, Any] | None:
        """Return the object of an outer iteration on world rank 0, None on the others.

        None there too where this iteration has none. `rank` is what `rank_record` returns; its
        residuals are empty on all ranks or on none. The first object also names the hosts.
        Collective on `world`.
        """
        if iteration % self.every and not self.begins:
            return None
        self.begins = False
        values = [rank[part][phase] for part in PARTS for phase in RANK_PHASES]
        values += [rank["broadcast"], *(rank["residuals"].get(name, 0.0) for name in RESIDUALS)]
        everyone = np.empty((self.world.size if self.world.rank == 0 else 0, len(values)))
        self.world.Gather(np.array(values, dtype=np.float64), everyone, root=0)
        if self.world.rank:
            return None
        columns = iter(everyone.T)
        row: dict[str, Any] = {"iteration": iteration, "node": self.nodes}
        if self.hosts:
            row["hosts"], self.hosts = self.hosts, []
        for part in PARTS:
            row[part] = {phase: rounded(next(columns)) for phase in RANK_PHASES}
        row["broadcast"] = rounded(next(columns))
        found = {
            name: [float(f"{x:.{DIGITS}g}") for x in next(columns).tolist()] for name in RESIDUALS
        }
        row["residuals"] = found if rank["residuals"] else None
        return row


def rounded(seconds: np.ndarray) -> list[float]:
    """Return seconds as they are written, without a zero below zero."""
    return [round(s, DIGITS) + 0.0 for s in seconds.tolist()]


@contextmanager
def tracing(topology: Topology, files: RunDirectory | None, context: RunContext) -> Iterator[None]:
    """Have torch's profiler record the first outer iterations of a job, with --trace.

    Each rank writes a file of its own: trace.json on world rank 0, where `files` is not None, and
    trace-rank-N.json beside it on the others. Collective on `world`.
    """
    if not context.settings.trace:
        yield
        return
    rank, clock = topology.world.rank, context.state.position.clock
    folder = broadcast_text(topology.world, str(files.path) if files is not None else "")
    path = Path(folder) / (f"trace-rank-{rank:05d}.json" if rank else "trace.json")

    def save(profiler: profile) -> None:
        # Whatever lies in its place is replaced, and not opened.
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            log.warning("%s can't be written: %s", path, error)

    def record(step: int) -> ProfilerAction:
        if step >= TRACED:
            return ProfilerAction.NONE
        last = step == TRACED - 1
        return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD

    activities = [ProfilerActivity.CPU]
    if context.state.theta.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, schedule=record, on_trace_ready=save) as profiler:
        profiler.add_metadata_json("rank", str(rank))
        clock.profiler = profiler
        try:
            yield
        finally:
            clock.profiler = None
