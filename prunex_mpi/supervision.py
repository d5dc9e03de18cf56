"""Iterate to the end: records, checkpoints when due, back after a divergence, out when asked."""

import time

import numpy as np

from mpi4py import MPI

from prunex_mpi import checkpoint, hsadmm
from prunex_mpi.collectives import Transport
from prunex_mpi.comm import Topology
from prunex_mpi.errors import Diverged
from prunex_mpi.logs import Progress, RunDirectory, log
from prunex_mpi.preemption import StopAgreement
from prunex_mpi.schedule import ROLLBACK_FACTOR
from prunex_mpi.settings import Settings
from prunex_mpi.state import Problem, State
from prunex_mpi.watchdog import Heartbeat

# --checkpoint-every auto: the share of the time that writing may take, and the shortest interval.
WRITING_SHARE = 0.02
SHORTEST_INTERVAL_S = 30.0
# Of the time a checkpoint took, kept free before a time limit.
RESERVE = 3
MAX_ROLLBACKS = 5


class Checkpoints:
    """Write checkpoints when they are due; `seconds` and `count` tell what they took."""

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

    def write(
        self, topology: Topology, files: RunDirectory | None, state: State, problem: Problem
    ) -> None:
        """Write one now. Collective on `world`."""
        started = time.monotonic()
        checkpoint.save(topology, files, state, problem)
        self.ended = time.monotonic()
        self.last_s = self.ended - started
        self.count, self.seconds = self.count + 1, self.seconds + self.last_s


def run_to_end(
    topology: Topology,
    files: RunDirectory | None,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    heartbeat: Heartbeat,
    stop: StopAgreement,
    checkpoints: Checkpoints,
) -> str:
    """Iterate from where `state` stands; return "completed", "converged" or "preempted".

    `files` is None on all ranks but world rank 0. Raises Diverged on every rank. Collective on
    `world`.
    """
    progress = Progress(settings.outer_iterations, settings.progress, topology.world.rank)
    progress.start(state.position.iteration - 1)
    if settings.on_divergence == "rollback" and state.position.iteration == 1:
        heartbeat.enter("checkpoint")
        checkpoints.write(topology, files, state, problem)
    while True:
        try:
            status = _iterate(
                topology,
                files,
                state,
                problem,
                settings,
                transport,
                heartbeat,
                stop,
                checkpoints,
                progress,
            )
            break
        except Diverged as error:
            rollbacks = state.position.rollbacks
            if settings.on_divergence == "stop" or rollbacks == MAX_ROLLBACKS:
                raise
            restored = checkpoint.restore(topology, files, state, problem, settings, transport)
            state.position.rollbacks = rollbacks + 1
            log.info(
                "%s; going back to checkpoint %s with %g of the learning rate",
                error,
                restored.name,
                ROLLBACK_FACTOR ** (rollbacks + 1),
            )
    progress.close()
    return status


def _iterate(
    topology: Topology,
    files: RunDirectory | None,
    state: State,
    problem: Problem,
    settings: Settings,
    transport: Transport,
    heartbeat: Heartbeat,
    stop: StopAgreement,
    checkpoints: Checkpoints,
    progress: Progress,
) -> str:
    """Run the driver until it ends, stops or diverges; return the status. Collective."""
    status = "running"
    for record in hsadmm.outer_iterations(
        topology, state, problem, settings, transport, heartbeat, stop
    ):
        heartbeat.enter("record")
        layers = record.pop("layers")
        status = record.pop("status")
        if files is not None:
            files.append("metrics.jsonl", [record])
            files.append("layers.jsonl", layers)
        progress.update(record)
        if status == "running" and checkpoints.due(topology.world, record["iteration"]):
            heartbeat.enter("checkpoint")
            checkpoints.write(topology, files, state, problem)
            stop.reserve_s = RESERVE * checkpoints.last_s
    if stop.reason:
        heartbeat.enter("checkpoint")
        checkpoints.write(topology, files, state, problem)
        return "preempted"
    return status
