"""What all ranks did, brought together on rank 0: ranks.jsonl, and trace.json on one clock."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import Diverged
from prunex_mpi.base.files import telling_disk_errors
from prunex_mpi.base.record_keys import RANK_PHASES, RESIDUALS
from prunex_mpi.base.trace import HELPER, Trace, TraceFile, label
from prunex_mpi.comm.agreement import gather_counts, gather_text, run_collectively, seconds_ahead
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import RunContext
from prunex_mpi.run.directory import RunDirectory

PARTS = ("work", "exchange")
# Up to this number of ranks each outer iteration has a row; with N times as many every Nth.
RANKS_EACH = 64
# Of seconds behind the point, of residuals all that count.
DIGITS = 6
NAME = "trace.json"


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
    """Have both threads of each rank note what they do for the time of the block, with --trace.

    `files` is None on all ranks but world rank 0, and has the file of the trace meanwhile. Raises
    UserError on every rank. Collective on `world`, at both ends: it ends the same on every rank, or
    the job is ended anyway.
    """
    if not context.settings.trace:
        yield
        return
    world, clock = topology.world, context.state.position.clock

    def open_file() -> TraceFile | None:
        return None if files is None else TraceFile(files.path / NAME, context.settings.resume)

    file = run_collectively(world, lambda: telling_disk_errors(NAME, open_file))
    if files is not None:
        files.trace = file
    # What rank 0's clock says at the zero of the file.
    zero = np.array([time.perf_counter() - (time.time() - file.zero) if file else 0.0])
    world.Bcast(zero, root=0)
    base = float(zero[0]) + seconds_ahead(world)
    clock.trace = Trace(world.rank, base=base)
    if context.behind is not None:
        context.behind.clock.trace = Trace(world.rank, HELPER, base)
    name = f"rank {world.rank}, node {topology.node_index} ({socket.gethostname()})"
    _gather(world, file, label(world.rank, name))
    ended = False
    try:
        yield
        write_trace(world, files, context)
        ended = True
    except Diverged:
        write_trace(world, files, context)
        raise
    finally:
        clock.trace = None
        if files is not None:
            files.trace = None
        if file is not None:
            file.close(ended)


def write_trace(world: MPI.Comm, files: RunDirectory | None, context: RunContext) -> None:
    """Write what all ranks have noted, where they do. Collective on `world`."""
    clock = context.state.position.clock
    if clock.trace is None:
        return
    events = clock.trace.take()
    # Of an exchange under way parts are there already: it is written as a whole, later.
    if context.behind is not None and context.behind.at_rest:
        events += context.behind.clock.trace.take()
    _gather(world, None if files is None else files.trace, events)


def _gather(world: MPI.Comm, file: TraceFile | None, events: list[str]) -> None:
    texts = gather_text(world, "\n".join(events))
    if file is not None:
        file.append([event for text in texts for event in text.split("\n") if event])
