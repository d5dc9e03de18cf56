"""Have all ranks note what they do when, and bring it together in trace.json, on one clock."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.errors import Diverged
from prunex_mpi.base.files import telling_disk_errors
from prunex_mpi.base.trace import HELPER, Trace, label
from prunex_mpi.comm.agreement import gather_text, seconds_ahead, together
from prunex_mpi.comm.topology import Topology
from prunex_mpi.core.state import Work
from prunex_mpi.run.directory import RunDirectory
from prunex_mpi.run.trace_file import TraceFile

NAME = "trace.json"


@contextmanager
def tracing(topology: Topology, files: RunDirectory | None, work: Work) -> Iterator[None]:
    """Have both threads of each rank note what they do for the time of the block, with --trace.

    `files` is None on all ranks but world rank 0, and has the file of the trace meanwhile. Raises
    UserError on every rank. Collective on `world`, at both ends: it ends the same on every rank, or
    the job is ended anyway.
    """
    if not work.settings.trace:
        yield
        return
    world, clock = topology.world, work.state.position.clock

    def open_file() -> TraceFile | None:
        return None if files is None else TraceFile(files.path / NAME, work.settings.resume)

    file = together(world, lambda: telling_disk_errors(NAME, open_file))
    if files is not None:
        files.trace = file
    # What rank 0's clock says at the zero of the file.
    zero = np.array([time.perf_counter() - (time.time() - file.zero) if file else 0.0])
    world.Bcast(zero, root=0)
    base = float(zero[0]) + seconds_ahead(world)
    clock.trace = Trace(world.rank, base=base)
    if work.behind is not None:
        work.behind.clock.trace = Trace(world.rank, HELPER, base)
    name = f"rank {world.rank}, node {topology.node_index} ({socket.gethostname()})"
    _gather(world, file, label(world.rank, name))
    ended = False
    try:
        yield
        write_trace(world, files, work)
        ended = True
    except Diverged:
        write_trace(world, files, work)
        raise
    finally:
        clock.trace = None
        if files is not None:
            files.trace = None
        if file is not None:
            file.close(ended)


def write_trace(world: MPI.Comm, files: RunDirectory | None, work: Work) -> None:
    """Write what all ranks have noted, where they do. Collective on `world`."""
    clock = work.state.position.clock
    if clock.trace is None:
        return
    events = clock.trace.take()
    # Of an exchange under way parts are there already: it is written as a whole, later.
    if work.behind is not None and work.behind.at_rest:
        events += work.behind.clock.trace.take()
    _gather(world, None if files is None else files.trace, events)


def _gather(world: MPI.Comm, file: TraceFile | None, events: list[str]) -> None:
    texts = gather_text(world, "\n".join(events))
    if file is not None:
        file.append([event for text in texts for event in text.split("\n") if event])
