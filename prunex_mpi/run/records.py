"""What all ranks did, brought together on rank 0: ranks.jsonl; and a trace of each rank."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from prunex_mpi.base.logs import log
from prunex_mpi.base.record_keys import RANK_PHASES, RESIDUALS
from prunex_mpi.comm.agreement import broadcast_text, gather_counts, gather_text
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import RunContext
from prunex_mpi.run.directory import RunDirectory

PARTS = ("work", "exchange")
# Up to this number of ranks each outer iteration has a row; with N times as many every Nth.
RANKS_EACH = 64
# Of seconds behind the point, of residuals all that count.
DIGITS = 6
# Outer iterations in a trace, which would else grow without end.
TRACED = 3


class RankRecords:
    """Gather one row of numbers per rank and outer iteration, into memory that is allocated once.

    Making one is collective on `world`.
    """

    def __init__(self, topology: Topology) -> None:
        self.world = topology.world
        self.begins, self.every = True, -(-self.world.size // RANKS_EACH)
        columns = len(PARTS) * len(RANK_PHASES) + 1 + len(RESIDUALS)
        self.mine = np.zeros(columns)
        self.everyone = np.zeros((self.world.size if self.world.rank == 0 else 0, columns))
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
        values.append(rank["broadcast"])
        self.mine[: len(values)] = values
        self.mine[len(values) :] = [rank["residuals"].get(name, 0.0) for name in RESIDUALS]
        self.world.Gather(self.mine, self.everyone, root=0)
        if self.world.rank:
            return None
        columns = iter(self.everyone.T)
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
