"""Iterate to the end: records, checkpoints when due, back after a divergence, out when asked."""

import time
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import Diverged
from prunex_mpi.base.heartbeat import Heartbeat
from prunex_mpi.base.logs import Progress, log
from prunex_mpi.comm.collectives import Transport
from prunex_mpi.comm.preemption import StopAgreement
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.schedule import ROLLBACK_FACTOR
from prunex_mpi.core.state import Problem, State
from prunex_mpi.methods import hsadmm, local_sgd, per_step
from prunex_mpi.run import checkpoint
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.settings.fields import Settings

# --checkpoint-every auto: the share of the time that writing may take, and the shortest interval.
WRITING_SHARE = 0.02
SHORTEST_INTERVAL_S = 30.0
# Of the time a checkpoint took, kept free before a time limit.
RESERVE = 3
MAX_ROLLBACKS = 5


class Checkpoints:
    """Say when checkpoints are due; `seconds` and `count` tell what they took."""

    def __init__(self, every: str) -> None:
        self.every = every
        self.count, self.seconds, self.last_s = 0, 0.0, 0.0
        self.ended = time.monotonic()

    def due(self, world: MPI.Comm, iteration: int) -> bool:
        """Say, alike on every rank, whether to write one after `iteration`. Collective."""
        if self.every == "off":
            return False
        if self.every != "auto":
            return iteration % int(self.every) == 0
        wait_s = max(SHORTEST_INTERVAL_S, self.last_s / WRITING_SHARE)
        flag = np.array([time.monotonic() - self.ended > wait_s], dtype=np.uint8)
        world.Bcast(flag, root=0)
        return bool(flag[0])

    def note(self, seconds: float) -> None:
        """Count one that has just been written."""
        self.ended, self.last_s = time.monotonic(), seconds
        self.count, self.seconds = self.count + 1, self.seconds + seconds


@dataclass(frozen=True)
class Job:
    """What a job works on; `files` is None on all ranks but world rank 0."""

    topology: Topology
    files: RunDirectory | None
    state: State
    problem: Problem
    settings: Settings
    transport: Transport
    heartbeat: Heartbeat
    stop: StopAgreement


def run_to_end(job: Job, checkpoints: Checkpoints) -> str:
    """Iterate from where the state stands; return "completed", "converged" or "preempted".

    Raises Diverged on every rank. Collective on `world`.
    """
    settings, position = job.settings, job.state.position
    progress = Progress(settings.outer_iterations, settings.progress, job.topology.world.rank)
    progress.start(position.iteration - 1)
    if settings.on_divergence == "rollback" and position.iteration == 1:
        write_checkpoint(job, checkpoints)
    while True:
        try:
            status = iterate(job, checkpoints, progress)
            break
        except Diverged as error:
            rollbacks = position.rollbacks
            if settings.on_divergence == "stop" or rollbacks == MAX_ROLLBACKS:
                raise
            restored = checkpoint.restore(
                job.topology, job.files, job.state, job.problem, settings, job.transport
            )
            position.rollbacks = rollbacks + 1
            factor = ROLLBACK_FACTOR**position.rollbacks
            text = "%s; going back to checkpoint %s with %g of the learning rate"
            log.info(text, error, restored.name, factor)
    progress.close()
    return status


def iterate(job: Job, checkpoints: Checkpoints, progress: Progress) -> str:
    """Run the driver until it ends, stops or diverges; return the status. Collective."""
    status = "running"
    for record in driver_of(job.settings.method).outer_iterations(
        job.topology,
        job.state,
        job.problem,
        job.settings,
        job.transport,
        job.heartbeat,
        job.stop,
    ):
        job.heartbeat.enter("record")
        layers = record.pop("layers")
        status = record.pop("status")
        if job.files is not None:
            job.files.append("metrics.jsonl", [record])
            job.files.append("layers.jsonl", layers)
        progress.update(record)
        if status == "running" and checkpoints.due(job.topology.world, record["iteration"]):
            write_checkpoint(job, checkpoints)
    if job.stop.reason:
        write_checkpoint(job, checkpoints)
        return "preempted"
    return status


def driver_of(method: str) -> ModuleType:
    """Return the module whose `outer_iterations` runs `method`."""
    match method:
        case "prunex" | "prunex-flat":
            return hsadmm
        case "local-sgd" | "diloco" | "one-shot":
            return local_sgd
        case _:
            return per_step


def write_checkpoint(job: Job, checkpoints: Checkpoints) -> None:
    """Write a checkpoint and note what it took. Collective on `world`."""
    job.heartbeat.enter("checkpoint")
    started = time.monotonic()
    checkpoint.save(job.topology, job.files, job.state, job.problem)
    checkpoints.note(time.monotonic() - started)
    job.stop.reserve_s = RESERVE * checkpoints.last_s
