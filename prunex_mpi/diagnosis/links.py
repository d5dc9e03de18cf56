"""Measure latency and bandwidth inside a node and between nodes, while the other ranks sleep."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpi4py import MPI

from prunex_mpi.base.units import MIB
from prunex_mpi.comm.topology import Topology

LATENCY_BYTES = 8
BANDWIDTH_BYTES = 4 * MIB
ALLREDUCE_BYTES = 16 * MIB
WARM_UP_TURNS = 3
MAX_TURNS = 1000
# For each of the at most five measurements.
LIMIT_S = 1.0
NAP_S = 0.01


@dataclass(frozen=True)
class Link:
    """One measurement: `between` whom, of what size, the median of `turns` times."""

    what: str
    between: str
    size_bytes: int
    seconds: float
    turns: int


def measure_links(
    topology: Topology, limit_s: float = LIMIT_S, beat: Callable[[], None] = lambda: None
) -> list[Link]:
    """Return what the links are worth on world rank 0, an empty list elsewhere.

    Collective on `world`, `node` and `leader`. Which measurements there are depends only on the
    sizes of the nodes, which all ranks know.
    """
    sizes, leader = topology.node_sizes, topology.leader
    largest = sizes.index(max(sizes))
    last = len(sizes) - 1
    in_largest = topology.node if topology.node_index == largest else MPI.COMM_NULL
    links = []

    def pairs(comm: MPI.Comm, other: int, where: str) -> None:
        for what, size in (("latency", LATENCY_BYTES), ("bandwidth", BANDWIDTH_BYTES)):
            member = comm != MPI.COMM_NULL and comm.rank in (0, other)
            times = ping_pong(comm, other, size, limit_s) if member else []
            links.append(_link(topology.world, what, where, size, times))
            beat()

    if sizes[largest] > 1:
        pairs(in_largest, 1, f"inside node {largest}")
    if last > 0:
        pairs(leader, last, f"nodes 0 and {last}")
        times = time_allreduce(leader, ALLREDUCE_BYTES, limit_s) if topology.is_leader else []
        where = f"{len(sizes)} leaders"
        links.append(_link(topology.world, "Allreduce", where, ALLREDUCE_BYTES, times))
        beat()
    return [] if topology.world.rank else links


def ping_pong(comm: MPI.Comm, other: int, size_bytes: int, limit_s: float) -> list[float]:
    """Return half the round trip times between ranks 0 and `other`, in seconds; [] on `other`.

    Only these two call it. The first byte says whether there is another turn, so that only rank 0
    needs to look at its clock.
    """
    data = np.zeros(size_bytes, dtype=np.uint8)
    if comm.rank == other:
        data[0] = 1
        while data[0]:
            comm.Recv(data, source=0)
            comm.Send(data, dest=0)
        return []
    times = []
    limit = time.perf_counter() + limit_s
    more = True
    while more:
        start = time.perf_counter()
        more = len(times) < WARM_UP_TURNS or (start < limit and len(times) < MAX_TURNS)
        data[0] = more
        comm.Send(data, dest=other)
        comm.Recv(data, source=other)
        times.append((time.perf_counter() - start) / 2)
    return times[WARM_UP_TURNS:]


def time_allreduce(comm: MPI.Comm, size_bytes: int, limit_s: float) -> list[float]:
    """Return the times of a float32 Allreduce SUM, in seconds. Collective on `comm`."""
    data = np.zeros(size_bytes // 4, dtype=np.float32)
    total = np.empty_like(data)
    times = []
    more = np.ones(1, dtype=np.uint8)
    limit = time.perf_counter() + limit_s
    while more[0]:
        comm.Barrier()
        start = time.perf_counter()
        comm.Allreduce(data, total, op=MPI.SUM)
        end = time.perf_counter()
        times.append(end - start)
        more[0] = len(times) <= WARM_UP_TURNS or (end < limit and len(times) < MAX_TURNS)
        comm.Bcast(more, root=0)
    return times[WARM_UP_TURNS:]


def wait_asleep(world: MPI.Comm) -> None:
    """Wait for all ranks without keeping a core busy. Collective on `world`."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)


def _link(world: MPI.Comm, what: str, where: str, size_bytes: int, times: list[float]) -> Link:
    """Return the slowest rank's median once all ranks are here. Collective on `world`."""
    wait_asleep(world)
    found = np.array([np.median(times) if times else 0.0, len(times)])
    world.Allreduce(MPI.IN_PLACE, found, op=MPI.MAX)
    return Link(what, where, size_bytes, float(found[0]), int(found[1]))
