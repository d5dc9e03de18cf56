"""Run one exchange at a time behind the training: in a helper thread, over its own communicators.

A non-blocking collective makes no progress while Python computes, so the helper makes blocking
calls, which give the interpreter's lock back. Its communicators are duplicates: what the main
thread sends meanwhile over the originals can't be mistaken for the helper's. MPI must allow calls
from several threads at once (MPI_THREAD_MULTIPLE). On a GPU the helper has a stream of its own: in
that of the main thread it would wait for all the local steps that are queued there.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from torch import cuda

from mpi4py import MPI

from prunex_mpi.base.errors import UserError
from prunex_mpi.base.heartbeat import HELPER
from prunex_mpi.comm.agreement import run_collectively
from prunex_mpi.comm.collectives import Transport, between_nodes, for_another_thread
from prunex_mpi.comm.topology import Topology, duplicate, duplicate_racks, free_racks
from prunex_mpi.comm.traffic import Clock


class AsyncExchange:
    """The helper thread of one rank, and what it is at.

    `between` and `node` are duplicates of the leaders and the node of a topology, `transport` has
    host memory that nobody else writes, and such duplicates of racks; `clock` is the thread's own,
    as is `stream` on a GPU.
    """

    def __init__(self, between: MPI.Comm, node: MPI.Comm, transport: Transport) -> None:
        self.between, self.node, self.transport = between, node, transport
        self.clock = Clock()
        self.stream = cuda.Stream() if cuda.is_initialized() else None
        self.pool = ThreadPoolExecutor(1, HELPER, cuda.set_stream, (self.stream,))
        self.in_flight: Future | None = None

    def begin(self, exchange: Callable[[], None]) -> None:
        """Have the helper run `exchange`, which may only use what is the helper's to send with."""
        if self.in_flight is not None:
            raise RuntimeError("an exchange is under way already")
        if self.stream is not None:
            # What the exchange reads may be queued still.
            self.stream.wait_stream(cuda.current_stream())
        self.in_flight = self.pool.submit(self._do, exchange)

    def _do(self, exchange: Callable[[], None]) -> None:
        exchange()
        if self.stream is not None:
            # Who reads what it has written need not know of this stream.
            self.stream.synchronize()

    @property
    def at_rest(self) -> bool:
        """Return whether the helper is idle; what it has raised may not be known yet."""
        return self.in_flight is None or self.in_flight.done()

    def finish(self) -> None:
        """Wait for what is under way, if anything is; raise what it has raised."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.result()


@contextmanager
def exchanging_asynchronously(
    topology: Topology, wanted: bool, transport: Transport
) -> Iterator[AsyncExchange | None]:
    """Have a helper thread for the time of the block, where one is `wanted`.

    Raises UserError on every rank where MPI does not allow several threads. Collective on `world`,
    `node` and `leader`, at both ends.
    """
    if not wanted:
        yield None
        return
    run_collectively(topology.world, check_thread_support)
    transport = between_nodes(for_another_thread(transport), topology.num_peers)
    helper = AsyncExchange(
        duplicate(topology, topology.leader) if topology.is_leader else MPI.COMM_NULL,
        duplicate(topology, topology.node),
        replace(transport, racks=duplicate_racks(topology)),
    )
    try:
        yield helper
    except UserError:
        _free(helper)
        raise
    except MPI.Exception:
        # The thread ends once its communicators are revoked, or the job is ended.
        helper.pool.shutdown(wait=False)
        raise
    _free(helper)


def check_thread_support() -> None:
    """Raise UserError where MPI was not started with MPI_THREAD_MULTIPLE."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UserError(
            "overlap-steps: this MPI does not let several threads communicate "
            "(MPI_THREAD_MULTIPLE); leave it at 0 or use an MPI that does"
        )


def _free(helper: AsyncExchange) -> None:
    helper.finish()
    helper.pool.shutdown()
    if helper.between != MPI.COMM_NULL:
        helper.between.Free()
    helper.node.Free()
    free_racks(helper.transport.racks)
